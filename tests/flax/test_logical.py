"""Axis names that Flax keeps with variables: read from Linen boxes and NNX metadata, resolved by logical rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.small import shard_small

RULES = (("batch", "batch"), ("embed", None), ("hidden", "model"))


class Linen(linen.Module):
    """One layer with logical names, one with mesh axes, one with neither."""

    logical: bool = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = linen.initializers.lecun_normal()
        boxed = linen.with_logical_partitioning if self.logical else linen.with_partitioning
        names = ("embed", "hidden") if self.logical else (None, "model")
        x = linen.Dense(16, kernel_init=boxed(init, names), name="up")(x)
        return linen.Dense(8, name="down")(x)


def abstract_linen(**config: Any) -> lm.AbstractModel:
    return lm.build_abstract(Linen(**config), jax.random.key(0), jax.ShapeDtypeStruct((2, 8), jnp.float32))


class Nnx(nnx.Module):
    def __init__(self, names: tuple[str | None, ...], rngs: nnx.Rngs, **metadata: Any) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, **metadata)
        self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)


def specs(model: lm.AbstractModel) -> dict[str, P | None]:
    return {path: variable.spec for path, variable in model.items()}


def test_linen_boxes_and_logical_rules(mesh42: Mesh) -> None:
    abstract = abstract_linen()
    assert abstract["params/up/kernel"].logical_axes == ("embed", "hidden")
    assert abstract["params/down/kernel"].logical_axes is None
    sharded = abstract.shard(mesh42, RULES)
    assert specs(sharded) == {
        "params/up/bias": P(),
        "params/up/kernel": P(None, "model"),
        "params/down/bias": P(),
        "params/down/kernel": P(),
    }
    assert "why (logical): logical axes ('embed', 'hidden')" in str(sharded.explain("params/up/kernel"))
    box = sharded.materialize()["params"]["up"]["kernel"]
    assert isinstance(box, linen.LogicallyPartitioned)
    assert box.value.sharding.spec == P(None, "model")


def test_mesh_axes_in_the_metadata_need_no_rules(mesh42: Mesh) -> None:
    sharded = abstract_linen(logical=False).shard(mesh42)
    assert sharded["params/up/kernel"].spec == P(None, "model")
    assert "why (metadata)" in str(sharded.explain("params/up/kernel"))
    with pytest.raises(
        lm.ShardingError,
        match=r"'params/up/kernel' has axes \('embed', 'hidden'\), and 'embed' is not an axis of",
    ):
        abstract_linen().shard(mesh42)


def test_nnx_metadata(mesh42: Mesh) -> None:
    abstract = lm.build_abstract(Nnx, ("embed", "hidden"), rngs=nnx.Rngs(0))
    assert abstract["up/kernel"].logical_axes == ("embed", "hidden")
    sharded = abstract.shard(mesh42, RULES)
    assert sharded["up/kernel"].spec == P(None, "model")
    assert sharded.materialize().up.kernel.get_value().sharding.spec == P(None, "model")
    named = lm.build_abstract(Nnx, (None, "model"), rngs=nnx.Rngs(0)).shard(mesh42)
    assert named["up/kernel"].spec == P(None, "model")


def test_rules_of_a_variable_itself_are_applied(mesh42: Mesh) -> None:
    abstract = lm.build_abstract(Nnx, ("embed", "hidden"), rngs=nnx.Rngs(0), sharding_rules=(("hidden", "model"),))
    assert abstract["up/kernel"].logical_axes == ("embed", "model")
    assert abstract.shard(mesh42, [("embed", "batch"), ("model", "model")])["up/kernel"].spec == P("batch", "model")
    rules = (("embed", None), ("hidden", "model"))
    abstract = lm.build_abstract(Nnx, ("embed", "hidden"), rngs=nnx.Rngs(0), sharding_rules=rules)
    assert abstract.shard(mesh42)["up/kernel"].spec == P(None, "model")


def test_a_variable_stays_on_a_mesh_of_its_own(mesh8: Mesh, mesh42: Mesh) -> None:
    """As Flax places it, beside others that need the same devices; a rule for it moves it."""
    own = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    placed = jax.sharding.NamedSharding(own, P("x", "y"))
    build = nnx.jit(lambda module, x: module.down(module.up(x)))
    for names, metadata in ((("x", "y"), {"mesh": own}), (placed, {})):
        abstract = lm.build_abstract(Nnx, names, rngs=nnx.Rngs(0), **metadata)
        eager = Nnx(names, rngs=nnx.Rngs(0), **metadata)
        assert abstract["up/kernel"].sharding == eager.up.kernel.get_value().sharding == placed
        assert "why (own mesh): on the mesh in the variable's own metadata" in str(abstract.explain("up/kernel"))
        made = abstract.materialize()
        assert made.up.kernel.get_value().sharding == placed
        assert np.array_equal(made.up.kernel.get_value(), eager.up.kernel.get_value())
        assert np.allclose(build(made, jnp.ones((2, 8))), build(eager, jnp.ones((2, 8))), rtol=1e-5)
        state = abstract.with_optimizer(optax.adam(1e-3))
        assert state["optimizer/0/mu/up/kernel"].sharding == placed
        assert state.shard(mesh8, {"down/.*": P()})["optimizer/0/mu/up/kernel"].sharding == placed
        for rules in (None, {"down/kernel": P("model")}, [("embed", "model")]):
            sharded = abstract.shard(mesh8, rules)
            assert sharded["up/kernel"].sharding == placed
            assert sharded["down/kernel"].sharding.mesh == mesh8
        moved = abstract.shard(mesh42, {"up/kernel": P(None, "model")})
        assert moved["up/kernel"].sharding.mesh == mesh42
        assert "rule 'up/kernel' matches" in str(moved.explain("up/kernel"))
    boxed = linen.Dense(8, kernel_init=linen.with_partitioning(linen.initializers.ones, ("x", "y"), own))
    variables = lm.build_abstract(boxed, jax.random.key(0), jnp.ones((1, 8)))
    assert variables["params/kernel"].sharding == placed
    with pytest.raises(lm.ShardingError, match=r"'up/kernel' of shape \(8, 16\).*'z'"):
        lm.build_abstract(Nnx, ("x", "z"), rngs=nnx.Rngs(0), mesh=own)


def test_unknown_logical_axes_are_not_split_and_named(mesh42: Mesh) -> None:
    abstract = abstract_linen()
    sharded = abstract.shard(mesh42, [("hidden", "model")])
    assert "no rule for 'embed', which are not split" in str(sharded.explain("params/up/kernel"))
    with pytest.warns(lm.LazyModelWarning, match="match no sharding rule.*params/up/kernel"):
        shard_small(abstract, mesh42, [("other", "model")], large=512)


NAMES = [("a", "b"), ("b", "a"), ("a", None), ("c", "a", "b"), ("d", "a"), (None, None), ("e", "b")]
ORDERED = (("a", "x"), ("b", "x"), ("b", "y"), ("c", None), ("c", "y"), ("d", ("x", "y")), ("a", "z"))


def test_resolved_as_flax_resolves() -> None:
    """The first rule of an axis counts whose mesh axes do not split another dimension already."""

    class Named(linen.Module):
        @linen.compact
        def __call__(self) -> None:
            for number, names in enumerate(NAMES):
                zeros = linen.with_logical_partitioning(linen.initializers.zeros, names)
                self.param(f"p{number}", zeros, (8,) * len(names))

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"))
    abstract = lm.build_abstract(Named(), jax.random.key(0)).shard(mesh, ORDERED)
    for number, names in enumerate(NAMES):
        flax = linen.logical_to_mesh_axes(names, ORDERED)
        expected = P(*(entry if isinstance(entry, str | tuple) else None for entry in flax))
        sharding = jax.sharding.NamedSharding(mesh, expected)
        assert abstract[f"params/p{number}"].sharding.is_equivalent_to(sharding, len(names)), names

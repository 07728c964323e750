"""NNX and Linen modules under the mesh of `jax.set_mesh`, and on Explicit axes."""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import mostly_large

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.up = nnx.Embed(64, 16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.norm(self.up(self.embed(tokens)), use_running_average=True)


RULES = {"up/kernel": P(None, "model"), ".*": P()}


def mesh(first: int, sizes: tuple[int, int], kind: str) -> Mesh:
    devices = np.array(jax.devices()[first : first + sizes[0] * sizes[1]]).reshape(sizes)
    return Mesh(devices, ("data", "model"), axis_types=(KINDS[kind],) * 2)


@functools.cache
def without(results: Callable[[Mesh], list[Any]], own: str) -> list[Any]:
    """What a function gives outside any mesh's context."""
    return results(mesh(0, (2, 4), own))


def results(own: Mesh) -> list[Any]:
    alone = lm.build_abstract(Model, nnx.Rngs(0))
    abstract, elsewhere = alone.shard(own, RULES), alone.shard(mesh(4, (2, 2), "auto"), RULES)
    model, sampler = abstract.materialize(), elsewhere.materialize()
    values = dict(abstract.stream())
    lm.Sync(abstract, elsewhere)(model, into=sampler)
    trained = abstract.with_optimizer(optax.adam(1e-3)).materialize()
    averaged = abstract.with_optimizer(optax.contrib.schedule_free_sgd(1e-3)).materialize()  # copies of parameters
    models = [
        model,
        sampler,
        alone.materialize(),
        abstract.materialize(values),
        lm.reshard(alone.materialize(), elsewhere),
    ]
    tokens = np.ones((4, 8), np.int32)
    ran = [each.run(lambda model, tokens: model(tokens), tokens) for each in (abstract, alone)]
    return [
        *(jax.tree.leaves(nnx.state(each)) for each in (*models, *trained, *averaged)),
        ran,
        lm.statistics(model).to_dict(),
    ]


# Kinds of the axes of the model's mesh and of the current one, whose devices are all or few.
CURRENT = [*itertools.product(KINDS, KINDS, ("all", "few"))]


@pytest.mark.parametrize(("own", "axes", "devices"), mostly_large(CURRENT, [("auto", "explicit", "few")]))
def test_main_paths(own: str, axes: str, devices: str) -> None:
    expected = without(results, own)
    with jax.set_mesh(mesh(0, (2, 4), axes) if devices == "all" else mesh(2, (2, 1), axes)):
        found = results(mesh(0, (2, 4), own))
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if hasattr(right, "dtype") and jax.numpy.issubdtype(right.dtype, jax.dtypes.prng_key):
            mine, right = jax.random.key_data(mine), jax.random.key_data(right)
        assert np.array_equal(mine, right, equal_nan=True) if hasattr(right, "dtype") else mine == right


class Convolved(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.conv = nnx.Embed(64, 16, rngs=rngs), nnx.Conv(16, 32, (3,), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.conv(self.embed(tokens))


class Said(Convolved):
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.conv(self.embed(tokens, out_sharding=P()), out_sharding=P())


@nnx.jit
def call(model: Any, tokens: Any) -> jax.Array:
    return model(tokens)


@pytest.mark.parametrize("optimized", [False, True], ids=["alone", "with an optimizer"])
@pytest.mark.parametrize(
    ("model", "path", "spec"),
    [(Model, "embed/embedding", P("model")), *((Convolved, "conv/kernel", P(*[None] * i, "model")) for i in (1, 2))],
)
def test_explicit_axes_that_layers_cannot_use(model: Any, path: str, spec: P, *, optimized: bool) -> None:
    abstract: Any = lm.build_abstract(model, nnx.Rngs(0))
    abstract = abstract.with_optimizer(optax.sgd(1e-3)) if optimized else abstract
    mesh42, rules = jax.make_mesh((2, 4), ("data", "model")), {path: spec, ".*": P()}
    with pytest.warns(lm.LazyModelWarning, match=re.escape(f"{path!r}: sharded over Explicit axes")) as warned:
        sharded = abstract.shard(mesh42, rules)
    tokens = np.ones((4, 8), np.int32)
    with pytest.raises(Exception, match="out_sharding"):  # of JAX, for which the warning is
        call(sharded.materialize()[0] if optimized else sharded.materialize(), tokens)
    shape, names = (2, 4), ("data", "model")
    advice = re.search(r"jax\.make_mesh\(.*\* len\(names\)\)", str(warned[0].message))
    assert advice is not None
    automatic = eval(advice[0], {"jax": jax, "shape": shape, "names": names})
    made = abstract.shard(automatic, rules).materialize()
    assert call(made[0] if optimized else made, tokens).shape == (4, 8, 32)


@pytest.mark.parametrize("path", ["embed/embedding", "conv/kernel"])
def test_layers_that_say_how_results_are_sharded(path: str) -> None:
    rules = {path: P("model") if path == "embed/embedding" else P(None, None, "model"), ".*": P()}
    mesh42 = jax.make_mesh((2, 4), ("data", "model"))
    made = lm.build_abstract(Said, nnx.Rngs(0)).shard(mesh42, rules).materialize()  # warnings are errors
    with jax.set_mesh(mesh42):
        assert call(made, np.ones((4, 8), np.int32)).shape == (4, 8, 32)


@pytest.mark.parametrize(
    ("kernel", "fitting", "failing"),
    [
        (P("model"), [P(), P("model"), P("data")], [P(None, "model")]),  # contracted, as in FSDP
        (P(None, "model"), [P(), P("data"), P(None, "model")], [P("model")]),
    ],
)
def test_products_depend_on_their_inputs(kernel: P, fitting: list[P], failing: list[P]) -> None:
    """So `shard` does not warn of them."""
    mesh42 = jax.make_mesh((2, 4), ("data", "model"))
    made = lm.build_abstract(nnx.Linear, 16, 32, rngs=nnx.Rngs(0)).shard(mesh42, {"kernel": kernel, "bias": P()})
    model, x = made.materialize(), np.ones((8, 16), np.float32)
    with jax.set_mesh(mesh42):
        for spec in fitting:
            assert call(model, jax.device_put(x, NamedSharding(mesh42, spec))).shape == (8, 32)
        for spec in failing:
            with pytest.raises(Exception, match="shard"):
                call(model, jax.device_put(x, NamedSharding(mesh42, spec)))


def test_tables_on_axes_that_say_nothing() -> None:
    """Axes of one device, rows that are whole, and Auto ones beside Explicit ones."""
    kinds = (AxisType.Auto, AxisType.Explicit, AxisType.Explicit)
    mixed = jax.make_mesh((4, 2, 1), ("auto", "model", "one"), axis_types=kinds)
    for spec in (P("auto"), P("auto", "model"), P(None, "model"), P()):
        made = lm.build_abstract(Convolved, nnx.Rngs(0)).shard(mixed, {"embed/embedding": spec, ".*": P()})
        with jax.set_mesh(mixed):
            assert made.materialize().embed(np.ones((4, 8), np.int32)).shape == (4, 8, 16)
    lm.build_abstract(Convolved, nnx.Rngs(0)).shard(mixed, {"conv/kernel": P(None, None, "one"), ".*": P()})


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(32, kernel_init=kernel_init)(nn.Embed(64, 16)(tokens))
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.scan(Residual, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()(x, None)[0]


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        return x + nn.Dense(32, kernel_init=nn.initializers.orthogonal())(nn.tanh(x)), None


def linen_results(own: Mesh) -> list[Any]:
    """What Linen's main paths give."""
    with tempfile.TemporaryDirectory() as folder:
        return linen_paths(own, Path(folder))


def linen_paths(own: Mesh, folder: Path) -> list[Any]:
    tokens = jnp.ones((4, 8), jnp.int32)
    alone = lm.build_abstract(Linen(), jax.random.key(0), tokens)
    rules = {"params/Dense_0/kernel": P(None, "model"), ".*": P()}
    abstract, elsewhere = alone.shard(own, rules), alone.shard(mesh(4, (2, 2), "auto"), rules)
    model, sampler = abstract.materialize(), elsewhere.materialize()
    values = {path: np.asarray(value) for path, value in abstract.stream()}
    sampler = lm.Sync(abstract, elsewhere)(model, into=sampler)
    trained = [each.with_optimizer(optax.adamw(1e-3)) for each in (abstract, alone)]
    states = [each.materialize() for each in trained]
    lm.save(model, folder / "model.safetensors")
    lm.save_step(states[0], folder / "run", 1)
    lm.save(model, folder / "orbax", format="orbax")
    return [
        *(model, sampler, alone.materialize(), abstract.materialize(values), states),
        [abstract.materialize(lm.open_checkpoint(folder / name)) for name in ("model.safetensors", "orbax")],
        [lm.restore(each, folder / "run") for each in trained],
        [each.run(lambda variables, x: Linen().apply(variables, x), np.asarray(tokens)) for each in (abstract, alone)],
        lm.reshard(alone.materialize(), elsewhere),
        lm.statistics(model).to_dict(),
    ]


@pytest.mark.parametrize(("own", "axes", "devices"), mostly_large(CURRENT, [("explicit", "auto", "few")]))
def test_linen(own: str, axes: str, devices: str) -> None:
    expected = without(linen_results, own)
    with jax.set_mesh(mesh(0, (4, 2), axes) if devices == "all" else mesh(2, (2, 1), axes)):
        found = linen_results(mesh(0, (2, 4), own))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(mine, right) if hasattr(right, "dtype") else mine == right
        assert getattr(mine, "sharding", None) == getattr(right, "sharding", None)

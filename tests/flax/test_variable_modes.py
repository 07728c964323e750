"""NNX variables kept as hijax objects or references, and eager sharding that a jitted factory remembers."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import lazymodel as lm
from tests.flax.modules import assert_same, states

MODES: dict[str, dict[str, bool]] = {"hijax": {"hijax": True}, "ref": {"ref": True}}


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.again = self.up
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.scale = nnx.Param(jnp.full((16,), 2.0))
        self.buffer = jnp.arange(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.again(x)) * self.scale


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plain_rngs", [False, True], ids=["rngs alike", "plain rngs"])
def test_modules_equal_their_eager_twins(mode: str, plain_rngs: bool, mesh8: Any) -> None:
    with contextlib.nullcontext() if plain_rngs else nnx.var_defaults(**MODES[mode]):
        ours, theirs = nnx.Rngs(0), nnx.Rngs(0)
    with nnx.var_defaults(**MODES[mode]):
        abstract, eager = lm.build_abstract(Model, rngs=ours), Model(rngs=theirs)
    # Outside of the context too: what a module is was said when it was built.
    model = abstract.materialize()
    assert_same(model, eager)
    assert_same(ours, theirs)  # whose counts have gone on
    assert model.again is model.up
    sharded = abstract.shard(mesh8, {"again/kernel": jax.P(None, "model"), ".*": jax.P()}).materialize()
    assert_same(sharded, eager)
    x = jnp.ones((2, 8))
    assert np.array_equal(model(x), eager(x))


@pytest.mark.parametrize("mode", MODES)
def test_optimizers_saving_and_loading(mode: str, tmp_path: Any) -> None:
    with nnx.var_defaults(**MODES[mode]):
        abstract, eager = lm.build_abstract(Model, rngs=nnx.Rngs(0)), Model(rngs=nnx.Rngs(3))
        model, optimizer = abstract.with_optimizer(optax.adam(1e-2)).materialize()
        twin = Model(rngs=nnx.Rngs(0))
        theirs = nnx.Optimizer(twin, optax.adam(1e-2), wrt=nnx.Param)
    assert_same(model, twin)
    assert states(optimizer).keys() == states(theirs).keys()
    weights = {path: array for path, array in zip(abstract, states(eager).values(), strict=True) if "rngs" not in path}
    model = abstract.materialize({path: np.asarray(array) for path, array in weights.items()}, initialize="missing")
    assert np.array_equal(states(model)["['again']['kernel'].value"], states(eager)["['again']['kernel'].value"])
    lm.save(model.up, tmp_path / "model.safetensors")
    saved = lm.open_checkpoint(tmp_path / "model.safetensors")
    assert np.array_equal(np.asarray(saved["kernel"]), states(eager)["['again']['kernel'].value"])


def test_a_variable_that_insists_is_refused() -> None:
    def make() -> nnx.Module:
        return nnx.Dict(a=nnx.Param(jnp.ones(3), ref=True))

    with pytest.raises(lm.LazyModelError, match=r"'a' is made with ref=True of its own.*var_defaults\(ref=True\)"):
        lm.build_abstract(make)


# --- eager sharding -------------------------------------------------------------------------------------------------


def eager_sharding(module: Any) -> dict[str, Any]:
    return {
        "/".join(map(str, path)): node.get_metadata("eager_sharding")
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Variable)
    }


class Kept(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.own = nnx.Param(jnp.ones(3), eager_sharding=False)
        self.default = nnx.Linear(4, 8, rngs=rngs)


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_variables_say_of_eager_sharding_what_their_eager_twins_say(jitted: bool, eager: bool) -> None:
    expected = {"own": False, "default/bias": eager, "default/kernel": eager}
    for first in ("ours", "eager"):

        def make(rngs: nnx.Rngs) -> Kept:
            return Kept(rngs)

        build = nnx.jit(make) if jitted else make  # a new function, whose traces nobody knows yet
        with nnx.use_eager_sharding(eager):
            if first == "eager":
                build(nnx.Rngs(0))
            abstract = lm.build_abstract(build, nnx.Rngs(0))
            twin = build(nnx.Rngs(0))
            assert eager_sharding(twin) == expected, "what was traced for us is not what others get"
        assert eager_sharding(abstract.materialize()) == expected
    model, optimizer = abstract.with_optimizer(optax.sgd(0.1, momentum=0.9)).materialize()
    assert eager_sharding(model) == expected
    eager_optimizer = nnx.Optimizer(twin, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    assert eager_sharding(optimizer) == eager_sharding(eager_optimizer)


# --- what has no arrays, or hides them ------------------------------------------------------------------------------


@dataclasses.dataclass
class Opaque:
    w: Any


class Hiding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(2, 2, rngs=rngs)
        self.opaque = Opaque(jax.random.normal(rngs(), (3,)))


class Abstract(nnx.Module):
    def __init__(self) -> None:
        self.module = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def eval_shape() -> nnx.Module:
    return nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


UNSEEN: list[tuple[Any, type[lm.LazyModelError], str]] = [
    (Hiding, lm.TraceError, r"Opaque at 'opaque'.*float32\[3\].*opaque\.w.*register_dataclass"),
    (lambda rngs: Abstract(), lm.TraceError, r"shapes instead of arrays.*'module/bias'"),
    (lambda rngs: eval_shape(), lm.TraceError, r"shapes instead of arrays.*'bias'"),
    (lambda rngs: nnx.state(eval_shape()), lm.TraceError, "shapes instead of arrays"),
    (lambda rngs: Opaque(nnx.Linear(2, 2, rngs=rngs)), lm.TraceError, "Opaque at 'value'"),
    (lambda rngs: None, lm.TraceError, "returned None"),
    (lambda rngs: (nnx.Linear(2, 2, rngs=rngs) for _ in range(2)), lm.TraceError, "return a list or a tuple"),
    (lambda rngs: linen.Dense(3), lm.TraceError, r"linear\.Dense: pass that object itself"),
    (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), lm.LazyModelError, "Linear that is built already: pass its class"),
    (linen.Dense, lm.LazyModelError, r"Linen class Dense: pass a module, Dense\(…\)"),
]


def test_what_nnx_cannot_see_is_refused() -> None:
    for build, error, message in UNSEEN:
        with pytest.raises(error, match=message):
            lm.build_abstract(build, nnx.Rngs(0))
    with pytest.raises(lm.TraceError, match="shapes instead of arrays"):
        lm.build_abstract(Abstract)
    with pytest.warns(lm.LazyModelWarning, match=r"argument 1\.last"):
        lm.build_abstract(_keep, nnx.Rngs(0), types.SimpleNamespace())


def _keep(rngs: nnx.Rngs, config: Any) -> nnx.Module:
    config.last = jax.random.normal(rngs(), (3,))
    return nnx.Linear(2, 2, rngs=rngs)


def test_modules_without_variables() -> None:
    abstract = lm.build_abstract(nnx.Dropout, 0.0)
    assert len(abstract) == 0 and isinstance(abstract.materialize(), nnx.Dropout)


class Leaves(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.weak = nnx.Param(jnp.full((4,), 2.0))
        self.wide = nnx.Variable(np.array([2**40]))
        self.table = np.array([1e300])
        self.layer = nnx.Linear(4, 4, rngs=rngs)


class WithLeaves(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", lambda key: jnp.full((4,), 2.0))
        table = self.variable("constants", "table", lambda: np.array([2**40]))
        return linen.Dense(4)(x) * scale + table.value.size


def test_leaves_are_those_of_eager_construction(mesh8: Any) -> None:
    abstract, eager = lm.build_abstract(Leaves, rngs=nnx.Rngs(0)), Leaves(rngs=nnx.Rngs(0))
    for model in (abstract.materialize(), abstract.shard(mesh8, {".*": jax.P()}).materialize()):
        assert model.weak.get_value().weak_type and not model.layer.kernel.get_value().weak_type
        assert type(model.wide.get_value()) is type(eager.wide.get_value()) is np.ndarray
        assert model.wide.get_value().tolist() == [2**40] and model.table.tolist() == [1e300]
        assert type(model.table) is type(eager.table)
        assert model.weak * jnp.ones(4, jnp.bfloat16) == pytest.approx(2.0)
        assert (model.weak * jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16
    # As after `model.weak[...] = values`.
    eager.weak[...] = np.ones(4, np.float32)
    loaded = abstract.materialize({"weak": np.ones(4, np.float32)}, initialize="missing")
    assert loaded.weak.get_value().weak_type == eager.weak.get_value().weak_type is True
    x = np.ones((1, 4), np.float32)
    linens = lm.build_abstract(WithLeaves(), jax.random.key(0), x)
    ours, theirs = linens.materialize(), WithLeaves().init(jax.random.key(0), x)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert ours["params"]["scale"].weak_type
    assert ours["constants"]["table"].tolist() == [2**40]
    assert linens["params/scale"].trainable and not linens["constants/table"].trainable

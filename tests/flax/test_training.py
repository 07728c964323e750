"""Training in Flax: steps that are saved, restored and gone on with elsewhere, bit for bit; learning rates of muP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import mostly_large
from tests.resuming import Batches, assert_same, assert_same_values
from tests.small import shard_small

optax = pytest.importorskip("optax")
OPTIMIZER = optax.adamw(1e-2)
WIDTHS = (16, 64)  # of muP's base and model
X = jnp.ones((8, 8))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.norm(self.up(x))))


class Module(linen.Module):
    boxes: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = linen.initializers.lecun_normal()
        init = linen.with_logical_partitioning(init, ("embed", "mlp")) if self.boxes else init
        return linen.Dense(8, kernel_init=init)(linen.relu(linen.Dense(16, kernel_init=init)(x)))


class Case(NamedTuple):
    build: Callable[[], Any]
    step: Callable[[Any, jax.Array], Any]
    eager: Callable[[], Any]


@nnx.jit
def update(model: Net, optimizer: nnx.Optimizer, batch: jax.Array) -> None:
    optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(batch) - batch) ** 2))(model))


def nnx_step(state: Any, batch: jax.Array) -> Any:
    update(*state, batch)
    return state


def nnx_pair() -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def linen_case(boxes: bool) -> Case:
    module = Module(boxes)

    @jax.jit
    def step(state: Any, batch: jax.Array) -> Any:
        variables, moments = state
        gradients = jax.grad(lambda v: jnp.mean((module.apply(v, batch) - batch) ** 2))(variables)
        updates, moments = OPTIMIZER.update(gradients["params"], moments, variables["params"])
        return {"params": optax.apply_updates(variables["params"], updates)}, moments

    def eager() -> Any:
        variables = module.init(jax.random.key(0), X)
        return variables, OPTIMIZER.init(variables["params"])

    return Case(lambda: lm.build_abstract(module, jax.random.key(0), X).with_optimizer(OPTIMIZER), step, eager)


def train_state_case(boxes: bool, jitted: bool) -> Case:
    module = Module(boxes)
    tx = OPTIMIZER if jitted else optax.sgd(1e-2, momentum=0.9)  # of fewer operations, which are compiled one by one

    def create(key: jax.Array) -> Any:
        return TrainState.create(apply_fn=module.apply, params=module.init(key, X)["params"], tx=tx)

    def step(state: Any, batch: jax.Array) -> Any:
        loss = lambda params: jnp.mean((module.apply({"params": params}, batch) - batch) ** 2)  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    key = jax.random.key(0)
    return Case(lambda: lm.build_abstract(create, key), jax.jit(step) if jitted else step, lambda: create(key))


CASES = {
    "nnx": Case(lambda: lm.build_abstract(Net, nnx.Rngs(0)).with_optimizer(OPTIMIZER), nnx_step, nnx_pair),
    "nnx, built with its optimizer": Case(lambda: lm.build_abstract(nnx_pair), nnx_step, nnx_pair),
    "linen, partitioned": linen_case(True),
    "train state, partitioned": train_state_case(True, True),
    "train state, step by step": train_state_case(False, False),
}


def content(state: Any) -> Any:
    if isinstance(state, TrainState):
        return state.replace(step=int(state.step))  # as it begins; a jitted step makes an array of it
    return nnx.split(state)[1] if isinstance(state[0], nnx.Module) else state


@pytest.mark.parametrize("name", mostly_large(CASES, ["nnx", "linen, partitioned", "train state, partitioned"]))
def test_two_steps_and_two_are_four(tmp_path: Path, mesh8: Mesh, name: str) -> None:
    case = CASES[name]

    def sharded(mesh: Mesh) -> Any:
        return shard_small(case.build(), mesh, {".*kernel": P("model"), ".*": P()}, on_unmatched="ignore")

    def train(state: Any, batches: Batches, count: int) -> Any:
        for _ in range(count):
            state = case.step(state, next(batches))
        return state

    begun = sharded(mesh8).materialize()
    assert_same_values(content(begun), content(case.eager()))
    through = train(begun, Batches(), 4)
    batches = Batches()
    half = train(sharded(mesh8).materialize(), batches, 2)
    lm.save_step(half, tmp_path, 2, data=batches.get_state())
    with lm.open_checkpoint(tmp_path) as saved:
        assert set(saved) - {"step"} == set(sharded(mesh8)) - {"step"}

    elsewhere = lm.restore(sharded(Mesh(mesh8.devices[:4], ("model",))), tmp_path)
    assert_same_values(content(elsewhere), content(half))
    restored = again = lm.restore(sharded(mesh8), tmp_path)
    at, batches = lm.training_state(tmp_path), Batches()
    assert at is not None and at.step == 2
    batches.set_state(at.data)
    resumed = content(train(restored, batches, 2))
    if name.endswith("step by step"):
        # Each operation chooses shardings anew, so those of `half` are no longer the rules'; sums have an order.
        placed = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding) if hasattr(a, "sharding") else a, half, again)
        assert_same(resumed, content(train(placed, Batches(2), 2)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), resumed, content(through))
    else:
        assert_same(resumed, content(through))
        train(elsewhere, Batches(2), 1)  # on half of the devices it goes on as well


def test_a_live_module_is_a_source(tmp_path: Path, mesh8: Mesh) -> None:
    model, optimizer = nnx_pair()
    update(model, optimizer, X)
    trained = lm.build_abstract(Net, nnx.Rngs(1)).with_optimizer(OPTIMIZER)
    pair = shard_small(trained, mesh8, {".*kernel": P("model")}, on_unmatched="ignore").materialize((model, optimizer))
    assert pair[0].up.kernel[...].sharding.spec == P("model")
    assert_same_values(content(pair), content((model, optimizer)))
    plain = lm.build_abstract(Net, nnx.Rngs(1))
    assert_same_values(nnx.state(plain.materialize(model)), nnx.state(model))
    assert_same_values(nnx.state(plain.materialize(nnx.state(model))), nnx.state(model))
    assert_same_values(nnx.state(plain.materialize(plain)), nnx.state(plain.materialize()))
    table = lm.WeightMap.suggest(model, plain)
    assert table.check(model, plain).ok and not table.unsure
    mapped = lm.map_checkpoint(model, table, plain)
    assert_same_values(nnx.state(plain.materialize(mapped, initialize="nothing")), nnx.state(model))
    assert set(lm.map_checkpoint(model, dict)) == set(plain)
    assert plain.plan(model).read_nbytes == 0
    flat = dict(nnx.to_flat_state(nnx.state(model)))  # its keys are tuples
    assert_same_values(nnx.state(plain.materialize(flat)), nnx.state(model))
    assert not lm.diff(flat, model) and not lm.diff(nnx.to_pure_dict(nnx.state(model)), plain.materialize(model))
    # Without its optimizer, and to a model that is live as well.
    assert lm.WeightMap.suggest((model, optimizer), plain).check((model, optimizer), plain).ok
    other = Net(nnx.Rngs(2))
    table = lm.WeightMap.suggest(other, model)
    assert not lm.diff(lm.map_checkpoint(other, table, model), other) and table.check(other, model).one_way == ""


def test_live_variables_of_linen_are_a_source() -> None:
    layer, x = linen.Dense(4, kernel_init=linen.with_partitioning(linen.initializers.ones, (None, "model"))), X[:, :3]
    abstract, variables = lm.build_abstract(layer, jax.random.key(0), x), layer.init(jax.random.key(1), x)
    plain = linen.unbox(variables)
    for source in (variables, plain, freeze(variables), flatten_dict(plain), flatten_dict(plain, sep="/")):
        assert_same_values(abstract.materialize(source), variables)
        assert not lm.diff(source, variables)
        assert not lm.WeightMap.suggest(source, abstract).check(source, abstract).unmapped


def test_mup_of_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self, width: int, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)])

        def __call__(self, x: Any) -> Any:
            return self.layers[1](self.layers[0](x))

    base, wide = (lm.build_abstract(Model, width, rngs=nnx.Rngs(0)) for width in WIDTHS)
    scheme = lm.mup(base, wide)
    assert {path: row.kind for path, row in scheme.items()} == {
        "layers/0/bias": "vector",
        "layers/0/kernel": "input",
        "layers/1/bias": "fixed",
        "layers/1/kernel": "output",
    }
    model, optimizer = wide.reinitialize(scheme).with_optimizer(scheme.optimizer(optax.sgd(1.0))).materialize()
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer) -> Any:
        gradients = nnx.grad(lambda model: model(jnp.ones((1, 8))).sum())(model)
        optimizer.update(model, gradients)
        return gradients

    gradients = step(model, optimizer)
    states = (jax.tree.map(np.asarray, each) for each in (before, nnx.state(model, nnx.Param), gradients))
    moved = jax.tree.map(lambda old, new, gradient: float(((old - new) / gradient).mean()), *states)
    assert [round(value, 2) for value in jax.tree.leaves(moved)] == [4, 4, 1, 0.25]


def test_mup_of_linen() -> None:
    class Model(linen.Module):
        width: int

        @linen.compact
        def __call__(self, x: Any) -> Any:
            hidden = linen.Dense(self.width)(x)
            return linen.Dense(3)(hidden)

    x = jnp.ones((1, 8))
    base, wide = (lm.build_abstract(Model(width), jax.random.key(0), x) for width in WIDTHS)
    scheme = lm.mup(base, wide)
    assert [scheme[f"params/Dense_{number}/kernel"].kind for number in (0, 1)] == ["input", "output"]
    tx = scheme.optimizer(optax.sgd(1.0))
    variables, state = wide.reinitialize(scheme).with_optimizer(tx).materialize()
    params: Any = variables["params"]
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert [float(update.mean()) for update in jax.tree.leaves(updates)] == [-4, -4, -1, -0.25]

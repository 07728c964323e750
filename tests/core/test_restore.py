"""Going on with training: 5 steps, saved, restored, and 5 more are 10, bit for bit; and elsewhere than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import mostly_large
from tests.resuming import BATCHES, Batches, assert_same, assert_same_values

optax = pytest.importorskip("optax")
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))


def init(key: jax.Array) -> dict[str, Any]:
    up, down, noise = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(up, (8, 32)) / 3,
        "down": jax.random.normal(down, (32, 8), "bfloat16") / 6,
        "noise": noise,  # a PRNG key that training advances
        "seen": jnp.zeros((), "int32"),
    }


@jax.jit
def step(state: Any, batch: jax.Array) -> Any:
    model, optimizer = state
    key, now = jax.random.split(model["noise"])

    def loss(params: dict[str, Any]) -> jax.Array:
        hidden = jax.nn.relu((batch + jax.random.normal(now, batch.shape) / 9) @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch) ** 2)

    params = {name: model[name] if name in ("up", "down") else None for name in model}
    updates, optimizer = OPTIMIZER.update(jax.grad(loss)(params), optimizer, params)
    return {**model, **_given(optax.apply_updates(params, updates)), "noise": key, "seen": model["seen"] + 1}, optimizer


def _given(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def sharded(mesh: Mesh) -> Any:
    abstract = lm.build_abstract(init, jax.random.key(0)).with_optimizer(OPTIMIZER)
    return abstract.shard(mesh, {"up": P(None, "model"), "down": P("model"), "noise": P(), "seen": P()})


def train(state: Any, batches: Batches, count: int) -> Any:
    for _ in range(count):
        state = step(state, next(batches))
    return state


def test_five_steps_and_five_are_ten(tmp_path: Path, mesh8: Mesh) -> None:
    through = train(sharded(mesh8).materialize(), Batches(), 10)
    batches = Batches()
    half = train(sharded(mesh8).materialize(), batches, 5)
    lm.save_step(half, tmp_path, 5, metadata={"run": "a"}, data=batches.get_state())

    at = lm.training_state(tmp_path)
    assert at is not None and (at.step, at.metadata) == (5, {"run": "a"})
    restored, batches = lm.restore(sharded(mesh8), tmp_path), Batches()
    batches.set_state(at.data)
    assert_same(restored, half)
    assert_same(train(restored, batches, 5), through)


@pytest.mark.parametrize(
    "place", mostly_large(["half of the devices", "another mesh", "one device", "hosts"], ["another mesh", "hosts"])
)
def test_what_was_saved_goes_elsewhere(tmp_path: Path, mesh8: Mesh, mesh42: Mesh, place: str) -> None:
    half = train(sharded(mesh8).materialize(), Batches(), 5)
    lm.save_step(half, tmp_path, 5)
    abstract = lm.build_abstract(init, jax.random.key(1)).with_optimizer(OPTIMIZER)
    if place == "half of the devices":
        abstract = sharded(Mesh(mesh8.devices[:4], ("model",)))
    elif place == "another mesh":
        abstract = abstract.shard(mesh42, {"up": P("batch", "model"), "down": P(None, "batch"), ".*": P()})
    elif place == "hosts":
        abstract = abstract.shard(mesh8, {"up": lm.Host(P(None, "model")), "down": P("model"), ".*": P()})
    restored = lm.restore(abstract, tmp_path, max_host_memory="64KiB")
    assert_same_values(restored, half)
    for path, array in {"up": restored[0]["up"], "optimizer/1/0/mu/up": restored[1][1][0].mu["up"]}.items():
        if (sharding := abstract[path].sharding) is not None:
            assert array.sharding == sharding
    if place != "hosts":  # a step has to move them itself
        through = train(half, batches := Batches(5), 5)
        goes_on = train(restored, Batches(5), 5)
        assert batches.position == 10
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=0.02, atol=1e-3),
            *(jax.tree.map(lambda x: np.asarray(x, "float32"), _numbers(state)) for state in (goes_on, through)),
        )


def _numbers(state: Any) -> Any:
    return [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, np.number)]


@pytest.mark.large
def test_equinox(tmp_path: Path, mesh8: Mesh) -> None:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        mlp: Any
        dropout: Any

        def __init__(self, key: jax.Array) -> None:
            self.mlp = eqx.nn.MLP(8, 8, 16, 2, key=key)
            self.dropout = eqx.nn.Dropout(0.25)  # a number among the leaves

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            return self.mlp(self.dropout(x, key=key))

    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def update(state: Any, batch: jax.Array, number: int) -> Any:
        def loss(net: Any) -> jax.Array:
            keys = jax.random.split(jax.random.key(number), len(batch))
            return jnp.mean((jax.vmap(net)(batch, keys) - batch) ** 2)

        net, moments = state
        updates, moments = optimizer.update(eqx.filter_grad(loss)(net), moments)
        return eqx.apply_updates(net, updates), moments

    abstract = lm.build_abstract(Net, jax.random.key(0)).with_optimizer(optimizer)
    abstract = abstract.shard(mesh8, {".*weight": P("model"), ".*": P()})
    states = [abstract.materialize()]
    for number, batch in enumerate(BATCHES):
        states.append(update(states[-1], batch, number))
    lm.save_step(states[5], tmp_path, 5)
    with lm.open_checkpoint(tmp_path) as saved:
        assert set(saved) == {*abstract, "dropout/p", "dropout/inference"}
    state = lm.restore(abstract, tmp_path)
    assert state[0].dropout.p == 0.25 and state[0].dropout.inference is False
    for number, batch in list(enumerate(BATCHES))[5:]:
        state = update(state, batch, number)
    assert_same(eqx.filter(state, eqx.is_array), eqx.filter(states[10], eqx.is_array))


def test_paths_are_the_abstract_model_s_whatever_the_state(tmp_path: Path) -> None:
    """Also of a pair that the built function returns itself."""
    for number, optimizer in enumerate([optax.sgd(0.1), optax.sgd(0.1, 0.9), optax.adafactor(0.1), OPTIMIZER]):
        by_step = lm.build_abstract(init, jax.random.key(0)).with_optimizer(optimizer, "up|down")

        def both(key: jax.Array, optimizer: Any = optimizer) -> Any:
            model = init(key)
            return model, optimizer.init({name: model[name] for name in ("up", "down")})

        by_function = lm.build_abstract(both, jax.random.key(0))
        assert set(by_step) == set(by_function)
        for kind, abstract in (("step", by_step), ("function", by_function)):
            pair = abstract.materialize()
            lm.save(pair, tmp_path / f"{kind}{number}")
            with lm.open_checkpoint(tmp_path / f"{kind}{number}") as checkpoint:
                assert set(checkpoint) == set(abstract)
                assert_same(abstract.materialize(checkpoint, initialize="nothing"), pair)
            assert_same(abstract.materialize(pair, initialize="nothing"), pair)  # without a file
    with lm.open_checkpoint(tmp_path / "step3") as checkpoint:
        model = lm.build_abstract(init, jax.random.key(0))
        found = lm.map_checkpoint(checkpoint, lambda tensors: {path: tensors[path] for path in model})
        assert_same(model.materialize(found, initialize="nothing"), model.materialize())


def test_another_optimizer_and_weights_alone(tmp_path: Path) -> None:
    model = lm.build_abstract(init, jax.random.key(0))
    state = train(model.with_optimizer(OPTIMIZER).materialize(), Batches(), 2)
    lm.save_step(state, tmp_path, 2)
    with pytest.raises(lm.CheckpointError, match="optimizer/0/trace"):
        lm.restore(model.with_optimizer(optax.sgd(0.1, 0.9)), tmp_path)
    with pytest.warns(lm.LazyModelWarning, match="optimizer/1/0/count"):
        weights = lm.restore(model, tmp_path, strict=False)
    assert_same(weights, state[0])
    with pytest.warns(lm.LazyModelWarning, match="strict=False leaves out"):
        other = lm.restore(model.with_optimizer(optax.sgd(0.1, 0.9)), tmp_path, strict=False, initialize="missing")
    assert_same(other[0], state[0])

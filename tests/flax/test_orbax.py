"""What `lm.save(format="orbax")` writes, both generations of Orbax restore into the tree that was saved; and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import lazymodel as lm

ocp = pytest.importorskip("orbax.checkpoint")
optax = pytest.importorskip("optax")
v1 = ocp.v1

W = np.arange(6.0, dtype="float32").reshape(2, 3)
MODEL = {"w": W, "layers": [W + 1, (W + 2, {"c": W, "none": np.zeros((0, 3))})]}
CHAIN = optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adamw(1e-3)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def pair(seed: int) -> tuple[Net, nnx.Optimizer[Any]]:
    net = Net(nnx.Rngs(seed))
    net.norm.mean[...] += seed
    net.dropout(jnp.ones(4))  # its count advances
    return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)


def state(nodes: Any) -> Any:
    kinds = (nnx.Module, nnx.Optimizer)
    return jax.tree.map(
        lambda x: nnx.state(x) if isinstance(x, kinds) else x, nodes, is_leaf=lambda x: isinstance(x, kinds)
    )


CASES: dict[str, Callable[[], Any]] = {
    "lists, tuples and numbers": lambda: {**MODEL, "step": 3, "rate": 0.5, "nothing": None, "empty": [{}, (), []]},
    "a list": lambda: [W, W + 1],
    "a model and its optimizer": lambda: (MODEL, CHAIN.init(MODEL)),
    "an optimizer": lambda: optax.adam(1e-3).init(MODEL),
    "a TrainState": lambda: TrainState.create(apply_fn=max, params=MODEL, tx=CHAIN),
    "a frozen dict": lambda: freeze({"a": {"b": W}}),
    "a module": lambda: pair(1)[0],
    "a state": lambda: nnx.state(pair(1)[0]),
    "a module and its optimizer": lambda: pair(1),
    "modules in a dict": lambda: {"net": pair(1)[0], "step": 3},
}


def assert_same_tree(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(getattr(two, "dtype", None), jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        assert np.asarray(one).dtype == np.asarray(two).dtype
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("case", CASES)
def test_orbax_restores_what_was_saved(tmp_path: Path, case: str) -> None:
    saved = CASES[case]()
    lm.save(saved, tmp_path / "x", format="orbax")
    target = state(saved)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same_tree(checkpointer.restore(tmp_path / "x", target), target)
    assert_same_tree(v1.load(tmp_path / "x", target), target)
    with lm.open_checkpoint(tmp_path / "x") as checkpoint:
        assert len(checkpoint) == len(jax.tree.leaves(target))


@pytest.mark.parametrize("generation", ["v0", "v1", "ours"])
def test_states_of_nnx_load_as_they_are(tmp_path: Path, generation: str) -> None:
    """As Flax' own guide saves them, with generators and statistics."""
    net, optimizer = pair(1)
    if generation == "v0":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "net", nnx.state(net))
            checkpointer.save(tmp_path / "pair", state((net, optimizer)))
    elif generation == "v1":
        v1.save(tmp_path / "net", nnx.state(net))
        v1.save(tmp_path / "pair", state((net, optimizer)))
    else:
        lm.save(net, tmp_path / "net", format="orbax")
        lm.save((net, optimizer), tmp_path / "pair", format="orbax")
    abstract = lm.build_abstract(Net, nnx.Rngs(0))
    assert_same_tree(nnx.state(lm.restore(abstract, tmp_path / "net")), nnx.state(net))
    with lm.open_checkpoint(tmp_path / "net") as checkpoint:
        loaded = abstract.materialize(checkpoint, initialize="nothing")
        assert_same_tree(nnx.state(loaded), nnx.state(net))
        pure = lm.build_abstract(lambda: nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)))))
        expected = nnx.to_pure_dict(nnx.state(net))
        assert_same_tree(pure.materialize(checkpoint, initialize="nothing"), expected)
    trained = lm.restore(abstract.with_optimizer(optax.adam(1e-3)), tmp_path / "pair")
    assert_same_tree(state(trained), state((net, optimizer)))


def test_a_network_and_its_clone_move_apart(tmp_path: Path) -> None:
    class Agent(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.q = nnx.Linear(4, 4, rngs=rngs)
            self.same, self.target = self.q, nnx.clone(self.q)

    abstract = lm.build_abstract(Agent, nnx.Rngs(0)).with_optimizer(optax.adam(1e-3))
    assert {path for path in abstract if "optimizer" not in path} == {
        f"{name}/{leaf}" for name in ("q", "target") for leaf in ("bias", "kernel")
    }
    agent, optimizer = abstract.materialize()
    assert agent.same is agent.q and agent.target is not agent.q
    agent.q.kernel[...] += 1
    lm.save_step((agent, optimizer), tmp_path, 1)
    restored, _ = lm.restore(abstract, tmp_path)
    assert restored.same is restored.q
    assert_same_tree(nnx.state(restored), nnx.state(agent))
    assert not np.array_equal(restored.q.kernel[...], restored.target.kernel[...])

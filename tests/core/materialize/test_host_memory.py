"""Variables in the memory of hosts: made, loaded, saved and moved there, and trained from there."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.compile_events import compile_events
from tests.large import mostly_large
from tests.small import shard_small

optax = pytest.importorskip("optax")
RULES = {"up": P(None, "model"), "down": P("model")}


def init(key: Any, width: int = 64) -> dict[str, Any]:
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (64, width)), "down": jax.random.normal(down, (width, 64)) / width}


def abstract_model(width: int = 64) -> lm.AbstractModel:
    return lm.build_abstract(init, jax.random.key(0), width)


def kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def device_nbytes(tree: Any) -> int:
    """Bytes of the most loaded device in its own memory."""
    own = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == "device"]
    shards = [shard for leaf in own for shard in leaf.addressable_shards]
    return max(sum(s.data.nbytes for s in shards if s.device == device) for device in jax.devices()[:8])


def training_step(optimizer: Any, state: Any) -> Any:
    """A jitted step that keeps the optimizer's state where it lies."""
    places = jax.tree.map(lambda leaf: leaf.sharding, state)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        moments = jax.device_put(state, jax.memory.Space.Device)
        updates, moments = optimizer.update(gradients, moments, params)
        return value, optax.apply_updates(params, updates), jax.device_put(moments, places)

    return step


# The larger model has 1 GiB of parameters, and twice that of state.
@pytest.mark.parametrize("width", [64, pytest.param(2 << 20, marks=pytest.mark.large)])
def test_training_with_its_state_on_the_host(mesh8: Mesh, width: int) -> None:
    x, losses, held, optimizer = np.ones((8, 64), np.float32), [], [], optax.adamw(0.5 / width)
    for kind in (None, "pinned_host"):
        abstract = abstract_model(width).with_optimizer(optimizer, memory_kind=kind).shard(mesh8, RULES)
        plan = abstract.plan()
        params, state = abstract.materialize()
        assert kinds(params) == {"device"} and kinds((state[0].mu, state[0].nu)) == {kind or "device"}
        assert (
            device_nbytes((params, state))
            == plan.device_nbytes
            == plan.parts["parameters"] + plan.parts["optimizer state"]
        )
        assert plan.offloaded_nbytes == (4 * 64 * width * 4 if kind else 0)
        held.append(plan.device_nbytes)
        step, found = training_step(optimizer, state), []
        for _ in range(3):
            value, params, state = step(params, state, x)
            found.append(float(value))
        assert kinds((state[0].mu, state[0].nu)) == {kind or "device"} and kinds(state[0].count) == {"device"}
        losses.append(found)
        del params, state
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]
    assert held[0] - held[1] == 4 * 64 * width * 4 // 8
    print(f"bytes on a device: {held[0]:,} and {held[1]:,}; losses {losses[0]} and {losses[1]}")


def test_a_step_that_is_compiled_beforehand_finds_the_state_where_it_will_lie(mesh8: Mesh) -> None:
    optimizer = optax.adamw(1e-2)
    abstract = abstract_model().with_optimizer(optimizer, memory_kind="pinned_host").shard(mesh8, RULES)
    step, x = training_step(optimizer, abstract.tree[1]), np.ones((8, 64), np.float32)
    params, state = abstract.materialize(compile=lm.Compile(step, x).of(lambda both: both))
    with compile_events() as events:
        jax.block_until_ready(step(params, state, x))
    assert events == []


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_a_state_on_the_host_is_saved_and_loaded_there(mesh8: Mesh, tmp_path: Path, format: str) -> None:
    abstract = abstract_model().with_optimizer(optax.adamw(1e-2), memory_kind="pinned_host").shard(mesh8, RULES)
    params, state = abstract.materialize()
    state = jax.tree.map(lambda leaf: jax.device_put(leaf + 1, leaf.sharding), state)  # nothing initializes that
    lm.save({**params, "optimizer": state}, tmp_path / "x", format=format)
    loaded = abstract.materialize(lm.open_checkpoint(tmp_path / "x"))
    for found, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves((params, state)), strict=True):
        assert found.sharding == expected.sharding and np.array_equal(found, expected)


@pytest.mark.parametrize("spec", mostly_large([P("model"), P()], [P("model")]))
def test_what_is_made_loaded_saved_and_moved_is_the_same_in_either_memory(mesh8: Mesh, tmp_path: Path, spec: P) -> None:
    device = NamedSharding(mesh8, spec)
    abstract = lm.build_abstract(
        lambda key: {
            "normal": jax.random.normal(key, (64, 64)),
            "orthogonal": jax.nn.initializers.orthogonal()(key, (64, 64)),  # of kernels, on one device
            "weak": jnp.full((64, 64), 2.0),
            "small": jax.random.normal(key, (64, 64)).astype(jnp.bfloat16),
        },
        jax.random.key(1),
    )
    expected = abstract.shard(mesh8, {".*": spec}).materialize()
    sharded = abstract.shard(mesh8, {".*": lm.Host(spec)})
    made = sharded.materialize()
    lm.save(made, tmp_path / "model.safetensors")
    loads: list[lm.LoadReport] = []
    loaded = sharded.materialize(lm.open_checkpoint(tmp_path / "model.safetensors"), report=loads.append)
    assert loads[0].read_nbytes == sharded.nbytes
    assert lm.statistics(made, spectral=False)["small"] == lm.statistics(expected, spectral=False)["small"]
    moved = lm.reshard(loaded, device)
    reports: list[lm.ReshardReport] = []
    parked = lm.reshard(moved, device.with_memory_kind("pinned_host"), report=reports.append)
    assert reports[0].held_nbytes == (device_nbytes(moved), device_nbytes(moved)) and "pinned_host" in str(reports[0])
    elsewhere = Mesh(np.array(jax.devices()[:4]), ("model",))
    fewer = lm.reshard(parked, NamedSharding(elsewhere, spec, memory_kind="pinned_host"))
    for model, kind in ((made, "pinned_host"), (loaded, "pinned_host"), (moved, "device"), (fewer, "pinned_host")):
        assert kinds(model) == {kind}
        for path, array in expected.items():
            assert model[path].dtype == array.dtype and np.array_equal(model[path], array), path
    assert fewer["normal"].sharding.mesh.size == 4 and kinds(parked) == {"pinned_host"}


def test_every_form_of_rules_says_where(mesh8: Mesh) -> None:
    host = NamedSharding(mesh8, P("model"), memory_kind="pinned_host")
    for rules in (
        {"up": lm.Host(P("model")), ".*": P()},
        {"up": lm.Host(("model",)), ".*": P()},
        lambda variable: lm.Host(P("model")) if variable.path == "up" else P(),
        {"up": host, ".*": P()},
    ):
        sharded = abstract_model().shard(mesh8, rules)
        assert sharded["up"].sharding == host and sharded["down"].sharding == NamedSharding(mesh8, P())
        assert sharded["up"].memory_kind == "pinned_host" and sharded["down"].memory_kind is None
    proposed = abstract_model().shard(mesh8, lm.auto(host="up"))
    like = abstract_model().shard(mesh8, "auto")
    assert [v.memory_kind for v in proposed.values()] == [None, "pinned_host"]
    assert [v.spec for v in proposed.values()] == [v.spec for v in like.values()]
    mended = shard_small(
        abstract_model(60), mesh8, {"up": lm.Host(P(None, "model")), ".*": P()}, on_unmatched="auto", large=1 << 10
    )
    assert mended["up"].spec == P("model") and mended["up"].memory_kind == "pinned_host"
    for text in (proposed, proposed.explain(), proposed.explain("up"), repr(proposed["up"]), proposed.plan()):
        assert "pinned_host" in str(text) or "in the host's memory: 1 variable, " in str(text)


def test_state_lies_where_the_optimizer_was_told(mesh8: Mesh) -> None:
    model, rules = abstract_model(), {"up": lm.Host(P("model")), "down": P("model")}
    own = model.with_optimizer(optax.adam(1e-3)).shard(mesh8, rules)
    assert own["optimizer/0/mu/up"].spec == P("model") and own["optimizer/0/mu/up"].memory_kind is None
    offloaded = model.with_optimizer(optax.adam(1e-3), memory_kind="pinned_host")
    assert offloaded["optimizer/0/mu/up"].memory_kind == "pinned_host"  # on one device, as the parameter
    whole = NamedSharding(mesh8, P("model"))
    ruled = offloaded.shard(mesh8, {**rules, "optimizer/0/mu/up": P(None, "model"), "optimizer/0/nu/up": whole})
    assert ruled["optimizer/0/mu/up"].spec == P(None, "model")
    assert [v.memory_kind for p, v in ruled.items() if p.startswith("optimizer")] == [
        None, "pinned_host", "pinned_host", "pinned_host", None
    ]  # fmt: skip
    assert ruled["optimizer/0/count"].path == list(ruled)[2]


def test_state_that_copies_parameters_is_computed_between_memories(mesh8: Mesh) -> None:
    class Averages:
        def init(self, params: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf * 2, params)

    for rule, kind in ((lm.Host(P("model")), None), (P("model"), "pinned_host"), (lm.Host(P()), "pinned_host")):
        abstract = abstract_model().with_optimizer(Averages(), memory_kind=kind).shard(mesh8, {".*": rule})
        params, state = abstract.materialize()
        assert kinds(state) == {kind or "device"}
        assert all(np.array_equal(state[path], 2 * np.asarray(params[path])) for path in params)


def test_what_cannot_lie_there_is_one_error(mesh8: Mesh) -> None:
    abstract = abstract_model()
    listed = "they have 'device', 'pinned_host', 'unpinned_host'"
    for wrong in (
        lambda: abstract.with_optimizer(optax.adam(1e-3), memory_kind="pined_host"),
        lambda: abstract.shard(mesh8, {".*": lm.Host(P(), "pined_host")}, on_unmatched="auto"),
        lambda: abstract.shard(lm.arithmetic_mesh("v5e-8"), {".*": lm.Host(P(), "pined_host")}),
    ):
        with pytest.raises(lm.ShardingError, match=f"no memory of kind 'pined_host'; closest: 'pinned_host'.*{listed}"):
            wrong()
    for rules, message in (
        ({".*": lm.Host(NamedSharding(mesh8, P()))}, "takes a PartitionSpec; for a sharding, use sharding.with_memory"),
        ({".*": lm.Host("model")}, r"Write PartitionSpec\('model'\)"),
        (lm.Host(P()), r"For all variables: {'\.\*': Host"),
        (lm.auto(host="upp"), "host='upp' matches no variable; closest: 'up'"),
        (lm.auto(host="("), "is not a regular expression"),
    ):
        with pytest.raises(lm.ShardingError, match=message):
            abstract.shard(mesh8, rules)

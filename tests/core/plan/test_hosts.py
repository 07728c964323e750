"""Plans of what hosts keep for their devices: counted apart from devices, and against the hosts' own memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.conftest import needs_libtpu

optax = pytest.importorskip("optax")
MIB = 2**20
RULES = {"up": P(None, "model"), "down": P("model")}


def init(key: Any) -> dict[str, Any]:
    return {"up": jax.random.normal(key, (1024, 2048)), "down": jax.random.normal(key, (2048, 1024))}  # 8 MiB each


def abstract_model() -> lm.AbstractModel:
    return lm.build_abstract(init, jax.random.key(0))


def test_devices_and_hosts_are_counted_apart(mesh8: Mesh) -> None:
    trained = abstract_model().with_optimizer(optax.adam(1e-3), memory_kind="pinned_host")
    plan = trained.shard(mesh8, {**RULES, "up": lm.Host(P(None, "model"))}).plan(host_memory="1GiB")
    assert plan.parts == {"parameters": MIB, "optimizer state": 4, "gradients": 2 * MIB}
    assert plan.device_nbytes == MIB + 4 and plan.offloaded_nbytes == 40 * MIB
    rows = {row.path: row for row in plan.rows}
    assert (rows["up"].shard_nbytes, rows["up"].offloaded_nbytes, rows["up"].memory_kind) == (0, MIB, "pinned_host")
    assert (rows["down"].shard_nbytes, rows["down"].offloaded_nbytes, rows["down"].memory_kind) == (MIB, 0, None)
    (host,) = plan.hosts
    assert host.offloaded_nbytes == 40 * MIB and host.device_nbytes == 8 * (MIB + 4)
    # CPUs' memory is the host's, too.
    assert plan.needed_host_nbytes == host.peak_nbytes >= 48 * MIB
    assert plan.timeline[-1].offloaded_nbytes == 5 * MIB and plan.timeline[-1].held_nbytes == plan.device_nbytes
    assert plan.fits is None and plan.check() is plan  # what CPU devices have is not known
    text = str(plan)
    assert "offloaded: 40.00 MiB that a host keeps" in text and "host memory: 1.00 GiB; fits" in text
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["offloaded_nbytes"] == 40 * MIB and told["hosts"][0]["offloaded_nbytes"] == 40 * MIB
    assert told["variables"][1]["memory_kind"] == "pinned_host" and told["host_memory"] == 2**30
    whole = abstract_model().shard(mesh8, RULES).plan()
    assert whole.offloaded_nbytes == 0 and whole.host_memory is None and "host memory:" not in str(whole)


def test_what_one_device_computes_whole_counts_once(mesh8: Mesh) -> None:
    make = jax.nn.initializers.orthogonal()
    abstract = lm.build_abstract(lambda key: {"w": make(key, (256, 256))}, jax.random.key(0))
    one = abstract.plan().hosts[0].peak_nbytes
    for spec in (P("model"), P(None, "model")):
        plan = abstract.shard(mesh8, {"w": spec}).plan()
        # A kernel's temporaries on the first device; later the whole beside its shards on all of them.
        assert plan.hosts[0].peak_nbytes == max(one, 2 * 256 * 256 * 4) <= plan.peak_nbytes + 8 * 256 * 32 * 4


def test_a_host_that_has_too_little_does_not_fit() -> None:
    trained = abstract_model().with_optimizer(optax.adam(1e-3), memory_kind="pinned_host")
    plan = trained.shard(lm.arithmetic_mesh("v5e-8"), RULES).plan(host_memory="20MiB")
    assert plan.device_memory is not None and plan.needed_nbytes <= plan.device_memory and plan.fits is False
    assert plan.verdict() == "does not fit a host, 12.00 MiB short"
    with pytest.raises(lm.DoesNotFitError, match=r"32\.00 MiB on a host .*has 20\.00 MiB, 12\.00 MiB too") as error:
        plan.check()
    assert (error.value.needed_nbytes, error.value.limit_nbytes) == (32 * MIB, 20 * MIB)
    assert "optimizer/0/mu/down 1.00 MiB" in str(error.value)


@pytest.mark.parametrize(
    ("devices", "per_host", "gib"),
    [
        ("v2-8", 8, 334), ("v3-8", 8, 334), ("v3-32", 8, 334), ("v4-8", 4, 407), ("v5p-8", 4, 448), ("v5e-1", 1, 48),
        ("v5e-4", 4, 192), ("v5e-8", 8, 384), ("v5e-16", 4, 192), ("v6e-8", 8, 1408), ("v6e-16", 4, 704),
        ("v7x-16", 8, 960),
    ],
)  # fmt: skip
def test_hosts_of_devices_that_are_not_here(devices: str, per_host: int, gib: int) -> None:
    """A slice of one host has all chips of it; of several hosts, each has four."""
    mesh = lm.arithmetic_mesh(devices)
    kept = abstract_model().shard(mesh, {".*": lm.Host(P())}).plan()
    assert (kept.offloaded_nbytes, kept.host_memory) == (16 * MIB * per_host, gib << 30)


def test_hosts_of_cards_are_not_known_unless_they_are_stated() -> None:
    trained = abstract_model().with_optimizer(optax.adam(1e-3), memory_kind="pinned_host")
    cards = trained.shard(lm.arithmetic_mesh("H100:16"), RULES)
    plan = cards.plan()
    assert plan.offloaded_nbytes == 32 * MIB and plan.host_memory is None
    assert "number of hosts unknown, one assumed; set hosts=…" in plan.notes
    stated = cards.plan(hosts=2)
    assert stated.offloaded_nbytes == 16 * MIB and not any("unknown" in note for note in stated.notes)
    for hosts, message in ((3, "hosts=3 do not divide the 16 devices"), (0, "hosts is a number of hosts, from 1")):
        with pytest.raises(lm.LazyModelError, match=message):
            cards.plan(hosts=hosts)


@needs_libtpu
@pytest.mark.parametrize("devices", ["v2-8", "v4-8", "v5e-1", "v5e-8", "v6e-16", "v7x-16"])
def test_hosts_are_as_libtpu_has_them(devices: str) -> None:
    mesh, arithmetic = lm.topology(devices), lm.arithmetic_mesh(devices)
    per_host = mesh.size // len({device.process_index for device in mesh.devices.flat})
    kept = abstract_model().shard(arithmetic, {".*": lm.Host(P())}).plan()
    assert kept.offloaded_nbytes == 16 * MIB * per_host


def test_slots_that_are_only_stated_lie_there_too() -> None:
    sharded = abstract_model().shard(lm.arithmetic_mesh("v5e-8"), RULES)
    own, host = (sharded.plan(what_if=lm.WhatIf(optimizer="adamw", memory_kind=k)) for k in (None, "pinned_host"))
    assert own.used_nbytes - host.used_nbytes == 4 * MIB and host.offloaded_nbytes == 32 * MIB
    assert host.parts["optimizer state"] == 0 and own.offloaded_nbytes == 0
    with pytest.raises(lm.DoesNotFitError, match=r"optimizer state in hosts' memory \(memory_kind='pinned_host'\) it"):
        own.check("5MiB")
    assert host.check("5MiB")
    with pytest.raises(lm.LazyModelError, match="memory_kind was given without optimizer"):
        lm.WhatIf(memory_kind="pinned_host")
    quantized = abstract_model().shard(lm.arithmetic_mesh("v5e-8"), {**RULES, "up": lm.Host(P(None, "model"))})
    plan = quantized.plan(what_if=lm.WhatIf(quantize="int8"))
    assert MIB // 4 < plan.offloaded_nbytes / 8 < MIB // 3 and MIB // 4 < plan.parts["parameters"] < MIB // 3


def test_the_group_is_in_the_peak_where_it_is_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hosts hold the same: each reads a part, and the devices gather the whole."""
    save_file({"w": np.zeros((4096, 1024), "float32"), "small": np.zeros(16, "float32")}, tmp_path / "w.safetensors")
    model = lm.build_abstract(lambda: {"w": jnp.zeros((4096, 1024)), "small": jnp.zeros((16,))})
    sharded = model.shard(AbstractMesh((4, 2), ("data", "model")), {"w": P(None, "model"), "small": P()})
    with lm.open_checkpoint(tmp_path / "w.safetensors") as ckpt:
        plans = {way: sharded.plan(ckpt, hosts=4, replicas=way) for way in ("read", "exchange", None)}
        monkeypatch.setattr(type(ckpt["w"].source.reader), "remote", True)
        remote = sharded.plan(ckpt, hosts=4)
    held = plans["read"].device_nbytes
    assert plans["read"].peak_nbytes == plans[None].peak_nbytes == held
    # A device reads 2 MiB, sends halves of it to its neighbour, and gathers 8 MiB.
    assert plans["exchange"].peak_nbytes == remote.peak_nbytes == held + (2 + 2 + 8) * MIB
    for wrong in (sharded.plan, model.materialize):
        with pytest.raises(lm.LazyModelError, match="expected replicas="):
            wrong(replicas="once")


@pytest.mark.large
@needs_libtpu
def test_the_compiler_counts_them_apart_as_well() -> None:
    mesh = lm.topology("v5e:2x4")
    sharded = abstract_model().shard(mesh, {**RULES, "up": lm.Host(P(None, "model"))})
    plan = sharded.plan(compile=lm.Compile("init"))
    assert plan.timeline[0].held_nbytes == 0 and MIB <= plan.timeline[0].peak_nbytes < 1.1 * MIB
    assert plan.hosts[0].offloaded_nbytes == 8 * MIB and plan.host_memory == 384 << 30

    def loss(tree: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ tree["up"]) @ tree["down"]) ** 2)

    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    trained = lm.WhatIf(optimizer="adamw", memory_kind="pinned_host")
    plan = sharded.plan(compile=lm.Compile("train", loss, x), what_if=trained)
    # The state of both and one parameter are the program's arguments in the host's memory, and its results.
    assert plan.compiled is not None and plan.compiled.host_nbytes == 5 * MIB
    assert plan.parts["parameters"] == MIB and 1 * MIB <= plan.compiled.argument_nbytes < 1.1 * MIB

"""Fleets on paper: what hosts read and exchange either way, and the seconds of it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm

MIB = 1 << 20
RULES = {"w": P(None, "model"), "small": P()}


def model() -> lm.AbstractModel:
    return lm.build_abstract(lambda: {"w": jnp.zeros((4096, 1024)), "small": jnp.zeros((16,))})


def test_a_thousand_hosts_read_once_or_each() -> None:
    """Each host has a whole replica; 16 MiB at 16 MiB a second, or a thousandth of it and the links."""
    mesh = AbstractMesh((1024, 4), ("data", "model"))
    fleet = lm.Fleet(hosts=1024, storage_bandwidth=16 * MIB, link_bandwidth="1GiB/s")
    plan = model().shard(mesh, RULES).plan(fleet=fleet)
    read, exchange = plan.ways["read"], plan.ways["exchange"]
    assert read.read_nbytes == (16 * MIB + 64,) * 1024 and set(read.exchanged_nbytes) == {0}
    assert exchange.total_read_nbytes == 16 * MIB + 64 * 1024
    assert exchange.exchanged_nbytes[0] == 16 * MIB - 16 * MIB // 1024
    assert read.seconds == pytest.approx(1, rel=0.01)
    assert exchange.seconds == pytest.approx(1 / 64, rel=0.1)
    assert "without a checkpoint" in " ".join(plan.notes)
    assert "replicas='exchange': 16.06 MiB from storage" in str(plan)
    assert plan.to_dict()["ways"]["read"]["seconds"] == read.seconds
    without = model().shard(mesh, RULES).plan(fleet=lm.Fleet(hosts=1024)).ways
    assert [way.seconds for way in without.values()] == [None, None]


def test_the_group_is_in_the_peak_where_it_is_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": np.zeros((4096, 1024), "float32"), "small": np.zeros(16, "float32")}, tmp_path / "w.safetensors")
    sharded = model().shard(AbstractMesh((4, 2), ("data", "model")), RULES)
    fleet = lm.Fleet(hosts=4)
    with lm.open_checkpoint(tmp_path / "w.safetensors") as ckpt:
        plans = {way: sharded.plan(ckpt, fleet=fleet, replicas=way) for way in ("read", "exchange", None)}
        monkeypatch.setattr(type(ckpt["w"].source.reader), "remote", True)
        remote = sharded.plan(ckpt, fleet=fleet)
    held = plans["read"].device_nbytes
    assert plans["read"].peak_nbytes == plans[None].peak_nbytes == held
    # A device reads 2 MiB, sends halves of it to its neighbour, and gathers 8 MiB.
    assert plans["exchange"].peak_nbytes == remote.peak_nbytes == held + (2 + 2 + 8) * MIB
    assert plans["exchange"].ways["exchange"].total_read_nbytes == 16 * MIB + 4 * 64


def test_one_host_has_no_ways_and_wrong_numbers_are_refused() -> None:
    sharded = model().shard(AbstractMesh((4, 2), ("data", "model")), RULES)
    assert sharded.plan().ways == {}
    with pytest.raises(lm.LazyModelError, match="hosts=3 do not divide the 8 devices"):
        sharded.plan(fleet=lm.Fleet(hosts=3))
    with pytest.raises(lm.LazyModelError, match="hosts is a number"):
        lm.Fleet(hosts=0)
    with pytest.raises(lm.LazyModelError, match="storage_bandwidth"):
        lm.Fleet(storage_bandwidth="fast")
    with pytest.raises(lm.LazyModelError, match="fleet is a lazymodel.Fleet"):
        sharded.plan(fleet=1024)
    with pytest.raises(lm.LazyModelError, match="expected replicas="):
        sharded.plan(fleet=lm.Fleet(hosts=2), replicas="once")
    with pytest.raises(lm.LazyModelError, match="expected replicas="):
        model().materialize(replicas="once")


def test_large_models_on_large_fleets_are_planned_in_seconds() -> None:
    """Numbers only: a model of a terabyte on 4096 devices, whose variables share a few shardings."""

    def init() -> dict[str, jax.Array]:
        return {f"layer_{n}/kernel": jnp.zeros((16384, 65536), jnp.bfloat16) for n in range(512)}

    mesh = AbstractMesh((64, 64), ("data", "model"))
    plan = lm.build_abstract(init).shard(mesh, {".*": P(None, "model")}).plan(fleet=lm.Fleet(hosts=1024))
    file = 512 * 16384 * 65536 * 2
    assert plan.ways["exchange"].total_read_nbytes == file
    assert plan.ways["read"].total_read_nbytes == 64 * file

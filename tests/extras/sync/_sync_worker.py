"""One of the processes of `test_sync`: a sampler on the devices of all of them follows its trainer.

Run as `python _sync_worker.py PROCESS PROCESSES ADDRESS`. Its exit code is not 0 if something is wrong.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"up": jax.random.normal(key, (64, 96)), "down": jax.random.normal(key, (96, 64))}


def check() -> None:
    devices = np.array(jax.devices())
    trainer = lm.build_abstract(init, jax.random.key(0))
    sampler = lm.build_abstract(lambda: {"w": jnp.zeros((2, 96, 64), jnp.bfloat16)})
    placed = trainer.shard(Mesh(devices, ("data",)), {".*": P("data")})
    target = sampler.shard(Mesh(devices.reshape(2, -1), ("data", "model")), {"w": P(None, None, "model")})

    def stack(w: Any) -> dict[str, Any]:
        return {"w": np.stack([w["up"].T, w["down"]])}

    sync = lm.Sync(placed, target, stack)
    live, into = placed.materialize(), target.materialize()
    whole = {name: np.asarray(value) for name, value in trainer.materialize().items()}
    for factor in (2, 4):
        live = jax.tree.map(lambda value, factor=factor: value * factor, live)
        whole = {name: value * np.float32(factor) for name, value in whole.items()}
        into = sync(live, into=into)
        for shard in into["w"].addressable_shards:
            expected = stack(whole)["w"][shard.index].astype(jnp.bfloat16)
            assert np.asarray(shard.data).tobytes() == expected.tobytes()
    half = sampler.shard(Mesh(devices[: len(devices) // 2], ("model",)), {"w": P(None, None, "model")})
    with pytest.raises(lm.LazyModelError, match="only if the devices and their order stay the same"):
        lm.Sync(placed, half, stack)


if __name__ == "__main__":
    process, processes, address = sys.argv[1:]
    join(int(process), int(processes), address, 8 // int(processes))
    check()

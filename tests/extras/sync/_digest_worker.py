"""One of the processes of `test_digest`: all of them find the digests that one process finds.

Run as `python _digest_worker.py PROCESS PROCESSES ADDRESS FOLDER`. Its exit code is not 0 if something is wrong.
"""

from __future__ import annotations

import importlib
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join


def check(process: int, folder: str) -> None:
    rng = np.random.default_rng(0)
    values = {f"w{n}": rng.integers(0, 256, (16, 32 * (n + 1)), np.uint8).view(np.float32) for n in range(4)}
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))
    crossed = Mesh(mesh.devices.T.reshape(2, -1), ("data", "model"))
    for places in (
        [(mesh, P("data", "model")), (mesh, P("model")), (mesh, P()), (crossed, P(None, "data"))],
        [(crossed, P("model", "data")), (crossed, P("model")), (mesh, P("data")), (crossed, P(("data", "model")))],
    ):
        live = {
            name: jax.make_array_from_callback(value.shape, NamedSharding(*place), value.__getitem__)
            for (name, value), place in zip(values.items(), places, strict=True)
        }
        live["own"] = jax.device_put(np.full(3, process), jax.local_devices()[0])  # another one in each process
        own = {"own": np.full(3, process, live["own"].dtype)}
        assert lm.digest(live) == lm.digest(values | own), places
        digest_arrays = importlib.import_module("lazymodel.extras.sync.digest").digest_arrays
        mine = digest_arrays(live, agreed=False)
        assert mine["own"] == lm.digest(own)["own"] and (mine["w2"] == lm.digest(values)["w2"]) == (
            process == 0 and places[2][1] == P()
        )
    path = f"{folder}/model"
    lm.save({name: live[name] for name in values}, path)
    assert lm.digest(path) == lm.digest(values)
    size = 4 + process
    different = {"w": jax.make_array_from_callback((size,), NamedSharding(mesh, P()), np.zeros(size).__getitem__)}
    with pytest.raises(lm.CheckpointError, match="the processes' variables differ"):
        lm.digest(different)


if __name__ == "__main__":
    process, processes, address, folder = sys.argv[1:]
    join(int(process), int(processes), address, 8 // int(processes))
    check(int(process), folder)

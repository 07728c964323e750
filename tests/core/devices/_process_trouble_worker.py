"""One of the processes of `test_process_trouble`: loads a model that all share, with one thing going wrong in it.

Run as `python _process_trouble_worker.py PROCESS PROCESSES ADDRESS FOLDER TROUBLE`. What comes of it is how it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._devices import coordination

SHORT = 3.0  # seconds of silence after which a process that was at work counts as dead here


def init(key: jax.Array) -> dict[str, Any]:
    return {"w": jnp.zeros((96, 256)), "new": jax.random.normal(key, (96, 64))}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def others_left() -> bool:
    store = coordination.run_store()
    assert store is not None
    return any(key.endswith("/left") for key in store.folder("lazymodel/trouble/"))


def main() -> None:
    process, processes, address, folder, trouble = sys.argv[1:]
    path = Path(folder) / f"model-{process}.safetensors"
    coordination.SILENCE = SHORT
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(process), initialization_timeout=60)
    jax.devices()  # waits for all

    def progress(done: int, total: int) -> None:
        if trouble == "killed while streaming" and done:
            die()
        if trouble == "interrupted" and done:
            raise KeyboardInterrupt

    model = lm.build_abstract(init, jax.random.key(0))
    shared = model.shard(Mesh(np.array(jax.devices()), ("model",)), {".*": P("model")})
    if trouble == "killed before":
        die()
    if trouble == "ends before":
        raise SystemExit("enough seen")
    ckpt = lm.open_checkpoint(path)
    if trouble == "killed after opening":
        time.sleep(1.5 * SHORT / coordination._SIGNS)  # one sign of life
        die()
    if trouble == "far too late":
        while not others_left():
            time.sleep(0.1)
    if trouble == "late":
        time.sleep(40)  # longer than Gloo waits
    arrays = shared.materialize(ckpt, initialize="missing", progress=progress)
    if trouble == "killed after materializing":
        die()
    for array in arrays.values():
        assert all(np.isfinite(np.asarray(shard.data)).all() for shard in array.addressable_shards)
    arrays = shared.materialize(ckpt, initialize="missing")
    total = jax.jit(lambda tree: tree["w"].sum())(arrays)
    assert jax.block_until_ready(total) == 96 * 256
    print("all is well")


if __name__ == "__main__":
    main()

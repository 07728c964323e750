"""One process of a job of which the last is killed while all load: the others report it.

    python tests/clusters/killed.py FOLDER [ADDRESS PROCESSES PROCESS]

Prints `reported: ` and the error in each process that is left. Without an address JAX finds the others by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm


def main(folder: str, *by_hand: str) -> None:
    if by_hand:
        address, processes, process = by_hand
        jax.distributed.initialize(address, int(processes), int(process))
    else:
        jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("model",))
    abstract = lm.build_abstract(lambda: {f"w{n}": jnp.ones((1024, 1024)) for n in range(32)}).shard(mesh, {".*": P()})
    lm.save(abstract.materialize(progress=False), f"{folder}/killed", overwrite=True, progress=False)
    last = jax.process_index() == jax.process_count() - 1

    def progress(done: int, total: int) -> None:
        if last and done > total // 4:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        abstract.materialize(lm.open_checkpoint(f"{folder}/killed"), replicas="exchange", progress=progress)
    except lm.CheckpointError as error:
        sys.stdout.write(f"reported: {error}\n")
        sys.stdout.flush()
        if jax.process_index() == 0:
            time.sleep(10)  # its end aborts the others
        os._exit(3)  # JAX would wait for the one that was killed


if __name__ == "__main__":
    main(*sys.argv[1:])

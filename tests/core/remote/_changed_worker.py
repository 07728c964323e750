"""One of two processes that load from objects of which one is replaced meanwhile; prints its error and when that was.

Run as `python _changed_worker.py PROCESS ADDRESS URL`.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import lazymodel as lm


def main() -> None:
    process, address, url = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(process))
    error = "none"
    try:
        with lm.open_checkpoint(url) as checkpoint:
            abstract = lm.build_abstract(
                lambda key: {name: jax.numpy.zeros(tensor.shape, tensor.dtype) for name, tensor in checkpoint.items()},
                jax.random.key(0),
            )
            mesh = Mesh(np.array(jax.devices()), ("x",))
            abstract.shard(mesh, {".*": PartitionSpec("x")}).materialize(checkpoint)
    except lm.CheckpointError as raised:
        error = str(raised)
    print(json.dumps((error, time.time())), flush=True)


if __name__ == "__main__":
    main()

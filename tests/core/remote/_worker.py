"""Processes of the tests of stores, run by `tests.processes.run_workers`.

`_worker.py changed PROCESS ADDRESS URL` is one of two that load from an object that is replaced meanwhile; prints its
error. `_worker.py bounded TASKS` reads from servers that mean harm, as often as each task says; prints the most memory
that each took, in bytes, and what came of each time. Of address space it has 2 GiB beyond what it begins with: what is
read without end ends it.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import lazymodel as lm
from tests.private_memory import Peak
from tests.processes import join


def changed(process: str, address: str, url: str) -> str:
    join(int(process), 2, address, 2)
    try:
        with lm.open_checkpoint(url) as checkpoint:
            shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in checkpoint.items()}
            abstract = lm.build_abstract(lambda: {name: jax.numpy.zeros(*given) for name, given in shapes.items()})
            mesh = Mesh(np.array(jax.devices()), ("x",))
            abstract.shard(mesh, {".*": PartitionSpec("x")}).materialize(checkpoint)
    except lm.CheckpointError as error:
        return str(error)
    return "none"


def bounded(tasks: str) -> dict[str, tuple[int, list[str]]]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found: dict[str, tuple[int, list[str]]] = {}
    for what, (url, options, times) in json.loads(tasks).items():
        with Peak() as peak:
            outcomes = [load(url, options) for _ in range(times)]
        found[what] = (peak.nbytes, outcomes)
    return found


def load(url: str, options: dict[str, Any]) -> str:
    """What comes of reading tensors `wN`, which count from N."""
    try:
        with lm.open_checkpoint(url, options) as checkpoint:
            for name in checkpoint:
                values = checkpoint[name].read()
                assert (values == np.arange(values.size).reshape(values.shape) + int(name[1:])).all(), name
            assert len(checkpoint) == 6
    except lm.LazyModelError as error:
        return str(error)
    return "right"


if __name__ == "__main__":
    print(json.dumps({"changed": changed, "bounded": bounded}[sys.argv[1]](*sys.argv[2:])))

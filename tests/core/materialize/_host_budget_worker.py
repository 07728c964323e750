"""The process that `test_host_budget` watches: streams a file under a ceiling and drops every array at once.

Run as `python -m tests.core.materialize._host_budget_worker CASE PATH CEILING`. Prints, as JSON, the peak of its
private memory beyond what it had before, the bytes that it loaded, and those of its largest variable.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._materialize.stream import StreamItem, stream
from tests.private_memory import Peak


def items(case: str, path: str, sharding: NamedSharding) -> list[StreamItem]:
    """What is streamed: every tensor as the case says."""
    checkpoint = lm.open_checkpoint(path)
    names = list(checkpoint)
    dtype = np.dtype(np.float32)

    def item(name: str, tensor: Any) -> StreamItem:
        return StreamItem(name, tensor, tensor.shape, dtype, sharding)

    if case == "cast":
        return [item(name, tensor.astype(np.float64).astype(dtype)) for name, tensor in checkpoint.items()]
    if case == "transposed":
        return [item(name, tensor.T) for name, tensor in checkpoint.items()]
    if case == "concatenated":
        pairs = [names[at : at + 2] for at in range(0, len(names), 2)]
        return [item(a, np.concatenate([checkpoint[a], checkpoint[b].T], axis=1)) for a, b in pairs]
    return [item(name, tensor) for name, tensor in checkpoint.items()]


def load(work: list[StreamItem], ceiling: int) -> int:
    """Streams all, drops every array before it asks for the next, and returns their bytes."""
    total = 0
    for _, array in stream(work, max_host_memory=ceiling):
        total += array.nbytes
        del array
    return total


def main() -> None:
    case, path, ceiling = sys.argv[1], sys.argv[2], int(sys.argv[3])
    mesh = Mesh(np.array(jax.devices()), ("model",))
    work = items(case, path, NamedSharding(mesh, P("model")))
    load(work[:2], ceiling)  # imports, threads, and what JAX compiles
    with Peak() as peak:
        total = load(work, ceiling)
    largest = max(int(np.prod(item.shape)) * item.dtype.itemsize for item in work)
    print(json.dumps({"peak": peak.nbytes, "total": total, "largest": largest}))


if __name__ == "__main__":
    main()

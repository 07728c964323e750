"""A process that `test_host_budget` watches: streams a file under a ceiling and drops every array at once.

Run as `python _host_budget_worker.py CASE PATH CEILING OUT`. Writes, as JSON, the peak of its private memory beyond
what it had before, the bytes that it loaded, and those of its largest variable.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.core.materialize._variables import model_of
from tests.private_memory import Peak


def tensors(case: str, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What is streamed: every tensor as the case says."""
    names = list(checkpoint)
    if case == "cast":
        return {name: tensor.astype(np.float64).astype(np.float32) for name, tensor in checkpoint.items()}
    if case == "transposed":
        return {name: tensor.T for name, tensor in checkpoint.items()}
    if case == "concatenated":
        pairs = zip(names[::2], names[1::2], strict=True)
        return {a: np.concatenate([checkpoint[a], checkpoint[b].T], axis=1) for a, b in pairs}
    return dict(checkpoint)


def load(given: Mapping[str, Any], ceiling: int) -> int:
    """Streams all, uses every array for a while and drops it before it asks for the next, and returns their bytes."""
    mesh = Mesh(np.array(jax.devices()), ("model",))
    total = 0
    for _, array in model_of(given, NamedSharding(mesh, P("model"))).stream(given, max_host_memory=ceiling):
        total += array.nbytes
        time.sleep(0.02)  # the stream reads ahead meanwhile
        del array
    return total


def main() -> None:
    case, path, ceiling, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 4)
    given = tensors(case, lm.open_checkpoint(path))
    load(dict(list(given.items())[:2]), ceiling)  # imports, threads, and what JAX compiles
    with Peak() as peak:
        total = load(given, ceiling)
    largest = max(tensor.nbytes for tensor in given.values())
    out.write_text(json.dumps({"peak": peak.nbytes, "total": total, "largest": largest}))


if __name__ == "__main__":
    main()

"""One of the processes of `test_other_checkpoint`: loads what the task says, and writes down what came of each.

Run as `python _other_checkpoint_worker.py PROCESS PROCESSES ADDRESS FOLDER`; `tasks.json` in the folder has for each
scenario what every process opens, by its number, and options.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join

SHAPE = (1024, 1024)


def outcome(where: str | int, options: dict[str, Any]) -> str:
    model = lm.build_abstract(lambda: {"w": jnp.zeros(SHAPE), "b": jnp.zeros(SHAPE[1])})
    model = model.shard(Mesh(np.array(jax.devices()), ("x",)), {"w": P(options.get("spec")), "b": P()})
    try:
        if isinstance(where, int):  # a seed of arrays in memory
            checkpoint: Any = {"w": np.full(SHAPE, where, np.float32), "b": np.zeros(SHAPE[1], np.float32)}
        else:
            checkpoint = lm.open_checkpoint(where, verify=options.get("verify", False))
        if options.get("mapped"):
            checkpoint = lm.map_checkpoint(checkpoint, lm.WeightMap({"w": lm.From("w").transpose(), "b": "b"}), model)
        if options.get("stream"):
            dict(model.stream(checkpoint))
        else:
            model.materialize(checkpoint, replicas=options.get("replicas"))
    except lm.LazyModelError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def main() -> None:
    process, processes, address, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    join(process, processes, address, 1, heartbeat=60)
    tasks = json.loads((folder / "tasks.json").read_text())
    outcomes = {name: outcome(wheres[process], options) for name, (wheres, options) in tasks.items()}
    (folder / f"outcomes-{process}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()

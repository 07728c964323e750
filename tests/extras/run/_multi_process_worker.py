"""One of the processes of `test_multi_process`: runs functions of a model that is sharded over all of them.

Run as `python _multi_process_worker.py PROCESS ADDRESS FOLDER`. Writes down what it read, or the traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.core.materialize._variables import bytes_read
from tests.extras.run.models import decoder, forward, norms_of, scanned, tokens
from tests.processes import join

PROCESSES, LAYERS = 2, 2
RULES = {"embedding": P("model"), ".*(qkv|up)": P(None, "model"), ".*(out|down)": P("model"), ".*": P()}


def values(tree: Any) -> list[Any]:
    """What every process holds of a result, added up over all of them."""
    replicated = jax.jit(lambda tree: tree, out_shardings=jax.NamedSharding(MESH, P()))(tree)
    return [np.asarray(leaf.addressable_data(0), np.float64).tolist() for leaf in jax.tree.leaves(replicated)]


def scenarios(process: int, folder: Path) -> dict[str, Any]:
    checkpoint = lm.open_checkpoint(folder / "model.safetensors")
    abstract = lm.build_abstract(decoder(LAYERS), jax.random.key(0)).shard(MESH, RULES)
    given = np.asarray(tokens())
    found: dict[str, Any] = {"forward": values(abstract.run(forward, given, checkpoint=checkpoint))}
    found["read"] = bytes_read(checkpoint)
    found["norms"] = values(abstract.run(norms_of(forward), tokens(), checkpoint=checkpoint))
    stacked = lm.build_abstract(decoder(LAYERS, stacked=True), jax.random.key(0)).shard(MESH, {".*": P()})
    found["scan"] = values(stacked.run(scanned, given))
    # What fails in one process fails in all.
    broken = lm.open_checkpoint(folder / f"model-{process}.safetensors")
    if process:
        with (folder / f"model-{process}.safetensors").open("r+b") as file:
            file.truncate(1000)
    with pytest.raises(lm.CheckpointError) as raised:
        abstract.run(forward, given, checkpoint=broken)
    found["error"] = str(raised.value)
    return found


if __name__ == "__main__":
    process, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    join(process, PROCESSES, address, 4)
    MESH = Mesh(np.array(jax.devices()), ("model",))
    try:
        outcome = scenarios(process, folder)
    except BaseException:
        outcome = {"wrong": traceback.format_exc()}
    (folder / f"outcome-{process}.json").write_text(json.dumps(outcome))

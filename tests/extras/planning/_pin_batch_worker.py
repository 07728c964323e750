"""A process of the tests of pinned batches: `python _pin_batch_worker.py PROCESS ADDRESS` is one of two, which train
together, each with its own half of the batch, and alone.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.extras.planning.test_pin_batch import LENGTH, ROWS, WORDS, init, training
from tests.processes import join


def worker(process: int, address: str) -> None:
    join(process, 2, address, 4)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    rules = {"embed/embedding": P(None, "fsdp"), "layers/.*/kernel": P(None, "fsdp")}
    abstract = lm.build_abstract(init, jax.random.key(0), stacked=True)
    together = abstract.shard(mesh, rules)
    tokens = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH), "int32")
    half = np.split(tokens, 2)[process]
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("fsdp")), half)
    placed = jax.tree.map(lambda leaf: leaf.sharding, together.tree)
    step = jax.jit(
        lm.pin_batch(training(), together), donate_argnums=0, out_shardings=(NamedSharding(mesh, P()), placed)
    )
    text = step.lower(together.tree, batch).compile().as_text()
    assert f"[{ROWS},{LENGTH},128]" not in text and f"[{ROWS // 8},{LENGTH},128]" in text  # the batch, not the model
    params, alone = together.materialize(), abstract.materialize()
    for _ in range(2):
        value, params = step(params, batch)
        expected, alone = jax.jit(training())(alone, tokens)
        np.testing.assert_allclose(np.asarray(value.addressable_data(0)), np.asarray(expected), rtol=1e-5)


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])

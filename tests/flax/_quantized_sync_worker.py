"""One of the processes of `test_qwix`: a quantized sampler on the devices of all of them follows its trainer.

Run as `python _quantized_sync_worker.py PROCESS PROCESSES ADDRESS`. Its exit code is not 0 if something is wrong.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.processes import join


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(64, 64, use_bias=False, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def scaled(model: Model, factor: float) -> Model:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda value: value * factor, state))


def assert_same(sampler: Any, expected: Any) -> None:
    """The shards of this process are those of a model that it has whole."""
    for new, whole in zip(*map(jax.tree.leaves, map(nnx.state, (sampler, expected))), strict=True):
        assert (new.dtype, new.shape) == (whole.dtype, whole.shape)
        for shard in new.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(whole)[shard.index].tobytes()


def check(process: int) -> None:
    devices = np.array(jax.devices())
    abstract, inputs = lm.build_abstract(Model, nnx.Rngs(0)), (jnp.zeros((1, 64)),)
    data, both = Mesh(devices, ("data",)), Mesh(devices.reshape(2, -1), ("data", "model"))
    trainer = abstract.shard(data, {".*kernel": P("data"), ".*": P()}).materialize()
    whole = abstract.materialize()
    tiles = [qwix.QuantizationRule(weight_qtype="int4", tile_size=16)]
    for how, spec in (("int8", P("data", "model")), ("float8", P(None, "model")), (tiles, P(("data", "model")))):
        quantized = abstract.quantize(how, inputs=inputs)
        sampler = quantized.shard(both, {"layers/.*": spec, "head/.*": P()})
        sync, into = lm.Sync(trainer, sampler, max_device_memory="8KiB"), sampler.materialize()
        assert sync.num_groups > 1
        for factor in (2, 3):
            into = sync(scaled(trainer, factor), into=into)
            assert_same(into, quantized.materialize(scaled(whole, factor)))
    calls, ready = itertools.count(), jax.block_until_ready

    def failing(arrays: Any) -> Any:
        return 1 / 0 if process == 1 and next(calls) == 3 else ready(arrays)

    with (
        mock.patch.object(jax, "block_until_ready", failing),
        pytest.raises(lm.SyncError, match="are lost.*division" if process == 1 else "process 1 failed") as error,
    ):
        sync(trainer, into=into)
    assert_same(sync(trainer, into=error.value.sampler), quantized.materialize(whole))


if __name__ == "__main__":
    process, processes, address = sys.argv[1:]
    join(int(process), int(processes), address, 8 // int(processes))
    warnings.simplefilter("ignore", DeprecationWarning)  # Qwix calls what Flax has deprecated
    check(int(process))

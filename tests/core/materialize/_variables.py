"""Models that have a variable for every tensor of a checkpoint, what their arrays have to hold, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

import lazymodel as lm
from tests.foreign_memory import bits


def model_of(tensors: Mapping[str, Any], shardings: Sharding | Mapping[str, Sharding]) -> lm.AbstractModel[Any]:
    """A model with a variable of the shape and dtype of each tensor; one sharding for all, or one a path."""

    def init() -> dict[str, Any]:
        return {path: jnp.zeros(tensor.shape, tensor.dtype) for path, tensor in tensors.items()}

    def rule(variable: lm.AbstractVariable) -> Sharding:
        return shardings if isinstance(shardings, Sharding) else shardings[variable.path]

    return lm.build_abstract(init).shard(Mesh(np.array(jax.devices()[:1]), ("one",)), rule)


def assert_shards_equal(array: jax.Array, expected: np.ndarray) -> None:
    """Every shard is the slice of a NumPy array, bit for bit."""
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    for shard in array.addressable_shards:
        found, wanted = np.asarray(shard.data), np.array(expected[shard.index], order="C")
        assert found.shape == wanted.shape
        if found.dtype.itemsize * 8 > bits(found.dtype):  # whatever is in the rest of the byte
            found, wanted = (each.view(np.uint8) & (2 ** bits(found.dtype) - 1) for each in (found, wanted))
        assert found.tobytes() == wanted.tobytes()


def bytes_read(checkpoint: Mapping[str, Any]) -> int:
    """Bytes of tensors that were read of a checkpoint in one file, since it was opened."""
    return next(iter(checkpoint.values())).source.reader.bytes_read


class Recorder:
    """A `Progress` that notes what it is given, and that no two calls overlap."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str | None]] = []
        self.busy = threading.Lock()

    def start(self, total_nbytes: int, description: str) -> None:
        self.calls.append(("start", total_nbytes, description))

    def advance(self, nbytes: int, description: str | None = None) -> None:
        assert self.busy.acquire(blocking=False), "two calls at once"
        self.calls.append(("advance", nbytes, description))
        self.busy.release()

    def finish(self) -> None:
        self.calls.append(("finish", 0, None))

"""Arrays on devices as leaves, so that saving and growing read them as loading reads files: box by box."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from lazymodel._errors import LazyModelError
from lazymodel._tensors.boxes import Box, BoxKey, box_key, box_of, box_shape, intersect, shift, slabs
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.leaves import Leaf
from lazymodel._tensors.shards import in_other_memory, on_host


class DeviceLeaf(Leaf):
    """An array on devices, of which this process may hold only a part.

    Attributes:
        complete: Whether all of it is on this process's devices.
        owned: The boxes that this process is to write where several hold the array: those of its first replicas.
    """

    def __init__(self, name: str, array: jax.Array) -> None:
        self.name, self.file, self.offset, self.array = name, "", 0, array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.complete = array.is_fully_addressable
        self.owned: list[Box] = []
        self._shards: dict[BoxKey, Any] = {}
        for shard in array.addressable_shards:
            key = box_key(shard.index, self.shape)
            self._shards.setdefault(key, shard)
            if shard.replica_id == 0:
                self.owned.append(box_of(key))

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        filled = 0
        for key, shard in self._shards.items():
            common = intersect(box, box_of(key))
            if common is None:
                continue
            target = out[(*shift(common, box), ...)]
            filled += target.size
            within = shift(common, box_of(key))
            if on_host(shard.device):
                assign(target, np.asarray(shard.data)[(*within, ...)], steps)  # not a copy
                continue
            data = shard.data
            if in_other_memory(shard.device, data.sharding.memory_kind):
                data = jax.device_put(data, SingleDeviceSharding(shard.device))  # where it can be sliced
            # Copies of pieces that die here: NumPy's copy of a whole shard would stay with the array.
            for piece in slabs(target.shape, max(workspace.room // (2 * self.dtype.itemsize), 1)):
                start = [w.start + p.start for w, p in zip(within, piece, strict=True)]
                with jax.enable_x64(True) if max(start, default=0) >= 2**31 else contextlib.nullcontext():
                    values = np.asarray(_slice(data, start, box_shape(piece)))
                assign(target[(*piece, ...)], values, steps)
        if filled < out.size:
            raise LazyModelError(
                f"{self.name!r}: a part of it is on another process's devices, so it cannot be read here. With several "
                "processes, a function for saving may only use views, np.stack, np.concatenate and scalars"
            )


@functools.partial(jax.jit, static_argnums=2)
def _slice(array: jax.Array, start: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, start, shape)

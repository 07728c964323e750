"""Parts of an array that the devices of this process hold, computed once for all variables that are split alike.

Also the rules for host buffers that are given to a device; see `keeps`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._errors import LazyModelError
from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_key, box_of, box_shape, intersect, shift, slabs
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.tensor_source import TensorSource


class DeviceTensor(TensorSource):
    """An array on devices, of which this process may hold only a part.

    Attributes:
        complete: True if all of it is on this process's devices.
        owned: The boxes that this process writes if several processes hold the array: those of its first replicas.
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
                assign(target, np.asarray(shard.data)[(*within, ...)], steps)  # no copy
                continue
            data = shard.data
            if in_other_memory(shard.device, data.sharding.memory_kind):
                data = jax.device_put(data, SingleDeviceSharding(shard.device))  # where it can be sliced
            # Copies of chunks that die here: NumPy's copy of a whole shard would stay with the array.
            for chunk in slabs(target.shape, max(workspace.available // (2 * self.dtype.itemsize), 1)):
                start = [w.start + p.start for w, p in zip(within, chunk, strict=True)]
                with jax.enable_x64(True) if max(start, default=0) >= 2**31 else contextlib.nullcontext():
                    values = np.asarray(_slice(data, start, box_shape(chunk)))
                assign(target[(*chunk, ...)], values, steps)
        if filled < out.size:
            raise LazyModelError(
                f"{self.name!r}: a part of it is on the devices of another process, so it cannot be read here. With "
                "several processes, a function for saving may only use views, np.stack, np.concatenate and scalars"
            )


@functools.partial(jax.jit, static_argnums=2)
def _slice(array: jax.Array, start: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, start, shape)


# Memory of known platforms: a `"host"` platform uses the host's memory, and a buffer becomes the array's own; a
# platform with its `"own"` memory gets a copy. Other platforms are unknown: JAX passes NumPy arrays, with
# `may_alias=False` too, in a way that lets a runtime keep them (HostBufferSemantics::kImmutableZeroCopy of
# https://github.com/openxla/xla/blob/main/xla/pjrt/pjrt_client.h).
MEMORIES = {"cpu": "host", "gpu": "own", "cuda": "own", "rocm": "own", "tpu": "own"}


def on_host(device: Any) -> bool:
    """Returns True if a device uses the host's memory."""
    return MEMORIES.get(device.platform) == "host"


def keeps(device: Any, memory_kind: str | None) -> bool:
    """Returns True if an array may use the NumPy buffer from which it was made even after it is ready.

    If not, the buffer has been read completely by then, and may be overwritten. Before that it never may:
    `jax.device_put` returns before the transfer has begun.
    """
    return MEMORIES.get(device.platform) != "own" or in_other_memory(device, memory_kind)


def in_other_memory(device: Any, memory_kind: str | None) -> bool:
    """Returns True if a kind of memory is not the device's own, such as `"pinned_host"`; little is computed there."""
    return memory_kind is not None and memory_kind != device.default_memory().kind


class Boxes:
    """Parts of an array that this process's devices hold. Made once for many variables; see `boxes_for`.

    Attributes:
        devices: For each distinct box, the devices that hold it.
        sizes: Elements of each of the `boxes`.
        whole: True if together they are the whole array.
        on_host: True if all devices use the host's memory.
        keeps: True if an array may use the buffers from which it was made even after it is ready.
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]) -> None:
        self.devices: dict[BoxKey, list[Any]] = {}
        for device, index in cast(Any, sharding).addressable_devices_indices_map(shape).items():
            self.devices.setdefault(box_key(index, shape), []).append(device)
        self.boxes: list[Box] = [box_of(key) for key in self.devices]
        self.sizes = [math.prod(box_shape(box)) for box in self.boxes]
        covers = bool(self.boxes) and box_shape(bounding(self.boxes)) == shape
        self.whole = covers and sum(self.sizes) == math.prod(shape)
        everywhere = [device for devices in self.devices.values() for device in devices]
        self.on_host = all(map(on_host, everywhere))
        self.keeps = any(keeps(device, cast(Any, sharding).memory_kind) for device in everywhere)
        self._sharding, self._shape = sharding, shape
        self._numbers: dict[Any, int] = {}

    def array(self, shards: Sequence[np.ndarray], dtype: np.dtype[Any]) -> jax.Array:
        """The array with these values in its boxes. Devices that use the host's memory keep the buffers."""

        # On CPU, replicas share a shard's memory. That is safe: XLA never writes into borrowed memory, donated or not
        # (tests/core/materialize/test_stream.py checks this). One call for all devices is 7 × as fast as one each.
        def find(index: Any) -> np.ndarray:
            key = tuple([(part.start, part.stop) for part in index])
            if key not in self._numbers:
                self._numbers[key] = list(self.devices).index(box_key(index, self._shape))
            return shards[self._numbers[key]]

        return jax.make_array_from_callback(self._shape, self._sharding, find, dtype=dtype)


@functools.lru_cache(maxsize=4096)
def boxes_for(sharding: Sharding, shape: tuple[int, ...]) -> Boxes:
    """The boxes of a sharding. A model has few different ones, however many variables it has."""
    return Boxes(sharding, shape)

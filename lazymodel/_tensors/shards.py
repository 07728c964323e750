"""Which parts of an array the devices of this process hold, worked out once for all variables that are split alike.

And what becomes of a host buffer that is given to a device; see `keeps`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_key, box_of, box_shape

# What is known of platforms: a `"host"` uses the host's memory, and a buffer becomes the array's own; what has memory
# of its `"own"` gets a copy. Of others nothing is known: JAX hands NumPy arrays over, with `may_alias=False` too, in a
# way that lets a runtime keep them (HostBufferSemantics::kImmutableZeroCopy of
# https://github.com/openxla/xla/blob/main/xla/pjrt/pjrt_client.h).
MEMORIES = {"cpu": "host", "gpu": "own", "cuda": "own", "rocm": "own", "tpu": "own"}


def on_host(device: Any) -> bool:
    """Whether a device uses the host's memory."""
    return MEMORIES.get(device.platform) == "host"


def keeps(device: Any, memory_kind: str | None) -> bool:
    """Whether an array may go on using the NumPy buffer that it was made of, once it is ready.

    If not, the buffer was read completely by then, and may be written again. Until then it never may: `jax.device_put`
    returns before the transfer has begun.
    """
    return MEMORIES.get(device.platform) != "own" or in_other_memory(device, memory_kind)


def in_other_memory(device: Any, memory_kind: str | None) -> bool:
    """Whether a kind of memory is not the device's own, such as `"pinned_host"`, where little can be computed."""
    return memory_kind is not None and memory_kind != device.default_memory().kind


class Boxes:
    """Which parts of an array this process's devices hold. Made once for many variables; see `boxes_for`.

    Attributes:
        devices: Each distinct box to the devices that hold it.
        sizes: Elements of each of the `boxes`.
        whole: Whether together they are the whole array.
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
        self._on_host = all(map(on_host, everywhere))
        self._keeps = any(keeps(device, cast(Any, sharding).memory_kind) for device in everywhere)
        self._sharding, self._shape = sharding, shape
        self._numbers: dict[Any, int] = {}

    @property
    def on_host(self) -> bool:
        """Whether all devices use the host's memory."""
        return self._on_host

    @property
    def keeps(self) -> bool:
        """Whether an array may go on using the buffers that it was made of, once it is ready."""
        return self._keeps

    def array(self, shards: Sequence[np.ndarray], dtype: np.dtype[Any]) -> jax.Array:
        """The array with these values in its boxes. Devices that use the host's memory take the buffers over."""

        # On CPU replicas share a shard's memory. That is safe: XLA never writes into memory it was lent, donated or
        # not (tests/core/test_stream.py holds it to that). One call for all devices is 7 × as fast as one each.
        def find(index: Any) -> np.ndarray:
            key = tuple([(part.start, part.stop) for part in index])
            if key not in self._numbers:
                self._numbers[key] = list(self.devices).index(box_key(index, self._shape))
            return shards[self._numbers[key]]

        return jax.make_array_from_callback(self._shape, self._sharding, find, dtype=dtype)


@functools.lru_cache(maxsize=4096)
def boxes_for(sharding: Sharding, shape: tuple[int, ...]) -> Boxes:
    """The boxes of a sharding, of which models have few, however many variables they have."""
    return Boxes(sharding, shape)

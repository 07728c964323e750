"""Which parts of an array the devices of this process hold, worked out once for all variables that are split alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_key, box_of, box_shape


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
        self._on_host = all(device.platform == "cpu" for devices in self.devices.values() for device in devices)
        self._sharding, self._shape = sharding, shape
        self._numbers: dict[Any, int] = {}

    @property
    def on_host(self) -> bool:
        """Whether all devices use the host's memory."""
        return self._on_host

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

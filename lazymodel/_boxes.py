"""Which parts of an array the devices of this process hold, worked out once for all variables that are split alike."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

from jax.sharding import Sharding

from lazymodel._geometry import Box, BoxKey, bounding, box_key, box_of, box_shape


class Boxes:
    """Which parts of an array this process's devices hold. Made once for many variables; see `boxes_for`.

    Attributes:
        devices: Each distinct box to the devices that hold it.
        whole: Whether together they are the whole array.
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]) -> None:
        self.devices: dict[BoxKey, list[Any]] = {}
        for device, index in cast(Any, sharding).addressable_devices_indices_map(shape).items():
            self.devices.setdefault(box_key(index, shape), []).append(device)
        self.boxes: list[Box] = [box_of(key) for key in self.devices]
        self.sizes = [math.prod(box_shape(box)) for box in self.boxes]  # elements
        self.whole = (
            bool(self.boxes) and box_shape(bounding(self.boxes)) == shape and sum(self.sizes) == math.prod(shape)
        )
        self._on_host = all(device.platform == "cpu" for devices in self.devices.values() for device in devices)
        self._shape = shape
        self._numbers: dict[Any, int] = {}

    @property
    def on_host(self) -> bool:
        """Whether all devices use the host's memory."""
        return self._on_host

    def number(self, index: Any) -> int:
        """Which of the boxes JAX's index of a shard means."""
        key = tuple([(part.start, part.stop) for part in index])
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = list(self.devices).index(box_key(index, self._shape))
        return number


@functools.lru_cache(maxsize=4096)
def boxes_for(sharding: Sharding, shape: tuple[int, ...]) -> Boxes:
    """The boxes of a sharding, of which models have few, however many variables they have."""
    return Boxes(sharding, shape)

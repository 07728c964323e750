"""Blocks of an object that were read last. Knows nothing of where they come from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_KEPT = 128


class Blocks:
    """Blocks by number, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()

    def get(self, number: int) -> np.ndarray | None:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
            return self._blocks.get(number)

    def add(self, number: int, blocks: Sequence[np.ndarray]) -> None:
        with self._lock:
            self._blocks.update(enumerate(blocks, number))
            while len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)

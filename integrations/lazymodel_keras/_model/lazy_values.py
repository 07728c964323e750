"""The values that abstract variables will have, as lazy tensors."""

from __future__ import annotations

import math
import threading
from typing import Any

import jax
import numpy as np

from lazymodel import LazyTensor
from lazymodel._tensors.boxes import Box
from lazymodel._tensors.buffers import Convert, Workspace, assign
from lazymodel._tensors.leaves import Leaf
from lazymodel_keras import _upstream
from lazymodel_keras._record.initializers import value_on_host
from lazymodel_keras._record.recording import RecordedVariable, Recording


def lazy_value(recording: Recording, variable: Any, recorded: RecordedVariable) -> LazyTensor:
    """What was assigned to an abstract variable, in its dtype; its initial value where nothing was."""
    if recorded.value is None:
        return LazyTensor(_InitialLeaf(variable, recorded))
    return recording.as_assigned(variable.path, recorded.value, jax.numpy.dtype(_upstream.own_dtype(variable)))


# Random bits, their counters, and the values made of them: bytes for each of the result's.
_INITIALIZING = 4


class _InitialLeaf(Leaf):
    """The initial value of a variable that nothing was loaded into, computed whole when the first of it is needed."""

    def __init__(self, variable: Any, recorded: RecordedVariable) -> None:
        assert recorded.initial is not None
        self.name, self.file, self.offset = variable.path, "", 0
        self.shape, self.dtype = tuple(variable.shape), jax.numpy.dtype(_upstream.own_dtype(variable))
        self._initial = recorded.initial
        self._lock = threading.Lock()
        self._value: np.ndarray | None = None
        self.unit_nbytes = _INITIALIZING * math.prod(self.shape) * self.dtype.itemsize

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        with self._lock:
            if self._value is None:
                self._value = value_on_host(self._initial, self.shape, self.dtype.name).astype(self.dtype)
            values = self._value
        assign(out, values[(*box, ...)], steps)

    def release(self) -> None:
        with self._lock:
            self._value = None

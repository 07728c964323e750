"""How values are converted while they are read or written: casts, the same bits as another dtype, arithmetic, copies.

Knows no file and no tensor. `casting` says which casts are allowed without a request.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from lazymodel._tensors.boxes import grid, slabs, whole_box

CHAIN = 1 << 16  # elements that a chain of several conversions handles at a time
TILE = 128  # rows of a tile when transposing: writing them together fills cache lines
LINE = 8  # adjacent numbers from which on tiles are worth their calls
PADDING = 64  # bytes after a row of a tile, so that rows are in other places of a cache
TRANSPOSED = 256 << 10  # bytes of a tile when transposing: fits a core's cache, and is worth releasing the GIL for


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Elementwise arithmetic of one array and scalars: a function of NumPy and its operands, None for the array."""

    function: Any
    operands: tuple[Any, ...]

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(self.function(*(values if operand is None else operand for operand in self.operands)))


@dataclasses.dataclass(frozen=True)
class Convert:
    """One deferred elementwise conversion: a cast to `dtype`, a reinterpretation of the same bits, or arithmetic."""

    dtype: np.dtype[Any]  # dtype of the result
    bitcast: bool = False  # True if it is a reinterpretation
    function: Callable[[np.ndarray], np.ndarray] | None = None  # the arithmetic, elementwise, to `dtype`
    replaceable: bool = False  # True if a cast after it replaces it: the elements are known more precisely

    def __call__(self, values: np.ndarray) -> np.ndarray:
        if self.function is not None:
            return self.function(values)
        return values.view(self.dtype) if self.bitcast else values.astype(self.dtype)


Steps: TypeAlias = "tuple[Convert, ...]"
DType: TypeAlias = "np.dtype[Any]"
# The scalar types of JAX' dtypes that are not NumPy's own: bfloat16, integers and floats of 8 bits and less.
ML_NUMBERS = tuple(each for each in vars(ml_dtypes).values() if isinstance(each, type) and issubclass(each, np.generic))


def assign(out: np.ndarray, values: np.ndarray, steps: Steps = ()) -> None:
    """`out[...] = values`, converted step by step; bit-equal to the same chain of `ndarray.astype` and `.view`."""
    with np.errstate(all="ignore"):  # astype would warn if a value overflows, which the caller accepts
        computes = any(step.function is not None for step in steps)
        if (len(steps) > 1 or computes) and values.size > CHAIN:  # keeps temporaries small
            for box in slabs(values.shape, CHAIN):
                assign(out[(*box, ...)], values[(*box, ...)], steps)
            return
        for step in steps[:-1]:
            values = step(values)
        if steps and (steps[-1].bitcast or computes):  # a copy casts without this
            values = steps[-1](values)
        if out.dtype == values.dtype:
            out, values = _bits(out), _bits(values)
        if out.size > TILE * TILE and out.shape == values.shape:
            across, along = _fastest(out), _fastest(values)
            if across != along and min(out.shape[across], out.shape[along]) >= LINE:
                _transpose(out, values, across, along)
                return
        np.copyto(out, values, casting="unsafe")


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns the array, or an integer view of it: ml_dtypes' copy loops are slow for strided arrays, those of integers
    are not.
    """
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.itemsize}")


def _fastest(array: np.ndarray) -> int:
    """The axis with the smallest stride."""
    axes = (axis for axis in range(array.ndim) if array.shape[axis] > 1)
    return min(axes, key=lambda axis: abs(array.strides[axis]))


def _transpose(out: np.ndarray, values: np.ndarray, across: int, along: int) -> None:
    """`out[...] = values`, where `out` is densest along the axis `across` and `values` along `along`.

    Copies through tiles whose rows are padded. Without the padding, rows whose length is a power of two would compete
    for the same few places in a cache. Casts, which are fast only for dense arrays, are done while a tile is filled.
    """
    others = [axis for axis in range(out.ndim) if axis not in (across, along)]
    extents = [1] * out.ndim
    for axis, most in ((across, TILE), (along, out.size), *((axis, out.size) for axis in reversed(others))):
        extents[axis] = min(out.shape[axis], most, max(TRANSPOSED // (out.itemsize * math.prod(extents)), 1))
    order = [*others, across, along]
    padded = np.empty([extents[axis] + (axis == along) * PADDING // out.itemsize for axis in order], out.dtype)
    padded = padded.transpose(np.argsort(order))
    for box in grid(whole_box(out.shape), extents):
        tile = padded[tuple(slice(part.stop - part.start) for part in box)]
        np.copyto(tile, values[box], casting="unsafe")
        np.copyto(_bits(out[box]), _bits(tile))

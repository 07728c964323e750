"""Statistics of what is no array on devices yet: read, or initialized, one variable at a time, measured on the host.

A variable is held whole, in the type that sums are computed in, only where its spectral norm is wanted. All else is
done block by block, while a block is in the caches.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np

from lazymodel._statistics.result import BREAKDOWN, ITERATIONS, VariableStatistics, cut
from lazymodel._tensors.boxes import Box, box_shape, slabs, whole_box
from lazymodel._tensors.buffers import Workspace, cores, empty_aligned
from lazymodel._tensors.fill import fill, fill_parts
from lazymodel._tensors.lazy import LazyTensor

_BLOCK = 1 << 16  # elements that are summed at once
_SLAB = 1 << 22  # elements that a thread reads at once, where a variable is not held
_PRODUCT = 1 << 18  # elements that are multiplied from both sides while they are in the caches
_WORKSPACE = 16 << 20  # bytes of temporaries of a thread that reads
_SQUARED = (1e-9, 1e9)  # sizes of numbers whose squares, and sums of billions of them, float32 has

_Array: TypeAlias = "np.ndarray[Any, Any]"
_T = TypeVar("_T")
_R = TypeVar("_R")


def host_rows(path: str, tensor: LazyTensor, *, layered: bool, spectral: bool) -> Iterator[VariableStatistics]:
    """A variable's statistics, or those of each of its layers."""
    dtype, parts = tensor.dtype.name, [tensor]
    if layered:
        parts = [tensor[index] for index in range(tensor.shape[0])]
    for index, part in enumerate(parts):
        (_, mean, std, low, high, nonfinite), norm = _measured(part, spectral=spectral)
        name = f"{path}[{index}]" if layered else path
        yield VariableStatistics(name, tuple(part.shape), dtype, mean, std, low, high, norm, nonfinite)
    tensor.leaf.release()


class _Numbers(NamedTuple):
    """Of what is finite: how many, mean, deviation, smallest, largest (exact for integers); and how many are not."""

    size: int
    mean: float
    std: float
    low: float
    high: float
    nonfinite: int


def _measured(tensor: LazyTensor, *, spectral: bool) -> tuple[_Numbers, float | None]:
    floating = jnp.issubdtype(tensor.dtype, np.floating)
    if floating:
        tensor = tensor.astype(np.dtype(np.float64 if tensor.dtype.itemsize >= 8 else np.float32))
    elif tensor.dtype.kind not in "iuc":  # truth values, and integers of less than a byte
        tensor = tensor.astype(np.dtype(np.int8))
    if spectral and tensor.ndim > 1 and floating and tensor.size:
        values = _read(tensor).reshape(-1)
        starts = range(0, values.size, _SLAB)
        numbers = _merged(_each(lambda start: _numbers(values[start : start + _SLAB]), starts))
        if numbers.nonfinite:
            np.nan_to_num(values, copy=False, nan=0, posinf=0, neginf=0)  # would make everything else so
        rows = int(np.prod(tensor.shape[: cut(tensor.shape)]))
        scale = _scale(numbers.low, numbers.high) if numbers.size else 1.0
        if scale != 1:
            values /= values.dtype.type(scale)
        return numbers, scale * _largest(values.reshape(rows, -1))

    def slab(box: Box) -> _Numbers:
        values = empty_aligned(box_shape(box), tensor.dtype)
        fill(tensor, [box], [values], Workspace(_WORKSPACE))
        return _numbers((np.abs(values) if tensor.dtype.kind == "c" else values).reshape(-1))

    return _merged(_each(slab, slabs(tensor.shape, _SLAB))), None


def _read(tensor: LazyTensor) -> _Array:
    values = empty_aligned(tensor.shape, tensor.dtype)
    local = threading.local()

    def run(part: Any) -> None:
        if not hasattr(local, "workspace"):
            local.workspace = Workspace(_WORKSPACE)
        part.run(local.workspace)

    _each(run, fill_parts(tensor, [whole_box(tensor.shape)], [values]))
    return values


def _each(function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """`function` of each, by all cores."""
    items = list(items)
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(cores(), thread_name_prefix="lazymodel-statistics") as pool:
        return list(pool.map(function, items))


def _numbers(values: _Array) -> _Numbers:
    return _merged([_of_block(values[start : start + _BLOCK]) for start in range(0, values.size, _BLOCK)])


def _of_block(values: _Array) -> _Numbers:
    low, high = values.min(), values.max()
    nonfinite = 0
    if not np.isfinite(low) or not np.isfinite(high):
        finite = values[np.isfinite(values)]
        nonfinite, values = values.size - finite.size, finite
        if not values.size:
            return _Numbers(0, math.nan, math.nan, math.inf, -math.inf, nonfinite)
        low, high = values.min(), values.max()
    scale = _scale(float(low), float(high))
    low, high = low.item(), high.item()
    if values.dtype.kind in "iu":
        values = values.astype(np.float64)
    if scale != 1:
        values = values / values.dtype.type(scale)
    mean = values.mean()
    rest = values - mean
    std = math.sqrt(float(np.dot(rest, rest)) / values.size)
    return _Numbers(values.size, scale * float(mean), scale * std, low, high, nonfinite)


def _scale(low: float, high: float) -> float:
    """What numbers between these are divided by, so that no square of theirs, nor a sum, leaves float32's range."""
    size = max(abs(low), abs(high))
    return 1.0 if not size or _SQUARED[0] < size < _SQUARED[1] else 2.0 ** (math.frexp(size)[1] - 1)


def _merged(parts: list[_Numbers]) -> _Numbers:
    """The numbers of parts as those of all (Chan, Golub and LeVeque 1979)."""
    nonfinite = sum(part.nonfinite for part in parts)
    some = [part for part in parts if part.size]
    if not some:
        return _Numbers(0, math.nan, math.nan, math.inf, -math.inf, nonfinite)
    low, high = min(part.low for part in some), max(part.high for part in some)
    counts, means, deviations = (np.array([part[index] for part in some], np.float64) for index in range(3))
    weights, scale = counts / counts.sum(), _scale(low, high)
    mean = float(weights @ means)
    square = weights @ (np.square(deviations / scale) + np.square((means - mean) / scale))
    return _Numbers(int(counts.sum()), mean, scale * math.sqrt(square), low, high, nonfinite)


def _largest(matrix: _Array) -> float:
    """The largest singular value, by Lanczos' process on the matrix times its transpose: one pass a product."""
    if matrix.shape[1] > matrix.shape[0]:
        matrix = matrix.T
    step = max(_PRODUCT // matrix.shape[1], 1)
    blocks = [matrix[start : start + step] for start in range(0, matrix.shape[0], step)]
    v = np.random.default_rng(0).standard_normal(matrix.shape[1]).astype(matrix.dtype)
    v /= np.linalg.norm(v)
    before, beta, alphas, betas = np.zeros_like(v), 0.0, list[float](), list[float]()
    for _ in range(min(ITERATIONS, matrix.shape[1])):
        w = functools.reduce(np.add, ((block @ v) @ block for block in blocks))
        alphas.append(float(w @ v))
        w -= matrix.dtype.type(alphas[-1]) * v + matrix.dtype.type(beta) * before
        beta = float(np.linalg.norm(w))
        if beta <= BREAKDOWN * max(*alphas, *betas, 0):
            break
        betas.append(beta)
        before, v = v, w / matrix.dtype.type(beta)
    off = betas[: len(alphas) - 1]
    values = np.linalg.eigvalsh(np.diag(alphas) + np.diag(off, 1) + np.diag(off, -1))
    return float(np.sqrt(max(values[-1], 0)))

"""Statistics of what is no array on devices yet: read, or initialized, one variable at a time, measured on the host.

A variable is held whole, in the type that sums are computed in, only where its spectral norm is wanted. All else is
done block by block, while a block is in the caches.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

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

_Array: TypeAlias = "np.ndarray[Any, Any]"
_T = TypeVar("_T")
_R = TypeVar("_R")


def host_rows(path: str, tensor: LazyTensor, *, layered: bool, spectral: bool) -> Iterator[VariableStatistics]:
    """A variable's statistics, or those of each of its layers."""
    dtype, parts = tensor.dtype.name, [tensor]
    if layered:
        parts = [tensor[index] for index in range(tensor.shape[0])]
    for index, part in enumerate(parts):
        numbers, norm = _measured(part, spectral=spectral)
        count, mean, square, low, high, nonfinite = numbers
        with np.errstate(invalid="ignore", divide="ignore"):
            std = float(np.sqrt(np.float64(square) / count))
        name = f"{path}[{index}]" if layered else path
        yield VariableStatistics(name, tuple(part.shape), dtype, mean, std, low, high, norm, int(nonfinite))
    tensor.leaf.release()


def _measured(tensor: LazyTensor, *, spectral: bool) -> tuple[_Array, float | None]:
    complex_ = jnp.issubdtype(tensor.dtype, np.complexfloating)
    wide = tensor.dtype.itemsize == (16 if complex_ else 8)
    dtype = np.dtype(np.float64 if wide else np.float32)
    if spectral and tensor.ndim > 1 and jnp.issubdtype(tensor.dtype, np.floating):
        values = _read(tensor.astype(dtype)).reshape(-1)
        starts = range(0, values.size, _SLAB)
        numbers = _merged(_each(lambda start: _numbers(values[start : start + _SLAB]), starts))
        if numbers[-1]:
            np.nan_to_num(values, copy=False, nan=0, posinf=0, neginf=0)  # would make everything else so
        rows = int(np.prod(tensor.shape[: cut(tensor.shape)]))
        return numbers, _largest(values.reshape(rows, -1))

    def slab(box: Box) -> _Array:
        values = empty_aligned(box_shape(box), tensor.dtype if complex_ else dtype)
        fill(tensor if complex_ else tensor.astype(dtype), [box], [values], Workspace(_WORKSPACE))
        return _numbers(np.abs(values).reshape(-1) if complex_ else values.reshape(-1))

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


def _numbers(values: _Array) -> _Array:
    """How many are finite, their mean, their squared deviations' sum, the smallest, the largest; how many are not."""
    return _merged([_of_block(values[start : start + _BLOCK]) for start in range(0, values.size, _BLOCK)])


def _of_block(values: _Array) -> _Array:
    low, high = values.min(), values.max()
    nonfinite = 0
    if not np.isfinite(low) or not np.isfinite(high):
        finite = values[np.isfinite(values)]
        nonfinite, values = values.size - finite.size, finite
        if not values.size:
            return np.array([0, np.nan, 0, np.inf, -np.inf, nonfinite])
        low, high = values.min(), values.max()
    mean = values.mean()
    rest = values - mean
    return np.array([values.size, mean, np.dot(rest, rest), low, high, nonfinite], np.float64)


def _merged(parts: list[_Array]) -> _Array:
    """The numbers of parts as those of all (Chan, Golub and LeVeque 1979)."""
    found = np.array(parts)
    count, nonfinite = found[:, 0].sum(), found[:, 5].sum()
    some = found[found[:, 0] > 0]
    if not len(some):
        return np.array([0, np.nan, np.nan, np.inf, -np.inf, nonfinite])
    mean = some[:, 0] @ some[:, 1] / count
    square = some[:, 2].sum() + some[:, 0] @ np.square(some[:, 1] - mean)
    return np.array([count, mean, square, some[:, 3].min(), some[:, 4].max(), nonfinite])


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

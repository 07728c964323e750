"""The method `statistics`: mean, deviation, range and spectral norm of every variable of a model.

Responsible for measuring values (arrays on devices at their shards, all others on the host, one variable at a time),
and for showing the results: a table, a figure over depth, a dict.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import device_shardings, in_memory, is_offloaded, named_arrays
from lazymodel._devices.hardware import require_live
from lazymodel._errors import LazyModelError
from lazymodel._mapping.resolve import opened, prepare_load
from lazymodel._materialize.materialize import stream
from lazymodel._programs.jaxprs import PROGRAMS, is_key, uses_x64, without_mesh
from lazymodel._show.depth import LAYER, drawn_over_depth, measured, values_over_depth
from lazymodel._show.progress import ProgressTo, progress_for, reported
from lazymodel._show.table import Column, Table, Tabled, plain, shape_text
from lazymodel._show.text import closest, plural
from lazymodel._tensors.boxes import Box, box_shape, slabs, whole_box
from lazymodel._tensors.buffers import Scratch, cores, empty_aligned, parallel
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import on_host
from lazymodel._tensors.tensor_source import fill, fill_parts

# Iterations of Lanczos' process: the largest singular value of a random matrix to about 1e-3.
ITERATIONS = 24
BREAKDOWN = 1e-6  # if a residual is this small relative to the norm so far, the rest of the process is rounding
_LISTED = 60  # variables with numbers that are not finite


@dataclasses.dataclass(frozen=True)
class VariableStatistics:
    """Statistics of one variable; for complex numbers, statistics of their absolute values |z|.

    Attributes:
        path: Its path; with `[i]` at the end for one layer of a stack.
        shape: Its shape, without the axis of layers.
        dtype: Its dtype.
        mean: Mean of its elements.
        std: Standard deviation of its elements (the population's: divided by their number).
        min: Smallest element; an exact int for integers.
        max: Largest element, likewise.
        spectral_norm: Largest singular value of the variable as a matrix; None if it has fewer than two dimensions or
            is not a float.
        nonfinite: Number of elements that are NaN or infinite; the other statistics leave them out.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    std: float
    min: float
    max: float
    spectral_norm: float | None
    nonfinite: int

    @property
    def layer(self) -> int | None:
        """The first number that is a part of the path, or ends one: its depth; None without a number."""
        found = LAYER.search(self.path)
        return None if found is None else int(found[1])


# `layers/3/kernel`, `layer_3/kernel`, `layer.3.weight`, `kernel[3]`
_MEASURES = ("mean", "std", "min", "max", "spectral_norm")


class Statistics(Tabled, dict[str, VariableStatistics]):
    """Statistics by path; prints as a table, folded over layers. Made by `statistics`."""

    def __missing__(self, path: str) -> VariableStatistics:
        raise KeyError(f"there are no statistics of {path!r}{closest(path, self)}")

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Path → name of the statistic → value, in types of JSON (except NaN and infinity)."""
        return plain(dict(self))

    def over_depth(self, measure: str = "std") -> dict[str, dict[int, float]]:
        """One statistic over depth: folded path → layer → value, for paths that occur in two layers or more.

        Raises:
            LazyModelError: `measure` is not a statistic.
        """
        if measure not in _MEASURES:
            raise LazyModelError(f"a statistic is one of {', '.join(_MEASURES)}; got {measure!r}")
        return values_over_depth({path: getattr(row, measure) for path, row in self.items()})

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws standard deviation and spectral norm over depth, a line for each kind of variable; needs matplotlib.

        Args:
            path: File to save the figure to, such as `"statistics.png"`; None does not save it.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            LazyModelError: No path has a layer's number in it, or matplotlib is not installed.
        """
        panels = {"standard deviation": self.over_depth("std"), "spectral norm": self.over_depth("spectral_norm")}
        return drawn_over_depth(panels, path)

    def table(self) -> Table:
        """A row for variables that differ only in numbers of their paths."""
        cells = [
            (row.path, *(getattr(row, measure) for measure in _MEASURES), row.dtype, shape_text(row.shape))
            for row in self.values()
        ]
        measures = map(measured, ("mean", "std", "min", "max", "spectral"))
        columns = (Column.names("variable"), *measures, Column("dtype"), Column("shape"))
        spoiled = [row for row in self.values() if row.nonfinite][:_LISTED]
        lines = [f"not finite: {plural(row.nonfinite, 'element')} of {row.path}" for row in spoiled]
        return Table(f"statistics of {plural(len(self), 'variable')}", columns, cells, lines)


def cut(shape: Sequence[int]) -> int:
    """The axis at which an array is split into the two sides of a matrix: as close to square as its axes allow."""
    return min(range(1, len(shape)), key=lambda cut: math.prod(shape[:cut]) + math.prod(shape[cut:]))


# Statistics of arrays on devices, computed where their shards are.
#
# Nothing is gathered: sums are added up over the devices, and a matrix is only multiplied by vectors. There is one
# compiled program for each shape, dtype and sharding.


def _measured_on_devices(array: jax.Array, *, layered: bool, spectral: bool) -> Iterator[_Measured]:
    if is_offloaded(array.sharding):  # compute on its devices
        array = jax.device_put(array, in_memory(array.sharding, None, ""))
    everywhere = None
    if isinstance(array.sharding, NamedSharding):  # on explicit axes, every sum would need its own sharding
        own: Any = array.sharding.mesh
        mesh, shards = Mesh(own.devices, own.axis_names), [shard.data for shard in array.addressable_shards]
        automatic = NamedSharding(mesh, array.sharding.spec)
        array = jax.make_array_from_single_device_arrays(array.shape, automatic, shards)
        everywhere = NamedSharding(mesh, PartitionSpec())
    with without_mesh(), jax.enable_x64(True) if array.dtype.itemsize == 8 else jax.enable_x64(uses_x64()):
        measured = jax.device_get(_program(layered, spectral, everywhere)(array))
    for index in range(array.shape[0] if layered else 1):
        *numbers, bidiagonal = (None if part is None else part[index] if layered else part for part in measured)
        exponent, mean, std, low, high, nonfinite = (cast(Any, number).item() for number in numbers)
        norm = None if bidiagonal is None else math.ldexp(_largest_singular_value(bidiagonal), exponent)
        mean = (_offset(low, high) if math.isfinite(mean) else 0) + math.ldexp(mean, exponent)
        yield _Numbers(1, mean, math.ldexp(std, exponent), low, high, nonfinite), norm


def _program(layered: bool, spectral: bool, everywhere: NamedSharding | None) -> Any:
    """A program, compiled once for each shape, dtype and sharding of its argument; results are on every device."""

    def measure(values: jax.Array) -> tuple[jax.Array | None, ...]:
        matrix = values.ndim > 1 and jnp.issubdtype(values.dtype, np.floating)
        exponent, *numbers = _device_numbers(values)
        return exponent, *numbers, _bidiagonal(_computed(values, exponent)) if spectral and matrix else None

    key = ("statistics", layered, spectral, everywhere)
    return PROGRAMS.get(key, lambda: jax.jit(jax.vmap(measure) if layered else measure, out_shardings=everywhere))


def _computed(values: jax.Array, exponent: Any) -> jax.Array:
    """The values divided by a power of two, in the dtype of sums."""
    values = values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
    return values * jnp.ldexp(jnp.ones((), values.dtype), -exponent)


def _offset(low: Any, high: Any) -> Any:
    """What is subtracted before sums, so that they do not round the difference of values that are far from zero."""
    return low if low > 0 else high if high < 0 else 0


def _device_numbers(values: jax.Array) -> Sequence[jax.Array]:
    """An exponent of two; mean, from the offset on, and deviation of the finite elements, divided by that power; the
    smallest and largest element; the number of elements that are not finite.

    The power is that of the largest absolute value, so that no square or sum exceeds the range of the type.
    """
    values = jnp.abs(values) if jnp.issubdtype(values.dtype, np.complexfloating) else values
    wide = np.float64 if values.dtype.itemsize == 8 else np.float32
    if jnp.issubdtype(values.dtype, np.floating):
        values, most, least = values.astype(wide), np.inf, -np.inf
    else:  # sums of booleans, and of integers of less than a byte
        values = values.astype(np.int32) if values.dtype.itemsize == 1 else values
        info = jnp.iinfo(values.dtype)
        most, least = np.array(info.max, info.dtype), np.array(info.min, info.dtype)
    finite = jnp.isfinite(values)
    low, high = jnp.min(values, initial=most, where=finite), jnp.max(values, initial=least, where=finite)
    size = jnp.maximum(jnp.abs(low.astype(wide)), jnp.abs(high.astype(wide)))
    usable = jnp.isfinite(size) & (size > 0)
    limit = -int(jnp.finfo(wide).minexp)  # a power whose inverse is a normal number
    exponent = jnp.where(usable, jnp.clip(jnp.frexp(jnp.where(usable, size, 1))[1] - 1, -limit, limit), 0)
    offset = jnp.where(low > 0, low, jnp.where(high < 0, high, jnp.zeros((), values.dtype)))
    scaled = _computed(values - jnp.where(usable, offset, jnp.zeros((), values.dtype)), exponent)
    count = _sum(finite.astype(wide))
    mean = _sum(jnp.where(finite, scaled, 0)) / count
    square = _sum(jnp.where(finite, jnp.square(scaled - mean), 0)) / count
    nonfinite = jnp.sum(~finite, dtype=np.uint32)
    return exponent, mean, jnp.sqrt(square), low, high, nonfinite


def _sum(values: jax.Array) -> jax.Array:
    """A sum, one axis at a time: float32 loses digits in a single chain of a billion additions."""
    for _ in range(values.ndim):
        # Without the barrier XLA would merge the sums into one.
        values = jax.lax.optimization_barrier(jnp.sum(values, axis=-1))
    return values


def _bidiagonal(values: jax.Array) -> jax.Array:
    """The diagonal and the superdiagonal of Golub and Kahan's bidiagonalization, stacked: (2, iterations)."""
    axis = cut(values.shape)
    left, right = values.shape[:axis], values.shape[axis:]
    iterations = min(ITERATIONS, math.prod(left), math.prod(right))
    # A value that is not finite would make all results not finite.
    values = jnp.where(jnp.isfinite(values), values, 0)

    # Products and sums rather than `dot`, which would need a copy of the matrix in its own type, and compiles for
    # seconds on CPUs. It costs nothing: a matrix times a vector takes as long as reading the matrix.
    def times(vector: jax.Array) -> jax.Array:
        return jnp.sum(values * vector, axis=tuple(range(axis, values.ndim)))

    def transposed_times(vector: jax.Array) -> jax.Array:
        return jnp.sum(values * vector.reshape(*left, *(1,) * len(right)), axis=tuple(range(axis)))

    def unit(vector: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        norm = jnp.sqrt(jnp.sum(jnp.square(vector)))
        usable = norm > BREAKDOWN * scale
        return jnp.where(usable, vector / jnp.where(usable, norm, 1), 0), jnp.where(usable, norm, 0)

    v, _ = unit(jax.random.normal(jax.random.key(0), right, values.dtype), 0)
    u, alpha = unit(times(v), 0)

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        u, v, alpha, scale = carry
        v, beta = unit(transposed_times(u) - alpha * v, scale)
        scale = jnp.maximum(scale, beta)
        u, following = unit(times(v) - beta * u, scale)
        return (u, v, following, jnp.maximum(scale, following)), (alpha, beta)

    _, (alphas, betas) = jax.lax.scan(step, (u, v, alpha, alpha), None, length=iterations)
    return jnp.stack([alphas, betas])


def _largest_singular_value(bidiagonal: np.ndarray[Any, Any]) -> float:
    alphas, betas = bidiagonal.astype(np.float64)
    matrix = np.pad(np.diag(alphas), ((0, 0), (0, 1)))
    matrix += np.pad(np.diag(betas), ((0, 0), (1, 0)))
    return float(np.linalg.norm(matrix, 2))


# Statistics of values that are not arrays on devices yet: read, or initialized, one variable at a time, on the host.
#
# A variable is held whole, in the dtype of its spectral norm, only if that is requested. Everything else is computed
# block by block, while a block is in the caches, in float64.


_BLOCK = 1 << 16  # elements that are summed at once
_CHUNK = 1 << 22  # elements that a thread reads at once, if a variable is not held
_PRODUCT = 1 << 18  # elements that are multiplied from both sides while they are in the caches
_WORKSPACE = 16 << 20  # bytes of temporaries of a thread that reads

_Array: TypeAlias = "np.ndarray[Any, Any]"
_T = TypeVar("_T")
_R = TypeVar("_R")


class _Numbers(NamedTuple):
    """Statistics of finite elements: count, mean, deviation, smallest, largest (exact for integers); and the count of
    the others.
    """

    size: int
    mean: float
    std: float
    low: float
    high: float
    nonfinite: int


_Measured: TypeAlias = "tuple[_Numbers, float | None]"


def _measured_on_host(tensor: LazyTensor, *, spectral: bool) -> _Measured:
    floating = jnp.issubdtype(tensor.dtype, np.floating)
    if floating:
        tensor = tensor.astype(np.dtype(np.float64 if tensor.dtype.itemsize >= 8 else np.float32))
    elif tensor.dtype.kind not in "iuc":  # booleans, and integers of less than a byte
        tensor = tensor.astype(np.dtype(np.int8))
    scratch = Scratch(_WORKSPACE)
    if spectral and tensor.ndim > 1 and floating and tensor.size:
        values = empty_aligned(tensor.shape, tensor.dtype)
        _each(lambda part: part.run(scratch.workspace), fill_parts(tensor, [whole_box(tensor.shape)], [values]))
        values = values.reshape(-1)
        starts = range(0, values.size, _CHUNK)
        numbers = _merged(_each(lambda start: _of_chunk(values[start : start + _CHUNK]), starts))
        if numbers.nonfinite:
            np.nan_to_num(values, copy=False, nan=0, posinf=0, neginf=0)  # would make all results not finite
        # Squares, and sums of billions of these, stay in the range of float32.
        scale = (max(abs(numbers.low), abs(numbers.high)) if numbers.size else 0) or 1.0
        values /= values.dtype.type(scale)
        return numbers, scale * _largest(values.reshape(math.prod(tensor.shape[: cut(tensor.shape)]), -1))

    def chunk(box: Box) -> _Numbers:
        values = empty_aligned(box_shape(box), tensor.dtype)
        fill(tensor, [box], [values], scratch.workspace)
        return _of_chunk((np.abs(values) if tensor.dtype.kind == "c" else values).reshape(-1))

    return _merged(_each(chunk, slabs(tensor.shape, _CHUNK))), None


def _each(function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Results of `function` for all items, on all cores."""
    with parallel(function, items, cores(), "statistics") as results:
        return list(results)


def _of_chunk(values: _Array) -> _Numbers:
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
    wide = values.astype(np.float64)
    power = int(np.frexp(max(abs(float(low)), abs(float(high))))[1])
    power = power if abs(power) > 400 else 0  # squares and sums stay in the range of float64
    wide = np.ldexp(wide, -power, out=wide) if power else wide
    mean = float(wide.mean())
    wide -= mean
    np.square(wide, out=wide)  # not a dot product, for which BLAS would start threads in each of these threads
    mean, std = (math.ldexp(each, power) for each in (mean, math.sqrt(wide.mean())))
    return _Numbers(values.size, mean, std, low.item(), high.item(), nonfinite)


def _merged(parts: list[_Numbers]) -> _Numbers:
    """The numbers of several parts, merged into those of the whole (Chan, Golub and LeVeque 1979)."""
    nonfinite = sum(part.nonfinite for part in parts)
    some = [part for part in parts if part.size]
    if not some:
        return _Numbers(0, math.nan, math.nan, math.inf, -math.inf, nonfinite)
    counts, means, deviations = (np.array([part[index] for part in some], np.float64) for index in range(3))
    weights = counts / counts.sum()
    mean = float(weights @ means)
    spread = np.hypot(deviations, means - mean)
    most = float(spread.max()) or 1.0
    std = most * math.sqrt(weights @ np.square(spread / most))
    low, high = min(part.low for part in some), max(part.high for part in some)
    return _Numbers(int(counts.sum()), mean, std, low, high, nonfinite)


def _largest(matrix: _Array) -> float:
    """The largest singular value, by Lanczos' process on the matrix times its transpose: one pass per product."""
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


def statistics(
    model: Any,
    checkpoint: Any = None,
    *,
    stacked: str | None = None,
    spectral: bool = True,
    progress: ProgressTo = None,
) -> Statistics:
    """Measures every variable of a model; those of an abstract model, also quantized, as `materialize` creates them.

    JAX arrays are measured where they are; nothing is gathered or moved. Values that do not exist yet, a checkpoint's
    tensors and the variables of an abstract model, are read or initialized one variable at a time and then dropped, so
    the model may be larger than the machine: on CPUs, the host holds the largest variable once while it is measured, in
    the dtype of sums. Variables initialized in one program (see `stream`) take more.

    The spectral norm is that of the variable as a matrix. With more than two dimensions, it is split between the two
    neighbouring axes that make the matrix closest to square: (embed, heads, size) is embed × (heads size), and a
    convolution's (3, 3, in, out) is (9 in) × out. It is found by Lanczos' process (power iteration that keeps earlier
    vectors: Golub and Kahan 1965), from below, to about 1e-3 of its value, in 24 products with the matrix and 24
    with its transpose.

    Complex numbers are measured by their absolute values |z|. An array without elements has a mean and a deviation of
    NaN. For JAX arrays, sums are in float32, or in float64 for float64 variables, of numbers scaled so that no square
    leaves the range, and temporaries on a device are up to five times the largest shard in that dtype (on CPUs, whose
    compiler writes the terms of each sum to memory). Subnormal numbers are zeros there, as XLA:CPU and TPUs compute.
    If several processes share the arrays, all of them must call this, and all get the result.

    Args:
        model: An abstract model; a model of a known framework, an open checkpoint, a mapping of path to array, or any
            pytree of arrays. PRNG keys are omitted.
        checkpoint: For an abstract model, as for `materialize`: missing variables are initialized.
        stacked: Path regex (`re.fullmatch`) of variables that hold all layers along their first axis, as in scanned
            models: each layer is measured separately.
        spectral: True computes spectral norms, which take a third of the time for initialized values, and
            most of the time for values that are read.
        progress: As for `materialize`, in bytes of variables.

    Returns:
        Statistics by path, in the model's order.

    Raises:
        LazyModelError: There is nothing to measure, `stacked` matches nothing, a checkpoint is given for a model that
            is not abstract, or a variable of one, such as some optimizer state, is computed from the values of others.
        CheckpointError: As for `materialize`.

    Example:
        >>> found = lm.statistics({"layers": [{"scale": jax.numpy.full((4,), i)} for i in (1.0, 3.0)]})
        >>> found["layers/1/scale"].mean, found.over_depth("mean")
        (3.0, {'layers/{layer}/scale': {0: 1.0, 1: 3.0}})
        >>> abs(lm.statistics(abstract)["up/kernel"].std - 1) < 0.01  # never materialized
        True
    """
    shapes, arrays = _measurable(model, checkpoint)
    shapes = {path: array for path, array in shapes.items() if not is_key(array.dtype)}
    if not shapes:
        raise LazyModelError(f"there are no arrays in {type(model).__name__} to measure")
    layered: set[str] = set()
    if stacked is not None:
        layered = {path for path, variable in shapes.items() if re.fullmatch(stacked, path) and len(variable.shape)}
        if not layered:
            raise LazyModelError(f"stacked={stacked!r} matches no variable{closest(stacked, shapes)}")
    bar = progress_for(progress)
    total, found = sum(variable.nbytes for variable in shapes.values()), dict[str, list[VariableStatistics]]()
    with reported(bar, total, f"measuring {len(shapes)} variables"):
        for path, array in arrays:
            if path in shapes:
                found[path] = list(_rows(path, array, path in layered, spectral=spectral))
                bar.advance(shapes[path].nbytes, path)
            del array  # before the next one of a stream comes
    return Statistics((row.path, row) for path in shapes for row in found[path])


def _rows(path: str, array: Any, layered: bool, *, spectral: bool) -> Iterator[VariableStatistics]:
    """The statistics of a variable, or of each of its layers."""
    if isinstance(array, jax.Array) and array.size:
        measured = _measured_on_devices(array, layered=layered, spectral=spectral)
    else:
        tensor = lazy(np.empty(array.shape, array.dtype) if isinstance(array, jax.Array) else array, path)
        parts = [tensor[index] for index in range(tensor.shape[0])] if layered else [tensor]
        measured = [_measured_on_host(part, spectral=spectral) for part in parts]
        tensor.source.release()
    shape, dtype = tuple(array.shape), np.dtype(array.dtype).name
    for index, (each, norm) in enumerate(measured):
        name, own = (f"{path}[{index}]", shape[1:]) if layered else (path, shape)
        yield VariableStatistics(name, own, dtype, each.mean, each.std, each.low, each.high, norm, each.nonfinite)


def _measurable(
    model: Any, checkpoint: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], Iterable[tuple[str, Any]]]:
    """Returns all that may be measured, and the arrays or lazy tensors, in any order."""
    model = opened(model)
    if not isinstance(model, ModelSpec):
        if checkpoint is not None:
            raise LazyModelError(
                f"a checkpoint is measured by itself, or as what an abstract model makes of it; got one for "
                f"{type(model).__name__}"
            )
        arrays = named_arrays(model)
        return arrays, arrays.items()
    require_live(model.variables)
    devices = {device for sharding in device_shardings(model.variables).values() for device in sharding.device_set}
    if model.conversions or not all(map(on_host, devices)):
        return model, stream(model, checkpoint)
    return model, prepare_load(model, checkpoint).lazy_values().items()

"""Statistics of arrays on devices, computed where their shards are.

Nothing is gathered: sums are added up over the devices, and a matrix is only ever multiplied by vectors. There is one
compiled program for each shape, dtype and sharding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._abstract.memory import in_memory, is_offloaded
from lazymodel._programs.jaxprs import uses_x64
from lazymodel._statistics.result import BREAKDOWN, ITERATIONS, VariableStatistics, cut


def dispatched(array: jax.Array, *, layered: bool, spectral: bool) -> Any:
    """Dispatches the program of an array; its results are not waited for."""
    if is_offloaded(array.sharding):  # it is computed with on its devices
        array = jax.device_put(array, in_memory(array.sharding, None, ""))
    values = _unplaced(array)
    sharding = values.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    with jax.enable_x64(True) if values.dtype.itemsize == 8 else jax.enable_x64(uses_x64()):
        return _program(layered, spectral, everywhere)(values)


def _unplaced(array: jax.Array) -> jax.Array:
    """The same array on a mesh of automatic axes: on explicit ones every sum would want a sharding of its own."""
    if not isinstance(array.sharding, NamedSharding):
        return array
    mesh: Any = array.sharding.mesh
    plain = NamedSharding(Mesh(mesh.devices, mesh.axis_names), array.sharding.spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, plain, shards)


def device_rows(path: str, array: jax.Array, measured: Any, *, layered: bool) -> Iterator[VariableStatistics]:
    """An array's statistics, or those of each of its layers, of what its program found."""
    found = [None if part is None else np.asarray(part) for part in measured]
    shape, dtype = tuple(array.shape), np.dtype(array.dtype).name
    names = [path]
    if layered:
        names, shape = [f"{path}[{index}]" for index in range(shape[0])], shape[1:]
    else:
        found = [None if part is None else part[None] for part in found]
    for index, name in enumerate(names):
        *numbers, bidiagonal = (None if part is None else part[index] for part in found)
        exponent, mean, std, low, high, nonfinite = (cast(Any, number).item() for number in numbers)
        mean, std = math.ldexp(mean, exponent), math.ldexp(std, exponent)
        norm = None if bidiagonal is None else math.ldexp(_largest(bidiagonal), exponent)
        yield VariableStatistics(name, shape, dtype, mean, std, low, high, norm, nonfinite)


@functools.lru_cache(maxsize=64)
def _program(layered: bool, spectral: bool, everywhere: NamedSharding | None) -> Any:
    """Compiled once for each shape, dtype and sharding that it is called with; results are on every device."""

    def measure(values: jax.Array) -> tuple[jax.Array | None, ...]:
        matrix = values.ndim > 1 and jnp.issubdtype(values.dtype, np.floating)
        exponent, *numbers = _numbers(values)
        return exponent, *numbers, _bidiagonal(_computed(values, exponent)) if spectral and matrix else None

    return jax.jit(jax.vmap(measure) if layered else measure, out_shardings=everywhere)


def _computed(values: jax.Array, exponent: Any) -> jax.Array:
    """As what sums are computed in, divided by a power of two."""
    values = values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
    return values * jnp.ldexp(jnp.ones((), values.dtype), -exponent)


def _numbers(values: jax.Array) -> Sequence[jax.Array]:
    """An exponent of two; of what is finite mean and deviation, divided by that power; smallest, largest; how many
    are not finite.

    The power is that of the largest size, so that no square or sum is beyond the type's range.
    """
    if jnp.issubdtype(values.dtype, np.complexfloating):
        values = jnp.abs(values)
    if not jnp.issubdtype(values.dtype, np.floating):
        if values.dtype.itemsize == 1:  # truth values, and integers of less than a byte
            values = values.astype(np.int32)
        finite, low, high = jnp.ones((), bool), jnp.min(values), jnp.max(values)
    else:
        values = values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
        finite = jnp.isfinite(values)
        low, high = jnp.min(jnp.where(finite, values, np.inf)), jnp.max(jnp.where(finite, values, -np.inf))
    wide = np.float64 if values.dtype.itemsize == 8 else np.float32
    size = jnp.maximum(jnp.abs(low.astype(wide)), jnp.abs(high.astype(wide)))
    usable = jnp.isfinite(size) & (size > 0)
    most = -int(jnp.finfo(wide).minexp)  # a power whose inverse is a normal number
    exponent = jnp.where(usable, jnp.clip(jnp.frexp(jnp.where(usable, size, 1))[1] - 1, -most, most), 0)
    scaled = _computed(values, exponent)
    count = _sum(jnp.broadcast_to(finite, values.shape).astype(wide))
    mean = _sum(jnp.where(finite, scaled, 0)) / count
    square = _sum(jnp.where(finite, jnp.square(scaled - mean), 0)) / count
    nonfinite = jnp.sum(~finite, dtype=np.uint32)
    return exponent, mean, jnp.sqrt(square), low, high, nonfinite


def _sum(values: jax.Array) -> jax.Array:
    """A sum, an axis at a time: float32 loses digits in a single chain of a billion additions."""
    for _ in range(values.ndim):
        # Without the barrier XLA would merge the sums into one.
        values = jax.lax.optimization_barrier(jnp.sum(values, axis=-1))
    return values


def _bidiagonal(values: jax.Array) -> jax.Array:
    """The diagonal and the superdiagonal of Golub and Kahan's bidiagonalization, stacked: (2, iterations)."""
    axis = cut(values.shape)
    left, right = values.shape[:axis], values.shape[axis:]
    iterations = min(ITERATIONS, math.prod(left), math.prod(right))
    # What is not finite would make everything else so.
    values = jnp.where(jnp.isfinite(values), values, 0)

    # Products and sums rather than `dot`, which would want a copy of the matrix in its own type, and compiles for
    # seconds on CPUs. Nothing is lost: a matrix times a vector takes as long as reading the matrix.
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


def _largest(bidiagonal: np.ndarray[Any, Any]) -> float:
    alphas, betas = bidiagonal.astype(np.float64)
    matrix = np.pad(np.diag(alphas), ((0, 0), (0, 1)))
    matrix += np.pad(np.diag(betas), ((0, 0), (1, 0)))
    return float(np.linalg.norm(matrix, 2))

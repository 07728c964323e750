"""Statistics of arrays on devices, computed where their shards are.

Nothing is gathered: sums are added up over the devices, and a matrix is only ever multiplied by vectors. There is one
compiled program for each shape, dtype and sharding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

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
    numbers, bidiagonal = jax.tree.map(np.asarray, measured)
    shape, dtype = tuple(array.shape), np.dtype(array.dtype).name
    names = [path]
    if layered:
        names, shape = [f"{path}[{index}]" for index in range(len(numbers))], shape[1:]
    else:
        numbers = numbers[None]
        bidiagonal = None if bidiagonal is None else bidiagonal[None]
    for index, name in enumerate(names):
        mean, std, low, high, nonfinite = numbers[index].tolist()
        norm = None if bidiagonal is None else _largest(bidiagonal[index])
        yield VariableStatistics(name, shape, dtype, mean, std, low, high, norm, int(nonfinite))


@functools.lru_cache(maxsize=64)
def _program(layered: bool, spectral: bool, everywhere: NamedSharding | None) -> Any:
    """Compiled once for each shape, dtype and sharding that it is called with; results are on every device."""

    def measure(values: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        matrix = values.ndim > 1 and jnp.issubdtype(values.dtype, np.floating)
        return _numbers(values), _bidiagonal(values) if spectral and matrix else None

    return jax.jit(jax.vmap(measure) if layered else measure, out_shardings=everywhere)


def _computed(values: jax.Array) -> jax.Array:
    """As what sums are computed in; complex numbers by their size."""
    if jnp.issubdtype(values.dtype, np.complexfloating):
        values = jnp.abs(values)
    return values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)


def _numbers(values: jax.Array) -> jax.Array:
    """Mean, deviation, smallest, largest of what is finite, and how many elements are not."""
    values = _computed(values)
    finite = jnp.isfinite(values)
    count = _sum(finite.astype(values.dtype))
    mean = _sum(jnp.where(finite, values, 0)) / count
    square = _sum(jnp.where(finite, jnp.square(values - mean), 0)) / count
    low = jnp.min(jnp.where(finite, values, np.inf))
    high = jnp.max(jnp.where(finite, values, -np.inf))
    nonfinite = jnp.sum(~finite).astype(values.dtype)
    return jnp.stack([mean, jnp.sqrt(square), low, high, nonfinite])


def _sum(values: jax.Array) -> jax.Array:
    """A sum, an axis at a time: float32 loses digits in a single chain of a billion additions."""
    for _ in range(values.ndim):
        # Without the barrier XLA would merge the sums into one.
        values = jax.lax.optimization_barrier(jnp.sum(values, axis=-1))
    return values


def _bidiagonal(values: jax.Array) -> jax.Array:
    """The diagonal and the superdiagonal of Golub and Kahan's bidiagonalization, stacked: (2, iterations)."""
    values = _computed(values)
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

"""PRNG keys as data: recognizing typed keys, converting them to the raw numbers that are stored, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np


def is_key(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


@functools.lru_cache(maxsize=64)
def key_impl(dtype: Any) -> Any:
    """The PRNG implementation of a key dtype, as `jax.random.wrap_key_data` takes it."""
    found: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        # `key_impl` only takes arrays and tracers, so it is called while tracing.
        found.append(jax.random.key_impl(keys))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return found[0]


def key_data(keys: Any) -> np.ndarray:
    """The raw `uint32` data of a typed key array: one more, trailing, dimension."""
    return np.asarray(jax.random.key_data(keys))


def as_keys(data: Any, dtype: Any) -> Any:
    """The inverse of `key_data`, eagerly or under a trace; the data itself if `dtype` is None or not a key dtype."""
    return jax.random.wrap_key_data(data, impl=key_impl(dtype)) if dtype is not None and is_key(dtype) else data


def stored_as(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype in which values are stored: their own, or those of key data for PRNG keys."""
    if not is_key(dtype):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


def pack_keys(data: np.ndarray) -> np.ndarray[Any, Any]:
    """Key data as opaque (void) elements in the keys' own shape, which NumPy moves like any other."""
    opaque = np.dtype((np.void, data.shape[-1] * data.itemsize))
    return np.ascontiguousarray(data).view(opaque).reshape(data.shape[:-1])


def unpack_keys(keys: np.ndarray) -> np.ndarray[Any, Any]:
    """The inverse of `pack_keys`."""
    return np.frombuffer(keys.tobytes(), np.uint32).reshape((*keys.shape, keys.itemsize // 4))

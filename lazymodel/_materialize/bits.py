"""Values as integers of the same bits, inside programs that only move them.

XLA may move small floats through wider ones, which changes signalling NaNs.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def moved_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype as which values are moved: their own where that is safe, or unsigned integers of as many bytes."""
    return dtype if dtype.kind in "biuc" or dtype.itemsize >= 4 else np.dtype(f"u{dtype.itemsize}")


def as_moved(values: jax.Array) -> jax.Array:
    """Values as their `moved_dtype`; what has less than a byte gets a byte each."""
    moved = moved_dtype(np.dtype(values.dtype))
    if values.dtype == moved:
        return values
    bits = jax.dtypes.itemsize_bits(values.dtype)
    if bits < 8:
        return jax.lax.bitcast_convert_type(values, f"uint{bits}").astype(moved)
    return jax.lax.bitcast_convert_type(values, moved)


def from_moved(values: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The inverse of `as_moved`."""
    if values.dtype == dtype:
        return values
    bits = jax.dtypes.itemsize_bits(dtype)
    if bits < 8:
        values = (values & (2**bits - 1)).astype(f"uint{bits}")
    return jax.lax.bitcast_convert_type(values, dtype)

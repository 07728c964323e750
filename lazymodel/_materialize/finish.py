"""The last touch to an array that was computed or read: weakly typed, in the layout of its variable."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format

from lazymodel._abstract.placement import is_narrowed
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._programs.jaxprs import is_weak, with_weak_type


def finished(array: Any, variable: AbstractVariable) -> Any:
    """Both."""
    array = in_layout(array, variable)
    return as_weak(array, variable) if variable.weak_type else array


def as_weak(array: Any, variable: AbstractVariable) -> Any:
    """The array weakly typed, in the same buffers."""
    if isinstance(array, np.ndarray) or is_weak(jax.typeof(array)) or not array.size:
        return array
    placed = array.sharding if variable.layout is None else array.format
    with jax.enable_x64(True) if is_narrowed(array.dtype) else contextlib.nullcontext():
        return jax.jit(_weakened, donate_argnums=0, out_shardings=placed)(array)


def _weakened(array: jax.Array) -> jax.Array:
    return with_weak_type(array, True)


def in_layout(array: jax.Array, variable: AbstractVariable) -> jax.Array:
    """The array with its bytes in the order that the variable asks for, as far as its devices have such orders."""
    if variable.layout is None:
        return array
    return jax.device_put(array, Format(variable.layout, array.sharding), donate=True)

"""Arrays that are not there yet: of everything that JAX traces and lowers by, and no values.

`jax.ShapeDtypeStruct` says as much, but is no `jax.Array`, and what sorts a model's leaves asks for one: Equinox'
`filter_jit` and `partition` would take a struct for a static value, which it is not when the function is called.
"""

from __future__ import annotations

from typing import Any

import jax


class Outline(jax.Array):
    """A `jax.ShapeDtypeStruct` in an array's place; lowering takes it for an array that is committed to its sharding,
    or, without one, for an array that is not committed.
    """

    def __init__(self, struct: jax.ShapeDtypeStruct) -> None:
        self._struct = struct

    shape: Any = property(lambda self: self._struct.shape)
    dtype: Any = property(lambda self: self._struct.dtype)
    ndim: Any = property(lambda self: self._struct.ndim)
    size: Any = property(lambda self: self._struct.size)
    weak_type: Any = property(lambda self: self._struct.weak_type)
    sharding: Any = property(lambda self: self._struct.sharding)
    format: Any = property(lambda self: self._struct.format)

    def __repr__(self) -> str:
        return f"Outline({self._struct})"

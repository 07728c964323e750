"""NumPy arrays that an init function returns: they stay what they are.

Eager execution hands a NumPy array back as it is, and much relies on it: 64-bit integers keep their range though JAX
has 32 bits, Equinox takes NumPy arrays for constants that are not trained, and none of them is on a device. So

- an array of numbers or truth values is a variable with `on_host`: it has a path, a checkpoint may have a tensor for
  it, and it comes back as a NumPy array of its own dtype. Only where its sharding splits it over devices, because a
  rule asked for that, does it become a `jax.Array`;
- of these, what JAX would narrow (64 bits without `jax_enable_x64`) is on the host whatever the rules say;
- an array of anything else (strings, objects, records, `float0`) is handed back untouched, like Python objects.

Responsible for telling these apart and for making the host's arrays; what is split is the stream's matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lazymodel._abstract.placement import is_narrowed
from lazymodel._abstract.variable import AbstractVariable, Reason

# Subclasses may mean more than their elements, as masked arrays do; a memory map is an array like any other.
_PLAIN = (np.ndarray, np.memmap)
_NOT_OF_JAX = (np.longdouble, np.clongdouble)


def is_host_variable(leaf: Any) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether a leaf of a result is a NumPy array of numbers or truth values."""
    if type(leaf) not in _PLAIN or leaf.dtype.fields is not None or not leaf.dtype.isnative:
        return False
    numbers = bool(jax.numpy.issubdtype(leaf.dtype, np.number)) and leaf.dtype.type not in _NOT_OF_JAX
    return leaf.dtype == np.bool_ or numbers


def kept_on_host(variables: Mapping[str, AbstractVariable]) -> dict[str, AbstractVariable]:
    """The variables, of which those that devices would narrow are not split, whatever the rules said."""
    kept = dict(variables)
    for path, variable in variables.items():
        if variable.on_host and is_narrowed(variable.dtype) and isinstance(variable.sharding, NamedSharding):
            text = f"a NumPy array of {variable.dtype.name}, which devices hold with jax_enable_x64 only: on the host"
            whole = NamedSharding(variable.sharding.mesh, PartitionSpec())
            kept[path] = dataclasses.replace(variable, sharding=whole, reason=Reason("host", text))
    return kept


def host_array(variable: AbstractVariable, source: Any) -> np.ndarray[Any, Any]:
    """A variable's array from its tensor or array, as a copy of its own; a memory map stays one."""
    if type(source) is np.memmap and source.dtype == variable.dtype:
        return source
    return np.array(source, dtype=variable.dtype)

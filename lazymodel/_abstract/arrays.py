"""The arrays of an existing model, by path and as lazy tensors; and the adapters of frameworks, which find them.

An adapter turns one framework's way of building into an abstract model. An entry of the table is loaded only if its
framework is already in `sys.modules`, since nobody can pass a Keras class without having imported Keras. Adapters
elsewhere register in the entry-point group `lazymodel.adapters` under their framework's top-level module.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lazymodel._abstract.paths import flatten_paths, is_trained_pair
from lazymodel._abstract.placement import is_narrowed
from lazymodel._abstract.variable import AbstractVariable, Reason
from lazymodel._errors import LazyModelError
from lazymodel._programs.keys import is_key
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import DeviceTensor

# Framework module → the module that exposes `adapter`; the extra by the framework's name installs what it needs.
_KNOWN = {"keras": "lazymodel_keras", "flax": "lazymodel_flax"}


class Adapter(Protocol):
    """The module-level `adapter` of a framework's integration."""

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if `build` belongs to this framework, or returns an object of it."""
        ...

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Builds abstractly what `build(*args, **kwargs)` would build."""
        ...

    def arrays(self, model: Any) -> dict[str, Any] | None:
        """A built model's arrays, under the paths that `build_abstract` gives; None for objects of other frameworks."""
        ...

    def with_arrays(self, model: Any, arrays: Mapping[int, Any]) -> Any:
        """The model with some of its arrays replaced; these are identified by their `id`."""
        ...


def named(framework: str) -> Any:
    """The adapter of a framework, which is imported; raises LazyModelError if the adapter or a requirement is missing.

    That of Keras also has `from_config` and `convert`.
    """
    modules = _modules()
    if framework not in modules:
        raise LazyModelError(f"there is no adapter for {framework!r}; known are {', '.join(modules)}")
    try:
        return importlib.import_module(modules[framework]).adapter
    except ModuleNotFoundError as error:
        raise LazyModelError(
            f"models of {framework} need {error.name}, which is not installed: pip install 'lazymodel[{framework}]'"
        ) from error


def adapters() -> Iterator[Adapter]:
    """The adapters whose framework has been imported."""
    return (importlib.import_module(module).adapter for name, module in _modules().items() if name in sys.modules)


@functools.cache
def _registered() -> dict[str, str]:
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group="lazymodel.adapters")}


def _modules() -> dict[str, str]:
    return {**_KNOWN, **_registered(), **_KNOWN}


# NumPy arrays that an init function returns stay NumPy arrays.
#
# Eager execution returns a NumPy array unchanged, and much code relies on it: 64-bit integers keep their range though
# JAX has 32 bits, Equinox treats NumPy arrays as constants that are not trained, and none of them is on a device. So
#
# - an array of numbers or booleans is a variable with `on_host`: it has a path, a checkpoint may have a tensor for it,
#   and it is returned as a NumPy array with its own dtype. It becomes a `jax.Array` only if its sharding splits it over
#   devices, because of a rule;
# - an array that JAX would narrow (64 bits without `jax_enable_x64`) is on the host, whatever the rules;
# - an array of anything else (strings, objects, records, `float0`) is returned unchanged, like Python objects.
#
# Responsible for distinguishing these and for making the host's arrays; the stream makes those that are split.


# Subclasses may have more than their elements, as masked arrays do; a memory map is an array like any other.
_PLAIN = (np.ndarray, np.memmap)
_NOT_OF_JAX = (np.longdouble, np.clongdouble)


def is_host_variable(leaf: Any) -> TypeGuard[np.ndarray[Any, Any]]:
    """Returns True if a leaf of a result is a NumPy array of numbers or booleans."""
    if type(leaf) not in _PLAIN or leaf.dtype.fields is not None or not leaf.dtype.isnative:
        return False
    numbers = bool(jax.numpy.issubdtype(leaf.dtype, np.number)) and leaf.dtype.type not in _NOT_OF_JAX
    return leaf.dtype == np.bool_ or numbers


def kept_on_host(variables: Mapping[str, AbstractVariable]) -> dict[str, AbstractVariable]:
    """The variables; those that devices would narrow are not split, whatever the rules."""
    kept = dict(variables)
    for path, variable in variables.items():
        if variable.on_host and is_narrowed(variable.dtype) and isinstance(variable.sharding, NamedSharding):
            text = f"a NumPy array of {variable.dtype.name}, which devices hold with jax_enable_x64 only: on the host"
            whole = NamedSharding(variable.sharding.mesh, PartitionSpec())
            kept[path] = dataclasses.replace(variable, sharding=whole, reason=Reason("host", text))
    return kept


def host_array(variable: AbstractVariable, source: Any) -> np.ndarray[Any, Any]:
    """A variable's array from its tensor or array, as a copy; a memory map is returned unchanged."""
    if type(source) is np.memmap and source.dtype == variable.dtype:
        return source
    return np.array(source, dtype=variable.dtype)


ARRAYS = (jax.Array, np.ndarray, LazyTensor)
NUMBERS = (bool, int, float, np.bool_, np.number)


def named_arrays(model: Any, *, kinds: tuple[type, ...] = ARRAYS) -> dict[str, Any]:
    """Path → array, with the names of `build_abstract`; an array that is in several places is under each path."""
    if not (found := named_leaves(model, kinds)):
        # The message does not contain the path: a signed URL includes a credential.
        of_path = "; a path is opened first: lm.open_checkpoint(path)" if isinstance(model, str | os.PathLike) else ""
        raise LazyModelError(f"there are no arrays in what was given, {type(model)}{of_path}")
    refuse_deleted(found)
    return found


def named_leaves(model: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Like `named_arrays`, for leaves of any kinds; may be empty."""
    return {path: leaf for path, leaf in _named(model, kinds).items() if isinstance(leaf, kinds)}


def refuse_deleted(arrays: Mapping[str, Any]) -> None:
    """Raises LazyModelError for an array whose buffers were deleted."""
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.is_deleted():
            raise LazyModelError(f"{name!r} was deleted or donated; use what the last step returned instead")


def _named(model: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    for adapter in adapters():
        if (found := adapter.arrays(model)) is not None:
            return found
        if is_trained_pair(model) and (found := adapter.arrays(model[0])) is not None:
            return found | flatten_paths((None, model[1]), only=kinds)
    return flatten_paths(dict(model) if isinstance(model, Mapping) else model, only=kinds)


def lazy_array(name: str, array: Any) -> LazyTensor:
    """A lazy tensor over an array of NumPy or JAX; for PRNG keys, over their data."""
    if not isinstance(array, jax.Array):
        return lazy(array, name)
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    return LazyTensor(DeviceTensor(name, array))

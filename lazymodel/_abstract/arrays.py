"""Arrays: those of an existing model by path, the devices of those that will be, and those that stay on the host.

Adapters of frameworks are found here: the module of one is imported only if its framework is in `sys.modules`. Adapters
elsewhere register in the entry-point group `lazymodel.adapters` under their framework's top-level module.

An array of numbers or booleans of NumPy that an init function returns is a variable with `on_host`, and is returned as
a NumPy array with its own dtype. It becomes a `jax.Array` only if a rule splits it over devices, and never if JAX would
narrow it (64 bits without `jax_enable_x64`). An array of anything else is returned unchanged, like Python objects.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.variable import AbstractVariable, Reason, flatten_paths, is_offloaded, is_trained_pair
from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import is_key
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import DeviceTensor

Signature: TypeAlias = "frozenset[Hashable]"


def device_shardings(variables: Mapping[str, AbstractVariable]) -> dict[str, Sharding]:
    """The sharding that each variable will be materialized with; the default device if none was assigned."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {path: variable.sharding or default for path, variable in variables.items()}


def is_narrowed(dtype: Any) -> bool:
    """Returns True if arrays of a NumPy dtype lose bits on their way to a device."""
    return bool(np.dtype(dtype) != jax.dtypes.canonicalize_dtype(dtype))


def stays_on_host(variable: AbstractVariable) -> bool:
    """Returns True if a variable is materialized as a NumPy array, and no device holds any of it."""
    if not variable.on_host:
        return False
    split = variable.sharding is not None and not variable.sharding.is_fully_replicated
    return not split or is_narrowed(variable.dtype)


class Placement:
    """The devices of shardings, grouped by what they hold.

    Every device of a mesh holds as many bytes of a variable as any other, so thousands of variables on thousands of
    devices form one group.

    Attributes:
        group: Path → the key of its devices, a mesh or a set.
        devices: Device → the groups that it belongs to; numbers stand for the devices of a mesh that has none.
        signatures: The number of devices that belong to the same groups.
        meshes: The meshes of all shardings that have one.
    """

    def __init__(self, shardings: Mapping[str, Sharding]) -> None:
        self.shardings = shardings
        self.group: dict[str, Hashable] = {
            path: sharding.mesh if isinstance(sharding, NamedSharding) else frozenset(sharding.device_set)
            for path, sharding in shardings.items()
        }
        members: dict[Any, set[Hashable]] = collections.defaultdict(set)
        for group in dict.fromkeys(self.group.values()):
            for device in _members(group):
                members[device].add(group)
        self.devices: dict[Any, Signature] = {device: frozenset(groups) for device, groups in members.items()}
        self.signatures = collections.Counter(self.devices.values())
        self.meshes: list[Any] = [g for g in dict.fromkeys(self.group.values()) if not isinstance(g, frozenset)]

    def held(self, amounts: Mapping[str, int]) -> dict[Signature, int]:
        """Bytes on each kind of device, from bytes by path."""
        by_group: collections.Counter[Hashable] = collections.Counter()
        for path, nbytes in amounts.items():
            by_group[self.group[path]] += nbytes
        return {signature: sum(by_group[group] for group in signature) for signature in self.signatures}

    def most_loaded(self, amounts: Mapping[str, int]) -> tuple[Signature, int]:
        """The kind of device with most of these bytes, and their number."""
        return max(self.held(amounts).items(), key=lambda item: item[1], default=(frozenset[Hashable](), 0))


def _members(group: Any) -> Iterator[Any]:
    if isinstance(group, frozenset):
        yield from cast("frozenset[Any]", group)
    else:
        yield from range(group.size) if isinstance(group, AbstractMesh) else group.devices.flat


def device_nbytes(variables: Iterable[AbstractVariable]) -> dict[Any, int]:
    """Bytes on each device that holds any of these variables, for variables with a sharding."""
    placed = {variable.path: variable for variable in variables if variable.sharding is not None}
    placement = Placement({path: cast("Sharding", variable.sharding) for path, variable in placed.items()})
    held = placement.held({path: resident_nbytes(variable) for path, variable in placed.items()})
    return {device: held[signature] for device, signature in placement.devices.items()}


def resident_nbytes(variable: AbstractVariable) -> int:
    """Bytes of a variable on each device of its sharding."""
    return 0 if stays_on_host(variable) or is_offloaded(variable.sharding) else variable.shard_nbytes


def offloaded_nbytes(variable: AbstractVariable) -> int:
    """Bytes of a variable that a host keeps for each of its devices."""
    return variable.shard_nbytes if is_offloaded(variable.sharding) and not stays_on_host(variable) else 0


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
def _modules() -> dict[str, str]:
    entries = importlib.metadata.entry_points(group="lazymodel.adapters")
    return {**_KNOWN, **{entry.name: entry.value for entry in entries}, **_KNOWN}


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

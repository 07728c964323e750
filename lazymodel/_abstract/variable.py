"""Variables of an abstract model: paths, reasons for their shardings, kinds of memory; and the arrays that they become.

Kinds of memory are JAX': `device`, `pinned_host`, and `unpinned_host`. Offloaded variables take no memory of a device;
a host keeps the shard of each of its devices. Paths come from a pytree's keys, and are matched by patterns.

An array of numbers or booleans of NumPy that an init function returns is a variable with `on_host`, and is returned as
a NumPy array with its own dtype. It becomes a `jax.Array` only if a rule splits it over devices, and never if JAX would
narrow it (64 bits without `jax_enable_x64`). An array of anything else is returned unchanged, like Python objects.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from lazymodel._abstract.adapters import adapters
from lazymodel._devices.tiles import array_nbytes, packed_nbytes
from lazymodel._errors import LazyModelError, ShardingError
from lazymodel._programs.jaxprs import is_key, stored_as
from lazymodel._show.table import placed_text, spec_text
from lazymodel._show.text import closest
from lazymodel._tensors.convert import ML_NUMBERS
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import DeviceTensor, in_other_memory

PINNED_HOST = "pinned_host"
_KNOWN = ("device", PINNED_HOST, "unpinned_host")  # what JAX accepts without devices


def is_offloaded(sharding: Any) -> TypeGuard[Sharding]:
    """Returns True if a sharding puts arrays in a host's memory, and its devices have their own memory."""
    kind = None if sharding is None else sharding.memory_kind
    if kind is None or "host" not in kind:
        return False
    device = _device(sharding)
    return device is None or in_other_memory(device, kind)


def in_memory(sharding: Sharding | None, kind: str | None, path: str) -> Sharding | None:
    """The sharding in another kind of memory; None is the devices' own, or as a sharding the default device.

    Raises:
        ShardingError: The devices have no such memory.
    """
    if kind is None:
        return sharding.with_memory_kind(cast(Any, None)) if is_offloaded(sharding) else sharding
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    device = _device(sharding)
    known = _KNOWN if device is None else [memory.kind for memory in device.addressable_memories()]
    if kind not in known:
        raise ShardingError(
            f"{path!r}: the devices have no memory of kind {kind!r}{closest(str(kind), known)}; they have "
            f"{', '.join(map(repr, known))}"
        )
    return sharding.with_memory_kind(kind)


def on_device(array: Any, sharding: Sharding | None) -> Any:
    """While tracing: an array of this sharding, moved to its devices' own memory if it is offloaded."""
    return jax.device_put(array, jax.memory.Space.Device) if is_offloaded(sharding) else array


def sharding_text(sharding: Sharding | None) -> str:
    """The spec, or the class of another sharding, and the kind of memory unless it is the devices' own."""
    if sharding is None or isinstance(sharding, NamedSharding):
        text = spec_text(None if sharding is None else sharding.spec)
    else:
        text = type(sharding).__name__
    return placed_text(text, sharding.memory_kind if is_offloaded(sharding) else None)


def automatic(array: jax.Array) -> jax.Array:
    """The array on a mesh of Auto axes, in the same buffers.

    `jax.make_mesh` gives Explicit axes since JAX 0.7: then every operation whose result sharding is ambiguous has to
    state it, which Keras' layers and Qwix do not (Dropout fails, for example). Under Auto axes XLA decides.
    """
    return under(array, automatic_sharding(array.sharding))


def under(array: jax.Array, sharding: Any) -> jax.Array:
    """The array under an equivalent sharding, in the same buffers."""
    if array.sharding == sharding:
        return array
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards, dtype=array.dtype)


def automatic_sharding(sharding: Any) -> Any:
    """The same sharding on a mesh of Auto axes."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    if all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return sharding
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _device(sharding: Any) -> Any:
    """One of the devices, of this process if there are any; None for a mesh without devices."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None
    return next(iter(sharding.addressable_devices or sharding.device_set))


def planned_device(sharding: Any) -> Any:
    """One of the devices, real or abstract; None if nothing is known of them."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        return mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return None if sharding is None else _device(sharding)


def shard_stored(array: Any, sharding: Sharding | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of one shard of an array, a variable or a struct; those of PRNG keys are their data."""
    shape = tuple(array.shape) if sharding is None else sharding.shard_shape(tuple(array.shape))
    return stored_as(shape, array.dtype)


def shard_nbytes(array: Any, sharding: Sharding | None, layout: Layout | None = None) -> int:
    """Bytes that one shard of an array, a variable or a struct takes on its device, or in its host's memory."""
    shape, dtype = shard_stored(array, sharding)
    order = layout.major_to_minor if layout is not None and len(layout.major_to_minor) == len(shape) else None
    return array_nbytes(shape, dtype, planned_device(sharding), order)


@dataclasses.dataclass(frozen=True)
class Reason:
    """The reason for the sharding of a variable.

    Attributes:
        kind: `rule` (of a mapping), `callable`, `logical` (axis rules), `metadata` (the variable's own), `own mesh` (of
            the variable's metadata), `proposed` (by `auto` or another proposer), `follows` (the weight that it belongs
            to), `repaired`, `optimizer` (state, as its parameter), `host` (a NumPy array that devices cannot hold), or
            `unmatched`.
        text: The reason as text.
        role: The role that `auto`, or a rule by role, found for the variable.
        labels: The meaning of each of its dimensions, if known.
        tried: Alternatives that were considered before and do not fit.
        told_from: What role and labels were inferred from, with a remark if that is a guess; empty if nothing was
            inferred.
        guessed: True if a guess decided along which dimension it is split.
    """

    kind: str
    text: str
    role: str = ""
    labels: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    told_from: str = ""
    guessed: bool = False


@dataclasses.dataclass(frozen=True)
class AbstractVariable:
    """One variable of an abstract model.

    Attributes:
        path: Its stable, unique name, parts joined by `/`, such as `decoder/attention/query/kernel`.
        shape: The global shape.
        dtype: A NumPy dtype, or an extended JAX dtype such as `key<fry>` for PRNG keys.
        sharding: The devices of its shards, or None if none was assigned (then one device is used).
        origin: The source of its value, as text: an initializer's name, `constant`, or a file and tensor.
        trainable: True if an optimizer would update it.
        logical_axes: Names for its dimensions that the framework keeps with it, in Flax' metadata or a `NamedArray`:
            logical axes or mesh axes, None for a dimension without one. None if it keeps none.
        layout: The order of its bytes on a device, or None for the compiler's choice.
        reason: The reason for its sharding; `AbstractModel.explain` shows it.
        follows: For optimizer state, the path of the parameter that it belongs to and is sharded like, or an empty
            string if it belongs to none, such as a step count; None for the model's own variables.
        weak_type: True if its array is weakly typed, as JAX makes those of Python scalars (`jnp.full((4,), 2.0)`): with
            another array of lower precision the result has that precision. Loaded or initialized, it has this type,
            like an array after `parameter[...] = loaded`.
        on_host: True if it is a NumPy array, and is returned as one unless its sharding splits it over devices.
        weight: For what belongs to a weight and knows it, such as a LoRA pair of Qwix: the weight's path, and for each
            dimension the corresponding one of the weight, or None.

    Example:
        >>> sharded["up/kernel"]
        AbstractVariable('up/kernel', float32[64, 256], P(None, 'model'), normal)
        >>> sharded["up/kernel"].nbytes, sharded["up/kernel"].shard_nbytes
        (65536, 8192)
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None = None
    origin: str = "init"
    trainable: bool = True
    logical_axes: tuple[Any, ...] | None = None
    layout: Layout | None = None
    reason: Reason | None = None
    follows: str | None = None
    weak_type: bool = False
    on_host: bool = False
    weight: tuple[str, tuple[int | None, ...]] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole variable, over all devices, counted once and without padding."""
        return packed_nbytes(*self.stored, planned_device(self.sharding))

    @property
    def is_key(self) -> bool:
        """Returns True if its elements are PRNG keys."""
        return is_key(self.dtype)

    @property
    def stored(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype that its values are stored and read in; those of PRNG keys are their data."""
        return stored_as(self.shape, self.dtype)

    @property
    def spec(self) -> jax.sharding.PartitionSpec | None:
        """The partition spec, or None if the sharding is not a NamedSharding."""
        return self.sharding.spec if isinstance(self.sharding, jax.sharding.NamedSharding) else None

    @property
    def memory_kind(self) -> str | None:
        """The kind of memory where it is stored, such as `pinned_host`; None for the devices' own."""
        return self.sharding.memory_kind if self.sharding is not None and is_offloaded(self.sharding) else None

    @functools.cached_property
    def shard_nbytes(self) -> int:
        """Bytes of one shard on a device, or on its host (shards of a JAX array have equal shapes); on a TPU's, those
        that fill up its tiles are included.
        """
        return shard_nbytes(self, self.sharding, self.layout)

    @functools.cached_property
    def padding_nbytes(self) -> int:
        """Bytes of `shard_nbytes` that only fill up the tiles of a TPU."""
        return self.shard_nbytes - packed_nbytes(*shard_stored(self, self.sharding), planned_device(self.sharding))

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The variable as a `jax.ShapeDtypeStruct`, with its sharding, layout and the dtype that JAX traces."""
        placed: Any = self.sharding if self.layout is None else Format(self.layout, self.sharding)
        # A variable that stays a NumPy array is traced with JAX' dtype for it; newer JAX versions warn about others.
        dtype = jax.dtypes.canonicalize_dtype(self.dtype) if self.on_host else self.dtype
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=placed, weak_type=self.weak_type)

    def __repr__(self) -> str:
        placed = placed_text(self.spec if self.spec is not None else self.sharding, self.memory_kind)
        spec = "" if self.sharding is None else f", {placed}"
        return f"AbstractVariable({self.path!r}, {self.dtype.name}{list(self.shape)}{spec}, {self.origin})"


Captures: TypeAlias = "dict[str, str]"
PathOf: TypeAlias = "Callable[[Sequence[Any]], str]"  # names a leaf from its `jax.tree_util` key path

OPTIMIZER = "optimizer/"  # prefix of the paths of optimizer state


def path_text(path: Sequence[Any]) -> str:
    """A `jax.tree_util` key path as text: dict keys, indexes and attribute names joined by `/`."""
    parts: list[str] = []
    for key in path:
        names = (getattr(key, attribute) for attribute in ("key", "idx", "name") if hasattr(key, attribute))
        name = next(names, key)
        parts += map(str, cast("tuple[Any, ...]", name) if type(name) is tuple else (name,))  # of a flattened dict
    return "/".join(parts) or "value"


def is_trained_pair(tree: Any) -> TypeGuard[tuple[Any, Any]]:
    """Returns True for a pair of a model and an optimizer's state, such as `with_optimizer` materializes to: the state
    has one of Optax' named tuples, or a tree of the model's parameters.
    """
    if type(tree) is not tuple or len(tree) != 2:
        return False
    model, state = cast("tuple[Any, Any]", tree)
    return (_is_state(state) and not _is_named(model) and not _is_chain(model)) or _has_parameters(state, model)


def _is_named(tree: Any) -> bool:
    """Returns True for a named tuple whose name ends in `State`, as all of Optax' do."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields") and type(cast(Any, tree)).__name__.endswith("State")


def _is_chain(tree: Any) -> bool:
    return type(tree) is tuple and any(_is_named(each) or _is_chain(each) for each in cast("tuple[Any, ...]", tree))


def _is_state(tree: Any) -> bool:
    def is_leaf(node: Any) -> bool:
        return _is_named(node) or isinstance(node, Iterator)  # of which JAX warns otherwise

    return any(map(_is_named, jax.tree.leaves(tree, is_leaf=is_leaf)))


def _has_parameters(state: Any, model: Any) -> bool:
    """Returns True if the keys of all parameters are in a part of the state; Linen's are those of a collection."""
    if isinstance(model, Mapping) and "params" in model and _has_parameters(state, cast("Any", model)["params"]):
        return True
    typed = ((keys, leaf.dtype) for keys, leaf in _leaves(model) if hasattr(leaf, "dtype"))
    floats = [keys for keys, dtype in typed if jax.numpy.issubdtype(dtype, np.inexact)]
    if not floats or not (size := len(floats[0])):
        return False
    found = {keys for keys, _ in _leaves(state)}
    parts = {keys[:-size] for keys in found if keys[-size:] == floats[0]}
    return any(part and all((*part, *keys) in found for keys in floats) for part in parts)


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return cast(Any, jax.tree_util.tree_flatten_with_path(tree)[0])


def trained_path(path: str) -> str:
    """The path in a pair of model and optimizer: `0/kernel` → `kernel`, `1/0/mu/kernel` → `optimizer/0/mu/kernel`."""
    part, _, rest = path.partition("/")
    return (OPTIMIZER if part == "1" else "") + (rest or "value")


def path_of(tree: Any) -> PathOf:
    """The function that names the leaves of a tree."""
    return (lambda keys: trained_path(path_text(keys))) if is_trained_pair(tree) else path_text


def unique_paths(paths: Sequence[str]) -> list[str]:
    """Makes repeated paths unique, in order: `a`, `a` → `a`, `a#2`."""
    unique = list(paths)
    while len(set(unique)) != len(unique):  # once is not enough if "a#2" is another variable's own name
        seen: dict[str, int] = {}
        for index, path in enumerate(unique):
            seen[path] = seen.get(path, 0) + 1
            unique[index] = path if seen[path] == 1 else f"{path}#{seen[path]}"
    return unique


def rule_path(path: str) -> str:
    """The path without the `#2` that distinguishes equal paths."""
    return re.sub(r"#\d+$", "", path)


def matched_paths(pattern: str, paths: Iterable[str], error: type[Exception], what: str) -> list[str]:
    """The paths that a regular expression matches completely; raises `error`, naming `what`, if it is not one."""
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as problem:
        raise error(f"{what}={pattern!r} is not a regular expression: {problem}") from problem
    return [path for path in paths if compiled.fullmatch(rule_path(path))]


def flatten_paths(tree: Any, *, only: tuple[type, ...] = (object,)) -> dict[str, Any]:
    """A pytree's leaves by path, named as `build_abstract` names variables: keys and indexes joined by `/`."""
    name = path_of(tree)
    leaves = [(keys, leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if isinstance(leaf, only)]
    paths = unique_paths([name(keys) for keys, _ in leaves])
    return {path: leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


class Template:
    """A name with captures: `{layer}` stands for text without `/` and `.`, `{rest...}` for any text.

    With `regex`, the text outside of captures is a regular expression, whose own braces contain numbers.
    """

    def __init__(self, text: str, *, regex: bool = False) -> None:
        if not isinstance(cast(Any, text), str):
            kind = "path regex" if regex else "name"
            raise LazyModelError(f"a pattern is a {kind}, with captures such as {{layer}}; got {text!r}")
        self.text = text
        capture = r"\{[A-Za-z_]\w*(?:\.\.\.)?\}" if regex else r"\{[^{}]*\}"
        self._parts: list[str] = re.split(f"({capture})", text)
        self.captures: tuple[str, ...] = tuple(dict.fromkeys(map(_name, self._parts[1::2])))
        if bad := [name for name in self.captures if not name.isidentifier()]:
            raise LazyModelError(f"{text!r}: a capture is a name in braces, such as {{layer}}; found {{{bad[0]}}}")
        pattern, seen = "", set[str]()
        for index, part in enumerate(self._parts):
            name = _name(part)
            if index % 2 == 0:
                pattern += part if regex else re.escape(part)
            else:
                pattern += f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if '...' in part else '[^/.]+'})"
                seen.add(name)
        try:
            self._regex = re.compile(pattern, 0 if regex else re.DOTALL)
        except re.error as error:
            raise LazyModelError(f"pattern {text!r} is not a regular expression: {error}") from error

    def match(self, name: str) -> Captures | None:
        """The text of each capture; None if the name does not match."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict("")

    def fill(self, captures: Mapping[str, str]) -> str:
        """The name, with the known captures filled in."""
        return "".join(captures.get(_name(part), part) if index % 2 else part for index, part in enumerate(self._parts))


def _name(part: str) -> str:
    return part.strip("{}").removesuffix("...")


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


def flat_axes(name: Any) -> tuple[str, ...]:
    """The axes that one entry names: none, one, or several."""
    entries = name if isinstance(name, tuple | list) else (name,)
    return tuple(str(axis) for axis in entries if axis is not None)


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
NUMBERS = (
    *(bool, int, float, complex, np.bool_, np.number),
    *ML_NUMBERS,
)


def as_array(leaf: Any) -> Any:
    """The leaf; for a number an array without dimensions."""
    return np.asarray(leaf) if isinstance(leaf, NUMBERS) else leaf


def named_arrays(model: Any, *, numbers: bool = False) -> dict[str, Any]:
    """Path → array, with the names of `build_abstract`; an array that is in several places is under each path.

    With `numbers`, those of Python and NumPy are arrays without dimensions.
    """
    leaves = named_leaves(model, ARRAYS + NUMBERS if numbers else ARRAYS)
    if not (found := {path: as_array(leaf) for path, leaf in leaves.items()}):
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
    if is_trained_pair(model):
        for adapter in adapters():
            if (found := adapter.arrays(model[0])) is not None:
                state = flatten_paths(model[1], only=kinds)
                return found | {trained_path(f"1/{path}"): leaf for path, leaf in state.items()}
    return flatten_paths(dict(model) if isinstance(model, Mapping) else model, only=kinds)


def lazy_array(name: str, array: Any) -> LazyTensor:
    """A lazy tensor over an array of NumPy or JAX; for PRNG keys, over their data."""
    if not isinstance(array, jax.Array):
        return lazy(array, name)
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    return LazyTensor(DeviceTensor(name, array))

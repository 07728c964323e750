"""One variable of an abstract model: its path, the reason for its sharding, and its kind of memory.

Kinds of memory are JAX': `device`, `pinned_host`, and `unpinned_host`. Offloaded variables take no memory of a device;
a host keeps the shard of each of its devices. Paths come from a pytree's keys, and are matched by patterns.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from lazymodel._errors import LazyModelError, ShardingError
from lazymodel._programs.jaxprs import is_key, stored_as
from lazymodel._show.table import placed_text
from lazymodel._show.text import closest
from lazymodel._tensors.shards import in_other_memory

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


def _device(sharding: Any) -> Any:
    """One of the devices, of this process if there are any; None for a mesh without devices."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None
    return next(iter(sharding.addressable_devices or sharding.device_set))


@dataclasses.dataclass(frozen=True)
class Reason:
    """The reason for the sharding of a variable.

    Attributes:
        kind: `rule` (of a mapping), `callable`, `logical` (axis rules), `metadata` (the variable's own), `proposed`
            (by `auto` or another proposer), `follows` (the weight that it belongs to), `repaired`, `optimizer` (state,
            as its parameter), `host` (a NumPy array that devices cannot hold), or `unmatched`.
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

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable, over all devices, counted once."""
        return self.size * self.dtype.itemsize

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

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one shard on a device, or on its host (shards of a JAX array have equal shapes)."""
        if self.sharding is None:
            return self.nbytes
        return math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize

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
        parts.append(str(next(names, key)))
    return "/".join(parts) or "value"


def is_trained_pair(tree: Any) -> TypeGuard[tuple[Any, Any]]:
    """Returns True for a pair of a model and an Optax state, such as `with_optimizer` materializes to."""
    return type(tree) is tuple and len(tree) == 2 and _is_state(tree[1]) and not _is_state(tree[0])


def _is_state(tree: Any) -> bool:
    """Returns True for a named tuple whose name ends in `State`, as all of Optax' do, and for a tuple with one."""
    if not isinstance(tree, tuple):
        return False
    if hasattr(cast(Any, tree), "_fields"):
        return type(cast(Any, tree)).__name__.endswith("State")
    return any(map(_is_state, cast("tuple[Any, ...]", tree)))


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

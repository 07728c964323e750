"""One variable of an abstract model, the reason for its sharding, and its kind of memory.

Kinds of memory are JAX': `device`, `pinned_host`, and `unpinned_host`. Offloaded variables take no memory of a device;
a host keeps the shard of each of its devices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeGuard, cast

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from lazymodel._errors import ShardingError
from lazymodel._programs.keys import is_key, stored_as
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

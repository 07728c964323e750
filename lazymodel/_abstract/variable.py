"""One variable of an abstract model, and why it has its sharding."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from lazymodel._abstract.memory import is_offloaded
from lazymodel._programs.keys import is_key, stored_as
from lazymodel._show.table import placed_text


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a variable has its sharding.

    Attributes:
        kind: `rule` (of a mapping), `callable`, `logical` (axis rules), `metadata` (the variable's own), `proposed`
            (by `auto` or another proposer), `follows` (the weight that it belongs to), `repaired`, `optimizer` (state,
            as its parameter), `host` (a NumPy array that devices cannot hold), or `unmatched`.
        text: The reason, for people.
        role: What `auto` or a rule by role took the variable for.
        labels: What each of its dimensions is, where that is known.
        tried: What was considered before and does not fit.
        told_from: What role and labels were told from, and where that is a guess; empty where nothing was inferred.
        guessed: Whether a guess decided along which dimension it is split.
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
        sharding: Where its shards go, or None while none was assigned (one device is used then).
        origin: How its value comes to be, for people: an initializer's name, `constant`, or a file and tensor.
        trainable: Whether an optimizer would update it.
        logical_axes: Names for its dimensions that the framework keeps with it, in Flax' metadata or a `NamedArray`:
            logical axes or mesh axes, None for a dimension without one. None if it keeps none.
        layout: The order of its bytes on a device, or None for what the compiler prefers.
        reason: Why it has its sharding; `AbstractModel.explain` tells it.
        follows: For optimizer state, the path of the parameter that it belongs to and is sharded like, or an empty
            string where it belongs to none, as a step count; None for the model's own variables.
        weak_type: Whether its array is weakly typed, as JAX makes those of Python scalars (`jnp.full((4,), 2.0)`): with
            another array of lower precision the result has that precision. Loaded or initialized, it is of this type,
            as an array is after `parameter[...] = loaded`.
        on_host: Whether it is a NumPy array, which comes back as one unless its sharding splits it over devices.

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
        """Whether its elements are PRNG keys."""
        return is_key(self.dtype)

    @property
    def stored(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype that its values are stored and read in; those of PRNG keys are their data."""
        return stored_as(self.shape, self.dtype)

    @property
    def spec(self) -> jax.sharding.PartitionSpec | None:
        """The partition spec, or None where the sharding is not a NamedSharding."""
        return self.sharding.spec if isinstance(self.sharding, jax.sharding.NamedSharding) else None

    @property
    def memory_kind(self) -> str | None:
        """The kind of memory that it lies in, such as `pinned_host`; None for the devices' own."""
        return self.sharding.memory_kind if self.sharding is not None and is_offloaded(self.sharding) else None

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one shard, which a device holds, or its host for it (shards of a JAX array have equal shapes)."""
        if self.sharding is None:
            return self.nbytes
        return math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The variable as a `jax.ShapeDtypeStruct`, with its sharding, layout and the dtype that JAX traces."""
        placed: Any = self.sharding if self.layout is None else Format(self.layout, self.sharding)
        # What stays a NumPy array is traced with the dtype that JAX has for it; newer ones warn of another.
        dtype = jax.dtypes.canonicalize_dtype(self.dtype) if self.on_host else self.dtype
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=placed, weak_type=self.weak_type)

    def __repr__(self) -> str:
        placed = placed_text(self.spec if self.spec is not None else self.sharding, self.memory_kind)
        spec = "" if self.sharding is None else f", {placed}"
        return f"AbstractVariable({self.path!r}, {self.dtype.name}{list(self.shape)}{spec}, {self.origin})"

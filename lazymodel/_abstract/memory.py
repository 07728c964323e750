"""Kinds of memory: whether a variable lies in its devices' own memory, or in that of their hosts.

Kinds are JAX': `device`, `pinned_host`, and `unpinned_host`. What is offloaded takes nothing of a device; a host keeps
for each of its devices the shard that is the device's.
"""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from lazymodel._errors import ShardingError
from lazymodel._show.text import closest
from lazymodel._tensors.shards import in_other_memory

PINNED_HOST = "pinned_host"
_KNOWN = ("device", PINNED_HOST, "unpinned_host")  # what JAX takes where there are no devices to ask


def is_offloaded(sharding: Any) -> TypeGuard[Sharding]:
    """Whether a sharding puts arrays in a host's memory, and its devices have one of their own."""
    kind = None if sharding is None else sharding.memory_kind
    if kind is None or "host" not in kind:
        return False
    device = _device(sharding)
    return device is None or in_other_memory(device, kind)


def in_memory(sharding: Sharding | None, kind: str | None, path: str) -> Sharding | None:
    """The sharding in another kind of memory; None is the devices' own, and of shardings the default device.

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

"""The rule that says where as well as how: a spec for the memory of the hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lazymodel._abstract.memory import PINNED_HOST


@dataclasses.dataclass(frozen=True)
class Host:
    """A spec for the memory of the hosts: split as any other, each shard beside its device instead of on it.

    For what a device has no room for and is seldom needed, such as embeddings, layers or optimizer state. A jitted
    function moves it in and out with `jax.device_put`; `docs/host_memory.md` has a training step.

    Attributes:
        spec: A `PartitionSpec`, a sequence of axis names, or None to replicate.
        memory_kind: `"pinned_host"`, from which devices copy by themselves, or another kind that they have.

    Example:
        >>> offloaded = abstract.shard(mesh, {"up/kernel": lm.Host(P(None, "model")), "down/kernel": P("model")})
        >>> offloaded["up/kernel"]
        AbstractVariable('up/kernel', float32[64, 256], P(None, 'model') in pinned_host, normal)
        >>> offloaded.plan().device_nbytes, offloaded.plan().offloaded_nbytes  # of one device, and of its host
        (8192, 65536)
    """

    spec: PartitionSpec | Sequence[Any] | None = None
    memory_kind: str = PINNED_HOST

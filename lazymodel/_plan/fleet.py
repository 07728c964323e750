"""Traffic of a fleet: the bytes that each host reads and receives over the interconnect, for both ways with replicas.

Responsible for counting bytes by host, and for dividing them by bandwidths. `_tensors/shards` decides who reads
what, as for `materialize`; the hosts and devices need not exist.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import Placement, stays_on_host
from lazymodel._errors import LazyModelError
from lazymodel._mapping.resolve import LoadPlan
from lazymodel._show.text import format_bytes, parse_bytes
from lazymodel._tensors import shards
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import (
    ReadPartition,
    check_replicas,
    divide,
    grouped,
    is_exchanged,
    is_shared,
    mesh_processes,
    spec_axes,
    stored_itemsize,
)
from lazymodel._tensors.tensor_source import TensorSource


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The hosts of a fleet, for a plan.

    Attributes:
        hosts: Number of hosts, each with equally many devices, in the mesh's order; for a mesh whose devices are only
            numbers. Real devices know their hosts.
        storage_bandwidth: Bytes a second that one host reads from storage while all do, or `"200MB/s"`.
        link_bandwidth: Bytes a second that the devices of one host receive over the interconnect, or `"25GB/s"`.

    Raises:
        LazyModelError: `hosts` is not a number of hosts, or a bandwidth is not valid.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((1024, 4), ("data", "model"))
        >>> fleet = lm.Fleet(hosts=1024, storage_bandwidth="200MB/s", link_bandwidth="25GB/s")
        >>> plan = abstract.shard(mesh, {".*": P("model")}).plan(fleet=fleet)
        >>> {name: way.total_read_nbytes for name, way in plan.ways.items()}  # by all hosts together
        {'read': 134217728, 'exchange': 131072}
    """

    hosts: int | None = None
    storage_bandwidth: int | str | None = None
    link_bandwidth: int | str | None = None

    def __post_init__(self) -> None:
        if self.hosts is not None and (type(self.hosts) is not int or self.hosts < 1):
            raise LazyModelError(f"hosts is a number of hosts, from 1; got {self.hosts!r}")
        for name in ("storage_bandwidth", "link_bandwidth"):
            self.bandwidth(name)

    def bandwidth(self, name: str) -> int | None:
        """One of the two bandwidths, in bytes a second."""
        value = getattr(self, name)
        if isinstance(value, str):
            value = value.strip().removesuffix("/s")
        return None if value is None else parse_bytes(value, name=name, at_least=1)


@dataclasses.dataclass(frozen=True)
class Way:
    """The cost of loading if replicas are read by each holder, or are read once and exchanged.

    Attributes:
        read_nbytes: Bytes that each host reads from storage.
        exchanged_nbytes: Bytes that each host's devices receive from other devices.
        seconds: Time of the slowest host at the bandwidths of a `Fleet`, reading and then exchanging; None if one of
            these is needed and not given.
    """

    read_nbytes: tuple[int, ...]
    exchanged_nbytes: tuple[int, ...]
    seconds: float | None

    @property
    def total_read_nbytes(self) -> int:
        """Bytes that all hosts together read from storage."""
        return sum(self.read_nbytes)

    def text(self) -> str:
        """The cost as text."""
        parts = [f"{format_bytes(self.total_read_nbytes)} from storage, {format_bytes(max(self.read_nbytes))} a host"]
        if arriving := max(self.exchanged_nbytes):
            parts.append(f"{format_bytes(arriving)} a host over the interconnect")
        if self.seconds is not None:
            parts.append(f"about {self.seconds:,.1f} s")
        return ", ".join(parts)


class Traffic:
    """The bytes that each host reads and exchanges.

    Attributes:
        exchanged: Path → partition of the variables that `materialize` would exchange.
        imagined: True if there is no checkpoint, and each variable counts as if stored in one as it is.
    """

    def __init__(
        self, model: ModelSpec, choice: LoadPlan, placement: Placement, fleet: Fleet | None, replicas: str | None
    ) -> None:
        check_replicas(replicas)
        tensors = {path: source for path, source in choice.sources.items() if isinstance(source, LazyTensor)}
        self.imagined = fleet is not None and not any(tensor.file for tensor in tensors.values())
        if self.imagined:
            tensors = {path: LazyTensor(TensorSource(path, *variable.stored)) for path, variable in model.items()}
        self._shardings, self._fleet, self._model = placement.shardings, fleet or Fleet(), model
        find = functools.cache(self._find_processes)
        # Path → tensor, the host of each device, and the partition if there is one; where hosts are known.
        self._tensors: dict[str, tuple[LazyTensor, np.ndarray, ReadPartition | None]] = {}
        self._shared: set[str] = set()
        self.exchanged: dict[str, ReadPartition] = {}
        for path, tensor in tensors.items():
            sharding = self._shardings[path]
            processes = find(sharding.mesh) if isinstance(sharding, NamedSharding) else None
            if processes is None or stays_on_host(model[path]):
                continue
            partition = None
            if is_shared(tensor, sharding, processes, "exchange"):
                self._shared.add(path)
            elif tensor.source.readers() or self.imagined:
                partition = divide(tensor, sharding, processes)
            self._tensors[path] = tensor, processes, partition
            if partition and (is_exchanged(tensor, replicas) or (self.imagined and replicas == "exchange")):
                self.exchanged[path] = partition

    def group_nbytes(self, order: Iterable[str]) -> dict[str, int]:
        """Bytes of a device that exchanging takes temporarily, for each exchanged variable, in load order."""
        spent = {
            path: self.exchanged[path].spent_elements * self._model[path].stored[1].itemsize
            for path in order
            if path in self.exchanged
        }
        groups = grouped(spent, shards.GROUP)
        return {path: sum(spent[each] for each in group) for group in groups for path in group}

    def ways(self) -> dict[str, Way]:
        """Both ways; empty unless there are several hosts."""
        hosts = 1 + max((int(processes.max()) for _, processes, _ in self._tensors.values()), default=0)
        if hosts == 1:
            return {}
        plain, parts, arriving = (np.zeros(hosts) for _ in range(3))
        for path, (tensor, processes, partition) in self._tensors.items():
            stored, itemsize = float(stored_itemsize(tensor.source) or tensor.dtype.itemsize), tensor.dtype.itemsize
            read = _distinct(self._shardings[path], tuple(tensor.shape), processes, hosts) * stored
            plain += read
            if path in self._shared:
                parts += tensor.size * stored / hosts
                arriving += tensor.size * stored * (1 - 1 / hosts)
                continue
            if partition is None:
                parts += read
                continue
            own = np.bincount(processes.ravel(), partition.own_elements(), hosts)
            held = np.bincount(processes.ravel(), minlength=hosts) * partition.box_elements
            parts += own * stored
            arriving += np.maximum(held - own, 0) * itemsize
        return {"read": self._way(plain, np.zeros(hosts)), "exchange": self._way(parts, arriving)}

    def share_nbytes(self, path: str) -> np.ndarray | None:
        """Bytes of an exchanged variable that each host reads; None if it is not exchanged."""
        if (partition := self.exchanged.get(path)) is None:
            return None
        tensor, processes, _ = self._tensors[path]
        return np.bincount(processes.ravel(), partition.own_elements()) * float(stored_itemsize(tensor.source))

    def _way(self, read: np.ndarray, exchanged: np.ndarray) -> Way:
        seconds: float | None = 0.0
        for amounts, name in ((read, "storage_bandwidth"), (exchanged, "link_bandwidth")):
            bandwidth = self._fleet.bandwidth(name)
            if seconds is not None and amounts.max():
                seconds = None if bandwidth is None else seconds + float(amounts.max()) / bandwidth
        return Way(tuple(map(int, read)), tuple(map(int, exchanged)), seconds)

    def _find_processes(self, mesh: Any) -> np.ndarray | None:
        """The host of each device; None if that is unknown."""
        if isinstance(mesh, Mesh):
            return mesh_processes(mesh)
        hosts = self._fleet.hosts
        if hosts is None:
            return None
        if mesh.size % hosts:
            raise LazyModelError(f"hosts={hosts} do not divide the {mesh.size} devices of the mesh")
        return (np.arange(mesh.size) // (mesh.size // hosts)).reshape(tuple(mesh.shape.values()))


def _distinct(sharding: Sharding, shape: tuple[int, ...], processes: np.ndarray, hosts: int) -> np.ndarray:
    """Elements of the distinct shards of each host."""
    assert isinstance(sharding, NamedSharding)
    places = dict(zip(sharding.mesh.axis_names, np.indices(processes.shape), strict=True))
    box = np.zeros(processes.shape, np.int64)
    for name in itertools.chain(*spec_axes(sharding.spec, len(shape))):
        box = box * sharding.mesh.shape[name] + places[name]
    pairs = np.unique(np.stack([processes.ravel(), box.ravel()]), axis=1)
    return np.bincount(pairs[0], minlength=hosts) * float(np.prod(sharding.shard_shape(shape)))

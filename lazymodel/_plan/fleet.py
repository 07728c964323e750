"""A fleet on paper: what each host reads from storage and gets over the interconnect, either way of loading replicas.

Responsible for counting bytes by host, and for seconds by dividing them. Who reads what is decided as `materialize`
decides it, in `_tensors/division`; hosts and devices need not be here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from lazymodel._abstract.placement import Placement, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import LazyModelError
from lazymodel._mapping.match import Choice
from lazymodel._show.text import format_bytes, parse_bytes
from lazymodel._tensors import division as dividing
from lazymodel._tensors.division import Division, check_replicas, divide, grouped, is_exchanged, mesh_processes
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import Leaf
from lazymodel._tensors.stored import stored_itemsize


@dataclasses.dataclass(frozen=True)
class Fleet:
    """What the hosts of a fleet have, for a plan.

    Attributes:
        hosts: How many there are, each with as many devices, in the mesh's order; for a mesh whose devices are mere
            numbers. Devices know their hosts themselves.
        storage_bandwidth: Bytes a second that one host reads from storage while all do, or `"200MB/s"`.
        link_bandwidth: Bytes a second that come to the devices of one host over the interconnect, or `"25GB/s"`.

    Raises:
        LazyModelError: `hosts` is no number of hosts, or a bandwidth none.

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
        """One of the two in bytes a second."""
        value = getattr(self, name)
        if isinstance(value, str):
            value = value.strip().removesuffix("/s")
        return None if value is None else parse_bytes(value, name=name, at_least=1)


@dataclasses.dataclass(frozen=True)
class Way:
    """What loading takes if replicas are read by each holder, or by one and exchanged.

    Attributes:
        read_nbytes: Bytes that each host reads from storage.
        exchanged_nbytes: Bytes that come to each host's devices from other devices.
        seconds: What the slowest host takes at the bandwidths of a `Fleet`, reading and exchanging one after the
            other; None where one of them is needed and not stated.
    """

    read_nbytes: tuple[int, ...]
    exchanged_nbytes: tuple[int, ...]
    seconds: float | None

    @property
    def total_read_nbytes(self) -> int:
        """Bytes that all hosts together read from storage."""
        return sum(self.read_nbytes)

    def text(self) -> str:
        """What it takes, for people."""
        parts = [f"{format_bytes(self.total_read_nbytes)} from storage, {format_bytes(max(self.read_nbytes))} a host"]
        if arriving := max(self.exchanged_nbytes):
            parts.append(f"{format_bytes(arriving)} a host over the interconnect")
        if self.seconds is not None:
            parts.append(f"about {self.seconds:,.1f} s")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `MemoryPlan.to_dict`."""
        own = {"read_nbytes": list(self.read_nbytes), "exchanged_nbytes": list(self.exchanged_nbytes)}
        return own | {"total_read_nbytes": self.total_read_nbytes, "seconds": self.seconds}


class Traffic:
    """Who reads and exchanges what.

    Attributes:
        exchanged: Path to division of the variables that `materialize` would exchange.
        imagined: Whether there is no checkpoint, and each variable counts as if it lay in one as it is.
    """

    def __init__(
        self, model: ModelSpec, choice: Choice, placement: Placement, fleet: Fleet | None, replicas: str | None
    ) -> None:
        check_replicas(replicas)
        tensors = {path: source for path, source in choice.sources.items() if isinstance(source, LazyTensor)}
        self.imagined = fleet is not None and not any(tensor.file for tensor in tensors.values())
        if self.imagined:
            tensors = {path: LazyTensor(_Imagined(path, *variable.stored)) for path, variable in model.items()}
        self._tensors = {path: each for path, each in tensors.items() if not stays_on_host(model[path])}
        self._shardings, self._fleet = placement.shardings, fleet or Fleet()
        self._model = model
        self._processes = functools.cache(self._find_processes)
        self._divisions: dict[str, Division] = {}
        for path, tensor in self._tensors.items():
            if (division := self._division(path, tensor)) is not None:
                self._divisions[path] = division
        self.exchanged = {
            path: division
            for path, division in self._divisions.items()
            if is_exchanged(self._tensors[path], replicas) or (self.imagined and replicas == "exchange")
        }

    def group_nbytes(self, order: Iterable[str]) -> dict[str, int]:
        """Bytes of a device that exchanging takes for a moment, for each variable that is exchanged, in load order."""
        spent = {
            path: self.exchanged[path].spent_elements * self._model[path].stored[1].itemsize
            for path in order
            if path in self.exchanged
        }
        groups = grouped(spent, dividing.GROUP)
        return {path: sum(spent[each] for each in group) for group in groups for path in group}

    def ways(self) -> dict[str, Way]:
        """Both ways; nothing where there are not several hosts."""
        hosts = 1 + max((int(found.max()) for found in self._all_processes()), default=0)
        if hosts == 1:
            return {}
        plain, parts, arriving = (np.zeros(hosts) for _ in range(3))
        for path, tensor in self._tensors.items():
            sharding = self._shardings[path]
            processes = self._processes(_mesh(sharding))
            if processes is None:
                continue
            stored, itemsize = float(stored_itemsize(tensor.leaf) or tensor.dtype.itemsize), tensor.dtype.itemsize
            read = _distinct(sharding, tuple(tensor.shape), processes, hosts) * stored
            plain += read
            if (division := self._divisions.get(path)) is None:
                parts += read
                continue
            own = np.bincount(processes.ravel(), division.all_own_elements(), hosts)
            held = np.bincount(processes.ravel(), minlength=hosts) * division.box_elements
            parts += own * stored
            arriving += np.maximum(held - own, 0) * itemsize
        return {"read": self._way(plain, np.zeros(hosts)), "exchange": self._way(parts, arriving)}

    def read_nbytes(self, process: int, nbytes: int) -> int:
        """What a process reads in the way that is taken, of which it would read so many bytes otherwise."""
        for path, division in self.exchanged.items():
            tensor, processes = self._tensors[path], self._processes(_mesh(self._shardings[path]))
            assert processes is not None
            hosts = int(processes.max()) + 1
            itemsize = stored_itemsize(tensor.leaf)
            before = _distinct(self._shardings[path], tuple(tensor.shape), processes, hosts)[process]
            after = np.bincount(processes.ravel(), division.all_own_elements(), hosts)[process]
            nbytes += int((int(after) - int(before)) * itemsize)
        return nbytes

    def _way(self, read: np.ndarray, exchanged: np.ndarray) -> Way:
        seconds: float | None = 0.0
        for amounts, name in ((read, "storage_bandwidth"), (exchanged, "link_bandwidth")):
            bandwidth = self._fleet.bandwidth(name)
            if seconds is not None and amounts.max():
                seconds = None if bandwidth is None else seconds + float(amounts.max()) / bandwidth
        return Way(tuple(map(int, read)), tuple(map(int, exchanged)), seconds)

    def _all_processes(self) -> list[np.ndarray]:
        found = (self._processes(_mesh(self._shardings[path])) for path in self._tensors)
        return [each for each in found if each is not None]

    def _find_processes(self, mesh: Any) -> np.ndarray | None:
        """The host of each device; None where that is not known."""
        if isinstance(mesh, Mesh):
            return mesh_processes(mesh)
        hosts = self._fleet.hosts
        if mesh is None or hosts is None:
            return None
        if mesh.size % hosts:
            raise LazyModelError(f"hosts={hosts} do not divide the {mesh.size} devices of the mesh")
        return (np.arange(mesh.size) // (mesh.size // hosts)).reshape(tuple(mesh.shape.values()))

    def _division(self, path: str, tensor: LazyTensor) -> Division | None:
        sharding = self._shardings[path]
        processes = self._processes(_mesh(sharding))
        if processes is None or not (tensor.leaf.sources() or self.imagined):
            return None
        return divide(tensor, sharding, processes)


class _Imagined(Leaf):
    """A tensor that nobody will read."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.file, self.offset, self.shape, self.dtype = name, "", 0, shape, dtype


def _mesh(sharding: Sharding) -> Any:
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _distinct(sharding: Sharding, shape: tuple[int, ...], processes: np.ndarray, hosts: int) -> np.ndarray:
    """Elements of the distinct shards of each host."""
    assert isinstance(sharding, NamedSharding)
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec if entry is not None]
    names = list(sharding.mesh.axis_names)
    axes = [names.index(name) for entry in entries for name in entry]
    places = np.indices(processes.shape)
    box = np.zeros(processes.shape, np.int64)
    for axis in axes:
        box = box * processes.shape[axis] + places[axis]
    pairs = np.unique(np.stack([processes.ravel(), box.ravel()]), axis=1)
    return np.bincount(pairs[0], minlength=hosts) * float(np.prod(sharding.shard_shape(shape)))

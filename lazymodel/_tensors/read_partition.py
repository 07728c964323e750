"""Divides a tensor among all devices that hold any of it, so that each of its bytes is read by one of them.

Decides who reads what, by arithmetic on meshes whose devices need not exist here. `_materialize/reshard` brings the
parts together.

A device holds a region of the tensor, which other devices may hold too. The members of such a group divide the region
along an outer axis of the file, so that each reads one range of it: the array is read under a finer sharding than its
own. If regions are columns whose rows are so short that reading them one by one would read the bytes of their
neighbours as well, all devices that hold some of the columns are one group, and divide whole rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._errors import LazyModelError
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor

# Bytes of a variable below which every process reads it: a request for its file's neighbourhood is made anyway, while
# an exchange costs every process a program and a round over the network, which takes as long as reading this.
SMALL = 64 << 10
# Limit, in bytes per device, of the parts that wait for their exchange and of the memory for exchanging them. It is a
# tenth of a device's memory and enough to spend seconds on, so waiting for other processes between two groups costs
# nothing.
GROUP = 1 << 30
_PADDING = 1 / 16  # of what a group reads: how uneven shares may be before another axis is divided


@dataclasses.dataclass(frozen=True)
class ReadPartition:
    """A finer layout in which an array is read. Shares that do not divide evenly are padded to `each`."""

    mesh: Any  # a `Mesh` or `AbstractMesh`
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]  # mesh axes along which each axis is split in the end
    axis: int  # the axis that the members of a group divide
    spread: tuple[int, ...]  # axes of which a group reads the whole extent, but a device holds only a part in the end
    gathered: tuple[str, ...]  # mesh axes along which the array is replicated
    each: int  # indices of `axis` that a member reads

    @property
    def members(self) -> tuple[str, ...]:
        """Mesh axes that connect the devices of a group, in the order of their shares."""
        return (*self.gathered, *(name for axis in self.spread for name in self.axes[axis]))

    @property
    def shards(self) -> int:
        """Groups along `axis`, each of `rows` indices, padded to `padded_rows`."""
        return mesh_size(self.mesh, self.axes[self.axis])

    @property
    def rows(self) -> int:
        return self.shape[self.axis] // self.shards

    @property
    def padded_rows(self) -> int:
        return self.each * mesh_size(self.mesh, self.members)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the array as it is read."""
        return (*self.shape[: self.axis], self.shards * self.padded_rows, *self.shape[self.axis + 1 :])

    @property
    def specs(self) -> list[PartitionSpec]:
        """Layouts from the one in which the array is read to its own; one collective operation between each two."""
        found = [self.axes]
        now = [*self.axes]
        now[self.axis] += self.gathered
        # Outermost first in this order, so that the innermost members are the first to be spread.
        for axis in (None, *self.spread):
            if axis is not None:
                now[self.axis] += now[axis]
                now[axis] = ()
            found.insert(0, (*now,))
        return [PartitionSpec(*axes) for axes in found]

    @property
    def spent_elements(self) -> int:
        """Elements that a device holds in addition to its result: its part, and memory for exchanging it."""
        part = self.each * self._row_elements
        # As in XLA:CPU: a buffer for each operation, the last of which is rearranged into the result.
        return part + (part if self.spread else 0) + mesh_size(self.mesh, self.gathered) * part

    @property
    def box_elements(self) -> int:
        """Elements that a device holds in the end."""
        sizes = (mesh_size(self.mesh, names) for names in self.axes)
        return math.prod(extent // size for extent, size in zip(self.shape, sizes, strict=True))

    @property
    def _row_elements(self) -> int:
        """Elements of one index of `axis` that a member reads."""
        whole = math.prod(mesh_size(self.mesh, self.axes[axis]) for axis in self.spread)
        return self.box_elements // self.rows * whole

    def own_elements(self) -> np.ndarray:
        """Elements that each device reads, by its position in the flattened mesh."""
        sizes = tuple(self.mesh.shape.values())
        places = dict(zip(self.mesh.axis_names, np.indices(sizes), strict=True))
        member = np.zeros(sizes, np.int64)
        for name in self.members:
            member = member * self.mesh.shape[name] + places[name]
        return np.clip(self.rows - member * self.each, 0, self.each).ravel() * self._row_elements

    def padded(self, tensor: LazyTensor) -> LazyTensor:
        """The tensor as it is read. Nothing is read for the padding."""
        if self.padded_rows == self.rows:
            return tensor
        shape = (*self.shape[: self.axis], self.padded_rows - self.rows, *self.shape[self.axis + 1 :])
        padding = np.broadcast_to(np.zeros((), tensor.dtype), shape)
        numpy: Any = np  # its functions accept lazy tensors, but its types do not
        parts = [each for part in numpy.split(tensor, self.shards, self.axis) for each in (part, padding)]
        return numpy.concatenate(parts, self.axis, dtype=tensor.dtype)


def divide(tensor: LazyTensor, sharding: Sharding, processes: np.ndarray) -> ReadPartition | None:
    """Divides a tensor among its holders. Returns None if each reads what it holds: if the tensor is small, if no two
    processes would read the same bytes, or if its devices are in no mesh or hold it in memory other than their own.

    Args:
        tensor: The tensor to read, of the sharded array's shape.
        sharding: Its sharding.
        processes: The process of every device of its mesh, as an array of the mesh's shape.
    """
    if not isinstance(sharding, NamedSharding) or tensor.nbytes < SMALL or not _is_own_memory(sharding):
        return None
    mesh, shape = sharding.mesh, tensor.shape
    axes = tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    )
    read_by = tensor.source.readers() or (ByteReader,)
    call, gap = max(source.row_call for source in read_by), max(source.row_gap for source in read_by)

    def short(axis: int, parts: int) -> bool:
        """Returns True if runs of so many parts of an axis cannot be read without the bytes between them."""
        run = shape[axis] // parts * abs(tensor.addresses.strides[axis])
        return parts > 1 and run < call and run * (parts - 1) < gap

    first, *others = tensor.file_order()
    sizes = [mesh_size(mesh, names) for names in axes]
    spread = tuple(axis for axis in others if short(axis, sizes[axis]))
    used = {name for names in axes for name in names}
    gathered = tuple(name for name in mesh.axis_names if name not in used)
    members = (*gathered, *(name for axis in spread for name in axes[axis]))
    if not _crosses(processes, [list(mesh.axis_names).index(name) for name in members]):
        return None
    count = mesh_size(mesh, members)
    found: list[tuple[float, int, int]] = []  # padding, axis and share of each axis that may be divided
    for axis in (first, *(axis for axis in others if axis not in spread and not short(axis, sizes[axis] * count))):
        rows = shape[axis] // sizes[axis]
        each = -(-rows // count)
        if axis == first:  # the chunks of a file are read whole
            each += -each % tensor.source.row_step
        found.append((each * count / rows - 1, axis, each))
    _, axis, each = next((one for one in found if one[0] <= _PADDING), min(found))
    return ReadPartition(mesh, tuple(shape), axes, axis, spread, gathered, each)


def check_replicas(replicas: str | None) -> None:
    """Raises LazyModelError if this is not a way of loading replicas."""
    if replicas not in ("read", "exchange", None):
        raise LazyModelError(f"expected replicas='read', 'exchange' or None, got {replicas!r}")


def is_exchanged(tensor: LazyTensor, replicas: str | None) -> bool:
    """Returns True if only one of several processes that hold a tensor reads it, as `materialize` documents it."""
    read_by = tensor.source.readers()
    wanted = replicas == "exchange" or (replicas is None and any(source.remote for source in read_by))
    return wanted and bool(read_by)


def _is_own_memory(sharding: NamedSharding) -> bool:
    """Returns True if devices hold the array in the memory that they compute with."""
    kind, mesh = sharding.memory_kind, sharding.mesh
    if kind is None or not isinstance(mesh, Mesh):
        return "host" not in (kind or "")
    return kind == mesh.devices.flat[0].default_memory().kind


def _crosses(processes: np.ndarray, members: Sequence[int]) -> bool:
    """Returns True if the devices of any group, which are along some axes of the mesh, belong to several processes."""
    others = [axis for axis in range(processes.ndim) if axis not in members]
    size = math.prod(processes.shape[axis] for axis in members)
    groups = processes.transpose([*others, *members]).reshape(-1, size)
    return bool((groups != groups[:, :1]).any())


def mesh_size(mesh: Any, names: Iterable[str]) -> int:
    """Number of devices along some axes of a mesh."""
    return math.prod(mesh.shape[name] for name in names)


def mesh_processes(mesh: Any) -> np.ndarray:
    """The process of each device of a mesh."""
    return np.array([device.process_index for device in mesh.devices.flat]).reshape(mesh.devices.shape)


def grouped(nbytes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Divides paths, in order, into groups of at most `limit` bytes; a path with more bytes is a group of its own."""
    group: list[str] = []
    together = 0
    for path, each in nbytes.items():
        if group and together + each > limit:
            yield group
            group, together = [], 0
        group.append(path)
        together += each
    if group:
        yield group

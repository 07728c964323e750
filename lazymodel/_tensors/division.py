"""How a tensor is divided among all devices that hold any of it, so that each of its bytes is read by one of them.

Responsible for who reads what, as arithmetic on meshes whose devices need not be here, and for what is read as a tensor
of its own. How the parts come together is in `_materialize/exchange`.

A device holds a box of the tensor, which other devices may hold too. The members of such a group divide the box along
its outermost axes in the file, so that each reads one range of it. Where boxes are columns whose rows are so short that
reading them one by one would read their neighbours' bytes as well, all that hold some of the columns are one group, and
divide whole rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from lazymodel._errors import LazyModelError
from lazymodel._tensors.boxes import Box, box_shape, unshift, whole_box
from lazymodel._tensors.fill import fill_parts
from lazymodel._tensors.leaves import DividedLeaf, Part, View
from lazymodel._tensors.source import Source

# Bytes of a variable below which every process reads it: a request for its file's neighbourhood is made anyway, while
# an exchange costs every process a program and a round over the network, which is as long as reading this takes.
SMALL = 64 << 10
# Bytes of a device that the parts which wait for their exchange, and what exchanging them takes, may have together. A
# tenth of what devices have and enough to spend seconds on, so that waiting for one another between two costs nothing.
GROUP = 1 << 30
_EVEN = 16  # rows for each member of a group, at least, so that the last one's share is within 1/16 of the others'


@dataclasses.dataclass(frozen=True)
class Division:
    """Who reads what of an array, and which collective operations bring it where it belongs.

    "Rows" are indices of the first `lead` axes in file order, flattened; a device has `rows` of them, the last members
    of a group fewer, which are padded.
    """

    mesh: Any  # a `Mesh` or `AbstractMesh`
    order: tuple[int, ...]  # the array's axes in file order; whatever follows is in it too
    extents: tuple[int, ...]  # of what a group divides: a box of the array
    axes: tuple[tuple[str, ...], ...]  # the mesh axes along which each axis is split
    spread: tuple[int, ...]  # positions of those of which a group has the whole extent, and a device in the end a part
    gathered: tuple[str, ...]  # the mesh axes along which the array is replicated
    lead: int
    rows: int

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows that a group divides."""
        return math.prod(self.extents[: self.lead])

    @functools.cached_property
    def part_shape(self) -> tuple[int, ...]:
        """What a device reads: its rows, and each row's own axes."""
        return (self.rows, *self.extents[self.lead :])

    @functools.cached_property
    def box(self) -> tuple[int, ...]:
        """What a device holds in the end, in file order."""
        sizes = (_size(self.mesh, self.axes[position]) for position in range(len(self.extents)))
        return tuple(
            extent // size if position in self.spread else extent
            for position, (extent, size) in enumerate(zip(self.extents, sizes, strict=True))
        )

    @property
    def members(self) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group lie, in the order of their rows."""
        return (*self.gathered, *(axis for position in self.spread for axis in self.axes[position]))

    @property
    def spent_elements(self) -> int:
        """Elements that a device has besides what it holds in the end: its part, and what exchanging it takes."""
        part = math.prod(self.part_shape)
        # As XLA:CPU has it: a buffer for each operation, the last of which is rearranged into the result.
        return part + (part if self.spread else 0) + _size(self.mesh, self.gathered) * part

    @property
    def box_elements(self) -> int:
        """Elements that a device holds in the end."""
        return math.prod(self.box)

    def all_own_elements(self) -> np.ndarray:
        """Elements that each device reads, by its position in the flattened mesh."""
        sizes = tuple(self.mesh.shape.values())
        places = dict(zip(self.mesh.axis_names, np.indices(sizes), strict=True))
        member = np.zeros(sizes, np.int64)
        for name in self.members:
            member = member * self.mesh.shape[name] + places[name]
        rows = np.clip(self.num_rows - member * self.rows, 0, self.rows)
        return rows.ravel() * math.prod(self.part_shape[1:])

    def share(self, device: int) -> tuple[Box, int, int]:
        """The box that the group of a device divides, in file order, and its own rows of it: first and last + 1.

        `device` is its position in the flattened mesh.
        """
        indices = np.unravel_index(device, tuple(self.mesh.shape.values()))
        place = dict(zip(self.mesh.axis_names, map(int, indices), strict=True))
        corner = [
            0 if position in self.spread else _index(self.mesh, axes, place) * extent
            for position, (axes, extent) in enumerate(zip(self.axes, self.extents, strict=True))
        ]
        box = tuple(slice(start, start + extent) for start, extent in zip(corner, self.extents, strict=True))
        first = min(_index(self.mesh, self.members, place) * self.rows, self.num_rows)
        return box, first, min(first + self.rows, self.num_rows)


def divide(tensor: View, sharding: Sharding, processes: np.ndarray) -> Division | None:
    """How the holders of a tensor divide it; None where each reads what it holds: it is small, no two processes would
    read the same bytes, or its devices are in no mesh or hold it in other memory than their own.

    Args:
        tensor: What is read, of the sharded array's shape.
        sharding: Where it goes.
        processes: The process of every device of its mesh, as an array of the mesh's shape.
    """
    if not isinstance(sharding, NamedSharding) or tensor.nbytes < SMALL or not _is_own_memory(sharding):
        return None
    mesh, shape = sharding.mesh, tensor.shape
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    order = tuple(tensor.file_order())
    axes = tuple(_names(spec[axis]) for axis in order)
    sizes = [_size(mesh, names) for names in axes]
    extents = [shape[axis] // size for axis, size in zip(order, sizes, strict=True)]
    used = {name for names in axes for name in names}
    gathered = tuple(name for name in mesh.axis_names if name not in used)
    short = _short(tensor, order, sizes)
    lead, spread = 1, short
    while True:
        members = (*gathered, *(name for position in spread for name in axes[position]))
        rows = math.prod(extents[:lead])
        enough = rows >= _EVEN * _size(mesh, members)
        if enough or lead == len(order) or lead in short:
            break
        lead += 1
    if not _crosses(processes, [list(mesh.axis_names).index(name) for name in members]):
        return None
    for position in spread:
        extents[position] *= sizes[position]
    each = -(-rows // _size(mesh, members))
    if lead == 1 and tensor.leaf.row_step > 1:  # what a file has in chunks is read in chunks
        each += -each % tensor.leaf.row_step
    return Division(mesh, order, tuple(extents), axes, spread, gathered, lead, each)


def check_replicas(replicas: str | None) -> None:
    """Raises LazyModelError for what is no way of loading replicas."""
    if replicas not in ("read", "exchange", None):
        raise LazyModelError(f"replicas is 'read', 'exchange' or None; got {replicas!r}")


def is_exchanged(tensor: View, replicas: str | None) -> bool:
    """Whether a tensor that several processes hold is read by one of them, as `AbstractModel.materialize` says."""
    read_by = tensor.leaf.sources()
    wanted = replicas == "exchange" or (replicas is None and any(source.remote for source in read_by))
    return wanted and bool(read_by)


def _is_own_memory(sharding: NamedSharding) -> bool:
    """Whether devices hold it in the memory that they compute with."""
    kind, mesh = sharding.memory_kind, sharding.mesh
    if kind is None or not isinstance(mesh, Mesh):
        return "host" not in (kind or "")
    return kind == mesh.devices.flat[0].default_memory().kind


def _short(tensor: View, order: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Positions of the axes that are split into runs so short that what lies between them would be read as well."""
    read_by = tensor.leaf.sources() or (Source,)
    call, gap = max(source.row_call for source in read_by), max(source.row_gap for source in read_by)
    found: list[int] = []
    for position, (axis, size) in enumerate(zip(order, sizes, strict=True)):
        run = tensor.shape[axis] // size * abs(tensor.addresses.strides[axis])
        if position and size > 1 and run < call and run * (size - 1) < gap:
            found.append(position)
    return tuple(found)


def _crosses(processes: np.ndarray, members: Sequence[int]) -> bool:
    """Whether any group, whose devices lie along some axes of the mesh, has devices of several processes."""
    others = [axis for axis in range(processes.ndim) if axis not in members]
    size = math.prod(processes.shape[axis] for axis in members)
    groups = processes.transpose([*others, *members]).reshape(-1, size)
    return bool((groups != groups[:, :1]).any())


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a partition spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _size(mesh: Any, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _index(mesh: Any, names: Sequence[str], place: Mapping[str, int]) -> int:
    """Which one a device is of those along some mesh axes, the first of which is the outermost."""
    index = 0
    for name in names:
        index = index * mesh.shape[name] + place[name]
    return index


def grouped(nbytes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Divides paths, in order, into groups of at most `limit` bytes, or of one that has more."""
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


def mesh_processes(mesh: Any) -> np.ndarray:
    """The process of each device of a mesh."""
    return np.array([device.process_index for device in mesh.devices.flat]).reshape(mesh.devices.shape)


class PartsLeaf(DividedLeaf):
    """The parts of all devices one after the other, in the order of the mesh, each of `Division.part_shape`.

    Its elements are the tensor's bits, of another dtype of the same size if one is given. What pads them is whatever
    was there before.
    """

    def __init__(self, tensor: View, division: Division, dtype: np.dtype[Any]) -> None:
        self.name, self.file, self.offset, self.dtype = tensor.name, tensor.file, tensor.offset, dtype
        self.shape = (division.mesh.size * division.rows, *division.part_shape[1:])
        self.unit_nbytes = tensor.leaf.unit_nbytes
        self.pieces = (tensor,)
        self._tensor, self._division = tensor.transpose(division.order), division

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Any) -> list[Part]:
        wanted: list[Box] = []
        targets: list[np.ndarray] = []
        for box, out in zip(boxes, outs, strict=True):
            values = out.view(self._tensor.dtype)
            for piece, rows, lead in self._pieces(box):
                wanted.append(piece)
                targets.append(np.reshape(values[rows], (*lead, *values.shape[1:]), copy=False))
        assert not steps, "bits are not converted"
        return fill_parts(self._tensor, wanted, targets)

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        yield self._tensor, [piece for box in boxes for piece, _, _ in self._pieces(box)]

    def _pieces(self, box: Box) -> Iterator[tuple[Box, slice, tuple[int, ...]]]:
        """The boxes of the tensor that a box consists of, each with its rows of that box and its leading extents."""
        each, wanted, lead = self._division.rows, box[0], self._division.lead
        for device in range(wanted.start // each, -(-wanted.stop // each)):
            region, first, last = self._division.share(device)
            start = max(wanted.start - device * each, 0)
            stop = min(wanted.stop - device * each, last - first)
            if start >= stop:
                continue
            begin = device * each - wanted.start - first
            for corner, part in ranges(self._division.extents[:lead], first + start, first + stop):
                rows = slice(begin + part.start, begin + part.stop)
                yield unshift((*corner, *box[1:]), region), rows, box_shape(corner)


def ranges(extents: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, slice]]:
    """Divides a range of a flattened array into boxes, each with the part of the range that it is, in order."""
    inner = math.prod(extents[1:])
    if len(extents) == 1 or (start % inner == 0 and stop % inner == 0):
        yield (slice(start // inner, stop // inner), *whole_box(extents[1:])), slice(start, stop)
        return
    while start < stop:
        row = start // inner
        end = stop // inner if start % inner == 0 and stop // inner > row else row + 1
        until = min(end * inner, stop)
        if start % inner == 0 and until == end * inner:
            yield (slice(row, end), *whole_box(extents[1:])), slice(start, until)
        else:
            for box, part in ranges(extents[1:], start - row * inner, until - row * inner):
                yield (slice(row, row + 1), *box), slice(part.start + row * inner, part.stop + row * inner)
        start = until

"""Groups of small tensors: neighbours in a file that the stream reads, converts and hands over together.

A tensor of a few KiB is read in less time than it takes to plan for it, to hand it from thread to thread and to look
whether its file has changed. So the stream makes one job of many: one read for what lies side by side, one buffer,
one thread. Responsible for which tensors are small enough and simple enough, and for filling a group; what may be in
flight, and what becomes of the arrays, is decided in `_stream`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._boxes import Boxes
from lazymodel._errors import CheckpointError
from lazymodel._file_source import ALIGNMENT, FileSource, Workspace, assign
from lazymodel._geometry import box_shape, geometry_of
from lazymodel._lazy_tensor import FileLeaf, LazyTensor, Leaf, fill_parts

_jax = cast(Any, jax)  # parts of JAX's own annotations are incomplete

SMALL = 64 << 10  # bytes of a tensor; a larger one gains little, and is worth the attention of several threads
GROUP = 512 << 10  # bytes of a group: a hundred times what its overhead takes, and all of it lives as long as any of it


@dataclasses.dataclass(frozen=True, eq=False)
class Small:
    """A tensor that can be part of a group.

    Attributes:
        tensor: What it is, of its variable's dtype.
        sharding: Where it goes.
        boxes: The parts that devices hold.
        start: First byte of its elements in the leaf, if that is a range of a file with nothing else in it; None for
            what is read in its own way, whole: a part of a tensor, what is compressed or joined, an array in memory.
        stored_nbytes: Bytes of that range; 0 where there is none.
        placed_nbytes: Bytes of all its boxes, each with a cache line to begin with.
        spent_nbytes: Bytes of temporaries that converting it takes.
    """

    tensor: LazyTensor
    sharding: Sharding
    boxes: Boxes
    start: int | None
    stored_nbytes: int
    placed_nbytes: int
    spent_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it takes while its group is filled."""
        return self.stored_nbytes + self.placed_nbytes + self.spent_nbytes


def small(tensor: LazyTensor, sharding: Sharding, boxes: Boxes) -> Small | None:
    """How a tensor can be part of a group, if it can: it is small, and all of it is wanted here."""
    size, itemsize = tensor.size, tensor.itemsize
    nbytes, stored_nbytes = size * itemsize, size * tensor.itemsize_stored
    if not boxes.whole or not size or max(stored_nbytes, nbytes) > SMALL:
        return None
    placed = sum(_padded(elements * itemsize) for elements in boxes.sizes)
    # What goes into a conversion, what comes out, and a mask or the like.
    widest = max([tensor.itemsize_stored, *(step.dtype.itemsize for step in tensor.steps)])
    spent = 3 * size * widest if tensor.steps else 0
    start = _dense_start(tensor)
    if start is None:
        spent += nbytes + tensor.leaf.unit_nbytes
    return Small(tensor, sharding, boxes, start, 0 if start is None else stored_nbytes, placed, spent)


def _dense_start(tensor: LazyTensor) -> int | None:
    """The first byte of its elements in the leaf, if that is a range of a file with nothing else in it."""
    if type(tensor.leaf) is not FileLeaf:
        return None
    geometry = geometry_of(tensor._view)
    start, span = geometry.start, tensor.itemsize_stored
    for extent, stride in zip(geometry.shape, geometry.strides, strict=True):
        if extent > 1 and not stride:
            return None  # repeated, so that something else may lie between its elements
        span += (extent - 1) * abs(stride)
        start += min((extent - 1) * stride, 0)
    return start if span == tensor.size * tensor.itemsize_stored else None


class Group:
    """Small tensors in the order of their file.

    Attributes:
        members: The tensors.
        placed_nbytes: Bytes of the buffer that their boxes are put into.
        values_nbytes: Bytes of their boxes alone.
        nbytes: Bytes of host memory that filling it takes, that buffer included.
        current: Number of the member to which an error is due.
    """

    def __init__(self, members: Sequence[Small]) -> None:
        self.members = tuple(members)
        self.placed_nbytes = sum(member.placed_nbytes for member in members)
        self.values_nbytes = sum(sum(member.boxes.sizes) * member.tensor.itemsize for member in members)
        self.nbytes = self.placed_nbytes + sum(member.stored_nbytes for member in members)
        self.nbytes += max(member.spent_nbytes for member in members)
        self.current = 0

    def arrays(self, buffer: np.ndarray, workspace: Workspace) -> list[jax.Array]:
        """Reads all members into a 64-byte-aligned buffer of `placed_nbytes` bytes, and makes their arrays.

        Where devices use the host's memory the arrays live in the buffer, which must not be written to again. On
        others they are complete when this returns.

        Raises:
            CheckpointError: A file is truncated, changed or unreadable; `current` says for which member.
        """
        raw = np.empty(sum(member.stored_nbytes for member in self.members), np.uint8)
        self._read(raw)
        arrays: list[jax.Array] = []
        read = placed = 0
        for number, member in enumerate(self.members):
            self.current = number
            values = _values(member, raw, read, workspace)
            arrays.append(_array(member, values, buffer, placed))
            read += member.stored_nbytes
            placed += member.placed_nbytes
            member.tensor.leaf.release()
        _jax.block_until_ready(arrays)
        return arrays

    def _read(self, raw: np.ndarray) -> None:
        """Reads the members that are ranges of files: with one call what lies side by side."""
        ranges = [(number, member.tensor.leaf) for number, member in enumerate(self.members) if member.stored_nbytes]
        try:
            first = done = 0
            while first < len(ranges):
                source, last = _source(ranges[first][1]), first
                begin = end = self._offset(ranges[first][0])
                while last < len(ranges) and _source(ranges[last][1]) is source:
                    number, _ = ranges[last]
                    if self._offset(number) != end:
                        break
                    end += self.members[number].stored_nbytes
                    last += 1
                source.read_into(begin, raw[done : done + end - begin])
                done += end - begin
                first = last
            for source in {id(source): source for _, leaf in ranges if (source := _source(leaf))}.values():
                source.check_unchanged()
        except CheckpointError:
            self._find_unreadable()
            raise

    def _find_unreadable(self) -> None:
        """Raises the error of the first member that cannot be read, if it still cannot be."""
        for number, member in enumerate(self.members):
            self.current = number
            if member.start is not None:
                leaf = cast(FileLeaf, member.tensor.leaf)
                leaf.fill_runs(member.start, [np.empty(member.stored_nbytes, np.uint8)])
        self.current = 0

    def _offset(self, number: int) -> int:
        member = self.members[number]
        return member.tensor.leaf.offset + (member.start or 0)


def groups(smalls: Sequence[Small | None], limit: int) -> Iterator[tuple[range, Group | None]]:
    """Divides tensors, None for those that are not small, into groups whose filling takes at most `limit` bytes.

    Yields:
        Numbers of neighbours and the group that they are, or one number and None, in order.
    """
    limit = min(limit, GROUP)
    first = together = spent = 0
    for number in range(len(smalls) + 1):
        member = smalls[number] if number < len(smalls) else None
        fits = member is not None and member.nbytes <= limit
        if member is not None and fits:
            more = together + member.stored_nbytes + member.placed_nbytes
            if more + max(spent, member.spent_nbytes) <= limit:
                together, spent = more, max(spent, member.spent_nbytes)
                continue
        if first < number:
            yield range(first, number), Group([one for one in smalls[first:number] if one is not None])
        first, together, spent = number, 0, 0
        if member is not None and fits:
            together, spent = member.stored_nbytes + member.placed_nbytes, member.spent_nbytes
        elif number < len(smalls):
            yield range(number, number + 1), None
            first = number + 1


def _source(leaf: Leaf) -> FileSource:
    return cast(FileLeaf, leaf).source


def _values(member: Small, raw: np.ndarray, position: int, workspace: Workspace) -> np.ndarray:
    """A member's elements, converted."""
    tensor = member.tensor
    if member.start is None:
        values = np.empty(tensor.shape, tensor.dtype)
        for part in fill_parts(tensor, [tuple(slice(0, extent) for extent in tensor.shape)], [values]):
            part.run(workspace)
        return values
    geometry = geometry_of(tensor._view)
    offset = position + geometry.start - member.start
    stored = np.ndarray(geometry.shape, tensor.leaf.dtype, cast(Any, raw), offset, geometry.strides)
    if not tensor.steps:
        return stored
    values = np.empty(geometry.shape, tensor.dtype)
    assign(values, stored, tensor.steps)
    return values


def _array(member: Small, values: np.ndarray, buffer: np.ndarray, position: int) -> jax.Array:
    """The sharded array of a member, its boxes put into the buffer from a position on."""
    boxes, dtype = member.boxes, member.tensor.dtype
    shards: list[np.ndarray] = []
    for box, elements in zip(boxes.boxes, boxes.sizes, strict=True):
        shard = np.ndarray(box_shape(box), dtype, cast(Any, buffer), position)
        shard[...] = values[(*box, ...)]
        shards.append(shard)
        position += _padded(elements * dtype.itemsize)

    def find(index: Any) -> np.ndarray:
        return shards[boxes.number(index)]

    # On CPU replicas share a shard's memory. That is safe: XLA never writes into memory it was lent, donated or
    # not (tests/core/test_stream.py holds it to that). One call for all devices is 7 × as fast as one each.
    return jax.make_array_from_callback(tuple(values.shape), member.sharding, find, dtype=dtype)


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT

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
from lazymodel._file_source import ALIGNMENT, assign
from lazymodel._geometry import box_shape, geometry_of
from lazymodel._lazy_tensor import ArrayLeaf, FileLeaf, LazyTensor

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
        start: First byte of its elements in the leaf, which has nothing else up to the last one.
        stored_nbytes: Bytes that are read for it: 0 for an array in memory.
        placed_nbytes: Bytes of all its boxes, each with a cache line to begin with.
        spent_nbytes: Bytes of temporaries that converting it takes.
    """

    tensor: LazyTensor
    sharding: Sharding
    boxes: Boxes
    start: int
    stored_nbytes: int
    placed_nbytes: int
    spent_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it takes while its group is filled."""
        return self.stored_nbytes + self.placed_nbytes + self.spent_nbytes


def small(tensor: LazyTensor, sharding: Sharding, boxes: Boxes) -> Small | None:
    """How a tensor can be part of a group, if it can: its bytes lie together, few, and all of them are wanted."""
    leaf, size, itemsize = tensor.leaf, tensor.size, tensor.itemsize
    stored = size * tensor.itemsize_stored
    if not boxes.whole or not size or max(stored, size * itemsize) > SMALL:
        return None
    start = 0
    if type(leaf) is FileLeaf:
        geometry = geometry_of(tensor._view)
        start, span = geometry.start, tensor.itemsize_stored
        for extent, stride in zip(geometry.shape, geometry.strides, strict=True):
            if extent > 1 and not stride:
                return None  # repeated, so that something else may lie between its elements
            span += (extent - 1) * abs(stride)
            start += min((extent - 1) * stride, 0)
        if span != stored:
            return None
    elif type(leaf) is not ArrayLeaf or leaf.array.nbytes > SMALL:
        return None
    placed = sum(_padded(elements * itemsize) for elements in boxes.sizes)
    widest = max([tensor.itemsize_stored, *(step.dtype.itemsize for step in tensor.steps)])
    spent = 3 * size * widest if tensor.steps else 0  # what goes in, what comes out, and a mask or the like
    return Small(tensor, sharding, boxes, start, stored if isinstance(leaf, FileLeaf) else 0, placed, spent)


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

    def arrays(self, buffer: np.ndarray) -> list[jax.Array]:
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
            values = _values(member, raw, read)
            arrays.append(_array(member, values, buffer, placed))
            read += member.stored_nbytes
            placed += member.placed_nbytes
        _jax.block_until_ready(arrays)
        return arrays

    def _read(self, raw: np.ndarray) -> None:
        """Reads what is stored: with one call what lies side by side."""
        first = done = 0
        try:
            while first < len(self.members):
                leaf, last = self.members[first].tensor.leaf, first + 1
                if isinstance(leaf, FileLeaf):
                    begin = self._offset(first)
                    end = begin + self.members[first].stored_nbytes
                    while last < len(self.members) and self._follows(last, leaf, end):
                        end += self.members[last].stored_nbytes
                        last += 1
                    leaf.source.read_into(begin, raw[done : done + end - begin])
                    done += end - begin
                first = last
            for source in {id(source): source for member in self.members if (source := _source(member))}.values():
                source.check_unchanged()
        except CheckpointError:
            self._find_unreadable()
            raise

    def _find_unreadable(self) -> None:
        """Raises the error of the first member that cannot be read, if it still cannot be."""
        for number, member in enumerate(self.members):
            self.current = number
            leaf = member.tensor.leaf
            if isinstance(leaf, FileLeaf):
                leaf.fill_runs(member.start, [np.empty(member.stored_nbytes, np.uint8)])
        self.current = 0

    def _follows(self, number: int, leaf: FileLeaf, end: int) -> bool:
        """Whether a member begins at a byte of the file that a leaf is in."""
        return _source(self.members[number]) is leaf.source and self._offset(number) == end

    def _offset(self, number: int) -> int:
        member = self.members[number]
        return member.tensor.leaf.offset + member.start


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


def _source(member: Small) -> Any:
    """The file that a member is in, or None for an array in memory."""
    leaf = member.tensor.leaf
    return leaf.source if isinstance(leaf, FileLeaf) else None


def _values(member: Small, raw: np.ndarray, position: int) -> np.ndarray:
    """A member's elements, converted."""
    tensor, leaf = member.tensor, member.tensor.leaf
    geometry = geometry_of(tensor._view)
    memory, offset = raw, position + geometry.start - member.start
    if isinstance(leaf, ArrayLeaf):
        memory, offset = np.ascontiguousarray(leaf.array), geometry.start
    stored = np.ndarray(geometry.shape, leaf.dtype, cast(Any, memory), offset, geometry.strides)
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

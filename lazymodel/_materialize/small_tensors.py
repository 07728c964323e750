"""Groups of small tensors: neighbours in a file that the stream reads, converts and delivers together.

Planning for a tensor of a few KiB, passing it between threads and checking that its file is unchanged takes longer than
reading it. So the stream makes one job of many: one read for adjacent tensors, one buffer, one thread.
`_materialize/stream` decides about bytes in flight and about the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Geometry, box_shape, strided, whole_box
from lazymodel._tensors.buffers import ALIGNMENT, Workspace, assign
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.shards import Boxes
from lazymodel._tensors.tensor_source import FileTensor, View, fill

SMALL_NBYTES = 64 << 10  # bytes of a tensor; a larger one gains little, and is worth several threads
GROUP = 512 << 10  # bytes of a group: a hundred times the cost of its overhead; all of it is freed together


@dataclasses.dataclass(frozen=True, eq=False)
class Small:
    """A tensor that can be part of a group."""

    tensor: View  # in its variable's dtype
    boxes: Boxes  # the parts that devices hold
    # Its file, if its elements are a contiguous range of it; None for tensors that are read whole in their own way:
    # part of a tensor, a compressed or joined one, an array in memory.
    source: ByteReader | None
    start: int  # first byte of that range
    stored_nbytes: int  # of that range; 0 without one
    placed_nbytes: int  # of all its boxes, each aligned to a cache line
    spent_nbytes: int  # of temporaries for converting it

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it needs while its group is filled."""
        return self.stored_nbytes + self.placed_nbytes + self.spent_nbytes


def small(tensor: View, boxes: Boxes) -> Small | None:
    """The tensor as a member of a group; None unless it is small, and all of it is needed here."""
    size, itemsize = tensor.size, tensor.itemsize
    nbytes, stored_nbytes = size * itemsize, size * tensor.itemsize_stored
    if not boxes.whole or not size or max(stored_nbytes, nbytes) > SMALL_NBYTES:
        return None
    placed = sum(_padded(elements * itemsize) for elements in boxes.sizes)
    # Input and output of a conversion, and a mask or the like.
    widest = max([tensor.itemsize_stored, *(step.dtype.itemsize for step in tensor.steps)])
    spent = 3 * size * widest if tensor.steps else 0
    geometry = tensor.geometry()
    repeats = any(n > 1 and not stride for n, stride in zip(geometry.shape, geometry.strides, strict=True))
    # If it repeats elements, its range may contain other data between its elements.
    if type(tensor.source) is FileTensor and not repeats and geometry.span(tensor.itemsize_stored) == stored_nbytes:
        return Small(tensor, boxes, tensor.source.reader, tensor.offset, stored_nbytes, placed, spent)
    return Small(tensor, boxes, None, 0, 0, placed, spent + nbytes + tensor.source.min_scratch_nbytes)


class Group:
    """Small tensors in the order of their file.

    Attributes:
        placed_nbytes: Bytes of the buffer of their boxes; `values_nbytes` are the bytes of the boxes alone.
        nbytes: Bytes of host memory for filling it, that buffer included.
        current: Number of the member that an error is about.
    """

    def __init__(self, members: Sequence[Small]) -> None:
        self.members = tuple(members)
        self.placed_nbytes = sum(member.placed_nbytes for member in members)
        self.values_nbytes = sum(sum(member.boxes.sizes) * member.tensor.itemsize for member in members)
        self.nbytes = self.placed_nbytes + sum(member.stored_nbytes for member in members)
        self.nbytes += max(member.spent_nbytes for member in members)
        self.current = 0

    def arrays(self, buffer: np.ndarray, workspace: Workspace) -> list[jax.Array]:
        """Reads all members into a 64-byte-aligned buffer of `placed_nbytes` bytes, and returns their arrays.

        If devices use the host's memory, the buffer must not be written again; otherwise not before the arrays are
        ready.

        Raises:
            CheckpointError: A file is truncated, changed or unreadable; `current` is the number of its member.
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
            member.tensor.source.release()
        return arrays

    def _read(self, raw: np.ndarray) -> None:
        """Reads the members that are ranges of files, with one call for adjacent ones."""
        runs: list[tuple[ByteReader, int, int]] = []  # with first and last byte
        for member in self.members:
            if member.source is not None:
                start, stop = member.start, member.start + member.stored_nbytes
                if runs and (runs[-1][0], runs[-1][2]) == (member.source, start):
                    start = runs.pop()[1]
                runs.append((member.source, start, stop))
        try:
            done = 0
            for source, start, stop in runs:
                source.read_into(start, raw[done : done + stop - start])
                done += stop - start
            for source in dict.fromkeys(source for source, _, _ in runs):
                source.check_unchanged()
        except CheckpointError:
            # Raise the error of the first member that cannot be read, if it still cannot be.
            for number, member in enumerate(self.members):
                self.current = number
                if isinstance(source := member.tensor.source, FileTensor) and member.source is not None:
                    source.fill_runs(member.start - source.offset, [np.empty(member.stored_nbytes, np.uint8)])
            self.current = 0
            raise


def groups(smalls: Sequence[Small | None], limit: int) -> Iterator[tuple[range, Group | None]]:
    """Divides tensors, None for those that are not small, into groups that need at most `limit` bytes to fill. Yields,
    in order, numbers of neighbours and their group, or one number and None.
    """
    limit = min(limit, GROUP)
    group: list[Small] = []
    together = spent = 0
    for number, member in enumerate([*smalls, None]):
        if member is not None and member.nbytes > limit:
            member = None
        lasting = member.stored_nbytes + member.placed_nbytes if member else 0
        if group and (member is None or together + lasting + max(spent, member.spent_nbytes) > limit):
            yield range(number - len(group), number), Group(group)
            group, together, spent = [], 0, 0
        if member is not None:
            group.append(member)
            together, spent = together + lasting, max(spent, member.spent_nbytes)
        elif number < len(smalls):
            yield range(number, number + 1), None


def _values(member: Small, raw: np.ndarray, position: int, workspace: Workspace) -> np.ndarray:
    """A member's elements, converted; `raw` contains its range of the file at a position."""
    tensor = member.tensor
    if member.source is None:
        values = np.empty(tensor.shape, tensor.dtype)
        fill(tensor, [whole_box(tensor.shape)], [values], workspace)
        return values
    geometry = tensor.geometry()
    start = position + tensor.source.offset + geometry.start - member.start
    stored = strided(raw, Geometry(start, geometry.shape, geometry.strides), tensor.source.dtype)
    if not tensor.steps:
        return stored
    values = np.empty(tensor.shape, tensor.dtype)
    assign(values, stored, tensor.steps)
    return values


def _array(member: Small, values: np.ndarray, buffer: np.ndarray, position: int) -> jax.Array:
    """The sharded array of a member; its boxes are put into the buffer at a position."""
    boxes, dtype = member.boxes, member.tensor.dtype
    shards: list[np.ndarray] = []
    for box, elements in zip(boxes.boxes, boxes.sizes, strict=True):
        shard = np.ndarray(box_shape(box), dtype, cast(Any, buffer), position)
        shard[...] = values[(*box, ...)]
        shards.append(shard)
        position += _padded(elements * dtype.itemsize)
    return boxes.array(shards, dtype)


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT

"""What can be read: leaves, arrays that lie somewhere, and views of them, which say what an array means.

Responsible for which elements of which leaf a view is, in which order and converted how. How boxes of a view are filled
is in `_tensors/fill`, how bytes come off a disk in `_tensors/source` and `_tensors/files`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import (
    Addresses,
    Box,
    Geometry,
    box_shape,
    cover,
    fresh_view,
    geometry_of,
    strided,
    whole_box,
)
from lazymodel._tensors.buffers import Convert, DType, Steps, Workspace, assign
from lazymodel._tensors.source import Source


class Leaf:
    """What a view is a view of: an array of a shape and dtype that can be read."""

    name: str  # in its checkpoint, for messages
    file: str  # its path; empty where there is none
    offset: int  # byte in the file, by which reads are ordered
    shape: tuple[int, ...]
    dtype: DType  # as stored
    row_step: int = 1  # reads should start and end at multiples of this along the first axis (a file's chunking)
    origin: Source | None = None  # where its file's bytes come from
    unit_nbytes: int = 0  # temporaries that reading even one element needs, such as a chunk's when decompressed

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Fills `out` with a box of the leaf, converted; temporaries within `workspace.room` or `unit_nbytes`."""
        raise NotImplementedError

    def sources(self) -> tuple[Source, ...]:
        """What its bytes are read from; nothing for an array in memory."""
        return ()

    def release(self) -> None:
        """Gives up what it keeps for the next box, which counts in `unit_nbytes`: all that was wanted has been read."""

    def fill(self, geometry: Geometry, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Fills `out` with a normalized geometry of the leaf, converted."""
        covering = cover(geometry, self.shape, self.dtype.itemsize)
        if covering.inner is None:
            self.fill_box(covering.box, covering.align(out), steps, workspace)
            return
        shape = box_shape(covering.box)
        # Half of the room: reading the box may need temporaries as well.
        if math.prod(shape) * self.dtype.itemsize > workspace.room // 2 and max(geometry.shape) > 1:
            axis = geometry.shape.index(max(geometry.shape))
            half = geometry.shape[axis] // 2
            for part in (slice(0, half), slice(half, None)):
                self.fill(geometry.take(axis, part), out[(*(slice(None),) * axis, part)], steps, workspace)
            return
        with workspace.array(shape, self.dtype) as values:
            self.fill_box(covering.box, values, (), workspace)
            assign(out, strided(values, covering.inner), steps)


class FileLeaf(Leaf):
    """A C-contiguous tensor in a file, from a byte offset on."""

    def __init__(self, name: str, source: Source, offset: int, shape: tuple[int, ...], dtype: DType) -> None:
        self.name, self.source, self.file, self.offset = name, source, source.path, offset
        self.shape, self.dtype = shape, dtype
        self.origin = source.origin

    def sources(self) -> tuple[Source, ...]:
        return (self.source,)

    def fill(self, geometry: Geometry, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        place = dataclasses.replace(geometry, start=self.offset + geometry.start)
        with self._reading():
            self.source.read_strided(place, self.dtype, out, steps, workspace)

    def fill_runs(self, start: int, outs: Sequence[np.ndarray]) -> None:
        """Fills C-contiguous arrays one after the other, with what begins at a byte of the leaf; no conversion."""
        with self._reading():
            self.source.read_into(self.offset + start, *outs)

    def fill_scattered(self, start: int, runs: np.ndarray) -> None:
        """Fills runs of memory, as `Source.read_runs` takes them, from a byte of the leaf on; no conversion."""
        with self._reading():
            self.source.read_runs(self.offset + start, runs)

    def copy_mapped(self, boxes: Sequence[tuple[Geometry, np.ndarray]], steps: Steps) -> bool:
        """Fills arrays, each from a normalized box of its shape, out of a map; False where there is none."""
        placed = [(dataclasses.replace(box, start=self.offset + box.start), out) for box, out in boxes]
        try:
            if copied := self.source.copy_mapped(placed, self.dtype, steps):
                self.source.check_unchanged()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name!r}: {error}") from error
        return copied

    @contextlib.contextmanager
    def lent(self, start: int, most: int, unit: int) -> Generator[np.ndarray]:
        """What the source lends, as `Source.lent`, from a byte of the leaf on."""
        with self._reading(), self.source.lent(self.offset + start, most, unit) as found:
            yield found

    @contextlib.contextmanager
    def _reading(self) -> Generator[None]:
        """Raises what goes wrong with the tensor's name, a file that changed meanwhile included."""
        try:
            yield
            self.source.check_unchanged()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name!r}: {error}") from error


class ArrayLeaf(Leaf):
    """An array in memory."""

    def __init__(self, array: np.ndarray, name: str = "array") -> None:
        self.name, self.file, self.offset, self.array = name, "", 0, array
        self.shape, self.dtype = array.shape, array.dtype

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        assign(out, self.array[(*box, ...)], steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A piece of work that fills a part of some arrays. Those of one plan may run in any order and any threads."""

    nbytes: int  # of the arrays that it writes
    run: Callable[[Workspace], None]  # with temporaries from a workspace


class DividedLeaf(Leaf):
    """A leaf that is made of other tensors, and divides the work of filling boxes by itself."""

    pieces: tuple[View, ...]
    reads_pieces: bool = True  # False for what is known once something else was read

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        for part in self.parts([box], [out], steps):
            part.run(workspace)

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        """The parts that fill boxes of it, converted."""
        raise NotImplementedError

    def sources(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(source for piece in self.pieces for source in piece.leaf.sources()))

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        """Which boxes of which pieces are read to fill boxes of it; by default all of every piece."""
        for piece in self.pieces if self.reads_pieces else ():
            yield piece, [whole_box(piece.shape)]

    def release(self) -> None:
        for piece in self.pieces:
            piece.leaf.release()


class View:
    """Elements of a leaf, in an order and converted. A view of a view is NumPy's own, on made-up addresses.

    Attributes:
        leaf: What it is a view of.
        addresses: Where its elements are in the leaf (`_tensors/boxes`).
        steps: Conversions applied to what is read; `dtype` is what they end in.
        itemsize_stored: Bytes of one element in the file; `itemsize` and `nbytes` are those of `dtype`.
    """

    __slots__ = (
        *("addresses", "dtype", "itemsize", "itemsize_stored", "leaf", "nbytes", "ndim", "shape", "size", "steps"),
    )

    def __init__(self, leaf: Leaf, addresses: np.ndarray | None = None, steps: Steps = ()) -> None:
        if addresses is None:
            addresses = fresh_view(leaf.shape, leaf.dtype.itemsize)
            if not steps and not leaf.dtype.isnative:
                steps = (Convert(leaf.dtype.newbyteorder("=")),)
        self.leaf, self.addresses, self.steps = leaf, addresses.view(Addresses), steps
        self.dtype: DType = steps[-1].dtype if steps else leaf.dtype
        self.shape, self.ndim, self.size = addresses.shape, addresses.ndim, addresses.size
        self.itemsize, self.itemsize_stored = self.dtype.itemsize, addresses.itemsize
        self.nbytes = self.size * self.itemsize

    @property
    def name(self) -> str:
        """Its name in its checkpoint."""
        return self.leaf.name

    @property
    def file(self) -> str:
        """Path of the file that it is in (of the first piece, for a concatenation); empty for an array in memory."""
        return self.leaf.file

    @property
    def offset(self) -> int:
        """Byte offset in the file of its earliest element."""
        return self.leaf.offset + (self.geometry().first if self.size and isinstance(self.leaf, FileLeaf) else 0)

    def geometry(self, box: Box | None = None) -> Geometry:
        """Start and strides, in bytes of the leaf, of a box or of all."""
        return geometry_of(self.addresses if box is None else self.addresses[(*box, ...)])

    def file_order(self) -> list[int]:
        """Its axes by descending stride: the order in which the file has them; repeated ones last."""
        return sorted(range(self.ndim), key=lambda axis: -abs(self.addresses.strides[axis]))

    def at(self, addresses: np.ndarray) -> Self:
        """Other elements of the same leaf, converted alike."""
        return type(self)(self.leaf, addresses, self.steps)

    def box(self, box: Box) -> Self:
        """A box of it."""
        return self.at(self.addresses[(*box, ...)])

    def transpose(self, *axes: Any) -> Self:
        """As `ndarray.transpose`."""
        return self.at(self.addresses.transpose(*axes))

    def converted(self, steps: Steps) -> Self:
        """The same elements with further conversions."""
        return type(self)(self.leaf, self.addresses, self.steps + steps) if steps else self

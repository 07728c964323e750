"""Tensor sources, arrays that are stored somewhere, and views of them.

Defines which elements of which source a view has, in which order, and how they are converted. `_tensors/fill` fills
boxes of a view, and `_tensors/byte_reader` reads bytes from a disk.
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
from lazymodel._tensors.byte_reader import ByteReader


class TensorSource:
    """An array of a shape and dtype that can be read; the base of views."""

    name: str  # in its checkpoint, for messages
    file: str  # its path; empty where there is none
    offset: int  # byte in the file, by which reads are ordered
    shape: tuple[int, ...]
    dtype: DType  # as stored
    row_step: int = 1  # reads should start and end at multiples of this along the first axis (a file's chunking)
    origin: ByteReader | None = None  # reader of its file's bytes
    min_scratch_nbytes: int = 0  # temporaries for reading even one element, such as those of a decompressed chunk

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Fills `out` with a box of it, converted. Temporaries: `workspace.available` or `min_scratch_nbytes`."""
        raise NotImplementedError

    def readers(self) -> tuple[ByteReader, ...]:
        """Readers of its bytes; empty for an array in memory."""
        return ()

    def release(self) -> None:
        """Frees memory that is kept for the next box and counted in `min_scratch_nbytes`. No box may follow."""

    def fill(self, geometry: Geometry, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Fills `out` with a normalized geometry of it, converted."""
        covering = cover(geometry, self.shape, self.dtype.itemsize)
        if covering.inner is None:
            self.fill_box(covering.box, covering.align(out), steps, workspace)
            return
        shape = box_shape(covering.box)
        # Half of the available memory: reading the box may need temporaries as well.
        if math.prod(shape) * self.dtype.itemsize > workspace.available // 2 and max(geometry.shape) > 1:
            axis = geometry.shape.index(max(geometry.shape))
            half = geometry.shape[axis] // 2
            for part in (slice(0, half), slice(half, None)):
                self.fill(geometry.take(axis, part), out[(*(slice(None),) * axis, part)], steps, workspace)
            return
        with workspace.array(shape, self.dtype) as values:
            self.fill_box(covering.box, values, (), workspace)
            assign(out, strided(values, covering.inner), steps)


class FileTensor(TensorSource):
    """A C-contiguous tensor in a file, stored from a byte offset on."""

    def __init__(self, name: str, reader: ByteReader, offset: int, shape: tuple[int, ...], dtype: DType) -> None:
        self.name, self.reader, self.file, self.offset = name, reader, reader.path, offset
        self.shape, self.dtype = shape, dtype
        self.origin = reader.origin

    def readers(self) -> tuple[ByteReader, ...]:
        return (self.reader,)

    def fill(self, geometry: Geometry, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        place = dataclasses.replace(geometry, start=self.offset + geometry.start)
        with self._reading():
            self.reader.read_strided(place, self.dtype, out, steps, workspace)

    def fill_runs(self, start: int, outs: Sequence[np.ndarray]) -> None:
        """Fills C-contiguous arrays one after the other, from the byte `start` of the tensor on; no conversion."""
        with self._reading():
            self.reader.read_into(self.offset + start, *outs)

    def fill_scattered(self, start: int, runs: np.ndarray) -> None:
        """Fills runs of memory, as `ByteReader.read_runs` takes them, from the byte `start` on; no conversion."""
        with self._reading():
            self.reader.read_runs(self.offset + start, runs)

    def copy_mapped(self, boxes: Sequence[tuple[Geometry, np.ndarray]], steps: Steps) -> bool:
        """Fills arrays from a map, each from a normalized geometry of its shape. Returns False if there is no map."""
        placed = [(dataclasses.replace(box, start=self.offset + box.start), out) for box, out in boxes]
        with self._reading():
            return self.reader.copy_mapped(placed, self.dtype, steps)

    @contextlib.contextmanager
    def borrowed(self, start: int, most: int, unit: int) -> Generator[np.ndarray]:
        """Bytes in memory from the byte `start` of the tensor on, as `ByteReader.borrowed`."""
        with self._reading(), self.reader.borrowed(self.offset + start, most, unit) as found:
            yield found

    @contextlib.contextmanager
    def _reading(self) -> Generator[None]:
        """Adds the tensor's name to errors, and raises if the file changed meanwhile."""
        try:
            yield
            self.reader.check_unchanged()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name!r}: {error}") from error


class ArrayTensor(TensorSource):
    """An array in memory."""

    def __init__(self, array: np.ndarray, name: str = "array") -> None:
        self.name, self.file, self.offset, self.array = name, "", 0, array
        self.shape, self.dtype = array.shape, array.dtype

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        assign(out, self.array[(*box, ...)], steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A unit of work that fills a part of some arrays. Parts of one plan may run in any order and in any threads."""

    nbytes: int  # of the arrays that it writes
    run: Callable[[Workspace], None]  # with temporaries from a workspace


class CompositeSource(TensorSource):
    """A source that is made of other tensors, and divides the work of filling boxes itself."""

    pieces: tuple[View, ...]
    reads_pieces: bool = True  # False if its values are known once another source was read

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        for part in self.parts([box], [out], steps):
            part.run(workspace)

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        """The parts that fill boxes of it, converted."""
        raise NotImplementedError

    def readers(self) -> tuple[ByteReader, ...]:
        return tuple(dict.fromkeys(source for component in self.pieces for source in component.source.readers()))

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        """The tensors of which it is made, each with the boxes that are read to fill boxes of the source; by default,
        each whole tensor.
        """
        for component in self.pieces if self.reads_pieces else ():
            yield component, [whole_box(component.shape)]

    def release(self) -> None:
        for component in self.pieces:
            component.source.release()


class View:
    """Elements of a source, in some order and converted. A view of a view is NumPy's own, on made-up addresses.

    Attributes:
        source: The source of its elements.
        addresses: The positions of its elements in the source (`_tensors/boxes`).
        steps: Conversions applied to what is read; `dtype` is the dtype of the last one.
        itemsize_stored: Bytes of one element in the file; `itemsize` and `nbytes` are those of `dtype`.
    """

    __slots__ = (
        *("addresses", "dtype", "itemsize", "itemsize_stored", "nbytes", "ndim", "shape", "size", "source", "steps"),
    )

    def __init__(self, source: TensorSource, addresses: np.ndarray | None = None, steps: Steps = ()) -> None:
        if addresses is None:
            addresses = fresh_view(source.shape, source.dtype.itemsize)
            if not steps and not source.dtype.isnative:
                steps = (Convert(source.dtype.newbyteorder("=")),)
        self.source, self.addresses, self.steps = source, addresses.view(Addresses), steps
        self.dtype: DType = steps[-1].dtype if steps else source.dtype
        self.shape, self.ndim, self.size = addresses.shape, addresses.ndim, addresses.size
        self.itemsize, self.itemsize_stored = self.dtype.itemsize, addresses.itemsize
        self.nbytes = self.size * self.itemsize

    @property
    def name(self) -> str:
        """Its name in its checkpoint."""
        return self.source.name

    @property
    def file(self) -> str:
        """Path of its file (of the first tensor, for a concatenation); empty for an array in memory."""
        return self.source.file

    @property
    def offset(self) -> int:
        """Byte offset in the file of its earliest element."""
        return self.source.offset + (self.geometry().first if self.size and isinstance(self.source, FileTensor) else 0)

    def geometry(self, box: Box | None = None) -> Geometry:
        """Start and strides, in bytes of the source, of a box or of the whole."""
        return geometry_of(self.addresses if box is None else self.addresses[(*box, ...)])

    def file_order(self) -> list[int]:
        """Axes by descending stride: the order in which the file stores them; repeated ones last."""
        return sorted(range(self.ndim), key=lambda axis: -abs(self.addresses.strides[axis]))

    def at(self, addresses: np.ndarray) -> Self:
        """Returns other elements of the same source, converted alike."""
        return type(self)(self.source, addresses, self.steps)

    def box(self, box: Box) -> Self:
        """Returns a box of the view."""
        return self.at(self.addresses[(*box, ...)])

    def transpose(self, *axes: Any) -> Self:
        """As `ndarray.transpose`."""
        return self.at(self.addresses.transpose(*axes))

    def converted(self, steps: Steps) -> Self:
        """Returns the same elements with further conversions."""
        return type(self)(self.source, self.addresses, self.steps + steps) if steps else self

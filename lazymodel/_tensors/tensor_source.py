"""Tensor sources, arrays that are stored somewhere; views of them; and filling arrays with boxes of a view.

Defines which elements of which source a view has, in which order, and how they are converted. Filling is divided into
parts, of which the caller decides who runs them, and when. Boxes that are adjacent in a file, or whose rows are so
short that one pass over the region that they tile is faster than one read each, are filled together. Also lists the
bytes that will be read, for those that can prefetch them. `_tensors/byte_reader` reads bytes from a disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import (
    Addresses,
    Box,
    Geometry,
    bounding,
    box_shape,
    clip,
    cover,
    fresh_view,
    geometry_of,
    is_run,
    normalize,
    ranges_of,
    repeat,
    run_axis,
    runs_in,
    shift,
    slabs,
    strided,
    unshift,
    whole_box,
)
from lazymodel._tensors.buffers import ALIGNMENT, STAGING, Scratch, Workspace, parallel
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.convert import Convert, DType, Steps, assign

_R = TypeVar("_R")


class TensorSource:
    """An array of a shape and dtype that can be read; the base of views."""

    name: str  # in its checkpoint, for messages
    file: str = ""  # its path; empty where there is none
    offset: int = 0  # byte in the file, by which reads are ordered
    shape: tuple[int, ...]
    dtype: DType  # as stored
    row_step: int = 1  # reads should start and end at multiples of this along the first axis (a file's chunking)
    origin: ByteReader | None = None  # reader of its file's bytes
    min_scratch_nbytes: int = 0  # temporaries for reading even one element, such as those of a decompressed chunk

    def __init__(self, name: str, shape: tuple[int, ...], dtype: DType) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype

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
        super().__init__(name, shape, dtype)
        self.reader, self.file, self.offset, self.origin = reader, reader.path, offset, reader.origin

    def readers(self) -> tuple[ByteReader, ...]:
        return (self.reader,)

    def fill(self, geometry: Geometry, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        with self.reading():
            self.reader.read_strided(self.placed(geometry), self.dtype, out, steps, workspace)

    def placed(self, geometry: Geometry) -> Geometry:
        """A geometry of the tensor, as one of the file."""
        return Geometry(self.offset + geometry.start, geometry.shape, geometry.strides)

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """Adds the tensor's name to errors, and raises if the file changed meanwhile."""
        try:
            yield
            self.reader.check_unchanged()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name!r}: {error}") from error


class ArrayTensor(TensorSource):
    """An array in memory."""

    def __init__(self, array: np.ndarray, name: str = "array") -> None:
        super().__init__(name, array.shape, array.dtype)
        self.array = array

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        assign(out, self.array[(*box, ...)], steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A unit of work that fills a part of some arrays. Parts of one plan may run in any order and in any threads."""

    nbytes: int  # of the arrays that it writes
    run: Callable[[Workspace], object]  # with temporaries from a workspace
    reads: FileRange | None = None  # what it reads, if that is one range of a file

    def follows(self, other: Part) -> bool:
        """Returns True if both can be filled with one call, in this order: its range is next to that of the other."""
        if self.reads is None or other.reads is None or self.reads.source.reader is not other.reads.source.reader:
            return False
        return self.reads.start == other.reads.start + other.reads.nbytes


@dataclasses.dataclass(frozen=True, eq=False)
class FileRange:
    """A range of a file's bytes, and where they go: into arrays one after the other, or through a function."""

    source: FileTensor
    start: int  # in the file
    nbytes: int
    arrays: Sequence[np.ndarray] = ()  # C-contiguous
    scatter: Callable[[np.ndarray], None] | None = None  # called with the bytes, which it may not keep


def read_ranges(ranges: Sequence[FileRange], workspace: Workspace) -> bool:
    """Reads adjacent ranges of a file with one call. Returns False if that takes more memory than the workspace has.
    An error names the first tensor.
    """
    staged = sum([each.nbytes + -each.nbytes % ALIGNMENT for each in ranges if each.scatter is not None])
    if staged > workspace.available:
        return False
    with workspace.array((staged,), np.dtype(np.uint8)) as memory, ranges[0].source.reading():
        arrays: list[np.ndarray] = []
        pieces: list[tuple[Callable[[np.ndarray], None], np.ndarray]] = []
        used = 0
        for each in ranges:
            if each.scatter is None:
                arrays += each.arrays
                continue
            arrays.append(memory[used : used + each.nbytes])
            pieces.append((each.scatter, arrays[-1]))
            used += each.nbytes + -each.nbytes % ALIGNMENT
        ranges[0].source.reader.read_into(ranges[0].start, *arrays)
        for scatter, piece in pieces:
            scatter(piece)
    return True


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

    @property
    def is_whole(self) -> bool:
        """True if it is the source as it is: all of its elements, in their order, not converted."""
        same = fresh_view(self.source.shape, self.itemsize_stored)
        return not self.steps and self.shape == same.shape and self.geometry() == geometry_of(same)

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


PART = 32 << 20  # bytes that one part of a fill writes: the unit of work of a thread
ONE_PASS_RUN = 64 << 10  # bytes; boxes whose rows are longer are read row by row rather than scattered
# Bytes of a run from which it is faster to distribute runs to shards directly from the page cache than through a staged
# copy. If there is a map, they are copied from it; else the kernel scatters them: for runs of 128, 512 and 1408 bytes
# two threads reached 4.1, 5.2 and 5.8 GB/s, against 4.1, 4.5 and 4.6 with staging and 6.7 without scattering; a map
# gave a fifth more.
RUN = 256
RUNS = 1 << 15  # runs prepared at a time: half as many took 4 % longer, an eighth 25 %, and twice as many as long
RUN_NBYTES = 64  # bytes of temporaries for preparing one run

Targets: TypeAlias = "Sequence[tuple[Box, np.ndarray]]"  # boxes, each with the array that it goes to


def prefers_one_pass(view: View, boxes: Sequence[Box]) -> bool:
    """Returns True if boxes should be filled together, by reading the region that they tile once and scattering it. If
    their rows in the file are short, reading each box alone would read the bytes of its neighbours too; and a small
    tensor is read faster than its boxes are planned, unless they are filled without a copy.
    """
    if len(boxes) < 2 or not view.size:
        return False
    reader = view.source.reader if isinstance(view.source, FileTensor) else None
    # Bytes from a network are fetched once, and not kept until the last of the boxes was read.
    longest = math.inf if reader is not None and reader.remote else ONE_PASS_RUN
    shapes, strides, size = [box_shape(box) for box in boxes], view.geometry().strides, view.itemsize_stored

    def has_short_rows(shape: tuple[int, ...]) -> bool:
        if is_run(shape, strides, size):
            return False
        geometry = Geometry(0, shape, strides).normalized()
        run = geometry.run(size)
        return run < longest and run < math.prod(geometry.shape) * size

    small = view.size * size <= ONE_PASS_RUN and bool(view.steps or reader is None)
    if not small and not any(map(has_short_rows, set(shapes))):  # the position of a box makes no difference
        return False
    return sum(map(math.prod, shapes)) == math.prod(box_shape(bounding(boxes)))


def required_ranges(view: View, boxes: Sequence[Box]) -> Iterator[tuple[ByteReader, np.ndarray]]:
    """Readers, each with the ranges of its bytes (`int64[n, 2]`) that filling boxes of a view reads. A range that is
    read for several boxes in turn occurs as often. Bytes that are known only while reading, such as compressed ones,
    have no ranges.
    """
    source = view.source
    if isinstance(source, CompositeSource):
        places = [view.geometry(box).normalized() for box in _with_elements(boxes)]
        inner = [cover(place, source.shape, source.dtype.itemsize).box for place in places]
        for component, own in source.reads(inner):
            yield from required_ranges(component, own)
    elif isinstance(source, FileTensor) and source.reader.remote:
        boxes = _with_elements(boxes)
        for box in [bounding(boxes)] if prefers_one_pass(view, boxes) else boxes:
            geometry = view.geometry(box).normalized()
            yield source.reader, ranges_of(source.placed(geometry), source.dtype.itemsize, source.reader.row_gap)
    elif source.origin is not None and source.origin.remote:
        yield source.origin, np.empty((0, 2), np.int64)


def _with_elements(boxes: Sequence[Box]) -> list[Box]:
    return [box for box in boxes if math.prod(box_shape(box))]


def fill_parts(view: View, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> list[Part]:
    """Plans how to fill `outs`, arrays of the view's dtype, with boxes of the view, each of the shape of its array."""
    source = view.source
    targets = [(box, out) for box, out in zip(boxes, outs, strict=True) if out.size]
    parts: list[Part] = []
    if isinstance(source, CompositeSource):
        aligned: list[tuple[Box, np.ndarray]] = []
        for box, out in targets:
            geometry, ordered, repeated = normalize(view.geometry(box), out)
            covering = cover(geometry, source.shape, source.dtype.itemsize)
            if repeated or covering.inner is not None:
                parts += _box_parts(view, box, out)
            else:
                aligned.append((covering.box, covering.align(ordered)))
        if aligned:
            parts += source.parts([box for box, _ in aligned], [out for _, out in aligned], view.steps)
        return parts
    if isinstance(source, FileTensor):
        if not view.steps and _are_runs(view, targets):
            return _run_parts(view, source, targets)
        if (part := _small_part(view, source, targets)) is not None:
            return [part]
    if prefers_one_pass(view, boxes):
        return _scatter_parts(view, targets)
    return [part for box, out in targets for part in _box_parts(view, box, out)]


def fill(view: View, boxes: Sequence[Box], outs: Sequence[np.ndarray], workspace: Workspace) -> None:
    """Fills arrays with boxes of a view, in this thread."""
    for part in fill_parts(view, boxes, outs):
        part.run(workspace)


@contextlib.contextmanager
def compared(
    pairs: Mapping[str, tuple[View, View]],
    jobs: Sequence[tuple[str, Box]],
    compare: Callable[[np.ndarray, np.ndarray], _R],
    threads: int,
    scratch_nbytes: int,
) -> Generator[Iterator[_R]]:
    """A `with` block that gives an iterator over what a function returns for the values of two tensors.

    Args:
        pairs: Tensors of one shape, by name.
        jobs: Names and the box that is read of both tensors, in threads. A name's jobs follow each other, and its
            sources are released after the last one.
        compare: Called in any of the threads.
        threads: Number of threads.
        scratch_nbytes: Bytes of temporaries of a thread, in addition to the values.
    """
    scratch = Scratch(scratch_nbytes)
    last = {name: number for number, (name, _) in enumerate(jobs)}

    def run(job: tuple[str, Box]) -> _R:
        values: list[np.ndarray] = []
        for number, view in enumerate(pairs[job[0]]):
            shape = box_shape(job[1])
            buffer = scratch.buffer(math.prod(shape) * view.dtype.itemsize, number)
            values.append(buffer.view(view.dtype).reshape(shape))
            fill(view, [job[1]], values[-1:], scratch.workspace)
        return compare(*values)

    def released(results: Iterator[_R]) -> Iterator[_R]:
        for number, ((name, _), result) in enumerate(zip(jobs, results, strict=True)):
            yield result
            for view in pairs[name] if number == last[name] else ():
                view.source.release()

    with parallel(run, jobs, threads, "compare") as results:
        yield released(results)


def _are_runs(view: View, targets: Targets) -> bool:
    """Returns True if every box is, in the order of its array, one run of the file."""
    strides, size = view.geometry().strides, view.itemsize
    return all(out.flags.c_contiguous and is_run(out.shape, strides, size) for _, out in targets)


def _run_parts(view: View, source: FileTensor, targets: Targets) -> list[Part]:
    """Parts for boxes each of which is one run of a file. They are read together if they are adjacent."""
    runs: list[tuple[int, np.ndarray]] = []  # byte of the tensor, array
    whole, step = view.geometry(), max(PART // view.itemsize, 1)
    for box, out in targets:
        start = whole.start_of(box)
        if out.nbytes <= PART:
            runs.append((start, out))
            continue
        flat = out.reshape(-1)
        runs += [(start + n * view.itemsize, flat[n : n + step]) for n in range(0, flat.size, step)]
    runs.sort(key=lambda run: run[0])
    groups: list[tuple[int, list[np.ndarray]]] = []
    end = -1
    for start, out in runs:
        if start == end and end + out.nbytes - groups[-1][0] <= PART:
            groups[-1][1].append(out)
        else:
            groups.append((start, [out]))
        end = start + out.nbytes
    parts: list[Part] = []
    for start, group in groups:
        reads = FileRange(source, source.offset + start, sum([out.nbytes for out in group]), group)
        parts.append(Part(reads.nbytes, functools.partial(read_ranges, [reads]), reads))
    return parts


def _box_parts(view: View, box: Box, out: np.ndarray) -> list[Part]:
    """Parts that each read a range of a box along its outermost axis in the file."""
    chunk = view.box(box)
    order = chunk.file_order()
    chunk, out = chunk.transpose(order), out.transpose(order)
    parts: list[Part] = []
    for part in slabs(chunk.shape, max(PART // out.itemsize, 1), _row_step(chunk)):
        target = out[(*part, ...)]
        parts.append(Part(target.nbytes, functools.partial(_fill_box, chunk, part, target)))
    return parts


def _fill_box(view: View, box: Box, out: np.ndarray, workspace: Workspace) -> None:
    geometry, ordered, repeated = normalize(view.geometry(box), out)
    view.source.fill(geometry, ordered, view.steps, workspace)
    repeat(out, repeated)


def _small_part(view: View, source: FileTensor, targets: Targets) -> Part | None:
    """The part that reads a small region, which boxes tile, as one range of a file. None if there is no such region."""
    nbytes = sum([out.size for _, out in targets]) * view.itemsize_stored
    if not 0 < nbytes <= ONE_PASS_RUN:
        return None
    region = bounding([box for box, _ in targets])
    geometry = view.geometry(region)
    if nbytes != math.prod(geometry.shape) * view.itemsize_stored or nbytes != geometry.span(view.itemsize_stored):
        return None
    if any(n > 1 and not stride for n, stride in zip(geometry.shape, geometry.strides, strict=True)):
        return None  # it repeats elements, and has other ones in between
    stored = Geometry(geometry.start - geometry.first, geometry.shape, geometry.strides)
    moved = any(part.start for part in region)

    def scatter(raw: np.ndarray) -> None:
        values = strided(raw, stored, source.dtype)
        for box, out in targets:
            part = values[(*(shift(box, region) if moved else box), ...)]
            if view.steps:
                assign(out, part, view.steps)
            else:  # takes a quarter of the time
                out[...] = part

    reads = FileRange(source, source.offset + geometry.first, nbytes, scatter=scatter)

    def run(workspace: Workspace) -> None:
        if not read_ranges([reads], workspace):
            for part in _scatter_parts(view, targets):
                part.run(workspace)

    return Part(sum(out.nbytes for _, out in targets), run, reads)


def _scatter_parts(view: View, targets: Targets) -> list[Part]:
    """Parts that each read a range of the region that the boxes tile, and scatter it over them."""
    region = bounding([box for box, _ in targets])
    whole = view.box(region)
    order = whole.file_order()
    whole = whole.transpose(order)
    relative = [(shift(box, region), out.transpose(order)) for box, out in targets]
    ordered = [(tuple(box[axis] for axis in order), out) for box, out in relative]
    return [
        Part(math.prod(box_shape(part)) * whole.itemsize, functools.partial(_fill_part, whole, part, ordered))
        for part in slabs(whole.shape, max(PART // whole.itemsize, 1), _row_step(whole))
    ]


def _fill_part(view: View, part: Box, targets: Targets, workspace: Workspace) -> None:
    """Fills all arrays that need a part of a view, whose axes are in file order."""
    wanted = clip(targets, part)
    # As stored: conversions are done while scattering.
    stored = View(view.source, view.addresses)
    if isinstance(source := view.source, FileTensor):
        # Elements of the shortest run that is contiguous both in the part and in an array that needs some of it.
        shortest = min(math.prod(out.shape[run_axis(part, common, out) :]) for common, out in wanted)
        if shortest * stored.itemsize >= RUN:
            # Long runs are copied from a map, to one target after the other.
            normalized = [normalize(view.geometry(common), out) for common, out in wanted]
            placed = [(source.placed(geometry), ordered) for geometry, ordered, _ in normalized]
            with source.reading():
                copied = source.reader.copy_mapped(placed, source.dtype, view.steps)
            if copied:
                for (_, out), (*_, repeated) in zip(wanted, normalized, strict=True):
                    repeat(out, repeated)
                return
            if not view.steps and _scatter_runs(stored, source, part, wanted, shortest, workspace):
                return
        if source.reader.remote and stored.box(part).addresses.flags.c_contiguous:
            _scatter_borrowed(stored, source, part, wanted, view.steps, workspace)
            return
    _scatter_staged(stored, part, wanted, view.steps, workspace)


def _scatter_staged(stored: View, part: Box, wanted: Targets, steps: Steps, workspace: Workspace) -> None:
    """Scatters a part through a staging buffer."""
    available = max(workspace.available // 2 if stored.source.min_scratch_nbytes else workspace.available, 1)
    for relative in slabs(box_shape(part), max(min(STAGING, available) // stored.itemsize, 1), _row_step(stored)):
        chunk = unshift(relative, part)
        with workspace.array(box_shape(chunk), stored.dtype) as values:
            _fill_box(stored, chunk, values, workspace)
            for common, out in clip(wanted, chunk):
                assign(out, values[shift(common, chunk)], steps)


def _scatter_borrowed(
    stored: View, source: FileTensor, part: Box, wanted: Targets, steps: Steps, workspace: Workspace
) -> None:
    """Scatters a part that is one range of a file, directly from the memory into which it was fetched if whole rows are
    there.
    """
    shape, start = box_shape(part), stored.geometry(part).start
    axis = next((axis for axis, extent in enumerate(shape) if extent > 1), 0)
    row = math.prod(shape[axis + 1 :]) * stored.itemsize
    first, stop = part[axis].start, part[axis].stop
    while first < stop:
        most = (stop - first) * row
        with source.reading(), source.reader.borrowed(source.offset + start, most, row) as found:
            count = max(found.size // row, 1)
            chunk = (*part[:axis], slice(first, first + count), *part[axis + 1 :])
            if found.size:
                values = found.view(stored.dtype).reshape(box_shape(chunk))
                for common, out in clip(wanted, chunk):
                    assign(out, values[shift(common, chunk)], steps)
        if not found.size:
            _scatter_staged(stored, chunk, clip(wanted, chunk), steps, workspace)
        first, start = first + count, start + count * row


def _scatter_runs(
    stored: View, source: FileTensor, part: Box, wanted: Targets, shortest: int, workspace: Workspace
) -> bool:
    """Lets the kernel scatter a part that is one range of a file. Returns False if that is not possible."""
    if not source.reader.scatters or workspace.available < RUNS * RUN_NBYTES:
        return False
    if not stored.box(part).addresses.flags.c_contiguous:
        return False
    for relative in slabs(box_shape(part), RUNS * shortest):
        chunk = unshift(relative, part)
        starts, runs = zip(*(runs_in(chunk, common, out) for common, out in clip(wanted, chunk)), strict=True)
        # Runs of shards of one axis alternate, so they need no sorting; the last ones of an uneven split do.
        join = np.stack if len({each.size for each in starts}) == 1 else np.concatenate
        axis = 1 if join is np.stack else 0
        starts, runs = join(starts, axis).reshape(-1), join(runs, axis).reshape(-1, 2)
        if (starts[1:] < starts[:-1]).any():
            runs = runs[np.argsort(starts, kind="stable")]
        with source.reading():
            source.reader.read_runs(source.offset + stored.geometry(chunk).start, runs)
    return True


def _row_step(view: View) -> int:
    """The source's `row_step` if the first axis of the view is that of the source, with whole rows, starting at a
    multiple of it; else 1.
    """
    source = view.source
    if source.row_step == 1 or not view.ndim:
        return 1
    geometry = view.geometry()
    row = math.prod(source.shape[1:]) * source.dtype.itemsize
    return source.row_step if geometry.strides[0] == row and geometry.start // row % source.row_step == 0 else 1

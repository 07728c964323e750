"""Fills arrays with boxes of a view: divides the work into parts, and decides what is read together.

Handles boxes that are adjacent in a file, or whose rows are so short that one pass over the region that they tile is
faster than one read each. Also lists the bytes that will be read, for those that can prefetch them. A tensor source
decides how it reads one box; the caller decides who runs the parts, and when.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from lazymodel._tensors.boxes import (
    Box,
    Geometry,
    bounding,
    box_shape,
    clip,
    cover,
    normalize,
    ranges_of,
    repeat,
    run_axis,
    runs_in,
    shift,
    slabs,
    unshift,
)
from lazymodel._tensors.buffers import STAGING, Steps, Workspace, assign
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.tensor_source import CompositeSource, FileTensor, Part, View

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
    their rows in the file are short, reading each box alone would read the bytes of its neighbours too.
    """
    if len(boxes) < 2 or not view.size:
        return False
    shapes = [box_shape(box) for box in boxes]
    if sum(map(math.prod, shapes)) != math.prod(box_shape(bounding(boxes))):
        return False
    # Bytes from a network are fetched once, and not kept until the last of the boxes was read.
    longest = math.inf if isinstance(view.source, FileTensor) and view.source.reader.remote else ONE_PASS_RUN
    strides = view.geometry().strides
    for shape in set(shapes):  # the position of a box makes no difference
        geometry = Geometry(0, shape, strides).normalized()
        run = geometry.run(view.itemsize_stored)
        if run < longest and run < math.prod(geometry.shape) * view.itemsize_stored:
            return True
    return False


def required_ranges(view: View, boxes: Sequence[Box]) -> Iterator[tuple[ByteReader, np.ndarray]]:
    """Readers, each with the ranges of its bytes (`int64[n, 2]`) that filling boxes of a view reads. A range that is
    read for several boxes in turn occurs as often. Bytes that are known only while reading, such as compressed ones,
    have no ranges.
    """
    source = view.source
    boxes = [box for box in boxes if math.prod(box_shape(box))]
    if isinstance(source, CompositeSource):
        inner = [cover(view.geometry(box).normalized(), source.shape, source.dtype.itemsize).box for box in boxes]
        for component, own in source.reads(inner):
            yield from required_ranges(component, own)
    elif isinstance(source, FileTensor) and source.reader.remote:
        for box in [bounding(boxes)] if prefers_one_pass(view, boxes) else boxes:
            geometry = view.geometry(box).normalized()
            place = dataclasses.replace(geometry, start=source.offset + geometry.start)
            yield source.reader, ranges_of(place, source.dtype.itemsize, source.reader.row_gap)
    elif source.origin is not None and source.origin.remote:
        yield source.origin, np.empty((0, 2), np.int64)


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
    if prefers_one_pass(view, boxes):
        return _scatter_parts(view, targets)
    if isinstance(source, FileTensor) and not view.steps:
        return _run_parts(view, source, targets)
    return [part for box, out in targets for part in _box_parts(view, box, out)]


def fill(view: View, boxes: Sequence[Box], outs: Sequence[np.ndarray], workspace: Workspace) -> None:
    """Fills arrays with boxes of a view, in this thread."""
    for part in fill_parts(view, boxes, outs):
        part.run(workspace)


def _run_parts(view: View, source: FileTensor, targets: Targets) -> list[Part]:
    """Parts for boxes of a file. Boxes that are one run in it are read together if they are adjacent."""
    parts: list[Part] = []
    runs: list[tuple[int, np.ndarray]] = []  # byte of the tensor, array
    whole, step = view.geometry(), max(PART // view.itemsize, 1)
    for box, out in targets:
        geometry = whole.box(box)
        place, ordered, repeated = normalize(geometry, out)
        contiguous = ordered.flags.c_contiguous and out.flags.c_contiguous and not repeated
        if not contiguous or place.run(view.itemsize) != ordered.nbytes:
            parts += _box_parts(view, box, out)
            continue
        flat = out.reshape(-1)
        for first in range(0, flat.size, step):
            runs.append((geometry.start + first * view.itemsize, flat[first : first + step]))
    runs.sort(key=lambda run: run[0])
    while runs:
        (start, out), *runs = runs
        group, end = [out], start + out.nbytes
        while runs and runs[0][0] == end and end + runs[0][1].nbytes - start <= PART:
            group.append(runs.pop(0)[1])
            end += group[-1].nbytes
        parts.append(Part(end - start, lambda _, start=start, group=group: source.fill_runs(start, group)))
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
            if source.copy_mapped([(geometry, ordered) for geometry, ordered, _ in normalized], view.steps):
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
        with source.borrowed(start, (stop - first) * row, row) as found:
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
        source.fill_scattered(stored.geometry(chunk).start, runs)
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

"""How arrays are filled with boxes of a view: into which parts the work is cut, and what is read together.

Responsible for boxes that are neighbours in a file, or whose rows are so short that one pass over the region they tile
is better than one each. How a leaf reads one box is the leaf's matter; who runs the parts, and when, is the caller's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from lazymodel._tensors.boxes import (
    Box,
    Geometry,
    bounding,
    box_shape,
    clip,
    cover,
    normalize,
    repeat,
    run_axis,
    runs_in,
    shift,
    slabs,
    unshift,
)
from lazymodel._tensors.buffers import STAGING, Steps, Workspace, assign
from lazymodel._tensors.leaves import DividedLeaf, FileLeaf, Part, View

PART = 32 << 20  # bytes that one part of a fill writes: the unit that threads share out
ONE_PASS_RUN = 64 << 10  # bytes; boxes whose rows are longer are read row by row rather than scattered
# Bytes of a run from which spreading runs over shards straight from the page cache beats a staged copy. Where there is
# a map, they are copied out of it; else the kernel scatters them: for runs of 128, 512 and 1408 bytes two threads got
# 4.1, 5.2 and 5.8 GB/s, against 4.1, 4.5 and 4.6 with staging and 6.7 without scattering; out of a map a fifth more.
RUN = 256
RUNS = 1 << 15  # runs prepared at a time: half as many took 4 % longer, an eighth 25 %, and twice as many as long
RUN_NBYTES = 64  # bytes of temporaries that preparing one takes

Targets: TypeAlias = "Sequence[tuple[Box, np.ndarray]]"  # boxes, each with the array that it goes to


def prefers_one_pass(view: View, boxes: Sequence[Box]) -> bool:
    """Whether boxes are better filled together, by reading the region they tile once and scattering it: where their
    rows in the file are short, each box alone would read its neighbours' bytes too.
    """
    if len(boxes) < 2 or not view.size:
        return False
    shapes = [box_shape(box) for box in boxes]
    if sum(map(math.prod, shapes)) != math.prod(box_shape(bounding(boxes))):
        return False
    # What comes over a network is fetched once, and not kept until the last of the boxes was read.
    longest = math.inf if isinstance(view.leaf, FileLeaf) and view.leaf.source.remote else ONE_PASS_RUN
    strides = view.geometry().strides
    for shape in set(shapes):  # where a box is makes no difference
        geometry = Geometry(0, shape, strides).normalized()
        run = geometry.run(view.itemsize_stored)
        if run < longest and run < math.prod(geometry.shape) * view.itemsize_stored:
            return True
    return False


def fill_parts(view: View, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> list[Part]:
    """Plans how to fill `outs`, arrays of the view's dtype, with boxes of the view, each of its array's shape."""
    leaf = view.leaf
    targets = [(box, out) for box, out in zip(boxes, outs, strict=True) if out.size]
    parts: list[Part] = []
    if isinstance(leaf, DividedLeaf):
        aligned: list[tuple[Box, np.ndarray]] = []
        for box, out in targets:
            geometry, ordered, repeated = normalize(view.geometry(box), out)
            covering = cover(geometry, leaf.shape, leaf.dtype.itemsize)
            if repeated or covering.inner is not None:
                parts += _box_parts(view, box, out)
            else:
                aligned.append((covering.box, covering.align(ordered)))
        if aligned:
            parts += leaf.parts([box for box, _ in aligned], [out for _, out in aligned], view.steps)
        return parts
    if prefers_one_pass(view, boxes):
        return _scatter_parts(view, targets)
    if isinstance(leaf, FileLeaf) and not view.steps:
        return _run_parts(view, leaf, targets)
    return [part for box, out in targets for part in _box_parts(view, box, out)]


def fill(view: View, boxes: Sequence[Box], outs: Sequence[np.ndarray], workspace: Workspace) -> None:
    """Fills arrays with boxes of a view, here and now."""
    for part in fill_parts(view, boxes, outs):
        part.run(workspace)


def _run_parts(view: View, leaf: FileLeaf, targets: Targets) -> list[Part]:
    """Parts for boxes of a file: those that are one run in it are read together where they are neighbours."""
    parts: list[Part] = []
    runs: list[tuple[int, np.ndarray]] = []
    whole, step = view.geometry(), max(PART // view.itemsize, 1)
    one_run: dict[Any, bool] = {}  # asked once of the boxes that differ only in where they are
    for box, out in targets:
        geometry, kind = whole.box(box), (out.shape, out.strides)
        if kind not in one_run:
            lies, ordered, repeated = normalize(geometry, out)
            alike = ordered.flags.c_contiguous and out.flags.c_contiguous and not repeated
            one_run[kind] = alike and lies.run(view.itemsize) == ordered.nbytes
        if not one_run[kind]:
            parts += _box_parts(view, box, out)
            continue
        flat = out.reshape(-1)
        for first in range(0, flat.size, step):
            runs.append((geometry.start + first * view.itemsize, flat[first : first + step]))
    runs.sort(key=lambda run: run[0])
    groups: list[tuple[int, int, list[np.ndarray]]] = []  # first byte, the one after the last, arrays
    for position, out in runs:
        start, end, group = groups[-1] if groups else (0, -1, [])
        if position == end and end + out.nbytes - start <= PART:
            group.append(out)
            groups[-1] = (start, end + out.nbytes, group)
        else:
            groups.append((position, position + out.nbytes, [out]))
    for start, end, group in groups:
        parts.append(Part(end - start, lambda _, start=start, group=group: leaf.fill_runs(start, group)))
    return parts


def _box_parts(view: View, box: Box, out: np.ndarray) -> list[Part]:
    """Parts that each read a range of a box along its outermost axis in the file."""
    piece = view.box(box)
    order = piece.file_order()
    piece, out = piece.transpose(order), out.transpose(order)
    parts: list[Part] = []
    for part in slabs(piece.shape, max(PART // out.itemsize, 1), _row_step(piece)):
        target = out[(*part, ...)]
        parts.append(Part(target.nbytes, functools.partial(_fill_box, piece, part, target)))
    return parts


def _fill_box(view: View, box: Box, out: np.ndarray, workspace: Workspace) -> None:
    geometry, ordered, repeated = normalize(view.geometry(box), out)
    view.leaf.fill(geometry, ordered, view.steps, workspace)
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
    """Fills a part of a view, whose axes are in file order, into all that want something of it."""
    wanted = clip(targets, part)
    # As stored: the conversion is part of the scattering.
    stored = View(view.leaf, view.addresses)
    if isinstance(leaf := view.leaf, FileLeaf):
        # Elements of the shortest run that is one both in the part and in an array that wants something of it.
        shortest = min(math.prod(out.shape[run_axis(part, common, out) :]) for common, out in wanted)
        if shortest * stored.itemsize >= RUN:
            # Long runs are copied out of a map, to one target after the other.
            normalized = [normalize(view.geometry(common), out) for common, out in wanted]
            if leaf.copy_mapped([(geometry, ordered) for geometry, ordered, _ in normalized], view.steps):
                for (_, out), (*_, repeated) in zip(wanted, normalized, strict=True):
                    repeat(out, repeated)
                return
            if not view.steps and _scatter_runs(stored, leaf, part, wanted, shortest, workspace):
                return
        if leaf.source.remote and stored.box(part).addresses.flags.c_contiguous:
            _scatter_lent(stored, leaf, part, wanted, view.steps, workspace)
            return
    _scatter_staged(stored, part, wanted, view.steps, workspace)


def _scatter_staged(stored: View, part: Box, wanted: Targets, steps: Steps, workspace: Workspace) -> None:
    """Scatters a part by way of a staging buffer."""
    room = max(workspace.room // 2 if stored.leaf.unit_nbytes else workspace.room, 1)
    for piece in slabs(box_shape(part), max(min(STAGING, room) // stored.itemsize, 1), _row_step(stored)):
        slab = unshift(piece, part)
        with workspace.array(box_shape(slab), stored.dtype) as values:
            _fill_box(stored, slab, values, workspace)
            for common, out in clip(wanted, slab):
                assign(out, values[shift(common, slab)], steps)


def _scatter_lent(stored: View, leaf: FileLeaf, part: Box, wanted: Targets, steps: Steps, workspace: Workspace) -> None:
    """Scatters a part that is one range of a file, straight out of the memory that it was fetched into where whole
    rows lie there.
    """
    shape, start = box_shape(part), stored.geometry(part).start
    axis = next((axis for axis, extent in enumerate(shape) if extent > 1), 0)
    row = math.prod(shape[axis + 1 :]) * stored.itemsize
    first, stop = part[axis].start, part[axis].stop
    while first < stop:
        with leaf.lent(start, (stop - first) * row, row) as found:
            count = max(found.size // row, 1)
            slab = (*part[:axis], slice(first, first + count), *part[axis + 1 :])
            if found.size:
                values = found.view(stored.dtype).reshape(box_shape(slab))
                for common, out in clip(wanted, slab):
                    assign(out, values[shift(common, slab)], steps)
        if not found.size:
            _scatter_staged(stored, slab, clip(wanted, slab), steps, workspace)
        first, start = first + count, start + count * row


def _scatter_runs(
    stored: View, leaf: FileLeaf, part: Box, wanted: Targets, shortest: int, workspace: Workspace
) -> bool:
    """Lets the kernel scatter a part that is one range of a file; else returns False."""
    if not leaf.source.scatters or workspace.room < RUNS * RUN_NBYTES:
        return False
    if not stored.box(part).addresses.flags.c_contiguous:
        return False
    for slab in slabs(box_shape(part), RUNS * shortest):
        piece = unshift(slab, part)
        starts, runs = zip(*(runs_in(piece, common, out) for common, out in clip(wanted, piece)), strict=True)
        # Shards of one axis take turns, so their runs need no sorting; the last ones of an uneven split do.
        join = np.stack if len({each.size for each in starts}) == 1 else np.concatenate
        axis = 1 if join is np.stack else 0
        starts, runs = join(starts, axis).reshape(-1), join(runs, axis).reshape(-1, 2)
        if (starts[1:] < starts[:-1]).any():
            runs = runs[np.argsort(starts, kind="stable")]
        leaf.fill_scattered(stored.geometry(piece).start, runs)
    return True


def _row_step(view: View) -> int:
    """The leaf's `row_step` where the view's first axis is the leaf's, whole rows, from its first row on; else 1."""
    leaf = view.leaf
    if leaf.row_step == 1 or not view.ndim:
        return 1
    geometry = view.geometry()
    row = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
    return leaf.row_step if geometry.strides[0] == row and geometry.start // row % leaf.row_step == 0 else 1

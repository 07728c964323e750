"""Which bytes of which files boxes of a view will be read from, told before they are read.

For whoever can fetch bytes ahead of time. Leaves that cannot tell (what is compressed, or decoded by a library) are
left out; reading them is no different for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from lazymodel._tensors.boxes import Box, bounding, box_shape, cover, ranges_of
from lazymodel._tensors.fill import prefers_one_pass
from lazymodel._tensors.leaves import DividedLeaf, FileLeaf, View
from lazymodel._tensors.source import Source


def wanted(view: View, boxes: Sequence[Box]) -> Iterator[tuple[Source, np.ndarray]]:
    """Sources, each with ranges of its bytes (`int64[n, 2]`), which filling boxes of a view reads: a range that is
    read for several boxes, one after the other, as often. Of what only reading tells, there are none.
    """
    leaf = view.leaf
    boxes = [box for box in boxes if math.prod(box_shape(box))]
    if isinstance(leaf, DividedLeaf):
        inner = [cover(view.geometry(box).normalized(), leaf.shape, leaf.dtype.itemsize).box for box in boxes]
        for piece, own in leaf.reads(inner):
            yield from wanted(piece, own)
    elif isinstance(leaf, FileLeaf) and leaf.source.remote:
        for box in [bounding(boxes)] if prefers_one_pass(view, boxes) else boxes:
            geometry = view.geometry(box).normalized()
            place = dataclasses.replace(geometry, start=leaf.offset + geometry.start)
            yield leaf.source, ranges_of(place, leaf.dtype.itemsize, leaf.source.row_gap)
    elif leaf.origin is not None and leaf.origin.remote:
        yield leaf.origin, np.empty((0, 2), np.int64)

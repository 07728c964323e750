"""Where the elements of a view are stored: boxes, chunks, byte strides, and made-up addresses that NumPy can rearrange.

Pure arithmetic on offsets, shapes and strides. Nothing here reads, and no tensor is known here.

NumPy itself carries out views, on an array that has a tensor's shape and strides but no memory: its dtype is an opaque
one of the right size, its addresses are byte offsets, and nothing may read them. So only operations for which NumPy
returns a view may be applied to it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

Box: TypeAlias = "tuple[slice[Any, Any, Any], ...]"  # one range of step 1 a dimension
BoxKey: TypeAlias = "tuple[tuple[int, int], ...]"  # the same, hashable: (start, stop) of each dimension


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Elements of the memory of a tensor or a file: `start` and `strides` are in bytes. A geometry is normalized if it
    has each element once and in file order: strides are positive and descending, and no extent is 1.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def take(self, axis: int, part: slice) -> Geometry:
        """Returns the geometry of a range of one axis."""
        start, stop, _ = part.indices(self.shape[axis])
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return Geometry(self.start + start * self.strides[axis], shape, self.strides)

    def box(self, box: Box) -> Geometry:
        return Geometry(self.start_of(box), box_shape(box), self.strides)

    def start_of(self, box: Box) -> int:
        """The byte of a box's first element."""
        return self.start + sum([part.start * stride for part, stride in zip(box, self.strides, strict=True)])

    @property
    def first(self) -> int:
        """The lowest byte of the geometry."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.start + sum((n - 1) * stride for n, stride in steps if n and stride < 0)

    def span(self, itemsize: int, axis: int = 0) -> int:
        """Bytes from the first to the last element, both included: of the whole, or of one index of the axes before
        `axis`.
        """
        steps = zip(self.shape[axis:], self.strides[axis:], strict=True)
        return sum((n - 1) * abs(stride) for n, stride in steps) + itemsize

    def run(self, itemsize: int) -> int:
        """Bytes of the longest contiguous run, if the axes are in file order (descending strides)."""
        run = itemsize
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if stride != run:
                break
            run *= extent
        return run

    def file_axes(self) -> list[int]:
        """Axes in file order, without those that have one index or one element (stride 0)."""
        axes = [axis for axis, n in enumerate(self.shape) if not n or (n > 1 and self.strides[axis])]
        return sorted(axes, key=lambda axis: -abs(self.strides[axis]))

    def normalized(self) -> Geometry:
        """Returns the same elements in file order, each once."""
        axes = self.file_axes()
        return Geometry(
            self.first, tuple(self.shape[axis] for axis in axes), tuple(abs(self.strides[axis]) for axis in axes)
        )


@functools.lru_cache(maxsize=4096)  # a model has few different shapes of shards
def is_run(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Returns True if elements with these strides are, in C order, one contiguous run."""
    run = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1:
            if stride != run:
                return False
            run *= extent
    return True


@functools.lru_cache(maxsize=4096)
def is_normalized(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Returns True if a geometry of this shape and these strides is normalized."""
    return 1 not in shape and all(n > 0 for n in strides) and list(strides) == sorted(strides, reverse=True)


def ranges_of(geometry: Geometry, itemsize: int, gap: int) -> np.ndarray:
    """Byte ranges that a normalized geometry occupies, as `int64[n, 2]`: the first byte, and the byte after the last.
    Ranges less than `gap` bytes apart are merged.
    """
    starts, span = np.array([geometry.start], np.int64), itemsize
    for extent, stride in zip(reversed(geometry.shape), reversed(geometry.strides), strict=True):
        if not extent:
            return np.empty((0, 2), np.int64)
        if starts.size == 1 and stride - span < gap:
            span += (extent - 1) * stride
        else:
            starts = (np.arange(extent, dtype=np.int64)[:, None] * stride + starts).reshape(-1)
    return np.stack((starts, starts + span), axis=1)


@functools.lru_cache(maxsize=64)
def _anchor(itemsize: int) -> tuple[Addresses, int]:
    """One element, which represents byte 0 of every tensor of this item size, and its address."""
    anchor = np.zeros(1, f"V{itemsize}").view(Addresses)
    return anchor, int(anchor.__array_interface__["data"][0])


class Addresses(np.ndarray):
    """An array of made-up addresses. It has its own class so that a debugger or a traceback that prints it reads
    nothing.
    """

    def __repr__(self) -> str:
        return f"Addresses(shape={self.shape}, strides={self.strides})"

    __str__ = __repr__


@functools.lru_cache(maxsize=4096)  # NumPy is slow here, and most of thousands of tensors share their shape
def fresh_view(shape: tuple[int, ...], itemsize: int) -> Addresses:
    """Returns the addresses of a C-contiguous array that starts at byte 0."""
    strides = c_strides(shape, itemsize)
    return np.lib.stride_tricks.as_strided(_anchor(itemsize)[0], shape, strides, subok=True).view(Addresses)


def geometry_of(view: np.ndarray) -> Geometry:
    """Start and strides of a view that was made from `fresh_view`."""
    address = int(view.__array_interface__["data"][0])
    return Geometry(address - _anchor(view.itemsize)[1], view.shape, view.strides)


def normalize(geometry: Geometry, out: np.ndarray) -> tuple[Geometry, np.ndarray, list[int]]:
    """Brings a geometry and the array that it fills into file order.

    Returns the normalized geometry, the view of `out` that it fills, and the axes of `out` along which all elements are
    the same (stride 0), so that the filled values have to be repeated along them.
    """
    if is_normalized(geometry.shape, geometry.strides):
        return geometry, out, []
    axes = geometry.file_axes()
    index: list[Any] = [0] * len(geometry.shape)
    for axis in axes:
        index[axis] = slice(None, None, -1 if geometry.strides[axis] < 0 else 1)
    kept = sorted(axes)
    repeated = [axis for axis, extent in enumerate(geometry.shape) if extent > 1 and not geometry.strides[axis]]
    return geometry.normalized(), out[(*index, ...)].transpose([kept.index(axis) for axis in axes]), repeated


def repeat(out: np.ndarray, axes: Sequence[int]) -> None:
    """Copies the first element along each of these axes to the other elements."""
    # Only index 0 of *all* repeated axes is filled, so an axis is spread within index 0 of the axes that follow.
    for position, axis in enumerate(axes):
        later = axes[position + 1 :]
        part = out[tuple(slice(0, 1) if index in later else slice(None) for index in range(out.ndim))]
        head = part[(*(slice(None),) * axis, slice(0, 1))]
        np.copyto(part[(*(slice(None),) * axis, slice(1, None))], head)


@dataclasses.dataclass(frozen=True)
class Covering:
    """The smallest box of an array that is known to cover a normalized geometry of it."""

    box: Box
    inner: Geometry | None  # the geometry in a C-contiguous copy of the box; None if the geometry is exactly the box
    # If it is exactly the box: the axis of the box along which each axis of the geometry runs, and the geometry's shape
    # after each axis that runs over several axes of the box is split.
    axes: tuple[int, ...] = ()
    split: tuple[int, ...] = ()

    def align(self, out: np.ndarray) -> np.ndarray:
        """Returns `out`, which the geometry fills, in the shape of the box. Only if the geometry is exactly the box."""
        index = tuple(slice(None) if axis in self.axes else None for axis in range(len(self.box)))
        return np.reshape(out, self.split, copy=False)[(*index, ...)]


def cover(geometry: Geometry, shape: tuple[int, ...], itemsize: int) -> Covering:
    """Finds the box of a C-contiguous array of `shape` that covers a normalized geometry."""
    base = c_strides(shape, itemsize)
    first = [geometry.start // base[k] % shape[k] for k in range(len(shape))]
    # Follow each axis, the innermost first, along the only base axis whose stride divides its stride.
    pending = list(zip(geometry.shape, geometry.strides, strict=True))
    extents = [1] * len(shape)
    single: list[tuple[int, int, int]] = []  # (extent, base axis, step), innermost first
    while pending:
        extent, stride = pending.pop()
        k = next((k for k in range(len(shape)) if shape[k] > 1 and base[k] <= stride), None)
        if k is None or stride % base[k]:
            break
        step = stride // base[k]
        reach = (extent - 1) * step
        if first[k] + extents[k] + reach <= shape[k]:
            extents[k] += reach
            single.append((extent, k, step))
        elif step == 1 and extents[k] == 1 and first[k] == 0 and extent % shape[k] == 0:
            pending += [(extent // shape[k], stride * shape[k]), (shape[k], stride)]
        else:
            break
    else:
        box = tuple(slice(f, f + e) for f, e in zip(first, extents, strict=True))
        single.reverse()
        used = [axis for _, axis, _ in single]
        exact = all(step == 1 for *_, step in single) and len(set(used)) == len(used)
        strides = c_strides(tuple(extents), itemsize)
        if exact:
            return Covering(box, None, tuple(used), tuple(extent for extent, *_ in single))
        if len(single) == len(geometry.shape):
            return Covering(box, Geometry(0, geometry.shape, tuple(step * strides[axis] for _, axis, step in single)))
    # Otherwise: the contiguous range from the first to the last element, rounded to whole rows.
    end = geometry.start + geometry.span(0)
    last = [end // base[k] % shape[k] for k in range(len(shape))]
    split = next((k for k in range(len(shape)) if first[k] != last[k]), len(shape) - 1)
    box = tuple(slice(first[k], last[k] + 1) if k <= split else slice(0, extent) for k, extent in enumerate(shape))
    begin = sum(box[k].start * base[k] for k in range(len(shape)))
    return Covering(box, dataclasses.replace(geometry, start=geometry.start - begin))


def c_strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Strides in bytes of a C-contiguous array."""
    return [itemsize * math.prod(max(extent, 1) for extent in shape[k + 1 :]) for k in range(len(shape))]


def strided(array: np.ndarray, geometry: Geometry, dtype: np.dtype[Any] | None = None) -> np.ndarray:
    """Returns a view of a C-contiguous array's memory, which must contain the geometry."""
    return np.ndarray(geometry.shape, dtype or array.dtype, cast(Any, array), geometry.start, geometry.strides)


def slabs(shape: tuple[int, ...], limit: int, multiple: int = 1) -> Iterator[Box]:
    """Splits a box into chunks that are contiguous in C order, in order, each of at most `limit` elements.

    Extents along the first axis, except the last, are multiples of `multiple`, even if that exceeds the limit.
    """
    inner = math.prod(shape[1:])
    if not shape or shape[0] * inner <= limit:
        yield whole_box(shape)
    elif inner > limit and multiple == 1:
        for index in range(shape[0]):
            yield from ((slice(index, index + 1), *rest) for rest in slabs(shape[1:], limit))
    else:
        step = max(limit // max(inner, 1) // multiple, 1) * multiple
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])), *whole_box(shape[1:]))


def grid(box: Box, extents: Sequence[int]) -> Iterator[Box]:
    """Divides a box into boxes of at most these extents, in C order."""
    axes = [
        [slice(start, min(start + extent, part.stop)) for start in range(part.start, part.stop, extent)]
        for part, extent in zip(box, extents, strict=True)
    ]
    return itertools.product(*axes)


def intersect(one: Box, other: Box) -> Box | None:
    """The common part of two boxes, or None."""
    common: list[slice] = []
    for a, b in zip(one, other, strict=True):  # called for every shard with every tile
        start, stop = a.start if a.start > b.start else b.start, a.stop if a.stop < b.stop else b.stop
        if start >= stop:
            return None
        common.append(slice(start, stop))
    return tuple(common)


def shift(box: Box, origin: Box) -> Box:
    """A box relative to the first corner of another."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, origin, strict=True))


def unshift(box: Box, origin: Box) -> Box:
    """Adds the first corner of another box: the inverse of `shift`."""
    return tuple(slice(a.start + b.start, a.stop + b.start) for a, b in zip(box, origin, strict=True))


def coarse(box: Box, ratios: Sequence[int]) -> Box:
    """Maps a box to a coarser array, where `ratios[axis]` indices of each axis become one index."""
    return tuple(slice(part.start // ratio, -(-part.stop // ratio)) for part, ratio in zip(box, ratios, strict=True))


def fine(box: Box, ratios: Sequence[int]) -> Box:
    """Maps a box of a coarser array back: the inverse of `coarse`. Axes without a ratio are dropped."""
    return tuple(slice(part.start * ratio, part.stop * ratio) for part, ratio in zip(box, ratios, strict=False))


def clip(targets: Iterable[tuple[Box, np.ndarray]], region: Box) -> list[tuple[Box, np.ndarray]]:
    """The overlaps of boxes with a region, each with its part of the box's array."""
    pairs = ((box, out, intersect(box, region)) for box, out in targets)
    return [
        (box, out) if common == box else (common, out[(*shift(common, box), ...)])
        for box, out, common in pairs
        if common is not None
    ]


def run_axis(region: Box, box: Box, out: np.ndarray) -> int:
    """First axis from which on a box is one run, both in a C-contiguous array of `region` and in `out`, its array."""
    run = run_there = out.itemsize
    for axis in range(out.ndim - 1, -1, -1):
        if out.shape[axis] > 1 and (out.strides[axis] != run or run_there != run):
            return axis + 1
        run *= out.shape[axis]
        run_there *= region[axis].stop - region[axis].start
    return 0


def runs_in(region: Box, box: Box, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of a box, in its order: `int64[n]` byte offsets in a C-contiguous array of `region`, and `int64[n, 2]`
    addresses and lengths of their places in `out`.
    """
    first = run_axis(region, box, out)
    strides = c_strides(box_shape(region), out.itemsize)
    corner = sum(stride * (b.start - r.start) for stride, b, r in zip(strides, box, region, strict=True))
    starts, places = np.array([corner]), np.array([out.__array_interface__["data"][0]])
    for extent, stride, stride_there in zip(out.shape[:first], out.strides, strides, strict=False):
        steps = np.arange(extent)
        starts = (starts[:, None] + steps * stride_there).reshape(-1)
        places = (places[:, None] + steps * stride).reshape(-1)
    runs = np.empty((len(places), 2), np.int64)
    runs[:, 0], runs[:, 1] = places, math.prod(out.shape[first:]) * out.itemsize
    return starts, runs


def box_key(index: Any, shape: tuple[int, ...]) -> BoxKey:
    """Converts JAX's index of a shard, slices with open ends or None, to ranges that can be compared and hashed."""
    return tuple(part.indices(extent)[:2] for part, extent in zip(index or (), shape, strict=True))


def box_of(key: BoxKey) -> Box:
    """Converts such ranges to a box."""
    return tuple(slice(start, stop) for start, stop in key)


def whole_box(shape: Sequence[int]) -> Box:
    return tuple(slice(0, extent) for extent in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def bounding(boxes: Sequence[Box]) -> Box:
    """Returns the smallest box that contains all of these boxes."""
    return tuple(slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in zip(*boxes, strict=True))


def checked_box(box: Box, shape: tuple[int, ...]) -> Box:
    """Fills in the open ends of a box. Raises ValueError if it is not a box of an array of this shape."""
    if len(box) != len(shape):
        raise ValueError(f"expected one slice for each of {len(shape)} dimensions, found {len(box)}")
    checked: list[slice] = []
    for part, extent in zip(box, shape, strict=True):
        start = 0 if part.start is None else part.start
        stop = extent if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= extent:
            raise ValueError(f"expected a range of step 1 within a dimension of {extent}, found {part}")
        checked.append(slice(start, stop))
    return tuple(checked)

"""Tensors that are made of others while they are read: decoded from codes and scales, compared with a copy, computed.

Contains what decoded tensors share: which regions of the stored tensors a box needs, the chunks in which these are
read, each once, and the tiles of chunks that are decoded at a time, so that temporaries stay in caches. A subclass, or
the only stored tensor, defines how a tile is decoded.

A `Computation` is a blockwise function of one tensor with several outputs, such as a quantization: every chunk is read
and computed once for all of them. The caller provides the function; readers of the outputs get lazy tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_shape, clip, coarse, fine, intersect, shift, whole_box
from lazymodel._tensors.buffers import STAGING, Workspace
from lazymodel._tensors.convert import DType, Steps, assign
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import CompositeSource, Part, Targets, View, fill

CHUNK = 4 << 20  # numbers that are read at once: 2 to 4 MiB, far beyond where calls cost anything
READ = 4 << 20  # limit of the temporaries of a chunk in bytes: a tile's input is then still in a shared cache
# Numbers that are decoded at once: 2 MiB of float32. A quarter of it would fit more caches, but threads hand the GIL to
# each other at every call: two of them were then slower than one.
TILE = 512 << 10
TILE_ROWS = 128  # rows of a tile: if the result is transposed, writing them together fills cache lines
SMALLEST = 1 << 10  # numbers that are read and decoded at once if there is not enough memory for more

# Fills an array with the numbers of stored elements.
Unpack: TypeAlias = "Callable[[np.ndarray, np.ndarray, Workspace], None]"


class Stored:
    """A stored tensor with the axes of the result, where each number belongs to a block of the result.

    Further axes, such as the bytes of a block, belong to each element.

    Attributes:
        view: The tensor.
        blocks: For each axis, how many indices of the result belong to one number.
        packing: For each axis, how many numbers one stored element has; by default every element is one number.
        ratios: For each axis, how many indices of the result belong to one stored element.
        unpack: Makes numbers of stored elements, if that is not a cast.
    """

    def __init__(self, view: View, blocks: Sequence[int], unpack: Unpack | None = None, packing: Sequence[int] = ()):
        self.view, self.blocks, self.unpack = view, tuple(blocks), unpack
        self.packing = tuple(packing) or (1,) * len(self.blocks)
        self.ratios = tuple(block * packing for block, packing in zip(self.blocks, self.packing, strict=True))

    def box(self, box: Box) -> Box:
        """The region of stored elements that a region of the result needs."""
        return (*coarse(box, self.ratios), *whole_box(self.view.shape[len(self.ratios) :]))

    @contextlib.contextmanager
    def numbers(
        self, box: Box, array: np.ndarray, dtype: DType, workspace: Workspace
    ) -> Generator[tuple[Box, np.ndarray]]:
        """The numbers in a region of stored elements, and the region that they are in the array of all numbers."""
        covered = fine(box, self.packing)
        with workspace.array(box_shape(covered), dtype) as numbers:
            if self.unpack is None:
                np.copyto(numbers, array, casting="unsafe")
            else:
                self.unpack(array, numbers, workspace)
            yield covered, numbers


class DecodedTensor(CompositeSource):
    """An array that is made of stored tensors tile by tile; by default, the numbers that the first one unpacks to.

    `scratch` is the bytes of temporaries per number while it is decoded.
    """

    tile = TILE  # numbers

    def __init__(
        self, shape: tuple[int, ...], *stored: Stored, dtype: Any = np.float32, scratch: int = 24, tile: int = 0
    ) -> None:
        first = stored[0].view
        self.stored, self.pieces = stored, tuple(each.view for each in stored)
        self.name, self.file, self.offset = first.name, first.file, first.offset
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.scratch, self.tile = scratch, tile or self.tile
        # Bytes that are read for one number; the same if blocks exceed boxes.
        self.read_nbytes = sum(
            -(-view.dtype.itemsize * math.prod(view.shape[len(shape) :]) // math.prod(each.packing))
            for each, view in zip(stored, self.pieces, strict=True)
        )
        self.min_scratch_nbytes = SMALLEST * (self.read_nbytes + scratch)
        self.min_scratch_nbytes += max(view.source.min_scratch_nbytes for view in self.pieces)
        # Chunks begin where nothing has to be read for two of them. They are long along the axis whose elements are
        # adjacent in the file, which may not be the last axis.
        self.cuts = tuple(
            min(math.lcm(*ratios), extent) or 1
            for extent, *ratios in zip(shape, *(each.ratios for each in stored), strict=True)
        )
        self.along = [axis for axis in first.file_order() if axis < len(shape)]

    def needs(self, box: Box) -> list[Box]:
        """The regions of the first stored tensors that a region of the result needs."""
        return [each.box(box) for each in self.stored]

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        """The numbers of a tile, made of the regions of the stored tensors that it needs, and the conversions that
        remain to be applied. Valid until the end of the `with` block.
        """
        with self.stored[0].numbers(needed[0], arrays[0], self.dtype, workspace) as (covered, numbers):
            yield numbers[shift(tile, covered)], steps

    def compiled(
        self, chunk: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> tuple[np.ndarray, Steps] | None:
        """As `decoded`, of a whole chunk by one compiled program, in memory of its own; None if there is none."""
        return None

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        parts: list[Part] = []
        for chunk in cut(bounding(boxes), CHUNK, self.cuts, self.along):
            wanted = clip(zip(boxes, outs, strict=True), chunk)
            # If the boxes fill the chunk, all of it is read and decoded once, although it may go to two boxes.
            together = sum(out.size for _, out in wanted) == math.prod(box_shape(chunk))
            for targets in [wanted] if together else [[target] for target in wanted]:
                nbytes = sum(out.nbytes for _, out in targets)
                parts.append(Part(nbytes, functools.partial(self._fill, targets, steps)))
        return parts

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        region = bounding(boxes)
        if sum(math.prod(box_shape(box)) for box in boxes) == math.prod(box_shape(region)):
            boxes = [region]
        yield from zip(self.pieces, map(list, zip(*map(self.needs, boxes), strict=True)), strict=False)

    def _fill(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        """Fills arrays with boxes that tile one region of a chunk, or with one box."""
        region = bounding([box for box, _ in targets])
        available = max(workspace.available, self.min_scratch_nbytes) // 2
        size, boxes = math.prod(box_shape(region)), zip(self.pieces, self.needs(region), strict=False)
        read = sum(view.dtype.itemsize * math.prod(box_shape(box)) for view, box in boxes)  # by all of the region
        limit = max(min(available // self.read_nbytes, READ * size // read), SMALLEST)
        count = min(size, limit)
        workspace.reserve(count * self.read_nbytes + STAGING + min(count, self.tile) * self.scratch)
        for chunk in cut(region, limit, self.cuts, self.along):
            needed = self.needs(chunk)
            with contextlib.ExitStack() as stack:
                arrays: list[np.ndarray] = []
                for view, box in zip(self.pieces, needed, strict=False):
                    arrays.append(stack.enter_context(workspace.array(box_shape(box), view.dtype)))
                    fill(view, [box], [arrays[-1]], workspace)
                if (made := self.compiled(chunk, needed, arrays, steps, workspace)) is not None:
                    _assign(targets, chunk, *made)
                    del made  # so that its memory can be overwritten
                    continue
                size = max(min(self.tile, workspace.available // self.scratch), SMALLEST)
                for tile in self._tiles(chunk, size):
                    within = self.needs(tile)
                    each = zip(arrays, within, needed, strict=True)
                    own = [array[(*shift(box, whole), ...)] for array, box, whole in each]
                    with self.decoded(tile, within, own, steps, workspace) as (values, rest):
                        for common, out in clip(targets, tile):
                            assign(out, values[(*shift(common, tile), ...)], rest)

    def _tiles(self, chunk: Box, size: int) -> Iterator[Box]:
        """Divides a chunk so that no stored element is decoded for two tiles."""
        units = self.stored[0].packing
        blocks = coarse(chunk, units)
        for part in cut(blocks, max(size // math.prod(units), 1), (1,) * len(chunk), range(len(chunk))):
            tile = intersect(fine(part, units), chunk)
            assert tile is not None  # a stored element of the chunk has at least one number in it
            yield tile


def cut(box: Box, limit: int, cuts: Sequence[int], order: Sequence[int]) -> Iterator[Box]:
    """Divides a box into boxes of at most so many numbers at multiples of `cuts`, as long as possible along the last
    axis of `order`. If one multiple along each axis is too many numbers, boxes are cut anywhere.
    """
    shape = box_shape(box)
    extents = [max(min(multiple, extent), 1) for multiple, extent in zip(cuts, shape, strict=True)]
    for axis in order:
        extents[axis] = max(min(extents[axis], extents[axis] * limit // math.prod(extents)), 1)

    def grow(axis: int, most: int) -> None:
        fits = limit * extents[axis] // math.prod(extents)
        extents[axis] = max(extents[axis], most if fits >= most else fits // cuts[axis] * cuts[axis])

    if len(order) > 1 and limit <= TILE:
        grow(order[-2], min(shape[order[-2]], TILE_ROWS // cuts[order[-2]] * cuts[order[-2]]))
    for axis in reversed(order):
        grow(axis, shape[axis])
    edges: list[list[slice]] = []
    for part, extent, multiple in zip(box, extents, cuts, strict=True):
        # From the multiple at or before the box, so that the block of one element is not cut in two.
        begin = part.start // multiple * multiple if extent % multiple == 0 else part.start
        starts = [part.start, *range(begin + extent, part.stop, extent)]
        edges.append([slice(a, b) for a, b in zip(starts, [*starts[1:], part.stop], strict=True)])
    return itertools.product(*edges)


COMPUTED_CHUNK = 8 << 20  # bytes of the input that are computed at once: intermediate results stay in the caches
# Memory that a function is assumed to need, as a multiple of its chunk: the chunk, a copy, and NumPy's temporaries.
TEMPORARIES = 6

Function: TypeAlias = "Callable[[np.ndarray], tuple[np.ndarray, ...]]"


@dataclasses.dataclass(frozen=True)
class Output:
    """One of the arrays that a computation makes."""

    dtype: DType
    ratios: tuple[int, ...]  # for each axis of the input, how many of its indices become one index of the output
    of: Callable[[tuple[np.ndarray, ...]], np.ndarray]  # picks this output from the function's result for a chunk
    small: bool = False  # True if it is kept once it was computed for another output, as scales are


class Computation:
    """A function of one tensor that can be computed in chunks.

    The function takes a chunk and returns a tuple of arrays, gives the same bits for a chunk as for the whole, and
    keeps no reference to its argument. On each axis, chunks begin at multiples of `steps`: 1 if indices are independent
    of each other, the extent if all depend on each other.
    """

    def __init__(self, source: View, function: Function, steps: Sequence[int]) -> None:
        self.source, self.function = source, function
        self.steps = tuple(max(min(step, extent), 1) for step, extent in zip(steps, source.shape, strict=True))
        self._outputs: list[Output] = []
        self._guard = threading.Lock()
        # For each chunk: a lock, so that no two threads compute it, and its part of the small outputs, once computed.
        self._chunks: dict[BoxKey, tuple[threading.Lock, dict[int, np.ndarray]]] = {}

    def output(self, output: Output) -> LazyTensor:
        """Adds an output, and returns it as a lazy tensor of shape ceil(extent / ratio) on every axis."""
        self.steps = tuple(
            min(math.lcm(step, ratio), extent) if extent else 1
            for step, ratio, extent in zip(self.steps, output.ratios, self.source.shape, strict=True)
        )
        self._outputs.append(output)
        return LazyTensor(ComputedTensor(self, len(self._outputs) - 1, output))

    @property
    def min_scratch_nbytes(self) -> int:
        """Bytes of temporaries that the smallest chunk needs."""
        return math.prod(self.steps) * self.source.itemsize * TEMPORARIES + self.source.source.min_scratch_nbytes

    def chunks(self, output: Output, boxes: Sequence[Box]) -> list[Box]:
        """Chunks of the input that boxes of an output need."""
        # Always cut at the same places, so that the outputs of one chunk share it.
        cut = self._cut(whole_box(self.source.shape), COMPUTED_CHUNK)
        return [chunk for chunk in cut if any(intersect(box, coarse(chunk, output.ratios)) for box in boxes)]

    def compute(self, chunk: Box, index: int, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        """Computes a chunk and fills arrays with boxes of an output that are in it. A small output is computed once."""
        with self._guard:
            key = tuple((part.start, part.stop) for part in chunk)
            lock, kept = self._chunks.setdefault(key, (threading.Lock(), {}))
        output = self._outputs[index]
        with lock:
            if index not in kept:
                small = {
                    number: np.empty(box_shape(coarse(chunk, each.ratios)), each.dtype)
                    for number, each in enumerate(self._outputs)
                    if each.small
                }
                for part in self._cut(chunk, max(workspace.available, self.min_scratch_nbytes) // TEMPORARIES):
                    with workspace.array(box_shape(part), self.source.dtype) as values:
                        fill(self.source, [part], [values], workspace)
                        results = self.function(values)
                        for number, array in small.items():
                            each = self._outputs[number]
                            array[shift(coarse(part, each.ratios), coarse(chunk, each.ratios))] = each.of(results)
                        if not output.small:
                            _assign(targets, coarse(part, output.ratios), output.of(results), steps)
                kept.update(small)
            if output.small:
                _assign(targets, coarse(chunk, output.ratios), kept[index], steps)

    def release(self, index: int) -> None:
        """Discards a small output."""
        with self._guard:
            for _, kept in self._chunks.values():
                kept.pop(index, None)
            if not any(kept for _, kept in self._chunks.values()):
                self._chunks = {}

    def _cut(self, box: Box, nbytes: int) -> Iterator[Box]:
        """Divides a box into chunks of at most so many bytes, but never smaller than a step."""
        limit = max(nbytes // self.source.itemsize, math.prod(self.steps))
        return cut(box, limit, self.steps, self.source.file_order())


def _assign(targets: Targets, region: Box, values: np.ndarray, steps: Steps) -> None:
    """Fills arrays with the overlaps of their boxes and a region, whose values are given."""
    for common, out in clip(targets, region):
        assign(out, values[(*shift(common, region), ...)], steps)


class ComputedTensor(CompositeSource):
    """One output of a computation."""

    def __init__(self, computation: Computation, index: int, output: Output) -> None:
        source = computation.source
        self.pieces, self.reads_pieces = (source,), not output.small
        self.name, self.file, self.offset = source.name, source.file, source.offset
        self.shape = tuple(-(-extent // ratio) for extent, ratio in zip(source.shape, output.ratios, strict=True))
        self.dtype, self.computation, self._index, self.output = output.dtype, computation, index, output

    @property
    def min_scratch_nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.computation.min_scratch_nbytes

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        parts: list[Part] = []
        for chunk in self.computation.chunks(self.output, boxes):
            targets = clip(zip(boxes, outs, strict=True), coarse(chunk, self.output.ratios))
            run = functools.partial(self.computation.compute, chunk, self._index, targets, steps)
            parts.append(Part(sum(out.nbytes for _, out in targets), run))
        return parts

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        if self.reads_pieces:
            yield self.computation.source, self.computation.chunks(self.output, boxes)

    def release(self) -> None:
        self.computation.release(self._index)
        super().release()

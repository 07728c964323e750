"""Quantized tensors, decoded while they are read: codes, scales and zero points as one leaf.

Responsible for which parts of the stored tensors a box needs, for the slabs in which they are read, each once, and for
the arithmetic on tiles of them that stay in the caches: `(code - zero) * scale` in float32, for any blocks that share a
scale. Which format stores what, and how codes are packed, is `_quantized/`'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Box, bounding, box_shape, clip, coarse, shift, whole_box
from lazymodel._tensors.buffers import STAGING, Convert, Steps, Workspace, assign
from lazymodel._tensors.fill import Targets, fill
from lazymodel._tensors.leaves import DividedLeaf, Part, View

SLAB = 4 << 20  # numbers that are read at once: 2 to 4 MiB, far beyond where calls cost anything
# Numbers that are decoded at once: 2 MiB of float32. A quarter as many stay in more caches, but threads hand the
# interpreter to each other at every call: two of them were then slower than one.
TILE = 512 << 10
READ = 8 << 20  # bytes of temporaries for a slab, at most: what a tile is decoded from is still in a shared cache
TILE_ROWS = 128  # of these: where the result is transposed, what is written together fills its cache lines
# Bytes of temporaries of one number while it is decoded: codes, its share of a scale, an index, and float32.
_NUMBER = 4 + 4 + 8 + 4 * 4
_UNIT = 256 << 10  # bytes of temporaries with which the smallest tile gets by
_HALF = np.dtype(np.float16)
_HALF_NORMAL, _HALF_MOST = 2.0**-14, 65504.0
_REBIAS = np.float32(2.0**-112)  # the difference of the exponents' biases of float32 and float16
_CUT = np.float32(2.0**13)  # of float32's digits, float16 has so many fewer

# Fills float32 numbers from stored elements.
Unpack: TypeAlias = "Callable[[np.ndarray, np.ndarray, Workspace], None]"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored tensor with as many axes as the result, of numbers that each are for a block of it.

    Attributes:
        view: The tensor.
        blocks: For each axis, how many indices of the result one of its numbers is for.
        packing: For each axis, how many numbers one stored element has.
        unpack: What makes float32 of stored elements, where that is not a cast.
    """

    view: View
    blocks: tuple[int, ...]
    packing: tuple[int, ...]
    unpack: Unpack | None = None

    @property
    def ratios(self) -> tuple[int, ...]:
        """For each axis, how many indices of the result a stored element is for."""
        return tuple(block * packing for block, packing in zip(self.blocks, self.packing, strict=True))

    def box(self, box: Box) -> Box:
        """The box of it that a box of the result needs."""
        return coarse(box, self.ratios)

    def unpacked(self, box: Box) -> Box:
        """The box of its numbers that a box of stored elements holds."""
        return tuple(slice(s.start * n, s.stop * n) for s, n in zip(box, self.packing, strict=True))

    def numbers(self, array: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        """Fills float32 with what is stored."""
        if self.unpack is None:
            np.copyto(out, array, casting="unsafe")
        else:
            self.unpack(array, out, workspace)


def stored(view: View, blocks: Sequence[int], unpack: Unpack | None = None, packing: Sequence[int] = ()) -> Stored:
    """A stored tensor; by default every element is one number."""
    return Stored(view, tuple(blocks), tuple(packing) or (1,) * view.ndim, unpack)


class ScaledLeaf(DividedLeaf):
    """A float32 array `(code - zero) * scale`, each of the three a stored tensor.

    Every operation is rounded to float32, and with `half` the product to the nearest float16. `factor` is multiplied
    last. `order` is a tensor of the group of each index of an axis, where groups are no ranges: scales and zero points
    are then taken by it. With `may_be_unordered`, one of -1 throughout says that they are ranges.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        codes: Stored,
        scale: Stored,
        zero: Stored | None = None,
        *,
        order: tuple[int, View] | None = None,
        scattered: bool = False,
        may_be_unordered: bool = False,
        factor: float | None = None,
        half: bool = False,
    ) -> None:
        self._codes, self._scale = codes, scale
        self._stored = [codes, scale, *([] if zero is None else [zero])]
        self.pieces = tuple(each.view for each in self._stored) + (() if order is None else (order[1],))
        self.name, self.file, self.offset = codes.view.name, codes.view.file, codes.view.offset
        self.shape, self.dtype = shape, np.dtype(np.float32)
        self._order, self._scattered, self._may_be_unordered = order, scattered, may_be_unordered
        self._factor, self._half = factor, half
        self._groups: np.ndarray | None = None  # of the order, once it was read; empty where it is none
        self._guard = threading.Lock()
        # Slabs are long along what lies together in the file, which may be an axis that is not the last.
        self._along = list(range(len(shape))) if scattered else codes.view.file_order()
        # Of a number that is read, with scales and zero points as float32; that many where blocks exceed boxes.
        self._nbytes = sum(-(-each.view.dtype.itemsize // math.prod(each.packing)) + 4 for each in self._stored)
        kept = 0 if order is None else 2 * order[1].size * np.dtype(np.intp).itemsize
        self.unit_nbytes = _UNIT + kept + max(piece.leaf.unit_nbytes for piece in self.pieces)
        # Slabs begin where nothing has to be read for two of them.
        self._cuts = tuple(
            min(math.lcm(*ratios), extent) or 1
            for extent, *ratios in zip(shape, *(each.ratios for each in self._stored), strict=True)
        )
        if order is not None and scattered:  # all groups for any part of that axis
            self._cuts = tuple(shape[k] if k == order[0] else cut for k, cut in enumerate(self._cuts))

    # Which work there is

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        region = bounding(boxes)
        parts: list[Part] = []
        for slab in _cut(region, SLAB, self._cuts, self._along):
            if not (wanted := clip(zip(boxes, outs, strict=True), slab)):
                continue
            # Where boxes fill it, everything is read and decoded once, although it may go to two of them.
            together = sum(out.size for _, out in wanted) == math.prod(box_shape(slab))
            for targets in [wanted] if together else [[target] for target in wanted]:
                nbytes = sum(out.nbytes for _, out in targets)
                parts.append(Part(nbytes, functools.partial(self._decode, targets, steps)))
        return parts

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        region = bounding(boxes)
        if sum(math.prod(box_shape(box)) for box in boxes) == math.prod(box_shape(region)):
            boxes = [region]
        for stored in self._stored:
            yield stored.view, [self._needed(stored, box, self._scattered) for box in boxes]
        if self._order is not None:
            yield self._order[1], [whole_box(self._order[1].shape)]

    def release(self) -> None:
        self._groups = None
        super().release()

    def _needed(self, stored: Stored, box: Box, grouped: bool) -> Box:
        """The box of a stored tensor that a box of the result needs; of scales by group, all groups."""
        found = stored.box(box)
        if not grouped or self._order is None or stored is self._codes:
            return found
        axis = self._order[0]
        return (*found[:axis], slice(0, stored.view.shape[axis]), *found[axis + 1 :])

    # The work

    def _decode(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        """Fills arrays with boxes that are one region of a slab, or one box."""
        region = bounding([box for box, _ in targets])
        grouped = self._read_groups(workspace) is not None
        limit = max(min(max(workspace.room, _UNIT) // 2, READ) // self._nbytes, 1024)
        count = min(math.prod(box_shape(region)), limit)
        workspace.reserve(count * self._nbytes + STAGING + min(count, TILE) * _NUMBER)
        for slab in _cut(region, limit, self._cuts, self._along):
            boxes = [self._needed(stored, slab, grouped) for stored in self._stored]
            with contextlib.ExitStack() as stack:
                arrays: list[np.ndarray] = []
                for stored, box in zip(self._stored, boxes, strict=True):
                    arrays.append(stack.enter_context(workspace.array(box_shape(box), stored.view.dtype)))
                    fill(stored.view, [box], [arrays[-1]], workspace)
                operands: list[tuple[Stored, Box, np.ndarray]] = []
                for stored, box, array in list(zip(self._stored, boxes, arrays, strict=True))[1:]:
                    covered = stored.unpacked(box)
                    numbers = stack.enter_context(workspace.array(box_shape(covered), self.dtype))
                    stored.numbers(array, numbers, workspace)
                    operands.append((stored, covered, numbers))
                halves = self._half and _are_halves(operands[0][2])
                # A cast that another follows needs not be made of what float16 has.
                to_half = halves and steps[:1] == (Convert(_HALF),) and not _casts(steps[1:])
                if halves:
                    np.multiply(operands[0][2], _CUT * _REBIAS if to_half else _CUT, out=operands[0][2])
                size = min(TILE, max(workspace.room // _NUMBER, 1024))
                for tile in _cut(slab, size, (1,) * len(slab), range(len(slab))):
                    own = self._codes.box(tile)
                    covered = self._codes.unpacked(own)
                    with workspace.array(box_shape(covered), self.dtype) as numbers:
                        self._codes.numbers(arrays[0][shift(own, boxes[0])], numbers, workspace)
                        values = numbers[shift(tile, covered)]
                        self._scale_tile(tile, values, operands, halves, workspace)
                        wanted = clip(targets, tile)
                        with self._converted(values, steps, halves, to_half, workspace) as (rest, found):
                            for common, out in wanted:
                                assign(out, found[shift(common, tile)], rest)

    def _scale_tile(
        self, tile: Box, values: np.ndarray, operands: Sequence[tuple[Stored, Box, np.ndarray]], halves: bool,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        """Turns the codes of a tile into what they stand for, given the numbers of scales and zero points of boxes."""
        with np.errstate(all="ignore"):  # infinities and what is no number are the file's
            for operand in operands[1:]:
                self._apply(np.subtract, values, values, tile, *operand, workspace)
            if halves:
                # x + x * 2 ** 13, rounded to float32's 24 digits, less x * 2 ** 13, is x rounded to float16's 11, ties
                # to even. Both multiples of a scale, which has 11, are exact: nothing is rounded before.
                scale, covered, numbers = operands[0]
                with workspace.array(values.shape, self.dtype) as rounded:
                    more = numbers + numbers / _CUT
                    self._apply(np.multiply, values, rounded, tile, scale, covered, more, workspace)
                    self._apply(np.multiply, values, values, tile, *operands[0], workspace)
                    np.subtract(rounded, values, out=values)
            else:
                self._apply(np.multiply, values, values, tile, *operands[0], workspace)
            if self._factor is not None:
                np.multiply(values, np.float32(self._factor), out=values)

    def _apply(
        self, operation: Any, values: np.ndarray, out: np.ndarray, tile: Box, stored: Stored, covered: Box,
        numbers: np.ndarray, workspace: Workspace,
    ) -> None:  # fmt: skip
        """`out = operation(values, numbers)`; the numbers, each for a block, are those of a box."""
        own, blocks = list(coarse(tile, stored.blocks)), list(stored.blocks)
        starts = [part.start - first.start * block for part, first, block in zip(tile, own, blocks, strict=True)]
        if self._order is None or self._groups is None or not self._groups.size:
            blockwise(operation, values, numbers[shift(tuple(own), covered)], out, blocks, starts)
            return
        axis = self._order[0]
        groups = self._groups[tile[axis]]
        own[axis], blocks[axis], starts[axis] = covered[axis], 1, 0
        numbers = numbers[shift(tuple(own), covered)]
        with workspace.array((*numbers.shape[:axis], groups.size, *numbers.shape[axis + 1 :]), self.dtype) as taken:
            np.take(numbers, groups, axis=axis, out=taken, mode="clip")
            blockwise(operation, values, taken, out, blocks, starts)

    @contextlib.contextmanager
    def _converted(
        self, values: np.ndarray, steps: Steps, halves: bool, to_half: bool, workspace: Workspace
    ) -> Generator[tuple[Steps, np.ndarray]]:
        """What of rounding and conversions is better done before values are copied to where they go: the rest, and the
        values. `halves` says that they are float16's already, `to_half` that they are to be cast to it, and are
        multiplied with `_REBIAS`.
        """
        if to_half:
            with workspace.array(values.shape, _HALF) as converted:
                _to_half(values, converted, workspace)
                yield steps[1:], converted
            return
        if halves:
            steps = steps[steps[:1] == (Convert(_HALF),) :]  # which casts no more
        elif self._half:
            with np.errstate(all="ignore"):
                np.copyto(values, values.astype(_HALF))
        yield steps, values

    def _read_groups(self, workspace: Workspace) -> np.ndarray | None:
        """The group of each index, where groups are no ranges."""
        if self._order is None:
            return None
        axis, view = self._order
        with self._guard:
            if (groups := self._groups) is None:
                read = np.empty(view.shape, view.dtype)
                fill(view, [whole_box(view.shape)], [read], workspace)
                self._groups = groups = self._checked(read.astype(np.intp), axis, view.name)
            return groups if groups.size else None

    def _checked(self, groups: np.ndarray, axis: int, name: str) -> np.ndarray:
        """The groups if they say something; CheckpointError where there is no such group."""
        none = self._may_be_unordered and (groups == -1).all()
        if none or (groups == np.arange(groups.size) // self._scale.blocks[axis]).all():
            return groups[:0]
        count = self._scale.view.shape[axis]
        if groups.min() < 0 or groups.max() >= count:
            raise CheckpointError(
                f"tensor {name!r}: expected groups of 0 to {count - 1}, found {groups.min()} to {groups.max()}; it is "
                "corrupt"
            )
        return groups


def _cut(box: Box, limit: int, cuts: Sequence[int], order: Sequence[int]) -> Iterator[Box]:
    """Divides a box into boxes of about so many numbers at multiples of `cuts`, as long as may be along the last axis
    of an order.

    Where that is too many, they are cut anywhere.
    """
    rows = min(box_shape(box)[order[-2]], TILE_ROWS) if len(box) > 1 and limit <= TILE else 1
    extents = [1] * len(box)
    for axis in reversed(order):
        extent, cut = box[axis].stop - box[axis].start, cuts[axis]
        reserved = rows if axis == order[-1] else 1
        fits = max(limit // (math.prod(extents) * reserved), 1)
        extents[axis] = max(min(extent, fits // cut * cut or fits), 1)
    edges: list[list[slice]] = []
    for part, extent, cut in zip(box, extents, cuts, strict=True):
        # From the multiple at or before the box on, so that what one element is for is not cut in two.
        begin = part.start // cut * cut if extent % cut == 0 else part.start
        starts = [part.start, *range(begin + extent, part.stop, extent)]
        edges.append([slice(a, b) for a, b in zip(starts, [*starts[1:], part.stop], strict=True)])
    return itertools.product(*edges)


def blockwise(
    operation: Any, values: np.ndarray, operand: np.ndarray, out: np.ndarray, blocks: Sequence[int],
    starts: Sequence[int],
) -> None:  # fmt: skip
    """`out = operation(values, operand)`, where one element of the operand is for a block of these extents, and the
    values begin so far behind the beginning of the first.
    """
    axes = [list(_segments(*each)) for each in zip(values.shape, blocks, starts, strict=True)]
    for segments in itertools.product(*axes):
        part = tuple(slice(segment.start, segment.stop) for segment in segments)
        of_operand = operand[tuple(slice(segment.first, segment.first + segment.blocks) for segment in segments)]
        split: list[int] = []
        index: list[Any] = []
        for segment in segments:
            size = (segment.stop - segment.start) // segment.blocks
            if segment.blocks > 1 and size > 1:
                split += [segment.blocks, size]
                index += [slice(None), None]
            else:  # one block, or blocks of one
                split.append(segment.blocks * size)
                index.append(slice(None))
        divided, result = (np.reshape(array[part], split, copy=False) for array in (values, out))
        operation(divided, of_operand[tuple(index)], out=result)


class _Segment(NamedTuple):
    """A range of an axis that is so many whole blocks, or a part of one."""

    start: int
    stop: int
    first: int
    blocks: int


def _segments(extent: int, block: int, start: int) -> Iterator[_Segment]:
    first = position = 0
    if start:
        position, first = min(block - start, extent), 1
        yield _Segment(0, position, 0, 1)
    if whole := (extent - position) // block:
        yield _Segment(position, position + whole * block, first, whole)
        position, first = position + whole * block, first + whole
    if position < extent:
        yield _Segment(position, extent, first, 1)


def _casts(steps: Steps) -> bool:
    """Whether the first of some conversions is a cast."""
    return bool(steps) and steps[0] == Convert(steps[0].dtype)


def _are_halves(scale: np.ndarray) -> bool:
    """Whether products of these scales and integers below 2 ** 8 are 0 or, rounded, normal numbers of float16; those of
    negative scales may be -0, which rounding would lose.
    """
    return bool(scale.size and scale.min() >= _HALF_NORMAL and scale.max() <= _HALF_MOST / 512)


def _to_half(values: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
    """Numbers of float16 times `_REBIAS` as float16: a cast that takes a fraction of NumPy's time. Overwrites them."""
    bits, found = values.view(np.uint32), out.view(np.uint16)
    with workspace.array(bits.shape, bits.dtype) as wide, workspace.array(found.shape, found.dtype) as signs:
        np.right_shift(bits, 16, out=wide)
        np.copyto(signs, wide, casting="unsafe")  # cuts off what is above, here and below
        np.bitwise_and(signs, 0x8000, out=signs)
        np.right_shift(bits, 13, out=bits)
        np.copyto(found, bits, casting="unsafe")
        np.bitwise_or(found, signs, out=found)

"""Tensors whose last axis is stored in blocks of so many numbers, decoded while they are read.

Responsible for which blocks a box needs, for the slabs in which they are read, each once, and for tiles of them that
stay in the caches. What a block stands for is somebody else's function.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from lazymodel._tensors.boxes import Box, bounding, box_shape, clip, grid, intersect, shift, slabs, unshift, whole_box
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.fill import Targets, fill
from lazymodel._tensors.leaves import DividedLeaf, Part, View

SLAB = 2 << 20  # numbers that are read at once: 1 MiB of four bits each, far beyond where calls cost anything
# Numbers that are decoded at once: their temporaries stay in caches, and each call is worth its cost, which is high
# where threads hand the interpreter to each other: a quarter as many took up to twice as long.
_TILE = 256 << 10
_TILE_ROWS = 128  # of these: where the result is transposed, what is written together fills its cache lines
# Bytes of temporaries of one number while it is decoded: itself, its code, an index, and what it is converted to.
_NUMBER = 24
_UNIT = 256 << 10  # bytes of temporaries with which the smallest tile gets by

# Fills numbers `float32[n, size]` with what blocks `uint8[n, bytes]` stand for; it is given `uint8[n * size]` besides.
Decode: TypeAlias = "Callable[[np.ndarray, np.ndarray, np.ndarray], None]"


class BlockedLeaf(DividedLeaf):
    """A leaf `[..., blocks * size]`, of which each piece has `[..., blocks]` or `[..., blocks, elements]`."""

    size: int  # numbers of a block

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        region = bounding(boxes)
        blocks = self.blocks(region)
        parts: list[Part] = []
        for slab in slabs(box_shape(blocks), SLAB // self.size):
            within = intersect(self.numbers(unshift(slab, blocks)), region)
            assert within is not None  # a block of the region has at least one number of it
            wanted = clip(zip(boxes, outs, strict=True), within)
            # Where boxes fill it, each block is read and decoded once, although it may go to two of them.
            together = sum(out.size for _, out in wanted) == math.prod(box_shape(within))
            for targets in [wanted] if together else [[target] for target in wanted]:
                nbytes = sum(out.nbytes for _, out in targets)
                parts.append(Part(nbytes, functools.partial(self.decode, targets, steps)))
        return parts

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        blocks = self.blocks(bounding(boxes))
        for piece in self.pieces:
            yield piece, [(*blocks, *whole_box(piece.shape[len(blocks) :]))]

    def decode(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        """Fills arrays with boxes that are one range of the file, or one box, converted."""
        raise NotImplementedError

    def blocks(self, box: Box) -> Box:
        """The blocks that have numbers of a box."""
        return (*box[:-1], slice(box[-1].start // self.size, -(-box[-1].stop // self.size)))

    def numbers(self, blocks: Box) -> Box:
        """The numbers of some blocks."""
        return (*blocks[:-1], slice(blocks[-1].start * self.size, blocks[-1].stop * self.size))


class BlocksLeaf(BlockedLeaf):
    """A float32 array that is stored as blocks `uint8[..., blocks, bytes]`, of which a function makes `size` each."""

    def __init__(self, stored: View, size: int, decode: Decode) -> None:
        self.pieces, self.size, self._function = (stored,), size, decode
        self.name, self.file, self.offset = stored.name, stored.file, stored.offset
        self.shape, self.dtype = (*stored.shape[:-2], stored.shape[-2] * size), np.dtype(np.float32)
        self.unit_nbytes = 2 * max(_UNIT, size * _NUMBER)

    def decode(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        stored = self.pieces[0]
        nbytes = stored.shape[-1]
        region = self.blocks(bounding([box for box, _ in targets]))
        room = max(workspace.room, self.unit_nbytes) // 2
        for slab in slabs(box_shape(region), max(min(SLAB // self.size, room // nbytes), 1)):
            slab = unshift(slab, region)
            with workspace.array((*box_shape(slab), nbytes), stored.dtype) as blocks:
                fill(stored, [(*slab, slice(0, nbytes))], [blocks], workspace)
                for tile in tiles(box_shape(slab), max(min(_TILE, room // _NUMBER) // self.size, 1), _TILE_ROWS):
                    within = self.numbers(unshift(tile, slab))
                    with self._decoded(blocks[tile].reshape(-1, nbytes), workspace) as numbers:
                        values = numbers.reshape(box_shape(within))
                        for common, out in clip(targets, within):
                            assign(out, values[shift(common, within)], steps)

    @contextlib.contextmanager
    def _decoded(self, blocks: np.ndarray, workspace: Workspace) -> Generator[np.ndarray]:
        """The numbers of some blocks, until the end of the `with` block."""
        shape = (len(blocks), self.size)
        with (
            workspace.array(shape, self.dtype) as numbers,
            workspace.array((math.prod(shape),), np.dtype(np.uint8)) as room,
        ):
            with np.errstate(all="ignore"):  # infinities and what is no number are the file's
                self._function(blocks, numbers, room)
            yield numbers


def tiles(shape: tuple[int, ...], limit: int, most_rows: int) -> Iterator[Box]:
    """Divides `[..., rows, blocks]` into what is decoded at once, of at most so many blocks."""
    *outer, rows, blocks = (1, 1, *shape)[-max(len(shape), 2) :]
    rows = min(rows, most_rows, limit)
    blocks = min(blocks, max(limit // rows, 1))
    extents = [1] * (len(outer) - 1) + [max(limit // (rows * blocks), 1)] * bool(outer) + [rows, blocks]
    return grid(whole_box(shape), extents[-len(shape) :])

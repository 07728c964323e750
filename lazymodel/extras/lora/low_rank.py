"""A matrix with a product of two narrow ones added while it is read, as a LoRA adapter changes a weight.

Products are computed in blocks that always begin at the same places, so that a box has the same bits as in the whole.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from lazymodel._tensors.boxes import Box, box_shape, coarse, fine, intersect, shift, whole_box
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.convert import Steps
from lazymodel._tensors.decoded import DecodedTensor, Stored, cut
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import Targets, View, fill

_ROWS, _COLUMNS = 32, 128  # of a block; fewer columns if the rank is high
# Multiplications of a block: so few that OpenBLAS uses one thread. Its own threads wait for each other, which takes
# several times as long on busy cores, as those of a load are.
_MULTIPLICATIONS = 1 << 18


class LowRankSum(DecodedTensor):
    """`base + scale * left @ right`, of shape `(rows, columns)`, in float32 (in float64 if the base is).

    `magnitude` is the norm of each row of the result, or of each column (`axis` 1); by default no norm is changed.
    The factors are read once and kept until `release`.
    """

    def __init__(
        self, base: View, left: View, right: View, scale: float, magnitude: View | None = None, axis: int = 0
    ) -> None:
        dtype = np.result_type(np.float32, base.dtype) if base.dtype.kind == "f" else np.dtype(np.float32)
        self._factors = tuple(
            LazyTensor(view.source, view.addresses, view.steps).astype(dtype) for view in (left, right)
        )
        super().__init__(base.shape, Stored(base, (1, 1)), dtype=dtype, scratch=dtype.itemsize)
        self._scale, self._axis = dtype.type(scale), axis
        self._magnitude = magnitude
        self.pieces += (*self._factors, *(() if magnitude is None else (magnitude,)))
        self.min_scratch_nbytes += sum(factor.nbytes for factor in self._factors)
        width = max(_MULTIPLICATIONS // (_ROWS * max(left.shape[1], 1)), 1)
        self._block = _ROWS, min(max(1 << width.bit_length() - 1, 16), _COLUMNS)
        self.min_scratch_nbytes += math.prod(self._block) * dtype.itemsize
        self.cuts = tuple(min(pair) for pair in zip(self._block, (extent or 1 for extent in base.shape), strict=True))
        # The factors, and what each row or column is multiplied with to have its norm.
        self._kept: tuple[np.ndarray, np.ndarray, np.ndarray | None] | None = None
        self._guard = threading.Lock()

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        for view in self.pieces[1:]:
            yield view, [whole_box(view.shape)]
        if self._magnitude is not None:
            yield self.pieces[0], [whole_box(self.shape)]
        yield from super().reads(boxes)

    def release(self) -> None:
        self._kept = None
        super().release()

    def _fill(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        self._read(workspace)
        super()._fill(targets, steps, workspace)

    def _read(self, workspace: Workspace) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The factors, and the norms; read again if another tensor that has a part of the sum released them."""
        with self._guard:
            if (kept := self._kept) is None:
                left, right = (_whole(factor, workspace) for factor in self._factors)
                norms = None if self._magnitude is None else self._factor(self._magnitude, left, right, workspace)
                self._kept = kept = left, right, norms
            return kept

    def _factor(self, magnitude: View, left: np.ndarray, right: np.ndarray, workspace: Workspace) -> np.ndarray:
        """Reads all of the base once for the norms of the sum."""
        squares = np.zeros(self.shape[self._axis], np.float64)
        view = self.pieces[0]
        # Tiles of a fixed size, so that sums do not depend on the available memory.
        for tile in cut(whole_box(self.shape), self.tile, self.cuts, self.along):
            with workspace.array(box_shape(tile), view.dtype) as stored:
                fill(view, [tile], [stored], workspace)
                with self._sum(tile, stored, left, right, workspace) as values, np.errstate(all="ignore"):
                    np.square(values, out=values)
                    squares[tile[self._axis]] += values.sum(axis=1 - self._axis, dtype=np.float64)
        with np.errstate(all="ignore"):  # a norm may be zero, as in PEFT
            return _whole(magnitude, workspace).astype(self.dtype) / np.sqrt(squares).astype(self.dtype)

    @contextlib.contextmanager
    def _sum(
        self, tile: Box, stored: np.ndarray, left: np.ndarray, right: np.ndarray, workspace: Workspace
    ) -> Generator[np.ndarray]:
        outer = self._blocks(tile)
        # Numbers of a file may overflow.
        with np.errstate(all="ignore"), workspace.array(box_shape(outer), self.dtype) as product:
            self._multiply(left[outer[0]], right[:, outer[1]], product)
            values = product[shift(tile, outer)]
            if self._scale != 1:
                np.multiply(values, self._scale, out=values)
            np.add(values, stored, out=values, dtype=self.dtype, casting="unsafe")
            yield values

    def _blocks(self, box: Box) -> Box:
        """The region of the blocks that a region needs."""
        found = intersect(fine(coarse(box, self._block), self._block), whole_box(self.shape))
        assert found is not None
        return found

    def _tiles(self, chunk: Box, size: int) -> Iterator[Box]:
        for part in cut(self._blocks(chunk), size, self.cuts, self.along):
            if (tile := intersect(part, chunk)) is not None:
                yield tile

    def _multiply(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """Computes a product block by block; blocks at the end may be smaller."""
        (rows, columns), rank = self._block, left.shape[1]
        for down in _whole_and_rest(len(left), rows):
            for along in _whole_and_rest(right.shape[1], columns):
                one = left[down].reshape(-1, 1, min(rows, down.stop - down.start), rank)
                width = min(columns, along.stop - along.start)
                other = np.reshape(right[:, along], (rank, -1, width), copy=False).transpose(1, 0, 2)
                found = np.reshape(out[down, along], (*one.shape[::2], -1, width), copy=False).transpose(0, 2, 1, 3)
                np.matmul(one, other, out=found)

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        left, right, norms = self._read(workspace)
        with self._sum(tile, arrays[0], left, right, workspace) as values:
            if norms is not None:
                norms = norms[tile[self._axis]]
                np.multiply(values, norms[:, None] if self._axis == 0 else norms, out=values)
            yield values, steps


def _whole(view: View, workspace: Workspace) -> np.ndarray:
    values = np.empty(view.shape, view.dtype)
    fill(view, [whole_box(view.shape)], [values], workspace)
    return values


def _whole_and_rest(count: int, size: int) -> Iterator[slice]:
    """The part of a range that is whole blocks, and the rest."""
    end = count // size * size
    for part in (slice(0, end), slice(end, count)):
        if part.start < part.stop:
            yield part

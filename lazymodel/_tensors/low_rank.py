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
from lazymodel._tensors.buffers import Steps, Workspace
from lazymodel._tensors.decoded import SMALLEST, TILE, DecodedTensor, Stored, cut
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import Targets, View, fill

_BLOCK = (128, 512)  # rows and columns of a product: several times an adapter's rank, and 256 KiB of float32


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
        super().__init__(base.shape, Stored(base, (1, 1)), dtype=dtype, scratch=3 * dtype.itemsize)
        self._scale, self._axis = dtype.type(scale), axis
        self._magnitude = magnitude
        self.pieces += (*self._factors, *(() if magnitude is None else (magnitude,)))
        self.min_scratch_nbytes += sum(factor.nbytes for factor in self._factors)
        self.min_scratch_nbytes += math.prod(_BLOCK) * dtype.itemsize
        self.cuts = tuple(min(pair) for pair in zip(_BLOCK, (extent or 1 for extent in base.shape), strict=True))
        self._kept: tuple[np.ndarray, np.ndarray] | None = None
        self._norms: np.ndarray | None = None  # what each row or column is multiplied with
        self._guard = threading.Lock()

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        for view in self.pieces[1:]:
            yield view, [whole_box(view.shape)]
        if self._magnitude is not None:
            yield self.pieces[0], [whole_box(self.shape)]
        yield from super().reads(boxes)

    def release(self) -> None:
        self._kept = self._norms = None
        super().release()

    def _fill(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        with self._guard:
            if self._kept is None:
                self._kept = _whole(self._factors[0], workspace), _whole(self._factors[1], workspace)
            if self._magnitude is not None and self._norms is None:
                self._norms = self._factor(self._magnitude, workspace)
        super()._fill(targets, steps, workspace)

    def _factor(self, magnitude: View, workspace: Workspace) -> np.ndarray:
        """Reads all of the base once for the norms of the sum."""
        squares = np.zeros(self.shape[self._axis], np.float64)
        view = self.pieces[0]
        count = min(TILE, max(workspace.available // (2 * (view.itemsize + 2 * self.scratch)), SMALLEST))
        for tile in cut(whole_box(self.shape), count, self.cuts, self.along):
            with workspace.array(box_shape(tile), view.dtype) as stored:
                fill(view, [tile], [stored], workspace)
                with self._sum(tile, stored, workspace) as values:
                    squares[tile[self._axis]] += np.einsum("ij,ij->" + "ij"[self._axis], values, values)
        with np.errstate(all="ignore"):  # a norm may be zero, as in PEFT
            return _whole(magnitude, workspace).astype(self.dtype) / np.sqrt(squares).astype(self.dtype)

    @contextlib.contextmanager
    def _sum(self, tile: Box, stored: np.ndarray, workspace: Workspace) -> Generator[np.ndarray]:
        assert self._kept is not None
        left, right = self._kept
        with np.errstate(all="ignore"), workspace.array(box_shape(tile), self.dtype) as values:  # as the file's values
            np.copyto(values, stored, casting="unsafe")
            for block in cut(fine(coarse(tile, _BLOCK), _BLOCK), math.prod(_BLOCK), _BLOCK, (0, 1)):
                rows, columns = (
                    slice(part.start, min(part.stop, n)) for part, n in zip(block, self.shape, strict=True)
                )
                common = intersect(tile, (rows, columns))
                if common is None:
                    continue
                with workspace.array((rows.stop - rows.start, columns.stop - columns.start), self.dtype) as product:
                    np.matmul(left[rows], right[:, columns], out=product)
                    np.multiply(product, self._scale, out=product)
                    own = values[shift(common, tile)]
                    np.add(own, product[shift(common, (rows, columns))], out=own)
            yield values

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        with self._sum(tile, arrays[0], workspace) as values:
            if self._norms is not None:
                norms = self._norms[tile[self._axis]]
                np.multiply(values, norms[:, None] if self._axis == 0 else norms, out=values)
            yield values, steps


def _whole(view: View, workspace: Workspace) -> np.ndarray:
    values = np.empty(view.shape, view.dtype)
    fill(view, [whole_box(view.shape)], [values], workspace)
    return values

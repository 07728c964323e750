"""Several stored tensors that stand for one: what a model ties has one array, and a checkpoint may have it twice."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Box, box_shape, slabs, unshift
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.fill import fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import DividedLeaf, Part, View

_SLAB = 4 << 20  # bytes of each tensor that are compared at a time


def equal_tensor(path: str, tensors: Sequence[LazyTensor]) -> LazyTensor:
    """One tensor for several, which have to be equal bit for bit: each box that is read is read of all of them.

    Raises:
        CheckpointError: Shapes or dtypes differ; when boxes are read, their values do.
    """
    first = tensors[0]
    others = [other for other in tensors[1:] if not _is_same(first, other)]
    for other in others:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise _differs(path, first, other)
    return LazyTensor(_EqualLeaf(path, first, others)) if others else first


def _is_same(one: LazyTensor, other: LazyTensor) -> bool:
    """Returns True where two tensors are the same elements of the same array, so that nothing has to be compared."""
    leaves = [getattr(tensor.leaf, "array", tensor.leaf) for tensor in (one, other)]
    return leaves[0] is leaves[1] and one.geometry() == other.geometry() and one.steps == other.steps


def _differs(path: str, one: View, other: View) -> CheckpointError:
    texts = [f"{tensor.name!r} ({tensor.dtype.name}{list(tensor.shape)})" for tensor in (one, other)]
    return CheckpointError(
        f"{path!r} is one array in the model, and the checkpoint has {' and '.join(texts)} for it, which differ. Leave "
        "one of them out, or build a model that does not tie them"
    )


class _EqualLeaf(DividedLeaf):
    """The first of some tensors; the others are compared with it."""

    def __init__(self, path: str, first: View, others: Sequence[View]) -> None:
        self.name, self.file, self.offset = first.name, first.file, first.offset
        self.shape, self.dtype = first.shape, first.dtype
        self.pieces = (first, *others)
        self.unit_nbytes = 2 * first.itemsize + max(piece.leaf.unit_nbytes for piece in self.pieces)
        self._path = path

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        return ((piece, list(boxes)) for piece in self.pieces)

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        return [
            Part(target.nbytes, functools.partial(self._fill, unshift(slab, box), target, steps))
            for box, out in zip(boxes, outs, strict=True)
            for slab in slabs(box_shape(box), max(_SLAB // self.dtype.itemsize, 1))
            if (target := out[(*slab, ...)]).size
        ]

    def _fill(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        first, *others = self.pieces
        limit = max(workspace.room // (4 * self.dtype.itemsize), 1)
        for slab in slabs(box_shape(box), limit):
            part, shape = unshift(slab, box), box_shape(slab)
            with workspace.array(shape, self.dtype) as values, workspace.array(shape, self.dtype) as compared:
                fill(first, [part], [values], workspace)
                for other in others:
                    fill(other, [part], [compared], workspace)
                    if not np.array_equal(values.reshape(-1).view(np.uint8), compared.reshape(-1).view(np.uint8)):
                        raise _differs(self._path, first, other)
                assign(out[(*slab, ...)], values, steps)

"""Scales that stand beside weights: which block of a weight each is for, told from shapes and a declared block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lazymodel._quantized.contents import Contents
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import View
from lazymodel._tensors.scaled import ScaledLeaf, Stored


def blocks_of(
    contents: Contents, name: str, shape: Sequence[int], declared: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape that the scales `name` have as an array of as many axes as the weight, and the block that each is for.

    One for all, one for each index of an axis, or, where a block of the last axes is declared, one for each of these.
    Raises CheckpointError where it is none of them.
    """
    found = tuple(contents.header(name).shape)
    count = len(shape)
    least = len(declared or (1,))
    if count < least or not all(shape):
        contents.refuse(name, f"a weight of at least {least} axes that is not empty", f"one of shape {tuple(shape)}")
    if declared is not None:
        ends = shape[count - len(declared) :]
        expected = (1,) * (count - len(declared)) + tuple(map(min, declared, ends))
        wanted = tuple(-(-extent // block) for extent, block in zip(shape, expected, strict=True))
        squeezed = tuple(extent for extent in found if extent != 1)
        if squeezed != tuple(extent for extent in wanted if extent != 1):
            contents.refuse(name, f"shape {wanted}, a scale for each block of {list(declared)}", str(found))
        return wanted, expected
    if all(extent == 1 for extent in found):
        return (1,) * count, tuple(shape)
    full = found + (1,) * (count - len(found))  # per channel without the axes that follow
    if len(full) != count or any(n not in (1, extent) for n, extent in zip(full, shape, strict=True)):
        contents.refuse(name, f"a scale for all of {tuple(shape)}, or one for each index of an axis", f"shape {found}")
    return full, tuple(1 if n == extent else extent for n, extent in zip(full, shape, strict=True))


def arranged(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """A tensor in the shape that `blocks_of` says."""
    return tensor if tensor.shape == tuple(shape) else tensor.reshape(tuple(shape))


def scaled_integers(
    shape: tuple[int, ...],
    codes: Stored,
    scale: Stored,
    zero: Stored | None = None,
    *,
    order: tuple[int, View] | None = None,
    scattered: bool = False,
    may_be_unordered: bool = False,
) -> LazyTensor:
    """Integers below 2 ** 8 times their scales, rounded to the scales' dtype."""
    kind = scale.view.dtype
    leaf = ScaledLeaf(
        shape, codes, scale, zero, order=order, scattered=scattered, may_be_unordered=may_be_unordered,
        half=kind == np.float16,
    )  # fmt: skip
    return LazyTensor(leaf) if kind.name != "bfloat16" else LazyTensor(leaf).astype(kind)

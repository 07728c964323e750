"""How numbers of a few bits are packed: functions that make float32 of stored elements (`_tensors/scaled.Unpack`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.scaled import Unpack

_INDEX = np.dtype(np.intp)  # what NumPy looks up with; it would convert narrower ones, out of its own memory
WORD = 32  # bits of the integers that codes are packed in


def lookup(table: np.ndarray) -> Unpack:
    """Looks up bytes, or two at a time, in `float32[256 or 65536, n]`: each stands for n numbers that follow each other
    along the last axis.
    """
    row = table.shape[1] * table.itemsize
    flat = np.ascontiguousarray(table).reshape(-1).view(f"V{row}")
    kind = np.uint8 if len(table) == 256 else np.uint16

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        codes = stored.view(kind)
        with workspace.array(codes.shape, _INDEX) as index:
            np.copyto(index, codes)
            np.take(flat, index, out=out.view(flat.dtype), mode="clip")  # by default NumPy copies the result

    return unpack


@functools.cache
def floats(dtype: np.dtype[Any]) -> Unpack:
    """Floats of eight bits."""
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    one, two = lookup(values[:, None]), lookup(values[pairs].reshape(-1, 2))

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        (one if stored.shape[-1] % 2 else two)(stored, out, workspace)

    return unpack


def integers(bits: int, offset: int = 0) -> Unpack:
    """Unsigned integers along the last axis, the first in the lowest bits; `offset` is added."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits)
    return lookup((codes % (1 << bits) + offset).astype(np.float32))


def pairs(values: np.ndarray) -> Unpack:
    """Codes of four bits, each for one of 16 values, two to a byte, the first in its upper half."""
    byte = np.arange(256)
    return lookup(np.stack([values[byte >> 4], values[byte & 15]], axis=1).astype(np.float32))


def integers_down(bits: int, offset: int = 0, plus: int = 0, order: Sequence[int] = ()) -> Unpack:
    """Unsigned integers along the axis before the last, in words of 32: the first in the lowest bits, or in an order;
    `plus` is added modulo 2 ** bits, and then `offset`.
    """
    count, mask = WORD // bits, np.uint32((1 << bits) - 1)

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        words = stored.view(np.uint32)
        with workspace.array(words.shape, words.dtype) as codes:
            for place, position in enumerate(order or range(count)):
                np.right_shift(words, np.uint32(bits * place), out=codes)
                if plus:
                    np.add(codes, np.uint32(plus), out=codes)
                np.bitwise_and(codes, mask, out=codes)
                np.copyto(out[..., position::count, :], codes.view(np.int32), casting="unsafe")
        if offset:
            np.add(out, np.float32(offset), out=out)

    return unpack

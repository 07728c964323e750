"""Blocks of 4-bit floats with a scale of one byte each (MXFP4, NVFP4), decoded while they are read, as a leaf.

Responsible for decoding the blocks that a box needs. What the numbers are is somebody else's function: it is run once,
on every scale with every byte, and what it made of them is looked up from then on. So its result is what is loaded,
bit for bit, whatever it does with special values.

MXFP4 is the format of the OCP Microscaling Formats specification, version 1.0, section 5: blocks of 32 numbers of four
bits (E2M1), here two to a byte, the first in the lower half, and for each block an exponent of eight bits (E8M0). NVFP4
has blocks of 16, and a float of eight bits (E4M3) for each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import numpy as np

from lazymodel._tensors.blocks import SLAB, BlockedLeaf, tiles
from lazymodel._tensors.boxes import bounding, box_shape, clip, shift, slabs, unshift
from lazymodel._tensors.buffers import DType, Steps, Workspace, assign
from lazymodel._tensors.fill import Targets, fill
from lazymodel._tensors.leaves import View

BLOCK = 32  # numbers of MXFP4 that share a scale
CODES = BLOCK // 2  # bytes of a block, each of two numbers
# Blocks that are looked up at once: 512 KiB of indices and of float32 each, which stay in the caches. A quarter as many
# took 9 to 49 % longer, and no more were faster.
LOOKED_UP = 4096
LOOKED_UP_ROWS = 128  # of these: where the result is transposed, what is written together fills its cache lines
_INDEX = np.dtype(np.intp)  # what NumPy looks up with; it would convert narrower ones, out of its own memory
# Bytes of temporaries of one block: codes, a scale, indices, numbers of up to eight bytes, and each array's alignment.
_UNIT = CODES + 1 + CODES * _INDEX.itemsize + BLOCK * 8 + 4 * 64

Decode: TypeAlias = "Callable[[Any, Any], Any]"  # blocks `uint8[..., 16]` and scales `uint8[...]` to `float32[...]`


class DecodedPairs:
    """What every byte stands for under every scale: `float32[65536, 2]`, two numbers at `scale * 256 + byte`.

    `values` makes that table when it is first needed.
    """

    def __init__(self, values: Callable[[], np.ndarray]) -> None:
        self._values = values
        # Half a MiB each, beyond the budget of a load; it has variables of one dtype or two.
        self.converted = functools.lru_cache(maxsize=2)(self._converted)

    def _converted(self, dtype: DType, steps: Steps) -> np.ndarray:
        """Opaque pairs of numbers after conversion to a dtype: done to the table, it need not be done to every one."""
        values = self._values()
        converted = np.empty(values.shape, dtype)
        assign(converted, values, steps)
        return converted.view(f"V{2 * dtype.itemsize}").reshape(-1)


def decoded_pairs(decode: Decode) -> DecodedPairs | None:
    """What a function makes of every scale with every byte; None if that is not all there is to it, tried with numbers
    that lie elsewhere: a function that gives their places another meaning cannot be looked up.
    """
    every = np.arange(256, dtype=np.uint8)
    codes = np.broadcast_to(every.reshape(-1, CODES), (1, 256, 256 // CODES, CODES))
    scales = np.broadcast_to(every[:, None], (256, 256 // CODES))[None]
    rng = np.random.default_rng(0)
    other_codes = rng.integers(0, 256, (2, 24, 3, CODES), np.uint8)
    other_scales = rng.integers(0, 256, other_codes.shape[:-1], np.uint8)
    with np.errstate(all="ignore"):  # the largest scale is no number
        table = np.asarray(decode(codes, scales))
        expected = np.asarray(decode(other_codes, other_scales))
    if table.dtype != np.float32 or table.shape != (1, 256, 512) or expected.shape != (2, 24, 3 * BLOCK):
        return None
    table = np.ascontiguousarray(table).reshape(-1, 2)
    found = table[other_scales[..., None].astype(_INDEX) << 8 | other_codes].reshape(expected.shape)
    return DecodedPairs(lambda: table) if np.ascontiguousarray(expected).tobytes() == found.tobytes() else None


class Float4Leaf(BlockedLeaf):
    """A float32 array `[experts, rows, blocks * n]` that is stored as blocks `uint8[experts, rows, blocks, n / 2]` and
    scales `uint8[experts, rows, blocks]`, which mean what a table says.
    """

    def __init__(self, blocks: View, scales: View, table: DecodedPairs, *, own_table: bool = False) -> None:
        self.pieces = (blocks, scales)
        self.name, self.file, self.offset = blocks.name, blocks.file, blocks.offset
        self._codes, self.size = blocks.shape[-1], 2 * blocks.shape[-1]
        self.shape, self.dtype = (*blocks.shape[:2], blocks.shape[2] * self.size), np.dtype(np.float32)
        self.unit_nbytes = 2 * _UNIT + max(piece.leaf.unit_nbytes for piece in self.pieces)
        self._table, self._own_table = table, own_table

    def release(self) -> None:
        if self._own_table:
            self._table.converted.cache_clear()
        super().release()

    def decode(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        pairs = self._table.converted(targets[0][1].dtype, steps)
        blocks = self.blocks(bounding([box for box, _ in targets]))
        room = max(workspace.room, self.unit_nbytes)
        for slab in slabs(box_shape(blocks), max(min(SLAB // self.size, room // 2 // (self._codes + 1)), 1)):
            slab = unshift(slab, blocks)
            shape = box_shape(slab)
            with (
                workspace.array((*shape, self._codes), np.dtype(np.uint8)) as codes,
                workspace.array(shape, np.dtype(np.uint8)) as scales,
            ):
                for tensor, values in zip(self.pieces, (codes, scales), strict=True):
                    box = (*slab, slice(0, self._codes))[: tensor.ndim]
                    fill(tensor, [box], [values], workspace)
                for tile in tiles(shape, max(min(LOOKED_UP, workspace.room // _UNIT), 1), LOOKED_UP_ROWS):
                    within = self.numbers(unshift(tile, slab))
                    with _looked_up(pairs, codes[tile], scales[tile], workspace) as found:
                        for common, out in clip(targets, within):
                            numbers = found.view(out.dtype).reshape(box_shape(within))
                            assign(out, numbers[shift(common, within)])


@contextlib.contextmanager
def _looked_up(pairs: np.ndarray, codes: np.ndarray, scales: np.ndarray, workspace: Workspace) -> Generator[np.ndarray]:
    """The pairs of numbers that codes stand for, until the end of the `with` block."""
    with workspace.array(codes.shape, _INDEX) as index, workspace.array(codes.shape, pairs.dtype) as found:
        np.left_shift(scales[..., None], 8, out=index, dtype=_INDEX)
        np.bitwise_or(index, codes, out=index)
        np.take(pairs, index, out=found, mode="clip")  # none can be out of range; by default NumPy copies the result
        yield found

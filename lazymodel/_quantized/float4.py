"""Four-bit floats (E2M1) in blocks: MXFP4 and NVFP4, decoded by looking up pairs of numbers.

MXFP4 (OCP Microscaling Formats 1.0, section 5): blocks of 32 with a power of two (E8M0), where 255 is NaN; every
value is exact in float32. Two numbers in a byte, the first in the lower half. `mxfp4` of transformers stores it for
experts as `X_blocks` and `X_scales`; the last two axes of the plain form `X` are exchanged
(`convert_moe_packed_tensors`).

NVFP4: blocks of 16 with a scale in E4M3, and one float32 for all: compressed-tensors divides by it
(`weight_global_scale`), NVIDIA's ModelOpt multiplies by it (`weight_scale_2`). The quotient or product is rounded to
float32, its product with the number as well, and the result to the model's dtype.

The value of every byte under every scale is computed once and then looked up. So the loaded values equal that function
bit for bit, special values included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

import ml_dtypes
import numpy as np

from lazymodel._quantized.config import Contents
from lazymodel._quantized.scaled import INDEX
from lazymodel._tensors.boxes import Box, box_shape, fine, shift
from lazymodel._tensors.buffers import DType, Steps, Workspace, assign
from lazymodel._tensors.decoded import DecodedTensor, Stored
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import View

BLOCK = 32  # numbers of MXFP4 that share a scale
CODES = BLOCK // 2  # bytes of a block, each of two numbers
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))


class Float4Tensor(DecodedTensor):
    """A float32 array `[experts, rows, blocks * n]` that is stored as blocks `uint8[experts, rows, blocks, n / 2]` and
    scales `uint8[experts, rows, blocks]`. `pairs` makes the table of their values, as `scaled_pairs` does.
    """

    # 512 KiB of indices and of float32 each, which stay in the caches. A quarter as many took 9 to 49 % longer, and
    # larger tiles were not faster.
    tile = 4096 * BLOCK

    def __init__(self, blocks: View, scales: View, pairs: Callable[[], np.ndarray]) -> None:
        ones, packing = (1, 1, 1), (1, 1, 2 * blocks.shape[-1])
        shape = (*blocks.shape[:2], blocks.shape[2] * packing[2])
        stored = Stored(blocks, ones, packing=packing), Stored(scales, ones, packing=packing)
        super().__init__(shape, *stored, scratch=16)
        self._pairs = pairs
        # Half a MiB each, in addition to the budget of a load, which has variables of one or two dtypes.
        self._converted: dict[tuple[DType, Steps], np.ndarray] = {}

    def release(self) -> None:
        self._converted = {}
        super().release()

    def _table(self, dtype: DType, steps: Steps) -> np.ndarray:
        """Opaque pairs of numbers after conversion. Converting the table replaces converting every number."""
        if (table := self._converted.get((dtype, steps))) is None:
            values = self._pairs()
            converted = np.empty(values.shape, dtype)
            assign(converted, values, steps)
            self._converted[dtype, steps] = table = converted.view(f"V{2 * dtype.itemsize}").reshape(-1)
        return table

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        (codes, scales), dtype = arrays, steps[-1].dtype if steps else self.dtype
        pairs, covered = self._table(dtype, steps), fine(needed[0], self.stored[0].packing)
        with workspace.array(codes.shape, INDEX) as index, workspace.array(codes.shape, pairs.dtype) as found:
            np.left_shift(scales[..., None], 8, out=index, dtype=INDEX)
            np.bitwise_or(index, codes, out=index)
            np.take(pairs, index, out=found, mode="clip")  # none is out of range; by default NumPy copies the result
            yield found.view(dtype).reshape(box_shape(covered))[shift(tile, covered)], ()


def decode_mxfp4(contents: Contents) -> None:
    """Decodes the modules of `mxfp4` of transformers."""
    for name in contents.names("_blocks"):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        contents.require(blocks, scales)
        shape = tuple(contents.header(blocks).shape)
        if len(shape) < 3 or shape[-1] != CODES:
            contents.reject(blocks, f"blocks of {CODES} bytes", f"shape {shape}")
        contents.expect(blocks, shape, "uint8")
        contents.expect(scales, shape[:-1], "uint8")

        def make(blocks: str = blocks, scales: str = scales, shape: tuple[int, ...] = shape) -> LazyTensor:
            whole = (-1, *shape[-3:])
            stored = contents.tensor(blocks).reshape(whole), contents.tensor(scales).reshape(whole[:-1])
            decoded = LazyTensor(Float4Tensor(*stored, mxfp4_pairs))
            return decoded.reshape((*shape[:-2], shape[-2] * BLOCK)).swapaxes(-1, -2)

        contents.add(name, [blocks, scales], (*shape[:-3], shape[-2] * BLOCK, shape[-3]), make)


def add_mxfp4(contents: Contents, name: str, packed: str, scale: str) -> None:
    """Adds a matrix with a byte for the scale of every 32 numbers of a row."""
    _add(contents, name, [packed, scale], BLOCK, ("uint8", "float8_e8m0fnu"), mxfp4_pairs)


def add_nvfp4(contents: Contents, name: str, packed: str, scale: str, overall: str, *, divides: bool) -> None:
    """Adds a matrix with a scale for every 16 numbers of a row, and one for all of them."""
    header = contents.header(overall)
    if header.dtype != np.float32 or header.shape not in ((), (1,)):
        contents.reject(overall, "one float32", f"{header.dtype.name}{header.shape}")

    def pairs() -> np.ndarray:
        of_all = contents.tensor(overall).read().reshape(())
        with np.errstate(all="ignore"):
            return scaled_pairs(_E4M3 / of_all if divides else _E4M3 * of_all)

    _add(contents, name, [packed, scale, overall], 16, ("float8_e4m3fn",), pairs)


def _add(
    contents: Contents, name: str, parts: list[str], block: int, kinds: tuple[str, ...], pairs: Callable[[], np.ndarray]
) -> None:
    packed, scale = parts[:2]
    rows, columns = contents.matrix(packed, "uint8")
    columns *= 2
    if columns % block:
        contents.reject(packed, f"rows of whole blocks of {block}", f"{columns} numbers")
    contents.expect(scale, (rows, columns // block), *kinds)

    def make() -> LazyTensor:
        codes = contents.tensor(packed).reshape(1, rows, columns // block, block // 2)
        scales = contents.tensor(scale).view(np.uint8).reshape(1, rows, columns // block)
        return LazyTensor(Float4Tensor(codes, scales, pairs)).reshape(rows, columns)

    contents.add(name, parts, (rows, columns), make)


def mxfp4_pairs() -> np.ndarray:
    return scaled_pairs(_E8M0)


def scaled_pairs(scales: np.ndarray) -> np.ndarray:
    """`float32[65536, 2]` from `float32[256]`, the values of the scales' bytes."""
    byte = np.arange(256)
    with np.errstate(all="ignore"):
        values = scales.astype(np.float32)[:, None] * _E2M1
    return values[:, np.stack([byte & 15, byte >> 4], axis=1)].reshape(-1, 2)

"""Four-bit floats (E2M1) in blocks: MXFP4 and NVFP4.

MXFP4 (OCP Microscaling Formats 1.0, section 5): blocks of 32 with a power of two, where 255 is no number; every value
is exact in float32. As `mxfp4` of transformers it is stored for experts, `X_blocks` and `X_scales`, whose plain
form `X` has its last two axes exchanged (`convert_moe_packed_tensors`).

NVFP4: blocks of 16 with a scale in E4M3, and one float32 for all: compressed-tensors divides by it
(`weight_global_scale`), NVIDIA's ModelOpt multiplies with it (`weight_scale_2`). That quotient or product is rounded to
float32, its product with the number as well, and the result to the model's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

from lazymodel._quantized.contents import Contents
from lazymodel._tensors.float4 import DecodedPairs, Float4Leaf
from lazymodel._tensors.lazy import LazyTensor

_MX, _NV = 32, 16  # numbers of a block
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def decode_mxfp4(contents: Contents) -> None:
    """Takes what `mxfp4` of transformers stores."""
    for name in list(contents.names("_blocks")):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        contents.require(blocks, scales)
        shape = tuple(contents.header(blocks).shape)
        if len(shape) < 3 or shape[-1] != _MX // 2:
            contents.refuse(blocks, f"blocks of {_MX // 2} bytes", f"shape {shape}")
        contents.expect(blocks, shape, "uint8")
        contents.expect(scales, shape[:-1], "uint8")
        columns = shape[-2] * _MX

        def make(blocks: str = blocks, scales: str = scales, shape: tuple[int, ...] = shape) -> LazyTensor:
            whole = (-1, *shape[-3:])
            leaf = Float4Leaf(
                contents.tensor(blocks).reshape(whole), contents.tensor(scales).reshape(whole[:-1]), mxfp4_table()
            )
            return LazyTensor(leaf).reshape((*shape[:-2], shape[-2] * _MX)).swapaxes(-1, -2)

        contents.add(name, [blocks, scales], (*shape[:-3], columns, shape[-3]), make)


def add_mxfp4(contents: Contents, name: str, packed: str, scale: str) -> None:
    """Takes a matrix with a byte for the scale of each 32 numbers of a row."""
    _add(contents, name, [packed, scale], _MX, ("uint8", "float8_e8m0fnu"), mxfp4_table)


def add_nvfp4(contents: Contents, name: str, packed: str, scale: str, overall: str, *, divides: bool) -> None:
    """Takes a matrix with a scale for each 16 numbers of a row, and one for all of them."""
    if contents.header(overall).dtype != np.float32 or contents.header(overall).shape not in ((), (1,)):
        contents.refuse(
            overall, "one float32", f"{contents.header(overall).dtype.name}{contents.header(overall).shape}"
        )

    def table() -> DecodedPairs:
        def values() -> np.ndarray:
            of_all = contents.tensor(overall).read().reshape(())
            with np.errstate(all="ignore"):
                return _pairs(_E4M3 / of_all if divides else _E4M3 * of_all)

        return DecodedPairs(values)

    _add(contents, name, [packed, scale, overall], _NV, ("float8_e4m3fn",), table)


def _add(
    contents: Contents, name: str, parts: list[str], block: int, kinds: tuple[str, ...],
    table: Callable[[], DecodedPairs],
) -> None:  # fmt: skip
    packed, scale = parts[:2]
    rows, columns = contents.matrix(packed, "uint8")
    columns *= 2
    if columns % block:
        contents.refuse(packed, f"rows of whole blocks of {block}", f"{columns} numbers")
    contents.expect(scale, (rows, columns // block), *kinds)

    def make() -> LazyTensor:
        codes = contents.tensor(packed).reshape(1, rows, columns // block, block // 2)
        scales = contents.tensor(scale).view(np.uint8).reshape(1, rows, columns // block)
        return LazyTensor(Float4Leaf(codes, scales, table(), own_table=table is not mxfp4_table)).reshape(rows, columns)

    contents.add(name, parts, (rows, columns), make)


@functools.cache
def mxfp4_table() -> DecodedPairs:
    """What bytes stand for under exponents, for all tensors."""
    powers = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
    return DecodedPairs(lambda: _pairs(powers))


def _pairs(scales: np.ndarray) -> np.ndarray:
    """`float32[65536, 2]` for `float32[256]`, what the scales' bytes stand for."""
    byte = np.arange(256)
    with np.errstate(all="ignore"):
        values = scales.astype(np.float32)[:, None] * _E2M1
    return values[:, np.stack([byte & 15, byte >> 4], axis=1)].reshape(-1, 2)

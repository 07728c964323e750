"""The types of GGML's tensors, as GGUF files number them, and tensors of them.

Sizes are those of `ggml/src/ggml-common.h`. How blocks are decoded is the matter of `ggml_blocks`; types that
it does not decode are known by their size alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._quantized.ggml_blocks import DECODE, GRIDS, grid
from lazymodel._tensors.blocks import BlocksLeaf, Decode
from lazymodel._tensors.leaves import FileLeaf, View
from lazymodel._tensors.source import Source


class TensorType(NamedTuple):
    """A type: its name, the numbers of a block, and the bytes that a block takes.

    `dtype` is what NumPy calls it, where it is no quantized type.
    """

    name: str
    size: int
    nbytes: int
    dtype: np.dtype[Any] | None = None


def _plain(name: str, dtype: Any) -> TensorType:
    dtype = np.dtype(dtype)
    return TensorType(name, 1, dtype.itemsize, dtype)


TYPES = {
    0: _plain("F32", "<f4"),
    1: _plain("F16", "<f2"),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: _plain("I8", "<i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    29: TensorType("IQ1_M", 256, 56),
    30: _plain("BF16", ml_dtypes.bfloat16),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}


def tensor_leaf(
    name: str, source: Source, offset: int, shape: tuple[int, ...], type: TensorType
) -> FileLeaf | BlocksLeaf:
    """A tensor of a type, in C order from a byte of a file on; of quantized types, what its blocks are decoded to.

    Raises CheckpointError where the type cannot be decoded, or the `gguf` package is needed for that and not there.
    """
    if type.dtype is not None:
        return FileLeaf(name, source, offset, shape, type.dtype)
    try:
        decode = decoder(type.name)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {name!r} of {source.path}: {error}") from error
    stored = (*shape[:-1], shape[-1] // type.size, type.nbytes)
    return BlocksLeaf(View(FileLeaf(name, source, offset, stored, np.dtype(np.uint8))), type.size, decode)


def decoder(name: str) -> Decode:
    """What decodes the blocks of a quantized type; CheckpointError where nothing does."""
    if name not in DECODE:
        raise CheckpointError(f"{name} cannot be decoded; quantize the model to another type")
    if name in GRIDS:
        try:
            grid(name)
        except ImportError as error:
            raise CheckpointError(
                f"decoding {name} needs the package gguf, which is not installed: pip install 'lazymodel[gguf]'"
            ) from error
        except AttributeError as error:
            raise CheckpointError(
                f"{name} is not among what the installed package gguf decodes; update it: pip install -U gguf"
            ) from error
    return DECODE[name]

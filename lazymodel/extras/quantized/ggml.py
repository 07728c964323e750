"""The types of GGML's tensors, as GGUF files number them, and tensors of these types.

Sizes are those of `ggml/src/ggml-common.h`. For types that cannot be decoded here, only the size is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.decoded import DecodedTensor, Stored
from lazymodel._tensors.tensor_source import FileTensor, View

# Numbers that are decoded at once: their temporaries stay in caches, and each call is worth its cost, which is high if
# threads hand the GIL to each other: a quarter as many took up to twice as long.
_TILE = 256 << 10
# Bytes of temporaries per number while it is decoded: the number, its code, an index, and the converted number.
_NUMBER = 24

# Fills numbers `float32[n, size]` from blocks `uint8[n, bytes]`; the third argument is scratch, `uint8[n * size]`.
Decode: TypeAlias = "Callable[[np.ndarray, np.ndarray, np.ndarray], None]"

# Decoding of the blocks of GGML's quantized types: bytes to float32, in as few passes over memory as NumPy allows.
#
# A number is a small integer (its code) times a scale that 8 to 256 neighbours share; some types add or subtract a
# minimum. So a type is defined by the positions of the bits of codes and scales, as in `dequantize_row_*` of
# `ggml/src/ggml-quants.c`. Scales are computed and applied in the order of the package `gguf`, each step rounded to
# float32: results equal its results bit for bit. Types with a grid of codes (IQ1 to IQ3) take that grid from the
# package.


# Values of four-bit codes, as a table for `bytes.translate`: `kvalues_iq4nl` and `kvalues_mxfp4` of `ggml-common.h`.
_IQ4, _E2M1 = (
    np.array(values, np.int8).tobytes() * 16
    for values in (
        (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
        (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    )
)


# Passes ---------------------------------------------------------------------------------------------------------------


def _unpacked(packed: np.ndarray, bits: int, out: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Codes `uint8[n * groups * k * 8 / bits]` of `packed[n, groups, k]`: in each group the lowest bits of all bytes,
    then the next ones.

    Shifts and masks run over contiguous memory. Only copies, which cost the least, run group by group.
    """
    words = numbers.reshape(-1).view(np.uint8)[: packed.size].reshape(packed.shape)
    np.copyto(words, packed)
    flat, shares = words.reshape(-1), 8 // bits
    groups = out.reshape(*packed.shape[:2], shares, packed.shape[2])
    for share in range(shares):
        if share:
            np.right_shift(flat, np.uint8(bits), out=flat)
        np.copyto(groups[:, :, share], words)
    return np.bitwise_and(out, np.uint8(2**bits - 1), out=out)


def _more_bits(codes: np.ndarray, packed: np.ndarray, bits: int, shift: int, numbers: np.ndarray) -> np.ndarray:
    """Codes with further bits, which are stored separately, added from the bit `shift` on."""
    scratch = numbers.reshape(-1).view(np.uint8)[codes.size : 2 * codes.size]
    high = _unpacked(packed, bits, scratch, numbers)
    np.left_shift(high, np.uint8(shift), out=high)
    return np.bitwise_or(codes, high, out=codes)


def _less(codes: np.ndarray, zero: int) -> np.ndarray:
    """Codes minus the code `zero`, as `int8`."""
    return np.subtract(codes, np.uint8(zero), out=codes).view(np.int8)


def _looked_up(codes: np.ndarray, values: bytes) -> np.ndarray:
    """The values of codes, as `int8`. NumPy's `take` would first make an index of eight bytes of each code."""
    return np.frombuffer(codes.tobytes().translate(values), np.int8)


def _scale(numbers: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Writes numbers, each a code times its scale, and returns them as `[scales, numbers per scale]`."""
    numbers = numbers.reshape(scale.size, -1)
    np.copyto(numbers, codes.reshape(numbers.shape))
    return np.multiply(numbers, scale.reshape(-1, 1), out=numbers)


def _float16(blocks: np.ndarray) -> np.ndarray:
    """Columns of bytes, read as float16 and converted to float32."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _shifted(packed: np.ndarray, shifts: Any, mask: int) -> np.ndarray:
    """Small fields `[..., k, shifts]` of integers `[..., k]`."""
    return packed[..., None] >> np.array(shifts, packed.dtype) & packed.dtype.type(mask)


# Types whose blocks are 32 numbers ------------------------------------------------------------------------------------


def _q8_0(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    _scale(numbers, blocks[:, 2:].view(np.int8), _float16(blocks[:, :2]))


def _four_or_five_bits(zero: int, five: bool) -> Decode:
    """Q4_0, Q4_1, Q5_0 and Q5_1: a scale, a minimum unless a code stands for zero, the fifth bits, and codes."""

    def decode(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
        start = 2 if zero else 4
        codes = _unpacked(blocks[:, None, start + 4 * five :], 4, scratch, numbers)
        if five:
            bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little").reshape(-1)
            np.bitwise_or(codes, np.left_shift(bits, np.uint8(4), out=bits), out=codes)
        scaled = _scale(numbers, _less(codes, zero) if zero else codes, _float16(blocks[:, :2]))
        if not zero:
            np.add(scaled, _float16(blocks[:, 2:4]), out=scaled)

    return decode


def _iq4_nl(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, None, 2:], 4, scratch, numbers)
    _scale(numbers, _looked_up(codes, _IQ4), _float16(blocks[:, :2]))


@functools.cache
def _halved_e8m0() -> np.ndarray:
    """The values of MXFP4's scale bytes, powers of two, halved because its codes are doubled."""
    return np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _mxfp4(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, None, 1:], 4, scratch, numbers)
    _scale(numbers, _looked_up(codes, _E2M1), _halved_e8m0()[blocks[:, 0]])


@functools.cache
def _halved_e4m3() -> np.ndarray:
    """The values of NVFP4's scale bytes, halved: unsigned floats whose highest bit is ignored."""
    exponent, mantissa = np.arange(256) >> 3 & 15, np.arange(256) & 7
    values = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 11)
    values[0x7F] = 0
    return values.astype(np.float32)


def _nvfp4(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, 4:].reshape(-1, 4, 8), 4, scratch, numbers)
    _scale(numbers, _looked_up(codes, _E2M1), _halved_e4m3()[blocks[:, :4]])


# Types whose blocks are 256 numbers -----------------------------------------------------------------------------------


def _q2_k(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, 16:80].reshape(-1, 2, 32), 2, scratch, numbers)
    scale = _float16(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    minimum = _float16(blocks[:, 82:]) * (blocks[:, :16] >> 4)
    numbers = _scale(numbers, codes, scale)
    np.subtract(numbers, minimum.reshape(-1, 1), out=numbers)


def _q3_k(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, 32:96].reshape(-1, 2, 32), 2, scratch, numbers)
    codes = _more_bits(codes, blocks[:, None, :32], 1, 2, numbers)
    low = blocks[:, None, 96:104] >> np.array([[0], [4]], np.uint8) & 15
    high = blocks[:, None, 104:108] >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    scale = (low.reshape(-1, 16) | high.reshape(-1, 16) << 4).view(np.int8) - np.int8(32)
    _scale(numbers, _less(codes, 4), _float16(blocks[:, 108:]) * scale)


def _scales_and_minimums(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minimums of every 32 numbers of Q4_K and Q5_K: six bits each, times a float16 of the block."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    six = np.empty((len(blocks), 2, 8), np.uint8)
    six[..., :4] = packed[:, :2] & 63
    six[..., 4:] = packed[:, 2:] >> np.array([[0], [4]], np.uint8) & 15 | packed[:, :2] >> 2 & 0x30
    both = _float16(blocks[:, :4])[..., None] * six
    return np.ascontiguousarray(both[:, 0]), both[:, 1].reshape(-1, 1)


def _q4_k(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray, high: np.ndarray | None = None) -> None:
    codes = _unpacked(blocks[:, -128:].reshape(-1, 4, 32), 4, scratch, numbers)
    if high is not None:
        codes = _more_bits(codes, high, 1, 4, numbers)
    scale, minimum = _scales_and_minimums(blocks)
    numbers = _scale(numbers, codes, scale)
    np.subtract(numbers, minimum, out=numbers)


def _q5_k(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    _q4_k(blocks, numbers, scratch, blocks[:, None, 16:48])


def _q6_k(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, :128].reshape(-1, 2, 64), 4, scratch, numbers)
    codes = _more_bits(codes, blocks[:, 128:192].reshape(-1, 2, 32), 2, 4, numbers)
    _scale(numbers, _less(codes, 32), _float16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8))


def _iq4_xs(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, 8:].reshape(-1, 8, 16), 4, scratch, numbers)
    low = _shifted(blocks[:, 4:8], (0, 4), 15).reshape(-1, 8)
    high = _shifted(blocks[:, 2:4], (0, 2, 4, 6), 3).reshape(-1, 8)
    scale = (low | high << 4).view(np.int8) - np.int8(32)
    _scale(numbers, _looked_up(codes, _IQ4), _float16(blocks[:, :2]) * scale)


def _tq1_0(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes, start = scratch.reshape(-1, 256), 0
    for part, powers in ((slice(32), 5), (slice(32, 48), 5), (slice(48, 52), 4)):
        powered = blocks[:, None, part] * np.array([[3**power] for power in range(powers)], np.uint8)
        codes[:, start : start + powered[0].size] = powered.reshape(len(blocks), -1)
        start += powered[0].size
    # The highest base-three digit of a number between 0 and 1; the byte is 256 times that number.
    digits = np.greater_equal(scratch, 86).view(np.int8)
    digits += np.greater_equal(scratch, 171).view(np.int8)
    _scale(numbers, np.subtract(digits, np.int8(1), out=digits), _float16(blocks[:, 52:]))


def _tq2_0(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    codes = _unpacked(blocks[:, :64].reshape(-1, 2, 32), 2, scratch, numbers)
    _scale(numbers, _less(codes, 1), _float16(blocks[:, 64:]))


# Types with a grid: an index selects four or eight codes, whose signs are stored separately ---------------------------


@functools.cache
def grid(name: str) -> np.ndarray:
    """The grid of a type. Each row is one integer with as many bytes as it has numbers.

    Raises ImportError or AttributeError if the package is not installed, or has no such grid.
    """
    import gguf.quants

    type: Any = getattr(gguf.quants, name)
    type.init_grid()
    values: np.ndarray = type.grid.reshape(type.grid_shape)
    if name in ("IQ1_S", "IQ1_M"):  # eight times the value, plus and minus the delta of an eighth
        values = np.concatenate([8 * values + 1, 8 * values - 1])
    return values.astype(np.int8).view(f"u{values.shape[1]}").reshape(-1)


@functools.cache
def _signs(bits: int) -> np.ndarray:
    """Eight bytes, all ones if a number is negative, from eight bits, or from seven and an eighth for even parity."""
    every = np.arange(2**bits, dtype=np.uint8)
    negative = np.unpackbits(every[:, None], axis=1, bitorder="little")
    if bits == 7:
        negative[:, 7] = negative.sum(1) & 1
    return (-negative.view(np.int8)).view(np.uint64).reshape(-1)


def _gridded(index: np.ndarray, name: str, scratch: np.ndarray) -> np.ndarray:
    rows = grid(name)
    np.take(rows, index.reshape(-1), out=scratch.view(rows.dtype), mode="clip")
    return scratch.view(np.int8)


def _signed(codes: np.ndarray, signs: np.ndarray, bits: int) -> np.ndarray:
    """Codes with their signs; every eight codes have an index of `_signs`."""
    ones = np.take(_signs(bits), signs.reshape(-1), mode="clip")
    words = codes.view(np.uint64)
    np.bitwise_xor(words, ones, out=words)
    return np.subtract(codes, ones.view(np.int8), out=codes)


_SEVENS = (0, 7, 14, 21)  # positions of four times seven signs in 32 bits; the rest is a scale


def _iq2_xxs(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    pairs = np.ascontiguousarray(blocks[:, 2:]).reshape(-1, 8, 8)
    words = pairs.view("<u4")[..., 1]
    codes = _signed(_gridded(pairs[..., :4], "IQ2_XXS", scratch), _shifted(words, _SEVENS, 127), 7)
    scale = _float16(blocks[:, :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.25)
    _scale(numbers, codes, scale)


def _iq2_xs(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    words = np.ascontiguousarray(blocks[:, 2:66]).view("<u2")
    codes = _signed(_gridded(words & 511, "IQ2_XS", scratch), words >> 9, 7)
    four = _shifted(blocks[:, 66:], (0, 4), 15).reshape(-1, 16)
    _scale(numbers, codes, _float16(blocks[:, :2]) * (np.float32(0.5) + four) * np.float32(0.25))


def _iq2_s(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    high = _shifted(blocks[:, 66:74], (0, 2, 4, 6), 3).reshape(-1, 32)
    codes = _gridded(blocks[:, 2:34] | high.astype(np.uint16) << 8, "IQ2_S", scratch)
    four = _shifted(blocks[:, 74:], (0, 4), 15).reshape(-1, 16)
    scale = _float16(blocks[:, :2]) * (np.float32(0.5) + four) * np.float32(0.25)
    _scale(numbers, _signed(codes, blocks[:, 34:66], 8), scale)


def _iq3_xxs(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    words = np.ascontiguousarray(blocks[:, 66:]).view("<u4")
    codes = _signed(_gridded(blocks[:, 2:66], "IQ3_XXS", scratch), _shifted(words, _SEVENS, 127), 7)
    scale = _float16(blocks[:, :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    _scale(numbers, codes, scale)


def _iq3_s(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    codes = _gridded(blocks[:, 2:66] | high.astype(np.uint16) << 8, "IQ3_S", scratch)
    four = _shifted(blocks[:, 106:], (0, 4), 15).reshape(-1, 8)
    _scale(numbers, _signed(codes, blocks[:, 74:106], 8), _float16(blocks[:, :2]) * (1 + 2 * four))


def _iq1_s(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    words = np.ascontiguousarray(blocks[:, 34:]).view("<u2")
    high = (_shifted(words, (0, 3, 6, 9), 7) << 8) + (words >> 15 << 11)[..., None]
    codes = _gridded(blocks[:, 2:34] | high.reshape(-1, 32), "IQ1_S", scratch)
    _scale(numbers, codes, _float16(blocks[:, :2]) * (2 * (words >> 12 & 7) + 1) * np.float32(0.125))


def _iq1_m(blocks: np.ndarray, numbers: np.ndarray, scratch: np.ndarray) -> None:
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2")
    quarters = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    block = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view("<f2").astype(np.float32)
    high = (
        _shifted(blocks[:, 32:48], (0, 4), 15).reshape(-1, 32).astype(np.uint16) << 8
    )  # the highest bit belongs to the delta
    codes = _gridded(blocks[:, :32] | high, "IQ1_M", scratch)
    scale = block * (2 * _shifted(words, (0, 3, 6, 9), 7).reshape(-1, 16) + 1) * np.float32(0.125)
    _scale(numbers, codes, scale)


GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")  # types that need the package


class TensorType(NamedTuple):
    """A type: its name, the numbers in a block, and the bytes of a block.

    A quantized type has a function that decodes it, or None if that is not known; any other has a NumPy dtype.
    """

    name: str
    size: int
    nbytes: int
    decode: Decode | None = None
    dtype: np.dtype[Any] | None = None


def _plain(name: str, dtype: Any) -> TensorType:
    dtype = np.dtype(dtype)
    return TensorType(name, 1, dtype.itemsize, dtype=dtype)


TYPES = {
    0: _plain("F32", "<f4"),
    1: _plain("F16", "<f2"),
    2: TensorType("Q4_0", 32, 18, _four_or_five_bits(8, False)),
    3: TensorType("Q4_1", 32, 20, _four_or_five_bits(0, False)),
    6: TensorType("Q5_0", 32, 22, _four_or_five_bits(16, True)),
    7: TensorType("Q5_1", 32, 24, _four_or_five_bits(0, True)),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84, _q2_k),
    11: TensorType("Q3_K", 256, 110, _q3_k),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66, _iq2_xxs),
    17: TensorType("IQ2_XS", 256, 74, _iq2_xs),
    18: TensorType("IQ3_XXS", 256, 98, _iq3_xxs),
    19: TensorType("IQ1_S", 256, 50, _iq1_s),
    20: TensorType("IQ4_NL", 32, 18, _iq4_nl),
    21: TensorType("IQ3_S", 256, 110, _iq3_s),
    22: TensorType("IQ2_S", 256, 82, _iq2_s),
    23: TensorType("IQ4_XS", 256, 136, _iq4_xs),
    24: _plain("I8", "<i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    29: TensorType("IQ1_M", 256, 56, _iq1_m),
    30: _plain("BF16", ml_dtypes.bfloat16),
    34: TensorType("TQ1_0", 256, 54, _tq1_0),
    35: TensorType("TQ2_0", 256, 66, _tq2_0),
    39: TensorType("MXFP4", 32, 17, _mxfp4),
    40: TensorType("NVFP4", 64, 36, _nvfp4),
    41: TensorType("Q1_0", 128, 18),
}


def tensor_of(
    name: str, reader: ByteReader, offset: int, shape: tuple[int, ...], type: TensorType
) -> FileTensor | DecodedTensor:
    """A tensor of a type, stored in C order from a byte of a file on. Quantized types are decoded.

    Raises CheckpointError if the type cannot be decoded, or if the `gguf` package is needed for that and missing.
    """
    if type.dtype is not None:
        return FileTensor(name, reader, offset, shape, type.dtype)
    if (fix := _missing(type)) is not None:
        raise CheckpointError(f"tensor {name!r} of {reader.path}: {type.name} cannot be decoded; {fix}")
    decode = cast(Decode, type.decode)
    ones, stored = (1,) * len(shape), (*shape[:-1], shape[-1] // type.size, type.nbytes)

    def unpack(blocks: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        # Infinities and NaN come from the file.
        with workspace.array((out.size,), np.dtype(np.uint8)) as scratch, np.errstate(all="ignore"):
            decode(blocks.reshape(-1, type.nbytes), out.reshape(-1, type.size), scratch)

    view = View(FileTensor(name, reader, offset, stored, np.dtype(np.uint8)))
    return DecodedTensor(shape, Stored(view, ones, unpack, (*ones[:-1], type.size)), scratch=_NUMBER, tile=_TILE)


def _missing(type: TensorType) -> str | None:
    """How to become able to decode a type; None if it can be decoded."""
    if type.decode is None:
        return "quantize the model to another type"
    try:
        if type.name in GRIDS:
            grid(type.name)
    except ImportError:
        return "it needs the package gguf: pip install 'lazymodel[gguf]'"
    except AttributeError:
        return "the installed package gguf cannot do it: pip install -U gguf"
    return None

"""HQQ: integers of 1, 2, 3, 4 and 8 bits with zero points that are not integers (hqq 0.2.8.post1).

A module `X` has `X.W_q`, codes in bytes, or ten of 3 bits in words of 32, and `X.scale` and `X.zero` for groups of the
weight. With axis 1 a group is a range of the flat weight, a row of `W_q`; with axis 0 it is a column of `W_q`, numbers
of the flat weight that are as far from each other as there are groups. The codes of a word are as many ranges of rows
apart, the first in the highest bits. `(code - zero) * scale` is computed in the scales' dtype, both operations rounded,
as `Quantizer.dequantize` does.

`X.shape` and `X.packing` say the rest: tensors in the folders of `save_pretrained` of transformers (4.57) and of
`save_to_safetensors`; a size and text in HQQ's own `qmodel.pt`, where all but `W_q` is in `X.meta` in version 0.1.8.
Its own files do not state their method.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import numpy as np

from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.decoded import Stored, Unpack
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.extras.quantized.config import DTYPES, Contents
from lazymodel.extras.quantized.scaled import ScaledTensor

CODES = ".W_q"
_PARTS, _IN_META = ("scale", "zero"), ("scale", "zero", "scale_q")
_LONGEST = 64  # numbers of what says how a module is packed
# Codes in a word, bits of a code, dtype of words.
_PACKINGS = {
    "8bit_u8": (1, 8, "uint8"), "4bit_u8": (2, 4, "uint8"), "2bit_u8": (4, 2, "uint8"), "1bit_u8": (8, 1, "uint8"),
    "3bit_32": (10, 3, "int32"),
}  # fmt: skip
_STATE = (
    *("nbits", "group_size", "axis", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "optimize"),
    *("compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "round_zero"),
)


def decode_hqq(contents: Contents) -> None:
    """Decodes the modules of `hqq`."""
    for module in contents.names(CODES):
        inner = next((f"{module}.meta" for end in _IN_META if contents.has(f"{module}.meta.{end}")), module)
        codes, scale, zero = parts = [f"{module}{CODES}", *(f"{inner}.{part}" for part in _PARTS)]
        if contents.has(f"{inner}.scale_q") or contents.has(f"{inner}.zero_q"):
            contents.reject(codes, "scales and zero points that are not quantized", "some that are")
        contents.require(codes, scale, zero)
        rows, width = contents.matrix(codes, "uint8", "int32")
        groups = contents.matrix(scale, *DTYPES)
        contents.expect(zero, groups, contents.header(scale).dtype.name)
        said = {name: contents.has(name) for name in (f"{inner}.shape", f"{inner}.packing")}
        make = functools.partial(_decoded, contents, parts, rows, width, groups, said)
        state = [name for part in _STATE if contents.has(name := f"{module}.{part}")]
        contents.add_unread(f"{module}.weight", [*parts, *(name for name in said if said[name]), *state], make)
    for module in contents.names(".zero"):
        if contents.has(f"{module}.scale"):
            contents.require(f"{module}.zero", f"{module}{CODES}")


def _decoded(
    contents: Contents, names: list[str], rows: int, width: int, groups: tuple[int, int], said: dict[str, bool]
) -> LazyTensor:
    words, *operands = (contents.tensor(name) for name in names)
    sizes, packing = (_read(contents, name) if said[name] else contents.metadata.get(name) for name in said)
    count, bits, kind = _PACKINGS.get(packing, (1, 8, "")) if isinstance(packing, str) else (1, 8, "")
    if words.dtype.name != kind:
        contents.reject(names[0], f"one of {', '.join(_PACKINGS)}", f"{packing!r} in {words.dtype.name}")
    shape = cast("tuple[Any, ...]", sizes) if isinstance(sizes, tuple) else ()
    size = math.prod(shape) if len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 48 for n in shape) else 0
    whole = size // width  # rows of codes; 3 bits may have more, which are not used
    if not size or size % width or -(-whole // count) != rows or groups not in ((whole, 1), (1, width)):
        contents.reject(names[0], f"codes and scales of a matrix {sizes}", f"shapes {(rows, width)} and {groups}")
    full, rest = divmod(whole, rows)
    pieces = [_piece(words, operands, shape, (0, full, rows), (count, bits))]
    if rest:  # of the words' last code, only those of the first rows are used
        pieces.append(_piece(words[:rest], operands, shape, (full, 1, rest), (count, bits)))
    decoded = cast(LazyTensor, np.concatenate(pieces)) if rest else pieces[0]
    return decoded.reshape(shape).astype(contents.config.dtype)


def _piece(
    words: LazyTensor, operands: list[LazyTensor], shape: tuple[int, ...], which: tuple[int, int, int],
    packing: tuple[int, int],
) -> LazyTensor:  # fmt: skip
    """The rows of codes that some of the places in words have: the first place, how many, and rows of words."""
    (first, places, rows), width, columns = which, words.shape[1], shape[1]
    # The result as places, rows of words, and the rest: rows and columns of the weight if they are ranges.
    if operands[0].shape[0] == 1:
        extents = (rows, width // columns, columns) if width % columns == 0 else (rows, 1, width)
        operands = [each.reshape(1, 1, *extents[1:]) for each in operands]
        blocks = places, rows, 1, 1
    else:
        along = columns % width == 0 and rows * width % columns == 0
        extents = (rows * width // columns, 1, columns) if along else (rows, 1, width)
        start = operands[0].shape[0] - rows if first else 0
        operands = [each[start : start + places * rows].reshape(places, extents[0], 1, -1) for each in operands]
        blocks = 1, 1, 1, width
    unpack = _unpack(first, places, *packing)
    codes = Stored(words.reshape(1, *extents), (1, 1, 1, 1), unpack, (places, 1, 1, 1))
    scaled = ScaledTensor((places, *extents), codes, *(Stored(each, blocks) for each in operands), narrow=True)
    return LazyTensor(scaled).astype(operands[0].dtype).reshape(places * rows, width)


def _read(contents: Contents, name: str) -> Any:
    """Sizes, or text as bytes."""
    tensor = contents.tensor(name)
    if tensor.size > _LONGEST:
        contents.reject(name, "a shape or text", f"{tensor.dtype.name}{list(tensor.shape)}")
    array = tensor.read().reshape(-1)
    return array.tobytes().decode("latin") if array.dtype == np.uint8 else tuple(array.tolist())


def _unpack(first: int, places: int, count: int, bits: int) -> Unpack:
    """Unsigned integers along the first axis, from some of the places in a word, the first of which is the highest."""

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        words = stored.view(f"u{stored.itemsize}")
        with workspace.array(words.shape, words.dtype) as codes:
            for place in range(places):
                np.right_shift(words, bits * (count - 1 - first - place), out=codes)
                np.bitwise_and(codes, (1 << bits) - 1, out=codes)
                np.copyto(out[place::places], codes, casting="unsafe")

    return unpack

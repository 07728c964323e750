"""bitsandbytes: NF4 and FP4 in blocks of a flat array, and int8 with a scale for each row.

Four bits: two codes in a byte, the first in its upper half. Each code selects one of the 16 values of `quant_map`. It
is multiplied by the largest magnitude in its block (`absmax`), which may itself be stored in 8 bits, in blocks, with an
offset. The product is rounded from float32 to the dtype that `quant_state` names, as in `kDequantizeBlockwise`.
Eight bits: `code * SCB * float32(1 / 127)` as in `int8_vectorwise_dequant`, rounded to the model's dtype. `quant_state`
is JSON in a tensor of bytes (`QuantState.as_dict(packed=True)`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np

from lazymodel._quantized.config import DTYPES, Contents
from lazymodel._quantized.scaled import ScaledTensor, lookup
from lazymodel._tensors.boxes import Box
from lazymodel._tensors.buffers import Steps, Workspace
from lazymodel._tensors.decoded import DecodedTensor, Stored
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import View

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_INT8 = 7.874015718698502e-3  # 1 / 127, the value that bitsandbytes uses
_NESTED_TILE = 1 << 16  # scales that are computed at once


def decode(contents: Contents) -> None:
    """Decodes the modules of `bitsandbytes`."""
    for kind in _KINDS:
        for name in contents.names(_STATE + kind):
            _add_four_bits(contents, name, f"{name}{_STATE}{kind}")
    for module in contents.names(".SCB"):
        _add_int8(contents, f"{module}.weight", f"{module}.SCB", f"{module}.weight_format")


def _add_int8(contents: Contents, name: str, scale: str, form: str) -> None:
    contents.require(scale, name)
    shape = contents.matrix(name, "int8")
    contents.expect(scale, shape[:1], "float32")
    forms = [form] if contents.has(form) else []

    def make() -> LazyTensor:
        for each in forms:
            if (found := contents.tensor(each).read()).size != 1 or found.reshape(-1)[0] != 0:
                contents.reject(each, "0 (rows are not reordered)", repr(found.reshape(-1)[:4].tolist()))
        scales = Stored(contents.tensor(scale).reshape(-1, 1), (1, shape[1]))
        return LazyTensor(ScaledTensor(shape, Stored(contents.tensor(name), (1, 1)), scales, factor=_INT8))

    contents.add(name, [name, scale, *forms], shape, make)


def _add_four_bits(contents: Contents, name: str, state: str) -> None:
    """Adds a tensor whose shape is only in its state."""
    absmax, table = f"{name}.absmax", f"{name}.quant_map"
    contents.require(state, name, absmax, table)
    contents.expect(table, (16,), "float32")
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    if contents.header(absmax).dtype == np.uint8:
        contents.require(absmax, *nested)
        contents.expect(nested[1], (256,), "float32")
    else:
        nested = []
        contents.expect(absmax, contents.header(absmax).shape, "float32")
    contents.expect(name, contents.header(name).shape, "uint8")
    make = functools.partial(_four_bits, contents, name, state, nested)
    contents.add_unread(name, [name, absmax, table, *nested, state], make)


def _four_bits(contents: Contents, name: str, state: str, nested: Sequence[str]) -> LazyTensor:
    found = _read_state(contents, state)
    size = math.prod(found.shape)
    packed, absmax = contents.tensor(name), contents.tensor(f"{name}.absmax")
    if packed.size != -(-size // 2):
        contents.reject(name, f"{-(-size // 2)} bytes for shape {found.shape}", str(packed.size))
    if absmax.size != -(-size // found.block):
        contents.reject(f"{name}.absmax", f"{-(-size // found.block)} blocks of {found.block}", str(absmax.size))
    # Blocks run across rows; if rows consist of whole blocks, a box needs only the blocks of its own rows.
    width = found.shape[-1] if len(found.shape) > 1 and found.shape[-1] % math.lcm(found.block, 2) == 0 else size
    rows = size // width
    of_blocks = absmax.reshape(rows, -1)
    if nested:
        scales = contents.tensor(nested[0])
        count = -(-absmax.size // found.nested_block)
        if scales.size != count or scales.dtype != np.float32:
            expected = f"{count} float32 for blocks of {found.nested_block}"
            contents.reject(nested[0], expected, f"{scales.dtype.name}{list(scales.shape)}")
        of_blocks = LazyTensor(_NestedTensor(of_blocks, scales.reshape(-1), contents.tensor(nested[1]).read(), found))
    values, byte = contents.tensor(f"{name}.quant_map").read(), np.arange(256)
    pairs = lookup(np.stack([values[byte >> 4], values[byte & 15]], axis=1))
    codes = Stored(packed.reshape(rows, -1), (1, 1), pairs, (1, 2))
    decoded = LazyTensor(ScaledTensor((rows, width), codes, Stored(of_blocks, (1, found.block))))
    return decoded.reshape(found.shape).astype(found.dtype)


@dataclasses.dataclass(frozen=True)
class _State:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: int
    nested_block: int
    offset: float


def _read_state(contents: Contents, name: str) -> _State:
    tensor = contents.tensor(name)
    if tensor.dtype != np.uint8 or tensor.size > 1 << 16:
        contents.reject(name, "JSON as bytes", f"{tensor.dtype.name}{list(tensor.shape)}")
    try:
        found: Any = json.loads(tensor.read().tobytes())
    except (ValueError, RecursionError) as error:
        contents.reject(name, "JSON as bytes", str(error))
    if not isinstance(found, dict):
        contents.reject(name, "a JSON object", type(found).__name__)
    found = cast("dict[str, Any]", found)
    shape = cast("list[Any]", found.get("shape") if isinstance(found.get("shape"), list) else [None])
    sizes = [found.get("blocksize"), found.get("nested_blocksize", 256), *shape]
    for size in sizes:
        if type(size) is not int or not 0 < size < 1 << 48:
            contents.reject(name, "positive integers as blocksize and shape", repr(size))
    dtype, offset = found.get("dtype"), found.get("nested_offset", 0.0)
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(offset, (int, float)):
        expected = f"one of {', '.join(DTYPES)} as dtype and a number as nested_offset"
        contents.reject(name, expected, f"{dtype!r}, {offset!r}")
    return _State(tuple(shape), DTYPES[dtype], sizes[0], sizes[1], float(offset))


class _NestedTensor(DecodedTensor):
    """Scales `[rows, blocks]` in 8 bits: `table[code] * scale + offset`. Blocks are counted across rows."""

    tile = _NESTED_TILE

    def __init__(self, codes: View, scales: View, table: np.ndarray, state: _State) -> None:
        super().__init__(codes.shape, Stored(codes, (1, 1)), Stored(scales, (1, 1)), scratch=32)
        self._table, self._state = table, state

    def needs(self, box: Box) -> list[Box]:
        """The codes, and the scales from the scale of the first code to that of the last."""
        width, block = self.shape[1], self._state.nested_block
        first = box[0].start * width + box[1].start
        last = (box[0].stop - 1) * width + box[1].stop - 1
        return [box, (slice(first // block, last // block + 1),)]

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        codes, scales = arrays
        index = np.arange(tile[0].start, tile[0].stop)[:, None] * self.shape[1]
        index = (index + np.arange(tile[1].start, tile[1].stop)) // self._state.nested_block - needed[1][0].start
        with np.errstate(all="ignore"):
            values = self._table[codes] * scales[index] + np.float32(self._state.offset)
        yield values, steps

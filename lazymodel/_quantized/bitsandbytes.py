"""bitsandbytes: NF4 and FP4 in blocks of a flat array, and int8 with a scale for each row.

Four bits: two codes to a byte, the first in its upper half, each one of the 16 values of `quant_map` times the largest
size in its block (`absmax`), which may itself be stored in 8 bits, in blocks, with an offset. The product is rounded
from float32 to the dtype that `quant_state` names, as `kDequantizeBlockwise` does; eight bits are
`code * SCB * float32(1 / 127)` as in `int8_vectorwise_dequant`, rounded to the model's dtype. `quant_state` is JSON in
a tensor of bytes (`QuantState.as_dict(packed=True)`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from lazymodel._quantized.codes import pairs
from lazymodel._quantized.config import DTYPES
from lazymodel._quantized.contents import Contents
from lazymodel._tensors.boxes import Box, box_shape, slabs, unshift
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.fill import fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import DividedLeaf, Part, View
from lazymodel._tensors.scaled import ScaledLeaf, stored

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes has it
_ROOM = 1 << 16  # scales that are computed at once


def decode(contents: Contents) -> None:
    """Takes the modules of `bitsandbytes`."""
    for kind in _KINDS:
        for name in list(contents.names(_STATE + kind)):
            _add_four_bits(contents, name, kind)
    for module in list(contents.names(".SCB")):
        name, scale = f"{module}.weight", f"{module}.SCB"
        contents.require(scale, name)
        rows, columns = contents.matrix(name, "int8")
        contents.expect(scale, (rows,), "float32")
        extra = [f"{module}.weight_format"] if contents.has(f"{module}.weight_format") else []

        def make(
            name: str = name, scale: str = scale, shape: tuple[int, int] = (rows, columns),
            extra: Sequence[str] = tuple(extra),
        ) -> LazyTensor:  # fmt: skip
            for form in extra:
                if (found := contents.tensor(form).read()).size != 1 or found.reshape(-1)[0] != 0:
                    contents.refuse(form, "0, rows as they are", repr(found.reshape(-1)[:4].tolist()))
            scales = stored(contents.tensor(scale).reshape(-1, 1), (1, shape[1]))
            return LazyTensor(ScaledLeaf(shape, stored(contents.tensor(name), (1, 1)), scales, factor=_INT8))

        contents.add(name, [name, scale, *extra], (rows, columns), make)


def _add_four_bits(contents: Contents, name: str, kind: str) -> None:
    """Takes a tensor whose shape only its state tells."""
    absmax, table, state = f"{name}.absmax", f"{name}.quant_map", f"{name}{_STATE}{kind}"
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
    make = functools.partial(_four_bits, contents, name, state, bool(nested))
    contents.add_unread(name, [name, absmax, table, *nested, state], make)


def _four_bits(contents: Contents, name: str, state: str, nested: bool) -> LazyTensor:
    said = _read_state(contents, state)
    shape, size, block = said.shape, math.prod(said.shape), said.block
    packed, absmax = contents.tensor(name), contents.tensor(f"{name}.absmax")
    if packed.size != -(-size // 2):
        contents.refuse(name, f"{-(-size // 2)} bytes for shape {shape}", str(packed.size))
    if absmax.size != -(-size // block):
        contents.refuse(f"{name}.absmax", f"{-(-size // block)} blocks of {block}", str(absmax.size))
    # Blocks follow each other through rows; where they are parts of rows, a box needs those of its own alone.
    width = shape[-1] if len(shape) > 1 and shape[-1] % math.lcm(block, 2) == 0 else size
    arrangement = size // width, width
    of_blocks = absmax.reshape(arrangement[0], -1)
    if nested:
        of_blocks = _nested(contents, name, of_blocks, said)
    values = contents.tensor(f"{name}.quant_map").read()
    codes = packed.reshape(arrangement[0], -1)
    leaf = ScaledLeaf(
        arrangement,
        stored(codes, (1, 1), pairs(values), (1, 2)),
        stored(of_blocks, (1, block)),
    )
    return LazyTensor(leaf).reshape(shape).astype(said.dtype)


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
        contents.refuse(name, "JSON as bytes", f"{tensor.dtype.name}{list(tensor.shape)}")
    try:
        said: Any = json.loads(tensor.read().tobytes())
    except (ValueError, RecursionError) as error:
        contents.refuse(name, "JSON as bytes", str(error))
    if not isinstance(said, dict):
        contents.refuse(name, "a JSON object", type(said).__name__)
    said = cast("dict[str, Any]", said)

    def positive(value: Any) -> int:
        if type(value) is not int or not 0 < value < 1 << 48:
            contents.refuse(name, "positive integers as blocksize and shape", repr(value))
        return value

    shape = cast("list[Any]", said.get("shape") if isinstance(said.get("shape"), list) else [None])
    dtype, offset = said.get("dtype"), said.get("nested_offset", 0.0)
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(offset, (int, float)):
        contents.refuse(
            name, f"one of {', '.join(DTYPES)} as dtype and a number as nested_offset", f"{dtype!r}, {offset!r}"
        )
    return _State(
        tuple(map(positive, shape)),
        DTYPES[dtype],
        positive(said.get("blocksize")),
        positive(said.get("nested_blocksize", 256)),
        float(offset),
    )


def _nested(contents: Contents, name: str, codes: LazyTensor, said: _State) -> LazyTensor:
    """Scales that are quantized themselves."""
    scales = contents.tensor(f"{name}.nested_absmax")
    if scales.size != -(-codes.size // said.nested_block) or scales.dtype != np.float32:
        contents.refuse(
            f"{name}.nested_absmax",
            f"{-(-codes.size // said.nested_block)} float32 for blocks of {said.nested_block}",
            f"{scales.dtype.name}{list(scales.shape)}",
        )
    table = contents.tensor(f"{name}.nested_quant_map").read()
    return LazyTensor(_NestedLeaf(codes, scales.reshape(-1), table, said))


class _NestedLeaf(DividedLeaf):
    """Scales `[rows, blocks]` in 8 bits: `table[code] * scale + offset`, blocks counted through the rows."""

    unit_nbytes = 64 << 10

    def __init__(self, codes: View, scales: View, table: np.ndarray, said: _State) -> None:
        self.pieces = (codes, scales)
        self.name, self.file, self.offset = codes.name, codes.file, codes.offset
        self.shape, self.dtype = codes.shape, np.dtype(np.float32)
        self._table, self._said = table, said

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        return [
            Part(out.nbytes, functools.partial(self._decode, box, out, steps))
            for box, out in zip(boxes, outs, strict=True)
        ]

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        yield self.pieces[0], list(boxes)
        yield self.pieces[1], [(self._range(box),) for box in boxes]

    def _range(self, box: Box) -> slice:
        """The scales that a box needs, and those between them."""
        width, block = self.shape[1], self._said.nested_block
        first = box[0].start * width + box[1].start
        last = (box[0].stop - 1) * width + box[1].stop - 1
        return slice(first // block, last // block + 1)

    def _decode(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        for part in slabs(box_shape(box), _ROOM if workspace.room > 32 * _ROOM else 1 << 10):
            piece = unshift(part, box)
            within = self._range(piece)
            codes, scales = np.empty(box_shape(piece), np.uint8), np.empty(within.stop - within.start, np.float32)
            fill(self.pieces[0], [piece], [codes], workspace)
            fill(self.pieces[1], [(within,)], [scales], workspace)
            index = np.arange(piece[0].start, piece[0].stop)[:, None] * self.shape[1]
            index = (index + np.arange(piece[1].start, piece[1].stop)) // self._said.nested_block - within.start
            with np.errstate(all="ignore"):
                values = self._table[codes] * scales[index] + np.float32(self._said.offset)
            assign(out[(*part, ...)], values, steps)

"""Codes, scales and zero points as one array, decoded while it is read: `(code - zero) * scale` in float32.

Contains the arithmetic on tiles, for any blocks that share a scale; functions (of the type `Unpack`) for packed numbers
of a few bits; and the block that belongs to a scale, inferred from shapes and a declared block. `_tensors/decoded`
decides which regions are read; the methods define what a format stores.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Box, box_shape, coarse, fine, shift, whole_box
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.convert import Convert, DType, Steps, assign
from lazymodel._tensors.decoded import DecodedTensor, Stored, Unpack
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import Targets, View, fill
from lazymodel.extras.quantized.compiled import Words, decode
from lazymodel.extras.quantized.config import DTYPES, Contents

WORD = 32  # bits of the integers that codes are packed in
INDEX = np.dtype(np.intp)  # dtype of NumPy's indices; it would convert narrower ones, in memory of its own
# Bytes of temporaries per number while it is decoded: codes, its share of a scale, an index, and float32.
_NUMBER = 4 + 4 + 8 + 4 * 4
_HALF, _FLOATS = np.dtype(np.float16), tuple(DTYPES.values())
_HALF_NORMAL, _HALF_MOST = 2.0**-14, 65504.0
_E2M3_MAGNITUDES = np.append(np.arange(8), [(8 + m) << e for e in range(3) for m in range(8)]).astype(np.float32) / 8
_E2M3 = np.concatenate([_E2M3_MAGNITUDES, -_E2M3_MAGNITUDES])
_REBIAS = np.float32(2.0**-112)  # the difference of the exponents' biases of float32 and float16
_CUT = np.float32(2.0**13)  # float16 has this factor fewer digits than float32


class ScaledTensor(DecodedTensor):
    """A float32 array `(code - zero) * scale`, each of the three a stored tensor.

    Every operation is rounded to float32, and with `half` the product to the nearest float16. With `narrow` the
    difference is rounded to the scales' dtype. `factor` is multiplied last, or with `times` the last stored tensor.
    `order` is a tensor with the group of each
    index of an axis, for groups that are not ranges: scales and zero points are then looked up by it. With
    `may_be_unordered`, -1 throughout means that groups are ranges.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *stored: Stored,
        order: tuple[int, View] | None = None,
        scattered: bool = False,
        may_be_unordered: bool = False,
        factor: float | None = None,
        half: bool = False,
        narrow: bool = False,
        times: bool = False,
    ) -> None:
        super().__init__(shape, *stored, scratch=_NUMBER)
        self._order, self._scattered, self._may_be_unordered = order, scattered, may_be_unordered
        self._factor, self._half, self._narrow, self._times = factor, half, narrow, times
        self._groups: np.ndarray | None = None  # of the order, once it was read; empty if groups are ranges
        self._guard, self._filling = threading.Lock(), 0
        if order is not None:
            axis, groups = order
            self.pieces += (groups,)
            self.min_scratch_nbytes += 2 * groups.size * INDEX.itemsize
            if scattered:  # any part of that axis needs all groups
                self.along = list(range(len(shape)))
                self.cuts = (*self.cuts[:axis], shape[axis], *self.cuts[axis + 1 :])

    @property
    def _grouped(self) -> bool:
        """Returns True if groups are not ranges, as far as is known."""
        return self._scattered if self._groups is None else self._groups.size > 0

    def needs(self, box: Box) -> list[Box]:
        found = super().needs(box)
        if self._order is not None and self._grouped:  # all groups of tensors that are stored by group
            axis = self._order[0]
            for index in range(1, len(found)):
                every = slice(0, self.stored[index].view.shape[axis])
                found[index] = (*found[index][:axis], every, *found[index][axis + 1 :])
        return found

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        yield from super().reads(boxes)
        if self._order is not None:
            yield self._order[1], [whole_box(self._order[1].shape)]

    def release(self) -> None:
        with self._guard:
            if not self._filling:  # else another tensor, which has another part of it, is being read
                self._groups = None
        super().release()

    def _fill(self, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        with self._guard:
            if self._order is not None and self._groups is None:
                axis, view = self._order
                read = np.empty(view.shape, view.dtype)
                fill(view, [whole_box(view.shape)], [read], workspace)
                self._groups = self._checked(read.astype(INDEX), axis, view.name)
            self._filling += 1
        try:
            super()._fill(targets, steps, workspace)
        finally:
            with self._guard:
                self._filling -= 1

    def operations(self) -> tuple[tuple[int, str, DType], ...]:
        """What is done with stored tensors, by their index: a function of NumPy, and the dtype it is rounded to."""
        zeros = [(index, "subtract", self.dtype) for index in range(2, len(self.stored))]
        return (*zeros, (1, "multiply", _HALF if self._half else self.dtype))

    def compiled(
        self, chunk: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> tuple[np.ndarray, Steps] | None:
        words, group = self.stored[0].unpack, self.stored[1].blocks[-1]
        if not workspace.compiles or not isinstance(words, Words) or (self._order is not None and self._grouped):
            return None
        count, units = len(words.shifts), (*(1,) * (len(chunk) - 1), group)
        whole = fine(needed[0], self.stored[0].packing) == chunk == fine(coarse(chunk, units), units)
        if not whole or any(each.blocks != units for each in self.stored[1:]) or (group % count and not words.down):
            return None
        operations, groups = self.operations(), box_shape(chunk)[-1] // group
        # Words of a group each, or all words of a row, which belong to rows of groups.
        of_codes, of_operand = ((1, groups, group), (count, groups, 1)) if words.down else ((group // count, 1), (1, 1))
        casts = [*itertools.takewhile(lambda step: step == Convert(step.dtype) and step.dtype in _FLOATS, steps)]
        done = *(each[1:] for each in operations), *(("", cast.dtype) for cast in casts or [Convert(self.dtype)])
        with contextlib.ExitStack() as stack:
            operands: list[np.ndarray] = []
            for index, *_ in operations:
                read = self.stored[index].numbers(needed[index], arrays[index], self.dtype, workspace)
                covered, numbers = stack.enter_context(read)
                operands.append(numbers[shift(coarse(chunk, units), covered)].reshape(-1, *of_operand))
            values = decode(words, arrays[0].view(np.uint32).reshape(-1, *of_codes), operands, done, workspace)
        return None if values is None else (values.reshape(box_shape(chunk)), steps[len(casts) :])

    def _checked(self, groups: np.ndarray, axis: int, name: str) -> np.ndarray:
        """The groups, empty if they are ranges. Raises CheckpointError for a group that does not exist."""
        scale = self.stored[1]
        none = self._may_be_unordered and (groups == -1).all()
        if none or (groups == np.arange(groups.size) // scale.blocks[axis]).all():
            return groups[:0]
        count = scale.view.shape[axis]
        if groups.min() < 0 or groups.max() >= count:
            raise CheckpointError(
                f"tensor {name!r}: expected groups of 0 to {count - 1}, found {groups.min()} to {groups.max()}; it is "
                "corrupt"
            )
        return groups

    @contextlib.contextmanager
    def decoded(
        self, tile: Box, needed: Sequence[Box], arrays: Sequence[np.ndarray], steps: Steps, workspace: Workspace
    ) -> Generator[tuple[np.ndarray, Steps]]:
        with (
            np.errstate(all="ignore"),  # infinities and NaN come from the file
            contextlib.ExitStack() as stack,
        ):
            (covered, codes), (_, scale), *_ = operands = [
                stack.enter_context(stored.numbers(box, array, self.dtype, workspace))
                for stored, box, array in zip(self.stored, needed, arrays, strict=True)
            ]
            values = codes[shift(tile, covered)]
            # Products with integers below 2 ** 8 are 0 or, rounded, normal numbers of float16. Those of negative scales
            # may be -0, which rounding would lose.
            halves = self._half and bool(scale.size and scale.min() >= _HALF_NORMAL and scale.max() <= _HALF_MOST / 512)
            # A cast to float16 that another cast follows is not needed: the values are those of float16 already.
            cast_again = steps[1:] and steps[1] == Convert(steps[1].dtype)
            to_half = halves and steps[:1] == (Convert(_HALF),) and not cast_again
            if halves:
                np.multiply(scale, _CUT * _REBIAS if to_half else _CUT, out=scale)
            count = len(operands) - self._times
            for stored, operand in zip(self.stored[2:count], operands[2:count], strict=True):
                self._apply(np.subtract, values, tile, stored, *operand, workspace)
            if self._narrow and (kind := self.stored[1].view.dtype) != self.dtype:
                np.copyto(values, values.astype(kind))
            self._apply(np.multiply, values, tile, self.stored[1], *operands[1], workspace)
            if halves:
                # x + x * 2 ** 13, rounded to float32's 24 digits, minus x * 2 ** 13, is x rounded to float16's 11, ties
                # to even. Both multiples of a scale, which has 11 digits, are exact: nothing is rounded before.
                with workspace.array(values.shape, self.dtype) as rounded:
                    np.multiply(values, 1 + 1 / _CUT, out=rounded)
                    np.subtract(rounded, values, out=values)
                if not to_half:
                    steps = steps[steps[:1] == (Convert(_HALF),) :]  # without the cast, which has no effect any more
            elif self._half:
                np.copyto(values, values.astype(_HALF))
            if self._times:
                self._apply(np.multiply, values, tile, self.stored[-1], *operands[-1], workspace)
            if self._factor is not None:
                np.multiply(values, np.float32(self._factor), out=values)
            if to_half:
                converted = stack.enter_context(workspace.array(values.shape, _HALF))
                _to_half(values, converted, workspace)
                values, steps = converted, steps[1:]
            yield values, steps

    def _apply(
        self, operation: Any, values: np.ndarray, tile: Box, stored: Stored, covered: Box, numbers: np.ndarray,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        """`values = operation(values, numbers)`; `numbers` has one number per block, in the region `covered`."""
        own, blocks = list(coarse(tile, stored.blocks)), list(stored.blocks)
        starts = [part.start - first.start * block for part, first, block in zip(tile, own, blocks, strict=True)]
        if self._order is None or self._groups is None or not self._groups.size:
            blockwise(operation, values, numbers[shift(tuple(own), covered)], blocks, starts)
            return
        axis = self._order[0]
        groups = self._groups[tile[axis]]
        own[axis], blocks[axis], starts[axis] = covered[axis], 1, 0
        numbers = numbers[shift(tuple(own), covered)]
        with workspace.array((*numbers.shape[:axis], groups.size, *numbers.shape[axis + 1 :]), self.dtype) as taken:
            np.take(numbers, groups, axis=axis, out=taken, mode="clip")
            blockwise(operation, values, taken, blocks, starts)


def blockwise(
    operation: Any, values: np.ndarray, operand: np.ndarray, blocks: Sequence[int], starts: Sequence[int]
) -> None:
    """`values = operation(values, operand)`, where one element of the operand belongs to a block of these extents.
    `starts` are the offsets of the values from the beginning of the first block.
    """
    axes = [list(_segments(*each)) for each in zip(values.shape, blocks, starts, strict=True)]
    for segments in itertools.product(*axes):
        part = values[tuple(own for own, _ in segments)]
        split: list[int] = []
        index: list[Any] = []
        for extent, (_, first) in zip(part.shape, segments, strict=True):
            count = first.stop - first.start
            if 1 < count < extent:
                split += [count, extent // count]
                index += [slice(None), None]
            else:  # one block, or blocks of one
                split.append(extent)
                index.append(slice(None))
        divided = np.reshape(part, split, copy=False)
        operation(divided, operand[tuple(first for _, first in segments)][tuple(index)], out=divided)


def _segments(extent: int, block: int, start: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of an axis that are whole blocks or a part of one block, each with the range of these blocks."""
    head = min(-start % block, extent)
    tail = extent - (extent - head) % block
    first = 0
    for begin, end in ((0, head), (head, tail), (tail, extent)):
        if begin < end:
            count = -(-(end - begin) // block)
            yield slice(begin, end), slice(first, first + count)
            first += count


def _to_half(values: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
    """Casts numbers of float16 times `_REBIAS` to float16, in a fraction of NumPy's time. Overwrites `values`."""
    bits, found = values.view(np.uint32), out.view(np.uint16)
    with workspace.array(bits.shape, bits.dtype) as wide, workspace.array(found.shape, found.dtype) as signs:
        np.right_shift(bits, 16, out=wide)
        np.copyto(signs, wide, casting="unsafe")  # drops the upper bits, here and below
        np.bitwise_and(signs, 0x8000, out=signs)
        np.right_shift(bits, 13, out=bits)
        np.copyto(found, bits, casting="unsafe")
        np.bitwise_or(found, signs, out=found)


# Packed numbers


def lookup(table: np.ndarray) -> Unpack:
    """Looks up bytes, or two at a time, in `float32[256 or 65536, n]`: each selects n numbers that are adjacent along
    the last axis.
    """
    row = table.shape[1] * table.itemsize
    flat = np.ascontiguousarray(table).reshape(-1).view(f"V{row}")
    kind = np.uint8 if len(table) == 256 else np.uint16

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        codes = stored.view(kind)
        with workspace.array(codes.shape, INDEX) as index:
            np.copyto(index, codes)
            np.take(flat, index, out=out.view(flat.dtype), mode="clip")  # by default NumPy copies the result

    return unpack


@functools.cache
def floats(dtype: np.dtype[Any]) -> Unpack:
    """Floats of eight bits, two at a time if possible."""
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    one, two = lookup(values[:, None]), lookup(values[pairs].reshape(-1, 2))

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        (one if stored.shape[-1] % 2 else two)(stored, out, workspace)

    return unpack


def integers(bits: int, offset: int = 0) -> Words:
    """Unsigned integers along the last axis, the first in the lowest bits; `offset` is added."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits)
    unpack = lookup((codes % (1 << bits) + offset).astype(np.float32))
    return Words(bits, tuple(range(0, WORD, bits)), unpack, offset)


def integers_down(bits: int, offset: int = 0, plus: int = 0, order: Sequence[int] = ()) -> Unpack:
    """Unsigned integers along the second-to-last axis, in words of 32 bits: the first in the lowest bits, or in an
    order; `plus` is added modulo 2 ** bits, and then `offset`.
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


@functools.cache
def straddling(bits: int) -> Unpack:
    """Unsigned integers of 3, 5, 6 or 7 bits, eight in as many bytes."""
    mask = np.uint64((1 << bits) - 1)

    def unpack(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
        bytes_of = stored.view(np.uint8).reshape(-1, bits)
        numbers = out.reshape(-1, 8)
        with (
            workspace.array((len(bytes_of),), np.dtype(np.uint64)) as joined,
            workspace.array((len(bytes_of),), np.dtype(np.uint64)) as code,
        ):
            np.copyto(joined, bytes_of[:, 0])
            for place in range(1, bits):
                np.left_shift(bytes_of[:, place], np.uint64(8 * place), out=code, dtype=np.uint64)
                np.bitwise_or(joined, code, out=joined)
            for place in range(8):
                np.right_shift(joined, np.uint64(bits * place), out=code)
                np.bitwise_and(code, mask, out=code)
                np.copyto(numbers[:, place], code, casting="unsafe")

    return unpack


def mxfp6(stored: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
    """Floats of six bits (E2M3), eight in six bytes."""
    straddling(6)(stored, out, workspace)
    with workspace.array(out.shape, INDEX) as index:
        np.copyto(index, out, casting="unsafe")
        np.take(_E2M3, index, out=out, mode="clip")


# Blocks of scales


def scales_of(
    contents: Contents, name: str, shape: Sequence[int], declared: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the scales `name` as an array with the axes of the weight, and the block of each scale.

    There is one scale for all, one for each index of an axis, or, if a block of the last axes is declared, one for each
    of these blocks. Raises CheckpointError for any other shape.
    """
    found = tuple(contents.header(name).shape)
    count = len(shape)
    least = len(declared or (1,))
    if count < least or not all(shape):
        contents.reject(name, f"a weight of at least {least} axes that is not empty", f"one of shape {tuple(shape)}")
    if declared is not None:
        ends = shape[count - len(declared) :]
        expected = (1,) * (count - len(declared)) + tuple(map(min, declared, ends))
        wanted = tuple(-(-extent // block) for extent, block in zip(shape, expected, strict=True))
        if [extent for extent in found if extent != 1] != [extent for extent in wanted if extent != 1]:
            contents.reject(name, f"shape {wanted}, a scale for each block of {list(declared)}", str(found))
        return wanted, expected
    if all(extent == 1 for extent in found):
        return (1,) * count, tuple(shape)
    full = found + (1,) * (count - len(found))  # per channel, without the axes that follow
    if len(full) != count or any(n not in (1, extent) for n, extent in zip(full, shape, strict=True)):
        contents.reject(name, f"a scale for all of {tuple(shape)}, or one for each index of an axis", f"shape {found}")
    return full, tuple(1 if n == extent else extent for n, extent in zip(full, shape, strict=True))


def scaled_integers(shape: tuple[int, ...], codes: Stored, scale: Stored, *zero: Stored, **order: Any) -> LazyTensor:
    """Integers below 2 ** 8 times their scales, rounded to the scales' dtype; `order` is passed to `ScaledTensor`."""
    kind = scale.view.dtype
    decoded = LazyTensor(ScaledTensor(shape, codes, scale, *zero, half=kind == np.float16, **order))
    return decoded.astype(kind) if kind.name == "bfloat16" else decoded


# Four-bit floats (E2M1) in blocks, decoded by looking up pairs of numbers -------------------------------------------
#
# MXFP4 (OCP Microscaling Formats 1.0, section 5): blocks of 32 with a power of two (E8M0), where 255 is NaN; every
# value is exact in float32. Two numbers in a byte, the first in the lower half. `mxfp4` of transformers stores it for
# experts as `X_blocks` and `X_scales`; the last two axes of the plain form `X` are exchanged
# (`convert_moe_packed_tensors`).
#
# NVFP4: blocks of 16 with a scale in E4M3, and one float32 for all: compressed-tensors divides by it
# (`weight_global_scale`), NVIDIA's ModelOpt multiplies by it (`weight_scale_2`). The quotient or product is rounded to
# float32, its product with the number as well, and the result to the model's dtype.
#
# The value of every byte under every scale is computed once and then looked up. So the loaded values equal that
# function bit for bit, special values included.

BLOCK = 32  # numbers of MXFP4 that share a scale
CODES = BLOCK // 2  # bytes of a block, each of two numbers
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))


class Float4Tensor(DecodedTensor):
    """A float32 array `[experts, rows, blocks * n]` that is stored as blocks `[experts, rows, blocks, n / 2 bytes]` and
    scales `uint8[experts, rows, blocks]`. `pairs` makes the table of their values, as `scaled_pairs` does.
    """

    # 512 KiB of indices and of float32 each, which stay in the caches. A quarter as many took 9 to 49 % longer, and
    # larger tiles were not faster.
    tile = 4096 * BLOCK

    def __init__(self, blocks: View, scales: View, pairs: Callable[[], np.ndarray]) -> None:
        ones, packing = (1, 1, 1), (1, 1, 2 * blocks.shape[-1] * blocks.dtype.itemsize)
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
        codes, scales, dtype = arrays[0].view(np.uint8), arrays[1], steps[-1].dtype if steps else self.dtype
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
            decoded = LazyTensor(Float4Tensor(*stored, functools.partial(scaled_pairs, E8M0)))
            return decoded.reshape((*shape[:-2], shape[-2] * BLOCK)).swapaxes(-1, -2)

        contents.add(name, [blocks, scales], (*shape[:-3], shape[-2] * BLOCK, shape[-3]), make)


def add_float4(
    contents: Contents, name: str, packed: str, scale: str, overall: str = "", divides: bool = False
) -> None:
    """Adds a matrix in MXFP4 or, with a scale for all, NVFP4."""
    block, kinds = (16, ["float8_e4m3fn"]) if overall else (BLOCK, ["uint8", "float8_e8m0fnu"])
    rows, columns = contents.matrix(packed, "uint8")
    columns *= 2
    if columns % block:
        contents.reject(packed, f"rows of whole blocks of {block}", f"{columns} numbers")
    contents.expect(scale, (rows, columns // block), *kinds)
    if overall and ((header := contents.header(overall)).dtype != np.float32 or header.shape not in ((), (1,))):
        contents.reject(overall, "one float32", f"{header.dtype.name}{header.shape}")

    def pairs() -> np.ndarray:
        if not overall:
            return scaled_pairs(E8M0)
        of_all = contents.tensor(overall).read().reshape(())
        with np.errstate(all="ignore"):
            return scaled_pairs(E4M3 / of_all if divides else E4M3 * of_all)

    def make() -> LazyTensor:
        codes = contents.tensor(packed).reshape(1, rows, columns // block, block // 2)
        scales = contents.tensor(scale).view(np.uint8).reshape(1, rows, columns // block)
        return LazyTensor(Float4Tensor(codes, scales, pairs)).reshape(rows, columns)

    contents.add(name, [packed, scale, *([overall] if overall else [])], (rows, columns), make)


def scaled_pairs(scales: np.ndarray) -> np.ndarray:
    """`float32[65536, 2]` from `float32[256]`, the values of the scales' bytes."""
    byte = np.arange(256)
    with np.errstate(all="ignore"):
        values = scales.astype(np.float32)[:, None] * _E2M1
    return values[:, np.stack([byte & 15, byte >> 4], axis=1)].reshape(-1, 2)

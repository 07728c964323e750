"""safetensors files and folders of them (format: https://github.com/huggingface/safetensors#format).

A file is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes. Nothing in a header is
believed before it is checked, and nothing is allocated for a tensor because a header says so. Files that the
reference implementation rejects (gaps, overlaps, bytes left over, headers that are not UTF-8) are rejected here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._remote.reader import source_of
from lazymodel._tensors.boxes import Box, Geometry, box_shape, normalize, slabs
from lazymodel._tensors.buffers import Convert, Workspace, assign
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import FileTensor, TensorSource
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._safetensors_header import FLOAT4, read_header
from lazymodel.checkpoints._untrusted import check_pointer

_PACKED_UNIT = 16 << 10  # bytes of workspace for packed values, at least: rows of some thousand elements

_BYTE = np.dtype(np.uint8)


class PackedTensor(TensorSource):
    """4-bit floats, two a byte in the file, each a byte of its own in memory.

    The earlier element is in the low bits, as in PyTorch's `float4_e2m1fn_x2` (c10, `Float4_e2m1fn_x2.h`), which is
    what writers of this dtype store. Elements follow each other in C order without padding, so that where a row has an
    odd number of them the next one begins within a byte.
    """

    min_scratch_nbytes = _PACKED_UNIT

    def __init__(self, name: str, source: ByteReader, offset: int, shape: tuple[int, ...]) -> None:
        self.name, self.reader, self.file, self.offset = name, source, source.path, offset
        self.shape, self.dtype = shape, FLOAT4

    def readers(self) -> tuple[ByteReader, ...]:
        return (self.reader,)

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        # Half a byte an element as packed, a byte where values cannot be unpacked in place, the rest for reading.
        limit = max(workspace.available, _PACKED_UNIT) // 4
        try:
            for piece in slabs(box_shape(box), limit):
                corner = [whole.start + part.start for whole, part in zip(box, piece, strict=True)]
                target = out[(*piece, ...)]
                if not steps and target.flags.c_contiguous:
                    self._unpack(corner, target.view(_BYTE), workspace)
                    continue
                with workspace.array(target.shape, FLOAT4) as values:
                    self._unpack(corner, values.view(_BYTE), workspace)
                    assign(target, values, steps)
            self.reader.check_unchanged()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name!r}: {error}") from error

    def _unpack(self, corner: list[int], values: np.ndarray, workspace: Workspace) -> None:
        """Fills a C-contiguous array of bytes with the elements from a corner on."""
        shape, extents = list(self.shape), list(values.shape)
        while len(shape) > 1 and extents[-1] == shape[-1]:  # whole rows: longer rows of one dimension less
            row = shape.pop()
            shape[-1] *= row
            extents[-2:] = [extents[-2] * row]
            corner = [*corner[:-2], corner[-2] * row]
        values = values.reshape(extents)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]  # elements
        start = sum(index * stride for index, stride in zip(corner, strides, strict=True))
        if len(shape) == 1 or shape[-1] % 2 == 0:
            self._unpack_rows(start, [stride // 2 for stride in strides[:-1]], values, workspace)
            return
        for index in np.ndindex(*extents[:-1]):  # every other row begins within a byte
            ahead = sum(i * stride for i, stride in zip(index, strides[:-1], strict=True))
            self._unpack_rows(start + ahead, [], values[index], workspace)

    def _unpack_rows(self, start: int, strides: list[int], values: np.ndarray, workspace: Workspace) -> None:
        """Fills an array with rows of the elements from `start` on, `strides` bytes of the file apart."""
        first = start % 2
        shape = (*values.shape[:-1], (first + values.shape[-1] + 1) // 2)
        with workspace.array(shape, _BYTE) as packed:
            place, target, _ = normalize(Geometry(self.offset + start // 2, shape, (*strides, 1)), packed)
            self.reader.read_strided(place, _BYTE, target, (), workspace)
            low, high = values[..., first::2], values[..., 1 - first :: 2]
            np.bitwise_and(packed[..., first : first + low.shape[-1]], 15, out=low)
            np.right_shift(packed[..., : high.shape[-1]], 4, out=high)


class SafetensorsFile(Checkpoint):
    """One safetensors file: tensor name → `LazyTensor`, in file order. Opening reads and checks the header.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer, or its header is malformed: a length out
            of range, a repeated key, an unknown dtype, a shape that is not its byte range, overlaps, or gaps.
    """

    format = "safetensors"

    def __init__(self, path: str | Location) -> None:
        path = Path(path) if isinstance(path, str) else path
        check_pointer(path)
        self.source = source_of(path)
        self.header = read_header(self.source)
        self.metadata = self.header.metadata
        super().__init__(path, self.header.names, [self.source])

    def _tensor(self, name: str) -> LazyTensor:
        kind, offset = self.header.find(name)
        if kind.dtype == FLOAT4:
            return LazyTensor(PackedTensor(name, self.source, offset, kind.shape))
        return LazyTensor(FileTensor(name, self.source, offset, kind.shape, kind.dtype))

    def describe(self, name: str) -> TensorHeader:
        kind, offset = self.header.find(name)
        return TensorHeader(kind.dtype, kind.shape, kind.nbytes, self.path, None, offset)

    def _nbytes_of(self, names: Collection[str]) -> int:
        return self.header.nbytes(names)

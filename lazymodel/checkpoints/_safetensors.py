"""safetensors files and folders of them (format: https://github.com/huggingface/safetensors#format).

A file is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes. Nothing in a header is
believed before it is checked, and nothing is allocated for a tensor because a header says so. What the reference
implementation refuses (gaps, overlaps, bytes left over, headers that are not UTF-8) is refused here.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._bytes import format_bytes
from lazymodel._errors import CheckpointError
from lazymodel._file_source import Convert, FileSource, Workspace, assign, slabs
from lazymodel._lazy_tensor import Box, FileLeaf, LazyTensor, Leaf, box_shape
from lazymodel.checkpoints._checkpoint import (
    Checkpoint,
    check_pointer,
    read_json_file,
    read_json_object,
    require_shards,
    shard_path,
    weight_map,
)
from lazymodel.checkpoints._shards import shard_problems

MAX_HEADER = 100_000_000  # bytes; the reference implementation's own limit
_MAX_DIMENSIONS = 32  # NumPy 1's; no model comes near
_MAX_NBYTES = 2**63  # what NumPy can address, even where an extent of 0 leaves nothing to hold
_PACKED_UNIT = 16 << 10  # bytes of workspace for packed values, at least: rows of some thousand elements

_BYTE = np.dtype(np.uint8)
_FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)

# Every dtype of the format (the reference implementation's `Dtype`, 0.8.0) but those of 6 bits.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F4": _FLOAT4,
    "C64": np.dtype("<c8"),
}
_SIX_BITS = ("F6_E2M3", "F6_E3M2")


class PackedLeaf(Leaf):
    """4-bit floats, two a byte in the file, each a byte of its own in memory.

    The earlier element is in the low bits, as in PyTorch's `float4_e2m1fn_x2` (c10, `Float4_e2m1fn_x2.h`), which is
    what writers of this dtype store. Elements follow each other in C order without padding, so that where a row has an
    odd number of them the next one begins within a byte.
    """

    unit_nbytes = _PACKED_UNIT

    def __init__(self, name: str, source: FileSource, offset: int, shape: tuple[int, ...]) -> None:
        self.name, self.source, self.file, self.offset = name, source, source.path, offset
        self.shape, self.dtype = shape, _FLOAT4

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        # Half a byte an element as packed, a byte where values cannot be unpacked in place, the rest for reading.
        limit = max(workspace.room, _PACKED_UNIT) // 4
        try:
            for piece in slabs(box_shape(box), limit):
                corner = [whole.start + part.start for whole, part in zip(box, piece, strict=True)]
                target = out[(*piece, ...)]
                if not steps and target.flags.c_contiguous:
                    self._unpack(corner, target.view(_BYTE), workspace)
                    continue
                with workspace.array(target.shape, _FLOAT4) as values:
                    self._unpack(corner, values.view(_BYTE), workspace)
                    assign(target, values, steps)
            self.source.check_unchanged()
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
            axes = [axis for axis, extent in enumerate(shape) if extent > 1]
            self.source.read_strided(
                self.offset + start // 2,
                tuple([*strides, 1][axis] for axis in axes),
                _BYTE,
                packed.reshape([shape[axis] for axis in axes]),
                (),
                workspace,
            )
            low, high = values[..., first::2], values[..., 1 - first :: 2]
            np.bitwise_and(packed[..., first : first + low.shape[-1]], 15, out=low)
            np.right_shift(packed[..., : high.shape[-1]], 4, out=high)


class SafetensorsFile(Mapping[str, LazyTensor]):
    """One safetensors file: tensor name → `LazyTensor`, in file order. Opening reads and checks the header.

    Attributes:
        path: The file's path.
        metadata: The header's `__metadata__`, strings to strings.
        source: Its bytes; `source.bytes_read` counts what was read of the tensors.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer, or its header is malformed: a length out
            of range, a repeated key, an unknown dtype, a shape that is not its byte range, overlaps, or gaps.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        check_pointer(Path(path))
        self.source = FileSource(path)
        header, self._start = _read_header(self.path, self.source.size)
        self.metadata = _check_metadata(self.path, header.pop("__metadata__", None))
        self._entries = _check_entries(self.path, header, self.source.size - self._start)

    def __getitem__(self, name: str) -> LazyTensor:
        try:
            dtype, shape, begin = self._entries[name]
        except KeyError:
            raise KeyError(f"{name!r} is not a tensor of {self.path}") from None
        if dtype == _FLOAT4:
            return LazyTensor(PackedLeaf(name, self.source, self._start + begin, shape))
        return LazyTensor(FileLeaf(name, self.source, self._start + begin, shape, dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def close(self) -> None:
        """Releases the file descriptor; a later read opens it again."""
        self.source.close()

    def __repr__(self) -> str:
        return f"SafetensorsFile({self.path!r}: {len(self)} tensors, {format_bytes(self.source.size)})"


class SafetensorsCheckpoint(Checkpoint):
    """One or more safetensors files as one mapping."""

    format = "safetensors"

    def __init__(self, path: Path, files: list[SafetensorsFile], names: dict[str, SafetensorsFile]) -> None:
        super().__init__(path, list(names), [file.source for file in files])
        self._files = names
        self.metadata = {key: value for file in files for key, value in file.metadata.items()}

    def _tensor(self, name: str) -> LazyTensor:
        return self._files[name][name]


def open_safetensors(path: Path, paths: list[Path]) -> SafetensorsCheckpoint:
    """Opens safetensors files that no index describes.

    Raises:
        CheckpointError: As `SafetensorsFile`; or two files have a tensor of the same name; or, in a folder, files are
            numbered as shards and are not all of them, or not of one save.
    """
    if folder := path not in paths:
        _refuse(shard_problems(path, dict.fromkeys(paths)))
    files = [SafetensorsFile(file) for file in paths]
    if folder:
        _refuse(shard_problems(path, _metadata(files)))
    names: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file:
            if name in names:
                raise CheckpointError(
                    f"tensor {name!r} is in both {names[name].path} and {file.path}; open one of the files, or add the "
                    "index file that says which one counts"
                )
            names[name] = file
    return SafetensorsCheckpoint(path, files, names)


def open_index(index: Path) -> SafetensorsCheckpoint:
    """Opens the shards that an `*.safetensors.index.json` names. Tensors that it does not list are left out.

    Raises:
        CheckpointError: As `SafetensorsFile`; or a shard is missing or outside the folder, or lacks a tensor that the
            index says it has; or numbered shards are of different saves.
    """
    weights = weight_map(read_json_file(index), index)
    paths: dict[str, Path] = {}
    for shard in weights.values():
        if not isinstance(shard, str) or shard not in paths:
            paths[str(shard)] = shard_path(index, shard)  # which refuses what is no string
    require_shards(index, list(paths.values()))
    files = {shard: SafetensorsFile(path) for shard, path in paths.items()}
    _refuse(shard_problems(index, _metadata(files.values()), indexed=True))
    names: dict[str, SafetensorsFile] = {}
    for name, shard in weights.items():
        if name not in files[shard]:
            raise CheckpointError(
                f"{index}: expected tensor {name!r} in {files[shard].path}, found none there; the index and its shards "
                "are of different versions: download both again"
            )
        names[name] = files[shard]
    return SafetensorsCheckpoint(index, list(files.values()), names)


def _metadata(files: Iterable[SafetensorsFile]) -> dict[Path, dict[str, str]]:
    return {Path(file.path): file.metadata for file in files}


def _refuse(problems: Iterable[str]) -> None:
    for problem in problems:
        raise CheckpointError(problem)


def _read_header(path: str, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the byte at which tensors begin."""
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is no safetensors file: expected at least 8 bytes, found {size}")
            if length > MAX_HEADER:
                raise CheckpointError(
                    f"{path} is no safetensors file, or corrupt: expected a header of at most {MAX_HEADER} bytes, "
                    f"found a length of {length}"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated: expected a header up to byte {8 + length}, found a file of {size} bytes. "
                    "Download or copy it again."
                )
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return read_json_object(data, path), 8 + length


def _check_metadata(path: str, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in cast("dict[str, Any]", metadata).values()
    ):
        raise CheckpointError(
            f"{path}: expected '__metadata__' to map strings to strings, found {reprlib.repr(metadata)}; it is corrupt"
        )
    return cast("dict[str, str]", metadata)


def _check_entries(
    path: str, header: dict[str, Any], available: int
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Name → (dtype, shape, first byte), in file order, after every check that needs no tensor's bytes."""
    entries: list[tuple[int, int, str, np.dtype[Any], tuple[int, ...]]] = []
    for name, entry in header.items():
        # Values are quoted by reprlib: one may be as long as the header, or nested as deep as Python allows.
        what = f"{path}: tensor {name!r}"
        if not isinstance(entry, dict):
            raise CheckpointError(
                f"{what}: expected dtype, shape and data_offsets, found {reprlib.repr(entry)}; it is corrupt"
            )
        fields = cast("dict[str, Any]", entry)
        stored = fields.get("dtype")
        if stored in _SIX_BITS:
            raise CheckpointError(
                f"{what}: found dtype {stored}, which cannot be loaded: JAX has no arrays of 6-bit floats, and the "
                "format does not say how they are packed. Convert the file to a dtype of 8 bits or more"
            )
        dtype = DTYPES.get(stored) if isinstance(stored, str) else None
        if dtype is None:
            raise CheckpointError(
                f"{what}: expected one of the dtypes {', '.join(DTYPES)}, found {reprlib.repr(stored)}"
            )
        shape = _counts(fields.get("shape"))
        if (
            shape is None
            or len(shape) > _MAX_DIMENSIONS
            or math.prod(max(extent, 1) for extent in shape) * dtype.itemsize >= _MAX_NBYTES
        ):
            raise CheckpointError(
                f"{what}: expected a shape of non-negative ints, at most {_MAX_DIMENSIONS} of them and of less than "
                f"{_MAX_NBYTES} bytes, found {reprlib.repr(fields.get('shape'))}"
            )
        offsets = _counts(fields.get("data_offsets"))
        if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(
                f"{what}: expected data_offsets [begin, end], found {reprlib.repr(fields.get('data_offsets'))}"
            )
        begin, end = offsets
        bits = math.prod(shape) * (4 if dtype == _FLOAT4 else 8 * dtype.itemsize)
        if bits % 8:
            raise CheckpointError(
                f"{what}: expected whole bytes, found an odd number of 4-bit values, {stored}{list(shape)}; "
                "it is corrupt"
            )
        if end - begin != bits // 8:
            raise CheckpointError(
                f"{what}: expected {bits // 8} bytes for {stored}{list(shape)}, found data_offsets of "
                f"{end - begin} bytes; it is corrupt"
            )
        entries.append((begin, end, name, dtype, shape))
    entries.sort(key=lambda entry: entry[:2])
    position, previous = 0, ""
    for begin, end, name, _, _ in entries:
        if begin < position:
            raise CheckpointError(f"{path}: tensors {previous!r} and {name!r} overlap at byte {begin}; it is corrupt")
        if begin > position:
            raise CheckpointError(
                f"{path}: expected tensor {name!r} at byte {position}, found it at {begin}: the format allows no gaps; "
                "the file is corrupt"
            )
        position, previous = end, name
    if position > available:
        raise CheckpointError(
            f"{path} is truncated: expected {position} bytes of tensors, found {available}. Download or copy it again."
        )
    if position < available:
        raise CheckpointError(
            f"{path}: expected {position} bytes of tensors, found {available - position} more bytes after them; "
            "it is corrupt"
        )
    return {name: (dtype, shape, begin) for begin, _, name, dtype, shape in entries}


def _counts(value: Any) -> tuple[int, ...] | None:
    """A list of non-negative ints below 2**63 as a tuple, else None."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    return tuple(items) if all(type(item) is int and 0 <= item < 2**63 for item in items) else None

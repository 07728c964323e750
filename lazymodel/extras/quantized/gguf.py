"""GGUF files (llama.cpp), whole or split into several: tensors under the file's own names, quantized ones as float32.

A split model is files `NAME-00001-of-00003.gguf`, of which each says in its metadata which one it is, of how many files
and tensors (`split.no`, `split.count`, `split.tensors.count`). Whichever is opened, all of them are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All of it is little-endian: magic `GGUF`, version,
counts of tensors and of metadata, each key with its value, then each tensor's name, dimensions (the innermost first),
type and offset from where the tensors' bytes begin. No count is believed before the file is long enough for it.
"""

from __future__ import annotations

import collections
import math
import reprlib
import struct
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location, fetch_heads
from lazymodel._show.text import plural
from lazymodel._tensors.byte_reader import ByteReader, reading
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint, TensorHeader
from lazymodel.checkpoints._open import split_names
from lazymodel.checkpoints._untrusted import (
    MAX_DIMENSIONS,
    MAX_NBYTES,
    check_pointer,
    mismatch,
    require_shards,
    shard_path,
    truncated,
)
from lazymodel.extras.quantized.ggml import TYPES, TensorType, tensor_of

_MAGIC = b"GGUF"
_MAX_HEADER = 128 << 20  # bytes; the tokens of the largest vocabularies take 20 MB
_MAX_DEPTH = 8  # of arrays in arrays, which llama.cpp itself does not read at all
_PIECE = 1 << 20  # bytes that are read at least
_ALIGNED, _ALIGNMENT = "general.alignment", 32  # bytes, where the metadata says nothing else

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9  # types of values
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_LENGTH = struct.Struct("<Q")


class _TensorInfo(NamedTuple):
    """A tensor: its shape in NumPy's order, its type, and its first byte in the file."""

    shape: tuple[int, ...]
    type: TensorType
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.size * self.type.nbytes


class _Metadata(collections.UserDict[str, Any]):
    """Key → str, int, float, bool or a list of these. Text is decoded when it is looked up."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def __getitem__(self, key: str) -> Any:
        try:
            self.data[key] = _decoded(self.data[key])
        except UnicodeDecodeError as error:
            found = reprlib.repr(bytes(error.object))
            raise CheckpointError(f"{self._path}: expected {key!r} in UTF-8, found {found}; it is corrupt") from None
        return self.data[key]


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in cast("list[Any]", value)]
    return value.decode() if isinstance(value, bytearray) else value


class _Reader:
    """Reads a file from the front on, as far as the header goes."""

    def __init__(self, path: str, size: int, file: BinaryIO) -> None:
        self.path, self.size, self._file = path, size, file
        self.data, self.at = bytearray(), 0

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {message}; it is corrupt")

    def need(self, nbytes: int) -> None:
        """Has so many bytes from where it is on, or fails."""
        end = self.at + nbytes
        if end > self.size:
            expected = f"its header to reach byte {end}"
            raise truncated(self.path, expected, f"a file of {self.size} bytes; or it is corrupt")
        if end > _MAX_HEADER:
            self.fail(f"expected a header of at most {_MAX_HEADER} bytes, found more")
        while end > len(self.data):
            piece = self._file.read(max(end - len(self.data), _PIECE))
            if not piece:
                self.fail(f"expected {self.size} bytes, found that it ends after {len(self.data)}")
            self.data += piece

    def take(self, nbytes: int) -> bytes:
        self.need(nbytes)
        self.at += nbytes
        return bytes(memoryview(self.data)[self.at - nbytes : self.at])

    def integer(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def string(self, what: str) -> str:
        try:
            return self.strings(1)[0].decode()
        except UnicodeDecodeError as error:
            self.fail(f"expected {what} in UTF-8, found {reprlib.repr(bytes(error.object))}")

    def strings(self, count: int) -> list[bytearray]:
        texts: list[bytearray] = []
        unpack = _LENGTH.unpack_from
        for _ in range(count):  # a hundred thousand tokens: nothing is called for each that need not be
            if self.at + 8 > len(self.data):
                self.need(8)
            begin = self.at + 8
            self.at = begin + unpack(self.data, self.at)[0]
            if self.at > len(self.data):
                self.need(0)
            texts.append(self.data[begin : self.at])
        return texts

    def count(self, least: int, what: str) -> int:
        """A count of what takes at least so many bytes each."""
        count = self.integer(8)
        if count > (self.size - self.at) // least:
            raise truncated(self.path, f"{count} {what}", "fewer bytes than that; or it is corrupt")
        return count

    def value(self, key: str) -> Any:
        """A value after its type: the bytes of a text, an int, float or bool, or a list of these."""
        kind = self.integer(4)
        if key == _ALIGNED and kind != _UINT32:
            self.fail(f"expected {key!r} to be of type {_UINT32}, found type {kind}")
        return self._values(key, kind, 1, 0)[0]

    def _values(self, key: str, kind: int, count: int, depth: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        if kind != _ARRAY:
            self.fail(f"expected {key!r} to be a number, text or an array of these, found type {kind}")
        if depth == _MAX_DEPTH:
            self.fail(f"expected at most {_MAX_DEPTH} arrays in each other, found more at {key!r}")
        arrays: list[Any] = []
        for _ in range(count):
            inner = self.integer(4)
            least = np.dtype(_NUMBERS[inner]).itemsize if inner in _NUMBERS else 12 if inner == _ARRAY else 8
            arrays.append(self._values(key, inner, self.count(least, f"elements of {key!r}"), depth + 1))
        return arrays


def _read_header(source: ByteReader) -> tuple[_Metadata, dict[str, _TensorInfo]]:
    """The checked header of a file: metadata, and tensors in the order in which the file lists them."""
    with reading(source.path), source.open_file() as file:
        reader = _Reader(source.path, source.size, file)
        magic = reader.take(4) if source.size >= 4 else b""
        if magic != _MAGIC:
            raise CheckpointError(
                f"{source.path} is not a GGUF file: expected {_MAGIC} as its beginning, found {magic}"
            )
        version = reader.integer(4)
        if version and not version & 0xFFFF:
            raise CheckpointError(
                f"{source.path} is a big-endian GGUF file, which is not read; convert it by "
                "`gguf-convert-endian FILE little` of the package gguf"
            )
        if version not in (2, 3):
            raise mismatch(source.path, "GGUF version 2 or 3", version, "convert it again")
        tensors = reader.count(24, "tensors")
        metadata = _Metadata(source.path)
        values = metadata.data
        for _ in range(reader.count(13, "metadata")):
            key = reader.string("a key")
            if key in values:
                reader.fail(f"expected each key once, found {reprlib.repr(key)} twice")
            values[key] = reader.value(key)
        return metadata, _read_tensors(reader, tensors, values.get(_ALIGNED, _ALIGNMENT))


def _read_tensors(reader: _Reader, count: int, alignment: int) -> dict[str, _TensorInfo]:
    if alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"expected {_ALIGNED!r} to be a power of two, found {alignment}")
    infos: dict[str, _TensorInfo] = {}
    for _ in range(count):
        name = reader.string("a tensor's name")
        what = f"tensor {reprlib.repr(name)}"
        if name in infos:
            reader.fail(f"expected each tensor once, found {what} twice")
        if (dimensions := reader.integer(4)) >= MAX_DIMENSIONS:
            reader.fail(f"{what}: expected less than {MAX_DIMENSIONS} dimensions, found {dimensions}")
        shape = tuple(reader.integer(8) for _ in range(dimensions))[::-1]
        number, offset = reader.integer(4), reader.integer(8)
        if (kind := TYPES.get(number)) is None:
            names = ", ".join(f"{known} {each.name}" for known, each in TYPES.items())
            raise CheckpointError(f"{reader.path}: {what} is of type {number}, which is not known; known are {names}")
        if math.prod(max(extent, 1) for extent in shape) * max(kind.nbytes, 4) >= MAX_NBYTES:
            reader.fail(f"{what}: expected a shape of less than {MAX_NBYTES} bytes, found {shape}")
        if (shape or (1,))[-1] % kind.size:
            reader.fail(f"{what}: expected rows of whole blocks of {kind.size} numbers ({kind.name}), found {shape}")
        if offset % alignment:
            reader.fail(f"{what}: expected it at a multiple of {alignment} bytes, found it at {offset}")
        infos[name] = _TensorInfo(shape, kind, offset)
    start = reader.at + -reader.at % alignment
    infos = {name: info._replace(begin=start + info.begin) for name, info in infos.items()}
    position, previous = start, ""
    for name, info in sorted(infos.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if info.begin < position and info.nbytes:
            reader.fail(f"tensors {reprlib.repr(previous)} and {reprlib.repr(name)} overlap at byte {info.begin}")
        if (end := info.begin + info.nbytes) > position:
            position, previous = end, name
    if position > max(start, reader.size):
        expected = f"tensor {reprlib.repr(previous)} up to byte {position}"
        raise truncated(reader.path, expected, f"{reader.size} bytes")
    return infos


_FLOAT32 = np.dtype(np.float32)


class GgufFile(Checkpoint):
    """One GGUF file: tensor name → `LazyTensor`, in the file's order. Opening reads and checks the header.

    Shapes are in NumPy's order, rows first, the reverse of how the file lists dimensions.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer, or its header is malformed. When a
            tensor is looked up: its type cannot be decoded, or it has a scale tensor of its own.
    """

    format = "gguf"

    def __init__(self, path: Location) -> None:
        check_pointer(path)
        self.source = path.reader()
        self.whole: Checkpoint = self  # all files of the model
        self.metadata, self._tensors_there = _read_header(self.source)
        super().__init__(path, list(self._tensors_there), [self.source])

    def _tensor(self, name: str) -> LazyTensor:
        shape, kind, begin = self._tensors_there[name]
        # llama.cpp multiplies results by it: the second scale of NVFP4. Beside other types it belongs to the model.
        if kind.name == "NVFP4" and (scale := f"{name.removesuffix('weight')}scale") in self.whole:
            found = f"NVFP4 with another scale, tensor {scale!r}, which is not decoded"
            raise mismatch(f"tensor {name!r} of {self.path}", "one scale", found, "take a file of another type")
        return LazyTensor(tensor_of(name, self.source, begin, shape, kind))

    def describe(self, name: str) -> TensorHeader:
        info = self._tensors_there[name]
        dtype = info.type.dtype or _FLOAT32
        stored = None if info.type.dtype else (info.type.name, info.nbytes)
        return TensorHeader(dtype, info.shape, math.prod(info.shape) * dtype.itemsize, self.path, stored, info.begin)


def open_gguf(path: Location) -> Checkpoint:
    """Opens a GGUF file and, where it is one of several, the others."""
    opened = GgufFile(path)
    count = _integer(opened, "split.count") if "split.count" in (opened.metadata or {}) else 1
    names = split_names(path.name)
    if len(names) != max(count, 1):
        expected = f"a name that ends like -00001-of-{count:05}.gguf" if count > 1 else "a name without numbers"
        fix = f"its metadata says that it is one of {plural(count, 'file')}: give each of them its name back"
        raise mismatch(path, expected, path.name, fix)
    if count < 2:
        return opened
    paths = [shard_path(path, name) for name in names]
    fetch_heads(paths)
    require_shards(path, paths)
    parts = [opened if each.name == path.name else GgufFile(each) for each in paths]
    tensors = _integer(opened, "split.tensors.count")
    for number, part in enumerate(parts):
        stated = [_integer(part, key) for key in ("split.no", "split.count", "split.tensors.count")]
        if stated != [number, count, tensors]:
            expected = f"file {number} of {count} with the others' number of tensors"
            found = f"(split.no, split.count, split.tensors.count) = {tuple(stated)}"
            raise mismatch(part.path, expected, found, "the files are not of one model")
    if (found := sum(map(len, parts))) != tensors:
        raise mismatch(path, f"{plural(tensors, 'tensor')} in {plural(count, 'file')}", found, "download them again")
    joined = JoinedCheckpoint(path, [(part, part.keys()) for part in parts])
    for part in parts:
        part.whole = joined
    joined.metadata = parts[0].metadata  # the others have only what says which ones they are
    return joined


def _integer(checkpoint: Checkpoint, key: str) -> int:
    value: Any = (checkpoint.metadata or {}).get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        raise mismatch(checkpoint.path, f"{key!r} to be a count", repr(value))
    return value

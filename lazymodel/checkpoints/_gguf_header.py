"""The header of a GGUF file: its metadata and where its tensors lie, read and checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All of it is little-endian: magic `GGUF`, version,
counts of tensors and of metadata, each key with its value, then each tensor's name, dimensions (the innermost first),
type and offset from where the tensors' bytes begin. No count is believed before the file is long enough for it.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._quantized.ggml import TYPES, TensorType
from lazymodel._tensors.source import Source
from lazymodel.checkpoints._untrusted import MAX_DIMENSIONS, reading

MAGIC = b"GGUF"
_MAX_HEADER = 128 << 20  # bytes; the tokens of the largest vocabularies take 20 MB
_MAX_NBYTES = 2**63  # what NumPy can address
_MAX_DEPTH = 8  # of arrays in arrays, which llama.cpp itself does not read at all
_PIECE = 1 << 20  # bytes that are read at least
_ALIGNED, _ALIGNMENT = "general.alignment", 32  # bytes, where the metadata says nothing else

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_LENGTH = struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """A tensor: its shape in NumPy's order, its type, and its first byte in the file."""

    shape: tuple[int, ...]
    type: TensorType
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.size * self.type.nbytes


class Header(NamedTuple):
    """What a header says."""

    metadata: Metadata
    tensors: dict[str, TensorInfo]  # in the order in which the file lists them


class Metadata(Mapping[str, Any]):
    """Key → str, int, float, bool or a list of these. Lists are made when they are asked for."""

    def __init__(self, values: dict[str, Any], path: str) -> None:
        self._values, self._path = values, path

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            try:
                self._values[key] = value = value.read()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self._path}: {key!r} has a string that is no UTF-8; it is corrupt") from error
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._values)})"


class _Array(NamedTuple):
    """An array of numbers or strings as the file has it."""

    kind: int
    length: int
    data: bytes

    def read(self) -> list[Any]:
        if self.kind != _STRING:
            array = np.frombuffer(self.data, _NUMBERS[self.kind])
            return (array != 0 if self.kind == _BOOL else array).tolist()
        result, at, data = [""] * self.length, 0, self.data
        for index in range(self.length):
            begin = at + 8
            at = begin + _LENGTH.unpack_from(data, at)[0]
            result[index] = data[begin:at].decode()
        return result


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
            raise CheckpointError(
                f"{self.path} is truncated or corrupt: expected its header to reach byte {end}, found a file of "
                f"{self.size} bytes. Download or copy it again."
            )
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
        data = self.take(self.integer(8))
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"expected {what} in UTF-8, found {reprlib.repr(data)}")

    def count(self, least: int, what: str) -> int:
        """A count of what takes at least so many bytes each."""
        count = self.integer(8)
        if count > (self.size - self.at) // least:
            raise CheckpointError(
                f"{self.path} is truncated or corrupt: a count of {count} {what} is more than its bytes can hold"
            )
        return count

    def value(self, key: str, kind: int, depth: int = 0) -> Any:
        """A value of a kind; arrays of numbers and strings as they are stored."""
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if (number := _NUMBERS.get(kind)) is not None:
            value = np.frombuffer(self.take(int(number[-1])), number)[0].item()
            return bool(value) if kind == _BOOL else value
        if kind != _ARRAY:
            self.fail(f"expected {key!r} to be of types 0 to 12, found type {kind}")
        if depth == _MAX_DEPTH:
            self.fail(f"expected at most {_MAX_DEPTH} arrays in each other, found more at {key!r}")
        kind = self.integer(4)
        if (number := _NUMBERS.get(kind)) is not None:
            count = self.count(int(number[-1]), f"elements of {key!r}")
            found = _Array(kind, count, self.take(count * int(number[-1])))
        elif kind == _STRING:
            found = self._strings(self.count(8, f"strings of {key!r}"))
        else:
            return [self.value(key, kind, depth + 1) for _ in range(self.count(12, f"arrays of {key!r}"))]
        return found.read() if depth else found

    def _strings(self, count: int) -> _Array:
        begin, unpack = self.at, _LENGTH.unpack_from
        for _ in range(count):
            if self.at + 8 > len(self.data):
                self.need(8)
            self.at += 8 + unpack(self.data, self.at)[0]
            if self.at > len(self.data):
                self.need(0)
        return _Array(_STRING, count, bytes(memoryview(self.data)[begin : self.at]))


def read_header(source: Source) -> Header:
    """Reads and checks the header of a file."""
    with reading(source.path), source.open_file() as file:
        reader = _Reader(source.path, source.size, file)
        magic = reader.take(4) if source.size >= 4 else b""
        if magic != MAGIC:
            raise CheckpointError(f"{source.path} is no GGUF file: expected it to begin with {MAGIC}, found {magic}")
        version = reader.integer(4)
        if version and not version & 0xFFFF:
            raise CheckpointError(
                f"{source.path} is a big-endian GGUF file, which is not read; convert it by "
                "`gguf-convert-endian FILE little` of the package gguf"
            )
        if version not in (2, 3):
            raise CheckpointError(f"{source.path}: expected GGUF version 2 or 3, found {version}; convert it again")
        tensors = reader.count(24, "tensors")
        values: dict[str, Any] = {}
        for _ in range(reader.count(13, "metadata")):
            key = reader.string("a key")
            if key in values:
                reader.fail(f"expected each key once, found {reprlib.repr(key)} twice")
            kind = reader.integer(4)
            if key == _ALIGNED and kind != _UINT32:
                reader.fail(f"expected {key!r} to be of type {_UINT32}, found type {kind}")
            values[key] = reader.value(key, kind)
        found = _read_tensors(reader, tensors, values.get(_ALIGNED, _ALIGNMENT))
    return Header(Metadata(values, source.path), found)


def _read_tensors(reader: _Reader, count: int, alignment: int) -> dict[str, TensorInfo]:
    if alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"expected {_ALIGNED!r} to be a power of two, found {alignment}")
    infos: dict[str, TensorInfo] = {}
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
        if math.prod(max(extent, 1) for extent in shape) * max(kind.nbytes, 4) >= _MAX_NBYTES:
            reader.fail(f"{what}: expected a shape of less than {_MAX_NBYTES} bytes, found {shape}")
        if (shape or (1,))[-1] % kind.size:
            reader.fail(f"{what}: expected rows of whole blocks of {kind.size} numbers ({kind.name}), found {shape}")
        if offset % alignment:
            reader.fail(f"{what}: expected it at a multiple of {alignment} bytes, found it at {offset}")
        infos[name] = TensorInfo(shape, kind, offset)
    start = reader.at + -reader.at % alignment
    infos = {name: info._replace(begin=start + info.begin) for name, info in infos.items()}
    position, previous = start, ""
    for name, info in sorted(infos.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if info.begin < position and info.nbytes:
            reader.fail(f"tensors {reprlib.repr(previous)} and {reprlib.repr(name)} overlap at byte {info.begin}")
        if (end := info.begin + info.nbytes) > position:
            position, previous = end, name
    if position > max(start, reader.size):
        raise CheckpointError(
            f"{reader.path} is truncated: expected tensor {reprlib.repr(previous)} up to byte {position}, found "
            f"{reader.size} bytes. Download or copy it again."
        )
    return infos

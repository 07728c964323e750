"""GGUF files (llama.cpp), whole or split into several: tensors under the file's own names, quantized ones as float32.

A split model is files `NAME-00001-of-00003.gguf`, of which each says in its metadata which one it is, of how many files
and tensors (`split.no`, `split.count`, `split.tensors.count`). Whichever is opened, all of them are.
"""

from __future__ import annotations

import math
import re
import reprlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._quantized.ggml import TYPES, TensorType, tensor_of
from lazymodel._remote.path import Location, fetch_heads
from lazymodel._remote.reader import source_of
from lazymodel._show.text import plural
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint, TensorHeader
from lazymodel.checkpoints._untrusted import MAX_DIMENSIONS, check_pointer, reading, require_shards, shard_path

# The header of a GGUF file: its metadata and where its tensors are stored, read and checked.
#
# Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All of it is little-endian: magic `GGUF`, version,
# counts of tensors and of metadata, each key with its value, then each tensor's name, dimensions (the innermost first),
# type and offset from where the tensors' bytes begin. No count is believed before the file is long enough for it.


_MAGIC = b"GGUF"
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


class _TensorInfo(NamedTuple):
    """A tensor: its shape in NumPy's order, its type, and its first byte in the file."""

    shape: tuple[int, ...]
    type: TensorType
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.size * self.type.nbytes


class _Metadata(Mapping[str, Any]):
    """Key → str, int, float, bool or a list of these. Lists are made when they are looked up."""

    def __init__(self, values: dict[str, Any], path: str) -> None:
        self._values, self._path = values, path

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            try:
                self._values[key] = value = value.read()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self._path}: {key!r} has a string that is not UTF-8; it is corrupt") from error
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


def _read_header(source: ByteReader) -> tuple[_Metadata, dict[str, _TensorInfo]]:
    """The checked header of a file: metadata, and tensors in the order in which the file lists them."""
    with reading(source.path), source.open_file() as file:
        reader = _Reader(source.path, source.size, file)
        magic = reader.take(4) if source.size >= 4 else b""
        if magic != _MAGIC:
            raise CheckpointError(
                f"{source.path} is not a GGUF file: expected it to begin with {_MAGIC}, found {magic}"
            )
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
    return _Metadata(values, source.path), found


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
        if math.prod(max(extent, 1) for extent in shape) * max(kind.nbytes, 4) >= _MAX_NBYTES:
            reader.fail(f"{what}: expected a shape of less than {_MAX_NBYTES} bytes, found {shape}")
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
        raise CheckpointError(
            f"{reader.path} is truncated: expected tensor {reprlib.repr(previous)} up to byte {position}, found "
            f"{reader.size} bytes. Download or copy it again."
        )
    return infos


_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
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
        self.source = source_of(path)
        self.whole: Checkpoint = self  # all files of the model
        self.metadata, self._tensors_there = _read_header(self.source)
        super().__init__(path, list(self._tensors_there), [self.source])

    def _tensor(self, name: str) -> LazyTensor:
        shape, kind, begin = self._tensors_there[name]
        # llama.cpp multiplies results by it: the second scale of NVFP4. Beside other types it belongs to the model.
        if kind.name == "NVFP4" and (scale := f"{name.removesuffix('weight')}scale") in self.whole:
            raise CheckpointError(
                f"tensor {name!r} of {self.path} is NVFP4 with another scale, tensor {scale!r}, which is not decoded; "
                "take a file of another type"
            )
        return LazyTensor(tensor_of(name, self.source, begin, shape, kind))

    def describe(self, name: str) -> TensorHeader:
        info = self._tensors_there[name]
        dtype = info.type.dtype or _FLOAT32
        stored = None if info.type.dtype else (info.type.name, info.nbytes)
        return TensorHeader(dtype, info.shape, math.prod(info.shape) * dtype.itemsize, self.path, stored, info.begin)


def split_names(name: str) -> list[str]:
    """The names of all files of the model of which a file of this name is one, by its name."""
    if (match := _SPLIT.fullmatch(name)) is None:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def model_files(folder: Location) -> Sequence[Location]:
    """The GGUF files of a folder, which must be of one model."""
    files = sorted(folder.glob("*.gguf"))
    models = {split_names(file.name)[0]: None for file in files}
    if len(models) > 1:
        raise CheckpointError(f"{folder} has {len(models)} GGUF models; open one of {list(models)}")
    return files


def open_gguf(path: Location) -> Checkpoint:
    """Opens a GGUF file and, where it is one of several, the others."""
    opened = GgufFile(path)
    count = _integer(opened, "split.count") if "split.count" in (opened.metadata or {}) else 1
    names = split_names(path.name)
    if len(names) != max(count, 1):
        expected = f"a name that ends like -00001-of-{count:05}.gguf" if count > 1 else "a name without numbers"
        raise CheckpointError(
            f"{path} is one of {plural(count, 'file')} as its metadata says: expected {expected}, found {path.name}; "
            "give each of them its name back"
        )
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
            raise CheckpointError(
                f"{part.path}: expected file {number} of {count} with the others' number of tensors, found (split.no, "
                f"split.count, split.tensors.count) = {tuple(stated)}; the files are not of one model"
            )
    if (found := sum(map(len, parts))) != tensors:
        raise CheckpointError(
            f"{path}: expected {tensors} tensors in {count} files as their metadata says, found {found}; download them "
            "again"
        )
    joined = JoinedCheckpoint(path, [(part, part.keys()) for part in parts])
    for part in parts:
        part.whole = joined
    joined.metadata = parts[0].metadata  # the others have only what says which ones they are
    return joined


def _integer(checkpoint: Checkpoint, key: str) -> int:
    value: Any = (checkpoint.metadata or {}).get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        raise CheckpointError(f"{checkpoint.path}: expected {key!r} to be a count, found {value!r}; it is corrupt")
    return value

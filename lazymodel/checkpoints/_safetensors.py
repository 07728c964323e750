"""safetensors files and folders of them (format: https://github.com/huggingface/safetensors#format).

A file is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes. Nothing in a header is
believed before it is checked, and nothing is allocated for a tensor because a header says so. Files that the
reference implementation rejects (gaps, overlaps, bytes left over, headers that are not UTF-8) are rejected here.

The header of a safetensors file: read, checked, and kept as one array a property rather than objects a tensor.

A header may describe more than a million tensors. One that is written as all known writers write it is taken apart by
one regular expression and checked as arrays. Whatever that does not take, or finds wrong, goes through the JSON parser
and is checked tensor by tensor, which is exact in everything and finds the words for what is wrong.

Shards: the files of one checkpoint, which an index lists, or which are numbered and of one save.

A `Contents` collects them and everything that is wrong: opening raises it, inspecting shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import Location, fetch_heads
from lazymodel._remote.reader import source_of
from lazymodel._show.text import LISTED, first_lines, listed, plural
from lazymodel._tensors.boxes import Box, Geometry, box_shape, normalize, slabs
from lazymodel._tensors.buffers import Convert, Workspace, assign
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import FileTensor, TensorSource
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint, TensorHeader
from lazymodel.checkpoints._untrusted import (
    MAX_DIMENSIONS,
    check_pointer,
    counts,
    read_json_object,
    reading,
    shard_path,
)

MAX_HEADER = 100_000_000  # bytes; the reference implementation's own limit
_MAX_NBYTES = 2**63  # what NumPy can address, even where an extent of 0 leaves nothing to hold

FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)

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
    "F4": FLOAT4,
    "C64": np.dtype("<c8"),
}
_SIX_BITS = ("F6_E2M3", "F6_E3M2")

# One tensor as JSON has it, in the order and with the white space that writers use. An int has no leading zero, and
# so few digits that it is below 2**63; a string has no escapes and no control characters.
_INT = "(?:0|[1-9][0-9]{0,17})"
_TENSOR = re.compile(
    r', ?"([^"\\\x00-\x1f]*)": ?\{"dtype": ?"([A-Z0-9_]+)", ?"shape": ?'
    rf'\[((?:{_INT}(?:, ?{_INT})*)?)\], ?"data_offsets": ?\[({_INT}), ?({_INT})\]\}}'
)
_METADATA = '{"__metadata__":'


@dataclasses.dataclass(frozen=True)
class Kind:
    """The dtype and shape that many tensors share."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of its elements in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bits(self) -> int:
        """Bits of its elements in the file."""
        return math.prod(self.shape) * (4 if self.dtype == FLOAT4 else 8 * self.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Header:
    """The content of a header."""

    metadata: dict[str, str]
    names: dict[str, int]  # of the tensors, in the order in which the file has them, to their numbers
    kinds: list[Kind]
    codes: np.ndarray  # number of a tensor → number of its kind
    begins: np.ndarray  # number of a tensor → its first byte in the file

    def find(self, name: str) -> tuple[Kind, int]:
        """Dtype and shape of a tensor that is there, and its first byte in the file."""
        number = self.names[name]
        return self.kinds[self.codes[number]], int(self.begins[number])

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes of some tensors' elements in memory."""
        numbers = np.fromiter(map(self.names.__getitem__, names), np.int64)
        found = np.bincount(self.codes[numbers], minlength=len(self.kinds)).tolist()
        return sum(count * kind.nbytes for count, kind in zip(found, self.kinds, strict=True))


def read_header(source: ByteReader) -> Header:
    """Reads and checks the header of a file."""
    path, size = source.path, source.size
    data = _read(source)
    start = 8 + len(data)  # of the tensors' bytes
    if (header := _written_as_usual(data, start, size - start)) is not None:
        return header
    fields = read_json_object(data, path)
    metadata: Any = fields.pop("__metadata__", None)
    if not _is_metadata(metadata):
        raise CheckpointError(
            f"{path}: expected '__metadata__' to map strings to strings, found {reprlib.repr(metadata)}; it is corrupt"
        )
    entries = [(_entry(f"{path}: tensor {name!r}", entry), name) for name, entry in fields.items()]
    entries.sort(key=lambda item: item[0][:2])
    _require_no_gaps(path, [(begin, end, name) for (begin, end, _), name in entries], size - start)
    codes: dict[Kind, int] = {}
    numbers = [codes.setdefault(kind, len(codes)) for (*_, kind), _ in entries]
    begins = np.array([start + begin for (begin, *_), _ in entries], np.int64)
    names = {name: index for index, (_, name) in enumerate(entries)}
    return Header(metadata or {}, names, list(codes), np.array(numbers, np.int32), begins)


def _read(source: ByteReader) -> bytes:
    path, size = source.path, source.size
    with reading(path), source.open_file() as file:
        length = int.from_bytes(prefix := file.read(8), "little")
        if len(prefix) < 8:
            raise CheckpointError(f"{path} is not a safetensors file: expected at least 8 bytes, found {size}")
        if length > MAX_HEADER:
            raise CheckpointError(
                f"{path} is not a safetensors file, or corrupt: expected a header of at most {MAX_HEADER} bytes, found "
                f"{length}"
            )
        if 8 + length > size or len(data := file.read(length)) < length:
            raise CheckpointError(
                f"{path} is truncated: expected a header up to byte {8 + length}, found a file of {size} bytes. "
                "Download or copy it again."
            )
    return data


def _written_as_usual(data: bytes, start: int, available: int) -> Header | None:
    """The header, if it is written as writers do and nothing is wrong with it, else None."""
    try:
        text = data.decode()
        metadata: Any = None
        if text.startswith(_METADATA):
            metadata, end = json.JSONDecoder(object_pairs_hook=_no_repeats).raw_decode(text, len(_METADATA))
            if "\\u" in text[:end]:
                return None  # perhaps half a character, which the slower way refuses
            text = text[end:]
        else:
            text = "," + text.removeprefix("{") if text.startswith("{") else ""
    except (ValueError, RecursionError):
        return None
    # Bytes between tensors, then name, dtype, shape, begin and end of the next one.
    parts = _TENSOR.split(text)
    if len(parts) < 7 or any(parts[:-1:6]) or parts[-1].rstrip(" \t\n\r") != "}" or not _is_metadata(metadata):
        return None
    names, dtypes, shapes = parts[1::6], parts[2::6], parts[3::6]
    numbers = dict(zip(names, range(len(names)), strict=True))
    if len(numbers) < len(names) or "__metadata__" in numbers:
        return None
    keys = dict.fromkeys(zip(dtypes, shapes, strict=True))
    kinds: list[Kind] = []
    for code, (stored, shape) in enumerate(keys):
        kind = _kind(DTYPES.get(stored), [int(extent) for extent in shape.split(",")] if shape else [])
        if kind is None or kind.bits % 8:
            return None
        kinds.append(kind)
        keys[stored, shape] = cast(Any, code)
    codes = np.fromiter(map(cast(Any, keys).__getitem__, zip(dtypes, shapes, strict=True)), np.int32, len(names))
    begins = np.fromiter(map(int, parts[4::6]), np.int64, len(names))
    ends = np.fromiter(map(int, parts[5::6]), np.int64, len(names))
    if (ends - begins != np.array([kind.bits // 8 for kind in kinds], np.int64)[codes]).any():
        return None
    if (begins[1:] != ends[:-1]).any():
        order = np.lexsort((ends, begins))
        begins, ends, codes = begins[order], ends[order], codes[order]
        numbers = {names[number]: index for index, number in enumerate(order.tolist())}
        if (begins[1:] != ends[:-1]).any():
            return None
    if begins[0] != 0 or ends[-1] != available:
        return None
    return Header(metadata or {}, numbers, kinds, codes, begins + start)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _is_metadata(metadata: Any) -> bool:
    """Returns True for None, of a header without metadata, and for a mapping of strings to strings."""
    if metadata is None:
        return True
    return isinstance(metadata, dict) and all(
        isinstance(value, str) for value in cast("dict[str, Any]", metadata).values()
    )


def _entry(what: str, entry: Any) -> tuple[int, int, Kind]:
    """First and last byte of a tensor's bytes, and its kind, after every check of it alone."""
    # Values are quoted by reprlib: one may be as long as the header, or nested as deep as Python allows.
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
        raise CheckpointError(f"{what}: expected one of the dtypes {', '.join(DTYPES)}, found {reprlib.repr(stored)}")
    shape = fields.get("shape")
    kind = _kind(dtype, counts(shape))
    if kind is None:
        raise CheckpointError(
            f"{what}: expected a shape of non-negative ints, at most {MAX_DIMENSIONS} of them and of less than "
            f"{_MAX_NBYTES} bytes, found {reprlib.repr(shape)}"
        )
    offsets = counts(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{what}: expected data_offsets [begin, end], found {reprlib.repr(fields.get('data_offsets'))}"
        )
    begin, end = offsets
    if kind.bits % 8:
        raise CheckpointError(
            f"{what}: expected whole bytes, found an odd number of 4-bit values, {stored}{list(kind.shape)}; "
            "it is corrupt"
        )
    if end - begin != kind.bits // 8:
        raise CheckpointError(
            f"{what}: expected {kind.bits // 8} bytes for {stored}{list(kind.shape)}, found data_offsets of "
            f"{end - begin} bytes; it is corrupt"
        )
    return begin, end, kind


def _require_no_gaps(path: str, entries: Iterable[tuple[int, int, str]], available: int) -> None:
    """Raises CheckpointError unless tensors, given in file order, are all of the bytes and share none of them."""
    position, previous = 0, ""
    for begin, end, name in entries:
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


def _kind(dtype: np.dtype[Any] | None, shape: Sequence[int] | None) -> Kind | None:
    """A dtype and a shape of non-negative ints that NumPy can have together, else None."""
    if dtype is None or shape is None or len(shape) > MAX_DIMENSIONS:
        return None
    if math.prod(max(extent, 1) for extent in shape) * dtype.itemsize >= _MAX_NBYTES:
        return None
    return Kind(dtype, tuple(shape))


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


SAVE_KEY = "lazymodel_save"  # in a shard's metadata: what the shards of one save have in common, and no others
_PART = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")  # as Hugging Face numbers the shards of a model
_NOUNS = ("tensor", "group")  # what an index lists, by whether it groups them
_MAX_NAME = 240  # characters of a name that a message shows; a file may give a tensor a name of megabytes


def is_numbered(name: str) -> bool:
    """Returns True if a file is called as shards of a safetensors checkpoint are."""
    return _PART.fullmatch(name) is not None


@dataclasses.dataclass
class Contents:
    """The contents of a place: its files, the tensors of each that count, and all problems."""

    where: Location
    format: str = "unknown"
    index: Location | None = None
    metadata: Any = None  # of the index
    whole: Checkpoint | None = None  # what is opened as one thing
    files: list[Location] = dataclasses.field(default_factory=list)  # that are there, index first
    parts: list[tuple[Checkpoint, Collection[str]]] = dataclasses.field(default_factory=list)
    problems: list[tuple[str, Location | None]] = dataclasses.field(default_factory=list)  # with the file, if it is one
    harmless: set[str] = dataclasses.field(default_factory=set)  # problems in spite of which all that is listed loads

    def problem(self, message: str, file: Location | None = None) -> None:
        self.problems.append((message, file))

    @contextlib.contextmanager
    def noting(self, file: Location | None = None) -> Generator[None]:
        """Notes what the block raises."""
        try:
            yield
        except LazyModelError as error:
            self.problem(str(error), file)

    def checkpoint(self) -> Checkpoint:
        """All of it as one; raises CheckpointError if anything is wrong that keeps it from being loaded."""
        if wrong := [message for message, _ in self.problems if message not in self.harmless]:
            for part, _ in self.parts:
                part.close()
            raise CheckpointError("\n".join(first_lines(wrong)))
        return JoinedCheckpoint(self.index or self.where, self.parts) if self.whole is None else self.whole

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds what is opened as one thing."""
        self.whole = checkpoint
        self.parts.append((checkpoint, checkpoint.keys()))

    def open(self, path: Location, expected: str, open: Callable[[Any], Checkpoint]) -> Checkpoint | None:
        """Opens a file that should be there; None where that fails."""
        with self.noting(path):
            if not path.is_file():
                found = "no such file. Download it too."
                if path.exists():
                    found = "a folder, a pipe or a device; do not trust this checkpoint"
                elif isinstance(path, Path) and path.is_symlink():
                    found = f"a link to {path.readlink()}, which is not there. Download it too."
                raise CheckpointError(f"{path}: expected {expected}, found {found}")
            self.files.append(path)
            return open(path)

    def add_loose(self, folder: Location, paths: Sequence[Location], open: Callable[[Any], Checkpoint]) -> None:
        """Adds files that no index describes; those numbered `k-of-n` must be n, and of one save."""
        fetch_heads(paths)
        opened = {path: self.open(path, "tensors", open) for path in paths}
        self.parts += [(shard, shard.keys()) for shard in opened.values() if shard is not None]
        for message in _save_problems(folder, opened, indexed=False):
            self.problem(message)

    def add_indexed(
        self, index: Location, weights: Mapping[str, Any], open: Callable[[Any], Checkpoint], *, grouped: bool
    ) -> None:
        """Adds the shards that an index names, each with the tensors that the index says it has.

        `weights` maps a tensor to its file or, where `grouped`, as Keras' indexes, a group of tensors to one file or
        more.
        """
        expected: dict[Location, list[str]] = {}
        for shard, keys in self.by_shard(index, weights, grouped=grouped).items():
            with self.noting(index):
                expected.setdefault(shard_path(index, shard), []).extend(keys)
        fetch_heads(expected)
        nouns = {path: f"{some(keys, _NOUNS[grouped])} as {index.name} says" for path, keys in expected.items()}
        opened = {path: shard for path in expected if (shard := self.open(path, nouns[path], open)) is not None}
        for message in _save_problems(index, opened, indexed=True):
            self.problem(message)
        for path, shard in opened.items():
            self.add_shard(path, shard, index.name, expected[path], weights, grouped=grouped)

    def by_shard(self, index: Any, weights: Mapping[str, Any], *, grouped: bool) -> dict[str, list[str]]:
        """Shard → what an index says that it has."""
        result: dict[str, list[str]] = {}
        wrong: dict[str, None] = {}
        for key, value in weights.items():
            for shard in cast("list[Any]", value) if grouped and isinstance(value, list) else [value]:
                if isinstance(shard, str):
                    result.setdefault(shard, []).append(key.strip("/") if grouped else key)
                else:
                    wrong[reprlib.repr(shard)] = None
        for shard in wrong:
            self.problem(f"{index}: expected a shard's file name, found {shard}", index)
        return result

    def add_shard(
        self,
        path: Location,
        shard: Checkpoint,
        index: str,
        expected: Sequence[str],
        weights: Mapping[str, Any],
        *,
        grouped: bool,
    ) -> None:
        """Adds the tensors of a shard that an index, which lists `weights` in all, says it has."""
        held: Any = shard.keys()
        if grouped:
            held = {}
            for name in shard:
                held.setdefault(name.rpartition("/")[0], []).append(name)
        found = [key for key in expected if key in held]
        wrong = [([key for key in expected if key not in held], "is missing", "says it has")]
        if len(found) < len(held):
            known = {key.strip("/") for key in weights} if grouped else weights.keys()
            others = held.keys() - set(expected) if grouped else held - set(expected)
            others = [key for key in held if key in others]
            wrong.append(([key for key in others if key in known], "has", "puts in other shards"))
            wrong.append(([key for key in others if key not in known], "has", "does not mention and nothing will load"))
        for keys, verb, what in wrong:
            if keys:
                message = (
                    f"{shard.path}: {verb} {some(keys, _NOUNS[grouped])}, which {index} {what}; download both again"
                )
                self.problem(message, path)
                if verb == "has":
                    self.harmless.add(message)
        self.parts.append((shard, [name for key in found for name in held[key]] if grouped else found))


def open_loose(folder: Location, paths: Iterable[Location]) -> Checkpoint:
    """Opens safetensors files of a folder that no index describes."""
    found = Contents(folder)
    found.add_loose(folder, list(paths), SafetensorsFile)
    return found.checkpoint()


def _save_problems(folder: Location, shards: Mapping[Location, Checkpoint | None], *, indexed: bool) -> Iterator[str]:
    """Why safetensors files, None those that cannot be opened, are not all of one save's shards.

    Where an index names them their number and their names are right as they are.
    """
    parts: dict[tuple[str, str], dict[Location, int]] = {}
    for path in shards:
        if match := _PART.fullmatch(path.name):
            parts.setdefault((match[1], match[3]), {})[path] = int(match[2])
    if not indexed:
        complete = True
        for (stem, total), paths in parts.items():
            numbers, most = set(paths.values()), int(total)
            if count := most - sum(1 <= number <= most for number in numbers):
                complete = False
                missing = islice((number for number in range(1, most + 1) if number not in numbers), LISTED)
                names = listed(
                    [f"{stem}-{number:0{len(total)}}-of-{total}.safetensors" for number in missing], count=count
                )
                yield (
                    f"{folder}: expected {most} shards as their names say, found {most - count}; missing {names}. "
                    "Download them too."
                )
        if len(parts) > 1 and complete:
            names = ", ".join(f"{stem}-*-of-{total}.safetensors" for stem, total in parts)
            yield (
                f"{folder}: expected the shards of one save, found those of {len(parts)}, {names}, and no index that "
                "says which count. Remove the others, or add the index file"
            )
    for paths in parts.values():
        saves: dict[str | None, list[str]] = {}
        for path in paths:
            if (shard := shards[path]) is not None and shard.metadata is not None:
                saves.setdefault(shard.metadata.get(SAVE_KEY), []).append(path.name)
        if len(saves) > 1:
            yield (
                f"{folder}: expected shards of one save, found a mixture of {len(saves)}: "
                f"{'; '.join(map(listed, saves.values()))}. Copy all shards of one of them again"
            )


def some(names: Sequence[str], noun: str = "tensor") -> str:
    """The first few of some names, and how many they are."""
    first = [repr(short(name)) for name in names[:LISTED]]
    return f"{plural(len(names), noun)} ({listed(first, count=len(names))})"


def short(text: str) -> str:
    """The text, without the middle of one that is too long to show."""
    half = _MAX_NAME // 2
    return text if len(text) <= _MAX_NAME else f"{text[:half]}…{text[-half:]}"

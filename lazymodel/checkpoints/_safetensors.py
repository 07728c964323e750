"""safetensors files (https://github.com/huggingface/safetensors#format), and the shards of one checkpoint.

A file is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes. Nothing in a header is
believed before it is checked, and what the reference implementation rejects (gaps, overlaps, bytes left over, headers
that are not UTF-8) is rejected here. A header may describe more than a million tensors: one that is written as all
known writers write it is split by a regular expression, any other by the JSON parser, and both are checked as arrays.

A `Contents` collects the shards that an index lists, or that are numbered and of one save, and everything that is
wrong: opening raises it, inspecting shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._extras import extra
from lazymodel._remote.path import Location, fetch_heads, location, matching
from lazymodel._show.text import LISTED, first_lines, grouped_by, listed, plural
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.byte_reader import ByteReader, reading
from lazymodel._tensors.convert import ML_NUMBERS
from lazymodel._tensors.decoded import DecodedTensor, Stored
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import FileTensor, View
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint, TensorHeader
from lazymodel.checkpoints._untrusted import (
    HOSTILE,
    MAX_DIMENSIONS,
    MAX_NBYTES,
    check_pointer,
    counts,
    mismatch,
    read_json_object,
    shard_path,
    truncated,
)

MAX_HEADER = 100_000_000  # bytes; the reference implementation's own limit

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
# Dtypes of JAX that the format lacks: the tag and the inner shape of what stands for a number. `lm.save` says in the
# metadata which tensors have them, as JSON of name → dtype. Other readers see integers, and pairs of floats.
DTYPES_KEY = "lazymodel.dtypes"
OWN_DTYPES: dict[np.dtype[Any], tuple[str, tuple[int, ...]]] = {np.dtype("<c16"): ("F64", (2,))} | {
    dtype: ("U8", ()) for dtype in map(np.dtype, ML_NUMBERS) if dtype.itemsize == 1 and dtype not in DTYPES.values()
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


class _Kind(NamedTuple):
    """The dtype and shape that many tensors share, their bytes in memory, and in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    stored: int


class _Columns(NamedTuple):
    """A header, a list for each property of the tensors. Shapes are tuples, or text with commas."""

    metadata: Any
    names: list[str]
    dtypes: list[Any]
    shapes: list[Any]
    begins: list[Any]
    ends: list[Any]


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
            raise truncated(path, f"a header up to byte {8 + length}", f"a file of {size} bytes")
    return data


def _split(data: bytes) -> _Columns | None:
    """The header, if it is written as writers do, else None."""
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
    if len(parts) < 7 or any(parts[:-1:6]) or parts[-1].rstrip(" \t\n\r") != "}" or "__metadata__" in parts[1::6]:
        return None
    return _Columns(metadata, *(parts[first::6] for first in range(1, 6)))


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _parsed(data: bytes, path: str) -> _Columns:
    """The header, by the JSON parser."""
    entries = read_json_object(data, path)
    columns = _Columns(entries.pop("__metadata__", None), [], [], [], [], [])
    for name, entry in entries.items():
        # Values are quoted by reprlib: one may be as long as the header, or nested as deep as Python allows.
        what = f"{path}: tensor {name!r}"
        if not isinstance(entry, dict):
            raise mismatch(what, "dtype, shape and data_offsets", reprlib.repr(entry))
        fields = cast("dict[str, Any]", entry)
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if (extents := counts(shape)) is None:
            raise mismatch(what, "a shape of non-negative ints", reprlib.repr(shape))
        if (span := counts(offsets)) is None or len(span) != 2 or span[0] > span[1]:
            raise mismatch(what, "data_offsets [begin, end]", reprlib.repr(offsets))
        values: tuple[Any, ...] = (name, dtype if isinstance(dtype, str) else reprlib.repr(dtype), extents, *span)
        for column, value in zip(cast("list[list[Any]]", columns[1:]), values, strict=True):
            column.append(value)
    return columns


def _kind(what: str, stored: str, shape: Any) -> _Kind:
    """The dtype and shape of a tensor, after every check of them."""
    if stored in _SIX_BITS:
        raise CheckpointError(
            f"{what}: found dtype {stored}: JAX has no arrays of 6-bit floats, and the format does not say how they "
            "are packed. Convert the file to a dtype of 8 bits or more"
        )
    if (dtype := DTYPES.get(stored)) is None:
        raise mismatch(what, f"one of the dtypes {', '.join(DTYPES)}", stored)
    extents = tuple(int(extent) for extent in shape.split(",") if extent) if isinstance(shape, str) else shape
    if len(extents) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in extents) * dtype.itemsize >= MAX_NBYTES:
        expected = f"a shape of at most {MAX_DIMENSIONS} extents and less than {MAX_NBYTES} bytes"
        raise mismatch(what, expected, reprlib.repr(list(extents)))
    count = math.prod(extents)
    if dtype == FLOAT4 and count % 2:
        raise mismatch(what, "whole bytes", f"an odd number of 4-bit values, {stored}{list(extents)}")
    return _Kind(dtype, extents, count * dtype.itemsize, count // 2 if dtype == FLOAT4 else count * dtype.itemsize)


def _nibbles(packed: np.ndarray, out: np.ndarray, workspace: Workspace) -> None:
    values = out.view(np.uint8)
    np.bitwise_and(packed, 15, out=values[..., ::2])
    np.right_shift(packed, 4, out=values[..., 1::2])


def _float4_tensor(name: str, source: ByteReader, begin: int, shape: tuple[int, ...]) -> LazyTensor:
    """4-bit floats, two in each byte of the file: the earlier one is in the low bits, as in PyTorch's
    `float4_e2m1fn_x2` (c10, `Float4_e2m1fn_x2.h`). Rows are not padded: those of odd length share a byte.
    """
    whole = shape if shape and shape[-1] % 2 == 0 else (math.prod(shape),)
    ones = (1,) * (len(whole) - 1)
    file = FileTensor(name, source, begin, (*whole[:-1], whole[-1] // 2), np.dtype(np.uint8))
    stored = Stored(View(file), (*ones, 1), _nibbles, (*ones, 2))
    return LazyTensor(DecodedTensor(whole, stored, dtype=FLOAT4, scratch=2)).reshape(shape)


class SafetensorsFile(Checkpoint):
    """One safetensors file: tensor name → `LazyTensor`, in file order. Opening reads and checks the header.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer, or its header is malformed: a length out
            of range, a repeated key, an unknown dtype, a shape that is not its byte range, overlaps, or gaps.
    """

    format = "safetensors"

    def __init__(self, path: str | Location) -> None:
        path = location(path)
        check_pointer(path)
        self.source = path.reader()
        data = _read(self.source)
        super().__init__(path, self._checked(data), [self.source])

    def _checked(self, data: bytes) -> dict[str, int]:
        """Keeps a header, after every check: tensors are all of the bytes after it, and share none of them.

        Returns the number of each tensor, in file order.
        """
        path, available = self.source.path, self.source.size - 8 - len(data)
        metadata, names, dtypes, shapes, *offsets = _split(data) or _parsed(data, path)
        numbers = dict(zip(names, range(len(names)), strict=True))
        if len(numbers) < len(names):
            _parsed(data, path)  # raises for the one that is there twice
        strings = cast("dict[Any, Any]", metadata or {}).values() if isinstance(metadata, dict | None) else [None]
        if not all(isinstance(value, str) for value in strings):
            raise mismatch(path, "'__metadata__' to map strings to strings", reprlib.repr(metadata))
        self.metadata = texts = cast("dict[str, str]", metadata or {})
        keys: dict[tuple[str, Any], Any] = dict.fromkeys(zip(dtypes, shapes, strict=True))
        keys = dict(zip(keys, range(len(keys)), strict=True))
        codes = np.fromiter(map(keys.__getitem__, zip(dtypes, shapes, strict=True)), np.int32, len(names))
        first = np.searchsorted(np.maximum.accumulate(codes), np.arange(len(keys)))  # they are numbered in this order
        kinds = [_kind(f"{path}: tensor {names[at]!r}", *key) for key, at in zip(keys, first.tolist(), strict=True)]
        begins, ends = (np.fromiter(map(int, each), np.int64, len(names)) for each in offsets)
        sizes = np.array([kind.stored for kind in kinds], np.int64)[codes]
        if (odd := ends - begins != sizes).any():
            number = int(odd.argmax())
            expected = f"{sizes[number]} bytes for {dtypes[number]}{list(kinds[codes[number]].shape)}"
            found = f"data_offsets of {ends[number] - begins[number]} bytes"
            raise mismatch(f"{path}: tensor {names[number]!r}", expected, found)
        if (begins[1:] != ends[:-1]).any():
            order = np.lexsort((ends, begins))
            begins, ends, codes = begins[order], ends[order], codes[order]
            names = [names[number] for number in order.tolist()]
            numbers = dict(zip(names, range(len(names)), strict=True))
        expected_begins = np.concatenate([[0], ends[:-1]])[: len(names)]
        if (odd := begins != expected_begins).any():
            number = int(odd.argmax())
            begin, expected = int(begins[number]), int(expected_begins[number])
            if begin < expected:
                both = f"tensors {names[number - 1]!r} and {names[number]!r}"
                raise CheckpointError(f"{path}: {both} overlap at byte {begin}; it is corrupt")
            fix = "the format allows no gaps; the file is corrupt"
            raise mismatch(path, f"tensor {names[number]!r} at byte {expected}", f"it at {begin}", fix)
        used = int(ends[-1]) if names else 0
        if used > available:
            raise truncated(path, f"{used} bytes of tensors", available)
        if used < available:
            raise mismatch(path, f"{used} bytes of tensors", f"{available - used} more bytes after them")
        self._kinds, self._codes, self._begins = kinds, codes, begins + 8 + len(data)
        self._own = dict[str, np.dtype[Any]]()
        by_name = {dtype.name: (dtype, *stored) for dtype, stored in OWN_DTYPES.items()}
        for name, own in read_json_object((metadata or {}).get(DTYPES_KEY, "{}").encode(), path).items():
            kind, of = (kinds[codes[numbers[name]]] if name in numbers else None), by_name.get(str(own))
            if not kind or not of or kind.dtype != DTYPES[of[1]] or kind.shape[len(kind.shape) - len(of[2]) :] != of[2]:
                raise mismatch(path, f"{DTYPES_KEY!r} to name the dtypes of tensors", f"{name!r}: {own!r}"[:80])
            self._own[name] = of[0]
        found = texts.items()
        self.aliases = {other: name for other, name in found if name in numbers and other not in numbers}
        self._own |= {other: self._own[name] for other, name in self.aliases.items() if name in self._own}
        return numbers | {other: numbers[name] for other, name in self.aliases.items()}

    def _tensor(self, name: str) -> LazyTensor:
        dtype, shape, *_, begin = self.describe(name)
        if dtype == FLOAT4:
            return _float4_tensor(name, self.source, cast(int, begin), shape)
        return LazyTensor(FileTensor(name, self.source, cast(int, begin), shape, dtype))

    def describe(self, name: str) -> TensorHeader:
        number = self._names[name]
        kind = self._kinds[self._codes[number]]
        dtype, shape = self._own.get(name, kind.dtype), kind.shape
        shape = shape[: len(shape) - len(OWN_DTYPES[dtype][1])] if name in self._own else shape
        return TensorHeader(dtype, shape, kind.nbytes, self.path, None, int(self._begins[number]))

    def _nbytes_of(self, names: Collection[str]) -> int:
        numbers = np.fromiter(map(self._names.__getitem__, names), np.int64)
        found = np.bincount(self._codes[numbers], minlength=len(self._kinds)).tolist()
        return sum(count * kind.nbytes for count, kind in zip(found, self._kinds, strict=True))


SHARDING = "DCP_SHARDING_INFO"  # in a shard's metadata: name → where in the whole tensor this part begins, as JSON
SAVE_KEY = "lazymodel_save"  # in a shard's metadata: what the shards of one save have in common, and no others
# As Hugging Face numbers a model's shards; PyTorch's numbers of distributed ones say nothing of how many there are.
_PART = re.compile(r"(?!shard-\d+-)(.+)-(\d{1,9})-of-(\d{1,9})\.(safetensors|bin)")
_OF_RANK = re.compile(r"shard-\d+-.+\.safetensors")  # of torch.distributed's
_MAX_NAME = 240  # characters of a name that a message shows; a file may give a tensor a name of megabytes


def is_numbered(name: str) -> bool:
    """Returns True if a file is called as one of several shards on Hugging Face is, or as the part of a rank."""
    return _PART.fullmatch(name) is not None or _OF_RANK.fullmatch(name) is not None


class Index(NamedTuple):
    """An index: tensor → the file that has it, or, where `grouped` as Keras', group of tensors → its file or files."""

    path: Any
    name: str
    weights: Mapping[str, Any]
    grouped: bool

    def some(self, keys: Sequence[str]) -> str:
        return some(keys, "group" if self.grouped else "tensor")


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
    # Message, file if it is one, and whether all that is listed can be loaded in spite of it.
    problems: list[tuple[str, Location | None, bool]] = dataclasses.field(default_factory=list)

    def problem(self, message: str, file: Location | None = None, *, harmless: bool = False) -> None:
        self.problems.append((message, file, harmless))

    @contextlib.contextmanager
    def noting(self, file: Location | None = None) -> Generator[None]:
        """Notes what the block raises."""
        try:
            yield
        except LazyModelError as error:
            self.problem(str(error), file)

    def checkpoint(self) -> Checkpoint:
        """All of it as one; raises CheckpointError if anything is wrong that keeps it from being loaded."""
        if wrong := [message for message, _, harmless in self.problems if not harmless]:
            for part, _ in self.parts:
                part.close()
            raise CheckpointError("\n".join(first_lines(wrong)))
        return JoinedCheckpoint(self.index or self.where, self.parts) if self.whole is None else self.whole

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds what is opened as one thing."""
        self.whole = checkpoint
        self.parts.append((checkpoint, checkpoint.keys()))

    def _opened(self, expected: Mapping[Location, str], open: Callable[[Any], Checkpoint]) -> dict[Any, Checkpoint]:
        """Opens files that should be there, with what is expected in each; without those where that fails."""
        fetch_heads(expected)
        opened: dict[Location, Checkpoint] = {}
        for path, what in expected.items():
            with self.noting(path):
                if path.is_file():
                    self.files.append(path)
                    opened[path] = open(path)
                elif path.exists():
                    raise mismatch(path, what, "a folder, a pipe or a device", HOSTILE)
                elif path.is_symlink():
                    there = f"a link to {os.readlink(str(path))}, which is not there"
                    raise mismatch(path, what, there, "download it too")
                else:
                    raise mismatch(path, what, "no such file", "download it too")
        return opened

    def check_parts(self, folder: Location) -> None:
        """Notes it if shards of a distributed checkpoint have parts of tensors, which their folder has whole."""
        if any(SHARDING in (part.metadata or {}) for part, _ in self.parts):
            with self.noting(), open_loose(folder, sorted(folder.glob("shard-*.safetensors"))) as whole:
                for part, names in self.parts:
                    if cut := [n for n in names if n in whole and whole.describe(n).shape != part.describe(n).shape]:
                        fix = f"open the folder {folder}, without an index, which joins the parts"
                        raise mismatch(part.path, "whole tensors", f"parts of {some(cut)}", fix)

    def add_loose(self, paths: Sequence[Location], open: Callable[[Any], Checkpoint]) -> None:
        """Adds files that no index describes; those numbered `k-of-n` must be n, and of one save."""
        opened = self._opened(dict.fromkeys(paths, "tensors"), open)
        if any(SHARDING in (shard.metadata or {}) for shard in opened.values()):
            with self.noting():
                self.add(extra("DistributedCheckpoint")(self.where, list(opened.values())))
            return
        self.parts += [(shard, shard.keys()) for shard in opened.values()]
        for message in (*_numbering_problems(self.where, paths), *_save_problems(self.where, opened)):
            self.problem(message)

    def add_indexed(self, index: Index, open: Callable[[Any], Checkpoint]) -> None:
        """Adds the shards that an index names, each with the tensors that the index says it has."""
        expected: dict[Location, list[str]] = {}
        for shard, keys in self.by_shard(index).items():
            with self.noting(index.path):
                expected.setdefault(shard_path(index.path, shard), []).extend(keys)
        opened = self._opened({path: f"{index.some(expected[path])} as {index.name} says" for path in expected}, open)
        for message in _save_problems(index.path, opened):
            self.problem(message)
        for path, shard in opened.items():
            self.add_shard(index, path, shard, expected[path])

    def by_shard(self, index: Index) -> dict[str, list[str]]:
        """Shard → what an index says that it has."""
        result: dict[str, list[str]] = {}
        wrong: dict[str, None] = {}
        for key, value in index.weights.items():
            for shard in cast("list[Any]", value) if index.grouped and isinstance(value, list) else [value]:
                if isinstance(shard, str):
                    result.setdefault(shard, []).append(key.strip("/") if index.grouped else key)
                else:
                    wrong[reprlib.repr(shard)] = None
        for shard in wrong:
            self.problem(str(mismatch(index.path, "a shard's file name", shard)), index.path)
        return result

    def add_shard(self, index: Index, path: Location, shard: Checkpoint, expected: Sequence[str]) -> None:
        """Adds the tensors of a shard that an index says it has, and other names of these that it leaves out."""
        expected = [*expected, *(name for name in shard.aliases if name not in index.weights)]
        held: Any = grouped_by(shard, lambda name: name.rpartition("/")[0]) if index.grouped else shard.keys()
        found = [key for key in expected if key in held]
        wrong = [([key for key in expected if key not in held], "is missing", "says it has")]
        if len(found) < len(held):
            listed_here, known = set(expected), index.weights.keys()
            known = {key.strip("/") for key in known} if index.grouped else known
            others = [key for key in held if key not in listed_here]
            wrong.append(([key for key in others if key in known], "has", "puts in other shards"))
            wrong.append(([key for key in others if key not in known], "has", "does not mention and nothing will load"))
        for keys, verb, what in wrong:
            if keys:
                message = f"{shard.path}: {verb} {index.some(keys)}, which {index.name} {what}; download both again"
                self.problem(message, path, harmless=verb == "has")
        self.parts.append((shard, [name for key in found for name in held[key]] if index.grouped else found))


def loose_files(folder: Location) -> list[Location]:
    """The safetensors files of a folder without an index; not Mistral's own copy next to that of Hugging Face."""
    files = matching(folder, "*.safetensors")
    return [file for file in files if not file.name.startswith("consolidated")] or files


def open_loose(folder: Location, paths: Iterable[Location]) -> Checkpoint:
    """Opens safetensors files of a folder that no index describes."""
    found = Contents(folder)
    found.add_loose(list(paths), SafetensorsFile)
    return found.checkpoint()


def _numbered(paths: Iterable[Location]) -> dict[tuple[str, str, str], dict[Location, int]]:
    """(beginning of their names, total in them, suffix) → files of this numbering, with their numbers."""
    parts: dict[tuple[str, str, str], dict[Location, int]] = {}
    for path in paths:
        if match := _PART.fullmatch(path.name):
            parts.setdefault((match[1], match[3], match[4]), {})[path] = int(match[2])
    return parts


def _numbering_problems(folder: Location, paths: Iterable[Location]) -> Iterator[str]:
    """Why files without an index are not all of one checkpoint's shards by their names."""
    parts, complete = _numbered(paths), True
    for (stem, total, suffix), own in parts.items():
        numbers, most = set(own.values()), int(total)
        if count := most - sum(1 <= number <= most for number in numbers):
            complete = False
            missing = islice((number for number in range(1, most + 1) if number not in numbers), LISTED)
            names = [f"{stem}-{number:0{len(total)}}-of-{total}.{suffix}" for number in missing]
            found = f"{most - count}; missing {listed(names, count=count)}"
            yield f"{folder}: expected {most} shards as their names say, found {found}. Download them too."
    if len(parts) > 1 and complete:
        names = ", ".join(f"{stem}-*-of-{total}.{suffix}" for stem, total, suffix in parts)
        fix = "remove the others, or add the index file that says which count"
        yield str(mismatch(folder, "the shards of one save", f"those of {len(parts)}, {names}", fix))


def _save_problems(folder: Location, shards: Mapping[Location, Checkpoint]) -> Iterator[str]:
    """Why numbered shards are not of one save."""
    for paths in _numbered(shards).values():
        saves: dict[str | None, list[str]] = {}
        for path in paths:
            if (metadata := shards[path].metadata) is not None:
                saves.setdefault(metadata.get(SAVE_KEY), []).append(path.name)
        if len(saves) > 1:
            found = f"a mixture of {len(saves)}: {'; '.join(map(listed, saves.values()))}"
            yield str(mismatch(folder, "shards of one save", found, "copy all shards of one of them again"))


def some(names: Sequence[str], noun: str = "tensor") -> str:
    """The first few of some names, and how many they are."""
    first = [repr(short(name)) for name in names[:LISTED]]
    return f"{plural(len(names), noun)} ({listed(first, count=len(names))})"


def short(text: str) -> str:
    """The text, without the middle of one that is too long to show."""
    half = _MAX_NAME // 2
    return text if len(text) <= _MAX_NAME else f"{text[:half]}…{text[-half:]}"

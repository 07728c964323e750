"""The header of a safetensors file: read, checked, and kept as one array a property rather than objects a tensor.

A header may describe more than a million tensors. One that is written as all known writers write it is taken apart by
one regular expression and checked as arrays. Whatever that does not take, or finds wrong, goes through the JSON parser
and is checked tensor by tensor, which is exact in everything and finds the words for what is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel.checkpoints._untrusted import MAX_DIMENSIONS, counts, read_json_object, reading

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

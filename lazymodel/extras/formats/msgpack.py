"""Flax' msgpack (`flax.serialization.to_bytes`, `flax_model.msgpack`, `checkpoint_N`), read without unpacking tensors.

A file is one map of maps (https://github.com/msgpack/msgpack/blob/master/spec.md, all lengths big-endian). An array is
an extension of type 1, NumPy's scalars are of type 3: inside is a list of the shape, the dtype's name and the bytes, in
C order. Arrays above 1 GiB are a map `{__msgpack_chunked_array__, shape, chunks}`, whose chunks are flat (flax 0.12).
Names are the keys joined by `/`, as in Hugging Face's indexes of such files. Numbers are arrays without axes; text and
None are left out. Only the parts between arrays are read.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._tensors.byte_reader import ByteReader, reading
from lazymodel._tensors.convert import ML_NUMBERS
from lazymodel._tensors.lazy import ConcatenatedTensor, LazyTensor
from lazymodel._tensors.tensor_source import ArrayTensor, FileTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._untrusted import MAX_DIMENSIONS, MAX_NBYTES, check_pointer, counts, truncated

_ARRAY, _SCALAR = 1, 3  # types of extensions
_CHUNKED = "__msgpack_chunked_array__"
_NATIVE = [np.dtype(letter) for letter in "?bhiqBHIQefdFD"]
_DTYPES = {dtype.name: dtype for dtype in (*_NATIVE, *(np.dtype(each) for each in ML_NUMBERS))}
_MAX_DEPTH = 64
_MAX_TEXT = 1 << 16  # bytes of a key
_NUMBERS = {0xCA + place: f">{letter}" for place, letter in enumerate("fdBHIQbhiq")}  # first byte → struct's format
# First byte → bytes of the length that follows, for text, bytes, extensions, lists and maps.
_TEXTS, _BYTES, _EXTENSIONS = {0xD9: 1, 0xDA: 2, 0xDB: 4}, {0xC4: 1, 0xC5: 2, 0xC6: 4}, {0xC7: 1, 0xC8: 2, 0xC9: 4}
_LISTS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}


class _Stored(NamedTuple):
    """An array: where its bytes begin, or its chunks; a number as itself."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int = 0
    chunks: tuple[_Stored, ...] = ()
    value: Any = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MsgpackFile(Checkpoint):
    """A file of Flax' msgpack: path of an array → `LazyTensor`.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer, no map, or an array's bytes are not those of
            its shape.
    """

    format = "msgpack"

    def __init__(self, path: Location) -> None:
        check_pointer(path)
        self.source = path.reader()
        with reading(self.source.path), self.source.open_file() as file:
            self._stored = dict(_Reader(self.source, file).top())
        super().__init__(path, self._stored, [self.source])

    def _tensor(self, name: str) -> LazyTensor:
        return self._lazy(name, self._stored[name])

    def _lazy(self, name: str, found: _Stored) -> LazyTensor:
        if found.chunks:
            joined = ConcatenatedTensor([self._lazy(name, chunk) for chunk in found.chunks], 0)
            return LazyTensor(joined).reshape(found.shape)
        if found.value is not None:
            return LazyTensor(ArrayTensor(np.array(found.value, found.dtype), name))
        return LazyTensor(FileTensor(name, self.source, found.begin, found.shape, found.dtype))

    def describe(self, name: str) -> TensorHeader:
        found = self._stored[name]
        return TensorHeader(found.dtype, found.shape, found.nbytes, self.path, None, found.begin or None)


class _Reader:
    """Reads a file from the front on, and passes over the bytes of arrays."""

    def __init__(self, source: ByteReader, file: BinaryIO) -> None:
        self.path, self.size, self._file, self.at = source.path, source.size, file, 0

    def fail(self, expected: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: expected {expected} at byte {self.at}, found {found}; it is corrupt")

    def take(self, count: int) -> bytes:
        if self.at + count > self.size:
            raise truncated(self.path, f"{self.at + count} bytes", self.size)
        self._file.seek(self.at)
        data = self._file.read(count)
        if len(data) != count:
            raise truncated(self.path, f"{self.at + count} bytes", self.at + len(data))
        self.at += count
        return data

    def integer(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def passed(self, count: int) -> int:
        """Passes over bytes; returns where they begin."""
        if self.at + count > self.size:
            raise truncated(self.path, f"{self.at + count} bytes", self.size)
        self.at += count
        return self.at - count

    def top(self) -> Iterator[tuple[str, _Stored]]:
        first = self.take(1)[0]
        if (count := self._count(first, 0x80, _MAPS)) is None:
            self.fail("a map", f"the byte {first:#x}")
        yield from self._map(count, "", 0)
        if self.at != self.size:
            self.fail("the end of the file", f"{self.size - self.at} more bytes")

    def _count(self, first: int, fixed: int, sizes: dict[int, int]) -> int | None:
        """The number of elements, where the first byte is of such a container; `fixed` begins those of a byte alone."""
        width = 0x1F if fixed == 0xA0 else 0xF
        return first & width if first & ~width == fixed else self.integer(sizes[first]) if first in sizes else None

    def _map(self, count: int, prefix: str, depth: int) -> Iterator[tuple[str, _Stored]]:
        if depth > _MAX_DEPTH:
            self.fail(f"at most {_MAX_DEPTH} maps in each other", "more")
        seen, found = set[str](), dict[str, _Stored]()
        for _ in range(count):
            key = self._text()
            if key in seen:
                self.fail("each key once", reprlib.repr(key))
            seen.add(key)
            for path, stored in self._value(f"{prefix}/{key}" if prefix else key, depth + 1):
                if path in found:
                    self.fail("each path once", reprlib.repr(path))
                found[path] = stored
        if _CHUNKED in seen:
            yield prefix, self._joined(prefix, found)
        else:
            yield from found.items()

    def _joined(self, name: str, found: dict[str, _Stored]) -> _Stored:
        """The array of a map of chunks."""
        shape, chunks = (
            [found[path] for n in range(len(found)) if (path := f"{name}/{part}/{n}") in found]
            for part in ("shape", "chunks")
        )
        extents, dtypes = counts([each.value for each in shape]), {each.dtype for each in chunks}
        flat = all(len(each.shape) == 1 for each in chunks) and len(dtypes) == 1
        if extents is None or not flat or sum(math.prod(each.shape) for each in chunks) != math.prod(extents):
            self.fail(f"chunks of {name!r} of shape {extents}", reprlib.repr([each.shape for each in chunks]))
        return _Stored(dtypes.pop(), extents, chunks=tuple(chunks))

    def _text(self) -> str:
        first = self.take(1)[0]
        count = self._count(first, 0xA0, _TEXTS)
        if count is None or count > _MAX_TEXT:
            self.fail("text as a key", f"the byte {first:#x}" if count is None else f"{count} bytes of it")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            self.fail("a key in UTF-8", "other bytes")

    def _value(self, name: str, depth: int) -> Iterator[tuple[str, _Stored]]:
        first = self.take(1)[0]
        if first < 0x80 or first >= 0xE0:
            yield name, _Stored(_DTYPES["int64"], (), value=first if first < 0x80 else first - 0x100)
        elif first in _NUMBERS:
            (value,) = struct.unpack(_NUMBERS[first], self.take(struct.calcsize(_NUMBERS[first])))
            yield name, _Stored(np.array(value).dtype, (), value=value)
        elif first in (0xC2, 0xC3):
            yield name, _Stored(_DTYPES["bool"], (), value=first == 0xC3)
        elif first == 0xC0:  # None
            return
        elif (count := self._count(first, 0x80, _MAPS)) is not None:
            yield from self._map(count, name, depth)
        elif (count := self._count(first, 0x90, _LISTS)) is not None:
            if depth > _MAX_DEPTH:
                self.fail(f"at most {_MAX_DEPTH} lists in each other", "more")
            for index in range(count):
                yield from self._value(f"{name}/{index}", depth + 1)
        elif (count := self._count(first, 0xA0, _TEXTS | _BYTES)) is not None:
            self.passed(count)
        elif first in _EXTENSIONS or 0xD4 <= first <= 0xD8:
            count = self.integer(_EXTENSIONS[first]) if first in _EXTENSIONS else 1 << (first - 0xD4)
            kind, end = self.take(1)[0], self.at + count
            if kind in (_ARRAY, _SCALAR):
                yield name, self._array(name)
            else:  # a complex number of Python's
                self.passed(count)
            if self.at != end:
                self.fail(f"{name!r} to end at byte {end}", "that it does not")
        else:
            self.fail(f"a value of {name!r}", f"the byte {first:#x}")

    def _array(self, name: str) -> _Stored:
        """What is inside an extension: shape, dtype, bytes."""
        if self.take(1) != b"\x93" or (ndim := self._count(self.take(1)[0], 0x90, _LISTS)) is None:
            self.fail(f"shape, dtype and bytes of {name!r}", "something else")
        if ndim > MAX_DIMENSIONS:
            self.fail(f"at most {MAX_DIMENSIONS} axes of {name!r}", str(ndim))
        shape = counts([extent for _ in range(ndim) for _, (*_, extent) in self._value(name, _MAX_DEPTH)])
        dtype = _DTYPES.get(text := self._text())
        if shape is None or dtype is None:
            self.fail(f"an array {name!r} of numbers", f"{text} of shape {shape}")
        first = self.take(1)[0]
        count = self.integer(_BYTES[first]) if first in _BYTES else -1
        if count != math.prod(shape) * dtype.itemsize or max(count, *shape, 0) >= MAX_NBYTES:
            self.fail(f"the bytes of {name!r}, {dtype.name}{list(shape)}", f"{count} bytes")
        return _Stored(dtype, shape, self.passed(count))

"""NumPy's own files: `.npy`, one array, and `.npz`, a zip archive of them, as `np.save` and `np.savez` write them;
and folders of `.npy` files.

Arrays are read in place, at their offset in the file; members that `np.savez_compressed` deflated are decompressed on
the way, in small pieces. Nothing is ever unpickled, and a header is compared with the bytes that are there before it
is believed. Formats: `numpy.lib.format`; APPNOTE.TXT 6.3.10 (zip) sections 4.3.7 and 4.4; RFC 1951 (deflate).
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import threading
import warnings
import zipfile
import zlib
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location, RemotePath, fetch_heads
from lazymodel._remote.reader import source_of
from lazymodel._tensors.boxes import Geometry
from lazymodel._tensors.buffers import Steps
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import ArrayTensor, FileTensor
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._untrusted import (
    MAX_DIMENSIONS,
    Member,
    Window,
    check_pointer,
    corrupt,
    counts,
    reading,
    shard_path,
    zip_directory,
    zip_member,
)

_MAX_HEADER = 12 + 10_000  # bytes: magic and length, then as much header as NumPy itself reads from untrusted files

_PIECE = 1 << 20  # decompressed bytes that are held at once
_STATE = 48 << 10  # bytes of a stream's state and buffered input, and a little more
_STREAMS = 8  # that are kept where reading stopped: as many as threads read one member
_PIECES = 1 << 12  # of a stored member, whose checksums are kept until what is before them was read
_POLYNOMIAL = 0xEDB88320  # CRC-32's, its highest power in the lowest bit


class NumpyCheckpoint(Checkpoint):
    """A `.npz` archive: member name without `.npy` → tensor. A `.npy` file has one tensor, named as the file is; of a
    folder of such files, by the path in it.

    A deflated stream can only be read from its start, so that a box is found by decompressing what is before it.
    Streams are kept where reading stopped: reading an array in order, or in several shards of whole rows, decompresses
    it about once; shards of columns decompress it once each. Once an array was read up to its end, in order, its
    checksum has been compared with the archive's. So is that of a stored one on a disk, once this process has read all
    of it.
    """

    format = "numpy"

    def __init__(self, path: Location, sources: Sequence[ByteReader], tensors: dict[str, LazyTensor]) -> None:
        super().__init__(path, tensors, sources)
        self._tensors = tensors


def open_npy(path: Location) -> NumpyCheckpoint:
    """Opens a `.npy` file: one tensor, with the file's name without its suffix (`embedding.npy` → `embedding`)."""
    return _open_files(path, {path.name.removesuffix(".npy"): path})


def open_npy_folder(folder: Location, names: Sequence[str]) -> NumpyCheckpoint:
    """Opens the `.npy` files of a folder, which `npy_names` lists: `layers/0/kernel.npy` → `layers/0/kernel`."""
    # As shards that an index in the folder names: links that lead out of it raise.
    files = {name: shard_path(folder / "index", f"{name}.npy") for name in names}
    fetch_heads(files.values())
    return _open_files(folder, files)


def npy_names(folder: Location) -> list[str]:
    """Paths of the `.npy` files in a folder and its folders, without the suffix; none that begins with a dot."""
    if isinstance(folder, RemotePath):
        found = folder.files_below() if folder.store.lists else []
    else:
        found = list[str]()
        for inner, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [os.path.relpath(os.path.join(inner, name), folder).replace(os.sep, "/") for name in names]
    hidden = [name for name in found if name.startswith(".") or "/." in name]
    return sorted(name[:-4] for name in set(found).difference(hidden) if name.endswith(".npy"))


def _open_files(path: Location, files: dict[str, Location]) -> NumpyCheckpoint:
    sources: list[ByteReader] = []
    tensors: dict[str, LazyTensor] = {}
    for name, file in files.items():
        check_pointer(file)
        source = source_of(file)
        with source.open_file() as stream:
            head = stream.read(_MAX_HEADER)
        tensors[name] = _array(name, str(file), head, source, 0, source.size)
        sources.append(source)
    return NumpyCheckpoint(path, sources, tensors)


def open_npz(path: Location) -> NumpyCheckpoint:
    """Opens a `.npz` archive. Members that are not arrays, which `np.load` gives as bytes, are left out."""
    source = source_of(path)
    tensors: dict[str, LazyTensor] = {}
    end = 0
    archive = zip_directory(source, path, ".npz")
    for info in sorted(archive.infolist(), key=lambda each: each.header_offset):
        member = zip_member(path, info)
        if member.header < end:
            raise CheckpointError(f"{path}: member {member.name!r} overlaps another at byte {end}; it is corrupt")
        end = member.start + member.stored
        with corrupt(f"{path}: member {member.name!r} is corrupt"), member.path.open("rb") as file:
            file.seek(member.start)
            # Deflating can also make longer, a little.
            head = file.read(min(member.stored, 2 * _MAX_HEADER)) or b""
            if member.deflated:
                head = zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, _MAX_HEADER)
        if not head.startswith(np.lib.format.MAGIC_PREFIX):
            if member.name.endswith(".npy"):
                raise CheckpointError(
                    f"{path}: expected an array in member {member.name!r}, found {head[:6]!r} as its first bytes; it "
                    "is corrupt. Download or copy it again."
                )
            continue
        name = member.name.removesuffix(".npy")
        if name in tensors:
            raise CheckpointError(f"{path}: expected each array once, found two named {name!r}; it is corrupt")
        values: ByteReader = source
        if member.deflated:
            values = _DeflatedReader(source, member, info)
        elif not source.remote:
            values = _StoredReader(source, member)
        tensors[name] = _array(name, f"{path}: array {name!r}", head, values, member.start, member.size)
    return NumpyCheckpoint(path, [source], tensors)


def _array(name: str, what: str, head: bytes, source: ByteReader, start: int, size: int) -> LazyTensor:
    """A tensor from the first bytes of a `.npy` file of `size` bytes that begins at `start` of a source."""
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        # Version 3 is for field names outside latin-1: a record, which raises below for the others.
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"it has version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that Python 2 wrote, which are read all the same
            shape, fortran, dtype = cast("tuple[Any, bool, np.dtype[Any]]", read(stream))
    # Evaluating a hostile header can fail in as many ways as evaluating Python.
    except Exception as error:
        raise CheckpointError(f"{what}: expected the header of an array of numbers, found another ({error})") from error
    if dtype.hasobject:
        raise CheckpointError(
            f"{what}: expected numbers, found pickled Python objects, which can run any code when they are read; "
            "do not trust it, or save the numbers in it as arrays of their own"
        )
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        raise CheckpointError(
            f"{what}: expected numbers, found {dtype.itemsize}-byte values of an unknown type ({dtype.str}). NumPy "
            "writes types that are not its own, such as bfloat16 or float8, without their name. Save such arrays as "
            "safetensors, or as integers (array.view('uint16')) that you view as what they are after loading."
        )
    if dtype.kind not in "biufc":
        raise CheckpointError(f"{what}: expected numbers, found {dtype}; records, text and dates cannot be weights")
    if len(shape) > MAX_DIMENSIONS or counts(shape) is None:  # the header reader accepts any ints, True among them
        raise CheckpointError(f"{what}: expected a shape of non-negative ints, found {str(shape)[:200]}")
    nbytes = math.prod(shape) * dtype.itemsize
    begin = stream.tell()
    if nbytes != size - begin:
        raise CheckpointError(
            f"{what}: expected {nbytes} bytes for {dtype}{list(shape)}, found {size - begin}; it is truncated or "
            "corrupt. Download or copy it again."
        )
    if not nbytes:
        return LazyTensor(ArrayTensor(np.empty(shape, dtype.newbyteorder("=")), name))
    if isinstance(source, _StoredReader):
        source.begin(head[:begin])
    kind = (
        _DeflatedTensor if isinstance(source, _DeflatedReader) else FileTensor if source.remote or start else _NpyTensor
    )
    leaf = kind(name, source, start + begin, tuple(reversed(shape)) if fortran else shape, dtype)
    return LazyTensor(leaf).T if fortran else LazyTensor(leaf)


class _MemberReader(ByteReader):
    """The bytes of a member, at the addresses that they have, or would have were they stored, from its start on."""

    def __init__(self, file: ByteReader, member: Member) -> None:
        super().__init__(str(member.path))
        self._file, self._member = file, member
        self._guard = threading.Lock()  # of what a subclass keeps for later reads
        self.forget()

    def forget(self) -> None:
        """Gives up what is kept."""
        raise NotImplementedError

    @property
    def origin(self) -> ByteReader:
        return self._file

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def _corrupt(self, found: str) -> CheckpointError:
        self.check_unchanged()
        return CheckpointError(
            f"{self.path}: expected {self._member.size} bytes of member {self._member.name!r}, found {found}; it is "
            "truncated or corrupt. Download or copy it again."
        )

    def _check(self, crc: int) -> None:
        if crc != self._member.crc:
            raise self._corrupt(f"bytes whose checksum is {crc:#x}, not {self._member.crc:#x}")


class _StoredReader(_MemberReader):
    """A member that is stored as it is. Once all of it was read, in any order, its checksum is compared."""

    _header = b""  # what was read of it when it was opened

    def begin(self, header: bytes) -> None:
        """Notes the bytes with which it begins, which nobody reads again."""
        self._header = header
        self.forget()

    def forget(self) -> None:
        self._pieces: dict[int, tuple[int, int]] = {}  # first byte of what was read → end, checksum
        self._position = self._member.start + len(self._header)  # as far as nothing is missing
        self._crc = zlib.crc32(self._header)  # up to there

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        self._file.read_into(offset, *outs)
        end, crc = offset, 0
        for out in outs:
            crc = zlib.crc32(cast(Any, out.reshape(-1).view(np.uint8)), crc)
            end += out.nbytes
        with self._guard:
            if len(self._pieces) >= _PIECES:
                self._pieces.clear()
            if end > max(offset, self._pieces.get(offset, (0, 0))[0]):
                self._pieces[offset] = end, crc
            if offset == self._member.start + len(self._header):  # from the beginning again
                self._position, self._crc = offset, zlib.crc32(self._header)
            while self._position in self._pieces:
                end, crc = self._pieces[self._position]
                self._crc = _joined_crc(self._crc, crc, end - self._position)
                self._position = end
            if self._position < self._member.start + self._member.size:
                return
            crc = self._crc
            self.forget()
        self._check(crc)


def _joined_crc(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two pieces of data one after the other, of which the second has so many bytes."""
    return _product(_shift(nbytes), first) ^ second


@functools.lru_cache
def _shift(nbytes: int) -> int:
    """x ** (8 * nbytes) modulo CRC-32's polynomial, as zlib's `crc32_combine` computes it."""
    result, power, exponent = 1 << 31, 1 << 30, 8 * nbytes  # 1 and x: the lowest bit is the highest power
    while exponent:
        result = _product(result, power) if exponent & 1 else result
        power, exponent = _product(power, power), exponent >> 1
    return result


def _product(a: int, b: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        result ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


class _DeflatedReader(_MemberReader):
    """The decompressed bytes of a member. `zipfile` checks how many they are and their checksum, at the end of them.

    Each stream reads the file by itself: `ZipFile.open` of one archive, in several threads at once, misplaces members.
    """

    def __init__(self, file: ByteReader, member: Member, info: zipfile.ZipInfo) -> None:
        super().__init__(file, member)
        self._info = info

    def _open(self) -> zipfile.ZipExtFile:
        stored = Window(self._file, self._member.start, self._member.stored)
        return zipfile.ZipExtFile(cast(Any, stored), "r", self._info)

    def forget(self) -> None:
        """Drops the streams that reads continue; the next read begins at the start."""
        with self._guard:
            self._streams: list[Any] = []  # where reads stopped, the newest last; each is used by one thread at a time

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        position = offset - self._member.start
        with self._guard:
            before = [stream for stream in self._streams if stream.tell() <= position]
            if stream := max(before, key=lambda each: each.tell(), default=None):
                self._streams.remove(stream)
        try:
            with reading(self.path):
                stream = stream or self._open()
                while stream.tell() < position:
                    self._next(stream, position - stream.tell())
                for out in outs:
                    target = memoryview(cast(Any, out.reshape(-1).view(np.uint8)))
                    done = 0
                    while done < len(target):
                        piece = self._next(stream, len(target) - done)
                        target[done : done + len(piece)] = piece
                        done += len(piece)
                    self._file.count(done)
        except (zlib.error, zipfile.BadZipFile, EOFError) as error:
            raise self._corrupt(f"others ({error})") from error
        if stream.tell() < self._member.size:
            with self._guard:
                self._streams = [*self._streams[1 - _STREAMS :], stream]

    def _next(self, stream: Any, limit: int) -> bytes:
        if not (piece := stream.read(min(limit, _PIECE))):
            raise self._corrupt(f"only {stream.tell()}")
        return piece


class _NpyTensor(FileTensor):
    """An array that is a file: open only while it is read, as there may be more of them than may be open."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock, self._readers = threading.Lock(), 0

    @contextlib.contextmanager
    def _reading(self) -> Generator[None]:
        with self._lock:
            self._readers += 1
        try:
            with super()._reading():
                yield
        finally:
            with self._lock:
                self._readers -= 1
                if not self._readers:
                    self.reader.close()

    def copy_mapped(self, boxes: Sequence[tuple[Geometry, np.ndarray]], steps: Steps) -> bool:
        with self._reading():
            return super().copy_mapped(boxes, steps)


class _DeflatedTensor(FileTensor):
    """An array in a deflated member."""

    min_scratch_nbytes = 2 * _PIECE + _STREAMS * _STATE

    def release(self) -> None:
        cast(_DeflatedReader, self.reader).forget()

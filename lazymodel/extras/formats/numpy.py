"""NumPy's own files: `.npy`, `.npz` (a zip archive of them), and folders of `.npy` files.

Arrays are read in place, at their offset in the file; members that `np.savez_compressed` deflated are decompressed on
the way, in small pieces. Nothing is ever unpickled, and a header is compared with the bytes that are there before it
is believed. Formats: `numpy.lib.format`; APPNOTE.TXT 6.3.10 (zip) sections 4.3.7 and 4.4; RFC 1951 (deflate).
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import threading
import warnings
import zipfile
import zlib
from collections.abc import Generator, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location, fetch_heads
from lazymodel._tensors.byte_reader import ByteReader, reading
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import ArrayTensor, FileTensor
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._open import EQUINOX, SAVE_EQUINOX
from lazymodel.checkpoints._untrusted import (
    HOSTILE,
    MAX_DIMENSIONS,
    TRUNCATED,
    check_pointer,
    corrupt,
    counts,
    mismatch,
    shard_path,
)
from lazymodel.extras.formats.archive import Window, member_start, zip_directory

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


def _open_files(path: Location, files: dict[str, Location]) -> NumpyCheckpoint:
    sources: list[ByteReader] = []
    tensors: dict[str, LazyTensor] = {}
    for name, file in files.items():
        check_pointer(file)
        source = file.reader()
        with source.open_file() as stream:
            head = stream.read(_MAX_HEADER)
        tensors[name] = _array(name, str(file), head, source, 0, source.size)
        sources.append(source)
    return NumpyCheckpoint(path, sources, tensors)


def open_npz(path: Location) -> NumpyCheckpoint:
    """Opens a `.npz` archive. Members that are not arrays, which `np.load` gives as bytes, are left out."""
    source = path.reader()
    tensors: dict[str, LazyTensor] = {}
    end = 0
    for info in sorted(zip_directory(source, path, ".npz"), key=lambda each: each.header_offset):
        start, member = member_start(path, info), info.filename
        if info.header_offset < end:
            raise CheckpointError(f"{path}: member {member!r} overlaps another at byte {end}; it is corrupt")
        end = start + info.compress_size
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        with corrupt(f"{path}: member {member!r} is corrupt"), path.open("rb") as file:
            file.seek(start)
            # Deflating can also make longer, a little.
            head = file.read(min(info.compress_size, 2 * _MAX_HEADER)) or b""
            if deflated:
                head = zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, _MAX_HEADER)
        if not head.startswith(np.lib.format.MAGIC_PREFIX):
            if member.endswith(".npy"):
                raise mismatch(path, f"an array in member {member!r}", f"{head[:6]!r} as its first bytes", TRUNCATED)
            continue
        name = member.removesuffix(".npy").replace("//", "/")  # Haiku's `scope//name`
        if name in tensors:
            raise mismatch(path, "each array once", f"two named {name!r}")
        values: ByteReader = source
        if deflated:
            values = _DeflatedReader(source, start, info)
        elif not source.remote:
            values = _StoredReader(source, start, info)
        tensors[name] = _array(name, f"{path}: array {name!r}", head, values, start, info.file_size)
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
        raise mismatch(what, "the header of an array of numbers", f"another ({error})") from error
    if dtype.hasobject:
        found = "pickled Python objects, which can run any code when they are read"
        raise mismatch(what, "numbers", found, f"{HOSTILE}, or save the numbers in it as arrays of their own")
    if dtype == np.dtype("V2"):  # all that NumPy writes of bfloat16, the only type of two bytes that it does not know
        dtype = np.dtype(ml_dtypes.bfloat16)
    elif dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        found = f"{dtype.itemsize}-byte values of an unknown type ({dtype.str}), as NumPy writes float8 or int4"
        fix = "save them as safetensors, or as integers (array.view('uint8')) that you view as what they are"
        raise mismatch(what, "numbers", found, fix)
    elif dtype.kind not in "biufc":
        raise mismatch(what, "numbers", str(dtype), "records, text and dates cannot be weights")
    if len(shape) > MAX_DIMENSIONS or counts(shape) is None:  # the header reader accepts any ints, True among them
        raise mismatch(what, "a shape of non-negative ints", str(shape)[:200])
    nbytes, begin = math.prod(shape) * dtype.itemsize, stream.tell()
    more = not isinstance(source, _MemberReader) and nbytes < size - begin
    if more and source.peek(start + begin + nbytes, 6) == np.lib.format.MAGIC_PREFIX:
        raise mismatch(what, "one array", f"others after it, like {EQUINOX}", SAVE_EQUINOX)
    if nbytes != size - begin:
        raise mismatch(what, f"{nbytes} bytes for {dtype}{list(shape)}", size - begin, TRUNCATED)
    if not nbytes:
        return LazyTensor(ArrayTensor(np.empty(shape, dtype.newbyteorder("=")), name))
    kind = FileTensor if source.remote or start else _NpyTensor
    if isinstance(source, _MemberReader):
        kind = source.tensor
        source.begin(head[:begin])
    leaf = kind(name, source, start + begin, tuple(reversed(shape)) if fortran else shape, dtype)
    return LazyTensor(leaf).T if fortran else LazyTensor(leaf)


class _DeflatedTensor(FileTensor):
    """An array in a deflated member."""

    min_scratch_nbytes = 2 * _PIECE + _STREAMS * _STATE

    def release(self) -> None:
        cast(_MemberReader, self.reader).forget()


class _MemberReader(ByteReader):
    """The bytes of a member, at the addresses that they have, or would have were they stored, from its start on."""

    tensor: type[FileTensor] = FileTensor

    def __init__(self, file: ByteReader, start: int, info: zipfile.ZipInfo) -> None:
        super().__init__(file.path)
        self._file, self._start, self._info = file, start, info
        self._header = b""  # with which it begins, and which nobody reads again
        self._guard = threading.Lock()  # of what a subclass keeps for later reads

    def begin(self, header: bytes) -> None:
        """Notes the header of its array, which was read already."""
        self._header = header
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
        expected = f"{self._info.file_size} bytes of member {self._info.filename!r}"
        return mismatch(self.path, expected, found, TRUNCATED)


class _StoredReader(_MemberReader):
    """A member that is stored as it is. Once all of it was read, in any order, its checksum is compared."""

    def forget(self) -> None:
        self._pieces: dict[int, tuple[int, int]] = {}  # first byte of what was read → end, checksum
        self._position = self._start + len(self._header)  # as far as nothing is missing
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
            if offset == self._start + len(self._header):  # from the beginning again
                self._position, self._crc = offset, zlib.crc32(self._header)
            while self._position in self._pieces:
                end, crc = self._pieces[self._position]
                self._crc = _product(_shift(end - self._position), self._crc) ^ crc  # of both
                self._position = end
            if self._position < self._start + self._info.file_size:
                return
            crc = self._crc
            self.forget()
        if crc != self._info.CRC:
            raise self._corrupt(f"bytes whose checksum is {crc:#x}, not {self._info.CRC:#x}")


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

    tensor = _DeflatedTensor

    def forget(self) -> None:
        """Drops the streams that reads continue; the next read begins at the start."""
        with self._guard:
            self._streams: list[Any] = []  # where reads stopped, the newest last; each is used by one thread at a time

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        position = offset - self._start
        with self._guard:
            before = [stream for stream in self._streams if stream.tell() <= position]
            if stream := max(before, key=lambda each: each.tell(), default=None):
                self._streams.remove(stream)
        try:
            with reading(self.path):
                if stream is None:
                    stored = Window(self._file, self._start, self._info.compress_size)
                    stream = zipfile.ZipExtFile(cast(Any, stored), "r", self._info)
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
        if stream.tell() < self._info.file_size:
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
    def reading(self) -> Generator[None]:
        with self._lock:
            self._readers += 1
        try:
            with super().reading():
                yield
        finally:
            with self._lock:
                self._readers -= 1
                if not self._readers:
                    self.reader.close()

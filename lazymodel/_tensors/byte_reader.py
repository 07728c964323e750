"""The bytes of one file, read into our own memory: `ByteReader`, and `FileReader` for files of the operating system.

Chooses between one read, one read per row, a copy from memory that already has the file's bytes, and a read of the
whole span, and converts while copying. For files it handles descriptors, short reads, files that change while they are
read, and maps of files that nobody can write to meanwhile. Knows nothing of tensors' names, formats or views: the
caller passes a geometry.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import io
import mmap
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Geometry, slabs, strided
from lazymodel._tensors.buffers import STAGING, Workspace
from lazymodel._tensors.convert import DType, Steps, assign

# Bytes between two rows from which reading them separately is faster than reading through the gap: a call costs about
# as much as copying 8 KiB from the page cache, and twice that keeps sequential read-ahead active on disks.
ROW_GAP = 16 << 10
# Bytes of a row from which one call per row is as fast as copying from a map, which is faster for shorter rows: with a
# quarter of every row needed, a map gave 3.2 to 4.8 GB/s for rows of 0.5 to 16 KiB, calls 0.6 to 3.5, whole spans 1.5.
ROW_CALL = 64 << 10
SAMPLE = 4 << 10  # bytes of a block of a sampled file: one page
SAMPLES = 128  # blocks; content of which a twentieth differs is taken for the same once in seven hundred files
MAP_BLOCK = 16 << 20  # bytes copied from a map at a time, during which no one can write to the file


class ByteCounter:
    """A thread-safe count of bytes, of those whose time was measured, and of the seconds that these took threads."""

    def __init__(self) -> None:
        self._lock, self.count, self.timed, self.seconds = threading.Lock(), 0, 0, 0.0

    def so_far(self) -> tuple[int, int, float]:
        """All three."""
        with self._lock:
            return self.count, self.timed, self.seconds

    def add(self, count: int, seconds: float | None = None) -> None:
        with self._lock:
            self.count += count
            if seconds is not None:
                self.timed += count
                self.seconds += seconds


BYTES_READ = ByteCounter()
"""Tensor bytes read from files by this process, headers not included."""
BYTES_FILLED = ByteCounter()
"""Bytes of shards that streams filled, reading included."""


class RequestCounter:
    """Requests that this process made to stores, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = self.retries = self.nbytes = 0

    def so_far(self) -> tuple[int, int, int]:
        """Bytes that arrived, requests, and how many requests were retries."""
        with self._lock:
            return self.nbytes, self.requests, self.retries

    def add(self, *, requests: int = 0, retries: int = 0, nbytes: int = 0) -> None:
        """Adds to the counts; `nbytes` are those of bodies that arrived completely."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.nbytes += nbytes


REQUESTS = RequestCounter()


class Seekable(io.RawIOBase):
    """A file of `size` bytes with a position; a subclass reads or writes."""

    position = size = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + (0, self.position, self.size)[whence]
        if position < 0:
            raise OSError(errno.EINVAL, "negative seek position")
        self.position = position
        return position


@contextlib.contextmanager
def reading(path: object, verb: str = "read") -> Generator[None]:
    """Within the block, what the operating system refuses is a CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {verb} {path}: {error.strerror}") from error


VERIFIED: dict[Hashable, str] = {}
"""Hashes of the content of files that this process has compared with published ones, by `ByteReader.version`."""


def samples(size: int, count: int = SAMPLES) -> Iterator[int]:
    """Offsets of the blocks of a file of so many bytes that are sampled. A small file is sampled completely; else the
    first block, the last, and one at a random place in each of equal parts, so that no regular layout evades the
    sample. The same in every process.
    """
    if size <= count * SAMPLE:
        yield from range(0, size, SAMPLE)
        return
    somewhere, part = random.Random(size), (size - SAMPLE) / max(count - 2, 1)
    yield from (0, *(int((index + somewhere.random()) * part) for index in range(count - 2)), size - SAMPLE)


class ByteReader:
    """The bytes of one file, which any number of threads may read.

    A subclass defines `read_into` and `check_unchanged`; one that is a whole file also defines `open_file` and `peek`,
    which readers of headers use.
    """

    remote: bool = False  # True if its bytes come over a network, where each read has a noticeable latency
    base: int = 0  # byte of the file that offsets count from: where a member of an archive starts
    size: int  # bytes of the file
    scatters: bool = False  # True if `read_runs` can be used
    row_gap: int = ROW_GAP  # bytes between two rows from which a call for each is cheaper than reading through the gap
    row_call: int = ROW_CALL  # bytes of a row from which the cost of one call per row is negligible

    def __init__(self, path: str) -> None:
        self.path = path
        self._counter = ByteCounter()

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read through this reader so far."""
        return self._counter.count

    def count(self, nbytes: int, started: float | None = None) -> None:
        """Counts bytes that were read, here or by others, such as the HDF5 library.

        Nothing but reading them was done since `started`, a time of `time.perf_counter()`; None if more was done.
        """
        self._counter.add(nbytes)
        BYTES_READ.add(nbytes, None if started is None else time.perf_counter() - started)

    def open_file(self) -> BinaryIO:
        """Returns the whole file, opened for reading by a library."""
        raise NotImplementedError

    def peek(self, position: int, nbytes: int) -> bytes:
        """Returns bytes of the whole file, fewer at its end. They are not counted."""
        raise NotImplementedError

    def fetch_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Prefetches ranges of the whole file that headers will be read from, if that saves time."""

    @property
    def origin(self) -> ByteReader:
        """The reader from which these bytes are taken or computed."""
        return self

    @property
    def version(self) -> Hashable:
        """Identity of the content, unique within this process; None if unknown."""
        return None

    def fingerprint(self, count: int = SAMPLES) -> str:
        """Identity of the content, as text: its hash if it was verified; else its size, with the ETag of a server
        or the hash of `count` sampled blocks. Raises CheckpointError if it cannot be read.
        """
        if (verified := VERIFIED.get(self.version)) is not None:
            return verified
        digest = hashlib.blake2b(digest_size=8)
        with reading(self.path), self.open_file() as file:
            for start in samples(self.size, count):
                file.seek(start)
                digest.update(file.read(SAMPLE))
        self.check_unchanged()
        return f"{self.size:,} bytes, sampled content {digest.hexdigest()}"

    def given_up(self) -> bool:
        """Returns True if nothing waits for the bytes any more."""
        return False

    def check_unchanged(self) -> None:
        """Raises CheckpointError if the file has changed since it was opened."""
        raise NotImplementedError

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        """Fills C-contiguous arrays, one after the other, with the bytes from `offset` on, and counts them.

        Raises CheckpointError if the file ends too early or cannot be read.
        """
        raise NotImplementedError

    def read_runs(self, offset: int, runs: np.ndarray) -> None:
        """Fills runs of memory, one after the other, with the bytes from `offset` on, and counts them. Raises as
        `read_into` does.

        `runs` is a C-contiguous `int64[n, 2]`: address and length of each run, in bytes. The caller keeps that memory
        alive. The array itself is overwritten.
        """
        raise NotImplementedError

    def borrowed(self, offset: int, most: int, unit: int) -> AbstractContextManager[np.ndarray]:
        """Bytes (`uint8`) from `offset` on that are, or soon will be, in memory, until the end of the `with` block:
        whole units (`unit` bytes), at most `most` bytes, and counted. Empty if they have to be read.
        """
        return contextlib.nullcontext(np.empty(0, np.uint8))

    def mapped(self) -> AbstractContextManager[np.ndarray | None]:
        """The file's bytes as a read-only array until the end of the `with` block; None if it cannot be mapped."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Closes what is open; a later read opens it again."""

    def read_strided(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Fills `out`, of any strides, from a strided region of the file, and converts it. The region is normalized and
        has the shape of `out`.

        Contiguous bytes are read with as few calls as possible, directly into `out` if its layout is that of the file.
        Rows of at least `row_call` bytes are read one by one. Shorter rows are copied from a map of the file if there
        is one (`mapped`). If not, rows at least `row_gap` bytes apart are read one by one, and all others are read
        together with the gaps between them.
        """
        if out.size == 0:
            return
        itemsize, run = stored.itemsize, place.run(stored.itemsize)
        contiguous = out.size * itemsize == run
        if not out.ndim:
            place, out = Geometry(place.start, (1,), (itemsize,)), out.reshape(1)
        gaps = (stride - place.span(itemsize, axis + 1) for axis, stride in enumerate(place.strides))
        staging = min(STAGING, workspace.available)
        if contiguous and out.flags.c_contiguous and not steps and out.dtype == stored:
            self.read_into(place.start, out)
        elif (contiguous or run < self.row_call) and self.copy_mapped([(place, out)], stored, steps):
            pass
        elif out.size > 1 and (
            (not contiguous and (run >= self.row_call or any(gap >= self.row_gap for gap in gaps)))
            or place.strides[0] + place.span(itemsize, 1) > staging
        ):
            self._read_rows(place, stored, out, steps, workspace)
        else:
            self._read_spans(place, stored, out, steps, workspace)

    def copy_mapped(self, boxes: Sequence[tuple[Geometry, np.ndarray]], stored: DType, steps: Steps) -> bool:
        """Fills arrays from a map, each from a region as `read_strided` takes it. Returns False if there is no map."""
        limit = max(MAP_BLOCK // stored.itemsize, 1)
        chunks = [(place, out) for place, out in boxes if out.size <= limit]
        if len(chunks) < len(boxes):  # the Ellipsis keeps a result without dimensions an array
            chunks = [(place.box(box), out[(*box, ...)]) for place, out in boxes for box in slabs(out.shape, limit)]
        while chunks:
            copied = 0
            with self.mapped() as memory:
                while chunks and (not copied or copied + chunks[0][1].size <= limit):
                    own, part = chunks.pop(0)
                    if memory is None or own.start + own.span(stored.itemsize) > memory.nbytes:
                        return False  # the methods that read report what is missing
                    assign(part, strided(memory, own, stored), steps)
                    copied += part.size
            self.count(copied * stored.itemsize)
        return True

    def _read_rows(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Reads one index of the first axis at a time."""
        for index in range(len(out)):
            row = Geometry(place.start + index * place.strides[0], place.shape[1:], place.strides[1:])
            self.read_strided(row, stored, out[index, ...], steps, workspace)

    def _read_spans(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Reads as many rows at a time as the staging buffer holds, together with the gaps between them."""
        inner = place.span(stored.itemsize, 1)
        rows = min(max((min(STAGING, workspace.available) - inner) // place.strides[0] + 1, 1), len(out))
        nbytes = place.take(0, slice(0, rows)).span(stored.itemsize)
        with workspace.array((nbytes,), np.dtype(np.uint8)) as staging:
            for start in range(0, len(out), rows):
                own = place.take(0, slice(start, start + rows))
                span = staging[: own.span(stored.itemsize)]
                self.read_into(own.start, span)
                assign(out[start : start + rows], strided(span, Geometry(0, own.shape, own.strides), stored), steps)


READ = 32 << 20  # bytes of one system call: far beyond where calls cost anything, and a stop is noticed in 10 ms
VECTOR = 1024  # buffers of one system call: the maximum of Linux and macOS (IOV_MAX)


# `preadv` of the C library: `os.preadv` needs an object for every buffer, which takes longer than reading it. `struct
# iovec` and `off_t` are those of 64-bit systems, the only ones that JAX supports.
_READ_VECTOR: Callable[[int, int, int, int], int] = ctypes.CDLL(None, use_errno=True).preadv
cast(Any, _READ_VECTOR).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
cast(Any, _READ_VECTOR).restype = ctypes.c_ssize_t
_PREADV = os.preadv


class FileReader(ByteReader):
    """A file's bytes from `base` on (where a member of an uncompressed archive starts), read with `preadv`.

    The descriptor is opened at first use and reused. Size, modification time and inode are recorded at construction. A
    file that differs later raises an error, so values of two checkpoints are never mixed.
    Raises:
        CheckpointError: The file does not exist or is not a regular file.
    """

    scatters = True

    def __init__(self, path: str | os.PathLike[str], *, base: int = 0) -> None:
        super().__init__(os.fspath(path))
        self.base = base
        with reading(self.path, "open"):
            status = os.stat(self.path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"cannot open {self.path}: expected a regular file, found another kind")
        self._stat, self.size = _identity(status), status.st_size
        self._lock = threading.Lock()
        self._fd, self._leases = -1, 0
        self._map: np.ndarray | None = None
        # File systems without a block device, such as network file systems, have the major device number 0.
        leases = hasattr(fcntl, "F_SETLEASE") and hasattr(fcntl, "F_SETSIG")
        self._mappable = leases and os.major(status.st_dev) > 0

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd, self._map = -1, None

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        # Bound early: when the interpreter ends, the module's own names may be gone before this object is.
        if getattr(self, "_fd", -1) >= 0:
            _close(self._fd)
            self._fd = -1

    @property
    def version(self) -> Hashable:
        return self._stat

    def open_file(self) -> BinaryIO:
        with reading(self.path, "open"):
            return open(self.path, "rb")

    def peek(self, position: int, nbytes: int) -> bytes:
        return os.pread(self.descriptor(), nbytes, position)

    def check_unchanged(self) -> None:
        try:
            now = _identity(os.stat(self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path} disappeared while it was being read: {error.strerror}") from error
        if now != self._stat:
            raise CheckpointError(
                f"{self.path} changed while it was being read: expected {self._stat[0]} bytes as when it was opened, "
                f"found {now[0]} bytes, modified since. Open the checkpoint again once nothing writes to it."
            )

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        starts = ((out.ctypes.data, out.nbytes, start) for out in outs for start in range(0, out.nbytes, READ))
        if runs := [(address + start, min(READ, nbytes - start)) for address, nbytes, start in starts]:
            self.read_runs(offset, np.array(runs, np.int64))

    def read_runs(self, offset: int, runs: np.ndarray) -> None:
        started, ends = time.perf_counter(), np.cumsum(runs[:, 1])
        fd, total, first, done = self.descriptor(), int(ends[-1]), 0, 0
        while done < total:
            position = self.base + offset + done
            whole = not done and total <= READ  # NumPy's search lets other threads run Python
            batch = len(runs) if whole else int(np.searchsorted(ends, done + READ, side="right")) - first
            count = _READ_VECTOR(fd, runs[first:].ctypes.data, max(min(batch, VECTOR), 1), position)
            if count < 0:
                if (code := ctypes.get_errno()) == errno.EINTR:
                    continue
                raise CheckpointError(f"cannot read {self.path} at byte {position}: {os.strerror(code)}")
            if count == 0:
                raise CheckpointError(
                    f"{self.path} is truncated: expected {total} bytes from byte {self.base + offset}, found {done}. "
                    "Download or copy it again."
                )
            if (done := done + count) < total:
                first = int(np.searchsorted(ends, done, side="right"))
                if filled := int(runs[first, 1]) - (int(ends[first]) - done):
                    runs[first] += (filled, -filled)
        self.count(total, started)

    @contextlib.contextmanager
    def mapped(self) -> Generator[np.ndarray | None]:
        """The file's bytes from `base` on; None if it must not be mapped.

        If a mapped file is truncated, the kernel kills the process that reads the map. So a file is mapped only while
        we hold a read lease on it (fcntl(2), F_SETLEASE): whoever wants to write to the file then waits until we are
        done. There is no lease, and no map, on network and other remote file systems, for files that others have open
        for writing, for files of other users, and outside Linux.
        """
        array = self._lease()
        try:
            yield array
        finally:
            del array
            with self._lock:
                self._leases -= 1
                if not self._leases and self._mappable:
                    with contextlib.suppress(OSError):
                        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _lease(self) -> np.ndarray | None:
        fd = self.descriptor()
        with self._lock:
            self._leases += 1
            if not self._mappable:
                return None
            try:
                if self._leases == 1:
                    # A break of the lease is announced by a signal; by default, this one is ignored.
                    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
                    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                elif fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                    return None  # another process waits for the lease
                # From here on the file cannot shrink.
                if os.fstat(fd).st_size != self.size:
                    return None
                if self._map is None:
                    self._map = np.frombuffer(mmap.mmap(fd, self.size, prot=mmap.PROT_READ), np.uint8)
            except OSError:
                self._mappable = False
                return None
            return self._map[self.base :]

    def _read_rows(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        whole, rows = 0, Geometry(0, place.shape[1:], place.strides[1:])
        row = out[0].nbytes
        if row == rows.run(stored.itemsize) <= READ and out.flags.c_contiguous and not steps and out.dtype == stored:
            # A shorter way, as the calls around it take longer than reading a short row. Errors are raised below.
            target = memoryview(cast(Any, out.reshape(-1).view(np.uint8)))
            started, fd, position = time.perf_counter(), self.descriptor(), self.base + place.start
            for start in range(0, len(target), row):
                if _PREADV(fd, (target[start : start + row],), position) != row:
                    break
                position += place.strides[0]
                whole += 1
            self.count(whole * row, started)
        super()._read_rows(place.take(0, slice(whole, None)), stored, out[whole:], steps, workspace)

    def descriptor(self) -> int:
        with contextlib.nullcontext() if self._fd >= 0 else self._lock:
            if self._fd < 0:
                with reading(self.path, "open"):
                    fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                if _identity(os.fstat(fd)) != self._stat:
                    os.close(fd)
                    self.check_unchanged()
                    raise CheckpointError(f"{self.path} was replaced since it was opened; open it again")
                self._fd = fd
        return self._fd


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino

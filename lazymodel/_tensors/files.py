"""Files that the system opens: `FileSource`.

Responsible for file descriptors, short reads, files that change underneath, and maps of files that nobody can write to
meanwhile. What is read, and in which pieces, is decided in `_tensors/source`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import stat
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, BinaryIO, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Geometry
from lazymodel._tensors.buffers import DType, Steps, Workspace
from lazymodel._tensors.source import Source

READ = 32 << 20  # bytes of one system call: far beyond where calls cost anything, and a stop is noticed in 10 ms
VECTOR = 1024  # buffers of one system call: what Linux and macOS take (IOV_MAX)


def _vectored_read() -> Callable[[int, int, int, int], int] | None:
    """`preadv` of the C library: `os.preadv` wants an object for every buffer, which takes longer than reading it."""
    if ctypes.sizeof(ctypes.c_void_p) != 8 or ctypes.sizeof(ctypes.c_long) != 8:
        return None  # `struct iovec` and `off_t` are written here as 64-bit systems have them
    try:
        function = ctypes.CDLL(None, use_errno=True).preadv
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    function.restype = ctypes.c_ssize_t
    return function


_READ_VECTOR = _vectored_read()


def _read_first(fd: int, buffers: Sequence[memoryview], position: int) -> int:
    """What `os.preadv` may do as well, for systems without it: fills the first of some buffers."""
    data = os.pread(fd, len(buffers[0]), position)
    buffers[0][: len(data)] = data
    return len(data)


_PREADV: Callable[[int, Sequence[memoryview], int], int] = getattr(os, "preadv", _read_first)


class FileSource(Source):
    """A file's bytes from `base` on (where a member of an uncompressed archive starts), read with `preadv`.

    The descriptor is opened on first use and reused. Size, modification time and inode are noted at construction;
    a file that differs later is an error, not a mixture of two checkpoints.

    Raises:
        CheckpointError: The file does not exist or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], *, base: int = 0) -> None:
        super().__init__(os.fspath(path))
        self.base = base
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot open {self.path}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"cannot open {self.path}: expected a regular file, found another kind")
        self._stat, self.size = _identity(status), status.st_size
        self._lock = threading.Lock()
        self._fd, self._leases = -1, 0
        self._map: np.ndarray | None = None
        # Device numbers of file systems without a block device below them, network ones among them, have major 0.
        leases = hasattr(fcntl, "F_SETLEASE") and hasattr(fcntl, "F_SETSIG")
        self._mappable = leases and os.major(status.st_dev) > 0
        self.scatters = _READ_VECTOR is not None

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
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise CheckpointError(f"cannot open {self.path}: {error.strerror}") from error

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
        targets = [memoryview(cast(Any, out.reshape(-1).view(np.uint8))) for out in outs if out.size]
        total = sum(map(len, targets))
        fd = self.descriptor() if targets else -1
        done = first = 0
        while first < len(targets):
            batch, room = targets[first : first + VECTOR], READ
            for index, target in enumerate(batch):
                if len(target) >= room:
                    batch[index:] = [target[:room]]
                    break
                room -= len(target)
            position = self.base + offset + done
            try:
                count = _PREADV(fd, batch, position)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path} at byte {position}: {error.strerror}") from error
            if count == 0:
                raise self._truncated(offset, total, done)
            done += count
            while first < len(targets) and count >= len(targets[first]):
                count -= len(targets[first])
                first += 1
            if count:
                targets[first] = targets[first][count:]
        self.count(total)

    def read_runs(self, offset: int, runs: np.ndarray) -> None:
        assert _READ_VECTOR is not None
        ends = np.cumsum(runs[:, 1])
        fd, total, first, done = self.descriptor(), int(ends[-1]), 0, 0
        while done < total:
            position = self.base + offset + done
            count = _READ_VECTOR(fd, runs[first:].ctypes.data, min(VECTOR, len(runs) - first), position)
            if count < 0:
                if (code := ctypes.get_errno()) == errno.EINTR:
                    continue
                raise CheckpointError(f"cannot read {self.path} at byte {position}: {os.strerror(code)}")
            if count == 0:
                raise self._truncated(offset, total, done)
            done += count
            first = int(np.searchsorted(ends, done, side="right"))
            if done < total and (filled := int(runs[first, 1]) - (int(ends[first]) - done)):
                runs[first] += (filled, -filled)
        self.count(total)

    def _truncated(self, offset: int, expected: int, found: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated: expected {expected} bytes from byte {self.base + offset}, found {found}. "
            "Download or copy it again."
        )

    @contextlib.contextmanager
    def mapped(self) -> Generator[np.ndarray | None]:
        """The file's bytes from `base` on, or None where it must not be mapped.

        A file that is truncated under a map kills the process that touches it. So a file is mapped only while we hold
        a read lease on it (fcntl(2), F_SETLEASE): the kernel makes whoever wants to write to it wait until we are
        done. There is no lease, and no map, on network and other remote file systems, on what others have open for
        writing, on files of other users, and outside Linux.
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
                    # A break of the lease is announced by a signal; this one is ignored unless somebody asks for it.
                    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
                    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                elif fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                    return None  # somebody waits for it
                # Only now can it no longer shrink.
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
            # The same without the ceremony, which takes longer than reading a short row. What goes wrong goes below.
            target = memoryview(cast(Any, out.reshape(-1).view(np.uint8)))
            fd, position = self.descriptor(), self.base + place.start
            for start in range(0, len(target), row):
                if _PREADV(fd, (target[start : start + row],), position) != row:
                    break
                position += place.strides[0]
                whole += 1
            self.count(whole * row)
        super()._read_rows(place.take(0, slice(whole, None)), stored, out[whole:], steps, workspace)

    def descriptor(self) -> int:
        with contextlib.nullcontext() if self._fd >= 0 else self._lock:
            if self._fd < 0:
                try:
                    fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                except OSError as error:
                    raise CheckpointError(f"cannot open {self.path}: {error.strerror}") from error
                if _identity(os.fstat(fd)) != self._stat:
                    os.close(fd)
                    self.check_unchanged()
                    raise CheckpointError(f"{self.path} was replaced since it was opened; open it again")
                self._fd = fd
        return self._fd


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino

"""Reading bytes of one file into memory that we own: `FileSource`, and the arrays it fills.

Responsible for file descriptors, short reads, files that change underneath, the choice between one read, one read
per row, a copy out of a map and a read of the whole span, and for casting on the way. Knows nothing of tensors' names,
formats or views: it is given an offset, a shape and strides.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import math
import mmap
import os
import signal
import stat
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError

MAPPED = 1 << 20  # bytes from which memory is mapped rather than taken from malloc
ALIGNMENT = 64  # bytes; JAX's CPU backend takes a host buffer over without a copy when it is aligned so
HUGE_PAGE = 2 << 20  # bytes; of x86-64 and most arm64 kernels, and elsewhere merely an alignment
ARENA = 128 << 20  # bytes of a map that many buffers share; its last huge page is half empty on average: under 1 %
STAGING = 2 << 20  # bytes; ceiling of one staging buffer: amortizes a call, and what was read is still in the cache
READ = 32 << 20  # bytes of one system call: far beyond where calls cost anything, and a stop is noticed in 10 ms
VECTOR = 1024  # buffers of one system call: what Linux and macOS take (IOV_MAX)
# Bytes of a run from which spreading runs over shards straight from the page cache beats a staged copy. Where there is
# a map, they are copied out of it; else the kernel scatters them: for runs of 128, 512 and 1408 bytes two threads got
# 4.1, 5.2 and 5.8 GB/s, against 4.1, 4.5 and 4.6 with staging and 6.7 without scattering; out of a map a fifth more.
RUN = 256
RUNS = 1 << 15  # runs prepared at a time: half as many took 4 % longer, an eighth 25 %, and twice as many as long
RUN_NBYTES = 64  # bytes of temporaries that preparing one takes
# Bytes between two rows from which reading them one by one wins over reading through the gap: a call costs about as
# much as copying 8 KiB out of the page cache, and twice that keeps sequential read-ahead going on disks.
ROW_GAP = 16 << 10
# Bytes of a row from which one call a row is as fast as copying out of a map, which is faster below: with a quarter
# of every row needed, a map gave 3.2 to 4.8 GB/s for rows of 0.5 to 16 KiB, calls 0.6 to 3.5, whole spans 1.5.
ROW_CALL = 64 << 10
MAP_BLOCK = 16 << 20  # bytes copied out of a map at a time, during which no one can write to the file
CHAIN = 1 << 16  # elements that a chain of several conversions handles at a time
TILE = 128  # rows of a tile when transposing: their cache lines stay in L1 (5 × faster than one plain copy)

_PREADV = getattr(os, "preadv", None)


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
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class ByteCounter:
    """A thread-safe count of bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, count: int) -> None:
        """Adds `count` bytes."""
        with self._lock:
            self._count += count

    @property
    def count(self) -> int:
        """Bytes counted so far."""
        return self._count


BYTES_READ = ByteCounter()
"""Tensor bytes read from files by this process, headers not included."""


@dataclasses.dataclass(frozen=True)
class Convert:
    """One deferred elementwise conversion: a cast to `dtype`, a reinterpretation of the same bits, or arithmetic.

    Attributes:
        dtype: What it results in.
        bitcast: Whether it is a reinterpretation.
        function: The arithmetic: takes an array and returns one of the same shape and of `dtype`.
    """

    dtype: np.dtype[Any]
    bitcast: bool = False
    function: Callable[[np.ndarray], np.ndarray] | None = None

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The values, converted."""
        if self.function is not None:
            return self.function(values)
        return values.view(self.dtype) if self.bitcast else values.astype(self.dtype)


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialized C-contiguous array whose first byte is 64-byte aligned, in memory nobody else holds.

    Large ones are anonymous maps that ask for transparent huge pages: page faults are what filling fresh memory costs,
    and MAP_POPULATE, which faults small pages in, was half as fast. Not `np.empty`: below 32 MiB its memory comes from
    malloc's arenas, which many such buffers, allocated and freed by several threads, make slow and leave fragmented.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= MAPPED:
        return _map(nbytes)[:nbytes].view(dtype).reshape(shape)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class Arena:
    """Hands out aligned buffers that are meant to live equally long, many to a map, so that huge pages serve them all.

    A buffer of some hundred KiB cannot have a huge page of its own, and the faults of its small pages can take longer
    than reading it. The pages of a buffer go back to the system when the last array that uses it dies, the map when
    its last buffer does. Not thread-safe.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._used = self._end = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An uninitialized C-contiguous array, its first byte 64-byte aligned."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= ARENA // 4 or not nbytes:
            return empty_aligned(shape, dtype)
        if self._map is None or self._used + nbytes > self._end:
            self._map, self._used = _anonymous(ARENA)
            self._end = self._used + ARENA
        start = self._used
        self._used += nbytes + -nbytes % ALIGNMENT
        # An array of its own, which every view of it keeps alive: when it dies, nobody uses the memory.
        buffer = np.frombuffer(memoryview(self._map)[start : start + nbytes], np.uint8)
        weakref.finalize(buffer, _give_back, self._map, start, start + nbytes).atexit = False
        return buffer.view(dtype).reshape(shape)


def _give_back(memory: mmap.mmap, start: int, stop: int) -> None:
    """Gives the whole pages of a range of an anonymous map back to the system."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class Workspace:
    """A thread's scratch memory, taken and given back like a stack: staging, casts, whatever is not the result.

    Allocated when first used and used again, so that temporaries cost no page faults. Not thread-safe.

    Args:
        limit: Bytes of all temporaries together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    @property
    def room(self) -> int:
        """Bytes that may still be taken."""
        return max(self.limit - self._used, 0)

    @contextlib.contextmanager
    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Generator[np.ndarray]:
        """An uninitialized C-contiguous array until the end of the `with` block.

        One that exceeds `room` is allocated for itself; only what cannot be made smaller may ask for it.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        padded = nbytes + -nbytes % ALIGNMENT
        if padded > self.room:
            yield empty_aligned(shape, dtype)
            return
        if self._memory.nbytes < self._used + padded:
            if self._used:  # what is in use stays where it is
                yield empty_aligned(shape, dtype)
                return
            # Twice as much each time: most threads never need more than one staging buffer.
            size = min(max(2 * self._memory.nbytes, padded, min(2 * STAGING, self.limit)), self.limit)
            self._memory = np.empty(0, np.uint8)
            self._memory = empty_aligned((size,), np.dtype(np.uint8))
        start = self._used
        self._used += padded
        try:
            yield self._memory[start : start + nbytes].view(dtype).reshape(shape)
        finally:
            self._used = start


def _map(nbytes: int) -> np.ndarray:
    """Fresh memory of at least this many bytes that starts with a huge page where the kernel has them."""
    memory, start = _anonymous(nbytes)
    return np.frombuffer(memory, np.uint8)[start : start + nbytes]


def _anonymous(nbytes: int) -> tuple[mmap.mmap, int]:
    """An anonymous private map, and where in it a huge page begins that this many bytes follow."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE


def strided(array: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A view of a C-contiguous array's memory: `offset` and `strides` in bytes, which must stay inside."""
    return np.ndarray(shape, array.dtype, cast(Any, array), offset, strides)


def slabs(shape: tuple[int, ...], limit: int, multiple: int = 1) -> Iterator[tuple[slice, ...]]:
    """Splits a box into boxes that are contiguous in C order, each of at most `limit` elements, in order.

    The extent along the first axis is a multiple of `multiple` (but for the last one), even where this exceeds the
    limit.
    """
    if not shape or math.prod(shape) <= limit:
        yield tuple(slice(0, extent) for extent in shape)
        return
    inner = math.prod(shape[1:])
    if inner > limit and multiple == 1:
        for index in range(shape[0]):
            for rest in slabs(shape[1:], limit):
                yield (slice(index, index + 1), *rest)
        return
    step = max(limit // max(inner, 1) // multiple, 1) * multiple
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *(slice(0, extent) for extent in shape[1:]))


def assign(out: np.ndarray, values: np.ndarray, steps: tuple[Convert, ...] = ()) -> None:
    """`out[...] = values`, converted step by step; bit-equal to the same chain of `ndarray.astype` and `.view`."""
    with np.errstate(all="ignore"):  # astype would warn where a value overflows; that is the caller's wish here
        computes = any(step.function is not None for step in steps)
        if (len(steps) > 1 or computes) and values.size > CHAIN:  # its temporaries stay small
            for box in slabs(values.shape, CHAIN):
                assign(out[(*box, ...)], values[(*box, ...)], steps)
            return
        for step in steps[:-1]:
            values = step(values)
        if steps and (steps[-1].bitcast or computes):  # copying casts by itself
            values = steps[-1](values)
        if out.dtype == values.dtype and out.dtype.kind not in "biufc":
            # ml_dtypes' own copy loops are slow where strided; the same bits as integers copy at full speed.
            bits = np.dtype(f"u{out.dtype.itemsize}")
            out, values = out.view(bits), values.view(bits)
        if out.ndim < 2 or out.size <= TILE * TILE:
            np.copyto(out, values, casting="unsafe")
            return
        fastest = min(
            (axis for axis in range(out.ndim) if out.shape[axis] > 1), key=lambda axis: abs(out.strides[axis])
        )
        extent = out.shape[fastest]
        if fastest == out.ndim - 1 or extent <= TILE:
            np.copyto(out, values, casting="unsafe")
            return
        for start in range(0, extent, TILE):
            tile = (*(slice(None),) * fastest, slice(start, start + TILE))
            np.copyto(out[tile], values[tile], casting="unsafe")


def run_bytes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes of the longest contiguous run of a box whose axes are in file order (descending strides)."""
    run = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != run:
            break
        run *= extent
    return run


class FileSource:
    """One file's bytes from `base` on, read with `preadv` from any number of threads.

    The descriptor is opened on first use and reused. Size, modification time and inode are noted at construction;
    a file that differs later is an error, not a mixture of two checkpoints.

    Args:
        path: The file.
        base: Bytes to skip: where a member of an uncompressed archive starts.

    Attributes:
        path: The file's path as a string, for messages.
        size: Its size in bytes.
        plain: Whether the bytes are the file's own; a subclass that decodes them overrides `read_into` and says no.

    Raises:
        CheckpointError: The file does not exist or is not a regular file.
    """

    plain = True

    def __init__(self, path: str | os.PathLike[str], *, base: int = 0) -> None:
        self.path = os.fspath(path)
        self.base = base
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot open {self.path}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"cannot open {self.path}: expected a regular file, found another kind")
        self._stat, self._device = _identity(status), status.st_dev
        self.size = self._stat[0]
        self._fd = -1
        self._lock = threading.Lock()
        self._counter = ByteCounter()
        self._leases = 0
        self._map: np.ndarray | None = None
        # Device numbers of file systems without a block device below them, network ones among them, have major 0.
        leases = hasattr(fcntl, "F_SETLEASE") and hasattr(fcntl, "F_SETSIG")
        self._mappable = self.plain and leases and os.major(self._device) > 0

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read through this source so far."""
        return self._counter.count

    def count(self, nbytes: int) -> None:
        """Counts bytes that were read from this file by other means, such as the HDF5 library."""
        self._counter.add(nbytes)
        BYTES_READ.add(nbytes)

    def close(self) -> None:
        """Closes the descriptor; a later read opens it again."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd, self._map = -1, None

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        # Bound early: when the interpreter ends, the module's own names may be gone before this object is.
        if getattr(self, "_fd", -1) >= 0:
            _close(self._fd)
            self._fd = -1

    def check_unchanged(self) -> None:
        """Raises CheckpointError when the file's size, modification time or inode is no longer what it was."""
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
        """Fills C-contiguous arrays, one after the other, with the bytes from `offset` on.

        Raises:
            CheckpointError: The file ends before.
        """
        targets = [memoryview(cast(Any, out.reshape(-1).view(np.uint8))) for out in outs if out.size]
        total = sum(map(len, targets))
        fd = self._descriptor() if targets else -1
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
                if _PREADV is not None:
                    count = _PREADV(fd, batch, position)
                else:
                    data = os.pread(fd, len(batch[0]), position)
                    count = len(data)
                    batch[0][:count] = data
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

    @property
    def scatters(self) -> bool:
        """Whether `read_runs` can be used."""
        return self.plain and _READ_VECTOR is not None

    def read_runs(self, offset: int, runs: np.ndarray) -> None:
        """Fills runs of memory, one after the other, with the bytes from `offset` on.

        Args:
            offset: Byte of the file.
            runs: `int64[n, 2]`, C-contiguous: address and length of each, in bytes. The caller keeps that memory
                alive; the array itself is used up.

        Raises:
            CheckpointError: The file ends before.
        """
        assert _READ_VECTOR is not None
        ends = np.cumsum(runs[:, 1])
        fd, total, first, done = self._descriptor(), int(ends[-1]), 0, 0
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

    def read_strided(
        self,
        offset: int,
        strides: tuple[int, ...],
        stored: np.dtype[Any],
        out: np.ndarray,
        steps: tuple[Convert, ...],
        workspace: Workspace,
    ) -> None:
        """Fills `out` from a strided box of the file, converting on the way.

        What is contiguous is read with as few calls as there can be, straight into `out` where that lies as the file
        does. Rows of at least `ROW_CALL` bytes are read one by one. Shorter ones are copied out of a map of the file
        where there can be one (`mapped`); else rows at least `ROW_GAP` bytes apart are read one by one, and the rest
        is read gaps and all.

        Args:
            offset: Byte of the first element.
            strides: Positive strides in bytes, descending, one for each axis of `out`.
            stored: The file's dtype.
            out: An array of any strides.
            steps: How to get from `stored` to the dtype of `out`.
            workspace: Where temporaries come from.
        """
        if out.size == 0:
            return
        shape, run = out.shape, run_bytes(out.shape, strides, stored.itemsize)
        contiguous = out.size * stored.itemsize == run
        direct = not steps and out.dtype == stored
        if contiguous and direct and out.flags.c_contiguous:
            self.read_into(offset, out)
        elif (not contiguous and run >= ROW_CALL) or not self._copy_mapped(offset, strides, stored, out, steps):
            if contiguous:
                self._read_staged(offset, strides, stored, out, steps, workspace)
            elif (
                run >= ROW_CALL
                or strides[0] - _span(shape[1:], strides[1:], stored.itemsize) >= ROW_GAP
                or _has_gap(shape[1:], strides[1:], stored.itemsize)
                or strides[0] + _span(shape[1:], strides[1:], stored.itemsize) > min(STAGING, workspace.room)
            ):
                self._read_rows(offset, strides, stored, out, steps, workspace)
            else:
                self._read_spans(offset, strides, stored, out, steps, workspace)

    @contextlib.contextmanager
    def mapped(self) -> Generator[np.ndarray | None]:
        """The file's bytes from `base` on as a read-only array, or None where it must not be mapped.

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
        fd = self._descriptor()
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

    def _copy_mapped(
        self, offset: int, strides: tuple[int, ...], stored: np.dtype[Any], out: np.ndarray, steps: tuple[Convert, ...]
    ) -> bool:
        """Fills `out` out of a map; False where there is none."""
        for box in slabs(out.shape, max(MAP_BLOCK // stored.itemsize, 1)):
            part = out[(*box, ...)]  # the Ellipsis keeps what has no dimensions an array
            start = offset + sum(s.start * stride for s, stride in zip(box, strides, strict=True))
            with self.mapped() as memory:
                if memory is None or start + _span(part.shape, strides, stored.itemsize) > memory.nbytes:
                    return False  # whatever is missing is reported by those that read
                values = np.ndarray(part.shape, stored, cast(Any, memory), start, strides)
                assign(part, values, steps)
                del values
            self.count(part.size * stored.itemsize)
        return True

    def _read_staged(
        self,
        offset: int,
        strides: tuple[int, ...],
        stored: np.dtype[Any],
        out: np.ndarray,
        steps: tuple[Convert, ...],
        workspace: Workspace,
    ) -> None:
        """A contiguous range, piece by piece through a staging buffer."""
        size = min(out.size, max(min(STAGING, workspace.room) // stored.itemsize, 1))
        with workspace.array((size,), stored) as staging:
            for box in slabs(out.shape, size):
                piece = out[(*box, ...)]
                values = staging[: piece.size]
                self.read_into(offset + sum(s.start * stride for s, stride in zip(box, strides, strict=True)), values)
                assign(piece, values.reshape(piece.shape), steps)

    def _read_rows(
        self,
        offset: int,
        strides: tuple[int, ...],
        stored: np.dtype[Any],
        out: np.ndarray,
        steps: tuple[Convert, ...],
        workspace: Workspace,
    ) -> None:
        """Index by index of the first axis."""
        row = math.prod(out.shape[1:]) * stored.itemsize
        contiguous = row == run_bytes(out.shape[1:], strides[1:], stored.itemsize) <= READ
        direct = not steps and out.dtype == stored and out.flags.c_contiguous
        if contiguous and direct and self.plain and _PREADV is not None:
            # The same without the ceremony, which takes longer than reading a short row. What goes wrong goes below.
            target = memoryview(cast(Any, out.reshape(-1).view(np.uint8)))
            fd, position, whole = self._descriptor(), self.base + offset, 0
            for start in range(0, len(target), row):
                if _PREADV(fd, (target[start : start + row],), position) != row:
                    break
                position += strides[0]
                whole += 1
            self.count(whole * row)
            offset, out = offset + whole * strides[0], out[whole:]
        for index in range(out.shape[0]):
            self.read_strided(offset + index * strides[0], strides[1:], stored, out[index, ...], steps, workspace)

    def _read_spans(
        self,
        offset: int,
        strides: tuple[int, ...],
        stored: np.dtype[Any],
        out: np.ndarray,
        steps: tuple[Convert, ...],
        workspace: Workspace,
    ) -> None:
        """As many rows at a time as staging holds, and what lies between them."""
        inner = _span(out.shape[1:], strides[1:], stored.itemsize)
        rows = min((min(STAGING, workspace.room) - inner) // strides[0] + 1, out.shape[0])
        with workspace.array((_span((rows, *out.shape[1:]), strides, stored.itemsize),), np.dtype(np.uint8)) as staging:
            for start in range(0, out.shape[0], rows):
                piece = out[start : start + rows]
                span = staging[: _span(piece.shape, strides, stored.itemsize)]
                self.read_into(offset + start * strides[0], span)
                assign(piece, np.ndarray(piece.shape, stored, cast(Any, span), 0, strides), steps)

    def _descriptor(self) -> int:
        if self._fd < 0:
            with self._lock:
                if self._fd < 0:
                    try:
                        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                    except OSError as error:
                        raise CheckpointError(f"cannot open {self.path}: {error.strerror}") from error
                    if _identity(os.fstat(fd)) != self._stat:
                        os.close(fd)
                        self.check_unchanged()
                        raise CheckpointError(
                            f"{self.path} was replaced since it was opened; open the checkpoint again"
                        )
                    self._fd = fd
        return self._fd


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first to the last element of a box, both included."""
    return sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + itemsize


def _has_gap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether rows of any inner axis lie at least `ROW_GAP` bytes apart."""
    return any(
        strides[axis] - _span(shape[axis + 1 :], strides[axis + 1 :], itemsize) >= ROW_GAP for axis in range(len(shape))
    )

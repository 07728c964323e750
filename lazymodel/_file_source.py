"""Reading bytes of one file into memory that we own: `FileSource`, and the arrays it fills.

Responsible for file descriptors, short reads, files that change underneath, the choice between one read, one read
per row and a read of the whole span, and for casting on the way. Knows nothing of tensors' names, formats or views:
it is given an offset, a shape and strides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError

MAPPED = 1 << 20  # bytes from which memory is mapped rather than taken from malloc
ALIGNMENT = 64  # bytes; JAX's CPU backend takes a host buffer over without a copy when it is aligned so
HUGE_PAGE = 2 << 20  # bytes; of x86-64 and most arm64 kernels, and elsewhere merely an alignment
ARENA = 128 << 20  # bytes of a map that many buffers share; its last huge page is half empty on average: under 1 %
STAGING = 4 << 20  # bytes; ceiling of one staging buffer: large enough to amortize a call, small enough for caches
READ = 32 << 20  # bytes of one system call: far beyond where calls cost anything, and a stop is noticed in 10 ms
# Bytes between two rows from which reading them one by one wins over reading through the gap: a call costs about as
# much as copying 8 KiB out of the page cache, and twice that keeps sequential read-ahead going on disks.
ROW_GAP = 16 << 10
TILE = 128  # rows of a tile when transposing: their cache lines stay in L1 (5 × faster than one plain copy)

_PREADV = getattr(os, "preadv", None)
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
    """One deferred elementwise conversion: a cast to `dtype`, or with `bitcast` a reinterpretation of the same bits."""

    dtype: np.dtype[Any]
    bitcast: bool = False


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
    than reading it. The price: a map goes back to the system when the last of its buffers has died. Not thread-safe.
    """

    def __init__(self) -> None:
        self._map = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An uninitialized C-contiguous array, its first byte 64-byte aligned."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= ARENA // 4:
            return empty_aligned(shape, dtype)
        if self._used + nbytes > self._map.nbytes:
            self._map, self._used = _map(ARENA), 0
        buffer = self._map[self._used : self._used + nbytes]
        self._used += nbytes + -nbytes % ALIGNMENT
        return buffer.view(dtype).reshape(shape)


def _map(nbytes: int) -> np.ndarray:
    """An anonymous private map of at least this many bytes that starts with a huge page where the kernel has them."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE
    return array[start : start + nbytes]


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
        for step in steps[:-1]:
            values = values.view(step.dtype) if step.bitcast else values.astype(step.dtype)
        if steps and steps[-1].bitcast:
            values = values.view(steps[-1].dtype)
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

    Raises:
        CheckpointError: The file does not exist or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], *, base: int = 0) -> None:
        self.path = os.fspath(path)
        self.base = base
        try:
            self._stat = _identity(os.stat(self.path))
        except OSError as error:
            raise CheckpointError(f"cannot open {self.path}: {error.strerror}") from error
        self.size = self._stat[0]
        self._fd = -1
        self._lock = threading.Lock()
        self._counter = ByteCounter()

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
                self._fd = -1

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

    def read_into(self, offset: int, out: np.ndarray) -> None:
        """Fills a C-contiguous array with the bytes from `offset` on.

        Raises:
            CheckpointError: The file ends before.
        """
        if out.size == 0:
            return
        fd = self._descriptor()
        target = memoryview(cast(Any, out.reshape(-1).view(np.uint8)))
        done, total = 0, len(target)
        while done < total:
            position = self.base + offset + done
            chunk = target[done : done + READ]
            try:
                if _PREADV is not None:
                    count = _PREADV(fd, [chunk], position)
                else:
                    data = os.pread(fd, len(chunk), position)
                    count = len(data)
                    chunk[:count] = data
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path} at byte {position}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path} is truncated: expected {total} bytes from byte {self.base + offset}, found {done}. "
                    "Download or copy it again."
                )
            done += count
        self.count(total)

    def read_strided(
        self,
        offset: int,
        strides: tuple[int, ...],
        stored: np.dtype[Any],
        out: np.ndarray,
        steps: tuple[Convert, ...] = (),
    ) -> None:
        """Fills `out` from a strided box of the file, converting on the way.

        One rule for gaps: rows at least `ROW_GAP` bytes apart are read one by one; below, the whole span is read in
        pieces of at most `STAGING` bytes and the box is copied out of them. Where `out` itself lies as the file does,
        rows are read straight into it.

        Args:
            offset: Byte of the first element.
            strides: Positive strides in bytes, descending, one for each axis of `out`.
            stored: The file's dtype.
            out: An array of any strides.
            steps: How to get from `stored` to the dtype of `out`.
        """
        if out.size == 0:
            return
        direct = not steps and out.dtype == stored
        shape = out.shape
        if math.prod(shape) * stored.itemsize == run_bytes(shape, strides, stored.itemsize):
            if direct and out.flags.c_contiguous:
                self.read_into(offset, out)
                return
            staging = np.empty(min(out.size, max(STAGING // stored.itemsize, 1)), stored)
            for box in slabs(shape, staging.size):
                piece = out[(*box, ...)]  # the Ellipsis keeps what has no dimensions an array
                values = staging[: piece.size]
                self.read_into(offset + sum(s.start * stride for s, stride in zip(box, strides, strict=True)), values)
                assign(piece, values.reshape(piece.shape), steps)
            return
        inner_span = _span(shape[1:], strides[1:], stored.itemsize)
        gap = strides[0] - inner_span
        if gap >= ROW_GAP or strides[0] + inner_span > STAGING or _has_gap(shape[1:], strides[1:], stored.itemsize):
            for index in range(shape[0]):
                self.read_strided(offset + index * strides[0], strides[1:], stored, out[index, ...], steps)
            return
        rows = min((STAGING - inner_span) // strides[0] + 1, shape[0])
        staging = np.empty(_span((rows, *shape[1:]), strides, stored.itemsize), np.uint8)
        for start in range(0, shape[0], rows):
            piece = out[start : start + rows]
            span = staging[: _span(piece.shape, strides, stored.itemsize)]
            self.read_into(offset + start * strides[0], span)
            values = np.ndarray(piece.shape, stored, cast(Any, span), 0, strides)
            assign(piece, values, steps)

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


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first to the last element of a box, both included."""
    return sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + itemsize


def _has_gap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether rows of any inner axis lie at least `ROW_GAP` bytes apart."""
    return any(
        strides[axis] - _span(shape[axis + 1 :], strides[axis + 1 :], itemsize) >= ROW_GAP for axis in range(len(shape))
    )

"""Host memory for what is read: aligned buffers, scratch memory, how much of it there may be, and copies that convert.

Knows no file and no tensor. Whose a buffer becomes, and how many there are at a time, is the caller's matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lazymodel._tensors.boxes import grid, slabs, whole_box

DEFAULT_BUDGET = 4 << 30  # bytes; enough to keep any disk busy, whatever the model's size
MAPPED = 1 << 20  # bytes from which memory is mapped rather than taken from malloc
ALIGNMENT = 64  # bytes; JAX's CPU backend takes a host buffer over without a copy when it is aligned so
HUGE_PAGE = 2 << 20  # bytes; of x86-64 and most arm64 kernels, and elsewhere merely an alignment
ARENA = 128 << 20  # bytes of a map that many buffers share; its last huge page is half empty on average: under 1 %
STAGING = 2 << 20  # bytes; ceiling of one staging buffer: amortizes a call, and what was read is still in the cache
CHAIN = 1 << 16  # elements that a chain of several conversions handles at a time
TILE = 128  # rows of a tile when transposing: what is written together fills its cache lines
LINE = 8  # numbers side by side from which on tiles are worth their calls
TRANSPOSED = 256 << 10  # bytes of a tile when transposing: in a core's cache, and worth handing the interpreter over


@dataclasses.dataclass(frozen=True)
class Convert:
    """One deferred elementwise conversion: a cast to `dtype`, a reinterpretation of the same bits, or arithmetic."""

    dtype: np.dtype[Any]  # what it results in
    bitcast: bool = False  # whether it is a reinterpretation
    function: Callable[[np.ndarray], np.ndarray] | None = None  # the arithmetic, elementwise, to `dtype`

    def __call__(self, values: np.ndarray) -> np.ndarray:
        if self.function is not None:
            return self.function(values)
        return values.view(self.dtype) if self.bitcast else values.astype(self.dtype)


Steps: TypeAlias = "tuple[Convert, ...]"
DType: TypeAlias = "np.dtype[Any]"


def empty_aligned(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """An uninitialized C-contiguous array whose first byte is 64-byte aligned, in memory nobody else holds.

    Large ones are anonymous maps that ask for transparent huge pages: page faults are what filling fresh memory costs,
    and MAP_POPULATE, which faults small pages in, was half as fast. Not `np.empty`: below 32 MiB its memory comes from
    malloc's arenas, which many such buffers, allocated and freed by several threads, make slow and leave fragmented.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= MAPPED:
        memory, start = _anonymous(nbytes)
        raw = np.frombuffer(memory, np.uint8)
    else:
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

    def empty(self, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
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

    def several(self, shapes: Sequence[tuple[int, ...]], dtype: DType) -> list[np.ndarray]:
        """As `empty`, for the shards of one array: small ones are parts of one buffer, which takes a tenth of the time
        and is given back when the last of them dies.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        ends = list(itertools.accumulate(nbytes + -nbytes % ALIGNMENT for nbytes in sizes))
        if not ends or ends[-1] >= ARENA // 4:
            return [self.empty(shape, dtype) for shape in shapes]
        buffer = self.empty((ends[-1],), np.dtype(np.uint8))
        starts = [0, *ends]
        return [
            buffer[start : start + nbytes].view(dtype).reshape(shape)
            for start, nbytes, shape in zip(starts, sizes, shapes, strict=False)
        ]


def _give_back(memory: mmap.mmap, start: int, stop: int) -> None:
    """Gives the whole pages of a range of an anonymous map back to the system."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class Workspace:
    """A thread's scratch memory, taken and given back like a stack: staging, casts, whatever is not the result.

    Allocated when first used, up to `limit` bytes, and used again: temporaries cost no page faults. Not thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    @property
    def room(self) -> int:
        """Bytes that may still be taken."""
        return max(self.limit - self._used, 0)

    def reserve(self, nbytes: int) -> None:
        """Makes so many bytes ready, up to `limit`, if none is in use: arrays within arrays will find their place."""
        if not self._used and self._memory.nbytes < (size := min(nbytes, self.limit)):
            self._memory = np.empty(0, np.uint8)
            self._memory = empty_aligned((size,), np.dtype(np.uint8))

    @contextlib.contextmanager
    def array(self, shape: tuple[int, ...], dtype: DType) -> Generator[np.ndarray]:
        """An uninitialized C-contiguous array until the end of the `with` block.

        One that exceeds `room` is allocated for itself; only what cannot be made smaller may ask for it.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        padded = nbytes + -nbytes % ALIGNMENT
        grows = self._memory.nbytes < self._used + padded
        if padded > self.room or (grows and self._used):  # what is in use stays where it is
            yield empty_aligned(shape, dtype)
            return
        if grows:
            # Twice as much each time: most threads never need more than one staging buffer.
            self.reserve(max(2 * self._memory.nbytes, padded, 2 * STAGING))
        start = self._used
        self._used += padded
        try:
            yield self._memory[start : start + nbytes].view(dtype).reshape(shape)
        finally:
            self._used = start


def _anonymous(nbytes: int) -> tuple[mmap.mmap, int]:
    """An anonymous private map, and where in it a huge page begins that this many bytes follow."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE


def assign(out: np.ndarray, values: np.ndarray, steps: Steps = ()) -> None:
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
        if out.dtype == values.dtype:
            out, values = _bits(out), _bits(values)
        if out.size > TILE * TILE and out.shape == values.shape:
            across, along = _fastest(out), _fastest(values)
            if across != along and min(out.shape[across], out.shape[along]) >= LINE:
                _transpose(out, values, across, along)
                return
        np.copyto(out, values, casting="unsafe")


def _bits(array: np.ndarray) -> np.ndarray:
    """The array, or what copies as fast: ml_dtypes' own copy loops are slow where strided, integers' are not."""
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.itemsize}")


def _fastest(array: np.ndarray) -> int:
    """The axis along which neighbours are closest to each other."""
    axes = (axis for axis in range(array.ndim) if array.shape[axis] > 1)
    return min(axes, key=lambda axis: abs(array.strides[axis]))


def _transpose(out: np.ndarray, values: np.ndarray, across: int, along: int) -> None:
    """`out[...] = values`, of which the first lies densest along the axis `across`, the other along `along`.

    By way of tiles that a line of padding keeps from competing for the same few places in a cache, as rows do whose
    length is a power of two; casts, which are fast only where dense, are made on the way into them.
    """
    others = [axis for axis in range(out.ndim) if axis not in (across, along)]
    extents = [1] * out.ndim
    for axis, most in ((across, TILE), (along, out.size), *((axis, out.size) for axis in reversed(others))):
        extents[axis] = min(out.shape[axis], most, max(TRANSPOSED // (out.itemsize * math.prod(extents)), 1))
    order = [*others, across, along]
    padded = np.empty([extents[axis] + (axis == along) * ALIGNMENT // out.itemsize for axis in order], out.dtype)
    padded = padded.transpose(np.argsort(order))
    for box in grid(whole_box(out.shape), extents):
        tile = padded[tuple(slice(part.stop - part.start) for part in box)]
        np.copyto(tile, values[box], casting="unsafe")
        np.copyto(_bits(out[box]), _bits(tile))


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes of host memory that are available, to this process or at all, whichever is less; None if unknown."""
    available: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    groups = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")  # of containers: versions 2 and 1
    for folder, limit, used in zip(groups, ("max", "limit_in_bytes"), ("current", "usage_in_bytes"), strict=True):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            read = [int((folder / f"memory.{name}").read_text()) for name in (limit, used)]
            available.append(read[0] - read[1])
    return min(available, default=None)


def default_budget() -> int:
    """4 GiB, or an eighth of the memory that is available if that is less and known."""
    available = available_memory()
    return DEFAULT_BUDGET if available is None else max(min(available // 8, DEFAULT_BUDGET), 64 << 20)

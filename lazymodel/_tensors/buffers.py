"""Host memory for what is read: aligned buffers, scratch memory and its limits; and threads.

Knows no file and no tensor. The caller decides who owns a buffer and how many exist at a time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import mmap
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lazymodel._tensors.convert import DType

DEFAULT_BUDGET = 4 << 30  # bytes; enough to keep any disk busy, for models of any size
MAPPED = 1 << 20  # bytes from which memory is mapped rather than allocated by malloc
ALIGNMENT = 64  # bytes; JAX's CPU backend uses a host buffer without a copy if it is aligned to this
HUGE_PAGE = 2 << 20  # bytes; of x86-64 and most arm64 kernels; with other kernels it is only an alignment
ARENA = 128 << 20  # bytes of a map that many buffers share; its last huge page is half empty on average: under 1 %
STAGING = 2 << 20  # bytes; limit of one staging buffer: amortizes a call, and the data are still in the cache


def empty_aligned(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """An uninitialized C-contiguous array whose first byte is 64-byte aligned, in memory that nothing else uses.

    Large ones are anonymous maps with transparent huge pages: the cost of filling fresh memory is its page faults, and
    MAP_POPULATE, which faults small pages in, was half as fast. `np.empty` is not used: below 32 MiB its memory comes
    from malloc's arenas, which become slow and fragmented if several threads allocate and free many such buffers.
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
    """Allocates aligned buffers of a similar lifetime, many in one map, so that all of them use huge pages.

    A buffer of some hundred KiB cannot have a huge page of its own, and the faults of its small pages can take longer
    than reading it. The pages of a buffer are returned to the system when the last array that uses it dies, the map
    when its last buffer dies. Not thread-safe.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._used = self._end = 0

    def empty(self, nbytes: int) -> np.ndarray:
        """Returns so many uninitialized bytes; the first is 64-byte aligned."""
        if nbytes >= ARENA // 4 or not nbytes:
            return empty_aligned((nbytes,), np.dtype(np.uint8))
        if self._map is None or self._used + nbytes > self._end:
            self._map, self._used = _anonymous(ARENA)
            self._end = self._used + ARENA
        start = self._used
        self._used += nbytes + -nbytes % ALIGNMENT
        # An array of its own, which every view of it keeps alive: when it dies, nothing uses the memory.
        buffer = np.frombuffer(memoryview(self._map)[start : start + nbytes], np.uint8)
        weakref.finalize(buffer, _give_back, self._map, start, start + nbytes).atexit = False
        return buffer


def _give_back(memory: mmap.mmap, start: int, stop: int) -> None:
    """Returns the whole pages of a range of an anonymous map to the system."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class Workspace:
    """Scratch memory of a thread, used like a stack: for staging, casts and everything else that is not the result.

    It is allocated at first use, up to `limit` bytes, and reused, so temporaries cost no page faults. Not thread-safe.

    With `compiles`, whoever uses it may compile programs: JAX has started, and much is read. `result` is what the last
    one wrote, in memory of its own.
    """

    def __init__(self, limit: int, *, compiles: bool = False) -> None:
        self.limit, self.compiles = limit, compiles
        self.result: Any = None
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    @property
    def available(self) -> int:
        """Bytes that may still be taken."""
        return max(self.limit - self._used, 0)

    @property
    def unallocated(self) -> int:
        """Bytes of the limit for which it has no memory yet: as many may be taken elsewhere."""
        return max(self.limit - self._memory.nbytes, 0)

    def reserve(self, nbytes: int) -> None:
        """Allocates so many bytes, up to `limit`, if none is in use, so that nested arrays fit."""
        if not self._used and self._memory.nbytes < (size := min(nbytes, self.limit)):
            self._memory = np.empty(0, np.uint8)
            self._memory = empty_aligned((size,), np.dtype(np.uint8))

    @contextlib.contextmanager
    def array(self, shape: tuple[int, ...], dtype: DType) -> Generator[np.ndarray]:
        """An uninitialized C-contiguous array until the end of the `with` block.

        An array that exceeds `available` is allocated separately; request one only for what cannot be made smaller.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        padded = nbytes + -nbytes % ALIGNMENT
        grows = self._memory.nbytes < self._used + padded
        if padded > self.available or (grows and self._used):  # memory that is in use must not move
            yield empty_aligned(shape, dtype)
            return
        if grows:
            # Doubles each time: most threads never need more than one staging buffer.
            self.reserve(max(2 * self._memory.nbytes, padded, 2 * STAGING))
        start = self._used
        self._used += padded
        try:
            yield self._memory[start : start + nbytes].view(dtype).reshape(shape)
        finally:
            self._used = start


def _anonymous(nbytes: int) -> tuple[mmap.mmap, int]:
    """An anonymous private map, and the offset of a huge page in it that is followed by this many bytes."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def peak_memory() -> int | None:
    """The most bytes of host memory that this process has held since it started; None if the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available_memory() -> int | None:
    """Bytes of host memory that are available to this process or in the system, whichever is less; None if unknown."""
    available: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    groups = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")  # of containers: versions 2 and 1
    for folder, limit, used in zip(groups, ("max", "limit_in_bytes"), ("current", "usage_in_bytes"), strict=True):
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            read = [int((folder / f"memory.{name}").read_text()) for name in (limit, used)]
            available.append(read[0] - read[1])
    return min(available, default=None)


def default_budget() -> int:
    """4 GiB, or an eighth of the available memory if that is known and less."""
    available = available_memory()
    return DEFAULT_BUDGET if available is None else max(min(available // 8, DEFAULT_BUDGET), 64 << 20)


_T = TypeVar("_T")
_R = TypeVar("_R")

_AHEAD = 256  # items that are started before the first result is requested: enough to hide one that takes long


@contextlib.contextmanager
def parallel(
    function: Callable[[_T], _R],
    items: Iterable[_T],
    threads: int,
    name: str,
    *,
    ahead: int = _AHEAD,
    stopped: threading.Event | None = None,
) -> Generator[Iterator[_R]]:
    """A `with` block that gives an iterator over `function(item)` for each item, in order, computed by threads.

    At the end of the block, also after an error or a Ctrl-C, no further item is started, and those in progress are
    waited for.

    Args:
        function: Called in any of the threads.
        items: Iterated in the caller's thread.
        threads: Number of threads.
        name: Name of their task, for debuggers.
        ahead: Items that are started, or done, before their turn. Their results are in memory at the same time.
        stopped: Is set at the end of the block. A `function` that takes long may check it.

    Raises:
        Exception: While iterating: the error of the first item, in their order, that failed.
    """
    left = iter(items)
    pool = ThreadPoolExecutor(threads, f"lazymodel-{name}")

    def results() -> Iterator[_R]:
        pending = collections.deque[Future[_R]]()
        pending.extend(map(submit, itertools.islice(left, ahead)))
        while pending:
            yield pending.popleft().result()
            pending.extend(map(submit, itertools.islice(left, 1)))

    def submit(item: _T) -> Future[_R]:
        with uninterrupted():  # the pool does not wait for a thread whose start was interrupted
            return pool.submit(function, item)

    try:
        yield results()
    finally:
        if stopped is not None:
            stopped.set()
        pool.shutdown(cancel_futures=True)


def start_thread(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Starts a daemon thread: if it hangs, in a request for example, the program can still end."""
    thread = threading.Thread(target=target, args=args, name=f"lazymodel-{name}", daemon=True)
    with uninterrupted():
        thread.start()
    return thread


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """Delays a Ctrl-C until the end of the block, which may be in any thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    late: list[tuple[int, Any]] = []

    def note(number: int, frame: Any) -> None:
        late.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if late:
            before(*late[0])


class Scratch(threading.local):
    """Memory that each thread has for itself: a workspace of at most `limit` bytes, and buffers that are reused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffers: dict[int, np.ndarray] = {}

    @functools.cached_property
    def workspace(self) -> Workspace:
        return Workspace(self._limit)

    def buffer(self, nbytes: int, number: int = 0) -> np.ndarray:
        """The first `nbytes` (`uint8`, aligned) of one of the thread's buffers, with arbitrary content."""
        if number not in self._buffers or self._buffers[number].nbytes < nbytes:
            self._buffers[number] = empty_aligned((nbytes,), np.dtype(np.uint8))
        return self._buffers[number][:nbytes]

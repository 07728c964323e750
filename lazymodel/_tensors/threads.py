"""Threads: `parallel` for many items, `start_thread` for one long task, and scratch memory that each thread has."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from lazymodel._tensors.buffers import Workspace, empty_aligned

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
        pending.extend(pool.submit(function, item) for item in itertools.islice(left, ahead))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(function, item) for item in itertools.islice(left, 1))

    try:
        yield results()
    finally:
        if stopped is not None:
            stopped.set()
        pool.shutdown(cancel_futures=True)


def start_thread(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Starts a daemon thread: if it hangs, in a request for example, the program can still end."""
    thread = threading.Thread(target=target, args=args, name=f"lazymodel-{name}", daemon=True)
    thread.start()
    return thread


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

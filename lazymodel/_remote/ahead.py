"""Reading ahead: the ranges of objects that will be asked for, fetched before they are, in that order.

Responsible for which requests are made of many ranges (`requests_for`), how many are in flight, how much memory waits
to be read, and for readers that come too early. What the ranges are is the caller's knowledge; nothing fails if it is
wrong: what was not foreseen is fetched when it is asked for, and what was foreseen and is not asked for is given up.

A block is the answer to one request. It is given up when as many of its bytes were read as were said to be wanted,
and its memory used again: fresh memory, a page fault for every 4 KiB, took longer than a copy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.buffers import ALIGNMENT, empty_aligned

REQUEST = 4 << 20  # bytes of a request, at most: at 80 MB/s a connection 50 ms, beside which latency is bearable
CONNECTIONS = 32  # requests in flight, at most: 2.5 GB/s at 80 MB/s a connection, which is what object stores give
FEWEST = 8  # requests in flight to begin with: where the machine is the limit, 32 took 1.4 × the CPU time of 8
_FASTER = 1.3  # twice as many requests in flight must be this much faster to be kept
_SETTLED = 32  # rounds after which more of them are tried again
GAP = 128 << 10  # bytes between two ranges that are fetched rather than asked for around
_SHARE = 8  # of the limit, for each reading that was not foreseen
_WAITING = 2  # bytes in flight or waiting to be read, for each that may be in flight
AHEAD = _WAITING * CONNECTIONS * REQUEST  # the same, at most


class Origin(Protocol):
    """Whatever can be asked for ranges of bytes."""

    def fetch(self, start: int, out: np.ndarray, stopped: threading.Event) -> None:
        """Fills `out` (`uint8`) with the bytes from `start` on, in any thread, or stops where nobody waits any more.

        CheckpointError where they cannot be had.
        """
        ...


def requests_for(ranges: np.ndarray, gap: int, longest: int) -> np.ndarray:
    """The requests that fetch some ranges of one object: neighbours together, long ones in equal pieces.

    Args:
        ranges: `int64[n, 2]`: first byte and the one after the last, in any order, overlapping or not.
        gap: Bytes between two ranges that are fetched along.
        longest: Bytes of a request, at most.

    Returns:
        `int64[m, 2]` of the same kind, in order, without overlaps; every byte of the ranges is in one of them.
    """
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if not len(ranges):
        return np.empty((0, 2), np.int64)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    first = np.flatnonzero(np.concatenate(([True], ranges[1:, 0] > reach[:-1] + gap)))
    starts, stops = ranges[first, 0], reach[np.concatenate((first[1:] - 1, [len(ranges) - 1]))]
    counts = -(-(stops - starts) // longest)
    owner = np.repeat(np.arange(len(starts)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = -(-(stops - starts) // counts)
    lengths = np.minimum(lengths + -lengths % ALIGNMENT, longest)  # elements are aligned in each as in the whole
    begins = starts[owner] + index * lengths[owner]
    return np.stack((begins, np.minimum(begins + lengths[owner], stops[owner])), axis=1)


class Stopped(CheckpointError):
    """Nobody waits for what is read any more."""

    def __init__(self) -> None:
        super().__init__("reading was stopped")


class _Block:
    """One request, and what came of it."""

    __slots__ = ("data", "error", "left", "memory", "nbytes", "origin", "readers", "room", "start", "state", "stop")

    def __init__(self, origin: Origin, start: int, stop: int, wanted: int, longest: int) -> None:
        self.origin, self.start, self.stop, self.left = origin, start, stop, wanted
        self.nbytes = stop - start
        self.room = longest if self.nbytes > longest // 2 else self.nbytes  # bytes of its memory
        self.state = "planned"  # then "flying", "here", "gone"
        self.memory: np.ndarray | None = None
        self.data: np.ndarray | None = None  # the bytes, once they are all there
        self.readers = 0  # who looks at them
        self.error: Exception | None = None


class _Pace:
    """How many requests are in flight: twice as many as long as that is faster. Not thread-safe."""

    def __init__(self) -> None:
        self.level = FEWEST
        self._warm = False
        self._settled = 0  # rounds left in which nothing is tried
        self._rate = 0.0  # bytes/s of the round before
        self._began = time.monotonic()
        self._count = self._nbytes = 0

    def arrived(self, nbytes: int) -> None:
        """A request was answered."""
        self._count, self._nbytes = self._count + 1, self._nbytes + nbytes
        if self._count < 2 * self.level:
            return
        now = time.monotonic()
        rate = self._nbytes / max(now - self._began, 1e-6)
        self._began, self._count, self._nbytes = now, 0, 0
        if not self._warm:  # connections were being made
            self._warm = True
        elif self._settled:
            self._settled -= 1
        elif rate > _FASTER * self._rate:
            if self.level < CONNECTIONS:
                self._rate, self.level = rate, min(2 * self.level, CONNECTIONS)
                return
            self._settled = _SETTLED  # there are no more to try
        else:
            self.level, self._settled = max(self.level // 2, FEWEST), _SETTLED
        self._rate = rate if self._settled else 0.0


class ReadAhead:
    """Fetches what is wanted of some origins, in the order given, and hands it out.

    A `with` block: at its end nothing is fetched any more, and readers that still wait fail.

    Args:
        wants: Of each origin, the ranges that will be read (`int64[n, 2]`), one a reading; a range that is read twice
            is there twice. An origin may come several times.
        limit: Bytes in flight or waiting to be read, at most, but for one request of each thread that reads.
        gap: Bytes between two ranges that are fetched along.
    """

    def __init__(self, wants: Sequence[tuple[Origin, np.ndarray]], limit: int = AHEAD, gap: int = GAP) -> None:
        # Entered itself: a Ctrl-C within `Condition.__enter__`, which is Python's, would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._limit = limit
        self._longest = max(min(REQUEST, limit // 4), 1)
        self._blocks: list[_Block] = []
        self._spare: list[np.ndarray] = []  # memory of the longest blocks, to be used again
        self._starts: dict[Origin, np.ndarray] = {}
        self._mine: dict[Origin, list[_Block]] = {}
        self._plan(wants, gap)
        self._next = self._used = 0
        self._pace = _Pace()
        self._urgent: list[_Block] = []
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._within: list[ReadAhead] = []
        self._stopped = threading.Event()

    def _plan(self, wants: Sequence[tuple[Origin, np.ndarray]], gap: int) -> None:
        together: dict[Origin, list[np.ndarray]] = {}
        for origin, ranges in wants:
            together.setdefault(origin, []).append(ranges)
        for origin, several in together.items():
            ranges = np.concatenate(several).astype(np.int64, copy=False)
            requests = requests_for(ranges, gap, self._longest)
            wanted = _overlaps(requests, ranges)
            blocks = [
                _Block(origin, start, stop, count, self._longest)
                for (start, stop), count in zip(requests.tolist(), wanted.tolist(), strict=True)
            ]
            self._starts[origin], self._mine[origin] = requests[:, 0], blocks
            self._blocks += blocks  # origins follow each other in the order in which they were first named

    def __enter__(self) -> ReadAhead:
        with self._lock:
            self._fly()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops fetching. Requests that are in flight end by themselves; nobody waits for them."""
        with self._lock:
            self._stopped.set()
            for block in self._blocks:
                block.data = block.memory = None
            self._spare.clear()
            self._changed.notify_all()
            within, self._within = self._within, []
        for ahead in within:
            ahead.close()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    @contextlib.contextmanager
    def unforeseen(self, origin: Origin, ranges: np.ndarray) -> Generator[ReadAhead]:
        """Another one for what was not planned for, with a share of the memory; it ends with this one at the latest."""
        with ReadAhead([(origin, ranges)], self._limit // _SHARE) as ahead:
            with self._lock:
                if self._stopped.is_set():
                    raise Stopped
                self._within.append(ahead)
            try:
                yield ahead
            finally:
                with self._lock:
                    if ahead in self._within:
                        self._within.remove(ahead)

    def read_into(self, origin: Origin, position: int, out: np.ndarray) -> int:
        """Fills the beginning of an array of bytes with those from a position on, and says how many it filled: as many
        as one block has. 0 where no block was planned for that position.

        Raises:
            CheckpointError: They cannot be had, or all was stopped.
        """
        with self.lent(origin, position, out.size) as found:
            np.copyto(out[: found.size], found)
            return found.size

    @contextlib.contextmanager
    def lent(self, origin: Origin, position: int, most: int, unit: int = 1) -> Generator[np.ndarray]:
        """Bytes from a position on, for reading until the end of the `with` block: as many whole units as one block
        has, `most` bytes at most. None where no block was planned for that position, or none has a unit from there on.

        Raises:
            CheckpointError: They cannot be had, or all was stopped.
        """
        block = self._block_at(origin, position)
        count = 0 if block is None else min(block.stop - position, most) // unit * unit
        if block is None or not count:
            yield np.empty(0, np.uint8)
            return
        data = self._wait_for(block)
        try:
            yield data[position - block.start :][:count]
        finally:
            with self._lock:
                block.readers -= 1
                self._was_read(block, count)

    def passed(self, origin: Origin, start: int, stop: int) -> None:
        """Some of what was said to be wanted has been passed over: it counts as read."""
        with self._lock:
            while start < stop and (block := self._block_at(origin, start)) is not None:
                self._was_read(block, min(block.stop, stop) - start)
                start = block.stop

    def _block_at(self, origin: Origin, position: int) -> _Block | None:
        starts = self._starts.get(origin)
        if starts is None:
            return None
        number = int(np.searchsorted(starts, position, side="right")) - 1
        block = self._mine[origin][number] if number >= 0 else None
        return block if block is not None and position < block.stop else None

    def _was_read(self, block: _Block, count: int) -> None:
        block.left -= count
        if block.left <= 0 and block.state == "here" and not block.readers:
            self._give_up(block)
            self._fly()
        elif block.left <= 0 and block.state == "planned":
            block.state = "gone"

    def _wait_for(self, block: _Block) -> np.ndarray:
        with self._lock:
            while block.data is None:
                if block.error is not None:
                    raise block.error
                if self._stopped.is_set():
                    raise Stopped
                if block.state in ("planned", "gone"):
                    # Nobody has asked for it yet, or it was given up, be it just now by another reader: it goes first,
                    # whatever the limit says.
                    self._take(block)
                    self._urgent.insert(0, block)
                    self._fly()
                else:
                    self._changed.wait()
            block.readers += 1
            return block.data

    def _take(self, block: _Block) -> None:
        """Counts a block that will be fetched, and finds memory for it."""
        block.state = "flying"
        self._used += block.room
        if block.room == self._longest and self._spare:
            block.memory = self._spare.pop()
        while self._spare and self._used + len(self._spare) * self._longest > self._limit:
            self._spare.pop()

    def _give_up(self, block: _Block) -> None:
        self._used -= block.room
        if block.memory is not None and block.room == self._longest:
            self._spare.append(block.memory)
        block.data = block.memory = None
        block.state = "gone"

    # With the lock held, or in threads of its own.

    def _fly(self) -> None:
        """Sees to it that threads are at work for all that may be in flight."""
        if self._stopped.is_set():
            return
        while self._next < len(self._blocks):
            block = self._blocks[self._next]
            if block.state == "planned":
                limit = min(self._limit, _WAITING * self._pace.level * REQUEST)
                if self._used + block.room > limit and self._used:
                    break
                self._take(block)
                self._urgent.append(block)
            self._next += 1
        if self._idle:
            self._changed.notify_all()
        for _ in range(min(len(self._urgent) - self._idle, self._pace.level - len(self._threads))):
            # Daemons: a request that hangs must not keep the program from ending.
            thread = threading.Thread(target=self._work, name=f"lazymodel-fetch-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._urgent and not self._stopped.is_set():
                    if self._next >= len(self._blocks):
                        break
                    self._changed.wait()
                self._idle -= 1
                too_many = len(self._threads) > self._pace.level
                if self._stopped.is_set() or not self._urgent or too_many:
                    self._threads.remove(threading.current_thread())
                    return
                block = self._urgent.pop(0)
                memory = block.memory
            error = None
            if memory is None:
                memory = empty_aligned((block.room,), np.dtype(np.uint8))
            try:
                block.origin.fetch(block.start, memory[: block.nbytes], self._stopped)
            except Exception as failure:
                error = failure
            with self._lock:
                block.error, block.state = error, "here"
                self._pace.arrived(block.nbytes)
                if error is None and not self._stopped.is_set():
                    block.memory, block.data = memory, memory[: block.nbytes]
                self._changed.notify_all()
            del memory, error, block


def _overlaps(requests: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """How many bytes of the ranges are in each request, those of overlapping ranges as often as there are ranges."""
    if not len(requests):
        return np.zeros(0, np.int64)
    edges = np.concatenate((requests[:, 0], requests[-1:, 1]))

    def before(positions: np.ndarray) -> np.ndarray:
        """At each edge, the sum over positions of how far they lie before it."""
        ordered = np.sort(positions)
        sums = np.concatenate(([0], np.cumsum(ordered)))
        number = np.searchsorted(ordered, edges)
        return number * edges - sums[number]

    covered = before(ranges[:, 0]) - before(ranges[:, 1])
    return covered[1:] - covered[:-1]

"""Prefetching: ranges of objects that will be read are fetched before they are requested, in that order.

Decides which requests are made for many ranges (`requests_for`), how many are in flight, and how much memory waits to
be read, and handles readers that come too early. The caller provides the ranges. Wrong ranges cause no failure: a range
that was not planned is fetched when it is requested, and a planned range that nobody requests is discarded.

A block is the answer to one request. It is discarded when as many of its bytes were read as were planned, and its
memory is reused: a page fault for every 4 KiB of fresh memory took longer than a copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.buffers import ALIGNMENT, empty_aligned, start_thread

REQUEST = 4 << 20  # limit of a request in bytes: 50 ms at 80 MB/s per connection, so latency matters little
# Limit of requests in flight: 1.3 GB/s at 80 MB/s per connection. If the machine is the bottleneck, 32 took 1.4 ×
# the CPU time of 8.
CONNECTIONS = 16
GAP = 128 << 10  # bytes between two ranges up to which the gap is fetched too, in one request
_SHARE = 8  # each unplanned read gets this fraction of the limit
AHEAD = 2 * CONNECTIONS * REQUEST  # limit of bytes in flight or waiting to be read


class Origin(Protocol):
    """An object from which ranges of bytes can be requested."""

    def fetch(self, start: int, out: np.ndarray, stopped: threading.Event) -> None:
        """Fills `out` (`uint8`) with the bytes from `start` on, in any thread, or stops if nobody waits any more.

        Raises CheckpointError if they cannot be read.
        """
        ...


def requests_for(ranges: np.ndarray, gap: int, longest: int) -> np.ndarray:
    """The requests that fetch some ranges of one object: neighbours together, long ranges in equal chunks.

    Args:
        ranges: `int64[n, 2]`: the first byte and the byte after the last, in any order; they may overlap.
        gap: Bytes between two ranges up to which the gap is fetched too.
        longest: Limit of a request in bytes.

    Returns:
        `int64[m, 2]` in the same form, in order, without overlaps; every byte of the ranges is in one of them.
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
    lengths = np.minimum(lengths + -lengths % ALIGNMENT, longest)  # elements are aligned in each chunk as in the whole
    begins = starts[owner] + index * lengths[owner]
    return np.stack((begins, np.minimum(begins + lengths[owner], stops[owner])), axis=1)


class Stopped(CheckpointError):
    """Nobody waits for the bytes any more."""

    def __init__(self) -> None:
        super().__init__("reading was stopped")


class _Block:
    """One request, and its result."""

    __slots__ = ("data", "error", "left", "memory", "nbytes", "origin", "readers", "reserved", "start", "state", "stop")

    def __init__(self, origin: Origin, start: int, stop: int, wanted: int, longest: int) -> None:
        self.origin, self.start, self.stop, self.left = origin, start, stop, wanted
        self.nbytes = stop - start
        self.reserved = longest if self.nbytes > longest // 2 else self.nbytes  # bytes of its memory
        self.state = "planned"  # then "flying", "here", "gone"
        self.memory: np.ndarray | None = None
        self.data: np.ndarray | None = None  # the bytes, once all have arrived
        self.readers = 0  # number of readers that use the bytes
        self.error: Exception | None = None


class ReadAhead:
    """Fetches planned ranges of some origins, in the given order, and passes them to readers.

    A `with` block: at its end nothing is fetched any more, and readers that still wait get an error.

    Args:
        wants: For each origin, the ranges that will be read (`int64[n, 2]`), one per read; a range that is read twice
            occurs twice. An origin may occur several times.
        limit: Limit of bytes in flight or waiting to be read, in addition to one request of each thread that reads.
        gap: Bytes between two ranges up to which the gap is fetched too.
        held: Ranges that are in memory already, as (origin, first byte, byte after the last), disjoint and in order,
            and their bytes, one range after the other. They stay until the end.
    """

    def __init__(
        self,
        wants: Sequence[tuple[Origin, np.ndarray]],
        limit: int = AHEAD,
        gap: int = GAP,
        held: tuple[Sequence[tuple[Origin, int, int]], np.ndarray] | None = None,
    ) -> None:
        # Entered directly: a Ctrl-C within `Condition.__enter__`, which is Python code, would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._limit = min(limit, AHEAD)
        self._longest = max(min(REQUEST, limit // 4), 1)
        self._blocks: list[_Block] = []
        self._spare: list[np.ndarray] = []  # memory of the longest blocks, for reuse
        self._starts: dict[Origin, np.ndarray] = {}
        self._mine: dict[Origin, list[_Block]] = {}
        self._plan(wants, gap)
        self.held = held is not None
        if held is not None:
            self._hold(*held)
        self._next = self._used = 0
        self._urgent: list[_Block] = []
        self._idle = 0
        self._threads = 0
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
            self._blocks += blocks  # origins follow each other in the order in which they first occur

    def _hold(self, ranges: Sequence[tuple[Origin, int, int]], data: np.ndarray) -> None:
        done = 0
        for origin, start, stop in ranges:
            block = _Block(origin, start, stop, 0, self._longest)
            block.state, block.left = "here", 1 << 62  # however often it is read
            block.data, done = data[done : done + stop - start], done + stop - start
            self._mine.setdefault(origin, []).append(block)
            self._blocks.append(block)
        self._starts = {origin: np.array([block.start for block in mine]) for origin, mine in self._mine.items()}

    def __enter__(self) -> ReadAhead:
        with self._lock:
            self._fly()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops fetching. Requests that are in flight end by themselves; nothing waits for them."""
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
        """Fetches ranges that were not planned, with a share of the memory. Ends with this one at the latest."""
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
        """Fills the beginning of an array with the bytes from a position on, and returns how many it filled: as far as
        blocks were planned.

        Raises:
            CheckpointError: The bytes cannot be read, or all was stopped.
        """
        done, count = 0, 1
        while count and done < out.size:
            with self.borrowed(origin, position + done, out.size - done) as found:
                count = found.size
                np.copyto(out[done : done + count], found)
                done += count
        return done

    @contextlib.contextmanager
    def borrowed(self, origin: Origin, position: int, most: int, unit: int = 1) -> Generator[np.ndarray]:
        """Bytes from a position on, readable until the end of the `with` block: as many whole units as one block has,
        `most` bytes at most. Empty if no block was planned for that position, or none has a whole unit from there on.

        Raises:
            CheckpointError: The bytes cannot be read, or all was stopped.
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
        """Counts planned bytes that a reader skipped as read."""
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
                    # It was not requested yet, or was discarded, perhaps just now by another reader: it is fetched
                    # first, regardless of the limit.
                    self._take(block)
                    self._urgent.insert(0, block)
                    self._fly()
                else:
                    self._changed.wait()
            block.readers += 1
            return block.data

    def _take(self, block: _Block) -> None:
        """Counts a block that will be fetched, and provides memory for it."""
        block.state = "flying"
        self._used += block.reserved
        if block.reserved == self._longest and self._spare:
            block.memory = self._spare.pop()
        while self._spare and self._used + len(self._spare) * self._longest > self._limit:
            self._spare.pop()

    def _give_up(self, block: _Block) -> None:
        self._used -= block.reserved
        if block.memory is not None and block.reserved == self._longest:
            self._spare.append(block.memory)
        block.data = block.memory = None
        block.state = "gone"

    # With the lock held, or in the threads that fetch.

    def _fly(self) -> None:
        """Starts threads for all blocks that may be in flight."""
        if self._stopped.is_set():
            return
        while self._next < len(self._blocks):
            block = self._blocks[self._next]
            if block.state == "planned":
                if self._used + block.reserved > self._limit and self._used:
                    break
                self._take(block)
                self._urgent.append(block)
            self._next += 1
        if self._idle:
            self._changed.notify_all()
        for _ in range(min(len(self._urgent) - self._idle, CONNECTIONS - self._threads)):
            self._threads += 1
            start_thread(self._work, "fetch")

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._urgent and not self._stopped.is_set():
                    if self._next >= len(self._blocks):
                        break
                    self._changed.wait()
                self._idle -= 1
                if self._stopped.is_set() or not self._urgent:
                    self._threads -= 1
                    return
                block = self._urgent.pop(0)
                memory = block.memory
            error = None
            if memory is None:
                memory = empty_aligned((block.reserved,), np.dtype(np.uint8))
            try:
                block.origin.fetch(block.start, memory[: block.nbytes], self._stopped)
            except Exception as failure:
                error = failure
            with self._lock:
                block.error, block.state = error, "here"
                if error is None and not self._stopped.is_set():
                    block.memory, block.data = memory, memory[: block.nbytes]
                self._changed.notify_all()
            del memory, error, block


def _overlaps(requests: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Bytes of the ranges in each request; bytes of overlapping ranges count once for each range."""
    if not len(requests):
        return np.zeros(0, np.int64)
    edges = np.concatenate((requests[:, 0], requests[-1:, 1]))

    def before(positions: np.ndarray) -> np.ndarray:
        """At each edge, the sum of the distances of all positions before it."""
        ordered = np.sort(positions)
        sums = np.concatenate(([0], np.cumsum(ordered)))
        number = np.searchsorted(ordered, edges)
        return number * edges - sums[number]

    covered = before(ranges[:, 0]) - before(ranges[:, 1])
    return covered[1:] - covered[:-1]

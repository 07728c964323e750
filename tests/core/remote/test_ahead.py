"""Which requests are made of ranges, and that whoever reads gets its bytes, in whatever order, however little room."""

from __future__ import annotations

import itertools
import operator
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lazymodel as lm
from lazymodel._remote import ahead
from lazymodel._remote.ahead import ReadAhead, _overlaps, requests_for
from lazymodel._remote.blocks import Blocks
from lazymodel._remote.file import BLOCK, RemoteFile
from lazymodel._tensors.boxes import Geometry, ranges_of

RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=12).map(
    lambda pairs: np.array([(start, start + length) for start, length in pairs], np.int64).reshape(-1, 2)
)
DATA = np.random.default_rng(0).integers(0, 256, 512, np.uint8)


def covered(ranges: np.ndarray) -> Counter[int]:
    return Counter(byte for start, stop in ranges.tolist() for byte in range(start, stop))


@settings(max_examples=300, deadline=None)
@given(RANGES, st.integers(0, 40), st.integers(1, 80))
def test_requests_cover_what_is_wanted_and_little_more(ranges: np.ndarray, gap: int, longest: int) -> None:
    requests = requests_for(ranges, gap, longest)
    wanted, fetched = covered(ranges), covered(requests)
    assert wanted.keys() <= fetched.keys()
    assert all(count == 1 for count in fetched.values())
    assert all(0 < stop - start <= longest for start, stop in requests.tolist())
    assert (requests[1:, 0] >= requests[:-1, 1]).all()
    for byte in fetched.keys() - wanted.keys():  # in a gap that is worth it
        before = max(other for other in wanted if other < byte)
        assert min(other for other in wanted if other > byte) - before - 1 <= gap
    expected = [sum(wanted[byte] for byte in range(start, stop)) for start, stop in requests.tolist()]
    assert _overlaps(requests, ranges).tolist() == expected


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_ranges_of_a_geometry(data: st.DataObject) -> None:
    itemsize, gap = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.integers(1, 60))
    shape, strides, stride = list[int](), list[int](), itemsize
    for _ in range(data.draw(st.integers(0, 3))):
        stride *= data.draw(st.integers(1, 3))
        shape.insert(0, data.draw(st.integers(0, 4)))
        strides.insert(0, stride)
        stride *= max(shape[0], 1)
    place = Geometry(data.draw(st.integers(0, 20)), tuple(shape), tuple(strides))
    indices = itertools.product(*map(range, shape))
    firsts = [place.start + sum(map(operator.mul, index, strides)) for index in indices]
    wanted = {first + byte for first in firsts for byte in range(itemsize)}
    ranges = ranges_of(place, itemsize, gap)
    found = covered(ranges)
    assert wanted <= found.keys() and all(count == 1 for count in found.values())
    for byte in found.keys() - wanted:
        before = max(other for other in wanted if other < byte)
        assert min(other for other in wanted if other > byte) - before - 1 < gap


class Origin:
    """Bytes that are fetched from memory; the requests numbered in `fails` are errors."""

    def __init__(self, fails: frozenset[int] = frozenset()) -> None:
        self.requests: list[tuple[int, int]] = []
        self.fails = fails
        self._lock = threading.Lock()

    def fetch(self, start: int, out: np.ndarray, stopped: threading.Event) -> None:
        with self._lock:
            self.requests.append((start, start + out.size))
            if len(self.requests) - 1 in self.fails:
                raise lm.CheckpointError("it failed")
        out[:] = DATA[start : start + out.size]


def read(ahead: ReadAhead, origin: Origin, start: int, stop: int) -> np.ndarray:
    out, done = np.zeros(stop - start, np.uint8), 0
    while done < out.size and (count := ahead.read_into(origin, start + done, out[done:])):
        done += count
    return out[:done]


@settings(max_examples=150, deadline=None)
@given(RANGES, RANGES, st.integers(1, 600), st.randoms(use_true_random=False), st.integers(1, 4))
def test_whatever_was_announced_can_be_read(
    first: np.ndarray, second: np.ndarray, limit: int, random: object, threads: int
) -> None:
    """In any order, by several threads, some of it again, some of it never."""
    origins = [Origin(), Origin()]
    with ReadAhead([(origins[0], first), (origins[1], second), (origins[0], second)], limit) as ahead:
        readings = [(origins[0], *span) for span in [*first.tolist(), *second.tolist()]]
        readings += [(origins[1], *span) for span in second.tolist()]
        random.shuffle(readings)  # pyright: ignore[reportAttributeAccessIssue]
        readings = readings[1:] + readings[3:6]
        with ThreadPoolExecutor(threads) as pool:
            for (_, start, stop), out in zip(readings, pool.map(lambda one: read(ahead, *one), readings), strict=True):
                np.testing.assert_array_equal(out, DATA[start:stop])
    assert ahead.stopped


@pytest.mark.parametrize("threads", [1, 4])
def test_in_order_every_byte_is_fetched_once(threads: int) -> None:
    ranges = np.array([(start, start + 8) for start in range(0, 512, 8)], np.int64)
    origin = Origin()
    with ReadAhead([(origin, ranges)], 64) as ahead, ThreadPoolExecutor(threads) as pool:
        for (start, stop), out in zip(
            ranges.tolist(), pool.map(lambda span: read(ahead, origin, *span), ranges.tolist()), strict=True
        ):
            np.testing.assert_array_equal(out, DATA[start:stop])
    assert sum(stop - start for start, stop in origin.requests) == 512


def test_a_file_keeps_what_was_fetched_ahead_where_it_belongs() -> None:
    """Whatever is longer than a request and no multiple of it included."""
    data = np.random.default_rng(0).integers(0, 256, 1025 * BLOCK + 10, np.uint8)

    class Held:
        def __init__(self) -> None:
            self.blocks: dict[str, Blocks] = {}

        def head(self, key: str) -> tuple[np.ndarray, int]:
            return data[:5], data.size

        def get(self, key: str, start: int, out: np.ndarray, stopped: threading.Event) -> None:
            out[:] = data[start : start + out.size]

    file = RemoteFile(Held(), "w")  # pyright: ignore[reportArgumentType]
    assert file.fetch_ahead([(0, 3), (BLOCK, data.size)]) == data.size
    assert file.kept(0, data.size) == data.tobytes()


def test_an_error_is_that_of_whoever_reads_it() -> None:
    origin = Origin(frozenset([1]))
    ranges = np.array([(0, 100), (200, 300)], np.int64)
    with ReadAhead([(origin, ranges)], 400) as ahead:
        results: list[object] = []
        for start in range(0, 300, 50):
            try:
                results.append(read(ahead, origin, start, start + 50).size)
            except lm.CheckpointError as error:
                results.append(str(error))
    assert results.count("it failed") in (1, 2, 3) and 50 in results


def test_what_was_not_announced_is_not_there() -> None:
    origin = Origin()
    with ReadAhead([(origin, np.array([(10, 20)], np.int64))]) as ahead:
        for start in (0, 9, 20, 400):
            assert not read(ahead, origin, start, start + 5).size
        assert not read(ahead, Origin(), 10, 20).size
    with pytest.raises(lm.CheckpointError, match="reading was stopped"):
        read(ahead, origin, 10, 20)


@pytest.mark.parametrize(("useful", "expected"), [(1, {8}), (8, {8}), (16, {16}), (32, {32}), (1000, {32})])
def test_as_many_requests_are_in_flight_as_make_it_faster(
    monkeypatch: pytest.MonkeyPatch, useful: int, expected: set[int]
) -> None:
    """On a link that up to so many requests at a time fill, most rounds have that many, now and then one more."""
    now = 0.0
    monkeypatch.setattr(ahead.time, "monotonic", lambda: now)
    pace = ahead._Pace()
    levels: Counter[int] = Counter()
    for _ in range(20_000):
        now += 1 / min(pace.level, useful)
        levels[pace.level] += 1
        pace.arrived(1 << 20)
    assert {level for level, count in levels.items() if count > 0.8 * 20_000} == expected

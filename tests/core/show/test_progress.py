"""Progress in a log: a line now and then, never one for each piece, and nothing that could stop the work."""

from __future__ import annotations

import io
import os
import sys
import threading

import pytest

from lazymodel._show.progress import LogLines, progress_for

GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pipe(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_lines_say_percent_bytes_time_and_rate_every_five_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    stream = pipe(monkeypatch)
    lines = LogLines(clock)
    lines.start(100 * GIB, "gemma: materializing 3 variables")
    for _ in range(100):  # a piece a second
        clock.now += 1
        lines.advance(GIB, "w")
    lines.finish()
    written = stream.getvalue().splitlines()
    assert written[0] == "gemma: materializing 3 variables: 5%, 5.00 GiB of 100.00 GiB in 5.0 s, 1.00 GiB/s"
    assert written[12] == "gemma: materializing 3 variables: 65%, 65.00 GiB of 100.00 GiB in 0:01:05, 1.00 GiB/s"
    assert written[-1] == "gemma: materializing 3 variables: 100%, 100.00 GiB of 100.00 GiB in 0:01:40, 1.00 GiB/s"
    assert len(written) == 20 + 1


def test_many_pieces_at_once_are_one_line(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    stream = pipe(monkeypatch)
    lines = LogLines(clock)
    lines.start(8 * 1000, "x")
    clock.now += 60
    threads = [threading.Thread(target=lambda: [lines.advance(1) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stream.getvalue().splitlines()) == 1
    lines.finish()
    assert stream.getvalue().splitlines()[1:] == ["x: 100%, 7.81 KiB of 7.81 KiB in 0:01:00, 133 B/s"]


def test_what_is_quick_or_empty_is_one_line(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    stream = pipe(monkeypatch)
    lines = LogLines(clock)
    lines.start(0, "no bytes\x1b[31m\nat all")
    lines.finish()
    lines.finish()  # harmless
    assert stream.getvalue() == "no bytes\\x1b[31m\\nat all: 100%, 0 B of 0 B in 0.0 s\n"


def test_what_failed_half_way_says_so(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    stream = pipe(monkeypatch)
    lines = LogLines(clock)
    lines.start(1000, "x")
    lines.advance(499)
    lines.finish()
    assert stream.getvalue().startswith("x: 49%, 499 B of 1000 B in")


def test_true_writes_lines_where_nobody_watches_and_none_does_not(monkeypatch: pytest.MonkeyPatch):
    stream = pipe(monkeypatch)
    for progress in (None, True):
        reporter = progress_for(progress)
        reporter.start(10, "loading")
        reporter.advance(10, "w")
        reporter.finish()
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().startswith("loading: 100%, 10 B of 10 B in 0.0 s")


def test_a_reader_that_has_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    reading, writing = os.pipe()
    os.close(reading)
    closed = io.StringIO()
    closed.close()
    broken = os.fdopen(writing, "w", buffering=1)
    for stream in (broken, closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        lines = LogLines(clock)
        lines.start(1, "x")
        lines.advance(1)
        lines.finish()
    with pytest.raises(BrokenPipeError):
        broken.close()

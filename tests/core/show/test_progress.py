"""Progress: a bar that ends, a line in a log now and then, calls for a program; nothing that could stop the work."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import lazymodel as lm
from lazymodel._show.progress import progress_for
from tests.markup import Page

GIB = 1 << 30
HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>\n&amp;/kernel"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stream(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> Any:
    """Makes it standard error; called in the test itself, because pytest sets that anew after fixtures."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for IPython under a kernel; returns what its one output cell shows, oldest first."""
    shown: list[str] = []

    def display(text: str, display_id: bool) -> Any:
        assert display_id
        shown.append(text)
        return SimpleNamespace(update=shown.append)

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    return shown


def run(progress: lm.Progress, description: str = "materializing") -> None:
    progress.start(1000, description)
    for step in range(10):
        progress.advance(100, f"[/variable_{step}]")
    progress.finish()
    progress.finish()  # harmless


# --- a terminal ---


@pytest.mark.parametrize("progress", [None, True])
def test_a_terminal_gets_a_bar_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch, progress: bool | None):
    terminal = stream(monkeypatch, Terminal())
    run(progress_for(progress), HOSTILE)
    text = terminal.getvalue()
    assert "[/variable_9]" in text and "1,000/1,000 bytes" in text and "\x1b[31m<script>" not in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_the_terminal_is_whole_after_an_exception(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    terminal = stream(monkeypatch, Terminal())
    progress = progress_for(True)
    before = sys.stderr, sys.stdout
    with pytest.raises(RuntimeError):  # noqa: PT012
        progress.start(1000, "materializing")
        try:
            print("for standard output")
            raise RuntimeError
        finally:
            progress.finish()
    assert (sys.stderr, sys.stdout) == before
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1
    assert "for standard output" not in terminal.getvalue()
    assert capsys.readouterr().out == "for standard output\n"


def test_a_bar_inside_the_program_s_own_display(monkeypatch: pytest.MonkeyPatch):
    terminal = stream(monkeypatch, Terminal())
    from rich.console import Console
    from rich.live import Live

    with Live("own display", console=Console(file=terminal)):
        run(progress_for(True))


def test_a_bar_shows_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    terminal = stream(monkeypatch, Terminal())
    bar: Any = progress_for(None)
    bar.start(4096, "x")
    bar.bar.get_time = clock
    for _ in range(2):
        clock.now += 2
        bar.advance(1024)
    bar.bar.refresh()
    bar.finish()
    assert "2.0/4.0 KiB" in terminal.getvalue() and "512 bytes/s" in terminal.getvalue()
    assert "0:00:04" in terminal.getvalue()


def test_a_notebook_gets_a_bar_of_its_own(notebook: list[str], clock: Clock):
    cell = progress_for(None)
    cell.start(4096, "<b>materializing")
    clock.now += 2
    cell.advance(1024, "w<script>")
    cell.advance(1024)  # sooner than people see
    cell.finish()
    texts = [Page(text).text.strip() for text in notebook]
    assert [text.split(" left")[0] for text in texts] == [
        "0 B of 4.00 KiB <b>materializing",
        "1.00 KiB of 4.00 KiB, 512 B/s, 0:06",
        "2.00 KiB of 4.00 KiB, 1.00 KiB/s, 0:02",
    ]
    assert not any("script" in Page(text).tags for text in notebook)


# --- a log ---


def test_lines_say_percent_bytes_time_and_rate_every_five_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    log = stream(monkeypatch, io.StringIO())
    lines = progress_for(True)
    lines.start(100 * GIB, "gemma: materializing 3 variables")
    for _ in range(100):  # a piece a second
        clock.now += 1
        lines.advance(GIB, "w")
    lines.finish()
    written = log.getvalue().splitlines()
    assert written[0] == "gemma: materializing 3 variables: 5%, 5.00 GiB of 100.00 GiB in 5.0 s, 1.00 GiB/s"
    assert written[12] == "gemma: materializing 3 variables: 65%, 65.00 GiB of 100.00 GiB in 0:01:05, 1.00 GiB/s"
    assert written[-1] == "gemma: materializing 3 variables: 100%, 100.00 GiB of 100.00 GiB in 0:01:40, 1.00 GiB/s"
    assert len(written) == 20 + 1


def test_what_is_empty_or_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    log = stream(monkeypatch, io.StringIO())
    lines = progress_for(True)
    lines.start(0, "no bytes\x1b[31m\nat all")
    lines.finish()
    lines.finish()  # harmless
    lines.start(1000, "x")
    lines.advance(499)
    lines.finish()
    empty, failed = log.getvalue().splitlines()
    assert empty == "no bytes\\x1b[31m\\nat all: 100%, 0 B of 0 B in 0.0 s"
    assert failed.startswith("x: 49%, 499 B of 1000 B in")


def test_a_reader_that_has_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch):
    reading, writing = os.pipe()
    os.close(reading)
    closed = io.StringIO()
    closed.close()
    broken: Any = os.fdopen(writing, "w", buffering=1)
    for gone in (broken, closed, None):
        stream(monkeypatch, gone)
        run(progress_for(True))
        run(progress_for(None))
    with pytest.raises(BrokenPipeError):
        broken.close()


def test_nobody_is_written_to_who_does_not_watch_or_want_it(monkeypatch: pytest.MonkeyPatch):
    for given, progress in ((Terminal(), False), (io.StringIO(), None)):
        shown = stream(monkeypatch, given)
        run(progress_for(progress))
        assert shown.getvalue() == ""


# --- a program ---


def test_a_callable_gets_bytes_done_and_in_all():
    calls: list[tuple[int, int]] = []
    progress = progress_for(lambda done, total: calls.append((done, total)))
    progress.start(30, "x")
    progress.advance(10)
    progress.advance(20, "y")
    progress.advance(0, "z")  # a name, and nothing new to count
    progress.finish()
    assert calls == [(0, 30), (10, 30), (30, 30)]


@pytest.mark.parametrize("kind", ["callable", "bar", "notebook", "lines"])
def test_advance_counts_right_from_many_threads(
    kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    done: list[int] = []
    shown = stream(monkeypatch, Terminal() if kind == "bar" else io.StringIO())
    if kind == "notebook":
        done = request.getfixturevalue("notebook")
    progress: Any = progress_for((lambda count, total: done.append(count)) if kind == "callable" else True)
    progress.start(8 * 500, "x")
    threads = [threading.Thread(target=lambda: [progress.advance(1) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kind != "bar" or progress.bar.tasks[0].completed == 8 * 500
    progress.finish()
    assert kind != "callable" or done == list(range(8 * 500 + 1))
    assert kind != "notebook" or "3.91 KiB of 3.91 KiB" in str(done[-1])
    assert kind != "lines" or shown.getvalue().startswith("x: 100%, 3.91 KiB of 3.91 KiB")


def test_an_object_is_used_as_it_is():
    class Mine:
        def start(self, total_nbytes: int, description: str) -> None: ...
        def advance(self, nbytes: int, description: str | None = None) -> None: ...
        def finish(self) -> None: ...

    mine = Mine()
    assert progress_for(mine) is mine
    with pytest.raises(lm.LazyModelError, match="got 'yes'"):
        progress_for("yes")  # pyright: ignore

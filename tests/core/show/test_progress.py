"""Progress: a bar that ends, a line in a log now and then, calls for a program; nothing that could stop the work."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

import lazymodel as lm
from lazymodel._show.progress import progress_for

GIB = 1 << 30
HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>\n&amp;/kernel"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stream(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> Any:
    """Makes it standard error; called in the test itself, because pytest sets that anew after fixtures."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def run(progress: lm.Progress, description: str = "materializing") -> None:
    progress.start(1000, description)
    for step in range(10):
        progress.advance(100, f"[/variable_{step}]")
    progress.finish()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "lazymodel")
    return caplog


# --- a bar ---


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


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_gets_a_bar_if_it_has_widgets(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture, widgets: bool
):
    """Without them, rich would warn and draw nothing."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("lazymodel._show.progress.find_spec", lambda _: SimpleNamespace() if widgets else None)
    stream(monkeypatch, io.StringIO())
    progress: Any = progress_for(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rich, if there are no widgets here
        run(progress)
    assert (progress.bar.tasks[0].completed if widgets else 1000) == 1000
    assert [message[:20] for message in logged.messages] == ([] if widgets else ["materializing: 100%,"])


# --- a log ---


def test_a_log_says_percent_bytes_time_and_rate_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream(monkeypatch, io.StringIO())
    progress = progress_for(True)
    progress.start(100 * GIB, "gemma: materializing 3 variables")
    for _ in range(100):  # a piece a second
        now[0] += 1
        progress.advance(GIB, "w")
    progress.finish()
    written = logged.messages
    assert written[0] == "gemma: materializing 3 variables: 5%, 5.00 GiB of 100.00 GiB in 5.0 s, 1.00 GiB/s"
    assert written[-1] == "gemma: materializing 3 variables: 100%, 100.00 GiB of 100.00 GiB in 100.0 s, 1.00 GiB/s"
    assert len(written) == 20 + 1
    progress.start(0, "no bytes\x1b[31m\nat all")
    progress.finish()
    progress.start(1000, "x")
    progress.advance(499)
    progress.finish()
    assert logged.messages[-2:] == [
        "no bytes\\x1b[31m\\nat all: 100%, 0 B of 0 B in 0.0 s",
        "x: 49%, 499 B of 1000 B in 0.0 s",
    ]


def test_a_standard_error_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch):
    closed = io.StringIO()
    closed.close()
    for gone in (closed, None):
        stream(monkeypatch, gone)
        run(progress_for(True))
        run(progress_for(None))


def test_nobody_is_written_to_who_does_not_watch_or_want_it(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
):
    for given, progress in ((Terminal(), False), (io.StringIO(), None), (io.StringIO(), False)):
        shown = stream(monkeypatch, given)
        run(progress_for(progress))
        assert shown.getvalue() == "" and not logged.messages


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


@pytest.mark.parametrize("kind", ["callable", "bar", "log"])
def test_advance_counts_right_from_many_threads(
    kind: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
):
    done: list[int] = []
    stream(monkeypatch, Terminal() if kind == "bar" else io.StringIO())
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
    assert kind != "log" or logged.messages[-1].startswith("x: 100%, 3.91 KiB of 3.91 KiB")


def test_an_object_is_used_as_it_is():
    class Mine:
        def start(self, total_nbytes: int, description: str) -> None: ...
        def advance(self, nbytes: int, description: str | None = None) -> None: ...
        def finish(self) -> None: ...

    mine = Mine()
    assert progress_for(mine) is mine
    with pytest.raises(lm.LazyModelError, match="got 'yes'"):
        progress_for("yes")  # pyright: ignore

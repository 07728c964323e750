"""Progress of running work: a bar for interactive use, lines for a log, calls for a program."""

from __future__ import annotations

import contextlib
import html
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from lazymodel._errors import LazyModelError
from lazymodel._show.text import format_bytes, printable

_REDRAW_SECONDS = 0.2  # between redraws of a notebook's bar
_LINE_SECONDS = 5.0  # between lines: loading for an hour writes some hundred lines to a log

# The argument `report=` of a method; a callable gets the method's report.
ReportTo: TypeAlias = "bool | Callable[[Any], object] | None"


def delivery(report: ReportTo) -> Callable[[Any], object] | None:
    """The function that receives the report, if any."""
    if report is None or isinstance(report, bool):
        return print if report else None
    if callable(report):
        return report
    raise LazyModelError(f"report is True, None or a callable that takes the LoadReport; got {report!r}")


@runtime_checkable
class Progress(Protocol):
    """Progress of `materialize`, in bytes of the distinct shards of this process.

    `advance` is called from several threads, one call at a time. An exception in it ends the work.

    Example:
        >>> class Logged:
        ...     def start(self, total_nbytes, description):
        ...         print(description, total_nbytes)
        ...
        ...     def advance(self, nbytes, description=None): ...
        ...
        ...     def finish(self):
        ...         print("done")
        >>> model = sharded.materialize(progress=Logged())
        init: materializing 2 variables 131072
        done
    """

    def start(self, total_nbytes: int, description: str) -> None:
        """Called when work of this many bytes begins."""
        ...

    def advance(self, nbytes: int, description: str | None = None) -> None:
        """Called when `nbytes` more bytes are done, several times for large variables.

        The description names what was finished, such as a variable's path; its last bytes may have been reported
        before, with 0 now. When all bytes are done, it may name what is being waited for.
        """
        ...

    def finish(self) -> None:
        """Called exactly once after `start` when the work has ended, with or without an error."""
        ...


ProgressTo: TypeAlias = "bool | Progress | Callable[[int, int], object] | None"


def progress_for(to: ProgressTo) -> Progress:
    """The reporter for a user's `progress` argument.

    None draws a bar for interactive use: standard error is a terminal, or this is a notebook. True writes lines if no
    bar can be drawn. A callable is never called by two threads at once.

    Raises:
        LazyModelError: It is none of these.
    """
    if to is None:
        to = _in_notebook() or _is_terminal(sys.stderr)
    if isinstance(to, bool):
        if not to:
            return _Reporter()
        return _NotebookBar() if _in_notebook() else _TerminalBar() if _is_terminal(sys.stderr) else _Lines()
    if isinstance(to, Progress):
        return to
    if callable(to):
        return _Calls(to)
    raise LazyModelError(
        "progress is True, False, None, a callable of (done bytes, total bytes) or an object with start, advance and "
        f"finish; got {to!r}"
    )


class _Reporter:
    """Counts finished bytes, one thread at a time, and draws them at most every `interval` seconds; here not at all."""

    interval = 0.0
    names = False  # True to show the name of what was finished last, rather than that of all work

    def __init__(self) -> None:
        self._lock, self._running = threading.Lock(), False

    def start(self, total_nbytes: int, description: str) -> None:
        with self._lock:
            self.description, self.done, self.total = printable(description), 0, total_nbytes
            self._started = self._drawn = time.monotonic()
            self._running = True
            self.begin()

    def advance(self, nbytes: int, description: str | None = None) -> None:
        with self._lock:
            if not self._running:
                return
            self.done += nbytes
            if description is not None and self.names:
                self.description = printable(description)
            if time.monotonic() - self._drawn >= self.interval:
                self._drawn = time.monotonic()
                self.draw()

    def finish(self) -> None:
        with self._lock:
            if self._running:
                self.end()
            self._running = False

    def begin(self) -> None: ...

    def draw(self) -> None: ...

    def end(self) -> None:
        self.draw()

    def state(self) -> tuple[str, float, float]:
        """Bytes done of the total as text, seconds since the start, and bytes per second, 0 if unknown."""
        seconds = time.monotonic() - self._started
        rate = self.done / seconds if seconds > 0 else 0.0
        text = f"{format_bytes(self.done)} of {format_bytes(self.total)}"
        return text, seconds, rate


class _Calls(_Reporter):
    """Calls a function with bytes done and total bytes."""

    def __init__(self, function: Callable[[int, int], object]) -> None:
        super().__init__()
        self._function, self._last = function, -1

    def begin(self) -> None:
        self._last = -1
        self.draw()

    def draw(self) -> None:
        if self.done != self._last:  # an update may only have a name
            self._last = self.done
            self._function(self.done, self.total)


class _Lines(_Reporter):
    """If no bar can be drawn, writes lines to standard error: at most every few seconds, and at the end."""

    interval = _LINE_SECONDS

    def draw(self) -> None:
        text, seconds, rate = self.state()
        minutes, rest = divmod(int(seconds), 60)
        took = f"{seconds:.1f} s" if seconds < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        percent = 100 * self.done // self.total if self.total else 100
        line = f"{self.description}: {percent}%, {text} in {took}{f', {format_bytes(rate)}/s' if rate else ''}\n"
        stream = sys.stderr
        # The stream may be missing or closed, or the reader of a pipe has gone: the work continues.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.write(line)  # in one call, since other processes may write there as well
            stream.flush()


class _TerminalBar(_Reporter):
    """A bar on standard error with bytes, rate and time left; it is removed when the work ends."""

    names = True
    bar: Any = None

    def begin(self) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        # No markup: a variable may be named "[red]". One line: a bar that wraps cannot be redrawn in place.
        one_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        bar = RichProgress(
            TextColumn("{task.description}", markup=False, table_column=one_line),
            BarColumn(bar_width=24),
            DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            expand=True,
            redirect_stdout=False,  # a program's standard output must not go to standard error
        )
        self._task = bar.add_task(self.description, total=self.total)
        # A terminal can show one display; the program may already draw its own.
        with contextlib.suppress(LiveError):
            bar.start()
            self.bar = bar

    def draw(self) -> None:
        if self.bar is not None:
            self.bar.update(self._task, completed=self.done, description=self.description)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()  # restores the cursor and the line
        self.bar = None


class _NotebookBar(_Reporter):
    """A bar in a notebook's cell; needs only IPython, while rich's own bar needs widgets."""

    interval, names = _REDRAW_SECONDS, True

    def begin(self) -> None:
        self._handle: Any = None
        self.draw()

    def draw(self) -> None:
        from IPython.display import HTML, display  # pyright: ignore

        text, _, rate = self.state()
        left = math.ceil(max(self.total - self.done, 0) / rate) if rate else 0
        text += f", {format_bytes(rate)}/s" * bool(rate) + f", {left // 60}:{left % 60:02d} left" * bool(left)
        bar = f'<progress value="{self.done}" max="{max(self.total, 1)}"></progress>'
        drawn = HTML(f"<div>{bar} {html.escape(text)} {html.escape(self.description)}</div>")
        if self._handle is None:
            self._handle = display(drawn, display_id=True)
        else:
            self._handle.update(drawn)


def _is_terminal(stream: Any) -> bool:
    # Programs without a console (pythonw, some servers) have no standard error, or a closed one.
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:
        return False


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None

"""Progress while work goes on: a bar for who is watching, lines for a log, calls for a program."""

from __future__ import annotations

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
_LINE_SECONDS = 5.0  # between lines: a load of an hour leaves some hundred lines in a log

# What `report=` of a verb takes; the callable is given the verb's report.
ReportTo: TypeAlias = "bool | Callable[[Any], object] | None"


def delivery(report: ReportTo) -> Callable[[Any], object] | None:
    """The function that takes the report, if any."""
    if report is None or isinstance(report, bool):
        return print if report else None
    if callable(report):
        return report
    raise LazyModelError(f"report is True, None or a callable that takes the LoadReport; got {report!r}")


@runtime_checkable
class Progress(Protocol):
    """What `materialize` tells while it works, in bytes of the distinct shards of this process.

    `advance` is called from several threads, one call at a time. An exception raised in it ends the work.

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
        """Work of this many bytes begins."""
        ...

    def advance(self, nbytes: int, description: str | None = None) -> None:
        """So many bytes more are done, in pieces of variables where those are large.

        The description names what was finished, such as a variable's path; its last bytes may have been told of
        before, and 0 now. Or what is waited for when all bytes are there.
        """
        ...

    def finish(self) -> None:
        """The work ended, well or not; called exactly once after `start`."""
        ...


ProgressTo: TypeAlias = "bool | Progress | Callable[[int, int], object] | None"


def progress_for(progress: ProgressTo) -> Progress:
    """The reporter for what a person passed as `progress`.

    None draws a bar where somebody watches: standard error is a terminal, or this is a notebook. True writes lines
    where no bar can be drawn. A callable is never called by two threads at once.

    Raises:
        LazyModelError: It is none of these.
    """
    if progress is None:
        progress = _in_notebook() or _is_terminal(sys.stderr)
    if isinstance(progress, bool):
        if not progress:
            return _Counted()
        return _NotebookBar() if _in_notebook() else _TerminalBar() if _is_terminal(sys.stderr) else LogLines()
    if isinstance(progress, Progress):
        return progress
    if callable(progress):
        return _Counted(function=progress)
    raise LazyModelError(
        "progress is True, False, None, a callable of (done bytes, total bytes) or an object with start, advance and "
        f"finish; got {progress!r}"
    )


class _Counted:
    """Counts what is done, one thread at a time, and tells a function of bytes done and bytes in all."""

    _description = ""
    _done = _total = 0
    _running = False
    _started = _told = 0.0

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        function: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self._clock, self._function, self._lock = clock or time.monotonic, function, threading.Lock()

    def start(self, total_nbytes: int, description: str) -> None:
        with self._lock:
            self._description, self._done, self._total = printable(description), 0, total_nbytes
            self._started = self._told = self._clock()
            self._running = True
            self._begin()

    def advance(self, nbytes: int, description: str | None = None) -> None:
        with self._lock:
            self._done += nbytes
            self._advanced(nbytes, None if description is None else printable(description))

    def finish(self) -> None:
        with self._lock:
            if self._running:
                self._end()
            self._running = False

    def _begin(self) -> None:  # these three are called with the lock held
        self._function(0, self._total)

    def _advanced(self, nbytes: int, description: str | None) -> None:
        if nbytes:  # without, it is news for those who show names
            self._function(self._done, self._total)

    def _end(self) -> None: ...

    def _due(self, interval: float) -> bool:
        """Whether it is that long ago that this last returned True."""
        now = self._clock()
        if not self._running or now - self._told < interval:
            return False
        self._told = now
        return True

    def _state(self) -> tuple[str, float, float]:
        """Bytes done of all as text, seconds since the start, and bytes a second, 0 where that is not known."""
        seconds = self._clock() - self._started
        rate = self._done / seconds if seconds > 0 else 0.0
        return f"{format_bytes(self._done)} of {format_bytes(self._total)}", seconds, rate


class LogLines(_Counted):
    """Where no bar can be drawn, a line on standard error: at most every few seconds, and at the end."""

    def _advanced(self, nbytes: int, description: str | None) -> None:
        if self._due(_LINE_SECONDS):
            self._end()

    def _end(self) -> None:
        text, seconds, rate = self._state()
        minutes, rest = divmod(int(seconds), 60)
        took = f"{seconds:.1f} s" if seconds < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        percent = 100 * self._done // self._total if self._total else 100
        line = f"{self._description}: {percent}%, {text} in {took}{f', {format_bytes(rate)}/s' if rate else ''}\n"
        stream = sys.stderr
        try:
            if stream is not None:  # programs without a console have none
                stream.write(line)  # in one piece, since other processes may write there as well
                stream.flush()
        except (OSError, ValueError):
            pass  # whoever read the pipe has gone, or the stream is closed: no reason to stop the work


class _TerminalBar(_Counted):
    """A bar on standard error with bytes, rate and time left; it is removed when the work ends."""

    _bar: Any = None

    def _begin(self) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column
        from rich.text import Text

        class Bytes(ProgressColumn):
            """Bytes done, in all and a second, in the units of every other report (rich's own mixes MB and MiB)."""

            def render(self, task: Task) -> Text:
                rate = "" if not task.speed else f", {format_bytes(task.speed)}/s"
                return Text(f"{format_bytes(task.completed)} of {format_bytes(task.total or 0)}{rate}")

        self._end()
        # No markup: a variable may be called "[red]". One line: a bar that wraps cannot be redrawn in place.
        one_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        bar = RichProgress(
            TextColumn("{task.description}", markup=False, table_column=one_line),
            BarColumn(bar_width=24),
            Bytes(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            expand=True,
            redirect_stdout=False,  # what a program prints on standard output must not end up on standard error
        )
        self._task = bar.add_task(self._description, total=self._total)
        try:
            bar.start()
        except LiveError:
            return  # the program already draws a display of its own, and a terminal holds one
        self._bar = bar

    def _advanced(self, nbytes: int, description: str | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=nbytes, description=description)  # None leaves it as it is

    def _end(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()  # gives the cursor back, and the line


class _NotebookBar(_Counted):
    """A bar in a notebook's cell; needs IPython only, while rich's own needs widgets."""

    _handle: Any = None

    def _begin(self) -> None:
        from IPython.display import display  # pyright: ignore

        self._handle = display(self._drawn(), display_id=True)

    def _advanced(self, nbytes: int, description: str | None) -> None:
        self._description = self._description if description is None else description
        if self._due(_REDRAW_SECONDS):
            self._end()

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.update(self._drawn())

    def _drawn(self) -> Any:
        from IPython.display import HTML  # pyright: ignore

        text, _, rate = self._state()
        if rate:
            text += f", {format_bytes(rate)}/s"
            if left := math.ceil(max(self._total - self._done, 0) / rate):
                text += f", {left // 60}:{left % 60:02d} left"
        return HTML(
            f'<div><progress value="{self._done}" max="{max(self._total, 1)}"></progress> '
            f"{html.escape(text)} {html.escape(self._description)}</div>"
        )


def _is_terminal(stream: Any) -> bool:
    # Programs without a console (pythonw, some servers) have no standard error, others one that is closed.
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:
        return False


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None

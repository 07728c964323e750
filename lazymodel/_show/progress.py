"""Progress of running work: a bar of rich for interactive use, `logging`, calls for a program; timelines.

A timeline has spans since the process started, as a table with bars, as a figure and in a page; callers measure and
name them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

from lazymodel._errors import LazyModelError
from lazymodel._show import clock
from lazymodel._show.table import Column, Table, Tabled, plain, terminal_width
from lazymodel._show.text import PALETTE, empty_figure, finished_figure, format_bytes, grouped_by, printable

_LOGGER = logging.getLogger("lazymodel")
_LOG_SECONDS = 5.0  # between lines: loading for an hour writes some hundred of them

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

    None draws a bar for interactive use: standard error is a terminal, or this is a notebook with ipywidgets. True logs
    if no bar can be drawn. A callable is never called by two threads at once.

    Raises:
        LazyModelError: It is none of these.
    """
    if to is None or to is True:
        return _Bar() if _can_draw() else _Log() if to else _Calls(lambda done, total: None)
    if to is False:
        return _Calls(lambda done, total: None)
    if isinstance(to, Progress):
        return to
    if callable(to):
        return _Calls(to)
    raise LazyModelError(
        "progress is True, False, None, a callable of (done bytes, total bytes) or an object with start, advance and "
        f"finish; got {to!r}"
    )


def announce(bar: Progress, line: str) -> None:
    """Logs what ended; unless that is shown, a terminal that had a bar gets the line in its place."""
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info("%s", printable(line))
    elif isinstance(bar, _Bar) and sys.stderr.isatty():
        print(printable(line), file=sys.stderr)


@contextlib.contextmanager
def reported(bar: Progress, total_nbytes: int, description: str) -> Generator[None]:
    """Within the block, work of so many bytes is reported to `bar`."""
    bar.start(total_nbytes, description)
    try:
        yield
    finally:
        bar.finish()


class _Calls:
    """Calls a function with bytes done and total bytes."""

    def __init__(self, function: Callable[[int, int], object]) -> None:
        self._function, self._lock = function, threading.Lock()

    def start(self, total_nbytes: int, description: str) -> None:
        self._done, self._total = 0, total_nbytes
        self._function(0, total_nbytes)

    def advance(self, nbytes: int, description: str | None = None) -> None:
        with self._lock:
            if nbytes:  # an update may only have a name
                self._done += nbytes
                self._function(self._done, self._total)

    def finish(self) -> None: ...


class _Log:
    """Logs at most every few seconds, and at the end."""

    def start(self, total_nbytes: int, description: str) -> None:
        self._lock, self._description, self._done, self._total = threading.Lock(), description, 0, total_nbytes
        self._started = self._logged = time.monotonic()

    def advance(self, nbytes: int, description: str | None = None) -> None:
        with self._lock:
            self._done += nbytes
            if time.monotonic() - self._logged >= _LOG_SECONDS:
                self._logged = time.monotonic()
                self.finish()

    def finish(self) -> None:
        seconds = time.monotonic() - self._started
        percent = 100 * self._done // self._total if self._total else 100
        rate = f", {format_bytes(self._done / seconds)}/s" if seconds else ""
        text = f"{percent}%, {format_bytes(self._done)} of {format_bytes(self._total)} in {seconds:.1f} s{rate}"
        _LOGGER.info("%s: %s", printable(self._description), text)


class _Bar:
    """A bar of rich on standard error, or in a notebook's cell; it is removed when the work ends."""

    def start(self, total_nbytes: int, description: str) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        # No markup: a variable may be named "[red]". One line: a bar that wraps cannot be redrawn in place.
        one_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.bar: Any = RichProgress(
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
        self._task = self.bar.add_task(printable(description), total=total_nbytes)
        # A terminal can show one display; the program may already draw its own.
        with contextlib.suppress(LiveError):
            self.bar.start()

    def advance(self, nbytes: int, description: str | None = None) -> None:
        named = {} if description is None else {"description": printable(description)}
        self.bar.update(self._task, advance=nbytes, **named)

    def finish(self) -> None:
        self.bar.stop()  # restores the cursor and the line


def _can_draw() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is not None:
        return find_spec("ipywidgets") is not None
    # Programs without a console (pythonw, some servers) have no standard error, or a closed one.
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


_WIDTH = 48  # columns of a bar in a terminal, if it is wide enough for the other columns, which are as wide
_LEAST_WIDTH = 12
_BLOCK, _IDLE_BLOCK, _EARLIER = "█", "·", "◂"
_LEAST = 0.005  # seconds; a shorter row would show 0.00
_IDLE = 5.0  # longest time without a span that a picture always shows
_ROW_INCHES = 0.28
_COLOURS: dict[str, str] = dict(
    zip(("compile", "stream", "build", "initialize", "first step", "exchange", "import"), PALETTE, strict=True)
)
_OTHER = "#999999"
_AXIS = f"seconds since {'the process started' if clock.START_IS_KNOWN else 'lazymodel was imported'}"


@dataclasses.dataclass(frozen=True)
class Span:
    """A step that took time.

    Attributes:
        name: The kind of step: `"import"`, `"build"`, `"shard"`, `"match"` (of tensors and variables), `"lower"`,
            `"compile"`, `"initialize"`, `"stream"`, `"exchange"`, `"rebuild"` (of the user's object), or your own.
        start: Its start, in seconds since the process started; if that is unknown, since `import lazymodel`.
        stop: Its end, likewise.
        detail: Distinguishes several steps with the same name, such as the imported package.
    """

    name: str
    start: float
    stop: float
    detail: str = ""

    @classmethod
    def since(cls, start: float, name: str, detail: str = "") -> Self:
        """A span that began at this time of `time.perf_counter()` and ends now."""
        return cls(name, start - clock.ZERO, time.perf_counter() - clock.ZERO, detail)

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.stop - self.start

    @property
    def label(self) -> str:
        """The name and the detail."""
        return f"{self.name}: {self.detail}" if self.detail else self.name


# Label, start, stop, seconds, and the intervals of its spans, without overlaps.
_Row: TypeAlias = "tuple[str, float, float, float, list[tuple[float, float]]]"


class Timeline(Tabled, list[Span]):
    """Spans, in the order in which they ended; prints as a table with bars. Any thread may add to it."""

    @classmethod
    def after_imports(cls, spans: Iterable[Span]) -> Self:
        """A timeline that begins with the imports of this process, followed by these spans."""
        timeline = cls()
        for package, start, stop in clock.IMPORTS:
            timeline.add("import", start, stop, package)
        timeline.extend(spans)
        return timeline

    def add(self, name: str, start: float, stop: float, detail: str = "") -> None:
        """Adds a span between two times of `time.perf_counter()`."""
        self.append(Span(name, start - clock.ZERO, stop - clock.ZERO, detail))

    @contextlib.contextmanager
    def span(self, name: str, detail: str = "") -> Generator[None]:
        """Adds a span for the context, even if it fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter(), detail)

    def seconds(self, name: str) -> float:
        """The total duration of all spans with a name."""
        return sum(span.seconds for span in self if span.name == name)

    def to_dict(self) -> list[dict[str, Any]]:
        """The spans as dicts of strings and numbers."""
        return plain(self)

    # Showing ----------------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """A row for all spans of one label, in the order in which they began, except the shortest."""
        rows, begin, end = self._rows()
        width = max(min(_WIDTH, terminal_width() - _WIDTH), _LEAST_WIDTH)

        def bar(intervals: Sequence[tuple[float, float]]) -> str:
            """A bar in which every span has at least one column."""
            cells = [_IDLE_BLOCK] * width
            for start, stop in intervals:
                first = min(int((start - begin) / (end - begin) * width), width - 1)
                last = max(round((stop - begin) / (end - begin) * width), first + 1)
                cells[first:last] = _BLOCK * (last - first)
            return "".join(cells) if intervals else _EARLIER.ljust(width, _IDLE_BLOCK)

        columns = (Column(""), *map(Column.number, ("from", "to", "took", "")))
        cells = [(label, *(f"{number:.2f}" for number in numbers), bar(spans)) for label, *numbers, spans in rows]
        return Table(_AXIS, columns, cells)

    def plot(self, name: str, path: Any = None) -> Any:
        """A `matplotlib.figure.Figure` of it with the name as title, written to a file; for `LoadReport.plot`."""
        rows, begin, end = self._rows()
        drawn = empty_figure((9.6, 1.0 + _ROW_INCHES * max(len(rows), 1)))
        axes = drawn.subplots()
        for place, (label, _, _, took, intervals) in enumerate(rows):
            bars = [(start, stop - start) for start, stop in intervals]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=_COLOURS.get(label.partition(":")[0], _OTHER))
            # The text is next to its bar; before it if the bar ends near the edge of the figure.
            first, last = (intervals[0][0], intervals[-1][1]) if intervals else (begin, begin)
            past = last > begin + 0.9 * (end - begin)
            look = {"fontsize": 7, "va": "center", "ha": "right" if past else "left"}
            axes.text(first if past else last, place, f" {took:.2f} s ", **look)
        axes.set_yticks(range(len(rows)), [printable(row[0]).replace("$", r"\$") for row in rows], fontsize=8)
        axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        axes.set_xlim(begin, end)
        axes.set_xlabel(_AXIS)
        return finished_figure(drawn, name, path)

    def _rows(self) -> tuple[list[_Row], float, float]:
        """The rows, and the limits of the bars.

        Bars are not drawn before an idle time that is longer than everything after it, for example in a notebook whose
        imports ran hours ago.
        """
        spans = sorted(self, key=lambda span: -span.stop)
        begin, end = (spans[0].start, spans[0].stop) if spans else (0.0, 1.0)
        for span in spans:
            if begin - span.stop > max(end - begin, _IDLE):
                break
            begin = min(begin, span.start)
        rows: list[_Row] = []
        in_order = sorted(self, key=lambda span: (span.start, -span.stop))
        for label, some in grouped_by(in_order, lambda span: span.label).items():
            if (took := sum(span.seconds for span in some)) < _LEAST:
                continue
            intervals: list[tuple[float, float]] = []
            at = begin
            for span in some:
                if span.stop > at:
                    intervals.append((max(span.start, at), span.stop))
                    at = span.stop
            rows.append((label, some[0].start, max(span.stop for span in some), took, intervals))
        return rows, begin, max(end, begin + 1e-6)

"""A timeline since the process started: spans, as a table with bars, as a figure and in a page.

Responsible for keeping and showing spans; callers measure and name them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, Self

from lazymodel._show import clock
from lazymodel._show.page import Spans
from lazymodel._show.table import Column, Table, Tabled, plain, terminal_width
from lazymodel._show.text import PALETTE, empty_figure, finished_figure, grouped_by, printable

_WIDTH = 48  # columns of a bar in a terminal, if it is wide enough
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


class _Row(NamedTuple):
    label: str
    start: float
    stop: float
    took: float
    intervals: list[tuple[float, float]]  # of its spans, without overlaps


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
        width = min(_WIDTH, terminal_width() - 2)

        def bar(intervals: Sequence[tuple[float, float]]) -> str:
            """A bar in which every span has at least one column."""
            cells = [_IDLE_BLOCK] * width
            for start, stop in intervals:
                first = min(int((start - begin) / (end - begin) * width), width - 1)
                last = max(round((stop - begin) / (end - begin) * width), first + 1)
                cells[first:last] = _BLOCK * (last - first)
            return "".join(cells) if intervals else _EARLIER.ljust(width, _IDLE_BLOCK)

        columns = (Column(_AXIS), *map(Column.number, ("from", "to", "took", "")))
        cells = [(label, *(f"{number:.2f}" for number in numbers), bar(spans)) for label, *numbers, spans in rows]
        return Table("", columns, cells)

    def plot(self, name: str, path: Any = None) -> Any:
        """A `matplotlib.figure.Figure` of it with the name as title, written to a file; for `LoadReport.plot`."""
        rows, begin, end = self._rows()
        drawn = empty_figure((9.6, 1.0 + _ROW_INCHES * max(len(rows), 1)))
        axes = drawn.subplots()
        for place, row in enumerate(rows):
            bars = [(start, stop - start) for start, stop in row.intervals]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=_COLOURS.get(row.label.partition(":")[0], _OTHER))
            # The text is next to its bar; before it if the bar ends near the edge of the figure.
            first, last = (row.intervals[0][0], row.intervals[-1][1]) if row.intervals else (begin, begin)
            past = last > begin + 0.9 * (end - begin)
            look = {"fontsize": 7, "va": "center", "ha": "right" if past else "left"}
            axes.text(first if past else last, place, f" {row.took:.2f} s ", **look)
        axes.set_yticks(range(len(rows)), [printable(row[0]).replace("$", r"\$") for row in rows], fontsize=8)
        axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        axes.set_xlim(begin, end)
        axes.set_xlabel(_AXIS)
        return finished_figure(drawn, name, path)

    def section(self) -> Spans:
        """The section of a page that shows it."""
        rows, _, _ = self._rows()
        return Spans("What took how long", [(label, intervals) for label, *_, intervals in rows if intervals], _AXIS)

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
            rows.append(_Row(label, some[0].start, max(span.stop for span in some), took, intervals))
        return rows, begin, max(end, begin + 1e-6)

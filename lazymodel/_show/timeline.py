"""What took how long since the process started: spans, told as a table with bars, in HTML, and as a figure.

Responsible for keeping and showing them; what a span is of is said by whoever measures it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Self, overload

from lazymodel._show import clock
from lazymodel._show.figures import PALETTE, bar, empty_figure, finished_figure
from lazymodel._show.page import Spans
from lazymodel._show.table import Table, Tabled, terminal_width
from lazymodel._show.text import grouped_by, printable

_WIDTH = 48  # columns of a bar in a terminal, where it has so many
_BLOCK, _EARLIER = "█", "◂"
_LEAST = 0.005  # seconds; a row of less would say 0.00
_IDLE = 5.0  # seconds without a span that a picture shows in any case
_ROW_INCHES = 0.28
_COLOURS: dict[str, str] = dict(
    zip(("compile", "stream", "build", "initialize", "first step", "exchange", "import"), PALETTE, strict=True)
)
_OTHER = "#999999"


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        name: What it was: `"import"`, `"build"`, `"shard"`, `"match"` (which tensor becomes which variable), `"lower"`,
            `"compile"`, `"initialize"`, `"stream"`, `"exchange"`, `"rebuild"` (of the user's object), or yours.
        start: When it began, in seconds since the process started; where that is unknown, since `import lazymodel`.
        stop: When it was over, likewise.
        detail: What of several by that name it was, such as the package that was imported.
    """

    name: str
    start: float
    stop: float
    detail: str = ""

    @classmethod
    def since(cls, start: float, name: str, detail: str = "") -> Self:
        """What began at this moment of `time.perf_counter()` and is over now."""
        return cls(name, start - clock.ZERO, time.perf_counter() - clock.ZERO, detail)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start

    @property
    def label(self) -> str:
        """The name and what of several it was."""
        return f"{self.name}: {self.detail}" if self.detail else self.name


class Timeline(Tabled, Sequence[Span]):
    """Spans, in the order in which they were over; prints as a table with bars. Any thread may add to it."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = list(spans)

    @classmethod
    def after_imports(cls, spans: Iterable[Span]) -> Self:
        """One that begins with what this process has imported, and then these."""
        timeline = cls()
        for package, start, stop in clock.IMPORTS:
            timeline.add("import", start, stop, package)
        timeline._spans.extend(spans)
        return timeline

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and self._spans == other._spans

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def add(self, name: str, start: float, stop: float, detail: str = "") -> None:
        """Adds what ran between two moments of `time.perf_counter()`."""
        self._spans.append(Span(name, start - clock.ZERO, stop - clock.ZERO, detail))

    @contextlib.contextmanager
    def span(self, name: str, detail: str = "") -> Generator[None]:
        """Adds what runs within the context, even if it fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter(), detail)

    def seconds(self, name: str) -> float:
        """How long everything of a name took, one after the other."""
        return sum(span.seconds for span in self._spans if span.name == name)

    def to_dict(self) -> list[dict[str, Any]]:
        """The spans as dicts of strings and numbers."""
        return [dataclasses.asdict(span) for span in self._spans]

    # Showing ----------------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """What is shown: a row for all spans of one label, in the order in which they began, but for the shortest."""
        begin, end = self._window()
        columns = ("seconds since the process started", "from", "to", "took", "")
        if not clock.START_IS_KNOWN:
            columns = ("seconds since lazymodel was imported", *columns[1:])
        width = min(_WIDTH, terminal_width() - 2)
        rows = [(label, *_numbers(spans), _cells(spans, begin, end, width)) for label, spans in self._rows().items()]
        return Table("", columns, rows, frozenset(columns[1:]))

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """For a notebook: a row for all spans of one label, with a bar that says how long on being pointed at."""
        begin, end = self._window()
        rows: list[str] = []
        for label, spans in self._rows().items():
            pieces: list[tuple[str, str, float]] = []
            at = begin
            for start, stop in _covered(spans, begin):
                pieces.append(("", "", (start - at) / (end - begin)))
                pieces.append((f"{label}: {stop - start:.2f} s", _colour(label), (stop - start) / (end - begin)))
                at = stop
            name, took = html.escape(printable(label)), _numbers(spans)[-1]
            sides = f'<td>{name}</td><td style="text-align:right">{took} s</td>'
            rows.append(f'<tr>{sides}<td style="width:70%">{bar(pieces)}</td></tr>')
        return f'<table style="width:100%"><tbody>{"".join(rows)}</tbody></table>' if rows else ""

    def plot(self, name: str, path: Any = None) -> Any:
        """A `matplotlib.figure.Figure` of it, titled by the name, and written to a file; for `LoadReport.plot`."""
        rows, (begin, end) = self._rows(), self._window()
        drawn = empty_figure((9.6, 1.0 + _ROW_INCHES * max(len(rows), 1)))
        axes = drawn.subplots()
        for place, (label, spans) in enumerate(rows.items()):
            pieces = [(start, stop - start) for start, stop in _covered(spans, begin)]
            axes.broken_barh(pieces, (place - 0.4, 0.8), color=_colour(label))
            text, at = f" {_numbers(spans)[-1]} s", max(pieces[-1][0] + pieces[-1][1] if pieces else begin, begin)
            # Beside its bar, and before it where that ends with the figure.
            past = at > begin + 0.9 * (end - begin)
            at = pieces[0][0] if past else at
            axes.text(at, place, f"{text} ", fontsize=7, va="center", ha="right" if past else "left")
        axes.set_yticks(range(len(rows)), [printable(label).replace("$", r"\$") for label in rows], fontsize=8)
        axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        axes.set_xlim(begin, end)
        axes.set_xlabel(self.table().columns[0])
        return finished_figure(drawn, name, path)

    def section(self) -> Spans:
        """What shows it in a page."""
        begin, _ = self._window()
        rows = [(label, _covered(spans, begin)) for label, spans in self._rows().items()]
        return Spans("What took how long", [row for row in rows if row[1]], self.table().columns[0])

    def _rows(self) -> dict[str, list[Span]]:
        rows = grouped_by(sorted(self._spans, key=lambda span: (span.start, -span.stop)), lambda span: span.label)
        return {label: spans for label, spans in rows.items() if sum(span.seconds for span in spans) >= _LEAST}

    def _window(self) -> tuple[float, float]:
        """From when to when bars are drawn: not what an idle time longer than all that follows it cuts off, as of a
        notebook whose imports ran in the morning.
        """
        spans = sorted(self._spans, key=lambda span: -span.stop)
        if not spans:
            return 0.0, 1.0
        begin, end = spans[0].start, spans[0].stop
        for span in spans:
            if begin - span.stop > max(end - begin, _IDLE):
                break
            begin = min(begin, span.start)
        return begin, max(end, begin + 1e-6)


def _numbers(spans: Sequence[Span]) -> tuple[str, str, str]:
    """From when, to when, and how long of it."""
    stop = max(span.stop for span in spans)
    return f"{spans[0].start:.2f}", f"{stop:.2f}", f"{sum(span.seconds for span in spans):.2f}"


def _covered(spans: Sequence[Span], begin: float) -> list[tuple[float, float]]:
    """What spans of one row cover of the time from `begin` on, in order and without overlaps."""
    pieces: list[tuple[float, float]] = []
    at = begin
    for span in spans:
        if span.stop > at:
            pieces.append((max(span.start, at), span.stop))
            at = span.stop
    return pieces


def _cells(spans: Sequence[Span], begin: float, end: float, width: int) -> str:
    """A row's bar in a terminal, so many columns wide: every span has a column at least."""
    pieces = _covered(spans, begin)
    cells = [" "] * width
    for start, stop in pieces:
        first = min(int((start - begin) / (end - begin) * width), width - 1)
        last = max(round((stop - begin) / (end - begin) * width), first + 1)
        cells[first:last] = _BLOCK * (last - first)
    return "".join(cells) if pieces else _EARLIER.ljust(width)


def _colour(label: str) -> str:
    return _COLOURS.get(label.partition(":")[0], _OTHER)

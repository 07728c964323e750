"""What people read: tables of models and loads, the closest names in an error, and progress while work goes on.

Responsible for presentation only: it computes no sizes that the model or load report does not already state, and
nothing decides anything by what is written here; `_plan` shows plans in the same tables. A model has thousands
of variables and a person reads about forty lines, so variables whose paths differ only in numbers are folded into one
row (`block_{0..25}/query/kernel`, 26 of them).

Names come from files that anyone may have written: they reach a terminal without control characters and markup, and
HTML escaped.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import heapq
import html
import io
import itertools
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax

from lazymodel._bytes import format_bytes
from lazymodel._errors import LazyModelError
from lazymodel._placement import device_nbytes

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from lazymodel._abstract import AbstractModel, AbstractVariable
    from lazymodel._load_report import LoadReport, LoadRow

_MAX_ROWS = 40  # rows of a table before the smallest are only counted
_MAX_NAMES = 8  # names that a line below a table lists before it only counts
_MAX_VALUES = 4  # numbers that a fold lists one by one before it gives the first and the last only
_CANDIDATES = 50  # names that `closest` compares in full
_SUGGESTIONS = 3
_FALLBACK_WIDTH = 120  # columns, where no terminal says how wide it is
_MIN_WIDTH = 60
_MIN_COLUMN = 12  # columns that a folded path or origin keeps, however narrow the terminal
_REDRAW_SECONDS = 0.2  # between redraws of a notebook's bar

# --- names -----------------------------------------------------------------------------------------------------------


def closest(name: str, names: Iterable[str]) -> str:
    """What to add to an error about an unknown name: `; closest: 'a', 'b'`, or nothing where none is close.

    Names are ranked by the letter pairs they share before the few best are compared in full, so thousands of names
    take milliseconds. Case is ignored.
    """
    pairs = _letter_pairs(name)

    def shared(other: str) -> float:
        theirs = _letter_pairs(other)
        return 2 * len(pairs & theirs) / max(len(pairs) + len(theirs), 1)

    candidates = {other.lower(): other for other in heapq.nlargest(_CANDIDATES, dict.fromkeys(names), key=shared)}
    matches = [candidates[match] for match in difflib.get_close_matches(name.lower(), candidates, n=_SUGGESTIONS)]
    return f"; closest: {', '.join(map(repr, matches))}" if matches else ""


def _letter_pairs(name: str) -> set[tuple[str, str]]:
    return set(itertools.pairwise(f" {name.lower()} "))


def _printable(text: str) -> str:
    """The text with control and other unprintable characters written as escapes (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


# --- folding ---------------------------------------------------------------------------------------------------------

# Longer runs of digits are text: Python may refuse to read more of them as an int, and a hostile name may have them.
_NUMBER = re.compile(rf"(?<!\d)(\d{{1,{sys.int_info.str_digits_check_threshold}}})(?!\d)")


def _template(path: str) -> tuple[str, ...]:
    """The text between the numbers: what paths that fold together have in common."""
    return tuple(_NUMBER.split(path)[::2])


def fold(paths: Sequence[str]) -> str:
    """One name for paths that differ only in numbers: `block_0/w`, `block_1/w` → `block_{0..1}/w`.

    Numbers that are equal in all paths stay as they are. Where several differ, the name stands for combinations of
    them, not necessarily for all: the count beside it is the exact one.
    """
    split = [_NUMBER.split(path) for path in paths]
    parts = [
        column[0] if position % 2 == 0 else _fold_numbers(column)
        for position, column in enumerate(zip(*split, strict=True))
    ]
    return "".join(parts)


def _fold_numbers(column: Sequence[str]) -> str:
    numbers = sorted(dict.fromkeys(column), key=lambda digits: (int(digits), digits))
    if len(numbers) == 1:
        return numbers[0]
    if [int(digits) for digits in numbers] == list(range(int(numbers[0]), int(numbers[0]) + len(numbers))):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    if len(numbers) <= _MAX_VALUES:
        return f"{{{','.join(numbers)}}}"
    return f"{{{numbers[0]},{numbers[1]},…,{numbers[-1]}}}"


@dataclasses.dataclass(frozen=True)
class _Row:
    """One variable, ready to be grouped: those with equal keys and templates share a row of the table."""

    path: str
    cells: tuple[str, ...]  # shape, dtype, …: equal within a group
    nbytes: int
    note: str  # the last column; numbers in it are folded as in paths


@dataclasses.dataclass(frozen=True)
class _Group:
    rows: Sequence[_Row]
    count: int
    cells: tuple[str, ...]
    nbytes: int  # of the whole group

    @property
    def name(self) -> str:
        """All paths as one; asked for the groups that are shown only, because it takes a while."""
        return fold([row.path for row in self.rows])

    @property
    def note(self) -> str:
        """All notes as one."""
        return fold(list(dict.fromkeys(row.note for row in self.rows)))


def _grouped(rows: Iterable[_Row]) -> list[_Group]:
    """Rows folded into groups, in the order in which each group first appears."""
    members: dict[Hashable, list[_Row]] = {}
    templates: dict[str, tuple[str, ...]] = {}  # of notes, such as a file's name, of which there are few
    for row in rows:
        if row.note not in templates:
            templates[row.note] = _template(row.note)
        members.setdefault((_template(row.path), row.cells, templates[row.note]), []).append(row)
    return [_Group(group, len(group), group[0].cells, sum(row.nbytes for row in group)) for group in members.values()]


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Table:
    """What both renderers take: a title, a grid, and lines below it."""

    title: str
    columns: tuple[str, ...]
    right: frozenset[str]  # columns aligned to the right
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]


def _table(
    title: str, headings: Sequence[str], rows: Iterable[_Row], lines: Iterable[str], *, noun: str = "variable"
) -> _Table:
    """Groups the rows and keeps the largest groups; headings are those of `_Row.cells`, of the bytes, of the note.

    `noun` says what a row is: the heading of the first column.
    """
    *cell_headings, bytes_heading, note_heading = headings
    groups = _grouped(rows)
    largest = heapq.nlargest(_MAX_ROWS, range(len(groups)), key=lambda index: (groups[index].nbytes, -index))
    kept = set(largest if len(groups) > _MAX_ROWS else range(len(groups)))
    shown = [group for index, group in enumerate(groups) if index in kept]
    grid = [(group.name, f"{group.count:,}", *group.cells, format_bytes(group.nbytes), group.note) for group in shown]
    if rest := [group for index, group in enumerate(groups) if index not in kept]:
        count, nbytes = sum(group.count for group in rest), sum(group.nbytes for group in rest)
        blank = ("",) * len(cell_headings)
        grid.append((f"… and {len(rest):,} more", f"{count:,}", *blank, format_bytes(nbytes), ""))
    return _Table(
        title=_printable(title),
        columns=(noun, "count", *cell_headings, bytes_heading, note_heading),
        right=frozenset(("count", bytes_heading)),
        rows=tuple(tuple(_printable(cell) for cell in row) for row in grid),
        lines=tuple(_printable(line) for line in lines),
    )


def _text(table: _Table) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = max(shutil.get_terminal_size((_FALLBACK_WIDTH, 24)).columns, _MIN_WIDTH)
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )
    console.print(Text(table.title))
    if table.rows:
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for name in table.columns:
            # A path and an origin may be cut into lines; nothing else is worth reading in pieces.
            foldable = name in (table.columns[0], table.columns[-1])
            grid.add_column(
                name,
                justify="right" if name in table.right else "left",
                overflow="fold",
                no_wrap=not foldable,
                min_width=_MIN_COLUMN if foldable else None,
            )
        for row in table.rows:
            grid.add_row(*(Text(cell, overflow="fold") for cell in row))
        console.print(grid)
    for line in table.lines:
        console.print(Text(line))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _html(table: _Table) -> str:
    """Self-contained, without colours of its own, so that it reads on light and dark pages."""

    def cell(tag: str, column: str, text: str) -> str:
        align = "right" if column in table.right else "left"
        return f'<{tag} style="text-align:{align};padding:0.1em 0.8em 0.1em 0">{html.escape(text)}</{tag}>'

    parts = ["<div>", f"<p><strong>{html.escape(table.title)}</strong></p>"]
    if table.rows:
        head = "".join(cell("th", name, name) for name in table.columns)
        body = "".join(
            f"<tr>{''.join(cell('td', *pair) for pair in zip(table.columns, row, strict=True))}</tr>"
            for row in table.rows
        )
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if table.lines:
        parts.append(f"<p>{'<br/>'.join(html.escape(line) for line in table.lines)}</p>")
    parts.append("</div>")
    return "".join(parts)


@functools.lru_cache(maxsize=1024)
def _shape_text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _spec_text(spec: jax.sharding.PartitionSpec | None) -> str:
    if spec is None:
        return "–"
    entries: tuple[Any, ...] = tuple(spec)
    if all(entry is None or entry == () for entry in entries):
        return "replicated"
    return f"P({', '.join(map(repr, entries))})"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# --- the abstract model ----------------------------------------------------------------------------------------------


def model_text(model: AbstractModel) -> str:
    """An abstract model as a table for a terminal, as wide as it; no colours."""
    return _text(_model_table(model))


def model_html(model: AbstractModel) -> str:
    """An abstract model as an HTML fragment for a notebook."""
    return _html(_model_table(model))


def _model_table(model: AbstractModel) -> _Table:
    sharded = any(variable.sharding is not None for variable in model.values())
    title = (
        f"{model.name}: {_plural(len(model), 'variable')}, {_plural(model.num_parameters, 'parameter')}, "
        f"{format_bytes(model.nbytes)}"
    )
    if sharded:
        held = device_nbytes(model.values())
        anywhere = sum(variable.shard_nbytes for variable in model.values() if variable.sharding is None)
        title += f", {format_bytes(max(held.values()) + anywhere)} per device on {_plural(len(held), 'device')}"

    def row(variable: AbstractVariable) -> _Row:
        cells = (_shape_text(variable.shape), variable.dtype.name)
        if sharded:
            other = None if variable.sharding is None else type(variable.sharding).__name__
            cells += (_spec_text(variable.spec) if variable.spec is not None or other is None else other,)
        return _Row(variable.path, cells, variable.shard_nbytes, variable.origin)

    headings = ("shape", "dtype", "spec", "bytes/device", "origin")
    if not sharded:
        headings = ("shape", "dtype", "bytes", "origin")
    return _table(title, headings, map(row, model.values()), ())


# --- the load --------------------------------------------------------------------------------------------------------

_ACTIONS = {"load": "loaded", "initialize": "initialized"}  # and "constant", of plans and loads


def load_text(report: LoadReport) -> str:
    """A load report as a table and a summary for a terminal, as wide as it; no colours."""
    return _text(_load_table(report))


def load_html(report: LoadReport) -> str:
    """A load report as an HTML fragment for a notebook."""
    return _html(_load_table(report))


def _load_table(report: LoadReport) -> _Table:
    def row(row: LoadRow) -> _Row:
        note = _ACTIONS.get(row.action, row.action)
        dtype = row.dtype
        if row.action == "initialize":
            note = f"{note}: {row.initializer}"
        elif row.tensors:
            first, *others = row.tensors
            note = f"{note}: {first.name}"
            if first.file:
                note += f" of {os.path.basename(first.file)}"
            if others:
                note += f" and {len(others):,} more"
            stored = dict.fromkeys(tensor.dtype for tensor in row.tensors)
            if list(stored) != [dtype]:
                dtype = f"{', '.join(stored)} → {dtype}"
        return _Row(row.path, (_shape_text(row.shape), dtype), row.nbytes, note)

    nbytes = sum(row.nbytes for row in report.rows)
    title = (
        f"{report.name}: materialized {_plural(len(report.rows), 'variable')}, {format_bytes(nbytes)}, "
        f"in {report.seconds:.2f} s"
    )
    if report.process_count > 1:
        title += f", by process {report.process_index} of {report.process_count}"
    headings = ("shape", "dtype", "bytes", "value")
    return _table(title, headings, map(row, report.rows), _load_lines(report))


def _load_lines(report: LoadReport) -> list[str]:
    lines: list[str] = []
    for action, rows in (
        ("loaded", report.loaded),
        ("initialized", report.initialized),
        ("constant", report.constants),
    ):
        if rows:
            nbytes = format_bytes(sum(row.nbytes for row in rows))
            lines.append(f"{action}: {_plural(len(rows), 'variable')}, {nbytes}")
    if report.needed_nbytes or report.read_nbytes:
        line = f"read: {format_bytes(report.read_nbytes)} of files, {format_bytes(report.needed_nbytes)} needed"
        if report.gb_per_second is not None:
            line += f", {report.gb_per_second:.2f} GB/s"
        lines.append(line)
    lines.append(f"time: {report.initialize_seconds:.2f} s initializing, {report.stream_seconds:.2f} s streaming")
    if report.unused:
        nbytes = sum(tensor.nbytes or 0 for tensor in report.unused)
        listed = _listed(folded_names(tensor.name for tensor in report.unused))
        lines.append(f"unused: {_plural(len(report.unused), 'tensor')}, {format_bytes(nbytes)}: {listed}")
    if report.mismatched:
        listed = _listed([str(mismatch) for mismatch in report.mismatched])
        lines.append(f"did not match: {_plural(len(report.mismatched), 'tensor')}: {listed}")
    if report.files:
        sizes = [
            f"{file} ({'size unknown' if size is None else format_bytes(size)})" for file, size in report.files.items()
        ]
        lines.append(f"files: {_listed(sizes)}")
    return lines


def folded_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers as one, in the order in which each first appears."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(_template(name), []).append(name)
    return [fold(group) for group in groups.values()]


def _listed(texts: Sequence[str]) -> str:
    more = f", … and {len(texts) - _MAX_NAMES:,} more" if len(texts) > _MAX_NAMES else ""
    return ", ".join(texts[:_MAX_NAMES]) + more


# --- progress --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Progress(Protocol):
    """What `materialize` tells while it works, in bytes of the distinct shards of this process.

    `advance` is called from several threads, one call at a time. An exception raised in it ends the work.
    """

    def start(self, total_nbytes: int, description: str) -> None:
        """Work of this many bytes begins."""
        ...

    def advance(self, nbytes: int, description: str | None = None) -> None:
        """So many bytes more are done, in pieces of variables where those are large.

        The description names what was finished, such as a variable's path; its last bytes may have been told of
        before, and 0 now.
        """
        ...

    def finish(self) -> None:
        """The work ended, well or not; called exactly once after `start`."""
        ...


def progress_for(progress: bool | Progress | Callable[[int, int], object] | None) -> Progress:
    """The progress reporter for what a person passed as `progress`.

    Args:
        progress: None for a bar when a person is watching (standard error is a terminal, or this is a notebook) and
            silence otherwise; True for a bar, or for a line every few seconds where none can be drawn; False for
            silence; a `Progress`, which is returned as it is; or a callable `f(done_nbytes, total_nbytes)`, never
            called by two threads at once.

    Raises:
        LazyModelError: It is none of these.
    """
    if progress is None:
        progress = _in_notebook() or _is_terminal(sys.stderr)
    if progress is True:
        if _in_notebook():
            return _NotebookBar()
        if _is_terminal(sys.stderr):
            return _TerminalBar()
        from lazymodel._progress_lines import LogLines  # which needs this module

        return LogLines()
    if progress is False:
        return _Silent()
    if isinstance(progress, Progress):
        return progress
    if callable(progress):
        return _Callback(progress)
    raise LazyModelError(
        "progress is True, False, None, a callable of (done bytes, total bytes) or an object with start, advance and "
        f"finish; got {progress!r}"
    )


class _Silent:
    def start(self, total_nbytes: int, description: str) -> None:
        pass

    def advance(self, nbytes: int, description: str | None = None) -> None:
        pass

    def finish(self) -> None:
        pass


class _Callback:
    """Calls a plain function with bytes done and bytes in all, one thread at a time."""

    def __init__(self, function: Callable[[int, int], object]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0

    def start(self, total_nbytes: int, description: str) -> None:
        with self._lock:
            self._done, self._total = 0, total_nbytes
            self._function(0, total_nbytes)

    def advance(self, nbytes: int, description: str | None = None) -> None:
        if not nbytes:
            return  # news for those who show names
        with self._lock:
            self._done += nbytes
            self._function(self._done, self._total)

    def finish(self) -> None:
        pass


class _TerminalBar:
    """A bar on standard error with bytes, rate and time left; it is removed when the work ends."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, total_nbytes: int, description: str) -> None:
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

        self.finish()
        bar = RichProgress(
            # No markup: a variable may be called "[red]". One line: a bar that wraps cannot be redrawn in place.
            TextColumn(
                "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(bar_width=24),
            Bytes(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            expand=True,
            redirect_stdout=False,  # what a program prints on standard output must not end up on standard error
        )
        task = bar.add_task(_printable(description), total=total_nbytes)
        try:
            bar.start()
        except LiveError:
            return  # the program already draws a display of its own, and a terminal holds one
        self._bar, self._task = bar, task

    def advance(self, nbytes: int, description: str | None = None) -> None:
        if self._bar is not None and self._task is not None:
            changes: Mapping[str, Any] = {} if description is None else {"description": _printable(description)}
            self._bar.update(self._task, advance=nbytes, **changes)

    def finish(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()  # gives the cursor back, and the line


class _NotebookBar:
    """A bar in a notebook's cell; needs IPython only, no widgets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: Any = None
        self._description = ""
        self._done = self._total = 0
        self._started = self._drawn = 0.0

    def start(self, total_nbytes: int, description: str) -> None:
        from IPython.display import HTML, display  # pyright: ignore

        with self._lock:
            self._description, self._done, self._total = description, 0, total_nbytes
            self._started = self._drawn = time.monotonic()
            self._handle = display(HTML(self._render(0.0)), display_id=True)

    def advance(self, nbytes: int, description: str | None = None) -> None:
        with self._lock:
            self._done += nbytes
            self._description = self._description if description is None else description
            if time.monotonic() - self._drawn >= _REDRAW_SECONDS:
                self._draw()

    def finish(self) -> None:
        with self._lock:
            self._draw()
            self._handle = None

    def _draw(self) -> None:
        from IPython.display import HTML  # pyright: ignore

        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(HTML(self._render(self._drawn - self._started)))

    def _render(self, seconds: float) -> str:
        text = f"{format_bytes(self._done)} of {format_bytes(self._total)}"
        if seconds > 0 and self._done:
            rate = self._done / seconds
            text += f", {format_bytes(rate)}/s"
            if left := math.ceil(max(self._total - self._done, 0) / rate):
                text += f", {left // 60}:{left % 60:02d} left"
        return (
            f'<div><progress value="{self._done}" max="{max(self._total, 1)}"></progress> '
            f"{html.escape(text)} {html.escape(_printable(self._description))}</div>"
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

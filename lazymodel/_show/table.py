"""How reports look in a terminal, in a notebook and on a page, which is what rich exports. Which columns and rows a
report has is said where it is made, such as in `_plan/plan.py`.

A model has thousands of variables and a person reads about forty lines, so rows whose names differ only in numbers are
folded into one (`block_{0..25}/query/kernel`, 26 of them). In a terminal, names are shown without control characters
and markup; in HTML they are escaped. Rich draws a table in a terminal; in a notebook it would be preformatted text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import html
import io
import os
import shutil
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import jax
import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._show.text import fold, format_bytes, grouped_by, grouped_names, printable, unnumbered

_MAX_ROWS = 40  # rows of a table; the smallest further ones are only counted
_FALLBACK_WIDTH = 120  # columns, if the width of the terminal is unknown
_MIN_WIDTH = 40
_ANY = 1 << 16  # wider than any table, so that nothing is cut
_MIN_COLUMN = 12  # minimum width of names and origins, however short they are
_MIN_FOLDED = 20  # columns that names and origins keep in a narrow terminal: narrower ones are harder to read

ACTIONS = {"load": "loaded", "initialize": "initialized"}  # plans and loads also have "constant"


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: how its cells are shown, and how cells of folded rows are merged.

    Attributes:
        heading: Its heading.
        key: Returns a value that cells of rows that fold have in common; None uses the cell.
        merge: Returns the text for the cells of folded rows; None uses the first, since all are equal.
        right: True if it is aligned to the right and never wrapped, for numbers.
        is_bytes: True if cells are numbers of bytes.
        page: True if it is shown on pages only.
    """

    heading: str
    key: Callable[[Any], Hashable] | None = None
    merge: Callable[[Sequence[Any]], str] | None = None
    right: bool = False
    is_bytes: bool = False
    page: bool = False

    @classmethod
    def names(cls, heading: str) -> Self:
        """Names, by which rows fold."""
        return cls(heading, unnumbered, fold)

    @classmethod
    def notes(cls, heading: str) -> Self:
        """Texts whose numbers fold like those of names."""
        return cls(heading, _without_numbers, _merged_notes)

    @classmethod
    def number(cls, heading: str, merge: Callable[[Sequence[Any]], str] | None = None) -> Self:
        """Numbers; with `merge`, which makes one text of several, rows with different numbers can fold."""
        return cls(heading, None if merge is None else _alike, merge, right=True)

    @classmethod
    def nbytes(cls, heading: str, *, page: bool = False) -> Self:
        """Numbers of bytes, which are added up."""
        return cls(heading, _alike, lambda cells: format_bytes(sum(cells)), True, True, page)

    @classmethod
    def in_pages(cls, heading: str) -> Self:
        """Values that are shown on pages only."""
        return cls(heading, page=True)


def _alike(cell: Any) -> None:
    """The key of cells that do not prevent rows from folding."""


@functools.lru_cache(maxsize=1024)  # there are few notes, such as a file's name
def _without_numbers(note: str) -> str:
    """The text without numbers and the underscores before them: Keras names layers `block`, `block_1`, `block_2`."""
    return "".join(part.rstrip("_") for part in unnumbered(note))


def _merged_notes(notes: Sequence[str]) -> str:
    most, *others = sorted(grouped_names(dict.fromkeys(notes)), key=len, reverse=True)
    return fold(most) + (f" and {sum(map(len, others)):,} more" if others else "")


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, cells, and lines below them; each thing is one row of cells.

    If the first column has names, rows that differ only in their numbers are folded, and about 40 rows are shown, the
    largest ones if a column has bytes.
    """

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[Any]]
    lines: Sequence[str] = ()

    @functools.cached_property
    def shown(self) -> list[Column]:
        """The columns of the text; if rows fold, the second one has counts."""
        first, *others = (column for column in self.columns if not column.page)
        return [first, *([Column.number("count")] if first.merge else []), *others]

    @functools.cached_property
    def rows(self) -> list[tuple[str, ...]]:
        """The shown cells as text; if rows fold, with their count in the second column."""
        places = [(place, column) for place, column in enumerate(self.columns) if not column.page]
        keys = [(place, column.key) for place, column in places]
        sizes = [place for place, column in places if column.is_bytes]

        def key(row: Sequence[Any]) -> Hashable:
            return tuple(row[place] if key is None else key(row[place]) for place, key in keys)

        folds = self.columns[0].merge is not None
        groups = list(grouped_by(self.cells, key).values()) if folds else [[row] for row in self.cells]

        def nbytes(group: Sequence[Sequence[Any]]) -> int:
            return sum(row[sizes[0]] for row in group) if sizes else 0

        most = _MAX_ROWS if folds else len(groups)
        largest = heapq.nlargest(most, range(len(groups)), key=lambda index: (nbytes(groups[index]), -index))
        rows: list[tuple[str, ...]] = []
        for index in sorted(largest):
            group = groups[index]
            texts = [c.merge([row[p] for row in group]) if c.merge else str(group[0][p]) for p, c in places]
            rows.append((*texts[:1], *([f"{len(group):,}"] if folds else []), *texts[1:]))
        if left := [row for index in sorted(set(range(len(groups))) - set(largest)) for row in groups[index]]:
            sums = [c.merge([row[p] for row in left]) if c.merge and c.is_bytes else "" for p, c in places[1:]]
            rows.append((f"… and {len(groups) - len(largest):,} more", f"{len(left):,}", *sums))
        return [tuple(map(printable, row)) for row in rows]

    def text(self) -> str:
        """The text for a terminal, with its width and no colours. A narrow terminal folds names, never numbers."""
        console, width = _console(), terminal_width()
        with console.capture() as captured:
            if self.title:
                console.print(_line(self.title), width=width)
            if self.rows:
                console.print(self._grid(width), width=_ANY)
            for line in self.lines:
                console.print(_line(line), width=width)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def print_whole(self, console: Any) -> None:
        """Prints it for a page: the lines first, then every row, with the columns that only pages show."""
        first, *others = self.columns
        columns = [dataclasses.replace(first, merge=None), *(dataclasses.replace(each, page=False) for each in others)]
        whole = dataclasses.replace(self, columns=columns)
        for line in (self.title, *self.lines, ""):
            console.print(_line(line), width=_FALLBACK_WIDTH)
        if whole.rows:
            console.print(whole._grid(_ANY), "", width=_ANY)

    def _grid(self, width: int) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.cells import cell_len
        from rich.table import Table as RichTable

        sizes, least = list[int](), list[int]()
        for place, column in enumerate(self.shown):
            cells = [column.heading, *(row[place] for row in self.rows)]
            outer = place in (0, len(self.shown) - 1) and not column.right
            sizes.append(max(_MIN_COLUMN * outer, *map(cell_len, cells)))
            words = max(cell_len(word) for cell in cells for word in cell.split() or [""])
            least.append(sizes[-1] if column.right else min(words, _MIN_FOLDED))
        # The widest columns of text shrink until all fit. Numbers that do not fit overflow, and are not cut.
        while sum(sizes) + 2 * (len(sizes) - 1) > width and any(map(int.__gt__, sizes, least)):
            sizes[max(range(len(sizes)), key=lambda place: sizes[place] * (sizes[place] > least[place]))] -= 1
        grid = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column, size in zip(self.shown, sizes, strict=True):
            justify = "right" if column.right else "left"
            grid.add_column(_line(column.heading), width=size, justify=justify, overflow="fold")
        for row in self.rows:
            grid.add_row(*map(_line, row))
        return grid

    def html(self) -> str:
        """The HTML for a notebook: self-contained, without colours, so that it works on light and dark pages."""

        def row(tag: str, cells: Iterable[str]) -> str:
            sides = ("right" if column.right else "left" for column in self.shown)
            style = "padding:0.1em 0.8em 0.1em 0;white-space:pre-wrap;text-align:"
            texts = (f'<{tag} style="{style}{s}">{html.escape(c)}</{tag}>' for s, c in zip(sides, cells, strict=True))
            return f"<tr>{''.join(texts)}</tr>"

        parts = [f"<p><strong>{html.escape(printable(self.title))}</strong></p>"]
        if self.rows:
            body, head = "".join(row("td", cells) for cells in self.rows), (column.heading for column in self.shown)
            parts.append(f"<table><thead>{row('th', head)}</thead><tbody>{body}</tbody></table>")
        if self.lines:
            parts.append(f"<p>{'<br/>'.join(html.escape(printable(line)) for line in self.lines)}</p>")
        return f"<div>{''.join(parts)}</div>"


def _line(text: str) -> Any:
    from rich.text import Text  # names are never markup

    return Text(printable(text))


def _console(**options: Any) -> Any:
    from rich.console import Console

    plain = {"color_system": None, "force_jupyter": False, "legacy_windows": False}
    return Console(file=io.StringIO(), width=_ANY, **plain, **options)


def terminal_width() -> int:
    """Columns of the terminal, or the default width without one."""
    return max(shutil.get_terminal_size((_FALLBACK_WIDTH, 24)).columns, _MIN_WIDTH)


class Tabled:
    """An object that prints as a table, and shows it in a notebook."""

    def table(self) -> Table:
        """The tables."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


class Report(Tabled):
    """A result as a table, plain values and a page."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, strings and numbers, which `json` writes and reads back equal."""
        return plain(self)

    def page_tables(self) -> list[Table]:
        """The tables of its page."""
        return [self.table()]

    def drawing(self) -> str:
        """What its page begins with, as HTML."""
        return ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as a page: one HTML file without scripts, with every row of its tables.

        A plan's page shows what a device holds against its memory, and for every variable the reason of its sharding.

        Raises:
            LazyModelError: The file cannot be written.
        """
        console, path = _console(record=True), Path(path)
        for table in self.page_tables():
            table.print_whole(console)
        title, content = html.escape(self.table().title), console.export_html(code_format="{code}", inline_styles=True)
        text = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="color-scheme" content="light dark"><title>{title}</title></head>'
            f"\n<body>{self.drawing()}<pre>{content}</pre></body></html>\n"
        )
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # the old file stays until the new one is complete
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise LazyModelError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def plain(value: Any) -> Any:
    """A value as lists, dicts, strings and numbers."""
    if value is None or isinstance(value, str | int | float):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Sequence | jax.sharding.PartitionSpec):
        return [plain(each) for each in cast("Iterable[Any]", value)]
    return value.name if isinstance(value, np.dtype) else str(value)


@functools.lru_cache(maxsize=1024)
def shape_text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def placed_text(spec: Any, memory_kind: str | None) -> str:
    """The spec as text, with the kind of memory unless it is the devices' own."""
    return f"{spec}" if memory_kind is None else f"{spec} in {memory_kind}"


def spec_text(spec: jax.sharding.PartitionSpec | None) -> str:
    if spec is None:
        return "–"
    entries: tuple[Any, ...] = tuple(spec)
    if all(entry is None or entry == () for entry in entries):
        return "replicated"
    return f"P({', '.join(map(repr, entries))})"

"""How reports look in a terminal, in a notebook and on a page. Which columns and rows a report has is said where it is
made, such as in `_plan/plan.py`.

A model has thousands of variables and a person reads about forty lines, so rows whose names differ only in numbers are
folded into one (`block_{0..25}/query/kernel`, 26 of them), and a column that is equal in all rows is a line above them.
A name that is too long for its column has lines of its own above its row, so it can be copied. In a terminal, names are
shown without control characters; in HTML they are escaped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import html
import itertools
import os
import re
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import jax
import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._show.text import fold, format_bytes, grouped_by, grouped_names, numbers_in, printable, unnumbered

_MAX_ROWS = 40  # rows of a table; the smallest further ones are only counted
_FALLBACK_WIDTH = 80  # columns, if the width of the terminal is unknown
_MIN_WIDTH = 40
_ANY = 1 << 16  # wider than any table, so that nothing is broken
_GAP = "  "  # between columns
_MIN_COLUMN = 12  # columns that texts keep in a narrow terminal: narrower ones are harder to read
_MIN_ROWS = 3  # fewer show their equal numbers, which people look for
_NOTHING = ("", "–")  # a column that has nothing else is left out

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


_COUNT = Column.number("count")


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, cells, and lines below them; each thing is one row of cells.

    If the first column has names, rows that differ only in their numbers are folded, and about 40 rows are shown, the
    largest ones if a column has bytes. A column that is equal in all rows is shown above them.
    """

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[Any]]
    lines: Sequence[str] = ()

    @functools.cached_property
    def _content(self) -> tuple[list[Column], list[tuple[str, ...]], str]:
        """The columns and rows of the text, and the line above them; if rows fold, the second column has counts."""
        places = [(place, column) for place, column in enumerate(self.columns) if not column.page]
        keys = [(place, column.key) for place, column in places]
        sizes = [place for place, column in places if column.is_bytes]
        folds = self.columns[0].merge is not None

        def key(row: Sequence[Any]) -> Hashable:
            return tuple(row[place] if key is None else key(row[place]) for place, key in keys)

        groups = _in_order(grouped_by(self.cells, key).values()) if folds else [[row] for row in self.cells]

        def nbytes(group: Sequence[Sequence[Any]]) -> int:
            return sum(row[sizes[0]] for row in group) if sizes else 0

        texts: list[tuple[str, ...]] = []
        for group in groups:
            cells = [c.merge([row[p] for row in group]) if c.merge else str(group[0][p]) for p, c in places]
            texts.append(tuple(map(printable, (cells[0], *([f"{len(group):,}"] if folds else []), *cells[1:]))))
        columns = [column for _, column in places]
        columns[1:1] = [_COUNT] if folds else []
        most = _MAX_ROWS if folds else len(groups)
        largest = heapq.nlargest(most, range(len(groups)), key=lambda index: (nbytes(groups[index]), -index))
        rows = [texts[index] for index in sorted(largest)]
        if left := [row for index in set(range(len(groups))) - set(largest) for row in groups[index]]:
            sums = [c.merge([row[p] for row in left]) if c.merge and c.is_bytes else "" for p, c in places[1:]]
            rows.append((f"… and {len(groups) - len(largest):,} more", f"{len(left):,}", *sums))
        return _without_equal(columns, rows, texts)

    @property
    def shown(self) -> list[Column]:
        """The columns of the text; if rows fold, the second one has counts."""
        return self._content[0]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells of these columns, as text."""
        return self._content[1]

    @property
    def equal(self) -> str:
        """The columns that are equal in all rows, and therefore not shown as columns: a line above the rows."""
        return self._content[2]

    def text(self, width: int | None = None) -> str:
        """The text for a terminal, with its width and no colours. A narrow terminal breaks texts, never numbers."""
        width = terminal_width() if width is None else width
        lines = [line for text in (self.title, self.equal) if text for line in _broken(text, width)]
        lines += self._grid(width) if self.rows else []
        lines += [line for text in self.lines for line in _broken(text, width)]
        return "\n".join(line.rstrip() for line in lines)

    def page_text(self) -> str:
        """The text for a page: the lines first, then every row, with the columns that only pages show."""
        first, *others = self.columns
        columns = [dataclasses.replace(first, merge=None), *(dataclasses.replace(each, page=False) for each in others)]
        whole = dataclasses.replace(self, columns=columns, title="", lines=())
        return "\n".join([*map(printable, (self.title, *self.lines)), "", whole.text(_ANY), ""])

    def _grid(self, width: int) -> Iterator[str]:
        from rich.cells import cell_len

        leads = self.columns[0].merge is not None  # names, which can have lines of their own
        sizes, whole, least = list[int](), list[int](), list[int]()
        for place, column in enumerate(self.shown):
            cells = [row[place] for row in self.rows]
            sizes.append(max(map(cell_len, [column.heading, *cells])))
            parts = cells if column.right else [part for cell in cells for part in _parts(cell)]
            longest, heading = (max(map(cell_len, texts)) for texts in (parts, _parts(column.heading)))
            shortest = min(longest, _MIN_COLUMN)
            whole.append(max(shortest if leads and place == 0 else longest, heading))
            least.append(max(longest if column.right else shortest, heading))
        # The widest columns shrink until all fit: texts to their longest words, then further, and numbers never.
        for bounds in (whole, least):
            while sum(sizes) + len(_GAP) * (len(sizes) - 1) > width and any(map(int.__gt__, sizes, bounds)):
                sizes[max(range(len(sizes)), key=lambda place: sizes[place] * (sizes[place] > bounds[place]))] -= 1
        headings = tuple(column.heading for column in self.shown)
        total = sum(sizes) + len(_GAP) * (len(sizes) - 1)
        for number, row in enumerate([headings, *self.rows]):
            cells = [_broken(cell, size) for cell, size in zip(row, sizes, strict=True)]
            if leads and number and len(cells[0]) > 1:
                yield from _broken(row[0], max(width, total))
                cells[0] = []
            for line in itertools.zip_longest(*cells, fillvalue=""):
                blanks = [" " * (size - cell_len(text)) for size, text in zip(sizes, line, strict=True)]
                looks = zip(self.shown, line, blanks, strict=True)
                yield _GAP.join(blank + text if column.right else text + blank for column, text, blank in looks)
            if number == 0:
                yield "─" * total

    def html(self) -> str:
        """The HTML for a notebook: self-contained, without colours, so that it works on light and dark pages."""

        def row(tag: str, cells: Iterable[str]) -> str:
            sides = ("right" if column.right else "left" for column in self.shown)
            style = "padding:0.1em 0.8em 0.1em 0;white-space:pre-wrap;text-align:"
            texts = (f'<{tag} style="{style}{s}">{html.escape(c)}</{tag}>' for s, c in zip(sides, cells, strict=True))
            return f"<tr>{''.join(texts)}</tr>"

        parts = [f"<p><strong>{html.escape(printable(self.title))}</strong></p>"]
        parts += [f"<p>{html.escape(self.equal)}</p>"] if self.equal else []
        if self.rows:
            body, head = "".join(row("td", cells) for cells in self.rows), (column.heading for column in self.shown)
            parts.append(f"<table><thead>{row('th', head)}</thead><tbody>{body}</tbody></table>")
        if self.lines:
            parts.append(f"<p>{'<br/>'.join(html.escape(printable(line)) for line in self.lines)}</p>")
        return f"<div>{''.join(parts)}</div>"


def _in_order(groups: Iterable[list[Sequence[Any]]]) -> list[list[Sequence[Any]]]:
    """The groups of rows; those whose names differ only in numbers are in the order of these, where such groups are."""
    groups = list(groups)
    same = grouped_by(groups, lambda group: unnumbered(group[0][0])).values()

    def first(group: Sequence[Sequence[Any]]) -> tuple[int, ...]:
        return min(numbers_in(row[0]) for row in group)

    order = {unnumbered(each[0][0][0]): iter(sorted(each, key=first) if len(each) > 1 else each) for each in same}
    return [next(order[unnumbered(group[0][0])]) for group in groups]


def _without_equal(
    columns: list[Column], rows: list[tuple[str, ...]], every: Sequence[tuple[str, ...]]
) -> tuple[list[Column], list[tuple[str, ...]], str]:
    """The columns and rows without columns that are equal in every row, and a line that says these."""
    texts: list[str] = []
    kept: list[int] = []
    for place, column in enumerate(columns):
        values = {row[place] for row in every}
        least = _MIN_ROWS if column.right else 2
        if place == 0 or len(every) < least or len(values) > 1 or not column.heading:
            kept.append(place)
        elif (value := values.pop()) not in _NOTHING and (column, value) != (_COUNT, "1"):
            texts.append(f"{column.heading}: {value}")
    line = f"in all rows: {'; '.join(texts)}" if texts else ""
    return [columns[place] for place in kept], [tuple(row[place] for place in kept) for row in rows], line


def _parts(text: str) -> list[str]:
    """Where a text may be broken: at spaces and after a `/`."""
    return re.findall(r"[^ /]*/|[^ /]+", text) or [""]


def _broken(text: str, width: int) -> list[str]:
    """Lines of at most so many columns: a word that is too long is broken after a `/`, only longer ones anywhere."""
    from rich.cells import cell_len, chop_cells

    lines = [""]
    for place, word in enumerate(printable(text).split(" ")):
        space = " " if place else ""
        if cell_len(f"{lines[-1]}{space}{word}") <= width:
            lines[-1] += space + word
            continue
        for part in [word] if cell_len(word) <= width else _parts(word):
            if cell_len(f"{lines[-1]}{space}{part}") <= width:
                lines[-1] += space + part
            else:
                lines += chop_cells(part, width)
            space = ""
    return lines if lines[0] else lines[1:] or [""]


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
        path, title = Path(path), html.escape(printable(self.table().title))
        content = html.escape("\n".join(table.page_text() for table in self.page_tables()))
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


def change_text(before: str, after: str) -> str:
    """Both, unless they are the same."""
    return before if before == after else f"{before} → {after}"


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

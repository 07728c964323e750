"""Tables for a terminal and for a notebook.

A model has thousands of variables and a person reads about forty lines, so rows whose paths differ only in numbers are
folded into one (`block_{0..25}/query/kernel`, 26 of them). What names hold reaches a terminal without control
characters and markup, and HTML escaped. Rich's tables cut numbers where a terminal is narrow, and show in a notebook as
preformatted text, so both are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import html
import itertools
import os
import shutil
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from lazymodel._show.text import fold, format_bytes, grouped_names, longest_piece, printable, unnumbered, wrapped

_MAX_ROWS = 40  # rows of a table before the smallest are only counted
_FALLBACK_WIDTH = 120  # columns, where no terminal says how wide it is
_MIN_WIDTH = 40
_MIN_COLUMN = 12  # columns that paths and origins have, however short they are
_MIN_FOLDED = 20  # columns that folded paths and origins keep, or a third of their own: narrower ones read worse
_GAP = _INDENT = "  "  # between columns; before a row's second line

ACTIONS = {"load": "loaded", "initialize": "initialized"}  # and "constant", of plans and loads


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, a grid, and lines below it."""

    title: str
    columns: tuple[str, ...]  # headings; the first and the last are of columns that may be cut into lines
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()  # columns that are aligned to the right, and never cut into lines
    lines: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", printable(self.title))
        object.__setattr__(self, "rows", tuple(tuple(map(printable, row)) for row in self.rows))
        object.__setattr__(self, "lines", tuple(map(printable, self.lines)))

    def text(self) -> str:
        """For a terminal, as wide as it; no colours.

        Where there is no room, names are folded at separators; what still has none goes to a second line of each row.
        """
        width = terminal_width()
        lines = wrapped(self.title, width) + (self._grid(width) if self.rows else [])
        lines += [line for text in self.lines for line in wrapped(text, width)]
        return "\n".join(line.rstrip() for line in lines)

    def _grid(self, width: int) -> list[str]:
        from rich.cells import cell_len

        rows = [self.columns, *self.rows]
        natural, least = [], []
        for index, name in enumerate(self.columns):
            cells = [row[index] for row in rows]
            size = max(map(cell_len, cells))
            if index in (0, len(self.columns) - 1) and name not in self.right:  # a path, an origin
                natural.append(max(size, _MIN_COLUMN))
                least.append(min(natural[-1], max(_MIN_FOLDED, natural[-1] // 3, *map(longest_piece, cells))))
            else:
                natural.append(size)
                least.append(size)
        groups = _groups(natural, least, width)

        def printed(row: Sequence[str]) -> Iterable[str]:
            for place, widths in enumerate(groups):
                columns = [wrapped(row[index], widths[index]) for index in widths]
                for texts in itertools.zip_longest(*columns, fillvalue=""):
                    blanks = [" " * (size - cell_len(text)) for size, text in zip(widths.values(), texts, strict=True)]
                    right = [self.columns[index] in self.right for index in widths]
                    cells = (b + t if r else t + b for b, t, r in zip(blanks, texts, right, strict=True))
                    if any(texts):
                        yield _INDENT * (place > 0) + _GAP.join(cells)

        heading, *body = map(printed, rows)
        rule = max(_total(widths) + len(_INDENT) * (place > 0) for place, widths in enumerate(groups))
        return [*heading, "─" * rule, *itertools.chain.from_iterable(body)]

    def html(self) -> str:
        """For a notebook: self-contained, without colours of its own, so that it reads on light and dark pages."""

        side = {name: "right" if name in self.right else "left" for name in self.columns}

        def row(tag: str, cells: Sequence[str]) -> str:
            style = "padding:0.1em 0.8em 0.1em 0;text-align:"
            texts = (
                f'<{tag} style="{style}{side[name]}">{html.escape(cell)}</{tag}>'
                for name, cell in zip(self.columns, cells, strict=True)
            )
            return f"<tr>{''.join(texts)}</tr>"

        parts = [f"<p><strong>{html.escape(self.title)}</strong></p>"]
        if self.rows:
            body = "".join(row("td", cells) for cells in self.rows)
            parts.append(f"<table><thead>{row('th', self.columns)}</thead><tbody>{body}</tbody></table>")
        if self.lines:
            parts.append(f"<p>{'<br/>'.join(map(html.escape, self.lines))}</p>")
        return f"<div>{''.join(parts)}</div>"


def terminal_width() -> int:
    """Columns of the terminal, or of what is printed where there is none."""
    return max(shutil.get_terminal_size((_FALLBACK_WIDTH, 24)).columns, _MIN_WIDTH)


def _groups(natural: Sequence[int], least: Sequence[int], width: int) -> list[dict[int, int]]:
    """Widths of the columns, by their places: in one line if narrow columns make them fit, or else in several."""
    sizes = {index: min(size, width) for index, size in enumerate(natural)}
    while _total(sizes) > width:
        wide = [index for index, size in sizes.items() if size > least[index]]
        if not wide:
            break
        sizes[max(wide, key=sizes.__getitem__)] -= 1
    else:
        return [sizes]
    groups: list[dict[int, int]] = [{}]
    for index, size in enumerate(natural):
        indent = len(_INDENT) * (len(groups) > 1)
        size = min(size, width - len(_INDENT))
        if groups[-1] and indent + _total({**groups[-1], index: size}) > width:
            groups.append({})
        groups[-1][index] = size
    return groups


def _total(sizes: Mapping[int, int]) -> int:
    return sum(sizes.values()) + len(_GAP) * (len(sizes) - 1)


class Tabled:
    """What prints as a table, and shows it in a notebook."""

    def table(self) -> Table:
        """What is shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


# Rows that fold -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One variable, ready to be grouped: those with equal keys and templates share a row of the table."""

    path: str
    cells: tuple[str, ...]  # shape, dtype, …: equal within a group
    nbytes: int
    note: str  # the last column; numbers in it are folded as in paths


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are one row of the table."""

    rows: Sequence[Row]
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
        most, *others = sorted(grouped_names(dict.fromkeys(row.note for row in self.rows)), key=len, reverse=True)
        return fold(most) + (f" and {sum(map(len, others)):,} more" if others else "")


def grouped(rows: Iterable[Row]) -> list[Group]:
    """Rows folded into groups, in the order in which each group first appears."""
    members: dict[Hashable, list[Row]] = {}

    @functools.cache  # there are few notes, such as a file's name
    def template(note: str) -> str:
        """Without numbers and the underscores before them: Keras calls layers `block`, `block_1`, `block_2`."""
        return "".join(part.rstrip("_") for part in unnumbered(note))

    for row in rows:
        members.setdefault((unnumbered(row.path), row.cells, template(row.note)), []).append(row)
    return [Group(group, len(group), group[0].cells, sum(row.nbytes for row in group)) for group in members.values()]


def folded_table(
    title: str, headings: Sequence[str], rows: Iterable[Row], lines: Iterable[str] = (), *, noun: str = "variable"
) -> Table:
    """A table of the largest groups; headings: of `Row.cells`, bytes, note; `noun` of the path."""
    *cell_headings, bytes_heading, note_heading = headings
    groups = grouped(rows)
    largest = heapq.nlargest(_MAX_ROWS, range(len(groups)), key=lambda index: (groups[index].nbytes, -index))
    shown = [groups[index] for index in sorted(largest)]
    grid = [(group.name, f"{group.count:,}", *group.cells, format_bytes(group.nbytes), group.note) for group in shown]
    if left := len(groups) - len(shown):
        count = sum(group.count for group in groups) - sum(group.count for group in shown)
        nbytes = sum(group.nbytes for group in groups) - sum(group.nbytes for group in shown)
        blank = ("",) * len(cell_headings)
        grid.append((f"… and {left:,} more", f"{count:,}", *blank, format_bytes(nbytes), ""))
    columns = (noun, "count", *cell_headings, bytes_heading, note_heading)
    return Table(title, columns, grid, frozenset(("count", bytes_heading)), tuple(lines))


@functools.lru_cache(maxsize=1024)
def shape_text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def placed_text(spec: Any, memory_kind: str | None) -> str:
    """How something is split, in words, and in which kind of memory, unless it is devices' own."""
    return f"{spec}" if memory_kind is None else f"{spec} in {memory_kind}"


def spec_text(spec: jax.sharding.PartitionSpec | None) -> str:
    if spec is None:
        return "–"
    entries: tuple[Any, ...] = tuple(spec)
    if all(entry is None or entry == () for entry in entries):
        return "replicated"
    return f"P({', '.join(map(repr, entries))})"


def print_text(text: str) -> None:
    """Prints what the terminal's encoding may lack, and where the reader (`head`, a pager) may have left."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

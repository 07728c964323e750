"""Pages: information about a model in one HTML file that a browser opens offline.

Responsible for the file, its charts and its tables, not for their content. Plotly draws, and is included in the file.
Names may be hostile, so none is ever markup: data is compressed JSON that no HTML parser sees, the page's own script
inserts it as text, and text that Plotly would read as markup is escaped.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import functools
import gzip
import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymodel._errors import LazyModelError, required
from lazymodel._show.text import fold, grouped_by, unnumbered

# Separate files rather than strings, so that editors and linters support them.
_SCRIPT = Path(__file__).with_name("page.js")
_STYLE = Path(__file__).with_name("page.css")
_BOXES = 2000  # limit for a treemap: a browser draws these within a second
_DEPTH = 32  # limit for modules in modules: names of files may have any number of parts


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer to the reader's question, as a banner; `good` is None if it is unknown."""

    answer: str
    good: bool | None
    lines: Sequence[str] = ()
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines."""

    lines: Sequence[str]
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Bars:
    """Bytes as one stacked bar for each name, by kind, against a limit."""

    title: str
    bars: Mapping[str, Mapping[str, int]]
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Lines:
    """Bytes over steps: a name for each step, and one amount for each line."""

    title: str
    steps: Sequence[str]
    lines: Mapping[str, Sequence[int]]
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Spans:
    """Seconds as bars from start to end: a row for each name, with its intervals, in the given order."""

    title: str
    spans: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    axis: str = "seconds"


@dataclasses.dataclass(frozen=True)
class Treemap:
    """Bytes of paths; a reader zooms into the parts between `/`. Equal ones are one tile, `layers_{0..79} × 80`."""

    title: str
    sizes: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table that a reader filters by typing.

    A cell is text or a mapping: `{"nbytes": int}`; `{"share": float}`, the used share of a limit, at most 1 if it fits;
    or `{"placed": {"shape", "axes", "mesh"}}`, a shape that is drawn in colour, with the axes of the mesh that split
    each dimension.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


Section = Verdict | Text | Bars | Lines | Spans | Treemap | Grid


def save_page(path: str | os.PathLike[str], title: str, sections: Sequence[Section]) -> None:
    """Writes a page.

    Raises:
        LazyModelError: plotly is not installed, or the file cannot be written.
    """
    text, path = page(title, sections), Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # the old file stays until the new one is complete
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise LazyModelError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def page(title: str, sections: Sequence[Section]) -> str:
    """The HTML of a page."""
    plotly, style, script = plotly_source(), _STYLE.read_text("utf-8"), _SCRIPT.read_text("utf-8")
    charts = any(isinstance(section, Lines | Spans | Treemap) for section in sections)
    plain: list[dict[str, Any]] = [{"kind": type(each).__name__.lower(), **vars(each)} for each in sections]
    for each in plain:
        if each["kind"] == "grid":
            each["rows"] = [[cell if isinstance(cell, dict) else str(cell) for cell in row] for row in each["rows"]]
        elif each["kind"] == "treemap":
            each["sizes"] = _modules(each["sizes"])
    data = json.dumps({"title": title, "sections": plain})
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">\n"
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main></main>\n"
        "<noscript>This page is drawn by JavaScript.</noscript>\n"
        f'<script id="data" type="text/plain">{_packed(data)}</script>\n'
        f'<script id="plotly" type="text/plain">{plotly if charts else ""}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _packed(text: str) -> str:
    """A text for a page's script to unpack: a fiftieth of the size, for names and reasons of many variables."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@functools.cache
def plotly_source() -> str:
    """Plotly's own program, packed as in a page; raises LazyModelError if plotly is not installed."""
    return _packed(required("plotly.offline", "a page", "'lazymodel[page]'").get_plotlyjs())


def _modules(paths: Mapping[str, int]) -> dict[str, int]:
    """Bytes by path, equal modules folded; by outer ones, if there are too many; at last the largest, and the rest."""
    folded = _folded({tuple(path.split("/", _DEPTH)): nbytes for path, nbytes in paths.items()})
    sizes = collections.Counter({"/".join(parts): nbytes for parts, nbytes in folded.items()})
    while len(sizes) > _BOXES:
        outer = collections.Counter[str]()
        for path, nbytes in sizes.items():
            outer[path.rpartition("/")[0] or path] += nbytes
        if len(outer) == len(sizes):  # no path has a module
            largest = dict(sizes.most_common(_BOXES - 1))
            return {**largest, "others": sizes.total() - sum(largest.values())}
        sizes = outer
    return sizes


def _folded(sizes: Mapping[tuple[str, ...], int]) -> collections.Counter[tuple[str, ...]]:
    """Modules with names that differ only in numbers, and with the same content, become one, with the sum of bytes."""
    alike: dict[Any, list[str]] = {}
    for head, members in grouped_by(sizes.items(), lambda item: item[0][:1]).items():
        content = _folded({parts[1:]: nbytes for parts, nbytes in members}) if head else dict(members)
        alike.setdefault((*map(unnumbered, head), frozenset(content.items())), []).extend(head or [""])
    found = collections.Counter[tuple[str, ...]]()
    for (*kind, content), names in alike.items():
        name = fold(names) + (f" × {len(names)}" if len(names) > 1 else "")
        for parts, nbytes in content:
            found[(name, *parts) if kind else ()] += nbytes * len(names)
    return found

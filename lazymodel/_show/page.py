"""Pages: what is known of a model in one HTML file that a browser opens without a network.

Responsible for the file, its charts and its tables; what they show is somebody else's matter. Plotly draws, and lies in
the file. Names may be hostile, so none is ever markup: data is compressed JSON that no parser of HTML sees, the page's
own script writes it as text, and what Plotly would read as markup is escaped.
"""

from __future__ import annotations

import base64
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

from lazymodel._errors import LazyModelError

# Files of a page rather than strings: editors and linters know them.
_SCRIPT = Path(__file__).with_name("page.js")
_STYLE = Path(__file__).with_name("page.css")
_BOXES = 2000  # of a treemap at most: a browser draws so many within a second


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines."""

    lines: Sequence[str]
    title: str = ""
    kind: str = "text"


@dataclasses.dataclass(frozen=True)
class Bars:
    """Bytes as one stacked bar for each name, by kind, against a limit."""

    title: str
    bars: Mapping[str, Mapping[str, int]]
    limit: int | None = None
    kind: str = "bars"


@dataclasses.dataclass(frozen=True)
class Lines:
    """Bytes over steps; of each step what it is called, and one amount for each line."""

    title: str
    steps: Sequence[str]
    lines: Mapping[str, Sequence[int]]
    limit: int | None = None
    kind: str = "lines"


@dataclasses.dataclass(frozen=True)
class Spans:
    """Seconds as bars from starts to ends: a row for each name, with its pieces, in the order given."""

    title: str
    spans: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    axis: str = "seconds"
    kind: str = "spans"


@dataclasses.dataclass(frozen=True)
class Treemap:
    """Bytes of paths, whose parts between `/` are what a reader zooms into."""

    title: str
    sizes: Mapping[str, int]
    kind: str = "treemap"


@dataclasses.dataclass(frozen=True)
class Placed:
    """A shape that is split over the axes of a mesh, drawn in colour: for each dimension the axes that split it."""

    shape: Sequence[int]
    axes: Sequence[Sequence[str]]
    mesh: Mapping[str, int]
    kind: str = "placed"


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table that is filtered by what a reader types; cells are text, `Nbytes`, `Share` or `Placed`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kind: str = "grid"


@dataclasses.dataclass(frozen=True)
class Nbytes:
    """A number of bytes in a cell."""

    nbytes: int
    kind: str = "nbytes"


@dataclasses.dataclass(frozen=True)
class Share:
    """How much of what there is would be taken, in a cell: at most 1 where it fits."""

    of: float
    kind: str = "share"


Section = Text | Bars | Lines | Spans | Treemap | Grid


def save_page(path: str | os.PathLike[str], title: str, sections: Sequence[Section]) -> None:
    """Writes a page.

    Raises:
        LazyModelError: plotly is not installed, or the file cannot be written.
    """
    text, path = page(title, sections), Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # what was there stays until all of it is written
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise LazyModelError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def plotly_source() -> str:
    """Plotly's own program, as it stands in a page; LazyModelError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise LazyModelError("a page needs plotly: pip install 'lazymodel[page]'") from error
    return get_plotlyjs()


def page(title: str, sections: Sequence[Section]) -> str:
    """The HTML of a page."""
    plotly, style, script = _plotly(), _STYLE.read_text("utf-8"), _SCRIPT.read_text("utf-8")
    charts = any(not isinstance(section, Text | Grid) for section in sections)
    data = json.dumps({"title": title, "sections": [_plain(each) for each in sections]})
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
    """A text for a page's script to unpack: a fiftieth of what names and reasons of many variables take else."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@functools.cache
def _plotly() -> str:
    return _packed(plotly_source())


def _plain(section: Section) -> Any:
    """A section as JSON has it: shapes and drawings that many rows share are written once."""
    if not isinstance(section, Grid):
        return dataclasses.asdict(section)
    placed: dict[str, int] = {}
    rows = [[_cell(cell, placed) for cell in row] for row in section.rows]
    return {
        "kind": section.kind,
        "title": section.title,
        "columns": list(section.columns),
        "rows": rows,
        "placed": [json.loads(each) for each in placed],
    }


def _cell(cell: Any, placed: dict[str, int]) -> Any:
    if isinstance(cell, Nbytes):
        return {"nbytes": cell.nbytes}
    if isinstance(cell, Share):
        return {"share": cell.of}
    if isinstance(cell, Placed):
        return {"placed": placed.setdefault(json.dumps(dataclasses.asdict(cell)), len(placed))}
    return str(cell)


def modules(paths: Mapping[str, int]) -> dict[str, int]:
    """Bytes by path; by module, and outer modules, where there are too many."""
    sizes = dict(paths)
    while len(sizes) > _BOXES:
        outer: dict[str, int] = {}
        for path, nbytes in sizes.items():
            module = path.rpartition("/")[0] or path
            outer[module] = outer.get(module, 0) + nbytes
        if len(outer) == len(sizes):  # nothing is in anything: the largest, and the rest
            largest = sorted(sizes, key=lambda path: -sizes[path])[: _BOXES - 1]
            rest = sum(sizes.values()) - sum(sizes[path] for path in largest)
            return {**{path: sizes[path] for path in largest}, "others": rest}
        sizes = outer
    return sizes

"""A plan as a page: what devices hold in use and on the way there, the modules by size, every variable on the mesh.

Responsible for which charts and tables show a plan; it is given plain values, as `_plan/figures` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lazymodel._show.page import Bars, Grid, Lines, Nbytes, Placed, Section, Text, Treemap
from lazymodel._show.table import ACTIONS

_MODULES = 2000  # of a treemap at most: a browser draws so many within a second
_STEPS = 2000  # of a line: more are closer than pixels


class PageRow(NamedTuple):
    """A variable as its row of a page shows it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]  # of the mesh, for each dimension those that split it
    nbytes: int  # of a device, in use
    action: str
    source: str
    why: str


def plan_sections(
    lines: Sequence[str],
    parts: Mapping[str, int],
    timeline: Sequence[tuple[str, int, int]],
    limit: int | None,
    rows: Sequence[PageRow],
    mesh: Mapping[str, int],
) -> list[Section]:
    """The sections of one plan's page; of the timeline, a step is its name and the bytes held after and during it."""
    sections: list[Section] = [Text(lines), Bars("In use, on the fullest device", {"in use": parts}, limit)]
    if len(timeline) > 1:
        thin = timeline[:: -(-len(timeline) // _STEPS)]
        held = {"held": [step[1] for step in thin], "with temporaries": [step[2] for step in thin]}
        sections.append(Lines("While materializing, on the fullest device", [step[0] for step in thin], held, limit))
    sections.append(Treemap("Modules by bytes on a device", _sizes((row.path, row.nbytes) for row in rows)))
    columns = ("variable", "shape", "dtype", "sharding", "bytes on a device", "value", "why")
    grid = [_cells(row, mesh) for row in rows]
    sections.append(Grid("Variables", columns, grid))
    return sections


def comparison_sections(lines: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Section]:
    """What stands above the plans that are compared."""
    return [Text(lines), Grid("What would fit", columns, rows)]


def _cells(row: PageRow, mesh: Mapping[str, int]) -> list[Any]:
    shape = "[" + ", ".join(map(str, row.shape)) + "]"
    value = f"{ACTIONS.get(row.action, row.action)}: {row.source}"
    return [row.path, shape, row.dtype, Placed(row.shape, row.axes, mesh), Nbytes(row.nbytes), value, row.why]


def _sizes(paths: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by path; by module, and outer modules, where there are too many."""
    sizes = dict(paths)
    while len(sizes) > _MODULES:
        outer: dict[str, int] = {}
        for path, nbytes in sizes.items():
            module = path.rpartition("/")[0] or path
            outer[module] = outer.get(module, 0) + nbytes
        if len(outer) == len(sizes):  # nothing is in anything: the largest, and the rest
            largest = sorted(sizes, key=lambda path: -sizes[path])[: _MODULES - 1]
            rest = sum(sizes.values()) - sum(sizes[path] for path in largest)
            return {**{path: sizes[path] for path in largest}, "others": rest}
        sizes = outer
    return sizes

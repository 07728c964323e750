"""A plan as a page: what devices hold in use and on the way there, the modules by size, every variable on the mesh.

Responsible for which charts and tables show a plan; it is given plain values, as `_plan/figures` is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lazymodel._devices.hardware import CARDS, GENERATIONS, device_memory
from lazymodel._show.page import Bars, Grid, Lines, Nbytes, Placed, Section, Share, Text, Treemap, modules
from lazymodel._show.table import ACTIONS

_COUNTS = tuple(2**power for power in range(11))  # of devices: the slices and machines that people rent
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
    fixed: int,
    split: int,
) -> list[Section]:
    """The sections of one plan's page; of the timeline, a step is its name and the bytes held after and during it.

    Of the bytes that are needed, `fixed` are every device's, and `split` lie on all of them together.
    """
    sections: list[Section] = [Text(lines), Bars("In use, on the fullest device", {"in use": parts}, limit)]
    if len(timeline) > 1:
        thin = timeline[:: -(-len(timeline) // _STEPS)]
        held = {"held": [step[1] for step in thin], "with temporaries": [step[2] for step in thin]}
        sections.append(Lines("While materializing, on the fullest device", [step[0] for step in thin], held, limit))
    sections.append(Treemap("Modules by bytes on a device", modules({row.path: row.nbytes for row in rows})))
    sections.append(_elsewhere(fixed, split))
    columns = ("variable", "shape", "dtype", "sharding", "bytes on a device", "value", "why")
    grid = [_cells(row, mesh) for row in rows]
    sections.append(Grid("Variables", columns, grid))
    return sections


def _elsewhere(fixed: int, split: int) -> Grid:
    """Of other devices, and how many of them, how much each would need of what it has."""
    rows: list[list[Any]] = []
    for name in (*GENERATIONS, *CARDS):
        memory = device_memory(name)
        assert memory is not None  # the names are the table's
        there = GENERATIONS[name].sizes if name in GENERATIONS else _COUNTS
        shares = [Share((fixed + split / count) / memory) if count in there else "" for count in _COUNTS]
        rows.append([name, Nbytes(memory), *shares])
    title = "What would fit, split evenly over so many devices"
    return Grid(title, ("device", "each has", *map(str, _COUNTS)), rows)


def _cells(row: PageRow, mesh: Mapping[str, int]) -> list[Any]:
    shape = "[" + ", ".join(map(str, row.shape)) + "]"
    value = f"{ACTIONS.get(row.action, row.action)}: {row.source}"
    return [row.path, shape, row.dtype, Placed(row.shape, row.axes, mesh), Nbytes(row.nbytes), value, row.why]

"""Numbers of a model's layers over their depth: as figures, and as short texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._show.table import Column
from lazymodel._show.text import empty_figure, finished_figure

LAYER = re.compile(r"(?<![0-9A-Za-z])(\d{1,9})(?![0-9A-Za-z])")
_LOG_RATIO = 10  # between the largest and the smallest value: from here a plot's axis is logarithmic


def values_over_depth(values: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Folded path → layer → value, for paths that occur in two layers or more."""
    lines: dict[str, dict[int, Any]] = {}
    for path, value in values.items():
        found = LAYER.search(path)
        if found is not None and value is not None:
            name = f"{path[: found.start(1)]}{{layer}}{path[found.end(1) :]}"
            lines.setdefault(name, {})[int(found[1])] = value
    return {name: dict(sorted(line.items())) for name, line in lines.items() if len(line) > 1}


def drawn_over_depth(panels: Mapping[str, Mapping[str, Mapping[int, Any]]], path: str | os.PathLike[str] | None) -> Any:
    """A figure of title → folded path → layer → value or values, whose medians are drawn."""
    if not any(panels.values()):
        raise LazyModelError("there is nothing to draw over depth: no path occurs with two layers' numbers")
    figure = empty_figure((5.5 * len(panels), 4))
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, line in lines.items():
            # A leading underscore would hide a name from the legend.
            medians = [float(np.median(value)) for value in line.values()]
            axes.plot(list(line), medians, ".-", color=f"C{names.index(name)}", label=f" {name}")
        axes.set_title(title)
        axes.set_xlabel("layer")
        values = [float(np.median(value)) for line in lines.values() for value in line.values()]
        if min(values, default=0) > 0 and max(values) > _LOG_RATIO * min(values):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)
        axes.legend(fontsize="x-small")
    return finished_figure(figure, "", path)


def measured(heading: str) -> Column:
    """A column of numbers, or of arrays of them. Of rows that fold it has the range; under `min` and `max` its end."""
    end = {"min": np.min, "max": np.max}.get(heading)

    def merge(values: Sequence[Any]) -> str:
        known = [number for value in values if value is not None for number in np.ravel(value).tolist()]
        return _range([end(known)] if end and known else sorted(known))

    return Column.number(heading, merge)


def _range(known: Sequence[float]) -> str:
    if not known:
        return "–"
    digits = 3 if known[0] == known[-1] else 2  # more digits are too wide for five ranges side by side
    low, high = f"{known[0]:.{digits}g}", f"{known[-1]:.{digits}g}"
    return low if low == high else f"{low}…{high}"

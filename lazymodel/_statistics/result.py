"""What was found of a model's variables: a table, a figure over depth, a dict."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import Any, cast

from lazymodel._errors import LazyModelError
from lazymodel._show.table import Table, Tabled
from lazymodel._show.text import closest, fold, grouped_by, plural, unnumbered

# Of Lanczos' process: the largest singular value of a random matrix to some 1e-3.
ITERATIONS = 24
BREAKDOWN = 1e-6  # a residual this small beside the norm so far means that the rest of the process is rounding
_MAX_ROWS = 60  # of a table
_LOG_RATIO = 10  # between the largest and the smallest value, from which a plot's axis is logarithmic


@dataclasses.dataclass(frozen=True)
class VariableStatistics:
    """What was found of one variable; of complex numbers it is about their sizes, |z|.

    Attributes:
        path: Its path; with `[i]` at the end for one layer of a stack.
        shape: Its shape, without the axis of layers.
        dtype: Its dtype.
        mean: Mean of its elements.
        std: Standard deviation of its elements (the population's: divided by their number).
        min: Smallest element; of integers an exact int.
        max: Largest element, likewise.
        spectral_norm: Largest singular value of it as a matrix; None where it has fewer than two dimensions or is no
            float.
        nonfinite: Number of elements that are NaN or infinite; the others are then those of what there is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    std: float
    min: float
    max: float
    spectral_norm: float | None
    nonfinite: int

    @property
    def layer(self) -> int | None:
        """The first number that is a part of the path, or ends one: how deep it stands; None where there is none."""
        found = _LAYER.search(self.path)
        return None if found is None else int(found[1])


# `layers/3/kernel`, `layer_3/kernel`, `layer.3.weight`, `kernel[3]`
_LAYER = re.compile(r"(?<![0-9A-Za-z])(\d{1,9})(?![0-9A-Za-z])")
_MEASURES = ("mean", "std", "min", "max", "spectral_norm")


class Statistics(Tabled, dict[str, VariableStatistics]):
    """Statistics by path; prints as a table, folded over layers. Made by `statistics`."""

    def __missing__(self, path: str) -> VariableStatistics:
        raise KeyError(f"there are no statistics of {path!r}{closest(path, self)}")

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Path → name of the statistic → value, as JSON takes them (NaN and infinity aside)."""
        return {path: dataclasses.asdict(row) | {"shape": list(row.shape)} for path, row in self.items()}

    def over_depth(self, measure: str = "std") -> dict[str, dict[int, float]]:
        """One statistic as lines over depth: folded path → layer → value, where a path occurs in two layers or more.

        Raises:
            LazyModelError: There is no such statistic.
        """
        if measure not in _MEASURES:
            raise LazyModelError(f"a statistic is one of {', '.join(_MEASURES)}; got {measure!r}")
        lines: dict[str, dict[int, float]] = {}
        for path, row in self.items():
            value = getattr(row, measure)
            found = _LAYER.search(path)
            if found is not None and value is not None:
                name = f"{path[: found.start(1)]}{{layer}}{path[found.end(1) :]}"
                lines.setdefault(name, {})[int(found[1])] = value
        return {name: dict(sorted(line.items())) for name, line in lines.items() if len(line) > 1}

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws standard deviation and spectral norm over depth, a line for each kind of variable; needs matplotlib.

        Args:
            path: File to save the figure to, such as `"statistics.png"`; None saves none.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            LazyModelError: No path has a layer's number in it, or matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure  # not pyplot: no window, no global state
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise LazyModelError("drawing needs matplotlib: pip install matplotlib") from error
        panels = {"standard deviation": self.over_depth("std"), "spectral norm": self.over_depth("spectral_norm")}
        if not any(panels.values()):
            raise LazyModelError("there is nothing to draw over depth: no path occurs with two layers' numbers")
        figure = cast(Any, Figure(figsize=(11, 4), layout="constrained"))
        names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
        for axes, (title, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            for name, line in lines.items():
                # A leading underscore would hide a name from the legend.
                axes.plot(list(line), list(line.values()), ".-", color=f"C{names.index(name)}", label=f" {name}")
            axes.set_title(title)
            axes.set_xlabel("layer")
            values = [value for line in lines.values() for value in line.values()]
            if min(values, default=0) > 0 and max(values) > _LOG_RATIO * min(values):
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles = dict(zip(*figure.axes[0].get_legend_handles_labels()[::-1], strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
        if path is not None:
            figure.savefig(path)
        return figure

    def table(self) -> Table:
        """What is shown."""
        groups = grouped_by(self.values(), lambda row: (unnumbered(row.path), row.shape, row.dtype))
        grid: list[tuple[str, ...]] = []
        for rows in itertools.islice(groups.values(), _MAX_ROWS):
            cells = (_range([getattr(row, measure) for row in rows]) for measure in _MEASURES)
            shape = f"{rows[0].dtype}{list(rows[0].shape)}"
            grid.append((fold([row.path for row in rows]), f"{len(rows):,}", *cells, shape))
        lines: list[str] = []
        if len(groups) > _MAX_ROWS:
            lines.append(f"… and {len(groups) - _MAX_ROWS:,} more rows; to_dict() has all")
        for row in itertools.islice((row for row in self.values() if row.nonfinite), _MAX_ROWS):
            lines.append(f"not finite: {plural(row.nonfinite, 'element')} of {row.path}")
        columns = ("variable", "count", "mean", "std", "min", "max", "spectral", "shape")
        title = f"statistics of {plural(len(self), 'variable')}"
        return Table(title, columns, grid, frozenset(columns[1:-1]), lines)


def _range(values: Sequence[float | None]) -> str:
    """What a group's values are: one, or the least and the greatest."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "–"
    digits = 3 if known[0] == known[-1] else 2  # five ranges side by side leave no room for more
    low, high = f"{known[0]:.{digits}g}", f"{known[-1]:.{digits}g}"
    return low if low == high else f"{low}…{high}"


def cut(shape: Sequence[int]) -> int:
    """Where an array is cut into the two sides of a matrix: as close to square as its axes allow."""
    return min(range(1, len(shape)), key=lambda cut: math.prod(shape[:cut]) + math.prod(shape[cut:]))

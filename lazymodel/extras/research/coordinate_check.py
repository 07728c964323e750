"""`coordinate_check`: checks that activations and their updates keep their sizes while a model grows in width.

Responsible for measuring and for showing the results; models, data and training are the caller's. Source: Yang et
al., Tensor Programs V, 2022, appendix D.1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.variable import flatten_paths
from lazymodel._errors import LazyModelError
from lazymodel._show.table import Column, Report, Table
from lazymodel._show.text import PALETTE, empty_figure, finished_figure

_TOLERANCE = 0.25  # of a slope: half of the slope of growth with the square root of the width


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CoordinateCheck(Report):
    """Sizes of activations over widths and steps, as root mean squares of their elements. Made by `coordinate_check`.

    Attributes:
        sizes: Name of the activation → width → its size before each step.
        changes: Name → width → the size of its change relative to the first measurement, likewise.

    Example:
        >>> check = lm.coordinate_check(lambda width: jax.numpy.ones(width), [64, 128], lambda x: (x + 1, {"x": x}))
        >>> check.sizes["x"][64], check.changes["x"][64]
        ((1.0, 2.0, 3.0, 4.0), (0.0, 1.0, 2.0, 3.0))
    """

    sizes: Mapping[str, Mapping[int, tuple[float, ...]]]
    changes: Mapping[str, Mapping[int, tuple[float, ...]]]

    @property
    def widths(self) -> list[int]:
        return list(next(iter(self.sizes.values())))

    @property
    def steps(self) -> int:
        """Number of steps between the first and the last measurement."""
        return len(next(iter(next(iter(self.sizes.values())).values()))) - 1

    def slopes(self, what: str = "changes", step: int = -1) -> dict[str, float]:
        """Name → the power of the width by which its size (`what="sizes"`) or change grows, at this step.

        muP gives 0, standard parametrization often 1/2 or 1; NaN if a size is 0 or not finite.

        Raises:
            LazyModelError: `what` is neither `"changes"` nor `"sizes"`.
        """
        if what not in ("sizes", "changes"):
            raise LazyModelError(f'what is "sizes" or "changes"; got {what!r}')
        found: Mapping[str, Mapping[int, tuple[float, ...]]] = getattr(self, what)
        return {name: _slope({width: row[step] for width, row in rows.items()}) for name, rows in found.items()}

    def growing(self, tolerance: float = _TOLERANCE) -> dict[str, float]:
        """Name → slope, of activations that do not keep their size: they grow, or their changes grow or vanish.

        A size that shrinks does not count: readouts begin smaller in wider models.
        """
        sizes, changes = self.slopes("sizes"), self.slopes()
        found = {name: slope for name, slope in sizes.items() if not slope <= tolerance and not math.isnan(slope)}
        return found | {name: slope for name, slope in changes.items() if abs(slope) > tolerance}

    def table(self) -> Table:
        """A row for each activation before the first step, and for its change after the last step."""
        parts = (("size", "sizes", 0), (f"change in {self.steps} steps", "changes", -1))
        grid: list[tuple[str, ...]] = []
        for name in self.sizes:
            for label, what, step in parts:
                cells = (f"{getattr(self, what)[name][width][step]:.3g}" for width in self.widths)
                grid.append((name, *cells, f"{self.slopes(what, step)[name]:+.2f}", label))
        growing = self.growing()
        verdict = "all keep their size" if not growing else "with the width grow or vanish: "
        verdict += ", ".join(f"{name} (as width^{slope:.2f})" for name, slope in growing.items())
        numbers = map(Column.number, (*map(str, self.widths), "slope"))
        columns = (Column("activation"), *numbers, Column("root mean square"))
        return Table("coordinate check over widths", columns, grid, [verdict])

    def plot(self, path: str | os.PathLike[str] | None = None, title: str = "coordinate check") -> Any:
        """Draws sizes before the first step and changes after each over the width; needs matplotlib.

        Args:
            path: File to save the figure to, such as `"check.svg"`; None does not save it.
            title: The title of the figure.

        Returns:
            The `matplotlib.figure.Figure`.
        """
        figure = empty_figure((2.6 * (self.steps + 1), 2.8))
        panels = figure.subplots(1, self.steps + 1, squeeze=False, sharey=True)[0]
        for step, axes in enumerate(panels):
            for (name, rows), colour in zip((self.changes if step else self.sizes).items(), itertools.cycle(PALETTE)):
                axes.loglog(self.widths, [rows[width][step] for width in self.widths], ".-", color=colour, label=name)
            axes.set_title(f"change, step {step}" if step else "size at first", fontsize=9)
            axes.set_xticks(self.widths, list(map(str, self.widths)), fontsize=7)
            axes.minorticks_off()
            axes.set_xlabel("width", fontsize=8)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
        return finished_figure(figure, title, path)


def coordinate_check(
    make_model: Callable[[int], Any], widths: Sequence[int], step: Callable[[Any], tuple[Any, Any]], *, steps: int = 3
) -> CoordinateCheck:
    """Trains models of several widths for a few steps, and measures sizes of activations and of their changes.

    In muP no size grows with the width, and each change keeps its size; in standard parametrization, changes of hidden
    activations and of logits under Adam grow with it (Yang et al., Tensor Programs V, 2022, appendix D.1).

    Args:
        make_model: Makes the object to train for a width: a model with its optimizer, for example.
        widths: At least two.
        step: Trains it for one step: returns the trained object, and a pytree of activations from before the step,
            whose paths are their names. The inputs must be the same at each step, and of the same size for all widths.
        steps: Number of steps.

    Raises:
        LazyModelError: There are fewer than two widths, no steps or no activations.

    Example:
        >>> def step(weight):
        ...     loss = lambda w: (jax.numpy.ones((1, len(w))) @ w).mean()
        ...     return weight - 1.0 * jax.grad(loss)(weight), {"y": jax.numpy.ones((1, len(weight))) @ weight}
        >>> lm.coordinate_check(lambda width: jax.numpy.zeros((width, 1)), [64, 128, 256], step).slopes()
        {'y': 1.0}
    """
    widths = list(dict.fromkeys(widths))
    if len(widths) < 2 or steps < 1 or min(widths) < 1:
        raise LazyModelError(f"a coordinate check needs two widths and a step at least; got {widths} and {steps}")
    sizes: dict[str, dict[int, tuple[float, ...]]] = {}
    changes: dict[str, dict[int, tuple[float, ...]]] = {}
    for width in widths:
        model, first = make_model(width), None
        for _ in range(steps + 1):
            model, activations = step(model)
            found = {name: jnp.asarray(value, np.float32) for name, value in flatten_paths(activations).items()}
            if not found:
                raise LazyModelError("step returns (model, activations), a pytree of arrays; it has none")
            first = found if first is None else first
            for name, value in found.items():
                measured = jax.device_get((_size(value), _size(value - first[name])))
                for kept, number in zip((sizes, changes), measured, strict=True):
                    rows = kept.setdefault(name, {})
                    rows[width] = (*rows.get(width, ()), float(number))
    return CoordinateCheck(sizes, changes)


def _size(value: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(value)))


def _slope(sizes: Mapping[int, float]) -> float:
    values = list(sizes.values())
    if not all(0 < value < math.inf for value in values):
        return math.nan
    slope = np.polyfit(np.log(list(sizes)), np.log(values), 1)[0]
    return round(float(slope), 3) + 0.0

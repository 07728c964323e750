"""Colours and figures of matplotlib.

Responsible for their style and for writing them; callers draw the content.
"""

from __future__ import annotations

from typing import Any

from lazymodel._errors import LazyModelError
from lazymodel._show.text import printable

# Okabe and Ito's colours, distinguishable with any kind of colour vision; without black and yellow, used for lines.
PALETTE = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#8A8A8A")


def empty_figure(inches: tuple[float, float]) -> Any:
    """A `matplotlib.figure.Figure` of a size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LazyModelError("plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=inches, layout="constrained")


def finished_figure(figure: Any, title: str, path: Any = None) -> Any:
    """The figure with its title, written to `path` unless that is None."""
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(printable(title).replace("$", r"\$"), fontsize=10)
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:  # no such folder, or an unknown suffix
            raise LazyModelError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return figure

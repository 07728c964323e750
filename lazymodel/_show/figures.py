"""What pictures have in common: their colours, bars in HTML, and figures of matplotlib.

Responsible for how they look and for writing them; what they show is drawn by whoever knows it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from lazymodel._errors import LazyModelError
from lazymodel._show.text import printable

# Okabe and Ito's, which people with any kind of colour vision tell apart; without black and yellow, which lines need.
PALETTE = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#8A8A8A")


def bar(pieces: Iterable[tuple[str, str, float]]) -> str:
    """Pieces (label, colour, share of the width) as one bar, in HTML; one without a colour is a gap."""

    def piece(label: str, colour: str, share: float) -> str:
        look = f"display:inline-block;height:1em;width:{100 * share:.2f}%" + (f";background:{colour}" if colour else "")
        return f'<span title="{html.escape(label, quote=True)}" style="{look}"></span>'

    shown = "".join(piece(*each) for each in pieces)
    return f'<div style="border:1px solid #999;font-size:12px;line-height:1;white-space:nowrap">{shown}</div>'


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
        except (OSError, ValueError) as error:  # no such folder; a suffix of no format
            raise LazyModelError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return figure

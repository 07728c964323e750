"""Pictures of plans: a bar of what a device holds, and figures of it and of the way there.

Responsible for drawing plain numbers of bytes; what they mean is said in `_plan/plan`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from lazymodel._errors import LazyModelError
from lazymodel._show.text import format_bytes, printable

_GIB = 2**30
_COLOURS = {  # Okabe and Ito's palette, which people with any kind of colour vision tell apart
    "parameters": "#0072B2",
    "LoRA": "#56B4E9",
    "optimizer state": "#E69F00",
    "gradients": "#009E73",
    "activations": "#CC79A7",
}
_HELD, _OVER, _LIMIT = _COLOURS["parameters"], "#999999", "#D55E00"


def bar(parts: Mapping[str, int], full: int) -> str:
    """Parts of what a device holds as a bar, in HTML; its width is `full` bytes."""

    def piece(kind: str, nbytes: int) -> str:
        label = html.escape(f"{kind}: {format_bytes(nbytes)}", quote=True)
        look = f"width:{100 * nbytes / full:.2f}%;background:{_COLOURS.get(kind, _OVER)}"
        return f'<span title="{label}" style="display:inline-block;height:1em;{look}"></span>'

    pieces = "".join(piece(kind, nbytes) for kind, nbytes in parts.items())
    return f'<div style="border:1px solid #999;font-size:12px;line-height:1;white-space:nowrap">{pieces}</div>'


def figure(
    name: str,
    parts: Mapping[str, int],
    timeline: Sequence[tuple[int, int]],
    held: int,
    peak: int,
    limit: int | None,
    path: Any = None,
) -> Any:
    """Draws a device in use and once materialized (`held`, `peak`) beside what it holds after and during each step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LazyModelError("plot needs matplotlib: pip install matplotlib") from None
    drawn: Any = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 2))
    bottom = 0.0
    for kind, nbytes in parts.items():
        label = f"{kind}, {format_bytes(nbytes)}"
        left.bar("in use", nbytes / _GIB, bottom=bottom, color=_COLOURS.get(kind), label=label)
        bottom += nbytes / _GIB
    left.bar("materializing", held / _GIB, color=_HELD)
    over = (peak - held) / _GIB
    left.bar("materializing", over, bottom=held / _GIB, color=_OVER, label="peak while materializing")
    if limit is not None:
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (0, 3), "ha": "center"}
        text = f"device memory, {format_bytes(limit)}"
        left.annotate(text, (0.5, limit / _GIB), fontsize=7, color=_LIMIT, **where)
    left.set_ylabel("GiB on the fullest device")
    left.legend(fontsize=7, frameon=False)
    steps = range(1, len(timeline) + 1)
    after, during = ([amounts[i] / _GIB for amounts in timeline] for i in (0, 1))
    right.fill_between(steps, after, during, step="mid", color=_OVER, linewidth=0, label="temporaries")
    right.fill_between(steps, 0, after, step="mid", color=_HELD, linewidth=0, label="held")
    right.set_xlabel("step of materializing")
    if timeline:
        right.legend(fontsize=7, frameon=False, loc="upper left")
    for axes in (left, right):
        if limit is not None:
            axes.axhline(limit / _GIB, color=_LIMIT, linestyle="--", linewidth=1)
        axes.set_ylim(0, None)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    drawn.suptitle(printable(name).replace("$", r"\$"), fontsize=10)
    if path is not None:
        try:
            drawn.savefig(path)
        except (OSError, ValueError) as error:  # no such folder; a suffix of no format
            raise LazyModelError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return drawn

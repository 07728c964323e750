"""Pictures of plans: a bar of what a device holds, and figures of it and of the way there.

Responsible for drawing plain numbers of bytes; what they mean is said in `_plan/plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lazymodel._show import figures
from lazymodel._show.text import format_bytes

_GIB = 2**30
_COLOURS: dict[str, str] = dict(
    zip(("parameters", "LoRA", "optimizer state", "gradients", "activations"), figures.PALETTE, strict=False)
)
_HELD, _OVER, _LIMIT = _COLOURS["parameters"], "#999999", figures.PALETTE[5]


def bar(parts: Mapping[str, int], full: int) -> str:
    """Parts of what a device holds as a bar, in HTML; its width is `full` bytes."""
    return figures.bar(
        (f"{kind}: {format_bytes(nbytes)}", _COLOURS.get(kind, _OVER), nbytes / full) for kind, nbytes in parts.items()
    )


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
    drawn = figures.empty_figure((9.6, 3.6))
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
    return figures.finished_figure(drawn, name, path)

"""Plans for people and for programs: tables, HTML, figures, and plain values.

Responsible for presentation only, as `_report`, whose tables these are.
"""

from __future__ import annotations

import heapq
import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lazymodel._errors import LazyModelError
from lazymodel._table import ACTIONS, Row, Table, folded_table, shape_text, spec_text
from lazymodel._text import format_bytes, plural, printable

if TYPE_CHECKING:
    from lazymodel._plan import MemoryPlan, Modules, PlanComparison, PlanRow

_SUGGESTIONS = 3
_GIB = 2**30
_COLOURS = {  # Okabe and Ito's palette, which people with any kind of colour vision tell apart
    "parameters": "#0072B2",
    "LoRA": "#56B4E9",
    "optimizer state": "#E69F00",
    "gradients": "#009E73",
    "activations": "#CC79A7",
}


def plan_text(plan: MemoryPlan) -> str:
    """A memory plan as a table and a summary for a terminal, as wide as it; no colours."""
    return _plan_table(plan).text()


def plan_html(plan: MemoryPlan) -> str:
    """A memory plan as an HTML fragment for a notebook: a bar of the fullest device, the table, and by module."""
    modules = plan.by_module(depth=2)
    more = f"<details><summary>by module</summary>{modules_html(modules)}</details>" if len(modules) > 1 else ""
    return f"{_bar(plan)}{_plan_table(plan).html()}{more}"


def _plan_table(plan: MemoryPlan) -> Table:
    def row(row: PlanRow) -> Row:
        note = ACTIONS.get(row.action, row.action)
        if row.action == "initialize":
            note = f"{note}: {row.source}"
        cells = (shape_text(row.shape), row.dtype.name, spec_text(row.spec))
        return Row(row.path, cells, row.shard_nbytes, note)

    nbytes = sum(row.nbytes for row in plan.rows)
    title = f"{plan.name}: plan for {plural(len(plan.rows), 'variable')}, {format_bytes(nbytes)}"
    headings = ("shape", "dtype", "partition spec", "bytes/device", "value")
    return folded_table(title, headings, map(row, plan.rows), _plan_lines(plan))


def _plan_lines(plan: MemoryPlan) -> list[str]:
    lines: list[str] = []
    if plan.mesh or plan.device_kind:
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
        lines.append(": ".join(filter(None, (plan.device_kind or "mesh", mesh))))
    device = "device" if plan.num_devices == 1 else f"each of {plan.num_devices:,} devices, on the fullest"
    lines.append(
        f"{device}: {format_bytes(plan.device_nbytes)} resident, "
        f"{format_bytes(plan.peak_nbytes)} at the peak while materializing"
    )
    if len(plan.parts) > 1 or plan.used_nbytes != plan.device_nbytes:
        parts = ", ".join(f"{format_bytes(nbytes)} {kind}" for kind, nbytes in plan.parts.items())
        lines.append(f"in use: {format_bytes(plan.used_nbytes)}: {parts}")
    if plan.device_memory is not None:
        spare = plan.device_memory - plan.needed_nbytes
        verdict = (
            f"fits, {format_bytes(spare)} to spare" if spare >= 0 else f"does not fit, {format_bytes(-spare)} short"
        )
        lines.append(f"device memory: {format_bytes(plan.device_memory)}; {verdict}")
        if spare < 0:
            largest = heapq.nlargest(_SUGGESTIONS, plan.rows, key=lambda row: row.shard_nbytes)
            listed = ", ".join(f"{row.path} ({format_bytes(row.shard_nbytes)})" for row in largest)
            lines += [f"largest on a device: {listed}", plan.mend(plan.device_memory)]
    totals: dict[str, list[int]] = {}
    for row in plan.rows:
        totals.setdefault(row.action, []).append(row.nbytes)
    for action, sizes in totals.items():
        line = f"{ACTIONS.get(action, action)}: {plural(len(sizes), 'variable')}, {format_bytes(sum(sizes))}"
        if action == "load":
            reader = "this process" if len(plan.hosts) <= 1 else "the process that reads most"
            line += f"; {reader} reads {format_bytes(plan.read_nbytes)}"
            line += f", its largest shard in host memory is {format_bytes(plan.host_nbytes)}"
        elif action == "initialize" and plan.programs:
            line += f"; {plural(plan.programs, 'compiled program')}"
        lines.append(line)
    if plan.hosts:
        fullest = max(plan.hosts, key=lambda host: host.peak_nbytes)
        each = "host" if len(plan.hosts) == 1 else f"each of {len(plan.hosts):,} hosts, at most"
        lines.append(f"{each}: {format_bytes(fullest.peak_nbytes)} of host memory while materializing")
    return [*lines, *plan.notes]


# --- by module -------------------------------------------------------------------------------------------------------


def modules_text(modules: Modules) -> str:
    """A plan by module, for a terminal."""
    return _modules_table(modules).text()


def modules_html(modules: Modules) -> str:
    """A plan by module, for a notebook."""
    return _modules_table(modules).html()


def _modules_table(modules: Modules) -> Table:
    def row(path: str, depth: int, variables: int, nbytes: int, shard: int, used: int) -> Row:
        # Indented by depth: rows that fold are of one depth.
        return Row("  " * (depth - 1) + path, (f"{variables:,}", format_bytes(nbytes), format_bytes(used)), shard, "")

    rows = (row(m.path, m.depth, m.variables, m.nbytes, m.shard_nbytes, m.used_nbytes) for m in modules)
    headings = ("variables each", "bytes each", "in use each", "bytes/device", "")
    return folded_table(f"{modules.name} by module", headings, rows, (), noun="module")


# --- several plans ---------------------------------------------------------------------------------------------------


def comparison_text(comparison: PlanComparison) -> str:
    """Several plans, a row each, for a terminal."""
    return _comparison_table(comparison).text()


def comparison_html(comparison: PlanComparison) -> str:
    """Several plans, a row each, for a notebook."""
    return _comparison_table(comparison).html()


def _comparison_table(comparison: PlanComparison) -> Table:
    def cells(name: str, plan: MemoryPlan) -> tuple[str, ...]:
        memory = "–" if plan.device_memory is None else format_bytes(plan.device_memory)
        verdict = "unknown" if plan.device_memory is None else "fits" if plan.fits else "does not fit"
        if plan.device_memory is not None:
            spare = plan.device_memory - plan.needed_nbytes
            verdict += f", {format_bytes(abs(spare))} {'to spare' if spare >= 0 else 'short'}"
        amounts = (plan.device_nbytes, plan.peak_nbytes, plan.used_nbytes)
        return (name, f"{plan.num_devices:,}", *map(format_bytes, amounts), memory, verdict)

    columns = ("plan", "devices", "resident/device", "peak materializing", "in use", "device memory", "verdict")
    names = sorted({plan.name for plan in comparison.plans.values()})
    title = f"{', '.join(names)}: {plural(len(comparison.plans), 'plan')}"
    return Table(title, columns, [cells(*item) for item in comparison.plans.items()], frozenset(columns[1:6]))


# --- a bar and figures -----------------------------------------------------------------------------------------------


def _bar(plan: MemoryPlan) -> str:
    """The fullest device as a bar of its parts, as HTML."""
    parts = plan.parts or {"parameters": plan.device_nbytes}
    full = max(plan.needed_nbytes, plan.device_memory or 0, 1)

    def piece(kind: str, nbytes: int) -> str:
        label = html.escape(f"{kind}: {format_bytes(nbytes)}", quote=True)
        colour = _COLOURS.get(kind, "#999")
        style = f"display:inline-block;height:1em;width:{100 * nbytes / full:.2f}%;background:{colour}"
        return f'<span title="{label}" style="{style}"></span>'

    pieces = "".join(piece(kind, nbytes) for kind, nbytes in parts.items())
    return f'<div style="border:1px solid #999;font-size:12px;line-height:1;white-space:nowrap">{pieces}</div>'


def plan_figure(plan: MemoryPlan, path: Any = None) -> Any:
    """See `MemoryPlan.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LazyModelError("plot needs matplotlib: pip install matplotlib") from None
    figure: Any = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    _draw_device(left, plan)
    _draw_timeline(right, plan)
    for axes in (left, right):
        if plan.device_memory is not None:
            axes.axhline(plan.device_memory / _GIB, color="#D55E00", linestyle="--", linewidth=1)
        axes.set_ylim(0, None)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    left.set_ylabel("GiB on the fullest device")
    figure.suptitle(printable(plan.name).replace("$", r"\$"), fontsize=10)
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:  # no such folder; a suffix of no format
            raise LazyModelError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return figure


def _draw_device(axes: Any, plan: MemoryPlan) -> None:
    bottom = 0.0
    for kind, nbytes in (plan.parts or {"parameters": plan.device_nbytes}).items():
        height = nbytes / _GIB
        axes.bar("in use", height, bottom=bottom, color=_COLOURS.get(kind), label=f"{kind}, {format_bytes(nbytes)}")
        bottom += height
    axes.bar("materializing", plan.device_nbytes / _GIB, color=_COLOURS["parameters"])
    over = (plan.peak_nbytes - plan.device_nbytes) / _GIB
    axes.bar("materializing", over, bottom=plan.device_nbytes / _GIB, color="#999999", label="peak while materializing")
    if plan.device_memory is not None:
        axes.annotate(
            f"device memory, {format_bytes(plan.device_memory)}",
            (0.5, plan.device_memory / _GIB),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, 3),
            ha="center",
            fontsize=7,
            color="#D55E00",
        )
    axes.legend(fontsize=7, frameon=False)


def _draw_timeline(axes: Any, plan: MemoryPlan) -> None:
    steps = range(1, len(plan.timeline) + 1)
    held = [step.held_nbytes / _GIB for step in plan.timeline]
    peaks = [step.peak_nbytes / _GIB for step in plan.timeline]
    axes.fill_between(steps, held, peaks, step="mid", color="#999999", linewidth=0, label="temporaries")
    axes.fill_between(steps, 0, held, step="mid", color=_COLOURS["parameters"], linewidth=0, label="held")
    axes.set_xlabel("step of materializing")
    if plan.timeline:
        axes.legend(fontsize=7, frameon=False, loc="upper left")


# --- plain values ----------------------------------------------------------------------------------------------------


def plan_dict(plan: MemoryPlan) -> dict[str, Any]:
    """See `MemoryPlan.to_dict`."""
    import dataclasses

    compiled: Any = plan.compiled
    return {
        "name": plan.name,
        "mesh": dict(plan.mesh),
        "device_kind": plan.device_kind,
        "num_devices": plan.num_devices,
        "device_memory": plan.device_memory,
        "fits": plan.fits,
        "needed_nbytes": plan.needed_nbytes,
        "device_nbytes": plan.device_nbytes,
        "peak_nbytes": plan.peak_nbytes,
        "used_nbytes": plan.used_nbytes,
        "parts": dict(plan.parts),
        "read_nbytes": plan.read_nbytes,
        "host_nbytes": plan.host_nbytes,
        "programs": plan.programs,
        "compiled": None if compiled is None else dataclasses.asdict(compiled),
        "notes": list(plan.notes),
        "hosts": [dataclasses.asdict(host) for host in plan.hosts],
        "modules": [dataclasses.asdict(module) for module in plan.by_module(depth=2)],
        "variables": [_row_dict(row) for row in plan.rows],
        "timeline": [dataclasses.asdict(step) for step in plan.timeline],
    }


def _row_dict(row: PlanRow) -> dict[str, Any]:
    return {
        "path": row.path,
        "shape": list(row.shape),
        "dtype": row.dtype.name,
        "spec": None if row.spec is None else [_entry(entry) for entry in row.spec],
        "nbytes": row.nbytes,
        "shard_nbytes": row.shard_nbytes,
        "used_nbytes": row.used_nbytes,
        "action": row.action,
        "source": row.source,
    }


def _entry(entry: Any) -> Any:
    if entry is None or isinstance(entry, str):
        return entry
    return list(entry) if isinstance(entry, Iterable) else str(entry)

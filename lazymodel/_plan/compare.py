"""Several plans side by side."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from lazymodel._errors import LazyModelError
from lazymodel._plan.plan import MemoryPlan
from lazymodel._plan.what_if import ACTIVATIONS
from lazymodel._show.page import Grid, Section, Text, save_page
from lazymodel._show.table import Table, Tabled
from lazymodel._show.text import format_bytes, plural


@dataclasses.dataclass(frozen=True, repr=False)
class PlanComparison(Tabled):
    """Several plans side by side, by name and in the order given; prints as a table."""

    plans: Mapping[str, MemoryPlan]

    @property
    def fitting(self) -> tuple[str, ...]:
        """Names of the plans that are known to fit."""
        return tuple(name for name, plan in self.plans.items() if plan.fits)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the comparison and every plan as one page; see `MemoryPlan.save`."""
        table = self.table()
        sections: list[Section] = [Text(table.lines), Grid("What would fit", table.columns, table.rows)]
        for name, plan in self.plans.items():
            first, *others = plan.sections()
            sections += [dataclasses.replace(first, title=name), *others]
        save_page(path, table.title, sections)

    def to_dict(self) -> dict[str, Any]:
        """Each plan's `to_dict`, by name."""
        return {name: plan.to_dict() for name, plan in self.plans.items()}

    def table(self) -> Table:
        """What is shown: a row a plan."""

        def cells(name: str, plan: MemoryPlan) -> tuple[str, ...]:
            memory = "–" if plan.device_memory is None else format_bytes(plan.device_memory)
            amounts = (plan.device_nbytes, plan.peak_nbytes, plan.used_nbytes)
            verdict = plan.verdict().replace(f" {verdicts}", "")  # said once
            return (name, f"{plan.num_devices:,}", *map(format_bytes, amounts), memory, verdict)

        bare = not any(ACTIVATIONS in plan.parts for plan in self.plans.values())
        verdicts = "without activations" if bare else "verdict"
        columns = ("plan", "devices", "resident/device", "peak materializing", "in use", "device memory", verdicts)
        names = sorted({plan.name for plan in self.plans.values()})
        title = f"{', '.join(names)}: {plural(len(self.plans), 'plan')}"
        lines = list(dict.fromkeys(plan.counted_text() for plan in self.plans.values()))
        return Table(title, columns, [cells(*item) for item in self.plans.items()], frozenset(columns[1:6]), lines)


def compare_plans(plans: Mapping[str, MemoryPlan]) -> PlanComparison:
    """Puts the plans of several meshes, dtypes or anything else into one table.

    Raises:
        LazyModelError: There is none, or one is no plan.

    Example:
        >>> meshes = {name: lm.arithmetic_mesh(name) for name in ("v5e-1", "v5e-8")}
        >>> lm.compare_plans({name: abstract.shard(mesh, "auto").plan() for name, mesh in meshes.items()})
        init: 2 plans
        plan          devices  resident/device  peak materializing      in use  device memory  without activations
        ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
        v5e-1               1       128.00 KiB          128.00 KiB  128.00 KiB      15.75 GiB  fits, 15.75 GiB to spare
        v5e-8               8        16.00 KiB           16.00 KiB   16.00 KiB      15.75 GiB  fits, 15.75 GiB to spare
        counted: parameters (float32); not counted: activations (plan(compile=…) counts and WhatIf(batch=…, sequence=…)
        estimates them)
    """
    given: Any = plans
    values: Any = given.values() if isinstance(given, Mapping) else [None]
    if not all(isinstance(plan, MemoryPlan) for plan in values):
        raise LazyModelError(
            f"plans are a mapping of name to MemoryPlan, such as {{'v5e-8': model.plan()}}; got {type(given).__name__}"
        )
    if not plans:
        raise LazyModelError("there is no plan to compare; pass a mapping of name to MemoryPlan")
    return PlanComparison(dict(plans))

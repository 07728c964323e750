"""Reports as pages: every row is there, names are never markup, and nothing is fetched or run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from tests.command import main
from tests.markup import Page

ATTACKS = (
    "</pre><script>window.attacked=1</script>",
    "<img src=x onerror='window.attacked=1'>",
    "[red]bold[/red]",
    "&lt;i&gt;",
)


def plan_of(count: int, **options: Any) -> lm.MemoryPlan:
    def init() -> dict[str, Any]:
        return {"embed": jnp.zeros((512, 64)), **{f"layers_{i}": {"up": jnp.zeros((64, 128))} for i in range(count)}}

    mesh = lm.arithmetic_mesh("v5e:2x4", {"data": 2, "model": 4})
    return lm.build_abstract(init).shard(mesh, lm.auto()).plan(**options)


def shown(path: Path) -> Page:
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r'\b(src|href)="', text)
    page = Page(text.removeprefix("<!DOCTYPE html>").replace('"utf-8">', '"utf-8"/>').replace(' dark">', ' dark"/>'))
    assert set(page.tags) <= {
        "html",
        "head",
        "meta",
        "title",
        "body",
        "svg",
        "rect",
        "text",
        "tspan",
        "p",
        "pre",
        "span",
    }
    return page


def row_of(page: Page, name: str) -> list[str]:
    (line,) = (line for line in page.text.splitlines() if line.startswith(f"{name} "))
    return re.split(r"  +", line.strip())


def test_it_shows_a_bar_and_every_variable_with_its_reason(tmp_path: Path) -> None:
    plan = plan_of(60, what_if=lm.WhatIf(optimizer="adamw"), device_memory="8MiB")
    plan.save(tmp_path / "plan.html")
    page = shown(tmp_path / "plan.html")
    widths = [
        float(width) for width in re.findall(r'<rect x="[\d.]+" width="([\d.]+)"', (tmp_path / "plan.html").read_text())
    ]
    assert plan.device_memory == 2**23
    expected = [800 * nbytes / max(plan.used_nbytes, 2**23) for nbytes in plan.parts.values()]
    assert widths == [*(pytest.approx(width, abs=0.06) for width in expected), 2]
    assert "device memory, 8.00 MiB" in page.text and f"device memory: 8.00 MiB; {plan.verdict()}" in page.text
    for row in plan.rows:
        assert row_of(page, row.path)[-1] == row.why != ""


def test_a_comparison_has_the_bars_and_variables_of_all_plans(tmp_path: Path) -> None:
    lm.plans(lm.build_abstract(lambda: {"embed": jnp.zeros((512, 64))}), "v5e-4", "v2-8").save(tmp_path / "plans.html")
    page = shown(tmp_path / "plans.html")
    assert page.tags.count("svg") == 2 and page.text.count("\nembed ") == 2
    assert "v2-8: <lambda>: plan for 1 variable" in page.text


def test_names_are_never_markup(tmp_path: Path) -> None:
    abstract = lm.build_abstract(lambda: {name: jnp.zeros(3) for name in ATTACKS})
    abstract.shard(jax.sharding.AbstractMesh((8,), ("model",)), lm.auto()).plan().save(tmp_path / "plan.html")
    page = shown(tmp_path / "plan.html")
    for name in ATTACKS:
        assert name in page.text


def test_a_report_has_its_timeline_and_where_values_came_from(tmp_path: Path) -> None:
    arrays = {"a": np.ones((8, 4), np.float32), "b": np.ones(3, np.float32), "left": np.ones(2, np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    reports: list[lm.LoadReport] = []
    abstract = lm.build_abstract(lambda: {"a": jnp.zeros((8, 4)), "new": jnp.zeros(2), "b": jnp.zeros(3)})
    checkpoint = lm.open_checkpoint(tmp_path / "model.safetensors")
    with checkpoint, pytest.warns(lm.LazyModelWarning, match="'left'"):
        abstract.materialize(checkpoint, initialize="missing", strict=False, report=reports.append)
    with reports[0].timeline.span("mine"):
        sum(range(1_000_000))
    reports[0].save(tmp_path / "load.html")
    page, file = shown(tmp_path / "load.html"), str(tmp_path / "model.safetensors")
    assert "█" in row_of(page, "mine")[-1]
    assert "in all rows: dtype: float32" in page.text
    assert row_of(page, "a")[3:] == ["loaded from model.safetensors", file, "128 B"]
    assert row_of(page, "new")[3].startswith("initialized: ")
    assert row_of(page, "left") == ["left", "float32", "8 B", file]


def test_a_checkpoint_is_inspected_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x.y": np.ones(5, np.float32), ATTACKS[0]: np.ones((2, 3), np.float16)}, tmp_path / "m.safetensors")
    path = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "m.safetensors"), "--html", str(path)]) == 0
    assert "no problems found" in capsys.readouterr().out
    page = shown(path)
    assert "no problems found" in page.text
    *row, offset = row_of(page, "x.y")
    assert row == ["x.y", "(5)", "float32", "20 B"] and "in all rows: file: m.safetensors" in page.text
    start = int(offset.replace(",", ""))
    assert (tmp_path / "m.safetensors").read_bytes()[start : start + 20] == np.ones(5, np.float32).tobytes()
    assert main(["inspect", str(tmp_path / "m.safetensors"), "--html", str(tmp_path / "absent" / "p.html")]) == 2


def test_it_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match=r"cannot write .*absent/plan.html: No such file"):
        plan_of(1).save(tmp_path / "absent" / "plan.html")
    (tmp_path / "plan.html").mkdir()
    with pytest.raises(lm.LazyModelError, match=r"cannot write .*plan.html: Is a directory"):
        plan_of(1).save(tmp_path / "plan.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]

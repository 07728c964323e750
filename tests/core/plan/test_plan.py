"""What people and programs read of plans: tables, comparisons, modules, HTML, figures, plain values."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import lazymodel as lm
from lazymodel._plan.compare import compare_plans
from lazymodel._plan.plan import HostPlan, MemoryPlan, PlanRow, PlanStep
from tests.markup import Page

BF16 = np.dtype("bfloat16")
HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>\n&amp;/kernel"
GIB = 2**30


def make_plan(rows: list[PlanRow], **changes: Any) -> MemoryPlan:
    made = MemoryPlan(
        name="GemmaBackbone",
        rows=tuple(rows),
        device_nbytes=3 * GIB,
        peak_nbytes=4 * GIB,
        read_nbytes=20 * GIB,
        host_nbytes=GIB,
        num_devices=8,
        device_memory=16 * GIB,
        programs=7,
        parts={"parameters": 3 * GIB},
        counted={"parameters": "bfloat16"},
    )
    return dataclasses.replace(made, **changes)


def make_row(path: str, action: str = "load", shape: tuple[int, ...] = (1024, 1024), source: str = "file") -> PlanRow:
    nbytes = int(np.prod(shape)) * 2
    spec = PartitionSpec(None, "model")
    return PlanRow(path, shape, BF16, spec, nbytes // 8, nbytes, action, source, used_nbytes=nbytes // 4)


def test_plan_text_summarizes_what_fits():
    rows = [make_row(f"block_{i}/kernel") for i in range(12)] + [make_row("head/kernel", "initialize", source="normal")]
    lines = repr(make_plan(rows)).splitlines()
    assert lines[0] == "GemmaBackbone: plan for 13 variables, 26.00 MiB"
    (blocks,) = [line for line in lines if line.startswith("block")]
    assert re.split(r"\s{2,}", blocks.strip()) == [
        "block_{0..11}/kernel", "12", "(1024, 1024)", "bfloat16", "P(None, 'model')", "3.00 MiB", "loaded",
    ]  # fmt: skip
    (head,) = [line for line in lines if line.startswith("head")]
    assert head.rstrip().endswith("initialized: normal")
    assert lines[-6] == "each of 8 devices, on the fullest: 3.00 GiB resident, 4.00 GiB at the peak while materializing"
    assert lines[-5].startswith("counted: parameters (bfloat16); not counted: activations")
    assert lines[-3:] == [
        "device memory: 16.00 GiB; fits without activations, 12.00 GiB to spare",
        "loaded: 12 variables, 24.00 MiB; this process reads 20.00 GiB, its largest shard in host memory is 1.00 GiB",
        "initialized: 1 variable, 2.00 MiB; 7 compiled programs",
    ]


def test_plan_text_says_what_use_takes_and_how_numbers_came_to_be():
    hosts = tuple(HostPlan(i, 4, 12 * GIB, 10 * GIB, 4 * GIB, (4 + i) * GIB) for i in range(2))
    plan = make_plan(
        [make_row("w")],
        parts={"parameters": 3 * GIB, "optimizer state": 6 * GIB, "gradients": 3 * GIB},
        hosts=hosts,
        mesh={"data": 2, "model": 4},
        device_kind="TPU v5 lite",
        notes=("estimated",),
    )
    lines = repr(plan).splitlines()
    assert "mesh: data=2, model=4 of TPU v5 lite" in lines
    assert "in use: 12.00 GiB: 3.00 GiB parameters, 6.00 GiB optimizer state, 3.00 GiB gradients" in lines
    assert "device memory: 16.00 GiB; fits without activations, 4.00 GiB to spare" in lines
    assert "each of 2 hosts, at most: 5.00 GiB of host memory while materializing" in lines
    assert lines[-1] == "estimated"
    assert (plan.used_nbytes, plan.needed_nbytes) == (12 * GIB, 12 * GIB)


def test_plan_text_names_what_does_not_fit():
    rows = [make_row("small", shape=(8, 8)), make_row("embeddings", shape=(4096, 1024))]
    text = repr(make_plan(rows, device_memory=GIB))
    assert "device memory: 1.00 GiB; does not fit, 3.00 GiB short" in text
    assert "largest on a device: embeddings 2.00 MiB, small 32 B" in text
    assert "it would fit 32 such devices" in text


def test_plan_text_without_a_limit_says_nothing_of_fitting():
    text = repr(make_plan([make_row("w", "constant")], device_memory=None, num_devices=1))
    assert "fit" not in text
    assert "device: 3.00 GiB resident" in text
    assert "constant: 1 variable" in text


def test_html_is_well_formed_and_escaped():
    plan = make_plan([make_row(HOSTILE, "initialize", source=HOSTILE), make_row("b/c/d")], name=HOSTILE)
    comparison = compare_plans({HOSTILE: plan})
    for page in (Page(shown._repr_html_()) for shown in (plan, plan.by_module(2), comparison)):
        assert "script" not in page.tags
        assert "\x1b" not in page.text
    assert "fits without activations, 12.00 GiB to spare" in Page(plan._repr_html_()).text


def test_modules_are_a_tree_that_sums_up():
    paths = ("emb/table", "block_0/att/q", "block_0/att/k", "block_0/mlp/up", "scale")
    plan = make_plan(list(map(make_row, paths)))
    modules = plan.by_module(2)
    found = [(m.path, m.depth, m.variables, m.shard_nbytes) for m in modules]
    shard = plan.rows[0].shard_nbytes
    assert found == [
        ("emb", 1, 1, shard),
        ("block_0", 1, 3, 3 * shard),
        ("block_0/att", 2, 2, 2 * shard),
        ("block_0/mlp", 2, 1, shard),
        ("scale", 1, 1, shard),
    ]
    assert sum(m.used_nbytes for m in modules if m.depth == 1) == sum(row.used_nbytes for row in plan.rows)
    assert [m.path for m in plan.by_module()] == ["emb", "block_0", "scale"]
    assert "block_0/att" in repr(modules) and "GemmaBackbone by module" in repr(modules)
    with pytest.raises(lm.LazyModelError, match="depth is a number of path parts, from 1; got 0"):
        plan.by_module(0)


def test_a_comparison_is_a_row_a_plan():
    plans = {
        "v5e:2x4": make_plan([make_row("w")]),
        "v5e:1x1": make_plan([make_row("w")], num_devices=1, device_nbytes=24 * GIB, peak_nbytes=25 * GIB),
        "cpu": make_plan([make_row("w")], device_memory=None),
    }
    comparison = compare_plans(plans)
    lines = repr(comparison).splitlines()
    assert lines[0] == "GemmaBackbone: 3 plans"
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[3:6]]
    assert re.split(r"\s{2,}", lines[1])[-1] == "without activations"
    assert rows[0] == ["v5e:2x4", "8", "3.00 GiB", "4.00 GiB", "3.00 GiB", "16.00 GiB", "fits, 12.00 GiB to spare"]
    assert lines[6].startswith("counted: parameters (bfloat16); not counted: activations")
    assert rows[1][-1] == "does not fit, 9.00 GiB short"
    assert rows[2][-2:] == ["–", "unknown"]
    assert comparison.fitting == ("v5e:2x4",)
    assert json.loads(json.dumps(comparison.to_dict()))["v5e:1x1"]["fits"] is False
    with pytest.raises(lm.LazyModelError, match="there is no plan to compare"):
        compare_plans({})


def test_figures(tmp_path):
    figure_file = tmp_path / "plan.svg"
    timeline = (PlanStep("a", "initialize", GIB, 2 * GIB), PlanStep("b", "load", 3 * GIB, 3 * GIB))
    parts = {"parameters": 3 * GIB, "gradients": GIB}
    plan = make_plan([make_row("w")], timeline=timeline, parts=parts, name="cost $5")
    device, steps = plan.plot(figure_file).axes
    assert figure_file.read_text().startswith("<?xml")
    assert [round(patch.get_height(), 6) for patch in device.patches] == [3, 1, 3, 1]
    assert device.lines[0].get_ydata()[0] == 16  # what the device has
    assert len(steps.collections) == 2


def test_a_dictionary_that_json_gives_back_equal():
    plan = make_plan([make_row("a/w"), dataclasses.replace(make_row("b/w"), spec=PartitionSpec(("x", "y"), None))])
    values = plan.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["variables"][1]["spec"] == [["x", "y"], None]
    assert values["needed_nbytes"] == 4 * GIB
    assert [module["path"] for module in values["modules"]] == ["a", "b"]

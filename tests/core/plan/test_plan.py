"""Plans: arithmetic on shardings, hosts, the timeline, devices that are not here; as tables, pages, values, figures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.markup import Page

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOSTILE = "a[red]\x1b[31m<script>alert('x')</script>\n&amp;/kernel"
EIGHT = AbstractMesh((8,), ("model",))


def init(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    return {
        "embed": {"table": jax.random.normal(keys[0], (512, 64))},
        "layer_0": {
            "query": {"kernel": jax.random.normal(keys[1], (64, 64)), "bias": jnp.zeros(64)},
            "up": {"kernel": jax.random.normal(keys[2], (64, 256))},
        },
        "steps": jnp.zeros((), jnp.int32),
    }


SHARDS = {"embed/table": 16 * KIB, "layer_0/query/kernel": 2 * KIB, "layer_0/query/bias": 256,
          "layer_0/up/kernel": 8 * KIB, "steps": 4}  # fmt: skip
TOTAL = sum(SHARDS.values())


def sharded(mesh: Any = EIGHT) -> lm.AbstractModel:
    rules = {".*table": P("model"), ".*kernel": P(None, "model"), ".*": P()}
    return lm.build_abstract(init, jax.random.key(0)).shard(mesh, rules)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_arithmetic_needs_no_devices() -> None:
    model = sharded()
    plan = model.plan(device_memory="1GiB")
    assert {row.path: row.shard_nbytes for row in plan.rows} == SHARDS
    assert plan.device_nbytes == plan.peak_nbytes == plan.used_nbytes == TOTAL
    assert (plan.num_devices, plan.programs, plan.hosts, plan.mesh) == (8, 0, (), {"model": 8})
    assert len(model.programs) == 0
    assert plan.fits
    assert "temporaries of init programs are estimated" in plan.notes[0]


def test_the_timeline_ends_with_everything_held(mesh8: Mesh) -> None:
    plan = sharded(mesh8).plan()
    assert [step.held_nbytes for step in plan.timeline] == sorted(step.held_nbytes for step in plan.timeline)
    assert plan.timeline[-1].held_nbytes == plan.device_nbytes == TOTAL
    assert max(step.peak_nbytes for step in plan.timeline) == plan.peak_nbytes > plan.device_nbytes
    assert plan.programs == 4  # three normal ones, and the bias
    (host,) = plan.hosts
    assert (host.num_devices, host.device_nbytes) == (8, 8 * plan.device_nbytes)
    assert host.peak_nbytes >= host.device_nbytes  # CPU devices are host memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_and_estimated_temporaries_agree(mesh8: Mesh, dtype: str) -> None:
    """Without devices they are estimated: of CPUs as XLA's compiler for them says of large arrays."""
    model = lm.build_abstract(lambda key: jax.random.normal(key, (4096, 4096), dtype), jax.random.key(0))
    found = []
    for mesh in (mesh8, mesh8.abstract_mesh):
        plan = model.shard(mesh, lambda variable: P("model")).plan()
        found.append(plan.peak_nbytes - plan.device_nbytes)
    assert found[0] == pytest.approx(found[1], rel=1e-3) and found[0] > 0


@pytest.mark.parametrize(("optimizer", "slots"), [("adamw", 2), ("SGD", 0), (3, 3), (["float32", "bfloat16"], 1.5)])
def test_training_adds_gradients_and_slots(optimizer: Any, slots: float) -> None:
    plan = sharded().plan(what_if=lm.WhatIf(optimizer=optimizer))
    trained = TOTAL - SHARDS["steps"]  # a counter is no parameter
    assert plan.parts["gradients"] == trained
    assert plan.parts.get("optimizer state", 0) == slots * trained
    assert plan.needed_nbytes == plan.used_nbytes == TOTAL + (1 + slots) * trained
    assert sum(row.used_nbytes for row in plan.rows) == plan.used_nbytes
    assert plan.rows[-1].used_nbytes == SHARDS["steps"]


@pytest.mark.parametrize(
    ("spec", "first", "last"),
    [(P(), 1, 1), (P("batch"), 4, 1), (P(None, "model"), 2, 1), (P("batch", None, "model"), 4, 2)],
)
def test_lora_trains_the_pairs_only(mesh42: Mesh, spec: P, first: int, last: int) -> None:
    """The first factor is split as the kernel's other dimensions are, the second as its columns."""
    kernel = lm.build_abstract(lambda: {"kernel": jnp.zeros((8, 4, 16))}).shard(mesh42.abstract_mesh, {".*": spec})
    plan = kernel.plan(what_if=lm.WhatIf(optimizer="adam", lora_rank=2, lora_targets=".*"))
    pair = 8 * 4 * 2 * 4 // first + 2 * 16 * 4 // last
    assert plan.parts == {
        "parameters": kernel["kernel"].shard_nbytes, "LoRA": pair, "optimizer state": 2 * pair, "gradients": pair
    }  # fmt: skip
    own = sharded().plan(what_if=lm.WhatIf(lora_rank=4)).parts["LoRA"]  # by default, of attention's projections
    assert own == 64 * 4 * 4 + 4 * 64 * 4 // 8


@pytest.mark.parametrize(("mode", "share"), [("int8", 4), ("int4", 8)])
def test_quantizing_leaves_less_than_was_materialized(mode: str, share: int) -> None:
    plan = sharded().plan(what_if=lm.WhatIf(quantize=mode))
    scales = 4 * (64 + 8 + 32)  # a float32 a column of what each device holds
    small = SHARDS["layer_0/query/bias"] + SHARDS["steps"]
    assert plan.device_nbytes == plan.peak_nbytes == TOTAL
    assert plan.used_nbytes == (TOTAL - small) // share + scales + small


def test_what_is_compiled_is_the_compilers(mesh8: Mesh) -> None:
    model = sharded(mesh8)

    def forward(tree: Any, x: Any) -> Any:
        return (x @ tree["layer_0"]["query"]["kernel"]) @ tree["layer_0"]["up"]["kernel"]

    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    plan = model.plan(compile=lm.Compile("forward", forward, x))
    assert plan.compiled is not None
    assert plan.used_nbytes == plan.compiled.peak_nbytes > plan.device_nbytes + x.size * 4
    assert plan.notes[-1] == "compiled forward pass: forward"

    def loss(tree: Any, x: Any) -> Any:
        return jnp.mean(forward(tree, x) ** 2), "auxiliary"

    trained = model.plan(what_if=lm.WhatIf(optimizer="adam"), compile=lm.Compile("train", loss, x))
    assert "gradients" not in trained.parts  # they are among the compiler's temporaries
    assert trained.parts["optimizer state"] == 2 * (TOTAL - SHARDS["steps"])
    assert trained.compiled.peak_nbytes > trained.parts["parameters"] + trained.parts["optimizer state"]
    pairs = model.plan(what_if=lm.WhatIf(optimizer="adam", lora_rank=2), compile=lm.Compile("train", loss, x))
    assert pairs.compiled.argument_nbytes < trained.compiled.argument_nbytes


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(lm.DoesNotFitError, match=r"needs 26\.25 KiB on a device .*Largest on a device: embed/table "
                                                 r"16\.00 KiB.* it would fit 16 such devices") as raised:  # fmt: skip
        sharded().plan(device_memory="16KiB").check()
    assert "bfloat16" in str(raised.value)
    replicated = lm.build_abstract(init, jax.random.key(0)).shard(EIGHT, {".*": P()})
    with pytest.raises(lm.DoesNotFitError, match="replicated on every device, and more devices do not change that"):
        replicated.plan().check("64KiB")


def numpy_leaves() -> lm.AbstractModel:
    def make(key: jax.Array) -> dict[str, Any]:
        return {"w": jax.random.normal(key, (64, 64)), "table": np.zeros((64, 64), "float32"), "wide": np.zeros(8)}

    return lm.build_abstract(make, jax.random.key(0))


@pytest.mark.parametrize("live", [True, False])
def test_numpy_leaves_are_no_device_s_unless_they_are_split(mesh8: Mesh, live: bool) -> None:
    mesh = mesh8 if live else EIGHT
    rules = {"w": P("model"), "table": P(), "wide": P("model")}  # float64 stays on the host whatever the rules say
    model = numpy_leaves().shard(mesh, rules)
    plan = model.plan()
    shard = 64 * 64 * 4 // 8
    assert plan.device_nbytes == plan.used_nbytes == plan.parts["parameters"] == shard
    assert {row.path: (row.shard_nbytes, row.used_nbytes) for row in plan.rows if row.path != "w"} == {
        "table": (0, 0), "wide": (0, 0)
    }  # fmt: skip
    assert plan.timeline[-1].held_nbytes == shard and len(plan.timeline) == 1
    assert {cells[0]: cells[-3] for cells in plan.table().rows} == {
        "w": "P('model')", "table": "on the host", "wide": "on the host"
    }  # fmt: skip
    report = model.explain()
    assert (report.fullest_nbytes, report.imbalance, report.replicated) == (shard, 1.0, {})
    assert report.on_host.keys() == {"table", "wide"} and "64, 64" in report.on_host["table"]
    assert "on the host: a NumPy array" in str(model.explain("table"))
    assert "2.00 KiB per device on 8 devices" in repr(model)
    rows = {cells[0]: (cells[-3], cells[-2]) for cells in model.table().rows}
    assert rows["table"] == rows["wide"] == ("on the host", "0 B") and rows["w"] == ("P('model')", "2.00 KiB")
    assert {cells[0]: cells[-2] for cells in numpy_leaves().table().rows}["table"] == "16.00 KiB"
    split = numpy_leaves().shard(mesh, rules | {"table": P(None, "model")}).plan()
    assert split.device_nbytes == split.parts["parameters"] == 2 * shard
    for host, other in zip(plan.hosts, split.hosts, strict=True):
        assert host.peak_nbytes >= host.device_nbytes + 64 * 64 * 4 + 8 * 8  # CPU devices are host memory
        assert other.device_nbytes == host.device_nbytes + 8 * shard


def test_unsharded_numpy_leaves_are_on_no_device() -> None:
    plan = numpy_leaves().plan()
    assert plan.device_nbytes == plan.parts["parameters"] == 64 * 64 * 4
    quantized = numpy_leaves().plan(what_if=lm.WhatIf(quantize="int8"))
    assert quantized.parts["parameters"] == 64 * 64 + 64 * 4  # and a scale a column


# What people and programs read ----------------------------------------------------------------------------------------


def decoder(mesh: Any = EIGHT) -> lm.AbstractModel:
    """12 blocks, which are in `blocks`, and a head; 256 KiB of each on a device."""

    def decoder(key: jax.Array) -> dict[str, Any]:
        blocks = {f"block_{i}": {"kernel": jnp.zeros((1024, 1024), "bfloat16")} for i in range(12)}
        return {**blocks, "head": {"kernel": jax.random.normal(key, (1024, 1024), "bfloat16")}}

    return lm.build_abstract(decoder, jax.random.key(0)).shard(mesh, {".*": P(None, "model")})


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plan") / "blocks.safetensors"
    save_file({f"block_{i}/kernel": np.zeros((1024, 1024), "bfloat16") for i in range(12)}, path)
    with lm.open_checkpoint(path) as checkpoint:
        yield checkpoint


def test_text_summarizes_what_fits(blocks: Any) -> None:
    lines = repr(decoder().plan(blocks, device_memory="16GiB")).splitlines()
    assert lines[0] == "decoder: plan for 13 variables, 26.00 MiB"
    assert "mesh: model=8" in lines
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines if re.match("block|head", line)]
    assert rows == [
        ["block_{0..11}/kernel", "12", "3.00 MiB", "loaded"],
        ["head/kernel", "1", "256.00 KiB", "initialized: normal"],
    ]
    assert lines[1] == "in all rows: shape: (1024, 1024); dtype: bfloat16; partition spec: P(None, 'model')"
    text = "\n".join(lines)
    for expected in (
        "most loaded of 8 devices: 3.25 MiB resident, 3.25 MiB at the peak while materializing",
        "\ncounted: parameters (bfloat16); not counted: activations",
        "\ndevice memory: 16.00 GiB; fits without activations, 16.00 GiB to spare\n",
        "\nloaded: 12 variables, 24.00 MiB; ",
        "its largest shard in host memory is 256.00 KiB\n",
        "\ninitialized: 1 variable, 2.00 MiB",
    ):
        assert expected in text, expected


def test_text_says_what_use_takes_and_of_hosts_the_most(mesh8: Mesh) -> None:
    plan = decoder(mesh8).plan(what_if=lm.WhatIf(optimizer="adam"))
    (host,) = plan.hosts
    plan = dataclasses.replace(plan, hosts=(host, dataclasses.replace(host, peak_nbytes=5 * GIB)), notes=("a note",))
    lines = repr(plan).splitlines()
    assert "mesh: model=8 of cpu" in lines
    parts = "3.25 MiB parameters, 6.50 MiB optimizer state, 3.25 MiB gradients"
    assert f"in use, with gradients and optimizer state: 13.00 MiB: {parts}" in lines
    assert "each of 2 hosts, at most: 5.00 GiB of host memory while materializing" in lines
    assert lines[-1] == "a note"
    one = "the mesh model=8 does not split the batch; an axis named fsdp or data would (lazymodel.plans tries it)"
    assert one in decoder(mesh8).plan(what_if=lm.WhatIf(optimizer="adam")).notes
    assert plan.used_nbytes == plan.needed_nbytes == 13 * MIB


def test_text_names_what_does_not_fit_or_says_nothing_of_it() -> None:
    text = repr(sharded().plan(device_memory="16KiB"))
    assert "device memory: 16.00 KiB; does not fit, 10.25 KiB short" in text
    assert "largest on a device: embed/table 16.00 KiB, layer_0/up/kernel 8.00 KiB" in text
    assert "it would fit 16 such devices" in text
    text = repr(decoder().plan({f"block_{i}/kernel": np.zeros((1024, 1024), "bfloat16") for i in range(12)}))
    assert "fit" not in text
    assert "constant: 12 variables" in text
    assert "\ndevice: 26.00 MiB resident" in repr(lm.build_abstract(lambda: {"w": jnp.zeros(26 << 18)}).plan())


def test_html_is_well_formed_and_escaped() -> None:
    plan = lm.build_abstract(lambda: {HOSTILE: jnp.zeros(8), "b/c/d": jnp.zeros(2)}).plan(device_memory="1KiB")
    plan = dataclasses.replace(plan, name=HOSTILE)
    for page in (Page(shown._repr_html_()) for shown in (plan, plan.by_module(2))):
        assert "script" not in page.tags
        assert "\x1b" not in page.text
    assert "fits without activations, 984 B to spare" in Page(plan._repr_html_()).text


def test_modules_are_a_tree_that_sums_up() -> None:
    paths = ("block_0/att/k", "block_0/att/q", "block_0/mlp/up", "emb/table", "scale")
    plan = lm.build_abstract(lambda: {path: jnp.zeros(4) for path in paths}).plan()
    modules = plan.by_module(2)
    assert [(m.path, m.depth, m.variables, m.shard_nbytes) for m in modules] == [
        ("block_0", 1, 3, 48), ("block_0/att", 2, 2, 32), ("block_0/mlp", 2, 1, 16), ("emb", 1, 1, 16),
        ("scale", 1, 1, 16),
    ]  # fmt: skip
    assert sum(m.used_nbytes for m in modules if m.depth == 1) == sum(row.used_nbytes for row in plan.rows)
    assert [m.path for m in plan.by_module()] == ["block_0", "emb", "scale"]
    assert "block_0/att" in repr(modules) and "<lambda> by module" in repr(modules)
    with pytest.raises(lm.LazyModelError, match="depth is a number of path parts, from 1; got 0"):
        plan.by_module(0)


def test_figures(tmp_path: Path, mesh8: Mesh) -> None:
    plan = sharded(mesh8).plan(device_memory="64KiB", what_if=lm.WhatIf(optimizer="sgd"))
    device, steps = dataclasses.replace(plan, name="cost $5").plot(tmp_path / "plan.svg").axes
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    heights = [patch.get_height() * GIB for patch in device.patches]
    assert heights == pytest.approx([*plan.parts.values(), plan.device_nbytes, plan.peak_nbytes - plan.device_nbytes])
    assert device.lines[0].get_ydata()[0] * GIB == 64 * KIB  # what the device has
    assert len(steps.collections) == 2


def test_a_dictionary_that_json_gives_back_equal() -> None:
    mesh = AbstractMesh((2, 2), ("x", "y"))
    rules = {"a/w": P(), "b/w": P(("x", "y"), None)}
    model = lm.build_abstract(lambda: {"a/w": jnp.zeros((4, 4)), "b/w": jnp.zeros((4, 4))}).shard(mesh, rules)
    plan = model.plan(device_memory="16GiB")
    values = plan.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["variables"][1]["spec"] == [["x", "y"], None]
    assert values["needed_nbytes"] == 64 + 16
    assert [module["path"] for module in values["modules"]] == ["a", "b"]

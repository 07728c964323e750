"""Devices, here or not: memory, names of slices and cards, meshes to plan and compile for, what compilers refuse."""

from __future__ import annotations

import glob
import importlib.util
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.conftest import needs_libtpu

GIB = 2**30


# Memory ---------------------------------------------------------------------------------------------------------------

# A device and the GiB that it is sold with, and other names of the same.
SOLD: list[tuple[str, float, list[str]]] = [
    ("TPU v2", 8, ["v2", "v2-8"]),
    ("TPU v3", 16, ["v3"]),
    ("TPU v4", 32, ["v4"]),
    ("TPU v5 lite", 16, ["v5e", "V5E", "tpu v5e", "v5litepod", "v5e:2x4", "v5e-8", "v5litepod-16"]),
    ("TPU v5", 96, ["v5p", "v5p:4x4x4", "v5p-128"]),
    ("TPU v6 lite", 32, ["v6e", "trillium", "v6e-256"]),
    ("TPU7x", 96, ["v7x", "tpu7x", "tpu7x-8", "ironwood"]),
    ("NVIDIA B300 SXM6 AC", 288, ["B300"]),
    ("NVIDIA GB200", 189, ["GB200"]),
    ("NVIDIA B200", 183, ["B200"]),
    ("NVIDIA H200", 141, ["H200"]),
    ("NVIDIA GH200 480GB", 96, ["GH200"]),
    ("NVIDIA H20", 96, ["H20"]),
    ("NVIDIA H100 NVL", 94, ["H100-NVL"]),
    ("NVIDIA H100 80GB HBM3", 80, ["H100", "h100", "H100-80GB", "nvidia_h100"]),
    ("NVIDIA A100-SXM4-80GB", 80, ["A100-80GB", "a100 80gb"]),
    ("NVIDIA A100-SXM4-40GB", 40, ["A100-40GB", "A100"]),
    ("NVIDIA L40S", 48, ["L40S", "L40"]),
    ("NVIDIA A40", 48, ["A40"]),
    ("NVIDIA A10G", 24, ["A10"]),
    ("NVIDIA L4", 24, ["L4"]),
    ("Tesla T4", 16, ["T4"]),
    ("Tesla V100-SXM2-32GB", 32, ["V100-32GB"]),
    ("Tesla V100-SXM2-16GB", 16, ["V100"]),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, ["RTX PRO 6000"]),
    ("NVIDIA RTX 6000 Ada Generation", 48, ["RTX 6000 Ada"]),
    ("NVIDIA RTX A6000", 48, ["RTX A6000"]),
    ("NVIDIA GeForce RTX 5090", 32, ["RTX 5090"]),
    ("NVIDIA GeForce RTX 4090", 24, ["rtx4090", "RTX 4090"]),
    ("NVIDIA GeForce RTX 3090", 24, ["RTX 3090"]),
    ("AMD Instinct MI210", 64, ["MI210"]),
    ("AMD Instinct MI250X", 64, ["MI250X"]),
    ("AMD Instinct MI300X", 192, ["MI300X"]),
    ("AMD Instinct MI325X", 256, ["MI325X"]),
    ("AMD Instinct MI355X", 288, ["MI355X"]),
]


@pytest.mark.parametrize(("kind", "sold", "names"), SOLD, ids=[kind for kind, _, _ in SOLD])
def test_a_device_has_nearly_what_it_is_sold_with_under_each_name(kind: str, sold: float, names: list[str]) -> None:
    known = lm.device_memory(kind)
    assert known is not None and 0.89 * sold * GIB < known <= 1.0001 * sold * GIB
    assert {name: lm.device_memory(name) for name in names} == dict.fromkeys(names, known)


@pytest.mark.parametrize("name", ["", "cpu", "v9", "TPU v9", "v5x", "A1000", "GL40", "x" * 100_000])
def test_what_is_not_in_the_table_is_unknown(name: str) -> None:
    assert lm.device_memory(name) is None


class _Device:
    """A live device, and what it says of its memory."""

    def __init__(self, stats: object, device_kind: str = "TPU v5 lite", num_cores: int = 1) -> None:
        self.stats, self.device_kind, self.num_cores = stats, device_kind, num_cores

    def memory_stats(self) -> object:
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def test_a_live_device_knows_better_than_the_table() -> None:
    assert lm.device_memory(_Device({"bytes_limit": 123})) == 123
    for stats in ({"bytes_in_use": 5}, None, RuntimeError("only for addressable devices")):
        assert lm.device_memory(_Device(stats)) == lm.device_memory("v5e")
    v4 = lm.device_memory("v4")
    assert v4 is not None and lm.device_memory(_Device(None, "TPU v4", num_cores=2)) == v4
    assert lm.device_memory(_Device(None, "TPU v4")) == pytest.approx(v4 / 2, rel=0.01), "a core alone"
    assert lm.device_memory(jax.devices()[0]) is None, "CPUs do not say"
    with pytest.raises(lm.LazyModelError, match="such as 'v5e' or 'H100', got 8"):
        lm.device_memory(8)


# Names of slices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *(("v2:2x2", 8), ("v2-8", 8), ("v3-32", 32), ("v3-2048", 2048), ("v4-8", 4), ("v4:2x2x1", 4)),
        *(("v5e-8", 8), ("v5e:2x4", 8), ("v5e:4x2", 8), ("v5e:2x4x1", 8), ("v5litepod-16", 16), ("TPU v5 lite:2x4", 8)),
        *(("v5p:2x2", 4), ("v5p-8", 4), ("v5p-512", 256), ("v5p:8x8x4", 256), ("v6e-1", 1), ("V6E-256", 256)),
        *(("v7x:1x1x1", 2), ("v7x:4x4x8", 256), ("tpu7x-8", 8), ("H100:8", 8), ("A100-80GB:16", 16)),
    ],
)
def test_devices_of_a_name(name: str, devices: int) -> None:
    mesh = lm.arithmetic_mesh(name)
    assert dict(mesh.shape) == {"model": devices}
    assert mesh.axis_types == (AxisType.Auto,)
    assert lm.device_memory(mesh.abstract_device.device_kind) == lm.device_memory(name.split(":")[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:3x3", r"'v5e:3x3'; nearest: v5e:2x4 \(v5e-8\) and v5e:4x4 \(v5e-16\)"),
        ("v5e-7", r"nearest: v5e:2x2 \(v5e-4\) and v5e:2x4 \(v5e-8\)\. v5e-N counts chips"),
        ("v2-4", r"nearest: v2:2x2 \(v2-8\)\. v2-N counts cores, two per chip"),
        ("v2-9", r"nearest: v2:2x2 \(v2-8\) and v2:4x4 \(v2-32\)"),
        ("v5p:4x4x5", r"nearest: v5p:4x4x4 \(v5p-128\) and v5p:4x4x8 \(v5p-256\)"),
        ("v5e:999x999", r"nearest: v5e:16x16 \(v5e-256\)\."),
        ("v5e:0x4", r"nearest: v5e:1x1"),
        ("v9:2x2", "'v9' .* v2, v3, v4, v5e, v5p, v6e, v7x"),
        ("v5f:2x4", "'v5f' .*closest: .*'v5e'"),
        ("v5p", "such as 'v5p:2x2x4' or 'v5p-32'"),
        ("", "'' is not a TPU slice; write"),
        ("v5e:2x4x" + "9" * 10_000, "is not a TPU slice; write"),
        ("H100:0", "has no devices"),
        ("H100", "'H100' is a GPU without a number; write how many after a colon, such as 'H100:8'"),
        ("H100-4", "'H100-4' is a GPU without a number; write how many after a colon, such as 'H100:8'"),
        ("H101:8", "'H101:8' .*closest: 'H100'"),
        ("v5f", "'v5f' .*closest: .*'v5e'"),
        (8, "such as 'v5e:2x4' or 'v5e-8', got 8"),
        (None, "got None"),
    ],
)
def test_a_name_that_is_none_gets_the_nearest_that_works(name: Any, message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message) as caught:
        lm.arithmetic_mesh(name)
    assert len(str(caught.value)) < 300
    if not isinstance(name, str):
        with pytest.raises(lm.LazyModelError, match=message):
            lm.topology(name)


def test_axes_take_what_the_slice_has() -> None:
    assert dict(lm.arithmetic_mesh("v5e-8", {"batch": 2, "model": -1}).shape) == {"batch": 2, "model": 4}
    assert dict(lm.arithmetic_mesh("v5e-8", {"batch": 1, "model": 8}).shape) == {"batch": 1, "model": 8}
    mesh = lm.arithmetic_mesh("v5p:4x8x8", {"data": 4, "model": -1})
    assert NamedSharding(mesh, P("data", "model")).shard_shape((8, 128)) == (2, 2)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"a": 3, "b": 4}, r"8 devices of v5e:2x4; \{'a': 1, 'b': 8\} would"),
        ({"a": 4, "b": 4}, r"\{'a': 4, 'b': 2\} would"),
        ({"a": -1, "b": 6}, r"\{'a': 4, 'b': 2\} would"),
        ({"a": 0, "b": 8}, "positive sizes"),
        ({"a": True, "b": 8}, "positive sizes"),
        ({"a": -1, "b": -1}, "one of which may be -1"),
        ({}, "positive sizes"),
        ("model=8", r"such as \{'model': 8\}, got 'model=8'"),
        (("data", "model"), "expected axes as a mapping of axis name to size"),
        ({0: 8}, "expected axes as a mapping of axis name to size"),
        (8, "expected axes as a mapping of axis name to size"),
    ],
)
def test_axes_of_another_product(axes: Any, message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        lm.arithmetic_mesh("v5e:2x4", axes)


@pytest.mark.parametrize(("generation", "largest"), [("v5e", 256), ("v5p", 6144)])
def test_slices_of_a_generation_ascend_to_the_pod(generation: str, largest: int) -> None:
    """All of them are tried for a model that fits the largest only."""
    model = lm.build_abstract(lambda: {"w": jnp.zeros((largest, 1 << 20), jnp.int8)})
    found = lm.smallest_topology(
        model, generation, {"w": P("model")}, max_devices=largest, device_memory="1MiB", compile=None
    )
    names, sizes = [row.name for row in found.rows], [row.num_devices for row in found.rows]
    assert sizes == sorted(set(sizes)) == [lm.arithmetic_mesh(name).size for name in names]
    if generation == "v5e":
        assert names == [f"v5e:{s}" for s in ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")]
    else:
        assert names[:6] == [f"v5p:{s}" for s in ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")]
        assert names[-1] == "v5p:16x16x24"
        assert "v5p:8x8x16" in names and "v5p:4x16x16" not in names  # the most cubic for its number of chips


# Models on devices that are not here ----------------------------------------------------------------------------------


def on(mesh: Any) -> lm.AbstractModel:
    def init(key: Any) -> dict[str, Any]:
        return {"kernel": jax.random.normal(key, (64, 256)), "bias": jnp.zeros(256)}

    return lm.build_abstract(init, jax.random.key(0)).shard(mesh, {"kernel": P(None, "model"), "bias": P()})


@pytest.fixture(params=["v5e:2x4", "H100:8"])
def arithmetic(request: pytest.FixtureRequest) -> lm.AbstractModel:
    return on(lm.arithmetic_mesh(request.param))


def test_what_looks_at_shapes_works_without_devices(arithmetic: lm.AbstractModel) -> None:
    text = str(arithmetic.explain("kernel"))
    assert "each of 8 devices holds (64, 32), 8.00 KiB" in text
    assert "axis 'model' (8) divides dimensions 0, 1" in text
    report = arithmetic.explain()
    assert (report.num_devices, report.fullest_nbytes, report.emptiest_nbytes) == (8, 9216, 9216)
    assert dict(report.replicated) == {"bias": "(256,), 1.00 KiB: rule 'bias' matches"}
    assert report.imbalance == pytest.approx(9216 * 8 / (64 * 256 * 4 + 1024))
    assert arithmetic.plan().device_nbytes == 9216
    assert "9.00 KiB per device on 8 devices" in repr(arithmetic)
    assert "9.00 KiB per device on 8 devices" in arithmetic._repr_html_()
    assert arithmetic.tree["kernel"].sharding.shard_shape((64, 256)) == (64, 32)
    assert arithmetic.rekey(1).reinitialize("bias", jax.nn.initializers.ones)["bias"].spec == P()
    found = lm.smallest_topology(arithmetic, "v5e", {"kernel": P(None, "model"), "bias": P()}, compile=None)
    assert found.smallest.num_devices == 1


GIVEN = {"kernel": np.ones((64, 256), "f"), "bias": np.ones(256, "f")}


def test_what_needs_devices_says_so(arithmetic: lm.AbstractModel) -> None:
    for given in ([], [GIVEN]):
        with pytest.raises(lm.LazyModelError, match="'bias' is sharded over a mesh without devices"):
            arithmetic.materialize(*given)
    for compile in ("init", "forward", "train"):
        function = None if compile == "init" else lambda tree: tree["bias"].sum()
        with pytest.raises(lm.LazyModelError, match=f"compiling '{compile}' needs devices .* lazymodel.topology"):
            arithmetic.plan(compile=lm.Compile(compile, function))
    with pytest.raises(lm.LazyModelError, match=r"'H100:8' are GPUs, .*lazymodel\.arithmetic_mesh\('H100:8'\)"):
        lm.topology("H100:8")


@needs_libtpu
def test_devices_that_are_only_compiled_for_hold_nothing() -> None:
    model = on(lm.topology("v5e:2x4"))
    assert model.explain().num_devices == 8
    for given in ([], [GIVEN]):
        with pytest.raises(lm.LazyModelError, match="'bias' is sharded over devices that are not here"):
            model.materialize(*given)


# Compilers ------------------------------------------------------------------------------------------------------------


def planned(mesh: Any, shape: tuple[int, ...], function: Any, *inputs: Any, what: Any = "forward") -> lm.MemoryPlan:
    """A plan of a function of an array whose last dimension is split over the mesh, by the compiler."""
    model = lm.build_abstract(lambda: {"w": jnp.zeros(shape)}).shard(
        mesh, {"w": P(*[None] * (len(shape) - 1), "model")}
    )
    return model.plan(compile=lm.Compile(what, function, *inputs))


def test_memory_is_that_of_one_device(mesh8: jax.sharding.Mesh) -> None:
    memory = planned(mesh8, (32, 64), lambda tree: tree["w"] * 2).compiled
    assert memory is not None
    assert (memory.argument_nbytes, memory.output_nbytes, memory.alias_nbytes) == (1024, 1024, 0)
    assert memory.peak_nbytes >= 2048
    assert memory.seconds > 0
    trained = planned(mesh8, (32, 64), lambda tree: (tree["w"] ** 2).sum(), what="train").compiled
    assert trained is not None and trained.alias_nbytes == 1024, "what is trained takes its own place"
    held = trained.argument_nbytes + trained.output_nbytes - 1024
    assert trained.peak_nbytes == held + trained.temporary_nbytes + trained.code_nbytes


def check_refused(plan: lm.MemoryPlan, needed: float, *said: str) -> None:
    assert (plan.needed_nbytes, plan.device_memory, plan.fits) == (int(needed * GIB), int(15.75 * GIB), False)
    note = "\n".join(plan.notes)
    assert all(text in note for text in ("can use 15.75 GiB", *said)), note


@needs_libtpu
def test_programs_for_devices_that_are_not_here() -> None:
    mesh = lm.topology("v5e:2x4")
    x = jax.ShapeDtypeStruct((128, 1024), jnp.float32, sharding=NamedSharding(mesh, P()))
    memory = planned(mesh, (1024, 8192), lambda tree, x: x @ tree["w"], x).compiled
    assert memory is not None
    assert memory.argument_nbytes == (128 * 1024 + 1024 * 8192 // 8) * 4
    assert memory.output_nbytes in (128 * 8192 * 4, 128 * 8192 // 8 * 4)
    too_large = planned(mesh, (16 * 1024, 1024, 8 * 256), lambda tree: tree["w"] + 1)
    check_refused(too_large, 32, "needs 32.00 GiB", "16.25 GiB less")


ALLOCATOR = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.\n\n"
    "  Largest program allocations in hbm:\n\n"
    '  1. Size: 8.00G\n     Operator: op_name="jit(f)/dot_general"\n     Shape: f32[2048,1048576]{1,0:T(8,128)}\n'
    "     Unpadded size: 8.00G\n     ==========================\n\n"
    "  2. Size: 512.00M\n     Shape: bf16[256,1048576]{1,0}\n     ==========================\n"
)


def test_a_refusal_of_the_compiler_names_the_largest(mesh8: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = ["RESOURCE_EXHAUSTED: no room\nmore", ALLOCATOR]

    def refuse(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(refusals[-1])

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    plan = planned(mesh8, (32, 64), lambda tree: tree["w"] * 2)
    largest = "8.00 GiB f32[2048,1048576] jit(f)/dot_general; 512.00 MiB bf16[256,1048576]."
    check_refused(plan, 17.5, "1.75 GiB less", largest)
    refusals.pop()
    with pytest.raises(
        lm.DoesNotFitError, match="not fit, according to the compiler: RESOURCE_EXHAUSTED: no room$"
    ) as caught:
        planned(mesh8, (32, 64), lambda tree: tree["w"] * 2)
    assert caught.value.needed_nbytes is None


# libtpu ---------------------------------------------------------------------------------------------------------------


def test_without_libtpu_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(lm.LazyModelError, match=r'^devices of v6e:8x16 .* pip install "lazymodel\[tpu\]"$'):
        lm.topology("v6e:8x16")


@pytest.mark.parametrize("here", [[], ["/dev/accel0"]])
def test_libtpu_gets_what_is_not_set_already(monkeypatch: pytest.MonkeyPatch, here: list[str]) -> None:
    """Where a TPU is here, nothing: it will be opened later."""
    seen: list[dict[str, str]] = []

    def describe(*_: Any, **__: Any) -> Any:
        seen.append(dict(os.environ))
        raise jax.errors.JaxRuntimeError("the lockfile is held\nmore")

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(glob, "glob", lambda pattern: here)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere")
    monkeypatch.setenv("TPU_STDERR_LOG_LEVEL", "0")
    monkeypatch.delenv("TPU_LOG_DIR", raising=False)
    before = dict(os.environ)
    with pytest.raises(lm.LazyModelError, match=r"v6e:8x8: another process holds libtpu[^\n]*$"):
        lm.topology("v6e:8x8")
    assert dict(os.environ) == before
    assert seen[0]["TPU_STDERR_LOG_LEVEL"] == "0"
    assert seen[0].get("TPU_LOG_DIR") == (None if here else "disabled")
    assert (seen[0] == before) is bool(here)


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "kind", "devices", "hosts"),
    [
        ("v2-8", "TPU v2", 8, 1),
        ("v3-32", "TPU v3", 32, 4),
        ("v4-8", "TPU v4", 4, 1),
        ("v5e-1", "TPU v5 lite", 1, 1),
        ("v5e-8", "TPU v5 lite", 8, 1),
        ("v5e-16", "TPU v5 lite", 16, 4),
        ("v5p:4x8x8", "TPU v5", 256, 64),
        ("v6e-8", "TPU v6 lite", 8, 1),
        ("v7x:4x4x8", "TPU7x", 256, 32),
    ],
)
def test_devices_are_those_that_a_slice_has(name: str, kind: str, devices: int, hosts: int) -> None:
    mesh = lm.topology(name)
    assert isinstance(mesh, jax.sharding.Mesh)
    assert mesh.axis_types == (AxisType.Auto,)
    assert mesh.size == devices == lm.arithmetic_mesh(name).size
    found = list(mesh.devices.flat)
    assert {device.device_kind for device in found} == {kind} == {lm.arithmetic_mesh(name).abstract_device.device_kind}
    assert len({device.process_index for device in found}) == hosts
    assert lm.device_memory(found[0]) == lm.device_memory(kind)


@needs_libtpu
def test_a_slice_has_the_same_devices_each_time_and_takes_other_axes() -> None:
    before = dict(os.environ)
    first = lm.topology("v6e:2x2", {"a": 2, "b": 2})
    assert dict(os.environ) == before
    assert set(first.devices.flat) == set(lm.topology("v6e-4").devices.flat)
    assert first == lm.topology("v6e:2x2", {"a": 2, "b": -1})
    # No factors of the torus.
    assert dict(lm.topology("v5p:4x4x12", {"a": 3, "b": 64}).shape) == {"a": 3, "b": 64}


_OTHER = """
import jax, lazymodel as lm
from jax.sharding import SingleDeviceSharding
device = lm.topology("v5e:2x2").devices.flat[0]
struct = jax.ShapeDtypeStruct((8,), "float32", sharding=SingleDeviceSharding(device))
jax.jit(lambda x: x + 1).lower(struct).compile()
print("compiled")
"""


@needs_libtpu
def test_two_processes_at_a_time_and_nothing_on_stderr() -> None:
    assert lm.topology("v5e:2x2").size == 4, "this process has libtpu, too"
    other = subprocess.run([sys.executable, "-c", _OTHER], capture_output=True, text=True, timeout=100)
    assert (other.stdout, other.stderr, other.returncode) == ("compiled\n", "", 0)

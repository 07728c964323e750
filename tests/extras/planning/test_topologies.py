"""Devices that are not here: names of slices, models on them, and what compilers say of programs for them."""

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


# Models on devices that are not here ----------------------------------------------------------------------------------


def on(mesh: Any) -> lm.AbstractModel:
    def init(key: Any) -> dict[str, Any]:
        return {"kernel": jax.random.normal(key, (64, 1024)), "bias": jnp.zeros(256)}

    return lm.build_abstract(init, jax.random.key(0)).shard(mesh, {"kernel": P(None, "model"), "bias": P()})


@pytest.fixture(params=["v5e:2x4", "H100:8"])
def arithmetic(request: pytest.FixtureRequest) -> lm.AbstractModel:
    return on(lm.arithmetic_mesh(request.param))


def test_what_looks_at_shapes_works_without_devices(arithmetic: lm.AbstractModel) -> None:
    text = str(arithmetic.explain("kernel"))
    assert "each of 8 devices holds (64, 128), 32.00 KiB" in text
    assert "axis 'model' (8) divides dimensions 0, 1" in text
    report = arithmetic.explain()
    assert (report.num_devices, report.fullest_nbytes, report.emptiest_nbytes) == (8, 33792, 33792)
    assert dict(report.replicated) == {"bias": "(256,), 1.00 KiB: rule 'bias' matches"}
    assert report.imbalance == pytest.approx(33792 * 8 / (64 * 1024 * 4 + 1024))
    assert arithmetic.plan().device_nbytes == 33792
    assert "33.00 KiB per device on 8 devices" in repr(arithmetic)
    assert "33.00 KiB per device on 8 devices" in arithmetic._repr_html_()
    assert arithmetic.tree["kernel"].sharding.shard_shape((64, 1024)) == (64, 128)
    assert arithmetic.rekey(1).reinitialize("bias", jax.nn.initializers.ones)["bias"].spec == P()


GIVEN = {"kernel": np.ones((64, 1024), "f"), "bias": np.ones(256, "f")}


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


@pytest.mark.large
@needs_libtpu
def test_two_processes_at_a_time_and_nothing_on_stderr() -> None:
    assert lm.topology("v5e:2x2").size == 4, "this process has libtpu, too"
    other = subprocess.run([sys.executable, "-c", _OTHER], capture_output=True, text=True, timeout=100)
    assert (other.stdout, other.stderr, other.returncode) == ("compiled\n", "", 0)

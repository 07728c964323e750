"""Names of slices, and meshes of devices that are not here."""

import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._devices import hardware
from lazymodel._devices import topology as topology_module
from lazymodel._devices.hardware import CARDS, device_memory
from lazymodel._devices.topology import arithmetic_mesh, has_libtpu, topology, topology_names

GIB = 2**30
needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason='needs libtpu: pip install "lazymodel[tpu]"')


# --- names, by arithmetic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v2:2x2", 8),
        ("v2-8", 8),
        ("v3-32", 32),
        ("v3-2048", 2048),
        ("v4-8", 4),
        ("v4:2x2x1", 4),
        ("v5e-8", 8),
        ("v5e:2x4", 8),
        ("v5e:4x2", 8),
        ("v5e:2x4x1", 8),
        ("v5litepod-16", 16),
        ("v5p:2x2", 4),
        ("v5p-8", 4),
        ("v5p-512", 256),
        ("v5p:8x8x4", 256),
        ("TPU v5 lite:2x4", 8),
        ("v6e-1", 1),
        ("V6E-256", 256),
        ("v7x:1x1x1", 2),
        ("v7x:4x4x8", 256),
        ("tpu7x-8", 8),
        ("H100:8", 8),
        ("A100-80GB:16", 16),
    ],
)
def test_devices_of_a_name(name: str, devices: int) -> None:
    mesh = arithmetic_mesh(name)
    assert dict(mesh.shape) == {"model": devices}
    assert mesh.axis_types == (AxisType.Auto,)
    assert device_memory(mesh.abstract_device.device_kind) == device_memory(name.split(":")[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:3x3", r"no TPU slice 'v5e:3x3'; nearest: v5e:2x4 \(v5e-8\) and v5e:4x4 \(v5e-16\)"),
        ("v5e-7", r"nearest: v5e:2x2 \(v5e-4\) and v5e:2x4 \(v5e-8\)\. v5e-N counts chips"),
        ("v2-4", r"nearest: v2:2x2 \(v2-8\)\. v2-N counts cores, two a chip"),
        ("v2-9", r"nearest: v2:2x2 \(v2-8\) and v2:4x4 \(v2-32\)"),
        ("v5p:4x4x5", r"nearest: v5p:4x4x4 \(v5p-128\) and v5p:4x4x8 \(v5p-256\)"),
        ("v5e:999x999", r"nearest: v5e:16x16 \(v5e-256\)\."),
        ("v5e:0x4", r"nearest: v5e:1x1"),
        ("v9:2x2", "'v9' is no TPU generation; known are v2, v3, v4, v5e, v5p, v6e, v7x"),
        ("v5f:2x4", "'v5f' is no TPU generation; closest: .*'v5e'"),
        ("v5p", "write a generation and its chips, such as 'v5p:2x2x4' or 'v5p-32'"),
        ("", "'' is no TPU slice; write"),
        ("v5e:2x4x" + "9" * 10_000, "is no TPU slice; write"),
        ("H100:0", "has no devices"),
        ("H100", "'H100' is a card; say how many, such as 'H100:8'"),
        ("H100-4", "'H100-4' is a card; say how many, such as 'H100:4'"),
        ("H101:8", "'H101:8' is no TPU slice; closest: 'H100'"),
        ("v5f", "'v5f' is no TPU slice; closest: .*'v5e'"),
        (8, "a slice is named, such as 'v5e:2x4' or 'v5e-8'; got 8"),
        (None, "a slice is named, .*; got None"),
    ],
)
def test_a_name_that_is_none_gets_the_nearest_that_works(name: str, message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message) as caught:
        arithmetic_mesh(name)
    assert len(str(caught.value)) < 300


def test_cards_are_not_compiled_for() -> None:
    with pytest.raises(lm.LazyModelError, match=r"'H100:8' are cards, .*lazymodel\.arithmetic_mesh\('H100:8'\)"):
        topology("H100:8")
    for name in (8, None):
        with pytest.raises(lm.LazyModelError, match="a slice is named"):
            topology(name)  # pyright: ignore[reportArgumentType]


def test_every_card_goes_by_the_name_that_errors_give_it() -> None:
    sizes = [device_memory(name) for name in CARDS]
    assert sizes == [size * 2**20 for _, _, size in hardware._CARDS]
    with pytest.raises(lm.LazyModelError, match="a device is a jax.Device or a name such as 'v5e' or 'H100'; got 8"):
        device_memory(8)


def test_libtpu_is_told_what_is_not_set_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_module.glob, "glob", lambda pattern: [])
    monkeypatch.setenv("TPU_STDERR_LOG_LEVEL", "0")
    monkeypatch.delenv("TPU_LOG_DIR", raising=False)
    before = dict(os.environ)
    with topology_module.libtpu_environment():
        assert os.environ["TPU_STDERR_LOG_LEVEL"] == "0"
        assert os.environ["TPU_LOG_DIR"] == "disabled"
    assert dict(os.environ) == before
    monkeypatch.setattr(topology_module.glob, "glob", lambda pattern: ["/dev/accel0"])  # a TPU is here
    with topology_module.libtpu_environment():
        assert dict(os.environ) == before


def test_axes_take_what_the_slice_has() -> None:
    assert dict(arithmetic_mesh("v5e-8", {"batch": 2, "model": -1}).shape) == {"batch": 2, "model": 4}
    assert dict(arithmetic_mesh("v5e-8", {"batch": 1, "model": 8}).shape) == {"batch": 1, "model": 8}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"a": 3, "b": 4}, r"do not make the 8 devices of v5e:2x4; \{'a': 1, 'b': 8\} would"),
        ({"a": 4, "b": 4}, r"\{'a': 4, 'b': 2\} would"),
        ({"a": -1, "b": 6}, r"\{'a': 4, 'b': 2\} would"),
        ({"a": 0, "b": 8}, "positive sizes"),
        ({"a": True, "b": 8}, "positive sizes"),
        ({"a": -1, "b": -1}, "one of which may be -1"),
        ({}, "positive sizes"),
        ("model=8", r"axes is a mapping of axis name to size, such as \{'model': 8\}; got 'model=8'"),
        (("data", "model"), "axes is a mapping of axis name to size"),
        ({0: 8}, "axes is a mapping of axis name to size"),
        (8, "axes is a mapping of axis name to size"),
    ],
)
def test_axes_of_another_product(axes: dict[str, int], message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        arithmetic_mesh("v5e:2x4", axes)


def test_slices_of_a_generation_ascend_to_the_pod() -> None:
    assert topology_names("v5e") == [f"v5e:{s}" for s in ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")]
    names = topology_names("v5p")
    assert names[:6] == ["v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8"]
    assert names[-1] == "v5p:16x16x24"
    assert "v5p:8x8x16" in names and "v5p:4x16x16" not in names  # the most cubic for its number of chips
    sizes = [arithmetic_mesh(name).size for name in names]
    assert sizes == sorted(set(sizes))


def test_without_libtpu_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_module, "has_libtpu", lambda: False)
    topology_module._devices.cache_clear()
    with pytest.raises(lm.LazyModelError, match=r'^devices of v5e:2x4 .* pip install "lazymodel\[tpu\]"$'):
        topology("v5e:2x4")


# --- devices of libtpu -----------------------------------------------------------------------------------------------


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
    mesh = topology(name)
    assert isinstance(mesh, jax.sharding.Mesh)
    assert mesh.axis_types == (AxisType.Auto,)
    assert mesh.size == devices == arithmetic_mesh(name).size
    found = list(mesh.devices.flat)
    assert {device.device_kind for device in found} == {kind} == {arithmetic_mesh(name).abstract_device.device_kind}
    assert len({device.process_index for device in found}) == hosts
    assert device_memory(found[0]) == device_memory(kind)


@needs_libtpu
def test_a_slice_has_the_same_devices_each_time_and_leaves_the_environment_alone() -> None:
    before = dict(os.environ)
    first = topology("v6e:2x2", {"a": 2, "b": 2})
    assert dict(os.environ) == before
    assert set(first.devices.flat) == set(topology("v6e-4").devices.flat)
    assert first == topology("v6e:2x2", {"a": 2, "b": -1})


@needs_libtpu
def test_axes_that_are_no_factors_of_the_torus_are_taken_too() -> None:
    assert dict(topology("v5p:4x4x12", {"a": 3, "b": 64}).shape) == {"a": 3, "b": 64}


_CHILD = """
import jax, lazymodel._devices.topology as t
from jax.sharding import SingleDeviceSharding
device = t.topology("v5e:2x2").devices.flat[0]
struct = jax.ShapeDtypeStruct((8,), "float32", sharding=SingleDeviceSharding(device))
jax.jit(lambda x: x + 1).lower(struct).compile()
print("compiled", flush=True)
input()
"""


@needs_libtpu
def test_two_processes_at_a_time_and_nothing_on_stderr() -> None:
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", _CHILD], **pipe) for _ in range(2)]
    try:
        assert [child.stdout.readline() for child in children] == ["compiled\n"] * 2
        assert [child.communicate("\n", timeout=60)[1] for child in children] == [""] * 2
    finally:
        for child in children:
            child.kill()


def test_shard_shapes_on_a_mesh_without_devices() -> None:
    mesh = arithmetic_mesh("v5p:4x8x8", {"data": 4, "model": -1})
    assert NamedSharding(mesh, P("data", "model")).shard_shape((8, 128)) == (2, 2)

"""What is streamed: every shard is the NumPy slice, every byte is read once, and nothing outlives a failure."""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.core.materialize._variables import assert_shards_equal, bytes_read, model_of
from tests.foreign_memory import foreign_memory
from tests.large import examples

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def mesh1() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("x",))


@pytest.fixture(scope="module")
def mesh2() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))


def saved(folder: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[lm.Checkpoint, dict[str, np.ndarray]]:
    """A file of random values, opened, and the values."""
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(values, folder / "weights.safetensors")
    return lm.open_checkpoint(folder / "weights.safetensors"), values


def materialize(tensors: Any, sharding: Any, **options: Any) -> tuple[dict[str, jax.Array], lm.LoadReport]:
    reports: list[lm.LoadReport] = []
    arrays = model_of(tensors, sharding).materialize(tensors, report=reports.append, **options)
    return arrays, reports[0]


SMALL = {f"v{i:02}": (64, 64) for i in range(60)}  # 16 KiB each, which share jobs
LARGE = {f"v{i:02}": (160, 128) for i in range(30)}  # 80 KiB each, which do not


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 256])  # of tensors that share jobs, and that do not
def test_shards_are_slices_and_every_byte_is_read_once(tmp_path: Path, mesh2: Mesh, rows: int) -> None:
    checkpoint, values = saved(tmp_path, {"w": (rows, 128)})
    specs = [P(), P("x"), P(None, "y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]
    views = {f"{spec} {view}": (spec, view == "T") for spec in specs for view in ("", "T")}
    tensors = {name: checkpoint["w"].T if turned else checkpoint["w"] for name, (_, turned) in views.items()}
    shardings = {name: NamedSharding(mesh2, spec) for name, (spec, _) in views.items()}
    arrays, report = materialize(tensors, shardings)
    for name, (_, turned) in views.items():
        assert arrays[name].sharding == shardings[name]
        assert_shards_equal(arrays[name], values["w"].T if turned else values["w"])
    assert report.read_nbytes == report.needed_nbytes == len(views) * values["w"].nbytes


def test_arrays_come_in_file_order(tmp_path: Path, mesh1: Mesh) -> None:
    checkpoint, values = saved(tmp_path, SMALL)
    order = sorted(values, key=lambda name: checkpoint[name].offset)
    mixed = {name: checkpoint[name] for name in sorted(values, key=lambda name: name[::-1])}
    found = dict(model_of(mixed, NamedSharding(mesh1, P("x"))).stream(mixed))
    assert list(found) == order != list(mixed)
    for name, array in found.items():
        assert_shards_equal(array, values[name])


def test_arrays_are_copies_of_what_they_are_made_of(tmp_path: Path, mesh1: Mesh) -> None:
    """Of an array in memory, and of a file that changes afterwards."""
    checkpoint, values = saved(tmp_path, {"w": (256, 128), "v": (8, 8)})
    memory = np.arange(64, dtype=np.float32).reshape(8, 8)
    expected = {"memory": memory.copy()}
    tensors: dict[str, Any] = {"memory": memory}
    shardings: dict[str, Sharding] = {"memory": NamedSharding(mesh1, P())}
    for name in values:
        for spec in (P("x"), P(None, "x"), P()):
            key = f"{name} {spec}"
            tensors[key], expected[key], shardings[key] = checkpoint[name], values[name], NamedSharding(mesh1, spec)
    arrays, _ = materialize(tensors, shardings)
    memory[...] = -1
    file = tmp_path / "weights.safetensors"
    with file.open("r+b") as opened:
        opened.write(np.random.default_rng(1).bytes(file.stat().st_size))
    for name, array in arrays.items():
        assert_shards_equal(array, expected[name])


@pytest.mark.parametrize("shape", [(64, 1024), (16, 32)])
def test_replicas_share_memory_and_survive_donation_of_each_other(
    tmp_path: Path, mesh1: Mesh, shape: tuple[int, ...]
) -> None:
    """Nor does a donated array touch its neighbours, with which it may have been read."""
    checkpoint, values = saved(tmp_path, {f"v{i}": shape for i in range(8)})
    arrays = dict(model_of(checkpoint, NamedSharding(mesh1, P())).stream(checkpoint))
    shards = [shard.data for shard in arrays["v0"].addressable_shards]
    assert len({shard.unsafe_buffer_pointer() for shard in shards}) == 1
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(shards[0]).block_until_ready()
    shards[1].delete()
    del arrays["v0"]
    for shard in shards[2:]:
        np.testing.assert_array_equal(shard, values["v0"])
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for name in ("v1", "v3", "v5"):
        assert_shards_equal(add(arrays.pop(name)), values[name] + 1)
    for name, array in arrays.items():
        assert_shards_equal(array, values[name])


def test_a_device_of_its_own_scalars_and_nothing_at_all(tmp_path: Path) -> None:
    checkpoint, values = saved(tmp_path, {"odd": (5, 7), "scalar": (), "empty": (0, 7)})
    arrays, _ = materialize(checkpoint, SingleDeviceSharding(jax.devices()[3]))
    for name, array in arrays.items():
        assert array.devices() == {jax.devices()[3]}
        assert_shards_equal(array, values[name])
    assert list(lm.build_abstract(dict).stream({})) == []


def test_signalling_nans_keep_their_bits(tmp_path: Path, mesh1: Mesh) -> None:
    bits = np.array([0x7F800001, 0xFFC12345] * 32, np.uint32)
    half = np.array([0x7F81, 0xFF82] * 32, np.uint16)
    values = {"a": bits.view(np.float32), "b": half.view(ml_dtypes.bfloat16)}
    save_file(values, tmp_path / "m.safetensors")
    arrays, _ = materialize(lm.open_checkpoint(tmp_path / "m.safetensors"), NamedSharding(mesh1, P("x")))
    for name, array in arrays.items():
        assert_shards_equal(array, values[name])


def test_64_bit_types_are_loaded_where_jax_has_them(mesh1: Mesh) -> None:
    values = {"w": np.array([2.0**40 + 0.5, 1e300])}
    with jax.enable_x64(True):
        model = model_of(values, NamedSharding(mesh1, P()))
        assert_shards_equal(model.materialize(values)["w"], values["w"])
    with pytest.raises(lm.CheckpointError, match="'w'.*jax_enable_x64"):
        model.materialize(values)


# --- any tensors, under any budget ------------------------------------------------------------------------------------

VIEWS: dict[str, Any] = {
    "whole": lambda w: w,
    "transposed": lambda w: np.transpose(w, (1, 0)),
    "flipped": lambda w: np.flip(w, 0),
    "a part": lambda w: w[1:, 2:5],
    "rows": lambda w: w[2:4],
    "backwards": lambda w: w[::-1],
    "every other": lambda w: w[:, ::2],
    "repeated": lambda w: np.broadcast_to(w[:1], (8, *w.shape[1:])),
    "repeated over a gap": lambda w: np.broadcast_to(w[0, ::3][None, :2], (2, 2)),
    "joined": lambda w: np.concatenate([w, w[::-1]], 1),
    "stacked": lambda w: np.stack([w.T] * 8),
    "scaled": lambda w: w * 3,
    "reshaped": lambda w: np.reshape(w.T, (8, -1)),
    "flat": lambda w: w.T.reshape(-1),
    "one": lambda w: w[3, 4],
}
STORED = ("float32", "float64", "int8", "uint16", "int32", "bfloat16")
LOADED = ("float32", "float16", "bfloat16", "int8", "int4", "bool")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[lm.Checkpoint, dict[str, np.ndarray]]:
    """Small and large tensors of every dtype, of any bits, at odd places of a file."""
    rng, values = np.random.default_rng(0), dict[str, np.ndarray]()
    for dtype in map(np.dtype, STORED):
        for rows in (8, 1024):
            bits = rng.integers(0, 256, rows * 16 * dtype.itemsize, np.uint8)
            values[f"{dtype.name} {rows}"] = bits.view(dtype).reshape(rows, 16)
            values[f"{dtype.name} {rows} odd"] = rng.integers(0, 256, 7 * dtype.itemsize, np.uint8).view(dtype)
    path = tmp_path_factory.mktemp("stored") / "any.safetensors"
    save_file(values, path)
    return lm.open_checkpoint(path), values


@examples(4, 30, data=st.data())
def test_any_tensors_are_numpys_arrays_in_any_memory_under_any_budget(
    stored: tuple[lm.Checkpoint, dict[str, np.ndarray]], data: st.DataObject
) -> None:
    """Any views, small and large, of files and of memory, cast or not, sharded at random; their bits and counts."""
    checkpoint, whole = stored
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))  # each device has programs of its own
    tensors, expected, shardings = dict[str, Any](), dict[str, np.ndarray](), dict[str, Sharding]()
    for number in range(data.draw(st.integers(1, 10))):
        name = f"{data.draw(st.sampled_from(STORED))} {data.draw(st.sampled_from((8, 8, 1024)))}"
        view = VIEWS[data.draw(st.sampled_from(sorted(VIEWS)))]
        with np.errstate(all="ignore"):
            values = np.asarray(view(whole[name]))
            target = np.dtype(data.draw(st.sampled_from((values.dtype.name, *LOADED))))
            target = np.dtype(np.float32) if target == np.float64 else target
            if target.name == "int4":  # of what ml_dtypes converts
                values, tensor = np.clip(np.nan_to_num(values.astype("f4")), -8, 7), None
            else:
                tensor = view(checkpoint[name]) if data.draw(st.booleans()) else values.copy()
            values = values.astype(target)
            tensor = values if tensor is None else tensor.astype(target)
        axes: list[Any] = [None] * values.ndim
        for axis in data.draw(st.permutations(("x", "y"))):
            fits = [d for d in range(values.ndim) if values.shape[d] % math.prod(_sizes(mesh, axes[d], axis)) == 0]
            if fits and data.draw(st.booleans()):
                chosen = data.draw(st.sampled_from(fits))
                axes[chosen] = (*(axes[chosen] or ()), axis)
        kind = data.draw(st.sampled_from((None, None, "pinned_host")))
        path = f"v{number}"
        tensors[path], expected[path] = tensor, values
        shardings[path] = NamedSharding(mesh, P(*axes), memory_kind=kind)
    budget = data.draw(st.sampled_from((None, 600, 2000, 20_000, 1 << 20)))
    seen: list[tuple[int, int]] = []
    with foreign_memory(data.draw(st.integers(0, 1000))) if data.draw(st.booleans()) else contextlib.nullcontext() as t:
        if t is not None:
            t.held = data.draw(st.booleans())
        found, _ = materialize(tensors, shardings, max_host_memory=budget, progress=lambda *pair: seen.append(pair))
        if t is not None:
            assert t.under_way == 0
            assert max(t.buffers.most_nbytes, t.most_nbytes) <= (budget or 1 << 30)
    for path, array in found.items():
        assert array.sharding == shardings[path]
        assert_shards_equal(array, expected[path])
    assert seen[-1] == (sum(values.nbytes for values in expected.values()),) * 2


def _sizes(mesh: Mesh, taken: Any, axis: str) -> list[int]:
    return [mesh.shape[name] for name in (*(taken or ()), axis)]


@pytest.mark.parametrize("budget", [600, 3000, 12_000, None])  # from parts of a row to everything
def test_shards_of_any_size_reach_other_devices_under_any_budget(tmp_path: Path, budget: int | None) -> None:
    shapes = {"rows": (8, 512), "columns": (64, 64), "flat": (1 << 12,), "whole": (8, 512)}
    specs = {"rows": P("x"), "columns": P(None, "x"), "flat": P(), "whole": P()}
    checkpoint, values = saved(tmp_path, shapes)
    # The programs that put pieces together are compiled for every device: two show what eight do.
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    turned = {name: checkpoint[name].T.astype(ml_dtypes.bfloat16) for name in values}
    seen: list[int] = []
    with foreign_memory():
        arrays, report = materialize(
            checkpoint, shardings, max_host_memory=budget, progress=lambda done, _: seen.append(done)
        )
        other, _ = materialize(turned, shardings, max_host_memory=budget)
    for name, value in values.items():
        assert_shards_equal(arrays[name], value)
        assert_shards_equal(other[name], value.T.astype(ml_dtypes.bfloat16))
    assert report.read_nbytes == sum(value.nbytes for value in values.values()) == seen[-1]


def test_what_cannot_be_read_within_the_budget_is_refused_at_once(tmp_path: Path, mesh1: Mesh) -> None:
    """The chunk of a compressed file is read as one; the error names the least budget, which is enough."""
    values = np.arange(512 * 512, dtype=np.float32).reshape(512, 512)
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file.create_dataset("kernel", data=values, chunks=values.shape, compression="lzf", shuffle=True)
    checkpoint = lm.open_checkpoint(tmp_path / "model.weights.h5")
    model = model_of(checkpoint, NamedSharding(mesh1, P("x")))
    with pytest.raises(
        lm.CheckpointError, match=r"'kernel' .*model\.weights\.h5.*MiB at once.*Give at least"
    ) as caught:
        model.materialize(checkpoint, max_host_memory=1 << 20)
    least = int(re.findall(r"Give at least (\d+) bytes", str(caught.value))[0])
    assert_shards_equal(model.materialize(checkpoint, max_host_memory=least)["kernel"], values)
    with pytest.raises(lm.CheckpointError, match=f"Give at least {least} bytes"):
        model.materialize(checkpoint, max_host_memory=least - 1)
    with pytest.raises(lm.CheckpointError, match=f"Give at least {least} bytes"):
        next(model.stream(checkpoint, max_host_memory=least - 1))


# --- few calls --------------------------------------------------------------------------------------------------------


def read_calls() -> int:
    """Calls by which this process has read anything, as the kernel counts them."""
    io = Path("/proc/self/io")
    if not io.exists():
        pytest.skip("calls are counted by /proc")
    return int(io.read_text().split("syscr:")[1].split()[0])


@pytest.mark.parametrize("spec", [P("x"), P()])
def test_thousands_of_tensors_take_few_calls(
    tmp_path: Path, mesh1: Mesh, monkeypatch: pytest.MonkeyPatch, spec: P
) -> None:
    """To read them, to look whether their file has changed, and to put them on all devices at once."""
    shapes = ((16, 32), (32, 16), (16,), (8, 64))
    checkpoint, values = saved(tmp_path, {f"layer_{i}/w": shapes[i % 4] for i in range(600)})
    model = model_of(checkpoint, NamedSharding(mesh1, spec))
    counts = {"fstat": 0, "stat": 0, "make_array_from_callback": 0, "device_put": 0}

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, names in ((os, ("fstat", "stat")), (jax, ("make_array_from_callback", "device_put"))):
        for name in names:
            counted(module, name)
    before = read_calls()
    loaded = dict(model.stream(checkpoint))
    nbytes = sum(value.nbytes for value in values.values())
    assert read_calls() - before <= nbytes // (128 << 10) + 20  # and what else this process reads meanwhile
    assert counts["fstat"] + counts["stat"] <= nbytes // (64 << 10)
    assert counts["make_array_from_callback"] + counts["device_put"] == len(values)
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), value)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
def test_the_first_tensor_that_cannot_be_read_is_named(
    tmp_path: Path, mesh1: Mesh, monkeypatch: pytest.MonkeyPatch, threads: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    """A file that ends too early, though it seems unchanged: the others, with which it may share a job, are fine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(threads)), raising=False)
    checkpoint, _ = saved(tmp_path, shapes)
    last = max(checkpoint, key=lambda name: checkpoint[name].offset)
    model = model_of(checkpoint, NamedSharding(mesh1, P("x")))
    before = (tmp_path / "weights.safetensors").stat()
    for name, function in (("stat", os.stat), ("fstat", os.fstat)):

        def seen(*args: Any, function: Any = function, **options: Any) -> os.stat_result:
            now = function(*args, **options)
            return before if now.st_ino == before.st_ino else now

        monkeypatch.setattr(os, name, seen)
    os.truncate(tmp_path / "weights.safetensors", before.st_size - 8)
    with pytest.raises(
        lm.CheckpointError, match=rf"'{last}' from tensor '{last}' of .*weights\.safetensors.*truncated"
    ):
        list(model.stream(checkpoint, max_host_memory=400_000))


def test_a_file_that_changes_is_refused(tmp_path: Path, mesh1: Mesh) -> None:
    checkpoint, values = saved(tmp_path, SMALL)
    model = model_of(checkpoint, NamedSharding(mesh1, P()))
    assert len(dict(model.stream(checkpoint))) == len(values)  # which opens the file
    path = tmp_path / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(lm.CheckpointError, match="changed while it was being read"):
        list(model.stream(checkpoint))


@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
def test_stopping_early_stops_reading(tmp_path: Path, mesh1: Mesh, shapes: dict[str, tuple[int, ...]]) -> None:
    checkpoint, values = saved(tmp_path, shapes)
    each = values["v00"].nbytes
    arrays = model_of(checkpoint, NamedSharding(mesh1, P("x"))).stream(checkpoint, max_host_memory=4 * each)
    next(arrays)
    arrays.close()
    assert bytes_read(checkpoint) <= 6 * each

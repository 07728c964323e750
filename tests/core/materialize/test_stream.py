"""The stream: every shard is the NumPy slice, every byte is read once, and nothing outlives a failure."""

import contextlib
import dataclasses
import math
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lazymodel._errors import CheckpointError
from lazymodel._materialize import stream as streaming
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import FileLeaf
from lazymodel._tensors.source import BYTES_READ
from tests.foreign_memory import foreign_memory

P = PartitionSpec
F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def mesh1():
    return Mesh(np.array(jax.devices()[:8]), ("x",))


@pytest.fixture(scope="module")
def mesh2():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32).tobytes())
    return FileSource(path)


def tensor_of(source, shape, dtype=F32, offset=0, name="w"):
    """The lazy tensor, and its values by other means."""
    values = np.fromfile(source.path, np.uint8)[offset : offset + math.prod(shape) * dtype.itemsize]
    return LazyTensor(FileLeaf(name, source, offset, shape, dtype)), values.view(dtype).reshape(shape)


def load(tensor, dtype, sharding, **kwargs):
    item = StreamItem("layer/kernel", tensor, tensor.shape, np.dtype(dtype), sharding)
    ((path, array),) = list(stream([item], **kwargs))
    assert path == "layer/kernel"
    assert array.sharding == sharding
    assert array.dtype == np.dtype(dtype)
    return array


def assert_shards_equal(array, expected):
    assert array.shape == expected.shape
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()


@pytest.mark.parametrize(
    "spec", [P(), P("x"), P(None, "y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]
)
@pytest.mark.parametrize("view", ["plain", "transposed"])
def test_shards_are_slices_and_every_byte_is_read_once(source, mesh2, spec, view):
    tensor, expected = tensor_of(source, (64, 128))
    if view == "transposed":
        tensor, expected = tensor.T, expected.T
    array = load(tensor, F32, NamedSharding(mesh2, spec))
    assert_shards_equal(array, expected)
    assert source.bytes_read == expected.nbytes


def test_only_the_boxes_of_addressable_devices_are_read(source):
    """A sharding that this process sees half of, as one process of two would."""

    class Half(NamedSharding):
        def addressable_devices_indices_map(self, global_shape):
            full = super().addressable_devices_indices_map(global_shape)
            return dict(list(full.items())[:4])

    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    tensor, _ = tensor_of(source, (64, 128))
    plan = streaming._plan(StreamItem("k", tensor, (64, 128), F32, Half(mesh, P("x"))))
    assert [key[0] for key in plan.boxes.devices] == [(0, 8), (8, 16), (16, 24), (24, 32)]
    plan = streaming._plan(StreamItem("k", tensor, (64, 128), F32, Half(mesh, P())))
    assert list(plan.boxes.devices) == [((0, 64), (0, 128))]
    assert len(plan.boxes.devices[(0, 64), (0, 128)]) == 4


def test_items_come_in_file_order(source, mesh1):
    sharding = NamedSharding(mesh1, P("x"))
    offsets = [4096, 0, 8192, 2048]
    items = [
        StreamItem(f"v{offset}", tensor_of(source, (8, 16), offset=offset)[0], (8, 16), F32, sharding)
        for offset in offsets
    ]
    result = dict(stream(items))
    assert list(result) == ["v0", "v2048", "v4096", "v8192"]
    for offset in offsets:
        np.testing.assert_array_equal(result[f"v{offset}"], tensor_of(source, (8, 16), offset=offset)[1])


@pytest.mark.parametrize("stored", [F32, BF16, np.dtype(np.float64), np.dtype(np.int32)])
@pytest.mark.parametrize("dtype", [F32, BF16, np.dtype(np.float16), np.dtype(np.int8)])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_casts_are_numpys(source, mesh1, stored, dtype, spec):
    tensor, values = tensor_of(source, (64, 64), stored)
    with np.errstate(all="ignore"):
        expected = np.asarray(values).astype(dtype)
    assert_shards_equal(load(tensor, dtype, NamedSharding(mesh1, spec)), expected)


def test_arrays_in_memory_are_copied(mesh1):
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    loaded = load(array, F32, NamedSharding(mesh1, P()))
    expected = array.copy()
    array[...] = -1
    assert_shards_equal(loaded, expected)


def test_loaded_arrays_do_not_change_with_the_file(source, mesh1):
    for spec in (P("x"), P(None, "x"), P()):
        fresh = FileSource(source.path)
        tensor, values = tensor_of(fresh, (64, 1024))
        expected = values.copy()
        array = load(tensor, F32, NamedSharding(mesh1, spec))
        with open(source.path, "r+b") as file:
            file.write(np.random.default_rng(1).bytes(expected.nbytes))
        assert_shards_equal(array, expected)


def test_replicas_survive_donation_and_deletion_of_each_other(source, mesh1):
    tensor, expected = tensor_of(source, (64, 1024))
    array = load(tensor, F32, NamedSharding(mesh1, P()))
    shards = [shard.data for shard in array.addressable_shards]
    changed = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(shards[0])
    changed.block_until_ready()
    shards[1].delete()
    del array
    for shard in shards[2:]:
        np.testing.assert_array_equal(shard, expected)
    again = load(tensor, F32, NamedSharding(mesh1, P()))
    whole = jax.jit(lambda x: x + 1, donate_argnums=0)(again)
    assert_shards_equal(whole, expected + 1)


def test_single_device_and_scalars_and_empty(source):
    device = SingleDeviceSharding(jax.devices()[3])
    tensor, expected = tensor_of(source, (5, 7), offset=12)
    assert_shards_equal(load(tensor, F32, device), expected)
    tensor, expected = tensor_of(source, (), offset=8)
    assert_shards_equal(load(tensor, F32, device), expected)
    tensor, expected = tensor_of(source, (0, 7))
    assert_shards_equal(load(tensor, F32, device), expected)
    assert list(stream([])) == []


@pytest.fixture
def accelerator():
    """CPU devices are taken for devices with memory of their own."""
    with foreign_memory():
        yield


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("budget", [300, 1500, 12_500, 50_000, None])  # from parts of a row to everything
@pytest.mark.parametrize(
    ("shape", "spec"), [((8, 512), P("x")), ((256, 64), P(None, "x")), ((1 << 14,), P()), ((32, 512), P())]
)
def test_shards_of_any_size_reach_other_devices_under_any_budget(source, shape, spec, budget):
    tensor, expected = tensor_of(source, shape)
    # The programs that put pieces together are compiled for every device: two show what eight do.
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), spec)
    counts = []
    array = load(tensor, F32, sharding, max_host_memory=budget, on_bytes=counts.append)
    assert_shards_equal(array, expected)
    assert source.bytes_read == expected.nbytes == sum(counts)
    if len(shape) == 2:
        assert_shards_equal(load(tensor.T, BF16, sharding, max_host_memory=budget), expected.T.astype(BF16))


@pytest.mark.usefixtures("accelerator")
def test_buffers_that_were_copied_to_devices_are_used_again(source, mesh1, monkeypatch):
    made = []
    empty = streaming.empty_aligned
    monkeypatch.setattr(streaming, "empty_aligned", lambda *args: made.append(args) or empty(*args))
    items = [
        StreamItem(f"v{i}", tensor_of(source, (64, 64), offset=i * 16384)[0], (64, 64), F32, NamedSharding(mesh1, P()))
        for i in range(60)
    ]
    arrays = dict(stream(items, max_host_memory=150_000))
    for path, array in arrays.items():
        assert_shards_equal(array, tensor_of(source, (64, 64), offset=int(path[1:]) * 16384)[1])
    assert len(made) <= 10


@pytest.mark.parametrize("devices", ["host", "accelerator"])
@pytest.mark.parametrize("budget", [20_000, 100_000])
def test_bytes_in_flight_stay_under_the_budget(source, mesh1, monkeypatch, request, devices, budget):
    if devices == "accelerator":
        request.getfixturevalue("accelerator")
    peak = 0
    reserve = streaming._Stream._reserve

    def spy(self, job):
        nonlocal peak
        result = reserve(self, job)
        peak = max(peak, self._in_flight + sum(spare.nbytes for spare in self._spare))
        assert self._budget + self._workspace * len(self._threads) <= budget
        assert self._in_flight <= self._budget
        return result

    monkeypatch.setattr(streaming._Stream, "_reserve", spy)
    sharding = NamedSharding(mesh1, P("x"))
    items = [
        StreamItem(f"v{i}", tensor_of(source, (64, 64), offset=i * 16384)[0], (64, 64), F32, sharding)
        for i in range(32)
    ]
    for path, array in stream(items, max_host_memory=budget):
        assert_shards_equal(array, tensor_of(source, (64, 64), offset=int(path[1:]) * 16384)[1])
    assert 2000 < peak <= budget


def test_what_cannot_be_read_within_the_budget_is_refused_at_once(source, mesh1):
    tensor, _ = tensor_of(source, (64, 64))
    tensor.leaf.unit_nbytes = 1 << 20  # as a chunk of a compressed file would be
    item = StreamItem("layer/kernel", tensor, (64, 64), F32, NamedSharding(mesh1, P("x")))
    with pytest.raises(CheckpointError, match=r"'layer/kernel' .*takes 1\.00 MiB at once.*Give at least") as caught:
        stream([item], max_host_memory=1 << 20)
    least = re.search(r"Give at least (\d+) bytes", str(caught.value))
    assert least is not None
    assert len(list(stream([item], max_host_memory=int(least[1])))) == 1
    with pytest.raises(CheckpointError, match="Give at least"):
        stream([item], max_host_memory=int(least[1]) - 1)


@pytest.mark.parametrize("ceiling", range(4))
def test_the_least_budget_is_named_for_what_has_no_chunks(source, mesh1, ceiling):
    tensor, expected = tensor_of(source, (8,))
    item = StreamItem("w", tensor, (8,), F32, NamedSharding(mesh1, P()))
    with pytest.raises(CheckpointError, match=r"takes 4 B at once, and .* Give at least (\d+) bytes") as caught:
        stream([item], max_host_memory=ceiling)
    least = int(str(caught.value).split()[-2])
    assert_shards_equal(dict(stream([item], max_host_memory=least))["w"], expected)


def test_progress_adds_up_to_the_bytes_of_distinct_shards(source, mesh1):
    counts = []
    sharding = NamedSharding(mesh1, P("x"))
    tensor, _ = tensor_of(source, (64, 64))
    items = [
        StreamItem("sharded", tensor, (64, 64), BF16, sharding),
        StreamItem("replicated", tensor, (64, 64), F32, NamedSharding(mesh1, P())),
    ]
    list(stream(items, on_bytes=counts.append))
    assert sum(counts) == 64 * 64 * 2 + 64 * 64 * 4


def test_shape_mismatch_is_found_before_anything_is_read(source, mesh1):
    tensor, _ = tensor_of(source, (64, 64))
    item = StreamItem("layer/kernel", tensor, (64, 32), F32, NamedSharding(mesh1, P("x")))
    with pytest.raises(
        CheckpointError, match=r"'layer/kernel': expected shape \(64, 32\), found \(64, 64\) in .*weights\.bin"
    ):
        stream([item])
    assert source.bytes_read == 0


def test_a_dtype_that_jax_would_change_is_an_error(source, mesh1):
    tensor, _ = tensor_of(source, (64, 64))
    with pytest.raises(CheckpointError, match="jax_enable_x64"):
        stream([StreamItem("k", tensor, (64, 64), np.dtype(np.float64), NamedSharding(mesh1, P("x")))])
    with jax.enable_x64(True):
        array = load(tensor, np.float64, NamedSharding(mesh1, P("x")))
        assert array.dtype == np.float64


@pytest.mark.parametrize("threads", [1, 4])
def test_one_error_names_variable_and_file_and_ends_all_threads(source, mesh1, monkeypatch, threads):
    monkeypatch.setattr(streaming, "cores", lambda: threads)
    sharding = NamedSharding(mesh1, P("x"))
    good = [
        StreamItem(f"v{i}", tensor_of(source, (64, 64), offset=i * 16384)[0], (64, 64), F32, sharding)
        for i in range(40)
    ]
    beyond = LazyTensor(FileLeaf("w", source, source.size - 100, (64, 64), F32))
    bad = StreamItem("decoder/kernel", beyond, (64, 64), F32, sharding)
    with pytest.raises(CheckpointError, match=r"'decoder/kernel' from tensor 'w' of .*weights\.bin.*truncated"):
        list(stream([*good, bad], max_host_memory=60_000))


def test_a_failing_callback_is_an_error_too(source, mesh1):
    def fail(count):
        raise RuntimeError("no more")

    tensor, _ = tensor_of(source, (64, 64))
    with pytest.raises(CheckpointError, match="'layer/kernel' from .*no more"):
        load(tensor, F32, NamedSharding(mesh1, P("x")), on_bytes=fail)


def test_stopping_early_stops_reading(source, mesh1):
    sharding = NamedSharding(mesh1, P("x"))
    items = [
        StreamItem(f"v{i}", tensor_of(source, (64, 64), offset=i * 16384)[0], (64, 64), F32, sharding)
        for i in range(60)
    ]
    before = BYTES_READ.count
    arrays = stream(items, max_host_memory=60_000)
    next(arrays)
    arrays.close()
    assert BYTES_READ.count - before <= 6 * 16384
    stream(items)  # never started: nothing to end


SPECS = {
    "x": [P(), P("x"), P(None, "x"), P(None, None, "x")],
    "xy": [P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("x", "y")), P("y"), P(None, "x", "y"), P("y", None, "x")],
}


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_shape_view_dtype_and_sharding_gives_numpys_slices(tmp_path_factory, data):
    source = data_source(tmp_path_factory)
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.sampled_from([8, 16, 24])) for _ in range(ndim))
    stored, dtype = (np.dtype(data.draw(st.sampled_from([np.float32, BF16, np.int8]))) for _ in range(2))
    tensor, expected = tensor_of(source, shape, stored, offset=data.draw(st.sampled_from([0, 8, 24])))
    for kind in data.draw(st.lists(st.sampled_from(["transpose", "flip", "stack", "reshape", "half"]), max_size=3)):
        if kind == "transpose":
            axes = data.draw(st.permutations(range(expected.ndim)))
            tensor, expected = np.transpose(tensor, axes), np.transpose(expected, axes)
        elif kind == "flip":
            tensor, expected = np.flip(tensor, 0), np.flip(expected, 0)
        elif kind == "stack" and expected.ndim < 3:
            tensor, expected = np.stack([tensor] * 8), np.stack([expected] * 8)
        elif kind == "reshape":
            tensor, expected = np.reshape(tensor, (8, -1)), np.reshape(expected, (8, -1))
        elif kind == "half" and expected.shape[-1] % 16 == 0:
            tensor, expected = tensor[..., ::2], expected[..., ::2]
    devices = np.array(jax.devices()[:8])
    axes = data.draw(st.sampled_from(["x", "xy"]))
    mesh = Mesh(devices if axes == "x" else devices.reshape(data.draw(st.sampled_from([(2, 4), (4, 2)]))), tuple(axes))
    specs = [spec for spec in SPECS[axes] if _divides(mesh, spec, expected.shape)]
    sharding = NamedSharding(mesh, data.draw(st.sampled_from(specs)))
    budget = data.draw(st.sampled_from([None, 2000, 20_000]))
    with np.errstate(all="ignore"):
        expected = expected.astype(dtype)
    with foreign_memory() if data.draw(st.booleans()) else contextlib.nullcontext():
        assert_shards_equal(load(tensor, dtype, sharding, max_host_memory=budget), expected)


def _divides(mesh, spec, shape):
    if len(spec) > len(shape):
        return False
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return all(n % math.prod(mesh.shape[name] for name in entry) == 0 for n, entry in zip(shape, names, strict=False))


def data_source(factory, cache={}):  # noqa: B006 (one file for all examples)
    if not cache:
        path = factory.mktemp("stream") / "data.bin"
        path.write_bytes(np.random.default_rng(0).integers(0, 255, 1 << 16).astype(np.uint8).tobytes())
        cache["path"] = path
    return FileSource(cache["path"])


def test_items_are_immutable():
    item = StreamItem("k", np.zeros(1), (1,), F32, SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        item.path = "other"

"""Small tensors share jobs: the values of each by itself, with few calls, errors and ceilings as for large ones."""

import os
import random

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._errors import CheckpointError
from lazymodel._materialize import small_tensors
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors import files
from lazymodel._tensors import shards as shards_module
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.leaves import FileLeaf
from lazymodel._tensors.shards import boxes_for
from lazymodel._tensors.source import BYTES_READ

P = PartitionSpec
F32 = np.dtype(np.float32)
SHAPES = ((16, 32), (32, 16), (16,), (8, 64))

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]), ("x",))


@pytest.fixture(scope="module")
def mesh2():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))


@pytest.fixture
def calls(monkeypatch):
    """Counts of calls: reads of files, checks of files, and transfers to devices."""
    counts = {"read": 0, "check": 0, "put": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(files, "_PREADV", counted("read", files._PREADV))
    monkeypatch.setattr(FileSource, "check_unchanged", counted("check", FileSource.check_unchanged))
    monkeypatch.setattr(jax, "make_array_from_callback", counted("put", jax.make_array_from_callback))
    monkeypatch.setattr(jax, "device_put", counted("put", jax.device_put))
    return counts


def many(tmp_path, count):
    rng = np.random.default_rng(0)
    arrays = {f"layer_{i}/w": rng.standard_normal(SHAPES[i % 4]).astype(np.float32) for i in range(count)}
    save_file(arrays, tmp_path / "m.safetensors")
    return arrays, lm.open_checkpoint(tmp_path / "m.safetensors")


def items_of(checkpoint, sharding):
    return [StreamItem(name, tensor, tensor.shape, tensor.dtype, sharding) for name, tensor in checkpoint.items()]


@pytest.mark.parametrize("spec", [P("x"), P()])
def test_thousands_of_tensors_take_few_calls(tmp_path, mesh, calls, spec):
    arrays, checkpoint = many(tmp_path, 3_000)
    before = BYTES_READ.count
    loaded = dict(stream(items_of(checkpoint, NamedSharding(mesh, spec))))
    nbytes = sum(array.nbytes for array in arrays.values())
    assert BYTES_READ.count - before == nbytes
    assert calls["read"] <= nbytes // (small_tensors.GROUP // 4)
    assert calls["check"] <= calls["read"]
    assert calls["put"] == len(arrays)  # for all devices at once
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array)


def test_shards_are_worked_out_once_for_variables_that_are_split_alike(tmp_path, mesh, monkeypatch):
    made = []
    original = shards_module.Boxes.__init__
    monkeypatch.setattr(shards_module.Boxes, "__init__", lambda self, *args: made.append(args) or original(self, *args))
    boxes_for.cache_clear()
    _, checkpoint = many(tmp_path, 400)
    list(stream(items_of(checkpoint, NamedSharding(mesh, P("x")))))
    assert len(made) == len(SHAPES)


VIEWS = {
    "whole": lambda w: w,
    "transposed": lambda w: w.T,
    "a part": lambda w: w[1:, 2:5],
    "rows": lambda w: w[2:4],
    "backwards": lambda w: w[::-1],
    "every other": lambda w: w[:, ::2],
    "repeated": lambda w: np.broadcast_to(w[:1], (8, *w.shape[1:])),
    "repeated over a gap": lambda w: np.broadcast_to(w[0, ::3][None, :2], (2, 2)),
    "joined": lambda w: np.concatenate([w, w[::-1]], 1),
    "scaled": lambda w: w * 3,
    "reshaped": lambda w: w.T.reshape(-1),
    "one": lambda w: w[3, 4],
}
DTYPES = ("float32", "int8", "uint16", "float64", "bfloat16")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_view_dtype_and_sharding_is_the_numpy_array(tmp_path_factory, mesh2, data):
    """Mixed with large tensors, out of order, cast to another dtype or not."""
    folder = tmp_path_factory.mktemp("small")
    items, expected = [], {}
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    raw = rng.integers(0, 100, 1 << 18, np.uint8)
    (folder / "raw").write_bytes(raw.tobytes())
    source = FileSource(folder / "raw")
    for number in range(data.draw(st.integers(1, 12))):
        dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
        rows = data.draw(st.sampled_from((8, 8, 8, 1024)))
        offset = data.draw(st.integers(0, 1000))
        values = raw[offset : offset + rows * 16 * dtype.itemsize].view(dtype).reshape(rows, 16)
        tensor = LazyTensor(FileLeaf(f"t{number}", source, offset, (rows, 16), dtype))
        if data.draw(st.booleans()) and rows == 8:
            tensor = lazy(values.copy(), f"t{number}")
        view = VIEWS[data.draw(st.sampled_from(sorted(VIEWS)))]
        with np.errstate(all="ignore"):
            tensor, values = view(tensor), np.asarray(view(values))
            target = np.dtype(data.draw(st.sampled_from((values.dtype.name, "float32", "bfloat16"))))
            if target == np.float64:
                target = F32
            values = values.astype(target)
        axes = [None] * values.ndim
        for axis in ("x", "y"):
            size = mesh2.shape[axis]
            fitting = [d for d in range(values.ndim) if axes[d] is None and values.shape[d] % size == 0]
            if fitting and data.draw(st.booleans()):
                axes[data.draw(st.sampled_from(fitting))] = axis
        sharding = NamedSharding(mesh2, P(*axes))
        items.append(StreamItem(f"v{number}", tensor, values.shape, target, sharding))
        expected[f"v{number}"] = values
    budget = data.draw(st.sampled_from((None, 1 << 20, 4 << 10)))
    seen = []
    found = dict(stream(items, max_host_memory=budget, on_bytes=seen.append))
    assert found.keys() == expected.keys()
    for item in items:
        assert found[item.path].sharding == item.sharding
        bits = f"u{item.dtype.itemsize}"
        np.testing.assert_array_equal(
            np.asarray(found[item.path]).view(bits), np.ascontiguousarray(expected[item.path]).view(bits)
        )
    shards = (sum(boxes_for(item.sharding, item.shape).sizes) * item.dtype.itemsize for item in items)
    assert sum(seen) == sum(shards)


def test_groups_stay_within_the_ceiling(tmp_path, mesh, monkeypatch):
    _, checkpoint = many(tmp_path, 300)
    made = []
    original = small_tensors.Group.__init__

    def init(self, members):
        original(self, members)
        made.append(self.nbytes)

    monkeypatch.setattr(small_tensors.Group, "__init__", init)
    list(stream(items_of(checkpoint, NamedSharding(mesh, P("x"))), max_host_memory=64 << 10))
    assert made
    assert max(made) <= 16 << 10


def test_replicas_share_memory_where_devices_use_the_hosts(tmp_path, mesh):
    _, checkpoint = many(tmp_path, 8)
    for _, array in stream(items_of(checkpoint, NamedSharding(mesh, P()))):
        assert len({shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}) == 1


def test_arrays_of_a_group_share_no_memory_with_what_they_came_from(mesh):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    ((_, array),) = stream([StreamItem("w", values, (8, 8), F32, NamedSharding(mesh, P("x")))])
    values[...] = 0
    np.testing.assert_array_equal(np.asarray(array), np.arange(64, dtype=np.float32).reshape(8, 8))


def test_a_donated_array_leaves_its_neighbours_alone(tmp_path, mesh):
    arrays, checkpoint = many(tmp_path, 40)
    found = dict(stream(items_of(checkpoint, NamedSharding(mesh, P()))))
    scale = jax.jit(lambda x: x * 2, donate_argnums=0)
    for name in list(found)[::2]:
        scale(found.pop(name)).block_until_ready()
    for name, array in found.items():
        np.testing.assert_array_equal(np.asarray(array), arrays[name])


def test_the_tensor_that_cannot_be_read_is_named(tmp_path, mesh):
    """A file whose end is missing: the group's first tensors are fine."""
    _, checkpoint = many(tmp_path, 16)
    path = tmp_path / "m.safetensors"
    items = items_of(checkpoint, NamedSharding(mesh, P()))
    last = max(checkpoint, key=lambda name: checkpoint[name].offset)
    checkpoint[last].leaf.source._stat = (path.stat().st_size - 8, 0, 0)  # as if it had been opened like that
    os.truncate(path, path.stat().st_size - 8)
    status = path.stat()
    checkpoint[last].leaf.source._stat = (status.st_size, status.st_mtime_ns, status.st_ino)
    with pytest.raises(CheckpointError, match=f"'{last}' from tensor '{last}' of .*truncated: expected"):
        list(stream(items))


def test_a_file_that_changes_is_refused(tmp_path, mesh):
    _, checkpoint = many(tmp_path, 16)
    items = items_of(checkpoint, NamedSharding(mesh, P()))
    assert len(dict(stream(items))) == 16  # which opens the file
    path = tmp_path / "m.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        list(stream(items))


def test_a_member_that_fails_is_named(tmp_path, mesh):
    """Not the first of its group."""
    _, checkpoint = many(tmp_path, 4)

    class Broken(FileLeaf):
        def fill_runs(self, *args):
            raise CheckpointError(f"tensor {self.name!r}: broken")

    source = checkpoint["layer_0/w"].leaf.source
    broken = LazyTensor(Broken("bad", source, 1 << 30, (8, 8), F32))
    items = items_of(checkpoint, NamedSharding(mesh, P()))
    items.append(StreamItem("v", broken, (8, 8), F32, NamedSharding(mesh, P())))
    with pytest.raises(CheckpointError, match="'v' from tensor 'bad' of .*: tensor 'bad': broken"):
        list(stream(items))


def test_signalling_nans_keep_their_bits(tmp_path, mesh):
    bits = np.array([0x7F800001, 0xFFC12345] * 32, np.uint32)
    half = np.array([0x7F81, 0xFF82] * 32, np.uint16)
    save_file({"a": bits.view(np.float32), "b": half.view(ml_dtypes.bfloat16)}, tmp_path / "m.safetensors")
    found = dict(stream(items_of(lm.open_checkpoint(tmp_path / "m.safetensors"), NamedSharding(mesh, P("x")))))
    np.testing.assert_array_equal(np.asarray(found["a"]).view(np.uint32), bits)
    np.testing.assert_array_equal(np.asarray(found["b"]).view(np.uint16), half)


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_groups_divide_in_order(mesh, seed):
    rng = random.Random(seed)
    sharding = NamedSharding(mesh, P())
    limit = rng.choice((1 << 10, 1 << 16))
    smalls = []
    for _ in range(rng.randrange(30)):
        size = rng.choice((1, 100, 500, 10_000, 100_000))
        tensor = lazy(np.zeros(size, np.float32)).astype(rng.choice((F32, np.dtype(np.float16))))
        smalls.append(small_tensors.small(tensor, boxes_for(sharding, (size,))))
    numbers = []
    for span, group in small_tensors.groups(smalls, limit):
        numbers += span
        if group is None:
            assert len(span) == 1
            assert smalls[span[0]] is None or smalls[span[0]].nbytes > limit
        else:
            assert group.members == tuple(smalls[number] for number in span)
            assert group.nbytes <= limit
    assert numbers == list(range(len(smalls)))

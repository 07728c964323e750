"""Rows of a file that are spread over shards, by copies out of a map or by the kernel: values, bytes, failures."""

import contextlib
import ctypes
import errno
import math
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._errors import CheckpointError
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors import files
from lazymodel._tensors import fill as fill_module
from lazymodel._tensors.boxes import run_axis, runs_in
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.fill import fill_parts
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import FileLeaf
from lazymodel._tensors.source import BYTES_READ

pytestmark = pytest.mark.skipif(files._READ_VECTOR is None, reason="no preadv in the C library, or 32-bit")

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def mappable(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"12345678" + np.arange(192 * 2048, dtype=np.uint32).tobytes())
    return LazyTensor(FileLeaf("w", FileSource(path), 8, (192, 2048), np.dtype(np.uint32)))


@pytest.fixture
def tensor(mappable):
    with open(mappable.file, "r+b"):  # somebody may write, so there is no lease and no map
        yield mappable


@pytest.fixture
def calls(monkeypatch):
    """Counts the system calls of scattered reads; `calls.answer` may replace one."""

    class Calls(list):
        answer = None

    calls = Calls()
    real = files._READ_VECTOR

    def read(fd, runs, count, position):
        calls.append((count, position))
        answer = calls.answer and calls.answer(len(calls), count)
        if answer is not None and answer < 0:
            ctypes.set_errno(-answer)
            return -1
        return real(fd, runs, count if answer is None else answer, position)

    monkeypatch.setattr(files, "_READ_VECTOR", read)
    return calls


def columns(tensor, count):
    step = tensor.shape[1] // count
    return [(slice(0, tensor.shape[0]), slice(k * step, (k + 1) * step)) for k in range(count)]


def fill(tensor, boxes):
    outs = [np.zeros([s.stop - s.start for s in box], tensor.dtype) for box in boxes]
    for part in fill_parts(tensor, boxes, outs):
        part.run(Workspace(64 << 20))
    return outs


def test_columns_are_scattered_by_the_kernel(tensor, calls):
    values = np.asarray(tensor)
    before = BYTES_READ.count
    for box, out in zip(columns(tensor, 8), fill(tensor, columns(tensor, 8)), strict=True):
        np.testing.assert_array_equal(out, values[box])
    assert BYTES_READ.count - before == tensor.nbytes
    assert sum(count for count, _ in calls[-2:]) == 192 * 8 and len(calls) == 2  # 1024 runs a call


def test_columns_are_copied_out_of_a_map(mappable, calls):
    values = np.asarray(mappable)
    with mappable.leaf.source.mapped() as memory:
        if memory is None:
            pytest.skip("the file system here grants no leases")
    for tensor in (mappable, mappable.astype(np.float32), mappable[1::2]):
        before = BYTES_READ.count
        expected = np.asarray(tensor)
        assert BYTES_READ.count - before == tensor.nbytes
        for box, out in zip(columns(tensor, 8), fill(tensor, columns(tensor, 8)), strict=True):
            np.testing.assert_array_equal(out, expected[box])
        assert BYTES_READ.count - before == 2 * tensor.nbytes
    np.testing.assert_array_equal(np.concatenate(fill(mappable, columns(mappable, 7)), 1), values[:, : 7 * 292])
    assert calls == []
    with open(mappable.file, "r+b") as file:
        file.truncate(8 + 50 * 2048 * 4 + 100)
    with pytest.raises(CheckpointError, match="changed|truncated"):
        fill(mappable, columns(mappable, 8))


def test_short_rows_conversions_and_little_memory_are_staged(tensor, calls):
    values = np.asarray(tensor)
    for box, out in zip(columns(tensor, 64), fill(tensor, columns(tensor, 64)), strict=True):  # 128 bytes
        np.testing.assert_array_equal(out, values[box])
    cast = tensor.astype(np.float32)
    for box, out in zip(columns(cast, 8), fill(cast, columns(cast, 8)), strict=True):
        np.testing.assert_array_equal(out, values[box].astype(np.float32))
    outs = [np.zeros((192, 256), np.uint32) for _ in range(8)]
    for part in fill_parts(tensor, columns(tensor, 8), outs):
        part.run(Workspace(100_000))
    np.testing.assert_array_equal(np.concatenate(outs, 1), values)
    assert calls == []


def test_reads_go_on_after_a_short_or_interrupted_one(tensor, calls):
    calls.answer = lambda call, count: {1: 5, 2: -errno.EINTR}.get(call)
    np.testing.assert_array_equal(np.concatenate(fill(tensor, columns(tensor, 8)), 1), np.asarray(tensor))
    assert [position for _, position in calls[:3]] == [8, 8 + 5 * 1024, 8 + 5 * 1024]


def test_reads_go_on_within_a_run(tensor, monkeypatch):
    real, rest = files._READ_VECTOR, [700, 300, 24, 1000]

    def read(fd, runs, count, position):
        if rest:  # one run, and only the first bytes of it
            first = np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(runs)).copy()
            first[1] = min(first[1], rest.pop(0))
            return real(fd, first.ctypes.data, 1, position)
        return real(fd, runs, count, position)

    monkeypatch.setattr(files, "_READ_VECTOR", read)
    np.testing.assert_array_equal(np.concatenate(fill(tensor, columns(tensor, 8)), 1), np.asarray(tensor))


def test_an_error_of_the_system_names_the_tensor_and_the_file(tensor, calls):
    calls.answer = lambda call, count: -errno.EIO
    with pytest.raises(CheckpointError, match=r"weights\.bin at byte 8: Input/output error"):
        fill(tensor, columns(tensor, 8))


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tensor):
    tensor[:1].read()  # opens it
    with open(tensor.file, "r+b") as file:
        file.truncate(8 + 50 * 2048 * 4 + 100)
    with pytest.raises(CheckpointError, match="truncated"):
        fill(tensor, columns(tensor, 8))


def test_only_regular_files_are_sources(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match=rf"{path.name}: expected a regular file"):
            FileSource(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_runs_are_where_the_elements_are(data):
    """Against NumPy: every element of the box is in the run that begins at or before it, at the same distance."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), label="region"))
    box = []
    for extent in shape:
        start = data.draw(st.integers(0, extent - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, extent))))
    order = data.draw(st.permutations(range(len(shape))))
    extents = [s.stop - s.start for s in box]
    out = np.zeros([extents[axis] for axis in order], np.uint16).transpose(np.argsort(order))
    out[...] = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)[tuple(box)]
    region = tuple(slice(7, 7 + extent) for extent in shape)
    starts, runs = runs_in(region, tuple(slice(s.start + 7, s.stop + 7) for s in box), out)
    assert runs[:, 1].sum() == out.nbytes
    found = []
    for start, (address, length) in zip(starts, runs, strict=True):
        memory = np.ctypeslib.as_array((ctypes.c_uint16 * (int(length) // 2)).from_address(int(address)))
        np.testing.assert_array_equal(memory, start // 2 + np.arange(int(length) // 2))
        found += list(memory)
    assert sorted(found) == sorted(out.ravel())


def test_run_axis_counts_only_what_is_contiguous_on_both_sides():
    region = (slice(0, 4), slice(0, 6), slice(0, 8))
    whole = np.zeros((4, 6, 8), np.uint8)
    assert run_axis(region, region, whole) == 0
    assert run_axis(region, (slice(0, 4), slice(0, 3), slice(0, 8)), whole[:, :3].copy()) == 1
    assert run_axis(region, region, np.zeros((4, 6, 16), np.uint8)[..., :8]) == 2
    assert run_axis(region, region, np.zeros((4, 6, 16), np.uint8)[..., ::2]) == 3


@pytest.mark.parametrize("spec", [(None, "x"), (None, "x", None), (None, None, "x"), ("x", None, "y"), ("y", "x")])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("written", [False, True], ids=["quiet", "open for writing"])
def test_streams_of_column_shards_are_slices(tmp_path, spec, transposed, written, monkeypatch):
    used = []
    real = fill_module._scatter_runs
    monkeypatch.setattr(fill_module, "_scatter_runs", lambda *args: used.append(real(*args)) or used[-1])
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 2**14, 24 * 16 * 2048, np.uint16).tobytes())
    shape = (24, 16, 2048) if len(spec) == 3 else (24 * 16, 2048)
    tensor = LazyTensor(FileLeaf("w", FileSource(path), 0, shape, BF16))
    if transposed:
        tensor, spec = tensor.transpose(), spec[::-1] if len(spec) == len(shape) else (None, *spec[::-1])
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    with open(path, "r+b") if written else contextlib.nullcontext():
        ((_, array),) = stream([StreamItem("w", tensor, tensor.shape, BF16, sharding)])
    np.testing.assert_array_equal(np.asarray(array).view(np.uint16), np.asarray(tensor).view(np.uint16))
    assert not transposed or not any(used)

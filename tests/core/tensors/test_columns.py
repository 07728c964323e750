"""Columns of matrices are spread over devices in one pass over the file, by whichever means the system has."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._tensors import byte_reader
from tests.large import examples
from tests.small import buffer_sizes

SHAPE = (192, 2048)
NBYTES = 192 * 2048 * 4
VALUES = np.arange(192 * 2048, dtype=np.uint32).reshape(SHAPE)


def load(file: Path, mesh: Mesh, dtype: Any = np.uint32, *, written: bool = True, **options: Any) -> np.ndarray:
    """Columns of `w` on each device. A file that is open for writing has no lease, and so no map."""
    model = lm.build_abstract(lambda: {"w": jnp.zeros(SHAPE, dtype)}).shard(mesh, {"w": PartitionSpec(None, "model")})
    with lm.open_checkpoint(file) as checkpoint, open(file, "r+b") if written else contextlib.nullcontext():
        array = model.materialize(checkpoint, **options)["w"]
        assert checkpoint.bytes_read == NBYTES
    return np.asarray(array)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"w": VALUES}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


class Calls(list[int]):
    """Counts the runs of each system call; `answer` may replace a number of runs or be an error."""

    answer: Callable[[int, int], int | None] = staticmethod(lambda call, count: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls, real = Calls(), byte_reader._READ_VECTOR

    def read(fd: int, runs: int, count: int, position: int) -> int:
        calls.append(count)
        answer = calls.answer(len(calls), count)
        if answer is not None and answer < 0:
            ctypes.set_errno(-answer)
            return -1
        return real(fd, runs, count if answer is None else answer, position)

    monkeypatch.setattr(byte_reader, "_READ_VECTOR", read)
    return calls


def test_the_kernel_scatters_long_runs(file: Path, mesh8: Mesh, calls: Calls) -> None:
    np.testing.assert_array_equal(load(file, mesh8), VALUES)
    assert calls == [1024, 192 * 8 - 1024]  # 1024 runs a call


def test_runs_are_copied_out_of_a_map(file: Path, mesh8: Mesh, calls: Calls) -> None:
    with open(file, "rb") as opened:
        try:
            fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            pytest.skip("the file system here grants no leases")
    np.testing.assert_array_equal(load(file, mesh8, written=False), VALUES)
    np.testing.assert_array_equal(load(file, mesh8, np.float32, written=False), VALUES.astype(np.float32))
    assert set(calls) <= {1} and len(calls) <= 8, calls  # few contiguous reads: nothing is scattered


@pytest.mark.parametrize(("dtype", "budget"), [(np.float32, None), (np.uint32, 2_200_000)])
def test_conversions_and_little_memory_are_staged(
    dtype: Any, budget: int | None, file: Path, mesh8: Mesh, calls: Calls
) -> None:
    np.testing.assert_array_equal(load(file, mesh8, dtype, max_host_memory=budget), VALUES.astype(dtype))
    assert set(calls) <= {1} and len(calls) <= 8, calls  # few contiguous reads: nothing is scattered


def test_reads_go_on_after_a_short_or_interrupted_one(file: Path, mesh8: Mesh, calls: Calls) -> None:
    calls.answer = lambda call, count: {1: 5, 2: -errno.EINTR}.get(call)
    np.testing.assert_array_equal(load(file, mesh8), VALUES)
    assert calls[:3] == [1024] * 3


def test_reads_go_on_within_a_run(file: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = byte_reader._READ_VECTOR
    rest = [700, 300, 24, 1000]

    def read(fd: int, runs: int, count: int, position: int) -> int:
        if rest:  # one run, and only the first bytes of it
            first = np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(runs)).copy()
            first[1] = min(first[1], rest.pop(0))
            return real(fd, first.ctypes.data, 1, position)
        return real(fd, runs, count, position)

    monkeypatch.setattr(byte_reader, "_READ_VECTOR", read)
    np.testing.assert_array_equal(load(file, mesh8), VALUES)


def test_an_error_of_the_system_names_the_tensor_and_the_file(file: Path, mesh8: Mesh, calls: Calls) -> None:
    calls.answer = lambda call, count: -errno.EIO
    with pytest.raises(lm.CheckpointError, match=r"'w'.*m\.safetensors at byte \d+: Input/output error"):
        load(file, mesh8)


@pytest.mark.parametrize("written", [False, True])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(written: bool, file: Path, mesh8: Mesh) -> None:
    model = lm.build_abstract(lambda: {"w": jnp.zeros(SHAPE, np.uint32)})
    checkpoint = lm.open_checkpoint(file)
    checkpoint["w"][:1].read()  # opens it
    with open(file, "r+b") as stream:
        stream.truncate(50 * 2048 * 4 + 100)
    error = pytest.raises(lm.CheckpointError, match=r"m\.safetensors (changed|is truncated)")
    with open(file, "r+b") if written else contextlib.nullcontext(), error:
        model.shard(mesh8, {"w": PartitionSpec(None, "model")}).materialize(checkpoint)


@examples(10, 60, data=st.data())
def test_any_columns_are_numpys(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of any shape, view, dtype and sharding, with short runs taken for long ones and little prepared at a time."""
    shapes = st.lists(st.sampled_from([1, 2, 6, 8, 16, 24]), min_size=2, max_size=4).map(tuple)
    shape = data.draw(shapes.filter(lambda shape: np.prod(shape) <= 8192))
    stored = data.draw(st.sampled_from([np.uint16, np.float32, ml_dtypes.bfloat16]))
    values = np.random.default_rng(0).integers(0, 200, shape).astype(stored)
    file = tmp_path_factory.mktemp("columns") / "m.safetensors"
    save_file({"w": values}, file)
    order = data.draw(st.permutations(range(len(shape))))
    expected = values.transpose(order).astype(data.draw(st.sampled_from([stored, np.float32])))
    axes = data.draw(st.permutations(["x", "y", None, None][: len(shape)]))
    sizes = {"x": 2, "y": 4, None: 1}
    spec = [axis if n % sizes[axis] == 0 else None for axis, n in zip(axes, expected.shape, strict=True)]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    model = lm.build_abstract(lambda: {"w": jnp.zeros(expected.shape, expected.dtype)})
    model = model.shard(mesh, {"w": PartitionSpec(*spec)})
    sizes = {"runs": data.draw(st.sampled_from([2, 1 << 15])), "part": data.draw(st.sampled_from([64, 32 << 20]))}
    with buffer_sizes(run=2, **sizes), lm.open_checkpoint(file) as checkpoint:
        mapped = lm.map_checkpoint(checkpoint, lambda weights: {"w": np.transpose(weights["w"], order)})
        with open(file, "r+b") if data.draw(st.booleans()) else contextlib.nullcontext():
            array = model.materialize(mapped)["w"]
        assert checkpoint.bytes_read == values.nbytes
    np.testing.assert_array_equal(np.asarray(array, np.float32), expected.astype(np.float32))

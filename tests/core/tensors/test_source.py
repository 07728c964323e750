"""A source is anything that fills arrays with bytes from an offset on: all else works on top of that."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lazymodel as lm
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors import files
from lazymodel._tensors.boxes import Geometry
from lazymodel._tensors.buffers import Convert, Workspace
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import FileLeaf
from lazymodel._tensors.source import Source


class Elsewhere(Source):
    """Bytes that no file system has, such as an object in a bucket."""

    def __init__(self, data: bytes) -> None:
        super().__init__("memory://weights")
        self.data = data
        self.calls: list[tuple[int, int]] = []

    def check_unchanged(self) -> None:
        pass

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        nbytes = sum(out.nbytes for out in outs)
        self.calls.append((offset, nbytes))
        if offset + nbytes > len(self.data):
            raise lm.CheckpointError(f"{self.path} is truncated")
        for out in outs:
            out.reshape(-1).view(np.uint8)[:] = np.frombuffer(self.data, np.uint8, out.nbytes, offset)
            offset += out.nbytes
        self.count(nbytes)


VALUES = np.random.default_rng(0).standard_normal((256, 384)).astype(np.float32)


def tensor(offset: int = 8) -> tuple[LazyTensor, Elsewhere]:
    source = Elsewhere(bytes(8) + VALUES.tobytes())
    return LazyTensor(FileLeaf("w", source, offset, VALUES.shape, VALUES.dtype)), source


@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()])
@pytest.mark.parametrize("transposed", [False, True])
def test_shards_are_slices_and_every_byte_is_read_once(
    mesh8: Mesh, spec: tuple[str | None, ...], transposed: bool
) -> None:
    lazily, source = tensor()
    expected = VALUES
    if transposed:
        lazily, expected = lazily.T, VALUES.T
    sharding = NamedSharding(Mesh(mesh8.devices.reshape(-1), ("x",)), PartitionSpec(*spec))
    ((_, array),) = stream([StreamItem("w", lazily, lazily.shape, VALUES.dtype, sharding)])
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    assert source.bytes_read == VALUES.nbytes
    jax.block_until_ready(array)


def test_gaps_are_read_where_that_is_cheaper_than_another_call() -> None:
    lazily, source = tensor()
    gap = 374 * 4
    for allowed, calls, nbytes in ((gap, 256, 256 * 40), (gap + 1, 1, 255 * 384 * 4 + 40)):
        source.row_gap, source.calls = allowed, []
        np.testing.assert_array_equal(lazily[:, 3:13].read(), VALUES[:, 3:13])
        assert (len(source.calls), sum(n for _, n in source.calls)) == (calls, nbytes)
    source.row_call, source.calls = 40, []
    lazily[:, 3:13].read()
    assert len(source.calls) == 256


def test_an_error_names_the_tensor() -> None:
    lazily, _ = tensor(offset=12)
    with pytest.raises(lm.CheckpointError, match="tensor 'w': memory://weights is truncated"):
        lazily.read()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_strided_box_is_numpys(data: st.DataObject) -> None:
    """Whatever is converted on the way, however the target lies, however little room there is."""
    source = Elsewhere(np.random.default_rng(1).integers(0, 100, 1 << 14, np.uint8).tobytes())
    source.row_gap = data.draw(st.sampled_from([1, 8, 1 << 14]))
    source.row_call = data.draw(st.sampled_from([4, 64, 1 << 16]))
    dtype = np.dtype(data.draw(st.sampled_from([np.uint8, np.int16, np.int32])))
    shape, strides = [], []
    stride = dtype.itemsize
    for _ in range(data.draw(st.integers(0, 3))):
        stride *= data.draw(st.integers(1, 3))
        extent = data.draw(st.integers(2, 5))
        shape.insert(0, extent)
        strides.insert(0, stride)
        stride *= extent
    place = Geometry(data.draw(st.integers(0, 100)), tuple(shape), tuple(strides))
    expected = np.ndarray(place.shape, dtype, source.data, place.start, place.strides)
    steps = data.draw(st.sampled_from([(), (Convert(np.dtype(np.float64)),)]))
    order = data.draw(st.permutations(range(len(shape))))
    out = np.zeros([shape[axis] for axis in order], steps[-1].dtype if steps else dtype).transpose(np.argsort(order))
    source.read_strided(place, dtype, out, steps, Workspace(data.draw(st.sampled_from([0, 64, 1 << 20]))))
    np.testing.assert_array_equal(out, expected.astype(out.dtype))


@pytest.mark.parametrize("shape", [(6, 40), (5, 3, 700)])
def test_files_are_read_alike_where_the_system_has_no_vectored_read(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    path = tmp_path / "w"
    path.write_bytes(values.tobytes())
    monkeypatch.setattr(files, "_PREADV", files._read_first)
    monkeypatch.setattr(files, "_READ_VECTOR", None)
    monkeypatch.setattr(files, "READ", 1000)  # bytes of a call
    source = FileSource(path)
    source._mappable, source.row_call = False, 4
    assert not source.scatters
    first, second = np.empty(7, np.int32), np.empty(values.size - 7, np.int32)
    source.read_into(0, first, second)
    np.testing.assert_array_equal(np.concatenate([first, second]), values.reshape(-1))
    part = LazyTensor(FileLeaf("w", source, 0, shape, values.dtype))[..., 1:9]
    np.testing.assert_array_equal(part.read(), values[..., 1:9])
    with pytest.raises(lm.CheckpointError, match="truncated: expected 8 bytes from byte"):
        source.read_into(values.nbytes - 4, np.empty(2, np.int32))

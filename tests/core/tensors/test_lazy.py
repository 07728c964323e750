"""Lazy tensors: views cost nothing, reads take the fewest bytes, values are NumPy's own."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazymodel._errors import CheckpointError
from lazymodel._tensors import files, fill
from lazymodel._tensors import lazy as lazy_module
from lazymodel._tensors import source as source_module
from lazymodel._tensors.buffers import Workspace, empty_aligned
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.fill import fill_parts
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.leaves import FileLeaf

DTYPES = [np.float32, np.float16, np.int8, np.uint16, np.bool_, np.complex64, np.float64]
ML_DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def make(folder, array, offset=24, name="w", source_dtype=None):
    """A file with some bytes before and after the array's, and the lazy tensor of it."""
    path = folder / "tensor.bin"
    path.write_bytes(b"\1" * offset + array.tobytes() + b"\2" * 16)
    return LazyTensor(FileLeaf(name, FileSource(path), offset, array.shape, array.dtype))


def bytes_read(tensor):
    leaf = tensor.leaf
    while not isinstance(leaf, FileLeaf):
        leaf = leaf.pieces[0].leaf
    return leaf.source.bytes_read


def numbers(shape, dtype=np.float32):
    values = np.arange(1, math.prod(shape) + 1).reshape(shape) % 200
    return (values % 2).astype(dtype) if dtype == np.bool_ else values.astype(dtype)


VIEWS = {
    "index": lambda x: x[1],
    "slice": lambda x: x[:, 1:3],
    "negative step": lambda x: x[::-1, ::-2],
    "ellipsis": lambda x: x[..., 0],
    "newaxis": lambda x: x[:, None],
    "all ints": lambda x: x[1, 2, 3],
    "T": lambda x: x.T,
    "transpose": lambda x: np.transpose(x, (2, 0, 1)),
    "method transpose": lambda x: x.transpose(1, 2, 0),
    "swapaxes": lambda x: np.swapaxes(x, 0, 1),
    "moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "expand_dims": lambda x: np.expand_dims(x, 1),
    "squeeze": lambda x: np.squeeze(np.expand_dims(x, 1)),
    "reshape": lambda x: np.reshape(x, (-1, 8)),
    "reshape of a transpose": lambda x: np.reshape(x.T, (4, 48)),
    "ravel": lambda x: np.ravel(x),
    "ravel of a transpose": lambda x: x.T.ravel(),
    "split": lambda x: np.split(x, 2, axis=2)[1],
    "array_split": lambda x: np.array_split(x, 3, axis=1)[2],
    "flip": lambda x: np.flip(x, 1),
    "broadcast_to": lambda x: np.broadcast_to(x[:, :1], (4, 6, 8)),
    "broadcast of a slice": lambda x: np.broadcast_to(x[:1, :, :1], (5, 6, 7)),
    "concatenate": lambda x: np.concatenate([x, x[:, ::-1]], axis=0),
    "stack": lambda x: np.stack([x.T, x.T], axis=1),
    "slice of a stack": lambda x: np.stack([x[0], x[1], x[2]], axis=0)[1:, :, ::2].T,
    "reshape of a stack": lambda x: np.reshape(np.stack([x, x], axis=0), (8, 48)),
    "strided reshape of a stack": lambda x: np.reshape(np.stack([x, x], axis=0), (96, 4))[5:50:3],
    "copy": lambda x: np.copy(x),
    "concatenate with an array": lambda x: np.concatenate([x, np.ones((4, 6, 8), np.float32)]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_read_nothing_and_mean_what_numpy_means(tmp_path, view):
    array = numbers((4, 6, 8))
    tensor = make(tmp_path, array)
    result, expected = view(tensor), view(array)
    assert isinstance(result, LazyTensor)
    assert bytes_read(tensor) == 0
    assert (result.shape, result.dtype, result.ndim, result.size) == (
        expected.shape,
        expected.dtype,
        expected.ndim,
        expected.size,
    )
    assert result.nbytes == expected.nbytes
    np.testing.assert_array_equal(result.read(), expected)
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_split_of_a_transpose_s_last_axis_stays_a_view(tmp_path):
    array = numbers((16, 12))
    tensor = np.reshape(np.transpose(make(tmp_path, array)), (12, 4, 4))
    assert isinstance(tensor.leaf, FileLeaf)
    np.testing.assert_array_equal(
        tensor.read((slice(0, 12), slice(1, 2), slice(0, 4))), array.T.reshape(12, 4, 4)[:, 1:2]
    )
    assert bytes_read(tensor) == 4 * 12 * 4


def test_reshape_of_a_transpose_reads_only_the_needed_box(tmp_path):
    array = numbers((64, 4, 32))  # hidden, heads, dim → (heads · dim, hidden)
    tensor = np.reshape(np.transpose(make(tmp_path, array), (1, 2, 0)), (128, 64))
    box = (slice(32, 64), slice(16, 32))
    np.testing.assert_array_equal(tensor.read(box), array.transpose(1, 2, 0).reshape(128, 64)[box])
    assert bytes_read(tensor) == 16 * 32 * 4


def without_maps(patch):
    """As on a file system that grants no lease."""
    patch.setattr(files.fcntl, "F_SETLEASE", -1)


def test_concatenation_reads_only_the_pieces_that_a_box_touches(tmp_path):
    array = numbers((8, 4, 4))
    tensor = make(tmp_path, array)
    stacked = np.stack([tensor[expert].T for expert in range(8)])
    box = (slice(2, 4), slice(0, 4), slice(0, 4))
    np.testing.assert_array_equal(stacked.read(box), array.transpose(0, 2, 1)[box])
    assert bytes_read(tensor) == 2 * 16 * 4


@pytest.mark.parametrize("dtype", [*DTYPES, *ML_DTYPES])
def test_every_dtype_reads_back_as_it_was(tmp_path, dtype):
    array = numbers((5, 7), np.dtype(dtype))
    tensor = make(tmp_path, array)
    result = tensor.T.read()
    assert result.dtype == np.dtype(dtype)
    assert result.tobytes() == array.T.tobytes()
    assert tensor.read((slice(1, 4), slice(2, 5))).tobytes() == array[1:4, 2:5].tobytes()


@pytest.mark.parametrize("source", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int32, ">f4"])
@pytest.mark.parametrize("target", [np.float32, ml_dtypes.bfloat16, np.float16, np.int8, ml_dtypes.float8_e4m3fn])
def test_astype_is_deferred_and_bit_equal(tmp_path, source, target):
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        special = np.array([0, -0.0, 1e-40, 65504, 3.3895e38, np.inf, -np.inf, np.nan])
        values = special if np.dtype(source).kind != "i" else np.arange(8)
        array = np.concatenate([rng.standard_normal(1000) * 50, values]).astype(source).reshape(4, 252)
        expected = array.astype(target)
        tensor = make(tmp_path, array).astype(target)
        assert bytes_read(tensor) == 0
        assert tensor.dtype == np.dtype(target)
        assert tensor.read().tobytes() == expected.tobytes()
        assert tensor.T.astype(np.float64).read().tobytes() == expected.T.astype(np.float64).tobytes()


def test_big_endian_files_give_native_arrays(tmp_path):
    array = numbers((3, 4)).astype(">f4")
    tensor = make(tmp_path, array)
    assert tensor.dtype == np.dtype("=f4")
    assert tensor.read().dtype.isnative
    np.testing.assert_array_equal(tensor[:, ::2].read(), array[:, ::2])


def test_view_as_other_bits(tmp_path):
    array = numbers((3, 4))
    tensor = make(tmp_path, array)
    np.testing.assert_array_equal(tensor.view(np.int32).T.read(), array.view(np.int32).T)
    np.testing.assert_array_equal(tensor.view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool", ml_dtypes.bfloat16])
def test_arithmetic_with_scalars_reads_nothing_and_is_numpys_bit_for_bit(tmp_path, dtype):
    rng = np.random.default_rng(0)
    array = (rng.standard_normal((300, 250)) * 50).astype(dtype)  # more than is converted at a time
    tensor = make(tmp_path, array)
    cases = [
        lambda w: w * 0.3,
        lambda w: 2 - w[3:9, ::-1],
        lambda w: (w.T / 3 + 1).astype("float32") * np.float32(0.1),
        lambda w: np.multiply(np.float64(1.1), w),
        lambda w: (w + True)[7, 7],
    ]
    with np.errstate(all="ignore"):
        for case in cases:
            try:
                expected = case(array)
            except TypeError:  # NumPy has no minus for bool
                with pytest.raises(TypeError):
                    case(tensor)
                continue
            before = bytes_read(tensor)
            result = case(tensor)
            assert isinstance(result, LazyTensor) and bytes_read(tensor) == before
            assert result.dtype == expected.dtype and result.shape == expected.shape
            assert result.read().tobytes() == np.ascontiguousarray(expected).tobytes()
    if array.dtype.kind in "iu":
        with pytest.raises(OverflowError):
            tensor + 1000


def test_arithmetic_and_other_functions_read_this_tensor_only(tmp_path):
    array = numbers((4, 6))
    tensor = make(tmp_path, array)
    for result, expected in [
        (tensor + array, array + array),
        (tensor**2, array**2),
        (tensor * 1j, array * 1j),
        (np.add.reduce(tensor), array.sum(0)),
        (np.where(tensor > 3, tensor, 0), np.where(array > 3, array, 0)),
        (np.linalg.norm(tensor), np.linalg.norm(array)),
        (np.einsum("ij->ji", tensor), array.T),
        (tensor[[0, 2]], array[[0, 2]]),
        (tensor[tensor > 3], array[array > 3]),
        (tensor.sum(axis=1), array.sum(axis=1)),
        (np.reshape(tensor, (6, 4), order="F"), array.reshape((6, 4), order="F")),
        (np.concatenate([tensor, tensor], axis=None), np.concatenate([array, array], axis=None)),
        (tensor @ array.T, array @ array.T),
    ]:
        assert isinstance(result, (np.ndarray, np.generic))
        np.testing.assert_array_equal(result, expected)
    assert float(tensor[0, 0]) == 1.0
    assert int(tensor[1, 1]) == int(array[1, 1])
    assert bool(tensor[0, 0])
    assert [row.shape for row in tensor] == [(6,)] * 4
    assert len(tensor) == 4
    np.testing.assert_array_equal(jnp.asarray(tensor), array)


def test_shape_queries_read_nothing(tmp_path):
    tensor = make(tmp_path, numbers((4, 6)))
    assert (np.shape(tensor), np.ndim(tensor), np.size(tensor)) == ((4, 6), 2, 24)
    assert not hasattr(tensor, "numpy")
    assert repr(tensor).startswith("LazyTensor('w', float32[4, 6] in ")
    assert bytes_read(tensor) == 0


def test_errors_are_numpys(tmp_path):
    tensor = make(tmp_path, numbers((4, 6)))
    with pytest.raises(IndexError):
        tensor[9]
    with pytest.raises(ValueError, match="reshape"):
        tensor.reshape(5, 5)
    with pytest.raises(ValueError, match="dimension"):
        np.concatenate([tensor, np.ones((2, 5))])
    with pytest.raises(TypeError):
        len(tensor[0, 0])
    with pytest.raises(TypeError):
        tensor[0] = 1
    with pytest.raises(ValueError, match="always a copy"):
        np.asarray(tensor, copy=False)
    with pytest.raises(ValueError, match="range of step 1"):
        tensor.read((slice(0, 9), slice(0, 6)))


def test_read_owns_aligned_memory(tmp_path):
    tensor = make(tmp_path, numbers((4, 6)))
    one, other = tensor.read(), tensor.read()
    assert one.ctypes.data % 64 == 0
    assert one.flags.c_contiguous
    assert one.flags.writeable
    assert not np.shares_memory(one, other)
    before = one.copy()
    path = tensor.file
    with open(path, "r+b") as file:
        file.write(b"\xff" * 200)
    np.testing.assert_array_equal(one, before)


def test_empty_and_scalar_tensors(tmp_path):
    assert make(tmp_path, numbers((0, 3))).T.read().shape == (3, 0)
    assert make(tmp_path, numbers((3, 4)))[1:1].read().shape == (0, 4)
    scalar = make(tmp_path, np.array(7, np.int32))
    assert scalar.read() == 7
    assert scalar.astype(np.float32).reshape(1, 1).read().tolist() == [[7.0]]
    assert np.stack([scalar, scalar]).read().tolist() == [7, 7]


def test_rows_cost_only_themselves(tmp_path):
    array = numbers((64, 1024))
    for width in (1, 16, 255, 1024):
        tensor = make(tmp_path, array)
        np.testing.assert_array_equal(tensor.read((slice(0, 64), slice(0, width))), array[:, :width])
        assert bytes_read(tensor) == 64 * width * 4


def test_without_maps_far_rows_are_read_one_by_one_and_near_ones_together(tmp_path, monkeypatch):
    without_maps(monkeypatch)
    array = numbers((16, 16384))  # rows of 64 KiB
    tensor = make(tmp_path, array)
    tensor.read((slice(0, 16), slice(0, 1024)))
    assert bytes_read(tensor) == 16 * 4096  # gaps of 60 KiB: only what is needed
    tensor = make(tmp_path, array)
    np.testing.assert_array_equal(tensor.read((slice(0, 16), slice(100, 14000))), array[:, 100:14000])
    assert bytes_read(tensor) == 15 * 65536 + 13900 * 4  # gaps below 16 KiB: one span


def test_boxes_that_tile_a_region_are_read_in_one_pass(tmp_path):
    array = numbers((64, 64))
    tensor = make(tmp_path, array).T
    boxes = [(slice(0, 64), slice(start, start + 8)) for start in range(0, 64, 8)]
    boxes = [(box[1], box[0]) for box in boxes]  # columns in the file
    outs = [empty_aligned((8, 64), np.dtype(np.float32)) for _ in boxes]
    for part in fill_parts(tensor, boxes, outs):
        part.run(Workspace(1 << 20))
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, array.T[box])
    assert bytes_read(tensor) == array.nbytes


def test_truncated_and_changed_files_are_errors_that_name_them(tmp_path):
    array = numbers((4, 6))
    tensor = make(tmp_path, array)
    short = LazyTensor(FileLeaf("w", tensor.leaf.source, 1000, (4, 6), array.dtype))
    with pytest.raises(
        CheckpointError, match=r"'w'.*tensor\.bin is truncated: expected 96 bytes from byte 1000, found 0"
    ):
        short.read()
    tensor.read()
    with open(tensor.file, "ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"tensor\.bin changed while it was being read"):
        tensor.read()
    with pytest.raises(CheckpointError, match=r"cannot open .*absent\.bin"):
        FileSource(tmp_path / "absent.bin")


@pytest.fixture(scope="module")
def property_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("property") / "bytes.bin"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 15))
    return FileSource(path)


def _slices(draw, extent):
    start = draw(st.integers(0, max(extent - 1, 0)))
    stop = draw(st.integers(start, extent))
    step = draw(st.sampled_from([1, 1, 2, 3]))
    part = slice(start, stop, step)
    return slice(None, None, -1) if draw(st.integers(0, 9)) == 0 else part


@st.composite
def view_chain(draw, ndim_max=4):
    """A shape, a dtype, and a function that applies a chain of views to an array or a lazy tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=ndim_max)))
    dtype = np.dtype(draw(st.sampled_from([np.uint8, np.int16, np.float32, ml_dtypes.bfloat16, np.int64])))
    current = np.zeros(shape)
    steps = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "transpose", "reshape", "stack", "concatenate", "broadcast", "newaxis"]))
        if kind == "slice":
            index = tuple(_slices(draw, extent) for extent in current.shape)
            step = lambda x, index=index: x[index]  # noqa: E731
        elif kind == "transpose":
            axes = draw(st.permutations(range(current.ndim)))
            step = lambda x, axes=axes: np.transpose(x, axes)  # noqa: E731
        elif kind == "reshape":
            divisors = [n for n in range(1, current.size + 1) if current.size % n == 0] or [1]
            first = draw(st.sampled_from(divisors))
            target = (first, current.size // first) if current.size else current.shape
            step = lambda x, target=target: np.reshape(x, target)  # noqa: E731
        elif kind == "stack":
            axis = draw(st.integers(0, current.ndim))
            step = lambda x, axis=axis: np.stack([x, x], axis)  # noqa: E731
        elif kind == "concatenate" and current.ndim:
            axis = draw(st.integers(0, current.ndim - 1))
            step = lambda x, axis=axis: np.concatenate([x, np.flip(x, axis)], axis)  # noqa: E731
        elif kind == "broadcast":
            step = lambda x: np.broadcast_to(x, (2, *x.shape))  # noqa: E731
        else:
            step = lambda x: x[..., None]  # noqa: E731
        if step(current).size > 4096 or step(current).ndim > 8:
            continue
        current = step(current)
        steps.append(step)

    def chain(x):
        for step in steps:
            x = step(x)
        return x

    return shape, dtype, chain


@settings(max_examples=300, deadline=None)
@given(view_chain(), st.data(), st.booleans())
def test_any_box_of_any_view_chain_is_numpys(property_file, chained, data, cast):
    shape, dtype, chain = chained
    raw = np.fromfile(property_file.path, np.uint8)[8 : 8 + math.prod(shape) * dtype.itemsize]
    array = raw.view(dtype).reshape(shape)
    tensor = chain(LazyTensor(FileLeaf("t", property_file, 8, shape, dtype)))
    expected = chain(array)
    if cast:
        with np.errstate(all="ignore"):
            tensor, expected = tensor.astype(np.float16), expected.astype(np.float16)
    box = []
    for extent in expected.shape:
        start = data.draw(st.integers(0, extent))
        box.append(slice(start, data.draw(st.integers(start, extent))))
    result = tensor.read(tuple(box))
    assert result.shape == expected[tuple(box)].shape
    assert result.tobytes() == np.ascontiguousarray(expected[tuple(box)]).tobytes()


@settings(max_examples=100, deadline=None)
@given(view_chain(), st.data())
def test_small_staging_gives_the_same_values(property_file, chained, data):
    shape, dtype, chain = chained
    raw = np.fromfile(property_file.path, np.uint8)[8 : 8 + math.prod(shape) * dtype.itemsize]
    expected = chain(raw.view(dtype).reshape(shape))
    with pytest.MonkeyPatch.context() as patch:
        for module in (source_module, fill):
            patch.setattr(module, "STAGING", data.draw(st.sampled_from([16, 64])))
        patch.setattr(FileSource, "row_gap", data.draw(st.sampled_from([4, 1024])))
        patch.setattr(FileSource, "row_call", data.draw(st.sampled_from([8, 1 << 16])))
        patch.setattr(source_module, "MAP_BLOCK", 64)
        patch.setattr(fill, "PART", 128)
        patch.setattr(lazy_module, "READ_WORKSPACE", data.draw(st.sampled_from([0, 64, 1000])))
        if data.draw(st.booleans()):
            without_maps(patch)
        tensor = chain(LazyTensor(FileLeaf("t", property_file, 8, shape, dtype)))
        assert tensor.read().tobytes() == np.ascontiguousarray(expected).tobytes()


def test_arrays_in_memory_go_the_same_way():
    array = numbers((4, 6))
    tensor = lazy(array)
    result = np.stack([tensor, tensor.T.reshape(4, 6)]).read()
    np.testing.assert_array_equal(result, np.stack([array, array.T.reshape(4, 6)]))
    assert not np.shares_memory(tensor.read(), array)

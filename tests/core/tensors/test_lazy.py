"""Lazy tensors: views cost nothing, reads take the fewest bytes, values are NumPy's own."""

import fcntl
import gc
import math
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.large import examples
from tests.private_memory import private_nbytes
from tests.small import buffer_sizes


def make(folder, array):
    """A checkpoint with one tensor, `w`, and that."""
    if array.dtype.isnative:
        save_file({"w": array}, folder / "w.safetensors")
        checkpoint = lm.open_checkpoint(folder / "w.safetensors")
    else:
        np.save(folder / "w.npy", array)
        checkpoint = lm.open_checkpoint(folder / "w.npy")
    return checkpoint, checkpoint["w"]


def numbers(shape, dtype=np.float32):
    return (np.arange(1, math.prod(shape) + 1).reshape(shape) % 200).astype(dtype)


def same(tensor, expected):
    assert isinstance(tensor, lm.LazyTensor)
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    assert tensor.read().tobytes() == np.ascontiguousarray(expected).tobytes()


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
    "bits": lambda x: x.view(np.int32).T,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_read_nothing_and_mean_what_numpy_means(tmp_path, view):
    array = numbers((4, 6, 8))
    checkpoint, tensor = make(tmp_path, array)
    result, expected = view(tensor), view(array)
    assert (result.ndim, result.size, result.nbytes) == (expected.ndim, expected.size, expected.nbytes)
    assert (np.shape(result), np.ndim(result), np.size(result)) == (expected.shape, expected.ndim, expected.size)
    assert not hasattr(result, "numpy")
    assert repr(tensor).startswith("LazyTensor('w', float32[4, 6, 8] in ")
    assert checkpoint.bytes_read == 0
    same(result, expected)
    np.testing.assert_array_equal(np.asarray(result), expected)


READS = {  # boxes of views that are somewhere else in the file
    "a split of a transpose": (lambda x: np.reshape(x.T, (32, 4, 16)), np.s_[:, 1:2, :]),
    "a reshape of a transpose": (
        lambda x: np.reshape(np.transpose(x.reshape(64, 4, 8), (1, 2, 0)), (32, 64)), np.s_[8:16, 16:32]
    ),
    "some of many pieces": (lambda x: np.stack([row.reshape(8, 4).T for row in x]), np.s_[2:4, :, :]),
    **{f"{width} of each row": (lambda x: x, np.s_[:, :width]) for width in (1, 16, 31)},
}  # fmt: skip


@pytest.mark.parametrize("kind", READS)
def test_a_box_reads_its_own_bytes(tmp_path, kind):
    view, box = READS[kind]
    array = numbers((64, 32))
    checkpoint, tensor = make(tmp_path, array)
    expected = view(array)[box]
    whole = tuple(slice(*part.indices(extent)) for part, extent in zip(box, view(array).shape, strict=True))
    np.testing.assert_array_equal(view(tensor).read(tuple(slice(p.start, p.stop) for p in whole)), expected)
    assert checkpoint.bytes_read == expected.nbytes


def test_without_maps_far_rows_are_read_one_by_one_and_near_ones_together(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "F_SETLEASE", -1)  # as on a file system that grants no lease
    array = numbers((16, 16384))  # rows of 64 KiB
    for columns, nbytes in (((0, 1024), 16 * 4096), ((100, 14000), 15 * 65536 + 13900 * 4)):
        checkpoint, tensor = make(tmp_path, array)
        np.testing.assert_array_equal(tensor.read((slice(0, 16), slice(*columns))), array[:, slice(*columns)])
        assert checkpoint.bytes_read == nbytes  # gaps of 60 KiB are left out, those below 16 KiB are not


@pytest.mark.parametrize("source", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int32, ">f4"])
@pytest.mark.parametrize("target", [np.float32, ml_dtypes.bfloat16, np.float16, np.int8, ml_dtypes.float8_e4m3fn])
def test_astype_is_deferred_and_bit_equal(tmp_path, source, target):
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        special = np.array([0, -0.0, 1e-40, 65504, 3.3895e38, np.inf, -np.inf, np.nan])
        values = special if np.dtype(source).kind != "i" else np.arange(8)
        array = np.concatenate([rng.standard_normal(1000) * 50, values]).astype(source).reshape(4, 252)
        checkpoint, tensor = make(tmp_path, array)
        assert tensor.dtype == array.dtype.newbyteorder("=")
        assert tensor[:, ::2].read().dtype.isnative
        converted = tensor.astype(target)
        assert converted.dtype == np.dtype(target)
        assert checkpoint.bytes_read == array.nbytes // 2
        same(converted, array.astype(target))
        same(converted.T.astype(np.float64), array.astype(target).T.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool", ml_dtypes.bfloat16])
def test_arithmetic_with_scalars_reads_nothing_and_is_numpys_bit_for_bit(tmp_path, dtype):
    rng = np.random.default_rng(0)
    array = (rng.standard_normal((300, 250)) * 50).astype(dtype)  # more than is converted at a time
    checkpoint, tensor = make(tmp_path, array)
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
            before = checkpoint.bytes_read
            result = case(tensor)
            assert checkpoint.bytes_read == before
            same(result, expected)
    if array.dtype.kind in "iu":
        with pytest.raises(OverflowError):
            tensor + 1000


def test_arithmetic_and_other_functions_read_this_tensor_only(tmp_path):
    array = numbers((4, 6))
    _, tensor = make(tmp_path, array)
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
        (tensor.view(np.uint8), array.view(np.uint8)),
    ]:
        assert isinstance(result, (np.ndarray, np.generic))
        np.testing.assert_array_equal(result, expected)
    assert float(tensor[0, 0]) == 1.0
    assert int(tensor[1, 1]) == int(array[1, 1])
    assert bool(tensor[0, 0])
    assert [row.shape for row in tensor] == [(6,)] * 4
    assert len(tensor) == 4
    np.testing.assert_array_equal(jnp.asarray(tensor), array)


def test_errors_are_numpys(tmp_path):
    _, tensor = make(tmp_path, numbers((4, 6)))
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
    with pytest.raises(ValueError, match="always makes a copy"):
        np.asarray(tensor, copy=False)
    with pytest.raises(ValueError, match="range of step 1"):
        tensor.read((slice(0, 9), slice(0, 6)))


def test_read_owns_aligned_memory(tmp_path):
    for shape in ((4, 6), (600, 600)):
        _, tensor = make(tmp_path, numbers(shape))
        one, other = tensor.read(), tensor.read()
        assert one.ctypes.data % 64 == 0
        assert one.flags.c_contiguous and one.flags.writeable
        assert not np.shares_memory(one, other)
        before = one.copy()
        with open(tensor.file, "r+b") as file:
            file.seek(-96, 2)
            file.write(b"\xff" * 96)
        np.testing.assert_array_equal(one, before)


def test_empty_and_scalar_tensors(tmp_path):
    assert make(tmp_path, numbers((0, 3)))[1].T.read().shape == (3, 0)
    assert make(tmp_path, numbers((3, 4)))[1][1:1].read().shape == (0, 4)
    _, scalar = make(tmp_path, np.array(7, np.int32))
    assert scalar.read() == 7
    assert scalar.astype(np.float32).reshape(1, 1).read().tolist() == [[7.0]]
    assert np.stack([scalar, scalar]).read().tolist() == [7, 7]


def test_changed_and_missing_files_are_errors_that_name_them(tmp_path):
    checkpoint, tensor = make(tmp_path, numbers((4, 6)))
    tensor.read()
    with open(tensor.file, "ab") as file:
        file.write(b"more")
    with pytest.raises(lm.CheckpointError, match=r"w\.safetensors changed while it was being read"):
        tensor.read()
    checkpoint.close()
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(lm.CheckpointError, match=r"w\.safetensors"):
        tensor.read()


def _slices(draw, extent):
    start = draw(st.integers(0, max(extent - 1, 0)))
    stop = draw(st.integers(start, extent))
    step = draw(st.sampled_from([1, 1, 2, 3]))
    return slice(None, None, -1) if draw(st.integers(0, 9)) == 0 else slice(start, stop, step)


def chain_of_views(draw, array, tensor):
    """Both after the same views, up to four."""
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "transpose", "reshape", "stack", "concatenate", "broadcast", "newaxis"]))
        if kind == "slice":
            index = tuple(_slices(draw, extent) for extent in array.shape)
            step = lambda x, index=index: x[index]  # noqa: E731
        elif kind == "transpose":
            axes = draw(st.permutations(range(array.ndim)))
            step = lambda x, axes=axes: np.transpose(x, axes)  # noqa: E731
        elif kind == "reshape":
            divisors = [n for n in range(1, array.size + 1) if array.size % n == 0] or [1]
            first = draw(st.sampled_from(divisors))
            target = (first, array.size // first) if array.size else array.shape
            step = lambda x, target=target: np.reshape(x, target)  # noqa: E731
        elif kind == "stack":
            axis = draw(st.integers(0, array.ndim))
            step = lambda x, axis=axis: np.stack([x, x], axis)  # noqa: E731
        elif kind == "concatenate" and array.ndim:
            axis = draw(st.integers(0, array.ndim - 1))
            step = lambda x, axis=axis: np.concatenate([x, np.flip(x, axis)], axis)  # noqa: E731
        elif kind == "broadcast":
            step = lambda x: np.broadcast_to(x, (2, *x.shape))  # noqa: E731
        else:
            step = lambda x: x[..., None]  # noqa: E731
        if step(array).size <= 4096 and step(array).ndim <= 8:
            array, tensor = step(array), step(tensor)
    return array, tensor


@examples(60, 200, data=st.data())
def test_any_box_of_any_chain_of_views_is_numpys(tmp_path_factory, data):
    """Cast or not, in the usual buffers or in tiny ones, with maps of files or without."""
    draw = data.draw
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    dtype = np.dtype(draw(st.sampled_from([np.uint8, np.int16, np.float32, ml_dtypes.bfloat16, np.int64])))
    array = np.frombuffer(np.random.default_rng(0).bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    folder = tmp_path_factory.getbasetemp() / "chains"
    folder.mkdir(exist_ok=True)
    (folder / "w.safetensors").unlink(missing_ok=True)
    checkpoint, tensor = make(folder, array)
    sizes = {}
    if draw(st.booleans()):
        sizes = {"staging": draw(st.sampled_from([16, 64])), "map_block": 64, "part": 128}
        sizes |= {"row_gap": draw(st.sampled_from([4, 1024])), "row_call": draw(st.sampled_from([8, 1 << 16]))}
        sizes["workspace"] = draw(st.sampled_from([0, 64, 1000]))
    with checkpoint, buffer_sizes(**sizes), pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        if draw(st.booleans()):
            patch.setattr(fcntl, "F_SETLEASE", -1)
        expected, tensor = chain_of_views(draw, array, tensor)
        if draw(st.booleans()):
            tensor, expected = tensor.astype(np.float16), expected.astype(np.float16)
        corners = [sorted(draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in expected.shape]
        box = tuple(slice(*ends) for ends in corners)
        for part in (box, tuple(slice(0, extent) for extent in expected.shape)):
            result = tensor.read(part)
            assert result.shape == expected[part].shape
            assert result.tobytes() == np.ascontiguousarray(expected[part]).tobytes()


@examples(5, 20, data=st.data())
def test_large_tensors_in_any_order_of_axes(tmp_path_factory, data):
    """Large enough for tiles, in which what is far apart in the file is written together."""
    shape = data.draw(st.lists(st.sampled_from([1, 3, 17, 133]), min_size=1, max_size=2))
    shape.append(50_000 // math.prod(shape))
    dtypes = st.sampled_from([np.float32, ml_dtypes.bfloat16, np.uint8, np.float64])
    array = (np.arange(math.prod(shape)) % 251).astype(data.draw(dtypes)).reshape(shape)
    order, step = data.draw(st.permutations(range(len(shape)))), data.draw(st.sampled_from([1, 2]))
    with make(tmp_path_factory.mktemp("large"), array)[0] as checkpoint:
        view, expected = (each.transpose(order)[..., ::step] for each in (checkpoint["w"], array))
        wanted = data.draw(dtypes)
        same(view.astype(wanted), expected.astype(wanted))
    with jax.enable_x64(True):  # and an array of the host's in that order
        model = lm.build_abstract(lambda: {"w": jnp.zeros(expected.shape, wanted)})
        loaded = np.asarray(model.materialize({"w": expected}, cast="unsafe")["w"])
    assert loaded.tobytes() == np.ascontiguousarray(expected.astype(wanted)).tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_memory_is_given_back_with_the_last_array_in_it(tmp_path, mesh8):
    """Of arrays that were loaded together, and whose buffers share maps."""
    values = {name: np.full((4096, 1024), number, np.float32) for number, name in enumerate("abc", 1)}
    save_file(values, tmp_path / "w.safetensors")
    model = lm.build_abstract(lambda: {name: jnp.zeros((4096, 1024)) for name in values}).shard(
        mesh8, {".*": P("model")}
    )
    loaded = jax.block_until_ready(model.materialize(lm.open_checkpoint(tmp_path / "w.safetensors")))
    before = private_nbytes()
    del loaded["b"]
    gc.collect()
    jnp.zeros(3).block_until_ready()  # JAX lets go of buffers when it is next called
    assert before - private_nbytes() > 12 << 20
    assert all((np.asarray(loaded[name]) == number).all() for name, number in (("a", 1), ("c", 3)))

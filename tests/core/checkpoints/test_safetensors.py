"""safetensors: what the reference implementation writes is read back; what is corrupt or hostile is refused by name."""

import contextlib
import json
import os
import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from lazymodel._errors import CheckpointError
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors.buffers import Convert, Workspace
from lazymodel.checkpoints import SafetensorsFile, open_checkpoint
from lazymodel.checkpoints._safetensors_header import DTYPES

FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)


def packed(array):
    """The bytes of 4-bit values: the first of two in the low bits."""
    halves = array.reshape(-1).view(np.uint8)
    return bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))


def write(path, tensors, metadata=None, extra=b""):
    """Writes a file by the format's description, so that the reader is not tested against its own mistakes only."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, array in tensors.items():
        begin = len(data)
        data += packed(array) if array.dtype == FLOAT4 else array.tobytes()
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    return write_raw(path, header, data + extra)


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "F4"])
def test_every_dtype(tmp_path, name):
    array = np.arange(24).reshape(4, 6).astype(DTYPES[name])
    with open_checkpoint(write(tmp_path / "m.safetensors", {"w": array})) as checkpoint:
        assert checkpoint["w"].dtype == DTYPES[name]
        assert checkpoint["w"].read().tobytes() == array.tobytes()
        assert checkpoint.bytes_read == array.nbytes // (2 if name == "F4" else 1)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "F4"])
def test_every_dtype_on_devices(tmp_path, name, mesh42):
    array = np.arange(48).reshape(8, 6).astype(DTYPES[name])
    tensor = open_checkpoint(write(tmp_path / "m.safetensors", {"w": array}))["w"]
    sharding = NamedSharding(mesh42, PartitionSpec("batch", "model"))
    with jax.enable_x64(name.endswith("64")):
        [(_, loaded)] = stream([StreamItem("w", tensor, (8, 6), DTYPES[name], sharding)])
        assert loaded.dtype == DTYPES[name]
        assert loaded.sharding == sharding
        assert np.asarray(loaded).tobytes() == array.tobytes()


def test_4_bit_values_by_hand(tmp_path):
    header = {"w": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}
    path = write_raw(tmp_path / "m.safetensors", header, bytes([0x10, 0x32, 0xF7, 0x9C]))
    tensor = open_checkpoint(path)["w"]
    expected = [[0, 0.5, 1, 1.5], [6, -6, -2, -0.5]]
    np.testing.assert_array_equal(tensor.read().astype(np.float32), expected)
    np.testing.assert_array_equal(tensor.T[1:3].astype(ml_dtypes.bfloat16).read(), np.transpose(expected)[1:3])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_slices_of_4_bit_values_read_their_bytes_only(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: np.prod(s) % 2 == 0)))
    array = np.arange(np.prod(shape)).astype(np.uint8).view(FLOAT4).reshape(shape)
    array.view(np.uint8)[...] %= 16
    checkpoint = open_checkpoint(write(tmp_path_factory.mktemp("packed") / "m.safetensors", {"w": array}))
    index = tuple(slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape)
    axes = data.draw(st.permutations(range(len(shape))))
    found, expected = checkpoint["w"][index].transpose(axes), array[index].transpose(axes)
    assert found.read().tobytes() == expected.tobytes()
    rows = expected.size // max(array[index].shape[-1], 1)
    assert checkpoint.bytes_read <= expected.size // 2 + rows  # at most one half too much at each end of a row
    np.testing.assert_array_equal(found.astype(np.float32).read(), expected.astype(np.float32))


def test_4_bit_values_are_unpacked_within_little_memory(tmp_path):
    array = np.arange(1 << 20).astype(np.uint8).reshape(1024, 1024) % 16
    path = write(tmp_path / "m.safetensors", {"w": array.view(FLOAT4)})
    leaf = open_checkpoint(path)["w"].leaf
    for out in (np.empty(array.shape, FLOAT4), np.empty(array.shape, FLOAT4).T, np.empty(array.shape, np.float32)):
        steps = () if out.dtype == FLOAT4 else (Convert(out.dtype),)
        tracemalloc.start()
        leaf.fill_box((slice(0, 1024), slice(0, 1024)), out, steps, Workspace(64 << 10))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 128 << 10
        assert out.tobytes() == array.view(FLOAT4).astype(out.dtype).tobytes()


@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (2, 3, 2), (7,), (2, 3, 5), (), (1, 1), (64, 300)])
def test_packed_floats_of_4_bits(tmp_path, shape):
    dtype = DTYPES["F4"]
    values = np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)
    flat = np.append(values, [0] * (values.size % 2)).astype(np.uint8)
    packed = (flat[::2] | flat[1::2] << 4).tobytes()
    if values.size % 2:  # the reference implementation has no such tensors either
        with pytest.raises(CheckpointError, match="'w'"):
            open_checkpoint(write_raw(tmp_path / "m.safetensors", {"w": entry(shape, (0, len(packed)), "F4")}, packed))
        return
    path = write_raw(tmp_path / "m.safetensors", {"w": entry(shape, (0, len(packed)), "F4")}, packed)
    tensor = open_checkpoint(path)["w"]
    assert tensor.dtype == dtype and tensor.shape == shape
    assert tensor.read().tobytes() == values.tobytes()
    assert tensor.T.read().tobytes() == np.ascontiguousarray(values.T).tobytes()
    assert tensor[..., 1:].read().tobytes() == np.ascontiguousarray(values[..., 1:]).tobytes()
    assert tensor[1:].read().tobytes() == values[1:].tobytes()
    wide = tensor.astype(np.float32).read()
    assert wide.tobytes() == values.view(dtype).astype(np.float32).tobytes()


def test_files_of_the_reference_implementation(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = {
        "b": np.arange(6, dtype=np.float16).reshape(2, 3),
        "a": np.arange(5, dtype=np.int64),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
    }
    numpy.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert set(file) == set(file.keys()) == set(tensors)
    assert file.metadata == {"format": "np"}
    assert file.source.bytes_read == 0
    for name, array in tensors.items():
        assert file[name].name == name
        assert file[name].shape == array.shape
        np.testing.assert_array_equal(file[name].read(), array)
    assert file.source.bytes_read == sum(array.nbytes for array in tensors.values())
    with pytest.raises(KeyError, match="absent"):
        file["absent"]
    file.close()


def test_repr_tells_tensors_bytes_and_files(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path / "m.safetensors", {"w": np.zeros((4, 256), np.float32)}))
    assert repr(checkpoint) == f"SafetensorsFile('{tmp_path}/m.safetensors': 1 tensor, 4.00 KiB in 1 file)"


HOSTILE = {
    "header is not JSON": (b"{nonsense", b"", "expected a JSON object"),
    "header is a list": (b"[]", b"", "expected a JSON object, found a list"),
    "header nested too deeply": (b"[" * 100_000, b"", "expected a JSON object"),
    "key twice": (
        b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
        "found 'a' twice",
    ),
    "unknown dtype": ({"a": entry(dtype="F3")}, b"12345678", "tensor 'a': expected one of the dtypes .* found '?F3"),
    "6-bit dtype": ({"a": entry((4,), (0, 3), "F6_E2M3")}, b"123", "tensor 'a': found dtype F6_E2M3.*no arrays of 6"),
    "half a byte": ({"a": entry((3,), (0, 2), "F4")}, b"12", r"expected whole bytes, found an odd number.*F4\[3\]"),
    "dtype nested too deeply to be quoted": (
        b'{"a": {"dtype": ' + b"[" * 900 + b"]" * 900 + b', "shape": [], "data_offsets": [0, 0]}}',
        b"",
        "tensor 'a': expected one of the dtypes",
    ),
    "metadata that are no strings": ({"__metadata__": {"step": 3}}, b"", "'__metadata__' to map strings to strings"),
    "UTF-16": ('{"a": {}}'.encode("utf-16"), b"", "expected a JSON object"),
    "half of a surrogate pair": (b'{"\\ud800": {}}', b"", "expected a JSON object"),
    "too large for NumPy": ({"a": entry([0, 2**62, 2**62], [0, 0])}, b"", "tensor 'a': expected a shape"),
    "dtype not a string": ({"a": entry(dtype=["F32"])}, b"12345678", "tensor 'a': expected one of the dtypes"),
    "negative shape": ({"a": entry(shape=[-2])}, b"12345678", "tensor 'a': expected a shape of non-negative ints"),
    "float shape": ({"a": entry(shape=[2.0])}, b"12345678", "tensor 'a': expected a shape"),
    "boolean shape": ({"a": entry(shape=[True, 2])}, b"12345678", "tensor 'a': expected a shape"),
    "huge shape": ({"a": entry(shape=[2**62, 2**62])}, b"12345678", "tensor 'a': expected a shape .* bytes"),
    "large shape": ({"a": entry(shape=[2**50])}, b"12345678", "expected 4503599627370496 bytes for F32.*found .* 8 b"),
    "shape is no list": ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, b"12345678", "expected a shape"),
    "shape is not the range": ({"a": entry(shape=[3])}, b"12345678", "expected 12 bytes for F32.*found .* 8 bytes"),
    "offsets reversed": ({"a": entry(offsets=[8, 0])}, b"12345678", "tensor 'a': expected data_offsets"),
    "offsets negative": ({"a": entry(offsets=[-8, 0])}, b"12345678", "tensor 'a': expected data_offsets"),
    "entry is no object": ({"a": 3}, b"12345678", "tensor 'a': expected dtype, shape and data_offsets"),
    "beyond the end": ({"a": entry()}, b"1234", "truncated: expected 8 bytes of tensors, found 4"),
    "overlap": (
        {"a": entry(), "b": entry(offsets=[4, 12])},
        b"123456781234",
        "tensors 'a' and 'b' overlap at byte 4",
    ),
    "gap": ({"a": entry(), "b": entry(offsets=[12, 20])}, b"1" * 20, "expected tensor 'b' at byte 8, found it at 12"),
    "bytes left over": ({"a": entry()}, b"1" * 20, "expected 8 bytes of tensors, found 12 more"),
}


@pytest.mark.parametrize(("header", "data", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(tmp_path, header, data, message):
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as info:
        open_checkpoint(path)
    assert str(path) in str(info.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected at least 8 bytes, found 0"),
        (b"1234", "expected at least 8 bytes, found 4"),
        ((10**12).to_bytes(8, "little") + b"{}", "a header of at most .* found a length of 1000000000000"),
        (
            (1000).to_bytes(8, "little") + b"{}",
            "truncated: expected a header up to byte 1008, found a file of 10 bytes",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n",
            "LFS pointer: expected 123456 bytes",
        ),
    ],
)
def test_files_that_are_no_safetensors(tmp_path, content, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as info:
        SafetensorsFile(path)
    assert str(path) in str(info.value)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused_but_never_anything_else(tmp_path_factory, position, damage):
    path = write(
        tmp_path_factory.mktemp("damaged") / "m.safetensors", {"a": np.ones(8, np.float32), "b": np.ones(3, "i1")}
    )
    content = bytearray(path.read_bytes())
    position %= len(content)
    content[position : position + len(damage)] = damage
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        for tensor in open_checkpoint(path).values():
            assert tensor.read().nbytes == tensor.nbytes <= len(content)


def folder_of(tmp_path, weight_map=None, name="model.safetensors.index.json"):
    one, two = np.arange(4, dtype=np.float32), np.arange(6, dtype=np.float16)
    write(tmp_path / "model-00001.safetensors", {"a": one, "hidden": one})
    write(tmp_path / "model-00002.safetensors", {"b": two})
    shards = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"} if weight_map is None else weight_map
    (tmp_path / name).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": shards}))
    return one, two


@pytest.mark.parametrize("opened", [".", "model.safetensors.index.json"])
def test_an_index_says_which_tensors_count(tmp_path, opened):
    one, two = folder_of(tmp_path)
    with open_checkpoint(tmp_path / opened) as checkpoint:
        assert list(checkpoint) == ["a", "b"]
        np.testing.assert_array_equal(checkpoint["a"].read(), one)
        np.testing.assert_array_equal(checkpoint["b"].read(), two)
        assert [os.path.basename(file) for file in checkpoint.files] == [
            "model-00001.safetensors",
            "model-00002.safetensors",
        ]
        assert checkpoint.bytes_read == one.nbytes + two.nbytes


def test_an_index_of_another_name(tmp_path):
    folder_of(tmp_path, name="diffusion.safetensors.index.json")
    assert list(open_checkpoint(tmp_path)) == ["a", "b"]


def test_a_folder_without_an_index(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert set(open_checkpoint(tmp_path)) == {"a", "hidden", "b"}
    write(tmp_path / "model-00003.safetensors", {"b": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"'b' is in both .*00002.* and .*00003"):
        open_checkpoint(tmp_path)
    write(tmp_path / "model.safetensors", {"only": np.zeros(2, np.float32)})
    assert set(open_checkpoint(tmp_path)) == {"only"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-00002.safetensors"}, r"model-00002\.safetensors: lacks 1 tensor \('a'\), which .* says it has"),
        ({"a": "/etc/passwd"}, "inside its folder"),
        ({"a": "../other.safetensors"}, "inside its folder"),
        ({"a": "x/../../other.safetensors"}, "inside its folder"),
        ({"a": 3}, "expected a shard's file name, found 3"),
        ({"a": "x" * 300}, "expected a shard's file name, found 'x.*, which cannot be one"),
        ({"a": "\ud800"}, "expected a JSON object"),
        ({"a": ["model-00001.safetensors"]}, "expected a shard's file name"),
        ({"a": "absent.safetensors", "b": "gone.safetensors"}, r"missing absent\.safetensors, gone\.safetensors"),
        ([], "expected a 'weight_map' object"),
    ],
)
def test_hostile_indexes_are_refused(tmp_path, weight_map, message):
    folder_of(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message) as info:
        open_checkpoint(tmp_path)
    assert re.search(re.escape(str(tmp_path)), str(info.value))


def test_symbolic_links_may_not_leave_the_folder_except_into_a_cache_s_blobs(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    array = np.arange(3, dtype=np.float32)
    write(outside / "x.safetensors", {"a": array})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x.safetensors").symlink_to(outside / "x.safetensors")
    index = json.dumps({"weight_map": {"a": "x.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="symbolic link to"):
        open_checkpoint(folder)
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "0a1b", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write(blobs / "sha", {"a": array})
    (blobs / "index").write_text(index)
    (snapshot / "x.safetensors").symlink_to("../../blobs/sha")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/index")
    np.testing.assert_array_equal(open_checkpoint(snapshot)["a"].read(), array)
    (snapshot / "unet").mkdir()  # a repository of several models
    (snapshot / "unet" / "x.safetensors").symlink_to("../../../blobs/sha")
    (snapshot / "unet" / "model.safetensors.index.json").symlink_to("../../../blobs/index")
    np.testing.assert_array_equal(open_checkpoint(snapshot / "unet")["a"].read(), array)
    (snapshot / "x.safetensors").unlink()
    (snapshot / "x.safetensors").symlink_to(outside / "x.safetensors")
    with pytest.raises(CheckpointError, match="symbolic link to"):
        open_checkpoint(snapshot)

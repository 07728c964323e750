"""safetensors: what the reference implementation writes is read back; what is corrupt or hostile is refused by name."""

import gc
import json
import os
import random
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import lazymodel as lm
from lazymodel.checkpoints import SafetensorsFile
from tests.command import inspected, problems
from tests.core.checkpoints._formats import refused
from tests.small import read_within

FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
DTYPES = {
    "BOOL": np.bool_, "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "F32": "<f4", "F64": "<f8", "C64": "<c8",
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


def write(path, header, data=b""):
    """Writes a file by the format's description, so that the reader is not tested against its own mistakes only."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_one(path, array, dtype):
    """A file with one tensor, `w`; of 4-bit values the first of two is in the low bits."""
    data = array.tobytes()
    if dtype == "F4":
        data = bytes(low | high << 4 for low, high in zip(data[::2], data[1::2], strict=True))
    return write(path, {"w": entry(array.shape, (0, len(data)), dtype)}, data)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path, name, mesh42):
    dtype = np.dtype(DTYPES[name])
    array = np.arange(48).reshape(8, 6).astype(dtype)
    with lm.open_checkpoint(write_one(tmp_path / "m.safetensors", array, name)) as checkpoint:
        assert checkpoint["w"].dtype == dtype
        assert checkpoint["w"].read().tobytes() == array.tobytes()
        assert checkpoint.bytes_read == array.nbytes
        with jax.enable_x64(name.endswith("64")):
            model = lm.build_abstract(lambda: {"w": jnp.zeros((8, 6), dtype)})
            loaded = model.shard(mesh42, {"w": PartitionSpec("batch", "model")}).materialize(checkpoint)["w"]
            assert (loaded.dtype, loaded.sharding) == (dtype, NamedSharding(mesh42, PartitionSpec("batch", "model")))
            assert np.asarray(loaded).tobytes() == array.tobytes()


# 4-bit values ---------------------------------------------------------------------------------------------------------


def test_4_bit_values_by_hand(tmp_path):
    path = write(tmp_path / "m.safetensors", {"w": entry((2, 4), (0, 4), "F4")}, bytes([0x10, 0x32, 0xF7, 0x9C]))
    tensor = lm.open_checkpoint(path)["w"]
    expected = [[0, 0.5, 1, 1.5], [6, -6, -2, -0.5]]
    np.testing.assert_array_equal(tensor.read().astype(np.float32), expected)
    np.testing.assert_array_equal(tensor.T[1:3].astype(ml_dtypes.bfloat16).read(), np.transpose(expected)[1:3])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_slices_of_4_bit_values_read_their_bytes_only(tmp_path_factory, data):
    sizes = st.lists(st.sampled_from([1, 2, 3, 4, 5, 64]), min_size=1, max_size=4)
    shape = tuple(data.draw(sizes.filter(lambda s: np.prod(s) % 2 == 0 and np.prod(s) < 20_000)))
    array = (np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)).view(FLOAT4)
    checkpoint = lm.open_checkpoint(write_one(tmp_path_factory.mktemp("packed") / "m.safetensors", array, "F4"))
    index = tuple(slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape)
    axes = data.draw(st.permutations(range(len(shape))))
    found, expected = checkpoint["w"][index].transpose(axes), array[index].transpose(axes)
    assert found.read().tobytes() == expected.tobytes()
    rows = expected.size // max(array[index].shape[-1], 1)
    if shape[-1] % 2 == 0:  # else rows share a byte
        assert checkpoint.bytes_read <= expected.size // 2 + rows  # at most one half too much at each end of a row
    np.testing.assert_array_equal(found.astype(np.float32).read(), expected.astype(np.float32))


def test_4_bit_values_are_unpacked_within_little_memory(tmp_path):
    array = (np.arange(1 << 17).astype(np.uint8).reshape(256, 512) % 16).view(FLOAT4)
    tensor = lm.open_checkpoint(write_one(tmp_path / "m.safetensors", array, "F4"))["w"]
    wide = tensor.astype(np.float32), array.astype(np.float32)
    for view, expected in ((tensor, array), (tensor.T, array.T), wide):
        found, extra = read_within(view, 16 << 10)
        assert extra < 64 << 10
        assert found.tobytes() == expected.tobytes()


# Files ----------------------------------------------------------------------------------------------------------------


COUNT = 20_000


def many(folder, count, name="m", prefix=""):
    """A file with so many tensors of one byte."""
    entries = (f'"{prefix}{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(count))
    return write(folder / f"{name}.safetensors", "{" + ",".join(entries) + "}", bytes(count))


@pytest.fixture
def made(monkeypatch):
    """The lazy tensors that were made."""
    tensors = []
    original = lm.LazyTensor.__init__
    monkeypatch.setattr(lm.LazyTensor, "__init__", lambda self, *args: tensors.append(self) or original(self, *args))
    return tensors


def test_tensors_are_made_on_access_only(tmp_path, made):
    """And what is made for each when opening are names, on whose account no garbage is collected."""
    path = many(tmp_path, COUNT)
    gc.collect()
    before = len(gc.get_objects()), gc.get_stats()[0]["collections"]
    checkpoint = lm.open_checkpoint(path)
    assert gc.get_stats()[0]["collections"] - before[1] < 10
    gc.collect()
    assert len(gc.get_objects()) - before[0] < COUNT // 100
    assert len(checkpoint) == checkpoint.nbytes == COUNT
    assert f"{COUNT:,} tensors" in repr(checkpoint)
    assert list(checkpoint)[:2] == ["0", "1"]
    assert "5" in checkpoint
    assert made == []
    assert checkpoint["5"].offset == checkpoint["0"].offset + 5
    assert len(made) == 2


# Headers --------------------------------------------------------------------------------------------------------------

METADATA = '"__metadata__":{"format":"pt","a:b":"{}"},'
A = '"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}'
B = '"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}'
EMPTY = '"e":{"dtype":"I64","shape":[0,9],"data_offsets":[24,24]}'
BOTH = "{" + A + "," + B + "}"


def changed(old, new):
    assert old in BOTH
    return BOTH.replace(old, new)


# Header → what it is refused for; None where it is read.
HEADERS = {
    "as writers have it": (BOTH, None),
    "in another order, with space after it": ("{" + B + "," + A + "}   ", None),
    "with space before it": (" " + BOTH, None),
    "with metadata": ("{" + METADATA + A + "," + B + "}", None),
    "metadata last": ("{" + A + "," + B + "," + METADATA[:-1] + "}", None),
    "an empty tensor": ("{" + A + "," + EMPTY + "," + B + "}", None),
    "an empty tensor, in another order": ("{" + B + "," + EMPTY + "," + A + "}", None),
    "spaces": (BOTH.replace(",", ", ").replace(":", ": "), None),
    "odd names": (changed('"a"', '"wörter 名:{[ \U0001f600"'), None),
    "escapes": (changed('"a"', r'"\u0061\n"'), None),
    "fields in another order": ('{"a":{"shape":[2,3],"dtype":"F32","data_offsets":[0,24]},' + B + "}", None),
    "another field": (changed('"dtype":"F32"', '"x":1,"dtype":"F32"'), None),
    "no metadata": ('{"__metadata__":null,' + A + "," + B + "}", None),
    "an empty header": ("{}", "expected 0 bytes of tensors, found 26 more"),
    "nonsense": (b"{nonsense", "expected a JSON object"),
    "a list": ("[" + A + "," + B + "]", "expected a JSON object"),
    "an empty list": (b"[]", "expected a JSON object, found a list"),
    "nested too deeply": (b"[" * 100_000, "expected a JSON object"),
    "UTF-16": (BOTH.encode("utf-16"), "expected a JSON object"),
    "not UTF-8": (BOTH.encode().replace(b'"a"', b'"\xff"'), "expected a JSON object"),
    "half of a surrogate pair": (changed('"a"', r'"\ud800"'), "expected a JSON object"),
    "no comma": ("{" + A + B + "}", "expected a JSON object"),
    "two commas": ("{" + A + ",," + B + "}", "expected a JSON object"),
    "a comma first": ("{," + A + "," + B + "}", "expected a JSON object"),
    "a comma last": ("{" + A + "," + B + ",}", "expected a JSON object"),
    "no brace": ("{" + A + "," + B, "expected a JSON object"),
    "two braces": (BOTH + "}", "expected a JSON object"),
    "more after it": (BOTH + " x", "expected a JSON object"),
    "a control character": (changed('"a"', '"a\n"'), "expected a JSON object"),
    "a leading zero": (changed("2,3", "02,3"), "expected a JSON object"),
    "a repeated name": ("{" + A + "," + A + "}", "found 'a' twice"),
    "a repeated name, escaped": ("{" + A + "," + A.replace('"a"', r'"\u0061"') + "}", "found 'a' twice"),
    "a repeated name of other bytes": (changed('"b"', '"a"'), "found 'a' twice"),
    "a repeated field": (changed('"shape":[2,3]', '"shape":[9],"shape":[2,3]'), "found 'shape' twice"),
    "metadata twice": ("{" + METADATA + METADATA + A + "," + B + "}", "'__metadata__' twice"),
    "a repeated key of metadata": ("{" + METADATA.replace("a:b", "format") + A + "," + B + "}", "'format' twice"),
    "metadata with half a character": ("{" + METADATA.replace("pt", r"\ud800") + A + "," + B + "}", "JSON object"),
    "metadata of numbers": ("{" + METADATA.replace('"pt"', "1") + A + "," + B + "}", "'__metadata__' to map strings"),
    "a tensor called metadata": (changed('"a"', '"__metadata__"'), "'__metadata__' to map strings to strings"),
    "an entry that is no object": ('{"a":3}', "tensor 'a': expected dtype, shape and data_offsets"),
    "an unknown dtype": (changed("F32", "F33"), "tensor 'a': expected one of the dtypes .* found '?F33"),
    "a dtype that is no string": (changed('"F32"', '["F32"]'), "tensor 'a': expected one of the dtypes"),
    "a dtype nested too deeply to be quoted": (
        changed('"F32"', "[" * 900 + "]" * 900), "tensor 'a': expected one of the dtypes"
    ),
    "six bits": (changed("F32", "F6_E2M3"), "tensor 'a': found dtype F6_E2M3.*no arrays of 6"),
    "half a byte": ('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', r"found an odd number.*F4\[3\]"),
    "a shape that is no list": (changed("[2,3]", "6"), "tensor 'a': expected a shape"),
    "a negative extent": (changed("2,3", "-2,-3"), "tensor 'a': expected a shape of non-negative ints"),
    "a boolean": (changed("2,3", "true,6"), "tensor 'a': expected a shape"),
    "a float": (changed("2,3", "2.0,3"), "tensor 'a': expected a shape"),
    "an exponent": (changed("2,3", "2e0,3"), "tensor 'a': expected a shape"),
    "NaN": (changed("2,3", "NaN"), "'a'|JSON"),
    "a large int": (changed("2,3", str(2**63)), "tensor 'a': expected a shape"),
    "a product that wraps": (changed("2,3", f"{2**32},{2**32}").replace("0,24", "0,0"), "tensor 'a': expected a shape"),
    "large and nothing": (
        changed("2,3", f"0,{2**32},{2**32}").replace("0,24", "0,0"), "tensor 'a': expected a shape"
    ),
    "too many dimensions": (changed("2,3", "2,3" + ",1" * 31), "tensor 'a': expected a shape"),
    "much more than there is": (changed("2,3", str(2**50)), "expected 4503599627370496 bytes for F32.*found .* 24 b"),
    "other bytes than the shape": (changed("2,3", "2,2"), "expected 16 bytes for F32.*found .* 24 bytes"),
    "a reversed range": (changed("0,24", "24,0"), "tensor 'a': expected .* found data_offsets of -24"),
    "a negative range": (changed("0,24", "-24,0"), "tensor 'a': expected data_offsets"),
    "three offsets": (changed("0,24", "0,24,24"), "tensor 'a': expected data_offsets"),
    "an overlap": (changed("[24,26]", "[22,24]"), "tensors 'a' and 'b' overlap at byte 22"),
    "a gap": (changed("[24,26]", "[25,27]"), "expected tensor 'b' at byte 24, found it at 25"),
    "an overlap in what is all of the bytes": (
        changed(B, '"b":{"dtype":"U8","shape":[4],"data_offsets":[22,26]}'), "tensors 'a' and 'b' overlap at byte 22"
    ),
    "a gap in what is all of the bytes": (
        changed(B, '"b":{"dtype":"U8","shape":[1],"data_offsets":[25,26]}'), "expected tensor 'b' at byte 24"
    ),
    "bytes before the first": (
        "{" + A.replace("2,3", "6").replace("0,24", "2,26") + "}", "expected tensor 'a' at byte 0, found it at 2"
    ),
    "bytes left over": ("{" + A + "}", "expected 24 bytes of tensors, found 2 more"),
    "more than there is": (
        "{" + A + "," + B + "," + A.replace('"a"', '"c"').replace("0,24", "26,50") + "}",
        "truncated: expected 50 bytes of tensors, found 26",
    ),
}  # fmt: skip
DATA = np.arange(26, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("kind", HEADERS)
def test_headers(tmp_path, kind):
    text, message = HEADERS[kind]
    path = write(tmp_path / "m.safetensors", text, DATA)
    if message is not None:
        refused(path, message)
        assert problems(path)
        return
    with lm.open_checkpoint(path) as checkpoint:
        header = json.loads(text)
        assert checkpoint.metadata == (header.pop("__metadata__", None) or {})
        assert set(checkpoint) == set(header)
        for name, said in header.items():
            found, dtype = checkpoint[name], np.dtype(DTYPES[said["dtype"]])
            assert (found.dtype, list(found.shape)) == (dtype, said["shape"])
            assert found.read().tobytes() == DATA[slice(*said["data_offsets"])]
    assert not problems(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected at least 8 bytes, found 0"),
        (b"1234", "expected at least 8 bytes, found 4"),
        ((10**12).to_bytes(8, "little") + b"{}", "a header of at most .* found 1000000000000"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated: .*byte 1008, found a file of 10 bytes"),
    ],
)
def test_files_that_are_not_safetensors(tmp_path, content, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    refused(path, message)
    with pytest.raises(lm.CheckpointError, match=message):
        SafetensorsFile(path)


def outcome(path):
    """Everything a checkpoint says, or its error without the positions in it."""
    try:
        with lm.open_checkpoint(path) as checkpoint:
            tensors = {name: (t.dtype, t.shape, t.read().tobytes()) for name, t in checkpoint.items()}
            return list(tensors), tensors, dict(checkpoint.metadata)
    except lm.CheckpointError as error:
        return re.sub("[0-9]+", "", str(error))


def test_damaged_headers_are_read_alike_in_both_ways(tmp_path):
    """What is written as writers do is taken apart as a whole. With a space before it, it is parsed tensor by tensor,
    which the table above and the reference implementation, in `test_fuzz`, are compared with.
    """
    rng = random.Random(0)
    good = ("{" + METADATA + A + "," + EMPTY + "," + B + "}").encode()
    path, read = tmp_path / "m.safetensors", 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.choice(b'0129,:"[]{} \\\x00\xff-.eE')
                case 1:
                    del data[at : at + rng.randrange(1, 4)]
                case 2:
                    data[at:at] = bytes(rng.choices(b'019,:"[]{} \\u', k=rng.randrange(1, 3)))
                case _:
                    other = rng.randrange(len(data))
                    data[at:at] = data[other : other + rng.randrange(1, 60)]
        found = outcome(write(path, bytes(data), DATA))
        assert found == outcome(write(path, b" " + bytes(data), DATA)), bytes(data)
        read += isinstance(found, tuple)
    assert read > 10  # names and metadata may be anything


# Indexes --------------------------------------------------------------------------------------------------------------


def folder_of(tmp_path, weight_map=None, name="model.safetensors.index.json"):
    one, two = np.arange(4, dtype=np.float32), np.arange(6, dtype=np.float16)
    header = {"a": entry((4,), (0, 16)), "hidden": entry((4,), (16, 32))}
    write(tmp_path / "model-00001.safetensors", header, one.tobytes() * 2)
    write_one(tmp_path / "model-00002.safetensors", two, "F16")
    shards = weight_map or {"a": "model-00001.safetensors", "w": "model-00002.safetensors"}
    (tmp_path / name).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": shards}))
    return one, two


@pytest.mark.parametrize("opened", [".", "model.safetensors.index.json", "diffusion.safetensors.index.json"])
def test_an_index_says_which_tensors_count(tmp_path, opened):
    one, two = folder_of(tmp_path, name="model.safetensors.index.json" if opened == "." else opened)
    with lm.open_checkpoint(tmp_path / opened) as checkpoint:
        assert list(checkpoint) == ["a", "w"]
        np.testing.assert_array_equal(checkpoint["a"].read(), one)
        np.testing.assert_array_equal(checkpoint["w"].read(), two)
        names = [os.path.basename(file) for file in checkpoint.files]
        assert names == ["model-00001.safetensors", "model-00002.safetensors"]
        assert checkpoint.bytes_read == one.nbytes + two.nbytes


def test_symbolic_links_may_not_leave_the_folder_except_into_a_cache_s_blobs(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "0a1b", tmp_path / "models--x" / "blobs"
    for path in (outside, folder, snapshot / "unet", blobs):  # a repository of several models
        path.mkdir(parents=True)
    array = np.arange(3, dtype=np.float32)
    write_one(outside / "x.safetensors", array, "F32")
    write_one(blobs / "sha", array, "F32")
    index = json.dumps({"weight_map": {"w": "x.safetensors"}})
    (blobs / "index").write_text(index)
    for place, up in ((folder, None), (snapshot, "../../blobs"), (snapshot / "unet", "../../../blobs")):
        (place / "x.safetensors").symlink_to(f"{up}/sha" if up else outside / "x.safetensors")
        if up:
            (place / "model.safetensors.index.json").symlink_to(f"{up}/index")
            np.testing.assert_array_equal(lm.open_checkpoint(place)["w"].read(), array)
        else:
            (place / "model.safetensors.index.json").write_text(index)
            refused(place, "symbolic link to")
    (snapshot / "x.safetensors").unlink()
    (snapshot / "x.safetensors").symlink_to(outside / "x.safetensors")
    refused(snapshot, "symbolic link to")


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
    with SafetensorsFile(tmp_path / "m.safetensors") as file:
        assert set(file) == set(file.keys()) == set(tensors)
        assert file.metadata == {"format": "np"}
        assert file.bytes_read == 0
        for name, array in tensors.items():
            assert (file[name].name, file[name].shape) == (name, array.shape)
            assert file[name].offset == (tmp_path / "m.safetensors").stat().st_size - sum(
                tensors[other].nbytes for other in list(file)[list(file).index(name) :]
            )
            np.testing.assert_array_equal(file[name].read(), array)
        assert file.bytes_read == sum(array.nbytes for array in tensors.values())
        with pytest.raises(KeyError, match="absent"):
            file["absent"]


# Names that stand for others, tensors in parts ------------------------------------------------------------------------


def aliased(path, array):
    """As `safetensors.torch.save_model` writes a module two of whose parameters are one."""
    header = {"__metadata__": {"format": "pt", "embed": "head", "alias": "absent"}, "head": entry((4,), (0, 16))}
    return write(path, header, array.tobytes())


@pytest.mark.parametrize("kind", ["file", "folder", "index", "index without it", "url"])
def test_aliases_are_names_of_the_same_tensor(tmp_path, kind, object_server):
    folder = object_server.root / "aliased" if kind == "url" else tmp_path
    folder.mkdir(exist_ok=True)
    array = np.arange(4, dtype=np.float32)
    path = aliased(folder / "model-00001-of-00001.safetensors", array)
    if kind.startswith("index"):
        names = ["head"] if "without" in kind else ["head", "embed"]
        index = {"weight_map": dict.fromkeys(names, path.name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    where = {"file": path, "url": object_server.url(f"aliased/{path.name}")}.get(kind, folder)
    with lm.open_checkpoint(where) as checkpoint:
        assert sorted(checkpoint) == ["embed", "head"]
        assert checkpoint["embed"].offset == checkpoint["head"].offset
        for name in checkpoint:
            np.testing.assert_array_equal(checkpoint[name].read(), array)
            # Either is enough, also if all tensors must be used.
            model = lm.build_abstract(lambda name=name: {name: jnp.zeros(4)})
            np.testing.assert_array_equal(model.materialize(checkpoint)[name], array)
            table = lm.WeightMap({name: name})
            np.testing.assert_array_equal(lm.map_checkpoint(checkpoint, table, model)[name].read(), array)
        with pytest.raises(lm.CheckpointError, match="2 tensors that .* has no variable for: 'head', 'embed'"):
            lm.build_abstract(lambda: {"other": jnp.zeros(4)}).materialize(checkpoint)
    if kind != "url":
        found = inspected(where)
        assert not found["problems"]
        assert {(each["name"], each["offset"]) for each in found["tensors"]} == {
            (name, checkpoint["head"].offset) for name in ("head", "embed")
        }


def distributed(folder, saved):
    """Shards as PyTorch's `HuggingFaceStorageWriter` saves them: name → where its part begins, for each."""
    for number, offsets in enumerate(saved, 1):
        info = json.dumps({name: {"saved_offsets": begin} for name, begin in offsets.items()})
        tensors = {name: entry((2,), (8 * place, 8 * place + 8)) for place, name in enumerate(offsets)}
        header = {"__metadata__": {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"}, **tensors}
        write(folder / f"shard-{number:05}-model-00001-of-00001.safetensors", header, bytes(8 * len(tensors)))
    return sorted(folder.glob("*.safetensors"))


def test_parts_alone_are_refused(tmp_path):
    one, two = distributed(tmp_path, [{"w": [0], "a": [0]}, {"w": [2], "b": [0]}])
    assert list(lm.open_checkpoint(tmp_path)) == ["w", "a", "b"]
    for where in (one, two):
        message = refused(where, "expected whole tensors, found parts of 1 tensor .'w'.", where)
        assert f"open the folder {tmp_path}" in message
        assert len(inspected(where)["problems"]) == 1
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("wa", one.name)}))
    refused(tmp_path, "found parts of 1 tensor", one)
    index.unlink()
    for saved, found in (
        ([{"w": [0]}, {"w": [0]}], r"fill \[2\], found \[2\] at \[0\]"),
        ([{"w": [0]}, {"w": [3]}], r"fill \[5\]"),
        ([{"w": [0]}, {"w": [1]}], r"fill \[3\]"),
        ([{"a": [0]}, {"w": [2]}], r"fill \[4\]"),
    ):
        one, _ = distributed(tmp_path, saved)
        refused(tmp_path, found)
    refused(tmp_path / one.name, found, tmp_path)
    for info, found in (
        ("[1]", "expected a JSON object, found a list"),
        ('{"w": 3}', "saved_offsets"),
        ('{"w": {"saved_offsets": [-1]}}', r"from 0 on, found \[-1\]"),
        ('{"a": {"saved_offsets": [0, 0]}}', "1 saved_offsets of 'a'"),
    ):
        distributed(tmp_path, [{"a": [0]}, {"b": [0]}])
        write(one, {"__metadata__": {"DCP_SHARDING_INFO": info}, "a": entry((2,), (0, 8))}, bytes(8))
        refused(tmp_path, found)


def test_a_copy_of_mistral_s_is_left_out(tmp_path):
    for name, tensors in (("model-00001-of-00001", "a"), ("consolidated", "tok")):
        write(tmp_path / f"{name}.safetensors", {tensors: entry()}, bytes(8))
    assert list(lm.open_checkpoint(tmp_path)) == ["a"]
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    assert list(lm.open_checkpoint(tmp_path)) == ["tok"]

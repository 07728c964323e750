"""`open_checkpoint` says what it found, or what it could have opened; `lazymodel inspect` says the same of a file."""

import json
import os
import sys
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from tests.command import command, inspected
from tests.core.checkpoints._formats import refused


def test_nothing_there(tmp_path):
    (tmp_path / "round").symlink_to("round")
    for name in ("absent", "x" * 300, "a\0b", "round", "round/model.safetensors"):
        refused(tmp_path / name, "no checkpoint at ", "")
    for folder in ("12", "src/inner"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("read me")
    refused(tmp_path, "found no checkpoint in folder .*; supported: .*Orbax")
    for path, words in ((tmp_path / "absent", "no checkpoint at"), (tmp_path, "found no checkpoint in folder")):
        for ran in (command("inspect", path), command("inspect", path, "--json", "--verify")):
            assert (ran.status, ran.out) == (2, "") and ran.err.startswith("lazymodel: error: ")
            assert words in ran.err and str(path) in ran.err


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("model.weights", b"\x80\x02}q\x00.", None),
        ("__0_0.distcp", b"PK\x03\x04", r"torch\.distributed.*format_utils\.dcp_to_torch_save"),
        ("model.ckpt-1.index", b"", r"TensorFlow.*save_weights"),
        ("model.eqx", b"\x93NUMPY", r"Equinox.*tree_deserialise_leaves"),
        ("program.pt2", b"PK\x03\x04", r"torch\.export.*torch\.export\.load\(path\)\.state_dict"),
        ("dino.tar.lz4", b"\x04\x22\x4d\x18", r"a packed archive; unpack it"),
        ("params.pkl", b"\x80", r"pickle.*lm\.save"),
    ],
)
def test_formats_that_are_not_read_are_named_with_a_hint(tmp_path, name, content, hint):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name) if hint else (tmp_path / name,):
        refused(path, rf"{name} looks like .*{hint}.*supported: " if hint else "in no known format; supported: ")
    found = inspected(tmp_path / name)
    assert (found["format"], [problem["file"] for problem in found["problems"]]) == ("unknown", [name])
    assert found["files"] == [{"path": name, "nbytes": len(content), "tensors": 0, "verified": []}]


@pytest.mark.parametrize("name", ["weights.mpack", "net.qlknn", "weights"])
def test_flax_msgpack_by_its_content(tmp_path, name):
    flax = pytest.importorskip("flax.serialization")
    for tree in ({"params": {"w": np.ones(3)}}, {f"l{i}": np.ones(2) for i in range(20)}, {"a" * 40: np.ones(2)}):
        (tmp_path / name).write_bytes(flax.msgpack_serialize(tree))
        assert len(lm.open_checkpoint(tmp_path / name)) == len(tree)


@pytest.mark.parametrize("name", ["net.nqx", "net.npy", "net.bin", "net"])
@pytest.mark.parametrize("first", [b"", b'{"width": 8, "text": "' + b"x" * 2000 + b'"}\n'])
def test_leaves_of_equinox_by_their_content(tmp_path, name, first):
    with open(tmp_path / name, "wb") as file:  # as `tree_serialise_leaves` writes a model's arrays
        file.write(first)
        for shape in ((2, 3), (4,)):
            np.save(file, np.ones(shape, np.float32))
    if first and name.endswith((".npy", ".bin")):
        return  # other content than its name says
    refused(tmp_path / name, r"leaves of an Equinox model, which have no names; .*file\.readline\(\)")


INDEXES = {"safetensors": "model.safetensors.index.json", "weights.h5": "model.weights.json"}
NAMES = ("model.safetensors", "model.weights.h5", *INDEXES.values())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [*NAMES, "model.keras", "model.npz", "model.npy", "model.bin"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "pointer"])
def test_what_is_not_a_regular_file_is_refused_unopened(tmp_path, name, kind):
    """Opening a pipe waits for somebody to write into it."""
    path = tmp_path / name
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98765\n")
    words = rf"{name}: expected .*, found a folder, a pipe or a device"
    if kind == "pointer":
        words = "LFS pointer: expected 98765 bytes.*git lfs pull"
    for where in [path] * (kind != "folder") + [tmp_path] * (name in NAMES):
        refused(where, words, path)
        if kind == "pipe":
            assert "a pipe or a device" in inspected(where)["problems"][0]["message"]


@pytest.mark.parametrize("suffix", INDEXES)
@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("x" * 300, "expected a shard's file name, found 'x+.*x'.*File name too long"),
        ("a/" * 3000, "expected a shard's file name, .*File name too long"),
        ("\ud800", "expected a JSON object"),
        ("round", "round"),
        ("to_round", "round"),
        ("absent", "absent.*no such file"),
        ("folder", "folder"),
        ("pipe", "pipe"),
        (3, "expected a shard's file name, found 3"),
        (["a", 1], "expected a shard's file name"),
        ("/etc/passwd", "inside its folder"),
        ("../other.safetensors", "inside its folder"),
        ("x/../../other.safetensors", "inside its folder"),
    ],
)
def test_names_of_shards_that_cannot_be_files(tmp_path, suffix, shard, message):
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "to_round").symlink_to("round")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / INDEXES[suffix]).write_text(json.dumps({"weight_map": {"a": shard}}))
    refused(tmp_path, message)


@pytest.mark.parametrize("suffix", INDEXES)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object, found a list"),
        ("{}", "expected a 'weight_map' object"),
        ('{"weight_map": []}', "expected a 'weight_map' object"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "found 'a' twice"),
        # A key that is there twice is found at any depth.
        ('{"a" : 1, "a":2, "b":":"}', "twice"),
        ('{"x":[{"a":1,"a":1}]}', "twice"),
        (r'{"x":1,"\u0078":1}', "twice"),
    ],
)
def test_an_index_that_cannot_be_read(tmp_path, suffix, text, message):
    (tmp_path / INDEXES[suffix]).write_text(text)
    refused(tmp_path, message, tmp_path / INDEXES[suffix])
    assert [problem["file"] for problem in inspected(tmp_path)["problems"]] == [INDEXES[suffix]]


def test_several_indexes_are_ambiguous(tmp_path):
    save_file({"w": np.ones(2)}, tmp_path / "w.safetensors")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text('{"weight_map": {"w": "w.safetensors"}}')
    refused(tmp_path, "2 index files")
    assert "2 index files" in inspected(tmp_path)["problems"][0]["message"]
    (tmp_path / "b.safetensors.index.json").rename(tmp_path / INDEXES["safetensors"])
    assert list(lm.open_checkpoint(tmp_path)) == ["w"]  # the one called `model` counts
    (tmp_path / INDEXES["safetensors"]).unlink()
    assert list(lm.open_checkpoint(tmp_path)) == ["w"]  # or the only one


def test_it_is_a_mapping_of_str_to_lazy_tensors(tmp_path):
    save_file({"w": np.array([1, 2], np.uint8)}, tmp_path / "model.safetensors")
    with lm.open_checkpoint(str(tmp_path)) as checkpoint:
        assert isinstance(checkpoint, lm.Checkpoint)
        assert "w" in checkpoint and "v" not in checkpoint
        assert checkpoint["w"] is checkpoint["w"]
        assert (checkpoint.path, checkpoint.nbytes) == (str(tmp_path), 2)
        with pytest.raises(KeyError, match="'v' is not a tensor of"):
            checkpoint["v"]
        np.testing.assert_array_equal(checkpoint["w"], [1, 2])
    np.testing.assert_array_equal(checkpoint["w"], [1, 2])  # closed files open again


def test_files_are_told_apart_by_their_first_bytes(tmp_path):
    np.savez(tmp_path / "model.npz", w=np.arange(3))
    np.save(tmp_path / "model.npy", np.arange(3))
    assert list(lm.open_checkpoint(tmp_path / "model.npz")) == ["w"]
    assert list(lm.open_checkpoint(tmp_path / "model.npy")) == ["model"]
    (tmp_path / "model.npz").rename(tmp_path / "model.keras")
    refused(tmp_path / "model.keras", r"expected model\.weights\.h5 in the archive")
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    refused(tmp_path / "model.bin", "model.bin is truncated")


def test_a_folder_of_weights_may_have_other_folders(tmp_path):
    """What a preset's folder holds beside its weights, checkpoints of its training among it, decides nothing."""
    save_file({"w": np.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "_CHECKPOINT_METADATA").write_text("{}")
    assert list(lm.open_checkpoint(tmp_path)) == ["w"]
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "12: expected an Orbax item that holds arrays, found no folders")


def test_a_missing_package_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "x.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "manifest.ocdbt").write_bytes(b"")
    for module, name, hint in (("h5py", "x.weights.h5", "h5py"), ("tensorstore", "orbax", r"'lazymodel\[orbax\]'")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(lm.CheckpointError, match=f"pip install {hint}"):
            lm.open_checkpoint(tmp_path / name)


LONG = "n" * 100_000


def _header(folder, name):
    text = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def _index(folder, weights):
    save_file({"a": np.zeros(3)}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _archive(folder):
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.writestr(f"{LONG[:60_000]}.npy", b"\x93NUMPY\x01\x00")


def _links(folder):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "x.h5", "w") as file:
        file["w"] = h5py.ExternalLink(LONG[:50_000], "x")


def _quantized(folder):
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": LONG}}))
    save_file({"a": np.zeros(3)}, folder / "model.safetensors")


LENGTHY = {
    "a name": lambda folder: _header(folder, LONG),
    "words": lambda folder: _header(folder, "n " * 50_000),
    "a tensor that is missing": lambda folder: _index(folder, {LONG: "a.safetensors"}),
    "many files": lambda folder: _index(folder, {str(index): f"{index}.safetensors" for index in range(2000)}),
    "a path": lambda folder: _index(folder, {"a": f"../{LONG}"}),
    "a member": _archive,
    "a link": _links,
    "a method": _quantized,
}


@pytest.mark.parametrize("kind", LENGTHY)
def test_what_files_say_is_not_quoted_at_length(tmp_path, kind):
    LENGTHY[kind](tmp_path)
    files = [path for path in tmp_path.iterdir() if path.name.startswith("x.")]
    message = refused(files[0] if files else tmp_path, ".", tmp_path)
    assert len(message) < 5000
    assert ("1,992 more" in message) == (kind == "many files")

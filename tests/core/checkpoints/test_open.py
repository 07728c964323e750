"""`open_checkpoint` says what it found, or what it could have opened."""

import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

from lazymodel._errors import CheckpointError
from lazymodel.checkpoints import Checkpoint, open_checkpoint


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at .*absent"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="found no checkpoint in folder .*; supported: "):
        open_checkpoint(tmp_path)


def test_unknown_format(tmp_path):
    path = tmp_path / "model.weights"
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match=r"model\.weights is in no known format; supported: .*safetensors"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "content", "mend"),
    [
        ("pytorch_model.bin", b"PK\x03\x04", r"PyTorch.*safetensors\.torch\.save_file"),
        ("model.ckpt-1.index", b"", r"TensorFlow.*save_weights"),
        ("flax_model.msgpack", b"\x81", r"Flax.*msgpack_restore"),
        ("checkpoint_10", b"\x81", r"Flax.*msgpack_restore"),
        ("model.eqx", b"\x93NUMPY", r"Equinox.*tree_deserialise_leaves"),
        ("params.pkl", b"\x80", r"pickle.*lm\.save"),
    ],
)
def test_formats_that_are_known_and_not_read_are_named_with_their_mend(tmp_path, name, content, mend):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=rf"{name} looks like .*{mend}.*supported: "):
            open_checkpoint(path)


def test_a_gguf_file_by_another_name_is_read_as_one(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="model.bin is truncated"):
        open_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.weights.h5", "model.keras", "model.weights.json", "model.npz", "model.npy"],
)
def test_git_lfs_pointers(tmp_path, name):
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98765\n")
    with pytest.raises(CheckpointError, match="LFS pointer: expected 98765 bytes.*git lfs pull") as info:
        open_checkpoint(path)
    assert str(path) in str(info.value)


NAMES = ("model.safetensors", "model.weights.h5", "model.weights.json", "model.safetensors.index.json")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [*NAMES, "model.keras", "model.npz", "model.npy", "model.bin"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_refused_unopened(tmp_path, name, kind):
    """Opening a pipe waits for somebody to write into it."""
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    for where in [path] * (kind != "folder") + [tmp_path] * (name in NAMES):
        with pytest.raises(CheckpointError, match=rf"{name}: expected a file, found a folder, a pipe or a device"):
            open_checkpoint(where)


@pytest.mark.parametrize("suffix", ["safetensors", "weights.h5"])
@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("x" * 300, "expected a shard's file name, found 'x+.*x', which cannot be one .*File name too long"),
        ("a/" * 3000, "expected a shard's file name, .*File name too long"),
        ("round", r"round.*which cannot be one|missing round"),
        ("to_round", r"round.*which cannot be one|missing to_round"),
        ("absent", "missing absent"),
        ("folder", "missing folder"),
        ("pipe", "missing pipe"),
    ],
)
def test_names_of_shards_that_cannot_be_files(tmp_path, suffix, shard, message):
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "to_round").symlink_to("round")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    index = "model.weights.json" if suffix == "weights.h5" else "model.safetensors.index.json"
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match=message) as info:
        open_checkpoint(tmp_path)
    assert index in str(info.value)


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "round", "round/model.safetensors"])
def test_paths_that_cannot_be(tmp_path, path):
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(CheckpointError, match="there is no checkpoint at "):
        open_checkpoint(tmp_path / path)


def test_several_indexes_are_ambiguous(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match="2 index files"):
        open_checkpoint(tmp_path)


def test_it_is_a_mapping_of_str_to_lazy_tensors(tmp_path):
    header = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2")
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert "w" in checkpoint
        assert "v" not in checkpoint
        assert checkpoint["w"] is checkpoint["w"]
        assert checkpoint.path == str(tmp_path)
        assert checkpoint.nbytes == 2
        with pytest.raises(KeyError, match="'v' is not a tensor of"):
            checkpoint["v"]
        np.testing.assert_array_equal(checkpoint["w"], [1, 2])
    np.testing.assert_array_equal(checkpoint["w"], [1, 2])  # closed files open again


def test_numpy_files_and_archives_are_told_apart(tmp_path):
    np.savez(tmp_path / "model.npz", w=np.arange(3))
    np.save(tmp_path / "model.npy", np.arange(3))
    assert list(open_checkpoint(tmp_path / "model.npz")) == ["w"]
    assert list(open_checkpoint(tmp_path / "model.npy")) == ["model"]
    (tmp_path / "model.npz").rename(tmp_path / "model.keras")
    with pytest.raises(CheckpointError, match=r"expected model\.weights\.h5 in the archive"):
        open_checkpoint(tmp_path / "model.keras")


def test_a_folder_of_weights_may_have_other_folders(tmp_path):
    """What a preset's folder holds beside its weights, checkpoints of its training among it, decides nothing."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2")
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "_CHECKPOINT_METADATA").write_text("{}")
    assert list(open_checkpoint(tmp_path)) == ["w"]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="12: expected an Orbax item that holds arrays, found no folders"):
        open_checkpoint(tmp_path)


def test_safetensors_need_no_h5py(tmp_path):
    """Importing the checkpoints imports no format's library; and a missing one is one clear error."""
    (tmp_path / "x.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    code = (
        "import sys; sys.modules['h5py'] = None\n"
        "from lazymodel.checkpoints import open_checkpoint\n"
        "from lazymodel._errors import CheckpointError\n"
        "assert not {'safetensors', 'keras', 'torch', 'tensorstore', 'orbax'} & set(sys.modules)\n"
        "try: open_checkpoint(sys.argv[1])\n"
        "except CheckpointError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.weights.h5")], capture_output=True, text=True, check=True
    )
    assert "pip install h5py" in result.stdout


LONG = "n" * 100_000


def _header(path, entries):
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def _lies(folder):
    _header(folder / "x.safetensors", {LONG: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})


def _words(folder):
    _header(folder / "x.safetensors", {"n " * 50_000: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})


def _lacks(folder):
    save_file({"a": np.zeros(3)}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {LONG: "a.safetensors"}}))


def _absent(folder):
    shards = {str(index): f"{index}.safetensors" for index in range(20_000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def _leads_out(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": f"../{LONG}"}}))


def _archive(folder):
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.writestr(f"{LONG[:60_000]}.npy", b"\x93NUMPY\x01\x00")


def _links(folder):
    with pytest.importorskip("h5py").File(folder / "x.h5", "w") as file:
        file["w"] = pytest.importorskip("h5py").ExternalLink(LONG[:50_000], "x")


def _quantized(folder):
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": LONG}}))
    save_file({"a": np.zeros(3)}, folder / "model.safetensors")


@pytest.mark.parametrize("make", [_lies, _words, _lacks, _absent, _leads_out, _archive, _links, _quantized])
def test_what_files_say_is_not_quoted_at_length(tmp_path, make):
    make(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.name.startswith("x.")]
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(files[0] if files else tmp_path)
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 5000
    if make is _absent:
        assert "20000 shard files" in str(error.value)

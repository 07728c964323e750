"""`inspect_checkpoint` lists what there is and every problem, where `open_checkpoint` stops at the first."""

import dataclasses
import hashlib
import json
import os
import re

import numpy as np
import pytest

from lazymodel._errors import CheckpointError
from lazymodel.checkpoints import open_checkpoint
from lazymodel.checkpoints._inspect import FileSummary, Problem, TensorSummary, inspect_checkpoint

INDEX = "model.safetensors.index.json"
DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8"}


def write(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def shard(number, total=3):
    return f"model-{number:05}-of-{total:05}.safetensors"


def write_index(folder, weight_map, **more):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))


@pytest.fixture
def folder(tmp_path):
    """Three shards with an index: `a`, `b`; `c`; `d`."""
    f32, f16 = np.zeros((2, 3), np.float32), np.zeros(4, np.float16)
    write(tmp_path / shard(1), {"a": f32, "b": f16}, {"format": "pt"})
    write(tmp_path / shard(2), {"c": f32})
    write(tmp_path / shard(3), {"d": f16})
    write_index(tmp_path, {"a": shard(1), "b": shard(1), "c": shard(2), "d": shard(3)}, metadata={"total_size": 64})
    return tmp_path


def messages(path):
    return [problem.message for problem in inspect_checkpoint(path).problems]


def names(summary):
    return [tensor.name for tensor in summary.tensors]


# --- what there is ---------------------------------------------------------------------------------------------------


def test_what_is_in_an_index(folder):
    summary = inspect_checkpoint(folder)
    assert summary.path == str(folder)
    assert summary.format == "safetensors"
    assert summary.metadata == {"total_size": 64, "format": "pt"}
    assert summary.problems == ()
    assert tuple(tensor._replace(offset=None) for tensor in summary.tensors) == (
        TensorSummary("a", "float32", (2, 3), 24, shard(1)),
        TensorSummary("b", "float16", (4,), 8, shard(1)),
        TensorSummary("c", "float32", (2, 3), 24, shard(2)),
        TensorSummary("d", "float16", (4,), 8, shard(3)),
    )
    assert summary.files == tuple(
        FileSummary(name, (folder / name).stat().st_size, tensors, ())
        for name, tensors in {INDEX: 0, shard(1): 2, shard(2): 1, shard(3): 1}.items()
    )
    assert summary.nbytes == 64
    assert summary.dtypes == {"float32": 48, "float16": 16}


def test_it_is_what_open_checkpoint_gives(folder):
    """From the folder, from its index, from one shard, and without the index."""
    for path in (folder, folder / INDEX, folder / shard(1)):
        summary = inspect_checkpoint(path)
        with open_checkpoint(path) as checkpoint:
            assert names(summary) == list(checkpoint)
            assert summary.nbytes == checkpoint.nbytes
            assert {file.path for file in summary.files} - {INDEX} == {os.path.basename(f) for f in checkpoint.files}
        assert summary.problems == ()
    (folder / INDEX).unlink()
    summary = inspect_checkpoint(folder)
    assert names(summary) == ["a", "b", "c", "d"]
    assert summary.problems == ()


def test_no_tensor_is_read(folder, monkeypatch):
    from lazymodel._tensors.files import FileSource

    monkeypatch.setattr(FileSource, "read_into", lambda *_: pytest.fail("read a tensor"))
    assert len(inspect_checkpoint(folder).tensors) == 4


def test_as_a_dictionary(folder):
    write(folder / shard(2), {"x": np.zeros(1, np.int8)})
    found = inspect_checkpoint(folder).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["files"][1] == {"path": shard(1), "nbytes": (folder / shard(1)).stat().st_size, "tensors": 2,
                                 "verified": []}  # fmt: skip
    first = {"name": "a", "dtype": "float32", "shape": [2, 3], "nbytes": 24, "file": shard(1)}
    assert found["tensors"][0] == first | {"offset": (folder / shard(1)).stat().st_size - 32}
    assert [problem["file"] for problem in found["problems"]] == [shard(2), shard(2)]
    assert {key: found[key] for key in ("path", "format", "num_tensors", "nbytes", "dtypes", "metadata")} == {
        "path": str(folder),
        "format": "safetensors",
        "num_tensors": 3,
        "nbytes": 40,
        "dtypes": {"float32": 24, "float16": 16},
        "metadata": {"total_size": 64, "format": "pt"},
    }


def test_metadata_that_json_cannot_say(folder):
    deep = json.loads("[" * 500 + "]" * 500)
    write_index(folder, {"a": shard(1)}, metadata={"nan": float("nan"), "deep": deep, "list": [1, "x", None]})
    summary = inspect_checkpoint(folder)
    assert summary.metadata["nan"] == "nan"
    assert summary.metadata["list"] == [1, "x", None]
    json.dumps(summary.to_dict(), allow_nan=False)


def test_keras_files(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros((2, 5), np.float32)
        file["layers/empty/vars/0"] = np.zeros((0, 5), np.float32)
    for path in (tmp_path, tmp_path / "model.weights.h5"):
        summary = inspect_checkpoint(path)
        assert summary.format == "hdf5"
        assert summary.problems == ()
        assert summary.tensors == (
            TensorSummary("layers/dense/vars/0", "float32", (2, 5), 40, "model.weights.h5"),
            TensorSummary("layers/empty/vars/0", "float32", (0, 5), 0, "model.weights.h5"),
        )


def test_orbax_folders(tmp_path):
    """Two arrays as zarr, one of which has lost a chunk, in a step of their own."""
    tensorstore = pytest.importorskip("tensorstore")
    item = tmp_path / "3" / "default"
    for name in ("a.kernel", "b"):
        spec = {"driver": "zarr", "kvstore": f"file://{item / name}", "metadata": {"chunks": [2, 3]}}
        array = tensorstore.open(spec, create=True, dtype=np.float32, shape=(4, 3)).result()
        array.write(np.ones((4, 3), np.float32)).result()
    summary = inspect_checkpoint(tmp_path)
    assert summary.format == "orbax"
    assert summary.problems == ()
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in summary.tensors] == [
        ("a/kernel", "float32", (4, 3), 48), ("b", "float32", (4, 3), 48),
    ]  # fmt: skip
    assert {file.path for file in summary.files} == {
        f"3/default/{name}/{file}" for name in ("a.kernel", "b") for file in (".zarray", "0.0", "1.0")
    }
    (item / "b" / "1.0").unlink()
    (problem,) = inspect_checkpoint(tmp_path).problems  # elsewhere a warning
    assert re.search("array 'b' lacks 1 of its chunks", problem.message)
    (item / "b" / ".zarray").write_text("{}")
    summary = inspect_checkpoint(item)
    assert names(summary) == ["a/kernel"]
    assert "expected an array that b/.zarray describes" in summary.problems[0].message
    item.rename(tmp_path / "3" / "default.orbax-checkpoint-tmp")
    summary = inspect_checkpoint(tmp_path / "3" / "default.orbax-checkpoint-tmp")
    assert summary.format == "orbax"
    assert "is half written" in summary.problems[0].message


def test_numpy_files(tmp_path):
    np.savez(tmp_path / "m.npz", a=np.zeros((2, 3), np.float32), b=np.zeros(4, np.int8))
    np.save(tmp_path / "c.npy", np.zeros(5))
    summary = inspect_checkpoint(tmp_path / "m.npz")
    assert summary.format == "numpy"
    assert summary.tensors == (
        TensorSummary("a", "float32", (2, 3), 24, "m.npz"), TensorSummary("b", "int8", (4,), 4, "m.npz"),
    )  # fmt: skip
    assert inspect_checkpoint(tmp_path / "c.npy").tensors == (TensorSummary("c", "float64", (5,), 40, "c.npy"),)
    (tmp_path / "m.npz").write_bytes((tmp_path / "m.npz").read_bytes()[:-5])
    summary = inspect_checkpoint(tmp_path / "m.npz")
    assert summary.format == "numpy"
    assert "truncated or corrupt" in summary.problems[0].message


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at .*absent: No such file or directory"):
        inspect_checkpoint(tmp_path / "absent")
    (tmp_path / "README.md").write_text("read me")
    with pytest.raises(CheckpointError, match="found no checkpoint in folder .*; supported: a .safetensors file"):
        inspect_checkpoint(tmp_path)


def test_what_is_in_no_known_format(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00.")
    summary = inspect_checkpoint(tmp_path / "model.bin")
    assert summary.format == "unknown"
    assert summary.files == (FileSummary("model.bin", 6, 0, ()),)
    assert [problem.file for problem in summary.problems] == ["model.bin"]
    assert "is in no known format" in summary.problems[0].message


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert "a pipe or a device" in messages(path)[0]
    write_index(tmp_path, {"a": "model.safetensors"})
    assert "model.safetensors: expected a file, found a folder, a pipe or a device" in messages(tmp_path)[0]


def test_several_indexes(folder):
    for name in ("x", "y"):
        (folder / f"{name}.safetensors.index.json").write_text((folder / INDEX).read_text())
    assert messages(folder) == []  # the one called `model` counts
    (folder / INDEX).unlink()
    (message,) = messages(folder)
    assert "2 index files" in message


# --- problems --------------------------------------------------------------------------------------------------------


def test_all_problems_are_listed(folder):
    """One of each kind that a shard can have, and what is well is listed still."""
    write(folder / shard(5), {"e": np.zeros(2, np.float32), "b": np.zeros(4, np.float16)})
    weights = {"a": shard(1), "b": shard(1), "gone": shard(1), "c": shard(2), "d": shard(3), "f": shard(4),
               "e": shard(5), "g": "../g.safetensors", "h": 7, "i": shard(6)}  # fmt: skip
    write_index(folder, weights)
    (folder / shard(2)).write_bytes((folder / shard(2)).read_bytes()[:-1])
    (folder / shard(3)).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98765\n")
    (folder / shard(6)).write_bytes((10**12).to_bytes(8, "little"))
    summary = inspect_checkpoint(folder)
    assert names(summary) == ["a", "b", "e"]
    found = {(problem.file, problem.message.removeprefix(f"{folder}/")) for problem in summary.problems}
    expected = {
        (INDEX, r"expected shards inside its folder, found '\.\./g\.safetensors'; do not trust this checkpoint"),
        (INDEX, r"expected a shard's file name, found 7"),
        (shard(1), r"lacks 1 tensor \('gone'\), which model\.safetensors\.index\.json says it has; download both"),
        (shard(2), r"is truncated: expected 24 bytes of tensors, found 23\."),
        (shard(3), r"is a Git LFS pointer: expected 98765 bytes of weights.*git lfs pull"),
        (shard(4), r"expected 1 tensor \('f'\) as model\.safetensors\.index\.json says, found no such file"),
        (shard(5), r"has 1 tensor \('b'\), which model\.safetensors\.index\.json puts in other shards"),
        (shard(6), r"is no safetensors file, or corrupt: expected a header of at most"),
    }
    assert len(found) == len(summary.problems) == len(expected)
    for file, pattern in expected:
        assert [m for f, m in found if f == file and re.search(pattern, m)], (file, pattern)
    assert [file.path for file in summary.files] == [INDEX, *(shard(k) for k in (1, 2, 3, 5, 6))]


def test_tensors_that_the_index_does_not_mention(folder):
    write_index(folder, {"a": shard(1), "c": shard(2), "d": shard(3)})
    summary = inspect_checkpoint(folder)
    assert names(summary) == ["a", "c", "d"]
    message = f"{folder / shard(1)}: has 1 tensor ('b'), which {INDEX} does not mention and nothing will load"
    assert [problem.message.split(";")[0] for problem in summary.problems] == [message]


def test_one_shard_under_two_names(folder):
    write_index(folder, {"a": shard(1), "b": f"./{shard(1)}"})
    assert messages(folder) == []


def test_thousands_of_lost_tensors_are_one_problem(folder):
    write_index(folder, {f"layer.{i}": shard(1) for i in range(5000)})
    lacks, _ = messages(folder)
    assert "lacks 5,000 tensors ('layer.0', 'layer.1', " in lacks
    assert len(lacks) < 500


def test_shards_outside_the_folder(folder, tmp_path_factory):
    away = write(tmp_path_factory.mktemp("away") / "x.safetensors", {"a": np.zeros(1, np.int8)})
    (folder / "link.safetensors").symlink_to(away)
    (folder / "round.safetensors").symlink_to("round.safetensors")
    write_index(
        folder,
        {
            "a": "link.safetensors",
            "b": str(away),
            "c": "round.safetensors",
            "d": "x" * 300,
            "e": "",
            "f": "a\0b",
            "g": [shard(1)],
        },
    )
    summary = inspect_checkpoint(folder)
    assert summary.tensors == ()
    patterns = {
        "a": "'link.safetensors' is a symbolic link to .*copy the file into the folder",
        "b": "expected shards inside its folder, found '/.*do not trust this checkpoint",
        "c": "round",
        "d": "x{300}",
        "e": "expected a shard's file name, found ''",
        "f": "expected a shard's file name, found 'a",
        "g": r"expected a shard's file name, found \['model",
    }
    assert len(summary.problems) == len(patterns)
    for pattern in patterns.values():
        assert [problem for problem in summary.problems if re.search(pattern, problem.message)], pattern


def test_a_link_that_leads_nowhere(folder):
    """As in a cache whose blobs were removed."""
    (folder / shard(2)).unlink()
    (folder / shard(2)).symlink_to("../../blobs/0123")
    write_index(folder, {"c": shard(2)})
    (message,) = messages(folder)
    assert "symbolic link to" in message  # blobs of no cache
    (folder / shard(2)).unlink()
    (folder / shard(2)).symlink_to("absent")
    (message,) = messages(folder)
    assert "found a link to absent, which is not there" in message
    (folder / INDEX).unlink()
    assert any("found a link to absent, which is not there" in message for message in messages(folder))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{", "expected a JSON object"),
        (b"[]", "expected a JSON object, found a list"),
        (b"{}", "expected a 'weight_map' object"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "found 'a' twice"),
        (b"[" * 100_000, "expected a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "Git LFS pointer"),
    ],
)
def test_an_index_that_cannot_be_read(folder, text, expected):
    """The shards are looked at all the same."""
    (folder / INDEX).write_bytes(text)
    summary = inspect_checkpoint(folder)
    assert [problem.file for problem in summary.problems] == [INDEX]
    assert expected in summary.problems[0].message
    assert names(summary) == ["a", "b", "c", "d"]


def test_names_in_several_files_without_an_index(folder):
    (folder / INDEX).unlink()
    write(folder / shard(2), {"c": np.zeros(1, np.int8), "a": np.zeros(1, np.int8), "b": np.zeros(1, np.int8)})
    summary = inspect_checkpoint(folder)
    assert [(tensor.name, tensor.file) for tensor in summary.tensors] == [
        ("a", shard(1)), ("b", shard(1)), ("c", shard(2)), ("d", shard(3)),
    ]  # fmt: skip
    message = f"{folder / shard(2)} and {shard(1)} both have 2 tensors ('a', 'b'); keep one of them, or add an index"
    assert summary.problems == (Problem(shard(2), message),)


def test_numbered_shards_that_are_missing(tmp_path):
    write(tmp_path / shard(2), {"c": np.zeros(1, np.int8)})
    (message,) = messages(tmp_path)
    assert f"expected 3 shards as their names say, found 1; missing {shard(1)}, {shard(3)}. Download" in message
    write(tmp_path / "x-1-of-999999999.safetensors", {"x": np.zeros(1, np.int8)})  # a number to make one list them all
    _, message = messages(tmp_path)
    assert "found 1; missing x-000000002-of-999999999.safetensors, x-000000003-of-" in message
    assert len(message) < 1000


def test_keras_shards(tmp_path):
    h5py = pytest.importorskip("h5py")

    def h5(name, *datasets):
        with h5py.File(tmp_path / name, "w") as file:
            for dataset in datasets:
                file[dataset] = np.zeros(3, np.float32)

    h5("m_0.weights.h5", "layers/a/vars/0", "layers/b/vars/0", "layers/b/vars/1", "layers/odd/vars/0")
    h5("m_1.weights.h5", "layers/b/vars/2", "layers/b/vars/1")
    (tmp_path / "m_3.weights.h5").write_bytes((tmp_path / "m_0.weights.h5").read_bytes()[:100])
    weights = {
        "/layers/a/vars": "m_0.weights.h5",
        "/layers/b/vars": ["m_0.weights.h5", "m_1.weights.h5"],
        "/layers/c/vars": "m_1.weights.h5",
        "/layers/d/vars": "m_2.weights.h5",
        "/layers/e/vars": "m_3.weights.h5",
    }
    (tmp_path / "model.weights.json").write_text(json.dumps({"weight_map": weights}))
    for path in (tmp_path, tmp_path / "model.weights.json"):
        summary = inspect_checkpoint(path)
        assert summary.format == "hdf5"
        assert names(summary) == [f"layers/{name}" for name in ("a/vars/0", "b/vars/0", "b/vars/1", "b/vars/2")]
        patterns = {
            "m_0.weights.h5": r"has 1 group \('layers/odd/vars'\), which model\.weights\.json does not mention",
            "m_1.weights.h5": r"lacks 1 group \('layers/c/vars'\), which|both have 1 tensor \('layers/b/vars/1'\)",
            "m_2.weights.h5": r"expected 1 group \('layers/d/vars'\) as .*, found no such file",
            "m_3.weights.h5": r"truncated or corrupt",
        }
        assert {problem.file for problem in summary.problems} == set(patterns)
        assert len(summary.problems) == 5
        for problem in summary.problems:
            assert re.search(patterns[problem.file or ""], problem.message)


def test_a_tensor_that_cannot_be_used(tmp_path):
    """What is only found out tensor by tensor is a problem of that tensor alone."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["good"] = np.zeros(3, np.float32)
        file["text"] = "not a weight"
    summary = inspect_checkpoint(tmp_path)
    assert names(summary) == ["good"]
    (problem,) = summary.problems
    assert problem.file == "model.weights.h5"
    assert "dataset 'text': expected numbers" in problem.message
    (tmp_path / "model.weights.h5").write_bytes(b"\x89HDF")
    summary = inspect_checkpoint(tmp_path)
    assert summary.format == "hdf5"
    assert "truncated or corrupt" in summary.problems[0].message


# --- hashes ----------------------------------------------------------------------------------------------------------


def test_verify(folder):
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))
    assert {file.verified for file in inspect_checkpoint(folder).files} == {()}
    summary = inspect_checkpoint(folder, verify=True)
    assert summary.problems == ()
    assert {file.verified for file in summary.files} == {("sha256",)}
    content = bytearray((folder / shard(2)).read_bytes())
    content[-1] ^= 1
    (folder / shard(2)).write_bytes(content)
    (folder / "SHA256SUMS").write_text("".join(line for line in lines if shard(3) not in line))
    summary = inspect_checkpoint(folder, verify=True)
    assert [file.path for file in summary.files if file.verified] == [INDEX, shard(1)]
    wrong, lacking = summary.problems
    assert wrong.file == shard(2)
    assert "expected sha256" in wrong.message
    assert lacking.file is None
    assert f"no hash is known for {folder / shard(3)}:" in lacking.message
    (folder / "MD5SUMS").write_bytes(b"x" * (17 << 20))
    assert "MD5SUMS: expected a manifest of at most" in inspect_checkpoint(folder, verify=True).problems[0].message


# --- for a person ----------------------------------------------------------------------------------------------------


def test_the_report(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    write(folder / shard(3), {f"layer.{i}.w": np.zeros(256, np.float32) for i in range(3000)})
    write_index(folder, {"a": shard(1), "b": shard(1), **{f"layer.{i}.w": shard(3) for i in range(3000)}})
    text = str(inspect_checkpoint(folder))
    lines = text.splitlines()
    assert lines[0] == f"{folder}: safetensors, 3,002 tensors, 2.93 MiB in 3 files"
    assert "dtypes: float32 2.93 MiB, float16 8 B" in lines
    assert "metadata: format = pt" in lines
    assert any(
        re.fullmatch(rf"layer\.{{0\.\.2999}}\.w +3,000 +\(256\) +float32 +2\.93 MiB +{shard(3)}", x) for x in lines
    )
    assert lines[-1] == "no problems found"
    assert len(lines) < 20
    (folder / shard(3)).unlink()
    lines = str(inspect_checkpoint(folder)).splitlines()
    assert lines[-2] == "1 problem found:"
    assert lines[-1].startswith(f"  - {folder / shard(3)}: expected 3,000 tensors ('layer.0.w', ")


def test_the_report_of_a_hostile_file(tmp_path):
    """Names reach the terminal without control characters, and a name of a megabyte does not fill it."""
    tensors = {"\x1b[31mred": 1, "n" * 1_000_000: 2, "9" * 5000: 3, "[bold]": 4, "8" * 5000: 5}
    write(
        tmp_path / os.fsdecode(b"model\xff.safetensors"),
        {name: np.zeros(size, np.int8) for name, size in tensors.items()},
        {"\x1b[2J": "x" * 1_000_000, **{str(i): "" for i in range(100)}},
    )
    summary = inspect_checkpoint(tmp_path)
    text = str(summary)
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    assert "[bold]" in text
    assert len(text) < 10_000
    assert "metadata: … and 93 more" in text
    assert "model\\udcff.safetensors" in text
    text.encode()  # a file name that is no UTF-8 can be printed
    assert names(summary) == list(tensors)


def test_many_problems(folder):
    write_index(folder, {f"t{i}": f"{i}.safetensors" for i in range(100)})
    summary = inspect_checkpoint(folder)
    assert len(summary.problems) == 100
    lines = str(summary).splitlines()
    assert "100 problems found:" in lines
    assert lines[-1] == "  … and 60 more"


def test_repr(folder):
    summary = inspect_checkpoint(folder)
    assert repr(summary) == f"CheckpointSummary('{folder}': safetensors, 4 tensors, 64 B in 4 files, 0 problems)"
    assert repr(dataclasses.replace(summary, problems=(Problem(None, "x"),))).endswith("1 problem)")

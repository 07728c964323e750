"""`lazymodel inspect` lists what there is and every problem, where `open_checkpoint` stops at the first."""

import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import save

from tests.command import command, inspected, problems

INDEX = "model.safetensors.index.json"


def write(path, tensors, metadata=None):
    path.write_bytes(save(tensors, metadata))


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


def names(found):
    return [tensor["name"] for tensor in found["tensors"]]


# --- what there is ---------------------------------------------------------------------------------------------------


def test_what_is_in_an_index(folder):
    found = inspected(folder)
    sizes = {name: (folder / name).stat().st_size for name in (INDEX, shard(1), shard(2), shard(3))}
    counts = {INDEX: 0, shard(1): 2, shard(2): 1, shard(3): 1}
    a = {"name": "a", "dtype": "float32", "shape": [2, 3], "nbytes": 24, "file": shard(1)}
    b = {"name": "b", "dtype": "float16", "shape": [4], "nbytes": 8, "file": shard(1)}
    assert found == {
        "schema": "lazymodel.inspect/1",
        "path": str(folder),
        "format": "safetensors",
        "metadata": {"total_size": 64, "format": "pt"},
        "num_tensors": 4,
        "nbytes": 64,
        "dtypes": {"float32": 48, "float16": 16},
        "files": [
            {"path": name, "nbytes": sizes[name], "tensors": count, "verified": []} for name, count in counts.items()
        ],
        "tensors": [
            a | {"offset": sizes[shard(1)] - 32},
            b | {"offset": sizes[shard(1)] - 8},
            a | {"name": "c", "file": shard(2), "offset": sizes[shard(2)] - 24},
            b | {"name": "d", "file": shard(3), "offset": sizes[shard(3)] - 8},
        ],
        "problems": [],
    }


def test_metadata_that_json_cannot_say(folder):
    deep = json.loads("[" * 500 + "]" * 500)
    write_index(folder, {"a": shard(1)}, metadata={"nan": float("nan"), "deep": deep, "list": [1, "x", None]})
    found = inspected(folder)
    assert found["metadata"]["nan"] == "nan"
    assert found["metadata"]["list"] == [1, "x", None]
    json.dumps(found, allow_nan=False)


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
    found = inspected(folder)
    assert names(found) == ["a", "b", "e"]
    shown = {(problem["file"], problem["message"].removeprefix(f"{folder}/")) for problem in found["problems"]}
    expected = {
        (INDEX, r"expected shards inside its folder, found '\.\./g\.safetensors'; do not trust this checkpoint"),
        (INDEX, r"expected a shard's file name, found 7"),
        (shard(1), r"is missing 1 tensor \('gone'\), which model\.safetensors\.index\.json says it has; download both"),
        (shard(2), r"is truncated: expected 24 bytes of tensors, found 23\."),
        (shard(3), r"is a Git LFS pointer: expected 98765 bytes of weights.*git lfs pull"),
        (shard(4), r"expected 1 tensor \('f'\) as model\.safetensors\.index\.json says, found no such file"),
        (shard(5), r"has 1 tensor \('b'\), which model\.safetensors\.index\.json puts in other shards"),
        (shard(6), r"is not a safetensors file, or corrupt: expected a header of at most"),
    }
    assert len(shown) == len(found["problems"]) == len(expected)
    for file, pattern in expected:
        assert [m for f, m in shown if f == file and re.search(pattern, m)], (file, pattern)
    assert [file["path"] for file in found["files"]] == [INDEX, *(shard(k) for k in (1, 2, 3, 5, 6))]


def test_tensors_that_the_index_does_not_mention(folder):
    write_index(folder, {"a": shard(1), "c": shard(2), "d": shard(3)})
    found = inspected(folder)
    assert names(found) == ["a", "c", "d"]
    message = f"{folder / shard(1)}: has 1 tensor ('b'), which {INDEX} does not mention and nothing will load"
    assert [problem["message"].split(";")[0] for problem in found["problems"]] == [message]


def test_thousands_of_lost_tensors_are_one_problem(folder):
    write_index(folder, {f"layer.{i}": shard(1) for i in range(5000)})
    lacks, _ = problems(folder)
    assert "is missing 5,000 tensors ('layer.0', 'layer.1', " in lacks
    assert len(lacks) < 500


def test_a_link_that_leads_nowhere(folder):
    """As in a cache whose blobs were removed."""
    (folder / shard(2)).unlink()
    (folder / shard(2)).symlink_to("../../blobs/0123")
    write_index(folder, {"c": shard(2)})
    (message,) = problems(folder)
    assert "symbolic link to" in message  # blobs of no cache
    (folder / shard(2)).unlink()
    (folder / shard(2)).symlink_to("absent")
    (message,) = problems(folder)
    assert "found a link to absent, which is not there" in message
    (folder / INDEX).unlink()
    assert any("found a link to absent, which is not there" in message for message in problems(folder))


def test_an_index_that_cannot_be_read(folder):
    """The shards are looked at all the same."""
    (folder / INDEX).write_bytes(b"{")
    found = inspected(folder)
    assert [problem["file"] for problem in found["problems"]] == [INDEX]
    assert names(found) == ["a", "b", "c", "d"]


def test_names_in_several_files_without_an_index(folder):
    (folder / INDEX).unlink()
    write(folder / shard(2), {"c": np.zeros(1, np.int8), "a": np.zeros(1, np.int8), "b": np.zeros(1, np.int8)})
    found = inspected(folder)
    assert [(tensor["name"], tensor["file"]) for tensor in found["tensors"]] == [
        ("a", shard(1)), ("b", shard(1)), ("c", shard(2)), ("d", shard(3)),
    ]  # fmt: skip
    message = f"{folder / shard(2)} and {shard(1)} both have 2 tensors ('a', 'b'); keep one of them, or add an index"
    assert found["problems"] == [{"file": shard(2), "message": message}]


def test_numbered_shards_that_are_missing(tmp_path):
    write(tmp_path / shard(2), {"c": np.zeros(1, np.int8)})
    (message,) = problems(tmp_path)
    assert f"expected 3 shards as their names say, found 1; missing {shard(1)}, {shard(3)}. Download" in message
    write(tmp_path / "x-1-of-999999999.safetensors", {"x": np.zeros(1, np.int8)})  # a number to make one list them all
    _, message = problems(tmp_path)
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
        found = inspected(path)
        assert found["format"] == "hdf5"
        assert names(found) == [f"layers/{name}" for name in ("a/vars/0", "b/vars/0", "b/vars/1", "b/vars/2")]
        patterns = {
            "m_0.weights.h5": r"has 1 group \('layers/odd/vars'\), which model\.weights\.json does not mention",
            "m_1.weights.h5": r"is missing 1 group \('layers/c/vars'\), which|both have 1 tensor \('layers/b/vars/1'\)",
            "m_2.weights.h5": r"expected 1 group \('layers/d/vars'\) as .*, found no such file",
            "m_3.weights.h5": r"truncated or corrupt",
        }
        assert {problem["file"] for problem in found["problems"]} == set(patterns)
        assert len(found["problems"]) == 5
        for problem in found["problems"]:
            assert re.search(patterns[problem["file"]], problem["message"])


def test_a_tensor_that_cannot_be_used(tmp_path):
    """What is only found out tensor by tensor is a problem of that tensor alone."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["good"] = np.zeros(3, np.float32)
        file["text"] = "not a weight"
    found = inspected(tmp_path)
    assert names(found) == ["good"]
    (problem,) = found["problems"]
    assert problem["file"] == "model.weights.h5"
    assert "dataset 'text': expected numbers" in problem["message"]
    (tmp_path / "model.weights.h5").write_bytes(b"\x89HDF")
    found = inspected(tmp_path)
    assert found["format"] == "hdf5"
    assert "truncated or corrupt" in found["problems"][0]["message"]


# --- for a person ----------------------------------------------------------------------------------------------------


def test_the_report(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    write(folder / shard(3), {f"layer.{i}.w": np.zeros(256, np.float32) for i in range(1000)})
    write_index(folder, {"a": shard(1), "b": shard(1), **{f"layer.{i}.w": shard(3) for i in range(1000)}})
    text = command("inspect", folder).out
    lines = text.splitlines()
    assert lines[0] == f"{folder}: safetensors, 1,002 tensors, 1000.03 KiB in 3 files"
    assert "dtypes: float32 1000.02 KiB, float16 8 B" in lines
    assert "metadata: format = pt" in lines
    assert any(
        re.fullmatch(rf"layer\.{{0\.\.999}}\.w +1,000 +\(256\) +float32 +1000.00 KiB +{shard(3)}", x) for x in lines
    )
    assert lines[-1] == "no problems found"
    assert len(lines) < 20
    (folder / shard(3)).unlink()
    lines = command("inspect", folder).out.splitlines()
    assert lines[-2] == "1 problem found:"
    assert lines[-1].startswith(f"  - {folder / shard(3)}: expected 1,000 tensors ('layer.0.w', ")


def test_the_report_of_a_hostile_file(tmp_path):
    """Names reach the terminal without control characters, and a name of a megabyte does not fill it."""
    tensors = {"\x1b[31mred": 1, "n" * 1_000_000: 2, "9" * 5000: 3, "[bold]": 4, "8" * 5000: 5}
    write(
        tmp_path / os.fsdecode(b"model\xff.safetensors"),
        {name: np.zeros(size, np.int8) for name, size in tensors.items()},
        {"\x1b[2J": "x" * 1_000_000, **{str(i): "" for i in range(100)}},
    )
    found = inspected(tmp_path)
    text = command("inspect", tmp_path).out
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    assert "[bold]" in text
    assert len(text) < 10_000
    assert "metadata: … and 93 more" in text
    assert "model\\udcff.safetensors" in text
    text.encode()  # a file name that is no UTF-8 can be printed
    assert sorted(names(found)) == sorted(tensors)


def test_many_problems(folder):
    write_index(folder, {f"t{i}": f"{i}.safetensors" for i in range(100)})
    found = inspected(folder)
    assert len(found["problems"]) == 100
    lines = command("inspect", folder).out.splitlines()
    assert "100 problems found:" in lines
    assert lines[-1] == "  … and 60 more"


def test_one_shard_under_two_names(folder):
    write_index(folder, {"a": shard(1), "b": f"./{shard(1)}"})
    assert problems(folder) == []

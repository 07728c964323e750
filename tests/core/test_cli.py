"""The command line: what goes to which stream, exit statuses, and that it starts without any framework."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lazymodel import _cli
from lazymodel._cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path):
    """A safetensors file with one tensor, `w`, of two bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2")
    return path


def run(*arguments, code=None, **options):
    command = [sys.executable, *(("-m", "lazymodel") if code is None else ("-c", code)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_inspect(checkpoint, capsys):
    assert main(["inspect", str(checkpoint.parent)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{checkpoint.parent}: safetensors, 1 tensor, 2 B in 1 file\n")
    assert out.endswith("\nno problems found\n")
    assert err == ""


def test_inspect_json(checkpoint, capsys):
    """One document, and all of it."""
    assert main(["inspect", "--json", str(checkpoint)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "path": str(checkpoint),
        "format": "safetensors",
        "num_tensors": 1,
        "nbytes": 2,
        "dtypes": {"uint8": 2},
        "metadata": {},
        "files": [
            {"path": "model.safetensors", "nbytes": checkpoint.stat().st_size, "tensors": 1, "verified": []},
        ],
        "tensors": [{"name": "w", "dtype": "uint8", "shape": [2], "nbytes": 2, "file": "model.safetensors"}],
        "problems": [],
    }


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_problems_are_exit_status_1(checkpoint, capsys, json_option):
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    assert main(["inspect", str(checkpoint), *json_option]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    message = f"{checkpoint} is truncated: expected 2 bytes of tensors, found 1. Download or copy it again."
    if json_option:
        assert json.loads(out)["problems"] == [{"file": "model.safetensors", "message": message}]
    else:
        assert out.endswith(f"\n1 problem found:\n  - {message}\n")


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_nothing_there_is_exit_status_2(tmp_path, capsys, json_option):
    assert main(["inspect", str(tmp_path / "absent"), *json_option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"lazymodel: error: there is no checkpoint at {tmp_path}/absent: no such file or folder\n"
    assert main(["inspect", str(tmp_path), *json_option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lazymodel: error: found no checkpoint in folder {tmp_path}; supported: ")


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["inspect", "x", "--nonsense"], ["nonsense"]])
def test_wrong_usage_is_exit_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: lazymodel ")


def test_verify(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--verify"]) == 1
    assert "no hash is known" in capsys.readouterr().out
    (checkpoint.parent / "SHA256SUMS").write_text(f"{'0' * 64}  {checkpoint.name}\n")
    assert main(["inspect", str(checkpoint), "--verify"]) == 1
    assert f"expected sha256 {'0' * 64}" in capsys.readouterr().out
    assert main(["inspect", str(checkpoint)]) == 0


def test_interrupted(checkpoint, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lazymodel.checkpoints._inspect.inspect_checkpoint", interrupt)
    assert main(["inspect", str(checkpoint)]) == 130


def test_as_a_module(checkpoint):
    """Plain text where nobody watches, whatever the environment says about colours."""
    done = run("inspect", checkpoint, env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80"})
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "model.safetensors" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()[1:])
    assert run("inspect", checkpoint.parent / "absent").returncode == 2


def test_an_encoding_that_lacks_characters(checkpoint):
    done = run("inspect", checkpoint, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "no problems found" in done.stdout


def test_a_reader_that_leaves(checkpoint):
    """As `lazymodel inspect … | head -0` does."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lazymodel", "inspect", str(checkpoint)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_framework_is_imported(checkpoint):
    code = (
        "import sys; from lazymodel._cli import main; main(sys.argv[1:])\n"
        "print(*{'flax', 'h5py', 'keras', 'orbax', 'safetensors', 'tensorflow', 'torch'} & set(sys.modules))"
    )
    done = run("inspect", checkpoint, code=code)
    assert done.stdout.endswith("\nno problems found\n\n"), done.stdout + done.stderr


def test_the_script_of_the_distribution():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["lazymodel"].partition(":")
    assert getattr(importlib.import_module(module), name) is _cli.main

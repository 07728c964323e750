"""The command line: what goes to which stream, exit statuses, and that it starts without any framework."""

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import lazymodel
from lazymodel._cli import main as main_module
from lazymodel._cli import plan as planning
from lazymodel._cli.main import main, make_parser
from lazymodel._devices.topology import has_libtpu
from lazymodel._errors import LazyModelError

ROOT = Path(__file__).parents[3]


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
    offset = checkpoint.stat().st_size - 2
    assert json.loads(out) == {
        "schema": "lazymodel.inspect/1",
        "path": str(checkpoint),
        "format": "safetensors",
        "num_tensors": 1,
        "nbytes": 2,
        "dtypes": {"uint8": 2},
        "metadata": {},
        "files": [
            {"path": "model.safetensors", "nbytes": checkpoint.stat().st_size, "tensors": 1, "verified": []},
        ],
        "tensors": [
            {"name": "w", "dtype": "uint8", "shape": [2], "nbytes": 2, "file": "model.safetensors", "offset": offset},
        ],
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
    assert err == f"lazymodel: error: there is no checkpoint at {tmp_path}/absent: No such file or directory\n"
    assert main(["inspect", str(tmp_path), *json_option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lazymodel: error: found no checkpoint in folder {tmp_path}; supported: ")


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "x", "--nonsense"], ["nonsense"]])
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

    monkeypatch.setattr("lazymodel._cli.inspect.inspect_checkpoint", interrupt)
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


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """A module in the current folder with a function that builds a model of 1 MiB."""
    name = f"factory_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import jax\n\ndef make(key=None):\n"
        "    return {'dense': {'kernel': jax.random.normal(jax.random.key(0), (512, 512))}}\n"
    )
    monkeypatch.chdir(tmp_path)
    return f"{name}:make"


def test_plan(factory, capsys):
    assert main(["plan", factory, "--mesh", "model=8", "--device-memory", "1MiB"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "make: plan for 1 variable, 1.00 MiB" in out
    assert "each of 8 devices, on the fullest: 128.00 KiB resident" in out
    assert "device memory: 1.00 MiB; fits without activations, 896.00 KiB to spare" in out
    assert main(["plan", factory, "--mesh", "model=8", "--device-memory", "100KiB"]) == 1
    assert "does not fit, 28.00 KiB short" in capsys.readouterr().out
    assert main(["plan", factory]) == 0  # nothing is known of the device
    assert "device: 1.00 MiB resident" in capsys.readouterr().out


def test_plan_knows_what_lies_on_hosts(factory, capsys):
    at = ["plan", factory, "--topology", "v5e-8", "--optimizer", "adam", "--optimizer-on-host", "--json"]
    assert main([*at, "--host", ".*kernel"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["device_nbytes"], plan["offloaded_nbytes"], plan["host_memory"]) == (0, 3 << 20, 384 << 30)
    assert main([*at, "--host-memory", "1MiB"]) == 1
    assert main([*at[:4], "--optimizer-on-host"]) == 2
    assert main(["plan", factory, "--host", "x"]) == 2
    assert "host='x' matches no variable" in capsys.readouterr().err


def test_plan_knows_devices_that_are_not_here(factory, capsys):
    assert main(["plan", factory, "--topology", "v5e:2x4", "--optimizer", "adam", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_devices"], plan["fits"], plan["mesh"]) == (8, True, {"model": 8})
    assert plan["parts"] == {"parameters": 2**17, "optimizer state": 2**18, "gradients": 2**17}
    assert plan["counted"] == dict.fromkeys(plan["parts"], "float32")
    assert plan["device_memory"] > 15 * 2**30
    options = [
        "--topology",
        "v5e:2x4",
        "--optimizer",
        "adam",
        "--moments",
        "bf16",
        "--master-weights",
        "fp32",
        "--json",
    ]
    assert main(["plan", factory, *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parts"] == dict.fromkeys(plan["parts"], 2**17)
    assert plan["counted"]["optimizer state"] == "bfloat16"


def test_plan_compares(factory, capsys, tmp_path):
    page = tmp_path / "plan.html"
    topologies = ["--topology", "v5e-8", "--topology", "v2-8"]
    command = ["plan", factory, *topologies, "--mesh", "model=8", "--mesh", "data=2,model=4"]
    assert main([*command, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "make: 4 plans" in out
    assert "v5e-8, data=2,model=4" in out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert main([*command, "--device-memory", "1KiB"]) == 1
    assert capsys.readouterr().out.count("does not fit") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "model"], "cannot read mesh 'model'; write names and sizes, such as model=8"),
        (["--mesh", "model=0"], "cannot read mesh 'model=0'"),
        (["--mesh", "a=2,a=4"], "cannot read mesh"),
        (["--topology", "v5e:2x4", "--mesh", "model=6"], "do not make the 8 devices of v5e:2x4"),
        (["--topology", "v9:2x4"], "'v9' is no TPU generation"),
        (["--topology", "v5e-7"], "there is no TPU slice 'v5e-7'; nearest: v5e:2x2 (v5e-4) and v5e:2x4 (v5e-8)"),
        (["--device-memory", "lots"], "cannot read 'lots' as bytes"),
        (["--optimizer", "adams"], "optimizer 'adams' is not known; closest: 'adam'"),
        (["--lora-rank", "4", "--optimizer", "adam"], "no variable of make is a LoRA target"),
        (["--batch", "4"], "a batch and a sequence; say both"),
        (["--batch", "4", "--sequence", "8"], "activations are estimated for dense transformers"),
        (["--moments", "bf16"], "moments was given without optimizer"),
        (["--compile", "forward", "--mesh", "model=512"], "has 512 devices and this machine"),
        (["--compile", "forward", "--mesh", "model=1"], "needs a function and its inputs"),
        (["--dtype", "bfloat16"], "a factory decides for itself"),
        (["--html", "absent/plan.html"], "cannot write absent/plan.html: No such file or directory"),
    ],
)
def test_plan_of_wrong_usage_is_exit_status_2(factory, capsys, options, message):
    assert main(["plan", factory, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lazymodel: error: ")
    assert message in err


def test_plan_of_what_is_not_there(factory, capsys):
    module = factory.partition(":")[0]
    assert main(["plan", f"{module}:makes"]) == 2
    assert f"module {module} has no function 'makes'; closest: 'make'" in capsys.readouterr().err
    assert main(["plan", "no_such_module:make"]) == 2
    assert "there is no module 'no_such_module'" in capsys.readouterr().err


BROKEN = {
    "raises": "def make():\n    return helper()\n\ndef helper():\n    raise ValueError('mine')\n",
    "chained": "def make():\n    try:\n        {}[0]\n    except KeyError as e:\n        raise ValueError() from e\n",
    "exits": "import sys\n\ndef make():\n    sys.exit(0)\n",
    "operation": "import jax.numpy as jnp\n\ndef make():\n    return jnp.ones((2, 3)) @ jnp.ones((4, 5))\n",
    "recursion": "def make():\n    return make()\n",
    "import": "1 / 0\n",
    "syntax": "def make(:\n",
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_exception_in_what_was_given_is_exit_status_2(how, checkpoint, monkeypatch, capsys):
    """With the traceback of the user's own code, whichever command runs it; 1 would say that it does not fit."""
    module = f"broken_by_{how}"
    (checkpoint.parent / f"{module}.py").write_text(BROKEN[how].replace("make(", "make(tensors=None"))
    monkeypatch.chdir(checkpoint.parent)
    commands = ["plan", f"{module}:make"], ["convert", str(checkpoint), "x.npz", "--map", f"{module}:make"]
    for command in commands:
        sys.modules.pop(module, None)
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{module}.py" in err and ("Traceback" in err) == (how != "syntax")
        assert str(Path(lazymodel.__file__).parent) not in err and "importlib" not in err


def test_a_mistake_of_ours_is_exit_status_2_and_shows_where(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("lazymodel._cli.inspect.inspect_checkpoint", None)
    assert main(["inspect", str(checkpoint)]) == 2
    assert os.path.join("_cli", "inspect.py") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5f:2x4"], "'v5f' is no TPU generation; closest: 'v5p', 'v5e'"),
        (["--topology", "v5e-8", "--topology", "v5e-9"], "there is no TPU slice 'v5e-9'"),
        (["--topology", "H100"], "'H100' is a card; say how many"),
        (["--topology", "H100:8", "--compile", "init"], "plan for them by arithmetic"),
        (["--topology", "v5e-8", "--mesh", "model=6"], "do not make the 8 devices"),
        (["--mesh", "model"], "cannot read mesh 'model'"),
        (["--optimizer", "adams"], "optimizer 'adams' is not known"),
        (["--lora-rank", "0"], "lora_rank is a positive number; got 0"),
        (["--device-memory", "lots"], "cannot read 'lots' as bytes"),
        (["--html", "absent/plan.html"], "cannot write absent/plan.html: No such file or directory"),
    ],
)
def test_plan_refuses_before_it_builds(monkeypatch, capsys, options, message):
    def build(*args):
        raise AssertionError("nothing is built for arguments that are wrong")

    monkeypatch.setattr(planning, "_model", build)
    assert main(["plan", "gemma2_9b_en", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lazymodel: error: ") and message in err


@pytest.mark.parametrize(
    "name", ["x.safetensors", "model.weights.h5", "model.safetensors.index.json", "model.keras", "weights.npz", "w.BIN"]
)
def test_plan_of_weights_asks_for_what_describes_them(tmp_path, monkeypatch, capsys, name):
    planned = []

    def build(source, *args):
        planned.append(source)
        raise LazyModelError("built")

    monkeypatch.setattr(planning, "_model", build)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", name]) == 2
    assert f"error: {name} does not exist" in capsys.readouterr().err
    (tmp_path / name).write_bytes(b"\0" * 8)
    assert main(["plan", name]) == 2
    err = capsys.readouterr().err
    assert f"{name} holds weights, which do not say what model they are of, and no config.json lies beside" in err
    assert f"`lazymodel inspect {name}`" in err and planned == []
    (tmp_path / "config.json").write_text("{}")
    for given, folder in ((name, "."), (str(tmp_path / name), str(tmp_path))):
        assert main(["plan", given]) == 2
        assert f"{given} holds weights; planning its folder by config.json\n" in capsys.readouterr().err
        assert planned.pop() == folder
    main(["plan", str(tmp_path)])
    assert planned.pop() == str(tmp_path)
    for absent in ("absent.json", "./absent", str(tmp_path / "absent")):
        assert main(["plan", absent]) == 2
        assert f"error: {absent} does not exist" in capsys.readouterr().err


@pytest.mark.skipif(not has_libtpu(), reason='needs libtpu: pip install "lazymodel[tpu]"')
def test_plan_is_silent_where_jax_looks_for_a_tpu(factory):
    """With libtpu and without a TPU, JAX's search for devices prints lines of libtpu's unless it is told not to."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_", "XLA_"))}
    command = [sys.executable, "-m", "lazymodel", "plan", factory, "--mesh", "model=1", "--compile", "init"]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, *sys.path)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("make: plan for 1 variable")


def test_no_framework_is_imported(checkpoint):
    code = (
        "import sys; from lazymodel._cli.main import main; main(sys.argv[1:])\n"
        "print(*{'flax', 'h5py', 'keras', 'orbax', 'safetensors', 'tensorflow', 'torch'} & set(sys.modules))"
    )
    done = run("inspect", checkpoint, code=code)
    assert done.stdout.endswith("\nno problems found\n\n"), done.stdout + done.stderr


def test_no_command_shows_what_there_is(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    (commands,) = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for name, parser in commands.choices.items():
        assert f"\n    {name}" in out
        assert parser.epilog.startswith("example")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lazymodel {lazymodel.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(capsys, shell):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "lazymodel" in script and "inspect" in script and "verify" in script


def test_doctor(capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://example.org")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "lazymodel.doctor/1"
    (device,) = found["devices"]
    assert (device["platform"], device["count"]) == ("cpu", len(jax.devices()))
    assert found["packages"]["jax"] == jax.__version__
    assert found["settings"]["HF_ENDPOINT"] == "https://example.org"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: missing(name) if name == "flax" else "1")
    assert main(["doctor"]) == 0
    assert "pip install 'lazymodel[flax]'" in capsys.readouterr().out

    def no_device():
        raise RuntimeError("Unable to initialize backend 'tpu': taken\nby another process")

    monkeypatch.setattr(jax, "devices", no_device)
    assert main(["doctor"]) == 1
    assert "none: Unable to initialize backend 'tpu': taken" in capsys.readouterr().out


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_script_of_the_distribution():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["lazymodel"].partition(":")
    assert getattr(importlib.import_module(module), name) is main_module.main


def test_plan_of_a_fleet(tmp_path, monkeypatch, capsys):
    """Hosts that share nothing and hosts that hold replicas, on devices that are mere numbers."""
    (tmp_path / "fleet_factory.py").write_text(
        "import jax.numpy as jnp\ndef make(): return {'kernel': jnp.zeros((256, 1024))}\n"
    )
    monkeypatch.chdir(tmp_path)
    numbers = ["--hosts", "4", "--storage-bandwidth", "1MiB/s", "--link-bandwidth", "1MiB/s"]
    assert main(["plan", "fleet_factory:make", "--mesh", "data=4,model=2", *numbers, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert ways["exchange"]["total_read_nbytes"] == 256 * 1024 * 4
    assert ways["read"]["seconds"] is not None
    assert main(["plan", "fleet_factory:make", "--mesh", "data=4,model=2", "--hosts", "3"]) == 2
    assert "hosts=3 do not divide the 8 devices" in capsys.readouterr().err

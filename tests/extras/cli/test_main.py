"""The command line: what goes to which stream, exit statuses, and that it starts without any framework."""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel
from tests.command import main
from tests.conftest import ROOT, needs_libtpu


@pytest.fixture
def checkpoint(tmp_path):
    """A safetensors file with one tensor, `w`, of two bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2")
    return path


def run(*arguments, **options):
    command = [sys.executable, "-m", "lazymodel", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, **options)


def test_problems_are_exit_status_1(checkpoint, capsys):
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    assert main(["inspect", str(checkpoint)]) == 1
    out, err = capsys.readouterr()
    message = f"{checkpoint} is truncated: expected 2 bytes of tensors, found 1. Download or copy it again."
    assert err == "" and out.endswith(f"\n1 problem found:\n  - {message}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "CHECKPOINT"),
        (["inspect", "x", "--verfiy"], "--verfiy; closest: '--verify'"),
        (["plna", "x"], "'plna'; closest: 'plan'"),
    ],
)
def test_wrong_usage_is_exit_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: lazymodel ") and message in err


def test_interrupts_and_mistakes_of_ours(checkpoint, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lazymodel.extras.inspection.inspect.inspect_checkpoint", interrupt)
    assert main(["inspect", str(checkpoint)]) == 130
    monkeypatch.setattr("lazymodel.extras.inspection.inspect.inspect_checkpoint", None)
    assert main(["inspect", str(checkpoint)]) == 2
    assert os.path.join("cli", "main.py") in capsys.readouterr().err


NO_FRAMEWORK = """
import atexit, sys
frameworks = {"flax", "h5py", "keras", "orbax", "safetensors", "tensorflow", "torch"}
atexit.register(lambda: print("frameworks", *frameworks & set(sys.modules)))
"""


def test_as_a_module(checkpoint):
    """Plain ASCII text where nobody watches, whatever the environment says about colours; no framework is imported."""
    (checkpoint.parent / "sitecustomize.py").write_text(NO_FRAMEWORK)
    path = os.pathsep.join([str(checkpoint.parent), os.environ.get("PYTHONPATH", "")])
    plain = {"FORCE_COLOR": "1", "COLUMNS": "80", "PYTHONIOENCODING": "ascii", "PYTHONPATH": path}
    done = run("inspect", checkpoint, env={**os.environ, **plain})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "model.safetensors" in done.stdout
    assert done.stdout.endswith("no problems found\nframeworks\n")
    assert all(len(line) <= 80 for line in done.stdout.splitlines()[1:])


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
        "import pathlib\nimport jax\n\ndef make(key=None):\n    pathlib.Path('called').touch()\n"
        "    return {'dense': {'kernel': jax.random.normal(jax.random.key(0), (512, 512))}}\n"
    )
    monkeypatch.chdir(tmp_path)
    return f"{name}:make"


def test_plan(factory, capsys):
    assert main(["plan", factory, "--mesh", "model=8", "--device-memory", "1MiB"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "make: plan for 1 variable, 1.00 MiB" in out
    assert "most loaded of 8 devices: 128.00 KiB resident" in out
    assert "device memory: 1.00 MiB; fits without activations, 896.00 KiB to spare" in out
    assert main(["plan", factory, "--mesh", "model=8", "--device-memory", "100KiB"]) == 1
    assert "does not fit, 28.00 KiB short" in capsys.readouterr().out
    assert main(["plan", factory]) == 0  # nothing is known of the device
    assert "device: 1.00 MiB resident" in capsys.readouterr().out


def test_plan_knows_what_lies_on_hosts(factory, capsys):
    at = ["plan", factory, "--topology", "v5e-8", "--mesh", "model=8", "--optimizer", "adam", "--optimizer-on-host"]
    at += ["--json"]
    assert main([*at, "--host", ".*kernel"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["device_nbytes"], plan["offloaded_nbytes"], plan["host_memory"]) == (0, 3 << 20, 384 << 30)
    assert main([*at, "--host-memory", "1MiB"]) == 1


def test_plan_knows_devices_that_are_not_here(factory, capsys):
    assert main(["plan", factory, "--topology", "v5e:2x4", "--mesh", "model=8", "--optimizer", "adam", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_devices"], plan["fits"], plan["mesh"]) == (8, True, {"model": 8})
    assert plan["parts"] == {"parameters": 2**17, "optimizer state": 2**18, "gradients": 2**17}
    assert plan["counted"] == dict.fromkeys(plan["parts"], "float32")
    assert plan["device_memory"] > 15 * 2**30
    options = "--topology v5e:2x4 --mesh model=8 --optimizer adam --moments bf16 --master-weights fp32 --json"
    assert main(["plan", factory, *options.split()]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parts"] == dict.fromkeys(plan["parts"], 2**17)
    assert plan["counted"]["optimizer state"] == "bfloat16"


def test_plan_of_several_topologies_ends_with_the_command_that_fits(factory, capsys, tmp_path):
    page = tmp_path / "plan.html"
    command = ["plan", factory, "--topology", "v5e-1", "--topology", "v5e-8", "--optimizer", "adam"]
    assert main([*command, "--device-memory", "1MiB", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.startswith("v5e-")]
    assert err == "" and rows[0][0] == "v5e-1" and "does not fit" in out
    assert rows[1] == ["v5e-8", "fsdp=8", "–", "512.00", "KiB", "512.00", "KiB", "–", "fits"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    last = out[out.rindex("lazymodel plan") :].replace("\\\n", " ")
    assert main(shlex.split(last)[1:]) == 0
    assert "device memory: 1.00 MiB; fits without activations, 512.00 KiB to spare" in capsys.readouterr().out
    assert main([*command[:-4], "--optimizer", "adam", "--device-memory", "1KiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["best"], found["shell"]) == ("lazymodel.plans/1", None, "")
    assert found["rows"][0]["changes"] == {"memory_kind": "pinned_host"}  # all that can be done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mesh model=0", "cannot read mesh 'model=0'"),
        ("--mesh a=2,a=4", "cannot read mesh"),
        ("--mesh model", "cannot read mesh 'model'; write names and sizes, such as model=8"),
        ("--topology v5e-7", "there is no TPU slice 'v5e-7'; nearest: v5e:2x2 (v5e-4) and v5e:2x4 (v5e-8)"),
        ("--topology v5f:2x4", "'v5f' is not a TPU generation; closest: 'v5p', 'v5e'"),
        ("--topology v5e-8 --topology v5e-9", "there is no TPU slice 'v5e-9'"),
        ("--topology H100", "'H100' is a GPU without a number; write how many"),
        ("--topology H100:8 --compile init", "plan for them by arithmetic"),
        ("--topology v5e-8 --topology v5e-4 --compile init", "--compile takes one --topology"),
        ("--topology v5e-8 --mesh model=6", "do not make the 8 devices"),
        ("--batch 4", "--batch was given without --sequence"),
        ("--moments bf16", "--moments was given without --optimizer"),
        ("--optimizer adams", "optimizer 'adams' is not known; closest: 'adam'"),
        ("--lora-rank 0", "--lora-rank is a positive number; got 0"),
        ("--device-memory lots", "cannot read 'lots' as bytes"),
        ("--html absent/plan.html", "cannot write absent/plan.html: No such file or directory"),
        ("--compile forward --mesh model=512", "has 512 devices and this machine"),
        ("--dtype bfloat16", "a factory decides for itself"),
        ("--lora-rank 4 --optimizer adam", "of make is a LoRA target"),
        ("--batch 4 --sequence 8", "activations are estimated for dense transformers"),
        ("--compile forward --mesh model=1", "needs a function and its inputs"),
        ("--host x", "--host x matches no variable"),
        ("--optimizer-on-host --topology v5e-8", "--optimizer-on-host was given without --optimizer"),
        ("--mesh data=4,model=2 --hosts 3", "--hosts 3 do not divide the 8 devices"),
    ],
)
def test_plan_of_wrong_usage_is_exit_status_2(factory, capsys, options, message):
    """What options tell by themselves is refused before the factory is called."""
    assert main(["plan", factory, *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lazymodel: error: ") and message in err
    by_the_model = ("LoRA target", "dense transformers", "a function and its inputs", "matches no", "divide the 8")
    assert Path("called").exists() == any(each in message for each in by_the_model)


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
    commands = ["plan", f"{module}:make"], ["convert", str(checkpoint), "x.h5", "--map", f"{module}:make"]
    for command in commands:
        sys.modules.pop(module, None)
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{module}.py" in err and ("Traceback" in err) == (how != "syntax")
        assert str(Path(lazymodel.__file__).parent) not in err and "importlib" not in err


RULES = {
    "rules.toml": '".*/kernel" = ["", "model"]',
    "rules.json": '{".*/kernel": [null, ["model"]]}',
    "whole.json": '{".*/kernel": null}',
    "plain.toml": '".*/kernel" = "model"',
}


@pytest.mark.parametrize(
    ("name", "spec"), [*zip(RULES, ([None, "model"], [None, "model"], [], ["model"]), strict=True), (None, None)]
)
def test_rules_of_a_file(factory, capsys, name, spec):
    given = ["--mesh", "model=8"]
    if name is not None:
        Path(name).write_text(RULES[name])
        given += ["--rules", name]
    assert main(["plan", factory, *given, "--json"]) == 0
    out, _ = capsys.readouterr()
    (planned,) = json.loads(out)["variables"]
    split = 1 if name == "whole.json" else 8
    assert planned["shard_nbytes"] == 2**20 // split
    assert planned["why"].startswith("rule '.*/kernel' matches") == (name is not None)
    assert main(["explain", factory, *given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], list(report["replicated"])) == ("lazymodel.explain/1", ["dense/kernel"] * (split == 1))
    explained = report["variables"]["dense/kernel"]
    assert explained["spec"] == spec or spec is None
    assert explained["reason"]["text"] == planned["why"]
    assert main(["explain", factory, *given, "--variable", "dense/kernel"]) == 0
    assert f"why ({'proposed' if name is None else 'rule'}): " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "dense.kernel = ['model']", "the rule 'dense' of a.toml: found {'kernel': ['model']}; write"),
        ("a.toml", "x =", "cannot read the rules a.toml: Invalid value"),
        ("a.json", "[" * 100_000, "cannot read the rules a.json: "),
        ("a.json", "[1]", "the rules a.json are not a table with rules"),
        ("a.json", '{"dense/kernel": [2]}', "found [2]"),
        ("a.json", '{"role:mlp": "model"}', "there is no role 'mlp'; closest: 'mlp_up'"),
        ("a.json", '{"dense/kernl": "model"}', "matches no variable; closest: 'dense/kernel'"),
        ("absent.json", None, "cannot read the rules absent.json: No such file"),
    ],
)
def test_rules_that_cannot_be_used(factory, capsys, name, text, message):
    if text is not None:
        Path(name).write_text(text)
    assert main(["plan", factory, "--mesh", "model=8", "--rules", name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--topology v5e-8 --topology v5e-4", "explain takes one --topology"),
        ("", "explain needs devices; pass --topology or --mesh"),
        ("--mesh model=8 --variable dense/kernl", "'dense/kernl' is not a variable of make; closest: 'dense/kernel'"),
        ("--mesh model=8 --rules r.json --host x", "pass either --host or --rules"),
    ],
)
def test_explain_of_wrong_usage_is_exit_status_2(factory, capsys, options, message):
    assert main(["explain", factory, *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_stats(tmp_path, capsys):
    values = np.array([[1, -3], [5, 1]], np.float32)
    save_file({"a.w": values, "b.w": np.array([1, np.nan, np.inf, 3], np.float32)}, path := tmp_path / "m.safetensors")
    assert main(["stats", str(path), "--include", "a.*", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tensors"].values()
    assert (row["mean"], row["min"], row["max"]) == (1.0, -3.0, 5.0)
    assert row["spectral_norm"] == pytest.approx(np.linalg.norm(values, 2), rel=1e-3)
    assert main(["stats", str(path), "--exclude", "a.*", "--no-spectral"]) == 1
    assert "not finite: 2 elements of b.w" in capsys.readouterr().out
    assert main(["stats", str(path), "--include", "c*"]) == 2


def test_warnings_of_rules_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make = "import jax.numpy as jnp\n\ndef make():\n    return {name: jnp.zeros((512, 1024)) for name in ('a', 'b')}\n"
    (tmp_path / "two_variables.py").write_text(make)
    (tmp_path / "rules.json").write_text('{"a": "model"}')
    assert main(["plan", "two_variables:make", "--mesh", "model=8", "--rules", "rules.json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("lazymodel: warning: 1 variable") and err.endswith("Add a rule for them ([] replicates).\n")
    assert "P('model')" in out


def test_hints_name_options(factory, capsys):
    assert main(["plan", factory, "--mesh", "model=8"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "activations (add --batch and --sequence for an estimate, --compile for the compiler's count)" in out
    assert main(["plan", factory, "--mesh", "model=1", "--device-memory", "3MiB", "--optimizer", "adam"]) == 1
    assert "in hosts' memory (--optimizer-on-host)" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def planned(monkeypatch):
    """Sources that a framework is asked to build, with their storage options."""
    found = []

    def from_config(source, *, storage_options, **_):
        found.append((source, storage_options))
        raise lazymodel.LazyModelError("built")

    adapter = SimpleNamespace(from_config=from_config)
    monkeypatch.setattr("lazymodel.extras.cli.plan.adapter_of", lambda framework: adapter)
    return found


@pytest.mark.parametrize(
    "name", ["x.safetensors", "model.weights.h5", "model.safetensors.index.json", "model.keras", "weights.npz", "w.BIN"]
)
def test_plan_of_weights_asks_for_what_describes_them(tmp_path, monkeypatch, capsys, planned, name):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", name]) == 2
    assert f"error: {name} does not exist" in capsys.readouterr().err
    (tmp_path / name).write_bytes(b"\0" * 8)
    assert main(["plan", name]) == 2
    err = capsys.readouterr().err
    assert f"{name} holds weights, which do not say what model they are of, and no config.json is next to" in err
    assert f"`lazymodel inspect {name}`" in err and planned == []
    (tmp_path / "config.json").write_text("{}")
    for given, folder in ((name, "."), (str(tmp_path / name), str(tmp_path))):
        assert main(["plan", given]) == 2
        assert f"{given} holds weights; planning its folder by config.json\n" in capsys.readouterr().err
        assert planned.pop() == (folder, None)
    main(["plan", str(tmp_path)])
    assert planned.pop() == (str(tmp_path), None)
    for absent in ("absent.json", "./absent", str(tmp_path / "absent")):
        assert main(["plan", absent]) == 2
        assert f"error: {absent} does not exist" in capsys.readouterr().err


@pytest.mark.large
@needs_libtpu
def test_plan_is_silent_where_jax_looks_for_a_tpu(factory):
    """With libtpu and without a TPU, JAX's search for devices prints lines of libtpu's unless it is told not to."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_", "XLA_"))}
    command = [sys.executable, "-m", "lazymodel", "plan", factory, "--mesh", "model=1", "--compile", "init"]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, *sys.path)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("make: plan for 1 variable")


def test_no_command_shows_what_there_is(capsys):
    assert main([]) == 0
    commands = re.findall(r"^    (\w+)\b", capsys.readouterr().out, flags=re.M)
    assert {"inspect", "plan", "convert", "diff", "doctor", "explain", "stats", "digest"} <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert "\nexample" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lazymodel {lazymodel.__version__}\n"


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


def test_hosts_are_stated(factory, capsys):
    command = ["plan", factory, "--topology", "H100:8", "--mesh", "model=8", "--host", ".*kernel"]
    assert main(command) == 0
    assert "number of hosts unknown, one assumed; set --hosts\n" in capsys.readouterr().out
    assert main([*command, "--hosts", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["offloaded_nbytes"] == 2**20 // 4


NOISE = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795320015.407997    7476 port.cc:153] oneDNN custom operations are on. You may see\n"
    b"I0000 00:00:1795320015.409912    7476 cudart_stub.cc:31] Could not find cuda drivers on your machine\n"
)
ERROR = b"E0000 00:00:1795320015.409912    7476 cuda_dnn.cc:31] it is broken\n"


@pytest.mark.parametrize("level", [None, "0"])
def test_of_what_tensorflow_says_only_errors_are_shown_unless_the_log_is_asked_for(monkeypatch, capfd, level):
    def imports(_):
        os.write(2, NOISE + ERROR)
        raise lazymodel.LazyModelError("after")

    monkeypatch.setattr("lazymodel.extras.cli.plan.adapter_of", imports)
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    assert main(["plan", "bert_tiny_en_uncased"]) == 2
    shown = ERROR if level is None else NOISE + ERROR
    assert capfd.readouterr().err == shown.decode() + "lazymodel: error: after\n"
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == (level or "1")


@pytest.mark.large
def test_a_command_that_imports_tensorflow_says_one_line():
    pytest.importorskip("keras_hub")
    names = ("TF_CPP_MIN_LOG_LEVEL", "JAX_PLATFORMS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = run("plan", "no_preset_of_this_name", env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("lazymodel: error: ") and done.stderr.count("\n") == 1, done.stderr


# --storage-option -----------------------------------------------------------------------------------------------------


def test_storage_options_are_keys_and_values(planned, capsys):
    """They come to whoever opens the URL."""
    given = ("region=eu", "token=a=b=", "client_options.allow_http=true", "client_options.timeout=3s")
    assert main(["plan", "s3://bucket/x", *(part for text in given for part in ("--storage-option", text))]) == 2
    options = {"region": "eu", "token": "a=b=", "client_options": {"allow_http": True, "timeout": "3s"}}
    assert planned == [("s3://bucket/x", options)]
    assert "error: built" in capsys.readouterr().err


@pytest.mark.parametrize(
    "texts", [["SECRET"], ["=SECRET"], ["a=SECRET", "a=2"], ["a=SECRET", "a.b=2"], ["region=SECRET"]]
)
def test_storage_options_that_cannot_be_read_are_not_shown(tmp_path, capsys, texts):
    """The last can, but a path takes none."""
    given = [part for text in texts for part in ("--storage-option", text)]
    where = str(tmp_path) if texts == ["region=SECRET"] else "s3://bucket/x"
    assert main(["inspect", where, *given]) == 2
    assert "SECRET" not in capsys.readouterr().err

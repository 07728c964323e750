"""The package as a whole: what importing it imports, what it exports, and what its wheel contains."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import types
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import lazymodel

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("flax", "h5py", "keras", "keras_hub", "orbax", "safetensors", "tensorflow", "torch", "transformers")
FRAMEWORKS += ("IPython", "matplotlib", "obstore", "optax", "rich", "tensorstore", "urllib3")  # take long to import
PACKAGES = {
    "lazymodel": ROOT / "lazymodel",
    "lazymodel_flax": ROOT / "integrations" / "lazymodel_flax",
    "lazymodel_keras": ROOT / "integrations" / "lazymodel_keras",
}

# What a user calls or annotates with; a name more or less is a decision.
NAMES = {
    "lazymodel": """
        AbstractModel AbstractVariable Adapter Checkpoint CheckpointError Compile CoordinateCheck
        Digest DoesNotFitError From Host LazyModelError LazyModelWarning LazyTensor LoadReport MemoryPlan Mup
        Progress ReshardReport RunReport ShardingError Sync SyncClient SyncError SyncServer
        TraceError TrainingState WeightMap WhatIf
        arithmetic_mesh auto build_abstract coordinate_check device_memory diff digest grow initializers map_checkpoint
        merge mup open_adapter open_checkpoint path_key pin_batch plans research reshard restore role save
        save_adapter save_step signals statistics topology training_state
    """,
    "lazymodel.checkpoints": """
        Checkpoint SafetensorsFile open_checkpoint
    """,
    "lazymodel.research": """
        CoordinateCheck Mup coordinate_check diff grow initializers mup signals statistics
    """,
    "lazymodel_flax": """
        adapter maxtext tunix
    """,
    "lazymodel_keras": """
        TrainingCheckpoint abstract_from_preset adapter deferred distribution enable_lora
        from_preset leave_out_tensorflow load_model merge_lora restore save_preset streamed_saving training_state
    """,
}

STEPS = {
    "package": "import lazymodel",
    "core": "lazymodel.build_abstract, lazymodel.open_checkpoint, lazymodel.save",
    "names": "[getattr(lazymodel, name) for name in lazymodel.__all__]",
    "modules": """
import importlib, pkgutil
names = [module.name for module in pkgutil.walk_packages(lazymodel.__path__, "lazymodel.")]
assert "lazymodel._abstract.framework" in names
for name in names: importlib.import_module(name)
""",
    "measured": "import numpy; lazymodel.statistics([numpy.ones(3)])",
}


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """The frameworks that a new interpreter has loaded after each of these steps."""
    lines = ["import json, sys", "loaded = {}"]
    for step, statements in STEPS.items():
        seen = f"[name for name in {FRAMEWORKS!r} if name in sys.modules]"
        own = "[name for name in sys.modules if name.startswith('lazymodel')]"
        lines += [statements, f"loaded[{step!r}], loaded['own of {step}'] = {seen}, {own}"]
    script = "\n".join([*lines, "print(json.dumps(loaded))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_import_loads_no_framework(imported: dict[str, list[str]]):
    assert imported["package"] == imported["core"] == imported["names"] == []


def test_import_loads_no_extra(imported: dict[str, list[str]]):
    assert len(imported["own of package"]) < 10
    assert [name for name in imported["own of core"] if name.startswith("lazymodel.extras")] == []
    assert "lazymodel.extras.run.signals" in imported["own of names"]


def test_every_core_module_loads_no_framework(imported: dict[str, list[str]]):
    assert set(imported["modules"]) <= {"rich"}  # the command draws with it
    assert "matplotlib" not in imported["measured"]


def test_names_are_the_same_for_users_and_checkers():
    """What `import lazymodel` loads late is in `dir`, and type checkers know it from imports that do not run."""
    (checked,) = (node for node in ast.parse(Path(lazymodel.__file__).read_text()).body if isinstance(node, ast.If))
    found = {
        alias.name: getattr(importlib.import_module(node.module or ""), alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*lazymodel.__all__, "checkpoints"} == {*found}
    assert {name: getattr(lazymodel, name) for name in found} == found
    assert {*found} <= {*dir(lazymodel)}
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        lazymodel.missing  # noqa: B018


def test_a_method_of_an_extra_is_its_function():
    assert lazymodel.AbstractModel.run is importlib.import_module("lazymodel.extras.run.run").run


# What a process has of these packages: everything in their modules, classes and tables, and the settings of JAX.
THEIRS = ("jax", "flax", "keras", "optax")
SNAPSHOT = f"""
import importlib, json, sys, types
def theirs(): return [name for name in sorted(sys.modules) if name.partition(".")[0] in {THEIRS}]
def snapshot():
    found = {{("jax.config", name): value for name, value in jax.config.values.items()}}
    for module in theirs():
        for name, value in list(vars(sys.modules[module]).items()):
            if name.startswith("__") or isinstance(value, types.ModuleType): continue
            found[module, name] = value
            inside = value if type(value) is dict else vars(value) if isinstance(value, type) else {{}}
            if isinstance(value, type) and value.__module__.partition(".")[0] not in {THEIRS}: continue
            found |= {{(module, name, str(key)): each for key, each in list(inside.items()) if key != "__doc__"}}
    return found
"""


def test_import_changes_nothing_of_others() -> None:
    """In a process that has imported what ours import of them at the top of their modules."""
    ours = [name for name in PACKAGES if not name.partition("_")[2] or importlib.util.find_spec(name.partition("_")[2])]
    imports = f"for name in {ours}: importlib.import_module(name)"
    nodes = [
        node for name in ours for path in PACKAGES[name].rglob("*.py") for node in ast.parse(path.read_text()).body
    ]
    of_theirs = re.compile(rf"(import|from) ({'|'.join(THEIRS)})\b")
    theirs = {code for node in nodes if of_theirs.match(code := ast.unparse(node))}
    compare = f"""
import jax
for code in {sorted(theirs)}: exec(code, {{}})
before = snapshot()
def changed():
    after = snapshot()
    return [key for key in before.keys() | after if before.get(key, before) is not after.get(key, after)]
{imports}
found = [changed()]
from jax._src.interpreters import partial_eval as p; p.custom_staging_rules["x"] = p
jax.Array.planted = 1; jax.numpy.planted = 1; jax.config.update("jax_enable_x64", True)
print(json.dumps([*found, changed()]))
"""
    unchanged, planted = _printed(SNAPSHOT + compare)
    assert unchanged == []
    rules = "jax._src.interpreters.partial_eval/custom_staging_rules/x"
    found = {"/".join(key) for key in planted}
    assert {rules, "jax/Array/planted", "jax.numpy/planted", "jax.config/jax_enable_x64"} <= found, "it can fail"


def _printed(script: str) -> Any:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", NAMES)
def test_all_names_what_the_module_exports(package: str):
    if framework := package.partition("_")[2]:
        pytest.importorskip(framework)
    module = importlib.import_module(package)
    names: list[str] = module.__all__
    assert names == NAMES[package].split()
    assert [name for name in names if not hasattr(module, name)] == []
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - set(names) == set()
    undocumented = [name for name in names if callable(value := getattr(module, name)) and not value.__doc__]
    assert undocumented == []


def test_version_is_the_distribution_s():
    assert metadata.version("lazymodel") == lazymodel.__version__


def test_wheel_contains_the_packages_and_nothing_else(tmp_path: Path):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = f"lazymodel-{lazymodel.__version__}.dist-info"
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    (command,) = metadata.entry_points(group="console_scripts", name="lazymodel")  # which `tests/command.py` runs
    assert f"lazymodel = {command.value}\n" in scripts
    found = {name for name in names if not name.startswith(f"{info}/")}
    expected = {
        str(Path(package) / file.relative_to(folder))
        for package, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert found == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= found
    assert {f"{info}/METADATA", f"{info}/licenses/LICENSE"} <= names

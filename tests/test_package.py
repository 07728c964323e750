"""The package as a whole: what importing it imports, what it exports, and what its wheel contains."""

import importlib
import json
import subprocess
import sys
import types
import zipfile
from importlib import metadata
from pathlib import Path

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
        AbstractModel AbstractVariable Adapter Checkpoint CheckpointError Compile CoordinateCheck DoesNotFitError Fleet
        From Host LazyModelError LazyModelWarning LazyTensor LoadReport MemoryPlan Mup Progress ReshardReport RunReport
        ShardingError Sync SyncError TraceError TrainingState WeightMap WhatIf arithmetic_mesh auto build_abstract
        compare_plans coordinate_check device_memory diff grow initializers map_checkpoint merge mup open_adapter
        open_checkpoint path_key research reshard restore role save save_adapter save_step signals smallest_topology
        statistics topology training_state
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
        TrainingCheckpoint TrainingState abstract_from_preset adapter deferred distribution enable_lora
        from_preset leave_out_tensorflow load_model merge_lora restore save_preset streamed_saving training_state
    """,
}

STEPS = {
    "package": "import lazymodel",
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
        lines += [statements, f"loaded[{step!r}] = [name for name in {FRAMEWORKS!r} if name in sys.modules]"]
    script = "\n".join([*lines, "print(json.dumps(loaded))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_import_loads_no_framework(imported: dict[str, list[str]]):
    assert imported["package"] == []


def test_every_core_module_loads_no_framework(imported: dict[str, list[str]]):
    assert set(imported["modules"]) <= {"rich"}  # the command draws with it
    assert "matplotlib" not in imported["measured"]


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

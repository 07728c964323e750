"""Everything public has an example in its docstring, and the examples run, in one process for each package."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_docstrings
from tests.conftest import HAS_LIBTPU, child_environment

PACKAGES = {"lazymodel": ("optax",), "lazymodel_keras": ("keras", "keras_hub"), "lazymodel_flax": ("flax",)}


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str, tmp_path: Path) -> None:
    for module in PACKAGES[package]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    skipped = [] if HAS_LIBTPU else ["topology"]
    if package == "lazymodel_keras":
        import keras

        if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
            skipped += ["TrainingCheckpoint", "training_state", "restore"]
    environment = child_environment(libtpu=package == "lazymodel")  # which compiles in one of the examples
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        # -P: folders of tests named after a framework stay out of sys.path.
        [sys.executable, "-P", run_docstrings.__file__, package, *skipped],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr

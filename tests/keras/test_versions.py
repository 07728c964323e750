"""Versions that are too old are refused at import, by name; those that are not are what the package declares."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from unittest import mock

import keras
import pytest

import lazymodel as lm
from lazymodel_keras import _versions
from tests.conftest import ROOT, child_environment


def test_old_and_new_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.15.0", "3.9.2", "3.13.1"):
        monkeypatch.setattr(keras, "__version__", version)
        with pytest.raises(lm.LazyModelError, match=f"Keras 3.13.2 or newer; this is {version}. .*pip install -U"):
            importlib.reload(_versions)
    for version in ("3.13.2", "3.14.0rc1", "3.100.0.dev2026", "4.0"):
        monkeypatch.setattr(keras, "__version__", version)
        importlib.reload(_versions)
    monkeypatch.setattr(metadata, "version", mock.Mock(side_effect=metadata.PackageNotFoundError))
    importlib.reload(_versions)
    monkeypatch.setattr(metadata, "version", {"keras-hub": "0.25.1"}.__getitem__)
    with pytest.raises(lm.LazyModelError, match=r"KerasHub 0\.26 or newer; this is 0\.25\.1\. .*pip"):
        importlib.reload(_versions)
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lazymodel\[keras\]'"):
        importlib.reload(_versions)


def test_it_is_the_first_that_the_package_does(tmp_path: Path) -> None:
    """Also where Keras is so old that it has none of the parts that are used."""
    (tmp_path / "keras.py").write_text("__version__ = '2.15.0'\n")
    environment = child_environment()
    folders = [tmp_path, ROOT, ROOT / "integrations"]
    script = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}; import lazymodel_keras"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lazymodel.LazyModelError: lazymodel needs Keras 3.13.2 or")


@pytest.mark.large  # that it is rejected is also in model/test_build.py
def test_nnx_mode_is_rejected_before_anything_is_read() -> None:
    script = f"""
import sys; sys.path[:0] = {[str(ROOT), str(ROOT / "integrations")]}
import keras, lazymodel as lm, lazymodel_keras as lk
for call in (
    lambda: lm.build_abstract(keras.layers.Dense, 2),
    lambda: lk.load_model("missing.keras"),
    lambda: lk.deferred().__enter__(),
):
    try:
        call()
    except lm.LazyModelError as error:
        print(error)
"""
    environment = child_environment() | {"KERAS_NNX_ENABLED": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert [line.split(".")[0] for line in done.stdout.splitlines()] == [
        "Keras is in NNX mode, which allocates every variable when it is created"
    ] * 3, done.stderr


def test_what_is_enforced_is_what_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]["keras"]
    assert f"keras>={_versions.OLDEST_KERAS}" in declared
    assert f"keras-hub>={_versions.OLDEST_KERAS_HUB}" in declared
    limits = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    assert f"Keras {_versions.OLDEST_KERAS} and KerasHub {_versions.OLDEST_KERAS_HUB} or newer" in limits

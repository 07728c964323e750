"""`lk.load_model` of what is no saved model: one error that names the path, what was expected and what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lazymodel as lm
import lazymodel_keras as lk


def nothing(path: Path) -> None:
    (path.parent / "model.keras").touch()


def folder_of(**files: str) -> Any:
    def make(path: Path) -> None:
        path.mkdir()
        for name, text in files.items():
            (path / name.replace("_json", ".json").replace("_txt", ".txt")).write_text(text)

    return make


CASES: dict[str, tuple[str, Any, str]] = {
    "nothing": ("modle.keras", nothing, "nothing; closest: 'model.keras'"),
    "nowhere": ("folder/model.keras", lambda path: None, "nothing; there is no folder .*folder"),
    "empty file": ("m.keras", lambda path: path.touch(), "an empty file"),
    "no archive": ("m.keras", lambda path: path.write_text("text"), "no zip archive"),
    "no HDF5": ("m.h5", lambda path: path.write_text("text"), "no HDF5"),
    "text": ("notes.txt", lambda path: path.write_text("text"), r"a file of another kind \(.txt\)"),
    "tensors": ("m.safetensors", lambda path: lm.save({"a": np.ones(3)}, path), "another kind"),
    "weights": ("m.weights.h5", lambda path: small().save_weights(path), "weights without .*lazymodel_keras.restore"),
    "empty folder": ("m", folder_of(), "an empty folder"),
    "other folder": ("m", folder_of(a_txt="x", b_txt="y"), r"a folder with a\.txt, b\.txt"),
    "folder of tensors": ("m", lambda path: lm.save({"a": np.ones(3)}, path), "without a model's configuration"),
    "preset of others": ("m", folder_of(config_json='{"model_type": "bert"}'), "lazymodel_keras.from_preset"),
}


def small() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])


@pytest.mark.parametrize("case", CASES)
def test_no_saved_model(case: str, tmp_path: Path) -> None:
    name, make, found = CASES[case]
    make(tmp_path / name)
    message = f"cannot load a model from {re.escape(str(tmp_path / name))}: expected a .keras file.*; found .*{found}"
    with pytest.raises(lm.CheckpointError, match=message):
        lk.load_model(tmp_path / name)


@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m"])
def test_saved_models_are_loaded(name: str, tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path / name, **({} if "." in name else {"zipped": False}))
    for one, other in zip(model.weights, lk.load_model(tmp_path / name).weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())

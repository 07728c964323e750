"""Warnings point to the user's own line, whichever function gives them and however deep inside Keras and KerasHub."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk

from .models import BACKBONES, device_mesh, distribution, layouts, save_preset

BERT = BACKBONES["bert"][0]


def net(layers: int = 1) -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), *(keras.layers.Dense(4) for _ in range(layers))])


def preset(folder: Path) -> str:
    save_preset(folder, "bert")
    with h5py.File(folder / "model.weights.h5", "a") as file:
        file["layers/another/vars/0"] = np.zeros(3, "float32")
    return str(folder)


# The line that a warning is to point to ends with `# here`.


def abstract_from_preset(folder: Path, mesh: Mesh) -> None:
    lk.abstract_from_preset(BERT, preset(folder), strict=False)  # here


def deferred_from_preset(folder: Path, mesh: Mesh) -> None:
    path = preset(folder)
    with lk.deferred(strict=False):
        BERT.from_preset(path)  # here


def deferred_with_rules_that_match_nothing(folder: Path, mesh: Mesh) -> None:
    with lk.deferred(mesh=mesh, rules={"(.*/)?(kernel|bias)": P(), "nothing": P()}):  # here
        net(), net()


def restore_with_something_missing(folder: Path, mesh: Mesh) -> None:
    saved = {f"trainable_variables/{variable.path}": np.asarray(variable.value) for variable in net(2).variables}
    lm.save(saved, folder / "saved")
    lk.restore(net(layers=3), folder / "saved", weights_only=True, strict=False)  # here


def build_abstract_of_what_a_distribution_replicates(folder: Path, mesh: Mesh) -> None:
    with distribution(layouts(device_mesh(1, 8), nothing=(None, "model"))):
        lm.build_abstract(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1 << 18)]))  # here


@pytest.mark.parametrize(
    "call",
    [
        abstract_from_preset,
        deferred_from_preset,
        deferred_with_rules_that_match_nothing,
        restore_with_something_missing,
        build_abstract_of_what_a_distribution_replicates,
    ],
    ids=lambda call: call.__name__,
)
def test_a_warning_points_to_the_user_s_line(call: Callable[[Path, Mesh], None], tmp_path: Path, mesh8: Mesh) -> None:
    with pytest.warns(lm.LazyModelWarning) as caught:
        call(tmp_path, mesh8)
    lines = {line for *_, line in call.__code__.co_lines() if line is not None}
    (here,) = (line for line in lines if linecache.getline(__file__, line).endswith("# here\n"))
    found = {(w.filename, w.lineno) for w in caught if issubclass(w.category, lm.LazyModelWarning)}
    assert found == {(__file__, here)}

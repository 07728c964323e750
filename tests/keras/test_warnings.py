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

from .models import BACKBONES, save_preset
from .versions import needs_orbax_callback

BERT = BACKBONES["bert"][0]


def net(units: int = 4, layers: int = 1) -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), *(keras.layers.Dense(units) for _ in range(layers))])


def preset(folder: Path) -> str:
    save_preset(folder, "bert")
    with h5py.File(folder / "model.weights.h5", "a") as file:
        file["layers/another/vars/0"] = np.zeros(3, "float32")
    return str(folder)


def weights(folder: Path) -> Path:
    net(layers=2).save_weights(folder / "net.weights.h5")
    return folder / "net.weights.h5"


def orbax(folder: Path) -> Path:
    model, x = net(layers=2), np.ones((8, 4), "float32")
    model.compile("sgd", "mse")
    model.fit(x, x, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(str(folder))])
    return folder


# The line that a warning is to point to ends with `# here`.


def from_preset(folder: Path, mesh: Mesh) -> None:
    lk.from_preset(BERT, preset(folder), strict=False)  # here


def abstract_from_preset(folder: Path, mesh: Mesh) -> None:
    lk.abstract_from_preset(BERT, preset(folder), strict=False)  # here


def deferred_from_preset(folder: Path, mesh: Mesh) -> None:
    path = preset(folder)
    with lk.deferred(strict=False):
        BERT.from_preset(path)  # here


def deferred_load_weights(folder: Path, mesh: Mesh) -> None:
    path = weights(folder)
    with lk.deferred(strict=False):
        model = net()
        model.load_weights(path)  # here


def deferred_with_rules_that_match_nothing(folder: Path, mesh: Mesh) -> None:
    with lk.deferred(mesh=mesh, rules={"(.*/)?(kernel|bias)": P(), "nothing": P()}):  # here
        net(), net()


def restore_what_does_not_fit(folder: Path, mesh: Mesh) -> None:
    lk.restore(net(units=8, layers=2), orbax(folder), weights_only=True, strict=False)  # here


def restore_with_something_missing(folder: Path, mesh: Mesh) -> None:
    lk.restore(net(layers=3), orbax(folder), weights_only=True, strict=False)  # here


def build_abstract_of_what_a_distribution_replicates(folder: Path, mesh: Mesh) -> None:
    devices = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices())
    layout_map = keras.distribution.LayoutMap(devices)
    layout_map["nothing"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope():
        lm.build_abstract(net, 1 << 18)  # here


@pytest.mark.parametrize(
    "call",
    [
        from_preset,
        abstract_from_preset,
        deferred_from_preset,
        deferred_load_weights,
        deferred_with_rules_that_match_nothing,
        pytest.param(restore_what_does_not_fit, marks=needs_orbax_callback),
        pytest.param(restore_with_something_missing, marks=needs_orbax_callback),
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

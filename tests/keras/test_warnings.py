"""Warnings point to the user's own line, whichever function gives them and however deep inside Keras and KerasHub."""

from __future__ import annotations

import inspect
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


class World:
    """What the calls below are made with."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        self.folder, self.mesh = folder, mesh

    def preset(self) -> str:
        folder = save_preset(self.folder / "bert", "bert")
        with h5py.File(folder / "model.weights.h5", "a") as file:
            file["layers/another/vars/0"] = np.zeros(3, "float32")
        return str(folder)

    def weights(self) -> Path:
        net(layers=2).save_weights(self.folder / "net.weights.h5")
        return self.folder / "net.weights.h5"

    def orbax(self) -> Path:
        model, x = net(layers=2), np.ones((8, 4), "float32")
        model.compile("sgd", "mse")
        model.fit(x, x, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(str(self.folder / "orbax"))])
        return self.folder / "orbax"


# The line that a warning is to point to ends with `# here`.


def from_preset(world: World) -> None:
    preset = world.preset()
    lk.from_preset(BERT, preset, strict=False)  # here


def abstract_from_preset(world: World) -> None:
    preset = world.preset()
    lk.abstract_from_preset(BERT, preset, strict=False)  # here


def deferred_from_preset(world: World) -> None:
    preset = world.preset()
    with lk.deferred(strict=False):
        BERT.from_preset(preset)  # here


def deferred_load_weights(world: World) -> None:
    path = world.weights()
    with lk.deferred(strict=False):
        model = net()
        model.load_weights(path)  # here


def deferred_with_rules_that_match_nothing(world: World) -> None:
    with lk.deferred(mesh=world.mesh, rules={"(.*/)?(kernel|bias)": P(), "nothing": P()}):  # here
        net(), net()


def restore_what_does_not_fit(world: World) -> None:
    path = world.orbax()
    lk.restore(net(units=8, layers=2), path, weights_only=True, strict=False)  # here


def restore_what_lacks_something(world: World) -> None:
    path = world.orbax()
    lk.restore(net(layers=3), path, weights_only=True, strict=False)  # here


def build_abstract_of_what_a_distribution_replicates(world: World) -> None:
    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices())
    layout_map = keras.distribution.LayoutMap(mesh)
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
        pytest.param(restore_what_lacks_something, marks=needs_orbax_callback),
        build_abstract_of_what_a_distribution_replicates,
    ],
    ids=lambda call: call.__name__,
)
def test_a_warning_points_to_the_user_s_line(call: Callable[[World], None], tmp_path: Path, mesh8: Mesh) -> None:
    lines, first = inspect.getsourcelines(call)
    with pytest.warns(lm.LazyModelWarning) as caught:
        call(World(tmp_path, mesh8))
    (here,) = (first + index for index, line in enumerate(lines) if line.endswith("# here\n"))
    found = [(w.filename, w.lineno) for w in caught if issubclass(w.category, lm.LazyModelWarning)]
    assert found and set(found) == {(__file__, here)}

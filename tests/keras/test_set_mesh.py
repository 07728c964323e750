"""Keras models under the mesh of `jax.set_mesh`: on the same devices and on others, of Auto and of Explicit axes.

What calls the model's own layers outside of our programs is not here: under Explicit axes, and on other devices than
the current mesh's, Keras itself fails with "context mesh" and "incompatible devices".
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import preset_of
from tests.large import mostly_large

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh(first: int, sizes: tuple[int, int], kind: str) -> Mesh:
    devices = np.array(jax.devices()[first : first + sizes[0] * sizes[1]]).reshape(sizes)
    return Mesh(devices, ("data", "model"), axis_types=(KINDS[kind],) * 2)


def rules(variable: lm.AbstractVariable) -> P:
    return P("model") if variable.shape and variable.shape[0] % 4 == 0 else P()


def normal(shape: Any, dtype: Any = None) -> Any:
    return keras.random.normal(shape, dtype=dtype, seed=3)


def make() -> keras.Model:
    """With state, an initializer that is run, and one that is traced for its size."""
    x = keras.layers.Dense(32, kernel_initializer=normal)(inputs := keras.Input((8,)))
    x = keras.layers.Dropout(0.1)(keras.layers.BatchNormalization()(x))
    x = keras.layers.Dense(1 << 14, kernel_initializer=normal)(x)
    return keras.Model(inputs, keras.layers.Dense(8)(x))


def compiled() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def placed(own: Mesh, folder: Path, preset: str) -> list[Any]:
    """Models that are initialized, loaded, restored and moved."""
    other = mesh(4, (2, 2), "auto")
    alone = lm.build_abstract(make)
    abstract, elsewhere = alone.shard(own, rules), alone.shard(other, rules)
    model = abstract.materialize()
    values = dict(abstract.stream())
    lm.save(model, folder / "model.safetensors")
    model.save_weights(folder / "model.weights.h5")
    models = [
        model,
        alone.materialize(),
        elsewhere.materialize(),
        abstract.materialize(values),
        elsewhere.materialize(lm.open_checkpoint(folder / "model.safetensors")),
        lk.restore(lm.build_abstract(make).shard(own, rules), folder / "model.weights.h5"),
        lm.reshard(alone.materialize(), elsewhere),
        lk.from_preset(keras_hub.models.Backbone, preset, mesh=own, rules=rules),
    ]
    return [[variable.value for each in models for variable in each.variables], values]


def changed_and_run(own: Mesh, folder: Path, preset: str) -> list[Any]:
    """Models with pairs, quantized, compiled and with an optimizer; results of one that is never whole."""
    alone = lm.build_abstract(make)
    abstract, x = alone.shard(own, rules), np.ones((4, 8), np.float32)
    loaded = lk.from_preset(keras_hub.models.Backbone, preset, mesh=own, rules=rules)
    lk.enable_lora(loaded, 4)
    models = [
        lm.build_abstract(make).lora(4, ".*/kernel").shard(own, rules).materialize(),
        loaded,
        lk.abstract_from_preset(keras_hub.models.Backbone, preset).quantize("int8").shard(own, rules).materialize(),
        lm.build_abstract(compiled).shard(own, rules).materialize(),
    ]
    trained, state = abstract.with_optimizer(optax.adam(1e-3)).materialize()
    arrays = [variable.value for each in (*models, trained) for variable in each.variables]
    ran = [each.run(lambda model, x: model(x), x) for each in (abstract, alone)]
    signals = lm.signals(abstract, lambda model, x: model(x).sum(), x).to_dict()
    statistics = [lm.statistics(each).to_dict() for each in (abstract.materialize(), abstract)]
    return [arrays, jax.tree.leaves(state), ran, signals, statistics]


def results(paths: Any, own: str) -> list[Any]:
    preset = preset_of("gemma")  # which draws where it is made
    keras.utils.clear_session(free_memory=False)  # the names and generators of a fresh process
    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        return paths(mesh(0, (2, 4), own), Path(folder), preset)


without = functools.cache(results)


CURRENT = [("explicit", "explicit", "same"), ("explicit", "auto", "fewer"), ("auto", "explicit", "fewer")]


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`:UserWarning")
@pytest.mark.filterwarnings("ignore:Invalid quantization mode. Expected one of:UserWarning")
@pytest.mark.parametrize(
    ("paths", "own", "axes", "current"),
    mostly_large(
        [(paths, *each) for paths in (placed, changed_and_run) for each in CURRENT],
        [(placed, "explicit", "auto", "fewer")],
    ),
)
def test_main_paths(paths: Any, own: str, axes: str, current: str) -> None:
    expected = without(paths, own)
    with jax.set_mesh(mesh(0, (2, 4), axes) if current == "same" else mesh(2, (2, 1), axes)):
        found = results(paths, own)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(mine, right) if hasattr(right, "dtype") else mine == right
        assert getattr(mine, "sharding", None) == getattr(right, "sharding", None)

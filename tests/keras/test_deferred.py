"""`lk.deferred()`: unchanged Keras code, loaded on return of what loads, initialized on leaving the block."""

from __future__ import annotations

from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk

from .models import BACKBONES, assert_same, bits, save_preset, seeded


def small() -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])


def test_from_preset_is_loaded_when_it_returns(tmp_path: Path) -> None:
    folder = str(save_preset(tmp_path / "bert", "bert"))
    cls = BACKBONES["bert"][0]
    stock = seeded(lambda: cls.from_preset(folder))

    def inside() -> None:
        with lk.deferred():
            assert_same(stock, cls.from_preset(folder))  # runs the model inside the block

    seeded(inside)


def test_onto_a_mesh(tmp_path: Path, mesh8: Mesh) -> None:
    folder = str(save_preset(tmp_path / "bert", "bert"))
    with lk.deferred(mesh=mesh8, rules=lambda v: P("model") if v.shape and v.shape[0] % 8 == 0 else P()):
        model = keras_hub.models.Backbone.from_preset(folder)
    assert model.get_layer("pooled_dense").kernel.value.sharding.spec == P("model")


def test_what_was_only_built_is_initialized_on_leaving() -> None:
    expected = seeded(small)

    def inside() -> keras.Model:
        with lk.deferred():
            model = small()
            assert all(v._value is None for v in model.weights)
        return model

    assert_same(expected, seeded(inside))


def test_load_weights_of_a_model_built_inside(tmp_path: Path) -> None:
    source = seeded(small, seed=1)
    source.save_weights(tmp_path / "small.weights.h5")
    source.save(tmp_path / "small.keras")
    for file in ("small.weights.h5", "small.keras"):
        with lk.deferred():
            model = small()
            model.load_weights(tmp_path / file)
            assert all(v._value is not None for v in model.weights)
        for a, b in zip(source.weights, model.weights, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


def test_load_weights_of_a_model_built_before(tmp_path: Path) -> None:
    source, target = seeded(small, seed=1), seeded(small, seed=2)
    source.save_weights(tmp_path / "small.weights.h5")
    with lk.deferred():
        target.load_weights(tmp_path / "small.weights.h5")
        np.testing.assert_array_equal(bits(source.weights[0]), bits(target.weights[0]))


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")  # the file was saved without one
def test_training_afterwards(tmp_path: Path) -> None:
    source = seeded(small, seed=1)
    source.save_weights(tmp_path / "small.weights.h5")
    with lk.deferred():
        model = small()
        model.compile("adam", "mse")
        model.load_weights(tmp_path / "small.weights.h5")
    before = bits(model.weights[0])
    model.fit(np.ones((8, 4)), np.ones((8, 8)), verbose=0)
    assert not np.array_equal(before, bits(model.weights[0]))
    assert int(model.optimizer.iterations.value) == 1


def test_an_exception_inside_leaves_keras_as_it_was(tmp_path: Path) -> None:
    load_weights, from_preset = keras.Model.load_weights, vars(keras_hub.models.Backbone)["from_preset"]
    with pytest.raises(RuntimeError, match="no"), lk.deferred():
        fail()
    assert keras.Model.load_weights is load_weights
    assert vars(keras_hub.models.Backbone)["from_preset"] is from_preset
    assert seeded(small).weights[0]._value is not None
    with pytest.raises(lm.LazyModelError), lk.deferred():
        keras_hub.models.BertBackbone.from_preset(str(save_broken(tmp_path)))
    assert seeded(small).weights[0]._value is not None


def fail() -> None:
    small()
    raise RuntimeError("no")


def save_broken(tmp_path: Path) -> Path:
    folder = save_preset(tmp_path / "bert", "bert")
    (folder / "model.weights.h5").write_bytes(b"\0" * 100)
    return folder


def test_load_model(tmp_path: Path) -> None:
    source = seeded(small, seed=1)
    source.save(tmp_path / "small.keras")
    with lk.deferred():
        model = keras.saving.load_model(tmp_path / "small.keras")
    for a, b in zip(source.weights, model.weights, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_rules_hold_for_all_models_of_a_block(mesh8: Mesh) -> None:
    def named(name: str) -> keras.Model:
        return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, name=name)])

    rules = {".*/first/kernel": P(None, "model"), ".*/second/kernel": P("model"), ".*bias": None}
    with lk.deferred(mesh=mesh8, rules=rules):
        first, second = named("first"), named("second")
    assert first.weights[0].value.sharding.spec == P(None, "model")
    assert second.weights[0].value.sharding.spec == P("model")
    with (
        pytest.warns(lm.LazyModelWarning, match="no model of the block .*: '.\\*/second/kernel'"),
        lk.deferred(mesh=mesh8, rules=rules),
    ):
        named("first")

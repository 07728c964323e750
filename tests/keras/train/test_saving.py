"""Saving Keras models: under the paths that they are built with, optimizer and all, and back."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

import lazymodel as lm


def build(seed: int) -> keras.Model:
    initializer = keras.initializers.RandomNormal(seed=seed)
    layers = [
        keras.layers.Dense(4, kernel_initializer=initializer, name="dense"),
        keras.layers.BatchNormalization(name="norm"),
    ]
    return keras.Sequential([keras.Input((3,)), *layers], name="net")


def test_a_keras_model_comes_back(tmp_path: Path) -> None:
    model = build(1)
    lm.save(model, tmp_path / "net")
    abstract = lm.build_abstract(build, 2)
    with lm.open_checkpoint(tmp_path / "net") as ckpt:
        assert set(ckpt) == set(abstract)
        again = abstract.materialize(ckpt, initialize="nothing")
    inputs = np.ones((2, 3), "float32")
    np.testing.assert_array_equal(model(inputs), again(inputs))


def test_a_trained_model_has_its_optimizer_saved(tmp_path: Path) -> None:
    model = build(1)
    model.compile("adam", "mse")
    model.fit(np.ones((2, 3)), np.ones((2, 4)), verbose=0)
    lm.save(model, tmp_path / "net")
    with lm.open_checkpoint(tmp_path / "net") as ckpt:
        for variable in model.optimizer.variables:
            np.testing.assert_array_equal(ckpt[variable.path].read(), variable)

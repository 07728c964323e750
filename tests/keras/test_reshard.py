"""A Keras model whose variables move to other devices, where they stay when it is trained."""

from __future__ import annotations

import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm


def test_a_model_moves_in_place_and_trains_there(mesh8: Mesh) -> None:
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32)])
    model.compile("sgd", "mse")
    before = [np.asarray(weight) for weight in model.get_weights()]
    four = Mesh(mesh8.devices[:4], ("model",))
    paths = {variable.path: variable for variable in model.variables}
    targets = {path: NamedSharding(four, P(None, "model") if path.endswith("kernel") else P()) for path in paths}
    assert lm.reshard(model, targets, donate=True) is model
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    kernel = model.layers[0].kernel
    assert kernel.value.sharding == NamedSharding(four, P(None, "model"))
    kernel.assign(np.zeros((16, 32)))
    assert kernel.value.sharding == NamedSharding(four, P(None, "model"))

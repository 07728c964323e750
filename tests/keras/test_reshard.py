"""A Keras model whose variables move to other devices, where they stay when it is trained."""

from __future__ import annotations

import keras
import numpy as np
import optax
import pytest
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


def test_a_model_lies_on_the_host_between_its_uses(mesh8: Mesh) -> None:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((16,)), keras.layers.Dense(32)])

    abstract = lm.build_abstract(make).with_optimizer(optax.adam(1e-3), memory_kind="pinned_host")
    model, state = abstract.shard(mesh8, {".*": P()}).materialize()  # Optax' state may lie there
    assert {leaf.sharding.memory_kind for leaf in state[0].mu.values()} == {"pinned_host"}
    x = np.ones((2, 16), np.float32)
    before, own = np.asarray(model(x)), model.layers[0].kernel.value.sharding
    for kind in ("pinned_host", "device"):
        assert lm.reshard(model, own.with_memory_kind(kind), donate=True) is model
        assert {variable.value.sharding.memory_kind for variable in model.variables} == {kind}
    assert np.array_equal(model(x), before)
    with pytest.raises(lm.ShardingError, match="sequential.*/dense.*/kernel: in pinned_host, and Keras' layers"):
        abstract.shard(mesh8, {".*kernel": lm.Host(P()), ".*": P()}).materialize()

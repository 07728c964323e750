"""Models that have nothing to do with KerasHub: whatever Keras builds, built abstractly, equal to stock bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk

from .models import bits, seeded

layers = keras.layers


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.LayerNormalization(), layers.Dense(4)])


def functional() -> keras.Model:
    """Two inputs, a shared layer, a nested model."""
    shared = layers.Dense(16, activation="gelu")
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(16), layers.BatchNormalization()])
    one, two = keras.Input((8,)), keras.Input((8,))
    return keras.Model([one, two], layers.add([inner(shared(one)), shared(two)]))


class Built(keras.Model):
    """A subclassed model that builds its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Dense(16), layers.Dense(4)
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")
        self.build((None, 8))

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((None, 16))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.down(self.up(inputs)) * self.scale


class Lookup(layers.Layer):
    """A layer whose variables are made from arrays: NumPy's, JAX' and lists, some of them not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.Variable(np.arange(64, dtype="float32").reshape(8, 8), name="table")
        self.mask = keras.Variable(jax.numpy.tri(8), trainable=False, name="mask")
        self.counts = keras.Variable([1, 2, 3], dtype="int32", trainable=False, name="counts")

    def call(self, inputs: Any) -> Any:
        return inputs @ (self.table * self.mask)


def array_valued() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), Lookup(), layers.Dense(4)])


def recurrent() -> keras.Model:
    """Its state is a variable that is made from an array."""
    inputs = keras.Input(batch_shape=(2, 5, 8))
    return keras.Model(inputs, layers.LSTM(4, stateful=True)(inputs))


def preprocessing() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), layers.Normalization(mean=np.arange(8.0), variance=np.ones(8)), layers.Dense(4)]
    )


def embedding_from_an_array() -> keras.Model:
    table = np.arange(40, dtype="float32").reshape(10, 4)
    return keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(10, 4, weights=[table])])


def application() -> keras.Model:
    return keras.applications.MobileNet(input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=10)


MODELS = [
    functional,
    Built,
    array_valued,
    recurrent,
    preprocessing,
    embedding_from_an_array,
    pytest.param(application, marks=pytest.mark.large),
]


def columns(variable: lm.AbstractVariable) -> P:
    fits = variable.shape and variable.shape[-1] % 2 == 0
    return P(*[None] * (len(variable.shape) - 1), "model") if fits else P()


@pytest.mark.parametrize("build", MODELS)
def test_equal_to_stock(build: Callable[[], keras.Model], mesh42: Mesh) -> None:
    stock = seeded(build)
    abstract = seeded(lambda: lm.build_abstract(build))
    assert {path.rpartition("#")[0] or path for path in abstract} >= {variable.path for variable in stock.variables}
    model = abstract.shard(mesh42, columns).materialize()
    for one, other in zip(stock.variables, model.variables, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other), err_msg=one.path)
        assert len(other.value.sharding.device_set) == 8


class Unbuilt(keras.Model):
    """A subclassed model whose variables come to be when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Dense(16), layers.Dense(4)

    def call(self, inputs: Any) -> Any:
        return self.down(self.up(inputs))


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")  # Keras', of what it leaves as it is
def test_streamed_one_by_one_as_quantized() -> None:
    abstract = lm.build_abstract(sequential).quantize("int8")
    assert not lm.diff(abstract, abstract.materialize())
    assert {path for path, _ in abstract.stream()} == set(abstract)


def test_states_between_batches() -> None:
    """Variables that the layer holds and the model does not count among its own."""
    for state in lm.build_abstract(recurrent).materialize().layers[1].states:
        np.testing.assert_array_equal(state.value, np.zeros((2, 4)))


def test_a_model_without_build() -> None:
    """It is built on what it is called with: symbolically in the block, or with data after it."""
    data = np.random.default_rng(0).standard_normal((2, 8)).astype("f")
    expected = seeded(Unbuilt)
    expected(data)

    def built_inside() -> keras.Model:
        with lk.deferred():
            model = Unbuilt()
            model(keras.Input((8,)))
            assert all(variable._value is None for variable in model.variables)
        return model

    def built_afterwards() -> keras.Model:
        with lk.deferred():
            model = Unbuilt()
        model(data)
        return model

    for build in (built_inside, built_afterwards):
        for one, other in zip(expected.variables, seeded(build).variables, strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))
    abstract = lm.build_abstract(Unbuilt)
    assert len(abstract) == 0


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

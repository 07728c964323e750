"""Building Keras models abstractly: every way in, and what models do while they build."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import BACKBONES, assert_same, save_preset, seeded


def mlp() -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])


class Builder:
    @staticmethod
    def make(units: int):  # no annotation: found out by tracing
        return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(units)])


def bert_task() -> Any:
    backbone = keras_hub.models.BertBackbone(**BACKBONES["bert"][1])
    return keras_hub.models.BertTextClassifier(backbone, num_classes=2)  # compiled by default


def siglip() -> Any:
    return keras_hub.models.SigLIPVisionEncoder(
        image_shape=(16, 16, 3), patch_size=4, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=16
    )


TABLE = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")


def embedding() -> keras.Model:
    embedding = keras.layers.Embedding(10, 4, weights=[TABLE])
    return keras.Sequential([keras.layers.Input((3,), dtype="int32"), embedding])


class AssignsWhileBuilding(keras.layers.Layer):
    def build(self, _: Any) -> None:
        self.ids = self.add_weight(shape=(5,), dtype="int32", initializer="zeros", trainable=False, name="ids")
        self.ids.assign(np.arange(5))
        self.table = self.add_weight(shape=(4, 4), initializer="glorot_uniform", name="table")
        self.half = self.add_weight(shape=(4, 2), initializer="zeros", name="half")
        self.half.assign(keras.ops.multiply(self.table.value[:, :2], 0.5))  # reads one variable, assigns another
        self.built = True


class DrawsWhileBuilding(keras.layers.Layer):
    def build(self, _: Any) -> None:
        self.noise = self.add_weight(shape=(3,), initializer="zeros", name="noise")
        self.noise.assign(keras.random.normal((3,)))
        self.built = True


class ArrayValued(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.table = keras.Variable(np.arange(6, dtype="float32").reshape(2, 3), trainable=False, name="table")
        self.scalar = keras.Variable(3, dtype="int32", name="scalar")
        self.copy = keras.Variable(self.table, name="copy")


class WeightNorm(keras.layers.Layer):
    """Reads a variable that it makes: at once, within a jitted function, and through another layer's call."""

    def __init__(self, initializer: Any = "glorot_uniform") -> None:
        super().__init__()
        self.inner = keras.layers.Dense(3, kernel_initializer=initializer)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        v = self.inner.kernel
        self.g = self.add_weight(shape=(3,), initializer="ones", name="g")
        self.g.assign(keras.ops.norm(v, axis=0))
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.total.assign(jax.jit(lambda: jnp.sum(v.value))())
        self.output_of_ones = self.add_weight(shape=(1, 3), initializer="zeros", name="output")
        trainable, rest = self.inner.trainable_variables, self.inner.non_trainable_variables
        self.output_of_ones.assign(self.inner.stateless_call(trainable, rest, np.ones((1, shape[-1])))[0])
        self.after = self.add_weight(shape=(2, 2), initializer=self.inner.kernel_initializer, name="after")


def built_with_another(make: Callable[[], keras.layers.Layer]) -> Callable[[], keras.layers.Layer]:
    """A layer that is built, and one after it."""

    def build() -> keras.layers.Layer:
        both = keras.layers.Layer()
        both.first, both.after = make(), keras.layers.Dense(2)
        both.first.build((None, 4))
        both.after.build((None, 4))
        return both

    return build


READING: dict[str, Callable[[], keras.layers.Layer]] = {
    "assigns": AssignsWhileBuilding,
    "draws": DrawsWhileBuilding,
    "arrays": ArrayValued,
    "unseeded": WeightNorm,
    "generator": lambda: WeightNorm(keras.initializers.HeNormal(seed=keras.random.SeedGenerator(3))),
    "numpy": lambda: WeightNorm(lambda shape, dtype=None: np.random.normal(size=shape)),
    "random": lambda: WeightNorm(lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype)),
}
BUILDS: dict[str, Callable[[], Any]] = {
    "annotated": mlp,
    "lambda": lambda: mlp(),
    "partial": functools.partial(Builder.make, 3),
    "without annotation": lambda: Builder.make(2),
    "task": bert_task,
    "siglip": siglip,
    "embedding": embedding,
    **{name: functools.partial(cls, **config) for name, (cls, config) in BACKBONES.items()},
    **{f"layer that {name}": built_with_another(make) for name, make in READING.items()},
}
WITH_OUTPUTS = ("annotated", "embedding", "gemma", "vit")


@pytest.mark.parametrize("name", BUILDS)
def test_what_is_built_is_what_stock_builds(name: str) -> None:
    """With the same random numbers after it, before anything is materialized."""

    def drawn() -> Any:
        return np.random.rand(), np.asarray(keras.random.normal((2,))).tolist()

    expected = seeded(BUILDS[name])
    after = drawn()
    abstract = seeded(
        lambda: (
            lm.build_abstract(BACKBONES[name][0], **BACKBONES[name][1])
            if name in BACKBONES
            else lm.build_abstract(BUILDS[name])
        )
    )
    assert drawn() == after
    assert drawn() != after
    assert all(variable.sharding is None for variable in abstract.values())
    found = abstract.materialize()
    assert [variable.path for variable in found.variables] == [variable.path for variable in expected.variables]
    assert_same(expected, found, outputs=name in WITH_OUTPUTS)


def test_arrays_that_are_given_are_constants() -> None:
    assert [row.action for row in lm.build_abstract(embedding).plan().rows] == ["constant"]
    rows = {row.path: row.action for row in lm.build_abstract(siglip).plan().rows}
    assert next(action for path, action in rows.items() if path.endswith("position_ids")) == "constant"
    assert any("iteration" in path for path in lm.build_abstract(bert_task)), "the optimizer's are there"


def test_jax_functions_are_still_jax_functions() -> None:
    """With Keras imported, a function that takes no array and returns a pytree is not mistaken for a factory."""
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((4, 4)), "n": jnp.arange(3)})
    assert set(abstract) == {"w", "n"}
    keyed = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (4, 4))}, jax.random.key(0))
    assert set(keyed.materialize()) == {"w"}


def test_bound_from_preset(tmp_path: Path) -> None:
    cls, _ = BACKBONES["gemma"]
    folder = str(save_preset(tmp_path / "gemma", "gemma"))
    assert_same(cls.from_preset(folder), lm.build_abstract(cls.from_preset, folder).materialize(), outputs=False)


def test_materializing_twice_gives_two_models_of_the_same_names() -> None:
    """As `keras.models.clone_model` has it: whatever goes by path fits the abstract model and all that it becomes."""
    abstract = lm.build_abstract(mlp)
    first, second = abstract.materialize(), abstract.materialize()
    assert first is not second
    assert_same(first, second, outputs=False)
    assert [v.path for v in second.variables] == [v.path for v in first.variables] == list(abstract)
    assert keras.layers.Dense(1).name not in {layer.name for layer in (*first.layers, *second.layers)}
    first.weights[0].assign(np.zeros((4, 8)))
    assert not np.array_equal(first.weights[0].value, second.weights[0].value)


GIVEN = [np.arange(4.0), np.arange(4), np.arange(4) + 1j, np.arange(4, dtype="uint64"), np.float64(3)]
GIVEN += [np.array(1 << 40), np.ones(3, "float16"), np.ones(3, bool), jnp.ones(3, "bfloat16"), [1, 2], 3.0, True, 1j]


def test_the_dtype_of_a_variable_made_of_a_value() -> None:
    for given in GIVEN:
        expected = keras.Variable(given)
        with lk.deferred():
            found = keras.Variable(given)
            assert found.dtype == expected.dtype, given
        assert found.dtype == expected.dtype and found.value.dtype == expected.value.dtype, given
        np.testing.assert_array_equal(found.value, expected.value)


def test_batch_norm_rnn_dropout_and_compiled_optimizers() -> None:
    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.layers.Input((3, 4), batch_size=2),
                keras.layers.LSTM(4, return_sequences=True, stateful=True),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.Nadam(1e-2), "mse", metrics=["mae"])
        return model

    expected, found = seeded(build), seeded(lambda: lm.build_abstract(build).materialize())
    assert_same(expected, found, outputs=False)
    x, y = np.ones((4, 3, 4), "float32"), np.ones((4, 3, 2), "float32")
    options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    losses = [model.fit(x, y, **options).history["loss"] for model in (expected, found)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert int(found.optimizer.iterations.value) == 4


def test_shared_layers_and_equal_names() -> None:
    def tied() -> keras.Model:
        inputs = keras.Input((4,))
        dense = keras.layers.Dense(4)
        return keras.Model(inputs, dense(dense(inputs)))

    assert len(lm.build_abstract(tied)) == 2

    def alike() -> keras.layers.Layer:
        layer = keras.layers.Layer(name="same")
        layer.a = keras.Variable("ones", shape=(2,), name="w")
        layer.b = keras.Variable("zeros", shape=(3,), name="w")
        return layer

    abstract = lm.build_abstract(alike)
    assert list(abstract) == ["w", "w#2"]
    layer = abstract.materialize()
    assert (layer.a.shape, layer.b.shape) == ((2,), (3,))


def test_an_exception_leaves_keras_as_it_was() -> None:
    def build() -> keras.Model:
        keras.layers.Dense(3).build((None, 4))
        raise RuntimeError("no")

    def initialize() -> list[Any]:
        return [vars(cls).get("__init__") for cls in keras.Variable.__mro__]

    before = initialize()
    with pytest.raises(RuntimeError, match="no"):
        lm.build_abstract(build)
    assert initialize() == before
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    assert layer.kernel._value is not None
    with keras.StatelessScope():
        pass  # leaving a scope initializes whatever is pending; nothing may be


def test_other_threads_build_as_usual() -> None:
    inside, done = threading.Event(), threading.Event()
    values: list[Any] = []

    def elsewhere() -> None:
        inside.wait(60)
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        values.append(layer.kernel._value)
        done.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()

    def build() -> keras.Model:
        inside.set()
        assert done.wait(60)
        return mlp()

    abstract = lm.build_abstract(build)
    thread.join()
    assert values[0] is not None
    assert len(abstract) == 4


def test_building_inside_building_is_refused() -> None:
    with lk.deferred(), pytest.raises(lm.LazyModelError, match="already being built abstractly"):
        lm.build_abstract(mlp)


def test_a_large_model_builds_without_memory() -> None:
    live = sum(array.nbytes for array in jax.live_arrays())
    abstract = lm.build_abstract(
        keras_hub.models.Llama3Backbone, vocabulary_size=128256, num_layers=80, num_query_heads=64,
        num_key_value_heads=8, hidden_dim=8192, intermediate_dim=28672, dtype="bfloat16",
    )  # fmt: skip
    assert abstract.num_parameters == 70_553_706_496
    assert abstract.nbytes == pytest.approx(2 * abstract.num_parameters, rel=1e-3)
    assert sum(array.nbytes for array in jax.live_arrays()) < live + 1024  # scalars that a backbone keeps


def test_initializers_are_not_kept_alive() -> None:
    class Noise:
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return jnp.full(shape, 0.5, dtype)

    def value_from(noise: Any) -> float:
        def build() -> keras.layers.Layer:
            layer = keras.layers.Layer()
            layer.table = keras.Variable(noise, shape=(128, 128))
            return layer

        return float(lm.build_abstract(build).materialize().table.value[3, 4])

    noise = Noise()
    alive = weakref.ref(noise)
    assert value_from(noise) == 0.5
    del noise
    gc.collect()
    assert alive() is None


def test_a_factory_without_annotation_whose_layer_looks_at_values_while_it_is_made() -> None:
    class Drops(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [float(rate) for rate in keras.ops.linspace(0.0, 0.5, 3)]  # a tracer has no value
            self.dense = keras.layers.Dense(4)
            self.dense.build((None, 2))

    def factory():
        return Drops()

    abstract = lm.build_abstract(factory)
    assert [variable.shape for variable in abstract.values()] == [(2, 4), (4,)]
    assert abstract.materialize().rates == [0.0, 0.25, 0.5]

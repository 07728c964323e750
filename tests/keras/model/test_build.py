"""Building Keras models abstractly: every way in, and what models do while they build."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel_keras import _upstream
from tests.keras.models import BACKBONES, assert_same, save_preset, seeded


def mlp() -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])


def annotated() -> keras.Model:
    return mlp()


class Builder:
    @staticmethod
    def make(units: int):  # no annotation: found out by tracing
        return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(units)])


@pytest.mark.parametrize("name", BACKBONES)
def test_class(name: str) -> None:
    cls, config = BACKBONES[name]
    abstract = seeded(lambda: lm.build_abstract(cls, **config))
    assert all(v.sharding is None for v in abstract.values())
    assert_same(seeded(lambda: cls(**config)), abstract.materialize())


@pytest.mark.parametrize(
    "build", [annotated, mlp, lambda: mlp(), functools.partial(Builder.make, 3), lambda: Builder.make(2)]
)
def test_factories(build: Any) -> None:
    model = seeded(lambda: lm.build_abstract(build)).materialize()
    expected = seeded(build)
    assert [v.path for v in model.weights] == [v.path for v in expected.weights]
    assert_same(expected, model)


def test_jax_functions_are_still_jax_functions() -> None:
    """With Keras imported, a function that takes no array and returns a pytree is not mistaken for a factory."""
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((4, 4)), "n": jnp.arange(3)})
    assert set(abstract) == {"w", "n"}
    keyed = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (4, 4))}, jax.random.key(0))
    assert set(keyed.materialize()) == {"w"}


def test_bound_from_preset(tmp_path: Any) -> None:
    cls, _ = BACKBONES["gemma"]
    folder = str(save_preset(tmp_path / "gemma", "gemma"))
    abstract = lm.build_abstract(cls.from_preset, folder)
    assert_same(cls.from_preset(folder), abstract.materialize())


def test_materializing_twice_gives_two_models() -> None:
    abstract = lm.build_abstract(mlp)
    first, second = abstract.materialize(), abstract.materialize()
    assert first is not second
    assert_same(first, second)
    first.weights[0].assign(np.zeros((4, 8)))
    assert not np.array_equal(first.weights[0].value, second.weights[0].value)


def test_a_second_model_has_the_names_of_the_first() -> None:
    """As `keras.models.clone_model` has it: whatever goes by path fits the abstract model and all that it becomes."""

    def build() -> keras.Sequential:
        return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])

    abstract = lm.build_abstract(build)
    first, second = abstract.materialize(), abstract.materialize()
    assert [v.path for v in second.variables] == [v.path for v in first.variables] == list(abstract)
    assert keras.layers.Dense(1).name not in {layer.name for layer in (*first.layers, *second.layers)}


class AssignsWhileBuilding(keras.layers.Layer):
    def build(self, _: Any) -> None:
        self.ids = self.add_weight(shape=(5,), dtype="int32", initializer="zeros", trainable=False, name="ids")
        self.ids.assign(np.arange(5))
        self.table = self.add_weight(shape=(4, 4), initializer="glorot_uniform", name="table")
        self.half = self.add_weight(shape=(4, 2), initializer="zeros", name="half")
        self.half.assign(keras.ops.multiply(self.table.value[:, :2], 0.5))  # reads one variable, assigns another
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

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


READ: dict[str, Callable[[], keras.layers.Layer]] = {
    "assigns": AssignsWhileBuilding,
    "arrays": ArrayValued,
    "unseeded": WeightNorm,
    "generator": lambda: WeightNorm(keras.initializers.HeNormal(seed=keras.random.SeedGenerator(3))),
    "numpy": lambda: WeightNorm(lambda shape, dtype=None: np.random.normal(size=shape)),
    "random": lambda: WeightNorm(lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype)),
}


@pytest.mark.parametrize("kind", READ)
def test_values_given_and_read_while_building(kind: str) -> None:
    def build():
        layer = READ[kind]()
        layer.build((None, 4))
        after = keras.layers.Dense(2)
        after.build((None, 4))
        return [layer, after]

    expected = seeded(build)
    drawn = np.random.rand(), np.asarray(keras.random.normal((2,))).tolist()
    abstract = seeded(lambda: lm.build_abstract(build))
    assert (np.random.rand(), np.asarray(keras.random.normal((2,))).tolist()) == drawn
    for first, second in zip(expected, abstract.materialize(), strict=True):
        for a, b in zip(first.variables, second.variables, strict=True):
            np.testing.assert_array_equal(a.value, b.value, err_msg=a.path)
            assert a.dtype == b.dtype


GIVEN = [np.arange(4.0), np.arange(4), np.arange(4) + 1j, np.arange(4, dtype="uint64"), np.float64(3)]
GIVEN += [np.array(1 << 40), np.ones(3, "float16"), np.ones(3, bool), jnp.ones(3, "bfloat16"), [1, 2], 3.0, True, 1j]


@pytest.mark.parametrize("given", GIVEN, ids=repr)
def test_the_dtype_of_a_variable_made_of_a_value(given: Any) -> None:
    expected = keras.Variable(given)
    with lk.deferred():
        found = keras.Variable(given)
        assert found.dtype == expected.dtype
    assert found.dtype == expected.dtype and found.value.dtype == expected.value.dtype
    np.testing.assert_array_equal(found.value, expected.value)


def test_embedding_with_weights() -> None:
    table = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")

    def build() -> keras.Model:
        return keras.Sequential(
            [keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(10, 4, weights=[table])]
        )

    abstract = lm.build_abstract(build)
    assert [row.action for row in abstract.plan().rows] == ["constant"]
    np.testing.assert_array_equal(abstract.materialize().weights[0].value, table)


def test_batch_norm_rnn_dropout_and_compiled_optimizers() -> None:
    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.layers.Input((6, 4), batch_size=2),
                keras.layers.LSTM(4, return_sequences=True, stateful=True),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.Nadam(1e-2), "mse", metrics=["mae"])
        return model

    expected, found = seeded(build), seeded(lambda: lm.build_abstract(build).materialize())
    assert_same(expected, found)
    x, y = np.ones((4, 6, 4), "float32"), np.ones((4, 6, 2), "float32")
    losses = [
        model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"] for model in (expected, found)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert int(found.optimizer.iterations.value) == 4


def test_task_with_its_default_compile() -> None:
    def build() -> Any:
        backbone = keras_hub.models.BertBackbone(**BACKBONES["bert"][1])
        return keras_hub.models.BertTextClassifier(backbone, num_classes=2)

    abstract = seeded(lambda: lm.build_abstract(build))
    assert any("iteration" in path for path in abstract)
    assert_same(seeded(build), abstract.materialize())


def test_siglip_position_ids() -> None:
    config = {
        "image_shape": (16, 16, 3), "patch_size": 4, "hidden_dim": 8, "num_layers": 1, "num_heads": 2,
        "intermediate_dim": 16,
    }  # fmt: skip
    cls = keras_hub.models.SigLIPVisionEncoder
    expected = seeded(lambda: cls(**config))
    abstract = seeded(lambda: lm.build_abstract(cls, **config))
    assert_same(expected, abstract.materialize(), outputs=False)
    ids = next(path for path in abstract if path.endswith("position_ids"))
    assert abstract.plan().rows[list(abstract).index(ids)].action == "constant"


def test_shared_layers_are_one_variable() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((4,))
        dense = keras.layers.Dense(4)
        return keras.Model(inputs, dense(dense(inputs)))

    assert len(lm.build_abstract(build)) == 2


def test_equal_names_are_kept_apart() -> None:
    def build() -> keras.layers.Layer:
        layer = keras.layers.Layer(name="same")
        layer.a = keras.Variable("ones", shape=(2,), name="w")
        layer.b = keras.Variable("zeros", shape=(3,), name="w")
        return layer

    abstract = lm.build_abstract(build)
    assert list(abstract) == ["w", "w#2"]
    layer = abstract.materialize()
    assert layer.a.shape == (2,)
    assert layer.b.shape == (3,)


def test_an_exception_leaves_keras_as_it_was() -> None:
    def build() -> keras.Model:
        keras.layers.Dense(3).build((None, 4))
        raise RuntimeError("no")

    initialize = _upstream.VariableBase.__init__
    with pytest.raises(RuntimeError, match="no"):
        lm.build_abstract(build)
    assert _upstream.VariableBase.__init__ is initialize
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


def test_the_global_seed_generator_keeps_working() -> None:
    class DrawsWhileBuilding(keras.layers.Layer):
        def build(self, _: Any) -> None:
            self.noise = self.add_weight(shape=(3,), initializer="zeros", name="noise")
            self.noise.assign(keras.random.normal((3,)))
            self.built = True

    def build() -> keras.layers.Layer:
        layer = DrawsWhileBuilding()
        layer.build(None)
        return layer

    expected = seeded(build)
    after = np.asarray(keras.random.normal((2,)))
    found = seeded(lambda: lm.build_abstract(build))
    again = np.asarray(keras.random.normal((2,)))  # before anything is materialized
    np.testing.assert_array_equal(expected.noise.value, found.materialize().noise.value)
    np.testing.assert_array_equal(after, again)
    assert not np.array_equal(again, np.asarray(keras.random.normal((2,))))


def test_building_inside_building_is_refused() -> None:
    with lk.deferred(), pytest.raises(lm.LazyModelError, match="already being built abstractly"):
        lm.build_abstract(annotated)


LARGE = {
    "gemma2_9b": (
        keras_hub.models.GemmaBackbone,
        {"vocabulary_size": 256000, "num_layers": 42, "num_query_heads": 16, "num_key_value_heads": 8,
         "hidden_dim": 3584, "intermediate_dim": 28672, "head_dim": 256, "use_post_ffw_norm": True,
         "use_post_attention_norm": True, "final_logit_soft_cap": 30, "attention_logit_soft_cap": 50},
        9_241_705_984,
    ),
    "llama3_70b": (
        keras_hub.models.Llama3Backbone,
        {"vocabulary_size": 128256, "num_layers": 80, "num_query_heads": 64, "num_key_value_heads": 8,
         "hidden_dim": 8192, "intermediate_dim": 28672},
        70_553_706_496,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_models_build_without_memory(name: str) -> None:
    cls, config, parameters = LARGE[name]
    live = sum(array.nbytes for array in jax.live_arrays())
    abstract = lm.build_abstract(cls, **config, dtype="bfloat16")
    assert abstract.num_parameters == parameters
    assert abstract.nbytes == pytest.approx(2 * parameters, rel=1e-3)
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

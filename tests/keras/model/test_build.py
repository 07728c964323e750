"""Building Keras models abstractly: every way in, what models do while they build, and what is no model of Keras."""

from __future__ import annotations

import functools
import gc
import random
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import (
    BACKBONES,
    assert_same,
    assert_same_values,
    columns,
    functional,
    in_block,
    preprocessing,
    preset_of,
    seeded,
)
from tests.large import mostly_large

eqx: Any = pytest.importorskip("equinox")
flax: Any = pytest.importorskip("flax")
layers = keras.layers


def mlp() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(2)])


def compiled() -> Any:
    optimizer = keras.optimizers.Adam(1e-2)  # before the first layer
    model = mlp()
    model.compile(optimizer, "mse")
    return model


class Maker:
    @staticmethod
    def make(units: int):  # no annotation: found out by tracing
        return keras.Sequential([keras.Input((4,)), layers.Dense(units)])

    def __call__(self) -> Any:
        return mlp()


def bert_task() -> Any:
    backbone = keras_hub.models.BertBackbone(**BACKBONES["bert"][1])
    return keras_hub.models.BertTextClassifier(backbone, num_classes=2)  # compiled by default


def siglip() -> Any:
    return keras_hub.models.SigLIPVisionEncoder(
        image_shape=(16, 16, 3), patch_size=4, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=16
    )


TABLE = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")


def embedding(table: Any = TABLE) -> keras.Model:
    return keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(*table.shape, weights=[table])])


def recurrent() -> keras.Model:
    """Its states are variables that are made from arrays, which the model does not count among its own."""
    parts = [layers.LSTM(4, return_sequences=True, stateful=True), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3, 4), batch_size=2), *parts, layers.Dense(2)])
    model.compile(keras.optimizers.Nadam(1e-2), "mse", metrics=["mae"])
    return model


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


class AssignsWhileBuilding(layers.Layer):
    def build(self, _: Any) -> None:
        self.ids = self.add_weight(shape=(5,), dtype="int32", initializer="zeros", trainable=False, name="ids")
        self.ids.assign(np.arange(5))
        self.table = self.add_weight(shape=(4, 4), initializer="glorot_uniform", name="table")
        self.half = self.add_weight(shape=(4, 2), initializer="zeros", name="half")
        self.half.assign(keras.ops.multiply(self.table.value[:, :2], 0.5))  # reads one variable, assigns another
        self.noise = self.add_weight(shape=(3,), initializer="zeros", name="noise")
        self.noise.assign(keras.random.normal((3,)))
        self.built = True


class ArrayValued(layers.Layer):
    """A layer whose variables are made from arrays: NumPy's, JAX' and lists, some of them not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.Variable(np.arange(6, dtype="float32").reshape(2, 3), trainable=False, name="table")
        self.mask = keras.Variable(jnp.tri(8), name="mask")
        self.counts = keras.Variable([1, 2, 3], dtype="int32", trainable=False, name="counts")
        self.scalar = keras.Variable(3, dtype="int32", name="scalar")
        self.copy = keras.Variable(self.table, name="copy")


class WeightNorm(layers.Layer):
    """Reads a variable that it makes: at once, within a jitted function, and through another layer's call."""

    def __init__(self, initializer: Any = "glorot_uniform") -> None:
        super().__init__()
        self.inner = layers.Dense(3, kernel_initializer=initializer)

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


def built_with_another(make: Callable[[], layers.Layer]) -> Callable[[], layers.Layer]:
    """A layer that is built, and one after it."""

    def build() -> layers.Layer:
        both = layers.Layer()
        both.first, both.after = make(), layers.Dense(2)
        both.first.build((None, 4))
        both.after.build((None, 4))
        return both

    return build


def dense(bias: float) -> Any:
    layer = layers.Dense(2, bias_initializer=keras.initializers.Constant(bias))
    return keras.Sequential([keras.Input((3,)), layer, layers.Dropout(0.5), layers.Dense(2)])


READING: dict[str, Callable[[], layers.Layer]] = {
    "assigns": AssignsWhileBuilding,
    "arrays": ArrayValued,
    "unseeded": WeightNorm,
    "generator": lambda: WeightNorm(keras.initializers.HeNormal(seed=keras.random.SeedGenerator(3))),
    "numpy": lambda: WeightNorm(lambda shape, dtype=None: np.random.normal(size=shape)),
    "random": lambda: WeightNorm(lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype)),
}
# What is computed before the first layer.
BEFORE: dict[str, Callable[[], Any]] = {
    "keras.random": lambda: dense(float(keras.random.normal((3,))[0])),
    "generator": lambda: dense(float(keras.random.normal((3,), seed=keras.random.SeedGenerator(3))[0])),
    "jax": lambda: dense(float(jnp.ones(3).sum())),
    "branch": lambda: dense(1.0 if jax.random.uniform(jax.random.key(1)) > 0.5 else 2.0),
    "custom derivative": lambda: dense(float(jax.nn.softplus(jnp.arange(3.0))[1])),
    "jit": lambda: dense(float(jax.jit(lambda x: x.at[0].set(3.0))(np.arange(3.0))[0])),
    "numpy": lambda: dense(np.random.rand() + random.random()),
    "table": lambda: embedding(jnp.linspace(0.0, 1.0, 6).reshape(3, 2)),
}
BUILDS: dict[str, Callable[[], Any]] = {
    "annotated": mlp,
    "lambda": lambda: mlp(),
    "partial": functools.partial(Maker.make, 3),
    "object": Maker(),
    "without annotation": lambda: Maker.make(2),
    "compiled": compiled,
    "task": bert_task,
    "siglip": siglip,
    "embedding": embedding,
    "functional": functional,
    "subclassed": Built,
    "preprocessing": preprocessing,
    "recurrent": recurrent,
    **{name: functools.partial(cls, **config) for name, (cls, config) in BACKBONES.items()},
    **{f"layer that {name}": built_with_another(make) for name, make in READING.items()},
    **{f"before: {name}": make for name, make in BEFORE.items()},
}
WITH_OUTPUTS = ("annotated", "embedding", "gemma", "vit")
ON_A_MESH = ("functional", "subclassed", "preprocessing", "recurrent", "layer that arrays")
# Models whose layers make their variables as those of the others do; what takes long is compiling their values.
OF_OTHERS = ("siglip", "bert", "llama3", "mixtral", "vit", "task", "layer that generator", "layer that random")


def draw() -> list[float]:
    return [np.random.rand(), random.random(), *np.asarray(keras.random.normal((2,))).tolist()]


@pytest.mark.parametrize("name", mostly_large(BUILDS, set(BUILDS) - {*OF_OTHERS}))
def test_what_is_built_is_what_stock_builds(name: str, mesh42: Mesh) -> None:
    """With the same random numbers after it, of which models that are made of it later draw none."""
    expected = seeded(BUILDS[name])
    after = draw(), draw()
    build, options = (BACKBONES[name][0], BACKBONES[name][1]) if name in BACKBONES else (BUILDS[name], {})
    abstract = seeded(lambda: lm.build_abstract(build, **options))
    assert draw() == after[0]
    assert all(variable.sharding is None for variable in abstract.values())
    found = abstract.materialize()
    assert [variable.path for variable in found.variables] == [variable.path for variable in expected.variables]
    assert_same(expected, found, outputs=name in WITH_OUTPUTS)
    if name in ON_A_MESH:
        placed = abstract.shard(mesh42, columns).materialize()
        assert_same_values(expected.variables, placed.variables)
        assert all(len(variable.value.sharding.device_set) == 8 for variable in placed.variables)
    assert draw() == after[1]


def counted(build: Callable[..., Any]) -> Any:
    """A function that counts how often it runs."""

    def run(*args: Any) -> Any:
        run.calls += 1  # pyright: ignore[reportFunctionMemberAccess]
        return build(*args)

    run.calls = 0  # pyright: ignore[reportFunctionMemberAccess]
    return run


RESULTS: dict[str, Callable[..., Any]] = {
    "pytree": lambda: {"w": jnp.zeros((4, 4)), "n": jnp.arange(3)},
    "equinox": lambda: eqx.nn.Linear(4, 2, key=jax.random.key(0)),
    "nnx": lambda: flax.nnx.Linear(4, 2, rngs=flax.nnx.Rngs(0)),
    "linen": lambda: flax.linen.Dense(3).init(jax.random.key(0), jnp.zeros((1, 4))),
    "keras": mlp,
    "compiled": compiled,
    "several": lambda: (mlp(), mlp()),
    "argument": lambda key: {"w": jax.random.normal(key, (4,))},
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_factory_runs_once(kind: str) -> None:
    build = counted(RESULTS[kind])
    args = (jax.random.key(0),) if kind == "argument" else ()
    assert len(seeded(lambda: lm.build_abstract(build, *args))) > 0
    assert build.calls == 1


@pytest.mark.parametrize("kind", ["keras", "pytree"])
def test_an_exception_shows_the_users_own_line_once_and_leaves_keras_as_it_was(kind: str) -> None:
    def build():
        RESULTS[kind]()
        raise RuntimeError("no")

    def initialize() -> list[Any]:
        return [vars(cls).get("__init__") for cls in keras.Variable.__mro__]

    before = initialize()
    with pytest.raises(RuntimeError, match="no") as caught:
        lm.build_abstract(build)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count('raise RuntimeError("no")') == 1
    assert "another exception occurred" not in shown and "direct cause" not in shown
    assert initialize() == before
    layer = layers.Dense(3)
    layer.build((None, 4))
    assert layer.kernel._value is not None
    with keras.StatelessScope():
        pass  # leaving a scope initializes whatever is pending; nothing may be


def test_layers_have_values_and_jax_functions_have_none() -> None:
    class Drops(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [float(rate) for rate in keras.ops.linspace(0.0, 0.5, 3)]
            self.dense = layers.Dense(4)
            self.dense.build((None, 2))

    assert lm.build_abstract(lambda: Drops()).materialize().rates == [0.0, 0.25, 0.5]
    live = sum(array.nbytes for array in jax.live_arrays())
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((1 << 20, 1 << 20))})
    assert abstract.nbytes == 4 << 40
    assert sum(array.nbytes for array in jax.live_arrays()) <= live + 1024


def test_jax_functions_are_traced_though_small_arrays_have_values() -> None:
    def build():
        first, second = jax.random.split(jax.random.key(0))
        w = jax.random.normal(first, (8, 4))
        scale = 2.0 if w[0, 0] > 0 else 3.0
        return {"w": w * scale, "s": jax.nn.softplus(jnp.arange(3.0)), "k": second, "c": jnp.asarray(np.ones(2))}

    abstract = lm.build_abstract(build)
    assert {path: variable.origin for path, variable in abstract.items()} == {
        "w": "normal", "s": "init", "k": "value", "c": "constant"
    }  # fmt: skip
    found, expected = abstract.materialize(), build()
    assert found.pop("k") == expected.pop("k")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_too_large_to_be_computed_before_it_is_known_to_be_keras() -> None:
    def build():
        table = jnp.zeros((1 << 12, 1 << 12))
        return keras.Sequential([keras.Input((2,)), layers.Embedding(1 << 12, 1 << 12, weights=[table])])

    with pytest.raises(lm.LazyModelError, match=r"build makes Keras layers.* -> keras\.Model"):
        lm.build_abstract(build)
    build.__annotations__["return"] = keras.Model
    assert lm.build_abstract(build).nbytes == 64 << 20


def test_functions_that_make_layers_and_return_arrays() -> None:
    """A warning shows that large ones were computed whole."""

    def build(units: int):
        dense = layers.Dense(units, kernel_initializer=keras.initializers.RandomNormal(seed=1))
        dense.build((None, 4))
        return {"w": dense.kernel.value, "b": jnp.ones(3)}

    jax.tree.map(np.testing.assert_array_equal, build(3), lm.build_abstract(build, 3).materialize())
    with pytest.warns(lm.LazyModelWarning, match=r"build .* 1\.56 MiB"):
        lm.build_abstract(build, 100_000 + 2400)


def test_variables_alone_are_keras_too() -> None:
    abstract = seeded(lambda: lm.build_abstract(lambda: mlp().variables))
    assert [variable.shape for variable in abstract.values()] == [(4, 8), (8,), (8, 2), (2,)]
    assert_same_values(seeded(mlp).variables, abstract.materialize())


def test_arrays_as_arguments_of_a_factory() -> None:
    def build(table: Any):
        return embedding(table)

    np.testing.assert_array_equal(lm.build_abstract(build, TABLE).materialize().weights[0].value, TABLE)
    with pytest.raises(lm.LazyModelError, match=r"build takes arrays of JAX.* -> keras\.Model"):
        lm.build_abstract(build, jnp.asarray(TABLE))


@pytest.mark.parametrize("build", [lambda: mlp(), lambda: layers.Dropout(0.5)])
def test_where_nothing_can_be_recorded(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that returns arrays is traced there, too."""

    def refused(message: str) -> None:
        with pytest.raises(lm.LazyModelError, match=message):
            lm.build_abstract(build)
        assert lm.build_abstract(lambda: {"w": jnp.ones(3)})["w"].shape == (3,)

    in_block(lambda: refused("already being built abstractly"))
    with monkeypatch.context() as patch:
        patch.setattr(keras.config, "is_nnx_enabled", lambda: True)
        refused("KERAS_NNX_ENABLED")
    layer = layers.Activation("relu")
    build = lambda: layer  # noqa: E731  # with TensorFlow nothing of such a layer is traced
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    refused("'tensorflow'.*KERAS_BACKEND")


def test_a_model_that_is_built_is_said_to_be() -> None:
    with pytest.raises(lm.LazyModelError, match="'made', a Dense whose variables exist already"):
        lm.build_abstract(layers.Dense(2, name="made"))


def test_arrays_that_are_given_are_constants() -> None:
    assert [row.action for row in lm.build_abstract(embedding).plan().rows] == ["constant"]
    rows = {row.path: row.action for row in lm.build_abstract(siglip).plan().rows}
    assert next(action for path, action in rows.items() if path.endswith("position_ids")) == "constant"
    assert any("iteration" in path for path in lm.build_abstract(bert_task)), "the optimizer's are there"


def test_bound_from_preset() -> None:
    cls, folder = BACKBONES["gemma"][0], preset_of("gemma")
    assert_same(cls.from_preset(folder), lm.build_abstract(cls.from_preset, folder).materialize(), outputs=False)


def test_materializing_twice_gives_two_models_of_the_same_names() -> None:
    """As `keras.models.clone_model` has it: whatever goes by path fits the abstract model and all that it becomes."""
    abstract = lm.build_abstract(mlp)
    first, second = abstract.materialize(), abstract.materialize()
    assert first is not second
    assert_same(first, second, outputs=False)
    assert [v.path for v in second.variables] == [v.path for v in first.variables] == list(abstract)
    assert layers.Dense(1).name not in {layer.name for layer in (*first.layers, *second.layers)}
    first.weights[0].assign(np.zeros((4, 8)))
    assert not np.array_equal(first.weights[0].value, second.weights[0].value)


def test_an_abstract_model_keeps_no_model_that_it_became() -> None:
    abstract = lm.build_abstract(mlp)
    first = abstract.materialize()
    expected, reference = [np.asarray(v.value) for v in first.variables], weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None
    assert "forward" in str(abstract.plan(compile=lm.Compile("forward", batch=2)))
    for value, variable in zip(expected, abstract.materialize().variables, strict=True):
        np.testing.assert_array_equal(value, variable.value)


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


def test_batch_norm_rnn_dropout_and_compiled_optimizers_train() -> None:
    expected, found = seeded(recurrent), seeded(lambda: lm.build_abstract(recurrent).materialize())
    for state in found.layers[0].states:
        np.testing.assert_array_equal(state.value, np.zeros((2, 4)))
    x, y = np.ones((4, 3, 4), "float32"), np.ones((4, 3, 2), "float32")
    options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    losses = [model.fit(x, y, **options).history["loss"] for model in (expected, found)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert int(found.optimizer.iterations.value) == 4


def test_shared_layers_and_equal_names() -> None:
    def tied() -> keras.Model:
        inputs = keras.Input((4,))
        dense = layers.Dense(4)
        return keras.Model(inputs, dense(dense(inputs)))

    def alike() -> layers.Layer:
        layer = layers.Layer(name="same")
        layer.a = keras.Variable("ones", shape=(2,), name="w")
        layer.b = keras.Variable("zeros", shape=(3,), name="w")
        return layer

    assert len(lm.build_abstract(tied)) == 2
    abstract = lm.build_abstract(alike)
    assert list(abstract) == ["w", "w#2"]
    layer = abstract.materialize()
    assert (layer.a.shape, layer.b.shape) == ((2,), (3,))


def test_other_threads_build_as_usual() -> None:
    inside, done = threading.Event(), threading.Event()
    values: list[Any] = []

    def elsewhere() -> None:
        inside.wait(60)
        layer = layers.Dense(3)
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
        def build() -> layers.Layer:
            layer = layers.Layer()
            layer.table = keras.Variable(noise, shape=(128, 128))
            return layer

        return float(lm.build_abstract(build).materialize().table.value[3, 4])

    noise = Noise()
    alive = weakref.ref(noise)
    assert value_from(noise) == 0.5
    del noise
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")  # Keras', of what it leaves as it is
def test_streamed_one_by_one_as_quantized() -> None:
    abstract = lm.build_abstract(mlp).quantize("int8")
    assert not lm.diff(abstract, abstract.materialize())
    assert {path for path, _ in abstract.stream()} == set(abstract)


class Unbuilt(keras.Model):
    """A subclassed model whose variables come to be when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Dense(16), layers.Dense(4)

    def call(self, inputs: Any) -> Any:
        return self.down(self.up(inputs))


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
        model = in_block(Unbuilt)
        model(data)
        return model

    for build in (built_inside, built_afterwards):
        assert_same_values(expected.variables, seeded(build).variables)
    assert len(lm.build_abstract(Unbuilt)) == 0


def test_a_model_moves_in_place_and_trains_there(mesh8: Mesh) -> None:
    model = keras.Sequential([keras.Input((16,)), layers.Dense(32)])
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
    abstract = lm.build_abstract(mlp).with_optimizer(optax.adam(1e-3), memory_kind="pinned_host")
    model, state = abstract.shard(mesh8, {".*": P()}).materialize()  # Optax' state may lie there
    assert {leaf.sharding.memory_kind for leaf in state[0].mu.values()} == {"pinned_host"}
    x = np.ones((2, 4), np.float32)
    before, own = np.asarray(model(x)), model.layers[0].kernel.value.sharding
    for kind in ("pinned_host", "device"):
        assert lm.reshard(model, own.with_memory_kind(kind), donate=True) is model
        assert {variable.value.sharding.memory_kind for variable in model.variables} == {kind}
    assert np.array_equal(model(x), before)
    with pytest.raises(lm.ShardingError, match="sequential.*/dense.*/kernel: .*pinned_host"):
        abstract.shard(mesh8, {".*kernel": lm.Host(P()), ".*": P()}).materialize()


def test_a_live_model_is_a_source(mesh8: Mesh) -> None:
    live = seeded(functional, 3)
    abstract = seeded(lambda: lm.build_abstract(functional))  # with the same automatic names
    table = lm.WeightMap.suggest(live, abstract)
    for source in (live, lm.map_checkpoint(live, table, abstract), {v.path: v for v in live.variables}):
        assert_same(live, abstract.materialize(source), outputs=False)
    sharded = abstract.shard(mesh8, columns).materialize(live)
    assert_same(live, sharded, outputs=False)
    assert not lm.diff(live, sharded) and table.check(live, sharded).one_way == ""
    live.compile("sgd", "mse")
    with pytest.raises(lm.CheckpointError, match="has no variable for: .*sgd/iteration"):
        abstract.materialize(live)
    with pytest.warns(UserWarning, match="strict=False leaves out"):
        assert_same_values(live.variables, abstract.materialize(live, strict=False).variables)


def test_a_sampler_follows_its_trainer_in_place(mesh8: Mesh) -> None:
    def build(dtype: str) -> keras.Model:
        return keras.Sequential([keras.Input((16,)), layers.Dense(32, dtype=dtype, name="a")], name="m")

    low, high = (Mesh(devices, ("model",)) for devices in np.split(mesh8.devices, 2))
    trainer = lm.build_abstract(build, "float32").shard(low, {".*kernel": P("model"), ".*": P()})
    sampler = lm.build_abstract(build, "bfloat16").shard(high, {".*kernel": P(None, "model"), ".*": P("model")})
    sync, model, copy = lm.Sync(trainer, sampler), trainer.materialize(), sampler.materialize()
    for _ in range(2):
        model.layers[0].kernel.assign(model.layers[0].kernel * 2)
        assert sync(model, into=copy) is copy
        expected = np.asarray(model.layers[0].kernel).astype(jnp.bfloat16)
        assert np.asarray(copy.layers[0].kernel.value).tobytes() == expected.tobytes()
    assert copy.layers[0].kernel.value.sharding == NamedSharding(high, P(None, "model"))

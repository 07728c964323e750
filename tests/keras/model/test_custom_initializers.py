"""Initializers that are not just a distribution: each is run as stock Keras runs it, once and at its turn."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk

from ..models import bits
from ..versions import needs_keras

KI = keras.initializers
Build = Callable[[], Any]


def chain(
    *initializers: Any, shape: tuple[int, ...] = (8, 16), dtype: str = "float32", name: str | None = None
) -> keras.Model:
    """A model of layers that have one weight each, in order of creation."""

    class Weight(keras.layers.Layer):
        def __init__(self, initializer: Any) -> None:
            super().__init__()
            self.initializer = initializer

        def build(self, _: Any) -> None:
            self.kernel = self.add_weight(shape=shape, initializer=self.initializer, dtype=dtype, name="kernel")

        def call(self, x: Any) -> Any:
            return x

    return keras.Sequential([keras.Input((8,)), *map(Weight, initializers)], name=name)


CASES: dict[str, Callable[[], Build]] = {}


def case(make: Callable[[], Build]) -> Callable[[], Build]:
    """Adds a function that makes a build function with state of its own."""
    CASES[make.__name__] = make
    return make


def each(call: Callable[..., Any], base: type = KI.RandomNormal, count: int = 3, **options: Any) -> Build:
    """Builds a model whose initializers are of one class with a `__call__` of its own, seeded 1, 2, …"""
    cls = type("Own", (base,), {"__call__": call, "calls": 0})
    return lambda: chain(*(cls(seed=seed + 1) for seed in range(count)), **options)


@case
def seed_plus_one() -> Build:
    return each(lambda self, shape, dtype=None: keras.random.normal(shape, dtype=dtype, seed=self.seed + 1))


@case
def seed_decides() -> Build:
    def call(self: Any, shape: Any, dtype: Any = None) -> Any:
        return keras.random.normal(shape, dtype=dtype, seed=self.seed) if self.seed > 2 else keras.ops.ones(shape)

    return each(call)


@case
def seed_of_numpy() -> Build:
    return each(lambda self, shape, dtype=None: np.random.default_rng(self.seed).normal(size=shape).astype(dtype))


@case
def seed_of_jax() -> Build:
    return each(lambda self, shape, dtype=None: jax.random.normal(jax.random.key(self.seed), shape, dtype))


@case
def seed_of_another() -> Build:
    return each(lambda self, shape, dtype=None: KI.HeNormal(seed=self.seed)(shape, dtype) * 0.5)


@case
def seed_of_a_new_generator() -> Build:
    def call(self: Any, shape: Any, dtype: Any = None) -> Any:
        generator = keras.random.SeedGenerator(self.seed)
        generator.next()
        return keras.random.normal(shape, dtype=dtype, seed=generator)

    return each(call)


@case
def unseeded_subclass() -> Build:
    cls = type(
        "Own", (KI.GlorotUniform,), {"__call__": lambda self, *a, **k: 2 * KI.GlorotUniform.__call__(self, *a, **k)}
    )
    return lambda: chain(cls(), cls(), "glorot_uniform", cls())


@case
def unchanged_subclass() -> Build:
    class Own(KI.VarianceScaling):
        def __init__(self) -> None:
            super().__init__(2.0, "fan_out", "uniform")

    return lambda: chain(Own(), "he_normal", Own())


@case
def subclass_with_a_property() -> Build:
    class Own(KI.RandomNormal):
        read = 0

        @property
        def stddev(self) -> float:
            Own.read += 1
            return 0.5 * Own.read

        @stddev.setter
        def stddev(self, value: float) -> None:
            pass

    return lambda: chain(Own(seed=1), Own(seed=1))


@case
def class_attribute() -> Build:
    class Scaled(KI.GlorotUniform):
        K = 1.0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.K * super().__call__(*args, **kwargs)

    def build() -> Any:
        layers = []
        for scale in (1.0, 2.0, 3.0):
            Scaled.K = scale
            layers.append(chain(Scaled(seed=5)))
        return keras.Sequential([keras.Input((8,)), *layers])

    return build


@case
def a_global() -> Build:
    scale = [0.0]

    def own(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.full(shape, scale[0], dtype)

    def build() -> Any:
        models = []
        for value in (1.0, 2.0):
            scale[0] = value
            models.append(chain(own, own))
        scale[0] = 3.0
        return keras.Sequential([keras.Input((8,)), *models])

    return build


@case
def call_counter() -> Build:
    def call(self: Any, shape: Any, dtype: Any = None) -> Any:
        type(self).calls += 1
        return keras.ops.full(shape, type(self).calls, dtype)

    return each(call)


@case
def instance_counter() -> Build:
    class Own(KI.Initializer):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            self.calls += 1
            return keras.ops.full(shape, self.calls, dtype)

    def build() -> Any:
        own = Own()
        return chain(own, "ones", own, own)

    return build


@case
def shared_generator() -> Build:
    def build() -> Any:
        generator = keras.random.SeedGenerator(7)
        return chain(KI.RandomNormal(seed=generator), KI.Orthogonal(seed=generator), KI.HeUniform(seed=generator))

    return build


@case
def generator_of_outside() -> Build:
    generator = keras.random.SeedGenerator(7)
    return lambda: chain(*(KI.RandomNormal(seed=generator) for _ in range(3)))


@case
def drawn_twice() -> Build:
    class Own(KI.RandomNormal):
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return super().__call__(shape, dtype) + super().__call__(shape, dtype)

    def build() -> Any:
        generator = keras.random.SeedGenerator(7)
        return chain(Own(seed=generator), KI.RandomNormal(seed=generator), Own(seed=generator))

    return build


@case
def generator_under_another_name() -> Build:
    class Own(KI.Initializer):
        def __init__(self, generator: Any) -> None:
            self.generator = generator

        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return keras.random.uniform(shape, dtype=dtype, seed=self.generator)

    def build() -> Any:
        own = Own(keras.random.SeedGenerator(7))
        return chain(own, own, KI.RandomNormal(seed=own.generator), own)

    return build


@case
def generator_never_drawn() -> Build:
    class Own(KI.RandomNormal):
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return keras.ops.ones(shape, dtype)

    def build() -> Any:
        generator = keras.random.SeedGenerator(7)
        return chain(Own(seed=generator), KI.RandomNormal(seed=generator))

    return build


@case
def generator_subclass() -> Build:
    class Own(keras.random.SeedGenerator):
        def next(self, ordered: bool = True) -> Any:
            super().next(ordered)
            return super().next(ordered)

    def build() -> Any:
        generator = Own(7)
        return chain(*(KI.RandomNormal(seed=generator) for _ in range(3)))

    return build


@case
def unseeded_draws() -> Build:
    return lambda: chain(
        lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype),
        "random_normal",
        lambda shape, dtype=None: keras.random.uniform(shape, dtype=dtype) + keras.random.normal(shape, dtype=dtype),
    )


@case
def numpys_generator() -> Build:
    def own(shape: Any, dtype: Any = None) -> Any:
        return np.random.normal(size=shape).astype(dtype)

    class Reversed(keras.layers.Layer):
        """Its trainable weight, which is the first of its variables, is made last."""

        def build(self, _: Any) -> None:
            self.last = self.add_weight(shape=(8, 16), initializer=own, trainable=False, name="last")
            self.kernel = self.add_weight(shape=(8, 16), initializer=own, name="kernel")

        def call(self, x: Any) -> Any:
            return x

    return lambda: keras.Sequential([keras.Input((8,)), Reversed(), Reversed()])


@case
def pythons_generator() -> Build:
    def own(shape: Any, dtype: Any = None) -> Any:
        return np.full(shape, random.random(), dtype)

    return lambda: chain(own, "glorot_uniform", own)


@case
def value_of_an_array() -> Build:
    def own(shape: Any, dtype: Any = None) -> Any:
        values = np.asarray(keras.random.normal(shape, dtype=dtype))
        return values / float(np.linalg.norm(values))

    return lambda: chain(own, own)


@case
def cached_array() -> Build:
    cache: list[Any] = []

    def own(shape: Any, dtype: Any = None) -> Any:
        if not cache:
            cache.append(keras.random.normal((3, *shape), dtype=dtype))
        return cache[0][len(cache) - 1]

    return lambda: chain(own, own)


@case
def partial_function() -> Build:
    def own(scale: float, shape: Any, dtype: Any = None) -> Any:
        return keras.ops.full(shape, scale, dtype)

    return lambda: chain(*(functools.partial(own, scale) for scale in (0.5, 0.25)))


@case
def bound_method() -> Build:
    class Drawer:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(3)

        def draw(self, shape: Any, dtype: Any = None) -> Any:
            return self.rng.standard_normal(shape, dtype)

    def build() -> Any:
        drawer = Drawer()
        return chain(drawer.draw, drawer.draw, drawer.draw)

    return build


@case
def lambdas_over_jax() -> Build:
    return lambda: chain(
        *(lambda s, dtype=None, k=k: jax.random.normal(jax.random.key(k), s, dtype) * k for k in (1, 2))
    )


@case
def strings_and_configs() -> Build:
    config = {"class_name": "RandomNormal", "config": {"stddev": 0.3, "seed": 11}}
    nested = KI.serialize(KI.TruncatedNormal(seed=3))
    return lambda: chain("orthogonal", config, nested, KI.LecunUniform, "zeros", KI.Constant(2.5))


@case
def registered_class() -> Build:
    class Own(KI.RandomNormal):
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return super().__call__(shape, dtype) * self.seed

    config = {"class_name": "Own", "config": {"seed": 4}}

    def build() -> Any:
        with keras.saving.custom_object_scope({"Own": Own}):
            return chain(config, Own(seed=4).clone(), KI.get(config))

    return build


@case
def arrays() -> Build:
    values = np.random.default_rng(0).normal(size=(8, 16))
    array = jnp.asarray(values[::-1])
    return lambda: chain(values, array, KI.Constant(values), KI.Constant(array))


@case
def array_that_changes() -> Build:
    def build() -> Any:
        values = np.ones((8, 16), np.float32)
        constant = KI.Constant(values)
        first = chain(constant, lambda shape, dtype=None: values)
        values[:] = 2
        return keras.Sequential([keras.Input((8,)), first, chain(constant)])

    return build


@case
def initializer_that_changes() -> Build:
    def build() -> Any:
        own = KI.RandomNormal(seed=1)
        first = chain(own)
        own.stddev, own.seed = 3.0, 9
        return keras.Sequential([keras.Input((8,)), first, chain(own)])

    return build


@case
def numbers_of_numpy() -> Build:
    return lambda: chain(
        KI.Constant(-0.0),
        KI.Constant(0.0),
        KI.Constant(np.float32(0.1)),
        KI.RandomNormal(stddev=np.float64(0.3), seed=1),
    )


@case
def numbers_of_numpy_in_half_precision() -> Build:
    return lambda: chain(KI.RandomNormal(stddev=np.float32(0.3), seed=1), KI.Constant(True), dtype="bfloat16")


@case
def another_dtype() -> Build:
    return lambda: chain(
        lambda shape, dtype=None: np.arange(128).reshape(shape),
        lambda shape, dtype=None: keras.ops.ones(shape, "float16"),
        lambda shape, dtype=None: np.random.default_rng(0).normal(size=shape),
        lambda shape, dtype=None: [[0.5] * shape[1]] * shape[0],
    )


@case
def another_shape() -> Build:
    return lambda: chain(lambda shape, dtype=None: 0.25, lambda shape, dtype=None: np.ones(3, dtype), "ones")


@case
def integers() -> Build:
    return lambda: chain(lambda shape, dtype=None: np.random.randint(0, 9, shape), "ones", dtype="int32")


@case
def another_variable() -> Build:
    def build() -> Any:
        first = chain("random_normal")
        own = first.layers[0].kernel
        return keras.Sequential([keras.Input((8,)), first, chain(lambda shape, dtype=None: own * 2)])

    return build


@case
def optional_layout() -> Build:
    def own(shape: Any, dtype: Any = None, layout: Any = None) -> Any:
        return keras.ops.full(shape, 2.0 if layout is None else 3.0, dtype)

    return lambda: chain(own, own)


@case
def layers_without_build() -> Build:
    """Keras finds its layers while it traces it, and initializes their weights once that is over."""
    calls = [0]

    def own(shape: Any, dtype: Any = None) -> Any:
        calls[0] += 1
        return np.random.normal(size=shape) + calls[0]

    class Outer(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            generator = keras.random.SeedGenerator(3)
            self.inner = [
                keras.layers.Dense(8, kernel_initializer=initializer, use_bias=False)
                for initializer in (own, KI.RandomNormal(seed=generator), own, KI.HeNormal(seed=generator))
            ]

        def call(self, x: Any) -> Any:
            for layer in self.inner:
                x = layer(x)
            return x

    return lambda: keras.Sequential([keras.Input((8,)), Outer(), Outer()])


@case
def layers_of_keras() -> Build:
    def own(shape: Any, dtype: Any = None) -> Any:
        return np.random.normal(size=shape).astype(dtype)

    return lambda: keras.Sequential(
        [
            keras.Input((5, 8)),
            keras.layers.LSTM(4, kernel_initializer=own, recurrent_initializer="orthogonal", return_sequences=True),
            keras.layers.Dropout(0.5),
            keras.layers.Conv1D(8, 3, kernel_initializer=own, bias_initializer=own),
            keras.layers.BatchNormalization(gamma_initializer=own),
            keras.layers.Dense(8, kernel_initializer=own, bias_initializer="random_normal"),
        ]
    )


def run(make: Callable[[], Build], way: Callable[[Build], Any]) -> list[np.ndarray]:
    """The values of all variables of what a way makes of a fresh build function."""
    keras.utils.set_random_seed(7)
    model = way(make())
    after = random.random(), np.random.random(), bits(keras.Variable(lambda s, dtype: keras.random.normal(s), (2,)))
    for variable in model.variables:
        assert variable.shape == variable.value.shape
    return [*map(bits, model.variables), *map(np.asarray, after)]


def same(expected: list[np.ndarray], found: list[np.ndarray], what: str) -> None:
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (what, number)
        np.testing.assert_array_equal(a, b, err_msg=f"{what} {number}")


def rules(variable: Any) -> P:
    return P("model") if variable.shape and variable.shape[0] % 8 == 0 else P()


def materialized(build: Build) -> Any:
    return lm.build_abstract(build).materialize()


def materialized_twice(build: Build) -> Any:
    """The second model of the same abstract one."""
    abstract = lm.build_abstract(build)
    abstract.materialize()
    return abstract.materialize()


def in_deferred(build: Build, **options: Any) -> Any:
    with lk.deferred(**options):
        return build()


def loaded_in_part(build: Build, file: Path) -> Any:
    """A model whose first layer's weights are loaded, and its other variables initialized."""
    model = build()
    model.load_weights(file, objects_to_skip=model.layers[1:])
    return model


@pytest.mark.parametrize("name", CASES)
def test_as_in_keras_where_weights_are_missing(name: str, tmp_path: Path) -> None:
    built = CASES[name]()()
    source = keras.Sequential([keras.Input(built.input_shape[1:]), built.layers[0]])
    for variable in source.variables:
        variable.assign(np.zeros(variable.shape))
    source.save_weights(file := tmp_path / "zeros.weights.h5")
    load = functools.partial(loaded_in_part, file=file)
    expected = run(CASES[name], load)
    assert not np.any(expected[0])
    same(expected, run(CASES[name], lambda build: lm.build_abstract(lambda: load(build)).materialize()), "abstract")
    same(expected, run(CASES[name], lambda build: in_deferred(lambda: load(build))), "deferred")


@pytest.mark.parametrize("name", CASES)
def test_as_in_keras(name: str, mesh8: Mesh) -> None:
    expected = run(CASES[name], lambda build: build())
    ways: dict[str, Callable[[Build], Any]] = {
        "materialized": materialized,
        "materialized twice": materialized_twice,
        "deferred": in_deferred,
        "on a mesh": lambda build: lm.build_abstract(build).shard(mesh8, rules).materialize(),
        "deferred on a mesh": functools.partial(in_deferred, mesh=mesh8, rules=rules),
    }
    for what, way in ways.items():
        same(expected, run(CASES[name], way), what)


def distribution() -> Any:
    devices = keras.distribution.DeviceMesh((1, 8), ["batch", "model"], keras.distribution.list_devices()[:8])
    layouts = keras.distribution.LayoutMap(devices)
    layouts[".*kernel"] = keras.distribution.TensorLayout(("model", None), devices)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


# The layout that this test's distribution has for kernels does not fit these.
OTHER_SHAPES = ("another_shape", "layers_of_keras")


@pytest.mark.parametrize("name", sorted({*CASES} - {*OTHER_SHAPES}))
def test_as_in_keras_under_a_distribution(name: str, mesh8: Mesh) -> None:
    with distribution().scope():
        expected = run(CASES[name], lambda build: build())
        for what, way in {"materialized": materialized, "deferred": in_deferred}.items():
            same(expected, run(CASES[name], way), what)


@needs_keras("3.14", "layouts for initializers")
@pytest.mark.parametrize("rows", [8, 2112])
def test_initializers_that_take_a_layout(rows: int, mesh8: Mesh) -> None:
    seen: list[Any] = []

    class Own(KI.RandomNormal):
        def __call__(self, shape: Any, dtype: Any = None, *, layout: Any) -> Any:
            seen.append(layout.spec)
            return jax.random.normal(jax.random.key(self.seed), shape, dtype, out_sharding=layout)

    def build() -> Any:
        return chain(Own(seed=1), "ones", Own(seed=2), shape=(rows, 128))

    with distribution().scope():
        expected = build()
        for way in (materialized, in_deferred):
            found = way(build)
            for a, b in zip(expected.weights, found.weights, strict=True):
                np.testing.assert_array_equal(a.value, b.value)
                assert b.value.sharding.is_equivalent_to(a.value.sharding, 2)
                assert len(b.value.sharding.device_set) == 8
    assert seen == [P("model", None)] * 6
    with pytest.raises(TypeError, match="layout"):  # as in Keras, which has none to give
        lm.build_abstract(build)


LARGE = (264, 1024)


def test_large_ones_are_computed_by_their_devices(mesh8: Mesh) -> None:
    """They are called once while the model is built, and nothing of them is there before it is materialized."""
    calls: list[tuple[int, ...]] = []
    generator = keras.random.SeedGenerator(5)

    class Own(KI.HeNormal):
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            calls.append(shape)
            first = super().__call__(shape, dtype) * self.factor + keras.random.normal(shape, dtype=dtype)
            return first + keras.random.uniform(shape, dtype=dtype, seed=keras.random.SeedGenerator(len(calls)))

    def build() -> Any:
        initializers = [Own(seed=generator), Own(seed=3), KI.HeNormal(seed=generator), Own(seed=generator)]
        for factor, initializer in enumerate(initializers):
            initializer.factor = factor + 0.5
        return chain(*initializers, shape=LARGE, name="net")

    def fresh() -> Build:
        keras.backend.clear_session(free_memory=False)
        calls.clear()
        generator.state.assign([5, 0])
        return build

    expected = run(fresh, lambda build: build())
    for what, way in {
        "one device": materialized_twice,
        "a mesh": lambda build: lm.build_abstract(build).shard(mesh8, rules).materialize(),
        "deferred": functools.partial(in_deferred, mesh=mesh8, rules=rules),
    }.items():
        same(expected, run(fresh, way), what)
        assert calls == [LARGE] * 3
    fresh()
    abstract = lm.build_abstract(build)
    assert not any(path.endswith("kernel") for path in abstract.sources)
    assert abstract["net/weight/kernel"].origin == "Own"
    assert max(value.nbytes for recipe in abstract.recipes for value in recipe.inputs) < 100


def test_large_ones_that_only_the_host_can_compute_are_named(mesh8: Mesh) -> None:
    generator = keras.random.SeedGenerator(5)

    def numpys(shape: Any, dtype: Any = None) -> Any:
        return np.random.normal(size=shape).astype(dtype)

    def mixed(shape: Any, dtype: Any = None) -> Any:
        return keras.random.normal(shape, dtype=dtype, seed=generator) * numpys(shape, dtype)

    def of_values(shape: Any, dtype: Any = None) -> Any:
        values = np.asarray(keras.random.normal(shape, dtype=dtype, seed=generator)) * mixed(shape, dtype)
        return values / np.abs(values).max() + keras.random.normal(shape, dtype=dtype)

    def build() -> Any:
        return chain(numpys, mixed, of_values, mixed, shape=LARGE, name="net")

    def fresh() -> Build:
        keras.backend.clear_session(free_memory=False)
        generator.state.assign([5, 0])
        return build

    expected = run(fresh, lambda build: build())
    named = r"^4 variables .* 1.00 MiB .*: net/weight_2/kernel\.$"
    for way in (
        materialized_twice,
        lambda build: lm.build_abstract(build).shard(mesh8, rules).materialize(),
        functools.partial(in_deferred, mesh=mesh8, rules=rules),
    ):
        with pytest.warns(lm.LazyModelWarning) as caught:
            same(expected, run(fresh, way), "host")
        (warning,) = caught
        assert re.search(named, str(warning.message)), str(warning.message)
        assert warning.filename == __file__


def test_mup_does_not_take_drawn_values_for_a_table() -> None:
    """Of values that an initializer has computed nobody knows what they were drawn from."""

    class Own(KI.HeNormal):
        pass

    def net(width: int) -> Any:
        layers = [
            keras.layers.Dense(n, kernel_initializer=Own(seed=1), name=k) for k, n in (("up", width), ("down", 4))
        ]
        return lm.build_abstract(lambda: keras.Sequential([keras.Input((8,)), *layers], name="net"))

    with pytest.raises(lm.LazyModelError, match=r"net/\w+/kernel.*\(Own\).*normal or uniform"):
        lm.mup(net(16), net(64))


@pytest.mark.filterwarnings("ignore:.* left a traced")
def test_a_large_one_that_keeps_an_array_is_refused() -> None:
    keras.backend.clear_session(free_memory=False)
    kept: list[Any] = []

    def own(shape: Any, dtype: Any = None) -> Any:
        kept.append(keras.random.normal(shape, dtype=dtype))
        return kept[0]

    with pytest.raises(lm.LazyModelError, match=r"weight_1/kernel \(264, 1024\): its initializer own keeps"):
        in_deferred(lambda: chain(own, own, shape=LARGE, name="net"))


def test_what_a_checkpoint_holds_is_not_initialized() -> None:
    """What it lacks has the value that it would have in Keras, and is named as lacking."""
    keras.backend.clear_session(free_memory=False)
    abstract = lm.build_abstract(CASES["call_counter"]())
    given = {path: np.zeros((8, 16), np.float32) for path in abstract if "weight_1" in path}
    with pytest.raises(lm.CheckpointError, match="2 .*weight/kernel"):
        abstract.materialize(given, initialize="nothing")
    model = abstract.materialize(given, initialize="missing")
    assert [float(np.max(v.value)) for v in model.weights] == [1, 0, 3]
    with pytest.warns(lm.LazyModelWarning, match=r"weight/kernel.*weight_2/kernel"):
        abstract.materialize(given)

"""Initializers that are not just a distribution: each is run as stock Keras runs it, once and at its turn."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
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
from tests.keras.models import bits, device_mesh, distribution, in_block, layouts
from tests.keras.versions import needs_keras
from tests.large import mostly_large

KI = keras.initializers
Build = Callable[[], Any]


class Weight(keras.layers.Layer):
    """One weight, which is there when the layer is."""

    def __init__(self, initializer: Any, shape: tuple[int, ...] = (8, 16), dtype: str = "float32") -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=shape, initializer=initializer, dtype=dtype, name="kernel")

    def call(self, x: Any) -> Any:
        return x


def net(*parts: Any, inputs: tuple[int, ...] = (8,), **options: Any) -> keras.Model:
    """A model of layers, and of layers that have one weight each of an initializer, in order of creation."""
    layers = [part if isinstance(part, keras.layers.Layer) else Weight(part, **options) for part in parts]
    return keras.Sequential([keras.Input(inputs), *layers], name="net")


def own(call: Callable[..., Any], base: type = KI.RandomNormal) -> Any:
    """A subclass with a `__call__` of its own, and a count of calls for it."""
    return type("Own", (base,), {"__call__": call, "calls": 0})


def drawn(generator: Any) -> Any:
    generator.next()
    return generator


def normalized(values: np.ndarray) -> np.ndarray:
    return values / float(np.linalg.norm(values))


def normals(shape: Any, dtype: Any = None) -> Any:
    return np.random.normal(size=shape).astype(dtype)


# Initializers of a class with a `__call__` of its own that have a seed.
CALLS: tuple[Callable[..., Any], ...] = (
    lambda self, shape, dtype=None: keras.random.normal(shape, dtype=dtype, seed=self.seed + 1),
    lambda self, shape, dtype=None: (
        keras.random.normal(shape, dtype=dtype, seed=self.seed) if self.seed > 2 else keras.ops.ones(shape)
    ),
    lambda self, shape, dtype=None: np.random.default_rng(self.seed).normal(size=shape).astype(dtype),
    lambda self, shape, dtype=None: jax.random.normal(jax.random.key(self.seed), shape, dtype),
    lambda self, shape, dtype=None: KI.HeNormal(seed=self.seed)(shape, dtype) * 0.5,
    lambda self, shape, dtype=None: keras.random.normal(
        shape, dtype=dtype, seed=drawn(keras.random.SeedGenerator(self.seed))
    ),
)


def functions() -> Any:
    """Without state of their own."""
    unseeded = lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype)  # noqa: E731
    return net(
        *(unseeded, "random_normal"),
        lambda shape, dtype=None: keras.random.uniform(shape, dtype=dtype) + keras.random.normal(shape, dtype=dtype),
        *[lambda shape, dtype=None: np.full(shape, random.random(), dtype), "glorot_uniform"] * 2,
        *[lambda shape, dtype=None: normalized(np.asarray(keras.random.normal(shape, dtype=dtype)))] * 2,
        *(functools.partial(lambda k, shape, dtype=None: keras.ops.full(shape, k, dtype), k) for k in (0.5, 0.25)),
        *(lambda s, dtype=None, k=k: jax.random.normal(jax.random.key(k), s, dtype) * k for k in (1, 2)),
        *[lambda shape, dtype=None, layout=None: keras.ops.full(shape, 2.0 if layout is None else 3.0, dtype)] * 2,
    )


def values_of_other_dtypes() -> Any:
    return net(
        lambda shape, dtype=None: np.arange(128).reshape(shape),
        lambda shape, dtype=None: keras.ops.ones(shape, "float16"),
        lambda shape, dtype=None: np.random.default_rng(0).normal(size=shape),
        lambda shape, dtype=None: [[0.5] * shape[1]] * shape[0],
        *(KI.Constant(-0.0), KI.Constant(0.0), KI.Constant(np.float32(0.1))),
        KI.RandomNormal(stddev=np.float64(0.3), seed=1),
        Weight(KI.RandomNormal(stddev=np.float32(0.3), seed=1), dtype="bfloat16"),
        Weight(KI.Constant(True), dtype="bfloat16"),
        Weight(lambda shape, dtype=None: np.random.randint(0, 9, shape), dtype="int32"),
        Weight("ones", dtype="int32"),
    )


def strings_configs_and_arrays() -> Any:
    values = np.random.default_rng(0).normal(size=(8, 16))
    array = jnp.asarray(values[::-1])
    scaled = own(lambda self, *args, **kwargs: KI.RandomNormal.__call__(self, *args, **kwargs) * self.seed)
    config = {"class_name": "Own", "config": {"seed": 4}}
    with keras.saving.custom_object_scope({"Own": scaled}):
        return net(
            *("orthogonal", {"class_name": "RandomNormal", "config": {"stddev": 0.3, "seed": 11}}),
            *(KI.serialize(KI.TruncatedNormal(seed=3)), KI.LecunUniform, "zeros", KI.Constant(2.5)),
            *(values, array, KI.Constant(values), KI.Constant(array)),
            *(config, scaled(seed=4).clone(), KI.get(config)),
        )


def classes() -> Any:
    class Unchanged(KI.VarianceScaling):
        def __init__(self) -> None:
            super().__init__(2.0, "fan_out", "uniform")

    class Property(KI.RandomNormal):
        read = 0

        @property
        def stddev(self) -> float:
            Property.read += 1
            return 0.5 * Property.read

        @stddev.setter
        def stddev(self, value: float) -> None:
            pass

    doubled = own(lambda self, *a, **k: 2 * KI.GlorotUniform.__call__(self, *a, **k), KI.GlorotUniform)
    return net(
        *(own(call)(seed=seed) for call in CALLS for seed in (2, 3)),
        *(doubled(), doubled(), "glorot_uniform", doubled()),
        *(Unchanged(), "he_normal", Unchanged()),
        *(Property(seed=1), Property(seed=1)),
    )


def generators(outside: Any) -> Any:
    class Twice(keras.random.SeedGenerator):
        def next(self, ordered: bool = True) -> Any:
            super().next(ordered)
            return super().next(ordered)

    class OtherName(KI.Initializer):
        def __init__(self, generator: Any) -> None:
            self.generator = generator

        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return keras.random.uniform(shape, dtype=dtype, seed=self.generator)

    normal = KI.RandomNormal.__call__
    drawn_twice = own(lambda self, *args, **kwargs: normal(self, *args, **kwargs) + normal(self, *args, **kwargs))
    never_drawn = own(lambda self, shape, dtype=None: keras.ops.ones(shape, dtype))
    shared, twice = keras.random.SeedGenerator(7), Twice(7)
    other = OtherName(keras.random.SeedGenerator(7))
    return net(
        *(KI.RandomNormal(seed=shared), KI.Orthogonal(seed=shared), KI.HeUniform(seed=shared)),
        *(drawn_twice(seed=shared), KI.RandomNormal(seed=shared), drawn_twice(seed=shared)),
        *(never_drawn(seed=shared), KI.RandomNormal(seed=shared)),
        *(KI.RandomNormal(seed=outside) for _ in range(3)),
        *(KI.RandomNormal(seed=twice) for _ in range(2)),
        *(other, other, KI.RandomNormal(seed=other.generator), other),
    )


def what_changes_meanwhile() -> Build:
    """Counters, a class attribute, a global, arrays, an initializer and a variable that the next ones depend on."""
    cache: list[Any] = []

    def cached(shape: Any, dtype: Any = None) -> Any:
        if not cache:
            cache.append(keras.random.normal((3, *shape), dtype=dtype))
        return cache[0][len(cache) - 1]

    def count_calls(self: Any, shape: Any, dtype: Any = None) -> Any:
        type(self).calls += 1
        return keras.ops.full(shape, type(self).calls, dtype)

    def count_own_calls(self: Any, shape: Any, dtype: Any = None) -> Any:
        self.calls += 1
        return keras.ops.full(shape, self.calls, dtype)

    counting, scale = own(count_calls), [0.0]
    scaled = own(lambda self, *a, **k: self.calls * KI.GlorotUniform.__call__(self, *a, **k), KI.GlorotUniform)

    def of_a_global(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.full(shape, scale[0], dtype)

    def build() -> Any:
        one, rng, layers = own(count_own_calls, KI.Initializer)(), np.random.default_rng(3), list[Any]()
        drawer = own(lambda self, shape, dtype=None: rng.standard_normal(shape, dtype), object)()
        layers += map(Weight, (*(counting(seed=seed) for seed in (1, 2, 3)), one, "ones", one, cached, cached))
        layers += map(Weight, [drawer.__call__] * 3)
        for scaled.calls in (1.0, 2.0, 3.0):
            scale[0] = scaled.calls
            layers += [Weight(scaled(seed=5)), Weight(of_a_global)]
        scale[0] = 4.0
        values = np.ones(8 * 16 + 1, np.float32)[1:].reshape(8, 16)  # JAX shares the memory of aligned arrays
        constant, normal = KI.Constant(values), KI.RandomNormal(seed=1)
        layers += map(Weight, (constant, lambda shape, dtype=None: values, normal))
        values[:] = 2
        normal.stddev, normal.seed = 3.0, 9
        layers += map(Weight, (constant, normal))
        kernel = layers[-1].kernel
        return net(*layers, lambda shape, dtype=None: kernel * 2)

    return build


def order_of_layers() -> Build:
    """Keras finds layers of a layer without `build` while it traces it, and initializes their weights after that."""
    calls = [0]

    def counting(shape: Any, dtype: Any = None) -> Any:
        calls[0] += 1
        return np.random.normal(size=shape) + calls[0]

    class Outer(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            generator = keras.random.SeedGenerator(3)
            self.inner = [
                keras.layers.Dense(8, kernel_initializer=initializer, use_bias=False)
                for initializer in (counting, KI.RandomNormal(seed=generator), counting, KI.HeNormal(seed=generator))
            ]

        def call(self, x: Any) -> Any:
            for layer in self.inner:
                x = layer(x)
            return x

    class Reversed(keras.layers.Layer):
        """Its trainable weight, which is the first of its variables, is made last."""

        def build(self, _: Any) -> None:
            self.last = self.add_weight(shape=(8, 16), initializer=normals, trainable=False, name="last")
            self.kernel = self.add_weight(shape=(8, 16), initializer=normals, name="kernel")

        def call(self, x: Any) -> Any:
            return x

    return lambda: net(Reversed(), Outer(), Reversed(), Outer())


def layers_of_keras_and_values_of_other_shapes() -> Any:
    return net(
        keras.layers.LSTM(4, kernel_initializer=normals, recurrent_initializer="orthogonal", return_sequences=True),
        keras.layers.Dropout(0.5),
        keras.layers.Conv1D(8, 3, kernel_initializer=normals, bias_initializer=normals),
        keras.layers.BatchNormalization(gamma_initializer=normals),
        keras.layers.Dense(8, kernel_initializer=normals, bias_initializer="random_normal"),
        *(lambda shape, dtype=None: 0.25, lambda shape, dtype=None: np.ones(3, dtype), "ones"),
        inputs=(5, 8),
    )


# Functions that make a build function with state of its own.
CASES: dict[str, Callable[[], Build]] = {
    "functions": lambda: functions,
    "dtypes": lambda: values_of_other_dtypes,
    "configs": lambda: strings_configs_and_arrays,
    "classes": lambda: classes,
    "generators": lambda: functools.partial(generators, keras.random.SeedGenerator(7)),
    "changes": what_changes_meanwhile,
    "order": order_of_layers,
    "layers": lambda: layers_of_keras_and_values_of_other_shapes,
}


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
    """The second model of the same abstract one, which is as the first."""
    abstract = lm.build_abstract(build)
    first, second = abstract.materialize(), abstract.materialize()
    same([*map(bits, first.variables)], [*map(bits, second.variables)], "the second")
    return second


def of_a_distribution() -> Any:
    mesh = device_mesh(1, 8)
    return distribution(layouts(mesh, **{".*kernel": keras.distribution.TensorLayout(("model", None), mesh)}))


WAYS: dict[str, Callable[[Build, Mesh], Any]] = {
    "materialized": lambda build, mesh: materialized_twice(build),
    "deferred": lambda build, mesh: in_block(build),
    "on a mesh": lambda build, mesh: lm.build_abstract(build).shard(mesh, rules).materialize(),
    "under a distribution": lambda build, mesh: materialized(build),
    "deferred under a distribution": lambda build, mesh: in_block(build),
}
# One way for each case and a case for each way; all cases are materialized and deferred once more below.
FEW = [
    *[("generators", "materialized"), ("classes", "deferred"), ("changes", "on a mesh"), ("layers", "on a mesh")],
    *[("configs", "under a distribution"), ("order", "deferred under a distribution")],
]


@pytest.mark.parametrize(
    ("name", "way"),
    # The layout that the distribution has for kernels does not fit "layers".
    mostly_large(
        [case for case in itertools.product(CASES, WAYS) if not (case[0] == "layers" and "under" in case[1])], FEW
    ),
)
def test_as_in_keras(name: str, way: str, mesh8: Mesh) -> None:
    with of_a_distribution() if "under" in way else contextlib.nullcontext():
        expected = run(CASES[name], lambda build: build())
        same(expected, run(CASES[name], lambda build: WAYS[way](build, mesh8)), way)


def test_whenever_garbage_is_collected() -> None:
    """Keras drops copies of generators within cycles; their states are in no model, collected already or not."""
    before = gc.get_threshold()
    try:
        for young in (50, 200, 350):
            gc.set_threshold(young, 3, 3)
            run(CASES["generators"], materialized_twice)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("name", CASES)
def test_as_in_keras_where_the_first_half_is_loaded(name: str, tmp_path: Path) -> None:
    """Initializers of what is loaded run at their turn nevertheless, for the sake of the others."""
    built = CASES[name]()()
    half = len(built.layers) // 2
    source = keras.Sequential([keras.Input(built.input_shape[1:]), *built.layers[:half]])
    for variable in source.variables:
        variable.assign(np.zeros(variable.shape))
    source.save_weights(file := tmp_path / "zeros.weights.h5")

    def load(build: Build) -> Any:
        model = build()
        model.load_weights(file, objects_to_skip=model.layers[half:])
        return model

    expected = run(CASES[name], load)
    assert not np.any(expected[0]) and any(map(np.any, expected[1:-3]))
    same(expected, run(CASES[name], lambda build: materialized(lambda: load(build))), "abstract")
    same(expected, run(CASES[name], lambda build: in_block(lambda: load(build))), "deferred")


@needs_keras("3.14", "layouts for initializers")
def test_initializers_that_take_a_layout() -> None:
    seen: list[Any] = []

    class Own(KI.RandomNormal):
        def __call__(self, shape: Any, dtype: Any = None, *, layout: Any) -> Any:
            seen.append(layout.spec)
            return jax.random.normal(jax.random.key(self.seed), shape, dtype, out_sharding=layout)

    def build() -> Any:
        return net(Own(seed=1), "ones", Own(seed=2), shape=(2112, 128))

    with of_a_distribution():
        expected = build()
        for way in (materialized, in_block):
            for a, b in zip(expected.weights, way(build).weights, strict=True):
                np.testing.assert_array_equal(a.value, b.value)
                assert b.value.sharding.is_equivalent_to(a.value.sharding, 2)
                assert len(b.value.sharding.device_set) == 8
    assert seen == [P("model", None)] * 6
    with pytest.raises(TypeError, match="layout"):  # as in Keras, which has none to give
        lm.build_abstract(build)


@needs_keras("3.14", "layouts for initializers")
@pytest.mark.parametrize(
    ("where", "given"),
    [
        pytest.param(contextlib.nullcontext, True, marks=pytest.mark.large),
        pytest.param(lambda: keras.distribution.DataParallel().scope(), False, marks=pytest.mark.large),
        pytest.param(of_a_distribution, False, marks=pytest.mark.large),
        (of_a_distribution, True),
    ],
)
def test_initializers_get_the_layout_that_keras_passes(where: Any, given: bool) -> None:
    """Built-in ones and others, under a distribution or none, of variables with a layout of their own or none."""
    seen: list[str] = []

    class Own(KI.RandomNormal):
        def __call__(self, shape: Any, dtype: Any = None, layout: Any = None) -> Any:
            seen.append(f"{layout}")
            return jax.random.normal(jax.random.key(self.seed), shape, dtype, out_sharding=layout) * self.stddev

    own = keras.distribution.TensorLayout((None, "model"), device_mesh(1, 8)) if given else None

    class Placed(Weight):
        def __init__(self, *arguments: Any) -> None:
            keras.layers.Layer.__init__(self)
            self.kernel = keras.Variable(*arguments, name="kernel", layout=own)

    def build() -> Any:
        small = [Placed(init, (8, 16)) for init in (Own(seed=1), KI.Orthogonal(seed=2), KI.Ones())]
        return net(*small, *[Placed(init, (264, 1024), "bfloat16") for init in (Own(seed=3), KI.GlorotUniform(seed=4))])

    with where():
        expected, seen_by_keras = build(), list(seen)
        for way in (materialized, in_block):
            seen.clear()
            for a, b in zip(expected.weights, way(build).weights, strict=True):
                np.testing.assert_array_equal(bits(a), bits(b))
                assert b.dtype == a.dtype and b.value.sharding.is_equivalent_to(a.value.sharding, 2)
            assert seen == seen_by_keras


# Large ones, which their devices compute ------------------------------------------------------------------------------

LARGE = (264, 1024)
LARGE_WAYS: dict[str, Callable[[Build, Mesh], Any]] = {
    "one device": lambda build, mesh: materialized_twice(build),
    "a mesh": lambda build, mesh: lm.build_abstract(build).shard(mesh, rules).materialize(),
    "deferred": lambda build, mesh: in_block(build, mesh=mesh, rules=rules),
}


GENERATOR = keras.random.SeedGenerator(5)


def afresh(build: Build) -> Callable[[], Build]:
    def fresh() -> Build:
        keras.backend.clear_session(free_memory=False)
        GENERATOR.state.assign([5, 0])
        return build

    return fresh


@pytest.mark.parametrize("way", mostly_large(LARGE_WAYS, ["a mesh"]))
def test_large_ones_are_computed_by_their_devices(way: str, mesh8: Mesh) -> None:
    """They are called once while the model is built, and nothing of them is there before it is materialized."""
    calls: list[tuple[int, ...]] = []

    class Own(KI.HeNormal):
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            calls.append(shape)
            first = super().__call__(shape, dtype) * self.factor + keras.random.normal(shape, dtype=dtype)
            return first + keras.random.uniform(shape, dtype=dtype, seed=keras.random.SeedGenerator(len(calls)))

    def build() -> Any:
        initializers = [Own(seed=GENERATOR), Own(seed=3), KI.HeNormal(seed=GENERATOR), Own(seed=GENERATOR)]
        for factor, initializer in enumerate(initializers):
            initializer.factor = factor + 0.5
        return net(*initializers, shape=LARGE)

    fresh = afresh(build)
    expected = run(fresh, lambda build: build())
    calls.clear()
    same(expected, run(fresh, lambda build: LARGE_WAYS[way](build, mesh8)), way)
    assert calls == [LARGE] * 3
    abstract = lm.build_abstract(fresh())
    assert not any(path.endswith("kernel") for path in abstract.sources)
    assert abstract["weight/kernel"].origin == "Own"
    assert max(value.nbytes for recipe in abstract.recipes for value in recipe.inputs) < 100


@pytest.mark.parametrize("way", mostly_large(LARGE_WAYS, ["deferred"]))
def test_large_ones_that_only_the_host_can_compute_are_named(way: str, mesh8: Mesh) -> None:
    def mixed(shape: Any, dtype: Any = None) -> Any:
        return keras.random.normal(shape, dtype=dtype, seed=GENERATOR) * normals(shape, dtype)

    def of_values(shape: Any, dtype: Any = None) -> Any:
        drawn = keras.random.normal(shape, dtype=dtype) + mixed(shape, dtype)  # for nothing, where it is traced
        values = np.asarray(drawn) * mixed(shape, dtype)
        return values / np.abs(values).max() + keras.random.normal(shape, dtype=dtype)

    fresh = afresh(lambda: net(normals, mixed, of_values, mixed, shape=LARGE))
    expected = run(fresh, lambda build: build())
    with pytest.warns(lm.LazyModelWarning) as caught:
        same(expected, run(fresh, lambda build: LARGE_WAYS[way](build, mesh8)), way)
    (warning,) = caught
    assert re.search(r"4 variables .* 1.00 MiB .*weight_2/kernel", str(warning.message))
    assert warning.filename in (__file__, in_block.__code__.co_filename)  # who calls the library


@pytest.mark.filterwarnings("ignore:.* left a traced")
def test_a_large_one_that_keeps_an_array_is_refused() -> None:
    keras.backend.clear_session(free_memory=False)
    kept: list[Any] = []

    def own(shape: Any, dtype: Any = None) -> Any:
        kept.append(keras.random.normal(shape, dtype=dtype))
        return kept[0]

    with pytest.raises(lm.LazyModelError, match=r"weight_1/kernel \(264, 1024\): its initializer own keeps"):
        in_block(lambda: net(own, own, shape=LARGE))


# What else depends on initial values ----------------------------------------------------------------------------------


def test_mup_does_not_take_drawn_values_for_a_table() -> None:
    """Of values that an initializer has computed nobody knows what they were drawn from."""

    class Own(KI.HeNormal):
        pass

    def wide(width: int) -> Any:
        return lm.build_abstract(
            lambda: net(*(keras.layers.Dense(units, kernel_initializer=Own(seed=1)) for units in (width, 4)))
        )

    with pytest.raises(lm.LazyModelError, match=r"net/\w+/kernel.*\(Own\).*normal or uniform"):
        lm.mup(wide(16), wide(64))


def test_what_a_checkpoint_holds_is_not_initialized() -> None:
    """What is missing has the value that it would have in Keras, and is named as missing."""
    keras.backend.clear_session(free_memory=False)
    calls = itertools.count(1)
    counting = own(lambda self, shape, dtype=None: keras.ops.full(shape, next(calls), dtype))
    abstract = lm.build_abstract(lambda: net(*(counting(seed=seed) for seed in (1, 2, 3))))
    given = {path: np.zeros((8, 16), np.float32) for path in abstract if "weight_1" in path}
    with pytest.raises(lm.CheckpointError, match="2 .*weight/kernel"):
        abstract.materialize(given, initialize="nothing")
    model = abstract.materialize(given, initialize="missing")
    assert [float(np.max(v.value)) for v in model.weights] == [1, 0, 3]
    with pytest.warns(lm.LazyModelWarning, match=r"weight/kernel.*weight_2/kernel"):
        abstract.materialize(given)

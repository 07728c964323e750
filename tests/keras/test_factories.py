"""Factories of which only the run shows whether they are Keras': traced, and run again if they make layers."""

from __future__ import annotations

import functools
import random
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import lazymodel as lm
import lazymodel_keras as lk

from .models import assert_same, seeded

eqx: Any = pytest.importorskip("equinox")
flax: Any = pytest.importorskip("flax")


def mlp() -> Any:
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])


def compiled() -> Any:
    optimizer = keras.optimizers.Adam(1e-2)  # before the first layer
    model = mlp()
    model.compile(optimizer, "mse")
    return model


class Maker:
    def __call__(self) -> Any:
        return mlp()


RESULTS: dict[str, Callable[..., Any]] = {
    "pytree": lambda: {"w": jnp.zeros((4, 4)), "n": jnp.arange(3)},
    "equinox": lambda: eqx.nn.Linear(4, 2, key=jax.random.key(0)),
    "nnx": lambda: flax.nnx.Linear(4, 2, rngs=flax.nnx.Rngs(0)),
    "linen": lambda: flax.linen.Dense(3).init(jax.random.key(0), jnp.zeros((1, 4))),
    "keras": mlp,
    "compiled": compiled,
    "partial": functools.partial(lambda units: keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)]), 3),
    "object": Maker(),
    "several": lambda: (mlp(), mlp()),
    "argument": lambda key: {"w": jax.random.normal(key, (4,))},
}


def counted(build: Callable[..., Any]) -> Any:
    """A function that counts how often it runs."""

    def run(*args: Any) -> Any:
        run.calls += 1  # pyright: ignore[reportFunctionMemberAccess]
        return build(*args)

    run.calls = 0  # pyright: ignore[reportFunctionMemberAccess]
    return run


@pytest.mark.parametrize("kind", RESULTS)
def test_a_factory_runs_again_only_if_it_makes_layers(kind: str) -> None:
    runs = 2 if kind in ("keras", "compiled", "partial", "object", "several") else 1
    build = counted(RESULTS[kind])
    args = (jax.random.key(0),) if kind == "argument" else ()
    abstract = seeded(lambda: lm.build_abstract(build, *args))
    assert build.calls == runs and len(abstract) > 0
    again = seeded(lambda: lm.build_abstract(build, *args))
    assert [v.shape for v in abstract.values()] == [v.shape for v in again.values()]
    assert build.calls == 2 * runs


@pytest.mark.parametrize("kind", ["keras", "pytree"])
def test_an_exception_shows_the_users_own_line_once(kind: str) -> None:
    def build():
        RESULTS[kind]()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no") as caught:
        lm.build_abstract(build)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count('raise RuntimeError("no")') == 1
    assert "another exception occurred" not in shown and "direct cause" not in shown


def test_layers_have_values_and_jax_functions_have_none() -> None:
    class Drops(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [float(rate) for rate in jnp.linspace(0.0, 0.5, 3)]
            self.dense = keras.layers.Dense(4)
            self.dense.build((None, 2))

    build = counted(Drops)
    assert lm.build_abstract(build).materialize().rates == [0.0, 0.25, 0.5]
    live = sum(array.nbytes for array in jax.live_arrays())
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((1 << 20, 1 << 20))})
    assert abstract.nbytes == 4 << 40
    assert sum(array.nbytes for array in jax.live_arrays()) <= live + 1024


def dense(bias: float) -> Any:
    layer = keras.layers.Dense(2, bias_initializer=keras.initializers.Constant(bias))
    return keras.Sequential([keras.Input((3,)), layer, keras.layers.Dropout(0.5), keras.layers.Dense(2)])


BEFORE: dict[str, Callable[[], Any]] = {
    "keras.random": lambda: dense(float(keras.random.normal((3,))[0])),
    "generator": lambda: dense(float(keras.random.normal((3,), seed=keras.random.SeedGenerator(3))[0])),
    "numpy": lambda: dense(np.random.rand() + random.random()),
    "table": lambda: keras.Sequential(
        [keras.Input((2,)), keras.layers.Embedding(3, 2, weights=[jnp.linspace(0.0, 1.0, 6).reshape(3, 2)])]
    ),
}


def draw() -> list[float]:
    return [np.random.rand(), random.random(), *np.asarray(keras.random.normal((2,))).tolist()]


@pytest.mark.parametrize("kind", BEFORE)
def test_what_is_computed_before_the_first_layer_is_drawn_once(kind: str) -> None:
    """And more models of one factory draw nothing from the process-wide generators."""
    build = BEFORE[kind]
    expected = seeded(build, 7)
    after = draw(), draw()
    abstract = seeded(lambda: lm.build_abstract(build), 7)
    assert draw() == after[0]
    models = [abstract.materialize() for _ in range(2)]
    assert models[0] is not models[1]
    for model in models:
        assert_same(expected, model, outputs=False)
    assert draw() == after[1]


def test_functions_that_make_layers_and_return_arrays() -> None:
    """A warning shows that large ones were computed whole."""

    def build(units: int):
        dense = keras.layers.Dense(units, kernel_initializer=keras.initializers.RandomNormal(seed=1))
        dense.build((None, 4))
        return {"w": dense.kernel.value, "b": jnp.ones(3)}

    abstract = lm.build_abstract(build, 3)
    expected, found = build(3), abstract.materialize()
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    with pytest.warns(lm.LazyModelWarning, match=r"build makes Keras layers.* 1\.56 MiB"):
        lm.build_abstract(build, 100_000 + 2400)


def test_variables_alone_are_keras_too() -> None:
    abstract = seeded(lambda: lm.build_abstract(lambda: mlp().variables))
    assert [variable.shape for variable in abstract.values()] == [(4, 8), (8,), (8, 2), (2,)]
    for found, expected in zip(abstract.materialize(), seeded(mlp).variables, strict=True):
        np.testing.assert_array_equal(found.value, expected.value)


def with_table(table: Any):
    return keras.Sequential([keras.Input((2,)), keras.layers.Embedding(3, 2, weights=[table])])


def test_arrays_as_arguments_of_a_factory() -> None:
    table = np.arange(6, dtype="float32").reshape(3, 2)
    for given in (table, jnp.asarray(table)):
        np.testing.assert_array_equal(lm.build_abstract(with_table, given).materialize().weights[0].value, table)


@pytest.mark.parametrize("build", [lambda: mlp(), lambda: keras.layers.Dropout(0.5)])
def test_where_nothing_can_be_recorded(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that returns arrays is traced there, too."""

    def refused(message: str) -> None:
        with pytest.raises(lm.LazyModelError, match=message):
            lm.build_abstract(build)
        assert lm.build_abstract(lambda: {"w": jnp.ones(3)})["w"].shape == (3,)

    with lk.deferred():
        refused("already being built abstractly")
    with monkeypatch.context() as patch:
        patch.setattr(keras.config, "is_nnx_enabled", lambda: True)
        refused("NNX mode.*KERAS_NNX_ENABLED")
    layer = keras.layers.Activation("relu")
    build = lambda: layer  # noqa: E731  # with TensorFlow nothing of such a layer is traced
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    refused("needs Keras on JAX; the backend is 'tensorflow'. Set KERAS_BACKEND")


def test_a_model_that_is_built_is_said_to_be() -> None:
    with pytest.raises(lm.LazyModelError, match="'made', a Dense whose variables exist already"):
        lm.build_abstract(keras.layers.Dense(2, name="made"))

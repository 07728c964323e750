"""Factories of which only the result says whether they are Keras': run once, whatever they build."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import lazymodel as lm

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


RESULTS: dict[str, Callable[[], Any]] = {
    "pytree": lambda: {"w": jnp.zeros((4, 4)), "n": jnp.arange(3)},
    "equinox": lambda: eqx.nn.Linear(4, 2, key=jax.random.key(0)),
    "nnx": lambda: flax.nnx.Linear(4, 2, rngs=flax.nnx.Rngs(0)),
    "linen": lambda: flax.linen.Dense(3).init(jax.random.key(0), jnp.zeros((1, 4))),
    "keras": mlp,
    "compiled": compiled,
    "partial": functools.partial(lambda units: keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)]), 3),
    "object": Maker(),
    "several": lambda: (mlp(), mlp()),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_factory_runs_once(kind: str) -> None:
    calls = 0

    def build(*_: Any):
        nonlocal calls
        calls += 1
        return RESULTS[kind]()

    abstract = seeded(lambda: lm.build_abstract(build))
    assert calls == 1 and len(abstract) > 0
    assert [v.shape for v in abstract.values()] == [v.shape for v in seeded(lambda: lm.build_abstract(build)).values()]
    assert calls == 2


def test_a_factory_with_arrays_runs_once() -> None:
    calls = 0

    def build(key: Any):
        nonlocal calls
        calls += 1
        return {"w": jax.random.normal(key, (4,))}

    lm.build_abstract(build, jax.random.key(0))
    assert calls == 1


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

    calls = 0

    def build():
        nonlocal calls
        calls += 1
        return Drops()

    model = lm.build_abstract(build).materialize()
    assert model.rates == [0.0, 0.25, 0.5] and calls == 1
    live = sum(array.nbytes for array in jax.live_arrays())
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((1 << 20, 1 << 20))})
    assert abstract.nbytes == 4 << 40
    assert sum(array.nbytes for array in jax.live_arrays()) <= live + 1024


def test_what_is_computed_before_the_first_layer_has_values() -> None:
    """Begun anew, drawing the same names and seeds as if it had run once."""

    def build():
        table = jnp.linspace(0.0, 1.0, 6).reshape(3, 2)
        return keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(3, 2, weights=[table])])

    expected = seeded(build)
    model = seeded(lambda: lm.build_abstract(build)).materialize()
    np.testing.assert_array_equal(model.weights[0], np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2))
    assert [v.path for v in model.weights] == [v.path for v in expected.weights]


def test_functions_that_make_layers_and_return_arrays() -> None:
    def build():
        dense = keras.layers.Dense(3, kernel_initializer=keras.initializers.RandomNormal(seed=1))
        dense.build((None, 4))
        return {"w": dense.kernel.value, "b": jnp.ones(3)}

    abstract = lm.build_abstract(build)
    expected, found = build(), abstract.materialize()
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_a_second_model_of_an_unannotated_factory() -> None:
    abstract = seeded(lambda: lm.build_abstract(lambda: mlp()))
    first, second = abstract.materialize(), abstract.materialize()
    assert first is not second
    assert_same(first, second)


def test_another_backend_is_said_of_functions_that_make_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with TensorFlow, where nothing of such a layer is traced."""
    layer = keras.layers.Activation("relu")
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(lm.LazyModelError, match="needs Keras on JAX; the backend is 'tensorflow'. Set KERAS_BACKEND"):
        lm.build_abstract(lambda: layer)
    assert lm.build_abstract(lambda: {"w": jnp.ones(3)})["w"].shape == (3,)


def test_a_model_that_is_built_is_said_to_be() -> None:
    with pytest.raises(lm.LazyModelError, match="'made', a Dense whose variables are there already"):
        lm.build_abstract(keras.layers.Dense(2, name="made"))

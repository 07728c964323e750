"""What `keras.callbacks.OrbaxCheckpoint` saves: found, named after the variables, and loaded into an abstract model."""

import keras
import numpy as np
import pytest

import lazymodel as lm
from tests.keras.versions import needs_orbax_callback

pytest.importorskip("orbax.checkpoint")
pytestmark = needs_orbax_callback


@pytest.fixture(autouse=True)
def names_start_over():
    """Keras numbers layers of one kind over the whole process; a new program would begin where this does."""
    keras.utils.clear_session()


def build() -> keras.Model:
    layers = [
        keras.layers.Dense(8, activation="relu", name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(2, dtype="bfloat16", name="second"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers], name="model")


def fitted(directory, **options) -> keras.Model:
    """A model after two epochs that were each saved."""
    model = build()
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    data = rng.standard_normal((16, 6)), rng.standard_normal((16, 2))
    callback = keras.callbacks.OrbaxCheckpoint(str(directory), max_to_keep=2, **options)
    model.fit(*data, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    return model


@pytest.mark.parametrize("background", [False, True])
def test_names_and_values_are_the_variables(tmp_path, background):
    model = fitted(tmp_path / "saved", save_on_background=background)
    collections = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables,
        "metrics_variables": model.metrics_variables,
    }
    expected = {f"{name}/{v.path}": v for name, variables in collections.items() for v in variables}
    assert "trainable_variables/model/first/kernel" in expected
    with lm.open_checkpoint(tmp_path / "saved") as checkpoint:
        assert checkpoint.item == str(tmp_path / "saved" / "1" / "pytree")
        assert set(checkpoint) == set(expected)
        for name, variable in expected.items():
            tensor = checkpoint[name]
            assert (tensor.shape, tensor.dtype.name) == (tuple(variable.shape), variable.dtype)
            assert tensor.read().tobytes() == np.asarray(variable.value).tobytes()
    earlier = lm.open_checkpoint(tmp_path / "saved" / "0")
    assert earlier["optimizer_variables/adam/iteration"].read() == 2
    assert checkpoint["optimizer_variables/adam/iteration"].read() == 4


def test_weights_only(tmp_path):
    model = fitted(tmp_path / "saved", save_weights_only=True)
    checkpoint = lm.open_checkpoint(tmp_path / "saved")
    assert {name.split("/", 1)[1] for name in checkpoint} == {variable.path for variable in model.variables[:8]}


def test_into_an_abstract_model(tmp_path):
    expected = fitted(tmp_path / "saved")
    checkpoint = lm.open_checkpoint(tmp_path / "saved")
    keras.utils.clear_session()
    abstract = lm.build_abstract(build)
    paths = {name.split("/", 1)[1]: name for name in checkpoint}
    model = abstract.materialize({path: checkpoint[paths[path]] for path in abstract})
    assert len(model.variables) == 8
    for one, other in zip(expected.variables[:8], model.variables, strict=True):
        assert one.path == other.path
        assert np.asarray(one.value).tobytes() == np.asarray(other.value).tobytes()


def test_assets_are_no_weights(tmp_path):
    """Vocabularies and the like are saved as byte arrays, in an item beside the variables."""

    class Words(keras.layers.Layer):
        def call(self, inputs):
            return inputs

        def save_assets(self, folder):
            with open(f"{folder}/words.txt", "w") as file:
                file.write("a b c")

    model = keras.Sequential([keras.Input((3,)), Words(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "saved"))
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0, callbacks=[callback])
    assert (tmp_path / "saved" / "0" / "assets").is_dir()
    checkpoint = lm.open_checkpoint(tmp_path / "saved")
    assert checkpoint.item == str(tmp_path / "saved" / "0" / "pytree")
    assert f"trainable_variables/{model.variables[0].path}" in checkpoint

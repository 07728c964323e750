"""Saved models and weight files of Keras, of older versions too, in part or whole; and what is no saved model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk

from .models import assert_same, columns, functional, in_block, preprocessing, refused, seeded

RULES = {".*first/kernel": P(None, "model"), ".*": P()}
# Keras 2 wrote the variables of a layer in this order, the trainable ones first.
LAYERS = {
    "first": {"kernel:0": (6, 8), "bias:0": (8,)},
    "norm": {"gamma:0": (8,), "beta:0": (8,), "moving_mean:0": (8,), "moving_variance:0": (8,)},
    "head": {"kernel:0": (8, 4), "bias:0": (4,)},
}


def net(classes: int = 4, head: str = "head") -> keras.Model:
    layers = [
        keras.layers.Dense(8, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(classes, name=head),
    ]
    return keras.Sequential([keras.Input((6,)), *layers], name="net")


def values() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        layer: {name: rng.standard_normal(shape).astype("f") for name, shape in weights.items()}
        for layer, weights in LAYERS.items()
    }


def write_keras_2(path: Path, *, whole: bool) -> None:
    """Layer names and weight names in attributes; a whole model has them in a group, beside its configuration."""
    with h5py.File(path, "w") as file:
        group = file.create_group("model_weights") if whole else file
        group.attrs["layer_names"] = [name.encode() for name in LAYERS]
        group.attrs["backend"], group.attrs["keras_version"] = b"tensorflow", b"2.11.0"
        for layer, weights in values().items():
            inside = group.create_group(layer)
            inside.attrs["weight_names"] = [f"{layer}/{name}".encode() for name in weights]
            for name, value in weights.items():
                inside[f"{layer}/{name}"] = value


def write_keras_2_13(path: Path) -> None:
    """The first form of `.weights.h5`, whose groups have the names of attributes of the time."""
    with h5py.File(path, "w") as file:
        for layer, automatic in zip(values().values(), ("dense", "batch_normalization", "dense_1"), strict=True):
            group = file.create_group(f"_layer_checkpoint_dependencies/{automatic}/vars")
            for index, value in enumerate(layer.values()):
                group[str(index)] = value


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("legacy")
    paths = {name: folder / name for name in ("weights.h5", "whole.h5", "keras_2_13.weights.h5")}
    write_keras_2(paths["weights.h5"], whole=False)
    write_keras_2(paths["whole.h5"], whole=True)
    write_keras_2_13(paths["keras_2_13.weights.h5"])
    return paths


def assert_loaded(model: keras.Model, layers: Mapping[str, str]) -> None:
    expected = values()
    for name, stored in layers.items():
        for variable, value in zip(model.get_layer(name).weights, expected[stored].values(), strict=True):
            np.testing.assert_array_equal(variable.value, value, err_msg=variable.path)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("weights.h5", {}), ("whole.h5", {}), ("keras_2_13.weights.h5", {}), ("weights.h5", {"by_name": True}),
        ("whole.h5", {"by_name": True}),
    ],
)  # fmt: skip
def test_weights_of_keras_2(name: str, given: dict[str, Any], files: dict[str, Path], mesh42: Mesh) -> None:
    reports: list[lm.LoadReport] = []
    with lk.deferred(mesh=mesh42, rules=RULES, report=reports.append):
        model = net()
        model.load_weights(files[name], **given)
    assert len(reports[0].loaded) == 8, "read by the stream, into the shards"
    assert reports[0].files.keys() == {str(files[name])}
    assert reports[0].read_nbytes == reports[0].needed_nbytes == 4 * model.count_params()
    placed = lm.build_abstract(net).shard(mesh42, RULES).materialize()
    assert lk.restore(placed, files[name]) is placed
    for found in (model, placed):
        assert_loaded(found, {layer: layer for layer in LAYERS})
        assert found.get_layer("first").kernel.value.sharding.spec == P(None, "model")


def test_a_new_head_by_name(files: dict[str, Path]) -> None:
    """Layers that the file does not name are initialized, and the report says which."""
    reports: list[lm.LoadReport] = []
    with lk.deferred(report=reports.append):
        model = net(classes=3, head="other")
        model.load_weights(files["weights.h5"], by_name=True)
    assert_loaded(model, {"first": "first", "norm": "norm"})
    made = {row.path for row in (*reports[0].initialized, *reports[0].constants)}
    assert made == {"net/other/kernel", "net/other/bias"}
    assert np.abs(model.get_layer("other").kernel.value).max() > 0
    assert [tensor.name for tensor in reports[0].unused] == []


@pytest.mark.parametrize("name", ["weights.h5", "keras_2_13.weights.h5"])
def test_a_head_of_another_shape(name: str, files: dict[str, Path]) -> None:
    reports: list[lm.LoadReport] = []
    legacy = name == "weights.h5"
    said = "Skipping loading weights for layer #2" if legacy else "A total of 1 objects could not be loaded"
    with lk.deferred(report=reports.append):
        model = net(classes=3)
        with pytest.warns(UserWarning, match=said):  # Keras' own words
            model.load_weights(files[name], skip_mismatch=True)
    assert_loaded(model, {"first": "first", "norm": "norm"})
    assert "net/head/kernel" in [row.path for row in reports[0].initialized]
    if not legacy:  # where Keras does not even try
        (misfit,) = reports[0].mismatched
        assert (misfit.path, misfit.expected, misfit.found) == ("net/head/kernel", (8, 3), (8, 4))
        assert misfit.tensor.file == str(files[name])


def test_a_mismatch_names_variable_tensor_and_file(files: dict[str, Path]) -> None:
    file = files["keras_2_13.weights.h5"]
    message = refused(in_block, lambda: net(classes=3).load_weights(file))
    assert all(part in message for part in ("'net/head/kernel'", "(8, 3)", "(8, 4)", str(file)))
    with pytest.raises(ValueError, match="Shape mismatch in layer #2"):
        in_block(lambda: net(classes=3).load_weights(files["weights.h5"]))


def test_a_damaged_legacy_file(tmp_path: Path, files: dict[str, Path]) -> None:
    broken = tmp_path / "broken.h5"
    broken.write_bytes(files["weights.h5"].read_bytes()[:-64])
    with pytest.raises((lm.CheckpointError, OSError), match=r"broken\.h5|truncated"):
        in_block(lambda: net().load_weights(broken))
    assert "broken.h5" in refused(lk.restore, net(), broken)


def folder_of(**files: str) -> Any:
    def make(path: Path) -> None:
        path.mkdir()
        for name, text in files.items():
            (path / name.replace("_json", ".json").replace("_txt", ".txt")).write_text(text)

    return make


CASES: dict[str, tuple[str, Any, str]] = {
    "nothing": ("modle.keras", lambda path: (path.parent / "model.keras").touch(), "nothing; closest: 'model.keras'"),
    "nowhere": ("folder/model.keras", lambda path: None, "nothing; there is no folder .*folder"),
    "empty file": ("m.keras", lambda path: path.touch(), "an empty file"),
    "no archive": ("m.keras", lambda path: path.write_text("text"), "not a zip archive"),
    "no HDF5": ("m.h5", lambda path: path.write_text("text"), "a file that is not HDF5"),
    "text": ("notes.txt", lambda path: path.write_text("text"), r"a file of another kind \(.txt\)"),
    "tensors": ("m.safetensors", lambda path: lm.save({"a": np.ones(3)}, path), "another kind"),
    "weights": ("m.weights.h5", lambda path: small().save_weights(path), "weights without .*lazymodel_keras.restore"),
    "empty folder": ("m", folder_of(), "an empty folder"),
    "other folder": ("m", folder_of(a_txt="x", b_txt="y"), r"a folder with a\.txt, b\.txt"),
    "folder of tensors": ("m", lambda path: lm.save({"a": np.ones(3)}, path), "without a model's configuration"),
    "preset of others": ("m", folder_of(config_json='{"model_type": "bert"}'), "lazymodel_keras.from_preset"),
}


def small() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])


@pytest.mark.parametrize("case", CASES)
def test_no_saved_model(case: str, tmp_path: Path) -> None:
    name, make, found = CASES[case]
    make(tmp_path / name)
    message = f"{re.escape(str(tmp_path / name))}: expected a .keras file.*; found .*{found}"
    with pytest.raises(lm.CheckpointError, match=message):
        lk.load_model(tmp_path / name)


@pytest.mark.parametrize("build", [functional, preprocessing, small])
@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m"])
def test_saved_models_are_loaded(name: str, build: Callable[[], keras.Model], tmp_path: Path, mesh42: Mesh) -> None:
    source = seeded(build, seed=1)
    source.save(tmp_path / name, **({} if "." in name else {"zipped": False}))
    given: dict[str, Any] = {"compile": False} if name == "m.h5" else {}
    reports: list[lm.LoadReport] = []
    ours = lk.load_model(tmp_path / name, mesh=mesh42, rules=columns, report=reports.append, **given)
    assert len(reports[0].loaded) == len(source.variables)
    with lk.deferred(mesh=mesh42, rules=columns):
        model = keras.saving.load_model(tmp_path / name, **given)
        assert all(variable._value is not None for variable in model.variables), "loaded when it returns"
    assert_same(source, lk.load_model(tmp_path / name, **given), outputs=build is small)
    for found in (ours, model):
        assert_same(source, found, outputs=False)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_optimizer_state_of_another_dtype_policy_is_not_lost(tmp_path: Path) -> None:
    """Keras scales the loss only if the policy says so when the model is compiled, and leaves the state out."""
    file, policy = tmp_path / "model.keras", keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_float16")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        eighths = np.full((8, 4), 1 / 8)  # of larger inputs some gradients are infinite, and Keras skips the step
        model.fit(eighths, eighths[:, :2], verbose=0)
        model.save(file)
        keras.config.set_dtype_policy("float32")
        with pytest.raises(
            lm.CheckpointError, match="expected the 6 variables of optimizer .*, found 10.*mixed_float16"
        ):
            lk.load_model(file)
        assert not lk.load_model(file, compile=False).compiled
        keras.config.set_dtype_policy("mixed_float16")
        loaded = lk.load_model(file)
    finally:
        keras.config.set_dtype_policy(policy)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 1


def test_what_keras_itself_cannot_load(tmp_path: Path) -> None:
    """Keras 3.15.1 saves layers of AWQ without one of their variables."""
    file = tmp_path / "model.keras"
    try:
        awq = keras.layers.Dense(32, dtype="awq/4/-1_from_float32")
    except ValueError:
        pytest.skip("this version of Keras has no AWQ")
    keras.Sequential([keras.Input((16,)), awq]).save(file)
    try:
        keras.saving.load_model(file)
    except ValueError:
        assert "its weights do not match its own configuration" in refused(lk.load_model, file)
    else:
        lk.load_model(file)

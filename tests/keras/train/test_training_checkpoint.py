"""`lk.TrainingCheckpoint`: steps are committed wherever the folder is said to be, and a save that fails is heard of."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import bits, seeded
from tests.keras.versions import needs_orbax_callback

pytest.importorskip("orbax.checkpoint")
pytestmark = needs_orbax_callback

DATA = np.ones((8, 4), "f"), np.ones((8, 256), "f")


def net(units: int = 256) -> keras.Model:
    layers = [keras.layers.Dense(units, name="first"), keras.layers.Dense(256, name="second")]
    model = keras.Sequential([keras.layers.Input((4,)), *layers], name="model")
    model.compile("adam", "mse")
    return model


def fit(callback: Any, epochs: int = 1) -> keras.Model:
    model = seeded(net)
    model.fit(*DATA, epochs=epochs, verbose=0, callbacks=[callback])
    return model


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    "place",
    [lambda folder: "saved", lambda folder: "./saved", lambda folder: "~/saved", lambda folder: Path("saved")],
)
def test_any_folder_is_saved_to(
    place: Callable[[Path], Any], background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = place(tmp_path)
    callback = lk.TrainingCheckpoint(directory, save_on_background=background)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # it is the folder that was meant when it was said
    model = fit(callback)
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.chdir(tmp_path)
    assert lk.training_state(directory).step == 0
    loaded = lk.load_model(directory)
    restored = lk.restore(lm.build_abstract(net), directory)
    for one in (loaded, restored):
        for expected, found in zip(model.variables, one.variables, strict=True):
            np.testing.assert_array_equal(bits(expected), bits(found))
    with lk.deferred():
        stock = net()
        stock.load_weights(str(tmp_path / "saved"))
    np.testing.assert_array_equal(bits(stock.weights[0]), bits(model.weights[0]))


@pytest.fixture
def full() -> Any:
    """No file can become larger than 32 KiB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_is_heard_of(background: bool, tmp_path: Path, full: Any) -> None:
    callback = lk.TrainingCheckpoint(tmp_path / "saved", save_on_background=background)
    with pytest.raises(lm.CheckpointError, match=rf"step 0 was not saved to {tmp_path / 'saved'}: "):
        fit(callback)
    with pytest.raises(lm.CheckpointError):
        lk.training_state(tmp_path / "saved")


def test_what_was_saved_before_is_there_after_a_failure(tmp_path: Path) -> None:
    callback = lk.TrainingCheckpoint(tmp_path / "saved")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                callback.wait_until_finished()
                resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, hard))

    model = seeded(net)
    try:
        with pytest.raises(lm.CheckpointError, match="step 1 was not saved"):
            model.fit(*DATA, epochs=2, verbose=0, callbacks=[Fill(), callback])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lk.training_state(tmp_path / "saved").epoch == 1
    once = fit(lk.TrainingCheckpoint(tmp_path / "again"))
    restored = lk.restore(lm.build_abstract(net), tmp_path / "saved")
    np.testing.assert_array_equal(bits(once.weights[0]), bits(restored.weights[0]))


def test_without_obstore_a_url_that_orbax_cannot_save_to_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazymodel_keras._train.callbacks.has_obstore", lambda: False)
    with pytest.raises(
        lm.LazyModelError, match=r"Orbax, .* cannot save to s3://bucket/run: .*pip install 'lazymodel\[remote\]'"
    ) as told:
        lk.TrainingCheckpoint("s3://bucket/run?X-Amz-Signature=SECRET")
    assert "SECRET" not in str(told.value)
    assert told.value.__suppress_context__


def test_a_model_on_the_host_is_saved_and_restored_there(tmp_path: Path, mesh8: Mesh) -> None:
    model = seeded(net)
    model.optimizer.build(model.trainable_variables)
    assert lm.reshard(model, NamedSharding(mesh8, P(), memory_kind="pinned_host"), donate=True) is model
    before = [np.asarray(variable) for variable in model.get_weights()]
    checkpoint = lk.TrainingCheckpoint(tmp_path / "run")
    checkpoint.set_model(model)
    checkpoint.on_epoch_end(0)
    checkpoint.wait_until_finished()
    model.save_weights(tmp_path / "net.weights.h5")
    for saved in ("run", "net.weights.h5"):
        model.set_weights([np.zeros_like(weight) for weight in before])
        lk.restore(model, tmp_path / saved)
        assert {variable.value.sharding.memory_kind for variable in model.variables} == {"pinned_host"}
        assert all(map(np.array_equal, model.get_weights(), before))

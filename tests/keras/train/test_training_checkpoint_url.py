"""`lk.TrainingCheckpoint` in a bucket: steps come back bit for bit, count when they are complete, and old ones go."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel._remote import upload
from lazymodel.checkpoints._inspect import inspect_checkpoint
from lazymodel_keras._train import steps
from tests.keras.models import bits, seeded
from tests.keras.versions import needs_orbax_callback
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server

obstore = pytest.importorskip("obstore")
pytest.importorskip("orbax.checkpoint")
pytestmark = needs_orbax_callback

DATA = np.ones((8, 16), "f"), np.ones((8, 8), "f")
URL = "gs://runs/run"
QUICK = {"backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}}
INDEX = "model.safetensors.index.json"


def net() -> keras.Model:
    layers = [keras.layers.Dense(64, name="first"), keras.layers.Dropout(0.1), keras.layers.Dense(8, name="second")]
    model = keras.Sequential([keras.layers.Input((16,)), *layers], name="model")
    model.compile("adam", "mse")
    return model


def fit(*callbacks: Any, model: keras.Model | None = None, **options: Any) -> keras.Model:
    model = model or seeded(net)
    model.fit(*DATA, **{"epochs": 3, "batch_size": 4, "verbose": 0} | options, callbacks=[*callbacks])
    return model


def state(model: keras.Model) -> dict[str, np.ndarray]:
    return {variable.path: bits(variable) for variable in [*model.variables, *model.optimizer.variables]}


def assert_same_state(expected: dict[str, np.ndarray], model: keras.Model) -> None:
    found = {path.split("/", 1)[-1]: value for path, value in state(model).items()}
    wanted = {path.split("/", 1)[-1]: value for path, value in expected.items()}
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


class Runs:
    """A bucket of the object server."""

    def __init__(self, server: ObjectServer) -> None:
        self.server, self.folder = server, server.root / "runs"
        self.options = server.gcs() | {"retry_config": QUICK}

    def objects(self) -> dict[str, bytes]:
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


@pytest.fixture
def runs(object_server: ObjectServer) -> Iterator[Runs]:
    runs = Runs(object_server)
    runs.folder.mkdir()
    yield runs
    shutil.rmtree(runs.folder)


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are several shards with an index."""
    monkeypatch.setattr(steps, "save_step", functools.partial(lm.save_step, max_shard_size=6 << 10))


@pytest.mark.parametrize("background", [True, False])
def test_steps_on_s3_come_back_on_another_mesh(s3: S3Server, background: bool, mesh8: Any, mesh42: Any) -> None:
    options = s3.options()
    abstract = seeded(lambda: lm.build_abstract(net)).shard(mesh8, {".*first/kernel": P(None, "model"), ".*": P()})
    callback = lk.TrainingCheckpoint(
        "s3://bucket/run/",
        metadata={"run": 7},
        storage_options=options,
        max_to_keep=2,
        save_on_background=background,
    )
    model = fit(callback, model=abstract.materialize())
    store = obstore.store.S3Store("bucket", **options)
    assert sorted(entry["path"] for entry in obstore.list(store).collect()) == [
        "run/1/model.safetensors",
        "run/2/model.safetensors",
    ]
    assert s3.open_uploads() == []

    fresh = lm.build_abstract(net).shard(mesh42, {".*first/kernel": P("batch", "model"), ".*": P()})
    restored = lk.restore(fresh, "s3://bucket/run", storage_options=options)
    assert_same_state(state(model), restored)
    kernel = restored.layers[0].kernel.value
    assert kernel.sharding.mesh.shape == mesh42.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (4, 32)
    assert_same_state(state(model), lk.restore(seeded(net, 1), "s3://bucket/run/2", storage_options=options))
    told = lk.training_state("s3://bucket/run", storage_options=options)
    assert told == lk.TrainingState("s3://bucket/run/2", 2, {"run": 7}, None, 3, 0)
    assert lk.training_state("s3://bucket/run/1", storage_options=options).epoch == 2
    assert fit(model=restored, initial_epoch=told.epoch, epochs=4).optimizer.iterations == 8


class Numbers:
    """An iterator with a state of bytes, as Grain's may be."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Any:
        self.at += 1
        return tuple(part[:4] * self.at for part in DATA)

    def get_state(self) -> bytes:
        return bytes([self.at])


def test_batches_data_and_the_best_only(runs: Runs, sharded: None) -> None:
    callback = lk.TrainingCheckpoint(
        URL, storage_options=runs.options, save_freq=2, max_to_keep=None, metadata=lambda: {"made": "late"}
    )
    model = seeded(net)
    numbers = callback.data(Numbers())
    model.fit(numbers, steps_per_epoch=3, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    assert {name.split("/")[1] for name in runs.objects()} == {"2", "4", "6"}
    assert [name for name in runs.objects() if name.endswith(INDEX)] == [f"run/{n}/{INDEX}" for n in (2, 4, 6)]
    state_of = functools.partial(lk.training_state, storage_options=runs.options)
    assert state_of(f"{URL}/4") == lk.TrainingState(f"{URL}/4", 4, {"made": "late"}, bytes([4]), 1, 1)
    assert_same_state(state(model), lk.restore(seeded(net, 1), URL, storage_options=runs.options))

    best = lk.TrainingCheckpoint(
        "gs://runs/best", storage_options=runs.options, monitor="loss", mode="max", save_best_only=True
    )
    fit(best)  # the loss falls, so the first epoch has the most
    assert {name.split("/")[1] for name in runs.objects() if name.startswith("best/")} == {"0"}


def test_variables_that_share_an_array_are_each_saved(runs: Runs) -> None:
    model = seeded(net)
    first, second = model.layers[0].kernel, model.optimizer
    model.optimizer.build(model.trainable_variables)
    slot = next(v for v in second.variables if v.path.endswith("first_kernel_momentum"))
    slot._value = first.value
    callback = lk.TrainingCheckpoint(URL, storage_options=runs.options)
    callback.set_model(model)
    callback.on_epoch_end(0, {})
    assert_same_state(state(model), lk.restore(seeded(net, 1), URL, storage_options=runs.options))


@pytest.mark.parametrize("several", [False, True])
def test_a_save_that_fails_leaves_what_was_there(
    runs: Runs, several: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several:
        request.getfixturevalue("sharded")
    monkeypatch.setattr(upload, "LEAST_PART", 4 << 10)
    monkeypatch.setattr(upload, "PART", 4 << 10)
    before: dict[str, bytes] = {}
    expected: list[dict[str, np.ndarray]] = []

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:  # after the checkpoint of this epoch
                before.update(runs.objects())
                expected.append(state(self.model))
                runs.server.faults(["503"], every=2 + several, methods=["PUT"], path="/gcs/*")

    options = runs.options | {"retry_config": QUICK | {"max_retries": 0}}
    callback = lk.TrainingCheckpoint(URL, storage_options=options, max_to_keep=1)
    with pytest.raises(lm.CheckpointError, match=f"step 1 was not saved to {URL}: cannot write {URL}/1/.*503"):
        fit(callback, Fail())
    runs.server.faults()
    assert before
    assert runs.objects() == before
    assert runs.server.counters()["open_uploads"] == []
    assert_same_state(expected[0], lk.restore(seeded(net, 1), URL, storage_options=runs.options))
    assert lk.training_state(URL, storage_options=runs.options).epoch == 1


def test_a_step_without_its_index_is_passed_over(runs: Runs, sharded: None, tmp_path: Path) -> None:
    expected: list[dict[str, np.ndarray]] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: expected.append(state(model)))
    model = seeded(net)
    fit(lk.TrainingCheckpoint(URL, storage_options=runs.options, max_to_keep=3), note, model=model)
    (runs.folder / "run" / "2" / INDEX).unlink()
    assert_same_state(expected[1], lk.restore(seeded(net, 1), URL, storage_options=runs.options))
    assert lk.training_state(URL, storage_options=runs.options).step == 1
    found = inspect_checkpoint(URL, runs.options)
    assert (found.path, found.problems) == (f"{URL}/1", ())
    assert {tensor.name for tensor in found.tensors} == {*lm.open_checkpoint(URL, runs.options)}
    with pytest.raises(lm.LazyModelError, match="of another format or other names: steps, of which 1 is the newest"):
        lm.save({"a": np.ones(3)}, URL, storage_options=runs.options)
    shutil.copytree(runs.folder / "run", tmp_path / "copy")  # a folder on a disk is read alike
    assert lk.training_state(tmp_path / "copy").step == 1
    assert_same_state(expected[1], lk.restore(seeded(net, 1), tmp_path / "copy"))

    again = lk.TrainingCheckpoint(URL, storage_options=runs.options, max_to_keep=2)
    fit(again, model=model, initial_epoch=3, epochs=4)
    assert {name.split("/")[1] for name in runs.objects()} == {"1", "3"}, "what was left of 2 is gone"


def test_an_old_step_that_stays_is_warned_about_and_removed_later(runs: Runs) -> None:
    options = runs.options | {"retry_config": QUICK | {"max_retries": 0}}
    callback = lk.TrainingCheckpoint(URL, storage_options=options, max_to_keep=1)
    model = fit(callback, epochs=1)
    runs.server.faults(["503"], every=1, methods=["DELETE"], path="/gcs/*")
    with pytest.warns(lm.LazyModelWarning, match="step 1 is saved, but not all of older ones could be removed"):
        fit(callback, model=model, initial_epoch=1, epochs=2)
    runs.server.faults()
    assert {name.split("/")[1] for name in runs.objects()} == {"0", "1"}
    fit(callback, model=model, initial_epoch=2)
    assert {name.split("/")[1] for name in runs.objects()} == {"2"}


def test_what_cannot_be_saved_to_is_refused_at_once(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match=r"cannot save to https://host/run.*Expected s3://, gs:// or az://"):
        lk.TrainingCheckpoint("https://host/run")
    with pytest.raises(lm.LazyModelError, match="s3://bucket/run: expected a URL without") as told:
        lk.TrainingCheckpoint("s3://bucket/run?X-Amz-Signature=SECRET")
    assert "SECRET" not in str(told.value)
    with pytest.raises(lm.LazyModelError, match="storage_options are for URLs"):
        lk.TrainingCheckpoint(tmp_path, storage_options={"region": "eu"})
    fit(lk.TrainingCheckpoint(runs.folder / "run"), epochs=1)
    saved = runs.objects()
    with pytest.raises(lm.CheckpointError, match="step 0 was not saved.*/0/pytree, which would hide the step"):
        fit(lk.TrainingCheckpoint(URL, storage_options=runs.options), epochs=1)
    assert runs.objects() == saved


def test_what_was_saved_with_a_step_may_be_damaged(runs: Runs) -> None:
    metadata = {"lazymodel": json.dumps({"metadata": {"epoch": "many"}})}
    lm.save({"a": np.ones(3)}, f"{URL}/4", storage_options=runs.options, metadata=metadata)
    with pytest.raises(lm.CheckpointError, match=f"{URL}/4: expected epoch, batch and metadata"):
        lk.training_state(URL, storage_options=runs.options)
    lm.save({"a": np.ones(3)}, f"{URL}/5", storage_options=runs.options)
    with pytest.raises(lm.CheckpointError, match=f"{URL}: expected a step that a callback for training saved"):
        lk.training_state(URL, storage_options=runs.options)

"""`lk.TrainingCheckpoint` on disks and in buckets: steps come back bit for bit, and count when they are complete.

Also where training was, and a run that is killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.command import main
from tests.keras.models import assert_same_values, bits, in_block, seeded, state_of
from tests.keras.train import _killed_worker as worker
from tests.keras.versions import needs_orbax_callback
from tests.large import mostly_large
from tests.processes import printed, run_workers
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server
from tests.small import make_small

pytest.importorskip("orbax.checkpoint")
pytestmark = needs_orbax_callback

DATA = np.ones((8, 16), "f"), np.ones((8, 8), "f")
URL = "gs://runs/run"
QUICK = {"backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}}
INDEX = "model.safetensors.index.json"


def net(units: int = 64) -> keras.Model:
    layers = [keras.layers.Dense(units, name="first"), keras.layers.Dropout(0.1), keras.layers.Dense(8, name="second")]
    model = keras.Sequential([keras.layers.Input((16,)), *layers], name="model")
    model.compile("adam", "mse")
    return model


def fit(*callbacks: Any, model: keras.Model | None = None, **options: Any) -> keras.Model:
    model = model or seeded(net)
    model.fit(*DATA, **{"epochs": 3, "batch_size": 4, "verbose": 0} | options, callbacks=[*callbacks])
    return model


def state(model: keras.Model) -> dict[str, np.ndarray]:
    return {variable.path: bits(variable) for variable in state_of(model)}


def assert_same_state(expected: dict[str, np.ndarray], model: keras.Model) -> None:
    found = {path.split("/", 1)[-1]: value for path, value in state(model).items()}
    wanted = {path.split("/", 1)[-1]: value for path, value in expected.items()}
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


class TwoOptimizers(keras.Model):
    """As a generative adversarial net has them."""

    def __init__(self) -> None:
        super().__init__(name="nets")
        self.first, self.second = keras.layers.Dense(16, name="first"), keras.layers.Dense(8, name="second")

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.other_optimizer = keras.optimizers.Adam()

    def build(self, shape: Any) -> None:
        self.first.build((None, 16))
        self.second.build((None, 16))
        self.other_optimizer.build(self.first.trainable_variables)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def two_optimizers() -> keras.Model:
    model = TwoOptimizers()
    model.compile(optimizer="adam", loss="mse")
    model.build((None, 16))
    return model


def test_a_second_optimizer_is_not_lost(tmp_path: Path) -> None:
    """No step of Orbax holds it, so fit refuses; what the error advises does."""
    run, weights = tmp_path / "run", tmp_path / "run.weights.h5"
    with pytest.raises(lm.LazyModelError, match="also has other_optimizer.*ModelCheckpoint.*streamed_saving"):
        fit(lk.TrainingCheckpoint(run), model=two_optimizers())
    model = two_optimizers()
    stock = keras.callbacks.OrbaxCheckpoint(str(run), save_on_background=False)
    with lk.streamed_saving():
        fit(stock, keras.callbacks.ModelCheckpoint(weights, save_weights_only=True), model=model)
    model.other_optimizer.iterations.assign(7)
    with lk.streamed_saving():
        model.save_weights(weights)
    for made in (two_optimizers(), lm.build_abstract(two_optimizers)):
        restored = lk.restore(made, weights)
        assert (int(restored.other_optimizer.iterations), int(restored.optimizer.iterations)) == (7, 6)
    with pytest.raises(lm.CheckpointError, match="also has other_optimizer.*weights_only=True"):
        lk.restore(two_optimizers(), run)
    restored = lk.restore(two_optimizers(), run, weights_only=True)
    assert_same_values(model.variables, restored.variables)
    fit(lk.TrainingCheckpoint(tmp_path / "weights", save_weights_only=True), model=two_optimizers(), epochs=1)


def test_averages_are_not_saved_as_weights(tmp_path: Path) -> None:
    def averaged() -> keras.Model:
        model = net()
        model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse")
        return model

    checkpoint, swap = lk.TrainingCheckpoint(tmp_path), keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.raises(lm.LazyModelError, match="give TrainingCheckpoint first"):
        fit(swap, checkpoint, model=averaged())
    seen: list[list[np.ndarray]] = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append([*state(model).values()]))
    model = averaged()
    fit(lk.TrainingCheckpoint(tmp_path), look, swap, model=model)
    restored = lk.restore(averaged(), tmp_path)
    for value, expected in zip(state(restored).values(), seen[-1], strict=True):
        np.testing.assert_array_equal(value, expected)


def test_an_optimizer_whose_names_are_not_unique(tmp_path: Path, s3: S3Server) -> None:
    def factored() -> keras.Model:
        model = net(256)
        model.compile(keras.optimizers.Adafactor(0.1), "mse")
        return model

    model = seeded(factored)
    where: dict[str, Any] = {str(tmp_path / "run"): {}, "s3://bucket/run": s3.options()}
    fit(*(lk.TrainingCheckpoint(path, storage_options=options) for path, options in where.items()), model=model)
    assert "get_state_tree" not in vars(model)
    for path, options in where.items():
        for made in (factored(), lm.build_abstract(factored)):
            restored = lk.restore(made, path, storage_options=options)
            assert_same_values(state_of(model), state_of(restored))


def test_save_step_points_to_the_callback(tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match="lazymodel_keras.TrainingCheckpoint"):
        lm.save_step(fit(), tmp_path, 1)
    lm.save_step(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]), tmp_path, 1)


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


class Runs:
    """A bucket of the object server."""

    def __init__(self, server: ObjectServer) -> None:
        self.server, self.folder = server, server.root / "runs"
        self.options = server.gcs() | {"retry_config": QUICK}
        self.hasty = self.options | {"retry_config": QUICK | {"max_retries": 0}}

    def objects(self) -> dict[str, bytes]:
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def steps(self, run: str = "run") -> set[str]:
        return {name.split("/")[1] for name in self.objects() if name.startswith(f"{run}/")}


@pytest.fixture
def runs(object_server: ObjectServer) -> Iterator[Runs]:
    runs = Runs(object_server)
    runs.folder.mkdir()
    yield runs
    shutil.rmtree(runs.folder)


@pytest.mark.parametrize(
    ("place", "background"),
    mostly_large([("disk", True), ("disk", False), ("bucket", True)], [("disk", True), ("bucket", True)]),
)
def test_steps_come_back_on_another_mesh(
    place: str, background: bool, tmp_path: Path, request: pytest.FixtureRequest, mesh8: Mesh, mesh42: Mesh
) -> None:
    server: S3Server | None = request.getfixturevalue("s3") if place == "bucket" else None
    where, options = (str(tmp_path / "run"), {}) if server is None else ("s3://bucket/run/", server.options())
    stored = {"storage_options": options} if options else {}
    abstract = seeded(lambda: lm.build_abstract(net)).shard(mesh8, {".*first/kernel": P(None, "model"), ".*": P()})
    callback = lk.TrainingCheckpoint(where, metadata={"run": 7}, max_to_keep=2, save_on_background=background, **stored)
    model = fit(callback, model=abstract.materialize())
    if server is None:
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"1", "2"}
    else:
        store = pytest.importorskip("obstore").store.S3Store("bucket", **options)
        found = [entry["path"] for entry in store.list().collect()]
        assert sorted(found) == ["run/1/model.safetensors", "run/2/model.safetensors"]
        assert server.open_uploads() == []
    where = where.rstrip("/")
    fresh = lm.build_abstract(net).shard(mesh42, {".*first/kernel": P("batch", "model"), ".*": P()})
    restored = lk.restore(fresh, where, **stored)
    assert_same_state(state(model), restored)
    kernel = restored.layers[0].kernel.value
    assert kernel.sharding.mesh.shape == mesh42.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (4, 32)
    assert_same_state(state(model), lk.restore(seeded(net, 1), f"{where}/2", **stored))
    at = lk.training_state(where, **stored)
    assert at == lm.TrainingState(f"{where}/2", 2, {"run": 7}, None, 3, 0)
    assert lk.training_state(f"{where}/1", **stored).epoch == 2
    assert restored.optimizer.iterations == 6


@pytest.mark.parametrize("directory", mostly_large(["~/saved", Path("saved"), "./saved"], ["~/saved"]))
def test_any_folder_is_saved_to(directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    callback = lk.TrainingCheckpoint(directory)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the folder is resolved when the callback is made
    model = fit(callback, epochs=1)
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.chdir(tmp_path)
    assert lk.training_state(directory).step == 0
    loaded, restored = lk.load_model(directory), lk.restore(lm.build_abstract(net), directory)
    assert_same_state(state(model), restored)
    assert_same_values(model.variables, loaded.variables)

    def load() -> keras.Model:
        stock = net()
        stock.load_weights(str(tmp_path / "saved"))
        return stock

    assert_same_values(model.weights, in_block(load).weights)


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_epoch_data_and_metadata_are_saved_with_a_step(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    runs: Runs | None = None
    if place == "bucket":
        request.getfixturevalue("sharded")
        runs = request.getfixturevalue("runs")
    where, options = (tmp_path / "saved", None) if runs is None else (URL, runs.options)
    model, saves = seeded(net), list[int]()

    def metadata() -> dict[str, Any]:
        saves.append(1)
        return {"run": "a", "saves": len(saves)}

    # Keras takes batches from a stream before it trains on them; what is saved is what was trained on.
    callback = lk.TrainingCheckpoint(where, metadata=metadata, save_freq=1, max_to_keep=None, storage_options=options)
    data = callback.data(Numbers())
    model.fit(data, steps_per_epoch=2, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    states = [lk.training_state(f"{where}/{step}", storage_options=options) for step in range(1, 5)]
    assert [(s.epoch, s.batch) for s in states] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [s.data for s in states] == [bytes([count]) for count in range(1, 5)]
    assert [s.metadata for s in states] == [{"run": "a", "saves": count} for count in range(1, 5)]
    assert lk.training_state(where, storage_options=options) == states[-1]
    assert (states[-1].step, states[-1].path) == (4, f"{where}/4")
    assert_same_state(state(model), lk.restore(seeded(net, 1), where, storage_options=options))
    if runs is not None:
        assert [name for name in runs.objects() if name.endswith(INDEX)] == [f"run/{n}/{INDEX}" for n in range(1, 5)]


def test_the_best_only(runs: Runs) -> None:
    best = lk.TrainingCheckpoint(URL, storage_options=runs.options, monitor="loss", mode="max", save_best_only=True)
    fit(best)  # the loss falls, so the first epoch has the most
    assert runs.steps() == {"0"}


def test_variables_that_share_an_array_are_each_saved(runs: Runs) -> None:
    model = seeded(net)
    model.optimizer.build(model.trainable_variables)
    slot = next(v for v in model.optimizer.variables if v.path.endswith("first_kernel_momentum"))
    slot._value = model.layers[0].kernel.value
    callback = lk.TrainingCheckpoint(URL, storage_options=runs.options)
    callback.set_model(model)
    callback.on_epoch_end(0, {})
    assert_same_state(state(model), lk.restore(seeded(net, 1), URL, storage_options=runs.options))


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


@pytest.mark.parametrize(
    ("updates", "step", "epoch"),
    [(15, 4, 5), (4, 4, None), (0, 4, None), (0, 0, None)],
    ids=["epochs", "batches", "untrained", "untrained at first"],
)
def test_where_the_stock_callback_was(updates: int, step: int, epoch: int | None, tmp_path: Path) -> None:
    model, callback = net(), keras.callbacks.OrbaxCheckpoint(str(tmp_path / "orbax"))
    model.optimizer.iterations.assign(updates)
    callback.set_model(model)
    callback.on_epoch_end(step)
    callback.on_train_end()
    found = lk.training_state(tmp_path / "orbax")
    assert (found.step, found.epoch, found.batch, found.metadata, found.data) == (step, epoch, 0, {}, None)


# Failures -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full() -> Iterator[Callable[[], None]]:
    """What is yielded has no file become larger than 32 KiB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, hard))
    finally:  # also if the test fails: what comes after it writes files
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("background", "saved_before"), [(True, 0), (True, 1), (False, 1)])
def test_on_a_full_disk_a_save_raises_and_leaves_what_was_saved_before(
    background: bool, saved_before: int, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    checkpoint = lk.TrainingCheckpoint(folder, save_on_background=background)
    states: list[dict[str, np.ndarray]] = []
    model = seeded(lambda: net(2048))
    with contextlib.ExitStack() as stack:
        fill = stack.enter_context(full())

        def begin(epoch: int, logs: Any = None) -> None:
            if epoch == saved_before:
                checkpoint.wait_until_finished()
                states.append(state(model))
                fill()

        stack.enter_context(
            pytest.raises(lm.CheckpointError, match=rf"step {saved_before} was not saved to {folder}: ")
        )
        fit(keras.callbacks.LambdaCallback(on_epoch_begin=begin), checkpoint, model=model, epochs=2)
    if not saved_before:
        with pytest.raises(lm.CheckpointError):
            lk.training_state(folder)
        return
    assert lk.training_state(folder).epoch == 1
    assert_same_state(states[0], lk.restore(lm.build_abstract(net, 2048), folder))


@pytest.mark.parametrize("several", [False, True])
def test_a_failing_bucket_keeps_what_was_there(
    runs: Runs, several: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several:
        request.getfixturevalue("sharded")
    make_small(monkeypatch, least_upload_part=4 << 10, upload_part=4 << 10)
    before: dict[str, bytes] = {}
    expected: list[dict[str, np.ndarray]] = []

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:  # after the checkpoint of this epoch
                before.update(runs.objects())
                expected.append(state(self.model))
                runs.server.faults(["503"], every=2 + several, methods=["PUT"], path="/gcs/*")

    callback = lk.TrainingCheckpoint(URL, storage_options=runs.hasty, max_to_keep=1)
    with pytest.raises(lm.CheckpointError, match=f"step 1 was not saved to {URL}: cannot write {URL}/1/.*503"):
        fit(callback, Fail())
    runs.server.faults()
    assert before and runs.objects() == before
    assert runs.server.counters()["open_uploads"] == []
    assert_same_state(expected[0], lk.restore(seeded(net, 1), URL, storage_options=runs.options))
    assert lk.training_state(URL, storage_options=runs.options).epoch == 1


def test_a_step_without_its_index_is_passed_over(runs: Runs, sharded: None, tmp_path: Path, capsys: Any) -> None:
    expected: list[dict[str, np.ndarray]] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: expected.append(state(model)))
    model = seeded(net)
    fit(lk.TrainingCheckpoint(URL, storage_options=runs.options, max_to_keep=3), note, model=model)
    (runs.folder / "run" / "2" / INDEX).unlink()
    shutil.copytree(runs.folder / "run", tmp_path / "copy")  # a folder on a disk is read alike
    for where, options in ((URL, runs.options), (tmp_path / "copy", None)):
        assert_same_state(expected[1], lk.restore(seeded(net, 1), where, storage_options=options))
        assert lk.training_state(where, storage_options=options).step == 1
        with lm.open_checkpoint(where, options) as checkpoint:
            names = set(checkpoint)
        flat = {"base_url": runs.options["base_url"], "bearer_token": "a-token", "client_options.allow_http": "true"}
        given = [f"--storage-option={name}={value}" for name, value in flat.items()] if options else []
        assert main(["inspect", str(where), "--json", *given]) == 0, "and no problem is reported"
        found = json.loads(capsys.readouterr().out)
        assert found["path"] == f"{where}/1" and {tensor["name"] for tensor in found["tensors"]} == names
    with pytest.raises(lm.LazyModelError, match="steps, of which 1 is the newest"):
        lm.save({"a": np.ones(3)}, URL, storage_options=runs.options)

    again = lk.TrainingCheckpoint(URL, storage_options=runs.options, max_to_keep=2)
    fit(again, model=model, initial_epoch=3, epochs=4)
    assert runs.steps() == {"1", "3"}, "what was left of 2 is gone"


def test_an_old_step_that_stays_is_warned_about_and_removed_later(runs: Runs) -> None:
    callback = lk.TrainingCheckpoint(URL, storage_options=runs.hasty, max_to_keep=1)
    model = fit(callback, epochs=1)
    runs.server.faults(["503"], every=1, methods=["DELETE"], path="/gcs/*")
    with pytest.warns(lm.LazyModelWarning, match="step 1 is saved, but not all of older ones could be removed"):
        fit(callback, model=model, initial_epoch=1, epochs=2)
    runs.server.faults()
    assert runs.steps() == {"0", "1"}
    fit(callback, model=model, initial_epoch=2)
    assert runs.steps() == {"2"}


@pytest.mark.large  # steps on another mesh are above, files of killed processes in core/save and test_saving.py
def test_a_run_that_is_killed_goes_on_elsewhere(tmp_path: Path) -> None:
    """On another mesh, with the losses that it would have had."""
    epochs, killed_after = 4, 2 * worker.STEPS + 1
    arguments = [(tmp_path, killed_after)]
    codes = run_workers(Path(worker.__file__), arguments, tmp_path, patience=250)
    assert codes == [-signal.SIGKILL], printed(tmp_path, 1)

    keras.utils.clear_session()
    expected = worker.train(worker.abstract((1, 8)).materialize(), tmp_path / "whole", epochs)

    at = lk.training_state(tmp_path / "killed")
    assert at is not None and at.epoch is not None and 0 < at.epoch <= killed_after // worker.STEPS
    assert at.data == {"position": at.epoch * worker.STEPS}
    model = lk.restore(worker.abstract((2, 4)), tmp_path / "killed")
    assert int(model.optimizer.iterations.value) == at.epoch * worker.STEPS
    assert {len(v.value.sharding.device_set) for v in [*model.variables, *model.optimizer.variables]} == {8}
    found = worker.train(model, tmp_path / "killed", epochs, state=at)
    assert list(found) == list(range(at.epoch, epochs))
    np.testing.assert_allclose(list(found.values()), [expected[epoch] for epoch in found], rtol=1e-4)
    assert expected[epochs - 1] < expected[0], "it learns something"


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("https://host/run", {}, "cannot save to https://host/run.*s3://, gs:// or az://"),
        ("s3://bucket/run?X-Amz-Signature=SECRET", {}, "s3://bucket/run: expected a URL without"),
        ("folder", {"storage_options": {"region": "eu"}}, "storage_options are for URLs"),
    ],
)
def test_places_that_are_refused_at_once(
    where: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lm.LazyModelError, match=message) as raised:
        lk.TrainingCheckpoint(where, **options)
    assert "SECRET" not in str(raised.value)


def test_without_obstore_a_url_that_orbax_cannot_save_to_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(lm.LazyModelError, match=r"s3://bucket/run: .*pip install 'lazymodel\[remote\]'") as raised:
        lk.TrainingCheckpoint("s3://bucket/run?X-Amz-Signature=SECRET")
    assert "SECRET" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_without_obstore_orbax_saves_to_buckets_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = keras.callbacks.OrbaxCheckpoint.__init__

    def on_a_disk(self: Any, directory: str, **options: Any) -> None:
        stock(self, str(tmp_path / directory.removeprefix("gs://")), **options)

    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(keras.callbacks.OrbaxCheckpoint, "__init__", on_a_disk)
    model = fit(lk.TrainingCheckpoint("gs://bucket/run", metadata={"run": 7}), epochs=1)
    assert lk.training_state(tmp_path / "bucket" / "run").metadata == {"run": 7}
    assert_same_state(state(model), lk.restore(seeded(net, 1), tmp_path / "bucket" / "run"))


def test_a_step_of_orbax_would_hide_one_in_a_bucket(runs: Runs) -> None:
    fit(lk.TrainingCheckpoint(runs.folder / "run"), epochs=1)
    saved = runs.objects()
    with pytest.raises(lm.CheckpointError, match="step 0 was not saved.*/0/pytree, which would hide the step"):
        fit(lk.TrainingCheckpoint(URL, storage_options=runs.options), epochs=1)
    assert runs.objects() == saved


def test_what_cannot_be_saved_with_a_step(tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match=r"expected an iterator with get_state\(\)"):
        lk.TrainingCheckpoint(tmp_path / "a").data(iter([]))
    callback = lk.TrainingCheckpoint(tmp_path / "b", metadata={"x": object()})
    callback.set_model(net())
    with pytest.raises(lm.LazyModelError, match="types that JSON has"):
        callback.on_epoch_end(0)


def test_what_was_saved_with_a_step_may_be_damaged(runs: Runs, tmp_path: Path) -> None:
    save = functools.partial(lm.save, {"a": np.ones(3)}, storage_options=runs.options)
    save(f"{URL}/4", metadata={"lazymodel": json.dumps({"metadata": {"epoch": "many", "batch": 0, "metadata": {}}})})
    with pytest.raises(
        lm.CheckpointError, match=f"{URL}/4: expected metadata of a step under 'lazymodel', found ValueError"
    ):
        lk.training_state(URL, storage_options=runs.options)
    save(f"{URL}/5")
    with pytest.raises(lm.CheckpointError, match=f"{URL}: expected a step that a callback for training saved"):
        lk.training_state(URL, storage_options=runs.options)
    lm.save({"a": np.ones(3)}, tmp_path / "c.safetensors")
    with pytest.raises(lm.CheckpointError, match="expected a step that a callback for training saved, found"):
        lk.training_state(tmp_path / "c.safetensors")

"""KerasHub presets and Hugging Face folders by URL, against stock `from_preset` of the same folder on a disk."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import keras_hub
import numpy as np
import obstore
import pytest
from huggingface_hub import snapshot_download
from jax.sharding import Mesh
from obstore.store import S3Store

import lazymodel as lm
import lazymodel_keras as lk
from tests.large import mostly_large
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server

from .models import (
    BACKBONES,
    Words,
    assert_same,
    assert_same_values,
    causal_lm,
    first_that_divides,
    in_block,
    randomize,
    refused,
    save_hugging_face,
    save_preset,
    seeded,
)

_WEIGHTS = (".h5", ".safetensors")


class Remote:
    """A bucket: the folder that is served as one, and the one that takes all temporary files and caches."""

    def __init__(self, server: ObjectServer, written: Path) -> None:
        self.server, self.written, self.folder = server, written, server.root / "bucket"

    def at(self, name: str, kind: str = "gs") -> tuple[str, dict[str, Any] | None]:
        """The URL of something in the bucket, and the options that it takes."""
        if kind == "http":
            return self.server.url(f"bucket/{name}"), None
        return f"{kind}://bucket/{name}", self.server.gcs() if kind == "gs" else self.server.azure()

    def sent(self, folder: Path, suffixes: tuple[str, ...] = _WEIGHTS) -> tuple[int, int]:
        """Bytes that the server sent of a folder's weight files, and bytes that they have."""
        sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.name.endswith(suffixes)}
        sent = self.server.counters()["path_bytes"].items()
        return sum(count for path, count in sent if Path(path).name in sizes), sum(sizes.values())


@pytest.fixture
def remote(object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """A bucket, empty at first; in the end no weights are in any other file on this machine."""
    remote = Remote(object_server, tmp_path / "written")
    remote.folder.mkdir()
    remote.written.mkdir()
    save_preset(tmp_path / "before", "gemma")  # the process's own folder of presets, elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(remote.written))
    monkeypatch.setenv("HF_HOME", str(remote.written / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(remote.written / "hub" / "hub"))
    yield remote
    shutil.rmtree(remote.folder)
    written = [path for path in remote.written.rglob("*") if path.name.endswith(_WEIGHTS)]
    assert not [path for path in written if path.stat().st_size]


@pytest.mark.parametrize(
    ("kind", "name", "save"),
    [("gs", "gemma", {}), ("az", "gemma", {"max_shard_size": 2e-5}), ("http", "gemma", {})],
)
def test_preset(kind: str, name: str, save: Any, remote: Remote, mesh8: Mesh) -> None:
    folder = save_preset(remote.folder / name, name, **save)
    assert len(list(folder.glob("*.weights.h5"))) > (2 if save else 0)
    cls, _ = BACKBONES[name]
    stock = seeded(lambda: cls.from_preset(str(folder)))
    url, options = remote.at(name, kind)
    reports: list[lm.LoadReport] = []
    given: dict[str, Any] = {"rules": first_that_divides, "storage_options": options, "report": reports.append}
    ours = seeded(lambda: lk.from_preset(cls, url, mesh=mesh8, **given))
    assert_same(stock, ours, outputs=kind == "http")
    assert all(file.startswith(url) for file in reports[0].files), "reports name the URL"
    gc.collect()
    assert list(remote.written.iterdir()) == [], "what was fetched goes with what it was needed for"


def test_weights_are_fetched_once(remote: Remote) -> None:
    cls, config = BACKBONES["gemma"]
    folder = remote.folder / "large"
    cls(**{**config, "vocabulary_size": 1 << 16}).save_to_preset(str(folder))
    url, options = remote.at("large")
    with lk.deferred(storage_options=options):
        model = cls.from_preset(url)
    sent, size = remote.sent(folder)
    assert size > 8 << 20
    assert size < sent < size + (1 << 20), "headers besides"
    del model


@pytest.mark.parametrize("shards", mostly_large([1, 3], [3]))
def test_hugging_face_folder(shards: int, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hugging_face(remote.folder / "llama3", "llama3", shards=shards)
    monkeypatch.setenv("HF_ENDPOINT", remote.server.hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    remote.server.repository("bucket/llama3", token="hf_secret")
    cls, _ = BACKBONES["llama3"]
    stock = seeded(lambda: cls.from_preset(str(folder), layer_norm_epsilon=1e-5))  # which it would ignore
    abstract = seeded(lambda: lk.abstract_from_preset(cls, "hf://bucket/llama3"))
    assert abstract.unused == ()
    assert_same(stock, abstract.materialize())
    counters = remote.server.counters()
    assert counters["authorization"]
    assert not counters["cdn_authorization"]


@pytest.mark.filterwarnings("ignore:unclosed file .*vocabulary.spm:ResourceWarning")  # KerasHub leaves it open
def test_a_task_with_its_tokenizer(remote: Remote) -> None:
    folder = shutil.copytree(causal_lm(), remote.folder / "gemma_lm")
    url, options = remote.at("gemma_lm")
    with lk.deferred(storage_options=options):
        ours = seeded(lambda: keras_hub.models.CausalLM.from_preset(url))
        tokenizer = keras_hub.models.Tokenizer.from_preset(url)
    stock = seeded(lambda: keras_hub.models.CausalLM.from_preset(str(folder)))
    assert_same(stock, ours, outputs=False)
    text = "the quick brown fox"
    expected = np.asarray(stock.preprocessor.tokenizer(text))
    np.testing.assert_array_equal(np.asarray(ours.preprocessor.tokenizer(text)), expected)
    np.testing.assert_array_equal(np.asarray(tokenizer(text)), expected)


def make_model() -> Any:
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64), keras.layers.Dense(8)], name="small")
    model.compile("adam", "mse")
    return model


DATA = np.ones((4, 16), "float32"), np.ones((4, 8), "float32")


@pytest.fixture(scope="module")
def trained() -> Any:
    model = randomize(seeded(make_model))
    model.fit(*DATA, verbose=0)
    return model


def test_an_orbax_checkpoint_on_s3(s3: S3Server, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", s3.options()[name])
    trained.fit(*DATA, verbose=0, callbacks=[lk.TrainingCheckpoint(str(tmp_path / "saved"))])
    store, url = S3Store("bucket", **s3.options()), "s3://bucket/saved"
    for path in (path for path in (tmp_path / "saved").rglob("*") if path.is_file()):
        obstore.put(store, path.relative_to(tmp_path).as_posix(), path)
    options = {name: value for name, value in s3.options().items() if "key" not in name}
    state = lk.training_state(url, storage_options=options)
    assert state == lm.TrainingState(f"{url}/0", 0, {}, None, 1, 0)
    assert_same(trained, lk.restore(seeded(make_model), url, storage_options=options), outputs=False)
    assert_same(trained, lk.load_model(url, storage_options=options), outputs=False)


# Last the legacy one: saving it takes the optimizer out of what Keras saves afterwards.
@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "model.weights.json", "folder", "model.h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_saved_models_and_weights(name: str, trained: Any, remote: Remote) -> None:
    path, given = remote.folder / name, {"storage_options": remote.at(name)[1]}
    url, whole = remote.at(name)[0], ".weights." not in name
    options = {"model.weights.json": {"max_shard_size": 5e-6}, "folder": {"zipped": False}}.get(name, {})
    (trained.save if whole else trained.save_weights)(path, **options)
    if name not in ("model.h5", "folder"):
        model = lk.restore(seeded(make_model), url, **given)
        assert_same_values(trained.optimizer.variables, model.optimizer.variables)
        assert_same(trained, model)
        abstract = seeded(lambda: lm.build_abstract(make_model))
        assert_same(trained, lk.restore(abstract, url, **given), outputs=False)

        def load() -> Any:
            loaded = seeded(make_model)
            loaded.optimizer.build(loaded.trainable_variables)  # as Keras wants it
            loaded.load_weights(url)
            return loaded

        assert_same(trained, in_block(load, **given), outputs=False)
    if whole:
        compiled = name != "model.h5"
        assert_same(trained, lk.load_model(url, compile=compiled, **given))
        loaded = in_block(lambda: keras.saving.load_model(url, compile=compiled), **given)
        assert_same(trained, loaded, outputs=False)


def test_an_archive_with_assets(remote: Remote) -> None:
    """Keras would extract the weights along with the assets."""
    model = randomize(keras.Sequential([keras.Input((512,)), keras.layers.Dense(2048), Words()]))
    model.save(remote.folder / "model.keras")
    url, options = remote.at("model.keras")
    extracted: list[str] = []
    original = shutil.rmtree

    def watch(path: Any, *arguments: Any, **options: Any) -> None:
        extracted.extend(str(file) for file in Path(path).rglob("*"))
        original(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", watch)
        ours = lk.load_model(url, storage_options=options)
    assert any(name.endswith("words.txt") for name in extracted)
    assert not [name for name in extracted if name.endswith(_WEIGHTS)]
    assert ours.layers[-1].words == "d e f"
    assert_same(model, ours)
    sent, size = remote.sent(remote.folder, (".keras",))
    assert size > 4 << 20
    assert sent < size + (1 << 20)


def test_what_is_not_there(remote: Remote) -> None:
    folder = save_preset(remote.folder / "gemma", "gemma")
    url, options = remote.at("gemma")
    cls, _ = BACKBONES["gemma"]
    given: Any = {"storage_options": options}
    for missing in ("model.weights.h5", "config.json"):
        (folder / missing).unlink()
        message = refused(lk.from_preset, cls, url, **given)
        assert url in message and missing.replace("weights.h5", "weights.json") in message
    for load, name in ((partial(lk.restore, seeded(make_model)), "weights.h5"), (lk.load_model, "keras")):
        assert f"gs://bucket/absent.{name}" in refused(load, f"gs://bucket/absent.{name}", **given)
    assert "storage_options are for URLs" in refused(lk.from_preset, cls, str(folder), **given)
    folder = save_hugging_face(remote.folder / "llama3", "llama3", shards=3)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    message = refused(lk.abstract_from_preset, BACKBONES["llama3"][0], remote.server.url("bucket/llama3"))
    assert "bucket/llama3" in message and "model-00002-of-00003.safetensors" in message


def test_no_message_has_a_secret(remote: Remote) -> None:
    (remote.folder / "empty").mkdir()
    (remote.folder / "strange").mkdir()
    (remote.folder / "strange" / "config.json").write_text('{"model_type": "unheard-of"}')
    cls, _ = BACKBONES["gemma"]
    for name in ("empty", "strange"):
        url = f"{remote.server.url(f'bucket/{name}')}?signature=SECRET"
        assert "SECRET" not in refused(lk.from_preset, cls, url)
        with pytest.raises((lm.CheckpointError, ValueError)) as stock, lk.deferred():
            cls.from_preset(url)
        assert "SECRET" not in str(stock.value)
        assert name == "strange" or "bucket/empty" in str(stock.value)


def test_small_files_have_a_limit(remote: Remote, small_files_limit: int) -> None:
    save_preset(remote.folder / "gemma", "gemma")
    url, options = remote.at("gemma")
    message = refused(lk.from_preset, BACKBONES["gemma"][0], url, storage_options=options)
    assert "gemma/config.json" in message and f"{small_files_limit} B" in message


def test_a_complete_snapshot_in_the_cache_is_used(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, as_one_of_several: Callable[[], None]
) -> None:
    folder = save_hugging_face(remote.folder / "llama3", "llama3", shards=3)
    monkeypatch.setenv("HF_ENDPOINT", remote.server.hub)
    url, cls, cache = "hf://bucket/llama3", BACKBONES["llama3"][0], str(remote.written / "hub" / "hub")
    stock = seeded(lambda: cls.from_preset(str(folder)))

    def download(*patterns: str) -> None:
        snapshot_download("bucket/llama3", endpoint=remote.server.hub, cache_dir=cache, allow_patterns=[*patterns])

    def sent_while_loading() -> int:
        """Bytes of weights; the model is what stock makes of the folder."""
        remote.server.reset_counters()
        assert_same(stock, seeded(lambda: lk.from_preset(cls, url)), outputs=False)
        return remote.sent(folder)[0]

    download("*.json", "model-00001*", "model-00002*")
    assert sent_while_loading(), "a shard is missing, so all are read from the hub"
    with pytest.MonkeyPatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(lm.CheckpointError, match=r"hf://bucket/llama3: HF_HUB_OFFLINE is set, and the local cache"):
            lk.from_preset(cls, url)
        offline.undo()
        download("*.safetensors")
        offline.setenv("HF_HUB_OFFLINE", "1")
        sent_while_loading()
        assert remote.server.counters()["requests"] == 0
    assert sent_while_loading() == 0
    with lm.open_checkpoint(url) as checkpoint:
        assert all(file.startswith(cache) for file in checkpoint.files)
    with pytest.MonkeyPatch.context() as unreachable:
        unreachable.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
        sent_while_loading()
    as_one_of_several()  # which must all read from the same place
    assert sent_while_loading()
    shutil.rmtree(cache)


@pytest.mark.usefixtures("no_obstore")
def test_without_obstore_kerashub_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    download = mock.Mock(side_effect=FileNotFoundError)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert "hf://bucket/llama3" in refused(lk.from_preset, BACKBONES["llama3"][0], "hf://bucket/llama3")
    assert {(call.kwargs["repo_id"], call.kwargs["filename"]) for call in download.call_args_list} == {
        ("bucket/llama3", "config.json")
    }


def sparse_llama(folder: Path) -> int:
    """A Hugging Face folder in three shards with an embedding and a head of 10 GB each, of which nothing is written."""
    save_hugging_face(folder, "llama3", shards=3)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 80_000_000}
    (folder / "config.json").write_text(json.dumps(config))
    total = 0
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        end = 0
        for name, entry in header.items():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                entry["shape"][0] = config["vocab_size"]
            begin, end = end, end + 4 * int(np.prod(entry["shape"]))
            entry["data_offsets"] = [begin, end]
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + end)
        total += end
    return total


def test_plan_and_inspect_fetch_headers(remote: Remote, command: Callable[..., Any]) -> None:
    total = sparse_llama(remote.folder / "llama3")
    assert total > 20e9
    url, options = remote.at("llama3")
    assert options is not None
    given = {"base_url": options["base_url"], "bearer_token": "a-token", "client_options.allow_http": "true"}
    flags = [f"--storage-option={name}={value}" for name, value in given.items()]
    plan = json.loads(command("plan", url, "--mesh", "model=8", "--json", *flags).out)
    assert {row["action"] for row in plan["variables"]} == {"load"}
    assert plan["read_nbytes"] == total
    configuration = command("plan", remote.server.url("bucket/llama3/config.json"), "--json")
    assert json.loads(configuration.out)["read_nbytes"] == 0
    assert json.loads(command("inspect", url, "--json", *flags).out)["nbytes"] == total
    absent = command("plan", "gs://bucket/absent", *flags)
    assert absent.status == 2 and "a-token" not in absent.err
    assert remote.server.counters()["bytes"] < 2e6

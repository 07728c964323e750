"""KerasHub presets and Hugging Face folders by URL, against stock `from_preset` of the same folder on a disk."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from lazymodel._cli.main import main
from lazymodel._remote.path import remote_path
from lazymodel.checkpoints._open import cached_copy
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server

from .models import BACKBONES, assert_same, randomize, save_hugging_face, save_preset, seeded
from .test_hub import causal_lm, first_that_divides

_WEIGHTS = (".h5", ".safetensors")


@pytest.fixture
def bucket(object_server: ObjectServer) -> Iterator[Path]:
    """The folder that the server serves as a bucket, empty before and after."""
    folder = object_server.root / "bucket"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder into which everything goes that is written to a temporary folder or a cache."""
    folder = tmp_path / "written"
    save_preset(tmp_path / "before", "gemma")  # the process's own folder of presets, elsewhere
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub" / "hub"))
    return folder


def weights_below(folder: Path) -> list[Path]:
    """Weight files with anything in them."""
    return [path for path in folder.rglob("*") if path.name.endswith(_WEIGHTS) and path.stat().st_size]


def sent_of(server: ObjectServer, folder: Path, suffixes: tuple[str, ...] = _WEIGHTS) -> tuple[int, int]:
    """Bytes that the server sent of a folder's weight files, and bytes that they have."""
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.name.endswith(suffixes)}
    sent = sum(count for path, count in server.counters()["path_bytes"].items() if Path(path).name in sizes)
    return sent, sum(sizes.values())


def url_of(server: ObjectServer, kind: str, name: str) -> tuple[str, dict[str, Any] | None]:
    """The URL of a folder in the bucket, and the options that it takes."""
    if kind == "gs":
        return f"gs://bucket/{name}", server.gcs()
    if kind == "az":
        return f"az://bucket/{name}", server.azure()
    return server.url(f"bucket/{name}"), None


@pytest.mark.parametrize(
    ("kind", "name", "save"),
    [("gs", "gemma", {}), ("az", "gemma", {"max_shard_size": 2e-5}), ("http", "bert", {})],
)
def test_preset(
    kind: str, name: str, save: Any, bucket: Path, object_server: ObjectServer, written: Path, mesh8: Mesh
) -> None:
    folder = save_preset(bucket / name, name, **save)
    assert len(list(folder.glob("*.weights.h5"))) > (2 if save else 0)
    cls, _ = BACKBONES[name]
    stock = seeded(lambda: cls.from_preset(str(folder)))
    url, options = url_of(object_server, kind, name)
    reports: list[lm.LoadReport] = []
    ours = seeded(
        lambda: lk.from_preset(
            cls, url, mesh=mesh8, rules=first_that_divides, storage_options=options, report=reports.append
        )
    )
    assert_same(stock, ours)
    assert weights_below(written) == []
    assert all(file.startswith(url) for file in reports[0].files), "reports name the URL"
    gc.collect()
    assert list(written.iterdir()) == [], "what was fetched goes with what it was needed for"


def test_weights_are_fetched_once(bucket: Path, object_server: ObjectServer, written: Path) -> None:
    cls, config = BACKBONES["gemma"]
    folder = bucket / "large"
    cls(**{**config, "vocabulary_size": 1 << 16}).save_to_preset(str(folder))
    url, options = url_of(object_server, "gs", "large")
    with lk.deferred(storage_options=options):
        model = cls.from_preset(url)
    sent, size = sent_of(object_server, folder)
    assert size > 8 << 20
    assert size < sent < size + (1 << 20), "headers besides"
    assert weights_below(written) == []
    del model


@pytest.mark.parametrize("shards", [1, 3])
def test_hugging_face_folder(
    shards: int, bucket: Path, object_server: ObjectServer, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_hugging_face(bucket / "llama3", "llama3", shards=shards)
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    object_server.repository("bucket/llama3", token="hf_secret")
    cls, _ = BACKBONES["llama3"]
    stock = seeded(lambda: cls.from_preset(str(folder)))
    abstract = seeded(lambda: lk.abstract_from_preset(cls, "hf://bucket/llama3"))
    assert abstract.unused == ()
    assert_same(stock, abstract.materialize())
    assert weights_below(written) == []
    counters = object_server.counters()
    assert counters["authorization"]
    assert not counters["cdn_authorization"]


def test_preset_on_s3(s3: S3Server, written: Path, tmp_path: Path) -> None:
    folder = save_preset(tmp_path / "bert", "bert")
    store = S3Store("bucket", **s3.options())
    for path in folder.rglob("*.*"):
        obstore.put(store, f"bert/{path.relative_to(folder).as_posix()}", path)
    cls, _ = BACKBONES["bert"]
    stock = seeded(lambda: cls.from_preset(str(folder)))
    with lk.deferred(storage_options=s3.options()):
        ours = seeded(lambda: cls.from_preset("s3://bucket/bert"))
    assert_same(stock, ours, outputs=False)
    assert weights_below(written) == []


def test_an_orbax_checkpoint_on_s3(s3: S3Server, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", s3.options()[name])
    callback = lk.TrainingCheckpoint(str(tmp_path / "saved"))
    trained.fit(np.ones((4, 16), "float32"), np.ones((4, 8), "float32"), verbose=0, callbacks=[callback])
    store = S3Store("bucket", **s3.options())
    for path in (tmp_path / "saved").rglob("*"):
        if path.is_file():
            obstore.put(store, f"saved/{path.relative_to(tmp_path / 'saved').as_posix()}", path)
    options = {name: value for name, value in s3.options().items() if "key" not in name}
    told = lk.training_state("s3://bucket/saved", storage_options=options)
    assert told == lk.TrainingState("s3://bucket/saved/0", 0, {}, None, 1, 0)
    model = lk.restore(seeded(make_model), "s3://bucket/saved", storage_options=options)
    assert_same(trained, model)
    assert_same(trained, lk.load_model("s3://bucket/saved", storage_options=options), outputs=False)


@pytest.mark.filterwarnings("ignore:unclosed file .*vocabulary.spm:ResourceWarning")  # KerasHub leaves it open
def test_a_task_with_its_tokenizer(bucket: Path, object_server: ObjectServer, written: Path) -> None:
    folder = causal_lm(bucket / "gemma_lm")
    url, options = url_of(object_server, "gs", "gemma_lm")
    with lk.deferred(storage_options=options):
        ours = seeded(lambda: keras_hub.models.CausalLM.from_preset(url))
        tokenizer = keras_hub.models.Tokenizer.from_preset(url)
    stock = seeded(lambda: keras_hub.models.CausalLM.from_preset(folder))
    assert_same(stock, ours, outputs=False)
    text = "the quick brown fox"
    expected = np.asarray(stock.preprocessor.tokenizer(text))
    np.testing.assert_array_equal(np.asarray(ours.preprocessor.tokenizer(text)), expected)
    np.testing.assert_array_equal(np.asarray(tokenizer(text)), expected)
    assert weights_below(written) == []


def make_model() -> Any:
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64), keras.layers.Dense(8)], name="small")
    model.compile("adam", "mse")
    return model


@pytest.fixture
def trained() -> Any:
    model = randomize(seeded(make_model))
    model.fit(np.ones((4, 16), "float32"), np.ones((4, 8), "float32"), verbose=0)
    return model


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "model.weights.json"])
def test_restore(name: str, trained: Any, bucket: Path, object_server: ObjectServer, written: Path) -> None:
    save = trained.save if name.endswith(".keras") else trained.save_weights
    save(bucket / name, **({"max_shard_size": 5e-6} if name.endswith(".json") else {}))
    url, options = url_of(object_server, "gs", name)
    model = lk.restore(seeded(make_model), url, storage_options=options)
    assert_same(trained, model)
    for expected, found in zip(trained.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(expected), np.asarray(found), err_msg=expected.path)
    abstract = seeded(lambda: lm.build_abstract(make_model))
    assert_same(trained, lk.restore(abstract, url, storage_options=options))
    with lk.deferred(storage_options=options):
        loaded = seeded(make_model)
        loaded.optimizer.build(loaded.trainable_variables)  # as Keras wants it
        loaded.load_weights(url)
    assert_same(trained, loaded)
    assert weights_below(written) == []


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "folder"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_load_model(name: str, trained: Any, bucket: Path, object_server: ObjectServer, written: Path) -> None:
    trained.save(bucket / name, **({"zipped": False} if name == "folder" else {}))
    url, options = url_of(object_server, "gs", name)
    compiled = name != "model.h5"
    assert_same(trained, lk.load_model(url, compile=compiled, storage_options=options))
    with lk.deferred(storage_options=options):
        model = keras.saving.load_model(url, compile=compiled)
    assert_same(trained, model)
    assert weights_below(written) == []


class Vocabulary(keras.layers.Layer):
    """A layer with a file of its own."""

    text = ""

    def call(self, x: Any) -> Any:
        return x

    def save_assets(self, dir_path: str) -> None:
        Path(dir_path, "words.txt").write_text(self.text)

    def load_assets(self, dir_path: str) -> None:
        self.text = Path(dir_path, "words.txt").read_text()


def test_an_archive_with_assets(bucket: Path, object_server: ObjectServer, written: Path) -> None:
    """Keras would extract the weights along with the assets."""
    layer = Vocabulary()
    layer.text = "a b c"
    model = randomize(keras.Sequential([keras.Input((512,)), keras.layers.Dense(2048), layer]))
    model.save(bucket / "model.keras")
    url, options = url_of(object_server, "gs", "model.keras")
    extracted: list[str] = []
    original = shutil.rmtree

    def watch(path: Any, *arguments: Any, **options: Any) -> None:
        extracted.extend(str(file) for file in Path(path).rglob("*"))
        original(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", watch)
        ours = lk.load_model(url, {"Vocabulary": Vocabulary}, storage_options=options)
    assert any(name.endswith("words.txt") for name in extracted)
    assert not [name for name in extracted if name.endswith(_WEIGHTS)]
    assert ours.layers[-1].text == "a b c"
    assert_same(model, ours)
    sent, size = sent_of(object_server, bucket, (".keras",))
    assert size > 4 << 20
    assert sent < size + (1 << 20)


def test_what_is_not_there(bucket: Path, object_server: ObjectServer) -> None:
    folder = save_preset(bucket / "gemma", "gemma")
    url, options = url_of(object_server, "gs", "gemma")
    cls, _ = BACKBONES["gemma"]
    (folder / "model.weights.h5").rename(bucket / "elsewhere.h5")
    with pytest.raises(lm.CheckpointError, match=rf"there is no model\.weights\.json at {url}"):
        lk.from_preset(cls, url, storage_options=options)
    (folder / "config.json").unlink()
    with pytest.raises(lm.CheckpointError, match=rf"from_preset\('{url}'\).* no config\.json"):
        lk.from_preset(cls, url, storage_options=options)
    with pytest.raises(lm.CheckpointError, match="no checkpoint at gs://bucket/absent"):
        lk.restore(seeded(make_model), "gs://bucket/absent.weights.h5", storage_options=options)
    with pytest.raises(lm.CheckpointError, match="no checkpoint at gs://bucket/absent"):
        lk.load_model("gs://bucket/absent.keras", storage_options=options)
    with pytest.raises(lm.CheckpointError, match="storage_options are for URLs"):
        lk.from_preset(cls, str(folder), storage_options=options)


def test_a_shard_that_is_not_there(bucket: Path, object_server: ObjectServer) -> None:
    folder = save_hugging_face(bucket / "llama3", "llama3", shards=3)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(lm.CheckpointError, match=r"http://.*/bucket/llama3.*model-00002-of-00003\.safetensors"):
        lk.abstract_from_preset(BACKBONES["llama3"][0], object_server.url("bucket/llama3"))


def test_no_message_has_a_secret(bucket: Path, object_server: ObjectServer) -> None:
    (bucket / "empty").mkdir()
    (bucket / "strange").mkdir()
    (bucket / "strange" / "config.json").write_text('{"model_type": "unheard-of"}')
    cls, _ = BACKBONES["gemma"]
    for name in ("empty", "strange"):
        url = f"{object_server.url(f'bucket/{name}')}?signature=SECRET"
        with pytest.raises(lm.CheckpointError) as caught:
            lk.from_preset(cls, url)
        assert "SECRET" not in str(caught.value)
        with pytest.raises((lm.CheckpointError, ValueError)) as stock, lk.deferred():
            cls.from_preset(url)
        assert "SECRET" not in str(stock.value)
        assert name == "strange" or "bucket/empty" in str(stock.value)


def test_small_files_have_a_limit(bucket: Path, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    save_preset(bucket / "gemma", "gemma")
    monkeypatch.setattr("lazymodel_keras._record.remote._MOST", 100)
    url, options = url_of(object_server, "gs", "gemma")
    with pytest.raises(lm.CheckpointError, match=r"gemma/config\.json: expected at most 100 B"):
        lk.from_preset(BACKBONES["gemma"][0], url, storage_options=options)


def test_a_complete_snapshot_in_the_cache_is_used(
    bucket: Path, object_server: ObjectServer, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_hugging_face(bucket / "llama3", "llama3", shards=3)
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    url, cls = "hf://bucket/llama3", BACKBONES["llama3"][0]
    stock = seeded(lambda: cls.from_preset(str(folder)))
    cache = str(written / "hub" / "hub")

    def download(*patterns: str) -> None:
        snapshot_download("bucket/llama3", endpoint=object_server.hub, cache_dir=cache, allow_patterns=[*patterns])
        object_server.reset_counters()

    download("*.json", "model-00001*", "model-00002*")
    assert_same(stock, seeded(lambda: lk.from_preset(cls, url)), outputs=False)
    assert sent_of(object_server, folder)[0], "a shard is lacking, so all are read from the hub"
    offline = pytest.MonkeyPatch()
    offline.setenv("HF_HUB_OFFLINE", "1")
    with offline.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(lm.CheckpointError, match=r"hf://bucket/llama3: HF_HUB_OFFLINE is set, and the local cache"):
            lk.from_preset(cls, url)

    download("*.safetensors")
    assert_same(stock, seeded(lambda: lk.from_preset(cls, url)), outputs=False)
    assert sent_of(object_server, folder)[0] == 0
    with lm.open_checkpoint(url) as checkpoint:
        assert all(file.startswith(cache) for file in checkpoint.files)
    with pytest.MonkeyPatch.context() as several:  # processes, which must all read from the same place
        several.delenv("HF_HUB_OFFLINE", raising=False)
        several.setattr("lazymodel.checkpoints._open.run_store", lambda: "a store")
        assert cached_copy(remote_path(url)) is None
    offline.undo()
    object_server.reset_counters()
    with offline.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert_same(stock, seeded(lambda: lk.from_preset(cls, url)), outputs=False)
    assert object_server.counters()["requests"] == 0
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    assert_same(stock, seeded(lambda: lk.from_preset(cls, url)), outputs=False)


def test_without_obstore_kerashub_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repo_id: str, filename: str) -> str:
        asked.append(f"{repo_id}/{filename}")
        raise FileNotFoundError(filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("lazymodel_keras._record.remote.has_obstore", lambda: False)
    with pytest.raises(lm.CheckpointError, match=r"hf://bucket/llama3 has no config\.json"):
        lk.from_preset(BACKBONES["llama3"][0], "hf://bucket/llama3")
    assert set(asked) == {"bucket/llama3/config.json"}


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


def test_plan_and_inspect_fetch_headers(
    bucket: Path, object_server: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    total = sparse_llama(bucket / "llama3")
    assert total > 20e9
    options = object_server.gcs()
    asked = ["--storage-option", f"base_url={options['base_url']}", "--storage-option", "bearer_token=a-token"]
    asked += ["--storage-option", "client_options.allow_http=true"]
    assert main(["plan", "gs://bucket/llama3", "--mesh", "model=8", "--json", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["action"] for row in found["variables"]} == {"load"}
    assert found["read_nbytes"] == total
    assert main(["plan", object_server.url("bucket/llama3/config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["read_nbytes"] == 0
    assert main(["inspect", "gs://bucket/llama3", "--json", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["nbytes"] == total
    assert main(["plan", "gs://bucket/absent", *asked]) == 2
    assert "a-token" not in capsys.readouterr().err
    assert object_server.counters()["bytes"] < 2e6

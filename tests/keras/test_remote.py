"""KerasHub presets and Hugging Face folders by URL, against stock `from_preset` of the same folder on a disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import Mesh

import lazymodel_keras as lk
from tests.servers.object_server import ObjectServer

from .models import BACKBONES, assert_same, save_preset, seeded
from .test_hub import first_that_divides

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

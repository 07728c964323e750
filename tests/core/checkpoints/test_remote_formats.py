"""Every format by URL, over every kind of store: the same values as from a file, and no more bytes than they take."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from tests.gguf_files import gguf_file, random_tensor, split_files
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server

obstore = pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

RNG = np.random.default_rng(0)
WEIGHTS = {
    "a/vars/0": RNG.standard_normal((256, 300)).astype(np.float32),
    "a/vars/1": RNG.standard_normal(300).astype(np.float16),
    "b/vars/0": RNG.integers(-99, 99, (64, 8, 128), np.int32),
    "b/vars/1": np.zeros((0, 3), np.float32),
}
HALF = {name: WEIGHTS[name] for name in list(WEIGHTS)[:2]}, {name: WEIGHTS[name] for name in list(WEIGHTS)[2:]}


def hdf5(values: dict[str, np.ndarray], **options: Any) -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        for name, value in values.items():
            file.create_dataset(name, data=value, **(options if value.size > 999 else {}))
    return stream.getvalue()


def write(folder: Path) -> None:
    """A folder a format."""
    for name in (
        "one",
        "index",
        "numbered",
        "h5",
        "chunked",
        "sharded",
        "keras",
        "npz",
        "packed",
        "npy",
        "gguf",
        "split",
        "odd names é",
    ):
        (folder / name).mkdir()
    save_file(WEIGHTS, folder / "one" / "model.safetensors")
    save_file(WEIGHTS, folder / "odd names é" / "w #1%20+ü.safetensors")
    for kind in ("index", "numbered"):
        for number, half in enumerate(HALF, 1):
            save_file(half, folder / kind / f"model-{number:05}-of-00002.safetensors")
    shards = {name: f"model-{n:05}-of-00002.safetensors" for n, half in enumerate(HALF, 1) for name in half}
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "h5" / "model.weights.h5").write_bytes(hdf5(WEIGHTS))
    packed = hdf5(WEIGHTS, chunks=True, compression="gzip", shuffle=True)
    (folder / "chunked" / "model.weights.h5").write_bytes(packed)
    for number, half in enumerate(HALF):
        (folder / "sharded" / f"model_{number:05}.weights.h5").write_bytes(hdf5(half))
    groups = {f"/{name.rpartition('/')[0]}": f"model_{n:05}.weights.h5" for n, half in enumerate(HALF) for name in half}
    (folder / "sharded" / "model.weights.json").write_text(json.dumps({"weight_map": groups}))
    with zipfile.ZipFile(folder / "keras" / "m.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", hdf5(WEIGHTS))
    flat = {name.replace("/", "_"): value for name, value in WEIGHTS.items()}
    np.savez(folder / "npz" / "w.npz", **flat)
    np.savez_compressed(folder / "packed" / "w.npz", **flat)
    np.save(folder / "npy" / "w.npy", WEIGHTS["a/vars/0"])
    (folder / "npy" / "inner").mkdir()
    np.save(folder / "npy" / "inner" / "w.npy", WEIGHTS["a/vars/0"])
    blocks = {name: random_tensor(RNG, "Q4_0", 64, 512) for name in "abc"}
    (folder / "gguf" / "w.gguf").write_bytes(gguf_file({"tokens": ["a"] * 9999}, blocks))
    for name, content in split_files({}, blocks, 3).items():
        (folder / "split" / name).write_bytes(content)


FORMATS = {
    "one": "one/model.safetensors",
    "one folder": "one",
    "index": "index/model.safetensors.index.json",
    "index folder": "index",
    "index folder/": "index/",
    "numbered": "numbered",
    "h5": "h5/model.weights.h5",
    "h5 folder": "h5",
    "chunked": "chunked/model.weights.h5",
    "sharded": "sharded/model.weights.json",
    "sharded folder": "sharded",
    "keras": "keras/m.keras",
    "npz": "npz/w.npz",
    "packed": "packed/w.npz",
    "npy": "npy/w.npy",
    "npy folder": "npy",
    "gguf": "gguf/w.gguf",
    "split gguf": "split/m-00002-of-00003.gguf",
    "split gguf folder": "split",
    "odd": "odd names é/w #1%20+ü.safetensors",
}


@pytest.fixture(scope="module")
def folder(_object_server: ObjectServer) -> Path:
    folder = _object_server.root / "formats" / "all"
    folder.mkdir(parents=True)
    write(folder)
    return folder


def check(remote: lm.Checkpoint, local: lm.Checkpoint) -> None:
    """That both have the same, in views of it as well."""
    assert list(remote) == list(local)
    for name in local:
        expected = np.asarray(local[name])
        found = np.asarray(remote[name])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))
        if expected.ndim > 1 and expected.size:
            np.testing.assert_array_equal(np.asarray(remote[name].T[3:7, ::-2]), expected.T[3:7, ::-2])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dialect", ["http", "hf", "gcs", "azure"])
def test_formats(
    object_server: ObjectServer, folder: Path, dialect: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    path = FORMATS[kind]
    url, options = {
        "http": (object_server.url(f"formats/all/{path}"), None),
        "hf": (f"hf://formats/all/{path}", None),
        "gcs": (f"gs://formats/all/{path}", object_server.gcs()),
        "azure": (f"az://formats/all/{path}", object_server.azure()),
    }[dialect]
    if dialect == "http" and kind in ("numbered", "split gguf folder", "npy folder"):  # it does not list
        with pytest.raises(lm.CheckpointError, match="found no checkpoint"):
            lm.open_checkpoint(url)
        return
    with lm.open_checkpoint(url, options) as remote, lm.open_checkpoint(folder / path) as local:
        opening = object_server.counters()
        assert opening["requests"] <= 24
        object_server.reset_counters()
        for name in local:
            if kind not in ("chunked", "packed"):
                np.testing.assert_array_equal(np.asarray(remote[name]), np.asarray(local[name]))
        read = object_server.counters()
        assert read["bytes"] <= 1.02 * local.nbytes + 1000 * read["requests"]
        check(remote, local)


@pytest.mark.parametrize("kind", ["one", "index folder", "numbered", "sharded folder", "packed", "odd"])
def test_formats_on_s3(s3: S3Server, folder: Path, kind: str) -> None:
    path = FORMATS[kind]
    store = obstore.store.S3Store(s3.bucket, **s3.options())
    for file in sorted((folder / path.partition("/")[0]).iterdir()):
        obstore.put(store, f"deep/er/{path.partition('/')[0]}/{file.name}", file)
    url = f"s3a://{s3.bucket}/deep/er/{path}"
    with lm.open_checkpoint(url, s3.options()) as remote, lm.open_checkpoint(folder / path) as local:
        check(remote, local)


# Orbax' arrays are read by TensorStore, with drivers of its own.


@pytest.fixture(scope="module")
def orbax(folder: Path) -> Path:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(
            folder.parent / "orbax", {name.replace("/", "_"): WEIGHTS[name] for name in list(WEIGHTS)[:3]}
        )
    return folder.parent / "orbax"


def test_orbax_on_s3(s3: S3Server, orbax: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = obstore.store.S3Store(s3.bucket, **s3.options())
    for file in sorted(orbax.rglob("*")):
        if file.is_file():
            obstore.put(store, f"o/{file.relative_to(orbax)}", file)
    options = s3.options()
    with pytest.raises(lm.CheckpointError, match="takes no keys from storage_options"):
        lm.open_checkpoint(f"s3://{s3.bucket}/o", options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("access_key_id"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret_access_key"))
    with lm.open_checkpoint(f"s3://{s3.bucket}/o", options) as remote, lm.open_checkpoint(orbax) as local:
        check(remote, local)


def test_orbax_on_the_hub(object_server: ObjectServer, orbax: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    with lm.open_checkpoint("hf://formats/orbax") as remote, lm.open_checkpoint(orbax) as local:
        check(remote, local)


def test_orbax_on_a_web_server(object_server: ObjectServer, orbax: Path) -> None:
    with lm.open_checkpoint(object_server.url("formats/orbax")) as remote, lm.open_checkpoint(orbax) as local:
        check(remote, local)


def test_orbax_on_azure(object_server: ObjectServer, orbax: Path) -> None:
    with pytest.raises(lm.CheckpointError, match="no driver for Azure"):
        lm.open_checkpoint("az://formats/orbax", object_server.azure())

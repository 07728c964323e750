"""Hashes of objects: given, in manifests beside them, or of the hub; and that what was hashed is what is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

import lazymodel as lm
from lazymodel.checkpoints._inspect import inspect_checkpoint
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, part, scripted

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

SHARDS = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]


@pytest.fixture(scope="module")
def folder(_object_server: ObjectServer) -> Path:
    folder = _object_server.root / "verify" / "sub"
    folder.mkdir(parents=True)
    for number, name in enumerate(SHARDS):
        save_file({f"w{number}": np.full((700, 3000), number, np.float32)}, folder / name)
    shards = {f"w{number}": name for number, name in enumerate(SHARDS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def digests(folder: Path) -> dict[str, str]:
    names = [*SHARDS, "model.safetensors.index.json"]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def urls(server: ObjectServer) -> list[tuple[str, dict[str, object] | None]]:
    return [(server.url("verify/sub/"), None), ("gs://verify/sub", server.gcs()), ("az://verify/sub", server.azure())]


def test_given_hashes_and_manifests_on_disk(object_server: ObjectServer, folder: Path, tmp_path: Path) -> None:
    stated = digests(folder)
    manifest = tmp_path / "sums"
    manifest.write_text("".join(f"{digest}  {name}\n" for name, digest in stated.items()))
    wrong = {**stated, SHARDS[1]: "0" * 64}
    for url, options in urls(object_server):
        for verify in ({name: f"sha256:{digest}" for name, digest in stated.items()}, stated, manifest, str(manifest)):
            with lm.open_checkpoint(url, options, verify=verify) as checkpoint:
                assert np.asarray(checkpoint["w1"]).min() == 1
        with pytest.raises(lm.CheckpointError, match=f"{SHARDS[1]}: expected sha256 000"):
            lm.open_checkpoint(url, options, verify=wrong)
        with pytest.raises(lm.CheckpointError, match="no hash is known for .*index"):
            lm.open_checkpoint(url, options, verify={name: stated[name] for name in SHARDS})


def test_manifests_beside_the_objects(object_server: ObjectServer, folder: Path) -> None:
    for url, options in urls(object_server):
        with pytest.raises(lm.CheckpointError, match="no hash is known"):
            lm.open_checkpoint(url, options, verify=True)
    manifest = folder / "SHA256SUMS"
    try:
        manifest.write_text("".join(f"{digest}  {name}\n" for name, digest in digests(folder).items()))
        for url, options in urls(object_server):
            lm.open_checkpoint(url, options, verify=True).close()
            assert not inspect_checkpoint(url, options, verify=True).problems
        manifest.write_text(manifest.read_text().replace(digests(folder)[SHARDS[0]], "1" * 64))
        for url, options in urls(object_server):
            with pytest.raises(lm.CheckpointError, match=f"{SHARDS[0]}: expected sha256 111"):
                lm.open_checkpoint(url, options, verify=True)
            (problem,) = inspect_checkpoint(url, options, verify=True).problems
            assert problem.file == SHARDS[0]
    finally:
        manifest.unlink()


def test_what_is_replaced_after_it_was_hashed_is_not_read(object_server: ObjectServer, folder: Path) -> None:
    checkpoint = lm.open_checkpoint("gs://verify/sub", object_server.gcs(), verify=digests(folder))
    object_server.replace(f"verify/sub/{SHARDS[1]}", after=0)
    with pytest.raises(lm.CheckpointError, match="changed while it was being read"):
        np.asarray(checkpoint["w1"])


def test_hashes_that_the_hub_states(monkeypatch: pytest.MonkeyPatch) -> None:
    data = save({"w": np.arange(1000.0)})
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    large = {"lfs": {"sha256": hashlib.sha256(data).hexdigest()}, "blobId": "0" * 40}
    stated: dict[str, object] = {}

    def reply(asked: Asked) -> Reply:
        if asked.path.startswith("/api"):
            entry = {"rfilename": "a/w.safetensors"} | (stated if asked.query == "blobs=true" else {})
            return 200, {}, json.dumps({"sha": "f" * 40, "siblings": [entry]}).encode()
        return part(data, asked, ETag='"1"')

    with scripted(reply) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        for found in (large, {"blobId": git}):
            stated = found
            for url in ("hf://o/n/a/w.safetensors", "hf://o/n/a"):
                lm.open_checkpoint(url, verify=True).close()
        stated = {"lfs": {"sha256": "2" * 64}}
        with pytest.raises(lm.CheckpointError, match="expected sha256 222.* as the hub states"):
            lm.open_checkpoint("hf://o/n/a", verify=True)
        for broken in ({}, {"lfs": 3}, {"blobId": None}):
            stated = broken
            with pytest.raises(lm.CheckpointError, match="no hash is known|expected"):
                lm.open_checkpoint("hf://o/n/a", verify=True)

"""What all formats have in common: names, values, boxes, bytes read, what is shown of them, hashes, copies, damage; and
the same by URL, over every kind of store.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.command import inspected, problems
from tests.core.checkpoints._formats import FORMATS, ORBAX, WEIGHTS, read_nbytes, write
from tests.large import mostly_large
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server

KINDS = [kind for kind in FORMATS if not kind.endswith("/")]
DECODED = ("chunked", "packed", "gguf", "split gguf", "split gguf folder")  # read in whole chunks, streams or blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    write(folder)
    return folder


def expected(name: str) -> np.ndarray | None:
    """The values of a tensor; None of quantized ones, which `test_gguf` compares."""
    if name in ("w", "inner/w"):
        return WEIGHTS["a/vars/0"]
    return next((value for key, value in WEIGHTS.items() if name in (key, key.replace("/", "_"))), None)


# Of each format; nobody states hashes of Orbax' files.
ONE_OF_EACH = (
    "index folder",
    "bins folder",
    "numbered",
    "h5 folder",
    "keras",
    "npz",
    "npy folder",
    "split gguf folder",
)


@pytest.mark.parametrize("kind", KINDS)
def test_values_boxes_and_bytes(folder: Path, kind: str) -> None:
    with lm.open_checkpoint(folder / FORMATS[kind]) as checkpoint:
        assert len(checkpoint) == {"npy": 1, "npy folder": 2}.get(kind, 3 if "gguf" in kind or kind in ORBAX else 4)
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in checkpoint.values())
        assert checkpoint.bytes_read == 0
        values = {name: tensor.read() for name, tensor in checkpoint.items()}
        if kind not in DECODED:
            assert checkpoint.bytes_read == checkpoint.nbytes
        for name, value in values.items():
            if (array := expected(name)) is not None:
                assert (value.dtype, value.shape, value.tobytes()) == (array.dtype, array.shape, array.tobytes())
            header = checkpoint.describe(name)
            assert (header.dtype, header.shape, header.nbytes) == (value.dtype, value.shape, value.nbytes)
        tensors = dict(checkpoint)
    for name, tensor in tensors.items():  # which outlive their checkpoint
        before = checkpoint.bytes_read
        if tensor.ndim > 1 and tensor.size:
            np.testing.assert_array_equal(tensor[3:7].read(), values[name][3:7])
            if kind not in DECODED:
                assert checkpoint.bytes_read - before == values[name][3:7].nbytes
            np.testing.assert_array_equal(tensor.T[3:7, ::-2].astype(np.float64).read(), values[name].T[3:7, ::-2])


@pytest.mark.parametrize("kind", mostly_large(KINDS, [*ONE_OF_EACH, *ORBAX]))
def test_shards_on_devices(folder: Path, kind: str, mesh8: Mesh) -> None:
    """Along either axis, as float32 or as bfloat16: each byte is read once."""

    def spec(name: str, shape: tuple[int, ...]) -> P:
        axis = 0 if name.startswith("a") else 1
        divides = len(shape) > axis and min(shape) and shape[axis] % 8 == 0
        return P(*[None] * axis, "model") if divides else P()

    with lm.open_checkpoint(folder / FORMATS[kind]) as checkpoint:
        headers = {name: checkpoint.describe(name) for name in checkpoint}
        kinds = {name: "bfloat16" if name.startswith("a") else header.dtype for name, header in headers.items()}
        abstract = lm.build_abstract(lambda: {name: jnp.zeros(headers[name].shape, kinds[name]) for name in headers})
        rules = {name: spec(name, header.shape) for name, header in headers.items()}
        loaded = abstract.shard(mesh8, rules).materialize(checkpoint)
        if kind not in ("chunked", "packed"):
            stored = sum(header.stored[1] if header.stored else header.nbytes for header in headers.values())
            assert checkpoint.bytes_read == stored
        for name, array in loaded.items():
            with np.errstate(all="ignore"):
                values = checkpoint[name].read().astype(kinds[name])
            assert np.asarray(array).tobytes() == values.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown(folder: Path, kind: str) -> None:
    with lm.open_checkpoint(folder / FORMATS[kind]) as checkpoint:
        opened = {name: (checkpoint.describe(name).dtype.name, list(t.shape)) for name, t in checkpoint.items()}
        files = set(checkpoint.files)
        found = inspected(folder / FORMATS[kind])
    if sys.platform == "linux" and "gguf" not in kind:  # whose header is most of the file here
        before = read_nbytes()
        inspected(folder / FORMATS[kind])
        assert read_nbytes() - before < 80_000 < checkpoint.nbytes / 3
    assert (found["problems"], found["format"]) == ([], checkpoint.format)
    shown = {one["name"]: (one["dtype"], one["shape"]) for one in found["tensors"]}
    assert shown == ({name: ("Q4_0", shape) for name, (_, shape) in opened.items()} if "gguf" in kind else opened)
    root = folder / FORMATS[kind].partition("/")[0]
    assert {str(root / file["path"]) for file in found["files"] if not file["path"].endswith(".json")} == files
    assert kind in ORBAX or sum(file["tensors"] for file in found["files"]) == len(opened)


@pytest.mark.parametrize("kind", mostly_large([kind for kind in KINDS if kind not in ORBAX], ONE_OF_EACH))
def test_hashes_copies_and_damage(folder: Path, kind: str, tmp_path: Path) -> None:
    source, _, name = FORMATS[kind].partition("/")
    path = shutil.copytree(folder / source, tmp_path / "c") / name
    files = [file for file in (tmp_path / "c").rglob("*") if file.is_file()]
    hashes = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    with lm.open_checkpoint(path, verify=hashes) as checkpoint:
        lm.save(checkpoint, tmp_path / "copy.safetensors")
        with lm.open_checkpoint(tmp_path / "copy.safetensors") as copy:
            for key, tensor in checkpoint.items():
                np.testing.assert_array_equal(copy[key].read(), tensor.read())
        used = checkpoint.files
    with pytest.raises(lm.CheckpointError, match="no hash is known"):
        lm.open_checkpoint(path, verify=True)
    for file in map(Path, used):
        content = file.read_bytes()
        with pytest.raises(lm.CheckpointError, match=f"expected sha256 {'0' * 64}"):
            lm.open_checkpoint(path, verify={**hashes, str(file): "0" * 64})
        with lm.open_checkpoint(path) as checkpoint:
            tensors = [tensor for tensor in checkpoint.values() if tensor.file == str(file)]
            assert tensors or "split" in kind  # whose first file has metadata only
            file.write_bytes(content + b"more")
            if tensors:
                with pytest.raises(lm.CheckpointError, match=f"{re.escape(file.name)} changed while"):
                    [tensor.read() for tensor in tensors]
        for damaged in (content[:-40], content[:100], b"version https://git-lfs.github.com/spec/v1\nsize 9\n"):
            file.write_bytes(damaged)
            with pytest.raises(lm.CheckpointError) as error, lm.open_checkpoint(path) as checkpoint:
                [tensor.read() for tensor in checkpoint.values()]
            assert str(file) in str(error.value)
            assert problems(path)
            if b"git-lfs" in damaged:
                assert "LFS pointer: expected 9 bytes" in str(error.value) and "git lfs pull" in str(error.value)
        file.write_bytes(content)


# By URL ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(_object_server: ObjectServer) -> Path:
    folder = _object_server.root / "formats" / "all"
    folder.mkdir(parents=True)
    write(folder)
    return folder


def check(remote: lm.Checkpoint, local: lm.Checkpoint) -> None:
    """That both have the same, in views of it as well."""
    assert list(remote) == list(local)
    for name in local:
        values = np.asarray(local[name])
        found = np.asarray(remote[name])
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        np.testing.assert_array_equal(found.view(np.uint8), values.view(np.uint8))


def check_views(remote: lm.Checkpoint, local: lm.Checkpoint) -> None:
    for name, tensor in local.items():
        if tensor.ndim > 1 and tensor.size:
            np.testing.assert_array_equal(remote[name].T[3:7, ::-2].read(), tensor.T[3:7, ::-2].read())


def place(server: ObjectServer, dialect: str, path: str) -> tuple[str, dict[str, Any] | None]:
    return {
        "http": (server.url(f"formats/{path}"), None),
        "hf": (f"hf://formats/{path}", None),
        "gcs": (f"gs://formats/{path}", server.gcs()),
        "azure": (f"az://formats/{path}", server.azure()),
    }[dialect]


SOME = (
    *("one", "index folder/", "bins folder", "numbered", "h5 folder", "packed", "npy folder", "split gguf folder"),
    "odd",
)
UNLISTED = ("numbered", "split gguf folder", "npy folder", "numbered bins", "pt folder", "checkpoints of flax")
CASES = [(dialect, kind) for dialect in ("http", "gcs") for kind in FORMATS if kind not in ORBAX]
CASES += [(dialect, kind) for dialect in ("hf", "azure") for kind in SOME]
BRIEF = [(dialect, kind) for dialect, kind in CASES if dialect == "gcs" or kind in ("one", "index folder/", "numbered")]


@pytest.mark.parametrize(("dialect", "kind"), mostly_large(CASES, BRIEF))
def test_by_url(
    object_server: ObjectServer, served: Path, dialect: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    url, options = place(object_server, dialect, f"all/{FORMATS[kind]}")
    if dialect == "http" and kind in UNLISTED:  # it does not list
        with pytest.raises(lm.CheckpointError, match=r"cannot read .* 404 \(not found\)"):
            lm.open_checkpoint(url)
        return
    with lm.open_checkpoint(url, options) as remote, lm.open_checkpoint(served / FORMATS[kind]) as local:
        # Without a list, every name is asked for; Flax' come last.
        assert object_server.counters()["requests"] <= (28 if kind.startswith("msgpack") else 24)
        object_server.reset_counters()
        check(remote, local)
        read = object_server.counters()
        assert read["bytes"] <= 1.02 * local.nbytes + 1000 * read["requests"]
        check_views(remote, local)


@pytest.mark.parametrize(
    "kind",
    mostly_large(["one", "index folder", "numbered", "sharded folder", "packed", "odd"], ["index folder", "numbered"]),
)
def test_on_s3(s3: S3Server, served: Path, kind: str) -> None:
    path = FORMATS[kind]
    put(s3, served / path.partition("/")[0], f"deep/er/{path.partition('/')[0]}")
    url = f"s3a://{s3.bucket}/deep/er/{path}"
    with lm.open_checkpoint(url, s3.options()) as remote, lm.open_checkpoint(served / path) as local:
        check(remote, local)
        check_views(remote, local)


def put(s3: S3Server, folder: Path, key: str) -> None:
    obstore = pytest.importorskip("obstore")
    store = obstore.store.S3Store(s3.bucket, **s3.options())
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            obstore.put(store, f"{key}/{file.relative_to(folder)}", file)


@pytest.mark.skipif(not ORBAX, reason="needs orbax-checkpoint")
@pytest.mark.parametrize("dialect", ["http", "hf", "s3", "azure"])
def test_orbax_by_url(
    object_server: ObjectServer, served: Path, dialect: str, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays are read by TensorStore, with drivers of its own."""
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    if dialect == "s3":
        s3 = request.getfixturevalue("s3")
        put(s3, served / "ocdbt", "o")
        url, options = f"s3://{s3.bucket}/o", s3.options()
        with pytest.raises(lm.CheckpointError, match="takes no keys from storage_options"):
            lm.open_checkpoint(url, options)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("access_key_id"))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret_access_key"))
    else:
        url, options = place(object_server, dialect, "all/ocdbt")
    if dialect == "azure":
        with pytest.raises(lm.CheckpointError, match="no driver for az://"):
            lm.open_checkpoint(url, options)
        return
    with lm.open_checkpoint(url, options) as remote, lm.open_checkpoint(served / "ocdbt") as local:
        check(remote, local)
        check_views(remote, local)

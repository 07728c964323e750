"""Places in stores behave as paths do; web servers say nothing of folders, and some send pages for people."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

import lazymodel as lm
from lazymodel._remote.path import remote_path
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, part, scripted

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

DATA = save({"w": np.arange(9.0)})


@pytest.fixture(scope="module")
def tree(_object_server: ObjectServer) -> Path:
    folder = _object_server.root / "paths"
    for name in ("a/b/c.bin", "a/d.bin", "a b.bin", "a/b.safetensors", "z/model.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(DATA)
    save_file({"root": np.ones(3)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("page_size", [1, 1000])
@pytest.mark.parametrize("dialect", ["gcs", "azure"])
def test_as_paths(object_server: ObjectServer, tree: Path, dialect: str, page_size: int) -> None:
    object_server.configure(page_size=page_size)
    top = remote_path({"gcs": "gs://paths", "azure": "az://paths"}[dialect], getattr(object_server, dialect)())
    assert [path.name for path in top.iterdir()] == sorted(path.name for path in tree.iterdir())
    assert sorted(top.files_below()) == sorted(str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file())
    for name in ("", "a", "a/b", "a/b/c.bin", "a b.bin", "absent", "a/absent", "a/d.bin/x", "mode"):
        remote, local = (top / name, tree / name) if name else (top, tree)
        assert (remote.exists(), remote.is_file(), remote.is_dir()) == (local.exists(), local.is_file(), local.is_dir())
        assert (remote.name, remote.suffix) == (local.name if name else "", local.suffix if name else "")
        if local.is_file():
            assert remote.read_bytes() == local.read_bytes()
            assert remote.stat().st_size == local.stat().st_size
    assert [str(path) for path in (top / "a").glob("*.bin")] == [f"{top}/a/d.bin"]
    deep = top / "a" / "b" / "c.bin"
    assert deep.relative_to(top / "a") == "b/c.bin" and deep.is_relative_to(top) and not top.is_relative_to(deep)
    assert [path.key for path in deep.parents] == ["a/b", "a", ""]
    with pytest.raises(FileNotFoundError):
        (top / "absent").stat()
    with lm.open_checkpoint(str(top), getattr(object_server, dialect)()) as checkpoint:  # a bucket's root
        assert list(checkpoint) == ["root"]


def test_a_file_is_read_as_files_are(object_server: ObjectServer, tree: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8).tobytes()
    (tree / "long").write_bytes(data)
    file = remote_path("gs://paths/long", object_server.gcs()).open()
    rng = np.random.default_rng(0)
    for start in [0, 65_536, 999_999, 1_000_000, 1_000_007, *rng.integers(0, 1_000_000, 60).tolist()]:
        length = int(rng.choice([0, 1, 100, 65_536, 300_000]))
        assert file.seek(start) == start
        assert file.read(length) == data[start : start + length]
    assert file.seek(-5, 2) == 999_995 and file.read() == data[-5:]
    with pytest.raises(OSError, match="negative"):
        file.seek(-1)


@pytest.mark.parametrize(
    "shard", ["../x", "/etc/x", "..\\x", "a/../../x", "https://elsewhere/x", "gs://b/x", "", "a\0"]
)
def test_an_index_leads_nowhere_else(shard: str) -> None:
    asked: list[str] = []

    def reply(request: Asked) -> Reply:
        asked.append(request.path)
        if request.path.endswith(".index.json"):
            return part(json.dumps({"weight_map": {"w": shard}}).encode(), request)
        return 404, {}, b""

    with scripted(reply) as origin, pytest.raises(lm.CheckpointError, match=r"expected|missing|can have this name"):
        lm.open_checkpoint(f"{origin}/folder/model.safetensors.index.json")
    assert all(path.startswith("/folder/") and ".." not in path for path in asked)


@pytest.mark.parametrize("url", ["folder", "folder/", "folder/model.safetensors", "folder?sig=x", "folder/?sig=x"])
@pytest.mark.parametrize("page", ["index", "redirect", "none"])
def test_folders_of_web_servers(url: str, page: str) -> None:
    """Some answer with a page that lists them, some send to the name with a slash for that, most have nothing there."""

    def reply(request: Asked) -> Reply:
        if request.path == "/folder/model.safetensors":
            return part(DATA, request, ETag='"1"') if request.query == url.partition("?")[2] else (403, {}, b"")
        if request.path == "/folder" and page == "redirect":
            return 301, {"Location": "/folder/"}, b""
        if page == "none" or request.path not in ("/folder", "/folder/"):
            return 404, {}, b""
        return part(b"<html>model.safetensors</html>", request, Content_Type="text/html; charset=utf-8")

    with scripted(reply) as origin, lm.open_checkpoint(f"{origin}/{url}") as checkpoint:
        np.testing.assert_array_equal(np.asarray(checkpoint["w"]), np.arange(9.0))
        assert "sig" not in repr(checkpoint)


def test_a_page_is_no_file() -> None:
    def reply(request: Asked) -> Reply:
        return part(b"<html>Log in</html>", request, Content_Type="text/html")

    with scripted(reply) as origin, pytest.raises(lm.CheckpointError, match="checkpoint"):
        lm.open_checkpoint(f"{origin}/model.safetensors")

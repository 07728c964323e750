"""huggingface_hub against the object server, and what benchmarks measure with it.

Dialects, faults and hostile modes are proven by the tests of remote checkpoints, which count what came of each.
"""

from __future__ import annotations

import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.servers import _controls
from tests.servers._dialects import SIGNATURE
from tests.servers.object_server import ObjectServer

obstore = pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")
from obstore.exceptions import GenericError  # noqa: E402
from obstore.store import HTTPStore  # noqa: E402

MIB = 1 << 20
DATA = bytes(range(256)) * (MIB // 128)  # 2 MiB
ONCE = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}


@pytest.fixture
def server(object_server: ObjectServer) -> Iterator[ObjectServer]:
    bucket = object_server.root / "bucket"
    bucket.mkdir()
    (bucket / "a.bin").write_bytes(DATA)
    yield object_server
    shutil.rmtree(bucket)


def opened(server: ObjectServer) -> Any:
    """A store that makes each request once."""
    client_options = {"allow_http": True, "timeout": "30s"}
    return HTTPStore.from_url(server.url("bucket"), client_options=client_options, retry_config=ONCE)


def read(store: Any, first: int, stop: int, path: str = "a.bin") -> bytes:
    return bytes(obstore.get(store, path, options={"range": (first, stop)}).bytes())


# Hugging Face.


@pytest.fixture
def repository(object_server: ObjectServer) -> Iterator[ObjectServer]:
    folder = object_server.root / "owner" / "name"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(DATA)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "1_Pooling" / "config.json").write_bytes(b"{ }")
    yield object_server
    shutil.rmtree(object_server.root / "owner")


def test_the_cdn_notices_a_token_and_wants_its_signature(repository: ObjectServer) -> None:
    opener = urllib.request.build_opener(_NoRedirect)
    with pytest.raises(urllib.error.HTTPError) as redirect:
        opener.open(repository.url("owner/name/resolve/main/model.safetensors", "hf"))
    location = redirect.value.headers["Location"]
    assert redirect.value.headers["X-Linked-Size"] == str(len(DATA))
    assert location.startswith("http://localhost:") and SIGNATURE in location
    request = urllib.request.Request(location, headers={"Authorization": "Bearer hf_good"})
    with urllib.request.urlopen(request) as answer:
        assert answer.read() == DATA
    assert repository.counters()["cdn_authorization"] == 1
    with pytest.raises(urllib.error.HTTPError, match="403") as forbidden:
        urllib.request.urlopen(location.partition("?")[0])
    for error in (redirect.value, forbidden.value):
        error.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def test_huggingface_hub_itself(repository: ObjectServer, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    repository.configure(page_size=1)
    repository.repository("owner/name", token="hf_good", gated=True, revisions={"v1": "f" * 40})
    api = hub.HfApi(endpoint=repository.hub, token="hf_good")
    files = {entry.path: entry for entry in api.list_repo_tree("owner/name", recursive=True)}
    assert list(files) == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert files["model.safetensors"].size == files["model.safetensors"].lfs.size == len(DATA)
    flat = [entry.path for entry in api.list_repo_tree("owner/name")]
    assert flat == ["1_Pooling", "config.json", "model.safetensors"]
    assert api.model_info("owner/name", revision="v1").sha == "f" * 40
    stranger = hub.HfApi(endpoint=repository.hub, token="hf_stranger")
    with pytest.raises(hub.errors.GatedRepoError):
        stranger.model_info("owner/name")
    with pytest.raises(hub.errors.RepositoryNotFoundError):
        api.model_info("owner/nothing")
    with pytest.raises(hub.errors.RevisionNotFoundError):
        api.model_info("owner/name", revision="v2")
    with pytest.raises(hub.errors.EntryNotFoundError):
        api.hf_hub_download("owner/name", "nothing.json", cache_dir=tmp_path)
    assert Path(api.hf_hub_download("owner/name", "model.safetensors", cache_dir=tmp_path)).read_bytes() == DATA
    assert repository.counters()["cdn_authorization"] == 0


# Size, speed, what is counted.


def test_a_file_of_20_gb_needs_no_memory(server: ObjectServer) -> None:
    with (server.root / "bucket" / "sparse.bin").open("wb") as file:
        file.truncate(size := 20 * 10**9)
        file.seek(size - 3)
        file.write(b"end")
    store, process = opened(server), psutil.Process(server.pid)
    before = process.memory_info().rss
    assert obstore.head(store, "sparse.bin")["size"] == size
    assert read(store, size - 5, size, "sparse.bin") == b"\0\0end"
    assert len(read(store, size // 2, size // 2 + 64 * MIB, "sparse.bin")) == 64 * MIB
    assert process.memory_info().rss < before + 16 * MIB


def test_the_link_carries_no_more_than_its_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds * 1.1  # as sleeping does: a little too long

    monkeypatch.setattr(_controls, "time", Clock)
    link = _controls.Link()
    link.bandwidth = 200e6
    for _ in range(1000):
        link.wait(link.piece)
    assert 1000 * link.piece / (now[0] - 100.0) == pytest.approx(200e6, rel=0.005)
    now[0] += 60  # idle: what was not used is not made up for
    began = now[0]
    for _ in range(100):
        link.wait(link.piece)
    assert 100 * link.piece / (now[0] - began) < 200e6 * 1.03
    link.bandwidth = None
    link.wait(1 << 40)
    assert link.piece == 16 * MIB


def test_requests_in_flight(server: ObjectServer) -> None:
    """Four answers that stall at the same time are four in flight; a reset of the controls lets them end."""
    server.faults(["stall"], every=1)
    store = opened(server)
    stalled = [obstore.get(store, "a.bin", options={"range": (i, MIB)}) for i in range(4)]
    assert server.counters()["most_in_flight"] == 4

    def finish(result: Any) -> None:
        with pytest.raises(GenericError):
            result.bytes()

    threads = [threading.Thread(target=finish, args=(result,)) for result in stalled]
    for thread in threads:
        thread.start()
    server.reset()
    for thread in threads:
        thread.join()
    server.faults()
    assert read(store, 1000, MIB) == DATA[1000:MIB]
    counters = server.counters()
    assert counters["requests"] == counters["most_in_flight"] == 1
    assert counters["bytes"] == MIB - 1000


def test_wrong_controls_are_refused(object_server: ObjectServer) -> None:
    with pytest.raises(ValueError, match="bandwith"):
        object_server.configure(bandwith=1)

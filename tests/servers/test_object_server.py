"""obstore and huggingface_hub against the object server: dialects, faults and hostile modes are what they say."""

from __future__ import annotations

import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.servers import _controls
from tests.servers._answers import EXTRA
from tests.servers._dialects import SIGNATURE
from tests.servers.object_server import ObjectServer

obstore = pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")
from obstore.exceptions import (  # noqa: E402
    GenericError,
    NotSupportedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, HTTPStore  # noqa: E402

MIB = 1 << 20
DATA = bytes(range(256)) * (MIB // 128)  # 2 MiB
RANGE = (1000, MIB)
ONCE = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
SOON = {"timeout": "400ms"}  # where nothing but the client's patience ends a request
BUCKETS = ["gcs", "azure"]
DIALECTS = [*BUCKETS, "http"]


@pytest.fixture
def server(object_server: ObjectServer) -> Iterator[ObjectServer]:
    bucket = object_server.root / "bucket"
    (bucket / "folder").mkdir(parents=True)
    (bucket / "a.bin").write_bytes(DATA)
    (bucket / "folder" / "b c.bin").write_bytes(DATA[:1000])
    yield object_server
    shutil.rmtree(bucket)


def opened(server: ObjectServer, dialect: str, retry: dict[str, Any] | None = None, **client: Any) -> Any:
    """A store that asks once, unless `retry` says otherwise."""
    arguments: dict[str, Any] = {"retry_config": ONCE | (retry or {})}
    client_options = {"allow_http": True, **client}
    if dialect == "gcs":
        return GCSStore("bucket", **(server.gcs() | arguments | {"client_options": client_options}))
    if dialect == "azure":
        return AzureStore("bucket", **(server.azure() | arguments | {"client_options": client_options}))
    return HTTPStore.from_url(server.url("bucket"), client_options=client_options, **arguments)


def read(store: Any, path: str = "a.bin", **options: Any) -> bytes:
    """A range as obstore hands it out, in pieces: whole answers that lie about their length would need that memory."""
    pieces, total = list[bytes](), 0
    for piece in obstore.get(store, path, options={"range": RANGE} | options).stream(min_chunk_size=1 << 16):
        pieces.append(piece)
        if (total := total + len(piece)) > 4 * MIB:
            break
    return b"".join(pieces)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_get_and_head(server: ObjectServer, dialect: str) -> None:
    store = opened(server, dialect)
    whole = obstore.get(store, "a.bin")
    assert bytes(whole.bytes()) == DATA
    assert read(store) == DATA[slice(*RANGE)]
    assert bytes(obstore.get(store, "folder/b c.bin").bytes()) == DATA[:1000]
    if dialect != "azure":  # object_store asks Azure for no suffixes
        assert bytes(obstore.get(store, "a.bin", options={"range": {"suffix": 7}}).bytes()) == DATA[-7:]
    assert bytes(obstore.get(store, "a.bin", options={"range": {"offset": 2 * MIB - 5}}).bytes()) == DATA[-5:]
    meta = obstore.head(store, "a.bin")
    assert meta == whole.meta
    assert meta["size"] == len(DATA)
    assert (meta["version"] is not None) == (dialect == "gcs")
    assert read(store, if_match=meta["e_tag"]) == DATA[slice(*RANGE)]
    with pytest.raises(PreconditionError):
        read(store, if_match='"another"')
    with pytest.raises(FileNotFoundError):
        read(store, "nothing.bin")
    with pytest.raises(GenericError, match="416"):
        read(store, range=(4 * MIB, 5 * MIB))
    counters = server.counters()
    assert counters["methods"] == {"GET": 8 + (dialect != "azure"), "HEAD": 1}
    assert counters["ranges"]["bucket/nothing.bin"] == [list(RANGE)]
    assert counters["path_bytes"]["bucket/folder/b c.bin"] == 1000
    assert (counters["authorization"] == counters["requests"]) == (dialect in BUCKETS)


def test_an_old_generation_is_gone(server: ObjectServer) -> None:
    store = opened(server, "gcs")
    version = obstore.head(store, "a.bin")["version"]
    assert read(store, version=version) == DATA[slice(*RANGE)]
    with pytest.raises(FileNotFoundError):
        read(store, version="17")


@pytest.mark.parametrize("page_size", [1, 2, 1000])
@pytest.mark.parametrize("dialect", BUCKETS)
def test_list(server: ObjectServer, dialect: str, page_size: int) -> None:
    (server.root / "bucket" / "folder" / "deeper").mkdir()
    (server.root / "bucket" / "folder" / "deeper" / "<&>.bin").write_bytes(b"xyz")
    server.configure(page_size=page_size)
    store = opened(server, dialect)
    everything = obstore.list(store).collect()
    assert [meta["path"] for meta in everything] == ["a.bin", "folder/b c.bin", "folder/deeper/<&>.bin"]
    assert [meta["size"] for meta in everything] == [len(DATA), 1000, 3]
    assert everything[0]["e_tag"] == obstore.head(store, "a.bin")["e_tag"]
    level = obstore.list_with_delimiter(store, "folder")
    assert list(level["common_prefixes"]) == ["folder/deeper"]
    assert [meta["path"] for meta in level["objects"]] == ["folder/b c.bin"]
    assert obstore.list(store, "nothing").collect() == []
    assert server.counters()["paths"]["bucket"] >= 3


@pytest.mark.parametrize("dialect", DIALECTS)
def test_put_copy_and_delete(server: ObjectServer, dialect: str) -> None:
    store = opened(server, dialect)
    put = obstore.put(store, "new/c.bin", DATA, use_multipart=False)
    assert (server.root / "bucket/new/c.bin").read_bytes() == DATA
    assert put["e_tag"] == obstore.head(store, "new/c.bin")["e_tag"]
    if dialect in BUCKETS:
        obstore.copy(store, "new/c.bin", "new/d.bin")
        assert (server.root / "bucket/new/d.bin").read_bytes() == DATA
        with pytest.raises(obstore.exceptions.AlreadyExistsError):
            obstore.put(store, "a.bin", b"", mode="create", use_multipart=False)
        obstore.delete(store, ["new/c.bin", "new/d.bin"])
        assert list((server.root / "bucket/new").iterdir()) == []
    else:
        obstore.delete(store, "new/c.bin")
        assert list((server.root / "bucket/new").iterdir()) == []


@pytest.mark.parametrize("dialect", BUCKETS)
def test_upload_in_parts(server: ObjectServer, dialect: str) -> None:
    store, seen = opened(server, dialect), list[bool]()

    def pieces() -> Iterator[bytes]:
        for _ in range(6):
            yield DATA
            seen.append((server.root / "bucket/parts.bin").exists())

    obstore.put(store, "parts.bin", pieces(), use_multipart=True, chunk_size=5 * MIB, max_concurrency=2)
    assert (server.root / "bucket/parts.bin").read_bytes() == DATA * 6
    assert seen == [False] * 6
    assert server.counters()["uploads"] == {"begun": 1, "completed": 1}


@pytest.mark.parametrize("dialect", BUCKETS)
def test_upload_that_fails(server: ObjectServer, dialect: str) -> None:
    server.faults(["503"], requests=[3], methods=["PUT"])
    with pytest.raises(GenericError, match="503"):
        obstore.put(opened(server, dialect), "half.bin", DATA * 10, chunk_size=5 * MIB, max_concurrency=1)
    counters = server.counters()
    assert not (server.root / "bucket/half.bin").exists()
    if dialect == "gcs":
        assert counters["uploads"] == {"begun": 1, "aborted": 1}
        assert counters["open_uploads"] == []
    else:  # Azure knows no abort: blocks that nothing commits are dropped after a week
        assert counters["uploads"] == {"begun": 1}
        assert counters["open_uploads"] == ["bucket/half.bin"]
    server.reset()
    assert server.counters()["open_uploads"] == []


def test_web_servers_list_nothing(server: ObjectServer) -> None:
    with pytest.raises(GenericError, match="405"):
        obstore.list(opened(server, "http")).collect()


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    (tmp_path / "a.bin").write_bytes(DATA)
    with ObjectServer(tmp_path, tls=True) as server:
        url = f"{server.origin('https')}/http"  # a slash at the end would stand twice in what is asked for
        known = HTTPStore.from_url(url, client_options={"root_certificate": server.certificate}, retry_config=ONCE)
        assert read(known) == DATA[slice(*RANGE)]
        with pytest.raises(GenericError, match="UnknownIssuer"):
            read(HTTPStore.from_url(url, retry_config=ONCE))
        server.hostile("a.bin", "redirect", location=server.url("a.bin"))  # https → http
        with pytest.raises(GenericError, match="BadScheme"):
            read(known)


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


def hub_store(server: ObjectServer, token: str | None = None, revision: str = "main") -> Any:
    headers = {"default_headers": {"Authorization": f"Bearer {token}"}} if token else {}
    client = {"allow_http": True, **headers}
    return HTTPStore.from_url(f"{server.hub}/owner/name/resolve/{revision}", client_options=client, retry_config=ONCE)


def test_hub_redirects_to_another_host(repository: ObjectServer) -> None:
    repository.repository("owner/name", token="hf_good", revisions={"v1": "f" * 40})
    store = hub_store(repository, "hf_good")
    assert read(store, "model.safetensors") == DATA[slice(*RANGE)]
    e_tag = obstore.head(store, "model.safetensors")["e_tag"]
    assert read(store, "model.safetensors", if_match=e_tag) == DATA[slice(*RANGE)]
    assert bytes(obstore.get(store, "1_Pooling/config.json").bytes()) == b"{ }"
    counters = repository.counters()
    assert counters["cdn_authorization"] == 0
    assert counters["authorization"] == 4
    assert counters["statuses"] == {"302": 3, "206": 2, "200": 2}
    assert read(hub_store(repository, "hf_good", "v1"), "model.safetensors") == DATA[slice(*RANGE)]
    with pytest.raises(FileNotFoundError):
        read(hub_store(repository, "hf_good", "v2"), "model.safetensors")


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


def test_private_and_gated(repository: ObjectServer) -> None:
    repository.repository("owner/name", token="hf_good")
    with pytest.raises(UnauthenticatedError):
        read(hub_store(repository), "model.safetensors")
    with pytest.raises(FileNotFoundError):
        read(hub_store(repository, "hf_stranger"), "model.safetensors")
    repository.repository("owner/name", token="hf_good", gated=True)
    with pytest.raises(obstore.exceptions.PermissionDeniedError):
        read(hub_store(repository, "hf_stranger"), "model.safetensors")


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


# Faults, hostile answers, objects that change.


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("503", "503 Service Unavailable"),
        ("429", "429 Too Many Requests"),
        ("reset", "error sending request"),
        ("reset-body", "Interrupted"),
        ("truncate", "Interrupted"),
        ("stall", "Timeout"),
    ],
)
def test_faults(server: ObjectServer, dialect: str, kind: str, message: str) -> None:
    patience = SOON if kind == "stall" else {}
    server.faults([kind], every=2, retry_after=7)
    store = opened(server, dialect)
    assert read(store) == DATA[slice(*RANGE)]
    with pytest.raises(GenericError, match=message):
        read(opened(server, dialect, **patience))
    assert server.counters()["faults"] == {kind: 1}
    server.faults()
    assert read(store) == DATA[slice(*RANGE)]
    gaps = [(gap["status"], gap["range"]) for gap in server.counters()["retry_gaps"]]
    assert gaps == ([(int(kind), "bytes=1000-1048575")] if kind.isdigit() else [])


def test_faults_in_turn_and_what_is_sent_again(server: ObjectServer) -> None:
    """obstore's own retries: a body goes on where it broke off, so that no byte is sent twice but for resets."""
    server.faults(["503", "truncate"], requests=[1, 3])
    store = opened(server, "http", retry={"max_retries": 2, "backoff": {"init_backoff": timedelta(milliseconds=1)}})
    assert read(store) == read(store) == DATA[slice(*RANGE)]
    counters = server.counters()
    half = RANGE[0] + (RANGE[1] - RANGE[0]) // 2
    assert counters["ranges"]["bucket/a.bin"] == [[*RANGE], [*RANGE], [*RANGE], [half, RANGE[1]]]
    assert counters["bytes"] == 2 * (RANGE[1] - RANGE[0]) + len(b"a fault that was asked for")
    assert counters["faults"] == {"503": 1, "truncate": 1}


def test_faults_of_paths_and_retry_after(server: ObjectServer) -> None:
    server.faults(["429"], every=1, path="/gcs/bucket", retry_after=3)
    store = opened(server, "gcs")
    with pytest.raises(GenericError, match="429"):
        obstore.list(store).collect()
    assert read(store) == DATA[slice(*RANGE)]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(server.url("bucket", "gcs"))
    assert refused.value.headers["Retry-After"] == "3"
    refused.value.close()


FITS = slice(*RANGE)
HOSTILE: dict[str, tuple[type[Exception], str] | Callable[[bytes], bool]] = {
    "endless": (GenericError, "Content-Length Header missing"),
    "endless-length": lambda got: len(got) > 4 * MIB,  # as much as one likes
    "endless-error": (GenericError, "Timeout"),  # obstore reads what an error has to say, to its end
    "wrong-range": (GenericError, r"Requested 1000\.\.1048576, got 1001\.\.1048577"),
    "wrong-size": lambda got: got == DATA[FITS],  # nobody but the caller compares the size with anything
    "changing-length": lambda got: got == DATA[FITS],
    "ignores-range": (NotSupportedError, "Range request not supported"),
    "many-headers": (GenericError, "error sending request"),
    "large-header": (GenericError, "error sending request"),
    "longer": lambda got: got == DATA[FITS],
    "shorter": (GenericError, "Interrupted"),
    "less-than-range": lambda got: got == DATA[RANGE[0] : RANGE[0] + len(DATA[FITS]) // 2],  # no error
    "more-than-range": lambda got: got == DATA[FITS] + b"x" * EXTRA,  # no error
    "no-etag": lambda got: got == DATA[FITS],
    "drip": (GenericError, "Timeout"),
}


@pytest.mark.parametrize("mode", HOSTILE)
def test_hostile(server: ObjectServer, mode: str) -> None:
    server.hostile("bucket/a.bin", mode)
    patience = SOON if mode in ("endless-error", "drip") else {}
    store = opened(server, "http", **patience)
    if isinstance(expected := HOSTILE[mode], tuple):
        with pytest.raises(expected[0], match=expected[1]):
            read(store)
    else:
        assert expected(read(store))
    server.hostile("bucket/a.bin", None)
    assert read(opened(server, "http")) == DATA[FITS]


def test_a_listing_without_end(server: ObjectServer) -> None:
    server.hostile("/gcs/bucket", "endless")
    with pytest.raises(GenericError, match="Timeout"):  # it is read into memory until then
        obstore.list(opened(server, "gcs", **SOON)).collect()


def test_lengths_and_etags_of_hostile_answers(server: ObjectServer) -> None:
    store = opened(server, "http")
    sizes: dict[str, list[int]] = {}
    for mode in ("wrong-size", "changing-length", "endless-length"):
        server.hostile("bucket/a.bin", mode)
        sizes[mode] = [obstore.get(store, "a.bin", options={"range": RANGE}).meta["size"] for _ in range(2)]
    size = len(DATA)
    assert sizes == {
        "wrong-size": [size + (1 << 40)] * 2,
        "changing-length": [size + 1, size + 2],
        "endless-length": [size] * 2,
    }
    assert obstore.get(store, "a.bin").meta["size"] == 1 << 60  # what `bytes()` would set aside
    server.hostile("bucket/a.bin", "no-etag")
    assert obstore.get(store, "a.bin", options={"range": RANGE}).meta["e_tag"] is None


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "TooManyRedirects"),
        ("file:///etc/passwd", "302 Found"),
        ("private-scheme://anything", "BadScheme"),
    ],
)
def test_redirects(server: ObjectServer, location: str, message: str) -> None:
    server.hostile("bucket/a.bin", "redirect", location=location or server.url("bucket/a.bin"))
    with pytest.raises(GenericError, match=message):
        read(opened(server, "http"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_object_is_replaced(server: ObjectServer, dialect: str) -> None:
    (server.root / "bucket" / "other.bin").write_bytes(DATA[::-1])
    server.replace("bucket/a.bin", after=2, source="bucket/other.bin")
    store = opened(server, dialect)
    first = obstore.get(store, "a.bin", options={"range": RANGE})
    e_tag = first.meta["e_tag"]
    assert read(store, if_match=e_tag) == DATA[FITS]
    with pytest.raises(PreconditionError):
        read(store, if_match=e_tag)
    assert read(store) == DATA[::-1][FITS]
    assert bytes(first.bytes()) == DATA[FITS], "an answer under way is of the object that it began with"
    before = obstore.head(store, "a.bin")["e_tag"]
    server.replace("bucket/a.bin", after=0)
    assert obstore.head(store, "a.bin")["e_tag"] != before, "the same bytes, put there again"


# Size, speed, what is counted.


def test_a_file_of_20_gb_needs_no_memory(server: ObjectServer) -> None:
    with (server.root / "bucket" / "sparse.bin").open("wb") as file:
        file.truncate(size := 20 * 10**9)
        file.seek(size - 3)
        file.write(b"end")
    store, process = opened(server, "gcs"), psutil.Process(server.pid)
    before = process.memory_info().rss
    assert obstore.head(store, "sparse.bin")["size"] == size
    assert bytes(obstore.get(store, "sparse.bin", options={"range": (size - 5, size)}).bytes()) == b"\0\0end"
    assert (
        len(obstore.get(store, "sparse.bin", options={"range": (size // 2, size // 2 + 64 * MIB)}).bytes()) == 64 * MIB
    )
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
    store = opened(server, "http", timeout="30s")
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
    assert read(store) == DATA[FITS]
    counters = server.counters()
    assert counters["requests"] == counters["most_in_flight"] == 1
    assert counters["bytes"] == len(DATA[FITS])


def test_wrong_controls_are_refused(object_server: ObjectServer) -> None:
    with pytest.raises(ValueError, match="bandwith"):
        object_server.configure(bandwith=1)

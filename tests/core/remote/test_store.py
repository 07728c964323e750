"""Stores that answer what they should not: one error each, in our words, within bounds of memory and time."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import lazymodel as lm
from lazymodel._remote import store
from lazymodel._remote.path import remote_path
from tests.conftest import ROOT, child_environment
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, part, scripted
from tests.servers.secrets import SECRET, everything_of

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}
QUICK: dict[str, Any] = {
    "client_options": {"timeout": "2s", "read_timeout": "300ms"},
    "retry_config": {"max_retries": 2, "backoff": {"init_backoff": 0.001, "max_backoff": 0.001}},
}
VALUES = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)
DATA = VALUES.tobytes()


def read(url: str, options: dict[str, Any] = QUICK, stop: int = 100_000) -> bytes:
    """Bytes of an object after its head was looked at, as opening does."""
    place = remote_path(url, options)
    place.store.head(place.key)
    out = np.zeros(stop - 10, np.uint8)
    place.store.get(place.key, 10, out)
    return out.tobytes()


@pytest.fixture(scope="module")
def stored(_object_server: ObjectServer) -> ObjectServer:
    (_object_server.root / "hostile").mkdir(exist_ok=True)
    (_object_server.root / "hostile" / "w.bin").write_bytes(DATA)
    (_object_server.root / "hostile" / "empty.bin").write_bytes(b"")
    return _object_server


# Answers that mean harm, or are badly broken.

HOSTILE = {
    "endless": "does not say how long|more than",
    "endless-length": "more than|changed",
    "wrong-range": "another range",
    "changing-length": "changed",
    "ignores-range": "does not serve ranges",
    "redirect": "redirects",
    "many-headers": "headers",
    "large-header": "headers",
    "less-than-range": "sent .* of .* bytes, after 3 attempts",
    "more-than-range": "more than",
    "shorter": "broke off, after 3 attempts",
    "drip": "stopped answering",
}


@pytest.mark.parametrize("mode", HOSTILE)
def test_a_hostile_answer_is_one_error(stored: ObjectServer, mode: str) -> None:
    stored.reset()
    stored.hostile("hostile/w.bin", mode, **({"location": stored.url("hostile/w.bin")} if mode == "redirect" else {}))
    with pytest.raises(lm.CheckpointError, match=HOSTILE[mode]) as found:
        read(f"{stored.url('hostile/w.bin')}?sig={SECRET}")
    assert str(found.value).count("hostile/w.bin") == 1
    assert SECRET not in everything_of(found.value)


@pytest.mark.parametrize("mode", ["longer", "no-etag", "wrong-size"])
def test_what_is_harmless_is_read(stored: ObjectServer, mode: str) -> None:
    stored.reset()
    stored.hostile("hostile/w.bin", mode)
    assert read(stored.url("hostile/w.bin")) == DATA[10:100_000]


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/w", "gopher://x", "data:,w", "http://no.such.host.invalid/w", "//"],
)
def test_redirects_lead_to_web_servers_only(location: str) -> None:
    said = pytest.raises(lm.CheckpointError, match="redirects|cannot be found|cannot be reached|failed")
    with scripted(lambda _: (302, {"Location": f"{location}?{SECRET}"}, b"")) as origin, said as found:
        read(f"{origin}/w", ONCE)
    assert SECRET not in everything_of(found.value) and "passwd" not in everything_of(found.value)


def test_redirects_from_https_to_http_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(DATA)
    with ObjectServer(tmp_path, tls=True) as server:
        options = {"client_options": {"root_certificate": server.certificate}, **ONCE}
        assert read(server.url("w", scheme="https"), options) == DATA[10:100_000]
        server.hostile("w", "redirect", location=f"{server.url('other')}?{SECRET}")
        with pytest.raises(lm.CheckpointError, match="redirects") as found:
            read(server.url("w", scheme="https"), options)
        assert SECRET not in everything_of(found.value)
        with pytest.raises(lm.CheckpointError, match="certificate is not trusted"):
            read(server.url("w", scheme="https"), ONCE)


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 410, 411, 412, 418, 429, 500, 501, 503, 599])
def test_what_a_server_writes_into_an_error_is_not_repeated(status: int) -> None:
    said = dict.fromkeys((401, 403), "refuses access") | dict.fromkeys((404, 405), "nothing") | {412: "changed"}
    text = f"\x1b[2J{SECRET} status code: 200 credential token \n".encode()
    headers = {"Retry-After": "0", "WWW-Authenticate": SECRET, "X-Error-Message": SECRET}
    raised = pytest.raises(lm.CheckpointError, match=said.get(status, str(status)))
    with scripted(lambda _: (status, headers, text)) as origin, raised as found:
        read(f"{origin}/tokenizer-header.bin?sig={SECRET}", QUICK)
    told = everything_of(found.value)
    assert SECRET not in told and "\x1b" not in told
    assert ("3 attempts" in str(found.value)) is (status == 429 or status >= 500)


def test_names_of_files_do_not_decide_what_an_error_is(stored: ObjectServer) -> None:
    for name in ("header.json", "certificate", "content-range", "tokenizer.json", "a status code: 404", "credential"):
        with pytest.raises(lm.CheckpointError, match="cannot be reached, after 3 attempts"):
            read(f"http://127.0.0.1:9/{name}", QUICK)


def test_objects_without_bytes(stored: ObjectServer) -> None:
    stored.reset()
    for dialect, options in (("http", QUICK), ("gcs", stored.gcs()), ("azure", stored.azure())):
        kind = {"http": stored.url(""), "gcs": "gs://", "azure": "az://"}[dialect]
        place = remote_path(f"{kind}hostile/empty.bin", options)
        assert place.is_file() and place.stat().st_size == 0
        assert place.read_bytes() == b""


def test_a_weak_etag_is_compared_and_not_sent() -> None:
    """If-Match never holds for one (RFC 9110, section 13.1.1)."""
    etags = iter(['W/"1"', 'W/"1"', 'W/"2"'])

    def reply(asked: Asked) -> Reply:
        return (412, {}, b"") if "If-Match" in asked.headers else part(DATA, asked, ETag=next(etags))

    with scripted(reply) as origin:
        place = remote_path(f"{origin}/w", ONCE)
        place.store.head("w")
        out = np.zeros(10, np.uint8)
        place.store.get("w", 0, out)
        assert out.tobytes() == DATA[:10]
        with pytest.raises(lm.CheckpointError, match="changed while it was being read"):
            place.store.get("w", 0, out)


@pytest.mark.parametrize("how", ["etag", "modified", "size", "shorter", "gone"])
def test_another_object_is_one_error(how: str) -> None:
    answers: list[int] = []

    def reply(asked: Asked) -> Reply:
        answers.append(1)
        again = len(answers) > 1
        headers = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"} if how == "modified" else {}
        headers |= {"ETag": '"1"'} if how in ("etag", "gone") else {}
        if again:
            match how:
                case "etag":
                    headers["ETag"] = '"2"'
                case "modified":
                    headers["Last-Modified"] = "Tue, 02 Jan 2024 00:00:00 GMT"
                case "size":
                    return part(DATA + b"more", asked)
                case "shorter":
                    return 416, {"Content-Range": "bytes */5"}, b""
                case _:
                    return 404, {}, b""
        return part(DATA, asked, **headers)

    with scripted(reply) as origin, pytest.raises(lm.CheckpointError) as found:
        read(f"{origin}/w", ONCE)
    assert ("nothing any more" if how == "gone" else "changed while it was being read") in str(found.value)
    assert len(answers) == 2


# Lists.


def _listing(*names: str, more: bool = False) -> Reply:
    entries = "".join(
        f"<Contents><Key>{name}</Key><Size>3</Size><LastModified>2020-01-01T00:00:00Z</LastModified><ETag>e</ETag>"
        "</Contents>"
        for name in names
    )
    token = f"<NextContinuationToken>{SECRET}</NextContinuationToken>" if more else ""
    return 200, {}, f"<ListBucketResult>{entries}{token}</ListBucketResult>".encode()


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "a/../x.safetensors", "a&#1;.safetensors", "a&#10;b", "x//y", "."]
)
def test_lists_with_names_that_lead_elsewhere(name: str) -> None:
    with scripted(lambda _: _listing(name)) as origin:
        options = {"base_url": origin, "bearer_token": SECRET, "client_options": {"allow_http": True}}
        with pytest.raises(lm.CheckpointError, match="names") as found:
            lm.open_checkpoint("gs://bucket", options)
    assert SECRET not in everything_of(found.value)
    assert str(found.value).isprintable()


@pytest.mark.parametrize("body", [b"", b"<html>", b"<ListBucketResult><Contents><Size>-1", b"\xff" * 100, b"{}"])
def test_lists_that_are_none(body: bytes) -> None:
    with scripted(lambda _: (200, {}, body)) as origin:
        options = {"base_url": origin, "bearer_token": SECRET, "client_options": {"allow_http": True}}
        with pytest.raises(lm.CheckpointError):
            lm.open_checkpoint("gs://bucket", options)


def test_a_list_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LIST_SECONDS", 0.3)
    asked: list[int] = []

    def reply(_: Asked) -> Reply:
        asked.append(1)
        return _listing(*(f"{len(asked)}-{number}" for number in range(1000)), more=True)

    with scripted(reply) as origin:
        options = {"base_url": origin, "bearer_token": SECRET, "client_options": {"allow_http": True}}
        with pytest.raises(lm.CheckpointError, match="no end after 0.3 seconds") as found:
            lm.open_checkpoint("gs://bucket", options)
    assert SECRET not in everything_of(found.value)


def _zeros() -> Iterator[bytes]:
    while True:
        yield bytes(1 << 16)


STATUSES = (200, 204, 301, 302, 304, 400, 401, 403, 404, 405, 410, 412, 416, 418, 429, 500, 502, 503, 599)
FRAMES: dict[str, dict[str, str]] = {
    "long": {"Content-Length": str(8 << 30)},
    "chunked": {"Transfer-Encoding": "chunked"},
    "unsaid": {"Connection": "close"},
}


def test_memory_stays_bounded_whatever_is_sent() -> None:
    """A worker's own: other tests' memory would be in it."""
    stored = save({"w": np.zeros(1 << 18, np.float32)})
    bomb = b'{"sha": "' + b"a" * 40 + b'", "siblings": [' + b"[" * 200_000

    def reply(asked: Asked) -> Reply:
        span = {"Content-Range": f"bytes 0-1048575/{1 << 40}"}
        match asked.path.split("/")[1]:
            case "api" if "endless" in asked.path:
                return 200, {"Content-Length": str(1 << 50)}, _zeros()
            case "api":
                return 200, {}, bomb
            case "endless":
                return 206, span | {"Content-Length": str(1 << 60)}, _zeros()
            case "status" if not asked.path.endswith(".safetensors"):
                return 404, {}, b""
            case "status":
                status, frame, when = asked.path.split("/")[2].split(".")[0].split("-")
                if when == "later" and asked.range[0] == 0:
                    return part(stored, asked, ETag='"1"')
                pieces = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in _zeros())
                return int(status), FRAMES[frame], pieces if frame == "chunked" else _zeros()
            case "chunked":
                chunks = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in _zeros())
                return 206, span | {"Transfer-Encoding": "chunked"}, chunks
            case _:  # a header of safetensors that says that it is as long as all
                size = (1 << 60).to_bytes(8, "little")
                return part(size + bytes(100_000), asked)

    with scripted(reply) as origin:
        urls = {
            "read endless": f"{origin}/endless",
            "read chunked": f"{origin}/chunked",
            "open": f"{origin}/x.safetensors",
            "hub bomb": "hf://owner/bomb",
            "hub endless": "hf://owner/endless",
            **{
                what: f"{origin}/status/{what}.safetensors"
                for status, frame, when in itertools.product(STATUSES, FRAMES, ("first", "later"))
                for what in [f"{status}-{frame}-{when}"]
            },
        }
        child = subprocess.run(
            [sys.executable, "-m", "tests.core.remote._hostile_worker", json.dumps(urls)],
            cwd=ROOT,
            env=child_environment() | {"HF_ENDPOINT": origin, "HF_TOKEN": SECRET},
            capture_output=True,
            text=True,
        )
    assert child.returncode == 0, child.stderr
    assert SECRET not in child.stdout + child.stderr
    for what, (nbytes, error) in json.loads(child.stdout).items():
        assert error != "none", what
        assert nbytes < (160 << 20 if what == "hub endless" else 24 << 20), (what, nbytes, error)

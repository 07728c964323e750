"""Web servers behind proxies, connections that are used again, and durations as obstore writes them."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazymodel as lm
from lazymodel._remote.path import remote_path
from lazymodel._remote.web import _is_excluded, _seconds
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, part, scripted
from tests.servers.secrets import SECRET, everything_of

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

DATA = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8).tobytes()
ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}


def read(url: str, options: dict[str, Any]) -> bytes:
    place = remote_path(url, {**ONCE, **options})
    place.store.head(place.key)
    out = np.zeros(len(DATA), np.uint8)
    place.store.get(place.key, 0, out)
    return out.tobytes()


@contextlib.contextmanager
def tunnel(asked: list[str]) -> Generator[str]:
    """A proxy that knows CONNECT alone; the heads of requests go into a list."""

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            asked.append(head.decode())
            host, port = head.split()[1].decode().rsplit(":", 1)
            with socket.create_connection((host, int(port))) as there:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    for one in select.select([client, there], [], [])[0]:
                        if not (data := one.recv(1 << 16)):
                            return
                        (there if one is client else client).sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_https_goes_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").write_bytes(DATA)
    asked: list[str] = []
    with ObjectServer(tmp_path, tls=True) as server, tunnel(asked) as proxy:
        url, trusted = server.url("w", scheme="https"), {"root_certificate": server.certificate}
        assert read(url, {"client_options": {**trusted, "proxy_url": f"http://me:{SECRET}@{proxy}"}}) == DATA
        assert asked and all(head.startswith("CONNECT 127.0.0.1:") for head in asked)
        assert all("Proxy-Authorization: Basic " in head for head in asked)
        told = len(asked)
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        monkeypatch.setenv("NO_PROXY", "example.com, 127.0.0.0/8")
        assert read(url, {"client_options": trusted}) == DATA and len(asked) == told
        monkeypatch.delenv("NO_PROXY")
        assert read(url, {"client_options": trusted}) == DATA and len(asked) > told
        with pytest.raises(lm.CheckpointError, match="proxy's address") as found:
            read(url, {"client_options": {**trusted, "proxy_url": f"socks5://me:{SECRET}@{proxy}"}})
        assert SECRET not in everything_of(found.value)


def test_http_goes_through_a_proxy() -> None:
    asked: list[Asked] = []

    def reply(request: Asked) -> Reply:
        asked.append(request)
        return part(DATA, request, ETag='"1"')

    with scripted(reply) as proxy:
        options = {"client_options": {"allow_http": True, "proxy_url": proxy}}
        assert read("http://no-such-host.invalid/w", options) == DATA
    assert {request.headers["Host"] for request in asked} == {"no-such-host.invalid"}


@pytest.mark.parametrize(
    ("host", "excludes", "found"),
    [
        ("a.example.com", ".example.com", True),
        ("a.example.com", "b.com,example.com", True),
        ("example.com", "*.example.com", True),
        ("anexample.com", "example.com", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "11.0.0.0/8", False),
        ("host", "*", True),
        ("host", "", False),
    ],
)
def test_hosts_that_are_asked_without_a_proxy(host: str, excludes: str, found: bool) -> None:
    assert _is_excluded(host, excludes) is found


def test_connections_are_used_again(object_server: ObjectServer) -> None:
    (object_server.root / "web.bin").write_bytes(DATA)
    place = remote_path(object_server.url("web.bin"), ONCE)
    out = np.zeros(1000, np.uint8)
    for start in range(20):
        place.store.get(place.key, start, out)
        assert out.tobytes() == DATA[start : start + 1000]
        assert not (place.parent / "absent.bin").is_file()
    assert object_server.counters()["connections"] <= 3  # one is the counters' own


def test_a_connection_that_the_server_closed_is_no_error() -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:1000]
        raise ConnectionError  # the handler closes it

    def reply(asked: Asked) -> Reply:
        status, headers, _ = part(DATA, asked, ETag='"1"')
        start, stop = asked.range
        if stop - start == 1000:
            return status, headers | {"Content-Length": "1000"}, pieces()
        return part(DATA, asked, ETag='"1"')

    with scripted(reply) as origin:
        place = remote_path(f"{origin}/w", ONCE)
        out = np.zeros(1000, np.uint8)
        for _ in range(5):
            place.store.get("w", 0, out)
            assert out.tobytes() == DATA[:1000]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("1m 30s", 90),
        ("2h37min", 9420),
        ("3 seconds", 3),
        ("1month", 2_629_800),
        ("5us", 5e-6),
        ("1d", 86400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert _seconds(text, 0) == pytest.approx(seconds)

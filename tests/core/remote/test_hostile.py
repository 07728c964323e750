"""Stores that answer what they should not: one error each, in our words, within bounds of memory and time."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import lazymodel as lm
from tests.large import mostly_large
from tests.processes import printed, run_workers
from tests.servers.lying import lying
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, only, part, scripted
from tests.servers.secrets import SECRET, everything_of
from tests.small import make_small

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

WORKER = Path(__file__).with_name("_worker.py")
ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}
QUICK: dict[str, Any] = {
    "client_options": {"timeout": "2s", "read_timeout": "300ms"},
    "retry_config": {"max_retries": 2, "backoff": {"init_backoff": 0.001, "max_backoff": 0.001}},
}
VALUES = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)
FILE = save({"w": VALUES})
W = "/w.safetensors"


def check_read(url: str, options: dict[str, Any] = QUICK) -> None:
    with lm.open_checkpoint(url, options) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"].read(), VALUES)


@contextlib.contextmanager
def refused(match: str) -> Iterator[pytest.ExceptionInfo[lm.CheckpointError]]:
    """One error, in our words, without what the server wrote."""
    with pytest.raises(lm.CheckpointError, match=match) as found:
        yield found
    told = everything_of(found.value)
    assert SECRET not in told and "\x1b" not in told and str(found.value).isprintable()


@pytest.fixture
def server(object_server: ObjectServer) -> ObjectServer:
    (object_server.root / "hostile").mkdir(exist_ok=True)
    (object_server.root / "hostile" / "w.safetensors").write_bytes(FILE)
    (object_server.root / "hostile" / "empty.safetensors").write_bytes(b"")
    return object_server


HOSTILE = {
    "endless": "does not state the length|more than",
    "endless-length": "more than|changed",
    "wrong-range": "another range",
    "changing-length": "1 more bytes",
    "wrong-size": "1099511627776 more bytes",
    "ignores-range": "does not serve ranges",
    "redirect": "redirects",
    "many-headers": "headers",
    "large-header": "headers",
    "less-than-range": "sent .* of .* bytes, after 3 attempts",
    "more-than-range": "more than",
    "shorter": "broke off, after 3 attempts",
    "drip": "stopped answering",
    "longer": "",
    "no-etag": "",
}


@pytest.mark.parametrize("mode", mostly_large(HOSTILE, [mode for mode in HOSTILE if mode != "drip"]))
def test_a_hostile_answer_is_one_error_and_a_harmless_one_is_read(server: ObjectServer, mode: str) -> None:
    path = "hostile/w.safetensors"
    server.hostile(path, mode, **({"location": server.url(path)} if mode == "redirect" else {}))
    url = f"{server.url(path)}?sig={SECRET}"
    if not HOSTILE[mode]:
        check_read(url)
        return
    soon = {"client_options": {"timeout": "600ms"}} if mode == "drip" else {}
    with refused(HOSTILE[mode]) as found:
        check_read(url, QUICK | soon)
    assert str(found.value).count(path) == 1


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/w", "gopher://x", "data:,w", "http://no.such.host.invalid/w", "//"],
)
def test_redirects_lead_to_web_servers_only(location: str) -> None:
    reply: Reply = (302, {"Location": f"{location}?{SECRET}"}, b"")
    with (
        scripted(only(W, lambda _: reply)) as origin,
        refused("redirects|cannot be found|cannot be reached|failed") as found,
    ):
        check_read(origin + W, ONCE)
    assert "passwd" not in everything_of(found.value)


def test_redirects_from_https_to_http_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(FILE)
    with ObjectServer(tmp_path, tls=True) as server:
        url, trusting = server.url("w.safetensors", scheme="https"), {"root_certificate": server.certificate}
        check_read(url, ONCE | {"client_options": trusting})
        with refused("certificate is not trusted"):
            check_read(url, ONCE)
        server.hostile("w.safetensors", "redirect", location=f"{server.url('other')}?{SECRET}")
        with refused("redirects"):
            check_read(url, ONCE | {"client_options": trusting})


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 410, 411, 412, 418, 429, 500, 501, 503, 599])
def test_what_a_server_writes_into_an_error_is_not_repeated(status: int) -> None:
    said = (
        dict.fromkeys((401, 403), "refuses access") | dict.fromkeys((404, 405), "no longer exists") | {412: "changed"}
    )
    text = f"\x1b[2J{SECRET} status code: 200 credential token \n".encode()
    headers = {"Retry-After": "0", "WWW-Authenticate": SECRET, "X-Error-Message": SECRET}
    opened: list[int] = []

    def reply(asked: Asked) -> Reply:
        return (status, headers, text) if opened else part(FILE, asked)

    name = "/tokenizer-header.safetensors"
    with (
        scripted(only(name, reply)) as origin,
        lm.open_checkpoint(f"{origin}{name}?sig={SECRET}", QUICK) as checkpoint,
        refused(said.get(status, str(status))) as found,
    ):
        opened.append(1)
        checkpoint["w"].read()
    assert ("3 attempts" in str(found.value)) is (status == 429 or status >= 500)


def test_objects_without_bytes(server: ObjectServer) -> None:
    for root, options in ((server.url(""), QUICK), ("gs://", server.gcs()), ("az://", server.azure())):
        with refused(r"empty\.safetensors.* at least 8 bytes, found 0"):
            lm.open_checkpoint(f"{root}hostile/empty.safetensors", options)


def test_a_weak_etag_is_compared_and_not_sent() -> None:
    """If-Match never holds for one (RFC 9110, section 13.1.1)."""
    etags = iter(['W/"1"', 'W/"1"', 'W/"2"'])

    def reply(asked: Asked) -> Reply:
        return (412, {}, b"") if "If-Match" in asked.headers else part(FILE, asked, ETag=next(etags))

    with scripted(only(W, reply)) as origin, lm.open_checkpoint(origin + W, ONCE) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"].read(), VALUES)
        with refused("changed while it was being read"):
            checkpoint["w"].read()


@pytest.mark.parametrize("how", ["etag", "modified", "size", "shorter", "gone"])
def test_another_object_is_one_error(how: str) -> None:
    answers: list[int] = []

    def reply(asked: Asked) -> Reply:
        answers.append(1)
        again = len(answers) > 1
        headers = {"Last-Modified": f"Mon, 0{1 + again} Jan 2024 00:00:00 GMT"} if how == "modified" else {}
        headers |= {"ETag": f'"{again and how == "etag"}"'} if how in ("etag", "gone") else {}
        if again and how == "size":
            return part(FILE + b"more", asked)
        if again and how == "shorter":
            return 416, {"Content-Range": "bytes */5"}, b""
        if again and how == "gone":
            return 404, {}, b""
        return part(FILE, asked, **headers)

    with scripted(only(W, reply)) as origin, lm.open_checkpoint(origin + W, ONCE) as checkpoint:
        with refused("no longer exists" if how == "gone" else "changed while it was being read"):
            checkpoint["w"].read()
        assert len(answers) == 2


# Lists ----------------------------------------------------------------------------------------------------------------


def listing(*names: str, more: bool = False) -> Reply:
    entries = "".join(
        f"<Contents><Key>{name}</Key><Size>3</Size><LastModified>2020-01-01T00:00:00Z</LastModified><ETag>e</ETag>"
        "</Contents>"
        for name in names
    )
    token = f"<NextContinuationToken>{SECRET}</NextContinuationToken>" if more else ""
    return 200, {}, f"<ListBucketResult>{entries}{token}</ListBucketResult>".encode()


def open_bucket(origin: str) -> None:
    lm.open_checkpoint(
        "gs://bucket", {"base_url": origin, "bearer_token": SECRET, "client_options": {"allow_http": True}}
    )


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "a/../x.safetensors", "a&#1;.safetensors", "a&#10;b", "x//y", "."]
)
def test_lists_with_names_that_lead_elsewhere(name: str) -> None:
    with scripted(lambda _: listing(name)) as origin, refused("names"):
        open_bucket(origin)


@pytest.mark.parametrize("body", [b"", b"<html>", b"<ListBucketResult><Contents><Size>-1", b"\xff" * 100, b"{}"])
def test_lists_that_are_none(body: bytes) -> None:
    with scripted(lambda _: (200, {}, body)) as origin, refused("."):
        open_bucket(origin)


def test_a_list_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, list_seconds=0.3)
    pages = itertools.count()

    def reply(_: Asked) -> Reply:
        return listing(*(f"{next(pages)}-{number}" for number in range(1000)), more=True)

    with scripted(reply) as origin, refused("list of its objects does not end within 0.3 seconds"):
        open_bucket(origin)


# Hubs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"sha": "../..", "siblings": []}', b'{"sha": "\xff"}'),
        *(b'{"sha": "a\\nb", "siblings": []}', b'{"sha": 3, "siblings": []}', b'{"sha": "a", "siblings": 3}'),
        *(b'{"sha": "a", "siblings": [3]}', b'{"sha": "a", "siblings": [{"rfilename": 3}]}'),
        b'{"sha": "a", "siblings": [{}]}',
    ],
)
def test_answers_of_a_hub_that_are_none(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda _: (200, {}, answer)) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        with refused("hf://o/n@main: the hub's answer is not in its documented form"):
            lm.open_checkpoint("hf://o/n")


def test_names_of_a_hub_s_files_that_lead_elsewhere_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["../../x", "/etc/x", "a\0", "\x1b[2J", "./x"]
    files = [{"rfilename": name} for name in (*(f"{name}.safetensors" for name in names), "")]
    asked: list[str] = []

    def reply(request: Asked) -> Reply:
        asked.append(request.path)
        return 200, {}, json.dumps({"sha": "f" * 40, "siblings": files}).encode()

    with scripted(reply) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        with refused(r"(found no|no) checkpoint"):
            lm.open_checkpoint("hf://o/n")
    assert len(asked) == 1


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


# Memory and time ------------------------------------------------------------------------------------------------------

STATUSES = (200, 204, 301, 302, 304, 400, 401, 403, 404, 405, 410, 412, 416, 418, 429, 500, 502, 503, 599)
FRAMES: dict[str, dict[str, str]] = {
    "long": {"Content-Length": str(8 << 30)},
    "chunked": {"Transfer-Encoding": "chunked"},
    "unsaid": {"Connection": "close"},
}


def zeros() -> Iterator[bytes]:
    while True:
        yield bytes(1 << 16)


def bounded(folder: Path, tasks: dict[str, Any], **environment: str) -> dict[str, tuple[int, list[str]]]:
    """Of each task (URL, options, times), the most memory that it took and what came of it, in a process of its own."""
    codes = run_workers(WORKER, [("bounded", json.dumps(tasks))], folder, patience=150, **environment)
    assert codes == [0], printed(folder, 1)
    assert SECRET not in printed(folder, 1)
    return json.loads((folder / "log-0.txt").read_text().splitlines()[0])


def test_memory_stays_bounded_whatever_is_sent(tmp_path: Path) -> None:
    stored = save({"w0": np.zeros(1 << 18, np.float32)})
    bomb = b'{"sha": "' + b"a" * 40 + b'", "siblings": [' + b"[" * 200_000

    def reply(asked: Asked) -> Reply:
        _, kind, *rest = asked.path.split("/")
        if kind == "api" and "endless" in asked.path:
            return 200, {"Content-Length": str(1 << 50)}, zeros()
        if kind == "api":
            return 200, {}, bomb
        if not asked.path.endswith(".safetensors"):
            return 404, {}, b""
        if kind != "status":  # a header of safetensors that says that it is as long as all
            return part((1 << 60).to_bytes(8, "little") + bytes(100_000), asked)
        status, frame, when = rest[0].split(".")[0].split("-")
        if when == "later" and asked.range[0] == 0:
            return part(stored, asked, ETag='"1"')
        chunks = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in zeros())
        headers = FRAMES[frame]
        if status == "206":
            first, stop = asked.range
            headers = headers | {"Content-Range": f"bytes {first}-{stop - 1}/{1 << 40}"}
        return int(status), headers, chunks if frame == "chunked" else zeros()

    with scripted(reply) as origin:
        urls = {"open": f"{origin}/x.safetensors", "hub bomb": "hf://owner/bomb", "hub endless": "hf://owner/endless"}
        for status, frame, when in itertools.product((206, *STATUSES), FRAMES, ("first", "later")):
            urls[f"{status}-{frame}-{when}"] = f"{origin}/status/{status}-{frame}-{when}.safetensors"
        quick = {"client_options": {"timeout": "1s"}} | ONCE
        tasks = {what: (url, quick, 1) for what, url in urls.items()}
        found = bounded(tmp_path, tasks, HF_ENDPOINT=origin, HF_TOKEN=SECRET)
    for what, (nbytes, (outcome,)) in found.items():
        assert outcome != "right", what
        assert nbytes < (160 << 20 if what == "hub endless" else 24 << 20), (what, nbytes, outcome)


TIMES = 6  # loads from each
MOST = 48 << 20  # bytes of private memory: what is loaded at a time, and what fetches it


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seeds", [range(4), *(pytest.param([n], marks=pytest.mark.large) for n in range(4, 20))])
def test_servers_that_lie_at_random_end_in_the_right_values_or_one_error(tmp_path: Path, seeds: range) -> None:
    """Two shards of 3 MiB each, and their index."""
    tensors = {f"w{n}": (np.arange(1 << 18) + n).astype(np.float32).reshape(512, 512) for n in range(6)}
    files = {f"/m/{n}.safetensors": save({name: tensors[name] for name in [*tensors][n::2]}) for n in range(2)}
    index = {"metadata": {}, "weight_map": {name: f"{n % 2}.safetensors" for n, name in enumerate(tensors)}}
    files["/m/model.safetensors.index.json"] = json.dumps(index).encode()
    options = {
        "client_options": {"timeout": "2s", "read_timeout": "250ms"},
        "retry_config": {"max_retries": 3, "backoff": {"init_backoff": 0.001, "max_backoff": 0.01}},
    }
    with contextlib.ExitStack() as stack:
        origins = {seed: stack.enter_context(scripted(lying(seed, files))) for seed in seeds}
        tasks = {str(n): (f"{url}/m/model.safetensors.index.json", options, TIMES) for n, url in origins.items()}
        found = bounded(tmp_path, tasks)
    for seed, (nbytes, outcomes) in found.items():
        print(seed, nbytes >> 20, outcomes)
        assert len(outcomes) == TIMES
        assert all(outcome.isprintable() and len(outcome) < 1000 for outcome in outcomes), outcomes
        assert nbytes < MOST, (nbytes, outcomes)


def test_a_length_that_changes_is_another_object(server: ObjectServer) -> None:
    with lm.open_checkpoint(server.url("hostile/w.safetensors"), QUICK) as checkpoint:
        server.hostile("hostile/w.safetensors", "changing-length")
        with refused("changed"):
            checkpoint["w"].read()

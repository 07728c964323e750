"""URLs of checkpoints: where they lead, through which proxy, with whose credentials; and that none of it is shown."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import itertools
import logging
import select
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from safetensors.numpy import save, save_file

import lazymodel as lm
from tests.large import mostly_large
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server
from tests.servers.scripted import Asked, Reply, only, part, scripted
from tests.servers.secrets import SECRET, everything_of

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

VALUES = np.arange(60_000, dtype=np.float32)
FILE = save({"w": VALUES})
W = "/w.safetensors"
ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}
PLAIN: dict[str, Any] = {"client_options": {"allow_http": True}} | ONCE


def check_read(url: str, options: dict[str, Any] = ONCE) -> None:
    with lm.open_checkpoint(url, options) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"].read(), VALUES)


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_an_http_endpoint_is_said_to_be_that_and_asked_if_allowed(kind: str) -> None:
    seen: list[Asked] = []
    with scripted(lambda request: seen.append(request) or (403, {}, b"")) as origin:
        given: dict[str, Any] = {
            "s3": {"endpoint": origin, "region": "x", "access_key_id": "x", "secret_access_key": "x"},
            "gs": {"base_url": origin, "bearer_token": "x"},
            "az": {"endpoint": origin, "account_name": "x", "skip_signature": True},
        }[kind]
        fix = r"the endpoint is http, .*storage_options=\{'client_options': \{'allow_http': True\}\}"
        with pytest.raises(lm.CheckpointError, match=fix):
            lm.open_checkpoint(f"{kind}://box/w.safetensors", given | ONCE)
        assert not seen
        with pytest.raises(lm.CheckpointError, match="refuses access"):
            lm.open_checkpoint(f"{kind}://box/w.safetensors", given | PLAIN)
        assert seen


def test_what_a_web_server_does_not_have_is_said_to_be_that() -> None:
    with scripted(lambda request: (404, {}, b"")) as origin:
        for path in ("w.safetensors", "folder", "folder/"):
            with pytest.raises(
                lm.CheckpointError, match=rf"cannot read {origin}/{path.rstrip('/')}: .* 404 \(not found\)"
            ) as error:
                lm.open_checkpoint(f"{origin}/{path}")
            assert "supported" not in str(error.value)


# What a URL means -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "asked", "shown"),
    [
        ("s3://bucket/a/b.npz", "/bucket/a/b.npz", "s3://bucket/a/b.npz"),
        ("s3a://bucket/a", "/bucket/a", "s3://bucket/a"),
        ("gs://bucket//a//b/", "/bucket/a/b", "gs://bucket/a/b"),
        ("gs://bucket/a b/ü%20#x", "/bucket/a b/ü%20#x", "gs://bucket/a b/ü%20#x"),
        ("gs://bucket/a\x1b[31m", "", "gs://bucket/a\\x1b[31m"),
        ("az://box/a", "/box/a", "az://box/a"),
        ("abfs://box/a", "/box/a", "az://box/a"),
        ("abfss://box@account.dfs.core.windows.net/a", "", "az://box"),
        ("http://HOST/a%20b/%C3%BC?sig=x#y", "/a%20b/%C3%BC?sig=x", "http://HOST/a b/ü"),
        ("HTTP://HOST/a", "/a", "http://HOST/a"),
        ("http://me:hush%40word@HOST/a", "/a", "http://HOST/a"),
        ("hf://o/n", "/api/models/o/n/revision/main", "hf://o/n"),
        ("hf://o/n@v1/sub/x", "/api/models/o/n/revision/v1", "hf://o/n@v1"),
        ("hf://o/n@refs%2Fpr%2F1/folder", "/api/models/o/n/revision/refs%2Fpr%2F1", "hf://o/n@refs/pr/1"),
    ],
)
def test_where_a_url_leads_and_how_it_is_shown(
    url: str, asked: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Asked] = []

    def reply(request: Asked) -> Reply:
        seen.append(request)
        return 403, {}, b""

    with scripted(reply) as origin:
        host = origin.partition("://")[2]
        s3 = {"endpoint": origin, "region": "x", "access_key_id": "x", "secret_access_key": "x"}
        azure = {"endpoint": origin, "account_name": "account", "bearer_token": "x"}
        options: dict[str, Any] = {"s3": s3, "gs": {"base_url": origin, "bearer_token": "x"}, "az": azure, "ab": azure}
        monkeypatch.setenv("HF_ENDPOINT", origin)
        with pytest.raises(lm.CheckpointError) as found:
            lm.open_checkpoint(url.replace("HOST", host), PLAIN | options.get(url[:2], {}))
    assert shown.replace("HOST", host) in str(found.value)
    told = everything_of(found.value)
    assert "hush" not in told and "sig=" not in told and "\x1b" not in told
    if asked:
        first = seen[0].path + (f"?{seen[0].query}" if "?" in asked else "")
        assert asked in (first, unquote(first))
        user = base64.b64encode(b"me:hush@word").decode()
        assert ("me:" in url) is (seen[0].headers.get("Authorization") == f"Basic {user}")


@pytest.mark.parametrize(
    "text",
    [
        *("ftp://me:SECRET@host/a?SECRET", "s3://KEY:SECRET@bucket/a", "gs://SECRET@bucket/a", "gs:///a?SECRET"),
        *("az://box/a?sv=1&sig=SECRET", "az://box:SECRET@account/a", "s3://KEY:SEC/RET@bucket/a?SECRET"),
        *("https:///a?SECRET", "https://me:SECRET@host:port/a?SECRET", "https://me:SEC/RET@host/a?SECRET"),
        *("https://[SECRET/a", "http://me:SECRET@host/a?SECRET", "https://host/a/../b?SECRET", "gs://bucket/../a"),
        *("https://host/%2e%2e/b?SECRET", "https://host/a%00?SECRET", "hf://o", "hf://o/n@", "hf://../n"),
        *("hf://o/n/../x", "hf://o/n%2F.."),
    ],
)
def test_what_is_no_url_of_a_checkpoint_is_refused_and_shows_no_secret(text: str) -> None:
    with pytest.raises(lm.CheckpointError, match="expected") as found:
        lm.open_checkpoint(text)
    told = "".join(traceback.format_exception(found.value))
    for secret in ("SECRET", "KEY:SEC", "RET@", "sig="):
        assert secret not in told


@pytest.mark.parametrize("path", ["a/b", "C:\\x", "a:b", "x:/y", "/a://b"])
def test_paths_are_no_urls(path: str) -> None:
    with pytest.raises(lm.CheckpointError, match="there is no checkpoint at"):
        lm.open_checkpoint(path)


def test_plain_http_is_for_this_machine_or_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("10.0.0.1", "local.host", "localhost.example.com"):
        with pytest.raises(lm.CheckpointError, match="plain http"):
            lm.open_checkpoint(f"http://{host}/w.safetensors", ONCE)
    for host in ("localhost", "127.8.9.1", "[::1]"):
        with pytest.raises(lm.CheckpointError, match="cannot be reached"):
            lm.open_checkpoint(f"http://{host}:9/w.safetensors", ONCE)
    monkeypatch.setenv("HF_ENDPOINT", f"http://me:{SECRET}@hub.example.com")
    with pytest.raises(lm.CheckpointError, match="expected https") as found:
        lm.open_checkpoint("hf://o/n")
    assert SECRET not in everything_of(found.value)


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://bucket/a", "region", "storage_options to be a mapping"),
        ("s3://bucket/a", {"client_options": "SECRET"}, "client_options"),
        ("s3://bucket/a", {"retry_config": 3}, "retry_config"),
        ("s3://bucket/a", {"retry_config": {"max_retries": "SECRET"}}, "retry_config"),
        ("s3://bucket/a", {"region": 1}, "region"),
        ("s3://bucket/a", {"regoin": "SECRET"}, "regoin"),
        ("s3://bucket/a", {"client_options": {"timeout": "SECRET"}}, "timeout"),
        ("s3://bucket/a", {"client_options": {"tmeout": "SECRET"}}, "tmeout"),
        ("gs://bucket/a", {"service_account_key": "{SECRET"}, "service_account_key"),
        ("hf://o/n", {"token": "SECRET"}, "token"),
        ("https://host/a", {"headers": {"X": "SECRET"}}, "headers"),
    ],
)
def test_wrong_options_are_named_without_their_values(url: str, options: Any, named: str) -> None:
    with pytest.raises(lm.CheckpointError, match=named) as found:
        lm.open_checkpoint(url, options)
    assert "SECRET" not in everything_of(found.value)


# Folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["folder", "folder/", "folder/model.safetensors", "folder?sig=x", "folder/?sig=x"])
@pytest.mark.parametrize("page", ["index", "redirect", "none"])
def test_folders_of_web_servers(url: str, page: str) -> None:
    """Some answer with a page that lists them, some send to the name with a slash for that, most have nothing there."""

    def reply(request: Asked) -> Reply:
        if request.path == "/folder/model.safetensors":
            return part(FILE, request, ETag='"1"') if request.query == url.partition("?")[2] else (403, {}, b"")
        if request.path == "/folder" and page == "redirect":
            return 301, {"Location": "/folder/"}, b""
        if page == "none" or request.path not in ("/folder", "/folder/"):
            return 404, {}, b""
        return part(b"<html>model.safetensors</html>", request, Content_Type="text/html; charset=utf-8")

    with scripted(reply) as origin, lm.open_checkpoint(f"{origin}/{url}") as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"].read(), VALUES)
        assert "sig" not in repr(checkpoint)


def test_a_page_is_no_file() -> None:
    def reply(request: Asked) -> Reply:
        return part(b"<html>Log in</html>", request, Content_Type="text/html")

    with scripted(reply) as origin, pytest.raises(lm.CheckpointError, match="checkpoint"):
        lm.open_checkpoint(f"{origin}/model.safetensors")


@pytest.fixture(scope="module")
def tree(_object_server: ObjectServer) -> Path:
    """A bucket with folders of all kinds, some of them in others."""
    folder = _object_server.root / "folders"
    shutil.rmtree(folder, ignore_errors=True)
    made = {"a/b": np.ones(3, "f"), "a b/ü": np.arange(5), "c": np.zeros(2)}
    for name, value in made.items():
        (folder / "arrays" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / "arrays" / f"{name}.npy", value)
    lm.save(made, folder / "arrays/deep/er", max_shard_size=8)
    lm.save(made, folder / "loose", max_shard_size=8)
    (folder / "loose" / "model.safetensors.index.json").unlink()
    lm.save(made, folder / "loose/in/x.safetensors")
    lm.save({"root": np.ones(3)}, folder)
    for step in (2, 9, 10):
        lm.save_step({"step": np.full(3, step)}, folder / "run", step)
    (folder / "run" / "11").mkdir()
    return folder


@pytest.mark.parametrize(
    ("dialect", "page_size"),
    mostly_large([*itertools.product(["gs", "az"], [1, 1000])], [("gs", 1), ("az", 1000)]),
)
def test_folders_of_buckets_are_those_of_disks(
    object_server: ObjectServer, tree: Path, dialect: str, page_size: int
) -> None:
    object_server.configure(page_size=page_size)
    options = {"gs": object_server.gcs, "az": object_server.azure}[dialect]()
    for name in ("", "/arrays/deep/er", "/loose", "/loose/in", "/loose/in/x.safetensors", "/run", "/run/9"):
        with (
            lm.open_checkpoint(f"{tree}{name}") as one,
            lm.open_checkpoint(f"{dialect}://folders{name}", options) as two,
        ):
            assert list(one) == list(two) and one.format == two.format
            assert all((one[tensor].read() == two[tensor].read()).all() for tensor in one)
    for name in ("/absent", "/run/11", "/arr", "/loose/in/x", "/loose/in/x.safetensors/y"):
        for place, given in ((tree, None), (f"{dialect}://folders", options)):
            with pytest.raises(lm.CheckpointError, match=name):
                lm.open_checkpoint(f"{place}{name}", given)
    state = lm.training_state(f"{dialect}://folders/run", storage_options=options)
    assert state is not None and state.step == 10
    shutil.rmtree(tree / "arrays" / "deep", ignore_errors=True)
    with lm.open_checkpoint(tree / "arrays") as one, lm.open_checkpoint(f"{dialect}://folders/arrays", options) as two:
        assert sorted(one) == sorted(two) and all((one[name].read() == two[name].read()).all() for name in one)
    lm.save({"c": np.zeros(2)}, tree / "arrays/deep/er", max_shard_size=8)


# Proxies --------------------------------------------------------------------------------------------------------------


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
    (tmp_path / "w.safetensors").write_bytes(FILE)
    asked: list[str] = []
    with ObjectServer(tmp_path, tls=True) as server, tunnel(asked) as proxy:
        url, trusted = server.url("w.safetensors", scheme="https"), {"root_certificate": server.certificate}

        def read(**client: Any) -> int:
            check_read(url, {"client_options": {**trusted, **client}, **ONCE})
            return len(asked)

        told = read(proxy_url=f"http://me:{SECRET}@{proxy}")
        assert asked and all(head.startswith("CONNECT 127.0.0.1:") for head in asked)
        assert all("proxy-authorization: basic " in head.lower() for head in asked)
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        monkeypatch.setenv("NO_PROXY", "example.com, 127.0.0.0/8")
        assert read() == told
        monkeypatch.delenv("NO_PROXY")
        assert read() > told
        with pytest.raises(lm.CheckpointError, match="proxy's address") as found:
            read(proxy_url=f"socks5://me:{SECRET}@{proxy}")
        assert SECRET not in everything_of(found.value)


@pytest.mark.parametrize(
    ("host", "excludes", "direct"),
    [
        ("a.example.invalid", ".example.invalid", True),
        ("a.example.invalid", "b.com,example.invalid", True),
        ("example.invalid", "*.example.invalid", True),
        ("anexample.invalid", "example.invalid", False),
        ("127.1.2.3", "127.0.0.0/8", True),
        ("127.1.2.3", "11.0.0.0/8", False),
        ("host.invalid", "*", True),
        ("host.invalid", "", False),
    ],
)
def test_http_goes_through_a_proxy_unless_the_host_is_excluded(host: str, excludes: str, direct: bool) -> None:
    asked: list[str] = []

    def reply(request: Asked) -> Reply:
        asked.append(request.headers["Host"])
        return part(FILE, request, ETag='"1"')

    with scripted(only(W, reply)) as proxy:
        client = {"allow_http": True, "proxy_url": proxy, "proxy_excludes": excludes}
        if direct:
            with pytest.raises(lm.CheckpointError, match="name cannot be found|cannot be reached"):
                check_read(f"http://{host}:9{W}", {"client_options": client, **ONCE})
        else:
            check_read(f"http://{host}:9{W}", {"client_options": client, **ONCE})
    assert set(asked) == (set() if direct else {f"{host}:9"})


# The hub --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """A repository `hub/model` for those with the token, which is in the environment."""
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    folder = object_server.root / "hub" / "model"
    for name in ("model.safetensors", "sub/x y.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(FILE)
    object_server.repository("hub/model", token=SECRET, revisions={"v1.0": "f" * 40})
    return object_server


@pytest.mark.parametrize(
    "where",
    ["", "/model.safetensors", "/sub", "/sub/x y.safetensors", "@main", "@main/sub/", "@v1.0"],
)
def test_files_and_folders_of_the_hub(hub: ObjectServer, where: str) -> None:
    """A revision is settled once, as a commit."""
    with lm.open_checkpoint(f"hf://hub/model{where}") as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"].read(), VALUES)
        assert SECRET not in f"{checkpoint!r} {checkpoint['w']!r} {vars(checkpoint)}"
    counted = hub.counters()
    assert counted["cdn_authorization"] == 0 and counted["authorization"] > 0
    (commit,) = {path.split("/resolve/")[1].split("/")[0] for path in counted["paths"] if "/resolve/" in path}
    assert len(commit) == 40 and (where != "@v1.0" or commit == "f" * 40)


def test_a_token_that_is_missing_or_wrong(hub: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", f"another-{SECRET}")
    with pytest.raises(
        lm.CheckpointError, match="hf://hub/model@main: the hub has no such repository or revision"
    ) as found:
        lm.open_checkpoint("hf://hub/model")
    assert SECRET not in everything_of(found.value)
    hub.repository("hub/model", token=SECRET, gated=True)
    with pytest.raises(lm.CheckpointError, match="refuses access"):
        lm.open_checkpoint("hf://hub/model")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where nobody has logged in
    if importlib.util.find_spec("huggingface_hub") is not None:
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name in ("model", "absent"):
        with pytest.raises(lm.CheckpointError, match="hf auth login"):
            lm.open_checkpoint(f"hf://hub/{name}")


def test_a_token_that_expires_while_weights_are_read(hub: ObjectServer) -> None:
    checkpoint = lm.open_checkpoint("hf://hub/model/model.safetensors", ONCE)
    hub.repository("hub/model", token="another")
    said = r"hf://hub/model/model\.safetensors: (it no longer exists, or may not be read|the store)"
    with pytest.raises(lm.CheckpointError, match=said) as found:
        checkpoint["w"].read()
    assert SECRET not in everything_of(found.value)


# Secrets --------------------------------------------------------------------------------------------------------------

SOON: dict[str, Any] = {"max_retries": 1, "backoff": {"init_backoff": 0.001, "max_backoff": 0.001}}
CLIENT = {"allow_http": True, "read_timeout": "150ms"}
KEY = base64.b64encode(SECRET.encode()).decode()


@pytest.fixture
def stored(object_server: ObjectServer) -> ObjectServer:
    folder = object_server.root / "secrets" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": VALUES}, folder / "w.safetensors")
    return object_server


def places(server: ObjectServer) -> dict[str, tuple[str, dict[str, Any]]]:
    """Dialect and kind of credentials → URL and options, with the secret in each."""
    host = server.origin().partition("://")[2]
    path = "secrets/model/w.safetensors"
    azure = {name: value for name, value in server.azure().items() if name != "bearer_token"}
    plain: dict[str, Any] = {"client_options": CLIENT, "retry_config": SOON}
    return {
        "signed": (f"{server.url(path)}?X-Amz-Signature={SECRET}&sig={SECRET}", plain),
        "password": (f"http://me:{SECRET}@{host}/http/{path}", plain),
        "header": (server.url(path), plain | {"client_options": CLIENT | {"default_headers": {"X-Api-Key": SECRET}}}),
        "hub": ("hf://secrets/model/w.safetensors", plain),
        "gcs": (f"gs://{path}", server.gcs() | {"bearer_token": SECRET} | plain),
        "azure token": (f"az://{path}", azure | {"bearer_token": SECRET} | plain),
        "azure key": (f"az://{path}", azure | {"account_key": KEY} | plain),
        "azure SAS": (f"az://{path}", azure | {"sas_key": f"sv=2023&sig={SECRET}"} | plain),
    }


@pytest.mark.parametrize(
    "where",
    mostly_large(
        ["signed", "password", "header", "hub", "gcs", "azure token", "azure key", "azure SAS"],
        ["password", "hub", "azure SAS"],
    ),
)
def test_nothing_shows_a_secret(
    stored: ObjectServer, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_ENDPOINT", stored.hub)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    url, options = places(stored)[where]
    shown: list[str] = []

    def fails(call: Any, match: str = "") -> None:
        with pytest.raises(lm.CheckpointError, match=match or ".") as found:
            call()
        shown.append(everything_of(found.value))

    with lm.open_checkpoint(url, options) as checkpoint:
        assert checkpoint["w"].read()[-1] == 59_999
        counted = stored.counters()
        assert where != "password" or counted["authorization"] == counted["requests"] > 0, "it is sent as such"
        shown += [repr(checkpoint), repr(checkpoint["w"]), checkpoint.path, *checkpoint.files]
        shown.append(repr(vars(checkpoint)))
        for kind in ("401", "403", "404", "416", "500", "503", "reset", "truncate", "stall"):
            stored.faults([kind], every=1)
            fails(checkpoint["w"].read)
            fails(lambda: lm.open_checkpoint(url, options))
        stored.faults()
        stored.replace("secrets/model/w.safetensors", after=0)
        fails(checkpoint["w"].read, "changed")
    fails(lambda: lm.open_checkpoint(url.replace("w.safetensors", "absent.safetensors"), options))
    for text in (*shown, caplog.text, *capfd.readouterr()):
        for secret in (SECRET, KEY, "SECRET-SIGNATURE", base64.b64encode(f"me:{SECRET}".encode()).decode()):
            assert secret not in text, text


def test_orbax_shows_no_secret_either(
    stored: ObjectServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(stored.root / "secrets" / "orbax", {"w": VALUES}, force=True)
    monkeypatch.setenv("HF_ENDPOINT", stored.hub)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for url in (f"{stored.url('secrets/orbax')}?sig={SECRET}", "hf://secrets/orbax"):
        stored.faults()
        checkpoint = lm.open_checkpoint(url)
        checkpoint["w"]
        stored.faults(["403"], every=1)
        for call in (checkpoint["w"].read, lambda url=url: lm.open_checkpoint(url)):
            with pytest.raises(lm.CheckpointError) as found:
                call()
            assert SECRET not in everything_of(found.value)
            assert "a fault that was asked for" not in everything_of(found.value)
    assert SECRET not in "".join(capfd.readouterr())


def test_keys_of_s3(s3: S3Server) -> None:
    options = s3.options() | {"secret_access_key": SECRET, "retry_config": SOON}
    for url in (f"{s3.bucket}/absent", f"{s3.bucket}/absent/w.safetensors", "no-such-bucket/w.safetensors"):
        with pytest.raises(lm.CheckpointError, match=url) as found:
            lm.open_checkpoint(f"s3://{url}", options)
        assert SECRET not in everything_of(found.value)


@pytest.mark.parametrize("package", ["obstore", "urllib3"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(lm.CheckpointError, match=rf"needs {package}.*pip install 'lazymodel\[remote\]'"):
        lm.open_checkpoint("https://127.0.0.1:9/w.safetensors")

"""URLs are taken apart without a network, and shown without secrets."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import pytest

import lazymodel as lm
from lazymodel._remote.url import is_loopback, is_url, parse_url, shown


@pytest.mark.parametrize(
    ("text", "kind", "root", "key", "show"),
    [
        ("s3://bucket/a/b.npz", "s3", "s3://bucket", "a/b.npz", "s3://bucket/a/b.npz"),
        ("s3a://bucket/a", "s3", "s3://bucket", "a", "s3://bucket/a"),
        ("gs://bucket", "gs", "gs://bucket", "", "gs://bucket"),
        ("gs://bucket/", "gs", "gs://bucket", "", "gs://bucket"),
        ("gs://bucket//a//b/", "gs", "gs://bucket", "a/b", "gs://bucket/a/b"),
        ("gs://bucket/a b/ü%20#x", "gs", "gs://bucket", "a b/ü%20#x", "gs://bucket/a b/ü%20#x"),
        ("az://box/a", "az", "az://box", "a", "az://box/a"),
        ("abfs://box/a", "az", "az://box", "a", "az://box/a"),
        (
            "abfss://box@account.dfs.core.windows.net/a",
            "az",
            "abfss://box@account.dfs.core.windows.net",
            "a",
            "az://box/a",
        ),
        ("https://host/a%20b/%C3%BC?sig=x#y", "https", "https://host/?sig=x", "a b/ü", "https://host/a b/ü"),
        ("HTTPS://Host:8443/a", "https", "https://host:8443", "a", "https://host:8443/a"),
        ("https://me:pass%40word@host/a", "https", "https://host", "a", "https://host/a"),
        ("http://[::1]:80/a", "http", "http://[::1]:80", "a", "http://[::1]:80/a"),
        ("http://127.0.0.1/a", "http", "http://127.0.0.1", "a", "http://127.0.0.1/a"),
        ("hf://o/n", "hf", "o/n", "", "hf://o/n"),
        ("hf://o/n@v1/sub/x", "hf", "o/n", "sub/x", "hf://o/n@v1/sub/x"),
        ("hf://o/n@refs%2Fpr%2F1/folder", "hf", "o/n", "folder", "hf://o/n@refs/pr/1/folder"),
    ],
)
def test_parts(text: str, kind: str, root: str, key: str, show: str) -> None:
    url = parse_url(text)
    assert (url.kind, url.root, url.key, url.text) == (kind, root, key, show)
    assert "pass" not in repr(url) and "sig" not in repr(url)


def test_more_parts() -> None:
    assert parse_url("https://host/a/").folder and not parse_url("https://host/a").folder
    assert parse_url("https://me:pass%40word@host/a").user == "me:pass@word"
    assert parse_url("hf://o/n@refs%2Fpr%2F1").revision == "refs/pr/1"
    assert dataclasses.replace(parse_url("gs://b/x"), key="a\x1b[31m\n").text == "gs://b/a\\x1b[31m\\n"


@pytest.mark.parametrize(
    "text",
    [
        "ftp://me:SECRET@host/a?SECRET",
        "s3://KEY:SECRET@bucket/a",
        "gs://SECRET@bucket/a",
        "az://box/a?sv=1&sig=SECRET",
        "az://box:SECRET@account/a",
        "gs:///a?SECRET",
        "s3://KEY:SEC/RET@bucket/a?SECRET",
        "https:///a?SECRET",
        "https://me:SECRET@host:port/a?SECRET",
        "https://me:SEC/RET@host/a?SECRET",
        "https://[SECRET/a",
        "http://me:SECRET@host/a?SECRET",
        "https://host/a/../b?SECRET",
        "https://host/%2e%2e/b?SECRET",
        "https://host/a%00?SECRET",
        "gs://bucket/../a",
        "hf://o",
        "hf://o/n@",
        "hf://../n",
        "hf://o/n/../x",
        "hf://o/n%2F..",
    ],
)
def test_what_is_no_url_of_a_checkpoint_is_refused_and_shows_no_secret(text: str) -> None:
    with pytest.raises(lm.CheckpointError, match="expected") as found:
        lm.open_checkpoint(text)
    told = "".join(traceback.format_exception(found.value))
    for secret in ("SECRET", "KEY:SEC", "RET@", "sig="):
        assert secret not in told


def test_plain_http_is_for_this_machine_or_who_asks_for_it() -> None:
    assert parse_url("http://host/a", allow_http=True).root == "http://host"
    for host, local in {
        "localhost": True,
        "127.8.9.1": True,
        "::1": True,
        "10.0.0.1": False,
        "local.host": False,
    }.items():
        assert is_loopback(host) is local
    with pytest.raises(lm.CheckpointError, match="plain http"):
        parse_url("http://localhost.example.com/a")


def test_paths_are_no_urls() -> None:
    for path in ("a/b", "C:\\x", "a:b", "x:/y", "/a://b", b"gs://b"):
        assert not is_url(path)
    assert shown("a/b?x") == "a/b?x"
    assert shown("gs://b/a?SECRET#x") == "gs://b/a"


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
    assert "SECRET" not in "".join(traceback.format_exception(found.value))
    assert found.value.__context__ is None or "SECRET" not in str(found.value.__context__)

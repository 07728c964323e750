"""URLs of checkpoints, taken apart: which store, which key in it, and how both may be shown.

Nothing here is asked over a network. Queries of URLs can be signatures and user names can come with passwords, so what
is shown (`Url.shown`) has neither.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import posixpath
import re
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from lazymodel._errors import CheckpointError

_SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "https": "https",
    "http": "http",
    "hf": "hf",
}
_SUPPORTED = "gs://, s3://, az:// (or abfs://), https:// and hf://owner/name"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Url:
    """A URL of an object, or of what stands for a folder of them.

    Attributes:
        kind: `"s3"`, `"gs"`, `"az"`, `"https"`, `"http"` or `"hf"`.
        root: What its store is opened with, such as `s3://bucket` or `https://host`, the query of a signed URL
            included; for `hf` the name of the repository.
        key: The path in the store, decoded, without slashes at its ends.
        shown: The root as messages may show it: without user, password and query.
        revision: Of a repository; empty for its default.
    """

    kind: str
    root: str
    key: str
    shown: str
    revision: str = ""

    @property
    def text(self) -> str:
        """The URL as messages may show it."""
        return f"{self.shown}/{self.key}" if self.key else self.shown


def is_url(path: Any) -> bool:
    """Whether something names a place by a scheme such as `s3://` rather than by a path."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


def is_supported(path: Any) -> bool:
    """Whether something is a URL with a scheme that is known here."""
    match = _SCHEME.match(path) if isinstance(path, str) else None
    return match is not None and match[1].lower() in _SCHEMES


def shown(path: Any) -> str:
    """A path or URL as messages may show it: without user, password and query."""
    text = os.fspath(path)
    if not is_url(text):
        return text
    try:
        parts = urlsplit(text)
        return (
            f"{parts.scheme}://{parts.netloc.rpartition('@')[2] if parts.scheme != 'hf' else parts.netloc}{parts.path}"
        )
    except ValueError:
        return f"{text.partition('://')[0]}://…"


def parse_url(text: str, options: dict[str, Any] | None = None) -> Url:
    """Takes a URL apart.

    Raises:
        CheckpointError: The scheme is unknown, something is missing, or it is plain `http` to another host than this
            one without `client_options={"allow_http": True}`.
    """
    match = _SCHEME.match(text)
    kind = _SCHEMES.get(match[1].lower(), "") if match else ""
    if not kind:
        raise CheckpointError(
            f"{shown(text)}: expected a path, or a URL with one of {_SUPPORTED}, found another scheme"
        )
    if kind == "hf":
        return _hugging_face(text)
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError as error:
        raise CheckpointError(f"{shown(text)}: expected a URL, found one that cannot be read ({error})") from None
    if not host:
        what = "a host" if kind.startswith("http") else "a bucket or container"
        raise CheckpointError(f"{shown(text)}: expected {what} after ://, found none")
    key = _key(parts.path if not kind.startswith("http") else unquote(parts.path), text)
    if kind not in ("http", "https"):
        # Names of containers may be followed by the account: container@account.dfs.core.windows.net.
        user = parts.netloc.rpartition("@")[0]
        bucket = user or parts.netloc
        root = f"{match[1] if match else kind}://{parts.netloc}" if user else f"{kind}://{bucket}"
        return Url(kind, root, key, f"{kind}://{bucket}")
    if kind == "http" and not is_loopback(host) and not (options or {}).get("client_options", {}).get("allow_http"):
        raise CheckpointError(
            f"{shown(text)}: expected https, found plain http, over which anybody between can read and change weights. "
            'Use https, or pass storage_options={"client_options": {"allow_http": True}} if you mean it.'
        )
    where = f"{kind}://{_bracketed(host)}{port}"
    user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    root = f"{kind}://{user}{_bracketed(host)}{port}{f'/?{parts.query}' if parts.query else ''}"
    return Url(kind, root, key, where)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _key(path: str, text: str) -> str:
    key = path.strip("/")
    if "\0" in key or any(part in (".", "..") for part in key.split("/")):
        raise CheckpointError(f"{shown(text)}: expected a path without '.' and '..', found {path!r}")
    return re.sub("/+", "/", key)


def _hugging_face(text: str) -> Url:
    owner, _, rest = text.partition("://")[2].strip("/").partition("/")
    name, _, folder = rest.partition("/")
    name, at, revision = name.partition("@")
    if not _REPOSITORY.fullmatch(owner) or not _REPOSITORY.fullmatch(name) or (at and not revision):
        raise CheckpointError(
            f"{shown(text)}: expected hf://owner/name, hf://owner/name@revision or one of these and /folder"
        )
    revision = unquote(revision)
    pinned = f"@{revision}" if revision else ""
    return Url("hf", f"{owner}/{name}", _key(folder, text), f"hf://{owner}/{name}{pinned}", revision)


def quoted(key: str) -> str:
    """A key as part of a URL."""
    return quote(key, safe="/")


def child(key: str, name: str) -> str:
    """The key of something in a folder."""
    return posixpath.join(key, name) if key else name

"""Parsed URLs of checkpoints: the table of schemes, the store, the key in it, and how to show both.

Nothing here makes requests. Queries of URLs can be signatures, and user names can come with passwords, so the form for
messages (`Url.shown`) has neither.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from lazymodel._errors import CheckpointError
from lazymodel._show.text import printable

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
_HOST = re.compile(r"[^:\[\]]*(:[0-9]*)?|\[[0-9A-Fa-f:.]*\](:[0-9]*)?")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Url:
    """A URL of an object, or of a prefix that represents a folder of objects.

    Attributes:
        kind: `"s3"`, `"gs"`, `"az"`, `"https"`, `"http"` or `"hf"`.
        root: The address with which its store is opened, such as `s3://bucket` or `https://host`, the query of a signed
            URL included; for `hf` the name of the repository.
        key: The path in the store, decoded, without slashes at its ends.
        shown: The root in the form for messages: without user, password and query.
        revision: Of a repository; empty for its default.
        user: User and password for a web server, with a colon between them; empty if there are none.
        folder: True if it is on a web server and ends with a slash, which a file's URL never does.
    """

    kind: str
    root: str = dataclasses.field(repr=False)
    key: str
    shown: str
    revision: str = ""
    user: str = dataclasses.field(default="", repr=False)
    folder: bool = False

    @property
    def text(self) -> str:
        """The URL in the form for messages. It is escaped, as a server may give its files any name."""
        return printable(f"{self.shown}/{self.key}" if self.key else self.shown)


def is_url(path: Any) -> bool:
    """Returns True if this names a location by a scheme such as `s3://` rather than by a path."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


def is_supported(path: Any) -> bool:
    """Returns True for a URL with a known scheme."""
    match = _SCHEME.match(path) if isinstance(path, str) else None
    return match is not None and match[1].lower() in _SCHEMES


def shown(path: Any) -> str:
    """A path or URL in the form for messages: without user, password and query."""
    text = os.fspath(path)
    if not is_url(text):
        return text
    scheme, _, rest = text.partition("://")
    host, slash, key = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    if scheme.lower() != "hf":  # in those, a revision follows an @
        host = host.rpartition("@")[2]
        if not _HOST.fullmatch(host):  # may contain anything, such as a password with a slash in it
            return f"{scheme}://…"
    return printable(f"{scheme}://{host}{slash}{key}")


def parse_url(text: str, *, allow_http: bool = False) -> Url:
    """Parses a URL.

    Raises:
        CheckpointError: The scheme is unknown, a part is missing or unexpected, or it is plain `http` to a host other
            than this one and that is not allowed.
    """
    match = _SCHEME.match(text)
    kind = _SCHEMES.get(match[1].lower(), "") if match else ""
    if not kind:
        raise CheckpointError(
            f"{shown(text)}: expected a path, or a URL with one of {_SUPPORTED}, found another scheme"
        )
    if kind == "hf":
        return _hugging_face(text)
    return _web(text, kind, allow_http) if kind in ("http", "https") else _bucket(text, kind)


def _bucket(text: str, kind: str) -> Url:
    # Keys are taken literally: nothing in them is decoded.
    netloc, _, path = text.partition("://")[2].partition("/")
    name, at, account = netloc.partition("@")
    if "?" in path or "?" in netloc:
        raise CheckpointError(f"{shown(text)}: expected a URL without '?', found one; signatures are storage_options")
    if not name:
        raise CheckpointError(f"{shown(text)}: expected a bucket or container after ://, found none")
    if at and (kind != "az" or ":" in name):  # an account may follow Azure's containers
        raise CheckpointError(f"{shown(text)}: expected no credentials in the URL, found some; use storage_options")
    root = f"abfss://{name}@{account}" if at else f"{kind}://{name}"
    return Url(kind, root, _key(path, text), f"{kind}://{name}")


def _web(text: str, kind: str, allow_http: bool) -> Url:
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        raise CheckpointError(f"{shown(text)}: expected a URL, found one that cannot be read") from None
    if not host:
        raise CheckpointError(f"{shown(text)}: expected a host after ://, found none")
    if kind == "http" and not allow_http and not is_loopback(host):
        raise CheckpointError(
            f"{shown(text)}: expected https, found plain http, over which others can read and change weights. "
            'Use https, or pass storage_options={"client_options": {"allow_http": True}} if you mean it.'
        )
    where = f"{kind}://{f'[{host}]' if ':' in host else host}{port}"
    return Url(
        kind,
        f"{where}{f'/?{parts.query}' if parts.query else ''}",
        _key(unquote(parts.path), text),
        where,
        user=unquote(parts.netloc.rpartition("@")[0]),
        folder=parts.path.endswith("/"),
    )


def is_loopback(host: str) -> bool:
    """Returns True if a host is this machine; decided by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _key(path: str, text: str) -> str:
    key = path.strip("/")
    if "\0" in key or any(part in (".", "..") for part in key.split("/")):
        raise CheckpointError(f"{shown(text)}: expected a path without '.', '..' and NUL in the URL, found one")
    return re.sub("/+", "/", key)


def _hugging_face(text: str) -> Url:
    owner, _, rest = text.partition("://")[2].strip("/").partition("/")
    name, _, folder = rest.partition("/")
    name, at, revision = name.partition("@")
    if not _REPOSITORY.fullmatch(owner) or not _REPOSITORY.fullmatch(name) or (at and not revision):
        raise CheckpointError(
            f"{shown(text)}: expected hf://owner/name or hf://owner/name@revision, optionally followed by /folder"
        )
    revision = unquote(revision)
    pinned = f"@{revision}" if revision else ""
    return Url("hf", f"{owner}/{name}", _key(folder, text), f"hf://{owner}/{name}{pinned}", revision)


def quoted(key: str) -> str:
    """A key in the form for URLs."""
    return quote(key, safe="/")

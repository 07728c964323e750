"""Stores: buckets, web servers and repositories, asked for ranges of what lies in them, for sizes and for lists.

One `Store` serves one opening of a checkpoint: what it has learned of an object, its size and its ETag, holds for as
long as it is used, and every range of the object is asked for with that ETag (`If-Match`, RFC 9110 section 13.1.1), so
that two versions of an object are never mixed. Credentials are found by obstore in the places that each cloud's own
tools use.
"""

from __future__ import annotations

import dataclasses
import datetime
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote import hugging_face
from lazymodel._remote.requests import REQUESTS, Changed, Failure, Gate, Missing, Retries, attempt, retry_after
from lazymodel._remote.url import Url, child, parse_url, quoted

Result = TypeVar("Result")

PIECE = 1 << 20  # bytes that obstore hands out at a time: it has twice as much in memory meanwhile
_CLIENT = {
    "connect_timeout": "10s",
    "read_timeout": "10s",  # without a byte; a stalled connection is given up
    "timeout": "300s",  # of a whole request, its deadline: 8 MiB at 1 MB/s shared by all connections
    "pool_max_idle_per_host": "64",
    "user_agent": "lazymodel",
}
_MOST_LISTED = 1_000_000  # objects of a listing; a checkpoint has thousands
_SIGNED_SECONDS = 60  # for which the URL is good that asks for `Retry-After`


@dataclasses.dataclass(frozen=True)
class Object:
    """What a store says of an object.

    Attributes:
        size: In bytes.
        etag: Names its content; None where the store gives none.
        modified: When it was last modified, for comparison only.
    """

    size: int
    etag: str | None
    modified: Any


class Store:
    """What lies under one root. Thread-safe.

    Attributes:
        url: The root, with an empty key.
        lists: Whether it can say what it has; a web server cannot.
    """

    def __init__(self, url: Url, options: Mapping[str, Any] | None = None) -> None:
        self.url = dataclasses.replace(url, key="")
        self.options = dict(options or {})
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._folders: dict[str, tuple[dict[str, Object], set[str]]] = {}
        self.heads: dict[str, np.ndarray] = {}  # first bytes of objects that were looked at
        self.blocks: dict[str, OrderedDict[int, np.ndarray]] = {}  # and others, by number
        self._retries = Retries(self.options.pop("retry_config", None))
        self._gate = Gate(self._retry_after)
        self._client: dict[str, Any] = {**_CLIENT, **self.options.pop("client_options", {})}
        self._obstore = _import_obstore()
        self._repository: hugging_face.Repository | None = None
        if url.kind == "hf":
            self._repository = hugging_face.Repository(url.root, url.revision)
        self._opened: Any = None

    @property
    def lists(self) -> bool:
        return self.url.kind not in ("http", "https")

    def shown(self, key: str) -> str:
        """A key as messages may show it."""
        return dataclasses.replace(self.url, key=key).text

    @property
    def repository(self) -> hugging_face.Repository | None:
        """The repository that it is, if it is one."""
        return self._repository

    def commit(self, *, once: bool = False) -> str:
        """The commit of the repository that it is; asked for once, or as often as everything else.

        Raises:
            Unavailable: The hub cannot be reached.
            CheckpointError: It knows no such repository or revision, or refuses it.
        """
        assert self._repository is not None
        retries = Retries({"max_retries": 0}) if once else self._retries
        return self._repository.commit(lambda url: self._read_json(url, retries))

    # What is known of objects.

    def known(self, key: str) -> Object | None:
        """What is known of an object, without asking: what an answer said of it, or a list, which is not held to."""
        folder, _, name = key.rpartition("/")
        return self._objects.get(key) or (self._folders[folder][0].get(name) if folder in self._folders else None)

    def has(self, key: str) -> bool:
        """Whether there is an object; asks for its folder's list where that is there already, or is one answer."""
        folder, _, name = key.rpartition("/")
        if key not in self._objects and (self._repository is not None or self._listed(folder)):
            return name in self.folder(folder)[0]
        return self.find(key) is not None

    def has_folder(self, key: str) -> bool:
        """Whether anything lies below a key."""
        above, _, name = key.rpartition("/")
        if key and key not in self._folders and above in self._folders:
            return name in self._folders[above][1]
        return any(self.folder(key))

    def _listed(self, folder: str) -> bool:
        """Whether a folder was listed, or is one of a folder that was: somebody is looking around there."""
        above, _, name = folder.rpartition("/")
        return folder in self._folders or bool(folder and above in self._folders and name in self._folders[above][1])

    def find(self, key: str) -> Object | None:
        """What an object is, or None where there is none."""
        if key in self._objects:
            return self._objects[key]
        try:
            meta = self._ask(key, lambda: self._obstore.head(self._store(), key))
        except Missing:
            return None
        return self._note(key, _object(meta))

    def folder(self, key: str) -> tuple[dict[str, Object], set[str]]:
        """The objects and the folders in a folder, by name; nothing where there is no such folder, or no listing."""
        if key not in self._folders:
            self._folders[key] = self._list(key) if self.lists else ({}, set())
        return self._folders[key]

    def below(self, key: str) -> dict[str, Object]:
        """All objects below a folder, by path in it."""
        found: dict[str, Object] = {}
        folders = [""]
        while folders:
            inner = folders.pop()
            objects, names = self.folder(child(key, inner) if inner else key)
            found |= {child(inner, name): value for name, value in objects.items()}
            folders += [child(inner, name) for name in sorted(names, reverse=True)]
            if len(found) > _MOST_LISTED:
                raise CheckpointError(f"{self.shown(key)}: expected a checkpoint, found over {_MOST_LISTED} objects")
        return found

    def _list(self, key: str) -> tuple[dict[str, Object], set[str]]:
        if self._repository is not None:
            return self._files_of_repository(key)
        prefix = f"{key}/" if key else ""
        try:
            result = self._ask(key, lambda: self._obstore.list_with_delimiter(self._store(), prefix or None))
        except Missing:
            return {}, set()
        objects: dict[str, Object] = {}
        for meta in result["objects"]:
            if name := meta["path"][len(prefix) :]:  # what marks a folder has no name in it
                objects[name] = _object(meta)
        return objects, {path[len(prefix) :].strip("/") for path in result["common_prefixes"]}

    def _files_of_repository(self, key: str) -> tuple[dict[str, Object], set[str]]:
        assert self._repository is not None
        prefix = f"{key}/" if key else ""
        objects: dict[str, Object] = {}
        folders: set[str] = set()
        for path in self._repository.files(self._read_json):
            if path.startswith(prefix):
                name, slash, _ = path[len(prefix) :].partition("/")
                if slash:
                    folders.add(name)
                else:
                    objects[name] = Object(-1, None, None)
        return objects, folders

    def _note(self, key: str, found: Object) -> Object:
        with self._lock:
            return self._objects.setdefault(key, found)

    # Bytes.

    def get(
        self, key: str, start: int, stop: int, stopped: threading.Event | None = None, *, to_end: bool = False
    ) -> list[np.ndarray]:
        """Bytes of an object, in pieces that nobody may write to: as many as asked for; with `to_end` fewer where it
        ends.

        Raises:
            CheckpointError: They cannot be had, or the object changed since it was first looked at.
        """
        shown = self.shown(key)
        pieces: list[np.ndarray] = []

        def ask() -> None:
            done = sum(piece.size for piece in pieces)  # an attempt goes on where the last one broke off
            known = self._objects.get(key)
            options: dict[str, Any] = {"range": (start + done, stop)}
            if known is not None and known.etag is not None:
                options["if_match"] = known.etag
            result = self._obstore.get(self._store(), key, options=options)
            found = _object(result.meta)
            if known is None:
                known = self._note(key, found)
            if _differs(known, found):
                raise Changed
            expected = (min(stop, found.size) if to_end else stop) - start
            for chunk in result.stream(min_chunk_size=PIECE):
                pieces.append(np.frombuffer(chunk, np.uint8))
                done += len(chunk)
                if done > expected:  # before a body without end fills the memory
                    raise Failure("the server sends more than was asked for", False)
            if done < expected:
                raise Failure(f"the server sent {done} of {expected} bytes", True)

        try:
            self._ask(key, ask, stopped)
        except Missing:
            raise CheckpointError(f"there is nothing at {shown}, or nothing that may be read") from None
        except Changed:
            raise CheckpointError(
                f"{shown} changed while it was being read: expected the object that was there when it was opened, "
                "found another. Open the checkpoint again once nothing writes to it."
            ) from None
        REQUESTS.add(nbytes=sum(piece.size for piece in pieces))
        return pieces

    def _ask(self, key: str, function: Callable[[], Result], stopped: threading.Event | None = None) -> Result:
        return attempt(self.shown(key), key, function, self._retries, self._gate, stopped)

    def _store(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> Any:
        stores = self._obstore.store
        plain: dict[str, Any] = {"client_options": self._client, "retry_config": {"max_retries": 0}}
        try:
            if self._repository is not None or not self.lists:
                return self._over_http(*self.http())
            return stores.from_url(self.url.root, **plain, **self.options)
        except (CheckpointError, Missing):
            raise
        except Exception as error:
            kind = type(error).__name__
            unknown = f": {error}".partition("\n")[0] if kind == "UnknownConfigurationKeyError" else ""
        raise CheckpointError(
            f"{self.url.shown}: the store cannot be opened ({kind}{unknown}); check storage_options, which are what "
            f"obstore's store for {self.url.kind} takes, and the credentials in the environment"
        )

    def http(self) -> tuple[str, Mapping[str, str]]:
        """The address below which a server or repository has its files, and the headers to ask for them with."""
        if self._repository is None:
            return self.url.root, {}
        return self._repository.files_url(self._read_json), self._repository.headers

    def _over_http(self, url: str, headers: Mapping[str, str]) -> Any:
        client = dict(self._client)
        if headers:
            client["default_headers"] = {**client.get("default_headers", {}), **headers}
        if url.startswith("http://"):  # which `parse_url` allows to this machine only, unless asked for
            client["allow_http"] = True
        return self._obstore.store.HTTPStore(url, client_options=client, retry_config={"max_retries": 0})

    def _read_json(self, url: str, retries: Retries | None = None) -> bytes:
        """A small answer of a repository's server."""
        assert self._repository is not None
        base, _, key = url.rpartition("/")
        store = self._over_http(base, self._repository.headers)

        def ask() -> bytes:
            chunks: list[bytes] = []
            for chunk in self._obstore.get(store, key).stream(min_chunk_size=1 << 20):
                chunks.append(bytes(chunk))
                if sum(map(len, chunks)) > hugging_face.MOST_JSON:
                    raise Failure("the server's answer does not end", False)
            return b"".join(chunks)

        return attempt(self.shown(""), "", ask, retries or self._retries, self._gate)

    def _retry_after(self, key: str) -> float | None:
        try:
            if self._repository is not None or not self.lists:
                base, headers = self.http()
                root, mark, query = base.partition("?")
                return retry_after(f"{root.rstrip('/')}/{quoted(key)}{mark}{query}", headers)
            expires = datetime.timedelta(seconds=_SIGNED_SECONDS)
            return retry_after(self._obstore.sign(self._store(), "HEAD", key, expires), {})
        except Exception:  # only ever a better guess at how long to wait
            return None


def open_store(url: str, options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """The store of a URL, and the key in it."""
    parsed = parse_url(url, dict(options or {}))
    return Store(parsed, options), parsed.key


def _object(meta: Mapping[str, Any]) -> Object:
    return Object(int(meta["size"]), meta["e_tag"], meta["last_modified"])


def _differs(known: Object, found: Object) -> bool:
    if known.size != found.size:
        return known.size >= 0
    if known.etag is not None and found.etag is not None:
        return known.etag != found.etag
    return known.modified is not None and known.modified != found.modified


def _import_obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise CheckpointError(
            "reading from a URL needs obstore, which is not installed: pip install 'lazymodel[remote]'"
        ) from None
    return obstore

"""Stores: buckets, web servers and repositories; ranges of their objects, sizes and lists.

One `Store` is used for one opening of a checkpoint. It keeps the size and ETag of each object while it is used,
and requests every range of the object with that ETag (`If-Match`, RFC 9110 section 13.1.1), so that two versions of an
object are never mixed. obstore finds credentials in the places that each cloud's own tools use. A new kind of store
begins in `url.py`, with its scheme.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import os
import posixpath
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import numpy as np

from lazymodel._errors import CheckpointError, required
from lazymodel._remote.hub import MOST_JSON, Repository
from lazymodel._remote.requests import Changed, Failure, Missing, Retries, Web, apart, attempt, explained
from lazymodel._remote.url import Url, parse_url
from lazymodel._show.text import listed
from lazymodel._tensors.byte_reader import REQUESTS

_OWN = ("client_options", "retry_config")  # `storage_options` of every kind of store


_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
# Source: `ClientConfigKey` of the object_store crate; those with text values, or that obstore parses from text.
_CLIENT_OPTIONS = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_ca_certificate", "proxy_excludes"),
    *("proxy_url", "timeout", "user_agent"),
)


def _checked_options(url: Url, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`storage_options`, checked as far as possible without obstore, which checks the rest."""
    given: Any = {} if options is None else options
    inner = {f"storage_options[{name!r}]": given.get(name) or {} for name in _OWN} if isinstance(given, Mapping) else {}
    for name, value in {"storage_options": given, **inner}.items():
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{url.text}: expected {name} to be a mapping, found {type(value).__name__}")
    checked = {str(name): value for name, value in cast("Mapping[Any, Any]", given).items()}
    unknown = [repr(name) for name in checked if name not in _OWN]
    if unknown and url.kind in ("http", "https", "hf"):
        hint = "Credentials of the hub are those of `hf auth login` or HF_TOKEN. " if url.kind == "hf" else ""
        raise CheckpointError(
            f"{url.text}: expected storage_options 'client_options' and 'retry_config', found {listed(unknown)}. {hint}"
            "Headers are client_options['default_headers']"
        )
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        Retries(checked.get("retry_config"))
        return checked
    raise CheckpointError(
        f"{url.text}: expected storage_options['retry_config'] as obstore takes it, with numbers and durations, found "
        "another form"
    )


Result = TypeVar("Result")

HEAD = 64 << 10  # bytes that are fetched when an object is opened: nearly every header of a shard is shorter
CHUNK = 1 << 18  # bytes that obstore returns at a time: few calls, and still in the cache when they are copied
_CLIENT = {
    "connect_timeout": "10s",
    "read_timeout": "10s",  # without a byte; then a stalled connection is given up
    "timeout": "300s",  # deadline of a whole request: 8 MiB at 1 MB/s shared by all connections
    "pool_max_idle_per_host": "64",
    "user_agent": "lazymodel",
}
# A store sends nothing while it receives a part: time for all parts in transfer at 2 MB/s.
_PART_TIMEOUT = "120s"
_SMALL_TIMEOUT = "30s"  # of a small request: until then, a server can send an error of unlimited length
LIST_SECONDS = 60.0  # for the list of a folder: a million objects at 17 pages a second
_MOST_LISTED = 1_000_000  # objects of a listing; a checkpoint has thousands
_NO_SUCH_RANGE = 416  # a status


@dataclasses.dataclass(frozen=True)
class Object:
    """An object as a store describes it.

    Attributes:
        size: In bytes.
        etag: Identifies its content; None if the store provides none.
        modified: When it was last modified, for comparison only.
    """

    size: int
    etag: str | None
    modified: Any


class Store:
    """Objects under one root. Thread-safe.

    Attributes:
        url: The root, with an empty key.
        lists: True if it can list its objects; a web server cannot.
        repository: The repository of the Hugging Face hub, if it is one.
    """

    def __init__(self, url: Url, options: Mapping[str, Any] | None = None) -> None:
        self.url = dataclasses.replace(url, key="")
        self.lists = url.kind not in ("http", "https")
        self.options, self._given = _checked_options(url, options), options
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._folders: dict[str, tuple[dict[str, Object], set[str]]] = {}
        self._heads: dict[str, np.ndarray] = {}  # first bytes of objects that were opened
        self.blocks: dict[str, dict[int, np.ndarray]] = {}  # and others, by number
        self._pages: set[str] = {url.key} if url.folder and not self.lists else set()  # keys known not to be files
        self.retries = Retries(self.options.pop("retry_config", None))
        self._client: dict[str, Any] = dict(self.options.pop("client_options", None) or {})
        self._obstore, _ = (
            required(package, f"{url.text}: reading from a URL", "'lazymodel[remote]'", CheckpointError)
            for package in ("obstore", "urllib3")
        )
        self.repository: Repository | None = None
        if url.kind == "hf":
            self.repository = Repository(url.root, url.revision)
        self._opened: dict[bool, Any] = {}  # True: for small requests

    def anew(self) -> Store:
        """The same store, of whose objects nothing is known yet."""
        return Store(self.url, self._given)

    def shown(self, key: str) -> str:
        """A key in the form for messages."""
        return dataclasses.replace(self.url, key=key).text

    def commit(self, *, once: bool = False) -> str:
        """The commit of the repository; with `once`, at most one request is made for it.

        Raises:
            Unavailable: The hub cannot be reached.
            CheckpointError: It has no such repository or revision, or denies access to it.
        """
        assert self.repository is not None
        retries = Retries({"max_retries": 0}) if once else self.retries
        return self.repository.settled(lambda url: self._read_json(url, retries))[0]

    # State of objects

    def known(self, key: str) -> Object | None:
        """The known state of an object, from an answer, or from a list, which may be outdated."""
        folder, _, name = key.rpartition("/")
        return self._objects.get(key) or (self._folders[folder][0].get(name) if folder in self._folders else None)

    def has(self, key: str) -> bool:
        """Returns True if there is an object. Uses the list of its folder if that was fetched, or needs one request."""
        folder, _, name = key.rpartition("/")
        if key not in self._objects and (self.repository is not None or self._listed(folder)):
            return name in self.folder(folder)[0]
        return self.find(key) is not None

    def has_folder(self, key: str) -> bool:
        """Returns True if anything is stored below a key."""
        above, _, name = key.rpartition("/")
        if key and key not in self._folders and above in self._folders:
            return name in self._folders[above][1]
        return any(self.folder(key))

    def _listed(self, folder: str) -> bool:
        """Returns True if a folder was listed, or occurs in the list of its parent: more of it will be needed."""
        above, _, name = folder.rpartition("/")
        return folder in self._folders or bool(folder and above in self._folders and name in self._folders[above][1])

    def find(self, key: str) -> Object | None:
        """Describes an object. Returns None if there is none."""
        if key in self._objects:
            return self._objects[key]
        with self._required(key):
            try:
                self._first(key)  # the next step reads it, and a signed URL is valid for GET only
            except Missing:
                return None
            return self._objects[key]

    def folder(self, key: str) -> tuple[dict[str, Object], set[str]]:
        """The objects and the folders in a folder, by name; empty if there is no such folder, or no listing."""
        if not self.lists:
            return {}, set()
        if key not in self._folders:
            self._folders[key] = self._list(key)
        return self._folders[key]

    def below(self, key: str) -> dict[str, Object]:
        """All objects below a folder, by path relative to it."""
        found: dict[str, Object] = {}
        folders = [""]
        while folders:
            inner = folders.pop()
            objects, names = self.folder(posixpath.join(key, inner) if inner else key)
            found |= {posixpath.join(inner, name): value for name, value in objects.items()}
            folders += [posixpath.join(inner, name) for name in sorted(names, reverse=True)]
            if len(found) > _MOST_LISTED:
                raise CheckpointError(f"{self.shown(key)}: expected a checkpoint, found over {_MOST_LISTED} objects")
        return found

    def _list(self, key: str) -> tuple[dict[str, Object], set[str]]:
        if self.repository is not None:
            return self._files_of_repository(key)
        prefix = f"{key}/" if key else ""
        store = self._store(small=True)

        async def pages() -> Any:  # for all pages; unlike the call that waits for them, this can be cancelled
            return await asyncio.wait_for(self._obstore.list_with_delimiter_async(store, prefix or None), LIST_SECONDS)

        def ask(_: threading.Event) -> Any:
            try:
                return asyncio.run(pages())
            except TimeoutError:
                raise Failure(f"the list of its objects does not end within {LIST_SECONDS:g} seconds") from None

        try:
            result = self._ask(key, ask)
        except Missing:
            return {}, set()
        objects: dict[str, Object] = {}
        for meta in result["objects"]:
            if name := meta["path"][len(prefix) :]:  # empty for the object that marks the folder
                objects[name] = _object(meta)
        return objects, {path[len(prefix) :].strip("/") for path in result["common_prefixes"]}

    def _files_of_repository(self, key: str) -> tuple[dict[str, Object], set[str]]:
        assert self.repository is not None
        prefix = f"{key}/" if key else ""
        objects: dict[str, Object] = {}
        folders: set[str] = set()
        for path in self.repository.settled(self._read_json)[1]:
            if path.startswith(prefix):
                name, slash, _ = path[len(prefix) :].partition("/")
                if name in ("", ".", "..") or not path.isprintable():
                    continue  # no checkpoint has such a name
                if slash:
                    folders.add(name)
                else:
                    objects[name] = Object(-1, None, None)
        return objects, folders

    def hashes(self) -> dict[str, tuple[str, str]]:
        """Hashes of a repository's files, by path: an algorithm, named as in `LocalPath.published`, and the digits."""
        return {} if self.repository is None else self.repository.hashes(self._read_json)

    def _note(self, key: str, found: Object) -> Object:
        with self._lock:
            return self._objects.setdefault(key, found)

    # Bytes

    def get(
        self,
        key: str,
        start: int,
        out: np.ndarray,
        stopped: threading.Event | None = None,
        given_up: Callable[[], bool] = bool,
    ) -> None:
        """Fills `out` (`uint8`) with the bytes of an object from `start` on.

        `stopped` is for threads that nobody waits for; once it is set, `out` may stay unfilled. Without it, Ctrl-C and
        `given_up` end the waiting, and `out` may be written to for a while.

        Raises:
            CheckpointError: The bytes cannot be read, or the object changed since it was opened.
        """
        with self._required(key):
            self._get(key, start, out, stopped, given_up)

    def head(self, key: str, given_up: Callable[[], bool] = bool) -> tuple[np.ndarray, int]:
        """The first bytes of an object, at most `HEAD`, fetched once, and its size.

        Raises:
            CheckpointError: As `get`.
        """
        with self._required(key):
            return self._first(key, given_up), self._objects[key].size

    @contextlib.contextmanager
    def _required(self, key: str) -> Generator[None]:
        """Within the block, a missing or changed object raises CheckpointError."""
        try:
            yield
        except Changed:
            raise CheckpointError(
                f"{self.shown(key)} changed while it was being read: expected the object that was opened, found "
                "another. Open the checkpoint again once nothing writes to it."
            ) from None
        except Missing:
            found = "it no longer exists" if key in self._objects else "it does not exist"
            raise CheckpointError(f"cannot read {self.shown(key)}: {found}, or may not be read") from None

    def _first(self, key: str, given_up: Callable[[], bool] = bool) -> np.ndarray:
        if key not in self._heads:
            if key in self._pages:
                raise Missing
            known = self.known(key)
            head = np.empty(HEAD, np.uint8)
            count = 0 if known and not known.size else self._get(key, 0, head, None, given_up, to_end=True)
            self._heads[key] = head[:count].copy()
            if known and not count:
                self._note(key, known)
        return self._heads[key]

    def _get(
        self,
        key: str,
        start: int,
        out: np.ndarray,
        stopped: threading.Event | None,
        given_up: Callable[[], bool],
        *,
        to_end: bool = False,
    ) -> int:
        """Fills `out`: all of it or, with `to_end`, until the object ends. Returns the number of bytes."""
        done, stop = 0, start + out.size

        def ask(stopped: threading.Event) -> None:
            nonlocal done  # an attempt continues where the previous one ended
            known = self._objects.get(key)
            options: dict[str, Any] = {"range": (start + done, stop)}
            if known is not None and known.etag is not None and not known.etag.startswith("W/"):
                options["if_match"] = known.etag  # weak ETags never match
            try:
                answer = self._store(small=out.size - done <= HEAD).get(key, options=options)
                with answer if isinstance(answer, AbstractContextManager) else contextlib.nullcontext(answer) as result:
                    receive(result, known, stopped)
            except Exception as error:
                if explained(error).status != _NO_SUCH_RANGE:
                    raise
                if known is not None or start:  # the object is shorter
                    raise Changed from None
                self._note(key, Object(0, None, None))  # an empty object has no ranges

        def receive(result: Any, known: Object | None, stopped: threading.Event) -> None:
            nonlocal done
            found = _object(result.meta)
            page = str(result.attributes.get("Content-Type", "")).startswith("text/html")
            if page and known is None and not self.lists:  # a folder's index, or a form to log in
                self._pages.add(key)
                raise Missing
            known = known or self._note(key, found)
            if _differs(known, found):
                raise Changed
            expected = (min(stop, found.size) if to_end else stop) - start
            for chunk in result.stream(min_chunk_size=CHUNK):
                if done + len(chunk) > expected:  # an endless body must not fill the memory
                    raise Failure("the server sends more than was requested")
                out[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
                done += len(chunk)
                if stopped.is_set():
                    return
            if done < expected:
                raise Failure(f"the server sent {done} of {expected} bytes", True)

        self._ask(key, ask, stopped, given_up, conditional=True)
        REQUESTS.add(nbytes=done)
        return done

    def ask(self, key: str, function: Callable[[Any, Any], Result], *, action: str = "read") -> Result:
        """Returns the result of a function of obstore and its store, retried as `attempt` does.

        Raises:
            CheckpointError, Missing, Changed: As `attempt`.
        """
        # A Ctrl-C does not abandon a write that may still succeed: its answer determines what has to be undone.
        stopped = None if action == "read" else threading.Event()
        return self._ask(
            key, lambda _: function(self._obstore, self._store()), stopped, action=action, conditional=action == "write"
        )

    def open_for_parts(self) -> tuple[Any, Any]:
        """obstore, and a store of its kind that retries parts of uploads."""
        return self._obstore, self._open({**_CLIENT, "read_timeout": _PART_TIMEOUT}, self.retries.config())

    def _ask(
        self,
        key: str,
        function: Callable[[threading.Event], Result],
        stopped: threading.Event | None = None,
        given_up: Callable[[], bool] = bool,
        retries: Retries | None = None,
        **how: Any,
    ) -> Result:
        retries = retries or self.retries

        def ask(stopped: threading.Event) -> Result:
            return attempt(self.shown(key), lambda: function(stopped), retries, stopped, **how)

        return apart(ask, given_up) if stopped is None else ask(stopped)

    def _store(self, *, small: bool = False) -> Any:
        with self._lock:
            if small not in self._opened:
                self._opened[small] = self._open({**_CLIENT, **({"timeout": _SMALL_TIMEOUT} if small else {})})
            return self._opened[small]

    def _open(self, client: Mapping[str, Any], retries: Mapping[str, Any] | None = None) -> Any:
        web = self.http() if self.repository is not None or not self.lists else None

        prefix = _PREFIXES.get(self.url.kind)
        # Variables such as AWS_ALLOW_HTTP: obstore reads them only if it gets no `client_options` at all.
        named = {name: os.environ.get(f"{prefix}{name.upper()}") for name in _CLIENT_OPTIONS if prefix}
        options = {**client, **{name: value for name, value in named.items() if value}, **self._client}
        with contextlib.suppress(Exception):  # its text may contain values of options
            if web is not None:
                return self._over_http(*web, options)
            plain: dict[str, Any] = {"client_options": options, "retry_config": retries or {"max_retries": 0}}
            return self._obstore.store.from_url(self.url.root, **plain, **self.options)
        given = [f"client_options[{name!r}]" for name in self._client] + [repr(name) for name in self.options]
        raise CheckpointError(
            f"{self.url.shown}: the store cannot be opened; check the credentials in the environment and "
            f"storage_options{f' (here {listed(given)})' if given else ''}. storage_options are passed to obstore's "
            f"store for {self.url.kind}"
        )

    def http(self) -> tuple[str, Mapping[str, str]]:
        """The address of the files of a server or repository, and the headers for requests to it."""
        if self.repository is None:
            if not self.url.user:
                return self.url.root, {}
            return self.url.root, {"Authorization": f"Basic {base64.b64encode(self.url.user.encode()).decode()}"}
        repository, (commit, _) = self.repository, self.repository.settled(self._read_json)
        return f"{repository.endpoint}/{repository.name}/resolve/{commit}", repository.headers

    def _over_http(self, url: str, headers: Mapping[str, str], client_options: Mapping[str, Any]) -> Web:
        client = dict(client_options)
        if url.startswith("http://"):  # `parse_url` accepts it for this machine only, unless allowed
            client["allow_http"] = True
        # obstore checks the options, and normalizes them.
        return Web(url, headers, self._obstore.store.HTTPStore(url, client_options=client).client_options)

    def _read_json(self, url: str, retries: Retries | None = None) -> bytes:
        """Reads a small answer of a repository's server."""
        assert self.repository is not None
        client = {**_CLIENT, "timeout": _SMALL_TIMEOUT, **self._client}
        store = self._over_http(url, self.repository.headers, client)

        def ask(_: threading.Event) -> bytes:
            data = bytearray()
            with store.get("") as answer:
                for chunk in answer.stream(min_chunk_size=CHUNK):
                    data += chunk
                    if len(data) > MOST_JSON:
                        raise Failure("the server's answer does not end")
            return bytes(data)

        return self._ask("", ask, retries=retries)


def open_store(url: str, options: Mapping[str, Any] | None) -> tuple[Store, str]:
    """The store of a URL, and the key in it."""
    client = options.get("client_options") if isinstance(options, Mapping) else None
    parsed = parse_url(url, allow_http=bool(client.get("allow_http")) if isinstance(client, Mapping) else False)
    return Store(parsed, options), parsed.key


def _object(meta: Mapping[str, Any]) -> Object:
    return Object(int(meta["size"]), meta["e_tag"], meta["last_modified"])


def _differs(known: Object, found: Object) -> bool:
    if known.size != found.size:
        return known.size >= 0
    if known.etag is not None and found.etag is not None:
        return known.etag != found.etag
    return known.modified is not None and known.modified != found.modified

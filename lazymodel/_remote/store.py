"""Stores: buckets, web servers and repositories, asked for ranges of what lies in them, for sizes and for lists.

One `Store` serves one opening of a checkpoint: what it has learned of an object, its size and its ETag, holds for as
long as it is used, and every range of the object is asked for with that ETag (`If-Match`, RFC 9110 section 13.1.1), so
that two versions of an object are never mixed. Credentials are found by obstore in the places that each cloud's own
tools use.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote import hugging_face
from lazymodel._remote.blocks import Blocks
from lazymodel._remote.options import checked_options, client_from_environment, refused_options
from lazymodel._remote.requests import (
    REQUESTS,
    Changed,
    Failure,
    Gate,
    Missing,
    Retries,
    apart,
    attempt,
    explained,
)
from lazymodel._remote.url import Url, child, parse_url
from lazymodel._remote.web import Web
from lazymodel._show.text import listed

Result = TypeVar("Result")

HEAD = 64 << 10  # bytes that opening an object fetches: nearly every header of a shard is shorter
PIECE = 1 << 18  # bytes that obstore hands out at a time: few calls, and still in the cache when they are copied
_CLIENT = {
    "connect_timeout": "10s",
    "read_timeout": "10s",  # without a byte; a stalled connection is given up
    "timeout": "300s",  # of a whole request, its deadline: 8 MiB at 1 MB/s shared by all connections
    "pool_max_idle_per_host": "64",
    "user_agent": "lazymodel",
}
_SMALL_TIMEOUT = "30s"  # of a request for little: until then, a server can send an error that does not end
LIST_SECONDS = 60.0  # for the list of a folder: a million objects at 17 pages a second
_MOST_LISTED = 1_000_000  # objects of a listing; a checkpoint has thousands
_NO_SUCH_RANGE = 416  # a status
_PROBE_SECONDS = "10s"  # for the answer that has `Retry-After`
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
        repository: Of the Hugging Face hub, where it is one.
    """

    def __init__(self, url: Url, options: Mapping[str, Any] | None = None) -> None:
        self.url = dataclasses.replace(url, key="")
        self.options = checked_options(url, options)
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._folders: dict[str, tuple[dict[str, Object], set[str]]] = {}
        self._heads: dict[str, np.ndarray] = {}  # first bytes of objects that were looked at
        self.blocks: dict[str, Blocks] = {}  # and others
        self._pages: set[str] = {url.key} if url.folder and not self.lists else set()  # keys known to be no files
        self.retries = Retries(self.options.pop("retry_config", None))
        self._gate = Gate(self._retry_after)
        self._client: dict[str, Any] = dict(self.options.pop("client_options", None) or {})
        self._obstore = _import_obstore()
        self.repository: hugging_face.Repository | None = None
        if url.kind == "hf":
            self.repository = hugging_face.Repository(url.root, url.revision)
        self._opened: dict[bool, Any] = {}  # by whether it is for little

    @property
    def lists(self) -> bool:
        return self.url.kind not in ("http", "https")

    def shown(self, key: str) -> str:
        """A key as messages may show it."""
        return dataclasses.replace(self.url, key=key).text

    def commit(self, *, once: bool = False) -> str:
        """The commit of the repository that it is; asked for once, or as often as everything else.

        Raises:
            Unavailable: The hub cannot be reached.
            CheckpointError: It knows no such repository or revision, or refuses it.
        """
        assert self.repository is not None
        retries = Retries({"max_retries": 0}) if once else self.retries
        return self.repository.commit(lambda url: self._read_json(url, retries))

    # What is known of objects.

    def known(self, key: str) -> Object | None:
        """What is known of an object, without asking: what an answer said of it, or a list, which is not held to."""
        folder, _, name = key.rpartition("/")
        return self._objects.get(key) or (self._folders[folder][0].get(name) if folder in self._folders else None)

    def has(self, key: str) -> bool:
        """Whether there is an object; asks for its folder's list where that is there already, or is one answer."""
        folder, _, name = key.rpartition("/")
        if key not in self._objects and (self.repository is not None or self._listed(folder)):
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
            if not self.lists:  # what a signed URL is signed for is to get it
                self._same(key, lambda: self._first(key))
                return self._objects[key]
            meta = self._ask(key, lambda _: self._store(small=True).head(key))
        except Missing:
            return None
        return self._note(key, _object(meta))

    def folder(self, key: str) -> tuple[dict[str, Object], set[str]]:
        """The objects and the folders in a folder, by name; nothing where there is no such folder, or no listing."""
        if not self.lists:
            return {}, set()
        if key not in self._folders:
            self._folders[key] = self._list(key)
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
        if self.repository is not None:
            return self._files_of_repository(key)
        prefix = f"{key}/" if key else ""
        store = self._store(small=True)

        async def pages() -> Any:  # all of them, which can be cancelled, as the call that waits for them cannot
            return await asyncio.wait_for(self._obstore.list_with_delimiter_async(store, prefix or None), LIST_SECONDS)

        def ask(_: threading.Event) -> Any:
            try:
                return asyncio.run(pages())
            except TimeoutError:
                raise Failure(f"the list of its objects has no end after {LIST_SECONDS:g} seconds") from None

        try:
            result = self._ask(key, ask)
        except Missing:
            return {}, set()
        objects: dict[str, Object] = {}
        for meta in result["objects"]:
            if name := meta["path"][len(prefix) :]:  # what marks a folder has no name in it
                objects[name] = _object(meta)
        return objects, {path[len(prefix) :].strip("/") for path in result["common_prefixes"]}

    def _files_of_repository(self, key: str) -> tuple[dict[str, Object], set[str]]:
        assert self.repository is not None
        prefix = f"{key}/" if key else ""
        objects: dict[str, Object] = {}
        folders: set[str] = set()
        for path in self.repository.files(self._read_json):
            if path.startswith(prefix):
                name, slash, _ = path[len(prefix) :].partition("/")
                if name in ("", ".", "..") or not path.isprintable():
                    continue  # nothing that a checkpoint has
                if slash:
                    folders.add(name)
                else:
                    objects[name] = Object(-1, None, None)
        return objects, folders

    def hashes(self) -> dict[str, tuple[str, str]]:
        """Of a repository's files, by path: an algorithm, as `checkpoints/_verify` calls it, and the digits."""
        return {} if self.repository is None else self.repository.hashes(self._read_json)

    def _note(self, key: str, found: Object) -> Object:
        with self._lock:
            return self._objects.setdefault(key, found)

    # Bytes.

    def get(
        self,
        key: str,
        start: int,
        out: np.ndarray,
        stopped: threading.Event | None = None,
        given_up: Callable[[], bool] = bool,
    ) -> None:
        """Fills `out` (`uint8`) with the bytes of an object from `start` on.

        `stopped` is for threads that nobody waits for, and once it is set `out` may stay unfilled; without it, Ctrl-C
        and `given_up` end the waiting, and `out` may be written to for a while.

        Raises:
            CheckpointError: They cannot be had, or the object changed since it was first looked at.
        """
        self._told(key, lambda: self._get(key, start, out, stopped, given_up))

    def head(self, key: str) -> tuple[np.ndarray, int]:
        """The first bytes of an object, at most `HEAD` of them, fetched once, and how many it has in all.

        Raises:
            CheckpointError: As `get`.
        """
        return self._told(key, lambda: (self._first(key), self._objects[key].size))

    def _told(self, key: str, function: Callable[[], Result]) -> Result:
        """What a function that asks for an object returns; that it is not there, or no longer, is a CheckpointError."""
        try:
            return self._same(key, function)
        except Missing:
            found = "there is nothing any more" if key in self._objects else "there is nothing"
        raise CheckpointError(f"cannot read {self.shown(key)}: {found}, or nothing that may be read")

    def _same(self, key: str, function: Callable[[], Result]) -> Result:
        try:
            return function()
        except Changed:
            pass
        raise CheckpointError(
            f"{self.shown(key)} changed while it was being read: expected the object that was there when it was "
            "opened, found another. Open the checkpoint again once nothing writes to it."
        )

    def _first(self, key: str) -> np.ndarray:
        if key not in self._heads:
            if key in self._pages:
                raise Missing
            known = self.known(key)
            head = np.empty(HEAD, np.uint8)
            count = 0 if known and not known.size else self._get(key, 0, head, None, bool, to_end=True)
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
        """Fills `out`, all of it or, `to_end`, until the object ends; says how many bytes that is."""
        done, stop = 0, start + out.size

        def ask(stopped: threading.Event) -> None:
            nonlocal done  # an attempt goes on where the last one broke off
            known = self._objects.get(key)
            options: dict[str, Any] = {"range": (start + done, stop)}
            if known is not None and known.etag is not None and not known.etag.startswith("W/"):
                options["if_match"] = known.etag  # which weak ones never match
            try:
                with self._answer(key, options) as result:
                    receive(result, known, stopped)
            except Exception as error:
                if explained(error).status != _NO_SUCH_RANGE:
                    raise
                if known is not None or start:  # it ends before
                    raise Changed from None
                self._note(key, Object(0, None, None))  # what is empty has no ranges at all

        def receive(result: Any, known: Object | None, stopped: threading.Event) -> None:
            nonlocal done
            found = _object(result.meta)
            if known is None and self._is_page(key, result):
                raise Missing
            known = known or self._note(key, found)
            if _differs(known, found):
                raise Changed
            expected = (min(stop, found.size) if to_end else stop) - start
            for chunk in result.stream(min_chunk_size=PIECE):
                if done + len(chunk) > expected:  # before a body without end fills the memory
                    raise Failure("the server sends more than was asked for")
                out[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
                done += len(chunk)
                if stopped.is_set():
                    return
            if done < expected:
                raise Failure(f"the server sent {done} of {expected} bytes", True)

        self._ask(key, ask, stopped, given_up, conditional=True)
        REQUESTS.add(nbytes=done)
        return done

    def _answer(self, key: str, options: Mapping[str, Any]) -> AbstractContextManager[Any]:
        start, stop = options["range"]
        answer = self._store(small=stop - start <= HEAD).get(key, options=options)
        return answer if isinstance(answer, AbstractContextManager) else contextlib.nullcontext(answer)

    def _is_page(self, key: str, result: Any) -> bool:
        """Whether a web server answered with a page for people: a folder's index, a form to log in."""
        if self.lists or not str(result.attributes.get("Content-Type", "")).startswith("text/html"):
            return False
        self._pages.add(key)
        return True

    def ask(self, key: str, function: Callable[[Any, Any], Result], *, verb: str = "read") -> Result:
        """What a function of obstore and its store comes to, tried again as `attempt` does; it may be about to `verb`.

        Raises:
            CheckpointError, Missing, Changed: As `attempt`.
        """
        # What writes is not left by a Ctrl-C while it may still happen: its answer says what there is to undo.
        stopped = None if verb == "read" else threading.Event()
        return self._ask(
            key, lambda _: function(self._obstore, self._store()), stopped, verb=verb, conditional=verb == "write"
        )

    def open_for_parts(self, client: Mapping[str, Any]) -> tuple[Any, Any]:
        """obstore, and a store of its kind that tries parts of uploads again, with these defaults for its client."""
        retries = self.retries
        config = {
            "max_retries": retries.attempts - 1,
            "retry_timeout": datetime.timedelta(seconds=retries.timeout),
            "backoff": {
                "init_backoff": datetime.timedelta(seconds=retries.first),
                "max_backoff": datetime.timedelta(seconds=retries.longest),
                "base": retries.base,
            },
        }
        return self._obstore, self._open({**_CLIENT, **client}, config)

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
            return attempt(self.shown(key), key, lambda: function(stopped), retries, self._gate, stopped, **how)

        return apart(ask, given_up) if stopped is None else ask(stopped)

    def _store(self, *, small: bool = False) -> Any:
        with self._lock:
            if small not in self._opened:
                self._opened[small] = self._open({**_CLIENT, **({"timeout": _SMALL_TIMEOUT} if small else {})})
            return self._opened[small]

    def _open(self, client: Mapping[str, Any], retries: Mapping[str, Any] | None = None) -> Any:
        web = self.http() if self.repository is not None or not self.lists else None

        def opened(client_options: Mapping[str, Any], **options: Any) -> Any:
            if web is not None:
                return self._over_http(*web, client_options)
            plain: dict[str, Any] = {"client_options": client_options, "retry_config": retries or {"max_retries": 0}}
            return self._obstore.store.from_url(self.url.root, **plain, **options)

        try:
            return opened({**client, **client_from_environment(self.url), **self._client}, **self.options)
        except Exception:  # whose text may have values of options
            pass
        wrong = refused_options(opened, self._client, self.options)
        raise CheckpointError(
            f"{self.url.shown}: the store cannot be opened; check the credentials in the environment and "
            f"storage_options{f', here {listed(wrong)}' if wrong else ''}, which are what obstore's store for "
            f"{self.url.kind} takes"
        )

    def http(self) -> tuple[str, Mapping[str, str]]:
        """The address below which a server or repository has its files, and the headers to ask for them with."""
        if self.repository is None:
            if not self.url.user:
                return self.url.root, {}
            return self.url.root, {"Authorization": f"Basic {base64.b64encode(self.url.user.encode()).decode()}"}
        return self.repository.files_url(self._read_json), self.repository.headers

    def _over_http(self, url: str, headers: Mapping[str, str], client_options: Mapping[str, Any]) -> Web:
        client = dict(client_options)
        if url.startswith("http://"):  # which `parse_url` allows to this machine only, unless asked for
            client["allow_http"] = True
        # obstore says whether the options are such, and writes them down in one way.
        return Web(url, headers, self._obstore.store.HTTPStore(url, client_options=client).client_options)

    def _read_json(self, url: str, retries: Retries | None = None) -> bytes:
        """A small answer of a repository's server."""
        assert self.repository is not None
        client = {**_CLIENT, "timeout": _SMALL_TIMEOUT, **self._client}
        store = self._over_http(url, self.repository.headers, client)

        def ask(_: threading.Event) -> bytes:
            data = bytearray()
            with store.get("") as answer:
                for chunk in answer.stream(min_chunk_size=PIECE):
                    data += chunk
                    if len(data) > hugging_face.MOST_JSON:
                        raise Failure("the server's answer does not end")
            return bytes(data)

        return self._ask("", ask, retries=retries)

    def _retry_after(self, key: str) -> float | None:
        """The seconds for which a bucket that is still busy asks to be left alone, where it says so."""
        if self.repository is not None or not self.lists:
            return None  # which the first answer would have said
        try:
            url = self._obstore.sign(self._store(), "GET", key, datetime.timedelta(seconds=_SIGNED_SECONDS))
            web = self._over_http(url, {}, {**self._client, "timeout": _PROBE_SECONDS})
            # Of a kind with what was refused: limits, and signatures of URLs, can be for one method alone.
            with web.get("", options={"range": (0, 1)}):
                return None
        except Failure as error:
            return error.retry_after
        except Exception:  # only ever a better guess at how long to wait
            return None


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


def _import_obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise CheckpointError(
            "reading from a URL needs obstore, which is not installed: pip install 'lazymodel[remote]'"
        ) from None
    return obstore

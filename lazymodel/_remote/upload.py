"""Writing objects: large ones in parts, from pieces that are made while they are sent; small ones on a condition.

Responsible for one object at a time: an object is there whole or not at all, and a part that a store does not take is
sent again. Not responsible for which objects are a checkpoint together (`_save/remote`).

An upload in parts that ends early is aborted at the store by obstore. Azure has no such request: blocks that were never
committed are not visible there, and go after a week.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import RemotePath
from lazymodel._remote.requests import Changed, Failure, Missing, explained

PART = 8 << 20  # bytes of a part, where that is not too many of them: as long as a request that reads
LEAST_PART = 5 << 20  # bytes; S3 takes no shorter ones, but for the last
_MOST_PARTS = 10_000  # of an upload, as S3 and Google Cloud Storage have it
_CONNECTIONS = 32  # parts on the way, at most, as when reading
_MOST_SMALL = 256 << 20  # bytes of an object that is read whole: an index, of some million tensors
# Of one object, at most. Parts are sent again by themselves; what begins and completes an upload is not, where the
# connection breaks off, since it may have been done.
_UPLOADS = 4
_DELETIONS = 16  # at a time
_LOOK = 0.1  # seconds between two looks whether all is to stop: a Ctrl-C is seen in between
# Without a byte from the store. It has nothing to say while a part is sent: all parts on the way, at 2 MB/s.
_CLIENT = {"read_timeout": "120s"}


class Parts(NamedTuple):
    """How an object is uploaded: bytes of a part, and how many are on the way at a time."""

    nbytes: int
    connections: int


def parts_of(nbytes: int, memory: int) -> Parts | None:
    """How an object of a size is uploaded with so many bytes of memory; None where they are too few."""
    least = max(LEAST_PART, -(-nbytes // _MOST_PARTS))
    size = max(least, min(PART, memory // _CONNECTIONS))
    connections = min(memory // size - 1, _CONNECTIONS)  # and one that is being put together
    return Parts(size, connections) if connections >= 1 else None


Version: TypeAlias = "dict[str, str]"  # what tells an object from others of its name, as far as the store says


def version_of(path: RemotePath) -> Version | None:
    """Which object is there now; None where there is none."""
    found = _head(path)
    return None if found is None else _version(found)


def _head(path: RemotePath) -> dict[str, Any] | None:
    try:
        return path.store.ask(path.key, lambda obstore, store: obstore.head(store, path.key))
    except Missing:
        return None


def _version(head: dict[str, Any]) -> Version:
    return {name: head[name] for name in ("e_tag", "version") if head[name] is not None}


def replace(path: RemotePath, content: bytes, old: Version | None) -> None:
    """Puts a small object where another one was, or none.

    Raises:
        Changed: What is there is not the old one.
        CheckpointError: It cannot be written.
    """
    mode: Any = "create" if old is None else old
    try:
        path.store.ask(path.key, lambda obstore, store: obstore.put(store, path.key, content, mode=mode), verb="write")
    except Missing:
        raise CheckpointError(f"cannot write {path}: there is no such bucket or container") from None
    except (Changed, CheckpointError):
        # An attempt may have come through, and only its answer not.
        if read_whole(path) != content:
            raise


def read_whole(path: RemotePath) -> bytes | None:
    """The bytes of a small object as it is now, whatever was read of it before; None where there is none."""

    def read(obstore: Any, store: Any) -> bytes:
        content = bytearray()
        for chunk in obstore.get(store, path.key).stream(min_chunk_size=1 << 20):
            content += chunk
            if len(content) > _MOST_SMALL:
                raise Failure("it is larger than any index", False)
        return bytes(content)

    try:
        return path.store.ask(path.key, read)
    except Missing:
        return None


def delete(paths: Sequence[RemotePath]) -> list[str]:
    """Deletes objects that may be gone already; what could not be, in words."""

    def one(path: RemotePath) -> str | None:
        try:
            path.store.ask(path.key, lambda obstore, store: obstore.delete(store, path.key), verb="delete")
        except Missing:
            pass
        except CheckpointError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(_DELETIONS) as pool:
        return [failure for failure in pool.map(one, paths) if failure is not None]


class Content(NamedTuple):
    """An object to upload."""

    path: RemotePath
    pieces: Callable[[], Generator[np.ndarray]]  # bytes, made in the thread that uploads; none longer than a part
    nbytes: int  # of all of them
    parts: Parts
    old: Version | None  # what is there and is replaced
    again: bool  # whether the pieces can be made once more

    def arrived(self) -> bool:
        """Whether it is there though the store did not say so: an answer may be lost, and what is asked once more of an
        upload that is complete is an error.
        """
        try:
            found = _head(self.path)
        except LazyModelError:
            return False
        return found is not None and found["size"] == self.nbytes and _version(found) != self.old


class Uploading:
    """Objects that are uploaded one after the other, each in many parts at a time, in a thread of its own.

    Args:
        contents: What is uploaded, in this order.
        held: Whether the last step of each waits until `complete` is called.
    """

    def __init__(self, contents: Iterable[Content], *, held: bool) -> None:
        self._contents, self._held = contents, held
        self._stopped, self._going, self._sent = threading.Event(), threading.Event(), threading.Event()
        self._error: BaseException | None = None
        # A daemon: a request that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="lazymodel-upload", daemon=True)

    def start(self) -> None:
        """Begins; once."""
        self._thread.start()

    def wait(self, check: Callable[[], None]) -> None:
        """Returns when all is sent, and there unless it is held; raises what went wrong, or what `check` raises."""
        while self._thread.is_alive() and not (self._held and self._sent.wait(_LOOK)):
            self._thread.join(0 if self._held else _LOOK)
            self.check()
            check()
        self.check()

    def check(self) -> None:
        """Raises what went wrong, if anything did."""
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """What was held appears."""
        self._going.set()
        while self._thread.is_alive():
            self._thread.join(_LOOK)
        self.check()

    def abort(self, seconds: float) -> bool:
        """Gives up what is not complete; whether that was done within some seconds."""
        self._stopped.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def hand(self, to: queue.Queue[Any], item: Any) -> None:
        """Puts something into a queue that the pieces are made from, as soon as there is room; raises as `check`."""
        while True:
            self.check()
            try:
                to.put(item, timeout=_LOOK)
                return
            except queue.Full:
                pass

    # In the thread.

    def _run(self) -> None:
        try:
            opened: dict[int, tuple[Any, Any]] = {}
            for content in self._contents:
                store = content.path.store
                if id(store) not in opened:
                    opened[id(store)] = store.open_for_parts(_CLIENT)
                self._upload(*opened[id(store)], content)
        except BaseException as error:
            self._error = error

    def _upload(self, obstore: Any, store: Any, content: Content) -> None:
        retries = content.path.store.retries
        attempts = min(_UPLOADS, retries.attempts) if content.again else 1
        for attempt in range(attempts):
            failure = self._attempt(obstore, store, content)
            if failure is None or content.arrived():
                return
            if attempt == attempts - 1 or not failure.again:
                tried = f", after {attempts} uploads" if failure.again and attempts > 1 else ""
                raise LazyModelError(
                    f"cannot write {content.path}: {failure}{tried}. What was there before is as it was"
                )
            self._stopped.wait(retries.wait(attempt))

    def _attempt(self, obstore: Any, store: Any, content: Content) -> Failure | None:
        """Uploads an object; or says why the store did not take it, and it is aborted."""
        size, connections = content.parts
        writer = obstore.open_writer(store, content.path.key, buffer_size=size, max_concurrency=connections)
        failure: Failure | None = None
        try:
            with contextlib.closing(content.pieces()) as pieces:
                for piece in pieces:
                    self._require_going()
                    if (failure := _failure(writer.write, piece)) is not None:
                        break
            if failure is None:
                self._sent.set()
                while self._held and not self._going.wait(_LOOK):
                    self._require_going()
                self._require_going()
                failure = _failure(writer.close)
        except BaseException as error:
            _abort(writer, error)
            raise
        if failure is not None:
            _abort(writer, failure)
        return failure

    def _require_going(self) -> None:
        if self._stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The upload is given up."""


def _failure(function: Callable[..., Any], *arguments: Any) -> Failure | None:
    """What went wrong in a function of obstore, if anything, apart from its own error, which must not be shown."""
    try:
        function(*arguments)
    except Exception as error:
        failure = explained(error)
        if isinstance(failure, Missing):
            return Failure("there is no such bucket or container, or the upload was removed there")
        return failure
    return None


def _abort(writer: Any, error: BaseException) -> None:
    """Aborts an upload that is not complete, at the store as well, as leaving a `with` block by an error does."""
    if not writer.closed():
        _failure(writer.__exit__, type(error), error, None)

"""Objects of stores as they are written: sent in parts, replaced if they are still the old ones, deleted.

Responsible for single objects, each of which is the old one or the new one at every instant. Not responsible for which
objects are a checkpoint together (`_save/store`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import RemotePath
from lazymodel._remote.requests import Changed, Failure, Missing, apart, explained
from lazymodel._tensors.buffers import parallel, start_thread

_READ_ONLY = {
    "hf": "a repository on a hub takes commits: save to a folder, and upload that with `hf upload`",
    "https": "few web servers take files, and none of them in parts",
}
_READ_ONLY["http"] = _READ_ONLY["https"]

PART = 8 << 20  # bytes of a part, unless that makes too many parts
LEAST_PART = 5 << 20  # bytes; the minimum of S3, except for the last part
_MOST_PARTS = 10_000  # of an upload; the limit of S3 and Google Cloud Storage
_CONNECTIONS = 32  # limit of parts in transfer
_MOST_SMALL = 256 << 20  # bytes of an object that is read whole: an index of some million tensors
_DELETIONS = 16  # at a time
_ABORT = 15.0  # seconds, at most, that an upload is waited for to be given up: a part that hangs takes longer


def check_writable(where: RemotePath) -> None:
    """Raises LazyModelError for a place that cannot be saved to."""
    if (reason := _READ_ONLY.get(where.store.url.kind)) is not None:
        raise LazyModelError(f"cannot save to {where}: {reason}. Expected s3://, gs:// or az://")


class Parts(NamedTuple):
    """How an object is uploaded: bytes of a part, and the number of parts in transfer at a time."""

    nbytes: int
    connections: int


def parts_of(nbytes: int, memory: int) -> Parts | None:
    """Plans the upload of an object of a size with so many bytes of memory. Returns None if the memory is too small."""
    least = max(LEAST_PART, -(-nbytes // _MOST_PARTS))
    size = max(least, min(PART, memory // _CONNECTIONS))
    connections = min(memory // size - 1, _CONNECTIONS)  # and one part that is being filled
    return Parts(size, connections) if connections >= 1 else None


Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


@contextlib.contextmanager
def one_thread() -> Generator[Calls]:
    """Within the block, a thread runs what is put into the queue that it gives, however many uploads there are."""

    def run() -> None:
        for call in iter(calls.get, None):
            call()

    calls: Calls = queue.SimpleQueue()
    start_thread(run, "upload")
    try:
        yield calls
    finally:
        calls.put(None)


class Upload:
    """An object that is sent in parts: visible once `complete` returns, and gone after `abort`.

    Args:
        path: Location of the object, in a store as `Store.open_for_parts` returns it.
        check: Called while a call takes long; an error that it raises ends the waiting.
        calls: Takes what a thread runs.
    """

    def __init__(
        self, store: tuple[Any, Any], path: RemotePath, parts: Parts, check: Callable[[], None], calls: Calls
    ) -> None:
        obstore, opened = store
        self._writer: Any = obstore.open_writer(
            opened, path.key, buffer_size=parts.nbytes, max_concurrency=parts.connections
        )
        self._check, self._calls, self._calling = check, calls, threading.Lock()

    def write(self, chunk: np.ndarray) -> None:
        """Sends a chunk, which is not longer than a part. Raises Failure if the store rejects it."""
        self._call(self._writer.write, chunk)

    def complete(self) -> None:
        """Makes the object visible. Raises Failure if the store rejects it."""
        self._call(self._writer.close)

    def abort(self) -> None:
        """Aborts an incomplete upload, at the store as well, as leaving a `with` block by an error does."""
        if self._calling.acquire(timeout=_ABORT):
            with contextlib.ExitStack() as stack:
                stack.callback(self._calling.release)
                if not self._writer.closed():
                    arguments = self._writer.__exit__, Failure, Failure("saving was stopped"), None
                    start_thread(_failure, "abort", *arguments).join(_ABORT)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        def call(_: threading.Event) -> Failure | None:
            with self._calling:
                return _failure(function, *arguments)

        if (failure := apart(call, self._checked, self._calls.put)) is not None:
            raise failure

    def _checked(self) -> bool:
        self._check()
        return False


def _failure(function: Callable[..., Any], *arguments: Any) -> Failure | None:
    """The failure of a function of obstore, if any, without the original error, which must not be shown."""
    try:
        function(*arguments)
    except Exception as error:
        failure = explained(error)
        if isinstance(failure, Missing):
            return Failure("there is no such bucket or container, or the upload was removed there")
        return failure
    return None


Version: TypeAlias = "dict[str, str]"  # identity of an object among others of its name, as reported by the store


def version_of(path: RemotePath) -> Version | None:
    """The version of an object that is there now; None if there is none."""
    found = _head(path)
    return None if found is None else _version(found)


def _head(path: RemotePath) -> dict[str, Any] | None:
    try:
        return path.store.ask(path.key, lambda obstore, store: obstore.head(store, path.key))
    except Missing:
        return None


def _version(head: dict[str, Any]) -> Version:
    return {name: head[name] for name in ("e_tag", "version") if head[name] is not None}


def arrived(path: RemotePath, nbytes: int, old: Version | None) -> bool:
    """Returns True if an object exists although the store did not confirm it: an answer may be lost, and a second
    request to complete an upload is an error.
    """
    try:
        found = _head(path)
    except LazyModelError:
        return False
    return found is not None and found["size"] == nbytes and _version(found) != old


def replace(path: RemotePath, content: bytes, old: Version | None) -> None:
    """Replaces a small object, or creates it if `old` is None.

    Raises:
        Changed: The current object is not the old one.
        CheckpointError: It cannot be written.
    """
    mode: Any = "create" if old is None else old
    try:
        path.store.ask(
            path.key, lambda obstore, store: obstore.put(store, path.key, content, mode=mode), action="write"
        )
    except Missing:
        raise CheckpointError(f"cannot write {path}: there is no such bucket or container") from None
    except (Changed, CheckpointError):
        # The write may have succeeded although its answer was lost.
        if read_whole(path) != content:
            raise


def read_whole(path: RemotePath) -> bytes | None:
    """Reads a small object as it is now, regardless of earlier reads. Returns None if there is none."""

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
    """Deletes objects, which may be deleted already. Returns the messages of those that could not be deleted."""

    def one(path: RemotePath) -> str | None:
        try:
            path.store.ask(path.key, lambda obstore, store: obstore.delete(store, path.key), action="delete")
        except Missing:
            pass
        except CheckpointError as error:
            return str(error)
        return None

    with parallel(one, paths, _DELETIONS, "delete") as failures:
        return [failure for failure in failures if failure is not None]

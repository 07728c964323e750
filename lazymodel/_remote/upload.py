"""Writing objects: large ones in parts, from chunks that are made while they are sent; small ones conditionally.

Handles one object at a time: an object is written completely or not at all, and a part that a store rejects is sent
again. `_save/remote` decides which objects form a checkpoint.

If an upload in parts ends early, obstore aborts it at the store. Azure has no such request: blocks that were never
committed are not visible there, and are deleted after a week.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import RemotePath
from lazymodel._remote.requests import Changed, Failure, Missing, explained
from lazymodel._tensors.buffers import parallel

PART = 8 << 20  # bytes of a part, unless that makes too many parts
LEAST_PART = 5 << 20  # bytes; the minimum of S3, except for the last part
_MOST_PARTS = 10_000  # of an upload; the limit of S3 and Google Cloud Storage
_CONNECTIONS = 32  # limit of parts in transfer
_MOST_SMALL = 256 << 20  # bytes of an object that is read whole: an index of some million tensors
_DELETIONS = 16  # at a time
# Without a byte from the store, which sends nothing while it receives a part: time for all parts in transfer at 2 MB/s.
CLIENT = {"read_timeout": "120s"}


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


def arrived(path: RemotePath, nbytes: int, old: Version | None) -> bool:
    """Returns True if an object exists although the store did not confirm it: an answer may be lost, and a second
    request to complete an upload is an error.
    """
    try:
        found = _head(path)
    except LazyModelError:
        return False
    return found is not None and found["size"] == nbytes and _version(found) != old


def upload(
    store: tuple[Any, Any],
    path: RemotePath,
    parts: Parts,
    chunks: Generator[np.ndarray],
    check: Callable[[], None],
    hold: Callable[[], None],
) -> Failure | None:
    """Uploads an object. If the store rejects it, aborts the upload and returns the reason.

    Args:
        store: As `Store.open_for_parts` returns it.
        path: Location of the object.
        parts: Division into parts.
        chunks: Its bytes; no chunk is longer than a part.
        check: Called for each chunk; an error that it raises aborts the upload.
        hold: Called before the last step, which makes the object visible; an error aborts the upload, too.
    """
    obstore, opened = store
    writer = obstore.open_writer(opened, path.key, buffer_size=parts.nbytes, max_concurrency=parts.connections)
    failure: Failure | None = None
    try:
        with contextlib.closing(chunks):
            for chunk in chunks:
                check()
                if (failure := _failure(writer.write, chunk)) is not None:
                    break
        if failure is None:
            hold()
            failure = _failure(writer.close)
    except BaseException as error:
        _abort(writer, error)
        raise
    if failure is not None:
        _abort(writer, failure)
    return failure


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


def _abort(writer: Any, error: BaseException) -> None:
    """Aborts an incomplete upload, at the store as well, as leaving a `with` block by an error does."""
    if not writer.closed():
        _failure(writer.__exit__, type(error), error, None)

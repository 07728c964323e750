"""`RemotePath`: a location in a store that code can use like a `pathlib.Path` of a file or folder.

It has only the methods that readers of checkpoints need, with the meaning that they have for a path. There are no
links, and each question is sent to the store only once. Objects are files, and the part of their names before a slash
is a folder. A web server cannot list, so a folder there has no entries except those that are requested by name.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import functools
import io
import os
import posixpath
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lazymodel._errors import CheckpointError
from lazymodel._remote.file import RemoteFile
from lazymodel._remote.store import Store, open_store
from lazymodel._remote.url import child
from lazymodel._tensors.threads import parallel


@functools.total_ordering
class RemotePath:
    """A key in a store."""

    def __init__(self, store: Store, key: str = "") -> None:
        self.store, self.key = store, key

    def __str__(self) -> str:
        return self.store.shown(self.key)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self.store, self.key) == (other.store, other.key)

    def __hash__(self) -> int:
        return hash((id(self.store), self.key))

    def __lt__(self, other: RemotePath) -> bool:
        return self.key.split("/") < other.key.split("/")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.store, child(self.key, name))

    @property
    def name(self) -> str:
        return posixpath.basename(self.key)

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.key)[1]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.store, posixpath.dirname(self.key))

    def relative_to(self, folder: RemotePath) -> str:
        """The path relative to a folder."""
        return posixpath.relpath(self.key, folder.key) if folder.key else self.key

    def resolve(self) -> RemotePath:
        """Returns itself: there are no links."""
        return self

    def is_symlink(self) -> bool:
        return False

    def is_relative_to(self, other: RemotePath) -> bool:
        return not other.key or self.key == other.key or self.key.startswith(f"{other.key}/")

    @property
    def parents(self) -> Iterator[RemotePath]:
        """The folders that contain it, the innermost first."""
        folder = self
        while folder.key:
            folder = folder.parent
            yield folder

    def is_file(self) -> bool:
        return bool(self.key) and self.store.has(self.key)

    def is_dir(self) -> bool:
        if not self.store.lists:
            return not self.is_file()
        return self.store.has_folder(self.key)

    def exists(self) -> bool:
        return self.is_file() or (self.store.lists and self.is_dir())

    def stat(self) -> os.stat_result:
        """Size and kind. Raises FileNotFoundError if there is no such object."""
        found = self.store.find(self.key) if self.key else None
        if found is None:
            raise FileNotFoundError(2, os.strerror(2), str(self))
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, found.size, 0, 0, 0))

    def iterdir(self) -> Iterator[RemotePath]:
        objects, folders = self.store.folder(self.key)
        for name in sorted({*objects, *folders}):
            yield self / name

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Objects in the folder whose names match. On a web server: only the file with the usual name."""
        if not self.store.lists:
            usual = self / pattern.replace("*", "model")
            return iter([usual] if usual.is_file() else [])
        names = fnmatch.filter(self.store.folder(self.key)[0], pattern)
        return (self / name for name in sorted(names))

    def files_below(self) -> list[str]:
        """Paths, relative to it, of all objects below it."""
        return list(self.store.below(self.key))

    def open(self, mode: str = "rb") -> io.BufferedIOBase | io.RawIOBase:
        """Opens the object as a file."""
        assert mode == "rb", mode
        return RemoteFile(self.store, self.key)

    def read_bytes(self) -> bytes:
        with RemoteFile(self.store, self.key) as file:
            return file.read()


Location: TypeAlias = "Path | RemotePath"


_HEADS = 16  # heads of objects that are fetched at a time
_MOST_HEADS = 1024  # heads in all: an index with more shards than models have is more likely wrong


def fetch_heads(paths: Iterable[Location]) -> None:
    """Fetches the first bytes of objects, several at a time, so that reading their headers in turn needs no further
    requests. Objects that cannot be read raise when they are opened.
    """

    stopped = threading.Event()

    def fetch(path: RemotePath) -> None:
        with contextlib.suppress(CheckpointError):
            path.store.head(path.key, stopped.is_set)

    remote = [path for path in paths if isinstance(path, RemotePath)][:_MOST_HEADS]
    with parallel(fetch, remote, _HEADS, "heads", stopped=stopped) as fetched:
        collections.deque(fetched, 0)


def remote_path(url: str, options: Mapping[str, Any] | None = None) -> RemotePath:
    """The location that a URL names. Makes no request."""
    store, key = open_store(url, options)
    return RemotePath(store, key)

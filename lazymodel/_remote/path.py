"""`RemotePath`: a location in a store that code can use like a `pathlib.Path` of a file or folder.

It has only the methods that readers of checkpoints need, with the meaning that they have for a path. There are no
links, and each question is sent to the store only once. Objects are files, and the part of their names before a slash
is a folder. A web server cannot list, so a folder there has no entries except those that are requested by name.

`RemoteFile`: an object as a file with random access, for libraries that need one.

It is meant for headers: a few places of an object, each read in small steps. It keeps blocks of the object, and fetches
consecutive blocks in increasingly long requests. Tensors are not read through it.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.prefetch import ReadAhead, requests_for
from lazymodel._remote.store import Blocks, Store, open_store
from lazymodel._remote.url import child
from lazymodel._tensors.buffers import parallel

BLOCK = 4 << 10  # bytes of a block, except the head: metadata between the tensors of an HDF5 file is about 2 KiB long
_LONGEST = 4 << 20  # bytes of one request, after many consecutive blocks were requested


class RemoteFile(io.RawIOBase):
    """A read-only file. Not thread-safe, like other file objects. Once `given_up` returns True, it stops waiting."""

    def __init__(self, store: Store, key: str, given_up: Callable[[], bool] = bool) -> None:
        super().__init__()
        self._store, self._key, self._given_up = store, key, given_up
        self._head, self.size = store.head(key)
        self._position = 0
        self._blocks = store.blocks.setdefault(key, Blocks())
        self._next = self._length = 0  # the block after the last request, and how many blocks that had

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise OSError(22, "negative seek position")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(min(len(out), self.size - self._position), 0)
        done = 0
        while done < count:
            data = self._from(self._position, count - done)
            out[done : done + len(data)] = memoryview(cast(Any, data))
            done += len(data)
            self._position += len(data)
        return count

    def readall(self) -> bytes:
        data = bytearray(max(self.size - self._position, 0))
        self.readinto(data)
        return bytes(data)

    def _from(self, position: int, wanted: int) -> np.ndarray:
        """Bytes from a position on, at least one and at most `wanted`."""
        if position < len(self._head):
            return self._head[position : position + wanted]
        number, within = divmod(position, BLOCK)
        block = self._blocks.get(number)
        if block is None:
            block = self._fetch(number, within + wanted)
        return block[within : within + wanted]

    def kept(self, start: int, stop: int) -> bytes | None:
        """Returns bytes of the file if they were fetched already; else None."""
        data = bytearray()
        while start + len(data) < stop:
            position = start + len(data)
            if position < len(self._head):
                data += self._head[position:stop].tobytes()
                continue
            number, within = divmod(position, BLOCK)
            if (block := self._blocks.get(number)) is None or within >= len(block):
                return None
            data += block[within : within + stop - position].tobytes()
        return bytes(data)

    def fetch_ahead(self, spans: Sequence[tuple[int, int]]) -> int:
        """Prefetches ranges of the file that will be read, many at a time. Returns the number of bytes fetched."""
        blocks = np.array([(start // BLOCK, -(-stop // BLOCK)) for start, stop in spans], np.int64)
        # In blocks: every request starts at the beginning of one.
        ranges = np.minimum(requests_for(blocks, gap=1, longest=_LONGEST // BLOCK) * BLOCK, self.size)
        with ReadAhead([(self, ranges)], gap=0) as ahead:
            for start, stop in ranges.tolist():
                data = np.empty(stop - start, np.uint8)
                done = 0
                while done < data.size:
                    done += ahead.read_into(self, start + done, data[done:])
                self._keep(start // BLOCK, data)
        return int((ranges[:, 1] - ranges[:, 0]).sum())

    def fetch(self, start: int, out: np.ndarray, stopped: threading.Event) -> None:
        """Fills `out` with the bytes from `start` on."""
        self._store.get(self._key, start, out, stopped)

    def _fetch(self, number: int, wanted: int) -> np.ndarray:
        self._length = 2 * self._length if number == self._next else 1
        self._length = min(max(self._length, -(-wanted // BLOCK)), _LONGEST // BLOCK)
        start = number * BLOCK
        data = np.empty(min(self._length * BLOCK, self.size - start), np.uint8)
        self._store.get(self._key, start, data, given_up=self._given_up)
        self._next = number + self._length
        return self._keep(number, data)

    def _keep(self, number: int, data: np.ndarray) -> np.ndarray:
        """Keeps consecutive blocks, the first of which is `number`, and returns that one."""
        # Copies, so that each can be freed by itself.
        blocks = [data[first : first + BLOCK].copy() for first in range(0, len(data), BLOCK)]
        self._blocks.add(number, blocks)
        return blocks[0]


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

"""Where files are: a `Location` is a `LocalPath` on a disk or a `RemotePath` in a store, and code asks both the same.

What they have besides the methods of `pathlib`: `lists` (False for web servers, where folders have no entries but those
that are requested by name), `reader()` for the bytes of tensors, `files_below()`, `leads_out()` and `irregular()` for
links and pipes, which stores do not have, `named()` and `identity` for places that messages and manifests name,
`published()` and `fingerprint()` for what a file should be and is, and `state()` and `anew()` for places that change
while they are looked at. A store is asked each question only once.

`RemoteFile` is meant for headers: a few places of an object, each read in small steps. It keeps blocks of the object,
and fetches consecutive blocks in increasingly long requests.

`RemoteReader` gives the bytes of tensors. Callers announce what will be read (`reading_ahead`), and it is fetched in as
many concurrent requests as fill the link. Other reads are handled in the same way, one read at a time.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import functools
import hashlib
import io
import os
import posixpath
import reprlib
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import PosixPath
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.hub import stated_alongside
from lazymodel._remote.prefetch import AHEAD, GAP, ReadAhead, Stopped, requests_for
from lazymodel._remote.store import Store, open_store
from lazymodel._remote.url import is_url
from lazymodel._show.text import printable
from lazymodel._tensors.boxes import Geometry, ranges_of
from lazymodel._tensors.buffers import Workspace, parallel
from lazymodel._tensors.byte_reader import SAMPLE, SAMPLES, VERIFIED, ByteReader, FileReader, Seekable, samples
from lazymodel._tensors.convert import DType, Steps

BLOCK = 4 << 10  # bytes of a block, except the head: metadata between the tensors of an HDF5 file is about 2 KiB long
_MOST_BLOCKS = 4096  # of a file that are kept
_LONGEST = 4 << 20  # bytes of one request, after many consecutive blocks were requested


class RemoteFile(Seekable):
    """A read-only file. Not thread-safe, like other file objects. Once `given_up` returns True, it stops waiting."""

    def __init__(self, store: Store, key: str, given_up: Callable[[], bool] = bool) -> None:
        super().__init__()
        self._store, self._key, self._given_up = store, key, given_up
        self._head, self.size = store.head(key)
        self._blocks = store.blocks.setdefault(key, {})
        self._next = self._length = 0  # the block after the last request, and how many blocks that had

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(min(len(out), self.size - self.position), 0)
        done = 0
        while done < count:
            if (data := self._kept_from(self.position)) is None:
                number, within = divmod(self.position, BLOCK)
                data = self._fetch(number, within + count - done)[within:]
            data = data[: count - done]
            out[done : done + len(data)] = memoryview(cast(Any, data))
            done += len(data)
            self.position += len(data)
        return count

    def readall(self) -> bytes:
        data = bytearray(max(self.size - self.position, 0))
        self.readinto(data)
        return bytes(data)

    def _kept_from(self, position: int) -> np.ndarray | None:
        """Bytes from a position on that were fetched already, up to the end of the head or block that has them."""
        if position < len(self._head):
            return self._head[position:]
        number, within = divmod(position, BLOCK)
        return None if (block := self._blocks.get(number)) is None else block[within:]

    def kept(self, start: int, stop: int) -> bytes | None:
        """Returns bytes of the file if they were fetched already; else None."""
        data = bytearray()
        while start + len(data) < stop:
            found = self._kept_from(start + len(data))
            if found is None or not len(found):
                return None
            data += found[: stop - start - len(data)].tobytes()
        return bytes(data)

    def fetch_ahead(self, spans: Sequence[tuple[int, int]]) -> int:
        """Prefetches ranges of the file that will be read, many at a time. Returns the number of bytes fetched."""
        blocks = np.array([(start // BLOCK, -(-stop // BLOCK)) for start, stop in spans], np.int64).reshape(-1, 2)
        # In blocks: every request starts at the beginning of one.
        ranges = np.minimum(requests_for(blocks, gap=1, longest=_LONGEST // BLOCK) * BLOCK, self.size)
        with ReadAhead([(self, ranges)], gap=0) as ahead:
            for start, stop in ranges.tolist():
                data = np.empty(stop - start, np.uint8)
                ahead.read_into(self, start, data)
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
        self._blocks.update(enumerate(blocks, number))
        for oldest in list(self._blocks)[:-_MOST_BLOCKS]:
            self._blocks.pop(oldest, None)  # another thread may have done it
        return blocks[0]


class LocalPath(PosixPath):
    """A path on a disk."""

    remote = False
    lists = True

    def reader(self, *, base: int = 0) -> FileReader:
        """The bytes of the file from `base` on."""
        return FileReader(self, base=base)

    def named(self, text: str) -> LocalPath:
        """The place that has this name in messages."""
        return LocalPath(text)

    @property
    def identity(self) -> str:
        """A text that is the same for the same place; those of places below it begin with it."""
        return os.path.abspath(self)

    def absolute(self) -> LocalPath:
        """The same place, with all folders above it in its path, and without `..`."""
        return LocalPath(self.identity)

    def files_below(self) -> list[str]:
        """Paths, relative to it and with slashes, of all below it but folders; links are not followed."""
        files: list[str] = []
        for inner, folders, names in os.walk(self):
            links = [name for name in folders if os.path.islink(os.path.join(inner, name))]
            files += [os.path.relpath(os.path.join(inner, name), self).replace(os.sep, "/") for name in names + links]
        return files

    def leads_out(self, folder: Location) -> str:
        """Where links lead, if neither into a folder nor to the blobs of its Hugging Face cache; else, "".

        Raises OSError or RuntimeError where the links form a circle, or it cannot be a path.
        """
        if not stat.S_ISLNK(self.lstat().st_mode) and self.parent == folder:
            return ""
        # The cache's links are `snapshots/<revision>/x -> ../../blobs/<hash>`.
        target, root = self.resolve(), LocalPath(str(folder)).resolve()
        blobs = (parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")
        return "" if any(target.is_relative_to(inside) for inside in (root, *blobs)) else str(target)

    def irregular(self) -> str:
        """What it is if it is neither a file nor a link to one; else, ""."""
        if stat.S_ISREG(self.stat().st_mode):
            return ""
        return f"a symbolic link to {self.resolve()}" if self.is_symlink() else "a pipe or a device"

    def published(self) -> list[tuple[str, str, str]]:
        """The hashes that are stated for its content where it came from: algorithm, digits, and who states them."""
        return stated_alongside(self.identity)

    def fingerprint(self, count: int = SAMPLES) -> str:
        """Identity of its content, as text; see `ByteReader.fingerprint`."""
        return self.reader().fingerprint(count)

    def state(self) -> set[tuple[str, int]]:
        """Names in the folder, each with the identity of its file: a saver brings other files."""
        with contextlib.suppress(OSError), os.scandir(self) as entries:
            return {(entry.name, entry.inode()) for entry in entries}
        return set()

    def anew(self) -> LocalPath:
        """The same place, of which nothing is known; itself if that is always so."""
        return self


@functools.total_ordering
class RemotePath:
    """A key in a store; what is not described here is as in `LocalPath`."""

    remote = True

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
        return RemotePath(self.store, posixpath.join(self.key, name))

    @property
    def name(self) -> str:
        return posixpath.basename(self.key)

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.key)[1]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.store, posixpath.dirname(self.key))

    @property
    def parents(self) -> Sequence[RemotePath]:
        """The folders that contain it, the innermost first."""
        return [self.parent, *self.parent.parents] if self.key else []

    @property
    def lists(self) -> bool:
        return self.store.lists

    def reader(self, *, base: int = 0) -> RemoteReader:
        return RemoteReader(self, base=base)

    def named(self, text: str) -> RemotePath:
        below = text.removeprefix(str(self)).strip("/")
        return self / below if below else self

    @property
    def identity(self) -> str:
        return f"/{self.key}"

    def absolute(self) -> RemotePath:
        return self

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
        return list(self.store.below(self.key))

    def is_symlink(self) -> bool:
        return False

    def leads_out(self, folder: Location) -> str:
        return ""

    def irregular(self) -> str:
        return ""

    def published(self) -> list[tuple[str, str, str]]:
        known = self.store.hashes().get(self.key)
        return [] if known is None else [(*known, "the hub")]

    def fingerprint(self, count: int = SAMPLES) -> str:
        known = self.store.known(self.key)
        return f"{known.size} {known.etag}" if known and known.etag else self.reader().fingerprint(count)

    def state(self) -> set[tuple[str, int]]:
        return set()  # what was seen of a store stays

    def anew(self) -> RemotePath:
        return RemotePath(self.store.anew(), self.key) if self.lists else self

    def open(self, mode: str = "rb") -> io.BufferedIOBase | io.RawIOBase:
        """Opens the object as a file."""
        assert mode == "rb", mode
        return RemoteFile(self.store, self.key)

    def read_bytes(self) -> bytes:
        with RemoteFile(self.store, self.key) as file:
            return file.read()


Location: TypeAlias = "LocalPath | RemotePath"


def location(path: Any, options: Mapping[str, Any] | None = None) -> Location:
    """The place that a path or URL names; nothing need be there. Makes no request."""
    if isinstance(path, RemotePath):
        return path
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"expected a path or URL, text or a pathlib.Path; got {reprlib.repr(path)}")
    text = os.fspath(cast("str | os.PathLike[str]", path))
    if is_url(text):
        return RemotePath(*open_store(text, options))
    if options:
        raise CheckpointError(f"{text}: storage_options are for URLs, found a path")
    return LocalPath(text)


def matching(folder: Location, pattern: str) -> list[Location]:
    """The entries of a folder whose names match, in order; none if a saver has removed the folder meanwhile."""
    with contextlib.suppress(FileNotFoundError):  # of Python before 3.13
        return sorted(folder.glob(pattern))
    return []


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


_MOST_ETAG = 128  # characters of an ETag that are compared and shown; those of S3 have 34
_ALONE = 64 << 20  # bytes in flight for a read that was not announced


class RemoteReader(ByteReader):
    """An object's bytes from `base` on. Holds no connection open; every range is requested with the object's ETag.

    Raises:
        CheckpointError: There is no such object, or it cannot be read.
    """

    remote = True
    row_gap = GAP

    def __init__(self, path: RemotePath, *, base: int = 0) -> None:
        super().__init__(str(path))
        self.store, self.key, self.base = path.store, path.key, base
        _, self.size = self.store.head(self.key)
        self._aheads: tuple[ReadAhead, ...] = ()
        self._lock = threading.Lock()

    @property
    def version(self) -> tuple[str, str] | None:
        known = self.store.known(self.key)
        return None if known is None or known.etag is None else (self.path, known.etag)

    def fingerprint(self, count: int = SAMPLES) -> str:
        if self.version is None:
            spans = [(start, min(start + SAMPLE, self.size)) for start in samples(self.size, count)]
            with RemoteFile(self.store, self.key, self.given_up) as file:
                file.fetch_ahead(spans)
        elif self.version not in VERIFIED:
            # Two servers may give the same ETag to different files; the head was fetched when it was opened.
            head, etag = self.store.head(self.key)[0], self.version[1]
            begins = hashlib.blake2b(head.tobytes(), digest_size=8).hexdigest()
            return f"{self.size:,} bytes, ETag {printable(etag)[:_MOST_ETAG]}, beginning {begins}"
        return super().fingerprint(count)

    def open_file(self) -> BinaryIO:
        return cast(BinaryIO, RemoteFile(self.store, self.key, self.given_up))

    def peek(self, position: int, nbytes: int) -> bytes:
        with RemoteFile(self.store, self.key, self.given_up) as file:
            file.seek(position)
            return file.read(nbytes) or b""

    def fetch_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        with RemoteFile(self.store, self.key) as file:
            inside = [span for span in sorted(spans) if span[0] >= 0 and span[1] <= self.size]
            if wanted := [span for span in inside if file.kept(*span) is None]:
                file.fetch_ahead(wanted)

    def check_unchanged(self) -> None:
        """Does nothing: every range was requested with the ETag of the first answer."""

    def fetch(self, start: int, out: np.ndarray, stopped: threading.Event) -> None:
        """Fills `out` with the bytes of the object from `start` on."""
        self.store.get(self.key, start, out, stopped)

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        started, targets = time.perf_counter(), [out.reshape(-1).view(np.uint8) for out in outs if out.size]
        total, start = sum(target.size for target in targets), self.base + offset
        if start + total > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: expected {total} bytes from byte {start}, found "
                f"{max(self.size - start, 0)}. Upload it again."
            )
        missing: list[tuple[int, np.ndarray]] = []
        position, held = start, 0
        for target in targets:
            done = 0
            for ahead in self._active():
                with contextlib.suppress(Stopped):  # another reader's may end at any time
                    count = ahead.read_into(self, position + done, target[done:])
                    done, held = done + count, held + (count if ahead.held else 0)
            if done < target.size:
                missing.append((position + done, target[done:]))
            position += target.size
        if missing:
            ranges = np.array([(begin, begin + rest.size) for begin, rest in missing], np.int64)
            aheads = self._active()
            alone = aheads[0].unforeseen(self, ranges) if aheads else ReadAhead([(self, ranges)], _ALONE)
            with alone as ahead:
                for begin, rest in missing:
                    ahead.read_into(self, begin, rest)
        self.count(total - held, started)

    @contextlib.contextmanager
    def borrowed(self, offset: int, most: int, unit: int) -> Generator[np.ndarray]:
        started, found, held = time.perf_counter(), np.empty(0, np.uint8), False
        position = self.base + offset
        with contextlib.ExitStack() as lender:
            for ahead in self._active() if position + most <= self.size else ():
                with contextlib.suppress(Stopped):
                    found = lender.enter_context(ahead.borrowed(self, position, most, unit))
                if found.size:
                    held = ahead.held
                    break
            self.count(0 if held else found.size, started)
            yield found

    def _active(self) -> list[ReadAhead]:
        """Announced reads that have not ended."""
        if self.given_up():
            raise Stopped
        return [ahead for ahead in self._aheads if not ahead.stopped]

    def read_strided(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        if self._aheads or not out.size or place.run(stored.itemsize) == out.size * stored.itemsize:
            super().read_strided(place, stored, out, steps, workspace)
            return
        # Many rows, which must not be requested one after the other.
        with reading_ahead([(self, ranges_of(place, stored.itemsize, GAP))], _ALONE):
            super().read_strided(place, stored, out, steps, workspace)

    def given_up(self) -> bool:
        """Returns True if all readers that announced ranges have stopped."""
        aheads = self._aheads
        return bool(aheads) and all(ahead.stopped for ahead in aheads)

    def _read_rows(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        super()._read_rows(place, stored, out, steps, workspace)
        span, stride = place.span(stored.itemsize, 1), place.strides[0]
        if 0 < stride - span < GAP:  # fetched too, since separate requests would take longer
            for row in range(len(out) - 1):
                start = self.base + place.start + row * stride + span
                for ahead in self._aheads:
                    ahead.passed(self, start, start + stride - span)

    @property
    def holds(self) -> bool:
        """Returns True within `holding`."""
        return any(ahead.held for ahead in self._aheads)

    def attach(self, ahead: ReadAhead) -> None:
        with self._lock:
            self._aheads = (*self._aheads, ahead)

    def detach(self, ahead: ReadAhead) -> None:
        with self._lock:
            self._aheads = tuple(other for other in self._aheads if other is not ahead)


@contextlib.contextmanager
def reading_ahead(wants: Sequence[tuple[ByteReader, np.ndarray]], limit: int = AHEAD) -> Generator[ReadAhead]:
    """Within the block, announced ranges of remote readers are fetched before they are read.

    Args:
        wants: Readers, each with ranges of its tensors' bytes, in the order in which they will be read; readers that
            are not remote, and those of which bytes are held, are ignored.
        limit: Limit of bytes in flight or waiting to be read.
    """
    remote = [(source, ranges) for source, ranges in wants if isinstance(source, RemoteReader) and not source.holds]
    ahead = ReadAhead([(source, ranges + source.base) for source, ranges in remote], limit)
    with ahead, _attached(ahead, dict.fromkeys(source for source, _ in remote)):
        yield ahead


@contextlib.contextmanager
def holding(ranges: Sequence[tuple[ByteReader, int, int]], data: np.ndarray) -> Generator[None]:
    """Within the block, remote readers take ranges from memory, where they follow each other."""
    places = [(cast(RemoteReader, reader), start + reader.base, stop + reader.base) for reader, start, stop in ranges]
    with ReadAhead([], held=(places, data)) as ahead, _attached(ahead, dict.fromkeys(reader for reader, *_ in places)):
        yield


@contextlib.contextmanager
def _attached(ahead: ReadAhead, sources: Iterable[RemoteReader]) -> Generator[None]:
    for source in sources:
        source.attach(ahead)
    try:
        yield
    finally:
        for source in sources:
            source.detach(ahead)

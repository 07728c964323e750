"""`RemoteReader`: the bytes of an object, from which tensors are read.

Callers announce what will be read (`reading_ahead`), and it is fetched in as many concurrent requests as fill the link.
Other reads are handled in the same way, one read at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Generator, Sequence
from typing import BinaryIO, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location, RemoteFile, RemotePath
from lazymodel._remote.prefetch import AHEAD, GAP, ReadAhead, Stopped
from lazymodel._remote.url import printable
from lazymodel._tensors.boxes import Geometry, ranges_of
from lazymodel._tensors.buffers import DType, Steps, Workspace
from lazymodel._tensors.byte_reader import SAMPLE, SAMPLES, VERIFIED, ByteReader, FileReader, samples

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

    def check_unchanged(self) -> None:
        """Does nothing: every range was requested with the ETag of the first answer."""

    def fetch(self, start: int, out: np.ndarray, stopped: threading.Event) -> None:
        """Fills `out` with the bytes of the object from `start` on."""
        self.store.get(self.key, start, out, stopped)

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        targets = [out.reshape(-1).view(np.uint8) for out in outs if out.size]
        total, start = sum(target.size for target in targets), self.base + offset
        if start + total > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: expected {total} bytes from byte {start}, found "
                f"{max(self.size - start, 0)}. Upload it again."
            )
        missing: list[tuple[int, np.ndarray]] = []
        position = start
        for target in targets:
            done = 0
            while done < target.size:
                count = self._from_ahead(position + done, target[done:])
                if not count:
                    break
                done += count
            if done < target.size:
                missing.append((position + done, target[done:]))
            position += target.size
        if missing:
            ranges = np.array([(begin, begin + rest.size) for begin, rest in missing], np.int64)
            aheads = self._active()
            alone = aheads[0].unforeseen(self, ranges) if aheads else ReadAhead([(self, ranges)], _ALONE)
            with alone as ahead:
                for begin, rest in missing:
                    done = 0
                    while done < rest.size:
                        done += ahead.read_into(self, begin + done, rest[done:])
        self.count(total)

    def _from_ahead(self, position: int, out: np.ndarray) -> int:
        for ahead in self._active():
            with contextlib.suppress(Stopped):  # another reader's may end at any time
                if count := ahead.read_into(self, position, out):
                    return count
        return 0

    @contextlib.contextmanager
    def borrowed(self, offset: int, most: int, unit: int) -> Generator[np.ndarray]:
        found = np.empty(0, np.uint8)
        position = self.base + offset
        with contextlib.ExitStack() as lender:
            for ahead in self._active() if position + most <= self.size else ():
                with contextlib.suppress(Stopped):
                    found = lender.enter_context(ahead.borrowed(self, position, most, unit))
                if found.size:
                    break
            yield found
        self.count(found.size)

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

    def attach(self, ahead: ReadAhead) -> None:
        with self._lock:
            self._aheads = (*self._aheads, ahead)

    def detach(self, ahead: ReadAhead) -> None:
        with self._lock:
            self._aheads = tuple(other for other in self._aheads if other is not ahead)


def source_of(path: Location, *, base: int = 0) -> FileReader | RemoteReader:
    """The bytes of a file or object, from `base` on."""
    return RemoteReader(path, base=base) if isinstance(path, RemotePath) else FileReader(path, base=base)


@contextlib.contextmanager
def reading_ahead(wants: Sequence[tuple[ByteReader, np.ndarray]], limit: int = AHEAD) -> Generator[ReadAhead]:
    """Within the block, announced ranges of remote readers are fetched before they are read.

    Args:
        wants: Readers, each with ranges of its tensors' bytes, in the order in which they will be read; readers that
            are not remote are ignored.
        limit: Limit of bytes in flight or waiting to be read.
    """
    remote = [(source, ranges + source.base) for source, ranges in wants if isinstance(source, RemoteReader)]
    sources = dict.fromkeys(source for source, _ in remote)
    with ReadAhead(remote, limit) as ahead:
        for source in sources:
            source.attach(ahead)
        try:
            yield ahead
        finally:
            for source in sources:
                source.detach(ahead)

"""`RemoteSource`: the bytes of an object as what tensors are read from.

Whoever knows what will be read says so before (`reading_ahead`), and it is fetched in as many requests at a time as
fill the link. Whatever else is read is treated alike, a reading at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Generator, Sequence
from typing import BinaryIO, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.ahead import AHEAD, GAP, ReadAhead, Stopped
from lazymodel._remote.file import RemoteFile
from lazymodel._remote.path import Location, RemotePath
from lazymodel._remote.url import printable
from lazymodel._tensors.boxes import Geometry, ranges_of
from lazymodel._tensors.buffers import DType, Steps, Workspace
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.source import SAMPLE, SAMPLES, VERIFIED, Source, samples

_MOST_ETAG = 128  # characters of one that are compared and shown; S3's have 34
_ALONE = 64 << 20  # bytes in flight for a reading that nobody announced


class RemoteSource(Source):
    """An object's bytes from `base` on. Nothing holds it open; every range is asked for with its ETag.

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
            # Two servers may give the same ETag to different files; what came when it was opened costs nothing.
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
        """Nothing is to be done: every range was asked for with the ETag of the first."""

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
            aheads = self._going_on()
            alone = aheads[0].unforeseen(self, ranges) if aheads else ReadAhead([(self, ranges)], _ALONE)
            with alone as ahead:
                for begin, rest in missing:
                    done = 0
                    while done < rest.size:
                        done += ahead.read_into(self, begin + done, rest[done:])
        self.count(total)

    def _from_ahead(self, position: int, out: np.ndarray) -> int:
        for ahead in self._going_on():
            with contextlib.suppress(Stopped):  # somebody else's may end at any time
                if count := ahead.read_into(self, position, out):
                    return count
        return 0

    @contextlib.contextmanager
    def lent(self, offset: int, most: int, unit: int) -> Generator[np.ndarray]:
        found = np.empty(0, np.uint8)
        position = self.base + offset
        with contextlib.ExitStack() as lender:
            for ahead in self._going_on() if position + most <= self.size else ():
                with contextlib.suppress(Stopped):
                    found = lender.enter_context(ahead.lent(self, position, most, unit))
                if found.size:
                    break
            yield found
        self.count(found.size)

    def _going_on(self) -> list[ReadAhead]:
        """Those that were announced and go on."""
        if self.given_up():
            raise Stopped
        return [ahead for ahead in self._aheads if not ahead.stopped]

    def read_strided(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        if self._aheads or not out.size or place.run(stored.itemsize) == out.size * stored.itemsize:
            super().read_strided(place, stored, out, steps, workspace)
            return
        # Many rows, which must not be one request each, one after the other.
        with reading_ahead([(self, ranges_of(place, stored.itemsize, GAP))], _ALONE):
            super().read_strided(place, stored, out, steps, workspace)

    def given_up(self) -> bool:
        """Whether somebody who announced readings has stopped."""
        aheads = self._aheads
        return bool(aheads) and all(ahead.stopped for ahead in aheads)

    def _read_rows(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        super()._read_rows(place, stored, out, steps, workspace)
        span, stride = place.span(stored.itemsize, 1), place.strides[0]
        if 0 < stride - span < GAP:  # fetched along, since asking around it takes longer
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


def source_of(path: Location, *, base: int = 0) -> FileSource | RemoteSource:
    """The bytes of what is at a place, from `base` on."""
    return RemoteSource(path, base=base) if isinstance(path, RemotePath) else FileSource(path, base=base)


@contextlib.contextmanager
def reading_ahead(wants: Sequence[tuple[Source, np.ndarray]], limit: int = AHEAD) -> Generator[ReadAhead]:
    """Within the block, what is wanted of remote sources is fetched ahead of its being read.

    Args:
        wants: Sources, each with ranges of its tensors' bytes, in the order in which they will be read; those that
            are not remote are left alone.
        limit: Bytes in flight or waiting to be read, at most.
    """
    remote = [(source, ranges + source.base) for source, ranges in wants if isinstance(source, RemoteSource)]
    sources = dict.fromkeys(source for source, _ in remote)
    with ReadAhead(remote, limit) as ahead:
        for source in sources:
            source.attach(ahead)
        try:
            yield ahead
        finally:
            for source in sources:
                source.detach(ahead)

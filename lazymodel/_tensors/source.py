"""The bytes of one file, wherever it lies, read into memory that we own: `Source`.

Responsible for the choice between one read, one read per row, a copy out of memory that has the file's bytes already
and a read of the whole span, and for converting on the way. Knows nothing of tensors' names, formats or views: it is
given a geometry. How bytes come from where they lie is a subclass's matter (`_tensors/files`).
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Geometry, slabs, strided
from lazymodel._tensors.buffers import STAGING, DType, Steps, Workspace, assign

# Bytes between two rows from which reading them one by one wins over reading through the gap: a call costs about as
# much as copying 8 KiB out of the page cache, and twice that keeps sequential read-ahead going on disks.
ROW_GAP = 16 << 10
# Bytes of a row from which one call a row is as fast as copying out of a map, which is faster below: with a quarter
# of every row needed, a map gave 3.2 to 4.8 GB/s for rows of 0.5 to 16 KiB, calls 0.6 to 3.5, whole spans 1.5.
ROW_CALL = 64 << 10
SAMPLE = 4 << 10  # bytes of a block of a sampled file: one page
SAMPLES = 128  # blocks; content of which a twentieth differs passes for the same once in seven hundred files
MAP_BLOCK = 16 << 20  # bytes copied out of a map at a time, during which no one can write to the file


class ByteCounter:
    """A thread-safe count of bytes."""

    def __init__(self) -> None:
        self._lock, self.count = threading.Lock(), 0

    def add(self, count: int) -> None:
        with self._lock:
            self.count += count


BYTES_READ = ByteCounter()
"""Tensor bytes read from files by this process, headers not included."""

VERIFIED: dict[Hashable, str] = {}
"""Hashes of the content of files that this process has compared with stated ones, by `Source.version`."""


def samples(size: int, count: int = SAMPLES) -> Iterator[int]:
    """Where the blocks begin that are sampled of so many bytes: all of few, else the first, the last, and one somewhere
    in each of equal parts, so that no regular layout hides from them. The same in every process.
    """
    if size <= count * SAMPLE:
        yield from range(0, size, SAMPLE)
        return
    somewhere, part = random.Random(size), (size - SAMPLE) / max(count - 2, 1)
    yield from (0, *(int((index + somewhere.random()) * part) for index in range(count - 2)), size - SAMPLE)


class Source:
    """One file's bytes, which any number of threads may read.

    A subclass defines `read_into` and `check_unchanged`; one that is a whole file also `open_file` and `peek`, which
    readers of headers use.
    """

    remote: bool = False  # whether its bytes come over a network, where every reading has a latency that counts
    base: int = 0  # byte of the file that offsets count from: where a member of an archive starts
    size: int  # bytes of the file
    scatters: bool = False  # whether `read_runs` can be used
    row_gap: int = ROW_GAP  # bytes between two rows from which a call each is cheaper than reading through the gap
    row_call: int = ROW_CALL  # bytes of a row from which a call each costs nothing that counts

    def __init__(self, path: str) -> None:
        self.path = path
        self._counter = ByteCounter()

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read through this source so far."""
        return self._counter.count

    def count(self, nbytes: int) -> None:
        """Counts bytes that were read, here or by other means, such as the HDF5 library."""
        self._counter.add(nbytes)
        BYTES_READ.add(nbytes)

    def open_file(self) -> BinaryIO:
        """The whole file, opened for reading by a library."""
        raise NotImplementedError

    def peek(self, position: int, nbytes: int) -> bytes:
        """Bytes of the whole file, fewer where it ends; they are not counted."""
        raise NotImplementedError

    @property
    def origin(self) -> Source:
        """Where the bytes come from, of which these are a part or made."""
        return self

    @property
    def version(self) -> Hashable:
        """What tells the content from any other that this process may come across; None where nothing does."""
        return None

    def fingerprint(self, count: int = SAMPLES) -> str:
        """What tells the content from that of other files, in words: its hash if it was verified; else its size, and
        the ETag that a server gives it or the hash of `count` sampled blocks. CheckpointError where it cannot be read.
        """
        if (verified := VERIFIED.get(self.version)) is not None:
            return verified
        digest = hashlib.blake2b(digest_size=8)
        try:
            with self.open_file() as file:
                for start in samples(self.size, count):
                    file.seek(start)
                    digest.update(file.read(SAMPLE))
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        self.check_unchanged()
        return f"{self.size:,} bytes, sampled content {digest.hexdigest()}"

    def given_up(self) -> bool:
        """Whether nobody waits any more for what is being read."""
        return False

    def check_unchanged(self) -> None:
        """Raises CheckpointError when the file is no longer what it was when it was opened."""
        raise NotImplementedError

    def read_into(self, offset: int, *outs: np.ndarray) -> None:
        """Fills C-contiguous arrays, one after the other, with the bytes from `offset` on, and counts them.

        CheckpointError where the file ends before, or cannot be read.
        """
        raise NotImplementedError

    def read_runs(self, offset: int, runs: np.ndarray) -> None:
        """Fills runs of memory, one after the other, with the bytes from `offset` on, and counts them; raises likewise.

        `runs` is `int64[n, 2]`, C-contiguous: address and length of each, in bytes. The caller keeps that memory
        alive; the array itself is used up.
        """
        raise NotImplementedError

    def lent(self, offset: int, most: int, unit: int) -> AbstractContextManager[np.ndarray]:
        """Bytes (`uint8`) from `offset` on that are in memory already, or about to be, until the end of the `with`
        block: whole units (bytes), at most `most` bytes, and counted; none where they have to be read.
        """
        return contextlib.nullcontext(np.empty(0, np.uint8))

    def mapped(self) -> AbstractContextManager[np.ndarray | None]:
        """The file's bytes as a read-only array until the end of the `with` block; None where there is none."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Gives up what is open; a later read opens it again."""

    def read_strided(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Fills `out`, of any strides, from a strided box of the file, normalized and of its shape, converting.

        What is contiguous is read with as few calls as there can be, straight into `out` where that lies as the file
        does. Rows of at least `row_call` bytes are read one by one. Shorter ones are copied out of a map of the file
        where there can be one (`mapped`); else rows at least `row_gap` bytes apart are read one by one, and the rest
        is read gaps and all.
        """
        if out.size == 0:
            return
        itemsize, run = stored.itemsize, place.run(stored.itemsize)
        contiguous = out.size * itemsize == run
        if contiguous and out.flags.c_contiguous and not steps and out.dtype == stored:
            self.read_into(place.start, out)
        elif (contiguous or run < self.row_call) and self.copy_mapped([(place, out)], stored, steps):
            pass
        elif contiguous:
            self._read_staged(place, stored, out, steps, workspace)
        elif (
            run >= self.row_call
            or any(stride - place.span(itemsize, axis + 1) >= self.row_gap for axis, stride in enumerate(place.strides))
            or place.strides[0] + place.span(itemsize, 1) > min(STAGING, workspace.room)
        ):
            self._read_rows(place, stored, out, steps, workspace)
        else:
            self._read_spans(place, stored, out, steps, workspace)

    def copy_mapped(self, boxes: Sequence[tuple[Geometry, np.ndarray]], stored: DType, steps: Steps) -> bool:
        """Fills arrays, each from a box as `read_strided` takes them, out of a map; False where there is none."""
        limit = max(MAP_BLOCK // stored.itemsize, 1)
        # The Ellipsis keeps what has no dimensions an array.
        pieces = [(place.box(box), out[(*box, ...)]) for place, out in boxes for box in slabs(out.shape, limit)]
        while pieces:
            copied = 0
            with self.mapped() as memory:
                while pieces and (not copied or copied + pieces[0][1].size <= limit):
                    own, part = pieces.pop(0)
                    if memory is None or own.start + own.span(stored.itemsize) > memory.nbytes:
                        return False  # whatever is missing is reported by those that read
                    assign(part, strided(memory, own, stored), steps)
                    copied += part.size
            self.count(copied * stored.itemsize)
        return True

    def _read_staged(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """A contiguous range, piece by piece through a staging buffer."""
        size = min(out.size, max(min(STAGING, workspace.room) // stored.itemsize, 1))
        with workspace.array((size,), stored) as staging:
            for box in slabs(out.shape, size):
                piece = out[(*box, ...)]
                values = staging[: piece.size]
                self.read_into(place.box(box).start, values)
                assign(piece, values.reshape(piece.shape), steps)

    def _read_rows(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """Index by index of the first axis."""
        for index in range(len(out)):
            row = Geometry(place.start + index * place.strides[0], place.shape[1:], place.strides[1:])
            self.read_strided(row, stored, out[index, ...], steps, workspace)

    def _read_spans(self, place: Geometry, stored: DType, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        """As many rows at a time as staging holds, and what lies between them."""
        inner = place.span(stored.itemsize, 1)
        rows = min((min(STAGING, workspace.room) - inner) // place.strides[0] + 1, len(out))
        nbytes = place.take(0, slice(0, rows)).span(stored.itemsize)
        with workspace.array((nbytes,), np.dtype(np.uint8)) as staging:
            for start in range(0, len(out), rows):
                own = place.take(0, slice(start, start + rows))
                span = staging[: own.span(stored.itemsize)]
                self.read_into(own.start, span)
                assign(out[start : start + rows], strided(span, Geometry(0, own.shape, own.strides), stored), steps)

"""`RemoteFile`: an object as a file with random access, for libraries that need one.

It is meant for headers: a few places of an object, each read in small steps. It keeps blocks of the object, and fetches
consecutive blocks in increasingly long requests. Tensors are not read through it.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from lazymodel._remote.prefetch import ReadAhead, requests_for
from lazymodel._remote.store import Blocks, Store

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

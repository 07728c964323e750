"""`RemoteFile`: an object as a file that can be read from anywhere, for libraries that want one.

It is made for headers: a few places of an object, each read a little at a time. Blocks of it are kept, and those that
follow each other are fetched in ever longer pieces. Tensors are not read through it.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any, cast

import numpy as np

from lazymodel._remote.store import Store

HEAD = 64 << 10  # bytes that opening an object fetches: nearly every header of a shard is shorter
BLOCK = 64 << 10  # bytes of the other blocks
_LONGEST = 4 << 20  # bytes of one request, when block after block was asked for
_KEPT = 128  # blocks


def head(store: Store, key: str) -> np.ndarray:
    """The first bytes of an object, at most `HEAD` of them, fetched once; afterwards its size is known."""
    if key not in store.heads:
        known = store.known(key)
        empty = known is not None and known.size == 0
        store.heads[key] = np.empty(0, np.uint8) if empty else _joined(store.get(key, 0, HEAD, to_end=True))
    return store.heads[key]


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


class RemoteFile(io.RawIOBase):
    """A read-only file. Not thread-safe, as no file object is."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store, self._key = store, key
        self._head = head(store, key)
        found = store.find(key)
        self.size = 0 if found is None else found.size
        self._position = 0
        self._blocks = store.blocks.setdefault(key, OrderedDict())
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
        """Bytes from a position on, at least one and at most as many as wanted."""
        if position < len(self._head):
            return self._head[position : position + wanted]
        number, within = divmod(position, BLOCK)
        if number not in self._blocks:
            self._fetch(number, within + wanted)
        block = self._blocks[number]
        self._blocks.move_to_end(number)
        return block[within : within + wanted]

    def _fetch(self, number: int, wanted: int) -> None:
        self._length = 2 * self._length if number == self._next else 1
        longest = max(_LONGEST // BLOCK, 1)
        self._length = min(max(self._length, -(-wanted // BLOCK)), longest)
        start = number * BLOCK
        stop = min(start + self._length * BLOCK, self.size)
        data = _joined(self._store.get(self._key, start, stop))
        for index in range(-(-len(data) // BLOCK)):
            # Copies: each is given up by itself.
            self._blocks[number + index] = data[index * BLOCK : (index + 1) * BLOCK].copy()
        self._next = number + self._length
        while len(self._blocks) > max(_KEPT, longest):
            self._blocks.popitem(last=False)

"""Writing tensors to files: which bytes this process writes, band by band, in threads, under a ceiling of memory.

Each box of an array is written by one process, the one that has its first replica; what all of them have, by the
leading one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._remote.source import reading_ahead
from lazymodel._save.destination import Destination, SavedFile
from lazymodel._show.progress import Progress, progress_for
from lazymodel._show.text import format_bytes
from lazymodel._tensors.boxes import (
    Box,
    box_shape,
    clip,
    cover,
    fresh_view,
    geometry_of,
    normalize,
    shift,
    slabs,
    whole_box,
)
from lazymodel._tensors.buffers import Workspace, empty_aligned
from lazymodel._tensors.device import DeviceLeaf
from lazymodel._tensors.fill import fill_parts
from lazymodel._tensors.lazy import LazyTensor, PiecesLeaf
from lazymodel._tensors.leaves import Leaf
from lazymodel._tensors.wanted import wanted
from lazymodel.checkpoints._safetensors_header import FLOAT4

_BAND = 16 << 20  # bytes that are staged at a time: a write of some milliseconds, a transfer likewise
_THREADS = 4  # more than cores: the ones that wait for the disk use none, as others transfer, transpose or cast
# Runs of a file from this many bytes on go straight to the disk, past the page cache: it would only be waited for, and
# fresh pages of the cache cost more than writing (in virtual machines whose host has to find them, ten times as much).
_DIRECT = 1 << 20
# Bytes that such a write, its place in memory and its place in the file are multiples of; so no page of the cache has
# both a part that was written directly and one that was not. Disks ask for 4096 at most.
_ALIGNMENT = max(mmap.PAGESIZE, 4096)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Elements to write: a lazy tensor, and where each of its elements goes."""

    name: str  # of the tensor that they belong to, for messages
    tensor: LazyTensor  # its axes are in file order
    start: int  # byte in the file of its first element
    strides: tuple[int, ...]  # bytes in the file, descending but for axes of extent 1
    packed: bool = False  # whether two elements are a byte; then it has one dimension

    def position(self, box: Box) -> int:
        """Byte in the file of a box's first element."""
        first = sum(part.start * stride for part, stride in zip(box, self.strides, strict=True))
        return self.start + first // (2 if self.packed else 1)


_Job: TypeAlias = tuple[_Piece, Box, list[Box]]  # a box to write, and the list of those of its piece still to be done


def _pieces(name: str, tensor: LazyTensor, offset: int, *, leads: bool) -> Iterator[_Piece]:
    """What this process writes of a tensor."""
    if not tensor.size:
        return
    if complete(tensor.leaf):
        if leads and tensor.dtype == FLOAT4:
            yield _Piece(name, tensor.reshape(-1), offset, (1,), packed=True)
        elif leads:
            yield _Piece(name, tensor, offset, fresh_view(tensor.shape, tensor.itemsize).strides)
        return
    if tensor.dtype == FLOAT4:
        raise LazyModelError(
            f"{name!r}: 4-bit floats that several processes share cannot be written, because two are one byte"
        )
    for own, target in owned(tensor, fresh_view(tensor.shape, tensor.itemsize), leads=leads):
        order = sorted(range(own.ndim), key=lambda axis, target=target: -abs(target.strides[axis]))
        own, target = own.transpose(order), target.transpose(order)
        flip = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in target.strides)
        geometry = geometry_of(target[(*flip, ...)])
        yield _Piece(name, own[(*flip, ...)], offset + geometry.start, geometry.strides)


def complete(leaf: Leaf) -> bool:
    """Whether this process can read all of it."""
    if isinstance(leaf, PiecesLeaf):
        return all(complete(piece.leaf) for piece in leaf.pieces)
    return not isinstance(leaf, DeviceLeaf) or leaf.complete


def owned(tensor: LazyTensor, target: np.ndarray, *, leads: bool) -> Iterator[tuple[LazyTensor, np.ndarray]]:
    """The parts of a tensor that this process is to write, each with the part of `target`, addresses, it goes to."""
    leaf = tensor.leaf
    if not tensor.size:
        return
    if complete(leaf):
        if leads:
            yield tensor, target
        return
    geometry, view, repeated = normalize(tensor.geometry(), target)
    if repeated:
        axis = repeated[0]
        index: tuple[Any, ...] = (slice(None),) * axis
        for position in range(tensor.shape[axis]):
            yield from owned(tensor[(*index, position)], target[(*index, position, ...)], leads=leads)
        return
    covering = cover(geometry, leaf.shape, leaf.dtype.itemsize)
    if covering.inner is not None:
        # No plain box of the leaf: halves of it become one sooner or later, a single element at the latest.
        order: list[int] = tensor.file_order()
        axis = next(axis for axis in order if tensor.shape[axis] > 1)
        index = (slice(None),) * axis
        half = tensor.shape[axis] // 2
        for part in (slice(0, half), slice(half, None)):
            yield from owned(tensor[(*index, part)], target[(*index, part, ...)], leads=leads)
    elif isinstance(leaf, PiecesLeaf):
        for piece, within in leaf.places():
            for common, out in clip([(covering.box, covering.align(view))], within):
                own = piece.box(shift(common, within)).converted(tensor.steps)
                yield from owned(own, out, leads=leads)
    else:
        for box in cast(DeviceLeaf, leaf).owned:
            for common, out in clip([(covering.box, covering.align(view))], box):
                yield LazyTensor(leaf).box(common).converted(tensor.steps), out


def check_budget(files: Sequence[SavedFile], budget: int) -> None:
    """Raises LazyModelError where a tensor cannot be read within the budget."""
    for file in files:
        for name, tensor, _ in file.tensors:
            if tensor.leaf.unit_nbytes + 2 * tensor.itemsize > budget:
                raise LazyModelError(
                    f"{name!r}: reading any of it takes {format_bytes(tensor.leaf.unit_nbytes)} at once, more than "
                    f"max_host_memory={format_bytes(budget)}"
                )


def write_files(
    target: Destination,
    budget: int,
    progress: bool | Progress | Callable[[int, int], object] | None,
    check: Callable[[], None],
    *,
    leads: bool,
) -> None:
    """Writes what is this process's, in file order; what `check`, called with every piece, raises ends it."""
    pieces = [
        (file, [piece for name, tensor, at in file.tensors for piece in _pieces(name, tensor, at, leads=leads)])
        for file in target.files
        if file.tensors
    ]
    tensors = [piece.tensor for _, group in pieces for piece in group]
    remote = any(True for tensor in tensors for _ in wanted(tensor, [whole_box(tensor.shape)]))
    ahead = budget // 4 if remote else 0
    unit = max((tensor.leaf.unit_nbytes for tensor in tensors), default=0)
    threads = max(min(_THREADS, (budget - ahead) // (unit + 2 * _BAND)), 1)
    band = max(min(_BAND, ((budget - ahead) // threads - unit) // 2), 1)
    writing = [_Writing(target.place(file), list(_jobs(group, band)), direct=target.direct) for file, group in pieces]
    wants = [want for file in writing if remote for piece, box, _ in file.jobs for want in wanted(piece.tensor, [box])]
    bar = progress_for(progress)
    bar.start(sum(tensor.nbytes for tensor in tensors), f"{target.path.name}: saving")
    try:
        with reading_ahead(wants, ahead) if remote else contextlib.nullcontext():
            _run(writing, threads, band + unit, bar, check)
    except OSError as error:
        hint = "; with several processes the path must be on a file system that all of them share"
        hint = hint if isinstance(error, FileNotFoundError) else ""
        where = os.path.basename(error.filename) if isinstance(error.filename, str | Path) else "a file"
        raise LazyModelError(f"cannot write {target.path} ({where}): {error.strerror}{hint}") from error
    finally:
        for file in writing:
            file.close()
        bar.finish()


class _Writing:
    """A file that is written in several threads: open from its first job on, and on the disk after its last one."""

    def __init__(self, path: Path, jobs: list[_Job], *, direct: bool) -> None:
        self.path, self.jobs, self._left, self._fd = path, jobs, len(jobs), -1
        self._direct, self._flag = -1, getattr(os, "O_DIRECT", 0) if direct else 0

    def open(self) -> None:
        """Opens it, if it is not; not for two threads at once."""
        if self._fd < 0:
            flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
            self._fd = os.open(self.path, flags)
            if self._flag:
                with contextlib.suppress(OSError):  # file systems in memory, some of networks
                    self._direct = os.open(self.path, flags | self._flag)

    def write(self, data: np.ndarray, offset: int) -> None:
        """Writes bytes, directly as far as they may be: where they lie in memory as they will in the file's blocks."""
        start = stop = 0
        view = memoryview(cast(Any, data))
        if self._direct >= 0 and len(view) >= _DIRECT and not (data.ctypes.data - offset) % _ALIGNMENT:
            start = stop = -offset % _ALIGNMENT
            end = len(view) - (offset + len(view)) % _ALIGNMENT
            try:
                while stop < end:
                    stop += os.pwrite(self._direct, view[stop:end], offset + stop)
            except OSError as error:
                if error.errno != errno.EINVAL:  # it wants larger blocks, or is no such file system after all
                    raise
        for first, last in ((0, start), (stop, len(view))):
            while first < last:
                first += os.pwrite(self._fd, view[first:last], offset + first)

    def done(self) -> bool:
        """Tells that a job is done; whether it was the last. Not for two threads at once."""
        self._left -= 1
        return not self._left

    def finish(self) -> None:
        """Waits for the disk: renamed before its bytes are there, a power failure could leave it without them."""
        with self.telling():
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Closes it, if it is open."""
        fds, self._fd, self._direct = (self._fd, self._direct), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    @contextlib.contextmanager
    def telling(self) -> Generator[None]:
        """What the system says of a descriptor says of which file."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


def _run(
    files: Sequence[_Writing], threads: int, workspace_nbytes: int, bar: Progress, check: Callable[[], None]
) -> None:
    jobs = ((file, job) for file in files for job in file.jobs)
    lock, stopped = threading.Lock(), threading.Event()
    for file in files:
        if not file.jobs:  # all of it is another process's, or nothing: whether it can be written is told all the same
            file.open()
            file.close()

    def work() -> None:
        workspace = Workspace(workspace_nbytes)
        buffer = np.empty(0, np.uint8)
        while not stopped.is_set():
            try:
                with lock:
                    if (drawn := next(jobs, None)) is None:
                        return
                    file, (piece, box, others) = drawn
                    file.open()
                nbytes = math.prod(box_shape(box)) * piece.tensor.itemsize
                spare = _ALIGNMENT if nbytes >= _DIRECT else 0
                if buffer.nbytes < nbytes + spare:
                    buffer = empty_aligned((nbytes + spare,), np.dtype(np.uint8))
                first = piece.position(box) % _ALIGNMENT if spare else 0
                first -= first % piece.tensor.itemsize  # values that are not aligned are slow to make
                values = buffer[first : first + nbytes].view(piece.tensor.dtype).reshape(box_shape(box))
                for part in fill_parts(piece.tensor, [box], [values]):
                    part.run(workspace)
                with file.telling():
                    _put(file, piece, box, values)
                with lock:
                    bar.advance(nbytes, piece.name)
                    check()
                    others.remove(box)
                    if not others:
                        piece.tensor.leaf.release()
                    last = file.done()
                if last:
                    file.finish()
            except BaseException:
                stopped.set()
                raise

    with ThreadPoolExecutor(threads) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(threads)]:
                worker.result()
        finally:
            stopped.set()  # a Ctrl-C comes here, and not to the threads


def _jobs(pieces: Sequence[_Piece], band: int) -> Iterator[_Job]:
    """Each piece in bands."""
    for piece in pieces:
        elements = max(band // piece.tensor.itemsize, 1)
        if piece.packed:  # two are a byte
            elements = max(elements - elements % 2, 2)
        boxes = list(slabs(piece.tensor.shape, elements))
        others = boxes[:]
        for box in boxes:
            yield piece, box, others


def _put(file: _Writing, piece: _Piece, box: Box, values: np.ndarray) -> None:
    """Writes a box of a piece, run by run."""
    start = piece.position(box)
    if piece.packed:
        bits = values.view(np.uint8)
        # The earlier element in the low bits, as it is read.
        file.write((bits[0::2] & 15) | (bits[1::2] << 4), start)
        return
    run, outer = values.itemsize, values.ndim
    while outer and (values.shape[outer - 1] == 1 or piece.strides[outer - 1] == run):
        outer -= 1
        run *= values.shape[outer]
    rows = values.view(np.uint8).reshape(-1, run) if values.ndim else values.reshape(1).view(np.uint8).reshape(1, run)
    for row, index in zip(rows, np.ndindex(*values.shape[:outer]), strict=True):
        file.write(row, start + sum(i * stride for i, stride in zip(index, piece.strides, strict=False)))

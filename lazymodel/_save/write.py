"""Writing tensors to files: which bytes this process writes, chunk by chunk, in threads, within a memory limit.

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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from lazymodel._devices.collective import CollectiveScope
from lazymodel._errors import LazyModelError
from lazymodel._remote.path import reading_ahead
from lazymodel._save.files import SavedFile, SaveOptions, complete, divided, in_threads
from lazymodel._show.progress import Progress, reported
from lazymodel._tensors.boxes import Box, box_shape, clip, cover, fresh_view, geometry_of, normalize, shift, slabs
from lazymodel._tensors.buffers import Scratch, parallel
from lazymodel._tensors.lazy import ConcatenatedTensor, LazyTensor
from lazymodel._tensors.shards import DeviceTensor
from lazymodel._tensors.tensor_source import fill_parts, required_ranges
from lazymodel.checkpoints._safetensors import FLOAT4

_CHUNK = 16 << 20  # bytes that are staged at a time: a write of some milliseconds, a transfer likewise
_AHEAD = 4  # chunks of each thread that may be written before an earlier one is, each perhaps of another open file
_BATCH = 128 << 10  # bytes of small tensors that a thread writes as one item
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

    def position(self, box: Box) -> int:
        """Byte in the file of a box's first element."""
        first = sum(part.start * stride for part, stride in zip(box, self.strides, strict=True))
        return self.start + (first // 2 if self.tensor.dtype == FLOAT4 else first)


_Job: TypeAlias = tuple[_Piece, Box, bool]  # a box to write; whether it is the last one of its piece


def _pieces(name: str, tensor: LazyTensor, offset: int, *, leads: bool) -> Iterator[_Piece]:
    """The parts of a tensor that this process writes."""
    tensor = tensor.reshape(-1) if tensor.dtype == FLOAT4 and complete(tensor.source) else tensor
    for own, target in owned(tensor, fresh_view(tensor.shape, tensor.itemsize), leads=leads):
        order = sorted(range(own.ndim), key=lambda axis, target=target: -abs(target.strides[axis]))
        own, target = own.transpose(order), target.transpose(order)
        flip = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in target.strides)
        geometry = geometry_of(target[(*flip, ...)])
        yield _Piece(name, own[(*flip, ...)], offset + geometry.start, geometry.strides)


def chunks_of(tensor: LazyTensor, nbytes: int) -> list[Box]:
    """Boxes of a tensor that follow each other in a file, each of at most so many bytes, or of an element."""
    elements = max(nbytes // tensor.itemsize, 1)
    if tensor.dtype == FLOAT4:  # two are a byte
        elements = max(elements - elements % 2, 2)
    return list(slabs(tensor.shape, elements))


def packed(values: np.ndarray) -> np.ndarray:
    """4-bit floats as they are stored: the earlier of two in the low bits of a byte, as it is read."""
    bits = values.reshape(-1).view(np.uint8)
    return (bits[0::2] & 15) | (bits[1::2] << 4)


def owned(tensor: LazyTensor, target: np.ndarray, *, leads: bool) -> Iterator[tuple[LazyTensor, np.ndarray]]:
    """The parts of a tensor that this process is to write, each with the part of `target`, addresses, it goes to."""
    source = tensor.source
    if not tensor.size:
        return
    if complete(source):
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
    covering = cover(geometry, source.shape, source.dtype.itemsize)
    if covering.inner is not None:
        # No plain box of the source: halves of it become one sooner or later, a single element at the latest.
        order: list[int] = tensor.file_order()
        axis = next(axis for axis in order if tensor.shape[axis] > 1)
        index = (slice(None),) * axis
        half = tensor.shape[axis] // 2
        for part in (slice(0, half), slice(half, None)):
            yield from owned(tensor[(*index, part)], target[(*index, part, ...)], leads=leads)
    elif isinstance(source, ConcatenatedTensor):
        for piece, within in source.places():
            for common, out in clip([(covering.box, covering.align(view))], within):
                own = piece.box(shift(common, within)).converted(tensor.steps)
                yield from owned(own, out, leads=leads)
    else:
        for box in cast(DeviceTensor, source).owned:
            for common, out in clip([(covering.box, covering.align(view))], box):
                yield LazyTensor(source).box(common).converted(tensor.steps), out


def share_of(tensor: LazyTensor, *, leads: bool) -> tuple[int, int]:
    """Checksums of the places that this process writes to, and of all of them: those of processes add up to it."""
    whole = fresh_view(tensor.shape, tensor.itemsize)
    return sum(_places(part) for _, part in owned(tensor, whole, leads=leads)), _places(whole)


def _places(view: np.ndarray) -> int:
    """A polynomial in the addresses of a view's elements, summed over them."""
    geometry = geometry_of(view)
    extents = list(zip(geometry.strides, geometry.shape, strict=True))
    twice_mean = 2 * geometry.start + sum(stride * (extent - 1) for stride, extent in extents)
    spread = sum(stride**2 * (extent**2 - 1) for stride, extent in extents)
    return view.size * (1 + 7 * twice_mean + 3 * (3 * twice_mean**2 + spread))


def write_files(
    path: Path,
    files: Mapping[Path, SavedFile],
    options: SaveOptions,
    scope: CollectiveScope | None = None,
    *,
    leads: bool,
) -> None:
    """Writes what is this process's, in file order, until any process fails; errors and progress name the path.

    Every file is there already, with its header and its length.
    """
    scope = scope or CollectiveScope()
    ahead, unit = divided(list(files.values()), options.budget)
    threads, chunk = in_threads(options.budget - ahead, unit, _THREADS, _CHUNK, 2)
    writing: list[_Writing] = []
    for place, file in files.items():
        pieces = [piece for name, tensor, at in file.tensors for piece in _pieces(name, tensor, at, leads=leads)]
        writing += [_Writing(place, list(_jobs(pieces, chunk)))] if file.tensors else []
    jobs = [job for file in writing for job in file.jobs]
    wants = [want for piece, box, _ in jobs for want in required_ranges(piece.tensor, [box])]
    total = sum(_nbytes(piece, box) for piece, box, _ in jobs)
    try:
        with reported(options.bar, total, f"{path.name}: saving"), reading_ahead(wants, ahead):
            _run(writing, threads, chunk + unit, options.bar, scope.check)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            scope.check(at_once=True)  # a process that failed has removed what was staged
        hint = "; with several processes the path must be on a file system that all of them share"
        hint = hint if isinstance(error, FileNotFoundError) else ""
        where = os.path.basename(error.filename) if isinstance(error.filename, str | Path) else "a file"
        raise LazyModelError(f"cannot write {path} ({where}): {error.strerror}{hint}") from error
    finally:
        for file in writing:
            file.close()


class _Writing:
    """A file that is written in several threads: open from its first job on, and on the disk after its last one."""

    def __init__(self, path: Path, jobs: list[_Job]) -> None:
        self.path, self.jobs, self._fd = path, jobs, -1
        self._direct, self._flag = -1, getattr(os, "O_DIRECT", 0)

    def open(self) -> None:
        """Opens it, if it is not; not for two threads at once."""
        if self._fd < 0:
            flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
            self._fd = os.open(self.path, flags)
            if self._flag:
                with contextlib.suppress(OSError):  # file systems in memory, some of networks
                    self._direct = os.open(self.path, flags | self._flag)

    def write(self, data: np.ndarray, offset: int) -> None:
        """Writes bytes, directly where memory is aligned as the file's blocks are."""
        start = stop = 0
        view = memoryview(cast(Any, data))
        if self._direct >= 0 and len(view) >= _DIRECT and not (data.ctypes.data - offset) % _ALIGNMENT:
            start = stop = -offset % _ALIGNMENT
            end = len(view) - (offset + len(view)) % _ALIGNMENT
            try:
                while stop < end:
                    stop += os.pwrite(self._direct, view[stop:end], offset + stop)
            except OSError as error:
                if error.errno != errno.EINVAL:  # it wants larger blocks, or is not supported after all
                    raise
        for first, last in ((0, start), (stop, len(view))):
            while first < last:
                first += os.pwrite(self._fd, view[first:last], offset + first)

    def finish(self) -> None:
        """Waits for the disk: renamed before its bytes are there, a power failure could leave it without them."""
        with self.naming():
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Closes it, if it is open."""
        fds, self._fd, self._direct = (self._fd, self._direct), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    @contextlib.contextmanager
    def naming(self) -> Generator[None]:
        """Turns an error about a descriptor into one that names its file."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


def _run(
    files: Sequence[_Writing], threads: int, workspace_nbytes: int, bar: Progress, check: Callable[[], None]
) -> None:
    opening, scratch = threading.Lock(), Scratch(workspace_nbytes)
    for file in files:
        if not file.jobs:  # all of it is another process's, or nothing: an error if it cannot be written all the same
            file.open()
            file.close()

    def write(batch: tuple[_Writing, list[_Job]]) -> None:
        file, jobs = batch
        with opening:
            file.open()
        for piece, box, _ in jobs:
            write_box(file, piece, box)

    def write_box(file: _Writing, piece: _Piece, box: Box) -> None:
        nbytes = _nbytes(piece, box)
        spare = _ALIGNMENT if nbytes >= _DIRECT else 0
        first = piece.position(box) % _ALIGNMENT if spare else 0
        first -= first % piece.tensor.itemsize  # values that are not aligned are slow to make
        values = scratch.buffer(nbytes + spare)[first : first + nbytes].view(piece.tensor.dtype).reshape(box_shape(box))
        for part in fill_parts(piece.tensor, [box], [values]):
            part.run(scratch.workspace)
        with file.naming():
            _put(file, piece, box, values)

    batches = [(file, batch) for file in files for batch in _batches(file.jobs)]
    with parallel(write, batches, threads, "write", ahead=_AHEAD * threads) as written:
        for (file, batch), _ in zip(batches, written, strict=True):
            for piece, box, last in batch:
                bar.advance(_nbytes(piece, box), piece.name)
                check()
                if last:
                    piece.tensor.source.release()
            if batch[-1] is file.jobs[-1]:
                file.finish()


def _nbytes(piece: _Piece, box: Box) -> int:
    return math.prod(box_shape(box)) * piece.tensor.itemsize


def _batches(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Yields jobs together until handing them to a thread takes little of the time that writing them takes."""
    batch, nbytes = list[_Job](), 0
    for job in jobs:
        batch.append(job)
        nbytes += _nbytes(*job[:2])
        if nbytes >= _BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _jobs(pieces: Sequence[_Piece], chunk: int) -> Iterator[_Job]:
    """Yields each piece in chunks."""
    for piece in pieces:
        boxes = chunks_of(piece.tensor, chunk)
        yield from ((piece, box, box is boxes[-1]) for box in boxes)


def _put(file: _Writing, piece: _Piece, box: Box, values: np.ndarray) -> None:
    """Writes a box of a piece, run by run."""
    start = piece.position(box)
    if values.dtype == FLOAT4:
        file.write(packed(values), start)
        return
    run, outer = values.itemsize, values.ndim
    while outer and (values.shape[outer - 1] == 1 or piece.strides[outer - 1] == run):
        outer -= 1
        run *= values.shape[outer]
    rows = values.view(np.uint8).reshape(-1, run) if values.ndim else values.reshape(1).view(np.uint8).reshape(1, run)
    for row, index in zip(rows, np.ndindex(*values.shape[:outer]), strict=True):
        file.write(row, start + sum(i * stride for i, stride in zip(index, piece.strides, strict=False)))

"""Where safetensors files go in a bucket: what is there already, and the one step after which the new ones count.

Objects cannot be renamed, and there are no locks. Shards come under names that no other save has, `model-ID-…`, and
count when the index names them, which is replaced in one request, on the condition that it is still the one that was
there at the beginning: of two savers one succeeds. Only then are other saves' shards removed, the old ones and what
savers left that were killed. One file alone is uploaded in parts and appears, or replaces another, when the upload is
completed; where an index says what counts, it is a shard with an index, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lazymodel._devices.collective import agreement
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._remote.path import RemotePath
from lazymodel._remote.reader import reading_ahead
from lazymodel._remote.requests import Changed
from lazymodel._remote.upload import (
    CLIENT,
    Version,
    arrived,
    delete,
    parts_of,
    read_whole,
    replace,
    upload,
    version_of,
)
from lazymodel._save.destination import (
    INDEX,
    SINGLE,
    TERMS,
    SavedFile,
    SaveOptions,
    check_file,
    check_overwrite,
    index_of_loose,
    index_text,
    old_files,
)
from lazymodel._save.safetensors import layout, new_save_id
from lazymodel._save.write import Exchange, any_remote, check_budget, chunks_of, complete, owned, packed
from lazymodel._show.progress import Progress
from lazymodel._show.text import format_bytes, listed
from lazymodel._tensors.boxes import Box, box_shape, fresh_view, geometry_of, strided, whole_box
from lazymodel._tensors.buffers import Scratch, Workspace, assign, empty_aligned, parallel, start_thread
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import fill, required_ranges
from lazymodel.checkpoints._safetensors import FLOAT4

# Files as streams of bytes, for stores that take objects from beginning to end: made in chunks while they are sent.
#
# Each file is sent by one process. It reads what it can; tensors that are spread over
# the devices of several processes come to it by `Exchange`, a chunk in each round.


_CHUNK = 8 << 20  # bytes that are read at a time: no more than a part
_THREADS = 4  # that read chunks ahead of what is sent; they overlap transfers and transposing
# Uploads of an object, at most. Parts are sent again by themselves; what begins and completes an upload is not, where
# the connection breaks off, since it may have been done.
_UPLOADS = 4
_ABORT = 15.0  # seconds, at most, that an upload is waited for to be given up: a part that hangs takes longer
_LOOK = 0.1  # seconds between two looks whether all is given up


@dataclasses.dataclass(frozen=True)
class _Memory:
    """How a limit in bytes is divided."""

    parts: int  # on their way to the store
    ahead: int  # fetched ahead from another store
    chunk: int  # bytes that are read at a time
    threads: int


def _divided(budget: int, files: Sequence[SavedFile], processes: int) -> _Memory:
    """Divides the budget; LazyModelError where it is too small for these files."""
    tensors = [tensor for file in files for _, tensor, _ in file.tensors]
    parts, quarter = budget // 2, budget // 4
    ahead = quarter // 2 if any_remote(tensors) else 0
    reading = budget - parts - ahead - (quarter if processes > 1 else 0)
    check_budget(files, budget, reading)
    sizes = [parts_of(file.nbytes, parts) for file in files]
    if None in sizes:
        longest = max(file.nbytes for file in files)
        raise LazyModelError(
            f"max_host_memory={format_bytes(budget)} is too little for a file of {format_bytes(longest)}, which is "
            "sent in parts; give more, or save in smaller shards"
        )
    unit = max((tensor.source.min_scratch_nbytes for tensor in tensors), default=0)
    least = min(size.nbytes for size in sizes if size is not None)
    chunk = max(min(_CHUNK, least, (reading - unit) // 8), 1)
    threads = max(min(_THREADS, os.cpu_count() or 1, reading // (unit + 4 * chunk)), 1)
    return _Memory(parts, ahead, chunk, threads)


def _row_nbytes(budget: int, processes: int) -> int:
    """Bytes that a process gets in a round of the exchange: each holds two rows for each, and its own."""
    return max(min(_CHUNK, budget // 4 // (2 * processes + 2)), 1)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Bytes of a file that follow each other."""

    name: str  # of the tensor that they belong to
    tensor: LazyTensor
    box: Box
    nbytes: int
    number: int  # in the tensor
    last: bool

    @property
    def shared(self) -> bool:
        return not complete(self.tensor.source)

    def read(self, workspace: Workspace) -> np.ndarray:
        """All of it, of a tensor that is not shared."""
        values = empty_aligned(box_shape(self.box), self.tensor.dtype)
        fill(self.tensor, [self.box], [values], workspace)
        return packed(values) if values.dtype == FLOAT4 else values.reshape(-1).view(np.uint8)

    def contribute(self, row: np.ndarray, workspace: Workspace, *, leads: bool) -> None:
        """Fills in what this process is to give of a shared tensor's."""
        part = self.tensor.box(self.box)
        for own, target in owned(part, fresh_view(part.shape, part.itemsize), leads=leads):
            values = empty_aligned(own.shape, own.dtype)
            fill(own, [whole_box(own.shape)], [values], workspace)
            assign(strided(row, geometry_of(target), own.dtype), values)


def _chunks(file: SavedFile, chunk: int, row: int) -> Iterator[_Chunk]:
    """A file's tensors in chunks, in order; `row` is the limit for what is shared."""
    for name, tensor, _ in file.tensors:
        if tensor.size:
            half = tensor.dtype == FLOAT4
            tensor = tensor.reshape(-1) if half else tensor
            boxes = chunks_of(tensor, chunk if complete(tensor.source) else row)
            for number, box in enumerate(boxes):
                nbytes = math.prod(box_shape(box)) * tensor.itemsize // (2 if half else 1)
                yield _Chunk(name, tensor, box, nbytes, number, number == len(boxes) - 1)


def _by_process(files: Sequence[SavedFile], processes: Sequence[int]) -> dict[int, list[SavedFile]]:
    """Which process sends which files: each as many bytes as the others, as far as files allow."""
    shares: dict[int, list[SavedFile]] = {process: [] for process in processes}
    loads = dict.fromkeys(processes, 0)
    for file in sorted(files, key=lambda file: -file.nbytes):
        process = min(loads, key=lambda process: loads[process])
        loads[process] += file.nbytes
        shares[process].append(file)
    return shares


class _Sending:
    """Sends one process's share of files, one after the other, each in many parts at a time, in a thread of its own.

    Args:
        target: Where they go.
        shares: The files of all processes (`_by_process`).
        process: Which of them this one is.
        memory: Limits of its buffers.
        bar: Counts bytes that are sent.
        exchange: Between the processes, where there are several.
    """

    def __init__(
        self,
        target: RemoteDestination,
        shares: dict[int, list[SavedFile]],
        process: int,
        memory: _Memory,
        bar: Progress,
        exchange: Exchange | None,
    ) -> None:
        self._target, self._shares, self._process, self._memory = target, shares, process, memory
        self._bar, self._exchange = bar, exchange
        self._received: queue.Queue[np.ndarray] = queue.Queue(1)
        self._row = exchange.nbytes if exchange is not None else 0
        self._stopped, self._going, self._sent = threading.Event(), threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Sending:
        files = self._shares[self._process]
        self._bar.start(sum(file.nbytes - len(file.header) for file in files), f"{self._target.name}: saving")
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
        self._bar.finish()

    def run(self, check: Callable[[], None]) -> None:
        """Sends all of it, and takes part in the exchange as long as any process does. Errors are raised.

        Where another process failed it returns early, and the caller gets to know at the stage's end.
        """
        self._thread = start_thread(self._send, "upload")
        try:
            if self._exchange is not None and not self._take_turns(self._exchange):
                self.abort()
                return
            while not self._sent.wait(_LOOK):
                check()
            self._check()
        except BaseException:
            self.abort()
            raise

    def complete(self) -> None:
        """Lets the file appear that the target holds."""
        self._going.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK)
        self._check()

    def abort(self) -> None:
        """Gives up what is not there yet."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_ABORT)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_turns(self, exchange: Exchange) -> bool:
        """Rounds in each of which every process gets a chunk of what it sends; False where another one has failed.

        A process that fails, by a Ctrl-C as well, says so in one more round: none waits for it in vain.
        """
        workspace = Workspace(self._memory.chunk)
        leads = self._process == exchange.processes[0]
        turns = [self._shared(self._shares[process]) for process in exchange.processes]
        failure: BaseException | None = None
        for chunks in itertools.zip_longest(*turns):
            rows = np.zeros((len(chunks), exchange.nbytes), np.uint8)
            try:
                if failure is None:
                    self._check()
                    for row, chunk in zip(rows, chunks, strict=True):
                        if chunk is not None:
                            chunk.contribute(row, workspace, leads=leads)
            except BaseException as error:
                failure = error
            row = exchange(rows, failed=failure is not None)
            if row is None:
                break
            try:
                if (own := chunks[exchange.processes.index(self._process)]) is not None:
                    self._hand(row[: own.nbytes])
            except BaseException as error:
                failure = error
        else:
            row = np.empty(0)
        if failure is not None:
            raise failure
        return row is not None

    def _shared(self, files: Iterable[SavedFile]) -> Iterator[_Chunk]:
        for file in files:
            yield from (chunk for chunk in _chunks(file, self._memory.chunk, self._row) if chunk.shared)

    def _hand(self, row: np.ndarray) -> None:
        """Gives a chunk to the thread that uploads, as soon as it takes one."""
        while True:
            self._check()
            with contextlib.suppress(queue.Full):
                return self._received.put(row, timeout=_LOOK)

    # In the thread that uploads.

    def _send(self) -> None:
        try:
            if files := self._shares[self._process]:
                place = self._target.place(files[0])
                store = place.store.open_for_parts(CLIENT)
                for file in files:
                    self._upload(store, file)
        except BaseException as error:
            self._error = error
        finally:
            self._sent.set()

    def _upload(self, store: tuple[Any, Any], file: SavedFile) -> None:
        path, old = self._target.place(file), self._target.replaced
        parts, counted = parts_of(file.nbytes, self._memory.parts), Counter[str]()
        assert parts is not None
        # What came from other processes is not sent again by them.
        alone = all(complete(tensor.source) for _, tensor, _ in file.tensors)
        attempts = min(_UPLOADS, path.store.retries.attempts) if alone else 1
        for attempt in range(attempts):
            failure = upload(store, path, parts, self._pieces(file, counted), self._require_going, self._hold)
            if failure is None or arrived(path, file.nbytes, old):
                return
            if attempt == attempts - 1 or not failure.again:
                tried = f", after {attempts} uploads" if failure.again and attempts > 1 else ""
                raise LazyModelError(f"cannot write {path}: {failure}{tried}. What was there before is as it was")
            self._stopped.wait(path.store.retries.wait(attempt))

    def _require_going(self) -> None:
        if self._stopped.is_set():
            raise CheckpointError("saving was given up")

    def _hold(self) -> None:
        """Waits for `complete` where the file itself is what counts."""
        if self._target.held:
            self._sent.set()
            while not self._going.wait(_LOOK):
                self._require_going()
        self._require_going()

    def _pieces(self, file: SavedFile, counted: Counter[str]) -> Generator[np.ndarray]:
        """A file's bytes, from its header on; `counted` are the chunks of each tensor that progress knows of."""
        header = np.frombuffer(file.header, np.uint8)
        for start in range(0, header.size, self._memory.chunk):
            yield header[start : start + self._memory.chunk]
        chunks = list(_chunks(file, self._memory.chunk, self._row))
        wants = [want for chunk in chunks if not chunk.shared for want in required_ranges(chunk.tensor, [chunk.box])]
        threads, scratch = self._memory.threads, Scratch(self._memory.chunk)

        def read(chunk: _Chunk) -> np.ndarray | None:
            return None if chunk.shared else chunk.read(scratch.workspace)

        reading = parallel(read, chunks, threads, "read", ahead=threads)
        with reading as contents, reading_ahead(wants, self._memory.ahead):
            for chunk, content in zip(chunks, contents, strict=True):
                yield self._finished(chunk, content, counted)

    def _finished(self, chunk: _Chunk, content: np.ndarray | None, counted: Counter[str]) -> np.ndarray:
        while content is None:
            self._require_going()
            with contextlib.suppress(queue.Empty):
                content = self._received.get(timeout=_LOOK)
        if chunk.number == counted[chunk.name]:  # and not sent again
            counted[chunk.name] += 1
            self._bar.advance(chunk.nbytes, chunk.name)
        if chunk.last:
            chunk.tensor.source.release()
        return content


_OURS = re.compile(r"model-[0-9a-f]{16}-\d{5,9}-of-\d{5,9}\.safetensors")
_READ_ONLY = {
    "hf": "a repository on a hub takes commits: save to a folder, and upload that with `hf upload`",
    "https": "few web servers take files, and none of them in parts",
}
_READ_ONLY["http"] = _READ_ONLY["https"]


def remote_destination(
    tensors: Mapping[str, LazyTensor], where: RemotePath, shardings: Sequence[Any], options: SaveOptions
) -> Callable[[], tuple[RemoteDestination, int]]:
    """Returns what makes the destination, with a checksum of what is saved; all processes that share tensors meet."""
    exchange, save_id, processes = None, new_save_id(), [jax.process_index()]
    spread = [sharding for sharding in shardings if not sharding.is_fully_addressable]
    if spread:
        # All must be there before the first exchange, and do it alike.
        with agreement(shardings, **TERMS) as stage:
            check_writable(where)
            stage.outcome = f"use {options.budget} bytes of memory"
        devices = {device for sharding in spread for device in sharding.device_set}
        processes = sorted({device.process_index for device in devices})
        exchange = Exchange([*devices], _row_nbytes(options.budget, len(processes)))
        save_id = exchange.first(save_id.encode()).decode()  # all name the files alike

    def make() -> tuple[RemoteDestination, int]:
        check_writable(where)
        files, checksum = layout(tensors, options.shard_size, options.metadata, save_id)
        memory = _divided(options.budget, files, len(processes))
        target = RemoteDestination(where, files, save_id, options)
        shares, process = _by_process(target.files, processes), jax.process_index()
        target.own = shares[process]
        target.sending = _Sending(target, shares, process, memory, options.bar, exchange)
        return target, checksum

    return make


def check_writable(where: RemotePath) -> None:
    """Raises LazyModelError for a place that cannot be saved to."""
    if (reason := _READ_ONLY.get(where.store.url.kind)) is not None:
        raise LazyModelError(f"cannot save to {where}: {reason}. Expected s3://, gs:// or az://")


class RemoteDestination:
    """A file, `x.safetensors`, or a folder in a bucket, as it was when this was made.

    Attributes:
        files: With the names that they get there.
        own: Those of them that this process sends, by `sending`.
        held: True if the one file is itself what counts, once its upload is completed.
    """

    own: Sequence[SavedFile]
    sending: _Sending

    def __init__(self, where: RemotePath, files: Sequence[SavedFile], save_id: str, options: SaveOptions) -> None:
        self._where, self._folder, self.name = where, where, where.name
        if options.shard_size is None:
            check_file(where)
            self._folder, self.held = where.parent, True
            self._decides, old = where, [where.name] if where.is_file() else []
            leftovers: list[str] = []
        else:
            if where.is_file():
                raise LazyModelError(f"{where} is a file; give a folder, or a name that ends with .safetensors")
            self._decides = where / INDEX
            self._version = version_of(self._decides)  # before it is read: if it changes between them, it is noticed
            old = old_files(where, _OURS)
            self.held = len(files) == 1 and INDEX not in old
            leftovers = [path.name for path in where.glob("model-*.safetensors") if _OURS.fullmatch(path.name)]
            if self.held:
                self._decides = where / SINGLE
        self._there = self._folder / old[0] if old else None
        if self.held:
            self._version = version_of(self._decides)
            names = [self._decides.name]
        else:
            names = [f"model-{save_id}-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
        self.files = [dataclasses.replace(file, name=name) for file, name in zip(files, names, strict=True)]
        # Each name of a loose shard is one of a checkpoint that a reader would mix with what is coming.
        self._loose = old if old and not self.held and not {INDEX, SINGLE} & set(old) else []
        kept = {self._decides.name, *names}
        self._old = [name for name in dict.fromkeys([*old, *leftovers]) if name not in kept]
        weights = {tensor: file.name for file in self.files for tensor, _, _ in file.tensors}
        self._index = index_text(sum(file.nbytes - len(file.header) for file in files), weights).encode()
        self._begins_commit = False

    @property
    def replaced(self) -> Version | None:
        """The version of the files now at the destination."""
        return self._version if self.held else None

    def place(self, file: SavedFile) -> RemotePath:
        """Where a file goes."""
        return self._folder / file.name

    @contextlib.contextmanager
    def staged(self, *, leads: bool, overwrite: bool) -> Generator[None]:
        """Within the block files may come; where it fails all is as it was."""
        indexed = False
        try:
            if leads:
                check_overwrite(self._there, overwrite)
                indexed = self._index_old()
            with self.sending:
                yield
        except BaseException:
            if leads:
                self._delete(self.files, indexed=indexed)
            raise

    @contextlib.contextmanager
    def undone_if_failed(self) -> Generator[None]:
        """Removes this process's files where the block fails, but those that count by then."""
        try:
            yield
        except BaseException:
            self._delete(self.own)
            raise

    def _delete(self, files: Sequence[SavedFile], *, indexed: bool = False) -> None:
        """Removes files that do not count, and an index of old shards; what cannot be, the next save removes."""
        if (not self.held or indexed) and not self._committed():
            delete([self.place(file) for file in files if not self.held] + [self._decides] * indexed)

    def commit(self) -> None:
        """Makes complete files count instead of the old ones, which are removed."""
        self._begins_commit = True
        try:
            if self.held:
                if version_of(self._decides) != self._version:
                    raise Changed
                self.sending.complete()
            else:
                replace(self._decides, self._index, self._version)
        except Changed:
            raise LazyModelError(
                f"{self._where} was saved to by another saver meanwhile, whose checkpoint is there now. Save to "
                "another place, or once more to replace it"
            ) from None
        if failures := delete([self._folder / name for name in self._old]):
            warn(
                f"{self._where} is saved, but not all that it replaces could be removed: {listed(failures)}. The next "
                "save removes what has names of this library; remove others yourself"
            )

    def _committed(self) -> bool:
        """Returns True if the files count by what the store has: an answer may have been lost, or a Ctrl-C come."""
        if not self._begins_commit:
            return False
        try:
            return read_whole(self._decides) == self._index
        except CheckpointError:
            return True  # nobody knows, so nothing is removed

    def _index_old(self) -> bool:
        """Gives old shards without an index one, so that new ones can come alongside; returns True if it did."""
        if not self._loose or (index := index_of_loose(self._folder, self._loose)) is None:
            return False
        replace(self._decides, index.encode(), None)
        self._version = version_of(self._decides)
        return True

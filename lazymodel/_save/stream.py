"""Files as streams of bytes, for stores that take objects from beginning to end: made band by band while they are sent.

Each file is sent by one process. What it has on its own devices, or can read, it reads; tensors that are spread over
the devices of several processes come to it by `Exchange`, a band in each round.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import queue
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import RemotePath
from lazymodel._remote.source import reading_ahead
from lazymodel._remote.upload import Content, Uploading, Version, parts_of
from lazymodel._save.destination import SavedFile
from lazymodel._save.exchange import Exchange
from lazymodel._save.write import complete, owned
from lazymodel._show.progress import Progress
from lazymodel._show.text import format_bytes
from lazymodel._tensors.boxes import Box, box_shape, fresh_view, geometry_of, slabs, strided, whole_box
from lazymodel._tensors.buffers import Workspace, assign, empty_aligned
from lazymodel._tensors.fill import fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.wanted import wanted
from lazymodel.checkpoints._safetensors_header import FLOAT4

_BAND = 8 << 20  # bytes that are read at a time: no more than a part
_THREADS = 4  # that read bands ahead of what is sent; they overlap transfers and transposing
_ABORT = 15.0  # seconds, at most, that an upload is waited for to be given up: a part that hangs takes longer
_LOOK = 0.1  # seconds between two looks whether all is given up


@dataclasses.dataclass(frozen=True)
class Memory:
    """How a ceiling in bytes is divided."""

    parts: int  # on their way to the store
    ahead: int  # fetched ahead from another store
    band: int  # bytes that are read at a time
    threads: int


def divided(budget: int, files: Sequence[SavedFile], processes: int) -> Memory:
    """Divides the budget; LazyModelError where it is too small for these files."""
    tensors = [(name, tensor) for file in files for name, tensor, _ in file.tensors]
    remote = any(True for _, tensor in tensors for _ in wanted(tensor, [whole_box(tensor.shape)]))
    parts, quarter = budget // 2, budget // 4
    ahead = quarter // 2 if remote else 0
    reading = budget - parts - ahead - (quarter if processes > 1 else 0)
    unit = max((tensor.leaf.unit_nbytes for _, tensor in tensors), default=0)
    longest = max(file.nbytes for file in files)
    for name, tensor in tensors:
        if tensor.dtype == FLOAT4 and not complete(tensor.leaf):
            raise LazyModelError(
                f"{name!r}: 4-bit floats that several processes share cannot be written, because two are one byte"
            )
        if tensor.leaf.unit_nbytes + 8 * tensor.itemsize > reading:
            raise LazyModelError(
                f"{name!r}: reading any of it takes {format_bytes(tensor.leaf.unit_nbytes)} at once, and "
                f"max_host_memory={format_bytes(budget)} leaves {format_bytes(reading)} beside what is being sent"
            )
    if parts_of(longest, parts) is None:
        raise LazyModelError(
            f"max_host_memory={format_bytes(budget)} is too little for a file of {format_bytes(longest)}, which is "
            "sent in parts; give more, or save in smaller shards"
        )
    least = min(size.nbytes for file in files if (size := parts_of(file.nbytes, parts)) is not None)
    band = max(min(_BAND, least, (reading - unit) // 8), 1)
    threads = max(min(_THREADS, os.cpu_count() or 1, reading // (unit + 4 * band)), 1)
    return Memory(parts, ahead, band, threads)


def row_nbytes(budget: int, processes: int) -> int:
    """Bytes that a process gets in a round of the exchange: each holds two rows for each, and its own."""
    return max(min(_BAND, budget // 4 // (2 * processes + 2)), 1)


@dataclasses.dataclass(frozen=True)
class _Band:
    """Bytes of a file that follow each other."""

    name: str  # of the tensor that they belong to
    tensor: LazyTensor
    box: Box
    nbytes: int
    number: int  # in the tensor
    last: bool

    @property
    def shared(self) -> bool:
        return not complete(self.tensor.leaf)

    def read(self, workspace: Workspace) -> np.ndarray:
        """All of it, of a tensor that is not shared."""
        values = empty_aligned(box_shape(self.box), self.tensor.dtype)
        fill(self.tensor, [self.box], [values], workspace)
        bits = values.reshape(-1).view(np.uint8)
        if self.tensor.dtype == FLOAT4:  # two are a byte, the earlier in the low bits, as it is read
            return (bits[0::2] & 15) | (bits[1::2] << 4)
        return bits

    def contribute(self, row: np.ndarray, workspace: Workspace, *, leads: bool) -> None:
        """Fills in what this process is to give of a shared tensor's."""
        part = self.tensor.box(self.box)
        for own, target in owned(part, fresh_view(part.shape, part.itemsize), leads=leads):
            values = empty_aligned(own.shape, own.dtype)
            fill(own, [whole_box(own.shape)], [values], workspace)
            assign(strided(row, geometry_of(target), own.dtype), values)


def _bands(file: SavedFile, band: int, row: int) -> Iterator[_Band]:
    """A file's tensors in bands, in order; `row` is the limit for what is shared."""
    for name, tensor, _ in file.tensors:
        if not tensor.size:
            continue
        shared, packed = not complete(tensor.leaf), tensor.dtype == FLOAT4
        elements = max((row if shared else band) // tensor.itemsize, 1)
        if packed:
            tensor, elements = tensor.reshape(-1), max(elements - elements % 2, 2)
        boxes = list(slabs(tensor.shape, elements))
        for number, box in enumerate(boxes):
            nbytes = math.prod(box_shape(box)) * tensor.itemsize // (2 if packed else 1)
            yield _Band(name, tensor, box, nbytes, number, number == len(boxes) - 1)


def by_process(files: Sequence[SavedFile], processes: Sequence[int]) -> dict[int, list[SavedFile]]:
    """Which process sends which files: each as many bytes as the others, as far as files allow."""
    shares: dict[int, list[SavedFile]] = {process: [] for process in processes}
    loads = dict.fromkeys(processes, 0)
    for file in sorted(files, key=lambda file: -file.nbytes):
        process = min(loads, key=lambda process: loads[process])
        loads[process] += file.nbytes
        shares[process].append(file)
    return shares


class Sending:
    """Sends one process's share of files to their places, once it is told to `run`.

    Args:
        files: Of all processes (`by_process`).
        process: Which of them this one is.
        place: Where a file goes.
        memory: What it may take.
        held: Whether files are to appear only with `complete`.
        old: What they replace, where there is anything.
        exchange: Between the processes, where there are several.
        bar: Is told of bytes that are sent.
    """

    def __init__(
        self,
        files: dict[int, list[SavedFile]],
        process: int,
        place: Callable[[SavedFile], RemotePath],
        memory: Memory,
        bar: Progress,
        exchange: Exchange | None,
        *,
        held: bool,
        old: Version | None,
    ) -> None:
        self._files, self._process, self._memory, self._bar, self._exchange = files, process, memory, bar, exchange
        self._received: queue.Queue[np.ndarray] = queue.Queue(1)
        self._row = exchange.nbytes if exchange is not None else 0
        self._given_up = False
        contents: list[Content] = []
        for file in files[process]:
            parts = parts_of(file.nbytes, memory.parts)
            assert parts is not None
            pieces = functools.partial(self._pieces, file, Counter())
            # What came from other processes is not sent again by them.
            alone = all(complete(tensor.leaf) for _, tensor, _ in file.tensors)
            contents.append(Content(place(file), pieces, file.nbytes, parts, old, alone))
        self._uploading = Uploading(contents, held=held)

    def run(self, check: Callable[[], None]) -> None:
        """Sends all of it, and takes part in the exchange as long as any process does. What goes wrong is raised.

        Where another process failed it returns early, and whoever called it gets to know at the stage's end.
        """
        self._uploading.start()
        try:
            if self._exchange is not None and not self._take_turns(self._exchange):
                self.abort()
                return
            self._uploading.wait(check)
        except BaseException:
            self.abort()
            raise

    def complete(self) -> None:
        """What was held appears."""
        self._uploading.complete()

    def abort(self) -> None:
        """Gives up what is not there yet."""
        self._given_up = True
        self._uploading.abort(_ABORT)

    def _take_turns(self, exchange: Exchange) -> bool:
        """Rounds in each of which every process gets a band of what it sends; False where another one has failed.

        A process that fails, by a Ctrl-C as well, says so in one more round: none waits for it in vain.
        """
        workspace = Workspace(self._memory.band)
        leads = self._process == exchange.processes[0]
        turns = [self._shared(self._files[process]) for process in exchange.processes]
        failure: BaseException | None = None
        for bands in itertools.zip_longest(*turns):
            rows = np.zeros((len(bands), exchange.nbytes), np.uint8)
            try:
                if failure is None:
                    self._uploading.check()
                    for row, band in zip(rows, bands, strict=True):
                        if band is not None:
                            band.contribute(row, workspace, leads=leads)
            except BaseException as error:
                failure = error
            row = exchange(rows, failed=failure is not None)
            if row is None:
                break
            try:
                if (own := bands[exchange.processes.index(self._process)]) is not None:
                    self._uploading.hand(self._received, row[: own.nbytes])
            except BaseException as error:
                failure = error
        else:
            row = np.empty(0)
        if failure is not None:
            raise failure
        return row is not None

    def _shared(self, files: Iterable[SavedFile]) -> Iterator[_Band]:
        for file in files:
            yield from (band for band in _bands(file, self._memory.band, self._row) if band.shared)

    # In the thread that uploads.

    def _pieces(self, file: SavedFile, told: Counter[str]) -> Generator[np.ndarray]:
        """A file's bytes, from its header on; `told` counts the bands of each tensor that progress knows of."""
        header = np.frombuffer(file.header, np.uint8)
        for start in range(0, header.size, self._memory.band):
            yield header[start : start + self._memory.band]
        bands = list(_bands(file, self._memory.band, self._row))
        wants = [want for band in bands if not band.shared for want in wanted(band.tensor, [band.box])]
        pending: collections.deque[tuple[_Band, Future[np.ndarray] | None]] = collections.deque()
        spaces: queue.SimpleQueue[Workspace] = queue.SimpleQueue()
        for _ in range(self._memory.threads):
            spaces.put(Workspace(self._memory.band))

        def read(band: _Band) -> np.ndarray:
            space = spaces.get()
            try:
                return band.read(space)
            finally:
                spaces.put(space)

        ahead = reading_ahead(wants, self._memory.ahead) if wants else contextlib.nullcontext()
        pool = ThreadPoolExecutor(self._memory.threads, "lazymodel-read")
        try:
            with ahead:
                for band in [*bands, *[None] * self._memory.threads]:
                    if band is not None:
                        pending.append((band, None if band.shared else pool.submit(read, band)))
                    if pending and (band is None or len(pending) > self._memory.threads):
                        yield self._finished(*pending.popleft(), told)
        finally:
            pool.shutdown(cancel_futures=True)

    def _finished(self, band: _Band, future: Future[np.ndarray] | None, told: Counter[str]) -> np.ndarray:
        content: np.ndarray | None = future.result() if future is not None else None
        while content is None:
            if self._given_up:
                raise CheckpointError("saving was given up")
            with contextlib.suppress(queue.Empty):
                content = self._received.get(timeout=_LOOK)
        if band.number == told[band.name]:  # and not sent again
            told[band.name] += 1
            self._bar.advance(band.nbytes, band.name)
        if band.last:
            band.tensor.leaf.release()
        return content

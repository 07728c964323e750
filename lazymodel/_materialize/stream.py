"""The stream: turns (variable, tensor, sharding) triples into sharded `jax.Array`s, within a limit of host memory.

Responsible for which regions of a tensor this process needs, their order, the number of threads, the bytes in flight,
and for handing buffers to devices. `_tensors/tensor_source` reads a region; `_materialize/materialize` or an
integration decides which tensor belongs to which variable.

Life of a job: its bytes are reserved from the budget, its buffers allocated, its parts filled by free threads, its
buffers put on their devices, and the bytes released. Jobs start strictly in order, so the earliest variable can always
finish and there is no deadlock. A job consists of regions of one variable that are filled together; of small tensors
that are neighbours in a file, since planning for one of them takes longer than reading it; or of a shard larger than
the budget, which is sent to its devices in chunks and joined there.

If a device's memory is the host's (the CPU backend), the filled buffer becomes the array's own memory: nothing is
copied, and it is never written again. Other devices get copies: a separate thread waits for transfers while the others
continue to read. Only then are a job's bytes released and its buffers reused.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._errors import CheckpointError
from lazymodel._programs.jaxprs import uses_x64
from lazymodel._remote.path import AHEAD, reading_ahead
from lazymodel._show.text import format_bytes
from lazymodel._tensors.boxes import (
    Box,
    BoxKey,
    bounding,
    box_of,
    box_shape,
    intersect,
    shift,
    slabs,
    strided,
    unshift,
    whole_box,
)
from lazymodel._tensors.buffers import (
    ALIGNMENT,
    Arena,
    Workspace,
    assign,
    cores,
    default_budget,
    empty_aligned,
    start_thread,
    uninterrupted,
)
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import Boxes, boxes_for, in_other_memory, misshapen, where
from lazymodel._tensors.tensor_source import (
    FileTensor,
    Part,
    fill,
    fill_parts,
    prefers_one_pass,
    required_ranges,
)

CHUNK = 16 << 20  # bytes of a chunk of shards that are larger than the budget: a transfer of a few milliseconds
WORKSPACE = 64 << 20  # limit of temporaries of a thread; more makes nothing faster
_THREADS = 8  # more do not help: from here on memory bandwidth is the limit, not the number of requests
SMALL_NBYTES = 64 << 10  # bytes of a small tensor; a larger one gains little from a group, and is worth several threads
GROUP = 512 << 10  # bytes of a group: a hundred times the cost of its overhead; all of it is freed together


@dataclasses.dataclass(frozen=True)
class StreamItem:
    """One variable to fill."""

    path: str  # for messages
    tensor: LazyTensor | np.ndarray  # the source of its values
    shape: tuple[int, ...]  # the global shape; must equal the tensor's
    dtype: np.dtype[Any]  # values are cast as by `ndarray.astype`
    sharding: Sharding
    turn: int = 0  # an item is read once the caller waits for one of the turn before, or has got it


def in_file_order(items: Iterable[StreamItem]) -> list[StreamItem]:
    """The items in the order in which they are read and yielded."""
    tensors = ((item, lazy(item.tensor, item.path)) for item in items)
    return [item for item, _ in sorted(tensors, key=lambda pair: (pair[1].file, pair[1].offset))]


def stream(
    items: Sequence[StreamItem],
    *,
    max_host_memory: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
    hold: Callable[[Callable[[], bool]], None] | None = None,
    in_order: bool = False,
) -> Generator[tuple[str, jax.Array]]:
    """Reads every item's shards onto this process's devices; yields (path, array) in file order.

    Each distinct shard is read once, however many devices hold it. Threads read ahead; they end when the
    iterator is exhausted, closed or fails.

    Args:
        items: The items to fill, in any order.
        max_host_memory: Limit in bytes for the host memory in use at any time: values on their way to devices,
            and every temporary. None is 4 GiB, or an eighth of the available memory if that is less. Memory of
            devices does not count. On CPU devices, which use host memory, the variable that is yielded next does not
            count, but those read ahead do. Memory through which a device's runtime copies, such as pinned memory, does
            not count either; at most half the limit is in transfer at a time.
        on_bytes: Called with the bytes of shards just filled, from any thread, one call at a time.
        hold: Called afterwards by every thread before it continues, with a function that returns True if the stream has
            been stopped: until it returns, that thread reads nothing more.
        in_order: True to read and yield the items in the given order, which is that of their turns. An item may occur
            several times.

    Raises:
        CheckpointError: At once, for a tensor whose shape differs from its variable's or that cannot be read within the
            limit; while iterating, for any failure with one variable, naming it and its file.
    """
    plans = [_plan(item) for item in (items if in_order else in_file_order(items))]
    limit = default_budget() if max_host_memory is None else max_host_memory
    threads = max(2, min(_THREADS, cores()))  # two on one core as well: one reads while the other waits for a disk
    ranges = [each for plan in plans for each in required_ranges(plan.tensor, plan.boxes.boxes)]
    ahead, workspace, budget = _divided(limit, threads, bool(ranges))
    for plan in plans:
        if (needed := plan.least_nbytes(workspace)) > budget:

            def enough(limit: int) -> bool:
                _, workspace, budget = _divided(limit, threads, bool(ranges))
                return all(plan.least_nbytes(workspace) <= budget for plan in plans)

            # At least half of a limit remains as budget, so twice the need is enough, plus rounding.
            most = 2 * max(plan.least_nbytes(0) for plan in plans) + 4
            raise CheckpointError(
                f"{plan.item.path!r} from {where(plan.tensor)}: reading any of it takes {format_bytes(needed)} at "
                f"once, and max_host_memory={format_bytes(limit)} leaves {format_bytes(budget)}. Give at least "
                f"{bisect.bisect_left(range(most), True, key=enough)} bytes."
            )
    return _Stream(plans, budget, [Workspace(workspace) for _ in range(threads)], on_bytes, hold).arrays(ranges, ahead)


def _divided(limit: int, threads: int, remote: bool) -> tuple[int, int, int]:
    """A limit of host memory as bytes to prefetch, of each thread's workspace, and of the budget of the jobs."""
    ahead, workspace = min(AHEAD, limit // 4) if remote else 0, min(WORKSPACE, limit // (4 * threads))
    return ahead, workspace, limit - ahead - threads * workspace


@dataclasses.dataclass(eq=False)
class _Plan:
    """An item with its regions; `shards` fills up as they arrive, or `array` is set at once."""

    item: StreamItem
    tensor: LazyTensor  # in the variable's dtype
    boxes: Boxes
    # Of a tensor that can be in a group: bytes of its contiguous range of a file (0 if it is read in another way: a
    # part of a tensor, a compressed or joined one, an array in memory), of all its boxes, each aligned, and of
    # temporaries for converting it.
    small: tuple[int, int, int] | None
    shards: dict[BoxKey, list[jax.Array]] = dataclasses.field(default_factory=dict[BoxKey, list[jax.Array]])
    array: jax.Array | None = None

    @property
    def complete(self) -> bool:
        return self.array is not None or len(self.shards) == len(self.boxes.devices)

    def places(self, key: BoxKey) -> list[SingleDeviceSharding]:
        """The shardings of the shards of a region."""
        kind = self.item.sharding.memory_kind
        return [SingleDeviceSharding(device, memory_kind=kind) for device in self.boxes.devices[key]]

    def scratch_nbytes(self, workspace: int) -> int:
        """Bytes that a thread needs beyond its workspace."""
        unit = self.tensor.source.min_scratch_nbytes
        return unit if unit > workspace else 0

    def least_nbytes(self, workspace: int) -> int:
        """Bytes to read one element."""
        return self.scratch_nbytes(workspace) + self.item.dtype.itemsize

    def take(self) -> jax.Array:
        """The finished array; keeps no reference to it."""
        item, array, self.array = self.item, self.array, None
        if array is None:
            shards = [shard for key in self.boxes.devices for shard in self.shards[key]]
            self.shards = {}
            array = jax.make_array_from_single_device_arrays(item.shape, item.sharding, shards, dtype=item.dtype)
        return array


def _plan(item: StreamItem) -> _Plan:
    tensor = lazy(item.tensor, item.path)
    if tuple(tensor.shape) != tuple(item.shape):
        raise CheckpointError(
            f"{misshapen(item.path, item.shape, tensor.shape, where(tensor))}; "
            "is this the checkpoint of another configuration?"
        )
    if (stored := jax.dtypes.canonicalize_dtype(item.dtype)) != item.dtype:
        raise CheckpointError(
            f"{item.path!r}: JAX would store {item.dtype.name} as {stored.name}; "
            "enable 64-bit types (jax_enable_x64) or cast"
        )
    boxes = boxes_for(item.sharding, tuple(item.shape))
    tensor = tensor.astype(item.dtype)
    return _Plan(item, tensor, boxes, _small(tensor, boxes))


def _small(tensor: LazyTensor, boxes: Boxes) -> tuple[int, int, int] | None:
    """The numbers of `_Plan.small`; None unless the tensor is small, and all of it is needed here."""
    stored = tensor.size * tensor.itemsize_stored
    if not boxes.whole or not stored or max(stored, tensor.nbytes) > SMALL_NBYTES:
        return None
    placed = sum(_padded(elements * tensor.itemsize) for elements in boxes.sizes)
    # Input and output of a conversion, and a mask or the like.
    widest = max([tensor.itemsize_stored, *(step.dtype.itemsize for step in tensor.steps)])
    spent = 3 * tensor.size * widest if tensor.steps else 0
    geometry = tensor.geometry()
    # If it repeats elements (stride 0), its range may contain other data between its elements.
    repeats = any(n > 1 and not stride for n, stride in zip(geometry.shape, geometry.strides, strict=True))
    if type(tensor.source) is FileTensor and not repeats and geometry.span(tensor.itemsize_stored) == stored:
        return stored, placed, spent
    return 0, placed, spent + tensor.nbytes + tensor.source.min_scratch_nbytes


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


@dataclasses.dataclass(eq=False)
class _Job:
    """What is filled together, with one reservation."""

    plans: Sequence[_Plan]  # one, or those of a group
    nbytes: int  # its reservation
    boxes: Sequence[BoxKey] = ()  # regions of the only plan
    serial: bool = False  # True if its parts must not run at the same time, to save memory
    chunk_nbytes: int = 0  # bytes of the chunks in which it is sent to its devices; 0 if it is sent whole
    group: bool = False
    current: int = 0  # number of the plan that an error is about
    outs: list[np.ndarray] = dataclasses.field(default_factory=list[np.ndarray])
    parts: list[Part] = dataclasses.field(default_factory=list[Part])
    unfinished: int = 0
    # The results of the buffers, possibly not ready yet: the plans' arrays, or shards of a plan.
    arrays: list[jax.Array] = dataclasses.field(default_factory=list[jax.Array])
    shards: dict[BoxKey, list[jax.Array]] = dataclasses.field(default_factory=dict[BoxKey, list[jax.Array]])

    @property
    def on_host(self) -> bool:
        """Returns True if all buffers become the arrays' own memory."""
        return all(plan.boxes.on_host for plan in self.plans)


def _groups(plans: Sequence[_Plan], limit: int) -> Iterator[_Job | _Plan]:
    """Groups of small tensors that need at most `limit` bytes to fill, and the other plans, in order."""
    limit = min(limit, GROUP)
    group: list[_Plan] = []
    nbytes = most = 0  # bytes of the group, and of its temporaries
    for plan in plans:
        stored, placed, spent = plan.small or (limit, limit, limit)
        alone = stored + placed + spent > limit
        together = not alone and not (group and plan.item.turn != group[0].item.turn)
        if group and not (together and nbytes + stored + placed + max(most, spent) <= limit):
            yield _Job(group, nbytes + most, group=True)
            group, nbytes, most = [], 0, 0
        if alone:
            yield plan
        else:
            group.append(plan)
            nbytes, most = nbytes + stored + placed, max(most, spent)
    if group:
        yield _Job(group, nbytes + most, group=True)


def _fill_group(job: _Job, buffer: np.ndarray, workspace: Workspace) -> None:
    """Reads small tensors and makes their arrays, all of which use the buffer. If it fails, `current` is the number of
    the plan that the error is about.
    """
    small = [plan.small or (0, 0, 0) for plan in job.plans]
    raw = np.empty(sum(stored for stored, *_ in small), np.uint8)
    runs: list[tuple[ByteReader, int, int]] = []  # with first and last byte; adjacent ranges are one
    for plan, (stored, *_) in zip(job.plans, small, strict=True):
        if stored:
            reader, start = cast(FileTensor, plan.tensor.source).reader, plan.tensor.offset
            stop = start + stored
            if runs and (runs[-1][0], runs[-1][2]) == (reader, start):
                start = runs.pop()[1]
            runs.append((reader, start, stop))
    try:
        done = 0
        for reader, start, stop in runs:
            reader.read_into(start, raw[done : done + stop - start])
            done += stop - start
        for reader in dict.fromkeys(reader for reader, _, _ in runs):
            reader.check_unchanged()
    except CheckpointError:
        # Raise the error of the first tensor that cannot be read, if it still cannot be.
        for number, plan in enumerate(job.plans):
            job.current = number
            plan.tensor.read()
        job.current = 0
        raise
    arrays: list[jax.Array] = []
    read = placed = 0
    for number, (plan, (stored, *_)) in enumerate(zip(job.plans, small, strict=True)):
        job.current, tensor, boxes = number, plan.tensor, plan.boxes
        if stored and not tensor.steps:
            values = _stored_values(tensor, raw, read)
        else:
            values = np.empty(tensor.shape, tensor.dtype)
            if stored:
                assign(values, _stored_values(tensor, raw, read), tensor.steps)
            else:
                fill(tensor, [whole_box(tensor.shape)], [values], workspace)
        read += stored
        shards: list[np.ndarray] = []
        for box in boxes.boxes:
            shard = np.ndarray(box_shape(box), tensor.dtype, cast(Any, buffer), placed)
            shard[...] = values[(*box, ...)]
            shards.append(shard)
            placed += _padded(shard.nbytes)
        arrays.append(boxes.array(shards, tensor.dtype))
        tensor.source.release()
    job.arrays = arrays


def _stored_values(tensor: LazyTensor, raw: np.ndarray, position: int) -> np.ndarray:
    """A tensor's elements as stored; `raw` contains its range of the file at a position."""
    geometry = tensor.geometry()
    start = position + tensor.source.offset + geometry.start - tensor.offset
    return strided(raw, dataclasses.replace(geometry, start=start), tensor.source.dtype)


class _Stream:
    """The threads and their shared state. `_changed` guards everything below it."""

    def __init__(
        self,
        plans: Sequence[_Plan],
        budget: int,
        workspaces: Sequence[Workspace],
        on_bytes: Callable[[int], None] | None,
        hold: Callable[[Callable[[], bool]], None] | None,
    ) -> None:
        self._plans, self._budget, self._on_bytes, self._hold = plans, budget, on_bytes, hold
        self._x64 = uses_x64()  # a thread-local setting, which threads do not inherit
        self._workspaces = workspaces
        self._under_way: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # oldest first
        self._starting = threading.Lock()  # held while waiting for free budget: jobs start in order
        self._arena = Arena()  # used while `_starting` is held
        self._job: _Job | None = None
        self._jobs = self._make_jobs()
        self._report = threading.Lock()
        # The lock is entered directly: a Ctrl-C within `Condition.__enter__`, which is Python code, would leave it
        # locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight = self._turn = 0
        self._on_its_way = 0  # bytes of buffers that transfers read
        self._held: dict[_Plan, int] = {}  # reservations that last until their array is yielded
        self._spare: list[np.ndarray] = []  # buffers to be reused, oldest first
        self._stopped = False
        self._error: CheckpointError | None = None

    def arrays(self, ranges: Sequence[tuple[ByteReader, np.ndarray]], ahead: int) -> Generator[tuple[str, jax.Array]]:
        """Yields (path, array); the ranges of remote sources are prefetched, at most `ahead` bytes at a time."""
        if not self._plans:
            return
        with reading_ahead(ranges, ahead) as fetching:
            yield from self._arrays(fetching.close)

    def _arrays(self, stop_fetching: Callable[[], None]) -> Iterator[tuple[str, jax.Array]]:
        threads, waiter = list[threading.Thread](), None
        try:
            with uninterrupted():  # every thread that was started is waited for below
                if not all(plan.boxes.on_host for plan in self._plans):
                    waiter = start_thread(self._wait, "stream-wait")
                threads += [start_thread(self._work, "stream", workspace) for workspace in self._workspaces]
            for plan in self._plans:
                with self._lock:
                    if plan.item.turn > self._turn:
                        self._turn = plan.item.turn
                        self._changed.notify_all()
                    self._changed.wait_for(lambda plan=plan: self._error is not None or plan.complete)
                    if self._error is not None:
                        raise self._error
                    array = plan.take()
                    self._in_flight -= self._held.pop(plan, 0)
                    self._changed.notify_all()
                yield plan.item.path, array
                del array  # only the consumer holds it: it may donate or drop it before the next one
        finally:
            with self._lock:
                self._stopped = True
                self._changed.notify_all()
            stop_fetching()
            try:
                for thread in threads:
                    thread.join()
            finally:
                self._under_way.put(None)
            if waiter is not None:
                waiter.join()  # for running transfers: afterwards nothing reads this memory
            for plan in self._plans:  # for plans that were begun and not completed
                plan.tensor.source.release()

    def _make_jobs(self) -> Iterator[_Job]:
        """Divides plans into jobs; each reserves what it needs, and at most the budget."""
        for found in _groups(self._plans, self._budget // 4):
            yield from [found] if isinstance(found, _Job) else self._jobs_of(found)

    def _jobs_of(self, plan: _Plan) -> Iterator[_Job]:
        """The jobs of a single plan."""
        itemsize = plan.item.dtype.itemsize
        sizes = {key: size * itemsize for key, size in zip(plan.boxes.devices, plan.boxes.sizes, strict=True)}
        # What a thread needs beyond its workspace is reserved once, so one thread fills all parts of the job.
        unit = plan.scratch_nbytes(self._workspaces[0].limit)
        total, serial = sum(sizes.values()) + unit, unit > 0
        if plan.boxes.on_host:
            # The arrays' own memory: if it exceeds the budget, it only prevents reading ahead.
            yield _Job([plan], min(total, self._budget), list(sizes), serial)
            return
        together = total <= self._budget // 4 or prefers_one_pass(plan.tensor, plan.boxes.boxes)
        for keys in [list(sizes)] if together else [[key] for key in sizes]:
            nbytes = sum(sizes[key] for key in keys) + unit
            if nbytes <= self._budget:
                yield _Job([plan], nbytes, keys, serial)
                continue
            threads = 1 if serial else len(self._workspaces)  # each holds a chunk
            size = max(min((self._budget - unit) // threads, CHUNK), itemsize)
            yield _Job([plan], min(unit + threads * size, self._budget), keys, serial, size)

    # In the threads

    def _work(self, workspace: Workspace) -> None:
        with jax.enable_x64(self._x64):
            while (task := self._next()) is not None:
                job, part = task
                try:
                    complete = self._run(job, part, workspace)
                    del task, part  # they hold its buffers, which may be released once transfers have started
                    if complete:
                        self._deliver(job)
                except BaseException as error:  # any end of this thread: the others and the caller wait for it
                    self._fail(job, error)
                    return
                del job  # keep no buffer alive while waiting

    def _next(self) -> tuple[_Job, Part] | None:
        """The next part to fill, of the current job or a new one; None if nothing is left or the stream stops."""
        with self._starting:
            while True:
                if self._stopped:
                    return None
                if self._job is not None and self._job.parts:
                    return self._job, self._job.parts.pop(0)
                self._job = None
                job = next(self._jobs, None)
                if job is None or not self._reserve(job):
                    return None
                try:
                    self._start(job)
                except Exception as error:
                    self._fail(job, error)
                    return None
                self._job = job

    def _reserve(self, job: _Job) -> bool:
        turn = job.plans[0].item.turn

        def available() -> bool:
            return turn <= self._turn + 1 and self._in_flight + job.nbytes <= self._budget

        with self._lock:
            self._changed.wait_for(lambda: self._stopped or available())
            if self._stopped:
                return False
            self._in_flight += job.nbytes
            spare = 0
            for index in range(len(self._spare) - 1, -1, -1):
                spare += self._spare[index].nbytes
                if spare + self._in_flight > self._budget:
                    del self._spare[: index + 1]
                    break
            return True

    def _start(self, job: _Job) -> None:
        plan = job.plans[0]
        if job.group:
            placed = sum(plan.small[1] for plan in job.plans if plan.small)
            buffers = self._buffers([(placed,)], np.dtype(np.uint8), job.on_host)
            nbytes = sum(sum(plan.boxes.sizes) * plan.item.dtype.itemsize for plan in job.plans)
            # The buffer is owned by the arrays in the end.
            job.parts = [Part(nbytes, lambda workspace: _fill_group(job, buffers.pop(), workspace))]
        elif job.chunk_nbytes:
            job.parts = _chunk_parts(job)
        else:
            boxes = [box_of(key) for key in job.boxes]
            job.outs = self._buffers([box_shape(box) for box in boxes], plan.item.dtype, job.on_host)
            job.parts = fill_parts(plan.tensor, boxes, job.outs)
        # A tensor without elements has no parts, but is delivered as well.
        if job.serial or not job.parts:
            parts = job.parts

            def run(workspace: Workspace) -> None:
                for part in parts:
                    if self._stopped:
                        return
                    part.run(workspace)

            job.parts = [Part(sum(part.nbytes for part in parts), run)]
        job.unfinished = len(job.parts)

    def _buffers(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any], on_host: bool) -> list[np.ndarray]:
        if on_host:
            return self._arena.several(shapes, dtype)  # arrays of one load have the same lifetime
        return [self._buffer(shape, dtype) for shape in shapes]

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            for index, spare in enumerate(self._spare):
                if spare.nbytes == nbytes:
                    return self._spare.pop(index).view(dtype).reshape(shape)
        return empty_aligned(shape, dtype)

    def _run(self, job: _Job, part: Part, workspace: Workspace) -> bool:
        """Fills a part of a job; returns True if it was the last one."""
        part.run(workspace)
        if self._on_bytes is not None and not self._stopped:
            with self._report:
                self._on_bytes(part.nbytes)
        if self._hold is not None:
            self._hold(lambda: self._stopped)
        with self._lock:
            job.unfinished -= 1
            return not job.unfinished

    def _deliver(self, job: _Job) -> None:
        """Delivers filled buffers; shards that came in chunks and the arrays of groups exist already."""
        plan = job.plans[0]
        if job.on_host:
            if not job.group:
                job.arrays = [plan.boxes.array(job.outs, plan.item.dtype)]
            self._finish(job)
            return
        if job.outs:
            # Half of the budget stays available for reading, so that devices and files are busy at the same time.
            nbytes, most = sum(out.nbytes for out in job.outs), self._budget // 2
            with self._lock:
                self._changed.wait_for(
                    lambda: self._stopped or not self._on_its_way or self._on_its_way + nbytes <= most
                )
                self._on_its_way += nbytes
            if self._stopped:
                return
            pairs = zip(job.boxes, job.outs, strict=True)
            job.shards = {key: [jax.device_put(out, place) for place in plan.places(key)] for key, out in pairs}
        self._under_way.put(job)

    def _wait(self) -> None:
        """Waits for transfers, in the order in which they were started."""
        while (job := self._under_way.get()) is not None:
            try:
                self._finish(job)
            except Exception as error:
                self._fail(job, error)
            del job  # keep no buffer alive while waiting

    def _finish(self, job: _Job) -> None:
        """Waits until the results of a job's buffers are ready, and releases its bytes."""
        plan = job.plans[0]
        if not job.on_host:  # on the host the buffers are the arrays, and the call would take time
            jax.block_until_ready((job.arrays, list(job.shards.values())))
        with self._lock:
            self._in_flight -= job.nbytes
            for each, array in zip(job.plans, job.arrays, strict=False):
                each.array = array
                if job.on_host:
                    self._held[each] = each.small[1] if job.group and each.small else job.nbytes
                    self._in_flight += self._held[each]
            if job.shards:
                plan.shards.update(job.shards)
                self._on_its_way -= sum(out.nbytes for out in job.outs)
                if not plan.boxes.keeps:
                    self._spare += [out.reshape(-1).view(np.uint8) for out in job.outs]
            job.outs, job.arrays, job.shards = [], [], {}
            if not job.group and plan.complete:
                plan.tensor.source.release()
            self._changed.notify_all()

    def _fail(self, job: _Job, error: BaseException) -> None:
        plan = job.plans[job.current]
        wrapped = CheckpointError(f"{plan.item.path!r} from {where(plan.tensor)}: {error or type(error).__name__}")
        wrapped.__cause__ = error
        with self._lock:
            self._error = self._error or wrapped
            self._stopped = True
            self._changed.notify_all()


def _chunk_parts(job: _Job) -> list[Part]:
    """Parts that each fill a chunk of the region around some boxes, and copy it to its place on the devices.

    Chunks run along the file's outermost axis, so that the file is still read in one pass. The last part sets the
    shards of the job.
    """
    tensor, dtype = job.plans[0].tensor, job.plans[0].tensor.dtype
    places = {key: job.plans[0].places(key) for key in job.boxes}
    boxes = {key: box_of(key) for key in places}
    region = bounding(list(boxes.values()))
    order = tensor.box(region).file_order()
    extents = box_shape(region)
    chunks = list(slabs(tuple(extents[axis] for axis in order), max(job.chunk_nbytes // tensor.itemsize, 1)))
    lock, left = threading.Lock(), len(chunks)
    # As integers: XLA may move small floats through wider ones, which changes signalling NaNs.
    bits = dtype if dtype.kind in "biuc" else np.dtype(f"u{dtype.itemsize}")
    # In the devices' own memory: arrays cannot be updated in other kinds of memory.
    own = {key: [_own(place) for place in each] for key, each in places.items()}

    def zeros(key: BoxKey, place: SingleDeviceSharding) -> jax.Array:
        return jax.jit(lambda: jax.numpy.zeros(box_shape(boxes[key]), bits), out_shardings=place)()

    buffers = {key: [zeros(key, place) for place in each] for key, each in own.items()}

    def run(workspace: Workspace, part: Box) -> None:
        nonlocal left
        chunk = unshift(tuple(part[order.index(axis)] for axis in range(len(part))), region)
        regions = {key: common for key, box in boxes.items() if (common := intersect(box, chunk)) is not None}
        outs = [empty_aligned(box_shape(common), dtype) for common in regions.values()]
        fill(tensor, list(regions.values()), outs, workspace)
        # All transfers start before any is waited for, and have read their buffers completely when this returns.
        pairs = zip(regions, outs, strict=True)
        put = {key: [jax.device_put(out.view(bits), place) for place in own[key]] for key, out in pairs}
        jax.block_until_ready(put)
        with lock:
            for key, common in regions.items():
                corner = [part.start for part in shift(common, boxes[key])]
                joined = zip(buffers[key], put[key], strict=True)
                buffers[key] = [_updated(buffer, values, corner) for buffer, values in joined]
            jax.block_until_ready([buffers[key] for key in regions])
            left -= 1
            if left:
                return
        # The shards are complete, except for those in another kind of memory.
        for key, targets in places.items():
            done = zip(buffers.pop(key), targets, strict=True)
            job.shards[key] = [jax.device_put(_as(each, dtype), place) for each, place in done]

    return [Part(math.prod(box_shape(chunk)) * tensor.itemsize, functools.partial(run, part=chunk)) for chunk in chunks]


def _own(place: SingleDeviceSharding) -> SingleDeviceSharding:
    (device,) = place.device_set
    return SingleDeviceSharding(device) if in_other_memory(device, place.memory_kind) else place


def _updated(buffer: jax.Array, chunk: jax.Array, corner: Sequence[int]) -> jax.Array:
    long = max(corner, default=0) >= 2**31
    with jax.enable_x64(True) if long else contextlib.nullcontext():
        return _update(buffer, chunk, [(np.int64 if long else np.int32)(start) for start in corner])


@functools.partial(jax.jit, donate_argnums=0)
def _update(buffer: jax.Array, chunk: jax.Array, corner: list[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, chunk, corner)


def _as(buffer: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The same bits as elements of a dtype; elements of less than a byte are in the lower bits of a byte."""
    if buffer.dtype == dtype:
        return buffer
    bits = jax.dtypes.itemsize_bits(dtype)
    # A smaller result cannot reuse the memory of its argument.
    return jax.jit(_recast, donate_argnums=0 if bits >= 8 else (), static_argnums=(1, 2))(buffer, dtype, bits)


def _recast(buffer: jax.Array, dtype: Any, bits: int) -> jax.Array:
    return jax.lax.bitcast_convert_type(buffer if bits >= 8 else buffer.astype(f"uint{bits}"), dtype)

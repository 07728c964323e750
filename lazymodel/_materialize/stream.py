"""The stream: turns (variable, tensor, sharding) triples into sharded `jax.Array`s, within a limit of host memory.

Responsible for which regions of a tensor this process needs, their order, the number of threads, the bytes in flight,
and for handing buffers to devices. `_tensors/tensor_source` reads a region; `_materialize/materialize` or an
integration decides which tensor belongs to which variable.

Life of a job: its bytes are reserved from the budget, its buffers allocated, its parts filled by free threads, its
buffers put on their devices, and the bytes released. Jobs start strictly in order, so the earliest variable can always
finish and there is no deadlock. A job consists of variables that are neighbours in a file, since each job costs about
as much time as reading a megabyte; of regions of one variable that are filled together; or of a shard larger than the
budget, which is sent to its devices in chunks and joined there.

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
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Self, cast

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
    unshift,
)
from lazymodel._tensors.buffers import (
    ARENA,
    Arena,
    Workspace,
    cores,
    empty_aligned,
    start_thread,
    uninterrupted,
)
from lazymodel._tensors.byte_reader import BYTES_FILLED, ByteReader
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import Boxes, boxes_for, in_other_memory, layout
from lazymodel._tensors.stored import misshapen, where
from lazymodel._tensors.tensor_source import Part, fill, fill_parts, prefers_one_pass, read_ranges, required_ranges

CHUNK = 16 << 20  # bytes of a chunk of shards that are larger than the budget: a transfer of a few milliseconds
# Elements of the last two axes: a TPU updates a buffer in place where the compiler knows that a chunk begins at a tile.
# Of 4 bits it has 64 rows; 32 and 16 are enough for 8 and 16 bits.
TILE = (64, 128)
WORKSPACE = 64 << 20  # limit of temporaries of a thread; more makes nothing faster
COMPILES = 512 << 20  # bytes of a load from which on it may compile, which takes some 30 MiB and 0.1 s
_THREADS = 8  # more do not help: from here on memory bandwidth is the limit, not the number of requests
JOB = 16 << 20  # bytes of several variables that are one job: reading them takes some ten times its overhead


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


def read_items(
    items: Sequence[StreamItem],
    limit: int,
    on_bytes: Callable[[int], None] | None = None,
    hold: Callable[[Callable[[], bool]], None] | None = None,
) -> Generator[tuple[str, jax.Array]]:
    """Reads every item's shards onto this process's devices; yields (path, array) in their order.

    Each distinct shard is read once, however many devices hold it. Threads read ahead; they end when the
    iterator is exhausted, closed or fails.

    Args:
        items: The items to fill, in the order of their turns. An item may occur several times.
        limit: Limit in bytes for the host memory in use at any time: values on their way to devices, and every
            temporary. Memory of devices does not count. On CPU devices, which use host memory, the variable that is
            yielded next does not count, but those read ahead do; one that exceeds the limit is read once the caller
            asks for it. Memory through which a device's runtime copies, such as pinned memory, does not count either;
            at most half the limit is in transfer at a time.
        on_bytes: Called with the bytes of shards just filled, from any thread, one call at a time.
        hold: Called afterwards by every thread before it continues, with a function that returns True if the stream has
            been stopped: until it returns, that thread reads nothing more.

    Raises:
        CheckpointError: At once, for a tensor whose shape differs from its variable's or that cannot be read within the
            limit; while iterating, for any failure with one variable, naming it and its file.
    """
    plans = [_plan(item) for item in items]
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
    compiles = sum(plan.nbytes for plan in plans) >= COMPILES
    workspaces = [Workspace(workspace, compiles=compiles) for _ in range(threads)]
    return _Stream(plans, budget, workspaces, on_bytes, hold).arrays(ranges, ahead)


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
    shards: dict[BoxKey, list[jax.Array]] = dataclasses.field(default_factory=dict[BoxKey, list[jax.Array]])
    array: jax.Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer for all its boxes."""
        return self.boxes.layout(self.item.dtype.itemsize).nbytes

    @property
    def complete(self) -> bool:
        return self.array is not None or len(self.shards) == len(self.boxes.devices)

    def fits(self, other: Self) -> bool:
        """Returns True if it can be in one job, and in one buffer, with another plan."""
        own, others = self.boxes, other.boxes
        return self.item.turn == other.item.turn and (own.on_host, own.keeps) == (others.on_host, others.keeps)

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
    return _Plan(item, tensor.astype(item.dtype), boxes)


class _About:
    """A `with` block in which every error is about one variable."""

    __slots__ = ("_plan",)

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise _Failed(self._plan) from error


class _Failed(Exception):
    """An error, its cause, that is about a plan."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan


@dataclasses.dataclass(eq=False)
class _Job:
    """What is filled together, with one reservation."""

    plans: Sequence[_Plan]
    nbytes: int  # its reservation
    keys: Sequence[BoxKey] | None = None  # regions of the only plan; None for all of every plan
    serial: bool = False  # True if its parts must not run at the same time, to save memory
    chunk_nbytes: int = 0  # bytes of the chunks in which it is sent to its devices; 0 if it is sent whole
    buffer: np.ndarray | None = None  # the memory of `outs`, to be reused, unless it is the arrays' own
    used: int = 0  # bytes of the buffer
    outs: list[list[np.ndarray]] = dataclasses.field(default_factory=list[list[np.ndarray]])  # of each plan
    # Parts, each with its plan; those of one list are read with one call if possible.
    parts: list[list[tuple[_Plan, Part]]] = dataclasses.field(default_factory=list[list[tuple[_Plan, Part]]])
    unfinished: int = 0
    # The results of the buffers, possibly not ready yet: the plans' arrays, or shards of a plan.
    arrays: list[jax.Array] = dataclasses.field(default_factory=list[jax.Array])
    shards: dict[BoxKey, list[jax.Array]] = dataclasses.field(default_factory=dict[BoxKey, list[jax.Array]])

    @property
    def on_host(self) -> bool:
        """Returns True if its buffers become the arrays' own memory."""
        return self.plans[0].boxes.on_host

    @property
    def outs_nbytes(self) -> int:
        """Bytes of its buffers."""
        return sum(out.nbytes for outs in self.outs for out in outs)


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
        self._arena = Arena()  # used while `_starting` is held; arrays of one load have the same lifetime
        self._job: _Job | None = None
        self._jobs = iter([*self._make_jobs()])  # at once, so that an error reaches the caller
        self._report = threading.Lock()
        # The lock is entered directly: a Ctrl-C within `Condition.__enter__`, which is Python code, would leave it
        # locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight = self._turn = 0
        self._on_its_way = 0  # bytes of buffers that transfers read
        self._held: dict[_Plan, int] = {}  # reservations that last until their array is yielded
        self._yielded = False  # True while the caller has an array, and has not asked for the next one
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
                    self._turn, self._yielded = max(self._turn, plan.item.turn), False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda plan=plan: self._error is not None or plan.complete)
                    if self._error is not None:
                        raise self._error
                    array = plan.take()
                    self._in_flight -= self._held.pop(plan, 0)
                    self._yielded = True
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
        together: list[_Plan] = []
        # A small model is divided as well: for progress, and to stop before much was read.
        total = sum(plan.nbytes for plan in self._plans)
        nbytes, limit = 0, min(self._budget // 4, JOB, max(total // 64, 256 << 10))

        def job() -> _Job:
            # Buffers that are to be reused are of one size.
            return _Job(together, nbytes if together[0].boxes.on_host or len(together) == 1 else limit)

        for plan in self._plans:
            alone = plan.nbytes > limit or plan.scratch_nbytes(self._workspaces[0].limit) > 0
            if together and (alone or nbytes + plan.nbytes > limit or not plan.fits(together[0])):
                yield job()
                together, nbytes = [], 0
            if alone:
                yield from self._jobs_of(plan)
            else:
                together.append(plan)
                nbytes += plan.nbytes
        if together:
            yield job()

    def _jobs_of(self, plan: _Plan) -> Iterator[_Job]:
        """The jobs of a single plan."""
        itemsize = plan.item.dtype.itemsize
        # What a thread needs beyond its workspace is reserved once, so one thread fills all parts of the job.
        unit = plan.scratch_nbytes(self._workspaces[0].limit)
        total, serial = plan.nbytes + unit, unit > 0
        together = total <= self._budget // 4 or prefers_one_pass(plan.tensor, plan.boxes.boxes)
        if plan.boxes.on_host or (together and total <= self._budget):
            # On the host it is the arrays' own memory: if it exceeds the budget, it only prevents reading ahead.
            yield _Job([plan], min(total, self._budget), None, serial)
            return
        boxes = zip(plan.boxes.devices, plan.boxes.boxes, strict=True)
        sizes = {key: layout([box], itemsize).nbytes for key, box in boxes}
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
                job, parts = task
                try:
                    complete = self._run(job, parts, workspace)
                    del task, parts  # they hold its buffers, which may be released once transfers have started
                    if complete:
                        self._deliver(job)
                except BaseException as error:  # any end of this thread: the others and the caller wait for it
                    self._fail(job, error)
                    return
                del job  # keep no buffer alive while waiting

    def _next(self) -> tuple[_Job, list[tuple[_Plan, Part]]] | None:
        """The next parts to fill, of the current job or a new one; None if nothing is left or the stream stops."""
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
        exceeds = job.on_host and job.plans[0].nbytes > self._budget  # beside the last array it would be a second one

        def available() -> bool:
            asked = turn <= self._turn + 1 and not (exceeds and self._yielded)
            return asked and self._in_flight + job.nbytes <= self._budget

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
        parts = list[tuple[_Plan, Part]]()
        for plan in job.plans:
            with _About(plan):
                if job.chunk_nbytes:
                    found = _chunk_parts(job)
                else:
                    boxes = plan.boxes.boxes if job.keys is None else [box_of(key) for key in job.keys]
                    job.outs.append(self._buffers(job, plan, boxes))
                    found = fill_parts(plan.tensor, boxes, job.outs[-1])
                parts += [(plan, part) for part in found]
        if job.serial or not parts:  # a tensor without elements has no parts, but is delivered as well
            job.parts = [parts]
        else:
            for plan, part in parts:
                if job.parts and part.follows(job.parts[-1][-1][1]):
                    job.parts[-1].append((plan, part))
                else:
                    job.parts.append([(plan, part)])
        job.unfinished = len(job.parts)

    def _buffers(self, job: _Job, plan: _Plan, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Arrays for boxes of a plan. They are parts of one buffer, which takes a tenth of the time, if they are small
        or if the buffer will be reused; the buffer of small ones is freed when the last of them dies.
        """
        dtype = plan.item.dtype
        places, nbytes = plan.boxes.layout(dtype.itemsize) if job.keys is None else layout(boxes, dtype.itemsize)
        if job.on_host and nbytes >= ARENA // 4:
            return [
                self._arena.empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape) for shape, _ in places
            ]
        if job.on_host:
            buffer = self._arena.empty(nbytes)
        else:
            if job.buffer is None:
                job.buffer = self._buffer(job.nbytes if len(job.plans) > 1 else nbytes)
            buffer = job.buffer[job.used : job.used + nbytes]
            job.used += nbytes
        return [np.ndarray(shape, dtype, cast(Any, buffer), start) for shape, start in places]

    def _buffer(self, nbytes: int) -> np.ndarray:
        with self._lock:
            for index, spare in enumerate(self._spare):
                if spare.nbytes == nbytes:
                    return self._spare.pop(index)
        return empty_aligned((nbytes,), np.dtype(np.uint8))

    def _run(self, job: _Job, parts: Sequence[tuple[_Plan, Part]], workspace: Workspace) -> bool:
        """Fills parts of a job; returns True if they were the last ones."""
        started, done = time.perf_counter(), False
        if len(parts) > 1 and not job.serial:
            # If that fails, the error of the first part that cannot be read alone is raised, if there is one.
            with contextlib.suppress(Exception):
                done = read_ranges([part.reads for _, part in parts if part.reads is not None], workspace)
        for plan, part in () if done else parts:
            if self._stopped:
                break
            with _About(plan):
                part.run(workspace)
        nbytes = sum(part.nbytes for _, part in parts)
        BYTES_FILLED.add(nbytes, time.perf_counter() - started)
        if self._on_bytes is not None and not self._stopped:
            with self._report:
                self._on_bytes(nbytes)
        if self._hold is not None:
            self._hold(lambda: self._stopped)
        with self._lock:
            job.unfinished -= 1
            return not job.unfinished

    def _deliver(self, job: _Job) -> None:
        """Delivers filled buffers; shards that came in chunks exist already."""
        if not job.on_host and job.outs:
            # Half of the budget stays available for reading, so that devices and files are busy at the same time.
            nbytes, most = job.outs_nbytes, self._budget // 2
            with self._lock:
                self._changed.wait_for(
                    lambda: self._stopped or not self._on_its_way or self._on_its_way + nbytes <= most
                )
                self._on_its_way += nbytes
            if self._stopped:
                return
        for plan, outs in zip(job.plans, job.outs, strict=False):
            with _About(plan):
                if job.keys is None:
                    job.arrays.append(plan.boxes.array(outs, plan.item.dtype))
                else:
                    pairs = zip(job.keys, outs, strict=True)
                    job.shards = {key: [jax.device_put(out, place) for place in plan.places(key)] for key, out in pairs}
        if job.on_host:
            self._finish(job)
        else:
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
        if not job.on_host:  # on the host the buffers are the arrays, and the call would take time
            for plan, results in zip(job.plans, job.arrays or [job.shards], strict=True):
                with _About(plan):
                    jax.block_until_ready(results)
        with self._lock:
            self._in_flight -= job.nbytes
            for plan, array in zip(job.plans, job.arrays, strict=False):
                plan.array = array
                if job.on_host:
                    self._held[plan] = plan.nbytes if len(job.plans) > 1 else job.nbytes
                    self._in_flight += self._held[plan]
            job.plans[0].shards.update(job.shards)
            self._on_its_way -= 0 if job.on_host else job.outs_nbytes
            if job.buffer is not None and not job.plans[0].boxes.keeps:
                self._spare.append(job.buffer)
            job.buffer, job.outs, job.arrays, job.shards = None, [], [], {}
            for plan in job.plans:
                if plan.complete:
                    plan.tensor.source.release()
            self._changed.notify_all()

    def _fail(self, job: _Job, error: BaseException) -> None:
        plan, cause = (error.plan, error.__cause__) if isinstance(error, _Failed) else (job.plans[0], error)
        wrapped = CheckpointError(f"{plan.item.path!r} from {where(plan.tensor)}: {cause or type(cause).__name__}")
        wrapped.__cause__ = cause
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
    places = {key: job.plans[0].places(key) for key in job.keys or ()}
    boxes = {key: box_of(key) for key in places}
    region = bounding(list(boxes.values()))
    order = tensor.box(region).file_order()
    extents = box_shape(region)
    shape, most = tuple(extents[axis] for axis in order), max(job.chunk_nbytes // tensor.itemsize, 1)
    tiles = _tiles(len(extents))
    chunks = list(_chunks(shape, most, [tiles[axis] for axis in order]))
    lock, left = threading.Lock(), len(chunks)
    # As integers: XLA may move small floats through wider ones, which changes signalling NaNs. Not on TPUs, where it
    # does not, and where a program that changes the type of a buffer holds it twice.
    on_tpus = all(device.platform == "tpu" for each in places.values() for place in each for device in place.device_set)
    bits = dtype if on_tpus or dtype.kind in "biuc" else np.dtype(f"u{dtype.itemsize}")
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


def _tiles(ndim: int) -> list[int]:
    return [*(1,) * (ndim - len(TILE)), *TILE][-ndim:] if ndim else []


def _chunks(shape: tuple[int, ...], most: int, tiles: Sequence[int]) -> Iterator[Box]:
    """Boxes in C order, each of at most `most` elements, that begin at tiles unless a tile is more."""
    if math.prod(tiles) > most:
        tiles = [1] * len(shape)
    if len(shape) < 2 or tiles[0] * math.prod(shape[1:]) <= most:
        yield from slabs(shape, most, *tiles[:1])
        return
    parts = list(_chunks(shape[1:], max(most // tiles[0], 1), tiles[1:]))
    for start in range(0, shape[0], tiles[0]):
        yield from ((slice(start, min(start + tiles[0], shape[0])), *part) for part in parts)


def _own(place: SingleDeviceSharding) -> SingleDeviceSharding:
    (device,) = place.device_set
    return SingleDeviceSharding(device) if in_other_memory(device, place.memory_kind) else place


def _updated(buffer: jax.Array, chunk: jax.Array, corner: Sequence[int]) -> jax.Array:
    long = max(corner, default=0) >= 2**31
    integer = np.int64 if long else np.int32
    units = tuple(1 if start % tile else tile for start, tile in zip(corner, _tiles(len(corner)), strict=True))
    with jax.enable_x64(True) if long else contextlib.nullcontext():
        return update(buffer, chunk, [integer(start // unit) for start, unit in zip(corner, units, strict=True)], units)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def update(buffer: jax.Array, chunk: jax.Array, corner: list[Any], units: tuple[int, ...]) -> jax.Array:
    """The buffer, in place, with a chunk at a corner, whose places are stated in units that the compiler knows."""
    starts = [start * unit for start, unit in zip(corner, units, strict=True)]
    return jax.lax.dynamic_update_slice(buffer, chunk, starts)


def _as(buffer: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The same bits as elements of a dtype; elements of less than a byte are in the lower bits of a byte."""
    if buffer.dtype == dtype:
        return buffer
    bits = jax.dtypes.itemsize_bits(dtype)
    # A smaller result cannot reuse the memory of its argument.
    return jax.jit(_recast, donate_argnums=0 if bits >= 8 else (), static_argnums=(1, 2))(buffer, dtype, bits)


def _recast(buffer: jax.Array, dtype: Any, bits: int) -> jax.Array:
    return jax.lax.bitcast_convert_type(buffer if bits >= 8 else buffer.astype(f"uint{bits}"), dtype)

"""The stream: turns (variable, tensor, sharding) triples into sharded `jax.Array`s, within a limit of host memory.

Responsible for which regions of a tensor this process needs, their order, the number of threads, the bytes in flight,
and for handing buffers to devices. `_tensors/tensor_source` reads a region; `_materialize/materialize` or an
integration decides which tensor belongs to which variable.

Life of a job (regions of one variable that are filled together): its bytes are reserved from the budget, its buffers
allocated, its parts filled by free threads, its buffers put on their devices, and the bytes released. Jobs start
strictly in order, so the earliest variable can always finish and there is no deadlock.

If a device's memory is the host's (the CPU backend), the filled buffer becomes the array's own memory: nothing is
copied, and it is never written again. Other devices get copies: a separate thread waits for transfers while the others
continue to read. Only then are a job's bytes released and its buffers reused.

Shards larger than the available host memory: they are sent to their devices in chunks, and joined there.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._errors import CheckpointError
from lazymodel._materialize.small_tensors import Group, Small, groups, small
from lazymodel._programs.jaxprs import uses_x64
from lazymodel._remote.reader import AHEAD, reading_ahead
from lazymodel._show.text import format_bytes
from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_of, box_shape, intersect, shift, slabs, unshift
from lazymodel._tensors.buffers import Arena, Workspace, cores, default_budget, empty_aligned, start_thread
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import Boxes, boxes_for, in_other_memory, misshapen, where
from lazymodel._tensors.tensor_source import Part, View, fill, fill_parts, prefers_one_pass, required_ranges


def chunk_parts(
    tensor: View,
    places: Mapping[BoxKey, Sequence[SingleDeviceSharding]],
    nbytes: int,
    done: Callable[[dict[BoxKey, list[jax.Array]]], None],
) -> list[Part]:
    """Parts that each fill a chunk of the region around some boxes, and copy it to its place on the devices.

    Chunks, of at most `nbytes`, run along the file's outermost axis, so that the file is still read in one pass.
    The last part calls `done` with the shards of each box.
    """
    boxes = {key: box_of(key) for key in places}
    region = bounding(list(boxes.values()))
    order = tensor.box(region).file_order()
    extents = box_shape(region)
    chunks = list(slabs(tuple(extents[axis] for axis in order), max(nbytes // tensor.itemsize, 1)))
    dtype, lock, left = tensor.dtype, threading.Lock(), len(chunks)
    # As integers: XLA may move small floats through wider ones, which changes signalling NaNs.
    bits = dtype if dtype.kind in "biuc" else np.dtype(f"u{dtype.itemsize}")
    # In the devices' own memory: arrays cannot be updated in other kinds of memory.
    own = {key: [_own(place) for place in where] for key, where in places.items()}
    buffers = {key: [_zeros(box_shape(boxes[key]), bits, place) for place in where] for key, where in own.items()}

    def run(workspace: Workspace, part: Box) -> None:
        nonlocal left
        chunk = unshift(tuple(part[order.index(axis)] for axis in range(len(part))), region)
        regions = {key: common for key, box in boxes.items() if (common := intersect(box, chunk)) is not None}
        outs = [empty_aligned(box_shape(common), dtype) for common in regions.values()]
        fill(tensor, list(regions.values()), outs, workspace)
        # All transfers start before any is waited for, and have read their buffers completely when this returns.
        pairs = zip(regions, outs, strict=True)
        put = {key: [copy_to(place, out.view(bits)) for place in own[key]] for key, out in pairs}
        jax.block_until_ready(put)
        with lock:
            for key, common in regions.items():
                corner = shift(common, boxes[key])
                joined = zip(buffers[key], put[key], strict=True)
                buffers[key] = [_updated(buffer, values, corner) for buffer, values in joined]
            jax.block_until_ready([buffers[key] for key in regions])
            left -= 1
            if left:
                return
        # The shards are complete, except for those in another kind of memory.
        shards = {key: zip(buffers.pop(key), where, strict=True) for key, where in places.items()}
        done({key: [jax.device_put(_as(each, dtype), place) for each, place in pairs] for key, pairs in shards.items()})

    return [Part(math.prod(box_shape(chunk)) * tensor.itemsize, functools.partial(run, part=chunk)) for chunk in chunks]


def copy_to(place: SingleDeviceSharding, values: np.ndarray) -> jax.Array:
    """A copy on a device other than the host; when it is ready and `keeps` is False, `values` may be overwritten."""
    return jax.device_put(values, place)


def _own(place: SingleDeviceSharding) -> SingleDeviceSharding:
    (device,) = place.device_set
    return SingleDeviceSharding(device) if in_other_memory(device, place.memory_kind) else place


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: SingleDeviceSharding) -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=sharding)()


def _updated(buffer: jax.Array, chunk: jax.Array, corner: Box) -> jax.Array:
    long = any(part.start >= 2**31 for part in corner)
    with jax.enable_x64(True) if long else contextlib.nullcontext():
        return _update(buffer, chunk, [(np.int64 if long else np.int32)(part.start) for part in corner])


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


CHUNK = 16 << 20  # bytes of a chunk of shards that are larger than the budget: a transfer of a few milliseconds
WORKSPACE = 64 << 20  # limit of temporaries of a thread; more makes nothing faster
_THREADS = 8  # more do not help: from here on memory bandwidth is the limit, not the number of requests


@dataclasses.dataclass(frozen=True)
class StreamItem:
    """One variable to fill."""

    path: str  # for messages
    tensor: LazyTensor | np.ndarray  # the source of its values
    shape: tuple[int, ...]  # the global shape; must equal the tensor's
    dtype: np.dtype[Any]  # values are cast as by `ndarray.astype`
    sharding: Sharding


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

    Raises:
        CheckpointError: At once, for a tensor whose shape differs from its variable's or that cannot be read within the
            limit; while iterating, for any failure with one variable, naming it and its file.
    """
    plans = [_plan(item) for item in in_file_order(items)]
    limit = default_budget() if max_host_memory is None else max_host_memory
    threads = max(2, min(_THREADS, cores()))  # two on one core as well: one reads while the other waits for a disk
    ranges = [each for plan in plans for each in required_ranges(plan.tensor, plan.boxes.boxes)]
    workspace, ahead, budget = _divided(limit, threads, remote=bool(ranges))
    for plan in plans:
        if plan.least_nbytes(workspace) > budget:
            chunks = " (its chunks are that large)" if plan.min_scratch_nbytes(workspace) else ""
            raise CheckpointError(
                f"{plan.item.path!r} from {where(plan.tensor)}: reading any of it takes "
                f"{format_bytes(plan.least_nbytes(workspace))} at once{chunks}, "
                f"and max_host_memory={format_bytes(limit)} leaves {format_bytes(budget)}. Give at least "
                f"{_least_limit(plans, threads, remote=bool(ranges))} bytes."
            )
    return _Stream(plans, budget, [Workspace(workspace) for _ in range(threads)], on_bytes, hold).arrays(ranges, ahead)


def _divided(limit: int, threads: int, *, remote: bool) -> tuple[int, int, int]:
    """Divides a limit in bytes: the workspace of each thread, bytes to prefetch, and the budget left for all jobs."""
    ahead = min(AHEAD, limit // 4) if remote else 0
    workspace = min(WORKSPACE, limit // (4 * threads))
    return workspace, ahead, limit - ahead - threads * workspace


def _least_limit(plans: Sequence[_Plan], threads: int, *, remote: bool) -> int:
    """The smallest limit in bytes within which all plans can be read."""

    def enough(limit: int) -> bool:
        workspace, _, budget = _divided(limit, threads, remote=remote)
        return all(plan.least_nbytes(workspace) <= budget for plan in plans)

    # At least half of a limit remains as budget, so twice the need is enough, plus rounding.
    return bisect.bisect_left(range(2 * max(plan.least_nbytes(0) for plan in plans) + 4), True, key=enough)


@dataclasses.dataclass(eq=False)
class _Plan:
    """An item with its regions; `shards` fills up as they arrive, or `array` is set at once."""

    item: StreamItem
    tensor: LazyTensor
    boxes: Boxes
    small: Small | None  # set if it can share a job with its neighbours
    shards: dict[BoxKey, list[jax.Array]] = dataclasses.field(default_factory=dict[BoxKey, list[jax.Array]])
    array: jax.Array | None = None

    @property
    def complete(self) -> bool:
        return self.array is not None or len(self.shards) == len(self.boxes.devices)

    def places(self, key: BoxKey) -> list[SingleDeviceSharding]:
        """The shardings of the shards of a region."""
        kind = self.item.sharding.memory_kind
        return [SingleDeviceSharding(device, memory_kind=kind) for device in self.boxes.devices[key]]

    def min_scratch_nbytes(self, workspace: int) -> int:
        """Bytes that a thread needs beyond its workspace."""
        unit = self.tensor.source.min_scratch_nbytes
        return unit if unit > workspace else 0

    def least_nbytes(self, workspace: int) -> int:
        """Bytes for filling one element, and for the element itself."""
        return self.min_scratch_nbytes(workspace) + self.item.dtype.itemsize

    def take(self) -> jax.Array:
        """The finished array; keeps no reference to it."""
        item, array, self.array = self.item, self.array, None
        if array is None:
            shards = [shard for key in self.boxes.devices for shard in self.shards[key]]
            self.shards = {}
            array = jax.make_array_from_single_device_arrays(item.shape, item.sharding, shards, dtype=item.dtype)
        return array


@dataclasses.dataclass(eq=False)
class _Job:
    """Small plans, or regions of one plan, that are filled together, with one reservation."""

    plans: Sequence[_Plan]
    nbytes: int  # its reservation
    boxes: Sequence[BoxKey] = ()
    chunk_nbytes: int = 0  # bytes of the chunks in which it is sent to its devices; 0 if it is sent whole
    one_by_one: bool = False  # True if its parts must not run at the same time, to save memory
    group: Group | None = None  # the group of small plans
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
    return _Plan(item, tensor, boxes, small(tensor, boxes))


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
        self._workspaces, self._workspace = workspaces, min(workspace.limit for workspace in workspaces)
        self._under_way: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # oldest first
        self._starting = threading.Lock()  # held while waiting for free budget: jobs start in order
        self._arena = Arena()  # used while `_starting` is held
        self._job: _Job | None = None
        self._jobs = iter(self._make_jobs())
        self._report = threading.Lock()
        # The lock is entered directly: a Ctrl-C within `Condition.__enter__`, which is Python code, would leave it
        # locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight = 0
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
            if not all(plan.boxes.on_host for plan in self._plans):
                waiter = start_thread(self._wait, "stream-wait")
            for workspace in self._workspaces:
                threads.append(start_thread(self._work, "stream", workspace))
            for plan in self._plans:
                with self._lock:
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
        for numbers, group in groups([plan.small for plan in self._plans], self._budget // 4):
            plans = self._plans[numbers.start : numbers.stop]
            if group is None:
                yield from self._jobs_of(plans[0])
            else:
                yield _Job(plans, group.nbytes, group=group)

    def _jobs_of(self, plan: _Plan) -> Iterator[_Job]:
        """The jobs of a single plan."""
        itemsize = plan.item.dtype.itemsize
        sizes = {key: size * itemsize for key, size in zip(plan.boxes.devices, plan.boxes.sizes, strict=True)}
        total = sum(sizes.values())
        unit = plan.min_scratch_nbytes(self._workspace)
        everyone = unit * len(self._workspaces)
        if plan.boxes.on_host:
            # The arrays' own memory: if it exceeds the budget, it only prevents reading ahead.
            temporaries = everyone if everyone <= self._budget else unit
            nbytes = min(total + temporaries, self._budget)
            yield _Job([plan], nbytes, list(sizes), one_by_one=temporaries < everyone)
            return
        tiled = prefers_one_pass(plan.tensor, plan.boxes.boxes)
        together = tiled or total + everyone <= self._budget // 4
        for keys in [list(sizes)] if together else [[key] for key in sizes]:
            nbytes = sum(sizes[key] for key in keys)
            if nbytes + unit <= self._budget:
                serial = nbytes + everyone > self._budget
                yield _Job([plan], nbytes + (unit if serial else everyone), keys, one_by_one=serial)
                continue
            # Each thread holds a chunk and the temporaries for filling it.
            threads = len(self._workspaces)
            serial = threads * (unit + itemsize) > self._budget // 2
            size = (self._budget - unit) if serial else (self._budget - everyone) // threads
            size = max(min(size, CHUNK), itemsize)
            reserve = min(unit + size if serial else threads * (unit + size), self._budget)
            yield _Job([plan], reserve, keys, size, one_by_one=serial)

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
        with self._lock:
            self._changed.wait_for(lambda: self._stopped or self._in_flight + job.nbytes <= self._budget)
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
        plan, group = job.plans[0], job.group
        if group is not None:
            buffers = self._buffers([(group.placed_nbytes,)], np.dtype(np.uint8), job.on_host)

            def fill_group(workspace: Workspace) -> None:
                job.arrays = group.arrays(buffers.pop(), workspace)  # now owned by the arrays

            job.parts = [Part(group.values_nbytes, fill_group)]
        elif job.chunk_nbytes:
            places = {key: plan.places(key) for key in job.boxes}
            job.parts = chunk_parts(plan.tensor, places, job.chunk_nbytes, job.shards.update)
        else:
            boxes = [box_of(key) for key in job.boxes]
            job.outs = self._buffers([box_shape(box) for box in boxes], plan.item.dtype, job.on_host)
            job.parts = fill_parts(plan.tensor, boxes, job.outs)
        if job.one_by_one and len(job.parts) > 1:
            parts = job.parts

            def run(workspace: Workspace) -> None:
                for part in parts:
                    if self._stopped:
                        return
                    part.run(workspace)

            job.parts = [Part(sum(part.nbytes for part in parts), run)]
        # A tensor without elements has no parts, but is delivered as well.
        job.parts = job.parts or [Part(0, lambda workspace: None)]
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
            if job.group is None:
                job.arrays = [plan.boxes.array(job.outs, plan.item.dtype)]
            self._finish(job)
            return
        if job.outs and not self._may_start(sum(out.nbytes for out in job.outs)):
            return
        if job.outs:
            pairs = zip(job.boxes, job.outs, strict=True)
            job.shards = {key: [copy_to(place, out) for place in plan.places(key)] for key, out in pairs}
        self._under_way.put(job)

    def _may_start(self, nbytes: int) -> bool:
        """Waits until transfers of `nbytes` bytes may start; returns False if the stream stops.

        Half of the budget stays available for reading, so that devices and files are busy at the same time.
        """
        most = self._budget // 2
        with self._lock:
            self._changed.wait_for(lambda: self._stopped or not self._on_its_way or self._on_its_way + nbytes <= most)
            self._on_its_way += nbytes
            return not self._stopped

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
        plan, group = job.plans[0], job.group
        if not job.on_host:  # on the host the buffers are the arrays, and the call would take time
            jax.block_until_ready((job.arrays, list(job.shards.values())))
        kept = [job.nbytes] if group is None else [member.placed_nbytes for member in group.members]
        with self._lock:
            self._in_flight -= job.nbytes
            for number, array in enumerate(job.arrays):
                job.plans[number].array = array
                if job.on_host:
                    self._held[job.plans[number]] = kept[number]
                    self._in_flight += kept[number]
            if job.shards:
                plan.shards.update(job.shards)
                self._on_its_way -= sum(out.nbytes for out in job.outs)
                if not plan.boxes.keeps:
                    self._spare += [out.reshape(-1).view(np.uint8) for out in job.outs]
            job.outs, job.arrays, job.shards = [], [], {}
            if group is None and plan.complete:
                plan.tensor.source.release()
            self._changed.notify_all()

    def _fail(self, job: _Job, error: BaseException) -> None:
        plan = job.plans[0 if job.group is None else job.group.current]
        wrapped = CheckpointError(f"{plan.item.path!r} from {where(plan.tensor)}: {error or type(error).__name__}")
        wrapped.__cause__ = error
        with self._lock:
            self._error = self._error or wrapped
            self._stopped = True
            self._changed.notify_all()

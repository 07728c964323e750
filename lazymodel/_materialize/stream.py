"""The stream: (variable, tensor, sharding) triples in, sharded `jax.Array`s out, under a ceiling of host memory.

Responsible for which boxes of a tensor this process needs, in which order they are read, by how many threads, how
much may be in flight, and for handing buffers to devices. How a box is read is in `_tensors/fill`; which tensor
belongs to which variable is decided by `_materialize/materialize` or an integration.

Life of a job (the boxes of one variable that are filled together): its bytes are reserved from the budget, its
buffers allocated, its parts filled by whichever threads are free, its buffers put on their devices, and the bytes
given back. Jobs start strictly in order, so the earliest variable can always finish and nothing waits in a circle.

Where a device's memory is the host's (the CPU backend), the buffer that was filled becomes the array's own memory:
nothing is copied, and it is never written again. Other devices get copies: a thread of its own waits for transfers,
while the others go on reading, and only then are a job's bytes given back and its buffers used again.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._errors import CheckpointError
from lazymodel._materialize.bands import band_parts, copy_to
from lazymodel._materialize.small_tensors import Group, Small, groups, small
from lazymodel._programs.jaxprs import uses_x64
from lazymodel._remote.source import AHEAD, reading_ahead
from lazymodel._show.text import format_bytes
from lazymodel._tensors.boxes import BoxKey, box_of, box_shape
from lazymodel._tensors.buffers import Arena, Workspace, cores, default_budget, empty_aligned
from lazymodel._tensors.fill import fill_parts, prefers_one_pass
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.leaves import Part
from lazymodel._tensors.shards import Boxes, boxes_for
from lazymodel._tensors.source import Source
from lazymodel._tensors.stored import misshapen, where
from lazymodel._tensors.wanted import wanted

BAND = 16 << 20  # bytes of a piece of shards that are larger than the budget: a transfer of a few milliseconds
WORKSPACE = 64 << 20  # bytes of temporaries of a thread, at most; more makes nothing faster
_THREADS = 8  # more do not help: memory bandwidth, not the number of requests, is the limit from here on


@dataclasses.dataclass(frozen=True)
class StreamItem:
    """One variable to fill."""

    path: str  # for messages
    tensor: LazyTensor | np.ndarray  # where its values come from
    shape: tuple[int, ...]  # the global shape, which must be the tensor's
    dtype: np.dtype[Any]  # values are cast as `ndarray.astype` casts
    sharding: Sharding


def in_file_order(items: Iterable[StreamItem]) -> list[StreamItem]:
    """The order in which they are read and yielded."""
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

    Each distinct shard is read once, however many devices hold it. Reading runs ahead in threads, which end when the
    iterator is exhausted, closed or fails.

    Args:
        items: What to fill, in any order.
        max_host_memory: Ceiling in bytes for the host memory in use at any time: values on their way to devices,
            and every temporary. None is 4 GiB, or an eighth of the memory that is available if that is less. The
            memory of the devices themselves is no part of it, which on CPU devices is host memory too: there the
            variable that is next to be yielded does not count, those read ahead do. Nor is memory through which a
            device's runtime copies, such as pinned memory; at most half the ceiling is on its way at a time.
        on_bytes: Called with the bytes of shards just filled, from any thread, one call at a time.
        hold: Called after that by every thread before it goes on, with a function that says whether the stream has been
            stopped: as long as it takes to return, nothing more is read by that thread.

    Raises:
        CheckpointError: At once, for a tensor whose shape is not its variable's or that cannot be read within the
            ceiling; while iterating, for anything that goes wrong with one variable, naming it and its file.
    """
    plans = [_plan(item) for item in in_file_order(items)]
    ceiling = default_budget() if max_host_memory is None else max_host_memory
    threads = max(2, min(_THREADS, cores()))  # two on one core as well: one reads while the other waits for a disk
    wants = [want for plan in plans for want in wanted(plan.tensor, plan.boxes.boxes)]
    workspace, ahead, budget = _divided(ceiling, threads, remote=bool(wants))
    for plan in plans:
        if plan.least_nbytes(workspace) > budget:
            chunks = " (its chunks are that large)" if plan.unit_nbytes(workspace) else ""
            raise CheckpointError(
                f"{plan.item.path!r} from {where(plan.tensor)}: reading any of it takes "
                f"{format_bytes(plan.least_nbytes(workspace))} at once{chunks}, "
                f"and max_host_memory={format_bytes(ceiling)} leaves {format_bytes(budget)}. Give at least "
                f"{_least_ceiling(plans, threads, remote=bool(wants))} bytes."
            )
    return _Stream(plans, budget, [Workspace(workspace) for _ in range(threads)], on_bytes, hold).arrays(wants, ahead)


def _divided(ceiling: int, threads: int, *, remote: bool) -> tuple[int, int, int]:
    """Of a ceiling in bytes: what each thread has as its workspace, what may be fetched ahead, what is left for all."""
    ahead = min(AHEAD, ceiling // 4) if remote else 0
    workspace = min(WORKSPACE, ceiling // (4 * threads))
    return workspace, ahead, ceiling - ahead - threads * workspace


def _least_ceiling(plans: Sequence[_Plan], threads: int, *, remote: bool) -> int:
    """The smallest ceiling in bytes under which all of them can be read."""

    def enough(ceiling: int) -> bool:
        workspace, _, budget = _divided(ceiling, threads, remote=remote)
        return all(plan.least_nbytes(workspace) <= budget for plan in plans)

    # Half of a ceiling or more is left of it, so twice the need is enough; a rounding more.
    return bisect.bisect_left(range(2 * max(plan.least_nbytes(0) for plan in plans) + 4), True, key=enough)


@dataclasses.dataclass(eq=False)
class _Plan:
    """An item with its boxes; `shards` fills up as they arrive, or `array` at once."""

    item: StreamItem
    tensor: LazyTensor
    boxes: Boxes
    small: Small | None  # how it can share a job with its neighbours
    shards: dict[BoxKey, list[jax.Array]] = dataclasses.field(default_factory=dict[BoxKey, list[jax.Array]])
    array: jax.Array | None = None

    @property
    def complete(self) -> bool:
        return self.array is not None or len(self.shards) == len(self.boxes.devices)

    def places(self, key: BoxKey) -> list[SingleDeviceSharding]:
        """Where the shards of a box go."""
        kind = self.item.sharding.memory_kind
        return [SingleDeviceSharding(device, memory_kind=kind) for device in self.boxes.devices[key]]

    def unit_nbytes(self, workspace: int) -> int:
        """Bytes that a thread needs beyond its workspace."""
        unit = self.tensor.leaf.unit_nbytes
        return unit if unit > workspace else 0

    def least_nbytes(self, workspace: int) -> int:
        """Bytes for filling one element of it, and an element to put it in."""
        return self.unit_nbytes(workspace) + self.item.dtype.itemsize

    def take(self) -> jax.Array:
        """The finished array, which is the caller's alone."""
        item, array, self.array = self.item, self.array, None
        if array is None:
            shards = [shard for key in self.boxes.devices for shard in self.shards[key]]
            self.shards = {}
            array = jax.make_array_from_single_device_arrays(item.shape, item.sharding, shards, dtype=item.dtype)
        return array


@dataclasses.dataclass(eq=False)
class _Job:
    """Small plans, or boxes of one plan, that are filled together, out of one reservation."""

    plans: Sequence[_Plan]
    nbytes: int  # what it reserves
    boxes: Sequence[BoxKey] = ()
    band: int = 0  # bytes of the pieces in which it goes to its devices; 0 if it goes whole
    one_by_one: bool = False  # whether its parts must not run at the same time, for want of memory
    group: Group | None = None  # of the small plans
    outs: list[np.ndarray] = dataclasses.field(default_factory=list[np.ndarray])
    parts: list[Part] = dataclasses.field(default_factory=list[Part])
    unfinished: int = 0
    # What was made of the buffers, and is perhaps not there yet: the plans' arrays, or shards of a plan.
    arrays: list[jax.Array] = dataclasses.field(default_factory=list[jax.Array])
    shards: dict[BoxKey, list[jax.Array]] = dataclasses.field(default_factory=dict[BoxKey, list[jax.Array]])

    @property
    def on_host(self) -> bool:
        """Whether all buffers become the arrays' own memory."""
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
    """The threads and what they share. `_changed` guards everything below it."""

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
        self._threads = [
            threading.Thread(target=self._work, args=(workspace,), name=f"lazymodel-stream-{index}", daemon=True)
            for index, workspace in enumerate(workspaces)
        ]
        self._workspace = min(workspace.limit for workspace in workspaces)
        self._waiter = threading.Thread(target=self._wait, name="lazymodel-stream-wait", daemon=True)
        self._under_way: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # oldest first
        self._starting = threading.Lock()  # held while waiting for room: jobs start in order
        self._arena = Arena()  # used while `_starting` is held
        self._job: _Job | None = None
        self._jobs = iter(self._make_jobs())
        self._report = threading.Lock()
        # Entered itself: a Ctrl-C within `Condition.__enter__`, which is Python's, would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight = 0
        self._on_its_way = 0  # bytes of buffers that transfers read
        self._held: dict[_Plan, int] = {}  # reservations that last until their array is yielded
        self._spare: list[np.ndarray] = []  # buffers to be used again, oldest first
        self._stopped = False
        self._error: CheckpointError | None = None

    def arrays(self, wants: Sequence[tuple[Source, np.ndarray]], ahead: int) -> Generator[tuple[str, jax.Array]]:
        """Yields them; what is wanted of remote sources is fetched in at most `ahead` bytes before it is read."""
        if not self._plans:
            return
        with reading_ahead(wants, ahead) as fetching:
            yield from self._arrays(fetching.close)

    def _arrays(self, stop_fetching: Callable[[], None]) -> Iterator[tuple[str, jax.Array]]:
        try:
            if not all(plan.boxes.on_host for plan in self._plans):
                self._waiter.start()
            for thread in self._threads:
                thread.start()
            for plan in self._plans:
                with self._lock:
                    self._changed.wait_for(lambda plan=plan: self._error is not None or plan.complete)
                    if self._error is not None:
                        raise self._error
                    array = plan.take()
                    self._in_flight -= self._held.pop(plan, 0)
                    self._changed.notify_all()
                yield plan.item.path, array
                del array  # the consumer's alone: it may donate or drop it while the next one is awaited
        finally:
            with self._lock:
                self._stopped = True
                self._changed.notify_all()
            stop_fetching()
            try:
                for thread in self._threads:
                    if thread.ident is not None:
                        thread.join()
            finally:
                self._under_way.put(None)
            if self._waiter.ident is not None:
                self._waiter.join()  # for what is still under way: afterwards nothing reads this memory
            for plan in self._plans:  # those that were begun, where not all are complete
                plan.tensor.leaf.release()

    def _make_jobs(self) -> Iterator[_Job]:
        """Divides plans into what is filled together; each job reserves what it needs, and at most the budget."""
        for numbers, group in groups([plan.small for plan in self._plans], self._budget // 4):
            plans = self._plans[numbers.start : numbers.stop]
            if group is None:
                yield from self._jobs_of(plans[0])
            else:
                yield _Job(plans, group.nbytes, group=group)

    def _jobs_of(self, plan: _Plan) -> Iterator[_Job]:
        """The jobs of one plan by itself."""
        itemsize = plan.item.dtype.itemsize
        sizes = {key: size * itemsize for key, size in zip(plan.boxes.devices, plan.boxes.sizes, strict=True)}
        total = sum(sizes.values())
        unit = plan.unit_nbytes(self._workspace)
        everyone = unit * len(self._threads)
        if plan.boxes.on_host:
            # The arrays' own memory: what exceeds the budget only keeps others from being read ahead.
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
            # Threads that each hold a piece and what filling it takes.
            threads = len(self._threads)
            serial = threads * (unit + itemsize) > self._budget // 2
            band = (self._budget - unit) if serial else (self._budget - everyone) // threads
            band = max(min(band, BAND), itemsize)
            reserve = min(unit + band if serial else threads * (unit + band), self._budget)
            yield _Job([plan], reserve, keys, band, one_by_one=serial)

    # In the threads

    def _work(self, workspace: Workspace) -> None:
        with jax.enable_x64(self._x64):
            while (task := self._next()) is not None:
                job, part = task
                try:
                    complete = self._run(job, part, workspace)
                    del task, part  # they hold its buffers, which may be given up once they are under way
                    if complete:
                        self._deliver(job)
                except BaseException as error:  # whatever ends this thread: the others and the caller wait for it
                    self._fail(job, error)
                    return
                del job  # keep no buffer alive while waiting

    def _next(self) -> tuple[_Job, Part] | None:
        """The next part to fill, of the current job or a new one; None when there is nothing left or all stops."""
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
                job.arrays = group.arrays(buffers.pop(), workspace)  # the arrays' own from now on

            job.parts = [Part(group.values_nbytes, fill_group)]
        elif job.band:
            places = {key: plan.places(key) for key in job.boxes}
            job.parts = band_parts(plan.tensor, places, job.band, job.shards.update)
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
        # A tensor without elements has no parts, but is delivered all the same.
        job.parts = job.parts or [Part(0, lambda workspace: None)]
        job.unfinished = len(job.parts)

    def _buffers(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any], on_host: bool) -> list[np.ndarray]:
        if on_host:
            return self._arena.several(shapes, dtype)  # arrays of one load live equally long
        return [self._buffer(shape, dtype) for shape in shapes]

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            for index, spare in enumerate(self._spare):
                if spare.nbytes == nbytes:
                    return self._spare.pop(index).view(dtype).reshape(shape)
        return empty_aligned(shape, dtype)

    def _run(self, job: _Job, part: Part, workspace: Workspace) -> bool:
        """Fills a part of a job; whether it was the last one."""
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
        """Hands over what was filled; shards that came in bands and the arrays of groups are made already."""
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
        """Whether transfers of so many bytes may start, once there is room; not where everything stops.

        Half of the budget stays for what is being read, so that devices and files are busy at the same time.
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
        """Waits until what was made of a job's buffers is there, and gives back its bytes."""
        plan, group = job.plans[0], job.group
        if not job.on_host:  # else the buffers are the arrays, complete as they are, and asking takes its time
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
                plan.tensor.leaf.release()
            self._changed.notify_all()

    def _fail(self, job: _Job, error: BaseException) -> None:
        plan = job.plans[0 if job.group is None else job.group.current]
        wrapped = CheckpointError(f"{plan.item.path!r} from {where(plan.tensor)}: {error or type(error).__name__}")
        wrapped.__cause__ = error
        with self._lock:
            self._error = self._error or wrapped
            self._stopped = True
            self._changed.notify_all()

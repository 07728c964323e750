"""The stream: (variable, tensor, sharding) triples in, sharded `jax.Array`s out, under a ceiling of host memory.

Responsible for which boxes of a tensor this process needs, in which order they are read, by how many threads, how
much may be in flight, and for handing buffers to devices. How a box is read is in `_lazy_tensor`; which tensor
belongs to which variable is decided by `_materialize` or an integration.

Life of a job (the boxes of one variable that are filled together): its bytes are reserved from the budget, its
buffers allocated, its parts filled by whichever threads are free, its buffers put on their devices, and the bytes
given back. Jobs start strictly in order, so the earliest variable can always finish and nothing waits in a circle.
A buffer that was handed to a device is never written again: the CPU backend keeps it as the array's own memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._errors import CheckpointError
from lazymodel._file_source import STAGING, Arena, empty_aligned, slabs
from lazymodel._lazy_tensor import Box, LazyTensor, Part, box_shape, fill_parts, lazy, prefers_one_pass

_jax = cast(Any, jax)  # parts of JAX's own annotations are incomplete

DEFAULT_BUDGET = 4 << 30  # bytes; enough to keep any disk busy, whatever the model's size
PIECE = 64 << 20  # bytes of a piece of a shard that is larger than the budget
_THREADS = 4  # more do not help: memory bandwidth, not the number of requests, is the limit from here on


@dataclasses.dataclass(frozen=True)
class StreamItem:
    """One variable to fill.

    Attributes:
        path: The variable's path, for messages.
        tensor: Where its values come from.
        shape: Its global shape, which must be the tensor's.
        dtype: Its dtype; values are cast as `ndarray.astype` casts.
        sharding: Where its shards go.
    """

    path: str
    tensor: LazyTensor | np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding


def stream(
    items: Sequence[StreamItem],
    *,
    max_host_memory: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[tuple[str, jax.Array]]:
    """Reads every item's shards onto this process's devices; yields (path, array) in file order.

    Each distinct shard is read once, however many devices hold it. Reading runs ahead in threads, which end when the
    iterator is exhausted, closed or fails.

    Args:
        items: What to fill. Their order does not matter.
        max_host_memory: Ceiling in bytes for values on their way to devices; None is 4 GiB, or an eighth of the
            memory that is available if that is less. Each thread needs up to 4 MiB of staging, which is taken out of
            it as far as there is room. On CPU devices a finished array is not on its way.
        on_bytes: Called with the number of bytes of shards just filled, from any thread, one call at a time. Over a
            whole stream they add up to the bytes of all distinct shards of this process.

    Raises:
        CheckpointError: At once, for a tensor whose shape is not its variable's; while iterating, for anything that
            goes wrong with one variable, naming it and its file.
    """
    plans = [_plan(item) for item in items]
    plans.sort(key=lambda plan: (plan.tensor.file, plan.tensor.offset))
    budget = _default_budget() if max_host_memory is None else max_host_memory
    threads = max(1, min(_THREADS, _cores(), budget // (4 * STAGING)))
    budget = max(budget - threads * STAGING, budget // 2, 1)
    return _Stream(plans, budget, threads, on_bytes).arrays()


@dataclasses.dataclass(eq=False)
class _Plan:
    """An item with its boxes; `arrays` fills up as its shards arrive."""

    item: StreamItem
    tensor: LazyTensor
    boxes: dict[tuple[tuple[int, int], ...], list[Any]]  # (start, stop) of each dimension → devices
    arrays: dict[Any, jax.Array] = dataclasses.field(default_factory=dict[Any, jax.Array])

    @property
    def on_cpu(self) -> bool:
        return all(device.platform == "cpu" for devices in self.boxes.values() for device in devices)

    @property
    def pending(self) -> int:
        return sum(len(devices) for devices in self.boxes.values()) - len(self.arrays)

    def result(self) -> jax.Array:
        shards = [self.arrays[device] for devices in self.boxes.values() for device in devices]
        return jax.make_array_from_single_device_arrays(
            self.item.shape, self.item.sharding, shards, dtype=self.item.dtype
        )


@dataclasses.dataclass(eq=False)
class _Job:
    """Boxes of one plan that are filled together, out of one reservation."""

    plan: _Plan
    boxes: list[tuple[tuple[int, int], ...]]
    nbytes: int  # what it reserves
    in_pieces: bool = False  # one box, larger than the budget
    held: bool = False  # its reservation is given back only when the array is delivered
    outs: list[np.ndarray] = dataclasses.field(default_factory=list[np.ndarray])
    parts: list[Part] = dataclasses.field(default_factory=list[Part])
    unfinished: int = 0


def _plan(item: StreamItem) -> _Plan:
    tensor = lazy(item.tensor, item.path)
    if tuple(tensor.shape) != tuple(item.shape):
        raise CheckpointError(
            f"{item.path!r}: expected shape {tuple(item.shape)}, found {tuple(tensor.shape)} in {_where(tensor)}; "
            "is this the checkpoint of another configuration?"
        )
    if jax.dtypes.canonicalize_dtype(item.dtype) != item.dtype:
        raise CheckpointError(
            f"{item.path!r}: JAX would store {item.dtype.name} as "
            f"{jax.dtypes.canonicalize_dtype(item.dtype).name}; enable 64-bit types (jax_enable_x64) or cast"
        )
    boxes: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in cast(Any, item.sharding).addressable_devices_indices_map(tuple(item.shape)).items():
        ranges = index or ()
        key = tuple(part.indices(extent)[:2] for part, extent in zip(ranges, item.shape, strict=True))
        boxes.setdefault(key, []).append(device)
    return _Plan(item, tensor.astype(item.dtype), boxes)


class _Stream:
    """The threads and what they share. `_changed` guards everything below it."""

    def __init__(
        self, plans: Sequence[_Plan], budget: int, threads: int, on_bytes: Callable[[int], None] | None
    ) -> None:
        self._plans = plans
        self._budget = budget
        self._on_bytes = on_bytes
        self._x64 = bool(cast(Any, jax.config).jax_enable_x64)  # a thread-local setting, which threads do not inherit
        self._threads = [
            threading.Thread(target=self._work, name=f"lazymodel-stream-{index}", daemon=True)
            for index in range(threads)
        ]
        self._starting = threading.Lock()  # held while waiting for room: jobs start in order
        self._arena = Arena()  # used while `_starting` is held
        self._job: _Job | None = None
        self._jobs = iter(self._make_jobs())
        self._report = threading.Lock()
        self._changed = threading.Condition()
        self._in_flight = 0
        self._held: dict[_Plan, int] = {}
        self._stopped = False
        self._error: CheckpointError | None = None

    def arrays(self) -> Iterator[tuple[str, jax.Array]]:
        if not self._plans:
            return
        for thread in self._threads:
            thread.start()
        try:
            for plan in self._plans:
                with self._changed:
                    self._changed.wait_for(lambda plan=plan: self._error is not None or not plan.pending)
                    if self._error is not None:
                        raise self._error
                    array = plan.result()
                    plan.arrays = {}
                    self._in_flight -= self._held.pop(plan, 0)
                    self._changed.notify_all()
                yield plan.item.path, array
                del array  # the consumer's alone: it may donate or drop it while the next one is awaited
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def _make_jobs(self) -> Iterator[_Job]:
        for plan in self._plans:
            sizes = {key: _nbytes(key, plan.item.dtype) for key in plan.boxes}
            total = sum(sizes.values())
            boxes = [_box(key) for key in sizes]
            held = plan.on_cpu and total <= self._budget
            together = total <= self._budget // 4 or (total <= self._budget and prefers_one_pass(plan.tensor, boxes))
            if together or (len(sizes) == 1 and total <= self._budget):
                yield _Job(plan, list(sizes), total, held=held)
                continue
            for key, nbytes in sizes.items():
                if nbytes <= self._budget:
                    yield _Job(plan, [key], nbytes, held=held)
                else:
                    yield _Job(plan, [key], min(self._budget, PIECE), in_pieces=True)

    # In the threads

    def _work(self) -> None:
        with jax.enable_x64(self._x64):
            while (task := self._next()) is not None:
                job, part = task
                try:
                    self._run(job, part)
                except Exception as error:
                    self._fail(job, error)
                    return
                del task, job, part  # keep no buffer alive while waiting

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
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._in_flight + job.nbytes <= self._budget)
            if self._stopped:
                return False
            self._in_flight += job.nbytes
            if job.held:
                self._held[job.plan] = self._held.get(job.plan, 0) + job.nbytes
            return True

    def _start(self, job: _Job) -> None:
        dtype = job.plan.item.dtype
        if job.in_pieces:
            job.parts = [Part(_nbytes(job.boxes[0], dtype), lambda: self._put_in_pieces(job))]
        else:
            boxes = [_box(key) for key in job.boxes]
            # On CPU a buffer becomes the array's own memory, and arrays of one load live equally long.
            empty = self._arena.empty if job.plan.on_cpu else empty_aligned
            job.outs = [empty(box_shape(box), dtype) for box in boxes]
            # A tensor without elements has no parts, but is delivered all the same.
            job.parts = fill_parts(job.plan.tensor, boxes, job.outs) or [Part(0, lambda: None)]
        job.unfinished = len(job.parts)

    def _run(self, job: _Job, part: Part) -> None:
        part.run()
        if self._on_bytes is not None:
            with self._report:
                self._on_bytes(part.nbytes)
        with self._changed:
            job.unfinished -= 1
            if job.unfinished:
                return
        arrays: dict[Any, jax.Array] = {}
        for key, out in zip(job.boxes, job.outs, strict=False):
            for device in job.plan.boxes[key]:
                # On CPU replicas share the buffer. That is safe: XLA never writes into memory it was lent, donated
                # or not (tests/core/test_stream.py holds it to that).
                arrays[device] = _jax.device_put(out, _placement(job.plan, device))
        _jax.block_until_ready(list(arrays.values()))
        job.outs = []
        with self._changed:
            job.plan.arrays.update(arrays)
            if not job.held:
                self._in_flight -= job.nbytes
            self._changed.notify_all()

    def _put_in_pieces(self, job: _Job) -> None:
        """Assembles a shard that exceeds the budget on its devices, piece by piece."""
        plan, key = job.plan, job.boxes[0]
        tensor = plan.tensor[_box(key)]
        order: list[int] = tensor.file_order()
        # As integers: XLA may move small floats through wider ones, which changes signalling NaNs.
        bits = tensor.dtype if tensor.dtype.kind in "biuc" else np.dtype(f"u{tensor.itemsize}")
        buffers = {device: _zeros(tensor.shape, bits, _placement(plan, device)) for device in plan.boxes[key]}
        for piece in slabs(tuple(tensor.shape[axis] for axis in order), max(job.nbytes // tensor.itemsize, 1)):
            if self._stopped:
                return
            box: Box = tuple(piece[order.index(axis)] for axis in range(tensor.ndim))
            values = tensor.read(box).view(bits)
            corner = [np.int64(part.start) if self._x64 else np.int32(part.start) for part in box]
            for device in buffers:
                put = _jax.device_put(values, _placement(plan, device))
                buffers[device] = _update(buffers[device], put, corner)
            _jax.block_until_ready(list(buffers.values()))
        with self._changed:
            for device, buffer in buffers.items():
                plan.arrays[device] = buffer if bits == tensor.dtype else _bitcast(buffer, tensor.dtype)

    def _fail(self, job: _Job, error: Exception) -> None:
        plan = job.plan
        message = f"{plan.item.path!r} from {_where(plan.tensor)}: {error or type(error).__name__}"
        wrapped = CheckpointError(message)
        wrapped.__cause__ = error
        with self._changed:
            self._error = self._error or wrapped
            self._stopped = True
            self._changed.notify_all()


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    return _jax.jit(lambda: _jax.numpy.zeros(shape, dtype), out_shardings=sharding)()


@functools.partial(_jax.jit, donate_argnums=0)
def _update(buffer: jax.Array, piece: jax.Array, corner: list[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, piece, corner)


@functools.partial(_jax.jit, donate_argnums=0, static_argnums=1)
def _bitcast(buffer: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(buffer, dtype)


def _placement(plan: _Plan, device: Any) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=plan.item.sharding.memory_kind)


def _box(key: tuple[tuple[int, int], ...]) -> Box:
    return tuple(slice(start, stop) for start, stop in key)


def _nbytes(key: tuple[tuple[int, int], ...], dtype: np.dtype[Any]) -> int:
    return math.prod(stop - start for start, stop in key) * dtype.itemsize


def _where(tensor: LazyTensor) -> str:
    return f"tensor {tensor.name!r} of {tensor.file}" if tensor.file else "an array in memory"


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _default_budget() -> int:
    """4 GiB, or an eighth of the available memory if that is less and known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return DEFAULT_BUDGET
    return max(min(DEFAULT_BUDGET, available // 8), STAGING)

"""Materializing: initializes variables without weights, streams the others, and returns arrays all at once or in turn.

`_mapping/resolve` decides between loading and initializing, `_programs/programs` computes initial values,
`_materialize/load` chooses how to read, and `_materialize/stream` reads. This module measures, and
`_materialize/report` describes the result.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import operator
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.layout import Format

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.garbage import no_full_collections
from lazymodel._abstract.variable import AbstractVariable, device_shardings, is_narrowed
from lazymodel._devices.collective import CollectiveScope, agreement
from lazymodel._devices.hardware import require_live
from lazymodel._errors import CheckpointError
from lazymodel._extras import extra
from lazymodel._mapping.resolve import LoadPlan, prepare_load
from lazymodel._materialize.background import Background
from lazymodel._materialize.load import Reading, nbytes_here, publish_fingerprint
from lazymodel._materialize.report import report_load, threads_seconds
from lazymodel._programs.jaxprs import is_weak, with_weak_type
from lazymodel._programs.programs import InitRecipe, run_recipes
from lazymodel._remote.url import is_url
from lazymodel._show.progress import Progress, ProgressTo, ReportTo, Timeline, delivery, progress_for
from lazymodel._show.text import listed, parse_budget
from lazymodel._tensors.buffers import available_memory, default_budget
from lazymodel._tensors.byte_reader import BYTES_FILLED, BYTES_READ, REQUESTS
from lazymodel._tensors.casting import SAFE
from lazymodel._tensors.shards import on_host

if TYPE_CHECKING:
    from lazymodel.extras.planning.compile import Compile

_STREAM_BUDGET = 256 << 20  # bytes of the host's memory, within which `stream` reads variables ahead


@no_full_collections()
def materialize(
    model: ModelSpec,
    checkpoint: Any = None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
    max_host_memory: int | str | None = None,
    replicas: str | None = None,
    compile: Compile | Sequence[Compile] | None = None,
    progress: ProgressTo = None,
    report: ReportTo = None,
) -> Any:
    """Creates every variable on its own devices, and builds the user's object from them.

    The user's object gets no array before all are complete. If several processes share the model's devices, all of
    them must call this, and it fails in all or in none.

    Args:
        checkpoint: A checkpoint, open or its path, a live model or other argument of `save`; None: `build_abstract`'s.
            Its numbers replace the object's. What it lacks and began as another variable's array gets that tensor.
        initialize: `"missing"` initializes what is missing in the checkpoint, `"nothing"` raises for it, `"all"`
            ignores the checkpoint. None is `"missing"` with a warning that lists what is missing in a given checkpoint.
        strict: True raises for a checkpoint tensor that the model has no variable for, or whose shape differs from its
            variable's. False leaves such tensors out, with a warning that lists them, and treats a variable whose
            tensor was left out as missing. With `initialize="nothing"` a different shape always raises.
        cast: `"safe"` raises if a tensor's values could lose their meaning in its variable's dtype:
            floats into integers, numbers into bool, complex into real, quantized numbers (integers or eight-bit
            floats with their own scale) into floats. Floats may become other floats, also narrower ones, with infinity
            beyond their range; integers any dtype that has all values of their dtype or, if they are few enough
            (16 MiB), all of their values. `"unsafe"` casts as `ndarray.astype` does. Casts of a mapping with `astype`
            are requested, and never raise.
        max_host_memory: Limit of staging, in bytes or as `"4GiB"`; None is 4 GiB or an eighth of available memory.
        replicas: How several processes get bytes that all of them hold: with `"read"` each of them reads them, with
            `"exchange"` one does, and devices exchange them, which temporarily takes up to 1 GiB more of a device (for
            a single larger variable: twice its bytes). None exchanges only what comes over a network. Variables of less
            than 64 KiB in a file on a disk are read by all.
        compile: Functions that will be called with the model, one `lazymodel.Compile` or several: lowered before any
            data is read, compiled while weights are loaded; the first call, in this context, compiles nothing.
        progress: None for a bar in a terminal or notebook, True to log (`logging`, level INFO) where there is neither,
            False for none; or a callable `f(done_nbytes, total_nbytes)`, or your own `Progress`. Bytes are those of the
            distinct shards of this process, reported from several threads, one call at a time.
        report: True prints a `LoadReport` once the model is complete; a callable, such as `reports.append`, gets it
            instead. After a failure there is no report.

    Raises:
        LazyModelError: The model is sharded over devices that are only planned for.
        CheckpointError: A tensor is missing (with `initialize="nothing"`), unexpected or of another shape (with
            `strict`), could lose its meaning in its variable's dtype (unless `cast="unsafe"`), or cannot be read, in
            this or another process; or the processes' checkpoints have different tensors.
        DoesNotFitError: A compiled program does not fit the devices; raised at the latest after a fifth of the data.
        Exception: Any exception of a callable given as `progress` or `report`, and of tracing.

    Example:
        >>> model = sharded.materialize(lm.open_checkpoint("model.safetensors"), max_host_memory="64MiB")
        >>> model["up"]["kernel"].sharding.spec
        P(None, 'model')
    """
    start, timeline = time.perf_counter(), Timeline.after_imports(model.spent)
    prepared = (model, ()) if compile is None else extra("prepared")(model, compile, timeline)
    (model, compiles), matching = prepared, time.perf_counter()
    require_live(model.variables)
    model.framework.check_placed(model.variables)
    # Before the first program runs: a program that only some processes run could wait forever for the others.
    with agreement(model.variables) as stage:
        deliver, budget = delivery(report), parse_budget(max_host_memory, default_budget())
        load = prepare_load(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
        reading = Reading(load, load.tensors, budget, replicas, kept=True)
        timeline.add("match", matching, time.perf_counter())
        given = model, compiles, device_shardings(model.variables), timeline
        compiling: Background = extra("Compiling")(*given) if compiles else Background()
        publish_fingerprint(stage, load, compiling.names, itertools.chain(reading.details(), compiling.details))
    with agreement(model.variables) as stage, compiling.in_background():
        arrays, costs = _make_arrays(reading, compiling, bar := progress_for(progress), stage, timeline)
    with timeline.span("rebuild"):
        result = model.framework.rebuild({**arrays, **load.numbers})
    report_load(load, costs, timeline, time.perf_counter() - start, bar, deliver)
    return result


def _make_arrays(
    reading: Reading, compiling: Background, bar: Progress, stage: CollectiveScope, timeline: Timeline
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the init programs, the stream, and what is computed from other variables.

    Returns path → finished array, of JAX or (see `_abstract/variable`) of NumPy, and measurements for the report. Init
    programs run first: their temporaries are needed while the devices are still empty. With every unit of work it
    checks if the stage has failed elsewhere or something cannot be compiled, and then raises.
    """
    load, model = reading.load, reading.load.model
    finished, arrays = _finishing(load), dict[str, Any]()
    _make_room(load)
    reported = {item.path: nbytes_here(item, item.sharding) for item in reading.streamed}
    nbytes = {path: nbytes_here(v, load.shardings[path]) for path, v in model.items()}
    left = {path: max(each - reported.get(path, 0), 0) for path, each in nbytes.items()}
    total = sum(left.values()) + sum(reported.values())
    watcher = _Watcher(bar, stage.check, compiling, total)
    bar.start(total, f"{model.name}: materializing {len(model)} variables{_from_where(load)}")
    try:
        values = reading.values(stage, timeline, watcher.advance, watcher.hold)
        for path, array in _initial_arrays(load, [load.recipes], timeline):
            arrays |= (made := finished(path, array))
            if path not in made:
                array.delete()  # the generator still holds it
            del array, made
            watcher.advance(left[path], path)
        counters = BYTES_READ, BYTES_FILLED, REQUESTS
        started, before = time.perf_counter(), [counter.so_far() for counter in counters]
        with contextlib.closing(values):
            for path, array in values:
                arrays |= finished(path, array)
                del array
                watcher.advance(left[path], path)
        if (derived := load.derived) and model.derived is not None:
            for path, array in model.derived.compute(derived, arrays, load.shardings).items():
                arrays[path] = _in_layout(array, model[path])
                watcher.advance(left[path], path)
        # In the model's order, since every process has to run a program for all in the same order.
        arrays.update({path: _as_weak(arrays[path], model[path]) for path in model if path in arrays})
        jax.block_until_ready([arrays[path] for path in load.sources if path in arrays])
        timeline.add("stream", started, time.perf_counter())
        with timeline.span("initialize", "running"):
            jax.block_until_ready(list(arrays.values()))  # the init programs, which ran while files were read
        if compiling.unfinished:
            watcher.advance(0, f"compiling {listed(compiling.unfinished)}")
        compiled = compiling.finished(stage.check)
        now = [counter.so_far() for counter in counters]
        read, filled, counts = ([*map(operator.sub, *each)] for each in zip(now, before, strict=True))
        return arrays, {
            "read_nbytes": read[0],
            **threads_seconds(read[0], read[1], read[2], filled[2], timeline.seconds("stream")),
            "exchanged_nbytes": reading.arriving_nbytes,
            **dict(zip(("fetched_nbytes", "requests", "retries"), counts, strict=True)),
            "compiled": compiled,
            "compile_seconds": compiling.wait_seconds,
        }
    except CheckpointError:
        if watcher.error is not None:
            raise watcher.error from None
        raise
    finally:
        bar.finish()


def stream(
    model: ModelSpec,
    checkpoint: Any = None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
    max_host_memory: int | str | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields (path, array) one variable at a time, initialized or loaded, and keeps none: the model may be larger than
    the machine.

    Each array equals the variable of `materialize`, bit for bit, with the same sharding. On CPU devices at most two
    variables exist at once, the yielded one and the next, plus what is read ahead within the budget. Values that cannot
    be initialized in chunks (factorizations, sums, rows that do not fill vector registers) take about four times their
    bytes.

    The order is the same in every process and run: first what is initialized, then what is loaded, in the order of its
    files. If several processes share the devices, all of them call this and take equally many arrays; each reads its
    own shards.

    Args:
        checkpoint: As for `materialize`.
        initialize: As for `materialize`.
        strict: As for `materialize`.
        cast: As for `materialize`.
        max_host_memory: As for `materialize`, in bytes, or `"1GiB"`; None is 256 MiB.

    Raises:
        LazyModelError: At once: the model is sharded over devices that are only planned for, or a variable is computed
            from the values of others, as some optimizer state is.
        CheckpointError: At once, for errors that `materialize` finds before it reads; while iterating, if a tensor
            cannot be read.

    Example:
        >>> for path, array in sharded.stream():
        ...     print(path, array.shape, array.sharding.spec)
        down/kernel (256, 64) P('model',)
        up/kernel (64, 256) P(None, 'model')
    """
    require_live(model.variables)
    budget = parse_budget(max_host_memory, _STREAM_BUDGET)
    with agreement(model.variables, done="streamed") as stage:
        load = prepare_load(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
        load.refuse_derived()
        publish_fingerprint(stage, load)
        return _in_turn(load, budget)


def _in_turn(load: LoadPlan, budget: int) -> Generator[tuple[str, Any]]:
    """Yields the arrays of `stream`."""
    finished = _finishing(load)
    tensors, whole = load.by_region(load.shardings)
    values = Reading(load, tensors, budget, "read", kept=False).values(CollectiveScope(), Timeline())
    made = _initial_arrays(load, [[recipe] for recipe in whole], Timeline())
    with contextlib.closing(values):
        for path, array in itertools.chain(made, values):
            done = finished(path, array)
            del array  # only the caller holds it, so that it can be freed before the next one
            done = {each: _as_weak(done.pop(each), load.model[each]) for each in [*done] if each in load.model} | done
            jax.block_until_ready(done)
            while done:
                yield (path := next(iter(done))), done.pop(path)


def _initial_arrays(
    load: LoadPlan, groups: Sequence[Sequence[InitRecipe]], timeline: Timeline
) -> Generator[tuple[str, jax.Array]]:
    """Yields the arrays of init programs; those of a group are compiled together."""
    for recipes in groups:
        with timeline.span("initialize", "compiling"):
            computed = run_recipes(recipes, load.shardings, load.model.programs)
        with timeline.span("initialize", "running"):
            yield from computed


def _finishing(load: LoadPlan) -> Callable[[str, Any], dict[str, Any]]:
    """A function from a path and its array to the variables that are made of it: itself, or what a conversion makes."""
    model = load.model
    conversions = {each.variable.path: each for each in model.conversions if each.variable.path in model}

    def finished(path: str, array: Any) -> dict[str, Any]:
        array = _in_layout(array, model[path])
        return {path: array} if path not in conversions else conversions[path].compute(array, load.shardings)

    return finished


class _Watcher:
    """Reports progress from several threads, one call at a time. `error` is an exception of the receiver or of a check,
    which the stream would otherwise treat as its own failure.
    """

    def __init__(self, bar: Progress, check: Callable[[], None], compiling: Background, total_nbytes: int) -> None:
        self._bar, self._check, self._compiling = bar, check, compiling
        self._lock = threading.Lock()
        self._done, self._total = 0, total_nbytes
        self.error: Exception | None = None

    def advance(self, nbytes: int, path: str | None = None) -> None:
        with self._lock, self._noted():
            self._done += nbytes
            self._bar.advance(nbytes, path)
            self._compiling.check()
            self._check()

    def hold(self, stopped: Callable[[], bool]) -> None:
        """Waits in the stream's threads, if nothing should be read before it is known that programs fit."""

        def unless() -> bool:
            self._check()
            return stopped()

        with self._noted():
            self._compiling.hold(self._done / max(self._total, 1), unless)

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error
            raise


def _make_room(load: LoadPlan) -> None:
    """Collects garbage if there may be too little memory without: a Keras model that was deleted is in reference
    cycles, and its arrays are on the devices until then.
    """
    placed = ((load.shardings[path].shard_shape(v.shape), v.dtype.itemsize) for path, v in load.model.items())
    each = sum(math.prod(shape) * itemsize for shape, itemsize in placed)
    devices = {device for sharding in set(load.shardings.values()) for device in sharding.addressable_devices}
    of_host = (available_memory() or sys.maxsize) // max(len(devices), 1)

    def free(device: Any) -> int:
        if on_host(device):
            return of_host
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", sys.maxsize) - stats.get("bytes_in_use", 0)

    if any(each > free(device) for device in devices):
        gc.collect()


def _from_where(load: LoadPlan) -> str:
    """Text for progress: the bucket or server of the weights."""
    files = (getattr(source, "file", "") for source in load.sources.values())
    folders = list(dict.fromkeys(file.rpartition("/")[0] for file in files if is_url(file)))
    return f" from {listed(folders, most=1)}" if folders else ""


def _as_weak(array: Any, variable: AbstractVariable) -> Any:
    """The array, weakly typed if its variable is, in the same buffers."""
    if not variable.weak_type or isinstance(array, np.ndarray) or is_weak(jax.typeof(array)):
        return array
    placed = array.sharding if variable.layout is None else array.format
    with jax.enable_x64(True) if is_narrowed(array.dtype) else contextlib.nullcontext():
        if not array.size:  # shards of what a program returns would have the shape of the whole
            weak = with_weak_type(jax.numpy.zeros(array.shape, array.dtype), True)
            return jax.device_put(weak, placed) if array.is_fully_addressable else array
        return jax.jit(_weakened, donate_argnums=0, out_shardings=placed)(array)


def _weakened(array: jax.Array) -> jax.Array:  # one function, so that JAX caches its programs
    return with_weak_type(array, True)


def _in_layout(array: Any, variable: AbstractVariable) -> Any:
    """The array with its bytes in the variable's order, as far as its devices have such orders."""
    if variable.layout is None or isinstance(array, np.ndarray):
        return array
    return jax.device_put(array, Format(variable.layout, array.sharding), donate=True)

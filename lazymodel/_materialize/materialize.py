"""Materializing: initializes variables without weights, streams the others, and returns arrays all at once or in turn.

`_mapping/match` decides between loading and initializing, `_programs/programs` computes initial values, and
`_materialize/stream` reads tensors. This module measures, and `_materialize/report` describes the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.garbage import no_full_collections
from lazymodel._abstract.variable import AbstractVariable, device_shardings, host_array, is_narrowed, stays_on_host
from lazymodel._compile import Compile, Compiling, prepared
from lazymodel._devices.collective import CollectiveScope, agreement, layout_of
from lazymodel._devices.hardware import require_live
from lazymodel._errors import CheckpointError
from lazymodel._extras import extra
from lazymodel._mapping.match import (
    LoadPlan,
    checkpoint_for,
    initial_values,
    is_chunked,
    read_as,
    refuse_derived,
    resolve_and_warn,
)
from lazymodel._materialize.exchange import exchanged, exchanges, shared, shares
from lazymodel._materialize.report import make_report
from lazymodel._materialize.stream import StreamItem, in_file_order
from lazymodel._materialize.stream import stream as read_stream
from lazymodel._programs.jaxprs import as_keys, is_weak, with_weak_type
from lazymodel._programs.programs import run_recipes
from lazymodel._remote.url import is_url
from lazymodel._show.progress import Progress, ProgressTo, ReportTo, Timeline, delivery, progress_for
from lazymodel._show.text import listed, parse_budget
from lazymodel._tensors.buffers import available_memory, default_budget, parallel
from lazymodel._tensors.byte_reader import BYTES_READ, REQUESTS, ByteReader
from lazymodel._tensors.casting import SAFE
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import DeviceTensor, boxes_for, check_replicas, on_host
from lazymodel._tensors.tensor_source import ArrayTensor, CompositeSource, TensorSource

_SHARED = 8  # the part of `max_host_memory` that may hold the bytes of small variables, which processes share
_STREAM_BUDGET = 256 << 20  # bytes of the host's memory, within which `stream` reads variables ahead
AHEAD = 128 << 20  # bytes of values that are not kept, read in a turn by a process: enough to keep files busy
_READERS = 8  # files that are sampled at a time: the work is waiting for a disk


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
    (model, compiles), matching = prepared(model, compile, timeline), time.perf_counter()
    require_live(model.variables)
    model.framework.check_placed(model.variables)
    # Before the first program runs: a program that only some processes run could wait forever for the others.
    with agreement(model.variables) as stage:
        deliver, checkpoint = delivery(report), checkpoint_for(model, checkpoint)
        read = model.as_read(checkpoint or ())
        choice = resolve_and_warn(read, checkpoint, initialize=initialize, strict=strict, cast=cast)
        load = _Load(model, read, choice, parse_budget(max_host_memory, default_budget()), replicas)
        timeline.add("match", matching, time.perf_counter())
        compiling = Compiling(model, compiles, device_shardings(model.variables), timeline)
        publish_fingerprint(stage, choice, compiling.names, itertools.chain(load.details(), compiling.details))
    with agreement(model.variables) as stage, compiling.in_background():
        bar = progress_for(progress)
        arrays, costs = _make_arrays(load, compiling, bar, stage, timeline)
    with timeline.span("rebuild"):
        result = model.framework.rebuild({**arrays, **choice.numbers})
    if deliver is not None:
        deliver(make_report(read, choice, checkpoint, load.shardings, costs, timeline, time.perf_counter() - start))
    return result


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
        checkpoint, stored = checkpoint_for(model, checkpoint), model
        model = model.as_read(checkpoint or ())
        shardings = device_shardings({**stored.variables, **model.variables})
        choice = resolve_and_warn(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
        refuse_derived(model, choice)
        publish_fingerprint(stage, choice)
        return _converted(model, shardings, _each(model, choice, shardings, budget))


class _Load:
    """What is loaded and initialized, and how: `shares` and `items` are read, those with `exchanges` in parts, `moves`
    copied.
    """

    def __init__(self, model: ModelSpec, read: ModelSpec, choice: LoadPlan, budget: int, replicas: str | None) -> None:
        self.read, self.choice, self.budget = read, choice, budget
        self.shardings = device_shardings({**model.variables, **read.variables})
        tensors = {path: read_as(read[path], source, choice) for path, source in choice.sources.items()}
        items = _items(read, tensors, self.shardings)
        live = [item for item in items if isinstance(cast(LazyTensor, item.tensor).source, DeviceTensor)]
        self.moves = extra("device_moves")(live) if live else []
        moved = {move.path for move, _ in self.moves}
        items = [item for item in items if item.path not in moved]
        check_replicas(replicas)
        several = jax.process_count() > 1
        self.shares = shares(items, replicas, budget // _SHARED) if several else []
        together = {item.path for share in self.shares for item in share.items}
        items = [item for item in items if item.path not in together]
        self.exchanges = exchanges(items, replicas) if several else {}
        parts = {path: exchange.part for path, exchange in self.exchanges.items()}
        self.items = _in_turns([parts.get(item.path, item) for item in in_file_order(items)], read)

    def details(self) -> Iterator[str]:
        """The programs that copy arrays or exchange parts, in order: the same in all processes."""
        yield from (f"copy {move.path} {layout_of(array)}" for move, array in self.moves)
        yield from (f"share {share.nbytes} {[item.path for item in share.items]}" for share in self.shares)
        yield from (f"exchange {path} {exchange.partition}" for path, exchange in self.exchanges.items())


def _make_room(model: ModelSpec, shardings: Mapping[str, Sharding]) -> None:
    """Collects garbage if there may be too little memory without: a Keras model that was deleted is in reference
    cycles, and its arrays are on the devices until then.
    """
    each = sum(math.prod(shardings[path].shard_shape(v.shape)) * v.dtype.itemsize for path, v in model.items())
    devices = {device for sharding in set(shardings.values()) for device in sharding.addressable_devices}
    of_host = (available_memory() or sys.maxsize) // max(len(devices), 1)

    def free(device: Any) -> int:
        if on_host(device):
            return of_host
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", sys.maxsize) - stats.get("bytes_in_use", 0)

    if any(each > free(device) for device in devices):
        gc.collect()


def _make_arrays(
    load: _Load, compiling: Compiling, bar: Progress, stage: CollectiveScope, timeline: Timeline
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the init programs, the stream, and what is computed from other variables.

    Returns path → finished array, of JAX or (see `_abstract/variable`) of NumPy, and measurements for the report. Init
    programs run first: their temporaries are needed while the devices are still empty. With every unit of work it
    checks if the stage has failed elsewhere or something cannot be compiled, and then raises.
    """
    model, choice, shardings = load.read, load.choice, load.shardings
    convert = _converting(model, shardings)
    _make_room(model, shardings)

    def held_nbytes(sharding: Sharding, shape: tuple[int, ...], dtype: Any) -> int:
        """Bytes of all distinct shards that this process's devices hold."""
        return sum(boxes_for(sharding, shape).sizes) * dtype.itemsize

    nbytes = {path: held_nbytes(shardings[path], v.shape, v.dtype) for path, v in model.items()}
    parts = [item for item in load.items if item.path in load.exchanges]
    read = {item.path: held_nbytes(item.sharding, item.shape, item.dtype) for item in parts}
    nbytes |= {path: max(nbytes[path], read[path]) for path in read}
    arrays: dict[str, Any] = {}
    watcher = _Watcher(bar, stage.check, compiling, sum(nbytes.values()))
    bar.start(sum(nbytes.values()), f"{model.name}: materializing {len(model)} variables{_from_where(choice)}")
    try:
        reading: Any = {"on_bytes": watcher.advance, "hold": watcher.hold, "in_order": True}
        # Raises at once if something cannot be read at all.
        arriving = read_stream(load.items, max_host_memory=load.budget, **reading)
        if load.exchanges:
            arriving = exchanged(arriving, load.exchanges, stage, timeline)

        def read_shared(items: Sequence[StreamItem]) -> Generator[tuple[str, jax.Array]]:
            budget = load.budget - load.budget // _SHARED  # the rest has the bytes
            return read_stream(_in_turns(items, model), max_host_memory=budget, **reading)

        together = shared(load.shares, read_shared, stage, timeline)
        with timeline.span("initialize", "compiling"):
            computed = run_recipes(choice.recipes, shardings, model.programs)
        with timeline.span("initialize", "running"):
            for path, array in computed:
                arrays |= (made := convert(path, _in_layout(array, model[path])))
                if path not in made:
                    array.delete()  # `computed` still holds it
                del array, made
                watcher.advance(nbytes[path], path)
        started, bytes_before, requests_before = time.perf_counter(), BYTES_READ.count, REQUESTS.so_far()
        for path, array in extra("copied")(load.moves, stage) if load.moves else ():
            arrays |= convert(path, _in_layout(as_keys(array, model[path].dtype), model[path]))
            watcher.advance(nbytes[path], path)
        with contextlib.closing(together), contextlib.closing(arriving):  # a failure here ends their threads at once
            for path, array in itertools.chain(together, arriving):
                arrays |= convert(path, _in_layout(as_keys(array, model[path].dtype), model[path]))
                del array
                watcher.advance(nbytes[path] - read[path] if path in read else 0, path)
        for path, array in _rest(model, choice, arrays, shardings):
            arrays[path] = array
            watcher.advance(nbytes[path], path)
        # In the model's order, since every process has to run a program for all in the same order.
        arrays.update({path: _as_weak(arrays[path], model[path]) for path in model if path in arrays})
        jax.block_until_ready([arrays[path] for path in choice.sources if path in arrays])
        timeline.add("stream", started, time.perf_counter())
        with timeline.span("initialize", "running"):
            jax.block_until_ready(list(arrays.values()))  # the init programs, which ran while files were read
        if compiling.unfinished:
            watcher.advance(0, f"compiling {listed(compiling.unfinished)}")
        compiled = compiling.finished(stage.check)
        counts = [now - before for now, before in zip(REQUESTS.so_far(), requests_before, strict=True)]
        return arrays, {
            "read_nbytes": BYTES_READ.count - bytes_before,
            "exchanged_nbytes": sum(each.arriving_nbytes() for each in (*load.exchanges.values(), *load.shares)),
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


def _converting(read: ModelSpec, shardings: Mapping[str, Sharding]) -> Callable[[str, Any], dict[str, Any]]:
    """A function from a path and its array to the variables that are made of it: itself, or what a conversion makes."""
    conversions = {each.variable.path: each for each in read.conversions if each.variable.path in read}
    return lambda path, array: {path: array} if path not in conversions else conversions[path].compute(array, shardings)


def _items(model: ModelSpec, tensors: Mapping[str, Any], shardings: Mapping[str, Sharding]) -> list[StreamItem]:
    """Tensors to read, or arrays to copy from memory, onto devices."""
    return [
        # Keys are read as their key data, whose trailing dimension no spec names.
        StreamItem(path, lazy(tensor, path), *model[path].stored, shardings[path])
        for path, tensor in tensors.items()
        if not stays_on_host(model[path])
    ]


def _in_turns(items: Sequence[StreamItem], read: ModelSpec) -> list[StreamItem]:
    """The items, with turns by which few values that are not kept are on devices at once: those of two turns."""
    passing = {each.variable.path for each in read.conversions if each.variable.path in read}
    turn = taken = 0
    found: list[StreamItem] = []
    for item in items:
        if item.path in passing:
            nbytes = sum(boxes_for(item.sharding, item.shape).sizes) * item.dtype.itemsize
            turn, taken = (turn + 1, nbytes) if taken and taken + nbytes > AHEAD else (turn, taken + nbytes)
        found.append(dataclasses.replace(item, turn=turn))
    return found


def _rest(
    model: ModelSpec, choice: LoadPlan, arrays: Mapping[str, Any], shardings: Mapping[str, Sharding]
) -> Iterator[tuple[str, Any]]:
    """Yields variables that stay on the host, and those that depend on the values of others."""
    for path, source in choice.sources.items():
        if stays_on_host(model[path]):
            yield path, host_array(model[path], read_as(model[path], source, choice))
    computed = {path for recipe in choice.recipes for path in recipe.paths}
    derived = [path for path in model if path not in computed and path not in choice.sources]
    if derived and model.derived is not None:
        for path, array in model.derived.compute(derived, arrays, shardings).items():
            yield path, _in_layout(array, model[path])


class _Watcher:
    """Reports progress from several threads, one call at a time. `error` is an exception of the receiver or of a check,
    which the stream would otherwise treat as its own failure.
    """

    def __init__(self, bar: Progress, check: Callable[[], None], compiling: Compiling, total_nbytes: int) -> None:
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


def _from_where(choice: LoadPlan) -> str:
    """Text for progress: the bucket or server of the weights."""
    files = (getattr(source, "file", "") for source in choice.sources.values())
    folders = list(dict.fromkeys(file.rpartition("/")[0] for file in files if is_url(file)))
    return f" from {listed(folders, most=1)}" if folders else ""


def _converted(
    read: ModelSpec, shardings: Mapping[str, Sharding], values: Generator[tuple[str, Any]]
) -> Generator[tuple[str, Any]]:
    convert = _converting(read, shardings)
    with contextlib.closing(values):
        for path, array in values:
            done = convert(path, array)
            del array
            while done:
                yield (path := next(iter(done))), done.pop(path)


def _each(
    model: ModelSpec, choice: LoadPlan, shardings: Mapping[str, Sharding], budget: int
) -> Generator[tuple[str, Any]]:
    tensors = {path: read_as(model[path], source, choice) for path, source in choice.sources.items()}
    for recipe in choice.recipes:
        here = all(on_host(device) for path in recipe.paths for device in shardings[path].device_set)
        if here and is_chunked(recipe):
            tensors = initial_values(model, recipe) | tensors
            continue
        for path, array in run_recipes([recipe], shardings, model.programs):
            done = jax.block_until_ready(_as_weak(_in_layout(array, model[path]), model[path]))
            del array
            yield path, done
            del done
    order = {path: index for index, path in enumerate(model)}
    ordered = {path: tensors[path] for path in sorted(tensors, key=order.__getitem__)}
    items = _in_turns(in_file_order(_items(model, ordered, shardings)), model)
    with contextlib.closing(read_stream(items, max_host_memory=budget, in_order=True)) as arriving:
        for path, array in arriving:
            done = _as_weak(_in_layout(as_keys(array, model[path].dtype), model[path]), model[path])
            del array  # only the caller holds it, so that it can be freed before the next one
            yield path, done
            del done
    for path, tensor in tensors.items():
        if stays_on_host(model[path]):
            yield path, host_array(model[path], tensor)


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


def _in_layout(array: jax.Array, variable: AbstractVariable) -> jax.Array:
    """The array with its bytes in the variable's order, as far as its devices have such orders."""
    if variable.layout is None:
        return array
    return jax.device_put(array, Format(variable.layout, array.sharding), donate=True)


def publish_fingerprint(
    stage: CollectiveScope, choice: LoadPlan, programs: Iterable[str] = (), details: Iterable[str] = ()
) -> None:
    """Publishes what this process initializes (with its keys and seeds) and loads (tensors and their files).

    Args:
        programs: Names of the programs that are compiled meanwhile, for messages.
        details: Further texts that must be equal in all processes, in order; not computed for a single process.
    """
    initialized = [path for recipe in choice.recipes for path in recipe.paths]
    stage.outcome = f"load {len(choice.sources)} variables and initialize {len(initialized)}"
    if initialized:
        drawn = zlib.crc32(b"".join(_content(each) for recipe in choice.recipes for each in recipe.inputs))
        stage.outcome += f" (of keys and seeds {drawn:08x}): {', '.join(initialized)}"
    if jax.process_count() == 1:
        return
    loaded: list[str] = []
    files: dict[ByteReader, None] = {}
    for path, value in sorted(choice.sources.items()):
        parts = [value] if not isinstance(value, LazyTensor) else [*_origins(value.source)]
        files |= dict.fromkeys(part.origin for part in parts if isinstance(part, ByteReader))
        content = b"".join(map(_content, parts)).hex()
        loaded.append(f"{path} {getattr(value, 'dtype', '')} {np.shape(value)} {getattr(value, 'offset', 0)} {content}")
    with parallel(lambda file: file.fingerprint(), files, _READERS, "fingerprint") as contents:
        stage.files = [(file.path, content) for file, content in zip(files, contents, strict=True)]
    stage.outcome += "".join(f", compile {program}" for program in programs)
    stage.details = "\n".join([*loaded, *details])


def _origins(source: TensorSource) -> Iterator[Any]:
    """The files and arrays in memory that a tensor consists of."""
    if isinstance(source, ArrayTensor):
        yield source.array
    elif isinstance(source, CompositeSource):
        for piece in source.pieces:
            yield from _origins(piece.source)
    else:
        yield from source.readers()


def _content(value: object) -> bytes:
    """A hash of an array in memory."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return b""
    return zlib.crc32(cast(Any, np.ascontiguousarray(value).reshape(-1).view(np.uint8))).to_bytes(4)

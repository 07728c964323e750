"""Materializing: initialize what has no weights, stream what has, hand the arrays back.

What is done for each variable is decided in `_mapping/match`, how one is computed is in `_programs/programs`, how a
tensor is read in `_materialize/stream`. What was done is measured here, and described in `_materialize/report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from lazymodel._abstract.host_arrays import host_array
from lazymodel._abstract.placement import device_shardings, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._compile.beside import Compiling
from lazymodel._compile.compile import Compile
from lazymodel._compile.lower import prepared
from lazymodel._devices.agreement import Stage, agreement
from lazymodel._devices.hardware import require_live
from lazymodel._errors import CheckpointError
from lazymodel._mapping.given import flat_checkpoint
from lazymodel._mapping.match import Choice, choose_and_warn
from lazymodel._mapping.values import read_as
from lazymodel._materialize.exchange import Exchange, exchanged, exchanges
from lazymodel._materialize.finish import as_weak, in_layout
from lazymodel._materialize.report import Costs, make_report
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._materialize.tell import tell
from lazymodel._programs.keys import as_keys
from lazymodel._programs.programs import run_recipes
from lazymodel._remote.requests import REQUESTS
from lazymodel._remote.url import is_url
from lazymodel._show.progress import Progress, ProgressTo, ReportTo, delivery, progress_for
from lazymodel._show.text import listed, parse_budget
from lazymodel._show.timeline import Timeline
from lazymodel._tensors.casting import SAFE
from lazymodel._tensors.lazy import lazy
from lazymodel._tensors.shards import boxes_for
from lazymodel._tensors.source import BYTES_READ


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
    """Makes every variable on its own devices, and the user's object from them.

    Nothing is handed to the user's object before every array is complete, so a failure leaves nothing half-written.
    Where several processes share the model's devices, all of them must call this, and it fails in all or in none.

    Args:
        checkpoint: An open checkpoint, or what `save` takes, a live model too; None is what the model was built with.
        initialize: `"missing"` initializes what the checkpoint lacks, `"nothing"` makes that an error, `"all"`
            ignores the checkpoint. None is `"missing"` with a warning that lists what a given checkpoint lacked.
        strict: Whether a checkpoint tensor that the model has no variable for, or that has another shape than its
            variable, is an error. If not, such tensors are left out with a warning that lists them, and a
            variable whose tensor was left out is treated like one that the checkpoint lacks. With
            `initialize="nothing"` another shape is an error all the same.
        cast: `"safe"` makes it an error where a tensor's values could lose what they mean in its variable's dtype:
            floats into integers, numbers into bool, complex into real, quantized numbers (integers or eight-bit
            floats with a scale beside them) into floats. Floats become other floats, narrower ones too, and beyond
            their range infinite; integers anything that has all values of their dtype, and if they are few enough
            (16 MiB) anything that has all their values. `"unsafe"` casts as `ndarray.astype` does. What a mapping
            casts with `astype` was asked for.
        max_host_memory: Ceiling of staging, in bytes or as `"4GiB"`; None is that, or an eighth of available memory.
        replicas: How bytes reach several processes that hold the same: with `"read"` each of them reads them, with
            `"exchange"` one does, and devices exchange them, which takes up to 1 GiB more of a device for a moment
            (a larger variable alone: as much as a device holds of it, twice). None exchanges what comes over a network.
            Variables of less than 64 KiB are read by all.
        compile: What will be called with the model, one `lazymodel.Compile` or several: lowered before a byte is read,
            and compiled while the weights come; the first call, in the same context as this one, compiles nothing.
        progress: True or False for a bar, None for a bar when a person is watching, a callable
            `f(done_nbytes, total_nbytes)` or a `Progress` for your own. Bytes are those of the distinct shards of
            this process, told of from several threads, one call at a time.
        report: True prints a `LoadReport` once the model is complete; a callable, such as `reports.append`, is
            given it instead. A failure reports nothing but its error.

    Raises:
        LazyModelError: The model is sharded over devices that are only planned for.
        CheckpointError: A tensor is missing (with `initialize="nothing"`), unexpected or of another shape (with
            `strict`), would lose what it means in its variable's dtype (unless `cast="unsafe"`), or cannot be read, in
            this or another process; or the processes' checkpoints have other tensors.
        DoesNotFitError: What is compiled does not fit the devices; where it may not, it is known after a fifth of it.
        Exception: Whatever a callable given as `progress` or `report` raises, and what tracing raises.

    Example:
        >>> model = sharded.materialize(lm.open_checkpoint("model.safetensors"), max_host_memory="64MiB")
        >>> model["up"]["kernel"].sharding.spec
        P(None, 'model')
    """
    start, timeline = time.perf_counter(), Timeline.after_imports(model.spent)
    (model, compiles), matching = prepared(model, compile, timeline), time.perf_counter()
    _check_placed(model)
    shardings = device_shardings(model.variables)
    assigned = [variable.sharding for variable in model.values()]
    # Before the first program runs: one that only some processes run can wait forever for the rest.
    with agreement(assigned) as stage:
        deliver = delivery(report)
        checkpoint = flat_checkpoint(checkpoint)
        choice = choose_and_warn(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
        reading = Reading.of(model, choice, shardings, max_host_memory, replicas)
        timeline.add("match", matching, time.perf_counter())
        compiling = Compiling.of(model, compiles, shardings, timeline)
        tell(stage, choice, compiling.names, itertools.chain(reading.details(), compiling.details))
    with agreement(assigned) as stage, compiling.beside():
        told = progress_for(progress)
        arrays, costs = make_arrays(model, choice, shardings, reading, compiling, told, stage, timeline)
    with timeline.span("rebuild"):
        result = model.framework.rebuild(arrays)
    if deliver is not None:
        deliver(make_report(model, choice, checkpoint, shardings, costs, timeline, time.perf_counter() - start))
    return result


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is read, and how."""

    items: Sequence[StreamItem]
    max_host_memory: int | None
    exchanges: Mapping[str, Exchange]  # of those items that are read in parts, by path

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        choice: Choice,
        shardings: Mapping[str, Sharding],
        max_host_memory: int | str | None,
        replicas: str | None,
    ) -> Reading:
        """As the arguments of `materialize` say it."""
        budget = None if max_host_memory is None else parse_budget(max_host_memory)
        items = _items(model, choice, shardings)
        return cls(items, budget, exchanges(items, replicas))

    def details(self) -> Iterator[str]:
        """The programs by which parts are exchanged, in order: the same in all processes."""
        return (f"exchange {path} {exchange.division}" for path, exchange in self.exchanges.items())

    def arrays(self, watcher: _Watcher, stage: Stage, timeline: Timeline) -> Generator[tuple[str, jax.Array]]:
        """The arrays as they are complete; what cannot be read at all is refused at once."""
        parts = [self.exchanges[item.path].part if item.path in self.exchanges else item for item in self.items]
        arriving = stream(parts, max_host_memory=self.max_host_memory, on_bytes=watcher.advance, hold=watcher.hold)
        return exchanged(arriving, self.exchanges, stage, timeline) if self.exchanges else arriving


def make_arrays(
    model: ModelSpec,
    choice: Choice,
    shardings: Mapping[str, Sharding],
    reading: Reading,
    compiling: Compiling,
    progress: Progress,
    stage: Stage,
    timeline: Timeline,
) -> tuple[dict[str, Any], Costs]:
    """Runs the init programs, the stream, and what is computed from other variables, as `choice` says of each.

    Returns path to finished array, of JAX or (see `_abstract/host_arrays`) of NumPy, and what it cost. Init programs
    come first: their temporaries are spent while the devices are still empty. With every piece of work it is asked
    whether the stage has failed elsewhere or something cannot be compiled, which ends it.
    """
    # Of all distinct shards that this process's devices hold.
    nbytes = {path: sum(boxes_for(shardings[path], v.shape).sizes) * v.dtype.itemsize for path, v in model.items()}
    own = {path: exchange.own_nbytes() for path, exchange in reading.exchanges.items()}
    nbytes |= {path: max(nbytes[path], own[path]) for path in own}
    arrays: dict[str, Any] = {}
    watcher = _Watcher(progress, stage.check, compiling, sum(nbytes.values()))
    progress.start(sum(nbytes.values()), f"{model.name}: materializing {len(model)} variables{_from_where(choice)}")
    try:
        arriving = reading.arrays(watcher, stage, timeline)
        with timeline.span("initialize", "compiling"):
            computed = run_recipes(choice.recipes, shardings, model.programs)
        with timeline.span("initialize", "running"):
            for path, array in computed:
                arrays[path] = in_layout(array, model[path])
                watcher.advance(nbytes[path], path)
        started, read, asked = time.perf_counter(), BYTES_READ.count, REQUESTS.so_far()
        with contextlib.closing(arriving):  # what fails here ends its threads at once
            for path, array in arriving:
                arrays[path] = in_layout(as_keys(array, model[path].dtype), model[path])
                watcher.advance(nbytes[path] - own[path] if path in own else 0, path)
        for path, array in _rest(model, choice, arrays, shardings):
            arrays[path] = array
            watcher.advance(nbytes[path], path)
        # In the model's order, since every process has to run a program for all at the same turn.
        arrays.update({path: as_weak(arrays[path], model[path]) for path in model if model[path].weak_type})
        jax.block_until_ready([arrays[item.path] for item in reading.items])
        timeline.add("stream", started, time.perf_counter())
        with timeline.span("initialize", "running"):
            jax.block_until_ready(list(arrays.values()))  # the init programs, which ran on while files were read
        if compiling.unfinished:
            watcher.advance(0, f"compiling {listed(compiling.unfinished)}")
        compiled = compiling.finished(stage.check)
        arrived = sum(max(each.held_nbytes() - own[path], 0) for path, each in reading.exchanges.items())
        fetched, requests, retries = (now - before for now, before in zip(REQUESTS.so_far(), asked, strict=True))
        costs = Costs(BYTES_READ.count - read, arrived, fetched, requests, retries, compiled, compiling.wait_seconds)
        return arrays, costs
    except CheckpointError:
        if watcher.error is not None:
            raise watcher.error from None
        raise
    finally:
        progress.finish()


def _check_placed(model: ModelSpec) -> None:
    require_live(model.variables)
    model.framework.check_placed(model.variables)


def _items(model: ModelSpec, choice: Choice, shardings: Mapping[str, Sharding]) -> list[StreamItem]:
    """What is to be read, or copied from memory, onto devices."""
    return [
        # Keys are read as their key data, whose trailing dimension no spec names.
        StreamItem(path, lazy(read_as(model[path], source, choice), path), *model[path].stored, shardings[path])
        for path, source in choice.sources.items()
        if not stays_on_host(model[path])
    ]


def _rest(
    model: ModelSpec, choice: Choice, arrays: Mapping[str, Any], shardings: Mapping[str, Sharding]
) -> Iterator[tuple[str, Any]]:
    """What stays on the host, and what depends on the values of others."""
    for path, source in choice.sources.items():
        if stays_on_host(model[path]):
            yield path, host_array(model[path], read_as(model[path], source, choice))
    computed = {path for recipe in choice.recipes for path in recipe.paths}
    derived = [path for path in model if path not in computed and path not in choice.sources]
    if derived and model.derived is not None:
        for path, array in model.derived.compute(derived, arrays, shardings).items():
            yield path, in_layout(array, model[path])


class _Watcher:
    """Tells of progress from several threads, one call at a time; `error` is what the receiver or a check raised,
    which the stream would otherwise take for a failure of its own.
    """

    def __init__(self, progress: Progress, check: Callable[[], None], compiling: Compiling, total_nbytes: int) -> None:
        self._progress, self._check, self._compiling = progress, check, compiling
        self._lock = threading.Lock()
        self._done, self._total = 0, total_nbytes
        self.error: Exception | None = None

    def advance(self, nbytes: int, path: str | None = None) -> None:
        with self._lock, self._noted():
            self._done += nbytes
            self._progress.advance(nbytes, path)
            self._compiling.check()
            self._check()

    def hold(self, stopped: Callable[[], bool]) -> None:
        """Waits where nothing should be read before it is known whether programs fit; in the stream's threads."""

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


def _from_where(choice: Choice) -> str:
    """For whom it may concern: the bucket or server that weights come from."""
    files = (getattr(source, "file", "") for source in choice.sources.values())
    folders = list(dict.fromkeys(file.rpartition("/")[0] for file in files if is_url(file)))
    return f" from {listed(folders, most=1)}" if folders else ""

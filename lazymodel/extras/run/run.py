"""Running a function of a model that is never whole: the method `run`.

The function is traced with shapes (`extras/run/flatten`), and cut into stretches (`extras/run/stretches`) small enough
for the devices (`max_device_memory`). All programs are compiled, and the memory of every moment is known, before
anything is read. Then stretch after stretch runs: its variables arrive in this order from a stream
(`_materialize/stream`), which reads those of the next stretch meanwhile, or from init programs; they are freed after
their last use, or until the next one if memory is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import host_array, shard_nbytes, stays_on_host
from lazymodel._devices.collective import CollectiveScope, agreement
from lazymodel._devices.hardware import device_memory, require_live
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._mapping.resolve import LoadPlan, prepare_load
from lazymodel._materialize.load import publish_fingerprint
from lazymodel._materialize.stream import StreamItem, read_items
from lazymodel._programs.jaxprs import Programs, as_keys, as_operand, is_weak, placed, stored_as, with_weak_type
from lazymodel._programs.programs import run_recipes
from lazymodel._show.progress import Progress, ProgressTo, ReportTo, delivery, progress_for, reported
from lazymodel._show.text import format_bytes, grouped_by, parse_budget, parse_bytes
from lazymodel._tensors.buffers import available_memory, default_budget
from lazymodel._tensors.byte_reader import BYTES_READ
from lazymodel._tensors.lazy import lazy
from lazymodel._tensors.shards import on_host
from lazymodel._trace.errors import watched
from lazymodel._trace.function import trace
from lazymodel.extras.run.flatten import Flattened, RunValue, VariablePart
from lazymodel.extras.run.report import ProgramRow, RunReport, WholeRow
from lazymodel.extras.run.stretches import Cutter, Stretch, StretchProgram, program, stretches, variables_of

_LAYERS = 100  # a scan goes through layers if it is over more than this part of the model
_TRIM = 16 << 20  # bytes of results and temporaries after which freed memory is returned: it takes some milliseconds
_WHOLE = frozenset({"while", "cond", "scan", "jit", "pjit", "shard_map"})  # their variables are needed at once


def run(
    model: ModelSpec,
    function: Callable[..., Any],
    /,
    *inputs: Any,
    checkpoint: Any = None,
    max_device_memory: int | str | None = None,
    max_host_memory: int | str | None = None,
    progress: ProgressTo = None,
    report: ReportTo = None,
) -> Any:
    """Returns what `function(abstract.materialize(checkpoint), *inputs)` returns; the model is never whole anywhere.

    The function is traced once, and divided where it needs further variables. Each variable is read or initialized
    shortly before its first use, while the devices compute what comes before, and freed after its last. Layers that
    compute the same are one program, compiled once for any depth. A `lax.scan` over stacked layers runs layer by layer.

    Devices hold the variables of two stretches (of two layers, for example), the values that are live between them, and
    what the function returns. Gradients work; reduce them in the function, to norms for example, so that each is freed
    at once. If several processes share the model's devices, all of them must call this.

    Args:
        function: Takes the object that `materialize` returns, then the inputs, and returns a pytree. It must be
            traceable, like a function for `jax.jit`, and is not run again for other values.
        *inputs: Pytrees. `jax.Array`s are traced; everything else, also NumPy arrays, is passed on unchanged.
        checkpoint: As for `materialize`; variables that it lacks are initialized, with a warning.
        max_device_memory: Limit on each device, in bytes or as `"4GiB"`, of everything that this call puts there. It
            makes stretches smaller. None is the memory of the devices, if they report it; on CPUs stretches are as
            large as layers, and variables that are used again are read again, unless keeping them takes no more memory.
        max_host_memory: As for `materialize`: limit of staging.
        progress: As for `materialize`: bytes on a device of variables that have arrived.
        report: True prints a `RunReport` after the last stretch; a callable gets it instead.

    Raises:
        TraceError: The function needs the value of an array in Python.
        DoesNotFitError: A stretch cannot be small enough for `max_device_memory`, or the results do not fit; raised
            before anything is read.
        LazyModelError: The function uses mutable arrays, or variables on different devices; or a variable is computed
            from the values of others, as some optimizer state is.
        CheckpointError: As for `materialize`.

    Example:
        >>> x = np.ones((8, 64), "float32")
        >>> y = abstract.run(lambda model, x: x @ model["up"]["kernel"] @ model["down"]["kernel"], x)
        >>> y.shape
        (8, 64)
    """
    options = RunOptions(checkpoint, max_device_memory, max_host_memory, progress, report)
    return run_rewritten(model, function, inputs, options, None)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of `run`."""

    checkpoint: Any
    max_device_memory: int | str | None
    max_host_memory: int | str | None
    progress: ProgressTo
    report: ReportTo


# Takes the traced function, the path of each input that is a variable, and its inputs; returns another function of the
# same inputs, traced, and what makes the result of its flat results.
Rewrite: TypeAlias = "Callable[[Any, Sequence[str | None], Sequence[Any]], tuple[Any, Callable[[Sequence[Any]], Any]]]"


def _under_own_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under the model's mesh, if another one is current: the function may name its axes."""

    @functools.wraps(function)
    def wrapped(model: ModelSpec, *args: Any) -> Any:
        shardings = [model.framework.usable_sharding(v.sharding) for v in model.values() if v.sharding is not None]
        meshes = [each.mesh for each in shardings if isinstance(each, NamedSharding)]
        own = meshes[0] if meshes and isinstance(meshes[0], Mesh) else None
        with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(own):
            return function(model, *args)

    return wrapped


@_under_own_mesh
def run_rewritten(
    model: ModelSpec,
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    options: RunOptions,
    rewrite: Rewrite | None,
) -> Any:
    """As `run`, of the function that `rewrite` makes of the traced one."""
    start, limit = time.perf_counter(), None
    if options.max_device_memory is not None:
        limit = parse_bytes(options.max_device_memory, name="max_device_memory", at_least=1)
    budget = parse_budget(options.max_host_memory, default_budget())
    deliver, bar = delivery(options.report), progress_for(options.progress)
    if not callable(function):
        raise LazyModelError(f"run takes a function of the model, then its inputs; got {function!r}")
    require_live(model.variables)
    model.framework.check_placed(model.variables)
    with agreement(model.variables, done="run") as stage:
        load = prepare_load(model, options.checkpoint)
        if load.model is not model:
            raise LazyModelError(
                f"run: the kernels of {model.name} are quantized once they are whole, and run reads them in parts: "
                "run the model before quantize, or materialize it"
            )
        load.refuse_derived()
        publish_fingerprint(stage, load)
        variables = _Variables(load)
        name = getattr(function, "__name__", type(function).__name__)
        unflatten, flat = _traced(model, function, inputs, variables, name, rewrite)
        calls = _fitting(flat, variables, name, limit)
    planned, before = time.perf_counter(), BYTES_READ.count
    with agreement(model.variables, done="run") as stage:
        total = sum(variables.nbytes(value) for call in calls for value in call.fetch)
        with reported(bar, total, f"{model.name}: {name}"):
            result = unflatten(_run(calls, flat, variables, budget, bar, stage))
    if deliver is not None:
        times = {"plan_seconds": planned - start, "seconds": time.perf_counter() - start}
        deliver(_report(calls, flat, variables, limit_nbytes=limit, read_nbytes=BYTES_READ.count - before, **times))
    return result


class _Variables:
    """The sources of the variables, and of parts of them."""

    def __init__(self, load: LoadPlan) -> None:
        self.model, self.initialized = load.model, {*load.initialized}
        usable = load.model.framework.usable_sharding
        self.shardings = {path: usable(sharding) for path, sharding in load.shardings.items()}
        self._tensors, whole = load.by_region(self.shardings)
        self._recipes = {path: recipe.restricted_to([path]) for recipe in whole for path in recipe.paths}
        self.on_host = {p: host_array(v, self._tensors[p]) for p, v in load.model.items() if stays_on_host(v)}
        on_devices = [sharding for path, sharding in self.shardings.items() if path not in self.on_host]
        if len({frozenset(sharding.device_set) for sharding in on_devices}) > 1:
            raise LazyModelError(
                f"run: {load.model.name} has variables on different sets of devices, which no program can take "
                "together. Shard all of them over one mesh"
            )
        mesh = next((each.mesh for each in on_devices if isinstance(each, NamedSharding)), None)
        one = SingleDeviceSharding(jax.local_devices()[0])
        self.default = NamedSharding(mesh, PartitionSpec()) if mesh is not None else [*on_devices, one][0]

    def is_sliceable(self, path: str, dimension: int) -> bool:
        """Returns True if parts of a variable along a dimension can be read alone."""
        sharding = self.shardings[path]
        if path in self._recipes or dimension >= len(self.model[path].shape):
            return False
        if isinstance(sharding, NamedSharding):
            return not [*sharding.spec, *(None for _ in range(dimension + 1))][dimension]
        return isinstance(sharding, SingleDeviceSharding)

    def sharding(self, part: VariablePart) -> Sharding:
        """The sharding of a part."""
        sharding = self.shardings[part.path]
        if isinstance(sharding, NamedSharding) and part.depth:
            spec = PartitionSpec(*sharding.spec[part.depth :])
            return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        return sharding

    def nbytes(self, value: RunValue) -> int:
        """Bytes of a part on a device."""
        return shard_nbytes(value.aval, self.sharding(value.source))

    def is_read(self, value: RunValue) -> bool:
        """Returns True if the stream yields a part, False if an init program makes it."""
        return value.source.path not in self._recipes

    def item(self, value: RunValue, turn: int) -> StreamItem:
        """The item of a stream for a part."""
        part = value.source
        tensor = lazy(self._tensors[part.path], part.path)
        shape, dtype = stored_as(tuple(value.aval.shape), self.model[part.path].dtype)
        return StreamItem(part.path, part.of(tensor), shape, dtype, self.sharding(part), turn)

    def make(self, path: str) -> jax.Array:
        """A variable that an init program makes."""
        ((_, array),) = run_recipes([self._recipes[path]], {path: self.shardings[path]}, self.model.programs)
        return array

    def temp_nbytes(self, path: str) -> int:
        """Bytes of temporaries on a device while a variable is made."""
        recipe = self._recipes.get(path)
        return 0 if recipe is None else self.model.programs.get(recipe, [self.shardings[path]]).temp_nbytes


def _traced(
    model: ModelSpec,
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    variables: _Variables,
    name: str,
    rewrite: Rewrite | None,
) -> tuple[Callable[[Sequence[Any]], Any], Flattened]:
    """A function from flat results to what the user's function returns, and the steps to these."""
    built = model.framework.traceable()

    def of_arrays(arrays: Mapping[str, Any], inputs: tuple[Any, ...]) -> Any:
        with built(arrays) as whole:
            return function(whole, *inputs)

    structs = {
        path: dataclasses.replace(variable, sharding=variables.shardings[path], layout=None).struct
        for path, variable in model.items()
    }
    with watched(function, inputs, {}):
        inputs = jax.tree.map(functools.partial(_on_own_mesh, default=variables.default), inputs)
        found, closed, given = trace(of_arrays, (structs | variables.on_host, inputs), {}, None, name)
    left = iter(sorted(structs.keys() - variables.on_host.keys()))  # in the order in which JAX flattens a dict
    paths = [next(left) if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in given]
    values = [
        RunValue(aval, data=leaf) if path is None else RunValue(aval, part=VariablePart(path))
        for aval, path, leaf in zip(closed.in_avals, paths, given, strict=True)
    ]

    def unflatten(results: Sequence[Any]) -> Any:
        arrays = iter(results)
        return found.unflatten({p: next(arrays) if array is None else array for p, array in found.arrays.items()})

    restore: Callable[[Sequence[Any]], Any] = unflatten
    if rewrite is not None:
        closed, restore = rewrite(closed, paths, given)
    return restore, Flattened(closed, values, variables.is_sliceable, model.nbytes // _LAYERS)


@dataclasses.dataclass
class _Call:
    """One call of a program, with bytes on a device."""

    stretch: Stretch
    key: Any  # equal for calls of one program
    program: StretchProgram
    needed: list[RunValue]  # the variables that it takes
    taken: int  # bytes of these
    live: int  # of all else that exists before it
    busy: int  # of its results and temporaries
    kept: int = 0  # of variables for later calls
    fetch: list[RunValue] = dataclasses.field(default_factory=list[RunValue])  # variables that arrive for it
    drop: list[RunValue] = dataclasses.field(default_factory=list[RunValue])  # values that end with it
    turn: int = 0  # of the stream
    ahead: int = 0  # bytes that arrive meanwhile for the next call

    @property
    def total(self) -> int:
        """Bytes while it runs, without what arrives for the next call."""
        return self.taken + self.live + self.busy + self.kept


def _fitting(flat: Flattened, variables: _Variables, name: str, limit: int | None) -> list[_Call]:
    """The calls of the largest stretches that fit."""
    devices = [each for each in variables.default.device_set if each.process_index == jax.process_index()]
    if limit is None:
        limit = min((size for size in map(device_memory, devices) if size is not None), default=None)
    cutter = Cutter(flat, variables.nbytes)
    first = calls = _calls(flat, variables, cutter, None)
    room, nbytes = available_memory() if limit is None else limit, _results_nbytes(calls, flat, variables)
    if room is not None and nbytes > room:
        raise DoesNotFitError(
            f"run: {name} returns {format_bytes(nbytes)} on a device, and there are {format_bytes(room)}. Nothing was "
            "read. Return less: reduce it in the function, to norms for example",
            needed_nbytes=nbytes,
            limit_nbytes=room,
        )
    least, size = _most(calls), max(call.taken for call in calls) // 2
    while limit is not None and _most(calls) > limit:
        if 2 * size < cutter.largest or not size:
            call = max(first, key=lambda call: call.total)
            raise DoesNotFitError(
                f"run: {name} needs at least {format_bytes(least)} on a device, and it can have {format_bytes(limit)} "
                f"(whole layers need {format_bytes(call.taken)} for variables, {format_bytes(call.live)} for values "
                f"that are live, {format_bytes(call.busy)} in a program). Nothing was read. Give more, use more "
                "devices, or smaller inputs",
                needed_nbytes=least,
                limit_nbytes=limit,
            )
        calls = _calls(flat, variables, cutter, size)
        least, size = min(least, _most(calls)), size // 2
    _plan_arrivals(calls, flat, variables, limit)
    return calls


def _most(calls: Sequence[_Call]) -> int:
    return max(call.total for call in calls)


def _results_nbytes(calls: Sequence[_Call], flat: Flattened, variables: _Variables) -> int:
    """Bytes of what the function computes, or returns of the model."""
    placed_at = {v: s for call in calls for v, s in zip(call.stretch.outputs, call.program.shardings, strict=True)}
    computed = sum(shard_nbytes(each.aval, placed_at[each]) for each in flat.values if each in placed_at)
    return computed + sum(variables.nbytes(each) for each in flat.values if each.part is not None)


def _calls(flat: Flattened, variables: _Variables, cutter: Cutter, size: int | None) -> list[_Call]:
    """The calls for stretches with variables of a size, or for whole layers."""
    found = stretches(cutter, size)
    last = {value: number for number, stretch in enumerate(found) for value in (*stretch.inputs, *stretch.outputs)}
    last |= dict.fromkeys(flat.values, len(found))
    alive: dict[RunValue, Sharding] = {}  # inputs and constants to the end, values until their last use
    own: Programs[StretchProgram] = Programs(len(found))
    calls: list[_Call] = []
    for number, stretch in enumerate(found):
        for value in stretch.inputs:
            if value.part is None and value not in alive:
                value.data = _given(value, variables.default)
                alive[value] = value.data.sharding
        alive = {value: alive[value] for value in alive if value.step is None or last[value] >= number}
        live = sum(shard_nbytes(value.aval, sharding) for value, sharding in alive.items())
        inputs = [variables.sharding(value.source) if value.part else alive[value] for value in stretch.inputs]
        key, compiled = program(stretch, inputs, variables.default, own)
        made = dict(zip(stretch.outputs, compiled.shardings, strict=True))
        alive |= made
        needed = [value for value in stretch.inputs if value.part is not None]
        if number == len(found) - 1:
            needed = list(dict.fromkeys([*needed, *(value for value in flat.values if value.part is not None)]))
        busy = compiled.temp_nbytes + sum(shard_nbytes(value.aval, sharding) for value, sharding in made.items())
        busy = max([busy, *(variables.temp_nbytes(value.source.path) for value in needed)])
        calls.append(_Call(stretch, key, compiled, needed, sum(map(variables.nbytes, needed)), live, busy))
    return calls


def _elsewhere(aval: Any, where: str) -> LazyModelError:
    fix = "Put it on the model's, with jax.device_put, or pass a NumPy array"
    return LazyModelError(f"run: an input or captured array ({aval}) is {where} than the model. {fix}")


def _on_own_mesh(value: Any, default: Sharding) -> Any:
    """An input, which JAX traces beside the model only if it is of the current mesh, the model's."""
    current, own = (
        jax.sharding.get_abstract_mesh(),
        jax.typeof(value).sharding.mesh if isinstance(value, jax.Array) else None,
    )
    if current.empty or own is None or own.empty or own == current:
        return value
    if value.sharding.device_set != default.device_set or not value.is_fully_replicated:
        raise _elsewhere(jax.typeof(value), "on other devices or another mesh")
    return jax.device_put(value, default)


def _given(value: RunValue, default: Sharding) -> jax.Array:
    """An input or constant on the devices of the model."""
    data = value.data
    if not isinstance(data, jax.Array):
        return placed(np.asarray(data, value.aval.dtype), default)
    if data.committed and data.sharding.device_set != default.device_set:
        raise _elsewhere(value.aval, "on other devices")
    return data if data.sharding.device_set == default.device_set else placed(data, default)


def _plan_arrivals(calls: Sequence[_Call], flat: Flattened, variables: _Variables, limit: int | None) -> None:
    """Decides which variables are kept from one use to the next, which are fetched again, and when the next arrive."""
    uses: dict[RunValue, list[int]] = {}
    ends: dict[RunValue, int] = {}
    for number, call in enumerate(calls):
        for value in call.needed:
            uses.setdefault(value, []).append(number)
        ends.update((value, number) for value in (*call.stretch.inputs, *call.stretch.outputs) if value.part is None)
    most = _most(calls) if limit is None else limit
    gaps = [(first, then, value) for value, at in uses.items() for first, then in itertools.pairwise(at)]
    for first, then, value in sorted(gaps, key=lambda gap: (gap[1] - gap[0]) * variables.nbytes(gap[2])):
        between, nbytes = calls[first + 1 : then], variables.nbytes(value)
        if all(call.total + nbytes <= most for call in between):
            for call in between:
                call.kept += nbytes
        else:
            calls[first].drop.append(value)
            calls[then].fetch.append(value)
    for value, at in uses.items():
        calls[at[0]].fetch.append(value)
        ends[value] = at[-1]
    for value in ends.keys() - {*flat.values}:
        calls[ends[value]].drop.append(value)
    for call, later in itertools.pairwise(calls):
        arriving = sum(variables.nbytes(value) for value in later.fetch if variables.is_read(value))
        fits = limit is None or call.total + arriving <= limit
        call.ahead, later.turn = arriving * fits, call.turn + (1 if fits else 2)


def _run(
    calls: Sequence[_Call],
    flat: Flattened,
    variables: _Variables,
    budget: int,
    bar: Progress,
    stage: CollectiveScope,
) -> list[Any]:
    """Runs everything; returns the results of the function."""
    items = [variables.item(value, call.turn) for call in calls for value in call.fetch if variables.is_read(value)]
    values: dict[RunValue, Any] = {}
    here, spent = all(map(on_host, variables.default.device_set)), _TRIM
    with contextlib.closing(read_items(items, budget)) as arriving:
        for call in calls:
            stage.check()
            for value in call.fetch:
                if variables.is_read(value):
                    values[value] = as_keys(next(arriving)[1], value.aval.dtype)
                else:
                    values[value] = variables.make(value.source.path)
                bar.advance(variables.nbytes(value), value.source.path)
            inputs = (values[each] if each.data is None else each.data for each in call.stretch.inputs)
            outputs = call.program.run(*map(as_operand, inputs), *call.stretch.scalars)
            values.update(zip(call.stretch.outputs, outputs, strict=True))
            for value in call.drop:
                values.pop(value, None)
            jax.block_until_ready(outputs)
            del outputs
            spent += call.busy
            if here and spent >= _TRIM:
                _trim_heap()
                spent = 0
    if any(step.eqn.effects for step in flat.steps):
        jax.effects_barrier()
    return [_result(each, values) for each in flat.results]


def _result(result: Any, values: Mapping[RunValue, Any]) -> Any:
    if not isinstance(result, RunValue):
        return with_weak_type(jax.numpy.asarray(result.val, result.aval.dtype), is_weak(result.aval))
    if result.data is None:
        return values[result]
    return with_weak_type(jax.numpy.asarray(result.data), is_weak(result.aval))


def _layer(call: _Call) -> str:
    """The module that all variables of a call are of, if it is a single one, or of a numbered layer; else nothing."""
    modules = {value.source.path.rpartition("/")[0] or value.source.path for value in call.needed}
    parts = zip(*(module.split("/") for module in modules), strict=False)
    common = "/".join(names[0] for names in itertools.takewhile(lambda names: len({*names}) == 1, parts))
    return common if len(modules) == 1 or re.search(r"\d(?=/|$)", common) else ""


def _report(calls: Sequence[_Call], flat: Flattened, variables: _Variables, **measured: Any) -> RunReport:
    rows = [
        ProgramRow(
            calls=len(same),
            equations=len(same[0].stretch.steps),
            variables_nbytes=max(call.taken for call in same),
            live_nbytes=max(call.live + call.kept for call in same),
            temporary_nbytes=max(call.busy for call in same),
            peak_nbytes=max(call.total + call.ahead for call in same),
            layers=tuple(dict.fromkeys(filter(None, (_layer(call) for call in same)))),
        )
        for same in grouped_by(calls, lambda call: call.key).values()
    ]
    fetched = [value for call in calls for value in call.fetch]
    nbytes = sum(map(variables.nbytes, fetched))
    made = sum(variables.nbytes(value) for value in fetched if value.source.path in variables.initialized)
    whole: dict[str, set[RunValue]] = {}
    for step in (step for call in calls for step in call.stretch.steps):
        name = step.eqn.primitive.name
        if name == "dynamic_slice" and step.root is not None:
            reason = "of stacks whose layers cannot be read or initialized one by one, or are on different devices"
            whole.setdefault(reason, set()).add(step.root)
        elif name in _WHOLE and (roots := {each for each in variables_of(step) if not each.source.is_rows}):
            whole.setdefault(f"taken by `{name}`, which runs as one", set()).update(roots)
    model = variables.model
    return RunReport(
        name=model.name,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        rows=tuple(rows),
        variables=len({value.source.path for value in fetched}),
        model_nbytes=sum(
            shard_nbytes(model[path], sharding)
            for path, sharding in variables.shardings.items()
            if path not in variables.on_host
        ),
        loaded_nbytes=nbytes - made,
        made_nbytes=made,
        again_nbytes=nbytes - sum(map(variables.nbytes, {*fetched})),
        results_nbytes=_results_nbytes(calls, flat, variables),
        whole=tuple(
            WholeRow(reason, tuple(sorted({value.source.path for value in each})), sum(map(variables.nbytes, each)))
            for reason, each in whole.items()
        ),
        **measured,
    )


def _trim_heap() -> None:
    """Returns freed memory of the C library's heap to the system, where the library can (glibc).

    XLA allocates results on CPUs there; memory of freed ones otherwise stays with the process until it is used again.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

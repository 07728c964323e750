"""Materializing: initialize what has no weights, stream what has, hand the arrays back.

This module orchestrates. How a variable is computed is in `_init_programs`, how a tensor is read in `_stream`; what
is done for each variable is decided here, by `choose`, for `MemoryPlan` as well. What was done is measured here and
described in `_load_report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format

from lazymodel._abstract import AbstractModel, AbstractVariable, Source
from lazymodel._agreement import agreement
from lazymodel._bytes import parse_budget
from lazymodel._casting import SAFE, UNSAFE, check_mode, converted, refusal, weights
from lazymodel._errors import CheckpointError, LazyModelError, LazyModelWarning
from lazymodel._file_source import BYTES_READ
from lazymodel._hardware import require_live
from lazymodel._host_arrays import host_array
from lazymodel._init_programs import InitRecipe, run_recipes
from lazymodel._jaxprs import is_weak, key_impl, with_weak_type
from lazymodel._lazy_tensor import LazyTensor, lazy
from lazymodel._load_report import (
    Costs,
    LoadReport,
    MismatchedTensor,
    is_initial,
    local_nbytes,
    make_report,
    stored_tensors,
)
from lazymodel._mapping import MappedCheckpoint, flat_checkpoint
from lazymodel._placement import device_shardings, is_narrowed, stays_on_host
from lazymodel._quantized import scales_beside
from lazymodel._report import Progress, closest, folded_names, progress_for
from lazymodel._stream import StreamItem, stream

if TYPE_CHECKING:
    from jax.sharding import Sharding

ReportTo: TypeAlias = "bool | Callable[[LoadReport], object] | None"

_LISTED = 8  # how many paths a message names before it only counts


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where every variable's value comes from.

    Attributes:
        recipes: The init recipes to run, restricted to what is needed.
        sources: Path to tensor or array, for everything that is not computed.
        given: The paths among these that the checkpoint has.
        lacking: Variables that it has no tensor for.
        unused: Names of its tensors that no variable takes.
        mismatched: Its tensors that are left out, as if it lacked them, because of their shapes.
        cast: How values become their variables' dtypes; see `_casting`.
    """

    recipes: tuple[InitRecipe, ...]
    sources: Mapping[str, Source]
    given: frozenset[str] = frozenset()
    lacking: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mismatched: tuple[MismatchedTensor, ...] = ()
    cast: str = SAFE


def materialize(
    model: AbstractModel,
    checkpoint: Mapping[str, Any] | None = None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
    max_host_memory: int | str | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    report: ReportTo = None,
) -> Any:
    """Makes every variable on its own devices, and the user's object from them.

    Nothing is handed to the user's object before every array is complete, so a failure leaves nothing half-written.
    Where several processes share the model's devices, all of them must call this, and it fails in all or in none.

    Raises:
        LazyModelError: The model is sharded over devices that are only planned for.
        CheckpointError: A tensor is missing (with `initialize="nothing"`), unexpected or of another shape (with
            `strict`), would lose what it means in its variable's dtype (unless `cast="unsafe"`), or cannot be read, in
            this or another process; or the processes' checkpoints have other tensors.
        Exception: Whatever a callable given as `progress` or `report` raises.
    """
    start = time.perf_counter()
    require_live(model.variables)
    shardings = [variable.sharding for variable in model.variables.values()]
    # Before the first program runs: one that only some processes run can wait forever for the rest.
    with agreement(shardings) as stage:
        deliver = _delivery(report)
        checkpoint = flat_checkpoint(checkpoint)
        choice = choose(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
        if checkpoint is not None and initialize != "all":
            _warn(model, checkpoint, choice, initialize)
        budget = None if max_host_memory is None else parse_budget(max_host_memory)
        stage.outcome = _outcome(choice)
        if jax.process_count() > 1:
            stage.details = _details(choice)
    with agreement(shardings) as stage:
        arrays, costs = make_arrays(model, choice, max_host_memory=budget, progress=progress, check=stage.check)
    result = model.rebuild(arrays)
    if deliver is not None:
        seconds = time.perf_counter() - start
        deliver(make_report(model, choice, checkpoint, device_shardings(model.variables), costs, seconds))
    return result


def choose(
    model: AbstractModel,
    checkpoint: Mapping[str, Any] | None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
) -> Choice:
    """Decides for every variable whether it is loaded or initialized, and checks that what is loaded fits.

    What was left out or is lacking is noted in the choice, not warned about.

    Raises:
        CheckpointError: As `materialize`, and before anything is read.
    """
    if initialize not in (None, "missing", "nothing", "all"):
        raise CheckpointError(f"initialize is 'missing', 'nothing', 'all' or None; got {initialize!r}")
    check_mode(cast)
    checkpoint = flat_checkpoint(checkpoint)
    sources = dict(model.sources)
    by_recipe = {path for recipe in model.recipes for path in recipe.paths}
    given: dict[str, Source] = {}
    lacking: list[str] = []
    unused: list[str] = []
    mismatched: list[MismatchedTensor] = []
    if initialize == "all":
        # Constants have no other way to come to be; what a checkpoint gave does.
        sources = {path: source for path, source in sources.items() if path not in by_recipe}
        unused = list(checkpoint or ())
    elif checkpoint is not None:
        given, unused = _match(model, checkpoint, strict=strict)
        if not strict and initialize != "nothing":
            mismatched = _take_mismatched(model, given)
        sources.update(given)
        left_out = {mismatch.path for mismatch in mismatched}
        lacking = [path for path in model if path not in sources and path not in left_out]
        if lacking and initialize == "nothing":
            hint = closest(lacking[0], list(checkpoint))
            raise CheckpointError(
                f"{_lacks(model, checkpoint, lacking)}{hint}. Pass initialize='missing' to initialize them."
            )
    elif initialize == "nothing" and (lacking := [path for path in model if path not in sources]):
        raise CheckpointError(f"there is no checkpoint, and initialize='nothing' leaves {lacking[0]!r} without a value")
    for path, source in sources.items():
        _check_source(model[path], source)
    if cast == SAFE and (refused := refused_casts(model, checkpoint, sources, given)):
        more = f" ({len(refused)} tensors are refused)" if len(refused) > 1 else ""
        raise CheckpointError(f"{refused[0]}{more}.")
    needed = [path for path in model if path not in sources]
    wanted = set(needed)
    recipes = tuple(
        recipe.restricted_to([path for path in recipe.paths if path in wanted])
        for recipe in model.recipes
        if wanted.intersection(recipe.paths)
    )
    return Choice(recipes, sources, frozenset(given), tuple(lacking), tuple(unused), tuple(mismatched), cast)


def refused_casts(
    model: AbstractModel,
    checkpoint: Mapping[str, Any] | None,
    sources: Mapping[str, Source],
    given: Container[str],
) -> list[str]:
    """What is wrong with the dtypes of the tensors that variables take, and with the scales that none takes.

    Args:
        model: The variables.
        checkpoint: What tensors are taken from.
        sources: Path to tensor or array.
        given: The paths among these that the checkpoint has. What else is in memory the user's own code made.
    """
    mapped = isinstance(checkpoint, MappedCheckpoint)
    names = {*(checkpoint or ()), *(checkpoint.source if mapped else ())}
    refused: list[str] = []
    taken: dict[str, np.dtype[Any]] = {}  # quantized tensors by name, as they are stored
    for path, source in sources.items():
        if path not in given and not (isinstance(source, LazyTensor) and source.file):
            continue
        tensor, expected = lazy(source, path), _stored_dtype(model[path])
        if tensor.dtype != expected:
            why = refusal(path, tensor, expected, _origin(source), names)
            refused += [why] if why else []
        if path in given:
            taken |= {leaf.name: leaf.dtype for leaf in weights(tensor) if leaf.dtype == tensor.dtype}
    left = {name for name in checkpoint or () if name not in given} | set(checkpoint.unused if mapped else ())
    for name, dtype in taken.items():
        if scales := scales_beside(name, left):
            refused.append(
                f"{_describe(checkpoint or {})}: tensor {name!r} is {dtype.name} and {scales[0]!r} is beside it, which "
                f"{model.name} has no variable for: quantized numbers, which mean nothing without their scale. Give it "
                "a variable, or load a dequantized copy; cast='unsafe' takes the bare numbers"
            )
    return refused


def make_arrays(
    model: AbstractModel,
    choice: Choice,
    *,
    max_host_memory: int | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], Costs]:
    """Runs the init programs, the stream, and what is computed from other variables.

    Returns path to finished array, of JAX or (see `_host_arrays`) of NumPy, and what it cost.

    Init programs come first: their temporaries are spent while the devices are still empty. Progress is counted in
    bytes of the distinct shards of this process. `check` is called with every piece of work; what it raises ends it.
    """
    shardings = device_shardings(model.variables)
    on_host = {path: source for path, source in choice.sources.items() if stays_on_host(model[path])}
    items = [
        _stream_item(model[path], source, shardings[path], choice)
        for path, source in choice.sources.items()
        if path not in on_host
    ]
    computed = {
        path: local_nbytes(shardings[path], model[path].shape, model[path].dtype)
        for recipe in choice.recipes
        for path in recipe.paths
    }
    derived = [path for path in model if path not in computed and path not in choice.sources]
    apart = [*derived, *on_host]
    computed.update({path: local_nbytes(shardings[path], model[path].shape, model[path].dtype) for path in apart})
    total = sum(computed.values()) + sum(local_nbytes(item.sharding, item.shape, item.dtype) for item in items)
    arrays: dict[str, Any] = {}
    bar = progress_for(progress)
    watcher = _Watcher(bar, check)
    bar.start(total, f"{model.name}: materializing {len(model)} variables")
    try:
        start = time.perf_counter()
        arriving = stream(items, max_host_memory=max_host_memory, on_bytes=watcher.advance)  # or refused, at once
        for path, array in run_recipes(choice.recipes, shardings, model.programs):
            arrays[path] = _in_layout(array, model[path])
            watcher.advance(computed[path], path)
        started, read = time.perf_counter(), BYTES_READ.count
        for path, array in arriving:
            arrays[path] = _in_layout(_as_declared(array, model[path]), model[path])
            watcher.advance(0, path)
        for path, source in on_host.items():
            arrays[path] = host_array(model[path], _read_as(model[path], source, choice))
            watcher.advance(computed[path], path)
        if derived and model.derived is not None:
            for path, array in model.derived.compute(derived, arrays, shardings).items():
                arrays[path] = _in_layout(array, model[path])
                watcher.advance(computed[path], path)
        # In the model's order, since every process has to run a program for all at the same turn.
        arrays.update({path: _as_weak(arrays[path], model[path]) for path in model if model[path].weak_type})
        jax.block_until_ready([arrays[item.path] for item in items])
        streamed = time.perf_counter()
        jax.block_until_ready(list(arrays.values()))  # the init programs, which ran on while files were read
        initializing = started - start + time.perf_counter() - streamed
        costs = Costs(BYTES_READ.count - read, initializing, streamed - started)
    except CheckpointError:
        if watcher.error is not None:
            raise watcher.error from None
        raise
    finally:
        bar.finish()
    return arrays, costs


class _Watcher:
    """Tells of progress from several threads, one call at a time.

    Attributes:
        error: What the receiver or the check raised, which the stream would otherwise take for a failure of its own.
    """

    def __init__(self, progress: Progress, check: Callable[[], None]) -> None:
        self._progress, self._check = progress, check
        self._lock = threading.Lock()
        self.error: Exception | None = None

    def advance(self, nbytes: int, path: str | None = None) -> None:
        with self._lock:
            try:
                self._progress.advance(nbytes, path)
                self._check()
            except Exception as error:
                self.error = self.error or error
                raise


def _delivery(report: ReportTo) -> Callable[[LoadReport], object] | None:
    """The function that takes the report, if any."""
    if report is None or report is False:
        return None
    if report is True:
        return print
    if callable(report):
        return report
    raise LazyModelError(f"report is True, None or a callable that takes the LoadReport; got {report!r}")


def _outcome(choice: Choice) -> str:
    """What this process is about to do, in words that differ if it differs."""
    initialized = [path for recipe in choice.recipes for path in recipe.paths]
    return f"load {len(choice.sources)} variables and initialize {len(initialized)}" + (
        f": {', '.join(initialized)}" if initialized else ""
    )


def _details(choice: Choice) -> str:
    """What the tensors are that this process is about to load, which differs where the files are of another kind."""
    loaded = sorted(choice.sources.items())
    return "\n".join(f"{path} {getattr(source, 'dtype', '')} {np.shape(source)}" for path, source in loaded)


def _match(model: AbstractModel, checkpoint: Mapping[str, Any], *, strict: bool) -> tuple[dict[str, Source], list[str]]:
    """The checkpoint's tensors by variable path, and the names of all others."""
    unexpected = [name for name in checkpoint if name not in model.variables]
    if strict and unexpected:
        raise CheckpointError(
            f"{_describe(checkpoint)} has {len(unexpected)} tensors that {model.name} has no variable for: "
            f"{_listed(map(repr, unexpected))}{closest(unexpected[0], list(model))}. "
            "Rename them, or pass strict=False to leave them out."
        )
    return {path: checkpoint[path] for path in model if path in checkpoint}, unexpected


def _take_mismatched(model: AbstractModel, given: dict[str, Source]) -> list[MismatchedTensor]:
    """Takes tensors of another shape than their variable's out of `given`."""
    mismatched: list[MismatchedTensor] = []
    for path, source in list(given.items()):
        expected, found = _stored_shape(model[path]), tuple(np.shape(source))
        if expected != found:
            mismatched.append(MismatchedTensor(path, stored_tensors(source, path)[0], expected, found))
            del given[path]
    return mismatched


def _warn(model: AbstractModel, checkpoint: Mapping[str, Any], choice: Choice, initialize: str | None) -> None:
    """Warns of what a checkpoint has too much and, unless that was said to be meant, too little."""
    left_out: list[str] = []
    if choice.unused:
        left_out.append(
            f"{len(choice.unused)} tensors that {model.name} has no variable for: {_listed(map(repr, choice.unused))}"
        )
    if choice.mismatched:
        left_out.append(
            f"{len(choice.mismatched)} tensors of another shape, as if they were lacking: "
            f"{_listed(map(str, choice.mismatched))}"
        )
    if left_out:
        message = f"{_describe(checkpoint)}: strict=False leaves out {'; and '.join(left_out)}"
        warnings.warn(message, LazyModelWarning, stacklevel=4)
    if choice.lacking and initialize is None:
        warnings.warn(
            f"{_lacks(model, checkpoint, choice.lacking)}. "
            "They are initialized; say initialize='missing' if that is meant.",
            LazyModelWarning,
            stacklevel=4,
        )


def _lacks(model: AbstractModel, checkpoint: Mapping[str, Any], lacking: Sequence[str]) -> str:
    described = _describe(checkpoint)
    return f"{described} has no tensor for {len(lacking)} of {len(model)} variables: {_listed(folded_names(lacking))}"


def _listed(names: Iterable[str]) -> str:
    first = list(itertools.islice(names, _LISTED + 1))
    return ", ".join(first[:_LISTED]) + (", …" if len(first) > _LISTED else "")


def _check_source(variable: AbstractVariable, source: Source) -> None:
    expected, found = _stored_shape(variable), tuple(np.shape(source))
    if found != expected:
        raise CheckpointError(
            f"{variable.path!r}: expected shape {expected}, found {found} in {_origin(source)}; "
            "is this the checkpoint of another configuration?"
        )


def _stored_shape(variable: AbstractVariable) -> tuple[int, ...]:
    """The shape that its values are read in."""
    return _key_data(variable).shape if _is_key(variable) else variable.shape


def _key_data(variable: AbstractVariable) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, variable.struct)


def _stored_dtype(variable: AbstractVariable) -> np.dtype[Any]:
    """The dtype that its values are read in."""
    return np.dtype(_key_data(variable).dtype if _is_key(variable) else variable.dtype)


def _stream_item(variable: AbstractVariable, source: Source, sharding: Sharding, choice: Choice) -> StreamItem:
    """What the stream reads. Keys are read as their key data, whose trailing dimension no spec names."""
    tensor = lazy(_read_as(variable, source, choice), variable.path)
    return StreamItem(variable.path, tensor, _stored_shape(variable), _stored_dtype(variable), sharding)


def _read_as(variable: AbstractVariable, source: Source, choice: Choice) -> Any:
    """A source's values in the variable's dtype; what the user's own code made is cast as that would cast it."""
    dtype = _stored_dtype(variable)
    if variable.path in choice.given or (isinstance(source, LazyTensor) and source.file):
        return converted(lazy(source, variable.path), dtype, choice.cast)
    return source if source.dtype == dtype else converted(lazy(source, variable.path), dtype, UNSAFE)


def _as_declared(array: jax.Array, variable: AbstractVariable) -> jax.Array:
    return jax.random.wrap_key_data(array, impl=key_impl(variable.dtype)) if _is_key(variable) else array


def _as_weak(array: Any, variable: AbstractVariable) -> Any:
    """The array weakly typed, in the same buffers."""
    if isinstance(array, np.ndarray) or is_weak(jax.typeof(array)):
        return array
    placed = array.sharding if variable.layout is None else array.format
    with jax.enable_x64(True) if is_narrowed(array.dtype) else contextlib.nullcontext():
        return jax.jit(_weakened, donate_argnums=0, out_shardings=placed)(array)


def _weakened(array: jax.Array) -> jax.Array:
    return with_weak_type(array, True)


def _in_layout(array: jax.Array, variable: AbstractVariable) -> jax.Array:
    """The array with its bytes in the order that the variable asks for, as far as its devices have such orders."""
    if variable.layout is None:
        return array
    return jax.device_put(array, Format(variable.layout, array.sharding), donate=True)


def _is_key(variable: AbstractVariable) -> bool:
    return jax.numpy.issubdtype(variable.dtype, jax.dtypes.prng_key)


def _describe(checkpoint: Mapping[str, Any]) -> str:
    path = getattr(checkpoint, "path", None)
    return "the checkpoint" if path is None else f"checkpoint {path}"


def _origin(source: Source) -> str:
    stored = isinstance(source, LazyTensor) and source.file
    return f"tensor {source.name!r} of {source.file}" if stored else "an array"


def describe_sources(sources: Mapping[str, Source]) -> dict[str, str]:
    """For each path, where its value is read from, for people."""
    return {path: _origin(source) for path, source in sources.items() if not is_initial(source)}


__all__: Sequence[str] = (
    "Choice",
    "ReportTo",
    "choose",
    "describe_sources",
    "make_arrays",
    "materialize",
    "refused_casts",
)

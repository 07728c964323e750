"""Materializing: initialize what has no weights, stream what has, hand the arrays back.

This module orchestrates. How a variable is computed is in `_init_programs`, how a tensor is read in `_stream`; what
is done for each variable is decided here, by `choose`, for `MemoryPlan` as well.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lazymodel._abstract import AbstractModel, AbstractVariable, Source
from lazymodel._agreement import agreement
from lazymodel._bytes import parse_bytes
from lazymodel._errors import CheckpointError, LazyModelWarning
from lazymodel._init_programs import InitRecipe, run_recipes
from lazymodel._jaxprs import key_impl
from lazymodel._lazy_tensor import LazyTensor
from lazymodel._report import Progress, closest, progress_for
from lazymodel._sharding import device_shardings
from lazymodel._stream import StreamItem, stream

if TYPE_CHECKING:
    from jax.sharding import Sharding

_LISTED = 8  # how many paths a message names before it only counts


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where every variable's value comes from.

    Attributes:
        recipes: The init recipes to run, restricted to what is needed.
        sources: Path to tensor or array, for everything that is not computed.
    """

    recipes: tuple[InitRecipe, ...]
    sources: Mapping[str, Source]


def materialize(
    model: AbstractModel,
    checkpoint: Mapping[str, Any] | None = None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    max_host_memory: int | str | None = None,
    progress: bool | Progress | None = None,
) -> Any:
    """Makes every variable on its own devices, and the user's object from them.

    Nothing is handed to the user's object before every array is complete, so a failure leaves nothing half-written.
    Where several processes share the model's devices, all of them must call this, and it fails in all or in none.

    Raises:
        CheckpointError: A tensor is missing (with `initialize="nothing"`), unexpected (with `strict`), of another
            shape, or cannot be read, in this or another process; or the processes' checkpoints have other tensors.
    """
    shardings = [variable.sharding for variable in model.variables.values()]
    # Before the first program runs: one that only some processes run can wait forever for the rest.
    with agreement(shardings) as stage:
        choice = choose(model, checkpoint, initialize=initialize, strict=strict)
        budget = None if max_host_memory is None else parse_bytes(max_host_memory)
        stage.outcome = _outcome(choice)
    with agreement(shardings):
        arrays = make_arrays(model, choice, max_host_memory=budget, progress=progress)
    return model.rebuild(arrays)


def choose(
    model: AbstractModel,
    checkpoint: Mapping[str, Any] | None,
    *,
    initialize: str | None = None,
    strict: bool = True,
) -> Choice:
    """Decides for every variable whether it is loaded or initialized, and checks that what is loaded fits.

    Raises:
        CheckpointError: As `materialize`, and before anything is read.
    """
    if initialize not in (None, "missing", "nothing", "all"):
        raise CheckpointError(f"initialize is 'missing', 'nothing', 'all' or None; got {initialize!r}")
    sources = dict(model.sources)
    by_recipe = {path for recipe in model.recipes for path in recipe.paths}
    if initialize == "all":
        # Constants have no other way to come to be; what a checkpoint gave does.
        sources = {path: source for path, source in sources.items() if path not in by_recipe}
    elif checkpoint is not None:
        given = _match(model, checkpoint, strict=strict)
        sources.update(given)
        lacking = [path for path in model if path not in sources]
        if lacking and initialize != "missing":
            listed = ", ".join(lacking[:_LISTED]) + (", …" if len(lacking) > _LISTED else "")
            message = f"{_describe(checkpoint)} has no tensor for {len(lacking)} of {len(model)} variables: {listed}"
            if initialize == "nothing":
                hint = closest(lacking[0], list(checkpoint))
                raise CheckpointError(f"{message}{hint}. Pass initialize='missing' to initialize them.")
            warnings.warn(
                f"{message}. They are initialized; say initialize='missing' if that is meant.",
                LazyModelWarning,
                stacklevel=4,
            )
    elif initialize == "nothing" and (lacking := [path for path in model if path not in sources]):
        raise CheckpointError(f"there is no checkpoint, and initialize='nothing' leaves {lacking[0]!r} without a value")
    for path, source in sources.items():
        _check_source(model[path], source)
    needed = [path for path in model if path not in sources]
    wanted = set(needed)
    recipes = tuple(
        recipe.restricted_to([path for path in recipe.paths if path in wanted])
        for recipe in model.recipes
        if wanted.intersection(recipe.paths)
    )
    return Choice(recipes, sources)


def make_arrays(
    model: AbstractModel,
    choice: Choice,
    *,
    max_host_memory: int | None = None,
    progress: bool | Progress | None = None,
) -> dict[str, jax.Array]:
    """Runs the init programs, then the stream; returns path to finished array.

    Init programs come first: their temporaries are spent while the devices are still empty.
    """
    shardings = device_shardings(model.variables)
    arrays: dict[str, jax.Array] = {}
    bar = progress_for(progress)
    bar.start(model.nbytes, f"{model.name}: materializing {len(model)} variables")
    try:
        for path, array in run_recipes(choice.recipes, shardings, model.programs):
            arrays[path] = array
            bar.advance(model[path].nbytes, path)
        items = [_stream_item(model[path], source, shardings[path]) for path, source in choice.sources.items()]
        for path, array in stream(items, max_host_memory=max_host_memory):
            arrays[path] = _as_declared(array, model[path])
            bar.advance(model[path].nbytes, path)
        jax.block_until_ready(list(arrays.values()))
    finally:
        bar.finish()
    return arrays


def _outcome(choice: Choice) -> str:
    """What this process is about to do, in words that differ if it differs."""
    initialized = [path for recipe in choice.recipes for path in recipe.paths]
    return f"load {len(choice.sources)} variables and initialize {len(initialized)}" + (
        f": {', '.join(initialized)}" if initialized else ""
    )


def _match(model: AbstractModel, checkpoint: Mapping[str, Any], *, strict: bool) -> dict[str, Source]:
    """The checkpoint's tensors by variable path."""
    given = {path: checkpoint[path] for path in model if path in checkpoint}
    unexpected = [name for name in checkpoint if name not in model.variables]
    if strict and unexpected:
        listed = ", ".join(map(repr, unexpected[:_LISTED])) + (", …" if len(unexpected) > _LISTED else "")
        raise CheckpointError(
            f"{_describe(checkpoint)} has {len(unexpected)} tensors that {model.name} has no variable for: "
            f"{listed}{closest(unexpected[0], list(model))}. Rename them, or pass strict=False to leave them out."
        )
    return given


def _check_source(variable: AbstractVariable, source: Source) -> None:
    shape = tuple(np.shape(source))
    if shape != variable.shape and not _is_key(variable):
        raise CheckpointError(
            f"{variable.path!r}: expected shape {variable.shape}, found {shape} in {_origin(source)}; "
            "is this the checkpoint of another configuration?"
        )


def _stream_item(variable: AbstractVariable, source: Source, sharding: Sharding) -> StreamItem:
    """What the stream reads. Keys are read as their key data, whose trailing dimension no spec names."""
    if not _is_key(variable):
        return StreamItem(variable.path, source, variable.shape, np.dtype(variable.dtype), sharding)
    data = jax.eval_shape(jax.random.key_data, variable.struct)
    return StreamItem(variable.path, source, data.shape, np.dtype(data.dtype), sharding)


def _as_declared(array: jax.Array, variable: AbstractVariable) -> jax.Array:
    return jax.random.wrap_key_data(array, impl=key_impl(variable.dtype)) if _is_key(variable) else array


def _is_key(variable: AbstractVariable) -> bool:
    return jax.numpy.issubdtype(variable.dtype, jax.dtypes.prng_key)


def _describe(checkpoint: Mapping[str, Any]) -> str:
    path = getattr(checkpoint, "path", None)
    return "the checkpoint" if path is None else f"checkpoint {path}"


def _origin(source: Source) -> str:
    return f"tensor {source.name!r} of {source.file}" if isinstance(source, LazyTensor) else "an array"


def describe_sources(sources: Mapping[str, Source]) -> dict[str, str]:
    """For each path, where its value is read from, for people."""
    return {path: _origin(source) for path, source in sources.items()}


__all__: Sequence[str] = ("Choice", "choose", "describe_sources", "make_arrays", "materialize")

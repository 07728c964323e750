"""The prologue of a load: what a user gives becomes tensors by path, and each variable gets the source of its value.

Responsible for deciding and for checking that loaded tensors match, for `materialize`, `stream`, `run`, `statistics`
and a plan alike. Nothing is read here. A checkpoint is open, a path, a mapping, a pytree, a live or an abstract model.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import (
    ARRAYS,
    NUMBERS,
    AbstractVariable,
    as_array,
    device_shardings,
    lazy_array,
    named_leaves,
    refuse_deleted,
)
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._extras import extra
from lazymodel._mapping.initial import initial_values, is_initial_value
from lazymodel._mapping.source import MappedCheckpoint, described, refuse_adapter, respelled
from lazymodel._programs.programs import InitRecipe, chunked_init
from lazymodel._show.text import closest, first_of, folded_names, listed, plural
from lazymodel._tensors.casting import SAFE, UNSAFE, check_mode, converted, refusal, scales_beside, weights
from lazymodel._tensors.lazy import LazyTensor, lazy, left_over
from lazymodel._tensors.shards import on_host
from lazymodel._tensors.stored import MismatchedTensor, stored_tensors, where


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """A model, a checkpoint, and the source of every variable's value."""

    built: ModelSpec  # as it is materialized
    model: ModelSpec  # as it is read: with values in place of what is computed from them
    checkpoint: Mapping[str, Any] | None  # under the names of its variables
    recipes: tuple[InitRecipe, ...]  # the init recipes to run, restricted to the needed variables
    sources: Mapping[str, Any]  # path to tensor or array, for every value that is not computed
    given: frozenset[str]  # the paths of these that come from the checkpoint
    missing: tuple[str, ...]  # variables without a tensor in the checkpoint
    unused: tuple[str, ...]  # names of its tensors that no variable uses
    mismatched: tuple[MismatchedTensor, ...]  # its tensors that are left out, as if missing, because of their shapes
    filled: Mapping[str, str]  # path → that of an equal variable
    numbers: Mapping[str, Any]  # path → number, as it is to be
    cast: str  # how values are converted to their variables' dtypes; see `_tensors/casting`

    @cached_property
    def shardings(self) -> dict[str, Sharding]:
        """The shardings of all variables, as built and as read."""
        return device_shardings({**self.built.variables, **self.model.variables})

    @cached_property
    def initialized(self) -> list[str]:
        """The variables that init recipes compute."""
        return [path for recipe in self.recipes for path in recipe.paths]

    @property
    def derived(self) -> list[str]:
        """Variables that are computed from the values of others, as some optimizer state is."""
        known = {*self.sources, *self.initialized}
        return [path for path in self.model if path not in known]

    def from_file(self, path: str) -> bool:
        """True if a value is read from a file, or given as if it were; otherwise the user's own code created it."""
        source = self.sources[path]
        return path in self.given or (isinstance(source, LazyTensor) and bool(source.file))

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The values of `sources` in their variables' dtypes; those of the user's own code are cast as it would."""
        return {path: self._tensor(path, source) for path, source in self.sources.items()}

    def _tensor(self, path: str, source: Any) -> Any:
        _, dtype = self.model[path].stored
        if self.from_file(path):
            return converted(lazy(source, path), dtype, self.cast)
        return source if source.dtype == dtype else converted(lazy(source, path), dtype, UNSAFE)

    def by_region(self, shardings: Mapping[str, Sharding]) -> tuple[dict[str, Any], list[InitRecipe]]:
        """The tensors, with initial values that are computed region by region, and the recipes of all others.

        These are values on devices that use the host's memory, of programs that can be split into chunks.
        """
        tensors, whole = dict(self.tensors), list[InitRecipe]()
        for recipe in self.recipes:
            here = all(on_host(device) for path in recipe.paths for device in shardings[path].device_set)
            if here and chunked_init(recipe) is not None:
                tensors |= initial_values(self.model, recipe)
            else:
                whole.append(recipe)
        return tensors, whole

    def lazy_values(self) -> dict[str, LazyTensor]:
        """Path → its value as in `materialize`, key data for PRNG keys, in the model's order; nothing is read."""
        found = {path: lazy(tensor, path) for path, tensor in self.tensors.items()}
        for recipe in self.recipes:
            found |= initial_values(self.model, recipe)
        self.refuse_derived()
        return {path: found[path] for path in self.model}

    def refuse_derived(self) -> None:
        """Raises LazyModelError if a variable is computed from the values of others, which are not kept."""
        if others := self.derived:
            raise LazyModelError(
                f"{others[0]!r} ({len(others)} such variables) is computed from the values of other variables, of "
                "which none is kept. Take the model without its optimizer or before it is quantized, or materialize it"
            )


def prepare_load(
    model: ModelSpec,
    checkpoint: Any,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
    warns: bool = True,
) -> LoadPlan:
    """Opens a checkpoint, decides for every variable if it is loaded or initialized, and checks that tensors match.

    Arguments and errors are as for `materialize`. Tensors that are left out or missing are recorded in the result, and,
    if `warns`, a warning lists them, as `materialize` documents it.
    """
    given = None
    if checkpoint is not None:
        given = model.framework.computed(model, respelled(model, given_checkpoint(checkpoint)))
    load = _resolve(model, model.as_read(given or ()), given, initialize, strict, cast)
    if warns and given is not None and initialize != "all":
        _warn(load, given, initialize)
    return load


def lazy_values(model: ModelSpec) -> dict[str, LazyTensor]:
    """Path → the value that the model was built with, key data for PRNG keys, in its order; nothing is read.

    Raises:
        LazyModelError: A variable is computed from the values of others, as some optimizer state is.
    """
    return _resolve(model, model, None, None, True, SAFE).lazy_values()


def _resolve(
    built: ModelSpec,
    model: ModelSpec,
    checkpoint: Mapping[str, Any] | None,
    initialize: str | None,
    strict: bool,
    cast: str,
) -> LoadPlan:
    if initialize not in (None, "missing", "nothing", "all"):
        raise CheckpointError(f"initialize is 'missing', 'nothing', 'all' or None; got {initialize!r}")
    check_mode(cast)
    sources, given = dict(model.sources), dict[str, Any]()
    missing, unused, mismatched = list[str](), list[str](), list[MismatchedTensor]()
    filled, numbers = dict[str, str](), dict[str, Any]()
    if initialize == "all":
        # Constants have no other source; values from a checkpoint do.
        by_recipe = {path for recipe in model.recipes for path in recipe.paths}
        sources = {path: source for path, source in sources.items() if path not in by_recipe}
        unused = list(checkpoint or ())
    elif checkpoint is not None:
        given, unused, filled = _match(model, checkpoint, strict=strict)
        numbers = _numbers(model, checkpoint)
        if not strict and initialize != "nothing":
            mismatched = [found for path in given if (found := _mismatch(model[path], given[path])) is not None]
        for mismatch in mismatched:
            del given[mismatch.path]
        sources.update(given)
    needed = {path for path in model if path not in given and (path not in sources or is_initial_value(sources[path]))}
    if checkpoint is not None and initialize != "all":
        left_out = {mismatch.path for mismatch in mismatched}
        missing = [path for path in model if path in needed and path not in left_out]
    if initialize == "nothing" and needed:
        first = next(path for path in model if path in needed)
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint, and initialize='nothing' leaves {first!r} without a value")
        raise CheckpointError(
            f"{_missing_text(model, checkpoint, missing)}{closest(first, checkpoint)}. "
            "Pass initialize='missing' to initialize them."
        )
    for path, source in sources.items():
        if (mismatch := _mismatch(model[path], source)) is not None:
            raise CheckpointError(f"{mismatch}; is this the checkpoint of another configuration?")
    kept = ([path for path in recipe.paths if path in needed] for recipe in model.recipes)
    recipes = tuple(recipe.restricted_to(paths) for recipe, paths in zip(model.recipes, kept, strict=True) if paths)
    left = tuple(missing), tuple(unused), tuple(mismatched)
    load = LoadPlan(built, model, checkpoint, recipes, sources, frozenset(given), *left, filled, numbers, cast)
    if cast == SAFE and (refused := refused_casts(load)):
        raise CheckpointError(f"{first_of(refused, 'tensors are rejected')}.")
    return load


def _match(
    model: ModelSpec, checkpoint: Mapping[str, Any], *, strict: bool
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """The checkpoint's tensors by variable path, the names of all others, and the variables that get the tensor of a
    variable that began equal.
    """
    unexpected = left_over(checkpoint, (*model.variables, *model.numbers))
    refuse_adapter(unexpected, described(checkpoint))
    if strict and unexpected:
        raise CheckpointError(
            f"{described(checkpoint)} has {plural(len(unexpected), 'tensor')} that {model.name} has no variable for: "
            f"{listed(map(repr, unexpected))}{closest(unexpected[0], list(model))}. "
            f"{model.framework.fix_names(unexpected)}, or pass strict=False to leave them out."
        )
    others = {path: next((each for each in group if each in checkpoint), "") for path, group in model.alike().items()}
    filled = {path: other for path, other in others.items() if other and path not in checkpoint}
    given = {path: checkpoint[filled.get(path, path)] for path in model if path in checkpoint or path in filled}
    return given, unexpected, filled


def _numbers(model: ModelSpec, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the model that the checkpoint has, with their types in the model."""
    found: dict[str, Any] = {}
    for name, number in model.numbers.items():
        if name not in checkpoint:
            continue
        tensor, expected = lazy(checkpoint[name], name), np.asarray(number).dtype
        kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
        kind = next(each for each in kinds if jax.numpy.issubdtype(expected, each))
        if tensor.shape or not jax.numpy.issubdtype(tensor.dtype, kind):
            raise CheckpointError(
                f"{name!r}: expected a number, {expected.name}[], found {tensor.dtype.name}{list(tensor.shape)} in "
                f"{described(checkpoint)}"
            )
        found[name] = type(number)(tensor.read().item())
    return found


def _mismatch(variable: AbstractVariable, source: Any) -> MismatchedTensor | None:
    """The mismatch in shape between a variable and its tensor; None if they match."""
    (expected, _), found, path = variable.stored, tuple(np.shape(source)), variable.path
    return None if found == expected else MismatchedTensor(path, stored_tensors(source, path)[0], expected, found)


def refused_casts(load: LoadPlan) -> list[str]:
    """Problems with the dtypes of tensors, and with scales that no variable uses."""
    checkpoint = {} if load.checkpoint is None else load.checkpoint
    beside = checkpoint.unused if isinstance(checkpoint, MappedCheckpoint) else ()
    names = {*checkpoint, *(checkpoint.source if isinstance(checkpoint, MappedCheckpoint) else ())}
    refused: list[str] = []
    taken: dict[str, np.dtype[Any]] = {}  # quantized tensors by name → stored dtype
    for path, source in load.sources.items():
        if not load.from_file(path):
            continue
        tensor, (_, expected) = lazy(source, path), load.model[path].stored
        if tensor.dtype != expected and (why := refusal(path, tensor, expected, where(source), names)):
            refused.append(why)
        if path in load.given:
            taken |= {source.name: source.dtype for source in weights(tensor) if source.dtype == tensor.dtype}
    left = {name for name in checkpoint if name not in load.given} | {*beside}
    for name, dtype in taken.items():
        if scales := scales_beside(name, left):
            refused.append(
                f"{described(checkpoint)}: tensor {name!r} is {dtype.name}, with a scale {scales[0]!r}, which "
                f"{load.model.name} has no variable for: quantized numbers mean nothing without their scale. Give it "
                "a variable, or load a dequantized copy"
            )
    return refused


def _warn(load: LoadPlan, checkpoint: Mapping[str, Any], initialize: str | None) -> None:
    """Warns about unexpected tensors and, unless `initialize` is given, about missing ones."""
    left_out: list[str] = []
    if load.unused:
        names = listed(map(repr, load.unused))
        left_out.append(f"{plural(len(load.unused), 'tensor')} that {load.model.name} has no variable for: {names}")
    if load.mismatched:
        texts = listed(map(str, load.mismatched))
        left_out.append(f"{plural(len(load.mismatched), 'tensor')} of another shape, as if missing: {texts}")
    if left_out:
        warn(f"{described(checkpoint)}: strict=False leaves out {'; and '.join(left_out)}")
    if load.missing and initialize is None:
        text = _missing_text(load.model, checkpoint, load.missing)
        warn(f"{text}. They are initialized; pass initialize='missing' if that is intended.")


def _missing_text(model: ModelSpec, checkpoint: Mapping[str, Any], missing: Sequence[str]) -> str:
    what = f"{described(checkpoint)} has no tensor for {len(missing)} of {len(model)} variables"
    return f"{what}: {listed(folded_names(missing))}"


def opened(given: Any) -> Any:
    """The checkpoint at a path or URL; anything else as it is."""
    return extra("open_checkpoint")(given) if isinstance(given, str | os.PathLike) else given


def given_checkpoint(given: Any) -> Mapping[str, Any]:
    """The tensors of anything that a user may give as a checkpoint, by path; arrays on devices become lazy tensors.

    Raises:
        CheckpointError: It holds no tensors, or is a path that cannot be opened.
    """
    given = opened(given)
    if isinstance(given, ModelSpec):
        return lazy_values(given)
    if isinstance(given, Mapping) and jax.tree_util.all_leaves([given]):
        return cast("Mapping[str, Any]", given)
    keys = cast("dict[Any, Any]", given) if isinstance(given, dict) else ()
    if keys and all(isinstance(key, str) for key in keys) and jax.tree_util.all_leaves(given.values()):
        found = cast("dict[str, Any]", given)  # in its own order
    else:
        kinds = (object,) if isinstance(given, dict) else ARRAYS + NUMBERS
        found = {} if isinstance(given, NUMBERS) else named_leaves(given, kinds)
    if not found and not isinstance(given, Mapping):
        got = reprlib.repr(given)
        raise CheckpointError(
            f"a checkpoint is a mapping of path to tensor, or a pytree; got {got}, without arrays. Open one: "
            "lm.open_checkpoint(path)"
        )
    refuse_deleted(found)
    return {
        name: lazy_array(name, leaf) if isinstance(leaf, jax.Array) else as_array(leaf) for name, leaf in found.items()
    }


def given_tensors(given: Any) -> dict[str, LazyTensor]:
    """Like `given_checkpoint`, with every array as a lazy tensor."""
    return {name: lazy_array(name, array) for name, array in given_checkpoint(given).items()}

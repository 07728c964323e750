"""Loaded or initialized: what is done for each variable, for `materialize` and for a plan alike.

Responsible for deciding and for checking that what is loaded fits. Nothing is read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import CheckpointError, warn
from lazymodel._mapping.lora import refuse_adapter
from lazymodel._mapping.mapped import MappedCheckpoint, described
from lazymodel._programs.programs import InitRecipe
from lazymodel._show.text import closest, first_of, folded_names, listed
from lazymodel._tensors.casting import SAFE, check_mode, refusal, weights
from lazymodel._tensors.equal import equal_tensor
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.quantized import scales_beside
from lazymodel._tensors.stored import MismatchedTensor, stored_tensors, where


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where every variable's value comes from."""

    recipes: tuple[InitRecipe, ...]  # the init recipes to run, restricted to what is needed
    sources: Mapping[str, Any]  # path to tensor or array, for everything that is not computed
    given: frozenset[str] = frozenset()  # the paths among these that the checkpoint has
    lacking: tuple[str, ...] = ()  # variables that it has no tensor for
    unused: tuple[str, ...] = ()  # names of its tensors that no variable takes
    # Its tensors that are left out, as if it lacked them, because of their shapes.
    mismatched: tuple[MismatchedTensor, ...] = ()
    cast: str = SAFE  # how values become their variables' dtypes; see `_tensors/casting`

    def from_file(self, path: str) -> bool:
        """Whether a value is read from a file, or given as if it were; the user's own code made any other in memory."""
        source = self.sources[path]
        return path in self.given or (isinstance(source, LazyTensor) and bool(source.file))


def choose(
    model: ModelSpec,
    checkpoint: Mapping[str, Any] | None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
) -> Choice:
    """Decides for every variable whether it is loaded or initialized, and checks that what is loaded fits.

    The checkpoint is one of `flat_checkpoint`, the rest is as for `materialize`, errors too. What was left out or is
    lacking is noted in the choice, not warned about.
    """
    if initialize not in (None, "missing", "nothing", "all"):
        raise CheckpointError(f"initialize is 'missing', 'nothing', 'all' or None; got {initialize!r}")
    check_mode(cast)
    sources = dict(model.sources)
    given: dict[str, Any] = {}
    lacking: list[str] = []
    unused: list[str] = []
    mismatched: list[MismatchedTensor] = []
    if initialize == "all":
        # Constants have no other way to come to be; what a checkpoint gave does.
        by_recipe = {path for recipe in model.recipes for path in recipe.paths}
        sources = {path: source for path, source in sources.items() if path not in by_recipe}
        unused = list(checkpoint or ())
    elif checkpoint is not None:
        given, unused = _match(model, checkpoint, strict=strict)
        if not strict and initialize != "nothing":
            mismatched = [found for path in given if (found := _mismatch(model[path], given[path])) is not None]
        for mismatch in mismatched:
            del given[mismatch.path]
        sources.update(given)
        left_out = {mismatch.path for mismatch in mismatched}
        lacking = [path for path in model if path not in sources and path not in left_out]
    needed = {path for path in model if path not in sources}
    if initialize == "nothing" and needed:
        first = next(path for path in model if path in needed)
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint, and initialize='nothing' leaves {first!r} without a value")
        raise CheckpointError(
            f"{_lacks(model, checkpoint, lacking)}{closest(first, checkpoint)}. "
            "Pass initialize='missing' to initialize them."
        )
    for path, source in sources.items():
        if (mismatch := _mismatch(model[path], source)) is not None:
            raise CheckpointError(f"{mismatch}; is this the checkpoint of another configuration?")
    kept = ([path for path in recipe.paths if path in needed] for recipe in model.recipes)
    recipes = tuple(recipe.restricted_to(paths) for recipe, paths in zip(model.recipes, kept, strict=True) if paths)
    choice = Choice(recipes, sources, frozenset(given), tuple(lacking), tuple(unused), tuple(mismatched), cast)
    if cast == SAFE and (refused := refused_casts(model, checkpoint, choice)):
        raise CheckpointError(f"{first_of(refused, 'tensors are refused')}.")
    return choice


def _match(model: ModelSpec, checkpoint: Mapping[str, Any], *, strict: bool) -> tuple[dict[str, Any], list[str]]:
    """The checkpoint's tensors by variable path, and the names of all others."""
    unexpected = [name for name in checkpoint if name not in model.variables and name not in model.aliases]
    refuse_adapter(unexpected, described(checkpoint))
    if strict and unexpected:
        raise CheckpointError(
            f"{described(checkpoint)} has {len(unexpected)} tensors that {model.name} has no variable for: "
            f"{listed(map(repr, unexpected))}{closest(unexpected[0], list(model))}. "
            "Rename them (lm.WeightMap.suggest proposes how), or pass strict=False to leave them out."
        )
    names = {path: [path] if path in checkpoint else [] for path in model}
    for other, path in model.aliases.items():
        if other in checkpoint:
            names[path].append(other)
    return {path: _one(path, {n: checkpoint[n] for n in found}) for path, found in names.items() if found}, unexpected


def _one(path: str, sources: Mapping[str, Any]) -> Any:
    """What a variable is loaded from, of what a checkpoint has under each of its paths."""
    first, *others = sources.values()
    return equal_tensor(path, [lazy(source, name) for name, source in sources.items()]) if others else first


def _mismatch(variable: AbstractVariable, source: Any) -> MismatchedTensor | None:
    """What is wrong with the shape of what a variable is loaded from."""
    (expected, _), found, path = variable.stored, tuple(np.shape(source)), variable.path
    return None if found == expected else MismatchedTensor(path, stored_tensors(source, path)[0], expected, found)


def refused_casts(model: ModelSpec, checkpoint: Mapping[str, Any] | None, choice: Choice) -> list[str]:
    """What is wrong with the dtypes of the tensors that variables take, and with the scales that none takes."""
    mapped = isinstance(checkpoint, MappedCheckpoint)
    names = {*(checkpoint or ()), *(checkpoint.source if mapped else ())}
    refused: list[str] = []
    taken: dict[str, np.dtype[Any]] = {}  # quantized tensors by name, as they are stored
    for path, source in choice.sources.items():
        if not choice.from_file(path):
            continue
        tensor, (_, expected) = lazy(source, path), model[path].stored
        if tensor.dtype != expected and (why := refusal(path, tensor, expected, where(source), names)):
            refused.append(why)
        if path in choice.given:
            taken |= {leaf.name: leaf.dtype for leaf in weights(tensor) if leaf.dtype == tensor.dtype}
    left = {name for name in checkpoint or () if name not in choice.given} | set(checkpoint.unused if mapped else ())
    for name, dtype in taken.items():
        if scales := scales_beside(name, left):
            refused.append(
                f"{described(checkpoint or {})}: tensor {name!r} is {dtype.name} and {scales[0]!r} is beside it, which "
                f"{model.name} has no variable for: quantized numbers, which mean nothing without their scale. Give it "
                "a variable, or load a dequantized copy; cast='unsafe' takes the bare numbers"
            )
    return refused


def choose_and_warn(
    model: ModelSpec,
    checkpoint: Mapping[str, Any] | None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
) -> Choice:
    """As `choose`, having warned of what the checkpoint lacks or has besides."""
    choice = choose(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
    if checkpoint is not None and initialize != "all":
        _warn_of_rest(model, checkpoint, choice, initialize)
    return choice


def _warn_of_rest(model: ModelSpec, checkpoint: Mapping[str, Any], choice: Choice, initialize: str | None) -> None:
    """Warns of what a checkpoint has too much and, unless that was said to be meant, too little."""
    left_out: list[str] = []
    if choice.unused:
        names = listed(map(repr, choice.unused))
        left_out.append(f"{len(choice.unused)} tensors that {model.name} has no variable for: {names}")
    if choice.mismatched:
        texts = listed(map(str, choice.mismatched))
        left_out.append(f"{len(choice.mismatched)} tensors of another shape, as if they were lacking: {texts}")
    if left_out:
        warn(f"{described(checkpoint)}: strict=False leaves out {'; and '.join(left_out)}")
    if choice.lacking and initialize is None:
        lacks = _lacks(model, checkpoint, choice.lacking)
        warn(f"{lacks}. They are initialized; say initialize='missing' if that is meant.")


def _lacks(model: ModelSpec, checkpoint: Mapping[str, Any], lacking: Sequence[str]) -> str:
    what = f"{described(checkpoint)} has no tensor for {len(lacking)} of {len(model)} variables"
    return f"{what}: {listed(folded_names(lacking))}"

"""The decision for each variable to load or to initialize it, for `materialize` and for a plan alike.

Responsible for deciding and for checking that loaded tensors match. Nothing is read here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import CheckpointError, warn
from lazymodel._programs.programs import InitRecipe
from lazymodel._show.text import closest, first_of, folded_names, listed
from lazymodel._tensors.casting import SAFE, check_mode, refusal, scales_beside, weights
from lazymodel._tensors.decoded import equal_tensor
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.stored import MismatchedTensor, stored_tensors, where

_ADAPTER = re.compile(r"(?:.*[./])?lora_(?:embedding_)?[AB](?:[./].*)?", re.DOTALL)  # PEFT's names


def refuse_adapter(names: Iterable[str], what: str) -> None:
    """Raises CheckpointError if names of tensors, which no variable has, are those of a LoRA adapter."""
    if found := [name for name in names if _ADAPTER.fullmatch(name)]:
        raise CheckpointError(
            f"{what} has {len(found)} tensors of a LoRA adapter: {listed(map(repr, found))}. They add to a weight "
            "lora_alpha / r times their product, and neither number is among the tensors. Merge the adapter first "
            "(PEFT: merge_and_unload), or give lm.map_checkpoint a function that returns W + lora_alpha / r * B @ A"
        )


class MappedCheckpoint(Mapping[str, LazyTensor]):
    """A checkpoint by variable path: variable path → lazy tensor. Made by `map_checkpoint`."""

    def __init__(self, tensors: Mapping[str, LazyTensor], source: Any, unused: Sequence[str] = ()) -> None:
        path = getattr(source, "path", None)
        self._tensors = dict(tensors)
        self.path: str | None = path if isinstance(path, str) else None  # of the original checkpoint
        self.source = source  # the original checkpoint
        self.unused = tuple(unused)  # names of the source's tensors that were not used

    def __getitem__(self, path: str) -> LazyTensor:
        return self._tensors[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        return f"MappedCheckpoint({len(self)} variables{where})"


def described(checkpoint: Mapping[str, Any]) -> str:
    """The name of a checkpoint in errors."""
    path = getattr(checkpoint, "path", None)
    return "the checkpoint" if path is None else f"checkpoint {path}"


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """The source of every variable's value."""

    recipes: tuple[InitRecipe, ...]  # the init recipes to run, restricted to the needed variables
    sources: Mapping[str, Any]  # path to tensor or array, for every value that is not computed
    given: frozenset[str] = frozenset()  # the paths of these that come from the checkpoint
    missing: tuple[str, ...] = ()  # variables without a tensor in the checkpoint
    unused: tuple[str, ...] = ()  # names of its tensors that no variable uses
    # Its tensors that are left out, as if missing, because of their shapes.
    mismatched: tuple[MismatchedTensor, ...] = ()
    cast: str = SAFE  # how values are converted to their variables' dtypes; see `_tensors/casting`

    def from_file(self, path: str) -> bool:
        """True if a value is read from a file, or given as if it were; otherwise the user's own code created it."""
        source = self.sources[path]
        return path in self.given or (isinstance(source, LazyTensor) and bool(source.file))


def resolve(
    model: ModelSpec,
    checkpoint: Mapping[str, Any] | None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
) -> LoadPlan:
    """Decides for every variable if it is loaded or initialized, and checks that loaded tensors match.

    The checkpoint is a result of `flat_checkpoint`; the other arguments and errors are as for `materialize`. Tensors
    that are left out or missing are recorded in the result, without a warning.
    """
    if initialize not in (None, "missing", "nothing", "all"):
        raise CheckpointError(f"initialize is 'missing', 'nothing', 'all' or None; got {initialize!r}")
    check_mode(cast)
    sources = dict(model.sources)
    given: dict[str, Any] = {}
    missing: list[str] = []
    unused: list[str] = []
    mismatched: list[MismatchedTensor] = []
    if initialize == "all":
        # Constants have no other source; values from a checkpoint do.
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
        missing = [path for path in model if path not in sources and path not in left_out]
    needed = {path for path in model if path not in sources}
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
    choice = LoadPlan(recipes, sources, frozenset(given), tuple(missing), tuple(unused), tuple(mismatched), cast)
    if cast == SAFE and (refused := refused_casts(model, checkpoint, choice)):
        raise CheckpointError(f"{first_of(refused, 'tensors are rejected')}.")
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
    """Returns the tensor of a variable, from those that a checkpoint has under its paths."""
    first, *others = sources.values()
    return equal_tensor(path, [lazy(source, name) for name, source in sources.items()]) if others else first


def _mismatch(variable: AbstractVariable, source: Any) -> MismatchedTensor | None:
    """The mismatch in shape between a variable and its tensor; None if they match."""
    (expected, _), found, path = variable.stored, tuple(np.shape(source)), variable.path
    return None if found == expected else MismatchedTensor(path, stored_tensors(source, path)[0], expected, found)


def refused_casts(model: ModelSpec, checkpoint: Mapping[str, Any] | None, choice: LoadPlan) -> list[str]:
    """Problems with the dtypes of tensors, and with scales that no variable uses."""
    mapped = isinstance(checkpoint, MappedCheckpoint)
    names = {*(checkpoint or ()), *(checkpoint.source if mapped else ())}
    refused: list[str] = []
    taken: dict[str, np.dtype[Any]] = {}  # quantized tensors by name → stored dtype
    for path, source in choice.sources.items():
        if not choice.from_file(path):
            continue
        tensor, (_, expected) = lazy(source, path), model[path].stored
        if tensor.dtype != expected and (why := refusal(path, tensor, expected, where(source), names)):
            refused.append(why)
        if path in choice.given:
            taken |= {source.name: source.dtype for source in weights(tensor) if source.dtype == tensor.dtype}
    left = {name for name in checkpoint or () if name not in choice.given} | set(checkpoint.unused if mapped else ())
    for name, dtype in taken.items():
        if scales := scales_beside(name, left):
            refused.append(
                f"{described(checkpoint or {})}: tensor {name!r} is {dtype.name}, with a scale {scales[0]!r}, which "
                f"{model.name} has no variable for: quantized numbers mean nothing without their scale. Give it "
                "a variable, or load a dequantized copy; cast='unsafe' takes the bare numbers"
            )
    return refused


def resolve_and_warn(
    model: ModelSpec,
    checkpoint: Mapping[str, Any] | None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
) -> LoadPlan:
    """Like `resolve`, and warns about missing and unexpected tensors of the checkpoint."""
    choice = resolve(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
    if checkpoint is not None and initialize != "all":
        _warn_of_rest(model, checkpoint, choice, initialize)
    return choice


def _warn_of_rest(model: ModelSpec, checkpoint: Mapping[str, Any], choice: LoadPlan, initialize: str | None) -> None:
    """Warns about unexpected tensors of a checkpoint and, unless `initialize` is given, about missing ones."""
    left_out: list[str] = []
    if choice.unused:
        names = listed(map(repr, choice.unused))
        left_out.append(f"{len(choice.unused)} tensors that {model.name} has no variable for: {names}")
    if choice.mismatched:
        texts = listed(map(str, choice.mismatched))
        left_out.append(f"{len(choice.mismatched)} tensors of another shape, as if they were missing: {texts}")
    if left_out:
        warn(f"{described(checkpoint)}: strict=False leaves out {'; and '.join(left_out)}")
    if choice.missing and initialize is None:
        text = _missing_text(model, checkpoint, choice.missing)
        warn(f"{text}. They are initialized; pass initialize='missing' if that is intended.")


def _missing_text(model: ModelSpec, checkpoint: Mapping[str, Any], missing: Sequence[str]) -> str:
    what = f"{described(checkpoint)} has no tensor for {len(missing)} of {len(model)} variables"
    return f"{what}: {listed(folded_names(missing))}"

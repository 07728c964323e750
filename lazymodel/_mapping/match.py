"""The decision for each variable to load or to initialize it, for `materialize` and for a plan alike.

Responsible for deciding and for checking that loaded tensors match. Nothing is read here.

Lazy tensors by path: of a checkpoint that a user gives, and of every variable of an abstract model.

A checkpoint is open, a mapping, a pytree, a live or an abstract model. Initial values are tensors like any other: a
region of one is filled when it is read. If the init program can be split into chunks (`_programs/programs`), each
chunk is computed in the thread that reads it. Otherwise the program runs whole when its first variable is read, and its
results are kept until the last one was read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import (
    ARRAYS,
    NUMBERS,
    OPTIMIZER,
    AbstractVariable,
    as_array,
    lazy_array,
    named_leaves,
    refuse_deleted,
    trained_path,
)
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._extras import extra
from lazymodel._programs.jaxprs import is_key, key_data
from lazymodel._programs.programs import CHUNK, ChunkedInit, InitRecipe, ProgramCache, chunked_init, run_recipes
from lazymodel._show.text import closest, first_of, folded_names, listed, plural
from lazymodel._tensors.boxes import Box, bounding, box_shape, clip, shift, slabs
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.casting import SAFE, UNSAFE, check_mode, converted, refusal, scales_beside, weights
from lazymodel._tensors.decoded import ComputedTensor
from lazymodel._tensors.lazy import LazyTensor, lazy, left_over
from lazymodel._tensors.shards import MismatchedTensor, stored_tensors, where
from lazymodel._tensors.tensor_source import CompositeSource, Part, TensorSource

_ADAPTER = re.compile(r"(?:.*[./])?lora_(?:embedding_)?[AB](?:[./].*)?", re.DOTALL)  # PEFT's names


def refuse_adapter(names: Iterable[str], what: str) -> None:
    """Raises CheckpointError if names of tensors, which no variable has, are those of a LoRA adapter."""
    if found := [name for name in names if _ADAPTER.fullmatch(name)]:
        raise CheckpointError(
            f"{what} has {plural(len(found), 'tensor')} of a LoRA adapter: {listed(map(repr, found))}. They add to a "
            "weight lora_alpha / r times their product, and neither number is among the tensors. Merge the adapter "
            "into the base model's checkpoint first: lm.merge(checkpoint, lm.open_adapter(folder)); or keep its pairs, "
            "if the model has some: WeightMap.adapters"
        )


class MappedCheckpoint(dict[str, LazyTensor]):
    """A checkpoint by variable path: variable path → lazy tensor. Made by `map_checkpoint`."""

    def __init__(self, tensors: Mapping[str, LazyTensor], source: Any, unused: Sequence[str] = ()) -> None:
        path = getattr(source, "path", None)
        super().__init__(tensors)
        self.path: str | None = path if isinstance(path, str) else None  # of the original checkpoint
        self.source = source  # the original checkpoint
        self.unused = tuple(unused)  # names of the source's tensors that were not used

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
    filled: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # path → that of an equal variable
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # path → number, as it is to be
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

    The checkpoint is a result of `checkpoint_for`; the other arguments and errors are as for `materialize`. Tensors
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
    filled: dict[str, str] = {}
    numbers: dict[str, Any] = {}
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
    needed = {path for path in model if path not in given and (path not in sources or _is_initial(sources[path]))}
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
    choice = LoadPlan(recipes, sources, frozenset(given), *left, filled, numbers, cast)
    if cast == SAFE and (refused := refused_casts(model, checkpoint, choice)):
        raise CheckpointError(f"{first_of(refused, 'tensors are rejected')}.")
    return choice


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


def respelled(model: ModelSpec, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checkpoint with the model's names for tensors that have other spellings of them: those of places in a pair of
    model and optimizer, `0/w` for `w`, and those of Flax' states, `w/value` and `opt_state/…`.
    """
    known = {*model, *model.numbers, *(each.variable.path for each in model.conversions)}
    if known.issuperset(checkpoint):
        return checkpoint
    pair = {name.partition("/")[0] for name in checkpoint} <= {"0", "1"}
    own = {path: path for path in known}
    if {path.partition("/")[0] for path in known} <= {"0", "1"}:
        own |= {trained_path(path): path for path in known}

    def spelled(name: str) -> str:
        plain = name.removesuffix("/value")
        paired = trained_path(plain).replace(f"{OPTIMIZER}opt_state/", OPTIMIZER, 1)
        spellings = (plain, trained_path(name), paired) if pair else (plain,)
        return next((own[each] for each in (name, *spellings) if each in own), name)

    names = {name: spelled(name) for name in checkpoint}
    if len({*names.values()}) < len(names) or all(found == name for name, found in names.items()):
        return checkpoint
    return MappedCheckpoint({found: checkpoint[name] for name, found in names.items()}, checkpoint)


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
                "a variable, or load a dequantized copy"
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
    """Like `resolve`, and warns about unexpected tensors and, unless `initialize` is given, about missing ones."""
    choice = resolve(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
    if checkpoint is None or initialize == "all":
        return choice
    left_out: list[str] = []
    if choice.unused:
        names = listed(map(repr, choice.unused))
        left_out.append(f"{plural(len(choice.unused), 'tensor')} that {model.name} has no variable for: {names}")
    if choice.mismatched:
        texts = listed(map(str, choice.mismatched))
        number = plural(len(choice.mismatched), "tensor")
        left_out.append(f"{number} of another shape, as if missing: {texts}")
    if left_out:
        warn(f"{described(checkpoint)}: strict=False leaves out {'; and '.join(left_out)}")
    if choice.missing and initialize is None:
        text = _missing_text(model, checkpoint, choice.missing)
        warn(f"{text}. They are initialized; pass initialize='missing' if that is intended.")
    return choice


def _missing_text(model: ModelSpec, checkpoint: Mapping[str, Any], missing: Sequence[str]) -> str:
    what = f"{described(checkpoint)} has no tensor for {len(missing)} of {len(model)} variables"
    return f"{what}: {listed(folded_names(missing))}"


_TEMPORARIES = 3  # memory of an init program that runs whole, as a multiple of its results


def lazy_values(model: ModelSpec, choice: LoadPlan | None = None) -> dict[str, LazyTensor]:
    """Path → its value as in `materialize`, key data for PRNG keys, in the model's order; nothing is read.

    `choice` gives the source of each variable's value; by default the sources that the model was built with.

    Raises:
        LazyModelError: A variable is computed from the values of others, as some optimizer state is.
    """
    choice = resolve(model, None) if choice is None else choice
    found = {path: lazy(read_as(model[path], source, choice), path) for path, source in choice.sources.items()}
    for recipe in choice.recipes:
        found |= initial_values(model, recipe)
    refuse_derived(model, choice)
    return {path: found[path] for path in model}


def refuse_derived(model: ModelSpec, choice: LoadPlan) -> None:
    """Raises LazyModelError if a variable is computed from the values of others, which are not kept."""
    known = {*choice.sources, *(path for recipe in choice.recipes for path in recipe.paths)}
    if others := [path for path in model if path not in known]:
        raise LazyModelError(
            f"{others[0]!r} ({len(others)} such variables) is computed from the values of other variables, of "
            "which none is kept. Take the model without its optimizer or before it is quantized, or materialize it"
        )


def is_chunked(recipe: InitRecipe) -> bool:
    """Returns True if its values are computed in chunks, whatever its variable's size."""
    return chunked_init(recipe) is not None


def initial_values(model: ModelSpec, recipe: InitRecipe) -> dict[str, LazyTensor]:
    """The variables of one recipe, as lazy tensors."""
    if (chunks := chunked_init(recipe)) is not None:
        return {path: LazyTensor(_ChunkedInitial(path, model[path], chunks)) for path in recipe.paths}
    whole = _Whole(recipe, model.programs, sum(model[path].nbytes for path in recipe.paths))
    return {path: LazyTensor(_WholeInitial(model[path], whole)) for path in recipe.paths}


def initial_value(model: ModelSpec, path: str) -> LazyTensor:
    """The value of one variable with which the model was built."""
    if path in model.sources:
        return lazy(model.sources[path], path)
    for recipe in model.recipes:
        if path in recipe.paths:
            return initial_values(model, recipe.restricted_to([path]))[path]
    raise LazyModelError(f"{path!r} is computed from the values of other variables, of which none is kept")


def read_as(variable: AbstractVariable, source: Any, choice: LoadPlan) -> Any:
    """A source's values in the variable's dtype; values of the user's own code are cast as that code would."""
    _, dtype = variable.stored
    if choice.from_file(variable.path):
        return converted(lazy(source, variable.path), dtype, choice.cast)
    return source if source.dtype == dtype else converted(lazy(source, variable.path), dtype, UNSAFE)


class _ChunkedInitial(CompositeSource):
    """A variable that is computed in chunks."""

    pieces, reads_pieces = (), False

    def __init__(self, path: str, variable: AbstractVariable, chunks: ChunkedInit) -> None:
        self.name, self.file, self.offset = path, "", 0
        self.shape, self.dtype = variable.stored
        self._chunks = chunks

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        first = bounding(boxes)[0]
        found: list[Part] = []
        for rows, *rest in slabs((first.stop - first.start, *self.shape[1:]), CHUNK):
            chunk = (slice(first.start + rows.start, first.start + rows.stop), *rest)
            if clipped := clip(zip(boxes, outs, strict=True), chunk):
                run = functools.partial(self._compute, chunk, clipped, steps)
                found.append(Part(sum(out.nbytes for _, out in clipped), run))
        return found

    def _compute(self, chunk: Box, clipped: Sequence[tuple[Box, np.ndarray]], steps: Steps, _: Workspace) -> None:
        start = int(np.ravel_multi_index([part.start for part in chunk], self.shape))
        values = self._chunks.compute(start, math.prod(box_shape(chunk))).reshape(box_shape(chunk))
        for common, out in clipped:
            assign(out, values[shift(common, chunk)], steps)


def _is_initial(source: Any) -> bool:
    """Returns True for an initial value, or what is computed from one."""
    source = getattr(source, "source", None)
    while isinstance(source, ComputedTensor):
        source = source.computation.source.source
    return isinstance(source, _ChunkedInitial | _WholeInitial)


class _Whole:
    """The variables of a recipe that cannot be computed in chunks."""

    def __init__(self, recipe: InitRecipe, programs: ProgramCache, nbytes: int) -> None:
        self._recipe, self._programs, self.nbytes = recipe, programs, nbytes
        self._lock = threading.Lock()
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._released: set[str] = set()

    def array(self, path: str) -> np.ndarray[Any, Any]:
        with self._lock:
            if path not in self._arrays:
                here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
                run = run_recipes([self._recipe], dict.fromkeys(self._recipe.paths, here), self._programs)
                self._arrays = {name: key_data(a) if is_key(a.dtype) else np.asarray(a) for name, a in run}
            self._released.discard(path)
            return self._arrays[path]

    def release(self, path: str) -> None:
        """Drops all arrays once each has been released."""
        with self._lock:
            self._released.add(path)
            if self._released.issuperset(self._recipe.paths):
                self._arrays = {}


class _WholeInitial(TensorSource):
    """A variable whose program runs whole."""

    def __init__(self, variable: AbstractVariable, whole: _Whole) -> None:
        self.name, self.file, self.offset = variable.path, "", 0
        self.shape, self.dtype = variable.stored
        self._whole = whole
        self.min_scratch_nbytes = (1 + _TEMPORARIES) * whole.nbytes

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        assign(out, self._whole.array(self.name)[(*box, ...)], steps)

    def release(self) -> None:
        self._whole.release(self.name)


def opened(given: Any) -> Any:
    """The checkpoint at a path or URL; anything else as it is."""
    return extra("open_checkpoint")(given) if isinstance(given, str | os.PathLike) else given


def flat_checkpoint(checkpoint: Any) -> Mapping[str, Any] | None:
    """Returns the given tensors by path; None for None. Arrays on devices become lazy tensors over them.

    Raises:
        CheckpointError: It holds no tensors, or is a path that cannot be opened.
    """
    checkpoint = opened(checkpoint)
    if isinstance(checkpoint, ModelSpec):
        return lazy_values(checkpoint)
    if checkpoint is None or (isinstance(checkpoint, Mapping) and jax.tree_util.all_leaves([checkpoint])):
        return cast(Any, checkpoint)
    keys = cast("dict[Any, Any]", checkpoint) if isinstance(checkpoint, dict) else ()
    if keys and all(isinstance(key, str) for key in keys) and jax.tree_util.all_leaves(checkpoint.values()):
        found = cast("dict[str, Any]", checkpoint)  # in its own order
    else:
        kinds = (object,) if isinstance(checkpoint, dict) else ARRAYS + NUMBERS
        found = {} if isinstance(checkpoint, NUMBERS) else named_leaves(checkpoint, kinds)
    if not found and not isinstance(checkpoint, Mapping):
        got = reprlib.repr(checkpoint)
        raise CheckpointError(f"a checkpoint is a mapping of path to tensor, or a pytree; got {got}, without arrays")
    refuse_deleted(found)
    return {
        name: lazy_array(name, leaf) if isinstance(leaf, jax.Array) else as_array(leaf) for name, leaf in found.items()
    }


def checkpoint_for(model: ModelSpec, checkpoint: Any) -> Mapping[str, Any] | None:
    """Like `flat_checkpoint`, with the names of a model's variables, which may be quantized from the checkpoint's
    weights.
    """
    found = flat_checkpoint(checkpoint)
    return None if found is None else model.framework.computed(model, respelled(model, found))


def given_checkpoint(checkpoint: Any) -> Mapping[str, Any]:
    """Like `flat_checkpoint`; raises CheckpointError for None."""
    if (found := flat_checkpoint(checkpoint)) is None:
        raise CheckpointError(
            "a checkpoint is a mapping of path to tensor, or a pytree; got None. Open one: lm.open_checkpoint(path)"
        )
    return found


def given_tensors(given: Any) -> dict[str, LazyTensor]:
    """Like `given_checkpoint`, with every array as a lazy tensor."""
    return {name: lazy_array(name, array) for name, array in given_checkpoint(given).items()}

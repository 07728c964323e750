"""Lazy tensors by path: of a checkpoint that a user gives, and of every variable of an abstract model.

A checkpoint is open, a mapping, a pytree, a live or an abstract model. Initial values are tensors like any other: a
region of one is filled when it is read. If the init program can be split into chunks (`_programs/chunked_init`), each
chunk is computed in the thread that reads it. Otherwise the program runs whole when its first variable is read, and its
results are kept until the last one was read.
"""

from __future__ import annotations

import functools
import math
import os
import reprlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from lazymodel._abstract.arrays import ARRAYS, lazy_array, named_leaves, refuse_deleted
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._mapping.match import LoadPlan, resolve
from lazymodel._programs.chunked_init import CHUNK, ChunkedInit, chunked_init
from lazymodel._programs.keys import is_key, key_data
from lazymodel._programs.programs import InitRecipe, ProgramCache, run_recipes
from lazymodel._tensors.boxes import Box, bounding, box_shape, clip, shift, slabs
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.casting import UNSAFE, converted
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.tensor_source import CompositeSource, Part, TensorSource

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
            "which none is kept. Take the model without its optimizer, or materialize it"
        )


def is_chunked(recipe: InitRecipe) -> bool:
    """Returns True if its values are computed in chunks, whatever its variable's size."""
    return chunked_init(recipe) is not None


def initial_values(model: ModelSpec, recipe: InitRecipe) -> dict[str, LazyTensor]:
    """The variables of one recipe, as lazy tensors."""
    if (chunks := chunked_init(recipe)) is not None:
        (path,) = recipe.paths
        return {path: LazyTensor(_ChunkedInitial(path, model[path], chunks))}
    whole = _Whole(recipe, model.programs, sum(model[path].nbytes for path in recipe.paths))
    return {path: LazyTensor(_WholeInitial(model[path], whole)) for path in recipe.paths}


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


def flat_checkpoint(checkpoint: Any) -> Mapping[str, Any] | None:
    """Returns the given tensors by path; None for None. Arrays on devices become lazy tensors over them.

    Raises:
        CheckpointError: It holds no tensors; for example, a path that was not opened.
    """
    if isinstance(checkpoint, str | os.PathLike):
        name = os.fspath(cast("str | os.PathLike[str]", checkpoint)).partition("?")[0]  # a signed URL has a credential
        raise CheckpointError(f"{name!r} is a path, not a checkpoint; open it first: lm.open_checkpoint({name!r})")
    if isinstance(checkpoint, ModelSpec):
        return model_values(checkpoint)
    if checkpoint is None or (isinstance(checkpoint, Mapping) and jax.tree_util.all_leaves([checkpoint])):
        return cast(Any, checkpoint)
    if isinstance(checkpoint, dict) and jax.tree_util.all_leaves(checkpoint.values()):
        found = cast("dict[str, Any]", checkpoint)  # in its own order
    else:
        found = named_leaves(checkpoint, (object,) if isinstance(checkpoint, dict) else ARRAYS)
    if not found and not isinstance(checkpoint, Mapping):
        got = reprlib.repr(checkpoint)
        raise CheckpointError(f"a checkpoint is a mapping of path to tensor, or a pytree; got {got}, without arrays")
    refuse_deleted(found)
    return {name: lazy_array(name, leaf) if isinstance(leaf, jax.Array) else leaf for name, leaf in found.items()}


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


def model_values(model: ModelSpec) -> dict[str, LazyTensor]:
    """The values of an abstract model by all of its paths; tied values are under each of them."""
    values = lazy_values(model)
    return values | {other: values[path] for other, path in model.aliases.items()}

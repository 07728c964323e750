"""Every variable of an abstract model as a lazy tensor: read from where it lies, or computed by its init program.

Initial values are leaves like any other: a box of one is filled when it is asked for. Where the init program can be cut
into bands (`_programs/bands`), what fills it is computed band by band, in whichever threads read; else the program runs
whole when its first variable is read, and its results are kept until the last one was.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError
from lazymodel._mapping.match import Choice, choose
from lazymodel._programs.bands import BAND, Bands, bands
from lazymodel._programs.keys import is_key, key_data
from lazymodel._programs.programs import InitRecipe, ProgramCache, run_recipes
from lazymodel._tensors.boxes import Box, bounding, box_shape, clip, shift, slabs
from lazymodel._tensors.buffers import Steps, Workspace, assign
from lazymodel._tensors.casting import UNSAFE, converted
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.leaves import DividedLeaf, Leaf, Part

_TEMPORARIES = 3  # of an init program that runs whole, as a multiple of its results


def lazy_values(model: ModelSpec, choice: Choice | None = None) -> dict[str, LazyTensor]:
    """Path → its value as `materialize` would have it, key data for PRNG keys, in the model's order; nothing is read.

    `choice` says of each variable where its value comes from; by default what the model was built with.

    Raises:
        LazyModelError: A variable is computed from the values of others, as some optimizer state is.
    """
    choice = choose(model, None) if choice is None else choice
    found = {path: lazy(read_as(model[path], source, choice), path) for path, source in choice.sources.items()}
    for recipe in choice.recipes:
        found |= initial_values(model, recipe)
    refuse_derived(model, choice)
    return {path: found[path] for path in model}


def refuse_derived(model: ModelSpec, choice: Choice) -> None:
    """Raises LazyModelError where a variable is computed from the values of others, which are not kept."""
    known = {*choice.sources, *(path for recipe in choice.recipes for path in recipe.paths)}
    if others := [path for path in model if path not in known]:
        raise LazyModelError(
            f"{others[0]!r} ({len(others)} such variables) is computed from the values of other variables, of "
            "which none is kept. Take the model without its optimizer, or materialize it"
        )


def is_banded(recipe: InitRecipe) -> bool:
    """Whether its values are computed in bands, whatever its variable's size."""
    return bands(recipe) is not None


def initial_values(model: ModelSpec, recipe: InitRecipe) -> dict[str, LazyTensor]:
    """The variables of one recipe."""
    if (banded := bands(recipe)) is not None:
        (path,) = recipe.paths
        return {path: LazyTensor(_BandLeaf(path, model[path], banded))}
    whole = _Whole(recipe, model.programs, sum(model[path].nbytes for path in recipe.paths))
    return {path: LazyTensor(_WholeLeaf(model[path], whole)) for path in recipe.paths}


def read_as(variable: AbstractVariable, source: Any, choice: Choice) -> Any:
    """A source's values in the variable's dtype; what the user's own code made is cast as that would cast it."""
    _, dtype = variable.stored
    if choice.from_file(variable.path):
        return converted(lazy(source, variable.path), dtype, choice.cast)
    return source if source.dtype == dtype else converted(lazy(source, variable.path), dtype, UNSAFE)


class _BandLeaf(DividedLeaf):
    """A variable that is computed in bands."""

    pieces, reads_pieces = (), False

    def __init__(self, path: str, variable: AbstractVariable, banded: Bands) -> None:
        self.name, self.file, self.offset = path, "", 0
        self.shape, self.dtype = variable.stored
        self._bands = banded

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        first = bounding(boxes)[0]
        found: list[Part] = []
        for rows, *rest in slabs((first.stop - first.start, *self.shape[1:]), BAND):
            slab = (slice(first.start + rows.start, first.start + rows.stop), *rest)
            if wanted := clip(zip(boxes, outs, strict=True), slab):
                run = functools.partial(self._compute, slab, wanted, steps)
                found.append(Part(sum(out.nbytes for _, out in wanted), run))
        return found

    def _compute(self, slab: Box, wanted: Sequence[tuple[Box, np.ndarray]], steps: Steps, _: Workspace) -> None:
        start = int(np.ravel_multi_index([part.start for part in slab], self.shape))
        values = self._bands.compute(start, math.prod(box_shape(slab))).reshape(box_shape(slab))
        for common, out in wanted:
            assign(out, values[shift(common, slab)], steps)


class _Whole:
    """The variables of a recipe that has no bands."""

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
        """Forgets them all, once each has been released."""
        with self._lock:
            self._released.add(path)
            if self._released.issuperset(self._recipe.paths):
                self._arrays = {}


class _WholeLeaf(Leaf):
    """A variable whose program runs whole."""

    def __init__(self, variable: AbstractVariable, whole: _Whole) -> None:
        self.name, self.file, self.offset = variable.path, "", 0
        self.shape, self.dtype = variable.stored
        self._whole = whole
        self.unit_nbytes = (1 + _TEMPORARIES) * whole.nbytes

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        assign(out, self._whole.array(self.name)[(*box, ...)], steps)

    def release(self) -> None:
        self._whole.release(self.name)

"""Initial values as lazy tensors: a region of one is computed when it is read.

If the init program can be split into chunks (`_programs/programs`), each chunk is computed in the thread that reads it.
Otherwise the program runs whole when its first variable is read, and its results are kept until the last one was read.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import is_key, key_data
from lazymodel._programs.programs import CHUNK, ChunkedInit, InitRecipe, ProgramCache, chunked_init, run_recipes
from lazymodel._tensors.boxes import Box, bounding, box_shape, clip, shift, slabs
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.convert import Steps, assign
from lazymodel._tensors.decoded import ComputedTensor
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.tensor_source import CompositeSource, Part, TensorSource

_TEMPORARIES = 3  # memory of an init program that runs whole, as a multiple of its results


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


def is_initial_value(source: Any) -> bool:
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

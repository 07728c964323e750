"""Tensors that are computed from another one while they are read, slab by slab.

Responsible for the arithmetic of a blockwise function on boxes: which part of its input an element of an output needs,
into which slabs the work is cut, and that every slab is read and computed once although several outputs come of it.
What the function is, such as a quantization, is its maker's matter; whoever reads the outputs sees lazy tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_shape, clip, coarse, grid, intersect, shift, whole_box
from lazymodel._tensors.buffers import DType, Steps, Workspace, assign
from lazymodel._tensors.fill import fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import DividedLeaf, Part, View

SLAB = 8 << 20  # bytes of the input that are computed at once: what is made of them on the way stays in the caches
# A function is taken to need this many times its slab: the slab, a copy, and what NumPy makes of it on the way.
TEMPORARIES = 6

Function: TypeAlias = "Callable[[np.ndarray], tuple[np.ndarray, ...]]"


@dataclasses.dataclass(frozen=True)
class Output:
    """One of the arrays that a computation makes."""

    dtype: DType
    ratios: tuple[int, ...]  # for each axis of the input, how many indices come down to one of the output
    of: Callable[[tuple[np.ndarray, ...]], np.ndarray]  # of what the function returned for a slab, this output's part
    small: bool = False  # whether it is kept once it was computed on the way to another output, as scales are


class Computation:
    """A function of one tensor that can be computed in slabs.

    It takes a slab and returns a tuple of arrays, gives the same bits for a slab as for the whole, and keeps no
    reference to its argument. For each axis, slabs begin at multiples of `steps`: 1 where indices are independent of
    each other, the extent where none are.
    """

    def __init__(self, source: View, function: Function, steps: Sequence[int]) -> None:
        self.source, self.function = source, function
        self.steps = tuple(max(min(step, extent), 1) for step, extent in zip(steps, source.shape, strict=True))
        self._outputs: list[Output] = []
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # small outputs: values, and which are there
        self._guard = threading.Lock()
        self._busy: dict[BoxKey, threading.Lock] = {}

    def output(self, output: Output) -> LazyTensor:
        """A further output, as a lazy tensor of shape ceil(extent / ratio) on every axis."""
        self.steps = tuple(
            min(math.lcm(step, ratio), extent) if extent else 1
            for step, ratio, extent in zip(self.steps, output.ratios, self.source.shape, strict=True)
        )
        self._outputs.append(output)
        return LazyTensor(ComputedLeaf(self, len(self._outputs) - 1, output))

    @property
    def unit_nbytes(self) -> int:
        """Bytes of temporaries that the smallest slab needs."""
        return math.prod(self.steps) * self.source.itemsize * TEMPORARIES + self.source.leaf.unit_nbytes

    def shape(self, output: Output) -> tuple[int, ...]:
        return tuple(-(-extent // ratio) for extent, ratio in zip(self.source.shape, output.ratios, strict=True))

    def slabs(self, output: Output, boxes: Sequence[Box]) -> list[Box]:
        """The slabs of the input that boxes of an output need."""
        region = tuple(
            slice(part.start * ratio // step * step, min(-(-part.stop * ratio // step) * step, extent))
            for part, ratio, step, extent in zip(
                bounding(boxes), output.ratios, self.steps, self.source.shape, strict=True
            )
        )
        # Cut at the same places whatever the region, so that outputs of one slab find each other.
        cut = self._cut(whole_box(self.source.shape), SLAB)
        slabs = [common for slab in cut if (common := intersect(slab, region)) is not None]
        return [slab for slab in slabs if any(intersect(box, coarse(slab, output.ratios)) for box in boxes)]

    def compute(
        self, slab: Box, index: int, wanted: Sequence[tuple[Box, np.ndarray]], steps: Steps, workspace: Workspace
    ) -> None:
        """Computes a slab once, and takes from it what boxes of an output, each with its array, are in it."""
        with self._alone(slab):
            for piece in self._cut(slab, max(workspace.room, self.unit_nbytes) // TEMPORARIES):
                with workspace.array(box_shape(piece), self.source.dtype) as values:
                    fill(self.source, [piece], [values], workspace)
                    results = self.function(values)
                    self._keep(piece, results)
                    output = self._outputs[index]
                    within = coarse(piece, output.ratios)
                    found = output.of(results)
                    for common, out in clip(wanted, within):
                        assign(out, found[(*shift(common, within), ...)], steps)

    def keep(self, index: int, slabs: Sequence[Box], workspace: Workspace) -> np.ndarray:
        """A small output, with what these slabs come down to computed, unless it was before."""
        output = self._outputs[index]
        for slab in slabs:
            with self._alone(slab):
                missing = not self._entry(index)[1][coarse(slab, output.ratios)].all()
            if missing:
                self.compute(slab, index, (), (), workspace)
        return self._entry(index)[0]

    def release(self, index: int) -> None:
        """Forgets a small output."""
        with self._guard:
            self._kept.pop(index, None)
            self._busy.clear()

    def _keep(self, piece: Box, results: tuple[np.ndarray, ...]) -> None:
        for index, output in enumerate(self._outputs):
            if output.small:
                values, there = self._entry(index)
                box = coarse(piece, output.ratios)
                values[box] = output.of(results)
                there[box] = True

    def _entry(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        with self._guard:
            if index not in self._kept:
                shape = self.shape(self._outputs[index])
                self._kept[index] = np.empty(shape, self._outputs[index].dtype), np.zeros(shape, bool)
            return self._kept[index]

    @contextlib.contextmanager
    def _alone(self, slab: Box) -> Generator[None]:
        """Keeps other threads from the same slab, which would compute it a second time."""
        with self._guard:
            lock = self._busy.setdefault(tuple((part.start, part.stop) for part in slab), threading.Lock())
        with lock:
            yield

    def _cut(self, box: Box, nbytes: int) -> Iterator[Box]:
        """Divides a box at multiples of the steps, first along the file's outermost axis, until pieces are small, but
        never smaller than a step.
        """
        chunk = list(box_shape(box))
        for axis in self.source.file_order():
            rest = math.prod(chunk) // max(chunk[axis], 1) * self.source.itemsize
            if rest * chunk[axis] > nbytes:
                chunk[axis] = min(chunk[axis], max(nbytes // max(rest, 1) // self.steps[axis], 1) * self.steps[axis])
        return grid(box, [max(extent, 1) for extent in chunk])


class ComputedLeaf(DividedLeaf):
    """One output of a computation."""

    def __init__(self, computation: Computation, index: int, output: Output) -> None:
        source = computation.source
        self.pieces = (source,)
        self.reads_pieces = not output.small
        self.name, self.file, self.offset = source.name, source.file, source.offset
        self.shape, self.dtype = computation.shape(output), output.dtype
        self.computation, self._index, self._output = computation, index, output

    @property
    def unit_nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.computation.unit_nbytes

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        computation, index, output = self.computation, self._index, self._output
        slabs = computation.slabs(output, boxes)
        if output.small:

            def run(workspace: Workspace) -> None:
                values = computation.keep(index, slabs, workspace)
                for box, out in zip(boxes, outs, strict=True):
                    assign(out, values[(*box, ...)], steps)

            return [Part(sum(out.nbytes for out in outs), run)]
        parts: list[Part] = []
        for slab in slabs:
            wanted = clip(zip(boxes, outs, strict=True), coarse(slab, output.ratios))
            nbytes = sum(out.nbytes for _, out in wanted)
            parts.append(Part(nbytes, functools.partial(computation.compute, slab, index, wanted, steps)))
        return parts

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        if self.reads_pieces:
            yield self.computation.source, self.computation.slabs(self._output, boxes)

    def release(self) -> None:
        if self._output.small:
            self.computation.release(self._index)
        super().release()

"""Tensors that are computed from another one while they are read, chunk by chunk.

Contains the arithmetic of a blockwise function on boxes: which region of its input an element of an output needs, into
which chunks the work is cut, and how every chunk is read and computed once although it has several outputs. The caller
provides the function, such as a quantization. Readers of the outputs get lazy tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from lazymodel._tensors.boxes import Box, BoxKey, box_shape, clip, coarse, intersect, shift, whole_box
from lazymodel._tensors.buffers import DType, Steps, Workspace, assign
from lazymodel._tensors.decoded import cut
from lazymodel._tensors.fill import Targets, fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import CompositeSource, Part, View

CHUNK = 8 << 20  # bytes of the input that are computed at once: intermediate results stay in the caches
# Memory that a function is assumed to need, as a multiple of its chunk: the chunk, a copy, and NumPy's temporaries.
TEMPORARIES = 6

Function: TypeAlias = "Callable[[np.ndarray], tuple[np.ndarray, ...]]"


@dataclasses.dataclass(frozen=True)
class Output:
    """One of the arrays that a computation makes."""

    dtype: DType
    ratios: tuple[int, ...]  # for each axis of the input, how many of its indices become one index of the output
    of: Callable[[tuple[np.ndarray, ...]], np.ndarray]  # picks this output from the function's result for a chunk
    small: bool = False  # True if it is kept once it was computed for another output, as scales are


class Computation:
    """A function of one tensor that can be computed in chunks.

    The function takes a chunk and returns a tuple of arrays, gives the same bits for a chunk as for the whole, and
    keeps no reference to its argument. On each axis, chunks begin at multiples of `steps`: 1 if indices are independent
    of each other, the extent if all depend on each other.
    """

    def __init__(self, source: View, function: Function, steps: Sequence[int]) -> None:
        self.source, self.function = source, function
        self.steps = tuple(max(min(step, extent), 1) for step, extent in zip(steps, source.shape, strict=True))
        self._outputs: list[Output] = []
        self._guard = threading.Lock()
        # For each chunk: a lock, so that no two threads compute it, and its part of the small outputs, once computed.
        self._chunks: dict[BoxKey, tuple[threading.Lock, dict[int, np.ndarray]]] = {}

    def output(self, output: Output) -> LazyTensor:
        """Adds an output, and returns it as a lazy tensor of shape ceil(extent / ratio) on every axis."""
        self.steps = tuple(
            min(math.lcm(step, ratio), extent) if extent else 1
            for step, ratio, extent in zip(self.steps, output.ratios, self.source.shape, strict=True)
        )
        self._outputs.append(output)
        return LazyTensor(ComputedTensor(self, len(self._outputs) - 1, output))

    @property
    def min_scratch_nbytes(self) -> int:
        """Bytes of temporaries that the smallest chunk needs."""
        return math.prod(self.steps) * self.source.itemsize * TEMPORARIES + self.source.source.min_scratch_nbytes

    def chunks(self, output: Output, boxes: Sequence[Box]) -> list[Box]:
        """Chunks of the input that boxes of an output need."""
        # Always cut at the same places, so that the outputs of one chunk share it.
        cut = self._cut(whole_box(self.source.shape), CHUNK)
        return [chunk for chunk in cut if any(intersect(box, coarse(chunk, output.ratios)) for box in boxes)]

    def compute(self, chunk: Box, index: int, targets: Targets, steps: Steps, workspace: Workspace) -> None:
        """Computes a chunk and fills arrays with boxes of an output that are in it. A small output is computed once."""
        with self._guard:
            key = tuple((part.start, part.stop) for part in chunk)
            lock, kept = self._chunks.setdefault(key, (threading.Lock(), {}))
        output = self._outputs[index]
        with lock:
            if index not in kept:
                small = {
                    number: np.empty(box_shape(coarse(chunk, each.ratios)), each.dtype)
                    for number, each in enumerate(self._outputs)
                    if each.small
                }
                for part in self._cut(chunk, max(workspace.available, self.min_scratch_nbytes) // TEMPORARIES):
                    with workspace.array(box_shape(part), self.source.dtype) as values:
                        fill(self.source, [part], [values], workspace)
                        results = self.function(values)
                        for number, array in small.items():
                            each = self._outputs[number]
                            array[shift(coarse(part, each.ratios), coarse(chunk, each.ratios))] = each.of(results)
                        if not output.small:
                            _assign(targets, coarse(part, output.ratios), output.of(results), steps)
                kept.update(small)
            if output.small:
                _assign(targets, coarse(chunk, output.ratios), kept[index], steps)

    def release(self, index: int) -> None:
        """Discards a small output."""
        with self._guard:
            for _, kept in self._chunks.values():
                kept.pop(index, None)
            if not any(kept for _, kept in self._chunks.values()):
                self._chunks = {}

    def _cut(self, box: Box, nbytes: int) -> Iterator[Box]:
        """Divides a box into chunks of at most so many bytes, but never smaller than a step."""
        limit = max(nbytes // self.source.itemsize, math.prod(self.steps))
        return cut(box, limit, self.steps, self.source.file_order())


def _assign(targets: Targets, region: Box, values: np.ndarray, steps: Steps) -> None:
    """Fills arrays with the overlaps of their boxes and a region, whose values are given."""
    for common, out in clip(targets, region):
        assign(out, values[(*shift(common, region), ...)], steps)


class ComputedTensor(CompositeSource):
    """One output of a computation."""

    def __init__(self, computation: Computation, index: int, output: Output) -> None:
        source = computation.source
        self.pieces, self.reads_pieces = (source,), not output.small
        self.name, self.file, self.offset = source.name, source.file, source.offset
        self.shape = tuple(-(-extent // ratio) for extent, ratio in zip(source.shape, output.ratios, strict=True))
        self.dtype, self.computation, self._index, self._output = output.dtype, computation, index, output

    @property
    def min_scratch_nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.computation.min_scratch_nbytes

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        parts: list[Part] = []
        for chunk in self.computation.chunks(self._output, boxes):
            targets = clip(zip(boxes, outs, strict=True), coarse(chunk, self._output.ratios))
            run = functools.partial(self.computation.compute, chunk, self._index, targets, steps)
            parts.append(Part(sum(out.nbytes for _, out in targets), run))
        return parts

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        if self.reads_pieces:
            yield self.computation.source, self.computation.chunks(self._output, boxes)

    def release(self) -> None:
        self.computation.release(self._index)
        super().release()

"""Entries of a `WeightMap` from lazy values: from which tensor each value is, and how its axes were rearranged.

A loader that is ordinary code, such as a converter of KerasHub, leaves its steps in the strides of its lazy results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from lazymodel._mapping.entry import From
from lazymodel._tensors.lazy import ConcatenatedTensor, LazyTensor


def recorded(values: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, From | None], list[str]]:
    """The entry of each value, None for values of no tensor, and the paths of those that no entry can make.

    `tensors` are those of the checkpoint; decoded ones may be views.
    """
    entries: dict[str, From | None] = {}
    left: list[str] = []
    read = [value for value in values.values() if isinstance(value, LazyTensor)]
    parts = _Parts([*read, *itertools.chain(*map(_stacked, read))], tensors)
    written = set[str]()
    for path, value in values.items():
        if not isinstance(value, LazyTensor) or not (value.file or value.name in tensors):
            entries[path] = None
        elif not parts.is_named(value) or set(path) & set("{}") or (entry := _entry(value, parts)) is None:
            left.append(path)
        else:
            place = repr(entry) if ".part" in repr(entry) else entry.names[0]
            entries[path] = entry.unsaved() if place in written else entry
            written.add(place)
    return entries, left


class _Parts:
    """Along which axis tensors are cut, and where: (tensor, axis) → the ranges that values are of."""

    def __init__(self, values: Iterable[LazyTensor], tensors: Mapping[str, LazyTensor]) -> None:
        # A decoded tensor may be a view of a source that has the name of a part.
        self._tensors = {_identity(tensor): (name, tensor) for name, tensor in tensors.items()}
        self._ranges: dict[tuple[str, int], set[tuple[int, int]]] = {}
        self._places: dict[str, set[tuple[str, int]]] = {}
        for value in map(_stored, values):
            name, _ = self.tensor(value)
            self._places.setdefault(name, set()).add((value.file, value.source.offset))
            for axis, start, stop in _cuts(value):
                self._ranges.setdefault((name, axis), set()).add((start, stop))

    def tensor(self, value: LazyTensor) -> tuple[str, LazyTensor]:
        """The tensor of which a value is, with its name in the checkpoint."""
        return self._tensors.get(_identity(value), (value.name, LazyTensor(value.source)))

    def is_named(self, value: LazyTensor) -> bool:
        """Returns True if the name of a value's tensor is that of no other, in another file, and no pattern."""
        name, _ = self.tensor(_stored(value))
        return len(self._places[name]) == 1 and not set(name) & set("{}")

    def of(self, value: LazyTensor) -> tuple[From, LazyTensor] | None:
        """The part of its tensor that a value consists of; None if parts of other values do not make up the rest."""
        name, whole = self.tensor(value)
        if value.size == whole.size:
            return From(name), whole
        for axis, start, stop in _cuts(value):
            ranges = sorted(self._ranges[name, axis])
            ends = [0, *(end for _, end in ranges)]
            if [begin for begin, _ in ranges] == ends[:-1] and ends[-1] == whole.shape[axis]:
                sizes = [end - begin for begin, end in ranges]
                of = len(sizes) if len(set(sizes)) == 1 else sizes
                taken = whole[(*(slice(None),) * axis, slice(start, stop))]
                return From(name).part(ranges.index((start, stop)), of, axis), taken
        return None


def _identity(value: LazyTensor) -> tuple[Any, ...]:
    source = value.source
    return source.name, source.file, source.offset, source.shape


def _stored(value: LazyTensor) -> LazyTensor:
    """The view of a stored tensor from which a value was made by a reshape in an order that is not the tensor's."""
    while isinstance(value.source, ConcatenatedTensor) and len(value.source.pieces) == 1:
        value = cast(LazyTensor, value.source.pieces[0])
    return value


def _cuts(value: LazyTensor) -> list[tuple[int, int, int]]:
    """The axes of its tensor, each with a range, that would be cut to get the elements of a value."""
    shape, found = value.source.shape, list[tuple[int, int, int]]()
    first = value.geometry().first // value.itemsize_stored
    for axis, extent in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        length, rest = divmod(value.size * extent, math.prod(shape) or 1)
        start, offset = divmod(first, inner or 1)
        if not rest and not offset and 0 < length < extent and start + length <= extent:
            found.append((axis, start, start + length))
    return found


def _entry(value: LazyTensor, parts: _Parts) -> From | None:
    if any(step.bitcast or step.function is not None for step in value.steps):
        return None
    if isinstance(value.source, ConcatenatedTensor):
        if pieces := _stacked(value):
            return _joined(value, pieces, parts)
        pieces, whole = value.source.pieces, LazyTensor(value.source)
        found = _entry(cast(LazyTensor, pieces[0]), parts) if len(pieces) == 1 else None
    else:
        found, whole = parts.of(value) or (None, value)
    return None if found is None else _rearranged(found, whole, value)


def _stacked(value: LazyTensor) -> list[LazyTensor]:
    """The views that a value stacks along a new axis; empty if it does not."""
    source = value.source
    if not isinstance(source, ConcatenatedTensor) or len(source.pieces) == 1 or not _same(value, LazyTensor(source)):
        return []
    pieces = [cast(LazyTensor, piece) for piece in source.pieces]
    return pieces if all(piece.shape[source.axis : source.axis + 1] == (1,) for piece in pieces) else []


def _joined(value: LazyTensor, pieces: list[LazyTensor], parts: _Parts) -> From | None:
    """The entry that joins tensors along their first axis and rearranges them, if a value stacks the same view of each.

    Joined, tensors of one shape follow each other: the stacked axis has the stride of a whole one.
    """
    names, wholes = zip(*map(parts.tensor, pieces), strict=True)
    first, shape = pieces[0].geometry(), wholes[0].shape
    alike = all(
        (piece.geometry().strides, piece.geometry().start, piece.size) == (first.strides, 0, whole.size)
        and whole.shape == shape
        and parts.is_named(piece)
        and not any(step.bitcast or step.function is not None for step in piece.steps)
        for piece, whole in zip(pieces, wholes, strict=True)
    )
    if not alike or not shape:
        return None
    whole, axis = LazyTensor(ConcatenatedTensor(wholes, 0)), cast(ConcatenatedTensor, value.source).axis
    strides = [*first.strides[:axis], wholes[0].size * pieces[0].itemsize_stored, *first.strides[axis + 1 :]]
    turned = whole.at(np.lib.stride_tricks.as_strided(whole.addresses, value.shape, strides, writeable=False))
    return _rearranged(From(*names, sizes=[shape[0]] * len(names)), whole, turned)


def _rearranged(source: From, whole: LazyTensor, value: LazyTensor) -> From | None:
    """The entry that makes a value of all elements of another one, by strides; None if none does."""
    if _same(value, whole):
        return source
    if _same(value, whole.T):
        return source.T
    own, other = (
        [(stride, stride * extent) for stride, extent in zip(view.geometry().strides, view.shape, strict=True)]
        for view in (value, whole)
    )
    # The axes common to both: between any two neighbouring bounds of either, within an axis of the tensor.
    bounds = sorted({bound for span in own for bound in span})
    names: dict[tuple[int, int], str] = {}
    before: list[list[str]] = []
    for low, high in other:
        spans = list(itertools.pairwise([low, *(bound for bound in bounds if low < bound < high), high]))[::-1]
        if any(stop % start for start, stop in spans):
            return None
        before.append([names.setdefault(span, f"axis{len(names)}") for span in spans if span[0] < span[1]])
    spans = sorted(names, reverse=True)
    after = [[names[low, high] for low, high in spans if start <= low and high <= stop] for start, stop in own]
    order = [name for group in after for name in group]
    if sorted(order) != sorted(names.values()):
        return None
    sizes = {name: high // low for (low, high), name in names.items()}
    turned = np.transpose(np.reshape(whole, list(sizes.values())), [list(sizes).index(name) for name in order])
    if not _same(value, cast(LazyTensor, np.reshape(turned, value.shape))):
        return None
    given = {name: size for name, size in sizes.items() if [name] not in after}  # others are axes of the variable
    return source.rearrange(" -> ".join(" ".join(map(_group, side)) for side in (before, after)), **given)


def _same(one: LazyTensor, two: LazyTensor) -> bool:
    """Returns True if views of a source have the same elements at the same places; strides of one element are any."""
    own, other = one.geometry(), two.geometry()
    differing = (n for n, a, b in zip(own.shape, own.strides, other.strides, strict=False) if a != b)
    return (own.start, own.shape) == (other.start, other.shape) and all(n == 1 for n in differing)


def _group(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"

"""Entries of a `WeightMap` from lazy values: from which tensor each value is, and how its axes were rearranged.

A loader that is ordinary code, such as a converter of KerasHub, leaves its steps in the strides of its lazy results.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np

from lazymodel._abstract.variable import Template
from lazymodel._mapping.entry import From
from lazymodel._show.text import grouped_by
from lazymodel._tensors.lazy import ConcatenatedTensor, LazyTensor

_NUMBER = re.compile(r"\{\w+\}|(?<!\d)\d+(?=[/._]|$)")


def recorded(
    values: Mapping[str, Any], tensors: Mapping[str, LazyTensor], paths: Iterable[str]
) -> tuple[dict[str, From | None], list[str]]:
    """The entry of each value, None for values of no tensor, and the paths of those that no entry can make.

    Equal entries of layers are one. `tensors` are those of the checkpoint; decoded ones may be views. `paths` are all
    of the model.
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
    return _folded(entries, [*paths]), left


def _folded(entries: dict[str, From | None], paths: list[str]) -> dict[str, From | None]:
    """The entries, with one in place of those that differ in a number of the path and of tensors' names alone."""
    matched = {path: {path} for path in entries}
    for column in range(max((len(_NUMBER.findall(path)) for path in entries), default=0)):
        found: dict[str, From | None] = {}
        for around, group in grouped_by(entries, partial(_around, column)).items():
            path, entry = _as_one(around, {path: entries[path] for path in group}) if len(group) > 1 else ("", None)
            own = set[str]().union(*(matched[each] for each in group))
            if path and {each for each in paths if Template(path).match(each) is not None} == own:
                found[path], matched[path] = entry, own
            else:
                found |= {each: entries[each] for each in group}
        entries = found
    return entries


def _around(column: int, path: str) -> tuple[str, ...]:
    """The text before and after a number of a path; the path if it has no such number."""
    match = next(itertools.islice(_NUMBER.finditer(path), column, None), None)
    return (path,) if match is None or match[0][0] == "{" else (path[: match.start()], path[match.end() :])


def _as_one(around: tuple[str, ...], entries: dict[str, From | None]) -> tuple[str, From | None]:
    """The path and the entry in place of several; no path if they differ in more than the number."""
    word = re.findall(r"[A-Za-z]+|$", around[0].lower())[-2:][0].removesuffix("s") or "n"
    capture = "{layer}" if word == "h" else f"{{{word}}}"
    path, read = capture.join(around), [entry for entry in entries.values() if entry is not None]
    if path.count(capture) > 1 or 0 < len(read) < len(entries):
        return "", None
    if not read:
        return path, None
    parts = ([re.split(r"(\d+)", name) for name in entry.names] for entry in read[:2])
    pairs = (zip(*both, strict=False) for both in zip(*parts, strict=False))
    one = read[0].with_names(["".join(mine if mine == other else capture for mine, other in pair) for pair in pairs])
    for own, entry in zip(entries, read, strict=True):
        number = own[len(around[0]) : len(own) - len(around[1])]
        if repr(one.with_names([name.replace(capture, number) for name in one.names])) != repr(entry):
            return "", None
    return path, one


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

"""Pieces of arrays that move between devices: which elements of which shard become which elements of another one.

A lazy tensor is a view of variables: transposed, reshaped, cut, joined, converted. Here it becomes `Copy` objects,
strided boxes of a source and of the target; and these, with the shardings of both, become a `Route`: the pieces that
each pair of devices exchanges. Only shapes and shardings are used, no array. `extras/sync/transfer` moves them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from jax.sharding import NamedSharding, Sharding

from lazymodel._errors import LazyModelError
from lazymodel._show.text import grouped_by
from lazymodel._tensors.boxes import Box, box_key, c_strides
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.convert import Steps
from lazymodel._tensors.lazy import ConcatenatedTensor
from lazymodel._tensors.tensor_source import ArrayTensor, TensorSource, View

Recipe: TypeAlias = "tuple[tuple[Route, tuple[int, ...]], ...]"  # of each target, its route and its arguments
_Shape: TypeAlias = "tuple[int, ...]"
_Ranges: TypeAlias = "tuple[tuple[int, int], ...]"  # start and stop, for each axis of a copy
_CONSTANT = -1  # the sender of what is in no variable
_Strided: TypeAlias = "list[tuple[int, int, int]]"  # axes: extent, stride in a source, stride in the target


class VariableSource(TensorSource):
    """A variable of an abstract model as a source of views; it has no values."""

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        raise LazyModelError(
            f"the mapping reads values of {self.name!r}: expected views, np.stack, np.concatenate, casts and "
            "arithmetic with scalars"
        )


@dataclasses.dataclass(frozen=True)
class Region:
    """Where the elements of a copy are in an array: of each axis, the dimension (-1 for none) and the step along it."""

    shape: _Shape
    origin: _Shape
    axes: tuple[tuple[int, int], ...]

    def within(self, extents: _Shape, box: _Ranges) -> list[_Ranges]:
        """The ranges of the copy's axes whose elements are in a box of the array, as few as possible."""
        found: list[dict[int, tuple[int, int]]] = [{}]
        for dimension, (start, stop) in enumerate(box):
            axes = [(extents[k], step, k) for k, (own, step) in enumerate(self.axes) if own == dimension]
            origin = self.origin[dimension]
            parts = list(_within(sorted(axes, key=lambda axis: -axis[1]), start - origin, stop - origin))
            found = [{**one, **part} for one in found for part in parts]
        return [tuple(one.get(k, (0, n)) for k, n in enumerate(extents)) for one in found]

    def digits(self, ranges: _Ranges, box: _Ranges) -> tuple[_Shape, _Shape, _Shape] | int:
        """How to cut such ranges from the array's shard: its shape with dimensions split, starts and extents there.
        An axis of the copy, along which it has to be divided, if that is impossible.
        """
        digits: list[tuple[int, int, int]] = []
        for dimension, (low, high) in enumerate(box):
            own = [(step, k) for k, (of, step) in enumerate(self.axes) if of == dimension]
            start = self.origin[dimension] - low + sum(step * ranges[k][0] for step, k in own)
            merged: list[tuple[int, int, int]] = []
            for step, k in sorted(own, reverse=True):
                extent = ranges[k][1] - ranges[k][0]
                if merged and merged[-1][1] == step * extent:
                    merged[-1] = (merged[-1][0] * extent, step, merged[-1][2])
                elif extent > 1:
                    merged.append((extent, step, k))
            if [step for _, step, _ in merged] in ([], [1]):
                extent = merged[0][0] if merged else 1
                digits.append((high - low, start, extent))
                continue
            size, outer = high - low, merged[0][2]
            for extent, step, _ in (*merged, *(((1, 1, 0),) if merged[-1][1] > 1 else ())):
                if size % step or start // step + extent > size // step:
                    return outer
                digits.append((size // step, start // step, extent))
                start, size = start % step, step
        return tuple(d[0] for d in digits), tuple(d[1] for d in digits), tuple(d[2] for d in digits)


def _within(axes: Sequence[tuple[int, int, int]], low: int, high: int) -> Iterator[dict[int, tuple[int, int]]]:
    """The indices of nested axes (extent, step, name) whose sum of steps is in a range, as boxes."""
    if not axes:
        if low <= 0 < high:
            yield {}
        return
    (extent, step, name), *rest = axes
    span = sum((n - 1) * each for n, each, _ in rest)  # of the other axes
    first, last = max(-((span - low) // step), 0), min((high - 1) // step, extent - 1)
    whole = max(-(-low // step), 0), min((high - 1 - span) // step, extent - 1)  # all of the other axes is inside
    if whole[0] <= whole[1]:
        yield {name: (whole[0], whole[1] + 1), **{other: (0, n) for n, _, other in rest}}
    for index in range(first, last + 1):
        if not whole[0] <= index <= whole[1]:
            for part in _within(rest, low - index * step, high - index * step):
                yield {name: (index, index + 1), **part}


@dataclasses.dataclass(frozen=True)
class Copy:
    """Elements of a source, which a target gets."""

    source: int | float | complex  # the number of the source; the value itself if `of` is None
    extents: _Shape
    of: Region | None
    to: Region
    dtype: np.dtype[Any]  # of the source's elements
    steps: Steps  # the conversions in between

    def order(self, *, every: bool = False) -> list[int]:
        """The axes in the target's order; those along which elements are repeated only if `every`."""
        return [k for k in self._by(self.to) if every or (self.of is not None and self.of.axes[k][0] >= 0)]

    def repeated(self) -> list[int]:
        """The places, in the target's order of all axes, of the axes along which elements are repeated."""
        return [n for n, k in enumerate(self._by(self.to)) if self.of is None or self.of.axes[k][0] < 0]

    def source_order(self) -> list[int]:
        """The axes in the source's order."""
        return [k for k in self._by(cast(Region, self.of)) if cast(Region, self.of).axes[k][0] >= 0]

    def moving(self) -> tuple[int, np.dtype[Any]]:
        """The conversions before it moves, and its dtype then: the first with the fewest bytes."""
        dtypes = [self.dtype, *(step.dtype for step in self.steps)]
        best = 0 if self.of is None else min(range(len(dtypes)), key=lambda n: dtypes[n].itemsize)
        return best, dtypes[best]

    def _by(self, place: Region) -> list[int]:
        return sorted(range(len(self.extents)), key=lambda k: (place.axes[k][0], -place.axes[k][1]))


def copies_of(path: str, tensor: View, shape: _Shape) -> tuple[tuple[str, ...], tuple[Copy, ...]]:
    """The names of the variables of which a lazy tensor consists, and their parts.

    Raises:
        LazyModelError: Some of its elements are not a strided box of a variable, or need other computations.
    """
    names: dict[str, int] = {}
    found: list[Copy] = []

    def add(view: View, start: Sequence[int], axes: list[tuple[int, int, int, int]], target: int, steps: Steps) -> None:
        """Adds elements of a view: of each axis, the extent, the view's dimension, the step, the target's stride."""
        geometry, size = view.geometry(), view.addresses.itemsize
        strides = [stride // size for stride in geometry.strides]
        first = geometry.start // size + sum(n * stride for n, stride in zip(start, strides, strict=True))
        strided = [(n, strides[own] * step if own >= 0 else 0, to) for n, own, step, to in axes]
        source, steps = view.source, (*view.steps, *steps)
        if isinstance(source, ArrayTensor):
            values = source.array.ravel()
            if values.size and (values == values[0]).all():
                to = _placed(strided, target, shape, 2)
                found.append(
                    Copy(
                        values[0].item(),
                        tuple(n for n, _, _ in to[2]),
                        None,
                        Region(shape, *to[:2]),
                        source.dtype,
                        steps,
                    )
                )
                return
        elif isinstance(source, VariableSource):
            of = _placed(strided, first, source.shape, 1)
            to = _placed(of[2], target, shape, 2)
            of = _placed(to[2], first, source.shape, 1)  # the same, with axes divided for the target as well
            number = names.setdefault(source.name, len(names))
            extents = tuple(n for n, _, _ in of[2])
            found.append(
                Copy(number, extents, Region(source.shape, *of[:2]), Region(shape, *to[:2]), source.dtype, steps)
            )
            return
        elif isinstance(source, ConcatenatedTensor):
            origin, places, strided = _placed(strided, first, source.shape, 1)
            middle, extents = Region(source.shape, origin, places), tuple(n for n, _, _ in strided)
            for part, box in source.places():
                for ranges in middle.within(extents, tuple((each.start, each.stop) for each in box)):
                    starts = [low for low, _ in ranges]
                    own = [
                        o + sum(s * low for (d, s), low in zip(places, starts, strict=True) if d == dimension)
                        for dimension, o in enumerate(origin)
                    ]
                    inner = [
                        (high - low, d, s, to)
                        for (low, high), (d, s), (_, _, to) in zip(ranges, places, strided, strict=True)
                    ]
                    begin = target + sum(low * to for low, (_, _, to) in zip(starts, strided, strict=True))
                    add(part, [o - each.start for o, each in zip(own, box, strict=True)], inner, begin, steps)
            return
        raise ValueError(f"{source.name!r} is computed in a way that devices cannot repeat")

    try:
        if math.prod(shape):
            targets = c_strides(shape, 1)
            whole = [(n, k, 1, to) for k, (n, to) in enumerate(zip(shape, targets, strict=True))]
            add(tensor, (0,) * len(shape), whole, 0, ())
    except ValueError as error:
        raise LazyModelError(
            f"{path!r}: its mapping cannot be planned: {error}. Expected views of variables (transposed, reshaped, "
            "cut, joined, repeated), casts, and arithmetic with one number"
        ) from error
    return tuple(names), tuple(found)


def _placed(
    axes: _Strided, first: int, shape: _Shape, side: int
) -> tuple[_Shape, tuple[tuple[int, int], ...], _Strided]:
    """Divides axes so that each moves along one dimension of an array of this shape, given by strides on one side.

    Returns the index of the first element, the dimension and the step of each axis, and the axes. Raises ValueError if
    an axis cannot be divided.
    """
    strides = c_strides(shape, 1)
    origin: list[int] = []
    for stride in strides:
        origin.append(first // stride if stride else 0)
        first -= origin[-1] * stride
    left, places, kept = list(reversed(axes)), list[tuple[int, int]](), list[tuple[int, int, int]]()
    while left:
        axis = left.pop()
        extent, stride = axis[0], axis[side]
        if extent == 1:
            continue
        if stride == 0:
            kept.append(axis)
            places.append((-1, 0))
            continue
        # The dimension with the largest stride that divides this one, if it has more than one index.
        fits = [d for d, n in enumerate(shape) if n > 1 and 0 < strides[d] <= stride]
        if stride < 0 or not fits or stride % strides[fits[0]]:
            raise ValueError("elements are in an order that is not one of its dimensions")
        dimension = fits[0]
        step, size = stride // strides[dimension], shape[dimension]
        if origin[dimension] + (extent - 1) * step < size:
            kept.append(axis)
            places.append((dimension, step))
            continue
        inner = size // step
        if size % step or origin[dimension] >= step or extent % inner:
            raise ValueError(f"a dimension of {size} is not divided evenly")
        left += [(inner, axis[1], axis[2]), (extent // inner, axis[1] * inner, axis[2] * inner)]
    return tuple(origin), tuple(places), kept


# Routes ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slot:
    """The static part of a piece: how it is cut from a shard, and put into another one."""

    copy: int
    lens: _Shape  # along the axes of the copy
    cut: tuple[_Shape, _Shape]  # the shape of the source's shard with dimensions split, and the extents of the piece
    put: tuple[_Shape, _Shape]  # the same of the target's

    def nbytes(self, copy: Copy) -> int:
        """Bytes of the piece while it moves."""
        own = 0 if copy.of is None else copy.moving()[1].itemsize
        return math.prod(self.lens[k] for k in copy.order()) * own


_Piece: TypeAlias = "tuple[Slot, _Shape, _Shape]"  # with its starts in both


@dataclasses.dataclass(frozen=True)
class Round:
    """Pieces of equal form that pairs of devices exchange; a device sends to at most one and gets from at most one."""

    pairs: tuple[tuple[int, int], ...]  # positions of the sending and the receiving devices
    stays: bool  # True if each pair is one device
    slots: tuple[Slot, ...]
    starts: tuple[tuple[tuple[_Shape, _Shape], ...], ...]  # of each slot, a row for each pair: in `cut` and in `put`


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """How a variable gets its value; variables of the same form share one."""

    copies: tuple[Copy, ...]
    sources: tuple[Sharding, ...]
    target: Sharding
    rounds: tuple[Round, ...]

    def sent_nbytes(self, *, stays: bool = False) -> int:
        """Bytes that all devices together send, or keep."""
        return sum(len(each.pairs) * self.round_nbytes(each) for each in self.rounds if each.stays == stays)

    def round_nbytes(self, each: Round) -> int:
        """Bytes of one pair of a round."""
        return sum(slot.nbytes(self.copies[slot.copy]) for slot in each.slots)

    @property
    def order(self) -> tuple[Any, ...]:
        """The devices of the sources, in order."""
        return device_order(self.sources[0] if self.sources else self.target)

    @property
    def computed(self) -> bool:
        """True if values change on the way."""
        return any(copy.steps for copy in self.copies)


def device_order(sharding: Sharding) -> tuple[Any, ...]:
    """The devices of a sharding, in the order of its mesh."""
    if isinstance(sharding, NamedSharding):
        return tuple(cast(Any, sharding.mesh).devices.flat)
    devices = tuple(cast(Any, sharding).device_set)
    if len(devices) > 1:
        raise LazyModelError(
            f"{sharding} does not show which device holds what: jax.device_put(array, NamedSharding(mesh, spec)) first"
        )
    return devices


@functools.lru_cache(maxsize=4096)
def route(copies: tuple[Copy, ...], sources: tuple[Sharding, ...], target: Sharding) -> Route:
    """Decides for each element of each shard of the target from which device it comes: its own if possible."""
    there = device_order(target)
    here = device_order(sources[0]) if sources else there
    where = {device: position for position, device in enumerate(here)}
    kept = [where.get(device, -1) for device in there]  # the position, as a source, of each receiving device
    load: collections.Counter[int] = collections.Counter()  # pieces that each device sends
    pairs: dict[tuple[int, int], list[_Piece]] = collections.defaultdict(list)
    for number, copy in enumerate(copies):
        holders = _holders(target, copy.to.shape, there)
        given = {} if copy.of is None else _holders(sources[int(cast(Any, copy.source))], copy.of.shape, here)
        parts = [(box, part) for box in given for part in cast(Region, copy.of).within(copy.extents, box)]
        for to, receivers in holders.items():
            for ranges in copy.to.within(copy.extents, to):
                if copy.of is None:
                    for slot, begin, end in _slots(number, copy, ranges, (), to):
                        for receiver in receivers:
                            pairs[_CONSTANT, receiver].append((slot, begin, end))
                for of, part in parts:
                    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(ranges, part, strict=True))
                    if all(low < high for low, high in common):
                        found = list(_slots(number, copy, common, of, to))
                        for receiver in receivers:
                            own = kept[receiver]
                            best = min(given[of], key=lambda s: (s != own, load[s], (s - receiver) % len(here)))
                            load[best] += best != own
                            pairs[best, receiver] += found
    return Route(copies, sources, target, tuple(_rounds(pairs, kept)))


def _rounds(pairs: Mapping[tuple[int, int], list[_Piece]], kept: Sequence[int]) -> Iterator[Round]:
    """Rounds of pairs that exchange pieces of equal form."""
    together: dict[Hashable, list[tuple[int, int]]] = collections.defaultdict(list)
    for (sender, receiver), pieces in pairs.items():
        pieces.sort(key=lambda piece: dataclasses.astuple(piece[0]))
        stays = sender in (_CONSTANT, kept[receiver])
        together[stays, sender == _CONSTANT, tuple(slot for slot, _, _ in pieces)].append((sender, receiver))
    for (stays, _, slots), members in cast(Any, together).items():
        for matched in [members] if stays else _matchings(members):
            starts = [tuple(pairs[pair][n][1:] for pair in matched) for n in range(len(slots))]
            yield Round(tuple(matched), stays, slots, tuple(starts))


def _matchings(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divides pairs so that each device sends, and gets, at most once in each part; as few parts as possible.

    This colours the edges of a bipartite graph: where no colour is free at both ends, two are swapped along a path.
    """
    ends: tuple[dict[Any, int], dict[Any, int]] = ({}, {})  # (sender, colour) → receiver, and the other way

    def free(side: int, end: int) -> int:
        return next(colour for colour in itertools.count() if (end, colour) not in ends[side])

    for pair in pairs:
        colour, other = free(0, pair[0]), free(1, pair[1])
        path, side, end = list[tuple[int, int, int]](), 1, pair[1]
        while (following := ends[side].get((end, colour if side else other))) is not None:
            path.append((side, end, following))
            side, end = 1 - side, following
        for side, end, following in path:
            was = colour if side else other
            del ends[side][end, was], ends[1 - side][following, was]
        for side, end, following in path:
            now = other if side else colour
            ends[side][end, now], ends[1 - side][following, now] = following, end
        ends[0][pair[0], colour], ends[1][pair[1], colour] = pair[1], pair[0]
    parts: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for (sender, colour), receiver in ends[0].items():
        parts[colour].append((sender, receiver))
    return [sorted(parts[colour]) for colour in sorted(parts)]


def _holders(sharding: Sharding, shape: _Shape, order: Sequence[Any]) -> dict[_Ranges, list[int]]:
    """The boxes of a sharding, with the positions of the devices that hold them."""
    indices = sharding.devices_indices_map(shape)
    return grouped_by(range(len(order)), lambda position: box_key(indices[order[position]], shape))


def _slots(number: int, copy: Copy, ranges: _Ranges, of: _Ranges, to: _Ranges) -> Iterator[_Piece]:
    """The slots of a piece, with its starts in the shards of both; it is divided where it is no box of them."""
    cut = copy.of.digits(ranges, of) if copy.of is not None else ((), (), ())
    put = copy.to.digits(ranges, to)
    if isinstance(cut, int) or isinstance(put, int):
        axis = cut if isinstance(cut, int) else cast(int, put)
        for index in range(*ranges[axis]):
            yield from _slots(number, copy, (*ranges[:axis], (index, index + 1), *ranges[axis + 1 :]), of, to)
        return
    lens = tuple(high - low for low, high in ranges)
    yield Slot(number, lens, (cut[0], cut[2]), (put[0], put[2])), cut[1], put[1]


# Exchanges -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece that pairs of devices exchange."""

    target: int
    source: int | None  # the number of the argument; None for a constant
    copy: Copy
    slot: Slot
    starts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # for each pair, where it is cut, and put


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Pieces that move at the same time: each device sends to one other at most."""

    pairs: Sequence[tuple[int, int]]  # positions of the sending and the receiving devices
    stays: bool
    parts: Sequence[Part]

    def only(self, chosen: Callable[[int, int], bool]) -> Exchange:
        """What of it is between the pairs of devices that are chosen."""
        numbers = [n for n, pair in enumerate(self.pairs) if chosen(*pair)]
        parts = [dataclasses.replace(part, starts=[part.starts[n] for n in numbers]) for part in self.parts]
        return Exchange([self.pairs[n] for n in numbers], self.stays, parts)


def exchanges(recipe: Recipe) -> list[Exchange]:
    """What devices exchange for a group's variables, in order."""
    together: dict[Any, list[Part]] = collections.defaultdict(list)
    for number, (own, given) in enumerate(recipe):
        for each in own.rounds:
            for slot, starts in zip(each.slots, each.starts, strict=True):
                copy = own.copies[slot.copy]
                source = given[cast(int, copy.source)] if copy.of is not None else None
                together[each.pairs, each.stays].append(Part(number, source, copy, slot, starts))
    return [Exchange(pairs, stays, parts) for (pairs, stays), parts in together.items()]


def by_receivers(given: Sequence[Exchange]) -> tuple[list[Exchange], dict[tuple[int, int], int]]:
    """The same pieces in as few exchanges as those who receive them need, whatever each sends; and in which of these
    each pair is, by the numbers of its exchange and of the pair there.
    """
    alike: dict[Any, dict[int, list[tuple[int, int]]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for number, exchange in enumerate(given):
        form = tuple((part.target, part.source, part.copy, part.slot) for part in exchange.parts)
        for row, (_, receiver) in enumerate(exchange.pairs):
            alike[form, exchange.stays][receiver].append((number, row))
    found, became = list[Exchange](), dict[tuple[int, int], int]()
    for (_, stays), received in alike.items():
        for some in itertools.zip_longest(*received.values()):
            members = [each for each in some if each is not None]
            became |= dict.fromkeys(members, len(found))
            parts = [
                dataclasses.replace(part, starts=[given[number].parts[n].starts[row] for number, row in members])
                for n, part in enumerate(given[members[0][0]].parts)
            ]
            found.append(Exchange([given[number].pairs[row] for number, row in members], stays, parts))
    return found, became

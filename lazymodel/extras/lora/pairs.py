"""LoRA pairs through the entry of their base, in both directions: an adapter's product, and the factors of a variable.

An entry makes a variable of tensors. A tensor is seen as a matrix, its first axis by all others, to which a product of
low rank is added. Where each axis of the variable runs over rows only, or over columns only, a product is added to the
variable, too. To find out, the numbers of elements are sent through the entry in place of tensors, and read along each
axis. Other entries are refused; merging works for all. All values are lazy tensors, so nothing is read of these here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.pairs import RANK, Axes, LoraPair
from lazymodel._abstract.variable import Captures
from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._mapping.entry import From, joined_names, unstacked, variable_of
from lazymodel._mapping.initial import initial_value
from lazymodel._mapping.resolve import given_checkpoint
from lazymodel._mapping.source import MappedCheckpoint
from lazymodel._mapping.table import WeightMap, map_checkpoint
from lazymodel._show.text import closest, listed
from lazymodel._tensors.boxes import Geometry
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.convert import Steps, assign
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.tensor_source import TensorSource

_MERGE = "lm.merge(checkpoint, adapter)"
_Shape: TypeAlias = "tuple[int, ...]"
_Fixed: TypeAlias = "Mapping[int, int]"  # axis of a variable → index


@dataclasses.dataclass(frozen=True)
class LowRank:
    """What is added to a tensor, seen as a matrix: `scale * b @ a.T`; if `flipped`, the transpose of it.

    `a` is `(inputs, rank)` and `b` is `(outputs, rank)`. A tensor is flipped if it is stored as `(in, out)`.
    """

    a: LazyTensor
    b: LazyTensor
    scale: float
    flipped: bool
    shape: tuple[int, ...]  # of the tensor


class PairSource(Protocol):
    """An adapter, as `WeightMap.adapters` needs it."""

    path: str

    def fit(self, checkpoint: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, LowRank]]:
        """The checkpoint with what the adapter replaces, and what it adds to its tensors, by their names."""
        ...


class _Indices(TensorSource):
    """The number of each element in C order, from 1."""

    name, file, offset, dtype = "indices", "", 0, np.dtype(np.float64)

    def __init__(self, shape: _Shape) -> None:
        self.shape = shape

    def fill(self, geometry: Geometry, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        steps_of_axes = [stride // self.dtype.itemsize for stride in geometry.strides]
        lines = np.ix_(*(np.arange(n) * step for n, step in zip(geometry.shape, steps_of_axes, strict=True)))
        assign(out, np.asarray(1.0 + geometry.start // self.dtype.itemsize + sum(lines)), steps)


@dataclasses.dataclass(frozen=True)
class _Side:
    """The rows or the columns of a matrix, and the axes of a variable that run over them."""

    count: int
    start: int  # where the variable begins
    offsets: Mapping[int, np.ndarray]  # axis → for each index how far it is from there

    def first(self, fixed: _Fixed) -> int:
        """Where the variable begins if some axes are fixed."""
        return self.start + sum(int(self.offsets[axis][index]) for axis, index in fixed.items() if axis in self.offsets)

    def parts(self, axis: int) -> list[tuple[int, int]]:
        """An axis as axes with a step each: extent and step, such as that of heads and that within a head."""
        offsets, found = self.offsets[axis], list[tuple[int, int]]()
        while len(offsets) > 1:
            step = int(offsets[1] - offsets[0])
            other = np.flatnonzero(offsets != offsets[0] + step * np.arange(len(offsets)))
            extent = int(other[0]) if len(other) else len(offsets)
            rows = offsets.reshape(-1, extent) if len(offsets) % extent == 0 else offsets[:0].reshape(-1, 1)
            if step < 1 or not rows.size or np.any(rows - rows[:, :1] != step * np.arange(extent)):
                raise ValueError("an axis of the variable has indices in an order of its own")
            found.insert(0, (extent, step))
            offsets = offsets[::extent]
        return found


@dataclasses.dataclass(frozen=True)
class _TensorPlace:
    """A part of a variable, and the tensors that it is made of, joined to one matrix."""

    fixed: _Fixed  # the part's place: indices along the axes of stacked tensors
    names: Mapping[str, tuple[int, int]]  # tensor → its range of rows or of columns
    by_rows: bool  # whether tensors are joined along rows
    shape: _Shape  # of what they are joined to, with all its axes
    rows: _Side
    columns: _Side
    factor: float  # the variable is so many times the tensors

    def sides(self, flipped: bool) -> tuple[_Side, _Side]:
        """The sides of `a` and of `b`."""
        return (self.rows, self.columns) if flipped else (self.columns, self.rows)

    def misplaced(self, axes: tuple[Axes, Axes], flipped: bool) -> Axes:
        """The axes that a factor has though they run over the other factor's side."""
        sides = zip(axes, reversed(self.sides(flipped)), strict=True)
        return tuple(axis for of, other in sides for axis in of if axis in other.offsets)


def _sides(source: From, shape: _Shape, axes: Sequence[int]) -> tuple[_Shape, _Side, _Side, float]:
    """What a variable whose axes have these numbers is made of: the tensors' shape, rows, columns, and factor."""
    view, whole = variable_of(source, shape, lambda shape: LazyTensor(_Indices(shape)))
    if len(whole) < 2:
        raise ValueError(f"{source.names[0]!r}, {list(whole)}, is no matrix")
    ones, _ = variable_of(source, shape, lambda shape: lazy(np.broadcast_to(np.ones(()), shape)))
    factor = float(ones[(0,) * ones.ndim])

    def places(index: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        return np.divmod(np.rint(np.asarray(view[index]) / factor).astype(np.int64) - 1, math.prod(whole[1:]))

    starts = places((0,) * view.ndim)
    offsets: tuple[dict[int, np.ndarray], dict[int, np.ndarray]] = {}, {}
    for number, axis in enumerate(axes):
        index = (*(0,) * number, slice(None), *(0,) * (view.ndim - number - 1))
        moves = [line - start for line, start in zip(places(index), starts, strict=True)]
        if moves[0].any() and moves[1].any():
            raise ValueError("an axis of the variable runs over inputs and outputs")
        if view.shape[number] > 1:
            offsets[not moves[0].any()][axis] = moves[not moves[0].any()]
    rows = _Side(whole[0], int(starts[0]), offsets[0])
    return whole, rows, _Side(math.prod(whole[1:]), int(starts[1]), offsets[1]), factor


def _places(
    entry: tuple[From, Captures], shape: _Shape, tensors: Mapping[str, Any] | None = None
) -> Iterator[_TensorPlace]:
    """The places of a variable of this shape; ValueError if there are none.

    `tensors` give the sizes of joined tensors if the entry does not.
    """
    if 0 in shape:
        raise ValueError(f"the variable, {list(shape)}, is empty")
    found: tuple[_Shape, _Side, _Side, float] | None = None  # the same for all layers
    for fixed, source, captures in unstacked(*entry, shape):
        if found is None:
            axes = [axis for axis in range(len(shape)) if axis not in fixed]
            found = _sides(source, tuple(shape[axis] for axis in axes), axes)
        whole, rows, columns, factor = found
        names, along = joined_names(source, captures, whole, tensors)
        if along > 1:
            raise ValueError(f"tensors are joined along axis {along}")
        if along == 1:
            unit = math.prod(whole[2:])
            names = {name: (lo * unit, hi * unit) for name, (lo, hi) in names.items()}
        yield _TensorPlace(fixed, names, along == 0, whole, rows, columns, factor)


def _scaled(factor: LazyTensor, scale: float) -> LazyTensor:
    """Multiplied in float32 at least; by a power of two this changes no digits."""
    return factor if scale == 1 else factor.astype(np.result_type(np.float32, factor.dtype)) * scale


def _zeros(shape: _Shape, dtype: Any = np.float32) -> LazyTensor:
    return lazy(np.broadcast_to(np.zeros((), dtype), shape))


def _concatenated(parts: Sequence[LazyTensor], axis: int) -> LazyTensor:
    parts = [part for part in parts if part.shape[axis]] or parts[:1]
    return parts[0] if len(parts) == 1 else cast(Any, np.concatenate(cast(Any, parts), axis))


def _padded(factor: LazyTensor, start: int, count: int) -> LazyTensor:
    """A factor with rows of zeros before and after it, `count` in all."""
    before, after = ((n, factor.shape[1]) for n in (start, count - start - factor.shape[0]))
    return _concatenated([_zeros(before, factor.dtype), factor, _zeros(after, factor.dtype)], 0)


def _summed(products: Sequence[LowRank]) -> LowRank:
    """The sum of products as one, whose rank is the sum of theirs."""
    if len(products) == 1:
        return products[0]
    first = products[0]
    if any(each.flipped != first.flipped for each in products):
        raise ValueError("its tensors are stored partly as (in, out)")
    b = [_scaled(each.b, each.scale / first.scale) for each in products]
    a = [each.a for each in products]
    return dataclasses.replace(first, a=_concatenated(a, 1), b=_concatenated(b, 1))


def _split_shape(pair: LoraPair, axes: Axes, shape: _Shape) -> _Shape:
    """The shape of a factor with each of these axes by itself, though the factor may have several as one."""
    rank = math.prod(shape) // math.prod(pair.shape[axis] for axis in axes if axis != RANK)
    return tuple(rank if axis == RANK else pair.shape[axis] for axis in axes)


def _box(axes: Axes, fixed: _Fixed) -> tuple[slice, ...]:
    """The part of a factor with these axes at fixed indices of some."""
    return tuple(slice(fixed[axis], fixed[axis] + 1) if axis in fixed else slice(None) for axis in axes)


# Into a model ---------------------------------------------------------------------------------------------------------


def kept_pairs(
    table: WeightMap, checkpoint: Any, adapter: PairSource, abstract: ModelSpec, scale: float | None
) -> MappedCheckpoint:
    """The checkpoint and adapter of `WeightMap.adapters`."""
    if not callable(getattr(cast(Any, adapter), "fit", None)):
        raise CheckpointError(f"expected an adapter, found {adapter!r}; open one: lm.open_adapter(folder)")
    if not isinstance(cast(Any, abstract), ModelSpec):
        raise LazyModelError(f"adapters are for an abstract model; got {type(abstract).__name__}")
    pairs = with_scale(abstract.framework.lora_pairs(abstract), scale)
    if not pairs:
        raise LazyModelError(f"{abstract.name} has no LoRA pairs; build it with them, or merge: {_MERGE}")
    base, added = adapter.fit(given_checkpoint(checkpoint))
    own = {path for pair in pairs for path in (pair.a, pair.b)}
    others = {path: variable for path, variable in abstract.items() if path not in own}
    found = map_checkpoint(base, table, abstract.with_variables(others))
    taken: set[str] = set()
    for pair in pairs:
        entries = [(source, captures) for _, source, captures in table.entries_of(pair.base) if source is not None]
        if not entries:
            continue
        shapes = abstract[pair.a].shape, abstract[pair.b].shape
        try:
            values, names = _pair_values(
                pair, entries[0], added, shapes, base, lambda path: initial_value(abstract, path)
            )
        except ValueError as error:
            raise CheckpointError(
                f"adapter {adapter.path}: its product cannot be kept in {pair.a!r} {list(shapes[0])}, {pair.b!r} "
                f"{list(shapes[1])}, whose base is {entries[0][0]}: {error}; or merge it instead: {_MERGE}"
            ) from error
        found.update(values)
        taken |= names
    if left := [name for name in added if name not in taken]:
        raise CheckpointError(
            f"adapter {adapter.path}: expected a LoRA pair of {abstract.name} for each tensor that it changes, "
            f"found none for {len(left)} of {len(added)}: {listed(map(repr, left))}; build the model with pairs "
            f"for these, or merge it instead: {_MERGE}"
        )
    return found


def _pair_values(
    pair: LoraPair,
    entry: tuple[From, Captures],
    added: Mapping[str, LowRank],
    shapes: tuple[_Shape, _Shape],
    tensors: Mapping[str, Any],
    initial: Callable[[str], LazyTensor],
) -> tuple[dict[str, LazyTensor], set[str]]:
    """The values of a pair, by path, and the names of the tensors to which they are added; none if there are none.

    The pair of a tensor to which nothing is added has its initial `a`, and zeros as `b`; so has what a model's rank
    exceeds an adapter's by. The outputs are those of the adapter, and training can use all of the rank.

    Args:
        pair: The pair; its scale is known.
        entry: That of its base.
        added: Tensor → what is added to it.
        shapes: Those of `a` and of `b`.
        tensors: The checkpoint.
        initial: Path → its initial values.

    Raises:
        ValueError: The pair cannot have what is added; why.
    """
    places = list(_places(entry, pair.shape, tensors))
    sums = [_sum_at(place, added) for place in places]
    if (first := next((each for each in sums if each is not None), None)) is None:
        return {}, set()
    fixed = places[0].fixed
    for axes in pair.axes:
        if not places[0].misplaced(axes, first.flipped) and all(axis in of for axis in fixed for of in axes):
            break
    else:
        raise ValueError("the model's pair does not divide its axes into inputs and outputs, or is shared by layers")
    values: dict[str, LazyTensor] = {}
    for index, path in enumerate((pair.a, pair.b)):
        of = axes[index]
        default = _split_shape(pair, of, shapes[index])
        start = _zeros(default) if index else initial(path).reshape(default)
        parts: list[LazyTensor] = []
        for place, each in zip(places, sums, strict=True):
            part = start[_box(of, place.fixed)]
            if each is not None:
                factor = _scaled(each.b, each.scale * place.factor / cast(float, pair.scale)) if index else each.a
                factor = _spread(factor, of, place.sides(first.flipped)[index], pair.shape)
                part = _with_rank(factor, part, of.index(RANK))
            parts.append(part)
        for axis in reversed(fixed):
            count = pair.shape[axis]
            parts = [_concatenated(parts[n : n + count], of.index(axis)) for n in range(0, len(parts), count)]
        values[path] = parts[0].reshape(shapes[index])
    return values, {name for place in places for name in place.names if name in added}


def _sum_at(place: _TensorPlace, added: Mapping[str, LowRank]) -> LowRank | None:
    """What is added to the tensors of a place, as one product."""
    found: list[LowRank] = []
    for name, (start, _) in place.names.items():
        if (low := added.get(name)) is not None:
            joined_at_b = place.by_rows != low.flipped
            a, b = (side.count for side in place.sides(low.flipped))
            starts = (0, start) if joined_at_b else (start, 0)
            found.append(dataclasses.replace(low, a=_padded(low.a, starts[0], a), b=_padded(low.b, starts[1], b)))
    return _summed(found) if found else None


def _spread(factor: LazyTensor, axes: Axes, side: _Side, shape: _Shape) -> LazyTensor:
    """A factor with the axes of a variable in place of its first; axes that are not of its side have one index."""
    row, rank = factor.addresses.strides
    parts = [[(1, 0)] if axis not in side.offsets else side.parts(axis) for axis in axes if axis != RANK]
    parts.insert(axes.index(RANK), [(factor.shape[1], 0)])
    strides = [rank if axis == RANK else row * step for axis, of in zip(axes, parts, strict=True) for _, step in of]
    begin = factor.addresses[side.start :]
    split = np.lib.stride_tricks.as_strided(begin, [n for of in parts for n, _ in of], strides, subok=True)
    return factor.at(split).reshape([math.prod(n for n, _ in of) for of in parts])


def _with_rank(factor: LazyTensor, start: LazyTensor, axis: int) -> LazyTensor:
    """A factor with the rank that the model's has: the rest is from `start`."""
    rank, most = factor.shape[axis], start.shape[axis]
    if rank > most:
        raise ValueError(f"the adapter's rank is {rank}, that of the model {most}; build it with {rank}")
    rest = start[(*(slice(None),) * axis, slice(rank, None))]
    return _concatenated([factor, rest.astype(np.result_type(factor.dtype, rest.dtype))], axis)


# Out of a model -------------------------------------------------------------------------------------------------------


def pair_products(table: WeightMap, pairs: Iterable[LoraPair], arrays: Mapping[str, LazyTensor]) -> dict[str, LowRank]:
    """Tensor → what LoRA pairs add to it: the inverse direction of `kept_pairs`. Their scales are known.

    Raises:
        LazyModelError: A pair's base has no entry or several, or the pair cannot be separated into inputs and outputs
            of tensors; names it.
    """
    found: list[tuple[LoraPair, tuple[From, Captures]]] = []
    for pair in pairs:
        entries = [(source, captures) for _, source, captures in table.entries_of(pair.base) if source is not None]
        if len(entries) != 1:
            what = "several entries" if entries else f"no entry{closest(pair.base, table.paths)}"
            raise LazyModelError(
                f"{pair.base!r}, to which {pair.a!r} and {pair.b!r} belong, has {what} in the table; give it one"
            )
        found.append((pair, entries[0]))
    places = [_checked(pair, entry, arrays) for pair, entry in found]
    orientations = [_orientations(pair, of[0]) for (pair, _), of in zip(found, places, strict=True)]
    # A square matrix is stored as the others are, by default as PyTorch does.
    default = {next(iter(each)) for each in orientations if len(each) == 1} == {True}
    products: dict[str, list[LowRank]] = {}
    for (pair, entry), of, each in zip(found, places, orientations, strict=True):
        with _explained(pair, entry[0], arrays):
            flipped = default if default in each else not default
            for name, low in _products(pair, of, flipped, arrays[pair.a], arrays[pair.b]):
                products.setdefault(name, []).append(low)
    return {name: _summed(each) for name, each in products.items()}


@contextlib.contextmanager
def _explained(pair: LoraPair, source: From, arrays: Mapping[str, LazyTensor]) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        factors = ", ".join(f"{path!r} {list(arrays[path].shape)}" for path in (pair.a, pair.b))
        raise LazyModelError(
            f"LoRA pair {factors} cannot be written as an adapter of {source}: {error}; save the merged model instead"
        ) from error


def _checked(pair: LoraPair, entry: tuple[From, Captures], arrays: Mapping[str, LazyTensor]) -> list[_TensorPlace]:
    with _explained(pair, entry[0], arrays):
        if entry[0].read_only:
            raise ValueError("the entry ends with .unsaved()")
        return list(_places(entry, pair.shape))


def _orientations(pair: LoraPair, place: _TensorPlace) -> set[bool]:
    """Whether tensors are flipped, as far as the axes of factors say it."""
    misplaced = {flipped: min(len(place.misplaced(axes, flipped)) for axes in pair.axes) for flipped in (False, True)}
    return {flipped for flipped, count in misplaced.items() if count == min(misplaced.values())}


def _products(
    pair: LoraPair, places: Sequence[_TensorPlace], flipped: bool, a: LazyTensor, b: LazyTensor
) -> Iterator[tuple[str, LowRank]]:
    """What a pair adds to the tensors of its base, by name. There may be several products for a tensor."""
    for place in places:
        axes = min(pair.axes, key=lambda axes: len(place.misplaced(axes, flipped)))
        # Axes of the other side are taken apart: a product for each index.
        loose = place.misplaced(axes, flipped)
        for index in itertools.product(*(range(pair.shape[axis]) for axis in loose)):
            fixed = {**place.fixed, **dict(zip(loose, index, strict=True))}
            matrices = [
                _matrix(factor.reshape(_split_shape(pair, of, factor.shape)), of, side, fixed)
                for factor, of, side in zip((a, b), axes, place.sides(flipped), strict=True)
            ]
            starts = [side.first(fixed) for side in place.sides(flipped)]
            yield from _by_tensor(place, matrices, starts, flipped, cast(float, pair.scale) / place.factor)


def _matrix(factor: LazyTensor, axes: Axes, side: _Side, fixed: _Fixed) -> LazyTensor:
    """A factor as a matrix `(rows of a side, rank)`, at fixed indices."""
    own = [axis for axis in axes if axis in side.offsets and axis not in fixed]
    others = [axis for axis in axes if axis not in (*own, RANK)]
    parts = [part for axis in own for part in side.parts(axis)]
    order = sorted(range(len(parts)), key=lambda number: -parts[number][1])
    extents = [parts[number][0] for number in order]
    if [parts[number][1] for number in order] != [math.prod(extents[n + 1 :]) for n in range(len(order))]:
        raise ValueError("the variable has rows or columns of its tensors that do not follow each other")
    turned = factor[_box(axes, fixed)].transpose([axes.index(axis) for axis in (*others, *own, RANK)])
    rank = turned.shape[-1]
    split = turned.reshape(*(n for n, _ in parts), rank).transpose(*order, len(parts))
    return split.reshape(math.prod(extents), rank)


def _by_tensor(
    place: _TensorPlace, matrices: Sequence[LazyTensor], starts: Sequence[int], flipped: bool, scale: float
) -> Iterator[tuple[str, LowRank]]:
    """A product that begins at some row and column of a place, cut into those of its tensors."""
    joined = int(place.by_rows != flipped)  # the factor along which tensors are joined
    for name, (lo, hi) in place.names.items():
        start, matrix = starts[joined], matrices[joined]
        begin, end = max(lo, start), min(hi, start + matrix.shape[0])
        if begin >= end:
            continue
        factors, counts = list(matrices), [side.count for side in place.sides(flipped)]
        firsts = list(starts)
        factors[joined], firsts[joined], counts[joined] = matrix[begin - start : end - start], begin - lo, hi - lo
        a, b = (_padded(*each) for each in zip(factors, firsts, counts, strict=True))
        axis, unit = (0, 1) if place.by_rows else (1, math.prod(place.shape[2:]))
        shape = (*place.shape[:axis], (hi - lo) // unit, *place.shape[axis + 1 :])
        yield name, LowRank(a, b, scale, flipped, shape)


def of_rank(low: LowRank, rank: int) -> tuple[LowRank, float]:
    """The product of a lower rank that is closest to this one, and its relative error; reads the factors.

    By the theorem of Eckart and Young it is that of the largest singular values. The product itself is not computed.
    """
    (left, upper), (right, lower) = (np.linalg.qr(np.asarray(factor, np.float64)) for factor in (low.b, low.a))
    outputs, sizes, inputs = np.linalg.svd(upper @ lower.T, full_matrices=False)
    root = np.sqrt(sizes[:rank])
    b, a = (left @ outputs[:, :rank] * root, right @ inputs[:rank].T * root)
    error = float(np.linalg.norm(sizes[rank:]) / (np.linalg.norm(sizes) or 1))
    return dataclasses.replace(low, a=lazy(a.astype(np.float32)), b=lazy(b.astype(np.float32))), error


def with_scale(pairs: Iterable[LoraPair], scale: float | None) -> list[LoraPair]:
    """The pairs with a user's scale if their own is unknown.

    Raises:
        LazyModelError: None is given for one that needs it, or another one than it has; or it is no number.
    """
    if scale is not None and not (math.isfinite(scale) and scale):
        raise LazyModelError(f"expected a finite scale other than 0, found {scale!r}; it is the model's alpha / rank")
    found: list[LoraPair] = []
    for pair in pairs:
        if pair.scale is None and scale is None:
            raise LazyModelError(
                f"LoRA pair {pair.a!r}: expected the factor with which the model multiplies a @ b, which its layer "
                "does not state; pass scale=, such as alpha / rank, or 1.0 if there is none"
            )
        if None not in (pair.scale, scale) and pair.scale != scale:
            raise LazyModelError(
                f"LoRA pair {pair.a!r}: its layer multiplies a @ b with {pair.scale}, found scale={scale}; leave it out"
            )
        found.append(dataclasses.replace(pair, scale=scale if pair.scale is None else pair.scale))
    return found

"""How one shape is made of another: axes in another order, split or merged, and numbered tensors stacked."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

from lazymodel._mapping.entry import From
from lazymodel._mapping.names import Family

Shape: TypeAlias = "tuple[int, ...]"
_Groups: TypeAlias = "tuple[tuple[int, ...], ...]"
_MOST_AXES = 6  # beyond which arrangements are not looked for: there are too many, and no network has them
_KERNELS = {3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}  # of convolutions: PyTorch's order as (…, in, out)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Groups of axes of the tensor and of the variable; whichever has fewer has some in one."""

    before: _Groups
    after: _Groups

    @property
    def order(self) -> tuple[int, ...] | None:
        """The order of the tensor's axes, where none is split or merged."""
        if any(len(group) != 1 for group in (*self.before, *self.after)):
            return None
        return tuple(self.before.index(group) for group in self.after)

    def add(self, source: From, v: Family, shape: Shape) -> From:
        """The steps that do it."""
        if (order := self.order) is None:
            names = self._names(v)
            sides = [
                " ".join(_group([names[axis] for axis in group]) for group in side)
                for side in (self.before, self.after)
            ]
            # What is merged in the variable cannot be told apart again without its extents.
            known = {
                names[axis]: shape[self.before.index((axis,))] for g in self.after if len(g) > 1 for axis in g[:-1]
            }
            return source.rearrange(" -> ".join(sides), **known)
        if order == tuple(range(len(order))):
            return source
        return source.T if order == tuple(reversed(range(len(order)))) else source.transpose(*order)

    def _names(self, v: Family) -> list[str]:
        axes = sum(len(group) for group in self.before)
        wide = [group for group in (*self.before, *self.after) if len(group) > 1]
        if len(wide) == 1 and v.words & {"query", "key", "value", "out", "attention"} and len(wide[0]) in (2, 3):
            called = dict(zip(wide[0], ("parts", "heads", "dim")[-len(wide[0]) :], strict=True))
            if axes - len(called) <= 1:
                return [called.get(axis, "model") for axis in range(axes)]
        return [chr(ord("a") + axis) for axis in range(axes)]

    def out_first(self, v: Family) -> bool:
        """Whether the first of two axes of the tensor is what the kernel computes.

        A kernel's last axis is; queries', keys' and values' heads are, and those of what puts them together are not.
        """
        first = self.before[0]
        heads = next((group for group in self.before if len(group) > 1), None)
        if heads is not None and v.words & {"query", "key", "value"}:
            return first == heads
        if heads is not None and "out" in v.words:
            return first != heads
        return self.after[-1][-1] in first

    def usual(self, v: Family) -> bool:
        """Whether this is the way that tables, and kernels of convolutions, mostly are."""
        order = self.order
        if v.kind == "weight" and "embed" not in v.words and order is not None and len(order) in _KERNELS:
            return order == _KERNELS[len(order)]
        return [axis for group in self.before for axis in group] == [axis for group in self.after for axis in group]


def _group(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"


@functools.lru_cache(maxsize=4096)
def arrangements(shape: Shape, wanted: Shape) -> list[Arrangement]:
    """Every way in which a tensor of one shape becomes a variable of another; groups keep the order of their axes."""
    if math.prod(shape) != math.prod(wanted) or max(len(shape), len(wanted)) > _MOST_AXES:
        return []
    if len(shape) == len(wanted):
        orders = itertools.permutations(range(len(shape)))
        fit = (order for order in orders if tuple(shape[axis] for axis in order) == wanted)
        single = tuple((axis,) for axis in range(len(shape)))
        return [Arrangement(single, tuple((axis,) for axis in order)) for order in fit]
    split = len(wanted) > len(shape)
    fine, coarse = (wanted, shape) if split else (shape, wanted)
    single = tuple((axis,) for axis in range(len(fine)))
    grouped = list(_grouped(fine, coarse))
    return [Arrangement(groups, single) if split else Arrangement(single, groups) for groups in grouped]


def _grouped(fine: Shape, coarse: Shape) -> Iterator[_Groups]:
    for places in itertools.product(range(len(coarse)), repeat=len(fine)):
        groups = tuple(tuple(axis for axis, at in enumerate(places) if at == place) for place in range(len(coarse)))
        if all(math.prod(fine[axis] for axis in group) == size for group, size in zip(groups, coarse, strict=True)):
            yield groups


@dataclasses.dataclass(frozen=True)
class Way:
    """How the indexes of a variable's names are those of tensors'."""

    captures: tuple[str, ...]  # a name for each index of the tensors
    stacked: tuple[str, ...]  # those of these that the variable has in one
    axis: int  # along which it has them, or the first of several
    wanted: Shape  # of the variable without them


def ways(v: Family, t: Family) -> list[Way]:
    """Every way, the likeliest first: indexes in the same order, and all that is stacked in front."""
    found: list[Way] = []
    own, numbers = v.captures(), set(v.indexes)
    columns = range(len(t.text) - 1)
    for kept in itertools.permutations(columns, len(own)):
        rest = [column for column in columns if column not in kept]
        if {tuple(index[column] for column in kept) for index in t.indexes} != numbers:
            continue
        counts = tuple(len({index[column] for index in t.indexes}) for column in rest)
        complete = all(
            {index[column] for index in t.indexes} == {str(n) for n in range(count)}
            for column, count in zip(rest, counts, strict=True)
        )
        if not complete or len(t.indexes) != len(numbers) * math.prod(counts):
            continue
        names = dict(zip(kept, own, strict=True))
        for column in rest:
            name = t.captures()[column]
            names[column] = name if name not in own else f"{name}_{column}"
        captures, stacked = tuple(names[c] for c in columns), tuple(names[c] for c in rest)
        for axis in range(len(v.shape) if len(counts) == 1 else 1):
            if v.shape[axis : axis + len(counts)] == counts:
                wanted = (*v.shape[:axis], *v.shape[axis + len(counts) :])
                found.append(Way(captures, stacked, axis, wanted))
    return found

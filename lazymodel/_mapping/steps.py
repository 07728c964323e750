"""The steps of an entry of a `WeightMap`, each with its inverse if it has one. They call only functions of NumPy.

A function or method that cannot do what is requested of it raises ValueError.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from lazymodel._abstract.variable import Captures

Groups: TypeAlias = "tuple[tuple[str, ...], ...]"
Shape: TypeAlias = "tuple[int, ...]"
_Extents: TypeAlias = "list[tuple[int, tuple[str, ...]]]"  # the extent of each group


@dataclasses.dataclass(frozen=True)
class Reversible:
    """A step with a function and its inverse; steps with equal text are equal."""

    text: str
    apply: Callable[[Any], Any] = dataclasses.field(compare=False)
    undo: Callable[[Any], Any] = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return self.text


def untransposed(axes: tuple[int, ...], values: Any) -> Any:
    if len(axes) != values.ndim:
        raise ValueError(f"transpose{axes} does not give {values.ndim} dimensions")
    return np.transpose(values, np.argsort([axis % len(axes) for axis in axes]))


def times(factor: float, values: Any) -> Any:
    return values * factor


def over(factor: float, values: Any) -> Any:
    return values / factor


def repeated(axis: int, count: int, values: Any) -> Any:
    after = axis_number(axis, values.ndim) + 1
    shape = values.shape
    values = np.broadcast_to(values[along(after, None)], (*shape[:after], count, *shape[after:]))
    return np.reshape(values, (*shape[: after - 1], shape[after - 1] * count, *shape[after:]))


def unrepeated(axis: int, count: int, values: Any) -> Any:
    axis = axis_number(axis, values.ndim)
    if values.shape[axis] % count:
        raise ValueError(f"{values.shape[axis]} of {list(values.shape)}, axis {axis}, are not {count} copies of each")
    return values[along(axis, slice(None, None, count))]


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of an axis, and what is outside of it."""

    axis: int
    start: int
    stop: int | None  # None: where the tensor ends
    of: int | None  # extent of the axis
    value: float  # of all elements outside

    def cut(self, values: Any) -> Any:
        if self.stop is None:
            raise ValueError(
                f"nothing says how many of the {self.of} are not padding; give .pad the tensor's extent, of="
            )
        axis = axis_number(self.axis, values.ndim)
        extent = values.shape[axis]
        if self.stop > extent or self.of not in (None, extent):
            expected = self.stop if self.of is None else self.of
            raise ValueError(f"expected {expected} along axis {axis}, found {extent} of {list(values.shape)}")
        return values[along(axis, slice(self.start, self.stop))]

    def fill(self, values: Any) -> Any:
        if self.of is None:
            raise ValueError("nothing says what .slice has left out; give it the tensor's extent, of=, to write value=")
        axis, shape = axis_number(self.axis, values.ndim), tuple(values.shape)
        stop = self.start + shape[axis] if self.stop is None else self.stop
        if shape[axis] != stop - self.start or stop > self.of:
            most = f"at most {self.of}" if self.stop is None else stop - self.start
            raise ValueError(f"expected {most} along axis {axis}, found {shape[axis]} of {list(shape)}")
        with np.errstate(invalid="ignore", over="ignore"):
            value = np.asarray(self.value).astype(values.dtype)
        if not jax.numpy.issubdtype(value.dtype, np.inexact) and value != self.value:
            raise ValueError(f"{self.value} is not a number of dtype {value.dtype.name}")
        outside = [
            np.broadcast_to(value, (*shape[:axis], count, *shape[axis + 1 :])) for count in (self.start, self.of - stop)
        ]
        parts = [part for part in (outside[0], values, outside[1]) if part is values or part.size]
        return np.concatenate(parts, axis) if len(parts) > 1 else values


@dataclasses.dataclass(frozen=True)
class Rearrange:
    """Axes split, reordered and merged by name."""

    pattern: str
    before: Groups
    after: Groups
    sizes: tuple[tuple[str, int], ...]  # given sizes

    def apply(self, values: Any, shape: Shape | None = None) -> Any:
        """The result; `shape` is its expected shape, which may determine how an axis is split."""
        target = [] if shape is None or len(shape) != len(self.after) else list(zip(shape, self.after, strict=True))
        return self._turned(values, self.before, self.after, target)

    def undo(self, values: Any) -> Any:
        return self._turned(values, self.after, self.before, [])

    def _turned(self, values: Any, before: Groups, after: Groups, expected: _Extents) -> Any:
        sizes = self._solved(values.shape, before, expected)
        source, target = sum(before, ()), sum(after, ())
        values = np.reshape(values, tuple(sizes[name] for name in source))
        values = np.transpose(values, [source.index(name) for name in target])
        return np.reshape(values, tuple(math.prod(sizes[name] for name in group) for group in after))

    def _solved(self, shape: Shape, groups: Groups, expected: _Extents) -> dict[str, int]:
        """The size of every named axis: given, implied by the shape, or implied by the expected result."""
        if len(shape) != len(groups):
            raise ValueError(f"rearrange {self.pattern!r} needs {len(groups)} dimensions, found {list(shape)}")
        sizes, own = dict(self.sizes), list(zip(shape, groups, strict=True))
        while (found := _one_unknown(own, sizes) or _one_unknown(expected, sizes)) is not None:
            sizes.update([found])
        for extent, group in own:
            known = {name: sizes[name] for name in group if name in sizes}
            if len(known) < len(group) or math.prod(known.values()) != extent:
                raise ValueError(
                    f"rearrange {self.pattern!r} needs the sizes of all but one of {', '.join(group)}, which make the "
                    f"{extent} of {list(shape)}; known are {known}"
                )
        return sizes

    def __str__(self) -> str:
        return f".rearrange({self.pattern!r}{''.join(f', {name}={size}' for name, size in self.sizes)})"


def _one_unknown(groups: _Extents, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """An axis whose size is determined by the others of its group."""
    for extent, group in groups:
        unknown = [name for name in group if name not in sizes]
        known = math.prod(sizes[name] for name in group if name in sizes)
        if len(unknown) == 1 and known and extent % known == 0:
            return unknown[0], extent // known
    return None


@dataclasses.dataclass(frozen=True)
class FusedPart:
    index: int
    of: int | tuple[int, ...]
    axis: int

    @property
    def count(self) -> int:
        return self.of if isinstance(self.of, int) else len(self.of)

    def apply(self, values: Any) -> Any:
        axis = axis_number(self.axis, values.ndim)
        extent = values.shape[axis]
        of = (extent // self.of,) * self.of if isinstance(self.of, int) else self.of
        if sum(of) != extent:
            parts = f"{self.of} equal parts" if isinstance(self.of, int) else f"the {sum(of)} of parts {of}"
            raise ValueError(f"{extent} of {list(values.shape)}, axis {self.axis}, are not {parts}")
        start = sum(of[: self.index])
        return values[along(axis, slice(start, start + of[self.index]))]

    def join(self, parts: Sequence[Any]) -> Any:
        """The whole tensor, from all of its parts."""
        extents = [part.shape[axis_number(self.axis, part.ndim)] for part in parts]
        expected = [extents[0]] * len(parts) if isinstance(self.of, int) else list(self.of)
        if extents != expected:
            raise ValueError(f"parts have extents {extents} along axis {self.axis}, expected {expected}")
        return np.concatenate(parts, self.axis)

    def __str__(self) -> str:
        return f".part({self.index}, of={self.of}, axis={self.axis})"


@dataclasses.dataclass(frozen=True)
class FunctionOutput(FusedPart):
    """One of several results of a function, whose inverse takes all of them."""

    function: Callable[[Any], Sequence[Any]]
    inverse: Callable[[Sequence[Any]], Any] | None

    def apply(self, values: Any) -> Any:
        return called(self.function, values)[self.index]

    def join(self, parts: Sequence[Any]) -> Any:
        return called(self.inverse, parts)

    def __str__(self) -> str:
        return f".apply({function_name(self.function)}, output={self.index}, of={self.of})"


def function_name(function: Callable[[Any], Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def called(function: Callable[[Any], Any] | None, values: Any) -> Any:
    if function is None:
        raise ValueError("nothing reverses the function of .apply; give it the inverse")
    try:
        return function(values)
    except Exception as error:
        raise ValueError(f"{function_name(function)} raised {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Stack:
    capture: str
    axis: int
    values: tuple[str, ...] | None  # texts of the capture; None: 0, 1, …

    def texts(self, count: int) -> Sequence[str]:
        return list(map(str, range(count))) if self.values is None else self.values

    def __str__(self) -> str:
        values = "" if self.values is None else f", values={self.values}"
        return f".stack({self.capture!r}" + (f", axis={self.axis}" if self.axis else "") + f"{values})"


@dataclasses.dataclass(frozen=True)
class Take:
    capture: str
    axis: int

    def apply(self, values: Any, captures: Captures) -> Any:
        number, axis = captures[self.capture], axis_number(self.axis, values.ndim)
        if not number.isdecimal() or int(number) >= values.shape[axis]:
            raise ValueError(
                f"{{{self.capture}}} is {number!r}, expected a number from 0 to {values.shape[axis] - 1}: axis {axis} "
                f"of {list(values.shape)}"
            )
        return values[along(axis, int(number))]

    def __str__(self) -> str:
        return f".take({self.capture!r}" + (f", axis={self.axis})" if self.axis else ")")


AnyStep: TypeAlias = "Reversible | Rearrange | FusedPart | Stack | Take"


def axis_number(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"there is no axis {axis} in {ndim} dimensions")
    return axis % ndim


def along(axis: int, part: Any) -> tuple[Any, ...]:
    """The index of a part of an axis."""
    return (*(slice(None),) * axis, part)

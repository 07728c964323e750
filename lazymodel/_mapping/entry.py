# pyright: reportPrivateUsage=false
# `From` is for users: its private parts are only read by the classes below.
"""Sources of variables: `From`, the steps of an entry of a `WeightMap`, each with its inverse.

Every step can be undone from the variable's shape alone, so the inverse direction is automatic. Values are
`LazyTensor`s in both directions, so nothing here reads or holds one.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast

import jax
import numpy as np

from lazymodel._abstract.variable import Captures, Template
from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._mapping.match import described
from lazymodel._show.text import closest
from lazymodel._tensors.lazy import LazyTensor, lazy

_Groups: TypeAlias = "tuple[tuple[str, ...], ...]"
_Shape: TypeAlias = "tuple[int, ...]"
_Extents: TypeAlias = "list[tuple[int, tuple[str, ...]]]"  # the extent of each group

# Steps ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step with a function and its inverse; steps with equal text are equal."""

    text: str
    apply: Callable[[Any], Any] = dataclasses.field(compare=False)
    undo: Callable[[Any], Any] = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return self.text


def _untransposed(axes: tuple[int, ...], values: Any) -> Any:
    if len(axes) != values.ndim:
        raise ValueError(f"transpose{axes} does not give {values.ndim} dimensions")
    return np.transpose(values, np.argsort([axis % len(axes) for axis in axes]))


def _times(factor: float, values: Any) -> Any:
    return values * factor


def _over(factor: float, values: Any) -> Any:
    return values / factor


@dataclasses.dataclass(frozen=True)
class _Rearrange:
    """Axes split, reordered and merged by name."""

    pattern: str
    before: _Groups
    after: _Groups
    sizes: tuple[tuple[str, int], ...]  # given sizes

    def apply(self, values: Any, shape: _Shape | None = None) -> Any:
        """The result; `shape` is its expected shape, which may determine how an axis is split."""
        target = [] if shape is None or len(shape) != len(self.after) else list(zip(shape, self.after, strict=True))
        return self._turned(values, self.before, self.after, target)

    def undo(self, values: Any) -> Any:
        return self._turned(values, self.after, self.before, [])

    def _turned(self, values: Any, before: _Groups, after: _Groups, expected: _Extents) -> Any:
        sizes = self._solved(values.shape, before, expected)
        source, target = sum(before, ()), sum(after, ())
        values = np.reshape(values, tuple(sizes[name] for name in source))
        values = np.transpose(values, [source.index(name) for name in target])
        return np.reshape(values, tuple(math.prod(sizes[name] for name in group) for group in after))

    def _solved(self, shape: _Shape, groups: _Groups, expected: _Extents) -> dict[str, int]:
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
class _Part:
    index: int
    of: int | tuple[int, ...]
    axis: int

    @property
    def count(self) -> int:
        return self.of if isinstance(self.of, int) else len(self.of)

    def apply(self, values: Any) -> Any:
        axis = _axis(self.axis, values.ndim)
        extent = values.shape[axis]
        of = (extent // self.of,) * self.of if isinstance(self.of, int) else self.of
        if sum(of) != extent:
            parts = f"{self.of} equal parts" if isinstance(self.of, int) else f"the {sum(of)} of parts {of}"
            raise ValueError(f"{extent} of {list(values.shape)}, axis {self.axis}, are not {parts}")
        start = sum(of[: self.index])
        return values[(*(slice(None),) * axis, slice(start, start + of[self.index]))]

    def join(self, parts: Sequence[Any]) -> Any:
        """The whole tensor, from all of its parts."""
        extents = [part.shape[_axis(self.axis, part.ndim)] for part in parts]
        expected = [extents[0]] * len(parts) if isinstance(self.of, int) else list(self.of)
        if extents != expected:
            raise ValueError(f"parts have extents {extents} along axis {self.axis}, expected {expected}")
        return np.concatenate(parts, self.axis)

    def __str__(self) -> str:
        return f".part({self.index}, of={self.of}, axis={self.axis})"


@dataclasses.dataclass(frozen=True)
class _Stack:
    capture: str
    axis: int

    def __str__(self) -> str:
        return f".stack({self.capture!r}" + (f", axis={self.axis})" if self.axis else ")")


_AnyStep: TypeAlias = "_Step | _Rearrange | _Part | _Stack"


def _axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"there is no axis {axis} in {ndim} dimensions")
    return axis % ndim


def _check_alike(tensors: Sequence[Any], shapes: Sequence[tuple[int, ...]], what: str) -> None:
    """Checks tensors before they are joined: NumPy would read them before it raises."""
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(f"tensors {what} differ in shape: {list(shapes[0])}, and number {index} is {list(shape)}")
    # NumPy would join integers and floats to floats, which may not represent all of the integers.
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if len({bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact)) for dtype in dtypes}) > 1:
        names = " and ".join(dtype.name for dtype in dtypes)
        raise ValueError(f"tensors of one variable are {names}; is one of them a scale?")


class From:
    """The source of a variable: the names of one or several tensors, and steps, applied from left to right.

    Names may have captures: `{layer}` is the text at this place of the entry's path, or counts up if it is stacked.
    Objects are immutable; every method returns a new one.

    Args:
        *names: Name of the tensor, or of several, which are joined along `axis` first.
        axis: The axis along which they are joined.
        sizes: Their sizes along it. Only needed to write them again: without, it is unknown where each one ends.

    Example:
        >>> lm.From("h.{layer}.attn.weight").T.part(1, of=3, axis=1).stack("layer")
        From('h.{layer}.attn.weight').T.part(1, of=3, axis=1).stack('layer')
    """

    def __init__(self, *names: str, axis: int = 0, sizes: Sequence[int] | None = None) -> None:
        if not names or not all(isinstance(cast(Any, name), str) and name for name in names):
            raise LazyModelError(f"From takes names of tensors; got {names!r}")
        if sizes is not None and len(sizes) != len(names):
            raise LazyModelError(f"From{names} has {len(names)} names and {len(sizes)} sizes")
        self._templates = tuple(Template(name) for name in names)
        self._axis = axis
        self._sizes = None if sizes is None else tuple(sizes)
        self._steps: tuple[_AnyStep, ...] = ()
        self.read_only = False

    def _then(self, *steps: _AnyStep, read_only: bool = False) -> From:
        other = copy.copy(self)
        other._steps, other.read_only = (*self._steps, *steps), read_only or self.read_only
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """The names, including captures."""
        return tuple(template.text for template in self._templates)

    @property
    def T(self) -> From:
        """All dimensions reversed."""
        return self._then(_Step(".T", np.transpose, np.transpose))

    def transpose(self, *axes: int) -> From:
        """As `ndarray.transpose`."""
        if sorted(axis % max(len(axes), 1) for axis in axes) != list(range(len(axes))):
            raise LazyModelError(f"transpose{axes} is no order of axes")
        step = _Step(f".transpose{axes}", partial(np.transpose, axes=axes), partial(_untransposed, axes))
        return self._then(step) if axes else self.T

    def rearrange(self, pattern: str, **sizes: int) -> From:
        """Splits, reorders and merges axes by name, such as `"(heads dim) model -> model heads dim", heads=8`.

        Args:
            pattern: The axes before and after, `1` for one of size 1; axes in parentheses form one axis together.
                A plain reshape is not offered: its original shape is unknown, so it could not be inverted.
            **sizes: Sizes that are implied neither by the tensor's shape nor by the variable's: if `heads` and `dim`
                are axes of the variable, both are known. The inverse direction only knows the variable's shape.

        Raises:
            LazyModelError: The pattern has no arrow, has an axis twice or on one side only, or has no axis of `sizes`.
        """
        sides = [_groups(pattern, side) for side in pattern.split("->")]
        if len(sides) != 2:
            raise LazyModelError(f"rearrange takes 'before -> after'; got {pattern!r}")
        before, after = sides
        names = sum(before, ())
        if sorted(names) != sorted(sum(after, ())) or len(set(names)) != len(names):
            raise LazyModelError(f"rearrange {pattern!r}: every axis is named once on either side of the arrow")
        if unknown := set(sizes) - set(names):
            raise LazyModelError(f"rearrange {pattern!r} has no axis {sorted(unknown)[0]!r}")
        return self._then(_Rearrange(pattern, before, after, tuple(sizes.items())))

    def scale(self, factor: float) -> From:
        """Multiplies by a number; writing divides by it, which restores every bit if it is a power of two."""
        if not factor or not math.isfinite(factor):
            raise LazyModelError(f"scale takes a finite number that is not 0; got {factor!r}")
        return self._then(_Step(f".scale({float(factor)})", partial(_times, factor), partial(_over, factor)))

    def part(self, index: int, of: int | Sequence[int], axis: int = 0) -> From:
        """One part of a fused tensor along an axis; other entries use the others.

        Args:
            index: The number of the part, from 0.
            of: The number of equal parts, or the size of each.
            axis: The axis along which the tensor is split.

        Raises:
            LazyModelError: There is no such part.
        """
        of = of if isinstance(of, int) else tuple(of)
        step = _Part(index, of, axis)
        if not 0 <= index < step.count:
            raise LazyModelError(f"part {index} of {step.count} does not exist: parts count from 0")
        return self._then(step)

    def stack(self, capture: str, axis: int = 0) -> From:
        """Stacks tensors with the numbers 0, 1, … in place of a capture along a new axis, as in a scanned model."""
        if not any(capture in template.captures for template in self._templates):
            raise LazyModelError(f"stack({capture!r}): there is no {{{capture}}} in {', '.join(self.names)}")
        return self._then(_Stack(capture, axis))

    def unsaved(self) -> From:
        """The same, but not written in the inverse direction: for a tensor that another entry writes, such as a tied
        embedding.
        """
        return self._then(read_only=True)

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.names))
        joined = f", axis={self._axis}" if len(self._templates) > 1 else ""
        joined += f", sizes={self._sizes}" if self._sizes is not None else ""
        return f"From({names}{joined}){''.join(map(str, self._steps))}" + (".unsaved()" if self.read_only else "")


def _groups(pattern: str, side: str) -> tuple[tuple[str, ...], ...]:
    groups: list[tuple[str, ...]] = []
    if re.sub(r"\w+|\([\w\s]*\)", "", side).strip():
        raise LazyModelError(f"rearrange {pattern!r}: expected axis names and parentheses, found {side.strip()!r}")
    for token in re.findall(r"\w+|\([^()]*\)", side):
        names = tuple(name for name in token.strip("()").split() if name != "1")
        if bad := [name for name in names if not name.isidentifier()]:
            raise LazyModelError(f"rearrange {pattern!r}: {bad[0]!r} is no name of an axis")
        groups.append(names)
    return tuple(groups)


def check_captures(source: From, path: Template) -> None:
    """Raises LazyModelError for a capture of the names that is neither in the entry's path nor stacked, or both."""
    stacked = {step.capture for step in source._steps if isinstance(step, _Stack)}
    for name in source._templates:
        if unknown := set(name.captures) - set(path.captures) - stacked:
            capture = sorted(unknown)[0]
            raise LazyModelError(
                f"entry {path.text!r}: {{{capture}}} of {name.text!r} is neither in the path nor stacked; "
                f"add .stack({capture!r}) if the variable has all of them"
            )
    if twice := stacked & set(path.captures):
        raise LazyModelError(f"entry {path.text!r}: {{{sorted(twice)[0]}}} is stacked, so it cannot be in the path")


# Reading --------------------------------------------------------------------------------------------------------------


class Missing(CheckpointError, KeyError):
    """A tensor is missing from the checkpoint."""

    def __init__(self, name: str, checkpoint: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.name, self._checkpoint = name, checkpoint

    def __str__(self) -> str:  # comparing names takes long, so it is done on demand
        return f"{described(self._checkpoint)} has no tensor {self.name!r}{closest(self.name, self._checkpoint)}"


class Tensors(Mapping[str, LazyTensor]):
    """A checkpoint, and the names of its tensors that were used."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._checkpoint:
            raise Missing(name, self._checkpoint)
        self.taken.add(name)
        return lazy(self._checkpoint[name], name)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)


def read_entry(
    source: From,
    captures: Captures,
    tensors: Tensors,
    shape: _Shape | None,
    steps: Sequence[_AnyStep] | None = None,
) -> Any:
    """The value of an entry's variable, after all steps or only the first ones; ValueError if shapes do not match.

    `shape` is the expected shape of the result, as far as known; the caller checks the result.
    """
    steps = source._steps if steps is None else steps
    if not steps:
        return _joined(source, [tensors[template.fill(captures)] for template in source._templates])
    *before, step = steps
    needed = any(isinstance(other, _Rearrange | _Stack) for other in before)  # no other step uses its shape
    earlier = _shape_before(step, shape) if needed and shape is not None else None
    if not isinstance(step, _Stack):
        value = read_entry(source, captures, tensors, earlier, before)
        return step.apply(value, shape) if isinstance(step, _Rearrange) else step.apply(value)
    count = _count(source, step.capture, captures, tensors)
    if shape is not None and -len(shape) <= step.axis < len(shape):  # reading names the first that is missing
        count = max(count, shape[step.axis])
    numbered = (captures | {step.capture: str(index)} for index in range(max(count, 1)))
    layers = [read_entry(source, known, tensors, earlier, before) for known in numbered]
    _check_alike(layers, [layer.shape for layer in layers], f"of {{{step.capture}}}")
    return np.stack(layers, _axis(step.axis, layers[0].ndim + 1))


def _count(source: From, capture: str, captures: Captures, tensors: Tensors) -> int:
    """The number of tensors with the numbers 0, 1, … in a capture's place; other captures are known or begin at 0."""
    count = 0
    while True:
        known = dict.fromkeys((name for each in source._templates for name in each.captures), "0") | captures
        if not any(each.fill(known | {capture: str(count)}) in tensors for each in source._templates):
            return count
        count += 1


def _shape_before(step: _AnyStep, shape: _Shape) -> _Shape | None:
    """The shape from which a step makes this one; None if unknown."""
    try:
        if isinstance(step, _Step | _Rearrange):
            return step.undo(lazy(np.broadcast_to(np.zeros((), np.float32), shape), "a shape")).shape
        axis = _axis(step.axis, len(shape))
    except ValueError:
        return None
    whole = () if isinstance(step, _Stack) else (shape[axis] * step.of if isinstance(step.of, int) else sum(step.of),)
    return (*shape[:axis], *whole, *shape[axis + 1 :])


def _joined(source: From, tensors: Sequence[Any]) -> Any:
    if len(tensors) == 1:
        return tensors[0]
    axis = _axis(source._axis, tensors[0].ndim)
    _check_alike(tensors, [(*each.shape[:axis], *each.shape[axis + 1 :]) for each in tensors], "apart from the axis")
    found = tuple(each.shape[axis] for each in tensors)
    if source._sizes is not None and found != source._sizes:
        raise ValueError(f"the tensors have extents {found} along axis {source._axis}, not {source._sizes}")
    return np.concatenate(tensors, axis)


# Places ---------------------------------------------------------------------------------------------------------------


def unstacked(source: From, captures: Captures, shape: _Shape) -> Iterator[tuple[dict[int, int], From, Captures]]:
    """The entry of each tensor that the last steps stack to a variable of this shape, with its captures.

    The first of each three is the tensor's place: axis of the variable → index.
    """
    inner, axes, stacks = source._then(), list(range(len(shape))), list[tuple[int, str]]()
    while inner._steps and isinstance(step := inner._steps[-1], _Stack):
        stacks.append((axes.pop(_axis(step.axis, len(axes))), step.capture))
        inner._steps = inner._steps[:-1]
    for index in itertools.product(*(range(shape[axis]) for axis, _ in stacks)):
        numbers = {capture: str(number) for (_, capture), number in zip(stacks, index, strict=True)}
        yield {axis: number for (axis, _), number in zip(stacks, index, strict=True)}, inner, captures | numbers


def variable_of(source: From, shape: _Shape, fill: Callable[[_Shape], LazyTensor]) -> tuple[LazyTensor, _Shape]:
    """The variable of this shape that an entry makes of something else than its tensors, and the shape of these.

    `fill` makes it from that shape. Raises ValueError if the entry stacks tensors, or their shape is unknown.
    """
    if any(isinstance(step, _Stack) for step in source._steps):
        raise ValueError("tensors are stacked before other steps")
    shapes: list[_Shape] = [shape]
    for step in reversed(source._steps):
        if (before := _shape_before(step, shapes[0])) is None:
            raise ValueError(f"{step} does not give {list(shapes[0])}")
        shapes.insert(0, before)
    values: Any = fill(shapes[0])
    for step, after in zip(source._steps, shapes[1:], strict=True):
        assert not isinstance(step, _Stack)
        values = step.apply(values, after) if isinstance(step, _Rearrange) else step.apply(values)
    return values, shapes[0]


def filled_names(source: From, captures: Captures) -> list[str]:
    """The names of an entry's tensors."""
    return [template.fill(captures) for template in source._templates]


def joined_names(
    source: From, captures: Captures, shape: _Shape, tensors: Mapping[str, Any] | None = None
) -> tuple[dict[str, tuple[int, int]], int]:
    """The names of an entry's tensors, each with its range in what they are joined to; and the axis.

    Raises ValueError if their sizes are neither stated nor those of given tensors.
    """
    names, axis = filled_names(source, captures), _axis(source._axis, len(shape))
    sizes = source._sizes
    if sizes is None and len(names) > 1:
        if tensors is None or not all(name in tensors for name in names):
            raise ValueError(f"nothing says where {names[0]!r} ends; give From the sizes of its tensors")
        sizes = tuple(np.shape(tensors[name])[axis] for name in names)
    ends = np.cumsum(sizes or shape[axis : axis + 1]).tolist()
    return {name: (start, end) for name, start, end in zip(names, [0, *ends], ends, strict=False)}, axis


# Writing --------------------------------------------------------------------------------------------------------------


class Parts:
    """Tensors to be written, some of them in parts that are not complete yet."""

    def __init__(self) -> None:
        self.finished: dict[str, Any] = {}
        self._writers: dict[str, str] = {}
        self._parts: dict[Any, dict[int, tuple[_Part, Any, str]]] = {}
        self.path = ""  # the current variable

    def finish(self, name: str, value: Any) -> None:
        if name in self.finished:
            self._refuse_second(self._writers[name], repr(name))
        self.finished[name], self._writers[name] = value, self.path

    def _refuse_second(self, first: str, place: str) -> NoReturn:
        raise LazyModelError(
            f"both {first!r} and {self.path!r} would be written to {place}; end the entry of the one that repeats the "
            "other with .unsaved()"
        )

    def add(self, whole: Any, part: _Part, value: Any) -> Any:
        """Adds a part; returns the whole tensor once all its parts have been added, otherwise None."""
        parts = self._parts.setdefault((whole, part.of, part.axis), {})
        if part.index in parts:
            self._refuse_second(parts[part.index][2], f"part {part.index} of {whole[0]!r}")
        parts[part.index] = (part, value, self.path)
        if len(parts) < part.count:
            return None
        del self._parts[whole, part.of, part.axis]
        return part.join([parts[index][1] for index in range(part.count)])

    def check_complete(self) -> None:
        for (whole, _, axis), parts in self._parts.items():
            part, _, path = next(iter(parts.values()))
            absent = [str(index) for index in range(part.count) if index not in parts]
            raise LazyModelError(
                f"{path!r} is a part of {whole[0]!r} (axis {axis}), and no variable gives part {', '.join(absent)} of "
                f"its {part.count}. Give each an entry with the same steps before .part"
            )


def write_entry(
    source: From, value: Any, captures: Captures, parts: Parts, steps: Sequence[_AnyStep] | None = None
) -> None:
    """Adds the tensors that an entry makes of its variable's value, with all steps or only the first ones undone.

    Raises ValueError or IndexError if a step cannot be undone.
    """
    steps = source._steps if steps is None else steps
    names = filled_names(source, captures)
    if not steps:
        for name, tensor in zip(names, _split(source, names[0], value), strict=True):
            parts.finish(name, tensor)
        return
    *before, step = steps
    if isinstance(step, _Stack):
        index: tuple[Any, ...] = (slice(None),) * _axis(step.axis, value.ndim)
        for number in range(value.shape[len(index)]):
            known = captures | {step.capture: str(number)}
            write_entry(source, value[(*index, number)], known, parts, before)
    elif not isinstance(step, _Part):
        write_entry(source, step.undo(value), captures, parts, before)
    # A whole tensor is identified by its names and by the steps before its parts.
    elif (joined := parts.add((*names, tuple(before)), step, value)) is not None:
        write_entry(source, joined, captures, parts, before)


def _split(source: From, name: str, value: Any) -> Sequence[Any]:
    """Splits a value into the tensors that were joined."""
    if len(source.names) == 1:
        return [value]
    axis = _axis(source._axis, value.ndim)
    if source._sizes is None:
        raise ValueError(f"nothing says where {name!r} ends; give From the sizes of its tensors")
    if sum(source._sizes) != value.shape[axis]:
        raise ValueError(f"sizes {source._sizes} do not add up to the {value.shape[axis]} of {list(value.shape)}")
    return np.split(value, np.cumsum(source._sizes)[:-1].tolist(), axis)

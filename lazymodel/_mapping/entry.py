# pyright: reportPrivateUsage=false
# `From` is for users: its private parts are only read by the classes below.
"""Sources of variables: `From`, the entries of a `WeightMap`, read and written.

Most steps can be undone from the variable's shape alone, so the inverse direction is automatic; `pad` and `slice` need
the tensor's extent. Values are `LazyTensor`s in both directions, so nothing here reads or holds one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import jax
import numpy as np

from lazymodel._abstract.variable import Captures, Template
from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._mapping.source import described
from lazymodel._mapping.steps import (
    AnyStep,
    FunctionOutput,
    FusedPart,
    Range,
    Rearrange,
    Reversible,
    Shape,
    Stack,
    Take,
    along,
    axis_number,
    called,
    function_name,
    over,
    repeated,
    times,
    unrepeated,
    untransposed,
)
from lazymodel._show.text import closest
from lazymodel._tensors.lazy import LazyTensor, lazy

# Sources --------------------------------------------------------------------------------------------------------------


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
        self._steps: tuple[AnyStep, ...] = ()
        self.read_only = False

    def _then(self, *steps: AnyStep, read_only: bool = False) -> From:
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
        return self._then(Reversible(".T", np.transpose, np.transpose))

    def transpose(self, *axes: int) -> From:
        """As `ndarray.transpose`."""
        if sorted(axis % max(len(axes), 1) for axis in axes) != list(range(len(axes))):
            raise LazyModelError(f"transpose{axes} is no order of axes")
        step = Reversible(f".transpose{axes}", partial(np.transpose, axes=axes), partial(untransposed, axes))
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
        return self._then(Rearrange(pattern, before, after, tuple(sizes.items())))

    def scale(self, factor: float) -> From:
        """Multiplies by a number; writing divides by it, which restores every bit if it is a power of two."""
        if not factor or not math.isfinite(factor):
            raise LazyModelError(f"scale takes a finite number that is not 0; got {factor!r}")
        return self._then(Reversible(f".scale({float(factor)})", partial(times, factor), partial(over, factor)))

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
        step = FusedPart(index, of, axis)
        if not 0 <= index < step.count:
            raise LazyModelError(f"part {index} of {step.count} does not exist: parts count from 0")
        return self._then(step)

    def stack(self, capture: str, axis: int = 0, *, values: Iterable[Any] | None = None) -> From:
        """Stacks tensors with the numbers 0, 1, … in place of a capture along a new axis, as in a scanned model.

        `values` are other numbers, or texts, such as `range(1, 12, 2)` for every second layer.
        """
        if not any(capture in template.captures for template in self._templates):
            raise LazyModelError(f"stack({capture!r}): there is no {{{capture}}} in {', '.join(self.names)}")
        texts = None if values is None else tuple(map(str, values))
        if texts == ():
            raise LazyModelError(f"stack({capture!r}) takes at least one value; got none")
        return self._then(Stack(capture, axis, texts))

    def take(self, capture: str, axis: int = 0) -> From:
        """One layer of a stacked tensor, whose number is a capture of the entry's path: the inverse of `stack`.

        Written, the layers 0, 1, … of all variables are stacked again.
        """
        if any(capture in template.captures for template in self._templates):
            raise LazyModelError(
                f"take({capture!r}): expected {{{capture}}} in the path alone, found it in {self.names}"
            )
        return self._then(Take(capture, axis))

    def repeat(self, axis: int, count: int) -> From:
        """Each element of an axis `count` times, next to each other as `np.repeat` has them, such as the key and value
        heads that tensor parallelism copies. Split heads into an axis first, with `rearrange`.

        Written, the first copy of each counts; the others are not compared with it, since nothing is read here.
        """
        if count < 1:
            raise LazyModelError(f"repeat takes a count of at least 1; got {count}")
        text = f".repeat({axis}, {count})"
        return self._then(Reversible(text, partial(repeated, axis, count), partial(unrepeated, axis, count)))

    def pad(self, axis: int, to: int, *, value: float = 0, of: int | None = None) -> From:
        """Extends an axis at its end, such as a vocabulary to a multiple of the devices.

        Args:
            axis: The axis.
            to: Its extent in the variable.
            value: The value of new elements.
            of: Its extent in the tensor. Only needed to write it again, without the padding.

        Raises:
            LazyModelError: `of` is not between 0 and `to`.
        """
        if not 0 <= (of or 0) <= to:
            raise LazyModelError(f"pad takes an extent of= from 0 to {to}; got {of}")
        padded = Range(axis, 0, of, to, value)
        return self._then(Reversible(f".pad({axis}, {to}{_keywords(value, of)})", padded.fill, padded.cut))

    def slice(self, axis: int, start: int, stop: int, *, value: float = 0, of: int | None = None) -> From:
        """A range of an axis, such as a vocabulary without its padding. What is left out cannot be restored.

        Args:
            axis: The axis.
            start: The first element.
            stop: The element after the last.
            value: What is written in place of elements that were left out.
            of: The extent of the axis in the tensor. Only needed to write it again, filled up with `value`.

        Raises:
            LazyModelError: The range is empty, or not within `of`.
        """
        if not 0 <= start < stop <= (stop if of is None else of):
            raise LazyModelError(f"slice takes 0 <= start < stop <= of; got {start}, {stop}, of={of}")
        cut = Range(axis, start, stop, of, value)
        return self._then(Reversible(f".slice({axis}, {start}, {stop}{_keywords(value, of)})", cut.cut, cut.fill))

    def apply(
        self,
        function: Callable[[Any], Any],
        inverse: Callable[[Any], Any] | None = None,
        *,
        output: int | None = None,
        of: int = 1,
    ) -> From:
        """A function of the tensor, for what is none of the other steps, and its inverse, for writing.

        Both get a lazy tensor: what `map_checkpoint` lists for functions is computed while shards are read.

        Args:
            function: Of the tensor.
            inverse: Of the variable. Only needed to write it.
            output: If `function` returns a sequence: the number of this entry's result in it. Other entries use the
                others, and `inverse` gets the list of all.
            of: The number of results.

        Raises:
            LazyModelError: There is no such output.

        Example:
            >>> lm.From("norm.weight").apply(lambda scale: scale + 1, lambda scale: scale - 1)
            From('norm.weight').apply(<lambda>)
        """
        if output is None:
            text = f".apply({function_name(function)})"
            return self._then(Reversible(text, partial(called, function), partial(called, inverse)))
        if not 0 <= output < of:
            raise LazyModelError(f"output {output} of {of} does not exist: outputs count from 0")
        return self._then(FunctionOutput(output, of, 0, function, inverse))

    def unsaved(self) -> From:
        """The same, but not written in the inverse direction: for a tensor that another entry writes, such as a tied
        embedding.
        """
        return self._then(read_only=True)

    def with_names(self, names: Sequence[str]) -> From:
        """The same of tensors with other names, or with captures in them."""
        other = copy.copy(self)
        other._templates = tuple(map(Template, names))
        return other

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.names))
        joined = f", axis={self._axis}" if len(self._templates) > 1 else ""
        joined += f", sizes={self._sizes}" if self._sizes is not None else ""
        return f"From({names}{joined}){''.join(map(str, self._steps))}" + (".unsaved()" if self.read_only else "")


def _keywords(value: float, of: int | None) -> str:
    """Arguments of `pad` and `slice` as Python."""
    number = repr(value if isinstance(value, int) else float(value))
    number = number if math.isfinite(value) else f"float({number!r})"
    return (f", value={number}" if value else "") + ("" if of is None else f", of={of}")


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
    stacked = {step.capture for step in source._steps if isinstance(step, Stack)}
    for name in source._templates:
        if unknown := set(name.captures) - set(path.captures) - stacked:
            capture = sorted(unknown)[0]
            raise LazyModelError(
                f"entry {path.text!r}: {{{capture}}} of {name.text!r} is neither in the path nor stacked; "
                f"add .stack({capture!r}) if the variable has all of them"
            )
    taken = {step.capture for step in source._steps if isinstance(step, Take)}
    if unknown := taken - set(path.captures):
        capture = sorted(unknown)[0]
        raise LazyModelError(
            f"entry {path.text!r}: take({capture!r}) needs {{{capture}}} in the path, a layer's number"
        )
    if twice := stacked & set(path.captures):
        raise LazyModelError(f"entry {path.text!r}: {{{sorted(twice)[0]}}} is stacked, so it cannot be in the path")


# Reading --------------------------------------------------------------------------------------------------------------


class MissingTensor(CheckpointError, KeyError):
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
            raise MissingTensor(name, self._checkpoint)
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
    shape: Shape | None,
    steps: Sequence[AnyStep] | None = None,
) -> Any:
    """The value of an entry's variable, after all steps or only the first ones; ValueError if shapes do not match.

    `shape` is the expected shape of the result, as far as known; the caller checks the result.
    """
    steps = source._steps if steps is None else steps
    if not steps:
        return _joined(source, [tensors[template.fill(captures)] for template in source._templates])
    *before, step = steps
    needed = any(isinstance(other, Rearrange | Stack) for other in before)  # no other step uses its shape
    earlier = _shape_before(step, shape) if needed and shape is not None else None
    if not isinstance(step, Stack):
        value = read_entry(source, captures, tensors, earlier, before)
        if isinstance(step, Take):
            return step.apply(value, captures)
        return step.apply(value, shape) if isinstance(step, Rearrange) else step.apply(value)
    count = 0 if step.values else _count(source, step.capture, captures, tensors)
    if shape is not None and -len(shape) <= step.axis < len(shape):  # reading names the first that is missing
        count = max(count, shape[step.axis])
    numbered = (captures | {step.capture: text} for text in step.texts(max(count, 1)))
    layers = [read_entry(source, known, tensors, earlier, before) for known in numbered]
    _check_alike(layers, [layer.shape for layer in layers], f"of {{{step.capture}}}")
    return np.stack(layers, axis_number(step.axis, layers[0].ndim + 1))


def _count(source: From, capture: str, captures: Captures, tensors: Tensors) -> int:
    """The number of tensors with the numbers 0, 1, … in a capture's place; other captures are known or begin at 0."""
    count = 0
    while True:
        known = dict.fromkeys((name for each in source._templates for name in each.captures), "0") | captures
        if not any(each.fill(known | {capture: str(count)}) in tensors for each in source._templates):
            return count
        count += 1


def _shape_before(step: AnyStep, shape: Shape) -> Shape | None:
    """The shape from which a step makes this one; None if unknown."""
    if isinstance(step, Take | FunctionOutput):
        return None
    try:
        if isinstance(step, Reversible | Rearrange):
            return step.undo(lazy(np.broadcast_to(np.zeros((), np.float32), shape), "a shape")).shape
        axis = axis_number(step.axis, len(shape))
    except ValueError:
        return None
    whole = () if isinstance(step, Stack) else (shape[axis] * step.of if isinstance(step.of, int) else sum(step.of),)
    return (*shape[:axis], *whole, *shape[axis + 1 :])


def _joined(source: From, tensors: Sequence[Any]) -> Any:
    if len(tensors) == 1:
        return tensors[0]
    axis = axis_number(source._axis, tensors[0].ndim)
    _check_alike(tensors, [(*each.shape[:axis], *each.shape[axis + 1 :]) for each in tensors], "apart from the axis")
    found = tuple(each.shape[axis] for each in tensors)
    if source._sizes is not None and found != source._sizes:
        raise ValueError(f"the tensors have extents {found} along axis {source._axis}, not {source._sizes}")
    return np.concatenate(tensors, axis)


# Places ---------------------------------------------------------------------------------------------------------------


def unstacked(source: From, captures: Captures, shape: Shape) -> Iterator[tuple[dict[int, int], From, Captures]]:
    """The entry of each tensor that the last steps stack to a variable of this shape, with its captures.

    The first of each three is the tensor's place: axis of the variable → index.
    """
    inner, axes, stacks = source._then(), list(range(len(shape))), list[tuple[int, Stack]]()
    while inner._steps and isinstance(step := inner._steps[-1], Stack):
        stacks.append((axes.pop(axis_number(step.axis, len(axes))), step))
        inner._steps = inner._steps[:-1]
    for index in itertools.product(*(enumerate(step.texts(shape[axis])) for axis, step in stacks)):
        numbers = {step.capture: text for (_, step), (_, text) in zip(stacks, index, strict=True)}
        yield {axis: number for (axis, _), (number, _) in zip(stacks, index, strict=True)}, inner, captures | numbers


def variable_of(source: From, shape: Shape, fill: Callable[[Shape], LazyTensor]) -> tuple[LazyTensor, Shape]:
    """The variable of this shape that an entry makes of something else than its tensors, and the shape of these.

    `fill` makes it from that shape. Raises ValueError if the entry stacks tensors, or their shape is unknown.
    """
    if any(isinstance(step, Stack | Take) for step in source._steps):
        raise ValueError("it stacks tensors before other steps, or takes a layer of a stacked tensor")
    shapes: list[Shape] = [shape]
    for step in reversed(source._steps):
        if (before := _shape_before(step, shapes[0])) is None:
            raise ValueError(f"{step} does not give {list(shapes[0])}")
        shapes.insert(0, before)
    values: Any = fill(shapes[0])
    for step, after in zip(source._steps, shapes[1:], strict=True):
        assert not isinstance(step, Stack | Take)
        values = step.apply(values, after) if isinstance(step, Rearrange) else step.apply(values)
    return values, shapes[0]


def filled_names(source: From, captures: Captures) -> list[str]:
    """The names of an entry's tensors."""
    return [template.fill(captures) for template in source._templates]


def joined_names(
    source: From, captures: Captures, shape: Shape, tensors: Mapping[str, Any] | None = None
) -> tuple[dict[str, tuple[int, int]], int]:
    """The names of an entry's tensors, each with its range in what they are joined to; and the axis.

    Raises ValueError if their sizes are neither stated nor those of given tensors.
    """
    names, axis = filled_names(source, captures), axis_number(source._axis, len(shape))
    sizes = source._sizes
    if sizes is None and len(names) > 1:
        if tensors is None or not all(name in tensors for name in names):
            raise ValueError(f"nothing says where {names[0]!r} ends; give From the sizes of its tensors")
        sizes = tuple(np.shape(tensors[name])[axis] for name in names)
    ends = np.cumsum(sizes or shape[axis : axis + 1]).tolist()
    return {name: (start, end) for name, start, end in zip(names, [0, *ends], ends, strict=False)}, axis


# Writing --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _TakenLayers:
    """Layers of one tensor."""

    source: From
    captures: Captures  # of one of them
    steps: Sequence[AnyStep]  # the last one takes a layer
    found: dict[int, tuple[Any, str]]  # number → value, path


class TensorWriter:
    """Tensors to be written, some of them in parts that are not complete yet."""

    def __init__(self) -> None:
        self.finished: dict[str, Any] = {}
        self._writers: dict[str, str] = {}
        self._parts: dict[Any, dict[int, tuple[FusedPart, Any, str]]] = {}
        self._layers: dict[Any, _TakenLayers] = {}
        self.path = ""  # the current variable

    @contextlib.contextmanager
    def writing(self, path: str, source: From, shape: Shape) -> Generator[None]:
        """Raises LazyModelError for a step that cannot be undone."""
        self.path = path
        try:
            yield
        except (ValueError, IndexError) as error:
            raise LazyModelError(f"{path!r}, shape {list(shape)}, cannot be written as {source}: {error}") from error

    def finish(self, name: str, value: Any) -> None:
        if name in self.finished:
            self._refuse_second(self._writers[name], repr(name))
        self.finished[name], self._writers[name] = value, self.path

    def _refuse_second(self, first: str, place: str) -> NoReturn:
        raise LazyModelError(
            f"both {first!r} and {self.path!r} would be written to {place}; end the entry of the one that repeats the "
            "other with .unsaved()"
        )

    def add(self, whole: Any, part: FusedPart, value: Any) -> Any:
        """Adds a part; returns the whole tensor once all its parts have been added, otherwise None."""
        parts = self._parts.setdefault((whole, part.of, part.axis), {})
        if part.index in parts:
            self._refuse_second(parts[part.index][2], f"part {part.index} of {whole[0]!r}")
        parts[part.index] = (part, value, self.path)
        if len(parts) < part.count:
            return None
        del self._parts[whole, part.of, part.axis]
        return part.join([parts[index][1] for index in range(part.count)])

    def add_layer(self, whole: Any, source: From, captures: Captures, steps: Sequence[AnyStep], value: Any) -> None:
        """Adds a layer, taken with the last of these steps, of a tensor to be stacked once all have been added."""
        layers = self._layers.setdefault(whole, _TakenLayers(source, captures, steps, {}))
        step = cast(Take, steps[-1])
        if not (text := captures[step.capture]).isdecimal():
            raise ValueError(f"{{{step.capture}}} is {text!r}, expected a number")
        if (number := int(text)) in layers.found:
            self._refuse_second(layers.found[number][1], f"layer {number} of {whole[0]!r}")
        layers.found[number] = value, self.path

    def complete(self) -> None:
        """Stacks layers; raises if some are missing, or parts of a tensor."""
        while self._layers:  # those with most steps to undo first, since that may add layers of others
            most = max(len(layers.steps) for layers in self._layers.values())
            for whole in [whole for whole, layers in self._layers.items() if len(layers.steps) == most]:
                self._stack(whole[0], self._layers.pop(whole))
        self._check_complete()

    def _stack(self, name: str, layers: _TakenLayers) -> None:
        *before, step = layers.steps
        assert isinstance(step, Take)
        first, path = next(iter(layers.found.values()))
        count = max(layers.found) + 1
        if absent := [str(number) for number in range(count) if number not in layers.found]:
            raise LazyModelError(
                f"{path!r} is a layer of {name!r}, and no variable gives layer {', '.join(absent)} of at least {count}"
            )
        with self.writing(path, layers.source, tuple(first.shape)):
            values = [layers.found[number][0] for number in range(count)]
            _check_alike(values, [value.shape for value in values], f"of {{{step.capture}}}")
            stacked = np.stack(values, axis_number(step.axis, first.ndim + 1))
            write_entry(layers.source, stacked, layers.captures, self, before)

    def _check_complete(self) -> None:
        for (whole, _, axis), parts in self._parts.items():
            part, _, path = next(iter(parts.values()))
            absent = [str(index) for index in range(part.count) if index not in parts]
            raise LazyModelError(
                f"{path!r} is a part of {whole[0]!r} (axis {axis}), and no variable gives part {', '.join(absent)} of "
                f"its {part.count}. Give each an entry with the same steps before .part"
            )


def write_entry(
    source: From, value: Any, captures: Captures, parts: TensorWriter, steps: Sequence[AnyStep] | None = None
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
    # A whole tensor is identified by its names, by the steps before its parts and layers, and by where these take it.
    whole = (*names, tuple(before), *(captures[each.capture] for each in before if isinstance(each, Take)))
    if isinstance(step, Stack):
        axis = axis_number(step.axis, value.ndim)
        texts = step.texts(value.shape[axis])
        if len(texts) != value.shape[axis]:
            raise ValueError(f"{step} has {len(texts)} values, axis {axis} of {list(value.shape)}")
        for number, text in enumerate(texts):
            known = captures | {step.capture: text}
            write_entry(source, value[along(axis, number)], known, parts, before)
    elif isinstance(step, Take):
        parts.add_layer(whole, source, captures, steps, value)
    elif not isinstance(step, FusedPart):
        write_entry(source, step.undo(value), captures, parts, before)
    elif (joined := parts.add(whole, step, value)) is not None:
        write_entry(source, joined, captures, parts, before)


def _split(source: From, name: str, value: Any) -> Sequence[Any]:
    """Splits a value into the tensors that were joined."""
    if len(source.names) == 1:
        return [value]
    axis = axis_number(source._axis, value.ndim)
    if source._sizes is None:
        raise ValueError(f"nothing says where {name!r} ends; give From the sizes of its tensors")
    if sum(source._sizes) != value.shape[axis]:
        raise ValueError(f"sizes {source._sizes} do not add up to the {value.shape[axis]} of {list(value.shape)}")
    return np.split(value, np.cumsum(source._sizes)[:-1].tolist(), axis)

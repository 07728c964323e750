"""Mapping checkpoint names to variables: `WeightMap`, a table that works in both directions, and functions.

Responsible for what is read from where and written to where. Values are `LazyTensor`s throughout, on their way in as
on their way out, so nothing here reads or holds one. Loading is `_materialize`'s, writing `_save`'s.

A table has an entry for each variable path, or for a pattern of paths, that says which tensors it is made of:

    WeightMap({
        "embed/embedding": "model.embed_tokens.weight",
        "layers/{layer}/up/kernel": From("model.layers.{layer}.mlp.up_proj.weight").T,
        "blocks/query/kernel": From("h.{layer}.qkv.weight").T.part(0, of=3, axis=1).stack("layer"),
    })

Every step of an entry can be undone from the variable's shape alone, which is what makes the way back automatic.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from lazymodel._abstract import AbstractModel, AbstractVariable, unique_paths
from lazymodel._errors import CheckpointError, LazyModelError, LazyModelWarning
from lazymodel._lazy import LazyTensor, lazy
from lazymodel._report import closest
from lazymodel._trace import path_text

_LISTED = 8  # findings of one kind that a message lists before it only counts
_PERMUTED = 5  # dimensions up to which permutations are tried for a suggestion: 120 of them

Captures: TypeAlias = "dict[str, str]"


# Templates ------------------------------------------------------------------------------------------------------------


class _Template:
    """A name with captures: `{layer}` stands for text without `/` and `.`, `{rest...}` for any text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.captures: tuple[str, ...] = tuple(dict.fromkeys(re.findall(r"\{([^{}]*?)(?:\.\.\.)?\}", text)))
        if bad := [name for name in self.captures if not name.isidentifier()]:
            raise LazyModelError(f"{text!r}: a capture is a name in braces, such as {{layer}}; found {{{bad[0]}}}")
        self._parts: list[str] = re.split(r"(\{[^{}]*\})", text)
        regex = ""
        seen: set[str] = set()
        for part in self._parts:
            if not part.startswith("{"):
                regex += re.escape(part)
                continue
            name = part.strip("{}").removesuffix("...")
            regex += f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if '...' in part else '[^/.]+'})"
            seen.add(name)
        self._regex = re.compile(regex, re.DOTALL)

    def match(self, name: str) -> Captures | None:
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, captures: Mapping[str, str]) -> str:
        """The name, with those captures filled in that are known."""
        filled = [
            captures.get(part.strip("{}").removesuffix("..."), part) if part.startswith("{") else part
            for part in self._parts
        ]
        return "".join(filled)


# Steps ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Transpose:
    axes: tuple[int, ...] | None

    def apply(self, values: Any) -> Any:
        return np.transpose(values, self.axes)

    def undo(self, values: Any) -> Any:
        if self.axes is None:
            return np.transpose(values)
        if sorted(axis % len(self.axes) for axis in self.axes) != list(range(values.ndim)):
            raise ValueError(f"transpose{self.axes} does not give {values.ndim} dimensions")
        return np.transpose(values, np.argsort([axis % len(self.axes) for axis in self.axes]))

    def __str__(self) -> str:
        return ".T" if self.axes is None else f".transpose{self.axes}"


@dataclasses.dataclass(frozen=True)
class _Rearrange:
    pattern: str
    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...]

    def apply(self, values: Any) -> Any:
        return self._move(values, self.before, self.after)

    def undo(self, values: Any) -> Any:
        return self._move(values, self.after, self.before)

    def _move(self, values: Any, before: tuple[tuple[str, ...], ...], after: tuple[tuple[str, ...], ...]) -> Any:
        sizes = self._solve(values.shape, before)
        source = [name for group in before for name in group]
        target = [name for group in after for name in group]
        values = np.reshape(values, tuple(sizes[name] for name in source))
        values = np.transpose(values, [source.index(name) for name in target])
        return np.reshape(values, tuple(math.prod(sizes[name] for name in group) for group in after))

    def _solve(self, shape: tuple[int, ...], groups: tuple[tuple[str, ...], ...]) -> dict[str, int]:
        """The extent of every named axis."""
        if len(shape) != len(groups):
            raise ValueError(f"rearrange {self.pattern!r} needs {len(groups)} dimensions, found {list(shape)}")
        sizes = dict(self.sizes)
        for extent, group in zip(shape, groups, strict=True):
            unknown = [name for name in group if name not in sizes]
            known = math.prod(sizes[name] for name in group if name in sizes)
            if len(unknown) > 1:
                raise ValueError(f"rearrange {self.pattern!r} needs the sizes of all but one of {', '.join(unknown)}")
            if unknown and known and extent % known == 0:
                sizes[unknown[0]] = extent // known
            elif unknown or known != extent:
                text = " x ".join(f"{name}={sizes[name]}" if name in sizes else name for name in group) or "1"
                raise ValueError(f"rearrange {self.pattern!r}: {text} does not make the {extent} of {list(shape)}")
        return sizes

    def __str__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        return f".rearrange({self.pattern!r}{sizes})"


@dataclasses.dataclass(frozen=True)
class _Scale:
    factor: float

    def apply(self, values: Any) -> Any:
        return values * self.factor

    def undo(self, values: Any) -> Any:
        return values / self.factor

    def __str__(self) -> str:
        return f".scale({self.factor})"


@dataclasses.dataclass(frozen=True)
class _Part:
    index: int
    of: int | tuple[int, ...]
    axis: int

    @property
    def count(self) -> int:
        return self.of if isinstance(self.of, int) else len(self.of)

    def apply(self, values: Any) -> Any:
        axis, extent = _axis(self.axis, values.ndim), 0
        extent = values.shape[axis]
        if isinstance(self.of, int):
            if extent % self.of:
                raise ValueError(f"{extent} of {list(values.shape)}, axis {self.axis}, are not {self.of} equal parts")
            start, size = self.index * (extent // self.of), extent // self.of
        else:
            if sum(self.of) != extent:
                raise ValueError(
                    f"{extent} of {list(values.shape)}, axis {self.axis}, are not the {sum(self.of)} of parts {self.of}"
                )
            start, size = sum(self.of[: self.index]), self.of[self.index]
        return values[(*(slice(None),) * axis, slice(start, start + size))]

    def join(self, parts: Sequence[Any]) -> Any:
        """The whole, of which these are all parts."""
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


_Step: TypeAlias = "_Transpose | _Rearrange | _Scale | _Part | _Stack"


def _axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"there is no axis {axis} in {ndim} dimensions")
    return axis % ndim


def _require_equal(shapes: Sequence[tuple[int, ...]], what: str) -> None:
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(f"tensors {what} differ in shape: {list(shapes[0])}, and number {index} is {list(shape)}")


def _require_one_kind(tensors: Sequence[Any]) -> None:
    """Joined by NumPy, integers and floats would become floats that need not have all of the integers."""
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    kinds = {bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact)) for dtype in dtypes}
    if len(kinds) > 1:
        names = " and ".join(dtype.name for dtype in dtypes)
        raise ValueError(f"tensors of one variable are {names}; is one of them a scale?")


class From:
    """What a variable is made of: the names of one or several tensors, and steps, applied from left to right.

    Names may have captures: `{layer}` is whatever the entry's path has there, or counts up where it is stacked.
    Objects are immutable; every method returns a new one.

    Args:
        *names: Name of the tensor, or of several, which are joined along `axis` before anything else.
        axis: That axis.
        sizes: Their extents along it. Only needed to write them again: without, nothing says where one ends.

    Example:
        >>> From("h.{layer}.attn.weight").T.part(1, of=3, axis=1).stack("layer")
        From('h.{layer}.attn.weight').T.part(1, of=3, axis=1).stack('layer')
    """

    __slots__ = ("_axis", "_sizes", "_steps", "_templates", "read_only")

    def __init__(self, *names: str, axis: int = 0, sizes: Sequence[int] | None = None) -> None:
        if not names or not all(isinstance(cast(Any, name), str) and name for name in names):
            raise LazyModelError(f"From takes names of tensors; got {names!r}")
        if sizes is not None and len(sizes) != len(names):
            raise LazyModelError(f"From{names} has {len(names)} names and {len(sizes)} sizes")
        self._templates = tuple(_Template(name) for name in names)
        self._axis = axis
        self._sizes = None if sizes is None else tuple(sizes)
        self._steps: tuple[_Step, ...] = ()
        self.read_only = False

    def _then(self, *steps: _Step, read_only: bool = False) -> From:
        other = object.__new__(From)
        other._templates, other._axis, other._sizes = self._templates, self._axis, self._sizes
        other._steps, other.read_only = (*self._steps, *steps), read_only or self.read_only
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """The names, captures and all."""
        return tuple(template.text for template in self._templates)

    @property
    def T(self) -> From:
        """All dimensions reversed."""
        return self._then(_Transpose(None))

    def transpose(self, *axes: int) -> From:
        """As `ndarray.transpose`."""
        if sorted(axis % max(len(axes), 1) for axis in axes) != list(range(len(axes))):
            raise LazyModelError(f"transpose{axes} is no order of axes")
        return self._then(_Transpose(axes or None))

    def rearrange(self, pattern: str, **sizes: int) -> From:
        """Splits, reorders and merges axes by name, such as `"(heads dim) model -> model heads dim", heads=8`.

        Args:
            pattern: The axes before and after, `1` for one of extent 1; those in parentheses are one axis together.
                A plain reshape is not offered: it does not say what shape it came from, so nothing could undo it.
            **sizes: Extents that the shapes do not give.
        """
        sides = [_groups(pattern, side) for side in pattern.split("->")]
        if len(sides) != 2:
            raise LazyModelError(f"rearrange takes 'before -> after'; got {pattern!r}")
        names = [[name for group in side for name in group] for side in sides]
        if sorted(names[0]) != sorted(names[1]) or len(set(names[0])) != len(names[0]):
            raise LazyModelError(f"rearrange {pattern!r}: every axis is named once on either side of the arrow")
        if unknown := set(sizes) - set(names[0]):
            raise LazyModelError(f"rearrange {pattern!r} has no axis {sorted(unknown)[0]!r}")
        return self._then(_Rearrange(pattern, sides[0], sides[1], tuple(sizes.items())))

    def scale(self, factor: float) -> From:
        """Multiplies by a number; written divided by it, which restores every bit where it is a power of two."""
        if not factor or not math.isfinite(factor):
            raise LazyModelError(f"scale takes a finite number that is not 0; got {factor!r}")
        return self._then(_Scale(factor))

    def part(self, index: int, of: int | Sequence[int], axis: int = 0) -> From:
        """One part of a fused tensor along an axis; other entries take the others.

        Args:
            index: Which, from 0.
            of: How many equal parts there are, or the extent of each.
            axis: Along which axis.
        """
        of = of if isinstance(of, int) else tuple(of)
        step = _Part(index, of, axis)
        if not 0 <= index < step.count:
            raise LazyModelError(f"part {index} of {step.count} does not exist: parts count from 0")
        return self._then(step)

    def stack(self, capture: str, axis: int = 0) -> From:
        """Stacks what has the numbers 0, 1, … in the place of a capture along a new axis, as a scanned model does."""
        if not any(capture in template.captures for template in self._templates):
            raise LazyModelError(f"stack({capture!r}): there is no {{{capture}}} in {', '.join(self.names)}")
        return self._then(_Stack(capture, axis))

    def unsaved(self) -> From:
        """The same, but left out on the way back: for a tensor that another entry writes, such as a tied embedding."""
        return self._then(read_only=True)

    @property
    def _stacked(self) -> set[str]:
        return {step.capture for step in self._steps if isinstance(step, _Stack)}

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.names))
        joined = f", axis={self._axis}" if len(self._templates) > 1 else ""
        joined += f", sizes={self._sizes}" if self._sizes is not None else ""
        return f"From({names}{joined}){''.join(map(str, self._steps))}" + (".unsaved()" if self.read_only else "")

    # In

    def _read(self, captures: Captures, tensors: _Tensors, steps: int | None = None) -> Any:
        steps = len(self._steps) if steps is None else steps
        if not steps:
            pieces = [tensors.take(template.fill(captures)) for template in self._templates]
            if len(pieces) == 1:
                return pieces[0]
            axis = _axis(self._axis, pieces[0].ndim)
            # Checked here: what NumPy is to raise for lazy tensors, it would read them for.
            _require_equal([(*piece.shape[:axis], *piece.shape[axis + 1 :]) for piece in pieces], "beside the axis")
            found = tuple(piece.shape[axis] for piece in pieces)
            _require_one_kind(pieces)
            if self._sizes is not None and found != self._sizes:
                raise ValueError(f"the tensors have extents {found} along axis {self._axis}, not {self._sizes}")
            return np.concatenate(pieces, axis)
        step = self._steps[steps - 1]
        if not isinstance(step, _Stack):
            return step.apply(self._read(captures, tensors, steps - 1))
        count = max(tensors.count(template, step.capture, captures) for template in self._templates)
        layers = [self._read(captures | {step.capture: str(index)}, tensors, steps - 1) for index in range(count)]
        _require_equal([layer.shape for layer in layers], f"of {{{step.capture}}}")
        _require_one_kind(layers)
        return np.stack(layers, _axis(step.axis, layers[0].ndim + 1))

    # Out

    def _write(self, value: Any, captures: Captures, parts: _Parts, steps: int | None = None) -> None:
        steps = len(self._steps) if steps is None else steps
        if not steps:
            names = [template.fill(captures) for template in self._templates]
            if len(names) == 1:
                parts.finish(names[0], value)
                return
            axis = _axis(self._axis, value.ndim)
            if self._sizes is None:
                raise ValueError(f"nothing says where {names[0]!r} ends; give From the sizes of its tensors")
            if sum(self._sizes) != value.shape[axis]:
                raise ValueError(f"sizes {self._sizes} do not add up to the {value.shape[axis]} of {list(value.shape)}")
            for name, piece in zip(names, np.split(value, np.cumsum(self._sizes)[:-1].tolist(), axis), strict=True):
                parts.finish(name, piece)
            return
        step = self._steps[steps - 1]
        if isinstance(step, _Stack):
            index: tuple[Any, ...] = (slice(None),) * _axis(step.axis, value.ndim)
            for number in range(value.shape[len(index)]):
                self._write(value[(*index, number)], captures | {step.capture: str(number)}, parts, steps - 1)
        elif isinstance(step, _Part):
            # What the parts are parts of is known by its names and by the steps that led to it.
            whole = (*(template.fill(captures) for template in self._templates), self._steps[: steps - 1])
            joined = parts.add(whole, step, value)
            if joined is not None:
                self._write(joined, captures, parts, steps - 1)
        else:
            self._write(step.undo(value), captures, parts, steps - 1)


def _groups(pattern: str, side: str) -> tuple[tuple[str, ...], ...]:
    groups: list[tuple[str, ...]] = []
    if re.fullmatch(r"(\s*(\w+|\([\w\s]*\)))*\s*", side) is None:
        raise LazyModelError(f"rearrange {pattern!r}: expected axis names and parentheses, found {side.strip()!r}")
    for token in re.findall(r"\w+|\([^()]*\)", side):
        names = tuple(name for name in token.strip("()").split() if name != "1")
        if bad := [name for name in names if not name.isidentifier()]:
            raise LazyModelError(f"rearrange {pattern!r}: {bad[0]!r} is no name of an axis")
        groups.append(names)
    return tuple(groups)


class _Missing(Exception):
    """The checkpoint lacks a tensor of this name."""


class _Tensors:
    """A checkpoint's tensors, and which of them were taken."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoint = checkpoint
        self.taken: set[str] = set()
        self._counts: dict[Any, dict[Any, int]] = {}

    def take(self, name: str) -> LazyTensor:
        if name not in self.checkpoint:
            raise _Missing(name)
        self.taken.add(name)
        return lazy(self.checkpoint[name], name)

    def count(self, template: _Template, capture: str, captures: Captures) -> int:
        """One more than the highest number in a capture's place; a number that is left out is missed when taken."""
        known = tuple(sorted(set(captures).intersection(template.captures)))
        key = (template.text, capture, known)
        if key not in self._counts:
            counts = self._counts[key] = {}
            for name in self.checkpoint:
                found = template.match(name)
                if found is not None and re.fullmatch(r"0|[1-9]\d{0,8}", found.get(capture, "")):
                    # A number beyond that of all tensors leaves one out, which is missed before it is counted up to.
                    number = min(int(found[capture]), len(self.checkpoint))
                    values = tuple(found[name] for name in known)
                    counts[values] = max(counts.get(values, 0), number + 1)
        count = self._counts[key].get(tuple(captures[name] for name in known), 0)
        if not count:
            raise _Missing(template.fill(captures | {capture: "0"}))
        return count


class _Parts:
    """Tensors on their way out, some of them in parts that are not all there yet."""

    def __init__(self) -> None:
        self.finished: dict[str, Any] = {}
        self._writers: dict[str, str] = {}
        self._parts: dict[Any, dict[int, tuple[_Part, Any, str]]] = {}
        self.path = ""  # the variable at hand

    def finish(self, name: str, value: Any) -> None:
        if name in self.finished:
            raise LazyModelError(
                f"both {self._writers[name]!r} and {self.path!r} would be written to {name!r}; end the entry of the "
                "one that repeats the other with .unsaved()"
            )
        self.finished[name], self._writers[name] = value, self.path

    def add(self, whole: Any, part: _Part, value: Any) -> Any:
        """The whole, once all its parts have been added."""
        parts = self._parts.setdefault((whole, part.of, part.axis), {})
        if part.index in parts:
            raise LazyModelError(
                f"both {parts[part.index][2]!r} and {self.path!r} would be written to part {part.index} of "
                f"{whole[0]!r}; end the entry of the one that repeats the other with .unsaved()"
            )
        parts[part.index] = (part, value, self.path)
        if len(parts) < part.count:
            return None
        del self._parts[whole, part.of, part.axis]
        return part.join([parts[index][1] for index in range(part.count)])

    def check_complete(self) -> None:
        for (whole, _, axis), parts in self._parts.items():
            part, _, path = next(iter(parts.values()))
            lacking = [str(index) for index in range(part.count) if index not in parts]
            raise LazyModelError(
                f"{path!r} is a part of {whole[0]!r} (axis {axis}), and no variable gives part {', '.join(lacking)} of "
                f"its {part.count}. Give each an entry with the same steps before .part"
            )


# The table ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MappingReport:
    """What a table makes of a checkpoint and a model, found without reading a tensor.

    Attributes:
        unused: Tensors that no entry takes, name → suggestion.
        missing: Variables whose entry names a tensor that the checkpoint lacks, path → what is missing.
        ambiguous: Variables that several entries match, path → which.
        misshapen: Variables whose entry gives another shape, path → expected, found, and a suggestion.
        unmatched: Entries that match no variable, path pattern → suggestion.
        unmapped: Variables that no entry matches, path → suggestion. These are initialized, so alone they are no error.
    """

    unused: Mapping[str, str]
    missing: Mapping[str, str]
    ambiguous: Mapping[str, str]
    misshapen: Mapping[str, str]
    unmatched: Mapping[str, str]
    unmapped: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; variables that no entry matches are not counted."""
        return not any((self.unused, self.missing, self.ambiguous, self.misshapen, self.unmatched))

    def problems(self) -> list[str]:
        """One text a kind of finding, unmapped variables left out."""
        kinds = (
            ("variables that several entries match", self.ambiguous),
            ("variables whose tensors the checkpoint lacks", self.missing),
            ("variables that would get another shape", self.misshapen),
            ("entries that match no variable", self.unmatched),
            ("tensors that no entry takes", self.unused),
        )
        return [_findings(kind, found) for kind, found in kinds if found]

    def __str__(self) -> str:
        texts = self.problems() or ["every entry fits, and every tensor is taken"]
        if self.unmapped:
            texts.append(_findings("variables without an entry, which are initialized", self.unmapped))
        return "\n".join(texts)


def _findings(kind: str, found: Mapping[str, str]) -> str:
    lines = [f"  {name!r}{text}" for name, text in itertools.islice(found.items(), _LISTED)]
    more = [f"  … and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return "\n".join([f"{len(found)} {kind}:", *lines, *more])


class WeightMap:
    """A table from variable paths to the tensors of a checkpoint, usable in both directions.

    Args:
        entries: Variable path → `From`, or just a tensor's name, or None for a variable that checkpoints do not have.
            Paths may have captures: `{layer}` matches text without `/` and `.`, `{rest...}` any text. A path without
            captures goes before patterns; a variable that two patterns match is an error.
        ignore: Names of tensors, with captures or without, that may be left unused.

    Raises:
        LazyModelError: An entry has a capture in its names that is neither in its path nor stacked.
    """

    def __init__(self, entries: Mapping[str, From | str | None], *, ignore: Iterable[str] = ()) -> None:
        self._ignore = tuple(_Template(name) for name in ([ignore] if isinstance(ignore, str) else ignore))
        self._entries: dict[str, tuple[_Template, From | None]] = {}
        for path, entry in entries.items():
            template = _Template(path)
            source = From(entry) if isinstance(entry, str) else entry
            if source is not None and not isinstance(cast(Any, source), From):
                raise LazyModelError(f"entry {path!r}: expected a From, a name or None, found {source!r}")
            for name, stacked in () if source is None else ((name, source._stacked) for name in source._templates):
                if unknown := set(name.captures) - set(template.captures) - stacked:
                    capture = sorted(unknown)[0]
                    raise LazyModelError(
                        f"entry {path!r}: {{{capture}}} of {name.text!r} is neither in the path nor stacked; "
                        f"add .stack({capture!r}) if the variable has all of them"
                    )
            if source is not None and (twice := source._stacked & set(template.captures)):
                raise LazyModelError(f"entry {path!r}: {{{sorted(twice)[0]}}} is stacked, so it cannot be in the path")
            self._entries[path] = (template, source)
        self._patterns = {path: entry for path, entry in self._entries.items() if entry[0].captures}

    def check(self, checkpoint: Mapping[str, Any], abstract: Mapping[str, AbstractVariable]) -> MappingReport:
        """Compares the table with a checkpoint and an abstract model; reads headers only."""
        return self._map(checkpoint, abstract)[1]

    def write(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by name from arrays by variable path: the way back. Lazy tensors stay lazy.

        Raises:
            LazyModelError: A variable has no entry or several, or its entry cannot be undone; names it.
        """
        parts = _Parts()
        for path, array in arrays.items():
            found = self._find(path)
            if len(found) != 1:
                what = (
                    f"matches {' and '.join(repr(entry) for entry, _, _ in found)}; leave one of them out"
                    if found
                    else f"has no entry in the table{closest(path, self._entries)}; give it one, None to leave it out"
                )
                raise LazyModelError(f"variable {path!r} {what}")
            _, source, captures = found[0]
            if source is None or source.read_only:
                continue
            parts.path = path
            try:
                source._write(array, captures, parts)
            except (ValueError, IndexError) as error:
                shape = list(np.shape(array))
                raise LazyModelError(f"{path!r}, shape {shape}, cannot be written as {source}: {error}") from error
        parts.check_complete()
        return parts.finished

    def _find(self, path: str) -> list[tuple[str, From | None, Captures]]:
        """The entries that match a path: pattern, source, captures."""
        if path in self._entries and path not in self._patterns:
            return [(path, self._entries[path][1], {})]
        matches = ((pattern, source, template.match(path)) for pattern, (template, source) in self._patterns.items())
        return [(pattern, source, captures) for pattern, source, captures in matches if captures is not None]

    def _map(
        self, checkpoint: Mapping[str, Any], abstract: Mapping[str, AbstractVariable]
    ) -> tuple[dict[str, LazyTensor], MappingReport]:
        tensors = _Tensors(checkpoint)
        mapped: dict[str, LazyTensor] = {}
        missing: dict[str, str] = {}
        ambiguous: dict[str, str] = {}
        misshapen: dict[str, str] = {}
        unmapped: dict[str, str] = {}
        matched: set[str] = set()
        for path, variable in abstract.items():
            found = self._find(path)
            matched.update(pattern for pattern, _, _ in found)
            if len(found) != 1:
                if found:
                    ambiguous[path] = f" matches {' and '.join(repr(pattern) for pattern, _, _ in found)}"
                else:
                    unmapped[path] = _suggestion(unmapped, path, self._entries)
                continue
            _, source, captures = found[0]
            if source is None:
                continue
            try:
                value = source._read(captures, tensors)
            except _Missing as error:
                missing[path] = f" takes {error.args[0]!r}{_suggestion(missing, error.args[0], checkpoint)}"
                continue
            except ValueError as error:
                misshapen[path] = f" from {source}: {error}"
                continue
            expected = _stored_shape(variable)
            if tuple(value.shape) == expected:
                mapped[path] = value
            else:
                text = f" expects {list(expected)}, found {list(value.shape)} from {source}"
                misshapen[path] = text + _shape_hint(tuple(value.shape), expected)
        names = [name for _, source in self._entries.values() if source is not None for name in source.names]
        unused: dict[str, str] = {}
        for name in checkpoint:
            if name not in tensors.taken and not any(ignored.match(name) is not None for ignored in self._ignore):
                unused[name] = _suggestion(unused, name, names)
        unmatched: dict[str, str] = {}
        for pattern, (_, source) in self._entries.items():
            if pattern not in matched and source is not None:
                unmatched[pattern] = _suggestion(unmatched, pattern, abstract)
        return mapped, MappingReport(unused, missing, ambiguous, misshapen, unmatched, unmapped)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"WeightMap({len(self)} entries)"


def _suggestion(found: Mapping[str, str], name: str, names: Iterable[str]) -> str:
    """The closest names, for those findings that are listed: comparing all of many thousand takes long."""
    return closest(name, names) if len(found) < _LISTED else ""


def _stored_shape(variable: AbstractVariable) -> tuple[int, ...]:
    """The shape of its tensor; a PRNG key is stored as its key data."""
    if jax.numpy.issubdtype(variable.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, variable.struct).shape
    return tuple(variable.shape)


def _shape_hint(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if found[::-1] == expected:
        return "; the shape matches if transposed: add .T"
    if len(found) == len(expected) <= _PERMUTED and sorted(found) == sorted(expected):
        orders = itertools.permutations(range(len(found)))
        order = next(order for order in orders if tuple(found[axis] for axis in order) == expected)
        return f"; the shape matches with .transpose{order}"
    if math.prod(found) == math.prod(expected):
        return "; the number of elements is the same: split or merge axes with .rearrange"
    longer = [axis for axis, (f, e) in enumerate(zip(found, expected, strict=False)) if f != e]
    if len(found) == len(expected) and len(longer) == 1:
        axis = longer[0]
        if expected[axis] and found[axis] % expected[axis] == 0:
            return f"; is it fused? Take .part(…, of={found[axis] // expected[axis]}, axis={axis})"
    return ""


# Applying -------------------------------------------------------------------------------------------------------------

ReadFunction: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Any]"


class MappedCheckpoint(Mapping[str, LazyTensor]):
    """A checkpoint as a model sees it: variable path → lazy tensor. Made by `map_checkpoint`.

    Attributes:
        path: Path of the checkpoint that it was made of, if it has one.
        source: The checkpoint that it was made of.
        unused: Names of the source's tensors that were not looked at.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor], source: Any, unused: Sequence[str] = ()) -> None:
        path = getattr(source, "path", None)
        self._tensors = dict(tensors)
        self.path: str | None = path if isinstance(path, str) else None
        self.source = source
        self.unused = tuple(unused)

    def __getitem__(self, path: str) -> LazyTensor:
        return self._tensors[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        return f"MappedCheckpoint({len(self)} variables{where})"


class _Watched(Mapping[str, LazyTensor]):
    """A checkpoint that notes which tensors are looked at."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> LazyTensor:
        try:
            tensor = self._checkpoint[name]
        except KeyError:
            raise CheckpointError(
                f"{_described(self._checkpoint)} has no tensor {name!r}{closest(name, self._checkpoint)}"
            ) from None
        self.seen.add(name)
        return lazy(tensor, name)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)

    def get(self, name: str, default: Any = None) -> Any:
        return default if name not in self._checkpoint else self[name]  # Mapping's own expects a KeyError


def map_checkpoint(
    checkpoint: Mapping[str, Any],
    mapping: WeightMap | ReadFunction,
    abstract: AbstractModel | None = None,
    *,
    strict: bool = True,
) -> MappedCheckpoint:
    """A checkpoint under a model's own paths; nothing is read before a device asks for it.

    Args:
        checkpoint: Tensor name → lazy tensor or array, such as `open_checkpoint` returns.
        mapping: A `WeightMap`; or a function of the checkpoint that returns the model's structure, or a flat dict of
            paths, made of its tensors with NumPy: `w.T`, `w.reshape`, slices, `np.split`, `np.stack`,
            `np.concatenate`, `astype` and arithmetic with a scalar are carried out while shards are read. What else
            NumPy offers works too, and reads that one tensor whole. None in its result leaves a variable out.
        abstract: The model. A table needs it; with a function it is not used.
        strict: Whether anything that `WeightMap.check` finds wrong is an error. If not, what is wrong is left out with
            a warning. A variable without an entry is neither: `materialize` says what becomes of it.

    Returns:
        A mapping for `plan` and `materialize`.

    Raises:
        CheckpointError: The table does not fit, or the function asks for a tensor that is not there.
        LazyModelError: A table without a model.

    Example:
        >>> weights = {"dense.weight": np.zeros((4, 2), np.float32)}
        >>> map_checkpoint(weights, lambda w: {"dense": {"kernel": w["dense.weight"].T}})["dense/kernel"].shape
        (2, 4)
    """
    if not isinstance(mapping, WeightMap):
        watched = _Watched(checkpoint)
        flat = flatten_paths(mapping(watched))
        unused = [name for name in checkpoint if name not in watched.seen]
        return MappedCheckpoint({name: lazy(value, name) for name, value in flat.items()}, checkpoint, unused)
    if abstract is None:
        raise LazyModelError("a WeightMap is applied for a model: pass map_checkpoint the abstract model too")
    mapped, report = mapping._map(checkpoint, abstract)
    if not report.ok:
        text = f"{_described(checkpoint)} does not fit {abstract.name} as mapped.\n" + "\n".join(report.problems())
        if strict:
            raise CheckpointError(f"{text}\nMend the table, or pass strict=False to leave these out.")
        warnings.warn(text, LazyModelWarning, stacklevel=2)
    return MappedCheckpoint(mapped, checkpoint, list(report.unused))


def flatten_paths(tree: Any) -> dict[str, Any]:
    """A pytree's leaves by path, named as `build_abstract` names variables: keys and indexes joined by `/`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_text(keys) for keys, _ in leaves]
    while len(set(paths)) != len(paths):
        paths = unique_paths(paths)
    return {path: leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


def flat_checkpoint(checkpoint: Any) -> Mapping[str, Any] | None:
    """What a model is given to load, by path: dicts, lists and other pytrees are flattened, checkpoints are flat.

    Raises:
        CheckpointError: It is the path of a checkpoint that was not opened, or nothing with tensors.
    """
    if isinstance(checkpoint, str | os.PathLike):
        name = os.fspath(cast("str | os.PathLike[str]", checkpoint))
        raise CheckpointError(f"{name!r} is a path, not a checkpoint; open it first: lm.open_checkpoint({name!r})")
    flat = checkpoint is None or (isinstance(checkpoint, Mapping) and not isinstance(checkpoint, dict))
    leaf = not flat and jax.tree_util.all_leaves([checkpoint])
    if leaf and not hasattr(checkpoint, "dtype"):
        raise CheckpointError(f"a checkpoint is a mapping of path to tensor, or a pytree; got {checkpoint!r}")
    return cast(Any, checkpoint) if flat else flatten_paths(checkpoint)


def _described(checkpoint: Mapping[str, Any]) -> str:
    path = getattr(checkpoint, "path", None)
    return "the checkpoint" if path is None else f"checkpoint {path}"

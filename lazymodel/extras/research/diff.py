"""The method `diff`: compares two checkpoints, chunk by chunk in bounded memory.

Responsible for comparing names, shapes, dtypes and values, and for showing the differences. Values are compared as
bytes first, which is sufficient for equal tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._errors import LazyModelError
from lazymodel._mapping.resolve import given_tensors, opened
from lazymodel._mapping.source import described
from lazymodel._remote.path import reading_ahead
from lazymodel._show.progress import Progress, ProgressTo, progress_for, reported
from lazymodel._show.table import Column, Report, Table, change_text, plain, shape_text
from lazymodel._show.text import first_lines, folded_names, plural
from lazymodel._tensors.boxes import slabs
from lazymodel._tensors.buffers import cores
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import compared, required_ranges

_CHUNK = 4 << 20  # bytes of a tensor that a thread reads at once
_BLOCK = 1 << 16  # elements that are compared at once, in the caches
_WORKSPACE = 16 << 20  # bytes of temporaries of a thread
_SIZES = ("largest", "relative")  # of differences


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """The difference of a tensor that both have.

    Attributes:
        name: Its name.
        shapes: Its shape in each.
        dtypes: Its dtype in each.
        different: Number of elements whose bytes differ, or whose values differ if the dtypes do. None if the shapes
            differ, so that nothing was compared.
        largest: The largest absolute difference of two elements.
        relative: The largest difference of two elements, divided by the larger of their absolute values.
        nonfinite: Number of elements that are NaN or infinite in one and different in the other; the differences do not
            include them.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    different: int | None
    largest: float = 0.0
    relative: float = 0.0
    nonfinite: int = 0

    def within(self, tolerance: float | None) -> bool:
        """Returns True if this counts as no difference."""
        if self.different is None:
            return False
        if tolerance is None:
            return not self.different and self.dtypes[0] == self.dtypes[1]
        return self.relative <= tolerance and not self.nonfinite


@dataclasses.dataclass(frozen=True, repr=False)
class Difference(Report):
    """The result of `diff`; prints as a table, and is true if there is a difference.

    Attributes:
        names: Descriptions of what was compared.
        only: Names of tensors that only the first has, and that only the second has.
        tensors: Tensors that both have and that differ in shape, dtype or bytes, within the tolerance or not.
        compared: Number of tensors that both have.
        tolerance: The given tolerance.
    """

    names: tuple[str, str]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    tensors: tuple[TensorDifference, ...]
    compared: int
    tolerance: float | None = None

    @property
    def beyond(self) -> tuple[TensorDifference, ...]:
        """Tensors that differ by more than the tolerance."""
        return tuple(tensor for tensor in self.tensors if not tensor.within(self.tolerance))

    def __bool__(self) -> bool:
        return any(self.only) or bool(self.beyond)

    def to_dict(self) -> dict[str, Any]:
        """The result in types of JSON."""
        tensors = [plain(tensor) | {"within": tensor.within(self.tolerance)} for tensor in self.tensors]
        found = {"a": self.names[0], "b": self.names[1], "same": not self, "tolerance": self.tolerance}
        only = {"only_in_a": list(self.only[0]), "only_in_b": list(self.only[1])}
        return {**found, "compared": self.compared, **only, "tensors": tensors}

    def table(self) -> Table:
        """A row for tensors that differ only in numbers of their names."""
        beyond = self.beyond
        columns = (
            Column.names("tensor"),
            Column.number("elements", lambda cells: "–" if None in cells else f"{sum(cells):,}"),
            *(Column.number(name, lambda cells: "–" if None in cells else f"{max(cells):.3g}") for name in _SIZES),
            *map(Column, ("dtype", "shape")),
        )
        cells = [
            (t.name, t.different, *(None if t.different is None else getattr(t, name) for name in _SIZES),
             change_text(*t.dtypes), change_text(*map(shape_text, t.shapes)))
            for t in beyond
        ]  # fmt: skip
        lines: list[str] = []
        for where, names in zip(self.names, self.only, strict=True):
            mark = f"only in {where}: "
            lines += first_lines([f"{mark}{name}" for name in folded_names(names)], indent=mark)
        lines += [f"{plural(t.nonfinite, 'element')} of {t.name} not finite in one" for t in beyond if t.nonfinite][:3]
        return Table(self._title(), columns, cells, lines)

    def _title(self) -> str:
        both = f"{self.names[0]} and {self.names[1]}"
        if self:
            return f"{both}: {len(self.beyond):,} of {plural(self.compared, 'tensor')} that both have differ"
        how = "the same" if self.tolerance is None else f"the same within {self.tolerance:g}"
        equal = "bytes equal" if not self.tensors else f"{len(self.tensors):,} with other bytes"
        return f"{both}: {how}, {plural(self.compared, 'tensor')}, {equal}"


def diff(a: Any, b: Any, *, tolerance: float | None = None, progress: ProgressTo = None) -> Difference:
    """Compares two checkpoints, or other objects that have values by name; no tensor is ever held whole.

    Args:
        a: A checkpoint that `open_checkpoint` or `map_checkpoint` returned, or its path or URL; a mapping of name to
            array; an abstract model, whose initial values are computed as they are compared; or a model.
        b: The same, to compare it with.
        tolerance: None requires the same dtypes and bytes. A number requires the same shapes, and that no two elements
            differ by more than this times the larger of their absolute values; bfloat16 keeps a float32 within 0.01.
        progress: As for `materialize`, in bytes of both that are read.

    Returns:
        The differences; false, as a boolean, if there are none. Metadata are not compared.

    Raises:
        LazyModelError: One of them has no arrays.
        CheckpointError: A tensor cannot be read.

    Example:
        >>> other = {name: np.asarray(tensor) for name, tensor in lm.open_checkpoint("model.safetensors").items()}
        >>> bool(lm.diff(lm.open_checkpoint("model.safetensors"), other))
        False
        >>> other["up/kernel"] = other["up/kernel"] + 1
        >>> lm.diff(lm.open_checkpoint("model.safetensors"), other).tensors[0].name
        'up/kernel'
    """
    if tolerance is not None and not tolerance >= 0:
        raise LazyModelError(f"tolerance is None or a number of at least 0; got {tolerance!r}")
    (first, one), (second, other) = _tensors(a), _tensors(b)
    both = sorted((name for name in first if name in second), key=lambda name: (first[name].file, first[name].offset))
    comparable = {name: (first[name], second[name]) for name in both if first[name].shape == second[name].shape}
    found = _compare(comparable, progress_for(progress))
    tensors: list[TensorDifference] = []
    for name in both:
        shapes = first[name].shape, second[name].shape
        dtypes = first[name].dtype.name, second[name].dtype.name
        numbers: Any = found.get(name, (0, 0.0, 0.0, 0)) if shapes[0] == shapes[1] else (None,)
        if numbers[0] != 0 or dtypes[0] != dtypes[1]:
            tensors.append(TensorDifference(name, shapes, dtypes, *numbers))
    only = tuple(name for name in first if name not in second), tuple(name for name in second if name not in first)
    return Difference((one, other), only, tuple(tensors), len(both), tolerance)


def _tensors(given: Any) -> tuple[dict[str, LazyTensor], str]:
    """Everything by name, and a description."""
    tensors = given_tensors(given := opened(given))
    if isinstance(given, ModelSpec):
        return tensors, given.name
    if isinstance(given, Mapping) and hasattr(given, "path"):
        return tensors, described(given).removeprefix("checkpoint ")
    return tensors, f"the {type(given).__name__}"


_Block: TypeAlias = "tuple[int, float, float, int]"  # see `_of_block`


def _compare(pairs: Mapping[str, tuple[LazyTensor, LazyTensor]], bar: Progress) -> dict[str, _Block]:
    """Compares tensors of equal shapes, in threads: name → result of `_of_block` for all of it."""
    found: dict[str, _Block] = {}
    jobs = [
        (name, box)
        for name, (a, b) in pairs.items()
        for box in (slabs(a.shape, max(_CHUNK // max(a.itemsize, b.itemsize), 1)) if a.size else ())
    ]

    def compare(a: np.ndarray, b: np.ndarray) -> list[_Block]:
        one, other = a.reshape(-1), b.reshape(-1)
        blocks = range(0, one.size, _BLOCK)
        return [_of_block(one[start : start + _BLOCK], other[start : start + _BLOCK]) for start in blocks]

    total = sum(a.nbytes + b.nbytes for a, b in pairs.values())
    ranges = [each for name, box in jobs for tensor in pairs[name] for each in required_ranges(tensor, [box])]
    with (
        reported(bar, total, f"comparing {plural(len(pairs), 'tensor')}"),
        reading_ahead(ranges),
        compared(pairs, jobs, compare, cores(), _WORKSPACE) as blocks,
    ):
        for (name, box), results in zip(jobs, blocks, strict=True):
            counts, *sizes, more = zip(*results, found.get(name, (0, 0.0, 0.0, 0)), strict=True)
            largest, relative = map(max, sizes)
            found[name] = sum(counts), largest, relative, sum(more)
            bar.advance(sum(tensor.box(box).nbytes for tensor in pairs[name]), name)
    return found


def _common(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which two elements are subtracted. Long doubles represent 64-bit integers on most machines."""
    wide = any(dtype.kind in "iu" and dtype.itemsize == 8 for dtype in (a, b))
    if any(jnp.issubdtype(each, np.complexfloating) for each in (a, b)):
        return np.dtype(np.clongdouble if wide else np.complex128)
    small = all(jnp.issubdtype(each, np.floating) and each.itemsize <= 4 for each in (a, b))
    return np.dtype(np.longdouble if wide else np.float32 if small else np.float64)


def _of_block(a: np.ndarray, b: np.ndarray) -> _Block:
    """Number of elements that differ, largest absolute and relative difference, and number that are not finite."""
    common = _common(a.dtype, b.dtype)
    if a.dtype == b.dtype:
        bits = np.dtype((np.void, a.itemsize)) if a.itemsize > 8 else np.dtype(f"u{a.itemsize}")
        unequal = a.view(bits) != b.view(bits)
    elif a.dtype.kind in "iu" and b.dtype.kind in "iu":
        unequal = a != b  # exact, also where long doubles have fewer bits than these
    else:
        x, y = a.astype(common), b.astype(common)
        unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
    different = int(np.count_nonzero(unequal))
    if not different:
        return 0, 0.0, 0.0, 0
    if different < a.size:
        a, b = a[unequal], b[unequal]
    nonfinite = 0
    with np.errstate(all="ignore"):
        x, y = a.astype(common, copy=False), b.astype(common, copy=False)
        gap = np.abs(x - y)
        if not np.isfinite(gap.max()):
            common = np.promote_types(common, np.float64)  # for values that overflow float32
            x, y = a.astype(common), b.astype(common)
            gap = np.abs(x - y)
            apart = np.isfinite(gap)
            alike = (x == y) | (np.isnan(x) & np.isnan(y))
            nonfinite = int(np.count_nonzero(~apart & ~alike))
            x, y, gap = x[apart], y[apart], gap[apart]
        if not gap.size:
            return different, 0.0, 0.0, nonfinite
        relative = float(np.fmax.reduce(gap / np.maximum(np.abs(x), np.abs(y))))  # NaN for zeros of opposite signs
    return different, float(gap.max()), 0.0 if np.isnan(relative) else relative, nonfinite

"""The verb `diff`: what is different between two checkpoints, read slab by slab in bounded memory.

Responsible for comparing names, shapes, dtypes and values, and for showing what was found. Values are compared as bytes
first, which is all that equal tensors take.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import LazyModelError
from lazymodel._mapping.given import given_tensors
from lazymodel._mapping.mapped import described
from lazymodel._remote.source import reading_ahead
from lazymodel._show.progress import Progress, ProgressTo, progress_for
from lazymodel._show.table import Table, Tabled, shape_text
from lazymodel._show.text import first_lines, fold, folded_names, grouped_by, plural, unnumbered
from lazymodel._tensors.boxes import Box, box_shape, slabs
from lazymodel._tensors.buffers import Workspace, cores, empty_aligned
from lazymodel._tensors.fill import fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.wanted import wanted

_SLAB = 4 << 20  # bytes of a tensor that a thread reads at once
_BLOCK = 1 << 16  # elements that are compared at once, in the caches
_WORKSPACE = 16 << 20  # bytes of temporaries of a thread
_LOW = 2**11 - 1  # the bits of a 64-bit integer that float64 may not have
_MAX_ROWS = 40  # of a table


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """How a tensor that both have differs.

    Attributes:
        name: Its name.
        shapes: Its shape in each.
        dtypes: Its dtype in each.
        different: Number of elements with other bytes; with other values, where the dtypes differ. None where the
            shapes differ, so that nothing was compared.
        largest: The largest absolute difference of two elements.
        relative: The largest difference of two elements, divided by the larger of their sizes.
        nonfinite: Number of elements that are NaN or infinite in one and something else in the other; they are left
            out of the differences.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    different: int | None
    largest: float = 0.0
    relative: float = 0.0
    nonfinite: int = 0

    def within(self, tolerance: float | None) -> bool:
        """Whether this counts as no difference."""
        if self.different is None:
            return False
        if tolerance is None:
            return not self.different and self.dtypes[0] == self.dtypes[1]
        return self.relative <= tolerance and not self.nonfinite


@dataclasses.dataclass(frozen=True, repr=False)
class Difference(Tabled):
    """What `diff` found; prints as a table, and is true where there is a difference.

    Attributes:
        names: What was compared, for people.
        only: Names of tensors that only the first has, and only the second.
        tensors: Those that both have and that differ in shape, dtype or bytes, within the tolerance or not.
        compared: Number of tensors that both have.
        tolerance: As it was given.
    """

    names: tuple[str, str]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    tensors: tuple[TensorDifference, ...]
    compared: int
    tolerance: float | None = None

    @property
    def beyond(self) -> tuple[TensorDifference, ...]:
        """Those that differ by more than the tolerance."""
        return tuple(tensor for tensor in self.tensors if not tensor.within(self.tolerance))

    def __bool__(self) -> bool:
        return any(self.only) or bool(self.beyond)

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        tensors = [dataclasses.asdict(tensor) | {"within": tensor.within(self.tolerance)} for tensor in self.tensors]
        found = {"a": self.names[0], "b": self.names[1], "same": not self, "tolerance": self.tolerance}
        only = {"only_in_a": list(self.only[0]), "only_in_b": list(self.only[1])}
        return {**found, "compared": self.compared, **only, "tensors": tensors}

    def table(self) -> Table:
        """What is shown: a row for tensors that differ only in numbers of their names."""
        beyond = self.beyond
        groups = grouped_by(beyond, lambda tensor: (unnumbered(tensor.name), tensor.shapes, tensor.dtypes))
        rows: list[tuple[str, ...]] = []
        for group in list(groups.values())[:_MAX_ROWS]:
            first, comparable = group[0], group[0].different is not None
            numbers = ("–", "–", "–")
            if comparable:
                most = (max(tensor.largest for tensor in group), max(tensor.relative for tensor in group))
                numbers = (f"{sum(tensor.different or 0 for tensor in group):,}", *(f"{each:.3g}" for each in most))
            name = fold([tensor.name for tensor in group])
            shape, dtype = _both(tuple(map(shape_text, first.shapes))), _both(first.dtypes)
            rows.append((name, f"{len(group):,}", *numbers, dtype, shape))
        lines: list[str] = []
        if len(groups) > _MAX_ROWS:
            lines.append(f"… and {len(groups) - _MAX_ROWS:,} more rows; to_dict() has all")
        for where, names in zip(self.names, self.only, strict=True):
            lines += first_lines(
                [f"only in {where}: {name}" for name in folded_names(names)], indent=f"only in {where}: "
            )
        lines += [f"{plural(t.nonfinite, 'element')} of {t.name} not finite in one" for t in beyond if t.nonfinite][:3]
        columns = ("tensor", "count", "elements", "largest", "relative", "dtype", "shape")
        return Table(self._title(), columns, rows, frozenset(columns[1:5]), lines)

    def _title(self) -> str:
        both = f"{self.names[0]} and {self.names[1]}"
        if self:
            return f"{both}: {len(self.beyond):,} of {plural(self.compared, 'tensor')} that both have differ"
        how = "the same" if self.tolerance is None else f"the same within {self.tolerance:g}"
        equal = "bytes equal" if not self.tensors else f"{len(self.tensors):,} with other bytes"
        return f"{both}: {how}, {plural(self.compared, 'tensor')}, {equal}"


def diff(a: Any, b: Any, *, tolerance: float | None = None, progress: ProgressTo = None) -> Difference:
    """Compares two checkpoints, or whatever else has values by name; nothing is ever held whole.

    Args:
        a: A checkpoint that `open_checkpoint` or `map_checkpoint` returned, a mapping of name to array, an abstract
            model, whose initial values are computed as they are compared, or a model.
        b: What it is compared with, likewise.
        tolerance: None asks for the same dtypes and bytes. A number asks for the same shapes, and that no two elements
            differ by more than this times the larger of their sizes; 0.01 is what bfloat16 keeps of a float32.
        progress: As for `materialize`, in bytes of both that are read.

    Returns:
        What is different; false, as a truth value, where nothing is. Metadata are not compared.

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
        raise LazyModelError(f"tolerance is None or a number from 0 on; got {tolerance!r}")
    (first, one), (second, other) = _tensors(a), _tensors(b)
    both = sorted((name for name in first if name in second), key=lambda name: (first[name].file, first[name].offset))
    found = _Found()
    comparable = [(name, first[name], second[name]) for name in both if first[name].shape == second[name].shape]
    _compare(comparable, found, progress_for(progress))
    tensors: list[TensorDifference] = []
    for name in both:
        shapes = first[name].shape, second[name].shape
        dtypes = first[name].dtype.name, second[name].dtype.name
        if shapes[0] != shapes[1]:
            tensors.append(TensorDifference(name, shapes, dtypes, None))
        elif found.different[name] or dtypes[0] != dtypes[1]:
            numbers = (found.largest[name], found.relative[name], found.nonfinite[name])
            tensors.append(TensorDifference(name, shapes, dtypes, found.different[name], *numbers))
    only = tuple(name for name in first if name not in second), tuple(name for name in second if name not in first)
    return Difference((one, other), only, tuple(tensors), len(both), tolerance)


def _tensors(given: Any) -> tuple[dict[str, LazyTensor], str]:
    """Everything by name, and what to call it."""
    tensors = given_tensors(given)
    if isinstance(given, ModelSpec):
        return tensors, given.name
    if isinstance(given, Mapping) and hasattr(given, "path"):
        return tensors, described(given).removeprefix("checkpoint ")
    return tensors, f"the {type(given).__name__}"


def _both(texts: Sequence[str]) -> str:
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} → {texts[1]}"


class _Found:
    """Numbers by name."""

    def __init__(self) -> None:
        self.different, self.nonfinite = collections.Counter[str](), collections.Counter[str]()
        self.largest, self.relative = (
            collections.defaultdict[str, float](float),
            collections.defaultdict[str, float](float),
        )

    def add(self, name: str, different: int, largest: float, relative: float, nonfinite: int) -> None:
        self.different[name] += different
        self.nonfinite[name] += nonfinite
        self.largest[name] = max(self.largest[name], largest)
        self.relative[name] = max(self.relative[name], relative)


@dataclasses.dataclass(eq=False)
class _Job:
    """A box of two tensors; `left` is how many of these are to be done of them, in a list."""

    name: str
    pair: tuple[LazyTensor, LazyTensor]
    box: Box
    left: list[int]


def _jobs(pairs: Sequence[tuple[str, LazyTensor, LazyTensor]]) -> Iterator[_Job]:
    for name, a, b in pairs:
        if not a.size:
            continue
        boxes = list(slabs(a.shape, max(_SLAB // max(a.itemsize, b.itemsize), 1)))
        left = [len(boxes)]
        yield from (_Job(name, (a, b), box, left) for box in boxes)


def _compare(pairs: Sequence[tuple[str, LazyTensor, LazyTensor]], found: _Found, bar: Progress) -> None:
    """Compares tensors of equal shapes, in threads, in order."""
    jobs, lock, stopped = _jobs(pairs), threading.Lock(), threading.Event()

    def work() -> None:
        workspace, buffers = Workspace(_WORKSPACE), [empty_aligned((0,), np.dtype(np.uint8)) for _ in range(2)]
        while not stopped.is_set():
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            try:
                results = _job(job, buffers, workspace)
                with lock:
                    for result in results:
                        found.add(job.name, *result)
                    bar.advance(sum(tensor.box(job.box).nbytes for tensor in job.pair), job.name)
                    job.left[0] -= 1
                    if not job.left[0]:
                        for tensor in job.pair:
                            tensor.leaf.release()
            except BaseException:
                stopped.set()
                raise

    bar.start(sum(a.nbytes + b.nbytes for _, a, b in pairs), f"comparing {len(pairs)} tensors")
    wants = [want for job in _jobs(pairs) for tensor in job.pair for want in wanted(tensor, [job.box])]
    try:
        with reading_ahead(wants), ThreadPoolExecutor(cores(), thread_name_prefix="lazymodel-diff") as pool:
            for worker in [pool.submit(work) for _ in range(cores())]:
                worker.result()
    finally:
        bar.finish()


def _job(job: _Job, buffers: list[np.ndarray], workspace: Workspace) -> list[tuple[int, float, float, int]]:
    a, b = job.pair
    common = _common(a.dtype, b.dtype)
    if a.dtype != b.dtype and not any(map(_is_wide, (a.dtype, b.dtype))):
        a, b = a.astype(common), b.astype(common)
    arrays: list[np.ndarray] = []
    for index, tensor in enumerate((a, b)):
        shape, nbytes = box_shape(job.box), tensor.box(job.box).nbytes
        if buffers[index].nbytes < nbytes:
            buffers[index] = empty_aligned((nbytes,), np.dtype(np.uint8))
        values = buffers[index][:nbytes].view(tensor.dtype).reshape(shape)
        fill(tensor, [job.box], [values], workspace)
        arrays.append(values.reshape(-1))
    one, other = arrays
    blocks = range(0, one.size, _BLOCK)
    return [_of_block(one[start : start + _BLOCK], other[start : start + _BLOCK], common) for start in blocks]


def _common(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """As what two elements are subtracted."""
    wide = max(a.itemsize, b.itemsize)
    if any(jnp.issubdtype(each, np.complexfloating) for each in (a, b)):
        return np.dtype(np.complex128)
    small = all(jnp.issubdtype(each, np.floating) for each in (a, b)) and wide <= 4
    return np.dtype(np.float32 if small else np.float64)


def _is_wide(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype has integers that float64 has not."""
    return dtype.kind in "iu" and dtype.itemsize == 8


def _gap(a: np.ndarray, b: np.ndarray, common: np.dtype[Any]) -> np.ndarray:
    """By how much elements differ; 64-bit integers as a sum of two floats each, none of which is rounded."""
    rest = 0
    for values, sign in ((a, 1), (b, -1)):
        if _is_wide(values.dtype):
            rest = rest + sign * (values & _LOW).astype(np.float64)
    x, y = ((each - (each & _LOW) if _is_wide(each.dtype) else each).astype(common, copy=False) for each in (a, b))
    with np.errstate(all="ignore"):
        return np.abs(x - y + rest if np.ndim(rest) else x - y)


def _of_block(a: np.ndarray, b: np.ndarray, common: np.dtype[Any]) -> tuple[int, float, float, int]:
    """How many elements differ, by how much at most, absolutely and relatively, and how many beyond numbers."""
    if a.dtype != b.dtype:
        unequal = _gap(a, b, common) != 0
    else:
        bits = np.dtype((np.void, a.itemsize)) if a.itemsize > 8 else np.dtype(f"u{a.itemsize}")
        unequal = a.view(bits) != b.view(bits)
    different = int(np.count_nonzero(unequal))
    if not different:
        return 0, 0.0, 0.0, 0
    if different < a.size:
        a, b = a[unequal], b[unequal]
    nonfinite = 0
    with np.errstate(all="ignore"):
        x, y = a.astype(common, copy=False), b.astype(common, copy=False)
        gap = _gap(a, b, common)
        if not np.isfinite(gap.max()):
            common = np.promote_types(common, np.float64)  # for what overflows float32
            x, y, gap = a.astype(common), b.astype(common), _gap(a, b, common)
            apart = np.isfinite(gap)
            alike = (x == y) | (np.isnan(x) & np.isnan(y))
            nonfinite = int(np.count_nonzero(~apart & ~alike))
            x, y, gap = x[apart], y[apart], gap[apart]
        if not gap.size:
            return different, 0.0, 0.0, nonfinite
        largest, larger = float(gap.max()), np.maximum(np.abs(x), np.abs(y))
        ratio = np.divide(gap, larger, out=larger)
        relative = float(np.fmax.reduce(ratio))  # of zeros of two signs there is none
    return different, largest, 0.0 if np.isnan(relative) else relative, nonfinite

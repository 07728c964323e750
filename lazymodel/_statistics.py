"""Statistics of a model's variables, computed where their shards are: mean, deviation, range, spectral norm.

Responsible for measuring finished arrays and for showing what was found, as a table and over depth. Nothing is
gathered: sums are added up over the devices, and a matrix is only ever multiplied by vectors. There is one compiled
program for each shape, dtype and sharding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._abstract.arrays import named_arrays
from lazymodel._abstract.memory import in_memory, is_offloaded
from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import uses_x64
from lazymodel._programs.keys import is_key
from lazymodel._show.table import Table, Tabled
from lazymodel._show.text import closest, fold, plural, unnumbered

_ITERATIONS = 24  # of the Lanczos process: the largest singular value of a random matrix to some 1e-3
_BREAKDOWN = 1e-6  # a residual this small beside the norm so far means that the rest of the process is rounding
_MAX_ROWS = 60  # of a table
_LOG_RATIO = 10  # between the largest and the smallest value, from which a plot's axis is logarithmic
_IN_FLIGHT = 2  # programs dispatched before the first is waited for: one variable's temporaries besides the current


@dataclasses.dataclass(frozen=True)
class VariableStatistics:
    """What was found of one variable.

    Attributes:
        path: Its path; with `[i]` at the end for one layer of a stack.
        shape: Its shape, without the axis of layers.
        dtype: Its dtype.
        mean: Mean of its elements.
        std: Standard deviation of its elements (the population's: divided by their number).
        min: Smallest element.
        max: Largest element.
        spectral_norm: Largest singular value of it as a matrix; None where it has fewer than two dimensions or is no
            float.
        nonfinite: Number of elements that are NaN or infinite; the others are then those of what there is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    std: float
    min: float
    max: float
    spectral_norm: float | None
    nonfinite: int

    @property
    def layer(self) -> int | None:
        """The first number that is a part of the path, or ends one: how deep it stands; None where there is none."""
        found = _LAYER.search(self.path)
        return None if found is None else int(found[1])


# `layers/3/kernel`, `layer_3/kernel`, `layer.3.weight`, `kernel[3]`
_LAYER = re.compile(r"(?<![0-9A-Za-z])(\d{1,9})(?![0-9A-Za-z])")
_MEASURES = ("mean", "std", "min", "max", "spectral_norm")


class Statistics(Tabled, dict[str, VariableStatistics]):
    """Statistics by path; prints as a table, folded over layers. Made by `statistics`."""

    def __missing__(self, path: str) -> VariableStatistics:
        raise KeyError(f"there are no statistics of {path!r}{closest(path, self)}")

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Path → name of the statistic → value, as JSON takes them (NaN and infinity aside)."""
        return {path: dataclasses.asdict(row) | {"shape": list(row.shape)} for path, row in self.items()}

    def over_depth(self, measure: str = "std") -> dict[str, dict[int, float]]:
        """One statistic as lines over depth: folded path → layer → value, where a path occurs in two layers or more.

        Raises:
            LazyModelError: There is no such statistic.
        """
        if measure not in _MEASURES:
            raise LazyModelError(f"a statistic is one of {', '.join(_MEASURES)}; got {measure!r}")
        lines: dict[str, dict[int, float]] = {}
        for path, row in self.items():
            value = getattr(row, measure)
            found = _LAYER.search(path)
            if found is not None and value is not None:
                name = f"{path[: found.start(1)]}{{layer}}{path[found.end(1) :]}"
                lines.setdefault(name, {})[int(found[1])] = value
        return {name: dict(sorted(line.items())) for name, line in lines.items() if len(line) > 1}

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws standard deviation and spectral norm over depth, a line for each kind of variable; needs matplotlib.

        Args:
            path: File to save the figure to, such as `"statistics.png"`; None saves none.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            LazyModelError: No path has a layer's number in it, or matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure  # not pyplot: no window, no global state
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise LazyModelError("drawing needs matplotlib: pip install matplotlib") from error
        panels = {"standard deviation": self.over_depth("std"), "spectral norm": self.over_depth("spectral_norm")}
        if not any(panels.values()):
            raise LazyModelError("there is nothing to draw over depth: no path occurs with two layers' numbers")
        figure = cast(Any, Figure(figsize=(11, 4), layout="constrained"))
        names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
        for axes, (title, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            for name, line in lines.items():
                # A leading underscore would hide a name from the legend.
                axes.plot(list(line), list(line.values()), ".-", color=f"C{names.index(name)}", label=f" {name}")
            axes.set_title(title)
            axes.set_xlabel("layer")
            values = [value for line in lines.values() for value in line.values()]
            if min(values, default=0) > 0 and max(values) > _LOG_RATIO * min(values):
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles = dict(zip(*figure.axes[0].get_legend_handles_labels()[::-1], strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
        if path is not None:
            figure.savefig(path)
        return figure

    def table(self) -> Table:
        """What is shown."""
        groups: dict[Any, list[VariableStatistics]] = {}
        for row in self.values():
            groups.setdefault((unnumbered(row.path), row.shape, row.dtype), []).append(row)
        grid: list[tuple[str, ...]] = []
        for rows in itertools.islice(groups.values(), _MAX_ROWS):
            cells = (_range([getattr(row, measure) for row in rows]) for measure in _MEASURES)
            shape = f"{rows[0].dtype}{list(rows[0].shape)}"
            grid.append((fold([row.path for row in rows]), f"{len(rows):,}", *cells, shape))
        lines: list[str] = []
        if len(groups) > _MAX_ROWS:
            lines.append(f"… and {len(groups) - _MAX_ROWS:,} more rows; to_dict() has all")
        for row in itertools.islice((row for row in self.values() if row.nonfinite), _MAX_ROWS):
            lines.append(f"not finite: {plural(row.nonfinite, 'element')} of {row.path}")
        columns = ("variable", "count", "mean", "std", "min", "max", "spectral", "shape")
        title = f"statistics of {plural(len(self), 'variable')}"
        return Table(title, columns, grid, frozenset(columns[1:-1]), lines)


def _range(values: Sequence[float | None]) -> str:
    """What a group's values are: one, or the least and the greatest."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "–"
    digits = 3 if known[0] == known[-1] else 2  # five ranges side by side leave no room for more
    low, high = f"{known[0]:.{digits}g}", f"{known[-1]:.{digits}g}"
    return low if low == high else f"{low}…{high}"


def statistics(model: Any, *, stacked: str | None = None, spectral: bool = True) -> Statistics:
    """Measures every variable where it is; nothing is gathered, and nothing moved but from hosts' memory to devices.

    The spectral norm is that of the variable as a matrix. One of more than two dimensions is cut between those two
    neighbouring axes that make the matrix closest to square: (embed, heads, size) is embed × (heads size), and a
    convolution's (3, 3, in, out) is (9 in) × out. It is found by Lanczos' process (power iteration that keeps what it
    has learned: Golub and Kahan 1965), from below, to about 1e-3 of its value, in 24 products with the matrix and 24
    with its transpose.

    Sums are in float32, in float64 for float64 variables. Temporaries on a device are up to five times the largest
    shard in that type (on CPUs, whose compiler writes down what each sum is of).
    Where several processes share the arrays, all of them must call this, and all get the result.

    Args:
        model: A model of a known framework, a mapping of path to array, or any pytree of arrays. Lazy tensors of a
            checkpoint are read one after the other. PRNG keys are left out.
        stacked: Path regex (`re.fullmatch`) of variables that hold all layers along their first axis, as scanned models
            do: each layer is measured by itself.
        spectral: Whether to compute spectral norms, which take most of the time.

    Returns:
        Statistics by path.

    Raises:
        LazyModelError: There is nothing to measure, or `stacked` matches nothing.

    Example:
        >>> found = lm.statistics({"layers": [{"scale": jax.numpy.full((4,), i)} for i in (1.0, 3.0)]})
        >>> found["layers/1/scale"].mean, found.over_depth("mean")
        (3.0, {'layers/{layer}/scale': {0: 1.0, 1: 3.0}})
    """
    arrays = {path: array for path, array in named_arrays(model).items() if array.size and not is_key(array.dtype)}
    if not arrays:
        raise LazyModelError(f"there are no arrays in {type(model).__name__} to measure")
    layered: set[str] = set()
    if stacked is not None:
        layered = {path for path, array in arrays.items() if re.fullmatch(stacked, path) and array.ndim}
        if not layered:
            raise LazyModelError(f"stacked={stacked!r} matches no variable{closest(stacked, arrays)}")
    found = Statistics()
    pending: list[tuple[str, Any, Any]] = []
    for path, array in arrays.items():
        pending.append((path, array, _measured(array, layered=path in layered, spectral=spectral)))
        if len(pending) >= _IN_FLIGHT:
            found.update(_rows(*pending.pop(0), layered=layered))
    for item in pending:
        found.update(_rows(*item, layered=layered))
    return found


def _measured(array: Any, *, layered: bool, spectral: bool) -> Any:
    """Dispatches the program of an array; its results are not waited for."""
    if isinstance(array, jax.Array) and is_offloaded(array.sharding):  # it is computed with on its devices
        array = jax.device_put(array, in_memory(array.sharding, None, ""))
    values = _unplaced(array) if isinstance(array, jax.Array) else np.asarray(array)
    sharding = values.sharding if isinstance(values, jax.Array) else None
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    with jax.enable_x64(True) if values.dtype.itemsize == 8 else jax.enable_x64(uses_x64()):
        return _program(layered, spectral, everywhere)(values)


def _unplaced(array: jax.Array) -> jax.Array:
    """The same array on a mesh of automatic axes: on explicit ones every sum would want a sharding of its own."""
    if not isinstance(array.sharding, NamedSharding):
        return array
    mesh: Any = array.sharding.mesh
    plain = NamedSharding(Mesh(mesh.devices, mesh.axis_names), array.sharding.spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, plain, shards)


def _rows(path: str, array: Any, measured: Any, *, layered: set[str]) -> dict[str, VariableStatistics]:
    numbers, bidiagonal = jax.tree.map(np.asarray, measured)
    shape, dtype = tuple(array.shape), np.dtype(array.dtype).name
    names = [path]
    if path in layered:
        names, shape = [f"{path}[{index}]" for index in range(len(numbers))], shape[1:]
    else:
        numbers = numbers[None]
        bidiagonal = None if bidiagonal is None else bidiagonal[None]
    found: dict[str, VariableStatistics] = {}
    for index, name in enumerate(names):
        mean, std, low, high, nonfinite = numbers[index].tolist()
        norm = None if bidiagonal is None else _largest(bidiagonal[index])
        found[name] = VariableStatistics(name, shape, dtype, mean, std, low, high, norm, int(nonfinite))
    return found


@functools.lru_cache(maxsize=64)
def _program(layered: bool, spectral: bool, everywhere: NamedSharding | None) -> Any:
    """Compiled once for each shape, dtype and sharding that it is called with; results are on every device."""

    def measure(values: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        matrix = values.ndim > 1 and jnp.issubdtype(values.dtype, np.floating)
        return _numbers(values), _bidiagonal(values) if spectral and matrix else None

    return jax.jit(jax.vmap(measure) if layered else measure, out_shardings=everywhere)


def _computed(values: jax.Array) -> jax.Array:
    """As what sums are computed in; complex numbers by their size."""
    if jnp.issubdtype(values.dtype, np.complexfloating):
        values = jnp.abs(values)
    return values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)


def _numbers(values: jax.Array) -> jax.Array:
    """Mean, deviation, smallest, largest of what is finite, and how many elements are not."""
    values = _computed(values)
    finite = jnp.isfinite(values)
    count = _sum(finite.astype(values.dtype))
    mean = _sum(jnp.where(finite, values, 0)) / count
    square = _sum(jnp.where(finite, jnp.square(values - mean), 0)) / count
    low = jnp.min(jnp.where(finite, values, np.inf))
    high = jnp.max(jnp.where(finite, values, -np.inf))
    nonfinite = jnp.sum(~finite).astype(values.dtype)
    return jnp.stack([mean, jnp.sqrt(square), low, high, nonfinite])


def _sum(values: jax.Array) -> jax.Array:
    """A sum, an axis at a time: float32 loses digits in a single chain of a billion additions."""
    for _ in range(values.ndim):
        # Without the barrier XLA would merge the sums into one.
        values = jax.lax.optimization_barrier(jnp.sum(values, axis=-1))
    return values


def _bidiagonal(values: jax.Array) -> jax.Array:
    """The diagonal and the superdiagonal of Golub and Kahan's bidiagonalization, stacked: (2, iterations)."""
    values = _computed(values)
    cut = _cut(values.shape)
    left, right = values.shape[:cut], values.shape[cut:]
    iterations = min(_ITERATIONS, math.prod(left), math.prod(right))
    # What is not finite would make everything else so.
    values = jnp.where(jnp.isfinite(values), values, 0)

    # Products and sums rather than `dot`, which would want a copy of the matrix in its own type, and compiles for
    # seconds on CPUs. Nothing is lost: a matrix times a vector takes as long as reading the matrix.
    def times(vector: jax.Array) -> jax.Array:
        return jnp.sum(values * vector, axis=tuple(range(cut, values.ndim)))

    def transposed_times(vector: jax.Array) -> jax.Array:
        return jnp.sum(values * vector.reshape(*left, *(1,) * len(right)), axis=tuple(range(cut)))

    def unit(vector: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        norm = jnp.sqrt(jnp.sum(jnp.square(vector)))
        usable = norm > _BREAKDOWN * scale
        return jnp.where(usable, vector / jnp.where(usable, norm, 1), 0), jnp.where(usable, norm, 0)

    v, _ = unit(jax.random.normal(jax.random.key(0), right, values.dtype), 0)
    u, alpha = unit(times(v), 0)

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        u, v, alpha, scale = carry
        v, beta = unit(transposed_times(u) - alpha * v, scale)
        scale = jnp.maximum(scale, beta)
        u, following = unit(times(v) - beta * u, scale)
        return (u, v, following, jnp.maximum(scale, following)), (alpha, beta)

    _, (alphas, betas) = jax.lax.scan(step, (u, v, alpha, alpha), None, length=iterations)
    return jnp.stack([alphas, betas])


def _cut(shape: Sequence[int]) -> int:
    """Where an array is cut into the two sides of a matrix: as close to square as its axes allow."""
    return min(range(1, len(shape)), key=lambda cut: math.prod(shape[:cut]) + math.prod(shape[cut:]))


def _largest(bidiagonal: np.ndarray[Any, Any]) -> float:
    alphas, betas = bidiagonal.astype(np.float64)
    matrix = np.pad(np.diag(alphas), ((0, 0), (0, 1)))
    matrix += np.pad(np.diag(betas), ((0, 0), (1, 0)))
    return float(np.linalg.norm(matrix, 2))

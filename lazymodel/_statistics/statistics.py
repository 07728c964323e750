"""The verb `statistics`: mean, deviation, range and spectral norm of every variable of a model.

Responsible for which values are measured, and where: arrays on devices where their shards are (`devices`), all else on
the host, one variable at a time (`host`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lazymodel._abstract.arrays import named_arrays
from lazymodel._abstract.placement import device_shardings
from lazymodel._abstract.spec import ModelSpec
from lazymodel._devices.hardware import require_live
from lazymodel._errors import LazyModelError
from lazymodel._mapping.given import flat_checkpoint
from lazymodel._mapping.match import choose_and_warn
from lazymodel._mapping.values import lazy_values
from lazymodel._materialize.one_by_one import stream
from lazymodel._programs.keys import is_key
from lazymodel._show.progress import ProgressTo, progress_for
from lazymodel._show.text import closest
from lazymodel._statistics.devices import device_rows, dispatched
from lazymodel._statistics.host import host_rows
from lazymodel._statistics.result import Statistics, VariableStatistics
from lazymodel._tensors.lazy import lazy
from lazymodel._tensors.shards import on_host

_IN_FLIGHT = 2  # programs dispatched before the first is waited for: one variable's temporaries besides the current


def statistics(
    model: Any,
    checkpoint: Any = None,
    *,
    stacked: str | None = None,
    spectral: bool = True,
    progress: ProgressTo = None,
) -> Statistics:
    """Measures every variable of a model, be it there or not: of an abstract model as `materialize` would make them.

    Arrays of JAX are measured where they are; nothing is gathered or moved. What is not there yet, a checkpoint's
    tensors and the variables of an abstract model, is read or initialized one variable at a time and dropped again, so
    that it may be larger than the machine: on CPUs, while the largest variable is measured, the host holds it once, in
    the type that sums are computed in. What is initialized without bands (see `stream`) takes more.

    The spectral norm is that of the variable as a matrix. One of more than two dimensions is cut between those two
    neighbouring axes that make the matrix closest to square: (embed, heads, size) is embed × (heads size), and a
    convolution's (3, 3, in, out) is (9 in) × out. It is found by Lanczos' process (power iteration that keeps what it
    has learned: Golub and Kahan 1965), from below, to about 1e-3 of its value, in 24 products with the matrix and 24
    with its transpose.

    Complex numbers are measured by their sizes, |z|. An array without elements has a mean and a deviation of NaN.
    Sums are in float32, in float64 for float64 variables, of numbers scaled such that no square leaves its range. For
    arrays of JAX temporaries on a device are up to five times the largest shard in that type (on CPUs, whose compiler
    writes down what each sum is of).
    Where several processes share the arrays, all of them must call this, and all get the result.

    Args:
        model: An abstract model; a model of a known framework, an open checkpoint, a mapping of path to array, or any
            pytree of arrays. PRNG keys are left out.
        checkpoint: For an abstract model, as for `materialize`: what it lacks is initialized.
        stacked: Path regex (`re.fullmatch`) of variables that hold all layers along their first axis, as scanned models
            do: each layer is measured by itself.
        spectral: Whether to compute spectral norms, which take a third of the time where values are initialized, and
            most of it where they are read.
        progress: As for `materialize`, in bytes of variables.

    Returns:
        Statistics by path, in the model's order.

    Raises:
        LazyModelError: There is nothing to measure, `stacked` matches nothing, a checkpoint is given for what is no
            abstract model, or a variable of one is computed from the values of others.
        CheckpointError: As for `materialize`.

    Example:
        >>> found = lm.statistics({"layers": [{"scale": jax.numpy.full((4,), i)} for i in (1.0, 3.0)]})
        >>> found["layers/1/scale"].mean, found.over_depth("mean")
        (3.0, {'layers/{layer}/scale': {0: 1.0, 1: 3.0}})
        >>> abs(lm.statistics(abstract)["up/kernel"].std - 1) < 0.01  # never materialized
        True
    """
    shapes, arrays = _measurable(model, checkpoint)
    if not shapes:
        raise LazyModelError(f"there are no arrays in {type(model).__name__} to measure")
    layered: set[str] = set()
    if stacked is not None:
        layered = {path for path, variable in shapes.items() if re.fullmatch(stacked, path) and len(variable.shape)}
        if not layered:
            raise LazyModelError(f"stacked={stacked!r} matches no variable{closest(stacked, shapes)}")
    bar = progress_for(progress)
    bar.start(sum(variable.nbytes for variable in shapes.values()), f"measuring {len(shapes)} variables")
    # An array of a stream is gone before the next one comes.
    in_flight = 1 if isinstance(model, ModelSpec) else _IN_FLIGHT
    try:
        found: dict[str, Statistics] = {}
        chosen = ((path, array) for path, array in arrays if path in shapes)
        for path, rows in _measured(chosen, layered, in_flight, spectral=spectral):
            found[path] = Statistics((row.path, row) for row in rows)
            bar.advance(shapes[path].nbytes, path)
    finally:
        bar.finish()
    return Statistics(item for path in shapes for item in found[path].items())


def _measured(
    arrays: Iterator[tuple[str, Any]], layered: set[str], in_flight: int, *, spectral: bool
) -> Iterator[tuple[str, Iterator[VariableStatistics]]]:
    """What is found of each; programs of further arrays are dispatched before the first is waited for."""
    pending: list[tuple[str, Any, Any]] = []

    def first() -> tuple[str, Iterator[VariableStatistics]]:
        path, array, measured = pending.pop(0)
        return path, device_rows(path, array, measured, layered=path in layered)

    for path, array in arrays:
        if isinstance(array, jax.Array) and array.size:
            pending.append((path, array, dispatched(array, layered=path in layered, spectral=spectral)))
            if len(pending) >= in_flight:
                yield first()
        else:
            values = np.empty(array.shape, array.dtype) if isinstance(array, jax.Array) else array
            yield path, host_rows(path, lazy(values, path), layered=path in layered, spectral=spectral)
        del array
    while pending:
        yield first()


def _measurable(model: Any, checkpoint: Mapping[str, Any] | None) -> tuple[dict[str, Any], Iterator[tuple[str, Any]]]:
    """What has the shapes of all that is measured, and the arrays or lazy tensors, in any order."""
    if not isinstance(model, ModelSpec):
        if checkpoint is not None:
            raise LazyModelError(
                f"a checkpoint is measured by itself, or as what an abstract model makes of it; got one for "
                f"{type(model).__name__}"
            )
        arrays = named_arrays(model)
        return _numbers(arrays), iter(arrays.items())
    require_live(model.variables)
    devices = {device for sharding in device_shardings(model.variables).values() for device in sharding.device_set}
    if not all(map(on_host, devices)):
        return _numbers(model), stream(model, checkpoint)
    choice = choose_and_warn(model, flat_checkpoint(checkpoint))
    return _numbers(model), iter(lazy_values(model, choice).items())


def _numbers(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {path: array for path, array in arrays.items() if not is_key(array.dtype)}

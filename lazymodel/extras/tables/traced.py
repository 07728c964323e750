"""Lazy tensors in functions written with JAX: a function is traced, and its equations are applied to lazy tensors.

They must only move elements, since a function that computes would need their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import inner_jaxpr, walk, without_dead_code
from lazymodel._tensors.lazy import LazyTensor


def traced_result(
    function: Callable[[Any], Any], tensors: Mapping[str, LazyTensor], what: str
) -> tuple[Any, frozenset[str]]:
    """The pytree of lazy tensors that a function makes of arrays by name, and the names that it uses; nothing is read.

    `what` is the function in errors.

    Raises:
        LazyModelError: It cannot be traced, or computes values.
    """
    arrays = {name: tensor.astype(jax.dtypes.canonicalize_dtype(tensor.dtype)) for name, tensor in tensors.items()}
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    try:
        closed, result = jax.make_jaxpr(function, return_shape=True)(shapes)
    except Exception as error:
        raise LazyModelError(
            f"{what} cannot be traced: {error}. It gets arrays without values, of the shapes of the checkpoint; is "
            "this the checkpoint of another configuration?"
        ) from error
    live, used = without_dead_code(closed)  # such as initial values that the function replaces
    names = [name for name, is_used in zip(sorted(arrays), used, strict=True) if is_used]
    moved = _moved(live, [arrays[name] for name in names], what)
    return jax.tree.unflatten(jax.tree.structure(result), moved), frozenset(names)


def _moved(jaxpr: Any, values: Sequence[Any], what: str) -> list[Any]:
    """The results of a jaxpr of which each equation only moves elements."""

    def results(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in ("jit", "pjit"):
            return _moved(inner_jaxpr(eqn), operands, what)
        if name in ("div", "mul") and not np.ndim(operands[1]) and operands[1] == 1:  # a scale that is not in use
            return operands[:1]
        if move := _MOVES.get(name):
            result = move(*operands, eqn.params)
            return result if eqn.primitive.multiple_results else [result]
        raise LazyModelError(
            f"{what} computes {name!r}; it must only move elements ({', '.join(_MOVES)}), since tensors are not read "
            "before their devices need them. Write it with NumPy for lm.map_checkpoint, or load with its own library"
        )

    return walk(jaxpr, values, lambda _, value: value, results)


def _broadcast_in_dim(x: Any, params: Any) -> Any:
    shape = [1] * len(params["shape"])
    for axis, extent in zip(params["broadcast_dimensions"], np.shape(x), strict=True):
        shape[axis] = extent
    return np.broadcast_to(np.reshape(x, shape), params["shape"])


def _rev(x: Any, params: Any) -> Any:
    return x[tuple(slice(None, None, -1 if axis in params["dimensions"] else 1) for axis in range(x.ndim))]


def _slice(x: Any, params: Any) -> Any:
    steps = params["strides"] or [None] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _same(x: Any, params: Any) -> Any:
    return x


# Primitive → the same on lazy tensors, which are followed by its parameters.
_MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda *xs: np.concatenate(xs[:-1], xs[-1]["dimension"]),
    "convert_element_type": lambda *xs: xs[0].astype(xs[1]["new_dtype"]),
    "copy": _same,
    "reshape": lambda *xs: np.reshape(xs[0], xs[1]["new_sizes"]),
    "rev": _rev,
    "sharding_constraint": _same,
    "slice": _slice,
    "split": lambda *xs: np.split(xs[0], np.cumsum(xs[1]["sizes"])[:-1], xs[1]["axis"]),
    "squeeze": lambda *xs: np.squeeze(xs[0], xs[1]["dimensions"]),
    "stack": lambda *xs: np.stack(xs[:-1], xs[-1]["axis"]),
    "transpose": lambda *xs: np.transpose(xs[0], xs[1]["permutation"]),
}

"""Small equations, evaluated on the host while tracing: keys, counters and scalars are data, not program.

An init function derives a key for every variable: thousands of tiny equations, each with its own parameters, which
JAX would compile one by one. Data movement, integer arithmetic and the correctly rounded float operations give the same
bits in NumPy, so NumPy runs them; JAX runs everything else on the CPU, like eager execution. `_trace/graph` decides
which equations are small. PRNG keys are stored as packed by `pack_keys`.
"""

# pyright: reportUnknownLambdaType=false
from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lazymodel._programs.jaxprs import one_equation, run_jaxpr
from lazymodel._programs.keys import as_keys, is_key, key_data, pack_keys, unpack_keys

Array = np.ndarray[Any, Any]


def on_host() -> contextlib.AbstractContextManager[Any]:
    """Runs JAX' evaluations on the host's CPU, if there is a CPU backend."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return contextlib.nullcontext()
    return jax.default_device(cpu)


def to_host(value: Any, dtype: Any) -> Array:
    """An array, or an array of typed keys, as host data."""
    return pack_keys(key_data(value)) if is_key(dtype) else np.asarray(value, dtype)


def evaluate(eqn: Any, values: Sequence[Array]) -> list[Array]:
    """The results of an equation, bit for bit those of eager JAX."""
    fast = _FAST.get(eqn.primitive.name)
    if fast is not None:
        with np.errstate(all="ignore"):
            results = fast(eqn, *values)
        if results is not None:
            return results
    operands = [
        as_keys(unpack_keys(value), atom.aval.dtype) if is_key(atom.aval.dtype) else value
        for atom, value in zip(eqn.invars, values, strict=True)
    ]
    results = run_jaxpr(one_equation(eqn), operands)
    return [to_host(result, result.dtype) for result in results]


def _slice(eqn: Any, value: Array) -> list[Array]:
    starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    steps = strides or (1,) * value.ndim
    return [value[tuple(slice(*bounds) for bounds in zip(starts, limits, steps, strict=True))]]


def _dynamic_slice(eqn: Any, value: Array, *starts: Array) -> list[Array] | None:
    sizes = eqn.params["slice_sizes"]
    if len(starts) != value.ndim:
        return None
    # XLA clamps, so that the slice stays inside.
    first = [min(max(int(start), 0), full - size) for start, full, size in zip(starts, value.shape, sizes, strict=True)]
    return [value[tuple(slice(start, start + size) for start, size in zip(first, sizes, strict=True))]]


def _broadcast_in_dim(eqn: Any, value: Array, *_: Array) -> list[Array]:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    expanded = [1] * len(shape)
    for position, size in zip(dims, value.shape, strict=True):
        expanded[position] = size
    return [np.broadcast_to(value.reshape(expanded), shape)]


def _reshape(eqn: Any, value: Array, *_: Array) -> list[Array] | None:
    return None if eqn.params.get("dimensions") is not None else [value.reshape(eqn.params["new_sizes"])]


def _unstack(eqn: Any, value: Array) -> list[Array]:
    axis = eqn.params["axis"]
    return [np.take(value, index, axis) for index in range(value.shape[axis])]


def _iota(eqn: Any, *_: Array) -> list[Array] | None:
    if np.dtype(eqn.params["dtype"]).kind not in "iu":
        return None
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    line = np.arange(shape[axis], dtype=eqn.params["dtype"])
    return [np.broadcast_to(line.reshape([-1 if position == axis else 1 for position in range(len(shape))]), shape)]


def _convert(eqn: Any, value: Array) -> list[Array] | None:
    target = eqn.params["new_dtype"]
    exact = not is_key(target) and value.dtype.kind in "iub" and np.dtype(target).kind in "iu"
    if exact or value.dtype == target:
        return [value.astype(target)]
    # NumPy and XLA both round to nearest, ties to even.
    return [value.astype(target)] if value.dtype.kind in "iu" and target in (np.float32, np.float64) else None


def _arithmetic(operation: Callable[..., Any], kinds: str) -> Callable[..., list[Array] | None]:
    """Operations that IEEE 754 rounds correctly, and integer operations, which wrap."""

    def fast(eqn: Any, *values: Array) -> list[Array] | None:
        dtype = values[0].dtype
        if dtype.kind not in kinds or any(value.dtype != dtype for value in values):
            return None
        result = np.asarray(operation(*values), dtype)
        if dtype.kind == "f":
            # XLA may flush subnormals to zero, so JAX computes these, and values that are not finite.
            tiny = np.finfo(dtype).tiny if dtype in (np.float32, np.float64) else math.inf
            for array in (*values, result):
                if not np.all(np.isfinite(array) & ((array == 0) | (np.abs(array) >= tiny))):
                    return None
        return [result]

    return fast


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., jax.Array], dtype: Any, *last: Any) -> Callable[..., jax.Array]:
    """A function on keys as a compiled function on key data."""
    return jax.jit(lambda data, *rest: jax.random.key_data(function(as_keys(data, dtype), *rest, *last)))


def _derive(eqn: Any, keys: Array, *counts: Array) -> list[Array] | None:
    """Keys derived by `split` or `fold_in`."""
    if keys.ndim or any(count.ndim for count in counts) or not (counts or eqn.ctx.threefry_partitionable):
        return None
    function, last = (jax.random.fold_in, ()) if counts else (jax.random.split, (tuple(eqn.params["shape"]),))
    derive = _compiled(function, eqn.invars[0].aval.dtype, *last)
    return [pack_keys(np.asarray(derive(unpack_keys(keys), *counts)))]


_IDENTITIES = (
    *("copy", "copy_p", "stop_gradient", "random_clone", "device_put", "sharding_constraint"),
    *("optimization_barrier", "name"),
)
# NumPy's results, or None if NumPy would not give the same bits.
_FAST: dict[str, Callable[..., list[Array] | None]] = {
    **dict.fromkeys(_IDENTITIES, lambda eqn, *values: list(values)),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda eqn, value: [np.squeeze(value, tuple(eqn.params["dimensions"]))],
    "transpose": lambda eqn, value: [np.transpose(value, eqn.params["permutation"])],
    "concatenate": lambda eqn, *values: [np.concatenate(values, eqn.params["dimension"])],
    "unstack": _unstack,
    "iota": _iota,
    "convert_element_type": _convert,
    "random_wrap": lambda eqn, data: [pack_keys(data)],
    "random_unwrap": lambda eqn, keys: [unpack_keys(keys)],
    **dict.fromkeys(("random_split", "random_fold_in"), _derive),
    "add": _arithmetic(np.add, "iuf"),
    "sub": _arithmetic(np.subtract, "iuf"),
    "mul": _arithmetic(np.multiply, "iuf"),
    "div": _arithmetic(np.divide, "f"),
    "sqrt": _arithmetic(np.sqrt, "f"),
    "neg": _arithmetic(np.negative, "iuf"),
}

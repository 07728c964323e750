"""Init programs in bands: any stretch of a variable's elements computed by itself, with the bits of the whole.

Where random bits are counter-based and each element is computed from its own alone, initializing can begin anywhere:
element `i` needs counter `i`, nothing else. The recipe is interpreted for a stretch of elements, and that is one small
program, compiled once, whose first element is a run-time input. Temporaries are those of a band, where the whole
program's are three times the variable on CPUs. What has sums, factorizations or data movement in it has no bands.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from lazymodel._programs.jaxprs import (
    CALLS,
    ELEMENTWISE,
    JIT,
    depends_on_sharding,
    inner_jaxpr,
    is_approximate,
    opened,
)
from lazymodel._programs.keys import is_key
from lazymodel._programs.programs import VECTOR_LANES, InitRecipe, settings, x64_context

BAND = 1 << 18  # elements of a band, at most; what is made of them on the way stays in the caches
_SHAPE_ONLY = frozenset({"reshape", "expand_dims", "squeeze", "copy", "copy_p"})  # the elements' order is the same


class Bands:
    """A variable's elements, in C order, by stretches; programs are compiled on first use and kept for the process."""

    def __init__(self, recipe: InitRecipe, size: int, length: int, run: Callable[..., Any]) -> None:
        self._recipe, self._size, self._length, self._run = recipe, size, length, run

    def compute(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """So many elements from one on: those of one of the `slabs` of at most `BAND` elements of the variable's shape.

        These begin where rows do, or at a multiple of `BAND` in one, and so where a vector register does.
        """
        first = min(start, self._size - self._length)
        with x64_context(self._recipe):
            high, low = (np.uint32(part) for part in divmod(first, 2**32))
            return np.asarray(self._run(high, low, *self._recipe.inputs))[start - first :][:count]


def bands(recipe: InitRecipe) -> Bands | None:
    """A recipe of one variable in bands; None where its elements cannot be computed by themselves, bit for bit."""
    if len(recipe.paths) != 1 or recipe.kernels is not None:
        return None
    structs = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in recipe.inputs)
    key = (recipe.signature, structs, settings(recipe))
    with _LOCK:
        if key not in _KNOWN:
            if len(_KNOWN) >= _MOST:
                _KNOWN.pop(next(iter(_KNOWN)))
            with x64_context(recipe):
                _KNOWN[key] = _banded(recipe, structs)
        size, length, run = _KNOWN[key]
    return None if run is None else Bands(recipe, size, length, run)


_MOST = 512  # programs that are kept, a few KiB each
_KNOWN: dict[Any, tuple[int, int, Callable[..., Any] | None]] = {}
_LOCK = threading.Lock()


def _banded(recipe: InitRecipe, structs: Sequence[Any]) -> tuple[int, int, Callable[..., Any] | None]:
    jaxpr = jax.make_jaxpr(recipe.function)(*structs)
    (out,) = jaxpr.out_avals
    size, length = out.size, _longest(out.shape)
    given = any(value.size == size for value in recipe.inputs)  # data, of which no band is computed
    if size <= 1 or given or is_key(out.dtype) or depends_on_sharding(jaxpr):
        return size, length, None
    # The last elements of a row that does not fill a vector register may be computed by other instructions.
    if is_approximate(jaxpr) and (out.shape[-1] % VECTOR_LANES or size < VECTOR_LANES):
        return size, length, None
    run = functools.partial(_run_band, jaxpr, size, length)
    word = jax.ShapeDtypeStruct((), np.uint32)
    try:
        jax.eval_shape(run, word, word, *structs)
    except _NoBands:
        return size, length, None
    return size, length, _CompiledOnce(run, (word, word, *structs))


class _CompiledOnce:
    """A function that is compiled when it is first called, by one of the threads that call it."""

    def __init__(self, function: Callable[..., Any], structs: Sequence[Any]) -> None:
        self._function, self._structs = function, structs
        self._lock, self._compiled = threading.Lock(), None

    def __call__(self, *values: Any) -> Any:
        with self._lock:
            if self._compiled is None:
                self._compiled = jax.jit(self._function).lower(*self._structs).compile()
        return self._compiled(*values)


def _longest(shape: tuple[int, ...]) -> int:
    """Elements of the largest of the `slabs` of a shape."""
    size, inner = math.prod(shape), math.prod(shape[1:])
    if size <= BAND:
        return size
    return _longest(shape[1:]) if inner > BAND else inner * (BAND // inner)


class _NoBands(Exception):
    """An equation mixes elements."""


def _run_band(jaxpr: Any, size: int, length: int, high: Any, low: Any, *inputs: Any) -> jax.Array:
    def draw(key: Any, width: int) -> jax.Array:
        """As JAX draws random bits where `jax_threefry_partitionable` is on."""
        words = jax.random.key_data(key)
        low_words = low + jax.lax.iota(np.uint32, length)
        high_words = high + (low_words < low).astype(np.uint32)
        first, second = threefry2x32_p.bind(words[0], words[1], high_words, low_words)
        if width == 64:
            return (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
        return (first ^ second).astype(f"uint{width}")

    (result,) = _evaluate(jaxpr, inputs, size, length, draw)
    return jnp.broadcast_to(result, (length,))


def _bound(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    results = eqn.primitive.bind(*operands, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _evaluate(jaxpr: Any, inputs: Sequence[Any], size: int, length: int, draw: Callable[..., Any]) -> list[Any]:
    """A jaxpr in which every value of `size` elements is a band of it, and every other one as it is."""
    body, consts = opened(jaxpr)
    if any(np.size(const) == size for const in consts):
        raise _NoBands
    known: dict[Any, Any] = dict(zip((*body.constvars, *body.invars), (*consts, *inputs), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else known[atom]

    for eqn in body.eqns:
        name, operands = eqn.primitive.name, [read(atom) for atom in eqn.invars]
        whole = [atom.aval.size == size for atom in eqn.invars]
        if name in JIT or name in CALLS:
            results = _evaluate(inner_jaxpr(eqn), operands, size, length, draw)
        elif all(var.aval.size != size for var in eqn.outvars) and not any(whole):
            results = _bound(eqn, operands)
        elif name == "random_bits" and eqn.invars[0].aval.size == 1:
            results = [draw(operands[0].reshape(()), eqn.params["bit_width"])]
        elif name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1:
            results = [jnp.broadcast_to(jnp.reshape(operands[0], ()), (length,))]
        elif name in _SHAPE_ONLY and whole[0]:
            results = operands[:1]
        elif name in ELEMENTWISE and all(
            each or atom.aval.size == 1 for each, atom in zip(whole, eqn.invars, strict=True)
        ):
            flat = [
                each if ok or not np.ndim(each) else jnp.reshape(each, ())
                for each, ok in zip(operands, whole, strict=True)
            ]
            results = _bound(eqn, flat)
        else:
            raise _NoBands
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]

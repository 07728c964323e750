"""Init programs in chunks: any range of a variable's elements is computed separately, with the bits of the whole.

If random bits are counter-based and each element depends only on its own bits, initializing can begin anywhere: element
`i` only needs counter `i`. The recipe is interpreted for a range of elements as one small program, compiled once, with
the first element as a run-time input. Its temporaries are those of a chunk, while those of the whole program are three
times the variable on CPUs. Recipes with sums, factorizations or data movement cannot be computed in chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
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
    walk,
)
from lazymodel._programs.kernels import Programs
from lazymodel._programs.keys import is_key
from lazymodel._programs.programs import VECTOR_LANES, InitRecipe, settings, x64_context

CHUNK = 1 << 18  # maximum of elements in a chunk; intermediates of a chunk stay in the caches
_SHAPE_ONLY = frozenset({"reshape", "expand_dims", "squeeze", "copy", "copy_p"})  # keep the order of elements


class ChunkedInit:
    """A variable's elements, in C order, by ranges; programs are compiled on first use and kept for the process."""

    def __init__(self, recipe: InitRecipe, size: int, length: int, run: Callable[..., Any]) -> None:
        self._recipe, self._size, self._length, self._run = recipe, size, length, run

    def compute(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """`count` elements from `start` on: one of the `slabs` of at most `CHUNK` elements of the variable's shape.

        Each begins at the start of a row, or at a multiple of `CHUNK` in one, and so at that of a vector register.
        """
        first = min(start, self._size - self._length)
        with x64_context(self._recipe):
            high, low = (np.uint32(part) for part in divmod(first, 2**32))
            return np.asarray(self._run(high, low, *self._recipe.inputs))[start - first :][:count]


def chunked_init(recipe: InitRecipe) -> ChunkedInit | None:
    """A recipe of one variable in chunks; None if its elements cannot be computed separately, bit for bit."""
    if len(recipe.paths) != 1 or recipe.kernels is not None:
        return None
    structs = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in recipe.inputs)
    key = (recipe.signature, structs, settings(recipe))
    with x64_context(recipe):
        size, length, run = _CHUNKED.get(key, lambda: _in_chunks(recipe, structs))
    return None if run is None else ChunkedInit(recipe, size, length, run)


_CHUNKED: Programs[tuple[int, int, Callable[..., Any] | None]] = Programs(512)  # a few KiB each


def _in_chunks(recipe: InitRecipe, structs: Sequence[Any]) -> tuple[int, int, Callable[..., Any] | None]:
    jaxpr = jax.make_jaxpr(recipe.function)(*structs)
    (out,) = jaxpr.out_avals
    size, length = out.size, _longest(out.shape)
    given = any(value.size == size for value in recipe.inputs)  # data, which is not computed in chunks
    if size <= 1 or given or is_key(out.dtype) or depends_on_sharding(jaxpr):
        return size, length, None
    # The last elements of a row that does not fill a vector register may be computed with other instructions.
    if is_approximate(jaxpr) and (out.shape[-1] % VECTOR_LANES or size < VECTOR_LANES):
        return size, length, None
    run = functools.partial(_run_chunk, jaxpr, size, length)
    word = jax.ShapeDtypeStruct((), np.uint32)
    try:
        jax.eval_shape(run, word, word, *structs)
    except _NoChunks:
        return size, length, None
    compiled: Programs[Any] = Programs(1)  # compiled by the first thread that calls it
    lowered = jax.jit(run).lower
    return size, length, lambda *values: compiled.get((), lambda: lowered(word, word, *structs).compile())(*values)


def _longest(shape: tuple[int, ...]) -> int:
    """Elements of the largest of the `slabs` of a shape."""
    size, inner = math.prod(shape), math.prod(shape[1:])
    if size <= CHUNK:
        return size
    return _longest(shape[1:]) if inner > CHUNK else inner * (CHUNK // inner)


class _NoChunks(Exception):
    """An equation mixes elements."""


def _run_chunk(jaxpr: Any, size: int, length: int, high: Any, low: Any, *inputs: Any) -> jax.Array:
    def draw(key: Any, width: int) -> jax.Array:
        """Draws random bits as JAX does with `jax_threefry_partitionable`."""
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
    """Evaluates a jaxpr in which every value of `size` elements is replaced by a chunk of it, the others unchanged."""

    def constant(atom: Any, value: Any) -> Any:
        if np.size(value) == size and not hasattr(atom, "val"):
            raise _NoChunks
        return value

    def results(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name, whole = eqn.primitive.name, [atom.aval.size == size for atom in eqn.invars]
        if name in JIT or name in CALLS:
            return _evaluate(inner_jaxpr(eqn), operands, size, length, draw)
        if all(var.aval.size != size for var in eqn.outvars) and not any(whole):
            return _bound(eqn, operands)
        if name == "random_bits" and eqn.invars[0].aval.size == 1:
            return [draw(operands[0].reshape(()), eqn.params["bit_width"])]
        if name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1:
            return [jnp.broadcast_to(jnp.reshape(operands[0], ()), (length,))]
        if name in _SHAPE_ONLY and whole[0]:
            return operands[:1]
        pairs = list(zip(operands, whole, strict=True))
        if name in ELEMENTWISE and all(chunked or np.size(each) == 1 for each, chunked in pairs):
            return _bound(eqn, [each if ok or not np.ndim(each) else jnp.reshape(each, ()) for each, ok in pairs])
        raise _NoChunks

    return walk(jaxpr, inputs, constant, results)

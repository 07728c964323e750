"""Elements while they move: their bits, and conversions that round as NumPy does when the same is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazymodel._tensors.convert import Arithmetic, Convert


def converted(piece: Any, steps: Iterable[Convert]) -> Any:
    """The piece after conversions, each of which rounds as NumPy does when the same is loaded."""
    for step in steps:
        if step.bitcast:
            piece = lax.bitcast_convert_type(piece, step.dtype)
            continue
        zero, operands = _zero(piece), [piece]
        compute = step.function if isinstance(step.function, Arithmetic) else None
        if compute is not None:
            operands = [piece if operand is None else np.asarray(operand) for operand in compute.operands]
        # NumPy has decided the dtype in which it computes: JAX would multiply bfloat16 by 0.3 in bfloat16.
        operands = [_hidden(_hidden(jnp.asarray(each), zero).astype(step.dtype), zero) for each in operands]
        piece = operands[0] if compute is None else getattr(jnp, compute.function.__name__)(*operands)
    return piece


def _zero(piece: Any) -> Any:
    """Zeros, which no compiler knows: no square is 5 modulo 8."""
    wide = bits(piece).astype(np.uint32)
    return wide * wide % 8 == 5


def _hidden(value: Any, zero: Any) -> Any:
    """The same value, hidden so that the compiler does not know how it was computed: XLA skips roundings between
    operations, multiplies by reciprocals, and multiplies and adds in one instruction.
    """
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize > 4:
        return value
    bits = f"uint{jax.dtypes.itemsize_bits(value.dtype)}"
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, bits) + zero.astype(bits), value.dtype)


def wire(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which elements move: small ones as integers."""
    bits = jax.dtypes.itemsize_bits(dtype)
    return np.dtype(f"uint{max(bits, 8)}") if bits < 32 else np.dtype(dtype)


def bits(piece: Any) -> Any:
    """A piece in the dtype in which it moves."""
    moving, width = wire(piece.dtype), jax.dtypes.itemsize_bits(piece.dtype)
    if piece.dtype == np.bool_ or moving == piece.dtype:
        return piece.astype(moving)
    return lax.bitcast_convert_type(piece, jnp.dtype(f"uint{width}")).astype(moving)


def of_bits(piece: Any, dtype: np.dtype[Any]) -> Any:
    """The inverse of `bits`."""
    if dtype == np.bool_ or piece.dtype == dtype:
        return piece.astype(dtype)
    return lax.bitcast_convert_type(piece.astype(f"uint{jax.dtypes.itemsize_bits(dtype)}"), dtype)

"""Casts that nobody asked for: which a value may go through on its way from a checkpoint into a variable.

Responsible for the rule that `materialize` documents as its `cast`, for what it says where it refuses, and for the
conversion that is carried out while reading. Names of scales are `_tensors/quantized`'s.

The rule looks at dtypes, before anything is read. What float32 into bfloat16 rounds, or takes out of a narrower range,
is the choice of the variable's dtype. Where integers may not fit (int64 into int32, int32 into float32, uint8 into
bool), their values decide: a tensor of up to 16 MiB, such as a table of positions or a counter, is cast while it is
read, and a value that does not fit is an error. A larger one is refused: that is packed data, and finding a value that
does not fit would take reading it all.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._tensors.buffers import Convert
from lazymodel._tensors.lazy import LazyTensor, PiecesLeaf
from lazymodel._tensors.leaves import Leaf
from lazymodel._tensors.quantized import is_quantized, scales_beside

SMALL = 16 << 20  # bytes of a tensor, up to which its values decide: the largest tables of positions have 2 MiB

SAFE, UNSAFE = "safe", "unsafe"

# What a cast does to values.
_KEEPS, _BY_VALUE, _LOSES = range(3)


def check_mode(cast: Any) -> None:
    """Raises LazyModelError where `cast` is neither `"safe"` nor `"unsafe"`."""
    if cast not in (SAFE, UNSAFE):
        raise LazyModelError(
            f"cast is 'safe', where a cast that can lose what a value means is an error, or 'unsafe', where values are "
            f"cast as NumPy's astype does; got {cast!r}"
        )


def refusal(path: str, tensor: LazyTensor, expected: np.dtype[Any], where: str, names: Container[str] = ()) -> str:
    """Why a tensor, with all conversions that were asked for, is not cast into a variable's dtype; empty if it may be.

    `where` says what the tensor is, for the message; scales are looked for among `names`, those of its checkpoint.
    """
    found, verdict = tensor.dtype, _verdict(tensor.dtype, expected)
    if found != expected and is_quantized(found) and jnp.issubdtype(expected, jnp.inexact):
        scale = next((scale for leaf in _leaves(tensor) for scale in scales_beside(leaf.name, names)), None)
        if scale is not None:
            return (
                f"{path!r}: expected {expected.name}, found {found.name} in {where} with {scale!r} beside it: "
                "quantized numbers, which mean nothing without their scale. This form is not read yet: load a "
                "dequantized copy, or decode it with a mapping; cast='unsafe' takes the bare numbers"
            )
    if verdict == _KEEPS or (verdict == _BY_VALUE and tensor.nbytes <= SMALL):
        return ""
    return (
        f"{path!r}: expected {expected.name}, found {found.name} in {where}: the cast can lose "
        f"{_lost(found, expected)}. Is this the checkpoint of another configuration? cast='unsafe' casts as NumPy's "
        "astype does"
    )


def weights(tensor: LazyTensor) -> list[Leaf]:
    """What a tensor is made of that may be quantized weights: small floats, and matrices of integers."""
    return [
        leaf
        for leaf in _leaves(tensor)
        if is_quantized(leaf.dtype)
        and (jnp.issubdtype(leaf.dtype, jnp.floating) or (leaf.dtype.itemsize <= 4 and len(leaf.shape) > 1))
    ]


def _leaves(tensor: LazyTensor) -> list[Leaf]:
    """Its leaf, and those that this is joined of."""
    joined = tensor.leaf.pieces if isinstance(tensor.leaf, PiecesLeaf) else ()
    return [tensor.leaf, *(piece.leaf for piece in joined)]


def converted(tensor: LazyTensor, dtype: np.dtype[Any], cast: str = SAFE) -> LazyTensor:
    """The tensor in another dtype, converted while it is read, if `refusal` has nothing against it.

    With `"safe"`, reading raises CheckpointError at a value that the dtype does not have, where values decide.
    """
    if _kind(tensor.dtype) == _COMPLEX and _kind(dtype) in (_INTEGER, _FLOATING):
        # The same bits as astype's, which would warn from whichever thread reads.
        return tensor.converted((Convert(dtype, function=lambda values: np.real(values).astype(dtype)),))
    if cast == UNSAFE or _verdict(tensor.dtype, dtype) != _BY_VALUE:
        return tensor.astype(dtype)
    return tensor.converted((Convert(dtype, function=functools.partial(_fitting, dtype=dtype)),))


def _verdict(found: np.dtype[Any], expected: np.dtype[Any]) -> int:
    if found == expected:
        return _KEEPS
    source, target = _kind(found), _kind(expected)
    if source is None or target is None:
        return _KEEPS  # no numbers: whatever astype says
    if source >= _FLOATING:
        return _KEEPS if target >= source else _LOSES
    low, high = _range(found)
    if target >= _FLOATING:
        info = jnp.finfo(expected)
        # Every integer up to two to the number of digits exists.
        keeps = max(-low, high) <= min(2 ** (int(info.nmant) + 1), float(info.max))
    else:
        lowest, highest = _range(expected)
        keeps = lowest <= low and high <= highest
    return _KEEPS if keeps else _BY_VALUE


_BOOL, _INTEGER, _FLOATING, _COMPLEX = range(4)


def _kind(dtype: np.dtype[Any]) -> int | None:
    """What kind of numbers a dtype has, ml_dtypes' included; None where it has none."""
    if dtype == np.bool_:
        return _BOOL
    for kind, parent in ((_INTEGER, jnp.integer), (_FLOATING, jnp.floating), (_COMPLEX, jnp.complexfloating)):
        if jnp.issubdtype(dtype, parent):
            return kind
    return None


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The least and the greatest value of booleans or integers."""
    return (0, 1) if dtype == np.bool_ else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))


def _lost(found: np.dtype[Any], expected: np.dtype[Any]) -> str:
    source, target = _kind(found), _kind(expected)
    if source == _COMPLEX:
        return "imaginary parts"
    if target == _BOOL:
        return "all but whether a number is 0"
    if source == _FLOATING:
        return "fractions, infinities and NaN"
    return "what does not fit, and the tensor is too large to try each value"


def _fitting(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Integers in another dtype; CheckpointError where one is not there in it."""
    wide = values if values.dtype.kind in "iu" else values.astype(np.int64)  # ml_dtypes' are narrow
    with np.errstate(all="ignore"):
        cast = values.astype(dtype)
        if _kind(dtype) in (_FLOATING, _COMPLEX):
            back = np.real(cast).astype(np.float64)
            # Compared below 2 to the 63rd, beyond which the way back is undefined.
            fits = np.isfinite(back) & (back < float(_range(wide.dtype)[1] + 1)) & (back.astype(wide.dtype) == wide)
        else:
            low, high = _range(dtype)
            fits = (wide >= low) & (wide <= high)
    if not fits.all():
        raise CheckpointError(
            f"expected numbers that {dtype.name} has, found {values[~fits].flat[0]} ({values.dtype.name}); "
            "cast='unsafe' casts as NumPy's astype does"
        )
    return cast

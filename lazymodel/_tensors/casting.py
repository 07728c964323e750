"""Casts that may be applied to a value between a checkpoint and a variable without a request.

Contains the rule that `materialize` documents as its `cast`, the message for a rejected cast, and the casts whose
values decide; how numbers are rounded is `convert`'s. Also recognizes, by names and dtypes alone, tensors that have a
meaning only together with others: weights in eight bits or fewer, and their scales.

The rule uses dtypes, before anything is read. Float32 into bfloat16 rounds, and values outside a narrower range are
lost: this is the choice of the variable's dtype. Where integers may not fit (int64 into int32, int32 into float32,
uint8 into bool), their values decide: a tensor of up to 16 MiB, such as a table of positions or a counter, is cast
while it is read, and a value that does not fit raises. A larger tensor raises at once: it is packed data, and to find a
value that does not fit, all of it would have to be read.

Recognized are the names of FP8 (`weight_scale_inv`, `weight_scale`, `input_scale`), GPTQ and AWQ (`qweight`, `qzeros`,
`scales`, `g_idx`), bitsandbytes (`absmax`, `quant_map`, `quant_state`, `SCB`), compressed-tensors (`weight_packed`,
`weight_zero_point`), ModelOpt (`pre_quant_scale`), quanto (`weight._scale`), MLX (`scales`, `biases`), MXFP4
(`_blocks`, `_scales`), ComfyUI (`scale_weight`) and Mistral (`qscale_weight`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._tensors.convert import Convert
from lazymodel._tensors.lazy import ConcatenatedTensor, LazyTensor
from lazymodel._tensors.tensor_source import TensorSource

# Endings added to a tensor's own name, and names alongside it in its module.
_ADDED = (
    *("_scale", "_scale_inv", "_scales", "_scale_2", "_scale_inverse", "_zero_point", "_zero_points", "_zeros"),
    *("_absmax", ".absmax", ".quant_map", ".nested_absmax", ".SCB", "._scale", ".scale", ".scales", "/scale"),
    "/scales",
)
_ALONGSIDE = (
    *("scale", "scales", "scale_inv", "zero_point", "zeros", "qzeros", "g_idx", "absmax", "SCB", "qscale"),
    *("scale_weight", "qscale_weight"),
    *("weight_scale", "weight_scale_inv", "weight_scales", "weight_zero_point", "kernel_scale", "kernel_zero"),
)
# MXFP4 as GPT-OSS stores it: the name of the blocks determines the name of their scales.
_REPLACED = (("_blocks", "_scales"), ("_packed", "_scale"), ("_quantized", "_scale"), ("qvalue", "scale"))

# Names that only quantized forms have.
_MARKER = re.compile(
    r"(?:.*[./])?(?:"
    r"qweight|qzeros|g_idx|SCB|weight_format|(?:weight\.)?(?:nested_)?(?:absmax|quant_map)|(?:weight\.)?quant_state\..*"
    r"|weight_(?:scale(?:_inv|_2|s)?|zero_points?|packed|global_scale|g_idx)|weight\._(?:data|scale|shift)"
    r"|(?:input|output|activation)_scale|input_global_scale|pre_quant_scale|scale_weight|qscale_weight|W_q"
    r")|.*_scale_inv|.*_proj_(?:blocks|scales)"
)


def is_quantized(dtype: np.dtype[Any]) -> bool:
    """Returns True if quantized weights are stored in such a dtype: integers, or floats of eight bits or fewer."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype.itemsize == 1
    return bool(jnp.issubdtype(dtype, jnp.integer))


def is_marker(name: str) -> bool:
    """Returns True if only quantized forms have such a name."""
    return _MARKER.fullmatch(name) is not None


def scales_beside(name: str, names: Container[str]) -> list[str]:
    """Names in a checkpoint that look like the scales or zero points of one of its tensors."""
    module = name[: max(name.rfind("."), name.rfind("/")) + 1]
    candidates = [*(name + added for added in _ADDED), *(module + other for other in _ALONGSIDE)]
    leaf = name.removeprefix(module)
    candidates += [name.removesuffix(ending) + other for ending, other in _REPLACED if leaf.endswith(ending)]
    return [candidate for candidate in dict.fromkeys(candidates) if candidate != name and candidate in names]


SMALL = 16 << 20  # bytes of a tensor up to which its values decide: the largest tables of positions have 2 MiB

SAFE, UNSAFE = "safe", "unsafe"

# Effect of a cast on values.
_KEEPS, _BY_VALUE, _LOSES = range(3)


def check_mode(cast: Any) -> None:
    """Raises LazyModelError if `cast` is neither `"safe"` nor `"unsafe"`."""
    if cast not in (SAFE, UNSAFE):
        raise LazyModelError(
            "expected cast='safe' (a cast that can lose what a value means is an error) or cast='unsafe' (values are "
            f"cast as by NumPy's astype), got {cast!r}"
        )


def refusal(path: str, tensor: LazyTensor, expected: np.dtype[Any], where: str, names: Container[str] = ()) -> str:
    """The reason why a tensor, after its requested conversions, cannot be cast to a variable's dtype; empty if it can.

    `where` describes the tensor in the message. Scales are searched among `names`, those of its checkpoint.
    """
    found, verdict = tensor.dtype, _verdict(tensor.dtype, expected)
    if found != expected and is_quantized(found) and jnp.issubdtype(expected, jnp.inexact):
        scale = next((scale for source in _sources(tensor) for scale in scales_beside(source.name, names)), None)
        if scale is not None:
            return (
                f"{path!r}: expected {expected.name}, found {found.name} in {where} with {scale!r} alongside: "
                "quantized numbers, which mean nothing without their scale. This form is not read yet: load a "
                "dequantized copy, or decode it with a mapping"
            )
    if verdict == _KEEPS or (verdict == _BY_VALUE and tensor.nbytes <= SMALL):
        return ""
    # Only of values that fit is an unsafe cast right.
    fix = " If they fit, pass cast='unsafe'" if verdict == _BY_VALUE else ""
    if _kind(found) == _FLOATING and _kind(expected) == _INTEGER:
        fix = " A model that its step quantize() has quantized takes floats"
    return (
        f"{path!r}: expected {expected.name}, found {found.name} in {where}: the cast can lose "
        f"{_lost(found, expected)}. Is this the checkpoint of another configuration?{fix}"
    )


def weights(tensor: LazyTensor) -> list[TensorSource]:
    """The sources of a tensor that may be quantized weights: small floats, and matrices of integers."""
    return [
        source
        for source in _sources(tensor)
        if is_quantized(source.dtype)
        and (jnp.issubdtype(source.dtype, jnp.floating) or (source.dtype.itemsize <= 4 and len(source.shape) > 1))
    ]


def _sources(tensor: LazyTensor) -> list[TensorSource]:
    """The source of a tensor, and the sources that are joined in it."""
    joined = tensor.source.pieces if isinstance(tensor.source, ConcatenatedTensor) else ()
    return [tensor.source, *(part.source for part in joined)]


def converted(tensor: LazyTensor, dtype: np.dtype[Any], cast: str = SAFE) -> LazyTensor:
    """The tensor in another dtype, converted while it is read. Only for tensors that `refusal` accepts.

    With `"safe"`, if values decide, reading raises CheckpointError at a value that the dtype cannot represent.
    """
    if _kind(tensor.dtype) == _COMPLEX and _kind(dtype) in (_INTEGER, _FLOATING):
        # The same bits as from astype, which would warn in the thread that reads.
        return tensor.converted((Convert(dtype, function=lambda values: np.real(values).astype(dtype)),))
    if cast == UNSAFE or _verdict(tensor.dtype, dtype) != _BY_VALUE:
        return tensor.astype(dtype)
    return tensor.converted((Convert(dtype, function=functools.partial(_fitting, dtype=dtype)),))


def _verdict(found: np.dtype[Any], expected: np.dtype[Any]) -> int:
    if found == expected:
        return _KEEPS
    source, target = _kind(found), _kind(expected)
    if source is None or target is None:
        return _KEEPS  # not numbers: astype decides
    if source >= _FLOATING:
        return _KEEPS if target >= source else _LOSES
    low, high = _range(found)
    if target >= _FLOATING:
        info = jnp.finfo(expected)
        # A float represents every integer up to two to the power of its number of digits.
        keeps = max(-low, high) <= min(2 ** (int(info.nmant) + 1), float(info.max))
    else:
        lowest, highest = _range(expected)
        keeps = lowest <= low and high <= highest
    return _KEEPS if keeps else _BY_VALUE


_BOOL, _INTEGER, _FLOATING, _COMPLEX = range(4)


def _kind(dtype: np.dtype[Any]) -> int | None:
    """The kind of a dtype's numbers, including those of ml_dtypes; None if it has no numbers."""
    if dtype == np.bool_:
        return _BOOL
    for kind, parent in ((_INTEGER, jnp.integer), (_FLOATING, jnp.floating), (_COMPLEX, jnp.complexfloating)):
        if jnp.issubdtype(dtype, parent):
            return kind
    return None


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The smallest and the largest value of booleans or integers."""
    return (0, 1) if dtype == np.bool_ else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))


def _lost(found: np.dtype[Any], expected: np.dtype[Any]) -> str:
    source, target = _kind(found), _kind(expected)
    if source == _COMPLEX:
        return "imaginary parts"
    if target == _BOOL:
        return "everything except whether a number is zero"
    if source == _FLOATING:
        return "fractions, infinities and NaN"
    return "values that do not fit, and the tensor is too large to check each value"


def _fitting(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Casts integers to another dtype. Raises CheckpointError at a value that the dtype cannot represent."""
    wide = values if values.dtype.kind in "iu" else values.astype(np.int64)  # ml_dtypes' are narrow
    with np.errstate(all="ignore"):
        cast = values.astype(dtype)
        if _kind(dtype) in (_FLOATING, _COMPLEX):
            back = np.real(cast).astype(np.float64)
            # Compared below 2 to the 63rd; above it, converting back is undefined.
            fits = np.isfinite(back) & (back < float(_range(wide.dtype)[1] + 1)) & (back.astype(wide.dtype) == wide)
        else:
            low, high = _range(dtype)
            fits = (wide >= low) & (wide <= high)
    if not fits.all():
        raise CheckpointError(
            f"expected numbers that fit into {dtype.name}, found {values[~fits].flat[0]} ({values.dtype.name}); "
            "is this the checkpoint of another configuration?"
        )
    return cast

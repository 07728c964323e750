"""Quantized numbers by their names: which tensors of a checkpoint are scales, zero points and the like.

Responsible for telling, from names and dtypes alone, what only makes sense together with something else: a weight in
eight bits or fewer and its scale. Nothing here decodes; which of these a loader understands, it says itself.

Known are the names of FP8 (`weight_scale_inv`, `weight_scale`, `input_scale`), GPTQ and AWQ (`qweight`, `qzeros`,
`scales`, `g_idx`), bitsandbytes (`absmax`, `quant_map`, `quant_state`, `SCB`), compressed-tensors (`weight_packed`,
`weight_zero_point`), ModelOpt (`pre_quant_scale`), quanto (`weight._scale`), MLX (`scales`, `biases`), MXFP4
(`_blocks`, `_scales`), ComfyUI (`scale_weight`) and Mistral (`qscale_weight`).
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import jax.numpy as jnp
import numpy as np

# What is added to a tensor's own name, and what stands beside it in its module.
_ADDED = (
    *("_scale", "_scale_inv", "_scales", "_scale_2", "_scale_inverse", "_zero_point", "_zero_points", "_zeros"),
    *("_absmax", ".absmax", ".quant_map", ".nested_absmax", ".SCB", "._scale", ".scale", ".scales", "/scale"),
    "/scales",
)
_BESIDE = (
    *("scale", "scales", "scale_inv", "zero_point", "zeros", "qzeros", "g_idx", "absmax", "SCB", "qscale"),
    *("scale_weight", "qscale_weight"),
    *("weight_scale", "weight_scale_inv", "weight_scales", "weight_zero_point", "kernel_scale", "kernel_zero"),
)
# MXFP4 as GPT-OSS stores it: what the blocks are called decides what their scales are.
_REPLACED = (("_blocks", "_scales"), ("_packed", "_scale"), ("_quantized", "_scale"), ("qvalue", "scale"))

# Names that nothing but a quantized form has.
_MARKER = re.compile(
    r"(?:.*[./])?(?:"
    r"qweight|qzeros|g_idx|SCB|weight_format|(?:weight\.)?(?:nested_)?(?:absmax|quant_map)|(?:weight\.)?quant_state\..*"
    r"|weight_(?:scale(?:_inv|_2|s)?|zero_points?|packed|global_scale|g_idx)|weight\._(?:data|scale|shift)"
    r"|(?:input|output|activation)_scale|input_global_scale|pre_quant_scale|scale_weight|qscale_weight|W_q"
    r")|.*_scale_inv|.*_proj_(?:blocks|scales)"
)


def is_quantized(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one that quantized weights are stored in: integers, and floats of eight bits or fewer."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype.itemsize == 1
    return bool(jnp.issubdtype(dtype, jnp.integer))


def is_marker(name: str) -> bool:
    """Whether a name is one that only quantized forms have."""
    return _MARKER.fullmatch(name) is not None


def scales_beside(name: str, names: Container[str]) -> list[str]:
    """The names of a checkpoint that look like the scales or zero points of one of its tensors."""
    module = name[: max(name.rfind("."), name.rfind("/")) + 1]
    candidates = [*(name + added for added in _ADDED), *(module + beside for beside in _BESIDE)]
    leaf = name.removeprefix(module)
    candidates += [name.removesuffix(ending) + other for ending, other in _REPLACED if leaf.endswith(ending)]
    return [candidate for candidate in dict.fromkeys(candidates) if candidate != name and candidate in names]

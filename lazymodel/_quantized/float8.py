"""FP8 weights with scales alongside: `fp8`, `fbgemm_fp8`, and NVIDIA's ModelOpt.

A weight in F8_E4M3 (or another 8-bit float) has a `weight_scale_inv` or `weight_scale`: one for all, one for each
row, or one for each block of `weight_block_size`. The value is `float32(weight) * float32(scale)`, rounded once to the
model's dtype, as in `weight_dequant_kernel` of DeepSeek-V3's `inference/kernel.py`, and in `Fp8Dequantize` of
transformers. Scales of activations and of caches are not used for weights, and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lazymodel._quantized.config import Contents
from lazymodel._quantized.scaled import ScaledTensor, floats, scales_of
from lazymodel._tensors.decoded import Stored
from lazymodel._tensors.lazy import LazyTensor

_SCALES = ("_scale_inv", "_scale")
_KINDS = ("bfloat16", "float16", "float32", "float8_e8m0fnu")
_POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)
_ACTIVATIONS = re.compile(
    r"(?:.*\.)?(?:\w+_proj_)?(?:input|output|activation|k|v|q|kv|prob)_"  # and not `correct_output_scale` of Gemma 3n
    r"(?:global_)?(?:scale|scale_inv|scale_ub|zero_point)"
)
_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")


def decode(contents: Contents) -> None:
    """Decodes the weights of `fp8`, `fbgemm_fp8` and `modelopt`."""
    config = contents.config
    algorithm = config.get("quant_algo")
    if config.method == "modelopt" and algorithm not in _ALGORITHMS:
        config.reject(f"one of {', '.join(_ALGORITHMS)} as quant_algo", repr(algorithm))
    take(contents, block_of(contents, config.get("weight_block_size")))
    drop_activations(contents)


def block_of(contents: Contents, value: Any) -> Sequence[int] | None:
    """Returns a declared block, rows and columns; raises CheckpointError if it is not one."""
    if value is None:
        return None
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        contents.config.reject("two positive integers as the size of a block", repr(value))
    return sizes


def is_float8(dtype: Any) -> bool:
    return dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating) and dtype.name.startswith("float8_e")


def take(contents: Contents, declared: Sequence[int] | None) -> None:
    """Adds all 8-bit floats that have a scale."""
    for name in list(contents.left):
        if not contents.has(name) or not is_float8(contents.header(name).dtype) or name.endswith(_SCALES):
            continue
        if scale := next((name + ending for ending in _SCALES if contents.has(name + ending)), None):
            take_one(contents, name, scale, declared)


def take_one(
    contents: Contents, name: str, scale: str, declared: Sequence[int] | None, *, of_scale: bool = False
) -> None:
    """Adds a weight. With `of_scale`, its product is rounded to the scale's dtype before it is rounded to the model's,
    and scales that are bytes are powers of two (E8M0).
    """
    header, kind = contents.header(name), contents.header(scale).dtype
    shape = tuple(header.shape)
    contents.expect(scale, contents.header(scale).shape, *_KINDS, *(("uint8",) if of_scale else ()))
    arrangement, blocks = scales_of(contents, scale, shape, declared)

    def make() -> LazyTensor:
        weight = Stored(contents.tensor(name), (1,) * len(shape), floats(header.dtype))
        unpack = floats(_POWERS) if kind.itemsize == 1 else None
        scales = Stored(contents.tensor(scale).reshape(arrangement), blocks, unpack)
        decoded = LazyTensor(ScaledTensor(shape, weight, scales))
        return decoded.astype(kind) if of_scale and kind.itemsize > 1 else decoded

    contents.add(name, [name, scale], shape, make)


def drop_activations(contents: Contents) -> None:
    """Drops the scales and zero points of activations."""
    contents.drop(*[name for name in contents.left if _ACTIVATIONS.fullmatch(name)])

"""A quantized checkpoint as a plain one: the table of families, and the checks.

Raises for a form that no family knows, and for tensors that still look quantized after all families took what they
know. A weight loaded without its scale would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from lazymodel._errors import CheckpointError
from lazymodel._quantized import bitsandbytes, compressed_tensors, float4, float8, gptq
from lazymodel._quantized.config import ADVICE, Config, Contents, Plain, StoredTensors, find_config
from lazymodel._show.text import listed
from lazymodel._tensors.casting import is_marker, is_quantized, scales_beside


def _decode_modelopt(contents: Contents) -> None:
    for name in list(contents.names("_scale_2")):
        if contents.has(name) and contents.has(f"{name}_scale") and contents.header(name).dtype.name == "uint8":
            float4.add_nvfp4(contents, name, name, f"{name}_scale", f"{name}_scale_2", divides=False)
    float8.decode(contents)


_FAMILIES: Mapping[str, Callable[[Contents], None]] = {
    "fp8": float8.decode,
    "fbgemm_fp8": float8.decode,
    "modelopt": _decode_modelopt,
    "modelopt_fp4": _decode_modelopt,
    "compressed-tensors": compressed_tensors.decode,
    "gptq": gptq.decode_gptq,
    "awq": gptq.decode_awq,
    "bitsandbytes": bitsandbytes.decode,
    "mxfp4": float4.decode_mxfp4,
}


def plain_tensors(
    stored: StoredTensors, config: Mapping[str, Any], file: str
) -> tuple[dict[str, Plain], dict[str, None]]:
    """The plain tensors of a quantized checkpoint, by name, and the names of all tensors that are stored plain.

    `config` is its configuration, `file` the path of that. Raises CheckpointError for an unknown form, for parts that
    do not belong together, and for tensors that look quantized and that no family took.
    """
    found = find_config(config, file)
    contents = Contents(stored, found or Config("none", {}, jnp.dtype("bfloat16"), file))
    if found is not None:
        require_known(found)
        _FAMILIES[found.method](contents)
        if not contents.plain and found.get("format") != "dense":
            raise CheckpointError(
                f"{found.file} states that the weights are quantized with {found.method!r}, but none of them is. "
                "Remove the entry if they are plain."
            )
    _reject_rest(contents, found)
    return contents.plain, contents.left


def require_known(config: Config) -> None:
    """Raises CheckpointError for a form that no family knows."""
    if config.method not in _FAMILIES:
        raise CheckpointError(f"{config.file} states that the weights are quantized with {config.method!r}. {ADVICE}.")


def _reject_rest(contents: Contents, config: Config | None) -> None:
    """Raises CheckpointError if tensors look quantized and no family took them."""
    left = contents.left
    strange = [f"{name!r} ({dtype})" for name in left if (dtype := _strange(contents, name))]
    if strange:
        how = f"{config.file} has {config.method!r}" if config else f"{contents.config.file} does not state the method"
        raise CheckpointError(
            f"{contents.header(next(iter(left))).file} or another file of this checkpoint has quantized weights that "
            f"cannot be decoded: {listed(strange)}; {how}. {ADVICE}."
        )


def _strange(contents: Contents, name: str) -> str:
    """The dtype of a tensor that looks quantized; empty if it is plain."""
    header = contents.header(name)
    floats = jnp.issubdtype(header.dtype, jnp.floating)
    if is_marker(name) or (floats and header.dtype.itemsize == 1):
        return header.dtype.name
    small = is_quantized(header.dtype) and not floats and header.dtype.itemsize <= 4 and len(header.shape) > 1
    if small and (name.endswith("weight") or scales_beside(name, contents.left)):
        return header.dtype.name
    return ""


def is_hugging_face(config: Mapping[str, Any]) -> bool:
    """Returns True if a configuration is one of transformers or timm, or declares a quantization."""
    kinds = ("model_type", "architectures", "architecture", "quantization_config", "compression_config")
    return any(config.get(kind) for kind in kinds)

"""A quantized checkpoint as a plain one: the table of families, and what is refused.

Responsible for saying no: to a form that no family knows, and to whatever still looks quantized when all took what they
know. A weight without its scale would be loaded without a word, and mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax.numpy as jnp

from lazymodel._errors import CheckpointError
from lazymodel._quantized import bitsandbytes, compressed_tensors, float4, float8, gptq
from lazymodel._quantized.config import ADVICE, Config, find_config
from lazymodel._quantized.contents import Contents, Plain, StoredTensors
from lazymodel._show.text import listed
from lazymodel._tensors.quantized import is_marker, is_quantized, scales_beside


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
    """What the quantized tensors of a checkpoint are, by the names of the plain ones, and the names of all that are
    plain already.

    `config` is the configuration beside it, `file` its path. Raises CheckpointError for a form that is not known, for
    parts that do not belong together, and for what looks quantized and nobody took.
    """
    found = find_config(config, file)
    contents = Contents(stored, found or Config("none", {}, jnp.dtype("bfloat16"), file))
    if found is not None:
        require_known(found)
        _FAMILIES[found.method](contents)
        if not contents.plain and found.get("format") != "dense":
            raise CheckpointError(
                f"{found.file} says that the weights are quantized with {found.method!r}, and none of them is stored "
                "so. Remove the entry if they are plain."
            )
    _refuse_rest(contents, found)
    return contents.plain, contents.left


def require_known(config: Config) -> None:
    """Raises CheckpointError for a form that no family knows."""
    if config.method not in _FAMILIES:
        raise CheckpointError(f"{config.file} says that the weights are quantized with {config.method!r}. {ADVICE}.")


def _refuse_rest(contents: Contents, config: Config | None) -> None:
    """Raises CheckpointError where something looks quantized that nobody took."""
    left = contents.left
    strange = [f"{name!r} ({dtype})" for name in left if (dtype := _strange(contents, name))]
    if strange:
        how = f"{config.file} says {config.method!r}" if config else f"{contents.config.file} does not say how"
        raise CheckpointError(
            f"{contents.header(next(iter(left))).file} and its like hold quantized weights that nothing takes: "
            f"{listed(strange)}; {how}. {ADVICE}."
        )


def _strange(contents: Contents, name: str) -> str:
    """The dtype of what looks quantized; empty where it is plain."""
    header = contents.header(name)
    floats = jnp.issubdtype(header.dtype, jnp.floating)
    if is_marker(name) or (floats and header.dtype.itemsize == 1):
        return header.dtype.name
    small = is_quantized(header.dtype) and not floats and header.dtype.itemsize <= 4 and len(header.shape) > 1
    if small and (name.endswith("weight") or scales_beside(name, contents.left)):
        return header.dtype.name
    return ""


def is_hugging_face(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of transformers or timm, or says that something is quantized."""
    kinds = ("model_type", "architectures", "architecture", "quantization_config", "compression_config")
    return any(config.get(kind) for kind in kinds)


def with_older_modelopt(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with what `hf_quant_config.json` says, where ModelOpt left it."""
    inner = quantization.get("quantization")
    if config.get("quantization_config") or not isinstance(inner, dict):
        return dict(config)
    return {**config, "quantization_config": {"quant_method": "modelopt", **cast("dict[str, Any]", inner)}}

"""What KerasHub's own loaders and converters do otherwise while a recording runs.

Responsible for presets that were saved quantized, whose dtype policies its loader forgets for backbones; and for
GPT-OSS' experts, which its converter would hold in float32: it is handed a lazy tensor where it decodes.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np

from lazymodel import LazyTensor
from lazymodel._errors import warn
from lazymodel._tensors.mxfp4 import CODES, Decode, Mxfp4Leaf, decoded_pairs
from lazymodel_keras import _upstream
from lazymodel_keras._record.patches import active, register, replace


@register
def _install_saved_policies(undo: contextlib.ExitStack) -> None:
    """Keeps the dtype policies that a preset was quantized with, where its loader would overwrite them with None."""
    loader = _upstream.preset_loader_class()
    if loader is None:
        return
    original = loader.get_backbone_kwargs

    @functools.wraps(original)
    def get_backbone_kwargs(self: Any, **kwargs: Any) -> Any:
        own, others = original(self, **kwargs)
        if active() is not None and own.get("dtype") is None:
            saved = (self.config.get("config") or {}).get("dtype")
            if isinstance(saved, dict) and _is_quantized(keras.dtype_policies.get(saved)):
                own["dtype"] = saved
        return own, others

    replace(undo, loader, "get_backbone_kwargs", get_backbone_kwargs)


def _is_quantized(policy: Any) -> bool:
    policies = policy.values() if isinstance(policy, keras.dtype_policies.DTypePolicyMap) else [policy]
    return any(policy.quantization_mode is not None for policy in policies)


def lazily_decoding(decode: Decode) -> Decode:
    """The converter's function, which for lazy tensors returns a lazy tensor; what it would refuse, it still does."""
    table = functools.cache(lambda: decoded_pairs(decode))

    @functools.wraps(decode)
    def decode_lazily(blocks: Any, scales: Any) -> Any:
        lazy = isinstance(blocks, LazyTensor) and isinstance(scales, LazyTensor)
        if (
            lazy
            and blocks.dtype == scales.dtype == np.uint8
            and blocks.shape == (*scales.shape, CODES)
            and scales.ndim == 3
            and (found := table()) is not None
        ):
            return LazyTensor(Mxfp4Leaf(blocks, scales, found))
        return decode(blocks, scales)

    return decode_lazily


@register
def _install_lazy_decoding(undo: contextlib.ExitStack) -> None:
    """Has KerasHub's converter of GPT-OSS decode lazily."""
    converter = _upstream.gpt_oss_converter()
    if converter is None:
        return
    original = converter.convert_weights
    lazily = _upstream.with_gpt_oss_decoder(original, lazily_decoding)

    @functools.wraps(original)
    def convert_weights(*args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return original(*args, **kwargs)
        if lazily is None:
            warn(
                "this KerasHub decodes GPT-OSS' experts in a way that lazymodel does not know: the host holds all of "
                "them decoded, until the model is materialized"
            )
            return original(*args, **kwargs)
        return lazily(*args, **kwargs)

    replace(undo, converter, "convert_weights", convert_weights)

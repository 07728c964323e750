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
from lazymodel._tensors.float4 import CODES, Decode, Float4Leaf, decoded_pairs
from lazymodel_keras import _upstream
from lazymodel_keras._gguf.converters import converter
from lazymodel_keras._record.patches import active, recording_patches, while_recording


@recording_patches.register
def _install_from_preset(undo: contextlib.ExitStack) -> None:
    for cls in _upstream.classes_defining("from_preset"):
        recording_patches.replace(undo, cls, "from_preset", _from_preset)


def _from_preset(original: Any, cls: Any, preset: Any, *args: Any, **kwargs: Any) -> Any:
    """Has KerasHub's messages show a URL without what is secret in it, and a GGUF file taken for this class."""
    recording = active()
    if recording is not None and recording.remote.holds(preset):
        preset = recording.remote.folder(preset, cls)
    return original(cls, preset, *args, **kwargs)


@while_recording(_upstream.transformers_loader, "__init__")
def _convert_otherwise(recording: Any, original: Any, self: Any, preset: Any, config: Any) -> None:
    """Has a GGUF file of a model that KerasHub has no converter for converted by one of ours."""
    folder = recording.remote.gguf_preset(preset)
    ours = None if folder is None else converter(folder.row)
    original(self, preset, config if ours is None else {**config, "model_type": "llama"})
    if ours is not None:
        self.config, self.converter = config, ours


@while_recording(_upstream.preset_loader_class, "get_backbone_kwargs")
def _keep_saved_policies(recording: Any, original: Any, self: Any, **kwargs: Any) -> Any:
    """Keeps the dtype policies that a preset was quantized with, which its loader would overwrite with None."""
    own, others = original(self, **kwargs)
    saved = (self.config.get("config") or {}).get("dtype")
    if own.get("dtype") is None and isinstance(saved, dict) and _is_quantized(keras.dtype_policies.get(saved)):
        own["dtype"] = saved
    return own, others


def _is_quantized(policy: Any) -> bool:
    policies = policy.values() if isinstance(policy, keras.dtype_policies.DTypePolicyMap) else [policy]
    return any(policy.quantization_mode is not None for policy in policies)


def lazily_decoding(decode: Decode) -> Decode:
    """The converter's function, which for lazy tensors returns a lazy tensor; what it would refuse, it still does."""
    table = functools.cache(lambda: decoded_pairs(decode))

    @functools.wraps(decode)
    def decode_lazily(blocks: Any, scales: Any) -> Any:
        if (
            isinstance(blocks, LazyTensor)
            and isinstance(scales, LazyTensor)
            and blocks.dtype == scales.dtype == np.uint8
            and blocks.shape == (*scales.shape, CODES)
            and scales.ndim == 3
            and (found := table()) is not None
        ):
            return LazyTensor(Float4Leaf(blocks, scales, found))
        return decode(blocks, scales)

    return decode_lazily


@while_recording(_upstream.gpt_oss_converter, "convert_weights")
def _decode_lazily(recording: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    lazily = _upstream.with_gpt_oss_decoder(original, lazily_decoding)
    if lazily is None:
        warn(
            "this KerasHub decodes GPT-OSS' experts in a way that lazymodel does not know: the host holds all of them "
            "decoded, until the model is materialized"
        )
    return (lazily or original)(*args, **kwargs)

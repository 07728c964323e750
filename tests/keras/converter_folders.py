"""Tiny folders of every kind that KerasHub converts: Hugging Face model types, and timm architectures.

Hugging Face models are made by `transformers`, in `hugging_face_models`. timm is not among what tests install: its
names are those that KerasHub's converter asks for, and its shapes follow from PyTorch's layouts. Where timm is
installed they are a subset of what it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import pytest
from keras_hub.src.utils.preset_utils import get_preset_loader  # finds the converter of a folder; not exported
from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader  # what converters read through
from safetensors.numpy import load_file

import lazymodel as lm

from .models import write_safetensors_folder

M: Any = keras_hub.models

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


def write_hugging_face(folder: Path, made: Path, *, dtype: Any = np.float32, shards: int = 1) -> Path:
    """Writes a folder of what `hugging_face_models` wrote.

    Args:
        folder: Where; it is made.
        made: What.
        dtype: Of its floating-point tensors.
        shards: Files that the tensors are spread over; with more than one there is an index.
    """
    config = json.loads((made / "config.json").read_text())
    for other in made.glob("*/model.safetensors"):
        write_safetensors_folder(folder / other.parent.name, {}, _cast(load_file(other), dtype))
    tensors = _cast(load_file(made / "model.safetensors"), dtype)
    return write_safetensors_folder(folder, config, tensors, shards=shards)


def _cast(tensors: Tensors, dtype: Any) -> Tensors:
    return {name: t.astype(dtype) if np.issubdtype(t.dtype, np.floating) else t for name, t in tensors.items()}


_GEMMA3N = {
    "model_type": "gemma3n",
    "architectures": ["Gemma3nForConditionalGeneration"],
    "vision_soft_tokens_per_image": 4,
    "audio_soft_tokens_per_image": 4,
    "image_token_id": 60,
    "audio_token_id": 61,
    "text_config": {
        "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32,
        "head_dim": 8, "sliding_window": 8, "max_position_embeddings": 64, "intermediate_size": [64, 64],
        "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 10000.0, "attention_bias": False,
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
        "altup_coef_clip": 120.0, "altup_active_idx": 0, "altup_correct_scale": True, "laurel_rank": 4,
        "attention_dropout": 0.0, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6,
    },
    "vision_config": {"hidden_size": 32, "vocab_size": 8, "vocab_offset": 64},
    "audio_config": {
        "hidden_size": 8, "vocab_size": 8, "vocab_offset": 72, "input_feat_size": 16, "rms_norm_eps": 1e-6,
        "sscp_conv_channel_size": [8, 4], "sscp_conv_kernel_size": [[3, 3], [3, 3]],
        "sscp_conv_stride_size": [[2, 2], [2, 2]], "sscp_conv_group_norm_eps": 1e-3, "conf_num_hidden_layers": 1,
        "gradient_clipping": 1.0, "conf_residual_weight": 0.5, "conf_num_attention_heads": 2,
        "conf_attention_chunk_size": 4, "conf_attention_context_right": 0, "conf_attention_context_left": 5,
        "conf_attention_logit_cap": 50.0, "conf_conv_kernel_size": 5, "conf_reduction_factor": 2,
    },
}  # fmt: skip


def _timm(architecture: str, **entries: Any) -> Config:
    classes = {"num_classes": 5, "pretrained_cfg": {"classifier": "classifier"}}
    return {"architecture": architecture, **classes, **entries}


# Configurations of what is not made by `transformers`: Gemma 3n, whose vision tower is timm's, and timm. These are the
# smallest architectures of each converter; there are no tiny ones.
ASKED_FOR: dict[str, Config] = {
    "gemma3n": _GEMMA3N,
    "mobilenetv3_large_100": _timm("mobilenetv3_large_100", num_features=1280),
    "mobilenetv3_small_050": _timm("mobilenetv3_small_050", num_features=1024),
    **{
        name: _timm(name)
        for name in (
            "cspdarknet53", "cspresnet50", "darknet53", "densenet121", "efficientnet_b0", "efficientnet_el",
            "efficientnet_lite0", "efficientnetv2_rw_t", "hgnetv2_b0", "mobilenetv5_300m", "resnet18", "resnetv2_50",
            "vgg11",
        )
    },
}  # fmt: skip
_NARROW = {"VGGImageClassifier": {"pooling_hidden_dim": 16}}  # by default its head has 100 million weights


def write_asked_for(folder: Path, name: str, *, dtype: Any = np.float32, shards: int = 1) -> Path:
    """Writes the folder of one of `ASKED_FOR`; takes what `write_hugging_face` takes."""
    return write_safetensors_folder(folder, ASKED_FOR[name], _cast(asked_for(name).tensors, dtype), shards=shards)


def _pytorch_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What PyTorch may store for a variable of Keras: kernels with their channels first, all else as it is."""
    if len(shape) < 2:
        return [shape]
    *window, channels, out = shape
    return [(out, channels, *window), (channels, out, *window), shape]  # the second is depthwise


@dataclasses.dataclass(frozen=True)
class AskedFor:
    """One of `ASKED_FOR`.

    Attributes:
        cls: The KerasHub class to load: the image classifier where there is one, else the backbone.
        load: What `from_preset` needs besides the folder.
        tensors: Random values for all that the converter asks for.
    """

    cls: Any
    load: dict[str, Any]
    tensors: Tensors


@functools.cache
def asked_for(name: str) -> AskedFor:
    """Runs the converter of one of `ASKED_FOR` without any weights, and notes what it asks for."""
    shapes: dict[str, tuple[int, ...]] = {}

    def get_tensor(self: Any, hf_weight_key: str) -> None:
        """Converters call this themselves only to see whether a tensor is there.

        Batch norms are told from RMS norms by their averages; where both may be, it is an RMS norm, and the convolution
        before it has no bias.
        """
        if hf_weight_key.endswith(("running_mean", ".bias")):
            raise KeyError(hf_weight_key)

    def port_weight(self: Any, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        shape = tuple(keras_variable.shape)
        if not shape:
            shapes[hf_weight_key] = (1,)  # as timm has its learnable scales
            return
        for stored in _pytorch_shapes(shape):
            with contextlib.suppress(ValueError, AssertionError):  # not what the converter takes
                value = np.broadcast_to(np.float32(0), stored)
                if (value if hook_fn is None else hook_fn(value, list(shape))).shape == shape:
                    shapes[hf_weight_key] = stored
                    return
        raise AssertionError(f"no layout of PyTorch gives {hf_weight_key} the shape {shape}")

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "config.json").write_text(json.dumps(ASKED_FOR[name]))
        cls, load = get_preset_loader(folder).check_backbone_class(), {}
        for task in vars(M).values():
            if isinstance(task, type) and issubclass(task, M.ImageClassifier) and task.backbone_cls is cls:
                cls, load = task, {"preprocessor": None, **_NARROW.get(task.__name__, {})}
                break
        patch.setattr(SafetensorLoader, "get_tensor", get_tensor)
        patch.setattr(SafetensorLoader, "port_weight", port_weight)
        lm.build_abstract(cls.from_preset, folder, **load)
    rng = np.random.default_rng(1)
    return AskedFor(cls, load, {key: rng.standard_normal(s).astype("float32") for key, s in shapes.items()})

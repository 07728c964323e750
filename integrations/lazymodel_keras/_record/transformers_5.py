"""What transformers 5 names otherwise than KerasHub's converters expect: configurations and tensors.

A key is added only where it is absent, and another name of a tensor, or another type of model, is tried only after
KerasHub found none: what a newer KerasHub reads by itself is left to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lazymodel import CheckpointError

Config = Mapping[str, Any]

# A type of model that has no converter → the one whose converter reads it.
MODEL_TYPES: Mapping[str, str] = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


def _same(key: str) -> Callable[[Config], Any]:
    return lambda config: config.get(key)


def _rope(config: Config) -> Config:
    return config.get("rope_parameters") or {}


def _long_rope(config: Config) -> Config | None:
    return _rope(config) if _rope(config).get("rope_type", "default") != "default" else None


def _labels(config: Config) -> Config | None:
    """Two labels without names are not written."""
    classifies = any("ForImageClassification" in name for name in config.get("architectures") or ())
    return {"0": "LABEL_0", "1": "LABEL_1"} if classifies else None


_OF_LAYERS = "per_layer_config"  # number of a layer → keys that have other values in it


def _of_full_layers(key: str, config: Config) -> Any:
    """The value of a key in all layers that see all tokens, if it is one."""
    kinds, stated = config.get("layer_types") or [], config.get(_OF_LAYERS) or {}
    found = {stated.get(str(index), {}).get(key) for index, kind in enumerate(kinds) if kind == "full_attention"}
    return found.pop() if len(found) == 1 else None


def _full_pairs(config: Config) -> Any:
    shared = config.get("num_key_value_heads") if config.get("attention_k_eq_v") else None
    return _of_full_layers("num_key_value_heads", config) or shared


# `model_type` → a key that its converter reads → what it is for a configuration of transformers 5; None is left out.
_KEYS: Mapping[str, Mapping[str, Callable[[Config], Any]]] = {
    "bart": {"num_hidden_layers": _same("encoder_layers")},
    "deit": {"id2label": _labels},
    "gemma4_text": {
        "global_head_dim": lambda config: _of_full_layers("head_dim", config),
        "num_global_key_value_heads": _full_pairs,
    },
    "phi3": {"rope_theta": lambda config: _rope(config).get("rope_theta"), "rope_scaling": _long_rope},
    "qwen3_moe": {"num_experts": _same("num_local_experts")},
    "swin": {"id2label": _labels},
    "vit": {"id2label": _labels},
}  # fmt: skip
# What is different in a layer that sees all tokens → the key of the configuration for it.
_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}

# What a converter asks for → the name that it may have.
_NAMES: tuple[tuple[str, str], ...] = (
    (r"\bvision_tower\.vision_model\.", "vision_tower."),
    (r"\bLayerNorm\.weight$", "LayerNorm.gamma"),
    (r"\bLayerNorm\.bias$", "LayerNorm.beta"),
    (r"^cls_classifier\.", "classifier."),
    (r"^model\.language_model\.", "model."),
    (r"^(?:model|albert|deit|distilbert|roberta|vit)\.", ""),  # a model that was saved without a head
)


def with_expected_keys(config: Config, file: str, path: str = "") -> dict[str, Any]:
    """A configuration with the keys that KerasHub's converter reads. Raises CheckpointError for layers that differ."""
    known = _KEYS.get(str(config.get("model_type")), {})
    more = {key: make(config) for key, make in known.items() if config.get(key) is None}
    found = {**config, **{key: value for key, value in more.items() if value is not None}}
    kinds = config.get("layer_types") or []
    for layer, stated in (config.get(_OF_LAYERS) or {}).items():
        names = _FULL if "global_head_dim" in known and kinds[int(layer)] == "full_attention" else {}
        for key, value in stated.items():
            if key not in names or found.get(names[key]) != value:
                raise CheckpointError(
                    f"{file}: {path}{_OF_LAYERS} gives layer {layer} a {key} of {value!r}, and KerasHub has one for "
                    "all layers of a kind; load this model with transformers"
                )
    nested = {key: value for key, value in found.items() if isinstance(value, dict) and key != _OF_LAYERS}
    return {**found, **{key: with_expected_keys(value, file, f"{path}{key}.") for key, value in nested.items()}}


def other_names(name: str) -> Iterator[str]:
    """The names that a tensor may have in a folder of transformers 5, besides the one that a converter asks for."""
    for pattern, replacement in _NAMES:
        other = re.sub(pattern, replacement, name)
        if other != name:
            yield other

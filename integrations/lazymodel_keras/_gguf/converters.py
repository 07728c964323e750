"""Converters for what KerasHub has no Hugging Face converter of its own for, made of those that it has.

For Llama's models with SentencePiece and their epsilon, which KerasHub's converter leaves at the class's own; for
Mistral's Tekken vocabularies, which it takes from a file that GGUF has not; and for Phi-3.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lazymodel import CheckpointError
from lazymodel_keras import _upstream
from lazymodel_keras._gguf.architectures import LLAMA2, LLAMA3, PHI3, TEKKEN, Architecture, Settings

# How Tekken splits text: `config.pattern` of Mistral's `tekken.json`.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Converter:
    """What KerasHub's loader asks of a module that converts a kind of model."""

    backbone_cls: Any
    convert_backbone_config: Callable[[Settings], Settings]
    convert_weights: Callable[[Any, Any, Settings], Any]
    convert_tokenizer: Callable[..., Any]


def converter(row: Architecture) -> Converter | None:
    """The converter for a kind of model; None where KerasHub's own does all of it."""
    models = _upstream.hub_models()
    if row in (LLAMA2, LLAMA3):
        own = _upstream.converter("llama3")
        cls = models.LlamaBackbone if row is LLAMA2 else own.backbone_cls
        tokenizer = _sentence_piece if row is LLAMA2 else own.convert_tokenizer
        return Converter(cls, lambda config: _llama(own, config), own.convert_weights, tokenizer)
    if row is TEKKEN:
        own = _upstream.converter("mistral")
        return Converter(own.backbone_cls, own.convert_backbone_config, own.convert_weights, _tekken)
    if row is PHI3:
        return Converter(models.Phi3Backbone, _phi3_config, _phi3_weights, _sentence_piece)
    return None


def _llama(own: Any, config: Settings) -> Settings:
    return {**own.convert_backbone_config(config), "layer_norm_epsilon": config["rms_norm_eps"]}


def _sentence_piece(cls: Any, preset: str, **kwargs: Any) -> Any:
    return cls(_upstream.preset_file(preset, "tokenizer.model"), **kwargs)


def _tekken(_: Any, preset: str, **kwargs: Any) -> Any:
    with open(_upstream.preset_file(preset, "tokenizer.json"), encoding="utf-8") as file:
        content = json.load(file)
    vocabulary = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    cls = _upstream.hub_models().MistralTekkenTokenizer
    return cls(vocabulary=vocabulary, merges=merges, split_pattern=_TEKKEN, **kwargs)


def _phi3_config(config: Settings) -> Settings:
    scaling = config.get("rope_scaling", {})
    return {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "hidden_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "num_query_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "max_sequence_length": config["max_position_embeddings"],
        "pretraining_sequence_length": config["original_max_position_embeddings"],
        "rope_max_wavelength": config["rope_theta"],
        "rope_scaling_type": "su" if scaling else None,
        "rope_scaling_short_factor": scaling.get("short_factor"),
        "rope_scaling_long_factor": scaling.get("long_factor"),
    }


def _phi3_weights(backbone: Any, loader: Any, config: Settings) -> None:
    def port(variable: Any, name: str, change: Callable[[Any], Any] = lambda tensor: tensor) -> None:
        loader.port_weight(variable, f"model.{name}", lambda tensor, shape: np.reshape(change(tensor), shape))

    def part(index: int, sizes: Sequence[int]) -> Callable[[Any], Any]:
        def rows(tensor: Any) -> Any:
            if tensor.shape[0] != sum(sizes):
                where = f"tensor {tensor.name!r} of {tensor.file}"
                raise CheckpointError(f"{where}: expected {sum(sizes)} rows, found {tensor.shape[0]}")
            return np.transpose(tensor[sum(sizes[:index]) : sum(sizes[: index + 1])])

        return rows

    heads, pairs = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    attention_rows, inner_rows = (heads, pairs, pairs), [config["intermediate_size"]] * 2
    port(backbone.token_embedding.embeddings, "embed_tokens.weight")
    loader.port_weight(
        backbone.token_embedding.reverse_embeddings, "lm_head.weight", lambda tensor, _: np.transpose(tensor)
    )
    for index, layer in enumerate(backbone.transformer_layers):
        at = f"layers.{index}"
        port(layer.pre_attention_layernorm.scale, f"{at}.input_layernorm.weight")
        port(layer.post_attention_layernorm.scale, f"{at}.post_attention_layernorm.weight")
        attention, fused = layer.attention, f"{at}.self_attn.qkv_proj.weight"
        port(attention.query_dense.kernel, fused, part(0, attention_rows))
        port(attention.key_dense.kernel, fused, part(1, attention_rows))
        port(attention.value_dense.kernel, fused, part(2, attention_rows))
        port(attention.output_dense.kernel, f"{at}.self_attn.o_proj.weight", np.transpose)
        fused = f"{at}.mlp.gate_up_proj.weight"
        port(layer.feedforward_gate_dense.kernel, fused, part(0, inner_rows))
        port(layer.feedforward_intermediate_dense.kernel, fused, part(1, inner_rows))
        port(layer.feedforward_output_dense.kernel, f"{at}.mlp.down_proj.weight", np.transpose)
    port(backbone.layer_norm.scale, "norm.weight")

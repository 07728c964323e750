"""The converter of Phi-3, which KerasHub has a class for and no converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from lazymodel import CheckpointError
from lazymodel_keras import _upstream

Config = Mapping[str, Any]


def converter_module(cls: Any, config: Any, weights: Any, tokenizer: Any) -> Any:
    """The parts that KerasHub's loader uses of a module that converts a type of model."""
    names = {"convert_backbone_config": config, "convert_weights": weights, "convert_tokenizer": tokenizer}
    return SimpleNamespace(backbone_cls=cls, **names)


def with_sentence_piece(cls: Any, preset: str, **kwargs: Any) -> Any:
    """A tokenizer of a folder that has a SentencePiece model."""
    return cls(_upstream.preset_file(preset, "tokenizer.model"), **kwargs)


def phi3_converter() -> Any:
    """The converter of Phi-3, for a Hugging Face folder and for a GGUF file."""
    return converter_module(_upstream.hub_models().Phi3Backbone, _phi3_config, _phi3_weights, with_sentence_piece)


def _phi3_config(config: Config) -> Config:
    scaling = config.get("rope_scaling") or {}
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
        "rope_scaling_type": "su" if "short_factor" in scaling else None,
        "rope_scaling_short_factor": scaling.get("short_factor"),
        "rope_scaling_long_factor": scaling.get("long_factor"),
    }


def _phi3_weights(backbone: Any, loader: Any, config: Config) -> None:
    def port(variable: Any, name: str, change: Callable[[Any], Any]) -> None:
        loader.port_weight(variable, name, lambda tensor, shape: np.reshape(change(tensor), shape))

    def rows(sizes: Sequence[int], index: int) -> Callable[[Any], Any]:
        def part(tensor: Any) -> Any:
            if tensor.shape[0] != sum(sizes):
                where = f"tensor {tensor.name!r} of {tensor.file}"
                raise CheckpointError(f"{where}: expected {sum(sizes)} rows, found {tensor.shape[0]}")
            return np.transpose(tensor[sum(sizes[:index]) : sum(sizes[: index + 1])])

        return part

    width = config["hidden_size"] // config["num_attention_heads"]
    heads, pairs = (config[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))
    attention_rows, inner_rows = (heads, pairs, pairs), [config["intermediate_size"]] * 2
    port(backbone.token_embedding.embeddings, "model.embed_tokens.weight", _unchanged)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    port(backbone.token_embedding.reverse_embeddings, head, np.transpose)
    port(backbone.layer_norm.scale, "model.norm.weight", _unchanged)
    for index, layer in enumerate(backbone.transformer_layers):
        attention, qkv, gate_up = layer.attention, "self_attn.qkv_proj", "mlp.gate_up_proj"
        for variable, name, change in (
            (layer.pre_attention_layernorm.scale, "input_layernorm", _unchanged),
            (layer.post_attention_layernorm.scale, "post_attention_layernorm", _unchanged),
            (attention.query_dense.kernel, qkv, rows(attention_rows, 0)),
            (attention.key_dense.kernel, qkv, rows(attention_rows, 1)),
            (attention.value_dense.kernel, qkv, rows(attention_rows, 2)),
            (attention.output_dense.kernel, "self_attn.o_proj", np.transpose),
            (layer.feedforward_gate_dense.kernel, gate_up, rows(inner_rows, 0)),
            (layer.feedforward_intermediate_dense.kernel, gate_up, rows(inner_rows, 1)),
            (layer.feedforward_output_dense.kernel, "mlp.down_proj", np.transpose),
        ):
            port(variable, f"model.layers.{index}.{name}.weight", change)


def _unchanged(tensor: Any) -> Any:
    return tensor

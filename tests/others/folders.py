"""Hugging Face folders with random values: tensors, configuration and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

_TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 11, "head_dim": 8}
_TINY |= {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 12}


def _shapes(
    kind: str, vocab_size: int, hidden_size: int, intermediate_size: int, num_hidden_layers: int, head_dim: int,
    num_attention_heads: int, num_key_value_heads: int, num_experts: int,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    up, down = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    out = num_attention_heads * head_dim
    layer = {f"self_attn.{name}_proj": (num_key_value_heads * head_dim, hidden_size) for name in "kv"}
    layer |= {"self_attn.q_proj": (out, hidden_size), "self_attn.o_proj": (hidden_size, out)}
    layer |= {"input_layernorm": (hidden_size,), "post_attention_layernorm": (hidden_size,)}
    if kind == "mixtral":
        layer["block_sparse_moe.gate"] = (num_experts, hidden_size)
        for expert in range(num_experts):
            layer |= {f"block_sparse_moe.experts.{expert}.w{n}": down if n == 2 else up for n in (1, 2, 3)}
    else:
        experts = range(num_experts if kind == "qwen3_moe" else 0)
        if experts:
            layer |= {"mlp.gate": (num_experts, hidden_size)} | {f"self_attn.{name}_norm": (head_dim,) for name in "qk"}
        for place in [f"mlp.experts.{expert}" for expert in experts] or ["mlp"]:
            layer |= {f"{place}.gate_proj": up, f"{place}.up_proj": up, f"{place}.down_proj": down}
    shapes = {f"model.layers.{n}.{name}": shape for n in range(num_hidden_layers) for name, shape in layer.items()}
    return (
        shapes
        | dict.fromkeys(("model.embed_tokens", "lm_head"), (vocab_size, hidden_size))
        | {"model.norm": (hidden_size,)}
    )


def write(folder: Path, kind: str, **sizes: int) -> str:
    """Writes a model of this type of `transformers`, tiny unless sizes are given; returns the path of the folder."""
    used: dict[str, Any] = _TINY | sizes
    rng = np.random.default_rng(0)
    values = {
        f"{name}.weight": rng.standard_normal(shape, dtype="float32").astype(ml_dtypes.bfloat16)
        for name, shape in _shapes(kind, **used).items()
    }
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    config = used | {"model_type": kind, "tie_word_embeddings": False, "max_position_embeddings": 64}
    config |= {"num_local_experts": used["num_experts"], "moe_intermediate_size": used["intermediate_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    words = models.WordLevel({f"word{number}": number for number in range(used["vocab_size"])}, unk_token="word0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="word0").save_pretrained(folder)
    return str(folder)

"""Tiny Hugging Face folders with random values: tensors, configuration and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

VOCAB, LAYERS, SIZE, HIDDEN, HEADS, GROUPS, DIM, EXPERTS = 128, 11, 64, 96, 8, 2, 8, 12


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    layer = {
        f"self_attn.{name}_proj": (heads * DIM, SIZE)
        for name, heads in zip("qkv", (HEADS, GROUPS, GROUPS), strict=True)
    }
    layer |= {"self_attn.o_proj": (SIZE, HEADS * DIM), "input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,)}
    up, down = (HIDDEN, SIZE), (SIZE, HIDDEN)
    if kind == "mixtral":
        layer["block_sparse_moe.gate"] = (EXPERTS, SIZE)
        for expert in range(EXPERTS):
            layer |= {f"block_sparse_moe.experts.{expert}.w{n}": down if n == 2 else up for n in (1, 2, 3)}
    else:
        layer |= {"mlp.gate": (EXPERTS, SIZE)} if kind == "qwen3_moe" else {}
        layer |= {f"self_attn.{name}_norm": (DIM,) for name in "qk"} if kind == "qwen3_moe" else {}
        for place in [f"experts.{expert}." for expert in range(EXPERTS)] if kind == "qwen3_moe" else [""]:
            layer |= {f"mlp.{place}gate_proj": up, f"mlp.{place}up_proj": up, f"mlp.{place}down_proj": down}
    shapes = {f"model.layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    return shapes | {"model.embed_tokens": (VOCAB, SIZE), "model.norm": (SIZE,), "lm_head": (VOCAB, SIZE)}


def write(folder: Path, kind: str) -> str:
    """Writes a model of this type of `transformers`; returns the path of the folder."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": HIDDEN, "head_dim": DIM}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "num_hidden_layers": LAYERS}
    sizes |= {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_intermediate_size": HIDDEN}
    sizes |= {"model_type": kind, "tie_word_embeddings": False, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(sizes))
    rng = np.random.default_rng(0)
    shapes = _shapes(kind)
    values = {f"{name}.weight": rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    words = models.WordLevel({f"word{number}": number for number in range(VOCAB)}, unk_token="word0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="word0").save_pretrained(folder)
    return str(folder)

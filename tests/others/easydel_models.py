"""Models of EasyDeL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import easydel as ed
import jax.numpy as jnp
from flax import nnx

from .kinds import Call, OtherModel

_TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
_TINY |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
_LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_QWEN = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
_QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
_QWEN |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_LOAD = "`WeightMap.suggest`"
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def _easydel(name: str, published: dict[str, Any], tiny: dict[str, Any]) -> Callable[[bool], Call]:
    def make(large: bool) -> Call:
        config = getattr(ed, f"{name}Config")(**(published if large else {**_TINY, **tiny}))
        dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
        return Call(getattr(ed, f"{name}ForCausalLM"), (), {"config": config, **dtypes, "rngs": nnx.Rngs(0)})

    return make


MODELS = {
    model.name: model
    for model in (
        OtherModel("EasyDeL Llama 3.1 8B", "easydel", _easydel("Llama", _LLAMA, {}), _LOAD),
        OtherModel("EasyDeL Qwen 3 30B-A3B", "easydel", _easydel("Qwen3Moe", _QWEN, _EXPERTS), _LOAD),
    )
}

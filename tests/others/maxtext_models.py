"""Models of MaxText and of Google DeepMind's Gemma library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from gemma import gm
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

from .kinds import KEY, TOKENS, Call, OtherModel

_TINY = {"base_emb_dim": 64, "base_num_query_heads": 8, "base_num_kv_heads": 8, "base_num_decoder_layers": 3}
_TINY |= {"base_mlp_dim": 96, "head_dim": 16, "vocab_size": 128}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 96}
_LOAD = "`maxtext.weight_map`"
_ELSEWHERE = {"run_name": "none", "enable_checkpointing": False, "skip_jax_distributed_system": True}


def _maxtext(name: str, **tiny: Any) -> Callable[[bool], Call]:
    def make(large: bool) -> Call:
        base = str(Path(pyconfig.__file__).with_name("base.yml"))
        sizes = {} if large else {**_TINY, **tiny}
        config = pyconfig.initialize(
            ["", base], model_name=name, override_model_config=True, hardware="cpu", attention="dot_product",
            max_target_length=128, log_config=False, **_ELSEWHERE, **sizes,
        )  # fmt: skip
        mesh = maxtext_utils.get_mesh_from_config(config)

        def build(key: jax.Array) -> nnx.Module:
            return model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(params=key, dropout=1))

        return Call(build, (KEY,), {})

    return make


def _gemma(cls: Any) -> Callable[[bool], Call]:
    def make(large: bool) -> Call:
        config = cls().config
        small = dataclasses.replace(
            config, num_embed=128, embed_dim=64, hidden_dim=96, num_heads=8, head_dim=16, num_kv_heads=2,
            attention_types=tuple(config.attention_types)[:3], vision_encoder=None,
        )  # fmt: skip
        return Call(cls() if large else cls(config=small), (KEY, TOKENS), {})

    return make


MODELS = {
    model.name: model
    for model in (
        OtherModel("MaxText Llama 3.1 8B", "maxtext", _maxtext("llama3.1-8b"), _LOAD),
        OtherModel("MaxText Gemma 2 9B", "maxtext", _maxtext("gemma2-9b", base_num_decoder_layers=4), _LOAD),
        OtherModel("MaxText Qwen 3 30B-A3B", "maxtext", _maxtext("qwen3-30b-a3b", **_MOE), _LOAD),
        OtherModel("Gemma 3 12B", "gemma", _gemma(gm.nn.Gemma3_12B)),
        OtherModel("Gemma 3n E4B", "gemma", _gemma(gm.nn.Gemma3n_E4B)),
    )
}

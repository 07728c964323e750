"""Models of Levanter."""

from __future__ import annotations

from haliax import Axis
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.mixtral import MixtralConfig, MixtralLMHeadModel

from .kinds import KEY, Call, OtherModel

_TINY = {"hidden_dim": 64, "intermediate_dim": 96, "num_layers": 3, "num_heads": 8, "num_kv_heads": 8}
_LOAD = "its own function"
_LARGE = {"hidden_dim": 4096, "intermediate_dim": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8}


def _llama(large: bool) -> Call:
    config = LlamaConfig(**(_LARGE if large else _TINY))
    return Call(LlamaLMHeadModel.init, (Axis("vocab", 128256 if large else 128), config), {"key": KEY})


def _mixtral(large: bool) -> Call:
    config = MixtralConfig(**(_LARGE if large else _TINY))
    return Call(MixtralLMHeadModel.init, (Axis("vocab", 32000 if large else 128), config), {"key": KEY})


MODELS = {
    model.name: model
    for model in (
        OtherModel("Levanter Llama 3.1 8B", "levanter", _llama, _LOAD),
        OtherModel("Levanter Mixtral 8x7B", "levanter", _mixtral, _LOAD),
    )
}

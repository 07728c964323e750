"""Models of the packages that `requirements.txt` lists."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import equimo.models.convnext
import equimo.models.vit
import equinox as eqx
import flaxmodels
import haiku as hk
import haliax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from flax import nnx
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common
from recurrentgemma import common as griffin
from recurrentgemma.jax import Griffin
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from .kinds import KEY, TOKENS, Call, OtherModel

_TINY = {"num_layers": 3, "embed_dim": 64, "hidden_dim": 96, "num_heads": 8, "head_dim": 16, "num_kv_heads": 2}


def _tunix(cls: Any, config: Any, vocab: str = "vocab_size", **tiny: Any) -> Callable[[bool], Call]:
    small = dataclasses.replace(config, **_TINY, **{vocab: 128}, **tiny)
    return lambda large: Call(cls, (config if large else small,), {"rngs": nnx.Rngs(params=0)})


def _griffin(preset: Any) -> Callable[[bool], Call]:
    config = griffin.GriffinConfig.from_preset(preset)
    small = config._replace(
        vocab_size=128, width=64, mlp_expanded_width=96, num_heads=4, lru_width=64, block_types=config.block_types[:3]
    )
    positions = jnp.arange(8)[None]
    return lambda large: Call(Griffin(config if large else small), (KEY, TOKENS, positions), {})


def _haiku(large: bool) -> Call:
    """A decoder of Haiku's own attention and MLP."""
    layers, heads, size, hidden, vocab = (36, 32, 128, 16384, 50304) if large else (2, 8, 8, 96, 128)

    def forward(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(vocab, heads * size)(tokens)
        initial = hk.initializers.VarianceScaling(2 / layers)
        for _ in range(layers):
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(heads, size, w_init=initial)(h, h, h)
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.nets.MLP([hidden, heads * size], w_init=initial, activation=jax.nn.gelu)(h)
        return hk.Linear(vocab, name="logits")(hk.LayerNorm(-1, True, True)(x))

    return Call(hk.transform(forward).init, (KEY, TOKENS), {})


def _haiku_resnet(large: bool) -> Call:
    def forward(images: jax.Array) -> jax.Array:
        return (hk.nets.ResNet50 if large else hk.nets.ResNet18)(10)(images, is_training=True)

    return Call(hk.transform_with_state(forward).init, (KEY, jnp.zeros((1, 32, 32, 3))), {})


def _equimo_vit(large: bool) -> Call:
    tiny = {"dim": 64, "num_heads": 4, "depths": [2], "img_size": 32}
    sizes = {"depths": [42]} if large else tiny  # 40 as published, of 6.7 billion parameters
    return Call(equimo.models.vit.dinov3_vit7b16_pretrain_lvd1689m, (), {"key": KEY, **sizes})


def _equimo_convnext(large: bool) -> Call:
    tiny = {"depths": [1, 1, 2, 1], "dims": [16, 32, 64, 128]}
    return Call(equimo.models.convnext.convnext_l, (), {"key": KEY, **({} if large else tiny)})


def _penzai_llama(large: bool) -> Call:
    """Of which the parameters are unbound: a `Parameter` is no pytree."""
    sizes = (8, 4, 4096, 128, 14336, 32, 128256) if large else (2, 4, 64, 16, 96, 2, 128)
    names = ("num_kv_heads", "query_head_multiplier", "embedding_dim", "projection_dim", "mlp_hidden_dim")
    config = llamalike_common.LlamalikeTransformerConfig(
        **dict(zip((*names, "num_decoder_blocks", "vocab_size"), sizes, strict=True)),
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    return Call(_unbound(llamalike_common.build_llamalike_transformer, config), (KEY,), {})


def _penzai_neox(large: bool) -> Call:
    sizes = (64, 6144, 96, 24576, 44, 50432) if large else (4, 64, 16, 96, 2, 128)
    names = ("num_attention_heads", "embedding_dim", "projection_dim", "mlp_hidden_dim")
    config = gpt_neox.GPTNeoXTransformerConfig(
        **dict(zip((*names, "num_decoder_blocks", "vocab_size"), sizes, strict=True)),
        activation_fn="gelu_exact",
        rope_subset_size=4,
        rope_wavelength=10_000,
        layernorm_epsilon=1e-5,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
    )
    return Call(_unbound(gpt_neox.build_gpt_neox_transformer, config), (KEY,), {})


def _unbound(build: Callable[..., Any], config: Any) -> Callable[[jax.Array], Any]:
    def unbound(key: jax.Array) -> dict[str, Any]:
        _, parameters = pz.unbind_params(build(config, key), freeze=True)
        return {str(parameter.label): parameter.value for parameter in parameters}

    return unbound


class _HaliaxBlock(eqx.Module):
    """A gated MLP and attention of Haliax' linear layers, as Levanter's models have them."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    norm: hnn.LayerNorm

    @staticmethod
    def init(axes: dict[str, haliax.Axis], *, key: jax.Array) -> _HaliaxBlock:
        embed, heads, dim, mlp = (axes[name] for name in ("embed", "heads", "head_dim", "mlp"))
        keys = jax.random.split(key, 6)
        attention = [hnn.Linear.init(embed, (heads, dim), key=k, use_bias=False) for k in keys[:3]]
        out = hnn.Linear.init((heads, dim), embed, key=keys[3], use_bias=False)
        up = hnn.Linear.init(embed, mlp, key=keys[4])
        return _HaliaxBlock(*attention, out, up, hnn.Linear.init(mlp, embed, key=keys[5]), hnn.LayerNorm.init(embed))


def _haliax(large: bool) -> Call:
    sizes = (32, 4096, 32, 128, 24576, 50304) if large else (2, 64, 8, 8, 96, 128)
    names = ("layers", "embed", "heads", "head_dim", "mlp", "vocab")
    axes = {name: haliax.Axis(name, size) for name, size in zip(names, sizes, strict=True)}

    def build(key: jax.Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        keys = jax.random.split(first, axes["layers"].size)
        stacked = hnn.Stacked.init(axes["layers"], _HaliaxBlock)(axes, key=keys)
        return {"embed": hnn.Embedding.init(axes["vocab"], axes["embed"], key=second), "blocks": stacked}

    return Call(build, (KEY,), {})


def _flaxmodels_gpt2(large: bool) -> Call:
    """With a configuration that it else downloads."""
    size, heads, layers, vocab = (4096, 32, 36, 50257) if large else (64, 4, 2, 128)
    config = types.SimpleNamespace(
        n_embd=size, n_head=heads, n_layer=layers, vocab_size=vocab, n_positions=64, n_ctx=64, n_inner=None,
        attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1, scale_attn_weights=True, layer_norm_epsilon=1e-5,
        activation_function="gelu_new", initializer_range=0.02, use_cache=False,
    )  # fmt: skip
    return Call(flaxmodels.gpt2.gpt2.GPT2Model(config=config), (KEY, TOKENS), {})


def _flaxmodels_head(large: bool) -> Call:
    config = _flaxmodels_gpt2(large).build.config
    return Call(flaxmodels.gpt2.gpt2.GPT2LMHeadModel(config=config), (KEY, TOKENS), {})


def _flaxmodels_resnet(large: bool) -> Call:
    cls = flaxmodels.ResNet50 if large else flaxmodels.ResNet18
    return Call(cls(output="logits", pretrained=None), (KEY, jnp.zeros((1, 32, 32, 3))), {})


_GEMMA2 = gemma.ModelConfig.gemma2_9b()
_MOE = {"num_experts": 8, "num_experts_per_tok": 2}
_TUNIX = (
    ("Tunix Llama 3.1 8B", _tunix(llama3.Llama3, llama3.ModelConfig.llama3p1_8b()), "`tunix.llama3`"),
    ("Tunix Qwen 3 8B", _tunix(qwen3.Qwen3, qwen3.ModelConfig.qwen3_8b()), "`tunix.qwen3`"),
    ("Tunix Qwen 3 30B-A3B", _tunix(qwen3.Qwen3, qwen3.ModelConfig.qwen3_30b_a3b(), **_MOE), "`tunix.qwen3`"),
    ("Tunix Qwen 2.5 7B", _tunix(qwen2.Qwen2, qwen2.ModelConfig.qwen2p5_7b()), "`tunix.qwen2`"),
    (
        "Tunix Gemma 2 9B",
        _tunix(gemma.Gemma, _GEMMA2, "num_embed", attention_types=tuple(_GEMMA2.attention_types)[:3]),
        "`tunix.gemma`",
    ),
    ("Tunix Gemma 3 12B", _tunix(gemma3.Gemma3, gemma3.ModelConfig.gemma3_12b_it(), "num_embed"), "`tunix.gemma3`"),
    ("Tunix Gemma 4 31B", _tunix(gemma4.Gemma4, gemma4.ModelConfig.gemma4_31b(), "num_embed"), "`tunix.gemma4`"),
    (
        "Tunix Gemma 4 26B-A4B",
        _tunix(gemma4.Gemma4, gemma4.ModelConfig.gemma4_26b_a4b(), "num_embed"),
        "`tunix.gemma4`",
    ),
)
MODELS = {
    model.name: model
    for model in (
        *(OtherModel(name, "google-tunix", make, load) for name, make, load in _TUNIX),
        OtherModel("RecurrentGemma 9B", "recurrentgemma", _griffin(griffin.Preset.RECURRENT_GEMMA_9B_V1)),
        OtherModel("Griffin 7B", "recurrentgemma", _griffin(griffin.Preset.GRIFFIN_PAPER_7B)),
        OtherModel("Decoder of `hk.MultiHeadAttention`", "dm-haiku", _haiku),
        OtherModel("`hk.nets.ResNet50`", "dm-haiku", _haiku_resnet),
        OtherModel("DINOv3 7B with 42 layers", "equimo", _equimo_vit),
        OtherModel("ConvNeXt-L", "equimo", _equimo_convnext),
        OtherModel("Llama 8B, parameters unbound", "penzai", _penzai_llama),
        OtherModel("GPT-NeoX 20B, parameters unbound", "penzai", _penzai_neox),
        OtherModel("Decoder of `hnn.Stacked` blocks", "haliax", _haliax),
        OtherModel("GPT-2, 7B", "flaxmodels", _flaxmodels_gpt2, error=True),
        OtherModel("GPT-2 with a head", "flaxmodels", _flaxmodels_head, error=True),
        OtherModel("ResNet-50", "flaxmodels", _flaxmodels_resnet),
    )
}

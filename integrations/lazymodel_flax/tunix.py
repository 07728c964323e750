"""Hugging Face checkpoints in Tunix' models: a `WeightMap` for each family, from the model's own config.

The tables do the same as Tunix' own safetensors loaders (`tunix.models.*.params`, google-tunix 0.1.7). The tensors stay
lazy: every device reads its own shards, from checkpoints in any format that lazymodel opens, and `lm.save(model,
folder, mapping=table)` writes Hugging Face's names again. Tunix itself is not imported.
"""

from __future__ import annotations

from typing import Any

from lazymodel import From, WeightMap

__all__ = ["gemma3", "llama3", "qwen3"]

_QUERY = "(heads dim) model -> model heads dim"  # the variable's shape gives the number of heads
_EINSUM = "(heads dim) model -> heads model dim"
_OUT = "model (heads dim) -> heads dim model"


def llama3(config: Any) -> WeightMap:
    """The table for `tunix.models.llama3.model.Llama3(config)`, also for Llama 3.1 and 3.2.

    Args:
        config: Its `ModelConfig`.

    Example:
        >>> from types import SimpleNamespace
        >>> tunix.llama3(SimpleNamespace(weight_tying=True))
        WeightMap(11 entries)
    """
    return _llama_like(_mlp(), tied=config.weight_tying)


def qwen3(config: Any) -> WeightMap:
    """The table for `tunix.models.qwen3.model.Qwen3(config)`, dense or with experts, which the model stacks.

    Args:
        config: Its `ModelConfig`.

    Example:
        >>> from types import SimpleNamespace
        >>> experts = tunix.qwen3(SimpleNamespace(use_tied_embedding=False, num_experts=128))
        >>> experts
        WeightMap(15 entries)
    """
    layer, theirs = "layers/{layer}", "model.layers.{layer}"
    norms: dict[str, From | str | None] = {
        f"{layer}/attn/{name}/w": f"{theirs}.self_attn.{name}.weight" for name in ("q_norm", "k_norm")
    }
    if not config.num_experts:
        return _llama_like(norms | _mlp(), tied=config.use_tied_embedding)
    experts: dict[str, From | str | None] = {
        f"{layer}/mlp/{name}_proj": From(f"{theirs}.mlp.experts.{{expert}}.{name}_proj.weight").T.stack("expert")
        for name in ("gate", "up", "down")
    }
    router = {f"{layer}/mlp/router/kernel": From(f"{theirs}.mlp.gate.weight").T}
    return _llama_like({**norms, **router, **experts}, tied=config.use_tied_embedding)


def gemma3(config: Any, prefix: str | None = None) -> WeightMap:
    """The table for `tunix.models.gemma3.model.Gemma3(config)`, with or without its vision encoder.

    Args:
        config: Its `ModelConfig`.
        prefix: The prefix of names of the language model: `model`, or `language_model.model` in checkpoints with
            vision; these are the defaults for configs without and with vision. If the model has no vision encoder, that
            of a checkpoint is omitted.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(num_heads=4, num_kv_heads=1, head_dim=256, vision_config=None)
        >>> tunix.gemma3(config)
        WeightMap(14 entries)
    """
    prefix = prefix or ("model" if config.vision_config is None else "language_model.model")
    layer, theirs = "layers/{layer}", f"{prefix}.layers.{{layer}}"
    one = config.num_kv_heads * config.head_dim
    fused = ("q", "k", "v") if config.num_heads == config.num_kv_heads else ("k", "v")
    joined = From(*(f"{theirs}.self_attn.{name}_proj.weight" for name in fused), sizes=[one] * len(fused))
    entries: dict[str, From | str | None] = {
        "embedder/input_embedding": f"{prefix}.embed_tokens.weight",
        "final_norm/scale": f"{prefix}.norm.weight",
        f"{layer}/attn/{''.join(fused)}_einsum/w": joined.rearrange(
            "(parts heads dim) model -> parts heads model dim", parts=len(fused)
        ),
        f"{layer}/attn/attn_vec_einsum/w": From(f"{theirs}.self_attn.o_proj.weight").rearrange(_OUT),
        f"{layer}/attn/_query_norm/scale": f"{theirs}.self_attn.q_norm.weight",
        f"{layer}/attn/_key_norm/scale": f"{theirs}.self_attn.k_norm.weight",
        f"{layer}/pre_attention_norm/scale": f"{theirs}.input_layernorm.weight",
        f"{layer}/post_attention_norm/scale": f"{theirs}.post_attention_layernorm.weight",
        f"{layer}/pre_ffw_norm/scale": f"{theirs}.pre_feedforward_layernorm.weight",
        f"{layer}/post_ffw_norm/scale": f"{theirs}.post_feedforward_layernorm.weight",
        **_mlp(theirs),
    }
    if "q" not in fused:
        entries[f"{layer}/attn/q_einsum/w"] = From(f"{theirs}.self_attn.q_proj.weight").rearrange(_EINSUM)
    ignore = ["lm_head.weight", "{rest...}rotary_emb.inv_freq"]
    if config.vision_config is None:
        ignore += ["vision_tower.{rest...}", "multi_modal_projector.{rest...}"]
    else:
        entries |= _siglip()
    return WeightMap(entries, ignore=ignore)


def _siglip() -> dict[str, From | str | None]:
    ours, theirs = "vision_encoder/siglip_encoder", "vision_tower.vision_model"
    layer, block = f"{theirs}.encoder.layers.{{block}}", f"{ours}/transformer/blocks/{{block}}"
    dense = {f"mlp/fc{n}": f"mlp.fc{n}" for n in (1, 2)}
    for full, short in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out")):
        dense[f"attn/{full}_proj"] = f"self_attn.{short}_proj"
    norms = {f"{block}/ln{n}": f"{layer}.layer_norm{n}" for n in (1, 2)}
    norms[f"{ours}/transformer/encoder_norm"] = f"{theirs}.post_layernorm"
    return {
        f"{ours}/embedding/kernel": From(f"{theirs}.embeddings.patch_embedding.weight").transpose(2, 3, 1, 0),
        f"{ours}/embedding/bias": f"{theirs}.embeddings.patch_embedding.bias",
        f"{ours}/pos_embedding": f"{theirs}.embeddings.position_embedding.weight",
        "embedder/mm_input_projection/w": "multi_modal_projector.mm_input_projection_weight",
        "embedder/mm_soft_embedding_norm/scale": "multi_modal_projector.mm_soft_emb_norm.weight",
        **{f"{block}/{name}/kernel": From(f"{layer}.{other}.weight").T for name, other in dense.items()},
        **{f"{block}/{name}/bias": f"{layer}.{other}.bias" for name, other in dense.items()},
        **{f"{name}/scale": f"{other}.weight" for name, other in norms.items()},
        **{f"{name}/bias": f"{other}.bias" for name, other in norms.items()},
    }


def _mlp(theirs: str = "model.layers.{layer}") -> dict[str, From | str | None]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"layers/{{layer}}/mlp/{name}/kernel": From(f"{theirs}.mlp.{name}.weight").T for name in names}


def _llama_like(others: dict[str, From | str | None], *, tied: bool) -> WeightMap:
    """Entries that Llama 3 and Qwen 3 have in common, and others: the MLP and the norms of queries and keys."""
    layer, theirs = "layers/{layer}", "model.layers.{layer}"
    entries: dict[str, From | str | None] = {
        "embedder/input_embedding": "model.embed_tokens.weight",
        "final_norm/w": "model.norm.weight",
        **{f"{layer}/attn/{name}/w": From(f"{theirs}.self_attn.{name}.weight").rearrange(_QUERY)
           for name in ("q_proj", "k_proj", "v_proj")},
        f"{layer}/attn/o_proj/w": From(f"{theirs}.self_attn.o_proj.weight").rearrange(_OUT),
        **{f"{layer}/{name}/w": f"{theirs}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")},
        **others,
    }  # fmt: skip
    if not tied:
        entries["lm_head/w"] = From("lm_head.weight").T
    return WeightMap(entries, ignore=["{rest...}rotary_emb.inv_freq", *(["lm_head.weight"] if tied else [])])

"""The names that people give to axes of variables and of meshes, and what they mean.

Responsible for names that a model carries itself, in Flax' partitioning metadata, MaxText's `kernel_axes` or the arrays
of Haliax and Penzai: what a model says is surer than what `_sharding/describe` reads from paths and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazymodel._sharding.roles import HEADS

# What people call mesh axes → what parameters are split for over them. `batch` is what keras.distribution calls the
# axis of its data; published Keras layouts split parameters over it too.
TENSOR_NAMES = ("model", "tensor", "tp", "mp", "tensor_parallel", "model_parallel", "mdl")
FSDP_NAMES = ("fsdp", "zero", "fully_sharded")
DATA_NAMES = ("data", "batch", "dp", "data_parallel")
EXPERT_NAMES = ("expert", "experts", "ep", "expert_parallel")

EMBED, MLP, JOINED, LAYERS = "embed", "mlp", "heads with their columns", "layers"
# Meaning → names, in lower case: T5X's and MaxText's first, then those of other packages. In both, `kv` is the width of
# a head and `joined_kv` all heads side by side.
_MEANINGS = {
    EMBED: "embed embed_dim embedding emb d_model model_dim features hidden_size embed_no_exp norm",
    "vocabulary": "vocab vocabulary vocab_size",
    HEADS: "heads q_heads kv_heads kv_head query_heads num_heads n_heads num_kv_heads head_groups "
    "heads_per_group q_heads_per_group",
    "head_dim": "kv head_dim head_size kv_head_dim qk_head_dim v_head_dim d_head projection",
    JOINED: "joined_kv joined_heads qkv qkv_joined q_joined kv_joined",
    MLP: "mlp intermediate ffn ffw hidden hidden_dim d_ff mlp_dim ffw_dim intermediate_size mlp_hidden neurons",
    "experts": "experts expert exp num_experts",
    LAYERS: "layers layer stack scan layer_stack stage num_layers blocks",
    "space": "spatial height width kernel_h kernel_w conv_height conv_width conv_kernel time",
    "in": "conv_in in in_channels input in_features",
    "out": "conv_out out out_channels output channels out_features",
    "positions": "positions position length seq sequence relpos_buckets",
}
AXIS_NAMES = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()}


def are_mesh_axes(names: Sequence[Any], mesh_axes: Sequence[str]) -> bool:
    """Whether a variable's names, at least one, are all of mesh axes: of this mesh, or as people call such."""
    known = {*mesh_axes, *TENSOR_NAMES, *FSDP_NAMES, *DATA_NAMES, *EXPERT_NAMES}
    flat = [axis for name in names for axis in flat_axes(name)]
    return bool(flat) and all(axis in known or axis.lower() in known for axis in flat)


def flat_axes(name: Any) -> tuple[str, ...]:
    """The axes that one entry names: none, one, or several."""
    entries = name if isinstance(name, tuple | list) else (name,)
    return tuple(str(axis) for axis in entries if axis is not None)


def role_of_names(names: Sequence[Any], is_output: bool | None) -> tuple[str, tuple[str, ...]] | None:
    """The role and labels of a variable whose axes are so named; None where the names do not tell.

    `is_output` is what the path says of a weight with heads: whether it is the output projection, or None.
    """
    known = [AXIS_NAMES.get(str(name).lower(), "") for name in names]
    found = {meaning for meaning in known if meaning} - {LAYERS}
    heads = next((meaning for meaning in (HEADS, JOINED) if meaning in found), "")

    def first(one: str, other: str) -> bool:
        return known.index(one) < known.index(other)

    if {EMBED, "experts", MLP} <= found:
        role = "expert_up" if first(EMBED, MLP) else "expert_down"
    elif {EMBED, "experts"} == found:
        role = "router"
    elif {EMBED, "vocabulary"} <= found:
        role = "output_head" if first(EMBED, "vocabulary") else "embedding"
    elif {EMBED, MLP} <= found:
        role = "mlp_up" if first(EMBED, MLP) else "mlp_down"
    elif EMBED in found and heads:
        last = "head_dim" if "head_dim" in found else heads
        role = "attention_output" if (first(last, EMBED) if is_output is None else is_output) else "query_key_value"
    elif {"in", "out", "space"} <= found:
        role = "convolution"
    else:
        return None
    # A role's own words for its dimensions: the model's width comes in or goes out.
    down, parts = role in ("expert_down", "mlp_down", "attention_output"), role.startswith("expert") or MLP in found
    words = {EMBED: "out" if down else "in", MLP: "in" if down else "out", JOINED: HEADS}
    words |= {EMBED: "features"} if role == "embedding" else {}
    return role, tuple(words.get(meaning, meaning) or ("parts" if parts else "dimension") for meaning in known)

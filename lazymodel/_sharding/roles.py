"""Roles: the purposes of variables in networks, and common names for the axes of variables and meshes.

One row for each role: the paths that have it, a label for every dimension, the order in which dimensions are tried for
mesh axes, and the reason. `_sharding/describe` finds the role of a variable; `lm.auto` places the labels on a
mesh. A model's own names, in Flax' partitioning metadata, MaxText's `kernel_axes` or the arrays of Haliax and Penzai,
are more reliable than what is inferred from paths and shapes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lazymodel._abstract.variable import PINNED_HOST
from lazymodel._errors import ShardingError
from lazymodel._show.text import closest


@dataclasses.dataclass(frozen=True)
class Host:
    """A spec for host memory: split like any other, with each shard in the memory of its device's host.

    For variables that do not fit a device and are seldom needed, such as embeddings, layers or optimizer state. A
    jitted function moves them in and out with `jax.device_put`; `docs/host_memory.md` has a training step.

    Attributes:
        spec: A `PartitionSpec`, a sequence of axis names, or None to replicate.
        memory_kind: `"pinned_host"`, which devices read directly, or another kind that the devices have.

    Example:
        >>> offloaded = abstract.shard(mesh, {"up/kernel": lm.Host(P(None, "model")), "down/kernel": P("model")})
        >>> offloaded["up/kernel"]
        AbstractVariable('up/kernel', float32[64, 256], P(None, 'model') in pinned_host, normal)
        >>> offloaded.plan().device_nbytes, offloaded.plan().offloaded_nbytes  # on one device, and on its host
        (8192, 65536)
    """

    spec: PartitionSpec | Sequence[Any] | None = None
    memory_kind: str = PINNED_HOST


@dataclasses.dataclass(frozen=True, repr=False)
class Role:
    """A role. As a key of sharding rules, it matches every variable of this role; `role` looks it up."""

    name: str  # used in rules
    pattern: str  # regex of its path in lower case; `(^|/)` anchors a part, since many words contain a `k`
    ndims: tuple[int, ...]  # possible numbers of dimensions
    within: str  # the kind of layer in which the pattern applies; an empty string means any
    labels: tuple[str, ...]  # the meaning of its dimensions; a label with a star repeats
    turns: bool  # True if the labels are reversed for a weight that is stored as (out, in)
    tensor: tuple[str, ...]  # order in which tensor parallelism tries labels: least communication first
    fsdp: tuple[str, ...]  # the same for fully-sharded data parallelism; by default reversed, `-` for none
    why: str  # the advantage of the first choice of `tensor`

    def fits(self, name: str) -> bool:
        """Returns True if a path, or its last parts, matches the role's pattern."""
        return re.search(self.pattern, name) is not None

    def label(self, ndim: int, *, out_first: bool = False) -> tuple[str, ...]:
        """Labels for `ndim` dimensions."""
        many = ndim - len(self.labels) + 1
        each = [(label.strip("*"),) * (many if label[-1] == "*" else 1) for label in self.labels]
        labels = tuple(label for some in each for label in some)
        return labels[::-1] if out_first and self.turns else labels

    def __repr__(self) -> str:
        return f"Role(name={self.name!r})"


HEADS, FUSED_HEADS = "heads", "heads of queries, keys and values"
# The first pattern that matches, with a fitting number of dimensions, decides; those `within` a layer come last.
_PATTERNS = {
    "lora": r"lora_([a-z]+_)?[ab]$",
    "scale": r"(kernel|embeddings|weight|w)_(scale|zero|zero_point)$|(^|/)zero_point$",
    "norm": r"(^|/)(gamma|beta|moving_mean|moving_variance|mean|var|running_mean|running_var)$|"
    r"(norm|(^|[/_])ln(_?[a-z\d]*)?|(^|[/_])bn\d*)[^/]*/(scale|weight|w|bias|offset)$",
    "attention_bias_table": r"attention\w*/embeddings$|relative.*(bias|table)|rel_pos|attention_bias",
    # The table of tokens may be in a layer of tokens and positions.
    "position_embedding": r"^(?!.*(token|word|vocab)[a-z_]*embeddings?(/embeddings?)?$).*("
    r"(segment|token_type|type)_?embedding[^/]*/embeddings?$|"
    r"pos(ition(al|s)?)?_?(emb|enc|table|ids)|(^|/)wpe(/|$)|positions?/embedding)",
    "output_head": r"reverse_embeddings$|"
    r"(lm_head|logits|unembed|output_embedding)[^/]*(/.*)?(kernel|weight|w)$|(^|/)(lm_head|unembed)$",
    "embedding": r"(token|word|vocab)[a-z_]*embeddings?(/embeddings?)?$|"
    r"(^|/)([a-z\d_]*embeddings?|embedding_table|wte)$|"
    r"(^|/)(?!\w*(patch|time))(\w+_)?(emb|embed|embedder|embeddings?|embed_tokens|wte)(_\d+)?/(weight|w|table)$",
    "router": r"router|shared_expert_gate|sparse_feedforward_gate|"
    r"(moe|experts?)[^/]*/gate/(kernel|weight)|expert_gate/",
    "expert_down": r"expert.*(down|output|out|(^|[/_])w2|wo|linear)[^/]*(/(kernel|weight|w))?$",
    "expert_up": r"expert",
    "depthwise_convolution": r"depthwise.*kernel$",
    "convolution": r"(conv|patch|patching|stem).*(kernel|weight|/w)$",
    "recurrent": r"(^|[/_])(recurrent_kernel$|(lstm|gru|rnn)[^/]*/(.*/)?(kernel|weight\w*|w|w_[ih])$)",
    "state_space": r"(^|/)(a_log|log_a|ssm_a)$",
    "bias": r"(^|/)([a-z\d_]*bias|b)$",
    "latent_down": r"(^|[/_])w?(q|k|v|kv)_?(a|down)(_|/|$)",
    "latent_up": r"(^|[/_])w?(q|k|v|kv)_?(b|up)(_|/|$)",
    "fused_query_key_value": r"(^|[/_])(\w*qkv\w*|query_key_value|c_attn|in_proj|kv\w*|\w*qk)(/|$)",
    "query_key_value": r"(^|[/_])(q|k|v|query|queries|keys?|values?|wq|wk|wv|to_[qkv])"
    r"(_?(proj|projection|projector|dense|linear|layer|einsum|a|b)\w*)?(/|$)",
    "attention_output": r"(^|[/_])(o|wo|out|output|attention_output|c_proj|to_out|proj|post|linear|dense|attn_vec)"
    r"(_?(proj|projection|projector|dense|linear|layer|einsum|final)\w*)?(/|$)",
    "mlp_up": r"(^|[/_])"
    r"(up|gate|gating|intermediate|inner|fc_?1|c_fc|wi(_\d)?|w1|w3|expand|h_to_4h|linear_?1|dense_?1)([/_]|$)",
    "mlp_down": r"(^|[/_])"
    r"(down|output|outer|fc_?2|c_proj|wo|w2|contract|4h_to_h|linear_?2|dense_?2|out|ffw_linear)([/_]|$)",
}


# The advantage of splitting a dimension of this label.
_WHY = {
    "vocabulary": "each device has its own part of the vocabulary",
    "features": "each device has a part of the result of each lookup",
    "experts": "each device has whole experts",
    "heads": "each device has whole heads",
    "blocks": "each device has whole blocks",
    "channels": "each device computes its own channels",
    "out": "split by columns: no communication before the next layer",
    "in": "split by rows: its input is the columns of the layer before, on the same device",
}
# Role | numbers of dimensions | labels | tensor | fsdp | within.
# A dimension that an activation gets without a contraction is not for fsdp: tables by features, channels of depthwise
# kernels. The activation would be split over the data axes by it, and the compiler would gather the batch.
# `lookup_table` and `block_diagonal` are found by shapes. The gates of `recurrent` are side by side, so columns would
# be exchanged at every step in time. Latents are those of multi-head latent attention, where few sums matter more than
# whole heads. The dimension of an attention projection that counts the heads is inferred from neighbours.
_TABLE = """
lora                  | 234
scale                 | 1234
norm                  | 12
attention_bias_table  | 23
position_embedding    | 234  | positions*/features
output_head           | 2    | in/vocabulary, turns         | vocabulary/in
embedding             | 2    | vocabulary/features          | vocabulary/features | vocabulary
lookup_table          |      | entries/features             | features/entries | entries
router                | 2    | in/experts, turns
expert_down           | 34   | experts/in/parts*/out        | experts/in/out   | out/in/parts/experts
expert_up             | 34   | experts/in/parts*/out        | experts/out/in   | in/out/parts/experts
depthwise_convolution | 345  | space*/out/multiplier        | out              | -
convolution           | 345  | space*/in/out, turns         | out/in
block_diagonal        |      | blocks/in/out                | blocks/out/in    | blocks
recurrent             | 2
state_space           | 2    | channels/state               | channels         | -
bias                  | 1234
latent_down           | 2    | in/out, turns                | in/out           |                      | attention
latent_up             | 2    | in/out, turns                | out/in           |                      | attention
fused_query_key_value | 234  | dimension*                   | heads/in/fused   | in/parts/heads/fused | attention
query_key_value       | 23   | dimension*                   | heads/in         |                      | attention
attention_output      | 23   | dimension*                   | heads/out        |                      | attention
mlp_up                | 23   | parts*/in/out, turns         | out/in           |                      | mlp
mlp_down              | 2    | in/out, turns                | in/out           |                      | mlp
optimizer_slot        |      | of its variable*
state
other
"""


def _role(row: str) -> Role:
    cells = [cell.strip() for cell in row.split("|")]
    name, ndims, labels, tensor, fsdp, within = (*cells, *[""] * (6 - len(cells)))
    first, stored = (
        tuple(FUSED_HEADS if label == "fused" else label for label in cell.split("/") if label)
        for cell in (tensor, fsdp)
    )
    return Role(
        name=name,
        pattern=_PATTERNS.get(name, ""),
        ndims=tuple(map(int, ndims)),
        within=within,
        labels=tuple((labels.removesuffix(", turns") or "dimension*").split("/")),
        turns=labels.endswith(", turns"),
        tensor=first,
        fsdp=() if stored == ("-",) else stored or first[::-1],
        why=_WHY[first[0]] if first else "",
    )


ROLES: Mapping[str, Role] = {row.name: row for row in map(_role, _TABLE.strip().splitlines())}


def role(name: str) -> Role:
    """A key of sharding rules that matches every variable of a role: `{lm.role("embedding"): P("model")}`.

    Rules are tried in order, both paths and roles. `AbstractModel.explain(path)` shows a variable's role.

    Raises:
        ShardingError: There is no such role; the message lists them.

    Example:
        >>> abstract.shard(mesh, {lm.role("mlp_up"): P(None, "model"), ".*": P()})["up/kernel"].spec
        P(None, 'model')
    """
    if name not in ROLES:
        raise ShardingError(f"there is no role {name!r}{closest(name, ROLES)}; roles are {', '.join(ROLES)}")
    return ROLES[name]


# Names of mesh axes over which a batch is split; all other axes split dimensions inside the model.
DATA_AXES = ("data", "batch", "dp", "fsdp", "replica")


_EMBED, _MLP, _JOINED, LAYERS = "embed", "mlp", "heads with their columns", "layers"
# Meaning → names, in lower case: those of T5X and MaxText first, then those of other packages. In both, `kv` is the
# width of a head and `joined_kv` is all heads side by side.
_MEANINGS = {
    _EMBED: "embed embed_dim embedding emb d_model model_dim features hidden_size embed_no_exp norm",
    "vocabulary": "vocab vocabulary vocab_size",
    HEADS: "heads q_heads kv_heads kv_head query_heads num_heads n_heads num_kv_heads head_groups "
    "heads_per_group q_heads_per_group",
    "head_dim": "kv head_dim head_size kv_head_dim qk_head_dim v_head_dim d_head projection",
    _JOINED: "joined_kv joined_heads qkv qkv_joined q_joined kv_joined",
    _MLP: "mlp intermediate ffn ffw hidden hidden_dim d_ff mlp_dim ffw_dim intermediate_size mlp_hidden neurons",
    "experts": "experts expert exp num_experts",
    LAYERS: "layers layer stack scan layer_stack stage num_layers blocks",
    "space": "spatial height width kernel_h kernel_w conv_height conv_width conv_kernel time",
    "in": "conv_in in in_channels input in_features",
    "out": "conv_out out out_channels output channels out_features",
    "positions": "positions position length seq sequence relpos_buckets",
}
AXIS_NAMES = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()}


def role_of_names(names: Sequence[Any], is_output: bool | None) -> tuple[str, tuple[str, ...]] | None:
    """The role and labels of a variable with these axis names; None if they do not determine a role.

    `is_output`: for a weight with heads, True if its path shows an output projection; None if the path does not show.
    """
    known = [AXIS_NAMES.get(str(name).lower(), "") for name in names]
    found = {meaning for meaning in known if meaning} - {LAYERS}
    heads = next((meaning for meaning in (HEADS, _JOINED) if meaning in found), "")

    def first(one: str, other: str) -> bool:
        return known.index(one) < known.index(other)

    if {_EMBED, "experts", _MLP} <= found:
        role = "expert_up" if first(_EMBED, _MLP) else "expert_down"
    elif {_EMBED, "experts"} == found:
        role = "router"
    elif {_EMBED, "vocabulary"} <= found:
        role = "output_head" if first(_EMBED, "vocabulary") else "embedding"
    elif {_EMBED, _MLP} <= found:
        role = "mlp_up" if first(_EMBED, _MLP) else "mlp_down"
    elif _EMBED in found and heads:
        last = "head_dim" if "head_dim" in found else heads
        role = "attention_output" if (first(last, _EMBED) if is_output is None else is_output) else "query_key_value"
    elif {"in", "out", "space"} <= found:
        role = "convolution"
    else:
        return None
    # Labels as the role names them: the model's width is either `in` or `out`.
    down, parts = role in ("expert_down", "mlp_down", "attention_output"), role.startswith("expert") or _MLP in found
    words = {_EMBED: "out" if down else "in", _MLP: "in" if down else "out", _JOINED: HEADS}
    words |= {_EMBED: "features"} if role == "embedding" else {}
    return role, tuple(words.get(meaning, meaning) or ("parts" if parts else "dimension") for meaning in known)

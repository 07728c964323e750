"""Roles: what the variables of networks are for, one row each.

Responsible for the names by which people call the parts of networks and for all that follows from a role alone: a
label for every dimension, the order in which dimensions are tried for mesh axes, and why. Which role a variable has is
told by `_sharding/describe`; `_sharding/auto` places the labels on a mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lazymodel._errors import ShardingError
from lazymodel._show.text import closest


@dataclasses.dataclass(frozen=True, repr=False)
class Role:
    """A role, and as a key of sharding rules every variable that has it; `role` looks it up."""

    name: str  # by which rules call it
    pattern: str = ""  # what its path looks like in lower case; `(^|/)` anchors a part, since many words have a `k`
    ndims: tuple[int, ...] = ()  # how many dimensions it may have
    within: str = ""  # the kind of layer in which the pattern counts; an empty string is anywhere
    labels: tuple[str, ...] = ("dimension*",)  # what its dimensions are; one with a star for as many as there are
    turns: bool = False  # whether the labels are the other way round where a weight is stored as (out, in)
    tensor: tuple[str, ...] = ()  # in which order tensor parallelism tries labels: least communication first
    fsdp: tuple[str, ...] = ()  # the same for fully-sharded data parallelism; by default the other way round
    why: str = ""  # what the first choice of `tensor` is good for

    def __post_init__(self) -> None:
        object.__setattr__(self, "fsdp", self.fsdp or self.tensor[::-1])

    def label(self, ndim: int, *, out_first: bool = False) -> tuple[str, ...]:
        """One label for each of so many dimensions."""
        many = ndim - len(self.labels) + 1
        each = [(label.strip("*"),) * (many if label[-1] == "*" else 1) for label in self.labels]
        labels = tuple(label for some in each for label in some)
        return labels[::-1] if out_first and self.turns else labels

    def __repr__(self) -> str:
        return f"Role(name={self.name!r})"


HEADS, FUSED_HEADS = "heads", "heads of queries, keys and values"
# The first row whose pattern and number of dimensions fit is the role; rows within a layer are tried after all others.
_ROWS = (
    Role("lora", r"lora_([a-z]+_)?[ab]$", (2, 3, 4)),
    Role("scale", r"(kernel|embeddings|weight|w)_(scale|zero|zero_point)$", (1, 2, 3, 4)),
    Role(
        "norm",
        r"(^|/)(gamma|beta|moving_mean|moving_variance|mean|var|running_mean|running_var)$|"
        r"(norm|(^|[/_])ln(_?[a-z\d]*)?|(^|[/_])bn\d*)[^/]*/(scale|weight|w|bias|offset)$",
        (1, 2),
    ),
    Role("attention_bias_table", r"attention\w*/embeddings$|relative.*(bias|table)|rel_pos|attention_bias", (2, 3)),
    Role(
        "position_embedding",
        # The words' own table may lie within a layer of words and positions.
        r"^(?!.*(token|word|vocab)[a-z_]*embeddings?(/embeddings?)?$).*("
        r"(segment|token_type|type)_?embedding[^/]*/embeddings?$|"
        r"pos(ition(al|s)?)?_?(emb|enc|table|ids)|(^|/)wpe(/|$)|positions?/embedding)",
        (2, 3, 4),
        labels=("positions*", "features"),
    ),
    Role(
        "output_head",
        r"reverse_embeddings$|(lm_head|logits|unembed|output_embedding)[^/]*(/.*)?(kernel|weight|w)$|(^|/)(lm_head|unembed)$",
        (2,),
        labels=("in", "vocabulary"),
        turns=True,
        tensor=("vocabulary", "in"),
        why="each device computes its own logits",
    ),
    Role(
        "embedding",
        r"(token|word|vocab)[a-z_]*embeddings?(/embeddings?)?$|"
        r"(^|/)([a-z\d_]*embeddings?|embedding_table|wte)$|"
        r"(^|/)(?!\w*(patch|time))(\w+_)?(emb|embed|embedder|embeddings?|embed_tokens|wte)(_\d+)?/(weight|w|table)$",
        (2,),
        labels=("vocabulary", "features"),
        tensor=("vocabulary", "features"),
        why="each device looks its own tokens up",
    ),
    Role(
        "lookup_table",  # told by its neighbours: one of several tables in a layer
        labels=("entries", "features"),
        tensor=("features", "entries"),
        fsdp=("features", "entries"),
        why="each device has a part of what each of many look-ups gives",
    ),
    Role(
        "router",
        r"router|shared_expert_gate|sparse_feedforward_gate|(moe|experts?)[^/]*/gate/(kernel|weight)|expert_gate/",
        (2,),
        labels=("in", "experts"),
        turns=True,
    ),
    Role(
        "expert_down",
        r"expert.*(down|output|out|(^|[/_])w2|wo|linear)[^/]*(/(kernel|weight|w))?$",
        (3, 4),
        labels=("experts", "in", "parts*", "out"),
        tensor=("experts", "in", "out"),
        fsdp=("out", "in", "parts", "experts"),
        why="each device has whole experts",
    ),
    Role(
        "expert_up",
        r"expert",
        (3, 4),
        labels=("experts", "in", "parts*", "out"),
        tensor=("experts", "out", "in"),
        fsdp=("in", "out", "parts", "experts"),
        why="each device has whole experts",
    ),
    Role(
        "depthwise_convolution",
        r"depthwise.*kernel$",
        (3, 4, 5),
        labels=("space*", "out", "multiplier"),
        tensor=("out",),
        why="each device computes its own channels",
    ),
    Role(
        "convolution",
        r"(conv|patch|patching|stem).*(kernel|weight|/w)$",
        (3, 4, 5),
        labels=("space*", "in", "out"),
        turns=True,
        tensor=("out", "in"),
        why="each device computes its own channels",
    ),
    Role(
        "block_diagonal",  # told by shapes alone
        labels=("blocks", "in", "out"),
        tensor=("blocks", "out", "in"),
        fsdp=("blocks",),
        why="each device computes its own blocks",
    ),
    # Its gates lie side by side, so columns would be exchanged at every step in time.
    Role("recurrent", r"(^|[/_])(recurrent_kernel$|(lstm|gru|rnn)[^/]*/(.*/)?(kernel|weight\w*|w|w_[ih])$)", (2,)),
    Role(
        "state_space",
        r"(^|/)(a_log|log_a|ssm_a)$",
        (2,),
        labels=("channels", "state"),
        tensor=("channels",),
        why="each device computes its own channels",
    ),
    Role("bias", r"(^|/)([a-z\d_]*bias|b)$", (1, 2, 3, 4)),
    # Multi-head latent attention: what is narrow lies between the two. Whole heads count less than few sums.
    Role(
        "latent_down",
        r"(^|[/_])w?(q|k|v|kv)_?(a|down)(_|/|$)",
        (2,),
        "attention",
        labels=("in", "out"),
        turns=True,
        tensor=("in", "out"),
        why="split by rows: what is summed is narrow",
    ),
    Role(
        "latent_up",
        r"(^|[/_])w?(q|k|v|kv)_?(b|up)(_|/|$)",
        (2,),
        "attention",
        labels=("in", "out"),
        turns=True,
        tensor=("out", "in"),
        why="split by columns: each device computes its own",
    ),
    # By the last parts of the path. Which dimension counts the heads is told from neighbours.
    Role(
        "fused_query_key_value",
        r"(^|[/_])(\w*qkv\w*|query_key_value|c_attn|in_proj|kv\w*|\w*qk)(/|$)",
        (2, 3, 4),
        "attention",
        tensor=(HEADS, "in", FUSED_HEADS),
        fsdp=("in", "parts", HEADS, FUSED_HEADS),
        why="each device computes whole heads",
    ),
    Role(
        "query_key_value",
        r"(^|[/_])(q|k|v|query|queries|keys?|values?|wq|wk|wv|to_[qkv])"
        r"(_?(proj|projection|projector|dense|linear|layer|einsum|a|b)\w*)?(/|$)",
        (2, 3),
        "attention",
        tensor=(HEADS, "in"),
        why="each device computes whole heads",
    ),
    Role(
        "attention_output",
        r"(^|[/_])(o|wo|out|output|attention_output|c_proj|to_out|proj|post|linear|dense|attn_vec)"
        r"(_?(proj|projection|projector|dense|linear|layer|einsum|final)\w*)?(/|$)",
        (2, 3),
        "attention",
        tensor=(HEADS, "out"),
        why="each device has whole heads as input",
    ),
    Role(
        "mlp_up",
        r"(^|[/_])(up|gate|gating|intermediate|inner|fc_?1|c_fc|wi(_\d)?|w1|w3|expand|h_to_4h|linear_?1|dense_?1)([/_]|$)",
        (2, 3),
        "mlp",
        labels=("parts*", "in", "out"),
        turns=True,
        tensor=("out", "in"),
        why="split by columns: no communication before the next layer",
    ),
    Role(
        "mlp_down",
        r"(^|[/_])(down|output|outer|fc_?2|c_proj|wo|w2|contract|4h_to_h|linear_?2|dense_?2|out|ffw_linear)([/_]|$)",
        (2,),
        "mlp",
        labels=("in", "out"),
        turns=True,
        tensor=("in", "out"),
        why="split by rows: takes what columns before it left on the device",
    ),
    Role("optimizer_slot", labels=("of its variable*",)),
    Role("state"),
    Role("other"),
)
ROLES: Mapping[str, Role] = {row.name: row for row in _ROWS}


def role(name: str) -> Role:
    """A key of sharding rules that stands for every variable of a role: `{lm.role("embedding"): P("model")}`.

    Rules are tried in their order, whether path or role. Which role a variable has says `AbstractModel.explain(path)`.

    Raises:
        ShardingError: There is no such role; the message lists them.

    Example:
        >>> abstract.shard(mesh, {lm.role("mlp_up"): P(None, "model"), ".*": P()})["up/kernel"].spec
        P(None, 'model')
    """
    if name not in ROLES:
        raise ShardingError(f"there is no role {name!r}{closest(name, ROLES)}; roles are {', '.join(ROLES)}")
    return ROLES[name]

"""Names as people give them: which of them differ in an index alone, and the words that they have in common.

`q_proj`, `query` and `wq` are one word here, `ln_1` and `input_layernorm` the same words. These are guesses for a table
that a person will read; nothing is loaded by them alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

# A component that is a number, or a number at the end of a word for something of which there are many.
_INDEX = re.compile(r"(?:(?:^|[/.])|(?:layer|block|stage|expert|cell)s?_?)(\d{1,9})(?=[/.]|$)", re.IGNORECASE)
# What captures are called, by the word before the number.
_CAPTURES: dict[str, str] = {"h": "layer", "resblocks": "block", "branches": "branch"}

# Phrases, before names are taken apart. The norms of a block are called by what they stand before or after.
_PHRASES = (
    (r"c_attn|wqkv|qkv(_proj|_einsum)?|query_key_value|in_proj", "query key value attention"),
    (r"kv_(einsum|proj)", "key value attention"),
    (r"gate_up(_proj)?|gating_einsum", "gate up mlp"),
    (r"gate_?proj", "gate mlp"),
    (r"attn_vec(_einsum)?|c_proj|out_proj|o_proj|wo|resid_proj", "out"),
    (r"embed_tokens|wte|tok_embeddings?|word_embeddings?|token_embed(ding|der)?s?|input_embeddings?", "token embed"),
    (r"(absolute_)?pos(ition)?(al)?_?(embed(ding)?s?)|wpe", "position embed"),
    (r"token_type_embeddings?|segment(s|_embeddings?)?", "segment embed"),
    (r"lm_head|unembed(ding)?|embed_out", "head"),
    (r"(input|attention|attn|pre_attention|self_attn)_(layer_?)?norm|(ln|norm|layer_?norm)_?1", "pre attention norm"),
    (r"(pre_(feed_?forward|ffw|ffn|mlp)|ffn|ffw|mlp)_(layer_?)?norm|(ln|norm|layer_?norm)_?2", "pre mlp norm"),
    (r"post_attention_(layer_?)?norm", "post attention norm"),
    (r"post_(feed_?forward|ffw|ffn|mlp)_(layer_?)?norm", "post mlp norm"),
    (r"ln_f|final_(layer_?)?norm|(encoder|decoder|output|post)_(layer_?)?norm", "final norm"),
    (r"(^|(?<=model[/.]))norm(?=[/.])", "final norm"),
    (r"feed_?forward|intermediate", "mlp up"),
)
_PHRASE = [(re.compile(rf"(?<![a-z\d])(?:{pattern})(?![a-z\d])"), f" {words} ") for pattern, words in _PHRASES]
_EXPERT_GATE = re.compile(r"(?<=[/._])gate(?=[.]$)")
_WORDS: dict[str, str] = {
    **dict.fromkeys(("q", "wq"), "query"),
    **dict.fromkeys(("k", "wk"), "key"),
    **dict.fromkeys(("v", "wv"), "value"),
    **dict.fromkeys(("o", "output"), "out"),
    **dict.fromkeys(("attn", "mha", "sdpa", "selfattention"), "attention"),
    **dict.fromkeys(("ffn", "ffw", "ff", "moe"), "mlp"),
    **dict.fromkeys(("fc", "fc1", "w3", "wi", "intermediate"), "up"),
    **dict.fromkeys(("fc2", "w2"), "down"),
    **dict.fromkeys(("w1", "gating"), "gate"),
    **dict.fromkeys(("ln", "layernorm", "rmsnorm", "batchnorm", "bn", "groupnorm"), "norm"),
    **dict.fromkeys(("embedding", "embeddings", "embedder"), "embed"),
    **dict.fromkeys(("tokens", "word", "words"), "token"),
    **dict.fromkeys(("pos", "positions"), "position"),
    **dict.fromkeys(("logits", "classifier"), "head"),
    "experts": "expert",
}
_KINDS: dict[str, str] = {
    **dict.fromkeys(("bias", "b", "beta"), "bias"),
    **dict.fromkeys(("mean", "running_mean", "moving_mean"), "mean"),
    **dict.fromkeys(("var", "variance", "running_var", "moving_variance", "moving_var"), "variance"),
}
_LEAVES = {"weight", "weights", "kernel", "w", "scale", "gamma", "table"}
_ENDINGS = {"bias", "kernel", "weight", "scale"}
_NOISE = {
    *("proj", "projection", "model", "module", "transformer", "layer", "layers", "block", "blocks", "h", "self", "c"),
    *("dense", "linear", "einsum", "params", "net", "conv1d"),
}
ROLES = ("query", "key", "value", "gate", "up")  # of which a fused weight has several, in this order


@dataclasses.dataclass(frozen=True)
class Family:
    """Names that differ in indexes alone, and the shape of all of them."""

    text: tuple[str, ...]  # what stands around the indexes that differ
    indexes: tuple[tuple[str, ...], ...]  # of each name
    shape: tuple[int, ...]
    kind: str  # weight, bias, mean or variance
    words: frozenset[str]  # in the terms of this module
    spelled: frozenset[str]  # as they are

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in ROLES if role in self.words)

    def template(self, captures: Iterable[str] | None = None) -> str:
        """The names as one, with these captures; without, called after the words before them."""
        names = self.captures() if captures is None else tuple(captures)
        return self.text[0] + "".join(f"{{{name}}}{text}" for name, text in zip(names, self.text[1:], strict=True))

    @property
    def layer(self) -> str:
        """What a kernel and its bias have in common."""
        return re.sub(r"(^|[/.])[^/.]*$", "", self.template())

    def captures(self) -> tuple[str, ...]:
        """A name for each index."""
        names: list[str] = []
        for text in self.text[:-1]:
            words: list[str] = re.findall(r"[A-Za-z]+", text)
            word = words[-1].lower() if words else "n"
            name = _CAPTURES.get(word, word.removesuffix("s"))
            names.append(name if name not in names else f"{name}_{len(names)}")
        return tuple(names)


def families(shapes: Mapping[str, tuple[int, ...]]) -> list[Family]:
    """Names and their shapes as families, in the order in which each first appears."""
    groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], str]]] = {}
    for name in shapes:
        places = [match.span(1) for match in _INDEX.finditer(name)]
        ends = [0, *(end for _, end in places)]
        text = tuple(name[end:start] for end, (start, _) in zip(ends, [*places, (len(name), 0)], strict=True))
        groups.setdefault(text, []).append((tuple(name[start:end] for start, end in places), name))
    experts = any("expert" in name for name in shapes)
    # With a norm before the MLP under its own name, "post attention" is what it says; else it is what that one is.
    pre_mlp = any(re.search(r"pre_(feed_?forward|ffw|ffn|mlp)", name) for name in shapes)
    return [
        _family(text, members, shapes, experts, pre_mlp)
        for whole, group in groups.items()
        for text, members in _uniform(whole, group, shapes)
    ]


def _uniform(
    text: tuple[str, ...], group: list[tuple[tuple[str, ...], str]], shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[tuple[str, ...], list[tuple[tuple[str, ...], str]]]]:
    """The group in parts of one shape each, told apart by an index that becomes text; the last where that will do."""
    columns = list(zip(*(index for index, _ in group), strict=True))
    for column, values in enumerate(columns):
        if len(set(values)) == 1:  # of a model with one layer, or an index that is none
            joined = (*text[:column], text[column] + values[0] + text[column + 1], *text[column + 2 :])
            return _uniform(joined, [((*i[:column], *i[column + 1 :]), name) for i, name in group], shapes)
    if len({shapes[name] for _, name in group}) == 1:
        return [(text, group)]

    def split(column: int) -> list[list[tuple[tuple[str, ...], str]]]:
        parts: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for index, name in group:
            parts.setdefault(index[column], []).append((index, name))
        return list(parts.values())

    orders = range(len(columns) - 1, -1, -1)
    alike = (c for c in orders if all(len({shapes[name] for _, name in part}) == 1 for part in split(c)))
    return [found for part in split(next(alike, len(columns) - 1)) for found in _uniform(text, part, shapes)]


def _family(
    text: tuple[str, ...],
    members: list[tuple[tuple[str, ...], str]],
    shapes: Mapping[str, tuple[int, ...]],
    experts: bool,
    pre_mlp: bool,
) -> Family:
    whole = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", ".".join(text)).lower()
    leaf = re.split(r"[/.]", whole)[-1]
    spelled = frozenset(re.findall(r"[a-z]+\d*|\d+", whole))
    if leaf not in _KINDS and leaf.rpartition("_")[2] in _ENDINGS:  # `k_bias`
        leaf = leaf.rpartition("_")[2]
    phrased = whole.removesuffix(leaf) if leaf in _LEAVES or leaf in _KINDS else whole
    phrased = _EXPERT_GATE.sub(" router ", phrased) if experts else phrased
    for pattern, words in _PHRASE:
        phrased = pattern.sub(words, phrased)
    spoken: list[str] = re.findall(r"[a-z]+\d*", phrased)
    found = [_WORDS.get(word, word) for word in spoken]
    words = set(found) - _NOISE
    if not pre_mlp and {"post", "attention", "norm"} <= words:
        words = words - {"post", "attention"} | {"pre", "mlp"}
    if "down" in words:
        words |= {"out", "mlp"}
    index = tuple(index for index, _ in members)
    return Family(text, index, shapes[members[0][1]], _KINDS.get(leaf, "weight"), frozenset(words), spelled)

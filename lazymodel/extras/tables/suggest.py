"""A table proposed for a checkpoint and a model, from names and shapes alone, for the user to correct.

Families of names that differ only in indexes are matched by the words they share, if one's shape can be turned into
the other's: stacked, taken out of a stack, transposed, split into heads, cut from a fused tensor, joined. `q_proj`,
`query` and `wq` are the same word here, `ln_1` and `input_layernorm` the same words. Every ambiguous match is listed as
unsure, with the reason; nothing is loaded by these guesses alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from lazymodel._abstract.variable import OPTIMIZER
from lazymodel._mapping.entry import From
from lazymodel._show.text import grouped_by

# A component that is a number, or a number after a word for one of many parts.
_INDEX = re.compile(r"(?:(?:^|[/.])|(?:layer|block|stage|expert|cell)s?_?)(\d{1,9})(?=[/.]|$)", re.IGNORECASE)
# Names of captures, by the word before the number.
_CAPTURES: dict[str, str] = {"h": "layer", "resblocks": "block", "branches": "branch"}

# Phrases, replaced before names are split. The norms of a block are named by the part before or after them.
_PHRASES = (
    (r"c_attn|wqkv|qkv(_proj|_einsum)?|query_key_value|in_proj", "query key value attention"),
    (r"kv(_einsum|_proj|(?=[/.]))", "key value attention"),
    (r"gate_up(_proj)?|gating_einsum", "gate up mlp"),
    (r"gate_?proj", "gate mlp"),
    (r"attn_vec(_einsum)?|c_proj|out_proj|o_proj|wo|resid_proj", "out"),
    (r"embed_tokens|wte|tok_embeddings?|word_embeddings?|token_embed(ding|der)?s?|input_embeddings?", "token embed"),
    (r"(absolute_)?pos(ition)?(al)?_?(embed(ding)?s?)|wpe", "position embed"),
    (r"token_type_embeddings?|segment(s|_embeddings?)?", "segment embed"),
    (r"dense_h_to_4h", "mlp up"),
    (r"dense_4h_to_h", "mlp down"),
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
_ROLES = ("query", "key", "value", "gate", "up")  # a fused weight has several of these, in this order


@dataclasses.dataclass(frozen=True)
class _Family:
    """Names that differ only in indexes, and the shape of all of them."""

    text: tuple[str, ...]  # the text around the indexes that differ
    indexes: tuple[tuple[str, ...], ...]  # of each name
    shape: tuple[int, ...]
    kind: str  # weight, bias, mean or variance
    words: frozenset[str]  # normalized as in this module
    spelled: frozenset[str]  # as spelled

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * len(self.indexes)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in _ROLES if role in self.words)

    def template(self, captures: Iterable[str] | None = None) -> str:
        """The names as one pattern, with these captures; by default named after the words before them."""
        names = self.captures() if captures is None else tuple(captures)
        return self.text[0] + "".join(f"{{{name}}}{text}" for name, text in zip(names, self.text[1:], strict=True))

    @property
    def place(self) -> tuple[Any, ...]:
        """Names, whatever their order, and shape."""
        return self.text, frozenset(self.indexes), self.shape

    @property
    def layer(self) -> str:
        """The part of the names that a kernel and its bias share."""
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


_Member: TypeAlias = "tuple[tuple[str, ...], str]"  # the indexes of a name, and the name


def _families(shapes: Mapping[str, tuple[int, ...]]) -> list[_Family]:
    """Families of names and shapes, in the order in which each first appears."""
    groups: dict[tuple[str, ...], list[_Member]] = {}
    for name in shapes:
        ends = [0, *(end for match in _INDEX.finditer(name) for end in match.span(1)), len(name)]
        text, *rest = (name[start:end] for start, end in itertools.pairwise(ends))
        groups.setdefault((text, *rest[1::2]), []).append((tuple(rest[::2]), name))
    experts = any("expert" in name for name in shapes)
    # If the norm before the MLP has its own name, "post attention" is literal; otherwise it is the norm before the MLP.
    pre_mlp = any(re.search(r"pre_(feed_?forward|ffw|ffn|mlp)", name) for name in shapes)
    return [
        _family(text, members, shapes, experts, pre_mlp)
        for whole, group in groups.items()
        for text, members in _uniform(whole, group, shapes)
    ]


def _uniform(
    text: tuple[str, ...], group: list[_Member], shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[tuple[str, ...], list[_Member]]]:
    """The group split into parts of one shape each, by turning an index into text; the last index if possible.

    An index with one value is text, too: that of a model with one layer, or a number that is not an index.
    """

    def split(column: int) -> Mapping[str, list[_Member]]:
        return grouped_by(group, lambda member: member[0][column])

    def alike(members: list[_Member]) -> bool:
        return len({shapes[name] for _, name in members}) == 1

    columns = range(len(text) - 1)
    turned = next((column for column in columns if len(split(column)) == 1), None)
    if turned is None and alike(group):
        return [(text, group)]
    if turned is None:
        turned = next((c for c in reversed(columns) if all(map(alike, split(c).values()))), columns[-1])
    found: list[tuple[tuple[str, ...], list[_Member]]] = []
    for value, part in split(turned).items():
        joined = (*text[:turned], text[turned] + value + text[turned + 1], *text[turned + 2 :])
        found += _uniform(joined, [((*i[:turned], *i[turned + 1 :]), name) for i, name in part], shapes)
    return found


def _family(
    text: tuple[str, ...],
    members: list[_Member],
    shapes: Mapping[str, tuple[int, ...]],
    experts: bool,
    pre_mlp: bool,
) -> _Family:
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
    return _Family(text, index, shapes[members[0][1]], _KINDS.get(leaf, "weight"), frozenset(words), spelled)


# Ways to turn one shape into another: axes reordered, split or merged, and numbered tensors stacked.


_Shape: TypeAlias = "tuple[int, ...]"
_Groups: TypeAlias = "tuple[tuple[int, ...], ...]"
_MOST_AXES = 6  # limit for arrangements: more would be too many, and no network has them
_KERNELS = {3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}  # of convolutions: PyTorch's order as (…, in, out)


@dataclasses.dataclass(frozen=True)
class _Arrangement:
    """Groups of axes of the tensor and of the variable; the side with fewer axes has some merged in one group."""

    before: _Groups
    after: _Groups
    ones: tuple[int, int] = (0, 0)  # leading axes of size 1 that either has besides
    joined: int | None = None  # the axis along which tensors were joined, if the first of `before` is that of the parts

    @property
    def order(self) -> tuple[int, ...] | None:
        """The order of the tensor's axes, if none is split or merged."""
        if self.joined is not None or any(self.ones) or any(len(group) != 1 for group in (*self.before, *self.after)):
            return None
        return tuple(self.before.index(group) for group in self.after)

    @property
    def of_matrix(self) -> bool:
        """Returns True if the tensor has two axes, without leading ones of size 1."""
        return len(self._of_tensor) == 2

    @property
    def _of_tensor(self) -> _Groups:
        return self.before if self.joined is None else self.before[1:]

    def add(self, source: From, v: _Family, shape: _Shape) -> From:
        """The source with the steps of this arrangement added."""
        if (order := self.order) is None:
            names, before = self._names(v), self.before
            if self.joined is not None:
                names[before[0][0]] = "parts"
                before = tuple((before[0] if n == self.joined else ()) + g for n, g in enumerate(self._of_tensor))
            sides = [
                " ".join(["1"] * ones + [_group([names[axis] for axis in group]) for group in side])
                for ones, side in zip(self.ones, (before, self.after), strict=True)
            ]
            # Axes that are merged in the variable cannot be separated again without their sizes.
            known = {
                names[axis]: shape[self.ones[0] + self.before.index((axis,))]
                for g in self.after
                if len(g) > 1
                for axis in g[:-1]
            }
            return source.rearrange(" -> ".join(sides), **known)
        if order == tuple(range(len(order))):
            return source
        return source.T if order == tuple(reversed(range(len(order)))) else source.transpose(*order)

    def _names(self, v: _Family) -> list[str]:
        axes = sum(len(group) for group in self.before)
        wide = [group for group in (*self.before, *self.after) if len(group) > 1]
        if len(wide) == 1 and v.words & {"query", "key", "value", "out", "attention"} and len(wide[0]) in (2, 3):
            called = dict(zip(wide[0], ("parts", "heads", "dim")[-len(wide[0]) :], strict=True))
            if axes - len(called) <= 1 + (self.joined is not None):
                return [called.get(axis, "model") for axis in range(axes)]
        return [chr(ord("a") + axis) for axis in range(axes)]

    def out_first(self, v: _Family) -> bool:
        """Returns True if the first of two axes of the tensor is the kernel's output.

        A kernel's last axis is; heads of queries, keys and values are; heads of the output projection are not.
        """
        first = self._of_tensor[0]
        heads = next((group for group in self._of_tensor if len(group) > 1), None)
        if heads is not None and v.words & {"query", "key", "value"}:
            return first == heads
        if heads is not None and "out" in v.words:
            return first != heads
        return self.after[-1][-1] in first

    def usual(self, v: _Family) -> bool:
        """Returns True if this is the usual arrangement of tables, and of kernels of convolutions."""
        order = self.order
        if v.kind == "weight" and "embed" not in v.words and order is not None and len(order) in _KERNELS:
            return order == _KERNELS[len(order)]
        return [axis for group in self.before for axis in group] == [axis for group in self.after for axis in group]


def _group(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"


def _ones(shape: _Shape) -> int:
    """The number of leading axes of size 1, such as that of a batch, without the last axis."""
    return next((axis for axis, size in enumerate(shape[:-1]) if size != 1), len(shape[:-1]))


@functools.lru_cache(maxsize=4096)
def _arrangements(shape: _Shape, target: _Shape) -> list[_Arrangement]:
    """Every arrangement of a tensor of one shape as a variable of another; groups keep the order of their axes."""
    if (ones := (_ones(shape), _ones(target))) != (0, 0) and sorted(shape) != sorted(target):
        inner = _arrangements(shape[ones[0] :], target[ones[1] :])
        return [dataclasses.replace(each, ones=ones) for each in inner]
    if math.prod(shape) != math.prod(target) or max(len(shape), len(target)) > _MOST_AXES:
        return []
    if len(shape) == len(target):
        orders = itertools.permutations(range(len(shape)))
        fit = (order for order in orders if tuple(shape[axis] for axis in order) == target)
        single = tuple((axis,) for axis in range(len(shape)))
        return [_Arrangement(single, tuple((axis,) for axis in order)) for order in fit]
    split = len(target) > len(shape)
    fine, coarse = (target, shape) if split else (shape, target)
    single = tuple((axis,) for axis in range(len(fine)))
    found: list[_Arrangement] = []
    for places in itertools.product(range(len(coarse)), repeat=len(fine)):
        groups = tuple(tuple(axis for axis, at in enumerate(places) if at == place) for place in range(len(coarse)))
        if all(math.prod(fine[axis] for axis in group) == size for group, size in zip(groups, coarse, strict=True)):
            found.append(_Arrangement(groups, single) if split else _Arrangement(single, groups))
    return found


def _arrangements_of_parts(shapes: Sequence[_Shape], axis: int, target: _Shape) -> list[_Arrangement]:
    """Every arrangement of tensors of one shape, joined along an axis, as a variable with an axis of the parts."""
    found = _arrangements((len(shapes), *shapes[0]), target) if len(set(shapes)) == 1 else []
    return [dataclasses.replace(each, joined=axis) for each in found if each.before[0] in each.after]


_PADDING = 8  # a vocabulary is padded by less than this part of it


def resized(shape: _Shape, target: _Shape, source: From) -> From | None:
    """A source with the step that pads one axis a little, or removes such padding; None if that is not what differs."""
    differing = [axis for axis, sizes in enumerate(zip(shape, target, strict=False)) if len(set(sizes)) > 1]
    if len(shape) != len(target) or len(differing) != 1:
        return None
    (axis,) = differing
    found, wanted = shape[axis], target[axis]
    if abs(found - wanted) * _PADDING >= max(found, wanted):
        return None
    return source.pad(axis, wanted, of=found) if found < wanted else source.slice(axis, 0, wanted, of=found)


@dataclasses.dataclass(frozen=True)
class _Way:
    """A correspondence between the indexes of a variable's names and those of tensors."""

    captures: tuple[str, ...]  # a name for each index of the tensors
    stacked: tuple[str, ...]  # those of them that the variable stacks
    axis: int  # the axis of the stack, or the first of several; or that of the tensor from which a layer is taken
    target: _Shape  # shape of the variable without them
    taken: str = ""  # capture of the variable's names with the number of the layer that is taken, if one is

    def layer(self, shape: _Shape) -> _Shape:
        """The shape of a tensor of this shape, or of its layer."""
        return (*shape[: self.axis], *shape[self.axis + 1 :]) if self.taken else shape


def _ways(v: _Family, t: _Family) -> list[_Way]:
    """Every correspondence, likeliest first: indexes in the same order, and all stacked axes in front."""
    found: list[_Way] = []
    own, numbers = v.captures(), set(v.indexes)
    columns = range(len(t.text) - 1)
    for kept in itertools.permutations(columns, len(own)):
        rest = [column for column in columns if column not in kept]
        counts = tuple(len({index[column] for index in t.indexes}) for column in rest)
        every = itertools.product(numbers, *([str(n) for n in range(count)] for count in counts))
        if {(tuple(index[c] for c in kept), *(index[c] for c in rest)) for index in t.indexes} != set(every):
            continue
        names = dict(zip(kept, own, strict=True))
        for column in rest:
            name = t.captures()[column]
            names[column] = name if name not in own else f"{name}_{column}"
        captures, stacked = tuple(names[c] for c in columns), tuple(names[c] for c in rest)
        for axis in range(len(v.shape) if len(counts) == 1 else 1):
            if v.shape[axis : axis + len(counts)] == counts:
                target = (*v.shape[:axis], *v.shape[axis + len(counts) :])
                found.append(_Way(captures, stacked, axis, target))
    return found or list(_ways_of_layers(v, t))


def _ways_of_layers(v: _Family, t: _Family) -> Iterator[_Way]:
    """Every correspondence by which each variable is a layer of a stacked tensor."""
    own = v.captures()
    for column, capture in enumerate(own):
        indexes = [(*index[:column], *index[column + 1 :]) for index in v.indexes]
        numbers = {index[column] for index in v.indexes}
        count = len(numbers)
        if set(indexes) != set(t.indexes) or len(v.indexes) != count * len(t.indexes):
            continue
        for axis in range(len(t.shape)) if numbers == {str(number) for number in range(count)} else ():
            if t.shape[axis] == count:
                yield _Way((*own[:column], *own[column + 1 :]), (), axis, v.shape, capture)


_ALIKE = 0.5  # share of common words below which names have little in common
_CLOSE = 0.08  # difference of scores up to which another candidate is named
_LEAST = 0.25  # score below which names have nothing in common, unless nothing else has such a shape
# Buffers that a model computes, but checkpoints of PyTorch contain.
_BUFFERS = ("inv_freq", "position_ids", "masked_bias", "num_batches_tracked")


@dataclasses.dataclass
class Suggestion:
    """Entries of a `WeightMap`, and notes on them."""

    entries: dict[str, From | None] = dataclasses.field(default_factory=dict[str, "From | None"])
    unsure: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # path → why
    ignore: list[str] = dataclasses.field(default_factory=list[str])
    missing: list[str] = dataclasses.field(default_factory=list[str])  # variables without a match
    unused: list[str] = dataclasses.field(default_factory=list[str])  # tensors without a match


def suggest(tensors: Mapping[str, _Shape], variables: Mapping[str, _Shape], computed: Iterable[str]) -> Suggestion:
    """Proposes a table from names and shapes; `computed`: paths of variables that no checkpoint has, such as keys."""
    result = Suggestion()
    # Names with braces are skipped: they would be captures.
    tensors, variables = ({n: s for n, s in some.items() if not set(n) & set("{}")} for some in (tensors, variables))
    if not any(name.startswith(OPTIMIZER) for name in variables) and any(n.startswith(OPTIMIZER) for n in tensors):
        tensors = {name: shape for name, shape in tensors.items() if not name.startswith(OPTIMIZER)}
        result.ignore = [OPTIMIZER + "{state...}"]
    if tensors and all(variables.get(name) == shape for name, shape in tensors.items()):  # a checkpoint of this model
        result.entries = {family.template(): From(family.template()) for family in _families(tensors)}
        missing = {path: shape for path, shape in variables.items() if path not in tensors}
        result.missing = [f"{family.template()!r} {list(family.shape)}" for family in _families(missing)]
        return result
    buffers = {name: shape for name, shape in tensors.items() if name.endswith(_BUFFERS)}
    result.ignore += [family.template() for family in _families(buffers)]
    left_out = set(computed)
    keys, ours = (
        _families({path: shape for path, shape in variables.items() if (path in left_out) == out})
        for out in (True, False)
    )
    theirs = _families({name: shape for name, shape in tensors.items() if name not in buffers})
    same = {family.place for family in (*keys, *ours)} & {family.place for family in theirs}
    result.entries = {family.template(): None for family in keys}
    result.entries |= {each.template(): From(each.template()) for each in theirs if each.place in same}
    mine, others = ([family for family in some if family.place not in same] for some in (ours, theirs))
    matcher = _Matcher(mine, others, result)
    matcher.match_one_to_one({"weight"})
    matcher.match_one_to_one({"bias", "mean", "variance"})
    matcher.cut_fused()
    matcher.join_separate()
    matcher.reuse_tied()
    matcher.pad_vocabulary()
    result.missing, result.unused = (
        [f"{family.template()!r} {list(family.shape)}" for family in left] for left in (matcher.ours, matcher.theirs)
    )
    order = {family.template(): place for place, family in enumerate(ours)}
    result.entries = dict(sorted(result.entries.items(), key=lambda item: order.get(item[0], len(order))))
    return result


class _Matcher:
    """Tensors and variables that are still to be matched, and the matches."""

    def __init__(self, ours: list[_Family], theirs: list[_Family], result: Suggestion) -> None:
        self.ours, self.theirs, self._result = list(ours), theirs, result
        # A word that many names have means little; a word of a single kind of weight means a lot.
        counts = Counter(word for family in (*ours, *theirs) for word in family.words)
        self._weight = {word: 1 / (1 + math.log(count)) for word, count in counts.items()}
        self._tables = [t for t in theirs if {"token", "embed"} <= t.words]
        self._layers: dict[str, str] = {}  # layer of each variable whose weight was matched → layer of its tensor
        self._out_first = any(t.text[-1].endswith(".weight") for t in theirs)  # True if kernels are (out, in)
        self._certain = False  # True if a kernel here confirmed it

    def match_one_to_one(self, kinds: set[str]) -> None:
        """Matches families one to one, with the best total score; biases follow their kernels, matched before."""
        kept = {
            *self._fused(self.ours, self.theirs, _ways),
            *self._fused(self.theirs, self.ours, lambda t, v: _ways(v, t)),
        }
        ours, theirs = ([f for f in some if f.kind in kinds and f not in kept] for some in (self.ours, self.theirs))
        scores, pairs = self._assigned(ours, theirs)
        votes = Counter[bool]()  # how many kernels are (out, in), from unambiguous shapes
        for v, t in ((ours[row], theirs[column]) for row, column in pairs if "weight" in kinds):
            found = [a for way in _ways(v, t) for a in _arrangements(way.layer(t.shape), way.target)]
            if len(found) == 1 and found[0].of_matrix and "embed" not in v.words:
                votes[found[0].out_first(v)] += 1
        if votes:
            self._out_first, self._certain = votes[True] >= votes[False], True
            scores, pairs = self._assigned(ours, theirs)
        columns = range(len(theirs))
        for row, column in pairs:
            v, t, least = ours[row], theirs[column], scores[row][column] - _CLOSE
            near = [repr(theirs[c].template()) for c in columns if c != column and scores[row][c] >= least]
            why = f"{' and '.join(near[:2])} would fit as well" if near else ""
            if not near and self._shared(v, t) < _ALIKE and self._layers.get(v.layer) != t.layer:
                why = "the names have little in common"
            self._layers.setdefault(v.layer, t.layer)
            self._add(v, [t], t.shape, why)
            self.ours.remove(v)
            self.theirs.remove(t)

    def _assigned(self, ours: list[_Family], theirs: list[_Family]) -> tuple[list[list[float]], list[tuple[int, int]]]:
        """All scores, and the selected pairs: rows are variables, columns tensors."""
        # JAX depends on scipy; importing it takes long, so it is imported here.
        from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

        if not ours or not theirs:
            return [], []
        scores = [[self._score(v, t) for t in theirs] for v in ours]
        found = cast(Any, optimize).linear_sum_assignment(scores, maximize=True)
        pairs: list[tuple[int, int]] = []
        for row, column in zip(*(map(int, numbers) for numbers in found), strict=True):
            others = [scores[row][c] for c in range(len(theirs)) if c != column]
            others += [scores[r][column] for r in range(len(ours)) if r != row]
            if scores[row][column] >= _LEAST or (scores[row][column] and not any(others)):
                pairs.append((row, column))
        return scores, pairs

    def cut_fused(self) -> None:
        """Several variables from parts of one tensor: queries, keys and values, or a gate and its factor."""
        for t in [t for t in self.theirs if len(t.roles) > 1]:
            members = self._of_roles(t, [(v, _ways(v, t)) for v in self.ours])
            if members is None:
                continue
            layers = [t.shape[found[0].axis] if found[0].taken else 1 for _, found in members]
            sizes = [math.prod(found[0].target) * n for n, (_, found) in zip(layers, members, strict=True)]
            axes = range(len(t.shape)) if self._out_first else reversed(range(len(t.shape)))
            for axis in sorted(
                axes, key=lambda axis: t.shape[axis] != len(t.roles)
            ):  # an axis of the parts alone first
                rest = max(math.prod(t.shape) // max(t.shape[axis], 1), 1)
                extents = [size // rest for size in sizes]
                parts = [(*t.shape[:axis], extent, *t.shape[axis + 1 :]) for extent in extents]
                ways = [w[0] for _, w in members]
                fit = all(_arrangements(way.layer(part), way.target) for part, way in zip(parts, ways, strict=True))
                if sum(extents) == t.shape[axis] and fit:
                    of = len(extents) if len(set(extents)) == 1 else extents
                    why = f"taken to be {', '.join(t.roles)} one after the other; some models interleave them"
                    why += " by head" * ("query" in t.roles or "key" in t.roles)
                    for index, (v, _) in enumerate(members):
                        self._add(v, [t], parts[index], why, part=(index, of, axis))
                    self.ours = [v for v in self.ours if all(v is not member for member, _ in members)]
                    self.theirs.remove(t)
                    break

    def join_separate(self) -> None:
        """One variable from several tensors, the inverse of `cut_fused`."""
        for v in [v for v in self.ours if len(v.roles) > 1]:
            members = self._of_roles(v, [(t, _ways(v, t)) for t in self.theirs])
            tensors = [t for t, _ in members or ()]
            if not tensors or any(t.indexes != tensors[0].indexes for t in tensors):
                continue
            if fitting := self._fitting(v, tensors, tensors[0].shape):
                why = f"joined in the order {', '.join(v.roles)}"
                whole = fitting[0][2][0].joined is None
                self._add(v, tensors, tensors[0].shape, why + "; some models interleave them" * whole)
                self.ours.remove(v)
                self.theirs = [t for t in self.theirs if t not in tensors]

    def reuse_tied(self) -> None:
        """A head without its own tensor: many models use the table of tokens for it."""
        for v in [v for v in self.ours if "head" in v.words]:
            if t := next((t for t in self._tables if _arrangements(t.shape, v.shape)), None):
                self._add(v, [t], t.shape, "there is no tensor of this name: tied to the table of tokens?", tied=True)
                self.ours.remove(v)

    def pad_vocabulary(self) -> None:
        """A table of tokens, or a head, of a few more or fewer tokens."""
        for v in [v for v in self.ours if v.words & {"embed", "head"} and len(v.indexes) == 1]:
            fit = [t for t in self.theirs if t.kind == v.kind and len(t.indexes) == 1 and self._shared(v, t) >= _ALIKE]
            for t in sorted(fit, key=lambda t: -self._shared(v, t)):
                whole = From(t.template())
                if source := resized(t.shape, v.shape, whole) or resized(t.shape[::-1], v.shape, whole.T):
                    break
            else:
                continue
            self._result.entries[v.template()] = source
            self._result.unsure[v.template()] = f"{list(t.shape)} taken to be {list(v.shape)} but for padding"
            self.ours.remove(v)
            self.theirs.remove(t)

    def _of_roles(
        self, fused: _Family, found: list[tuple[_Family, list[_Way]]]
    ) -> list[tuple[_Family, list[_Way]]] | None:
        """For each role of a fused weight, the family of this role alone that shares most words with it."""
        members: list[tuple[_Family, list[_Way]]] = []
        for role in fused.roles:
            fit = [(f, w) for f, w in found if f.roles == (role,) and f.kind == fused.kind and w]
            if not fit:
                return None
            members.append(max(fit, key=lambda one: self._shared(one[0], fused)))
        return members

    def _fused(
        self, some: list[_Family], others: list[_Family], ways: Callable[[_Family, _Family], list[_Way]]
    ) -> Iterator[_Family]:
        """Fused weights, and others that have as many elements together: those are not matched one to one."""
        for fused in [f for f in some if len(f.roles) > 1]:
            members = [f for f, _ in self._of_roles(fused, [(f, ways(fused, f)) for f in others]) or ()]
            alone = (f for f in others if (f.roles, f.kind, f.elements) == (fused.roles, fused.kind, fused.elements))
            if sum(f.elements for f in members) == fused.elements and next(alone, None) is None:
                yield from (fused, *members)

    def _joining_axis(self, tensors: Sequence[_Family], way: _Way) -> int:
        """The axis of layers along which tensors are joined: the one in which they differ, or that of outputs."""
        sizes = [set(each) for each in zip(*(way.layer(t.shape) for t in tensors), strict=False)]
        usual = 0 if self._out_first or tensors[0].kind == "bias" else min(1, len(sizes) - 1)
        return next((axis for axis, each in enumerate(sizes) if len(each) > 1), usual)

    def _fitting(
        self, v: _Family, tensors: Sequence[_Family], shape: _Shape
    ) -> list[tuple[_Way, _Shape, list[_Arrangement]]]:
        """Ways to make a variable of a tensor of this shape, or of several, each with what is arranged."""
        fitting: list[tuple[_Way, _Shape, list[_Arrangement]]] = []
        for way in _ways(v, tensors[0]):
            layer = way.layer(shape)
            if len(tensors) > 1 and layer:
                axis, layers = self._joining_axis(tensors, way), [way.layer(t.shape) for t in tensors]
                if found := _arrangements_of_parts(layers, axis, way.target):
                    fitting.append((way, (len(layers), *layer), found))
                    continue
                if any((*each[:axis], *each[axis + 1 :]) != (*layer[:axis], *layer[axis + 1 :]) for each in layers):
                    continue
                layer = (*layer[:axis], sum(each[axis] for each in layers), *layer[axis + 1 :])
            if found := _arrangements(layer, way.target):
                fitting.append((way, layer, found))
        return fitting

    def _shared(self, v: _Family, t: _Family) -> float:
        """The weighted share of words that two names have in common."""
        # Rounded once, since sets have another order in every process.
        total, common = (
            math.fsum(self._weight[word] for words in some for word in words)
            for some in ((v.words, t.words), (v.words & t.words,) * 2)
        )
        return common / total if total else 0.0

    def _score(self, v: _Family, t: _Family) -> float:
        """The likelihood of a match: 0 if impossible, up to 1, and more if the layer was matched before."""
        if v.kind != t.kind or v.elements != t.elements:
            return 0.0
        found = [a for way in _ways(v, t) for a in _arrangements(way.layer(t.shape), way.target)]
        if not found:
            return 0.0
        spelled = 2 * len(v.spelled & t.spelled) / max(len(v.spelled) + len(t.spelled), 1)
        same_layer = 0.5 * (self._layers.get(v.layer) == t.layer)
        kernel = self._certain and found[0].of_matrix and "embed" not in v.words
        turned = 0.3 * (kernel and all(a.out_first(v) != self._out_first for a in found))
        return 0.02 + max(0.78 * self._shared(v, t) + 0.2 * spelled + same_layer - turned, 0)

    def _add(
        self,
        v: _Family,
        tensors: Sequence[_Family],
        shape: _Shape,
        why: str,
        *,
        part: tuple[int, int | list[int], int] | None = None,
        tied: bool = False,
    ) -> None:
        """Adds an entry: the variable from these tensors, or from a part of one, which then has this shape."""
        fitting = self._fitting(v, tensors, shape)
        way, shape, found = fitting[0]
        # Tables of tokens as they are, kernels like most kernels of this checkpoint.
        matrix = found[0].of_matrix
        usual = "embed" in v.words or not matrix
        likely = (a for a in found if (a.usual(v) if usual else a.out_first(v) == self._out_first))
        chosen, reasons = next(likely, found[0]), [why] if why else []
        if len(found) > 1 and "embed" not in v.words:
            stored = ("(out, in)" if self._out_first else "(in, out)") if matrix else "as is usual"
            like = ", as others here are" if matrix and self._certain else ""
            ways_text = f"{list(shape)} can become {list(way.target)} in {len(found)} ways"
            reasons.append(f"{ways_text}; taken to be {stored}{like}")
        if len(fitting) > 1:
            reasons.append("its indexes could be exchanged")
        names = [tensor.template(way.captures) for tensor in tensors]
        source = From(*names)
        if len(tensors) > 1:
            axis = self._joining_axis(tensors, way)
            axis += bool(way.taken) and way.axis <= axis
            source = From(*names, axis=axis, sizes=[tensor.shape[axis] for tensor in tensors])
        source = source if part is None else source.part(*part)
        source = chosen.add(source.take(way.taken, way.axis) if way.taken else source, v, shape)
        for capture in reversed(way.stacked):
            source = source.stack(capture, way.axis)
        self._result.entries[v.template()] = source.unsaved() if tied else source
        if reasons:
            self._result.unsure[v.template()] = "; ".join(reasons)

"""A variable's role, told from its path, its shape and its neighbours; and which other variable it belongs to.

Roles are guesses, and a wrong one costs speed, never correctness: every sharding computes the same values. What is made
of them is decided in `_sharding/auto`, which places labels on mesh axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from lazymodel._abstract.paths import rule_path
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._sharding.axis_names import AXIS_NAMES, LAYERS, role_of_names
from lazymodel._sharding.geometry import aligned, attention_labels, stacked_labels, told_by
from lazymodel._sharding.order import biases, name_tells, orders
from lazymodel._sharding.roles import FUSED_HEADS, HEADS, ROLES, Role

_WEIGHT = r"(_?kernel|weight|weights|w|embeddings?)$"
_ATTENTION = re.compile(r"(^|[/_])(\w*attention\w*|\w*attn\w*|mha|sdpa)(_\d+)?/")
_MLP = re.compile(r"feed_?forward|mlp|ffw|ffn|intermediate|(^|/)(up|down|fc_?[12])(_proj)?(/|$)")
_SLOT = re.compile(r"(^|/)(opt\w*|adam\w*|sgd|mu|nu|trace|ema\w*|momentum|velocity|acc\w*|v_row|v_col|avg\w*)/")
_NORM_VECTOR = re.compile(r"(norm|(^|[/_])ln)[^/]*(/(scale|weight|w|gamma|bias|offset))?$")
# Parameters that are called as layers are, without a `kernel` of their own.
_LEAF = re.compile(
    r"(^|/)[a-z_\d]*(proj|einsum|linear|w[qkvio123]|wi_\d)(_\d)?$|(mlp|ffw|ffn|feed_?forward)[^/]*/(up|gate|down)$"
)
_LEAF_OF_ATTENTION = re.compile(r"(^|/)(q|k|v|o|query|key|value|out|output)$")
_ROUTER = re.compile(r"^(?!.*(bias|/b)$).*(router|(^|[/_])gate(/|$)|gate_logits)")
_NUMBERED = re.compile(r"(^|[/_])(linear|dense)_?[12]/")  # from nought or one, so a shape says more
_QUERY_AND_KEY = [
    (form.format(query), form.format(key))
    for query, key in (("q", "k"), ("query", "key"), ("q", "kv"))
    for form in ("{}", "w{}", "{}_proj", "proj_{}", "to_{}", "{}_einsum", "linear_{}")
]
_LOW_RANK = re.compile(r"(^|[/_])[qkv]_?[ab](_|/|$)")
_HEAD_NORM = re.compile(r"(^|[/_])(q|k|query|key)_?(dense_?|layer_?)*norm\w*/[a-z]+$")


@dataclasses.dataclass(frozen=True)
class Described:
    """What is known of a variable."""

    role: str  # a name of `ROLES`
    labels: tuple[str, ...]  # one for each dimension
    units: tuple[int, ...]  # for each, how many parts at most keep its units whole: heads, where it holds heads
    follows: str | None = None  # the path of the variable that it belongs to and is split like, and
    dims: tuple[int | None, ...] = ()  # for each of its dimensions, which one of that variable, or None
    told_from: str = ""  # what it was told from, for people, and whether that is a guess
    ordered: bool = True  # whether the order of its dimensions is known
    guessed: bool = False  # whether its role is a guess
    bank: bool = False  # whether experts lie in a layer of their own, which runs all of them, and not beside a router


def describe(variables: Mapping[str, AbstractVariable]) -> dict[str, Described]:
    """The role of every variable, from all of them together."""
    describer = _Describer(variables)
    return {path: describer.described(path) for path in variables}


class _Describer:
    def __init__(self, variables: Mapping[str, AbstractVariable]) -> None:
        self._variables = variables
        self._names = {path: rule_path(path).lower() for path in variables}
        self._stacks = _stacks(variables, self._names)
        inner = {path: self._inner(path) for path in variables}
        self._biases = biases(self._names, inner)
        self._orders = orders(self._names, inner, self._biases)
        self._children: dict[str, list[str]] = {}
        for path in variables:
            self._children.setdefault(_parent(path), []).append(path)
        self._layers: dict[str, list[str]] = {}
        for place in dict.fromkeys(place for path in variables for place in _places(path)):
            if place:
                self._layers.setdefault(_parent(place), []).append(place)
        self._flat = {self._names[path].replace("/", "_"): path for path in reversed(list(variables))}
        self._by_name = {self._names[path]: path for path in reversed(list(variables))}
        for path in variables:
            # (model, optimizer): the optimizer's paths do not know that the model is the first of two.
            self._by_name.setdefault(self._names[path].partition("/")[2], path)
        self._with_keys = self._have_keys()
        self._qkv_widths: dict[str, frozenset[int]] = {}
        self._outputs: dict[str, list[tuple[int, ...]]] = {}
        self._norms, self._word_widths = self._widths()
        self._head_dims, self._head_counts = self._evidence()  # prefix → number, where all evidence below it agrees

    def described(self, path: str) -> Described:
        variable, shape = self._variables[path], self._inner(path)
        if (named := self._by_axis_names(path, variable)) is not None:
            return named
        found = self._one(path, variable, shape)
        if found.role.startswith("expert") and "expert" in self._names[path]:
            found = dataclasses.replace(found, bank=True)
        if len(shape) == len(variable.shape):
            return found
        dims = found.dims
        if found.follows in self._stacks:
            dims = (0, *(None if dim is None else dim + 1 for dim in dims))
        elif found.follows is not None:
            dims = (None, *dims)
        labels, units = ("layers", *found.labels), (variable.shape[0], *found.units)
        return dataclasses.replace(found, labels=labels, units=units, dims=dims)

    def _by_axis_names(self, path: str, variable: AbstractVariable) -> Described | None:
        """What the model itself says of a variable's dimensions, where that tells its role."""
        axes, n = variable.logical_axes or (), len(variable.shape)
        if not any(axes) or len(axes) > n:
            return None
        names = (*axes, *(None,) * (n - len(axes)))
        is_output = next(
            (
                role == "attention_output"
                for role in ("fused_query_key_value", "query_key_value", "attention_output")
                if re.search(ROLES[role].pattern, self._tail(path))
            ),
            None,
        )
        if (found := role_of_names(names, is_output)) is None:
            return None
        role, labels = found
        if path in self._stacks and names[0] is None:
            labels = ("layers", *labels[1:])
        joined = HEADS in labels and "head_dim" not in labels
        units = tuple(
            self._heads_in(path, size) if joined and label == HEADS else size
            for label, size in zip(labels, variable.shape, strict=True)
        )
        return Described(role, labels, units, told_from=f"axis names {names}, which the model gives")

    def _one(self, path: str, variable: AbstractVariable, shape: tuple[int, ...]) -> Described:
        """A variable's role, of its shape in one layer."""
        name, n = self._names[path], len(shape)
        if not shape or variable.is_key or "seed_generator" in name:
            return self._labelled("state", path, shape)
        if (slot := self._slot(path, variable)) is not None:
            return slot
        for row in ROLES.values():
            if row.within or n not in row.ndims or not re.search(row.pattern, name):
                continue
            if row.name == "embedding" and path in self._biases:
                continue  # a layer with a bias is no table
            if row.name == "embedding" and self._is_one_of_several(path, shape):
                return self._labelled("lookup_table", path, shape, "another table of its shape in the same layer")
            if row.name in ("lora", "scale", "bias") and (found := self._follower(path, row.name, shape)) is not None:
                return found
            if row.name.startswith("expert") and (found := self._stacked(path, shape, row.name)) is not None:
                return found
            if row.name != "bias" or n == 1 or _ATTENTION.search(name) is not None:
                return self._labelled(row.name, path, shape)
        if n < 2 or not np.prod(shape):
            return self._labelled("other", path, shape)
        if n < 5 and (found := self._stacked(path, shape)) is not None:
            return found
        tail = self._tail(path)
        attention = (
            _ATTENTION.search(name) is not None or not self._with_keys.isdisjoint(itertools.islice(_places(path), 2))
        ) and not _MLP.search(tail)
        if n == 3 and not attention and self._biases.get(path) == (shape[0], shape[-1]):  # an ensemble's
            return Described("other", ("members", "in", "out"), shape, told_from="its bias")
        is_leaf = _LEAF.search(name) or (attention and _LEAF_OF_ATTENTION.search(name))
        if not re.search(_WEIGHT, name) and not is_leaf:
            return self._labelled("other", path, shape)
        if n < 5 and (attention or n == 3):
            for row in ROLES.values():
                if row.within == "attention" and n in row.ndims and re.search(row.pattern, tail):
                    if row.labels != Role.labels:
                        return self._labelled(row.name, path, shape)
                    return self._projection(row.name, path, shape, known=attention)
            if n < 4 and attention:
                role = "fused_query_key_value" if n == 2 and shape[1] == 3 * shape[0] else "query_key_value"
                role = "attention_output" if self._is_left_over(path) else role
                return self._projection(role, path, shape, guess=True)
        if n >= 3:
            return self._labelled("other" if n == 3 else "convolution", path, shape)
        if "conv" in name and min(shape) <= 8 < max(shape):
            labels = ("space", "out") if shape[0] < shape[1] else ("out", "space")
            return Described("depthwise_convolution", labels, shape, told_from="its name, and its smaller dimension")
        beside = self._layer(_parent(_parent(path))) if name.split("/")[-2:-1] == ["gate"] else ()
        if any("expert" in self._names[other] for other in beside):
            return self._labelled("router", path, shape)
        return self._dense(path, shape)

    def _stacked(self, path: str, shape: tuple[int, ...], role: str = "") -> Described | None:
        """Matrices stacked on a leading dimension: experts, the parts of a gated layer, blocks of a diagonal.

        `role` is what the name says, where it says anything.
        """
        n, tail, widths = len(shape), self._tail(path), self._widths_at(path)
        if n < 3 or re.search(r"bias|norm|scale", tail.split("/")[-1]):
            return None
        if not role and n == 3 and shape[1] == shape[2] and self._blocks(path, shape):
            source = f"its shape: {shape[0]} blocks of {shape[1]} are the {shape[0] * shape[1]} of a vector beside it"
            return Described("block_diagonal", ROLES["block_diagonal"].labels, shape, told_from=source)
        up = bool(re.search(ROLES["mlp_up"].pattern, tail))
        down = not up and bool(re.search(rf"{ROLES['mlp_down'].pattern}|(^|/)linear$", tail))
        stack, source = "experts", "its name"
        if not role and (router := self._router_of(path, shape)) is not None:
            source = f"{router}, which has as many outputs"
            narrows = not up and n == 3 and widths[:1] == [shape[2]] != [shape[1]]
            role = "expert_down" if down or narrows else "expert_up"
        elif not role and n == 3 and shape[0] in (2, 3) and (up or _MLP.search(tail)) and not _ATTENTION.search(tail):
            role, stack = ("mlp_down" if down else "mlp_up"), "parts"
        if not role:
            return None
        out_first = tail.endswith(("weight", "weights")) and stack == "parts"
        labels, told = stacked_labels(shape, widths, stack, up=role.endswith("up"), out_first=out_first)
        ordered = told is not None or name_tells(tail)
        return Described(role, labels, shape, told_from=f"{source}; {told_by(told)}", ordered=ordered)

    def _labelled(
        self, role: str, path: str, shape: tuple[int, ...], source: str = "its name", *, guess: bool = False
    ) -> Described:
        """Roles whose dimensions follow from their number."""
        row = ROLES[role]
        labels = row.label(len(shape), out_first=row.turns and self._out_first(path))
        source = "" if role in ("other", "state") else source
        ordered = not row.turns or path in self._orders
        source += "" if ordered else f"; {told_by(None)}"
        return Described(role, labels, shape, told_from=source, ordered=ordered, guessed=guess)

    def _dense(self, path: str, shape: tuple[int, ...]) -> Described:
        """A matrix outside attention: by name, or else one that widens is `up` and one that narrows `down`."""
        size_in, size_out = shape[::-1] if self._out_first(path) else shape
        up, down = (bool(re.search(ROLES[name].pattern, self._tail(path))) for name in ("mlp_up", "mlp_down"))
        by_name = up != down and (size_in == size_out or not _NUMBERED.search(self._tail(path)))
        narrows = down if by_name else size_out < size_in
        source = "its name" if by_name else f"its shape, which {'narrows' if narrows else 'does not narrow'}"
        return self._labelled("mlp_down" if narrows else "mlp_up", path, shape, source, guess=not by_name)

    def _projection(
        self, role: str, path: str, shape: tuple[int, ...], *, guess: bool = False, known: bool = True
    ) -> Described:
        """A weight of attention: which dimension counts the heads. `known` is whether it is in attention."""
        output, fused = role == "attention_output", role.startswith("fused")
        source = "a guess: it is in attention, and its name says nothing known" if guess else "its name"
        if len(shape) == 2:
            turn = -1 if self._out_first(path) else 1
            source += "" if (ordered := path in self._orders) else f"; {told_by(None)}"
            size_in, size_out = shape[::turn]
            heads = self._heads_in(path, size_in if output else size_out)
            labels, units = (HEADS, "out"), (heads, size_out)
            if not output:
                labels, units = ("in", FUSED_HEADS if fused else HEADS), (size_in, 1 if fused else heads)
            return Described(role, labels[::turn], units[::turn], told_from=source, ordered=ordered, guessed=guess)
        widths = self._widths_at(path, attention=True)
        labels, told = attention_labels(shape, widths, output=output, fused=fused)
        if guess and told is not None and shape[-1] == told != shape[0]:
            role, (labels, told) = "attention_output", attention_labels(shape, widths, output=True, fused=False)
        joined, sizes = "head_dim" not in labels, zip(labels, shape, strict=True)
        units = tuple(self._heads_in(path, size) if joined and label == HEADS else size for label, size in sizes)
        source, ordered = f"{source}; {told_by(told)}", known and (told is not None or name_tells(self._names[path]))
        return Described(role, labels, units, told_from=source, ordered=ordered, guessed=guess or not known)

    # --- neighbours ---

    def _follower(self, path: str, role: str, shape: tuple[int, ...]) -> Described | None:
        """A LoRA factor, scale or bias: the weight in the same layer (or one level up or down) that it belongs to."""
        parent = _parent(path)
        leaf = self._names[path].split("/")[-1]
        places = [f"{place}{below}" for below in ("", "/base_module") for place in (parent, _parent(parent))]
        stem = re.sub(r"(_scale|_zero|_zero_point|_?bias)$", "", leaf)
        for place in places if role == "lora" else places[:1]:
            leaves = {o: self._names[o].split("/")[-1] for o in self._children.get(place, ()) if o != path}
            weights = [
                other
                for other, name in leaves.items()
                if len(self._variables[other].shape) >= 2 and not re.search(r"lora_|_scale$|_zero|bias$|_(a|b)$", name)
            ]
            named = [other for other in weights if leaves[other] in (stem, f"_{stem}") and stem]
            for other in named or weights:
                if role == "bias" and sum(n > 1 for n in shape) >= sum(n > 1 for n in self._inner(other)):
                    continue  # a weight that is called `b`
                if (dims := self._factor_dims(leaf, role, shape, other)) is not None:
                    own = "rank" if role == "lora" else "dimension"
                    labels = tuple(own if d is None else "of its weight" for d in dims)
                    return Described(role, labels, shape, other, dims)
        return None

    def _factor_dims(self, leaf: str, role: str, shape: tuple[int, ...], other: str) -> tuple[int | None, ...] | None:
        weight = self._inner(other)
        if role == "lora":
            n = len(shape)
            if leaf.endswith("_a"):
                return (*range(n - 1), None) if shape[:-1] == weight[: n - 1] else None
            return (*(None,) * (n - 1), len(weight) - 1) if shape[-1] == weight[-1] else None
        packs = role == "scale" and len(shape) == len(weight) == 2 and self._variables[other].dtype == np.int8
        if packs and any(-(-size // 2) == packed for size, packed in zip(shape, weight, strict=True)):
            # Two 4-bit numbers share a byte, and a group of them a scale: the same dimensions, of other extents.
            return (0, 1)
        embedding = "embedding" in self._names[other].split("/")[-1]
        out_first = not embedding and len(weight) == 2 and self._out_first(other)
        return aligned(shape, weight, from_left=embedding or out_first)

    def _slot(self, path: str, variable: AbstractVariable) -> Described | None:
        """An optimizer's slot: its path holds that of a variable, and its shape is the same or lacks a dimension."""
        parts = self._names[path].split("/")
        candidates = ["/".join(parts[start:]) for start in range(1, len(parts))]
        found = None  # Keras names slots `adam/dense_kernel_momentum`, Optax `0/mu/dense/kernel`
        if _SLOT.search(path.lower()):
            found = next((self._by_name[c] for c in candidates if self._by_name.get(c, path) != path), None)
        if found is None:
            words = parts[-1].split("_")
            stems = ["_".join(words[:end]) for end in range(len(words) - 1, max(len(words) - 4, 0), -1)]
            found = next((self._flat[stem] for stem in stems if "_" in stem and stem in self._flat), None)
        if found is None or found == path:
            return None
        shape, other = variable.shape, self._variables[found].shape
        lacks = len(shape) < len(other)
        dims = aligned(shape, other, from_left="col" not in parts[-1]) if lacks else tuple(range(len(shape)))
        if dims is None or not (lacks or shape == other):
            return None
        stack = int(path in self._stacks)
        inner = tuple(None if dim is None else dim - stack for dim in dims[stack:])
        return dataclasses.replace(self._labelled("optimizer_slot", path, shape[stack:]), follows=found, dims=inner)

    def _out_first(self, path: str) -> bool:
        """Whether a weight is stored as (out, in), as PyTorch and Equinox do where it is called `weight`."""
        return self._orders.get(path, self._names[path].rpartition("/")[2] in ("weight", "weights"))

    def _matrices_around(self, path: str) -> list[str]:
        """The other matrices of the layer that a weight, or the layer whose weight it is, lies in."""
        home = _parent(_parent(path) if re.search(rf"(^|/){_WEIGHT}", self._names[path]) else path)
        return [o for o in self._layer(home) if home and o != path and len(self._inner(o)) == 2]

    def _is_one_of_several(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether a table has another of its shape in the same layer, as those of PEER have: not the one of words."""
        alike = (self._names[other] for other in self._matrices_around(path) if self._inner(other) == shape)
        return any(re.search(ROLES["embedding"].pattern, name) for name in alike)

    def _is_left_over(self, path: str) -> bool:
        """Whether all other matrices of its attention are of queries, keys and values, by name: the output is left."""
        patterns = [ROLES[name].pattern for name in ("fused_query_key_value", "query_key_value")]
        found = [[re.search(each, self._tail(other)) for each in patterns] for other in self._matrices_around(path)]
        return all(map(any, found)) and (len(found) >= 3 or any(fused for fused, _ in found))

    def _widths_at(self, path: str, *, attention: bool = False) -> list[int]:
        """What the model's width may be where the variable is, surest first: of norms, output projections, words."""
        widths = [width for place in _places(path) if (width := self._norms.get(place)) is not None][:1]
        for place in itertools.islice(_places(path), 3) if attention and not widths else ():
            widths += [shape[-1] for shape in self._outputs_in(place) if shape != self._inner(path)][:1]
        return [*widths, *self._word_widths]

    def _outputs_in(self, place: str) -> list[tuple[int, ...]]:
        """Shapes of the output projections in a layer that have a dimension of heads."""
        if place not in self._outputs:
            found = [self._inner(o) for o in self._layer(place) if len(self._inner(o)) == 3 and self._is_output(o)]
            self._outputs[place] = list(dict.fromkeys(found))
        return self._outputs[place]

    def _is_output(self, path: str) -> bool:
        return re.search(ROLES["attention_output"].pattern, self._tail(path)) is not None

    def _router_of(self, path: str, shape: tuple[int, ...]) -> str | None:
        """The router beside experts: one output for each, of the width that they take or give."""
        for place in itertools.islice(_places(path), 2):
            for other in self._layer(place) if place else ():
                name, sizes = "/".join(self._names[other].split("/")[-2:]), self._inner(other)
                if other == path or len(sizes) != 2 or not _ROUTER.search(name):
                    continue
                if any(sizes[i] == shape[0] and sizes[1 - i] in shape[1:] for i in (0, 1)):
                    return other
        return None

    def _blocks(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the blocks of a diagonal make up a vector in the same layer, and none is a model's whole width."""
        size = shape[0] * shape[1]
        return any(
            self._inner(other) in ((size,), shape[:2])
            for place in itertools.islice(_places(path), 2)
            for other in self._children.get(place, ())
        )

    def _have_keys(self) -> frozenset[str]:
        """The layers whose parts are called as queries and keys are, whatever they are called themselves."""
        names: dict[str, set[str]] = {}
        for place, inside in (*self._children.items(), *self._layers.items()):
            names.setdefault(place, set()).update(path.rpartition("/")[2].lower() for path in inside)
        return frozenset(place for place, has in names.items() if any(q in has and k in has for q, k in _QUERY_AND_KEY))

    def _layer(self, prefix: str) -> Iterator[str]:
        """The variables of a layer and of the layers below it, two levels deep."""
        yield from self._children.get(prefix, ())
        for level in self._layers.get(prefix, ()):
            for below in (level, *self._layers.get(level, ())):
                yield from self._children.get(below, ())

    def _widths(self) -> tuple[dict[str, int], list[int]]:
        """The model's width by place, where all norms below agree, and the columns of its tables of words."""
        norms: dict[str, set[int]] = {}
        words: dict[int, None] = {}
        for path, name in self._names.items():
            shape = self._inner(path)
            if len(shape) == 1 and _NORM_VECTOR.search(name) and not _HEAD_NORM.search(name):
                _note(norms, path, shape[0])
            elif len(shape) == 2 and re.search(ROLES["embedding"].pattern, name):
                words[shape[-1]] = None
        return {place: sizes.pop() for place, sizes in norms.items() if len(sizes) == 1}, list(words)

    def _evidence(self) -> tuple[dict[str, int], dict[str, int]]:
        """Heads as other variables show them: norms of a head's width, and tables with a column for each head."""
        head_dims: dict[str, set[int]] = {}
        counts: dict[str, set[int]] = {}
        for path, name in self._names.items():
            shape = self._inner(path)
            if _HEAD_NORM.search(name) and len(shape) == 1:
                _note(head_dims, path, shape[0])
            elif len(shape) == 3 and re.search(_WEIGHT, name) and _ATTENTION.search(name):
                if re.search(r"(^|_)q(_|$)|que", name.split("/")[-2]):
                    labels, _ = attention_labels(
                        shape, self._widths_at(path, attention=True), output=False, fused=False
                    )
                    _note(counts, path, shape[labels.index(HEADS)])
            elif re.search(r"attention\w*/embeddings$|relative_(attention|position)_bias", name) and len(shape) == 2:
                _note(counts, path, shape[1])
        dims, heads = ({place: n.pop() for place, n in all.items() if len(n) == 1} for all in (head_dims, counts))
        return dims, heads

    def _heads_in(self, path: str, size: int) -> int:
        """How many heads a dimension of so many columns holds, at least: what is unknown is not split.

        Without evidence, pieces of 128 columns hold whole heads of 16, 32, 64 and 128, which nearly all models have; of
        64 where queries, keys and values are equally wide and have 1024 columns or fewer, as in BERT, T5 and ViT. Heads
        that are made of latents may be cut: adding up what latents give costs more.
        """
        if any(re.search(ROLES["latent_up"].pattern, self._tail(other)) for other in self._matrices_around(path)):
            return size
        for place in _places(path):
            head_dim, count = self._head_dims.get(place, size), self._head_counts.get(place)
            if head_dim < size and size % head_dim == 0:
                return size // head_dim
            if count is not None and size % count == 0:
                return count
        # Queries and keys that differ in width have no head wider than their common divisor.
        widths = self._attention_widths(_parent(_parent(path)))
        piece = 64 if len(widths) == 1 and max(widths) <= 1024 else 128
        return max(size // piece if size % piece == 0 else 1, size // math.gcd(size, *widths))

    def _attention_widths(self, place: str) -> frozenset[int]:
        """The columns of the matrices for queries, keys and values in a layer."""
        if place not in self._qkv_widths:
            shapes = (
                self._inner(other)[:: -1 if self._out_first(other) else 1]
                for other in self._layer(place)
                if len(self._inner(other)) == 2
                and re.search(ROLES["query_key_value"].pattern, self._tail(other))
                and not _LOW_RANK.search(self._tail(other))
            )
            self._qkv_widths[place] = frozenset(columns for _, columns in shapes)
        return self._qkv_widths[place]

    def _tail(self, path: str) -> str:
        return "/".join(self._names[path].split("/")[-3:])

    def _inner(self, path: str) -> tuple[int, ...]:
        """The variable's shape in one layer, where it holds one slice for each."""
        return self._variables[path].shape[int(path in self._stacks) :]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _places(path: str) -> Iterator[str]:
    """What the path is in, from the inside to the whole model, which is ``""``."""
    while path:
        path = _parent(path)
        yield path


def _note(found: dict[str, set[int]], path: str, value: int) -> None:
    for place in _places(path):
        found.setdefault(place, set()).add(value)


def _stacks(variables: Mapping[str, AbstractVariable], names: Mapping[str, str]) -> frozenset[str]:
    """The variables that hold one slice for each layer, as `scan` over layers and `vmap` of a constructor make them.

    A part of the model is a stack if everything in it has the same leading size and a vector by name, a norm's scale,
    has two dimensions. Experts have a leading size of their own and are none.
    """
    leading: dict[str, set[int]] = {}
    vectors: set[str] = set()
    others: set[str] = set()  # a lone norm of two dimensions is no stack: its layer must hold something else
    for path, variable in variables.items():
        vector = bool(_NORM_VECTOR.search(names[path])) and len(variable.shape) == 2
        for place in _places(path):
            leading.setdefault(place, set()).add(variable.shape[0] if variable.shape else -1)
            (vectors if vector else others).add(place)
    stacks = {place for place in vectors & others if len(leading[place]) == 1 and "expert" not in place.lower()}
    said = {
        path
        for path, variable in variables.items()
        if AXIS_NAMES.get(str((variable.logical_axes or "-")[0]).lower()) == LAYERS
    }
    return frozenset(said | {path for path in variables if any(place in stacks for place in _places(path))})

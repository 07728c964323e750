"""The role of a variable, inferred from its path, shape and neighbours, and the variable that it belongs to.

Roles are guesses. A wrong one costs speed, never correctness: every sharding computes the same values. `lm.auto`
uses the labels of the roles to place dimensions on mesh axes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lazymodel._abstract.variable import AbstractVariable, rule_path
from lazymodel._sharding.roles import AXIS_NAMES, FUSED_HEADS, HEADS, LAYERS, ROLES, role_of_names

_WEIGHT_WORD = re.compile(r"(^|_)(kernel|weights?|w)(?=_?\d*$)|^(kernel|weights?|w)_")
_BIAS_WORD = re.compile(r"(^|_)(bias|b)(?=_?\d*$)|^(bias|b)_")
_CONVENTIONAL = ("weight", "weights", "w")  # (out, in) in PyTorch and Equinox, else (in, out): same throughout a model
_WEIGHT = r"(_?kernel|weight|weights|w|embeddings?)$"
_ATTENTION = re.compile(r"(^|[/_])(\w*attention\w*|\w*attn\w*|mha|sdpa)(_\d+)?/")
_MLP = re.compile(r"feed_?forward|mlp|ffw|ffn|intermediate|(^|/)(up|down|fc_?[12])(_proj)?(/|$)")
_SLOT = re.compile(r"(^|/)(opt\w*|adam\w*|sgd|mu|nu|trace|ema\w*|momentum|velocity|acc\w*|v_row|v_col|avg\w*)/")
_NORM_VECTOR = re.compile(r"(norm|(^|[/_])ln)[^/]*(/(scale|weight|w|gamma|bias|offset))?$")
# Parameters with the name of a layer, without a `kernel` of their own.
_LEAF = re.compile(
    r"(^|/)[a-z_\d]*(proj|einsum|linear|w[qkvio123]|wi_\d)(_\d)?$|(mlp|ffw|ffn|feed_?forward)[^/]*/(up|gate|down)$"
)
_LEAF_OF_ATTENTION = re.compile(r"(^|/)(q|k|v|o|query|key|value|out|output)$")
_ROUTER = re.compile(r"^(?!.*(bias|/b)$).*(router|(^|[/_])gate(/|$)|gate_logits)")
_NUMBERED = re.compile(r"(^|[/_])(linear|dense)_?[12]/")  # numbered from 0 or 1, so the shape decides
_QUERY_AND_KEY = [
    (form.format(query), form.format(key))
    for query, key in (("q", "k"), ("query", "key"), ("q", "kv"))
    for form in ("{}", "w{}", "{}_proj", "proj_{}", "to_{}", "{}_einsum", "linear_{}")
]
_LOW_RANK = re.compile(r"(^|[/_])[qkv]_?[ab](_|/|$)")
_HEAD_NORM = re.compile(r"(^|[/_])(q|k|query|key)_?(dense_?|layer_?)*norm\w*/[a-z]+$")
_HEAD_TABLE = re.compile(r"attention\w*/embeddings$|relative_(attention|position)_bias")


@dataclasses.dataclass(frozen=True)
class Described:
    """A variable's role, and the meaning of its dimensions."""

    role: str  # a name of `ROLES`
    labels: tuple[str, ...]  # one for each dimension
    units: tuple[int, ...]  # number of units in each dimension that parts should not cut: heads, if it holds heads
    follows: str | None = None  # the path of the variable that it belongs to and is split like
    dims: tuple[int | None, ...] = ()  # for each of its dimensions, the corresponding one of that variable, or None
    told_from: str = ""  # what it was inferred from, as text, with a remark if that is a guess
    ordered: bool = True  # True if the order of its dimensions is known
    guessed: bool = False  # True if its role is a guess
    bank: bool = False  # True if experts are in a layer of their own that runs all of them, without a router


class _Variable:
    """A variable, and what its path shows."""

    def __init__(self, path: str, name: str, variable: AbstractVariable, stacked: bool) -> None:
        self.path, self.variable, self.stacked = path, variable, stacked
        self.name = name  # the path as rules match it, in lower case
        self.shape = variable.shape[int(stacked) :]  # of one layer, if it holds a slice for each
        self.places = _places(path)
        self.parent, _, self.leaf = name.rpartition("/")
        self.tail = "/".join(name.split("/")[-3:])
        # A `kernel` is summed over all dimensions but the last.
        self.in_first = self.leaf in ("kernel", "_kernel") and "transpose" not in name

    def described(self, role: str, labels: Sequence[str], **rest: Any) -> Described:
        """The variable as `Described`, with each element of a dimension as a unit."""
        return Described(role, tuple(labels), self.shape, **rest)


def describe(variables: Mapping[str, AbstractVariable]) -> dict[str, Described]:
    """Path → role of every variable; neighbours count."""
    describer = _Describer(variables)
    return {path: describer.described(variable) for path, variable in describer.all.items()}


class _Describer:
    """The variables of a model by place, and what is inferred from them together: biases, widths, numbers of heads."""

    def __init__(self, variables: Mapping[str, AbstractVariable]) -> None:
        names = {path: rule_path(path).lower() for path in variables}
        stacks = _stacks(variables, names)
        self.all = {path: _Variable(path, names[path], each, path in stacks) for path, each in variables.items()}
        self._children: dict[str, list[_Variable]] = {}
        self._layers: dict[str, list[_Variable]] = {}  # the variables of a layer and of two levels of layers below it
        inside: dict[str, set[str]] = {}  # place → names of the parts of that layer
        for v in self.all.values():
            self._children.setdefault(v.places[0], []).append(v)
            for place in v.places[:3]:
                self._layers.setdefault(place, []).append(v)
            for part, place in zip((v.path, *v.places), v.places, strict=False):
                inside.setdefault(place, set()).add(part.rpartition("/")[2].lower())
        # Layers whose parts have names of queries and keys, whatever the name of the layer.
        self._with_keys = {
            place for place, has in inside.items() if any(q in has and k in has for q, k in _QUERY_AND_KEY)
        }
        backwards = list(reversed(self.all.values()))
        self._flat = {v.name.replace("/", "_"): v.path for v in backwards}
        self._by_name = {v.name: v.path for v in backwards}
        for v in self.all.values():
            # (model, optimizer): the optimizer's paths do not contain the first part, the model's index in the tuple.
            self._by_name.setdefault(v.name.partition("/")[2], v.path)
        self._biases = self._find_biases()
        self._orders = self._find_orders()  # path of a weight → True if it is stored as (out, in), where that is known
        norms = ((v, v.shape[0]) for v in self.all.values() if len(v.shape) == 1 and _NORM_VECTOR.search(v.name))
        self._norms = _agreed((v, size) for v, size in norms if not _HEAD_NORM.search(v.name))
        tables = (v for v in self.all.values() if len(v.shape) == 2 and ROLES["embedding"].fits(v.name))
        self._word_widths = list(dict.fromkeys(v.shape[-1] for v in tables))
        self._outputs: dict[str, list[tuple[int, ...]]] = {}  # shapes of a layer's output projections that have heads
        for place, layer in self._layers.items():
            found = (v.shape for v in layer if len(v.shape) == 3 and ROLES["attention_output"].fits(v.tail))
            self._outputs[place] = list(dict.fromkeys(found))
        # Heads inferred from other variables: norms of a head's width, and tables with a column for each head.
        head_norms = (v for v in self.all.values() if len(v.shape) == 1 and _HEAD_NORM.search(v.name))
        self._head_dims = _agreed((v, v.shape[0]) for v in head_norms)
        self._head_counts = _agreed(
            (v, count) for v in self.all.values() if (count := self._shown_heads(v)) is not None
        )
        self._qkv_widths: dict[str, frozenset[int]] = {}

    def _find_biases(self) -> dict[str, tuple[int, ...]]:
        """Path of a weight → shape of its bias: in the same layer, with a matching name (not `dt_bias`: `in_proj`)."""
        biases = {(v.parent, stem): v for v in self.all.values() if (stem := _BIAS_WORD.sub("", v.leaf)) != v.leaf}
        found: dict[str, tuple[int, ...]] = {}
        for v in self.all.values():
            bias = biases.get((v.parent, _WEIGHT_WORD.sub("", v.leaf)))
            if bias is not None and bias is not v and len(v.shape) > 1:
                found[v.path] = bias.shape
        return found

    def _find_orders(self) -> dict[str, bool]:
        """Path of a weight → True if it is stored as (out, in); without the weights whose order is unknown.

        The size of a bias shows the order, unless both ends have the same size. Without a bias, `kernel` is (in, out),
        except in transposed convolutions, and another name has the same order as elsewhere in the model.
        """
        found: dict[str, bool] = {}
        conventions: dict[str, set[bool]] = {}
        for path, bias in self._biases.items():
            v = self.all[path]
            if len(bias) == 1 and v.shape[0] != v.shape[-1] and bias[0] in (v.shape[0], v.shape[-1]):
                found[path] = bias[0] == v.shape[0]
                conventions.setdefault(v.leaf, set()).add(found[path])
        for v in self.all.values():
            if len(v.shape) < 2 or v.path in found:
                continue
            convention = conventions.get(v.leaf, set()) if v.leaf in _CONVENTIONAL else set[bool]()
            if v.in_first:
                found[v.path] = False
            elif len(convention) == 1:
                found[v.path] = next(iter(convention))
        return found

    def _shown_heads(self, v: _Variable) -> int | None:
        """The number of heads that a variable shows: of a query weight, or columns of a table of attention biases."""
        if len(v.shape) == 1 and _HEAD_NORM.search(v.name):
            return None
        if len(v.shape) == 3 and re.search(_WEIGHT, v.name) and _ATTENTION.search(v.name):
            if not re.search(r"(^|_)q(_|$)|que", v.name.split("/")[-2]):
                return None
            labels, _ = _attention_labels(v.shape, self._widths_at(v, attention=True), output=False, fused=False)
            return v.shape[labels.index(HEADS)]
        return v.shape[1] if len(v.shape) == 2 and _HEAD_TABLE.search(v.name) else None

    # --- one variable ---

    def described(self, v: _Variable) -> Described:
        if v.variable.weight is not None and v.variable.weight[0] in self.all:
            path, dims = v.variable.weight
            labels = ["rank" if dim is None else "of its weight" for dim in dims]
            return Described("lora", tuple(labels), v.variable.shape, follows=path, dims=dims)
        if (named := self._by_axis_names(v)) is not None:
            return named
        found = self._one(v)
        if found.role.startswith("expert") and "expert" in v.name:
            found = dataclasses.replace(found, bank=True)
        if len(v.shape) == len(v.variable.shape):
            return found
        dims = found.dims
        if found.follows is not None:
            both = self.all[found.follows].stacked
            dims = (0, *(None if dim is None else dim + 1 for dim in dims)) if both else (None, *dims)
        labels, units = ("layers", *found.labels), (v.variable.shape[0], *found.units)
        return dataclasses.replace(found, labels=labels, units=units, dims=dims)

    def _by_axis_names(self, v: _Variable) -> Described | None:
        """The role of a variable according to the model's own names of its dimensions; None without such names."""
        axes, shape = v.variable.logical_axes or (), v.variable.shape
        if not any(axes) or len(axes) > len(shape):
            return None
        names = (*axes, *(None,) * (len(shape) - len(axes)))
        kinds = ("fused_query_key_value", "query_key_value", "attention_output")
        kind = next((role for role in kinds if ROLES[role].fits(v.tail)), None)
        if (found := role_of_names(names, None if kind is None else kind == "attention_output")) is None:
            return None
        role, labels = found
        if v.stacked and names[0] is None:
            labels = ("layers", *labels[1:])
        source = f"axis names {names}, which the model gives"
        return Described(role, labels, self._units(v, labels, shape), told_from=source)

    def _units(self, v: _Variable, labels: Sequence[str], shape: Sequence[int]) -> tuple[int, ...]:
        """The number of units of each dimension: heads, if a head's columns have no dimension of their own."""
        joined, sizes = "head_dim" not in labels, zip(labels, shape, strict=True)
        return tuple(self._heads_in(v, size) if joined and label == HEADS else size for label, size in sizes)

    def _one(self, v: _Variable) -> Described:
        """A variable's role, from its shape in one layer."""
        name, shape, n = v.name, v.shape, len(v.shape)
        if not shape or v.variable.is_key or "seed_generator" in name:
            return self._labelled("state", v)
        if (slot := self._slot(v)) is not None:
            return slot
        for row in ROLES.values():
            if row.within or n not in row.ndims or not row.fits(name):
                continue
            if row.name == "embedding" and v.path in self._biases:
                continue  # a layer with a bias is not a table
            # Several tables of the same shape in a layer, as those of PEER: not the table of tokens.
            alike = (o for o in self._matrices_around(v) if o.shape == shape) if row.name == "embedding" else ()
            if any(row.fits(other.name) for other in alike):
                return self._labelled("lookup_table", v, "another table of its shape in the same layer")
            if row.name in ("lora", "scale", "bias") and (found := self._follower(v, row.name)) is not None:
                return found
            if row.name.startswith("expert") and (found := self._stacked(v, row.name)) is not None:
                return found
            if row.name != "bias" or n == 1 or _ATTENTION.search(name) is not None:
                return self._labelled(row.name, v)
        if n < 2 or not np.prod(shape):
            return self._labelled("other", v)
        if n < 5 and (found := self._stacked(v)) is not None:
            return found
        attention = _ATTENTION.search(name) is not None or not self._with_keys.isdisjoint(v.places[:2])
        attention = attention and not _MLP.search(v.tail)
        if n == 3 and not attention and self._biases.get(v.path) == (shape[0], shape[-1]):  # an ensemble's
            return v.described("other", ("members", "in", "out"), told_from="its bias")
        is_leaf = _LEAF.search(name) or (attention and _LEAF_OF_ATTENTION.search(name))
        if not re.search(_WEIGHT, name) and not is_leaf:
            return self._labelled("other", v)
        if n < 5 and (attention or n == 3) and (found := self._of_attention(v, attention)) is not None:
            return found
        if n >= 3:
            return self._labelled("other" if n == 3 else "convolution", v)
        if "conv" in name and min(shape) <= 8 < max(shape):
            labels = ("space", "out") if shape[0] < shape[1] else ("out", "space")
            return v.described("depthwise_convolution", labels, told_from="its name, and its smaller dimension")
        around = self._layers.get("".join(v.places[1:2]), ()) if name.split("/")[-2:-1] == ["gate"] else ()
        if any("expert" in other.name for other in around):
            return self._labelled("router", v)
        return self._dense(v)

    def _labelled(self, role: str, v: _Variable, source: str = "its name", *, guess: bool = False) -> Described:
        """A variable of a role whose labels follow from the number of dimensions."""
        row = ROLES[role]
        labels = row.label(len(v.shape), out_first=row.turns and self._out_first(v))
        ordered = not row.turns or v.path in self._orders
        source = ("" if role in ("other", "state") else source) + ("" if ordered else f"; {_width_text(None)}")
        return v.described(role, labels, told_from=source, ordered=ordered, guessed=guess)

    def _dense(self, v: _Variable) -> Described:
        """A matrix outside attention: `up` or `down` by name; else `up` if it widens, `down` if it narrows."""
        size_in, size_out = v.shape[::-1] if self._out_first(v) else v.shape
        up, down = (ROLES[name].fits(v.tail) for name in ("mlp_up", "mlp_down"))
        by_name = up != down and (size_in == size_out or not _NUMBERED.search(v.tail))
        narrows = down if by_name else size_out < size_in
        source = "its name" if by_name else f"its shape, which {'narrows' if narrows else 'does not narrow'}"
        return self._labelled("mlp_down" if narrows else "mlp_up", v, source, guess=not by_name)

    def _stacked(self, v: _Variable, role: str = "") -> Described | None:
        """Matrices stacked on a leading dimension: experts, the parts of a gated layer, blocks of a diagonal.

        `role` is the role by name; an empty string if the name shows none.
        """
        shape, n, tail, widths = v.shape, len(v.shape), v.tail, self._widths_at(v)
        if n < 3 or re.search(r"bias|norm|scale", v.leaf):
            return None
        if not role and n == 3 and shape[1] == shape[2]:
            # Blocks of a diagonal have together the size of a vector in the layer; no block has the model's width.
            near = (other.shape for place in v.places[:2] for other in self._children.get(place, ()))
            if any(other in ((shape[0] * shape[1],), shape[:2]) for other in near):
                whole = f"the {shape[0] * shape[1]} of a vector in its layer"
                source = f"its shape: {shape[0]} blocks of {shape[1]} are {whole}"
                return v.described("block_diagonal", ROLES["block_diagonal"].labels, told_from=source)
        up = ROLES["mlp_up"].fits(tail)
        down = not up and bool(ROLES["mlp_down"].fits(tail) or re.search(r"(^|/)linear$", tail))
        stack, source = "experts", "its name"
        if not role and (router := self._router_of(v)) is not None:
            source = f"{router}, which has as many outputs"
            narrows = not up and n == 3 and widths[:1] == [shape[2]] != [shape[1]]
            role = "expert_down" if down or narrows else "expert_up"
        elif not role and n == 3 and shape[0] in (2, 3) and (up or _MLP.search(tail)) and not _ATTENTION.search(tail):
            role, stack = ("mlp_down" if down else "mlp_up"), "parts"
        if not role:
            return None
        out_first = tail.endswith(("weight", "weights")) and stack == "parts"
        labels, width = _stacked_labels(shape, widths, stack, up=role.endswith("up"), out_first=out_first)
        ordered = width is not None or v.in_first
        return v.described(role, labels, told_from=f"{source}; {_width_text(width)}", ordered=ordered)

    def _router_of(self, v: _Variable) -> str | None:
        """Path of the router for experts: one output per expert, and an input of the width of their input or output."""
        for place in filter(None, v.places[:2]):
            for other in self._layers[place]:
                sizes = other.shape
                if other is v or len(sizes) != 2 or not _ROUTER.search("/".join(other.name.split("/")[-2:])):
                    continue
                if any(sizes[i] == v.shape[0] and sizes[1 - i] in v.shape[1:] for i in (0, 1)):
                    return other.path
        return None

    def _of_attention(self, v: _Variable, attention: bool) -> Described | None:
        """A weight of attention, or one of three dimensions with the name of one."""
        n = len(v.shape)
        for row in ROLES.values():
            if row.within == "attention" and n in row.ndims and row.fits(v.tail):
                latent = row.name.startswith("latent")
                return self._labelled(row.name, v) if latent else self._projection(row.name, v, known=attention)
        if n == 4 or not attention:
            return None
        role = "fused_query_key_value" if n == 2 and v.shape[1] == 3 * v.shape[0] else "query_key_value"
        # If all other matrices are of queries, keys and values, by name, this one is the output.
        fused = [ROLES["fused_query_key_value"].fits(other.tail) for other in self._matrices_around(v)]
        single = [ROLES["query_key_value"].fits(other.tail) for other in self._matrices_around(v)]
        if all(map(max, fused, single)) and (len(fused) >= 3 or any(fused)):
            role = "attention_output"
        return self._projection(role, v, guess=True)

    def _projection(self, role: str, v: _Variable, *, guess: bool = False, known: bool = True) -> Described:
        """A weight of attention: finds the dimension that counts the heads. `known`: True if it is in attention."""
        output, fused, shape = role == "attention_output", role.startswith("fused"), v.shape
        source = "a guess: it is in attention, and its name says nothing known" if guess else "its name"
        if len(shape) == 2:
            turn = -1 if self._out_first(v) else 1
            source += "" if (ordered := v.path in self._orders) else f"; {_width_text(None)}"
            size_in, size_out = shape[::turn]
            heads = self._heads_in(v, size_in if output else size_out)
            labels, units = (HEADS, "out"), (heads, size_out)
            if not output:
                labels, units = ("in", FUSED_HEADS if fused else HEADS), (size_in, 1 if fused else heads)
            return Described(role, labels[::turn], units[::turn], told_from=source, ordered=ordered, guessed=guess)
        widths = self._widths_at(v, attention=True)
        labels, width = _attention_labels(shape, widths, output=output, fused=fused)
        if guess and width is not None and shape[-1] == width != shape[0]:
            role, (labels, width) = "attention_output", _attention_labels(shape, widths, output=True, fused=False)
        source, ordered = f"{source}; {_width_text(width)}", known and (width is not None or v.in_first)
        units = self._units(v, labels, shape)
        return Described(role, labels, units, told_from=source, ordered=ordered, guessed=guess or not known)

    # --- what belongs to another variable ---

    def _follower(self, v: _Variable, role: str) -> Described | None:
        """A LoRA factor, scale or bias, with its weight, in the same layer or one level up or down."""
        parents = (v.places[0], "".join(v.places[1:2]))
        places = [f"{place}{below}" for below in ("", "/base_module") for place in parents]
        stem = re.sub(r"(_scale|_zero|_?zero_point|_?bias)$", "", v.leaf)
        for place in places if role == "lora" else places[:1]:
            weights = [
                other
                for other in self._children.get(place, ())
                if other is not v
                and len(other.variable.shape) >= 2
                and not re.search(r"lora_|_scale$|_zero|zero_point$|bias$|_(a|b)$", other.leaf)
            ]
            for other in [o for o in weights if o.leaf in (stem, f"_{stem}") and stem] or weights:
                if role == "bias" and sum(n > 1 for n in v.shape) >= sum(n > 1 for n in other.shape):
                    continue  # a weight named `b`
                if (dims := self._factor_dims(v, role, other)) is not None:
                    own = "rank" if role == "lora" else "dimension"
                    labels = [own if dim is None else "of its weight" for dim in dims]
                    return v.described(role, labels, follows=other.path, dims=dims)
        return None

    def _factor_dims(self, v: _Variable, role: str, other: _Variable) -> tuple[int | None, ...] | None:
        shape, weight, n = v.shape, other.shape, len(v.shape)
        if role == "lora":
            if v.leaf.endswith("_a"):
                return (*range(n - 1), None) if shape[:-1] == weight[: n - 1] else None
            return (*(None,) * (n - 1), len(weight) - 1) if shape[-1] == weight[-1] else None
        packs = role == "scale" and n == len(weight) == 2 and other.variable.dtype == np.int8
        if packs and any(-(-size // 2) == packed for size, packed in zip(shape, weight, strict=True)):
            # Two 4-bit numbers share a byte, and a group of them a scale: the same dimensions with other sizes.
            return (0, 1)
        embedding = "embedding" in other.leaf
        return _aligned(shape, weight, from_left=embedding or (len(weight) == 2 and self._out_first(other)))

    def _slot(self, v: _Variable) -> Described | None:
        """An optimizer's slot: its path contains that of a variable; its shape is the same or has fewer dimensions."""
        parts = v.name.split("/")
        found = None  # Keras names slots `adam/dense_kernel_momentum`, Optax `0/mu/dense/kernel`
        if _SLOT.search(v.path.lower()):
            candidates = ("/".join(parts[start:]) for start in range(1, len(parts)))
            found = next((self._by_name[c] for c in candidates if self._by_name.get(c, v.path) != v.path), None)
        if found is None:
            words = v.leaf.split("_")
            stems = ["_".join(words[:end]) for end in range(len(words) - 1, max(len(words) - 4, 0), -1)]
            found = next((self._flat[stem] for stem in stems if "_" in stem and stem in self._flat), None)
        if found is None or found == v.path:
            return None
        shape, other = v.variable.shape, self.all[found].variable.shape
        smaller = len(shape) < len(other)
        dims = _aligned(shape, other, from_left="col" not in v.leaf) if smaller else tuple(range(len(shape)))
        if dims is None or not (smaller or shape == other):
            return None
        stack = int(v.stacked)
        inner = tuple(None if dim is None else dim - stack for dim in dims[stack:])
        return dataclasses.replace(self._labelled("optimizer_slot", v), follows=found, dims=inner)

    # --- neighbours ---

    def _out_first(self, v: _Variable) -> bool:
        """Returns True if a weight is stored as (out, in), as PyTorch and Equinox store a `weight`."""
        return self._orders.get(v.path, v.leaf in ("weight", "weights"))

    def _matrices_around(self, v: _Variable) -> list[_Variable]:
        """The other matrices of the layer that contains this variable or, for a weight, the layer of that weight."""
        home = "".join(v.places[1:2]) if re.search(rf"(^|/){_WEIGHT}", v.name) else v.places[0]
        return [other for other in self._layers.get(home, ()) if home and other is not v and len(other.shape) == 2]

    def _widths_at(self, v: _Variable, *, attention: bool = False) -> list[int]:
        """Candidates for the model's width near the variable, most reliable first: norms, outputs, embeddings."""
        widths = [self._norms[place] for place in v.places if place in self._norms][:1]
        for place in v.places[:3] if attention and not widths else ():
            widths += [shape[-1] for shape in self._outputs[place] if shape != v.shape][:1]
        return [*widths, *self._word_widths]

    def _heads_in(self, v: _Variable, size: int) -> int:
        """A lower bound of the number of heads in a dimension of `size` columns, so that no head is split.

        Without evidence, it counts chunks of 128 columns, which hold whole heads of 16, 32, 64 and 128 columns, as in
        nearly all models; chunks of 64 if queries, keys and values are equally wide and have 1024 columns or fewer, as
        in BERT, T5 and ViT. Heads made of latents may be split: summing the outputs of latents costs more.
        """
        if any(ROLES["latent_up"].fits(other.tail) for other in self._matrices_around(v)):
            return size
        for place in v.places:
            head_dim, count = self._head_dims.get(place, size), self._head_counts.get(place)
            if head_dim < size and size % head_dim == 0:
                return size // head_dim
            if count is not None and size % count == 0:
                return count
        # If queries and keys differ in width, no head is wider than their greatest common divisor.
        widths = self._attention_widths("".join(v.places[1:2]))
        chunk = 64 if len(widths) == 1 and max(widths) <= 1024 else 128
        return max(size // chunk if size % chunk == 0 else 1, size // math.gcd(size, *widths))

    def _attention_widths(self, place: str) -> frozenset[int]:
        """The columns of the matrices for queries, keys and values in a layer."""
        if place not in self._qkv_widths:
            matrices = (other for other in self._layers.get(place, ()) if len(other.shape) == 2)
            named = (o for o in matrices if ROLES["query_key_value"].fits(o.tail) and not _LOW_RANK.search(o.tail))
            self._qkv_widths[place] = frozenset(o.shape[0 if self._out_first(o) else 1] for o in named)
        return self._qkv_widths[place]


def _attention_labels(
    shape: Sequence[int], widths: Sequence[int], *, output: bool, fused: bool
) -> tuple[tuple[str, ...], int | None]:
    """Labels of an attention weight of three or four dimensions, and the entry of `widths` that showed them, or None.

    The position of the model's width depends on the package: (width, heads, head_dim), (heads, width, head_dim) or
    (heads, head_dim, width). Some have a dimension for queries, keys and values. In all, the columns of a head come
    somewhere after the heads.
    """
    rest = list(range(len(shape)))
    if len(rest) == 4 or (fused and {2, 3} & set(shape[:2])):
        rest.remove(next((dim for dim in rest[:-1] if shape[dim] in (2, 3)), rest[0]))
    order = (rest[-1], *rest[:-1]) if output else rest
    found = next((width for width in widths if any(shape[dim] == width for dim in order)), None)
    if found is not None:
        wide = next(dim for dim in order if shape[dim] == found)
    else:  # the larger of the two positions that most packages use
        wide = max(order[:2], key=lambda dim: shape[dim])
    left = [dim for dim in rest if dim != wide]
    names = {wide: "out" if output else "in", left[0]: HEADS, **dict.fromkeys(left[1:], "head_dim")}
    return tuple(names.get(dim, "parts") for dim in range(len(shape))), found


def _stacked_labels(
    shape: Sequence[int], widths: Sequence[int], stack: str, *, up: bool, out_first: bool
) -> tuple[tuple[str, ...], int | None]:
    """Labels of matrices stacked on the first dimension, and the entry of `widths` that showed them, or None.

    With four dimensions, one is for parts that are computed together, as a gate and the factor that it multiplies.
    """
    rest = list(range(1, len(shape)))
    if len(rest) > 2:
        rest.remove(next((dim for dim in rest if shape[dim] in (2, 3)), rest[1]))  # in the middle, if none is so small
    first, last = rest
    found = next((width for width in widths if (shape[first] == width) != (shape[last] == width)), None)
    turned = out_first if found is None else (shape[last] if up else shape[first]) == found
    names = {0: stack, first: "out" if turned else "in", last: "in" if turned else "out"}
    return tuple(names.get(dim, "parts") for dim in range(len(shape))), found


def _aligned(shape: tuple[int, ...], weight: tuple[int, ...], *, from_left: bool) -> tuple[int | None, ...] | None:
    """The dimension of `weight` for each dimension of `shape`; None for dimensions of size 1 or without a counterpart.

    Both are walked from the right (or left), so a bias takes the last dimension of a square kernel.
    """
    step = 1 if from_left else -1
    free = list(range(len(weight)))[::step]
    dims: list[int | None] = []
    for size in shape[::step]:
        match = next((position for position, dim in enumerate(free) if weight[dim] == size != 1), None)
        dims.append(None if match is None else free[match])
        free = free[0 if match is None else match + 1 :]
    return tuple(dims[::step]) if any(dim is not None for dim in dims) else None


def _width_text(width: int | None) -> str:
    """The source of the order of dimensions, as text."""
    return f"the order of its dimensions is {'a guess' if width is None else f'inferred from the model width, {width}'}"


def _places(path: str) -> tuple[str, ...]:
    """The layers that contain the path, from the innermost to the whole model, which is ``""``."""
    parts = path.split("/")
    return tuple("/".join(parts[:count]) for count in reversed(range(len(parts))))


def _agreed(found: Iterable[tuple[_Variable, int]]) -> dict[str, int]:
    """Place → number, if all variables below it show the same number."""
    numbers: dict[str, set[int]] = {}
    for v, number in found:
        for place in v.places:
            numbers.setdefault(place, set()).add(number)
    return {place: each.pop() for place, each in numbers.items() if len(each) == 1}


def _stacks(variables: Mapping[str, AbstractVariable], names: Mapping[str, str]) -> set[str]:
    """Paths of variables that hold one slice per layer, as `scan` over layers and `vmap` of a constructor create them.

    A part of the model is a stack if all its variables have the same leading size, and a variable that is a vector by
    name (a norm's scale) has two dimensions. Experts have a leading size of their own and are not stacks.
    """
    leading: dict[str, set[int]] = {}
    vectors: set[str] = set()
    others: set[str] = set()  # a norm of two dimensions alone is not a stack: its layer must hold other variables
    named: set[str] = set()
    for path, variable in variables.items():
        kind = vectors if _NORM_VECTOR.search(names[path]) and len(variable.shape) == 2 else others
        for place in _places(path):
            leading.setdefault(place, set()).add(variable.shape[0] if variable.shape else -1)
            kind.add(place)
        if AXIS_NAMES.get(str((variable.logical_axes or "-")[0]).lower()) == LAYERS:
            named.add(path)
    stacks = {place for place in vectors & others if len(leading[place]) == 1 and "expert" not in place.lower()}
    return named | {path for path in variables if not stacks.isdisjoint(_places(path))}

"""What a variable is for: its role, told from its path, its shape and its neighbours.

Responsible for the one table of names by which people call the parts of networks, and for what follows from a role:
a label for every dimension (`in`, `heads`, `vocabulary`, …), the largest number of parts that keeps a dimension's
units whole, and which other variable it belongs to. Not responsible for what is made of it: `_auto` places labels on
mesh axes.

Roles are guesses, and a wrong one costs speed, never correctness: every sharding computes the same values.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from lazymodel._errors import ShardingError
from lazymodel._paths import rule_path
from lazymodel._text import closest

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractVariable

_WEIGHT = r"(_?kernel|weight|weights|w|embeddings?)$"


@dataclasses.dataclass(frozen=True)
class Role:
    """A role as a key of sharding rules; made by `role`."""

    name: str


# Role → (what its path looks like, the numbers of dimensions it may have). The first row that fits is the role.
# Paths are lower case; `(^|/)` anchors a whole part, since `k` and `out` occur within many words.
_TABLE: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("lora", r"lora_([a-z]+_)?[ab]$", (2, 3, 4)),
    ("scale", r"(kernel|embeddings|weight|w)_(scale|zero|zero_point)$", (1, 2, 3, 4)),
    ("norm", r"(^|/)(gamma|beta|moving_mean|moving_variance|mean|var|running_mean|running_var)$", (1, 2)),
    ("norm", r"(norm|(^|[/_])ln(_?[a-z\d]*)?|(^|[/_])bn\d*)[^/]*/(scale|weight|bias)$", (1, 2)),
    ("attention_bias_table", r"attention\w*/embeddings$|relative.*(bias|table)|rel_pos|attention_bias", (2, 3)),
    ("embedding", r"(token|word|vocab)[a-z_]*embeddings?(/embeddings?)?$", (2,)),
    ("position_embedding", r"(segment|token_type|type)_?embedding[^/]*/embeddings?$", (2,)),
    ("position_embedding", r"pos(ition(al|s)?)?_?(emb|enc|table|ids)|(^|/)wpe(/|$)|positions?/embedding", (2, 3, 4)),
    (
        "output_head",
        r"reverse_embeddings$|(lm_head|logits|unembed|output_embedding)[^/]*(/.*)?(kernel|weight|w)$",
        (2,),
    ),
    ("embedding", r"(^|/)([a-z\d_]*embeddings?|embed_tokens/weight|embedding_table|wte(/weight)?)$", (2,)),
    (
        "router",
        r"router|shared_expert_gate|sparse_feedforward_gate|(moe|experts?)[^/]*/gate/(kernel|weight)|expert_gate/",
        (2,),
    ),
    ("expert_down", r"expert.*(down|output|out|(^|[/_])w2|wo|linear)[^/]*(/(kernel|weight|w))?$", (3, 4)),
    ("expert_up", r"expert", (3, 4)),
    ("depthwise_convolution", r"depthwise.*kernel$", (3, 4, 5)),
    ("convolution", r"(conv|patch|patching|stem).*(kernel|weight)$", (3, 4, 5)),
    ("bias", r"(^|/)([a-z\d_]*bias|b)$", (1, 2, 3)),
)

# Within an attention layer, by the name of the projection: the last part but one, or the last, of the path.
_ATTENTION = re.compile(r"(^|[/_])(\w*attention\w*|\w*attn\w*|mha|sdpa)(_\d+)?/")
_FUSED = re.compile(r"(^|[/_])(\w*qkv\w*|query_key_value|c_attn|in_proj|kv\w*|\w*qk)(/|$)")
_PROJECTION_IN = re.compile(
    r"(^|[/_])(q|k|v|query|queries|keys?|values?|wq|wk|wv|to_[qkv])(_?(proj|projection|projector|dense|linear|layer|a|b)\w*)?(/|$)"
)
_PROJECTION_OUT = re.compile(
    r"(^|[/_])(o|wo|out|output|attention_output|c_proj|to_out|proj|post)(_?(proj|projection|projector|dense|linear|layer)\w*)?(/|$)"
)

_UP = re.compile(
    r"(^|[/_])(up|gate|gating|intermediate|inner|fc_?1|c_fc|wi(_\d)?|w1|w3|expand|h_to_4h|linear_?1|dense_?1)([/_]|$)"
)
_DOWN = re.compile(
    r"(^|[/_])(down|output|outer|fc_?2|c_proj|wo|w2|contract|4h_to_h|linear_?2|dense_?2|out|ffw_linear)([/_]|$)"
)
_MLP = re.compile(r"feed_?forward|mlp|ffw|ffn|intermediate")
_SLOT = re.compile(r"(^|/)(opt\w*|adam\w*|sgd|mu|nu|trace|ema\w*|momentum|velocity|acc\w*|v_row|v_col|avg\w*)/")
_NORM_VECTOR = re.compile(r"(norm|(^|[/_])ln)[^/]*(/(scale|weight|gamma|bias))?$")
_HEAD_NORM = re.compile(r"(^|[/_])(q|k|query|key)_?(layer_?)?norm\w*/[a-z]+$")

ROLES = (
    *dict.fromkeys(name for name, _, _ in _TABLE),
    "query_key_value",
    "fused_query_key_value",
    "attention_output",
    "mlp_up",
    "mlp_down",
    "optimizer_slot",
    "state",
    "other",
)


def role(name: str) -> Role:
    """A key of sharding rules that stands for every variable of a role: `{lm.role("embedding"): P("model")}`.

    Rules are tried in their order, whether path or role. Which role a variable has says `AbstractModel.explain(path)`.

    Raises:
        ShardingError: There is no such role; the message lists them.
    """
    if name not in ROLES:
        raise ShardingError(f"there is no role {name!r}{closest(name, ROLES)}; roles are {', '.join(ROLES)}")
    return Role(name)


@dataclasses.dataclass(frozen=True)
class Described:
    """What is known of a variable.

    Attributes:
        role: A name of `ROLES`.
        labels: One for each dimension.
        units: For each dimension, how many parts at most keep its units whole: heads, where it holds heads.
        follows: The path of the variable that it belongs to and is split like, and
        dims: for each of its dimensions, which one of that variable, or None.
    """

    role: str
    labels: tuple[str, ...]
    units: tuple[int, ...]
    follows: str | None = None
    dims: tuple[int | None, ...] = ()


def describe(variables: Mapping[str, AbstractVariable]) -> dict[str, Described]:
    """The role of every variable, from all of them together."""
    return _Describer(variables).all()


class _Describer:
    def __init__(self, variables: Mapping[str, AbstractVariable]) -> None:
        self._variables = variables
        self._names = {path: rule_path(path).lower() for path in variables}
        self._stacks = _stacks(variables, self._names)
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
        self._head_dims: dict[str, int] = {}  # prefix → head_dim, where all evidence below it agrees
        self._head_counts: dict[str, int] = {}
        self._evidence()

    def all(self) -> dict[str, Described]:
        described: dict[str, Described] = {}
        for path, variable in self._variables.items():
            stack = self._stack(path)
            shape = variable.shape[1:] if stack else variable.shape
            found = self._one(path, variable, shape)
            if stack and variable.shape:
                shifted = tuple(None if dim is None else dim + 1 for dim in found.dims)
                dims = (
                    (0, *shifted) if found.follows is not None and self._stack(found.follows) else (None, *found.dims)
                )
                found = dataclasses.replace(
                    found,
                    labels=("layers", *found.labels),
                    units=(variable.shape[0], *found.units),
                    dims=dims if found.follows is not None else (),
                )
            described[path] = found
        return described

    # --- one variable ---

    def _one(self, path: str, variable: AbstractVariable, shape: tuple[int, ...]) -> Described:
        name = self._names[path]
        if not shape or jax.numpy.issubdtype(variable.dtype, jax.dtypes.prng_key) or "seed_generator" in name:
            return _plain("state", shape)
        if (slot := self._slot(path, variable)) is not None:
            return slot
        for role, pattern, ndims in _TABLE:
            if len(shape) in ndims and re.search(pattern, name):
                if role in ("lora", "scale", "bias") and (found := self._follower(path, role, shape)) is not None:
                    return found
                if role == "bias" and _ATTENTION.search(name) is None and len(shape) > 1:
                    continue
                return self._labelled(role, path, shape)
        if len(shape) < 2 or not np.prod(shape):
            return _plain("other", shape)
        tail = "/".join(name.split("/")[-3:])
        attention = _ATTENTION.search(name) is not None and not _MLP.search(tail)
        if re.search(_WEIGHT, name) and len(shape) < 5 and (attention or len(shape) == 3):
            if _FUSED.search(tail) and (len(shape) < 4 or {2, 3} & set(shape)):
                return self._projection("fused_query_key_value", path, shape)
            if len(shape) < 4 and _PROJECTION_IN.search(tail):
                return self._projection("query_key_value", path, shape)
            if len(shape) < 4 and _PROJECTION_OUT.search(tail):
                return self._attention_output(path, shape)
            if len(shape) < 4 and attention:
                fused = len(shape) == 2 and shape[1] == 3 * shape[0]
                return self._projection("fused_query_key_value" if fused else "query_key_value", path, shape)
        if len(shape) >= 4 and re.search(_WEIGHT, name):
            return self._labelled("convolution", path, shape)
        if len(shape) == 2 and re.search(_WEIGHT, name):
            if name.split("/")[-2:-1] == ["gate"] and any(
                "expert" in self._names[other] for other in self._layer(_parent(_parent(path)))
            ):
                return self._labelled("router", path, shape)
            return self._dense(path, shape)
        return _plain("other", shape)

    def _labelled(self, role: str, path: str, shape: tuple[int, ...]) -> Described:
        """Roles whose dimensions follow from their number."""
        n = len(shape)
        labels: tuple[str, ...] = ("dimension",) * n
        if role == "embedding":
            labels = ("vocabulary", "features")
        elif role == "position_embedding":
            labels = ("positions",) * (n - 1) + ("features",)
        elif role == "output_head":
            labels = ("vocabulary", "in") if self._out_first(path, shape) else ("in", "vocabulary")
        elif role == "router":
            labels = ("experts", "in") if self._out_first(path, shape) else ("in", "experts")
        elif role in ("expert_up", "expert_down"):
            labels = ("experts", "in", *("parts",) * (n - 3), "out")
        elif role == "convolution":
            labels = (
                ("out", "in", *("space",) * (n - 2))
                if self._out_first(path, shape)
                else (*("space",) * (n - 2), "in", "out")
            )
        elif role == "depthwise_convolution":
            labels = (*("space",) * (n - 2), "out", "multiplier")
        return Described(role, labels, shape)

    def _dense(self, path: str, shape: tuple[int, ...]) -> Described:
        """A matrix outside attention: by name, or else one that widens is `up` and one that narrows `down`."""
        out_first = self._out_first(path, shape)
        size_in, size_out = shape[::-1] if out_first else shape
        tail = "/".join(self._names[path].split("/")[-3:])
        up, down = bool(_UP.search(tail)), bool(_DOWN.search(tail))
        role = "mlp_down" if size_out < size_in else "mlp_up"
        if size_in == size_out or up != down:
            role = "mlp_down" if down and not up else "mlp_up" if up or size_in == size_out else role
        return Described(role, ("out", "in") if out_first else ("in", "out"), shape)

    def _projection(self, role: str, path: str, shape: tuple[int, ...]) -> Described:
        """Query, key and value: which dimension counts the heads."""
        if len(shape) == 2:
            out_first = self._out_first(path, shape)
            size = shape[0] if out_first else shape[1]
            label = "heads of queries, keys and values" if role.startswith("fused") else "heads"
            units = 1 if role.startswith("fused") else self._heads_in(path, size)
            return Described(
                role,
                (label, "in") if out_first else ("in", label),
                (units, shape[1]) if out_first else (shape[0], units),
            )
        heads, width = self._output_of(path)
        last = len(shape) - 1
        candidates = [dim for dim in range(last) if shape[dim] == heads]
        if len(candidates) != 1:
            # The width is the one that an output projection gives back; what is left counts heads.
            candidates = [dim for dim in range(last) if width is not None and shape[dim] != width and shape[dim] != 3]
        dim = candidates[-1] if candidates else last - 1
        inner = [d for d in range(last) if d != dim]
        wide = max(inner, key=lambda d: (shape[d] == width, shape[d]))
        labels = ["parts"] * len(shape)
        labels[dim], labels[wide], labels[last] = "heads", "in", "head_dim"
        return Described(role, tuple(labels), shape)

    def _attention_output(self, path: str, shape: tuple[int, ...]) -> Described:
        if len(shape) == 3:
            like_query = shape[0] != shape[-1] and any(
                other != path and self._variables[other].shape == self._variables[path].shape
                for other in self._layer(_parent(_parent(path)))
            )
            labels = ("out", "heads", "head_dim") if like_query else ("heads", "head_dim", "out")
            return Described("attention_output", labels, shape)
        if len(shape) != 2:
            return _plain("other", shape)
        if self._out_first(path, shape):
            return Described("attention_output", ("out", "heads"), (shape[0], self._heads_in(path, shape[1])))
        return Described("attention_output", ("heads", "out"), (self._heads_in(path, shape[0]), shape[1]))

    # --- neighbours ---

    def _follower(self, path: str, role: str, shape: tuple[int, ...]) -> Described | None:
        """A LoRA factor, scale or bias: the weight in the same layer (or one level up or down) that it belongs to."""
        parent = _parent(path)
        leaf = self._names[path].split("/")[-1]
        places = [parent, _parent(parent), f"{parent}/base_module", f"{_parent(parent)}/base_module"]
        stem = re.sub(r"(_scale|_zero|_zero_point|_?bias)$", "", leaf)
        for place in places if role == "lora" else places[:1]:
            weights = [
                other
                for other in self._children.get(place, ())
                if other != path and len(self._variables[other].shape) >= 2 and self._is_weight(other)
            ]
            named = [o for o in weights if self._names[o].split("/")[-1] in (stem, f"_{stem}") and stem]
            for other in named or weights:
                inner = self._variables[other].shape[1:] if self._stack(other) else self._variables[other].shape
                dims = self._factor_dims(leaf, role, shape, inner, other)
                if dims is not None:
                    labels = tuple("rank" if d is None else "of its weight" for d in dims)
                    return Described(role, labels, shape, other, dims)
        return None

    def _factor_dims(
        self, leaf: str, role: str, shape: tuple[int, ...], weight: tuple[int, ...], other: str
    ) -> tuple[int | None, ...] | None:
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
        out_first = not embedding and len(weight) == 2 and self._out_first(other, weight)
        return _aligned(shape, weight, from_left=embedding or out_first)

    def _is_weight(self, path: str) -> bool:
        leaf = self._names[path].split("/")[-1]
        return not re.search(r"lora_|_scale$|_zero|bias$|_(a|b)$", leaf)

    def _slot(self, path: str, variable: AbstractVariable) -> Described | None:
        """An optimizer's slot: its path holds that of a variable, and its shape is the same or lacks a dimension.

        Keras names slots `adam/dense_kernel_momentum`, Optax `0/mu/dense/kernel`.
        """
        parts = self._names[path].split("/")
        candidates = ["/".join(parts[start:]) for start in range(1, len(parts))]
        found = None
        if _SLOT.search(path.lower()):
            found = next((self._by_name[c] for c in candidates if self._by_name.get(c, path) != path), None)
        if found is None:
            words = parts[-1].split("_")
            stems = ["_".join(words[:end]) for end in range(len(words) - 1, max(len(words) - 4, 0), -1)]
            found = next((self._flat[stem] for stem in stems if "_" in stem and stem in self._flat), None)
        if found is None or found == path:
            return None
        shape, other = variable.shape, self._variables[found].shape
        stack = int(self._stack(path))
        if shape == other:
            dims: tuple[int | None, ...] = tuple(range(len(shape)))
        elif len(shape) < len(other) and (aligned := _aligned(shape, other, from_left="col" not in parts[-1])):
            dims = aligned
        else:
            return None
        inner = tuple(None if d is None else d - (1 if stack else 0) for d in dims[stack:])
        return Described("optimizer_slot", ("of its variable",) * len(shape[stack:]), shape[stack:], found, inner)

    def _out_first(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether a weight is stored as (out, in), as PyTorch and Equinox do: it is called `weight`, not `kernel`.

        A bias beside it tells with certainty, unless the matrix is square.
        """
        leaf = self._names[path].split("/")[-1]
        stack = int(self._stack(path))
        for other in self._children.get(_parent(path), ()):
            bias = self._variables[other].shape[stack:]
            if (
                re.search(r"(^|_)(bias|b)$", self._names[other].split("/")[-1])
                and len(bias) == 1
                and shape[0] != shape[-1]
            ):
                return bias[0] == shape[0]
        return leaf in ("weight", "weights")

    def _output_of(self, path: str) -> tuple[int | None, int | None]:
        """(heads, width) of the attention layer, from its output projection (heads, head_dim, width)."""
        own = self._variables[path].shape
        for prefix in itertools.islice(_places(path), 3):
            for child in self._layer(prefix):
                shape = self._variables[child].shape[int(self._stack(child)) :]
                tail = "/".join(self._names[child].split("/")[-3:])
                if len(shape) == 3 and _PROJECTION_OUT.search(tail) and re.search(_WEIGHT, tail):
                    # Of equal shapes, both are stored as (width, heads, head_dim).
                    return (None, None) if self._variables[child].shape == own else (shape[0], shape[-1])
        return None, None

    def _layer(self, prefix: str) -> Iterator[str]:
        """The variables of a layer and of the layers below it, two levels deep."""
        for level in (prefix, *self._layers.get(prefix, ())):
            yield from self._children.get(level, ())
            if level != prefix:
                for below in self._layers.get(level, ()):
                    yield from self._children.get(below, ())

    def _evidence(self) -> None:
        """Heads as other variables show them: norms of a head's width, and tables with a column for each head."""
        head_dims: dict[str, set[int]] = {}
        counts: dict[str, set[int]] = {}
        for path, variable in self._variables.items():
            name = self._names[path]
            shape = variable.shape[int(self._stack(path)) :]
            if _HEAD_NORM.search(name) and len(shape) == 1:
                _note(head_dims, path, shape[0])
            elif (
                re.search(_WEIGHT, name)
                and len(shape) == 3
                and _ATTENTION.search(name)
                and "que" in name.split("/")[-2]
            ):
                described = self._projection("query_key_value", path, shape)
                _note(counts, path, shape[described.labels.index("heads")])
            elif re.search(r"attention\w*/embeddings$|relative_(attention|position)_bias", name) and len(shape) == 2:
                _note(counts, path, shape[1])
        self._head_dims = {place: next(iter(found)) for place, found in head_dims.items() if len(found) == 1}
        self._head_counts = {place: next(iter(found)) for place, found in counts.items() if len(found) == 1}

    def _heads_in(self, path: str, size: int) -> int:
        """How many heads a dimension of so many columns holds, at least: what is unknown is not split.

        Without evidence, pieces of 128 columns hold whole heads of 16, 32, 64 and 128, which nearly all models have.
        """
        for place in _places(path):
            head_dim = self._head_dims.get(place)
            if head_dim is not None and head_dim < size and size % head_dim == 0:
                return size // head_dim
            count = self._head_counts.get(place)
            if count is not None and size % count == 0:
                return count
        return size // 128 if size % 128 == 0 else 1

    def _stack(self, path: str) -> bool:
        return path in self._stacks


def _plain(role: str, shape: tuple[int, ...]) -> Described:
    return Described(role, ("dimension",) * len(shape), shape)


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


def _aligned(
    shape: tuple[int, ...], weight: tuple[int, ...], *, from_left: bool = False
) -> tuple[int | None, ...] | None:
    """For each dimension of `shape`, the one of `weight` that it runs along; None for those that are 1 or of its own.

    Both are walked from the right (or left), so a bias takes the last dimension of a square kernel.
    """
    step = 1 if from_left else -1
    free = list(range(len(weight)))[::step]
    dims: dict[int, int | None] = {}
    for dim in list(range(len(shape)))[::step]:
        match = next((position for position, other in enumerate(free) if weight[other] == shape[dim]), None)
        dims[dim] = None if match is None or shape[dim] == 1 else free[match]
        if match is not None and shape[dim] != 1:
            free = free[match + 1 :]
    if all(dim is None for dim in dims.values()):
        return None
    return tuple(dims[dim] for dim in range(len(shape)))


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

    return frozenset(path for path in variables if any(place in stacks for place in _places(path)))

"""The dimensions of a variable that are summed over (fan-in) or are outputs (fan-out), and the evidence for it.

Responsible only for dimensions that grow. Guesses from names come from `_sharding/describe`; a guess that the
initializer contradicts is not used.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from lazymodel._abstract.paths import rule_path
from lazymodel._programs.moments import Moments
from lazymodel._sharding.describe import Described
from lazymodel._sharding.roles import FUSED_HEADS, HEADS

Side: TypeAlias = Literal["in", "out"] | None  # None: the dimension counts layers, experts or words

_OTHER: Mapping[Side, Side] = {"in": "out", "out": "in"}
_LOOKED_UP = ("vocabulary", "entries", "positions")  # one of them is taken, or a number that the task sets
_COUNTED = ("layers", "experts", "blocks", "members", *_LOOKED_UP)
_OF_ROLE: dict[str, dict[str, Side]] = {
    "embedding": {"features": "out"},
    "lookup_table": {"features": "out"},
    "position_embedding": {"features": "out"},
    "norm": {"dimension": "out"},
    "bias": {"dimension": "out", "of its weight": "out", "rank": "out"},
    "scale": {"dimension": "out"},
}
_OF_LABEL: dict[str, Side] = {"in": "in", "out": "out", "space": "in", "multiplier": "out", "channels": "out"}
_IN_HEADS = (HEADS, FUSED_HEADS, "head_dim", "parts")
_READOUTS = ("output_head", "router")  # from the width to words or experts, stored in either order
_DENSE = ("mlp_up", "mlp_down")
# One number for each unit, created in any way, and tokens, which are added to the input.
_VECTOR = re.compile(r"(scale|offset|shift|gain|bias|alpha|beta|gamma|a_log|decay|token|embed(ding)?)$")
# variance · fan-in of LeCun's, He's and PyTorch's initializers, which shows what they used as the fan-in.
_FAN_IN_GAINS = (1.0, 2.0, 1 / 3)
_BY_CHANCE = 2  # a fan-in of one or two also fits standard normal numbers by chance
_TOLERANCE = 1e-3
_TOLERANCE_16_BITS = 1e-2


@dataclasses.dataclass(frozen=True)
class Grown:
    """A variable that both builds have."""

    path: str
    base: tuple[int, ...]
    shape: tuple[int, ...]
    described: Described
    weight: Described | None  # of the weight that it belongs to
    moments: tuple[Moments | None, Moments | None]  # of initial values in both; None if they are not random
    narrow: bool  # True if its numbers have 16 bits or fewer

    @property
    def labels(self) -> tuple[str, ...]:
        return self.described.labels

    @property
    def counted(self) -> frozenset[int]:
        """The dimensions that count layers or experts."""
        return frozenset(dim for dim, label in enumerate(self.labels) if label in _COUNTED)

    @property
    def changed(self) -> list[int]:
        return [dim for dim, (a, b) in enumerate(zip(self.base, self.shape, strict=True)) if a != b]

    @property
    def growing(self) -> list[int]:
        return [dim for dim in self.changed if dim not in self.counted]

    @property
    def is_vector(self) -> bool:
        """Returns True for one number per unit, except a readout of one number, whose initial value is zero or
        differs.
        """
        pairs = zip(self.shape, self.labels, strict=True)
        if sum(size > 1 and label != "layers" for size, label in pairs) != 1:
            return False
        alike = all(each is not None and each.std == 0 and each.mean for each in self.moments)
        return alike or _VECTOR.search(rule_path(self.path).lower()) is not None

    @property
    def stds(self) -> tuple[float | None, float | None]:
        """The standard deviations of the initial values in the base and in the model."""
        before, after = (None if each is None else each.std for each in self.moments)
        return before, after

    @property
    def ordered(self) -> bool:
        """Returns True if the order of its dimensions is known; for a LoRA factor, that of its weight."""
        return (self.weight if self.described.role == "lora" and self.weight else self.described).ordered

    def ratio(self, dim: int) -> float:
        return self.shape[dim] / self.base[dim]


@dataclasses.dataclass(frozen=True)
class Sides:
    """The side of each dimension that grows, and the evidence."""

    sides: Mapping[int, Side]
    source: str
    vector: bool = False

    def ratio(self, variable: Grown, side: Side) -> float:
        """The fan-in or fan-out divided by that of the base."""
        return math.prod((variable.ratio(dim) for dim, found in self.sides.items() if found == side), start=1.0)


_NOT_GROWING = Sides({}, "no dimension grows")


def find_sides(variable: Grown, given: Sequence[Side] | None) -> Sides | None:
    """The sides of the dimensions that grow; None if that is ambiguous. `given` is the user's own answer."""
    growing, role = variable.growing, variable.described.role
    if given is not None:
        return Sides({dim: side for dim in variable.changed if (side := given[dim]) is not None}, "axes")
    named = f"its name: {role.replace('_', ' ')}"
    if role in _READOUTS and not variable.ordered:
        return Sides(dict.fromkeys(variable.changed, "in"), named) if len(variable.changed) == 1 else None
    if not growing:  # a table with a growing number of words only: its name or its order is wrong
        return None if any(variable.labels[dim] in _LOOKED_UP for dim in variable.changed) else _NOT_GROWING
    known, drawn = _by_name(variable), _by_initializer(variable)
    if known is not None and variable.ordered:
        return Sides(known, "its name" if role in _DENSE else named, vector=role in ("norm", "bias", "scale"))
    if drawn is not None:
        return Sides(drawn, "its initializer's fan-in")
    if variable.is_vector:
        return Sides(dict.fromkeys(growing, "out"), "one number for each unit", vector=True)
    if role not in _OF_ROLE and len(growing) == 2 and math.isclose(*map(variable.ratio, growing)):
        return Sides({growing[0]: "in", growing[1]: "out"}, "two dimensions that grow alike")
    return None


def _by_name(variable: Grown) -> dict[int, Side] | None:
    sides: dict[int, Side] = {dim: _side(variable, dim) for dim in variable.growing}
    return None if None in sides.values() else sides


def _side(variable: Grown, dim: int) -> Side:
    labels, role, label = variable.labels, variable.described.role, variable.labels[dim]
    if role == "lora" and variable.weight is not None:
        # A factor has the sides of its weight in the dimensions that they share; its rank is the other side.
        dims = (dim for dim in variable.described.dims if dim is not None)
        along: set[Side] = {_label_side(variable.weight.labels, dim) for dim in dims}
        side = along.pop() if len(along) == 1 else None
        return _OTHER.get(side) if label == "rank" else side
    if role == "bias" and len(variable.growing) > 1 and variable.weight is None:
        return None  # a bias has one dimension for each unit; others may have its name
    if role in _OF_ROLE:
        return _OF_ROLE[role].get(label)
    return _label_side(labels, dim)


def _label_side(labels: Sequence[str], dim: int) -> Side:
    if labels[dim] in _IN_HEADS:
        return "out" if "in" in labels else "in" if "out" in labels else None
    return _OF_LABEL.get(labels[dim])


def _by_initializer(variable: Grown) -> dict[int, Side] | None:
    """Dimensions that the initializer used as the fan-in: in both builds, its variance fits their size."""
    before, after = variable.stds
    if not before or not after:
        return None
    own = [dim for dim in range(len(variable.shape)) if dim not in variable.counted]
    tolerance = _TOLERANCE_16_BITS if variable.narrow else _TOLERANCE
    found: list[dict[int, Side]] = []
    for count in range(1, max(len(own), 2)):
        for dims in itertools.combinations(own, count):
            if math.prod(variable.shape[dim] for dim in dims) <= _BY_CHANCE:
                continue
            gains = [
                std**2 * math.prod(shape[dim] for dim in dims)
                for std, shape in ((before, variable.base), (after, variable.shape))
            ]
            if any(all(math.isclose(gain, known, rel_tol=tolerance) for gain in gains) for known in _FAN_IN_GAINS):
                sides: dict[int, Side] = {dim: "in" if dim in dims else "out" for dim in variable.growing}
                if sides not in found:
                    found.append(sides)
    return found[0] if len(found) == 1 else None

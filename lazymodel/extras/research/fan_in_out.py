"""The dimensions of a variable that are summed over (fan-in) or are outputs (fan-out), and the evidence for it.

Responsible only for dimensions that grow. Guesses from names come from `_sharding/describe`; a guess that the
initializer contradicts is not used.

The mean and standard deviation of the values of an init program, inferred from its jaxpr: nothing is run.

Responsible for the steps of common initializers: uniform and (truncated) normal numbers, orthogonal matrices, scaled,
shifted, moved. For any other step the result is unknown.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from lazymodel._abstract.variable import rule_path
from lazymodel._programs.jaxprs import CALLS, JIT, STRUCTURAL, equations, inner_jaxpr, is_key, walk
from lazymodel._programs.programs import InitRecipe, given_values, x64_context
from lazymodel._sharding.describe import Described
from lazymodel._sharding.roles import FUSED_HEADS, HEADS

_MOVES = STRUCTURAL | frozenset(
    ["convert_element_type", "optimization_barrier", "copy", "copy_p", "device_put", "stop_gradient", "nextafter"]
)
_QR = ("qr", "householder_product")
_NORMAL = NormalDist()
_UNCUT = 0.99  # for erf_inv's argument: from here on the normal distribution is not truncated, only rounded below 1
_EDGE = 1e-15  # distance of a probability from 0 and 1
_ROUNDING = 1e-2  # share of a support's width within which a bound counts as its end, also in 16 bits


@dataclasses.dataclass(frozen=True)
class Moments:
    """The distribution of each element of an array."""

    mean: float
    std: float
    support: tuple[float, float] | None = None  # the range of uniform numbers, and of values computed from them

    @property
    def is_uniform(self) -> bool:
        return self.support is not None and math.isclose(self.std, (self.support[1] - self.support[0]) / math.sqrt(12))

    def times(self, other: Moments) -> Moments:
        """The product of independent values."""
        if self.std and other.std:
            mean, square = self.mean * other.mean, (self.mean**2 + self.std**2) * (other.mean**2 + other.std**2)
            return Moments(mean, math.sqrt(max(square - mean**2, 0)))
        return self._moved(other.mean, 0.0) if self.std else other._moved(self.mean, 0.0)

    def plus(self, other: Moments) -> Moments:
        """The sum of independent values."""
        if self.std and other.std:
            return Moments(self.mean + other.mean, math.hypot(self.std, other.std))
        return self._moved(1.0, other.mean) if self.std else other._moved(1.0, self.mean)

    def _moved(self, factor: float, shift: float) -> Moments:
        support = None
        if self.support and factor:
            low, high = sorted(bound * factor + shift for bound in self.support)
            support = (low, high)
        return Moments(self.mean * factor + shift, abs(self.std * factor), support)


_MINUS = Moments(-1.0, 0.0)
_BITS = Moments(math.nan, math.nan)  # random integers


def moments(recipe: InitRecipe) -> tuple[Moments | None, ...]:
    """For each variable of a recipe the distribution of its elements; None if unknown.

    It is also unknown for values that are neither random nor the same number everywhere.
    """
    with x64_context(recipe):
        closed = jax.make_jaxpr(recipe.function)(*recipe.inputs)
    return tuple(walk(closed, list(map(_of_value, recipe.inputs)), _of_constant, _of_equation))


def is_random(recipe: InitRecipe) -> bool:
    """Returns True if the recipe draws random numbers, or is given a matrix that may have been drawn."""
    if recipe.function is given_values and recipe.inputs[0].ndim > 1:
        return True
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(recipe.function)(*recipe.inputs))}
    return any(name.startswith(("random_", "rng_", "threefry")) for name in names)


def _of_value(value: Any) -> Moments | None:
    """The moments of a known array with the same number everywhere."""
    if is_key(value.dtype):
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "biufV" or not array.size or not (array == array.flat[0]).all():
        return None
    return Moments(float(array.flat[0]), 0.0)


def _of_constant(_: Any, value: Any) -> Moments | None:
    return _of_value(value)


def _of_equation(eqn: Any, operands: Sequence[Moments | None]) -> Sequence[Moments | None]:
    name, unknown = eqn.primitive.name, [None] * (len(eqn.outvars) - 1)
    if name in _QR or eqn.params.get("name") == "qr":
        # The first result has orthonormal columns, or rows if it is wide. The other results are unknown.
        return [Moments(0.0, 1 / math.sqrt(max(eqn.outvars[0].aval.shape[-2:]))), *unknown]
    if name in JIT or name in CALLS:
        return walk(inner_jaxpr(eqn), operands, _of_constant, _of_equation)
    if name in _MOVES and name not in _RULES:
        return [_moved(operands, eqn)] * len(eqn.outvars)  # `split` has several results
    found = _BITS if name == "random_bits" else _RULES[name](operands, eqn) if name in _RULES else None
    return [found, *unknown][: len(eqn.outvars)]


def _moved(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    if eqn.primitive.name != "concatenate":  # otherwise the array is the first operand; indices follow
        return next(iter(operands), None)
    if None in operands:
        return None
    sizes = np.array([atom.aval.size for atom in eqn.invars]) / eqn.outvars[0].aval.size
    parts = [each for each in operands if each is not None]
    if len(set(parts)) == 1:
        return parts[0]
    mean = sum(size * each.mean for size, each in zip(sizes, parts, strict=True))
    square = sum(size * (each.mean**2 + each.std**2) for size, each in zip(sizes, parts, strict=True))
    return Moments(float(mean), math.sqrt(max(square - mean**2, 0)))


def _both(combine: Callable[[Moments, Moments], Moments]) -> Callable[[Sequence[Moments | None], Any], Moments | None]:
    def rule(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
        first, second = operands
        if first is None or second is None or first is _BITS or second is _BITS:
            return _BITS if first is _BITS or second is _BITS else None  # bits stay random
        shared = len({id(atom) for atom in eqn.invars}) < len(operands)
        return None if shared and first.std else combine(first, second)

    return rule


def _divided(first: Moments, second: Moments) -> Moments:
    return Moments(math.nan, math.nan) if second.std or not second.mean else first.times(Moments(1 / second.mean, 0.0))


def _bitcast(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """Random bits become floats in [1, 2), as in `jax.random.uniform`; otherwise bits are kept."""
    floating = jax.numpy.issubdtype(eqn.outvars[0].aval.dtype, np.floating)
    return Moments(1.5, 1 / math.sqrt(12), (1.0, 2.0)) if operands[0] is _BITS and floating else operands[0]


def _erf_inv(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """For uniform numbers: a normal number over √2, truncated where they end."""
    found = operands[0]
    if found is None or found.support is None or not found.is_uniform or max(map(abs, found.support)) > 1:
        return None
    if min(map(abs, found.support)) > _UNCUT:
        return Moments(0.0, math.sqrt(0.5), (-math.inf, math.inf))
    low, high = (_NORMAL.inv_cdf(max(min((1 + bound) / 2, 1 - _EDGE), _EDGE)) for bound in found.support)
    mass, (a, b) = _NORMAL.cdf(high) - _NORMAL.cdf(low), (_NORMAL.pdf(low), _NORMAL.pdf(high))
    mean = (a - b) / mass
    std = math.sqrt((1 + (low * a - high * b) / mass - mean**2) / 2)
    return Moments(mean / math.sqrt(2), std, (low / math.sqrt(2), high / math.sqrt(2)))


def _extreme(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """For numbers and a bound that only limits rounding errors."""
    first, second = operands
    if first is None or second is None or (first.std and second.std):
        return None
    choose = max if eqn.primitive.name == "max" else min
    if not first.std and not second.std:
        return Moments(choose(first.mean, second.mean), 0.0)
    found, bound = (first, second.mean) if first.std else (second, first.mean)
    if found.support is None:
        return None
    low, high = found.support
    slack = _ROUNDING * (high - low)
    holds = bound <= low + slack if choose is max else bound >= high - slack
    return found if holds else None


def _of_number(function: Callable[[float], float]) -> Callable[[Sequence[Moments | None], Any], Moments | None]:
    """For one number everywhere."""

    def rule(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
        found = operands[0]
        return None if found is None or found.std or math.isnan(found.mean) else Moments(function(found.mean), 0.0)

    return rule


def _same_bits(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """Bits are random if an operand's are; hiding a value does not change its bits."""
    return _BITS if _BITS in operands else operands[0]


_RULES: Mapping[str, Callable[[Sequence[Moments | None], Any], Moments | None]] = {
    "mul": _both(Moments.times),
    "add": _both(Moments.plus),
    "sub": _both(lambda first, second: first.plus(second.times(_MINUS))),
    "div": _both(_divided),
    "neg": lambda operands, eqn: None if operands[0] is None else operands[0].times(_MINUS),
    "sqrt": _of_number(lambda value: math.sqrt(value) if value >= 0 else math.nan),
    "erf": _of_number(math.erf),
    "max": _extreme,
    "min": _extreme,
    # For the diagonal of a factorization, whose values are unknown: both signs are equally likely.
    "sign": lambda operands, eqn: Moments(0.0, 1.0),
    "erf_inv": _erf_inv,
    "bitcast_convert_type": _bitcast,
    "shift_right_logical": _same_bits,
    "or": _same_bits,
    "xor": _same_bits,
}


Side: TypeAlias = Literal["in", "out"] | None  # None: the dimension counts layers, experts or words

_OTHER: Mapping[Side, Side] = {"in": "out", "out": "in"}
_LOOKED_UP = ("vocabulary", "entries", "positions")  # one of them is taken, or a number that the task sets
_COUNTED = ("layers", "experts", "blocks", "members", *_LOOKED_UP)
_OF_LABEL: dict[str, Side] = {
    "in": "in", "space": "in", "out": "out", "features": "out", "multiplier": "out", "channels": "out",
}  # fmt: skip
_VECTORS = ("norm", "bias", "scale")
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
        return Sides(known, "its name" if role in _DENSE else named, vector=role in _VECTORS)
    if drawn is not None:
        return Sides(drawn, "its initializer's fan-in")
    if variable.is_vector:
        return Sides(dict.fromkeys(growing, "out"), "one number for each unit", vector=True)
    if role not in _VECTORS and len(growing) == 2 and math.isclose(*map(variable.ratio, growing)):
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
    return "out" if role in _VECTORS else _label_side(labels, dim)


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

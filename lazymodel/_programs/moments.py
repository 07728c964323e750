"""The mean and standard deviation that an init program draws from, read off its jaxpr: nothing is run.

Responsible for the steps that initializers are made of: uniform and (truncated) normal numbers, orthogonal matrices,
scaled, shifted, moved. Of what else there may be it says that it does not know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import jax
import numpy as np

from lazymodel._programs.jaxprs import CALLS, JIT, STRUCTURAL, equations, inner_jaxpr, opened, uses_x64
from lazymodel._programs.keys import is_key
from lazymodel._programs.programs import InitRecipe, given_values

_MOVES = STRUCTURAL | frozenset(
    ["convert_element_type", "optimization_barrier", "copy", "copy_p", "device_put", "stop_gradient", "nextafter"]
)
_QR = ("qr", "householder_product")
_NORMAL = NormalDist()
_UNCUT = 0.99  # of erf_inv's argument: the last number of a type before one, so a normal that nothing cuts
_EDGE = 1e-15  # how near to the ends a probability comes
_ROUNDING = 1e-2  # of a support's width, within which a bound is its end, in 16 bits too


@dataclasses.dataclass(frozen=True)
class Moments:
    """What each element of an array is drawn from."""

    mean: float
    std: float
    support: tuple[float, float] | None = None  # between which they lie, of uniform numbers and what is made of them

    @property
    def is_uniform(self) -> bool:
        return self.support is not None and math.isclose(self.std, (self.support[1] - self.support[0]) / math.sqrt(12))

    def times(self, other: Moments) -> Moments:
        """The product of independent ones."""
        if self.std and other.std:
            mean, square = self.mean * other.mean, (self.mean**2 + self.std**2) * (other.mean**2 + other.std**2)
            return Moments(mean, math.sqrt(max(square - mean**2, 0)))
        drawn, factor = (self, other.mean) if self.std else (other, self.mean)
        support = None
        if drawn.support and factor:
            low, high = (bound * factor for bound in drawn.support)
            support = (min(low, high), max(low, high))
        return Moments(drawn.mean * factor, abs(drawn.std * factor), support)

    def plus(self, other: Moments) -> Moments:
        """The sum of independent ones."""
        if self.std and other.std:
            return Moments(self.mean + other.mean, math.hypot(self.std, other.std))
        drawn, shift = (self, other.mean) if self.std else (other, self.mean)
        support = drawn.support and (drawn.support[0] + shift, drawn.support[1] + shift)
        return Moments(drawn.mean + shift, drawn.std, support)


_MINUS = Moments(-1.0, 0.0)
_BITS = Moments(math.nan, math.nan)  # random integers


def moments(recipe: InitRecipe) -> tuple[Moments | None, ...]:
    """For each variable of a recipe what its elements are drawn from; None where that is not known.

    What draws nothing at random, and is not the same number everywhere, is not known either.
    """
    with jax.enable_x64(uses_x64() if recipe.x64 is None else recipe.x64):
        closed = jax.make_jaxpr(recipe.function)(*recipe.inputs)
    jaxpr, consts = opened(closed)
    given = [_of_value(value) for value in (*consts, *recipe.inputs)]
    return tuple(_walk(jaxpr, dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))))


def is_random(recipe: InitRecipe) -> bool:
    """Whether the recipe draws random numbers, or is given a matrix that may have been drawn."""
    if recipe.function is given_values and recipe.inputs[0].ndim > 1:
        return True
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(recipe.function)(*recipe.inputs))}
    return any(name.startswith(("random_", "rng_", "threefry")) for name in names)


def _of_value(value: Any) -> Moments | None:
    """A known array: the number that it has everywhere."""
    if is_key(value.dtype):
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "biufV" or not array.size or not (array == array.flat[0]).all():
        return None
    return Moments(float(array.flat[0]), 0.0)


def _walk(jaxpr: Any, env: dict[Any, Moments | None]) -> list[Moments | None]:
    def read(atom: Any) -> Moments | None:
        return _of_value(atom.val) if hasattr(atom, "val") else env.get(atom)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in _QR or eqn.params.get("name") == "qr":
            # Of the first result: orthonormal columns, or rows where it is wide. Of what is left nothing is known.
            shape = eqn.outvars[0].aval.shape
            env[eqn.outvars[0]] = Moments(0.0, 1 / math.sqrt(max(shape[-2:])))
        elif name in JIT or name in CALLS:
            inner, consts = opened(inner_jaxpr(eqn))
            known = dict(zip(inner.invars, operands, strict=True))
            known.update(zip(inner.constvars, map(_of_value, consts), strict=True))
            env.update(zip(eqn.outvars, _walk(inner, known), strict=True))
        elif name == "random_bits":
            env[eqn.outvars[0]] = _BITS
        elif (rule := _RULES.get(name)) is not None:
            env[eqn.outvars[0]] = rule(operands, eqn)
        elif name in _MOVES:
            env.update(dict.fromkeys(eqn.outvars, _moved(operands, eqn)))  # of which `split` has several
    return [read(atom) for atom in jaxpr.outvars]


def _moved(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    if eqn.primitive.name != "concatenate":  # else the array is the first; indices follow
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
            return _BITS if first is _BITS or second is _BITS else None  # whichever bits are kept or set
        shared = len({id(atom) for atom in eqn.invars}) < len(operands)
        return None if shared and first.std else combine(first, second)

    return rule


def _divided(first: Moments, second: Moments) -> Moments:
    return Moments(math.nan, math.nan) if second.std or not second.mean else first.times(Moments(1 / second.mean, 0.0))


def _bitcast(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """Random bits become floats in [1, 2), as `jax.random.uniform` sets their exponent; else bits are kept."""
    floating = jax.numpy.issubdtype(eqn.outvars[0].aval.dtype, np.floating)
    return Moments(1.5, 1 / math.sqrt(12), (1.0, 2.0)) if operands[0] is _BITS and floating else operands[0]


def _erf_inv(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """Of uniform numbers: a normal number over √2, cut where they end."""
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
    """Of numbers and a bound, which holds no more than what rounding did."""
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
    """Of one number everywhere."""

    def rule(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
        found = operands[0]
        return None if found is None or found.std or math.isnan(found.mean) else Moments(function(found.mean), 0.0)

    return rule


def _sign(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """Of the diagonal of a factorization, of which nothing else is known: as often one as the other."""
    return Moments(0.0, 1.0)


def _same_bits(operands: Sequence[Moments | None], eqn: Any) -> Moments | None:
    """Bits are random if an operand's are; what hides a value changes none of its own."""
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
    "sign": _sign,
    "erf_inv": _erf_inv,
    "bitcast_convert_type": _bitcast,
    "shift_right_logical": _same_bits,
    "or": _same_bits,
    "xor": _same_bits,
}

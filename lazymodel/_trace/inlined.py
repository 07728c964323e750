"""Keeps operations together, while tracing, that eager execution compiles together.

Most functions of `jax.numpy` are compiled functions that JAX inlines when it traces them: `x.mean(0)` becomes a sum and
a division. Run eagerly, both are one kernel, in which the compiler divides by a constant differently than by a run-time
number. Inside `keep_inlined`, such a function stays one equation of the outermost jaxpr, as it is one kernel in eager
execution.

No public API shows which equations came from one function, so this module wraps the rule by which JAX puts a compiled
function into a jaxpr; outside of `keep_inlined` the rule is unchanged. Functions called by a compiled function are
inlined as usual, so JAX' caches are not affected. If one kernel and several give the same bits, as for most elementwise
functions, `comes_apart` returns True.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Generator, Iterator
from typing import Any, cast

import jax
import jax.extend.core.primitives as primitives
import numpy as np
from jax._src import core  # the class of the trace of eager execution is not exported
from jax._src.interpreters import partial_eval  # the table of rules is not exported

from lazymodel._programs.jaxprs import CALLS, JIT, equations, inner_jaxprs, is_partitionable, rounds

_jit: Any = getattr(primitives, "jit_p", None)
_rules = cast("dict[Any, Any]", partial_eval.custom_staging_rules)
_usual = _rules[_jit]
# Prefix for the names of functions that JAX would have inlined: they are split again if that changes nothing.
INLINED = "inlined_"
_keeping = threading.local()
# Values of JAX' `traced_for` for functions whose bodies eager execution runs step by step.
_STEPWISE = ("custom_jvp", "custom_vjp")


@contextlib.contextmanager
def keep_inlined(on: bool = True) -> Generator[None]:
    """In the block, the outermost traces of this thread keep compiled functions that JAX would inline, if `on`."""
    before = getattr(_keeping, "on", False)
    _keeping.on = on
    try:
        yield
    finally:
        _keeping.on = before


def comes_apart(eqn: Any) -> bool:
    """True if an equation is a function that JAX would have inlined, and its equations one by one give the same bits.

    This is the case if at most one of them rounds, so the compiler has nothing to fuse or reassociate, and that one
    is elementwise, without a constant for which it might be rewritten. A bool converted to float also counts as
    rounding: its product with a number is compiled as a choice between the number and zero.
    """
    if eqn.primitive.name not in JIT or not eqn.params["name"].startswith(INLINED):
        return False
    return _is_separable(eqn.params["jaxpr"])


@functools.lru_cache(maxsize=512)  # layers share them
def _is_separable(closed: Any) -> bool:
    jaxpr = closed.jaxpr
    if len(jaxpr.eqns) == 1 and not _has_constant(jaxpr.eqns[0]):
        return jaxpr.eqns[0].primitive.name not in JIT
    rounding = list(_rounding(jaxpr))
    converted = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "convert_element_type")
    if rounding and any(eqn.invars[0].aval.dtype == np.bool_ for eqn in converted):
        return False
    return is_partitionable(jaxpr) and len(rounding) <= 1 and not any(map(_has_constant, rounding))


def _rounding(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in JIT or eqn.primitive.name in CALLS:
            for inner in inner_jaxprs(eqn):
                yield from _rounding(inner)
        elif rounds(eqn):
            yield eqn


def _has_constant(eqn: Any) -> bool:
    """Returns True if an equation contains a floating-point constant."""
    return any(hasattr(atom, "val") and jax.numpy.issubdtype(atom.aval.dtype, np.inexact) for atom in eqn.invars)


def _rule(trace: Any, *args: Any, **params: Any) -> Any:
    kept = _kept(params["inline"]) if getattr(_keeping, "on", False) else None
    if kept is not None and _runs_stepwise(trace):
        params = {**params, "inline": kept, "name": INLINED + params["name"]}
    return _usual(trace, *args, **params)


def _kept(inline: Any) -> Any:
    """The parameter with which JAX does not inline a function; None if it would not do so anyway."""
    if isinstance(inline, enum.Enum):  # since JAX 0.12
        return inline.__class__["AUTO"] if inline.name == "JAX_EARLY" else None
    return False if inline else None


def _runs_stepwise(trace: Any) -> bool:
    """True if eager execution runs the traced code one equation at a time, and not in a compiled function."""
    while True:
        outer = trace.parent_trace
        while hasattr(outer, "parent_trace") and not hasattr(outer, "frame"):  # skip vmap and grad
            outer = outer.parent_trace
        if isinstance(outer, core.EvalTrace):
            return True
        if not hasattr(outer, "frame") or not str(trace.frame.debug_info.traced_for).startswith(_STEPWISE):
            return False
        trace = outer


_rules[_jit] = _rule

"""Keeps together, while tracing, what eager execution compiles together.

Most functions of `jax.numpy` are compiled functions that JAX inlines when it traces them: `x.mean(0)` becomes a sum and
a division. Run eagerly, both are one kernel, in which the compiler divides by a constant otherwise than by a run-time
number. Inside `keep_inlined`, such a function stays one equation of the outermost jaxpr, as it is one kernel there.

Nothing public says which equations came from one function, so the rule by which JAX puts a compiled function into a
jaxpr is wrapped here; outside `keep_inlined` it does what it always did. What a compiled function calls itself is
inlined as always, so nothing of this is left in JAX's caches. Where one kernel or several are the same, as for most
elementwise functions, `comes_apart` says so.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Generator, Iterator
from typing import Any, cast

import jax
import jax.extend.core.primitives as primitives
import numpy as np
from jax._src import core  # the class of the trace of eager execution is not exported
from jax._src.interpreters import partial_eval  # the table of rules is not exported

from lazymodel._programs.jaxprs import CALLS, JIT, equations, inner_jaxprs, is_partitionable, opened, rounds

_jit: Any = getattr(primitives, "jit_p", None)
_rules = cast("dict[Any, Any]", partial_eval.custom_staging_rules)
_usual = _rules[_jit]
# Marks the names of functions that JAX would have inlined: they are taken apart again where that changes nothing.
INLINED = "inlined_"
_keeping = threading.local()
# Functions whose bodies eager execution runs step by step, by what JAX says that it traces them for.
_STEPWISE = ("custom_jvp", "custom_vjp")


@contextlib.contextmanager
def keep_inlined(on: bool = True) -> Generator[None]:
    """The outermost traces of this thread keep compiled functions that JAX would inline, or no longer do."""
    before = getattr(_keeping, "on", False)
    _keeping.on = on
    try:
        yield
    finally:
        _keeping.on = before


def comes_apart(eqn: Any) -> bool:
    """Whether an equation is a function that JAX would have inlined, and its equations one by one give the same bits.

    They do if no more than one of them rounds, so that the compiler has nothing to fuse or reassociate, and that one
    is elementwise, without a constant that it might be rewritten for. A bool that becomes a float is one as well: its
    product with a number is compiled as a choice, of the number or of zero.
    """
    if eqn.primitive.name not in JIT or not eqn.params["name"].startswith(INLINED):
        return False
    jaxpr = opened(eqn.params["jaxpr"])[0]
    if len(jaxpr.eqns) == 1 and not _has_constant(jaxpr.eqns[0]):
        return jaxpr.eqns[0].primitive.name not in JIT
    rounding = list(_rounding(jaxpr))
    if rounding and any(map(_is_of_bool, equations(jaxpr))):
        return False
    return is_partitionable(jaxpr) and len(rounding) <= 1 and not any(map(_has_constant, rounding))


def _rounding(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in JIT or eqn.primitive.name in CALLS:
            for inner in inner_jaxprs(eqn):
                yield from _rounding(inner)
        elif rounds(eqn):
            yield eqn


def _is_of_bool(eqn: Any) -> bool:
    return eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == np.bool_


def _has_constant(eqn: Any) -> bool:
    """Whether a floating-point number is fixed in an equation."""
    return any(hasattr(atom, "val") and jax.numpy.issubdtype(atom.aval.dtype, np.inexact) for atom in eqn.invars)


def _rule(trace: Any, *args: Any, **params: Any) -> Any:
    kept = _kept(params["inline"]) if getattr(_keeping, "on", False) else None
    if kept is not None and _runs_stepwise(trace):
        params = {**params, "inline": kept, "name": INLINED + params["name"]}
    return _usual(trace, *args, **params)


def _kept(inline: Any) -> Any:
    """The parameter of a function that JAX does not inline, or None where it would not anyway."""
    if isinstance(inline, enum.Enum):  # since JAX 0.12
        return inline.__class__["AUTO"] if inline.name == "JAX_EARLY" else None
    return False if inline else None


def _runs_stepwise(trace: Any) -> bool:
    """Whether eager execution runs what is traced one equation at a time, rather than in a compiled function."""
    while True:
        outer = trace.parent_trace
        while hasattr(outer, "parent_trace") and not hasattr(outer, "frame"):  # vmap and grad, which pass it on
            outer = outer.parent_trace
        if isinstance(outer, core.EvalTrace):
            return True
        if not hasattr(outer, "frame") or not str(trace.frame.debug_info.traced_for).startswith(_STEPWISE):
            return False
        trace = outer


_rules[_jit] = _rule

"""A trace in which small arrays have values, for a function that only its result identifies as JAX' own or another's.

Values that the function computes from constants are both traced and computed, so it can use them where only concrete
values work.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any, Self, cast

import jax
from jax._src import core  # there is no public API for replacing a trace

from lazymodel._programs.jaxprs import equations, inner_jaxprs
from lazymodel._trace.inlined import keep_inlined

# Bytes of all computed values. Large models are still built abstractly; tables that layers take are small.
_COMPUTED_NBYTES = 32 << 20
_ALWAYS_NBYTES = 1 << 10  # arrays up to this size are always computed: a seed, a scalar


class ValuedTrace(core.Trace):
    """Replaces the current trace; used as a context manager, and kept until that trace ends.

    An array with a value is an ordinary `jax.Array`, which the other trace knows as the result of the traced operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trace: Any = core.trace_ctx.trace
        # Objects of NNX may only be changed in the trace in which they were created.
        self._weakref, self.requires_low = self._trace._weakref, self._trace.requires_low
        self._available = _COMPUTED_NBYTES
        self._passed = len(self._equations)  # number of equations that existed before, or have values
        self._kept: list[tuple[Any, Any]] = []  # values, identified by their `id`, and their tracers
        self._stack = contextlib.ExitStack()
        self.left = False

    def __enter__(self) -> Self:
        self._stack.enter_context(core.set_current_trace(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def _equations(self) -> Any:
        return self._trace.frame.tracing_eqns

    def leave(self) -> bool:
        """From here on JAX computes without tracing. Returns False if something without a value was traced."""
        if self.left or core.trace_ctx.trace is not self:
            return True
        if len(self._equations) > self._passed:
            return False
        self._stack.enter_context(keep_inlined(False))
        self._stack.enter_context(core.eval_context())
        self.left = True
        return True

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        before = len(self._equations)
        traced = self._trace.process_primitive(primitive, args, params)
        results = traced if primitive.multiple_results else [traced]
        if not results or any(isinstance(arg, core.Tracer) for arg in args):
            return traced
        nbytes = sum(map(_nbytes, results))
        inner = (eqn for jaxpr in inner_jaxprs(SimpleNamespace(params=params)) for eqn in equations(jaxpr))
        largest = max([nbytes, *(_size(var.aval) for eqn in inner for var in eqn.outvars)])
        if largest > max(self._available, _ALWAYS_NBYTES):
            return traced
        with jax.ensure_compile_time_eval():
            computed = self._trace.process_primitive(primitive, args, params)
        values = computed if primitive.multiple_results else [computed]
        self._available -= nbytes
        self._passed += len(self._equations) - before
        self._kept += zip(values, results, strict=True)
        self._trace.frame.constid_to_tracer.update((id(value), result) for value, result in self._kept[-len(values) :])
        return computed

    # Eager execution runs the bodies of these step by step.

    def process_call(self, primitive: Any, function: Any, args: Any, params: Any, /) -> Any:
        return self._run(function, args)

    def process_custom_jvp_call(self, primitive: Any, function: Any, jvp: Any, args: Any, /, **_: Any) -> Any:
        return self._run(function, args)

    def process_custom_vjp_call(self, primitive: Any, function: Any, fwd: Any, bwd: Any, args: Any, /, **_: Any) -> Any:
        return self._run(function, args)

    def _run(self, function: Any, args: Any) -> Any:
        with core.set_current_trace(self):
            return function.call_wrapped(*args)

    def stage_value(self, val: Any) -> Any:
        small = getattr(val, "nbytes", 0) <= self._available
        return (core.eval_trace if small and not isinstance(val, core.Tracer) else self._trace).stage_value(val)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)  # methods that not every trace has, such as `shard_map`


def _nbytes(result: Any) -> float:
    """Bytes of a traced array; infinite if it has a value already, or comes from a side effect."""
    if not isinstance(result, core.Tracer) or getattr(cast(Any, result).parent, "effects", None):
        return math.inf
    return _size(result.aval)


def _size(aval: Any) -> float:
    return aval.size * aval.dtype.itemsize if isinstance(aval, core.ShapedArray) else math.inf

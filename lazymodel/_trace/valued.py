"""A trace in which small arrays have values, for a function of which only the result says whether it is JAX' own.

What the function computes from constants is traced and computed, so that it can also be used where only values will do.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Self, cast

import jax
from jax._src import core  # how a trace takes the place of another, nothing public says

from lazymodel._trace.inlined import keep_inlined

# Bytes of all that is computed, so that a large model is built abstractly; tables and scalars that layers get are small.
_COMPUTED_NBYTES = 32 << 20
_ALWAYS_NBYTES = 1 << 10  # seeds and scalars


class ValuedTrace(core.Trace):
    """Stands in for the trace that runs where this is made; used as a context manager.

    An array with a value is an ordinary `jax.Array`, and known to the other trace as the result of what was traced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trace: Any = core.trace_ctx.trace
        # Objects of NNX may be changed only in the trace that they were made in.
        self._weakref, self.requires_low = self._trace._weakref, self._trace.requires_low
        self._available = _COMPUTED_NBYTES
        self._others = len(self._trace.frame.tracing_eqns)  # equations whose results have no values, and what was before
        self._kept: list[tuple[Any, Any]] = []  # values, which are known by their `id`, and their tracers
        self._stack = contextlib.ExitStack()
        self.left = False

    def __enter__(self) -> Self:
        self._stack.enter_context(core.set_current_trace(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def leave(self) -> bool:
        """From here on JAX computes as if nothing were traced. False if something was traced that has no value."""
        if self.left or core.trace_ctx.trace is not self:
            return True
        if len(self._trace.frame.tracing_eqns) > self._others:
            return False
        self._stack.enter_context(keep_inlined(False))
        self._stack.enter_context(core.eval_context())
        self.left = True
        return True

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        before = len(self._trace.frame.tracing_eqns)
        traced = self._trace.process_primitive(primitive, args, params)
        results = traced if primitive.multiple_results else [traced]
        nbytes = sum(_nbytes(result) for result in results)
        if not results or nbytes > max(self._available, _ALWAYS_NBYTES) or any(isinstance(arg, core.Tracer) for arg in args):
            return traced
        with jax.ensure_compile_time_eval():
            computed = self._trace.process_primitive(primitive, args, params)
        values = computed if primitive.multiple_results else [computed]
        self._available -= nbytes
        self._others += len(self._trace.frame.tracing_eqns) - before
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
        return getattr(self._trace, name)  # what not every trace can do, such as `shard_map`


def _nbytes(result: Any) -> float:
    """Bytes of a traced array; infinitely many where it has its value, is no array, or comes of a side effect."""
    if not isinstance(result, core.Tracer) or not isinstance(result.aval, core.ShapedArray):
        return math.inf
    return math.inf if getattr(cast(Any, result).parent, "effects", None) else result.size * result.dtype.itemsize

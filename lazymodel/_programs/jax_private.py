"""JAX' private parts that tracing needs, put in place while a trace runs; nothing of JAX changes on import.

`keep_inlined` replaces the rule by which JAX puts a compiled function into the outermost jaxpr: no public API shows
which equations came from one function. `ValuedTrace` replaces the current trace by one in which arrays that are
computed from constants have values. `tests/core/programs/test_jax_private.py` fails when one of these parts moves.
"""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, Self, cast

import jax
import jax.extend.core.primitives as primitives
from jax._src import core  # the class of the trace of eager execution, and the current trace
from jax._src.interpreters import partial_eval  # the table of rules

from lazymodel._programs.jaxprs import equations, inner_jaxprs

JIT: Any = getattr(primitives, "jit_p", None)
RULES = cast("dict[Any, Any]", partial_eval.custom_staging_rules)
# Prefix for the names of functions that JAX would have inlined: they are split again if that changes nothing.
INLINED = "inlined_"
# Values of JAX' `traced_for` for functions whose bodies eager execution runs step by step.
_STEPWISE = ("custom_jvp", "custom_vjp")


class _State(threading.local):
    keeping = False  # in this thread


_state = _State()
_lock = threading.Lock()
_blocks: list[Any] = []  # an entry for each block that runs in any thread
_usual: list[Any] = []  # JAX' own rule; also after the last block, for threads that call `_rule` just then


@contextlib.contextmanager
def keep_inlined(on: bool = True) -> Generator[None]:
    """In the block, the outermost traces of this thread keep compiled functions that JAX would inline, if `on`."""
    with _lock:
        if not _blocks:
            _usual[:], RULES[JIT] = [RULES[JIT]], _rule
        _blocks.append(on)
    before, _state.keeping = _state.keeping, on
    try:
        yield
    finally:
        _state.keeping = before
        with _lock:
            _blocks.pop()
            if not _blocks:
                RULES[JIT] = _usual[0]


def _rule(trace: Any, *args: Any, **params: Any) -> Any:
    kept = _kept(params["inline"]) if _state.keeping else None
    if kept is not None and _runs_stepwise(trace):
        params = {**params, "inline": kept, "name": INLINED + params["name"]}
    return _usual[0](trace, *args, **params)


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
        self.nbytes, self.left_nbytes = 0, 0  # computed, and not computed as they are beyond the limit
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
        if largest > max(_COMPUTED_NBYTES - self.nbytes, _ALWAYS_NBYTES):
            self.left_nbytes += 0 if largest == math.inf else int(largest)
            return traced
        with jax.ensure_compile_time_eval():
            computed = self._trace.process_primitive(primitive, args, params)
        values = computed if primitive.multiple_results else [computed]
        self.nbytes += int(nbytes)
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
        small = getattr(val, "nbytes", 0) <= _COMPUTED_NBYTES - self.nbytes
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

"""JAX' private parts: they are where we look for them, put in place only while a trace runs, and in its thread only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core, pjit
from jax._src.interpreters import partial_eval

import lazymodel as lm
from lazymodel._programs.jax_private import INLINED, JIT, RULES, ValuedTrace, keep_inlined

KEY = jax.random.key(0)
USUAL = RULES[JIT]


def centered(x: Any) -> Any:
    return x - x.mean(0)


def keeps() -> bool:
    """Returns True if a function is kept that JAX would inline."""
    jaxpr = jax.make_jaxpr(lambda x: centered(x))(np.ones((4, 3), "float32"))  # a new function: JAX caches traces
    return any(eqn.params.get("name", "").startswith(INLINED) for eqn in jaxpr.eqns)


def test_jax_has_what_is_used() -> None:
    assert JIT is pjit.jit_p
    assert USUAL.__module__.startswith("jax._src"), "JAX' rule is replaced while nothing is traced"
    assert issubclass(ValuedTrace, core.Trace)
    seen: list[Any] = []

    def look(x: Any) -> Any:
        trace = core.trace_ctx.trace
        seen.append(trace)
        assert isinstance(trace.parent_trace, core.EvalTrace)
        assert all(hasattr(trace, name) for name in ("_weakref", "requires_low", "process_primitive", "stage_value"))
        assert all(hasattr(trace.frame, name) for name in ("tracing_eqns", "constid_to_tracer", "debug_info"))
        assert hasattr(x + 1, "parent")
        return x

    jax.make_jaxpr(look)(1.0)
    assert len(seen) == 1
    own = {name for name in vars(ValuedTrace) if name.startswith("process_")} - {"process_call"}  # until JAX 0.10
    assert own <= {*dir(core.Trace), *dir(partial_eval.DynamicJaxprTrace)}, "a method of ours replaces none of JAX'"


def test_a_function_is_kept_in_the_block_only() -> None:
    assert not keeps()
    with keep_inlined():
        assert keeps()
        inner = jax.make_jaxpr(jax.jit(centered))(np.ones((4, 3), "float32"))
        assert INLINED not in str(inner), "inside of a compiled function it is inlined as usual"
        with keep_inlined(False):
            assert not keeps()
        assert keeps()
    assert RULES[JIT] is USUAL


def test_an_error_puts_the_rule_back() -> None:
    def fails(key: Any) -> Any:
        assert RULES[JIT] is not USUAL
        raise RuntimeError("in the init")

    with pytest.raises(RuntimeError, match="in the init"):
        lm.build_abstract(fails, KEY)
    with pytest.raises(lm.TraceError):
        lm.build_abstract(lambda key: float(jax.random.normal(key)), KEY)
    assert RULES[JIT] is USUAL
    assert isinstance(core.trace_ctx.trace, core.EvalTrace)


def test_two_threads() -> None:
    """One traces while the other does something else; the blocks overlap, and end in the order in which they began."""
    steps = [threading.Event() for _ in range(4)]

    def wait(number: int) -> None:
        assert steps[number].wait(30)

    def first() -> bool:
        with keep_inlined():
            steps[0].set()
            wait(1)
            kept = keeps()
        usual = not keeps()
        steps[2].set()
        return kept and usual

    def second() -> bool:
        wait(0)
        usual = not keeps()  # not in a block, beside one
        with keep_inlined():
            steps[1].set()
            wait(2)
            kept = keeps()
        return usual and kept

    with ThreadPoolExecutor(2) as pool:
        assert all(each.result(60) for each in [pool.submit(first), pool.submit(second)])
    assert RULES[JIT] is USUAL


def test_models_built_in_two_threads_are_eager_bit_for_bit() -> None:
    def init(key: Any) -> Any:
        return {"w": centered(jax.random.normal(key, (33, 7))), "mask": jnp.tril(jnp.ones((3, 3)))}

    def build(seed: int) -> Any:
        return lm.build_abstract(init, jax.random.key(seed)).materialize(progress=False)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(build, range(4)))
    for seed, model in enumerate(made):
        assert np.array_equal(model["w"], init(jax.random.key(seed))["w"])
    assert RULES[JIT] is USUAL

"""What can be said to be compiled, and what is wrong with it by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.conftest import child_environment

STEP = jax.jit(lambda tree, x: x)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def test_a_step_takes_all_keywords() -> None:
    compile = lm.Compile(STEP, X, batch=3, sequence="static")
    assert (compile.what, compile.function, compile.inputs) == ("step", STEP, (X,))
    assert dict(compile.keywords) == {"batch": 3, "sequence": "static"}
    assert (compile.batch, compile.sequence, compile.split) == (None, None, None)
    assert repr(compile) == "Compile(<lambda>, ShapedArray(float32[4,8]), batch=3, sequence='static')"
    named = lm.Compile("predict", batch=3, sequence=8)
    assert (named.what, named.function, named.batch, named.sequence) == ("predict", None, 3, 8)


def test_of_leaves_all_else_as_it_is() -> None:
    compile = lm.Compile(STEP, X, k=1)

    def split(model: Any) -> tuple[Any, ...]:
        return (model,)

    other = compile.of(split)
    assert (other.split, other.function, other.inputs, other.keywords) == (split, STEP, (X,), compile.keywords)
    assert compile.split is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lm.Compile(3), "got 3"),  # pyright: ignore
        (lambda: lm.Compile("step", STEP, X), "got 'step'"),
        (lambda: lm.Compile("predict", len), "'predict' is the model's own; pass a jitted function without a name"),
        (lambda: lm.Compile("generate", steps=4), "a keyword of 'generate' is batch or sequence; got steps"),
        (lambda: lm.Compile("predict").of(len), r"of\(\).* for 'predict'"),  # pyright: ignore
        (lambda: lm.Compile(STEP).of("params"), r"of\(\).* got 'params'"),  # pyright: ignore
    ],
)
def test_what_is_nothing_to_compile(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        make()


def test_a_plan_asks_the_compiler_of_a_step_jitted_or_not(mesh8: jax.sharding.Mesh) -> None:
    P = jax.sharding.PartitionSpec
    model = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (64, 256))}, jax.random.key(0))
    sharded = model.shard(mesh8, {"w": P(None, "model")})

    def step(tree: Any, x: Any, scale: float = 1.0) -> Any:
        return {"w": tree["w"] * scale + (x @ tree["w"]).sum()}

    x = np.ones((512, 64), "f")
    plain = sharded.plan(compile=lm.Compile(step, x))
    jitted = sharded.plan(compile=lm.Compile(jax.jit(step, static_argnames="scale"), x, scale=2.0))
    donated = sharded.plan(compile=lm.Compile(jax.jit(step, donate_argnums=0), x))
    shard = 64 * 256 * 4 // 8
    assert plain.compiled is not None and donated.compiled is not None and jitted.compiled is not None
    assert plain.device_nbytes == shard
    # The result is an array beside the model unless it takes its place; the inputs are held in any case.
    assert plain.used_nbytes == plain.compiled.peak_nbytes >= 2 * shard + x.nbytes
    assert jitted.used_nbytes - jitted.compiled.temporary_nbytes == plain.used_nbytes - plain.compiled.temporary_nbytes
    assert donated.compiled.alias_nbytes == shard
    assert plain.notes[-1] == "compiled step"
    with pytest.raises(lm.LazyModelError, match="compiling step .*lora_rank=2 adds"):
        sharded.plan(what_if=lm.WhatIf(lora_rank=2), compile=lm.Compile(step, x))


@pytest.mark.large
def test_a_later_process_finds_the_program_in_the_persistent_cache(tmp_path: Path) -> None:
    code = """if True:
        import sys, jax, lazymodel as lm
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        step, reports = jax.jit(lambda tree, x: x @ tree["w"]), []
        model = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (8, 8))}, jax.random.key(0))
        x = jax.numpy.ones((2, 8))
        params = model.materialize(compile=lm.Compile(step, x), report=reports.append)
        (found,) = reports[0].compiled
        assert f"a {found.cache} of the persistent cache" in " ".join(str(reports[0]).split())
        print(found.cache, float(step(params, x).sum()))
    """
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    )
    assert (first[0], second[0], first[1]) == ("miss", "hit", second[1])

"""Inits that need values: what they compute from constants is computed while they are traced, the rest is not."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.core.trace._eager import assert_eager, same_bytes
from tests.large import mostly_large

KEY = jax.random.key(3)


def a_closure(key: Any) -> Any:
    mask = jnp.tril(jnp.ones((4, 4)))
    return {"w": jax.random.normal(key, (4, 4)), "apply": lambda w: w * mask}


def sizes(key: Any) -> Any:
    return [jax.random.normal(key, (int(width),)) for width in jnp.unique(jnp.array([3, 5, 3]))]


def a_float(key: Any) -> Any:
    return {"w": jax.random.normal(key, (4,)) * math.exp(jnp.log(3.0))}


def a_branch(key: Any) -> Any:
    table = jnp.linspace(-1, 1, 7)
    scale = table if table.sum() > -1 else -table
    return {"table": table, "w": jax.random.normal(key, (7,)) * scale, "same": scale}


def in_numpy(key: Any) -> Any:
    found = np.asarray(jax.vmap(lambda x: jax.nn.softmax(x))(jnp.arange(12.0).reshape(3, 4)))
    return {"w": jax.random.normal(key, (3, 4)) @ found.T, "found": found}


def derivatives(key: Any) -> Any:
    slope = float(jax.grad(lambda x: jax.nn.gelu(x).sum())(jnp.ones(())))
    return {"w": jax.lax.scan(lambda x, _: (x * slope, x), jax.random.normal(key, (3,)), None, length=3)}


def compiled(key: Any) -> Any:
    width = jax.jit(lambda x: {"n": x.astype(int).sum(), "x": x})(jnp.ones(5))
    return {"w": jax.random.normal(key, (int(width["n"]), 2)), "x": width["x"]}


INITS: list[Callable[..., Any]] = [sizes, a_float, a_branch, in_numpy, derivatives, compiled]


@pytest.mark.parametrize(
    "init", mostly_large(INITS, [sizes, a_branch, in_numpy, compiled]), ids=lambda init: init.__name__
)
def test_constants_have_values(init: Callable[..., Any], mesh8: Any, tmp_path: Path) -> None:
    assert_eager(init, mesh8)
    abstract = lm.build_abstract(init, KEY)
    made = abstract.materialize(progress=False)
    lm.save_step(made, tmp_path, step=3)
    restored = lm.restore(abstract.shard(mesh8, {".*": jax.P()}), tmp_path)
    assert jax.tree.all(jax.tree.map(same_bytes, restored, made))


@pytest.mark.parametrize("in_mesh", mostly_large([False, True], [True]))
def test_global_generators_are_drawn_from_once(mesh8: Any, in_mesh: bool) -> None:
    """An attempt that fails draws too, which is undone: the values, and what is drawn next, are those of eager code."""

    def init(key: Any) -> Any:
        drawn = np.random.normal(size=3) + random.random()
        spec = jax.P("model" if in_mesh else None)
        w = jax.lax.with_sharding_constraint(jax.random.normal(key, (8,)), spec) if in_mesh else key
        return {"w": jax.random.normal(KEY, (int(jnp.arange(4).sum()),)), "drawn": drawn, "other": w}

    def run(way: Callable[[], Any]) -> tuple[Any, ...]:
        np.random.seed(5)
        random.seed(5)
        with jax.set_mesh(mesh8) if in_mesh else contextlib.nullcontext():
            return way(), np.random.normal(), random.random()

    made, *after = run(lambda: lm.build_abstract(init, KEY).materialize(progress=False))
    eager, *expected = run(lambda: init(KEY))
    assert jax.tree.all(jax.tree.map(same_bytes, made, eager)) and after == expected


def test_an_array_in_a_closure() -> None:
    made, eager = lm.build_abstract(a_closure, KEY).materialize(progress=False), a_closure(KEY)
    assert same_bytes(made["w"], eager["w"])
    assert same_bytes(made["apply"](made["w"]), eager["apply"](eager["w"]))


def test_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lazymodel"):
        lm.build_abstract(lambda key: {"w": jax.random.normal(key, (3,))}, KEY)
        assert not caplog.messages
        lm.build_abstract(a_closure, KEY)
    (message,) = caplog.messages
    assert "a_closure" in message
    assert int(message.partition(": ")[2].split()[0]) in range(64, 1024)  # of bytes, the mask's and what made it


def test_nothing_large_is_computed() -> None:
    """32 MiB in all, also by functions that return less."""
    computed: list[bool] = []

    def table(rows: int) -> jax.Array:
        made = jnp.ones((rows, 1 << 18))  # 1 MiB a row
        computed.append(not isinstance(made, jax.core.Tracer))
        return made

    def small(key: Any) -> Any:
        return {"w": jax.random.normal(key, (int(table(4)[0, 0]),))}

    assert lm.build_abstract(small, KEY)["w"].shape == (1,)
    assert computed == [False, True]
    computed.clear()

    def inside(key: Any) -> Any:
        return {"w": jax.random.normal(key, (int(jax.jit(lambda: jnp.cos(jnp.ones((64, 1 << 18))).sum())()),))}

    for build in (lambda key: {"w": jax.random.normal(key, (int(table(64)[0, 0]),))}, inside):
        with pytest.raises(lm.TraceError, match=r"compute constants with NumPy: JAX was to compute [\d,]{10,} bytes"):
            lm.build_abstract(build, KEY)
    with pytest.raises(lm.TraceError, match="which JAX does not look into"):
        lm.build_abstract(lambda key: {"w": jax.random.normal(key), "f": functools.partial(len, table(64))}, KEY)
    assert not any(computed)
    plain = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (1,)), "table": table(64)}, KEY)
    assert plain["table"].nbytes == 64 << 20


def test_values_that_depend_on_the_key_are_named() -> None:
    """The line of the second error: the first is mended."""

    def init(key: Any) -> Any:
        width = int(jnp.ones(3).sum())
        w = jax.random.normal(key, (width,))
        return {"w": w if w[0] > 0 else -w}

    with pytest.raises(lm.TraceError, match=r"return \{\"w\": w if w\[0\] > 0.*jax\.lax\.cond") as raised:
        lm.build_abstract(init, KEY)
    assert "NumPy: JAX was to" not in str(raised.value)


def test_other_errors_are_the_init_s_own() -> None:
    runs: list[int] = []

    def init(key: Any) -> Any:
        runs.append(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lm.build_abstract(init, KEY)
    assert len(runs) == 1

    def later(key: Any) -> Any:
        if int(jnp.ones(())) == 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lm.build_abstract(later, KEY)

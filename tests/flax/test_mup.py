"""muP of NNX and Linen modules: their own optimizers are given their updates by path."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import lazymodel as lm

WIDTHS = (16, 64)


def test_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self, width: int, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)])

        def __call__(self, x: Any) -> Any:
            return self.layers[1](self.layers[0](x))

    base, wide = (lm.build_abstract(Model, width, rngs=nnx.Rngs(0)) for width in WIDTHS)
    scheme = lm.mup(base, wide)
    assert {path: row.kind for path, row in scheme.items()} == {
        "layers/0/bias": "vector",
        "layers/0/kernel": "input",
        "layers/1/bias": "fixed",
        "layers/1/kernel": "output",
    }
    model, optimizer = wide.reinitialize(scheme).with_optimizer(scheme.optimizer(optax.sgd(1.0))).materialize()
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    gradients = nnx.grad(lambda model: model(jnp.ones((1, 8))).sum())(model)
    optimizer.update(model, gradients)
    after = nnx.state(model, nnx.Param)
    moved = jax.tree.map(lambda old, new, gradient: float(((old - new) / gradient).mean()), before, after, gradients)
    assert [round(value, 2) for value in jax.tree.leaves(moved)] == [4, 4, 1, 0.25]


def test_linen() -> None:
    class Model(linen.Module):
        width: int

        @linen.compact
        def __call__(self, x: Any) -> Any:
            hidden = linen.Dense(self.width)(x)
            return linen.Dense(3)(hidden)

    x = jnp.ones((1, 8))
    base, wide = (lm.build_abstract(Model(width), jax.random.key(0), x) for width in WIDTHS)
    scheme = lm.mup(base, wide)
    assert [scheme[f"params/Dense_{number}/kernel"].kind for number in (0, 1)] == ["input", "output"]
    tx = scheme.optimizer(optax.sgd(1.0))
    variables, state = wide.reinitialize(scheme).with_optimizer(tx).materialize()
    params: Any = variables["params"]
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert [float(update.mean()) for update in jax.tree.leaves(updates)] == [-4, -4, -1, -0.25]

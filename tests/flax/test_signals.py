"""Signals of NNX modules are named by modules, and those of Linen's by their scopes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import lazymodel as lm

X = np.random.default_rng(0).normal(size=(4, 16)).astype("float32")


def rms(array: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(array, np.float64)))))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.linear = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.linear(self.norm(x)))


class Blocks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def test_modules_of_nnx() -> None:
    abstract = lm.build_abstract(lambda: Blocks(nnx.Rngs(0)))
    found, model = (
        lm.signals(abstract, lambda model, x: jnp.mean(model(x) ** 2), X, gradients=True),
        abstract.materialize(),
    )
    # In the order of operations; a block's output is the residual stream.
    assert list(found.activations) == [f"blocks/{n}{name}" for n in range(3) for name in ("/norm", "/linear", "")]

    @nnx.jit  # operations one by one would be compiled one by one
    def outputs(model: Blocks, x: jax.Array) -> list[jax.Array]:
        outputs: list[jax.Array] = []
        for block in model.blocks:
            outputs.append(block.linear(block.norm(x)))
            x = x + block.dropout(outputs[-1])
            outputs.append(x)
        return outputs

    names = [f"blocks/{number}{name}" for number in range(3) for name in ("/linear", "")]
    for name, output in zip(names, outputs(model, X), strict=True):
        np.testing.assert_allclose(found.activations[name].rms, rms(output), rtol=1e-5)
    assert list(found.over_depth()["blocks/{layer}"]) == [0, 1, 2]
    gradients = nnx.jit(nnx.grad(lambda model: jnp.mean(model(X) ** 2)))(abstract.materialize())
    for number in range(3):
        expected = rms(gradients["blocks"][number]["linear"]["kernel"].get_value())
        np.testing.assert_allclose(found.variables[f"blocks/{number}/linear/kernel"].rms, expected, rtol=1e-5)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + linen.Dense(16)(linen.gelu(linen.LayerNorm()(x)))
        return x


def test_scopes_of_linen() -> None:
    module = Dense()
    abstract = lm.build_abstract(lambda key: module.init(key, X), jax.random.key(0))
    found = lm.signals(abstract, module.apply, X)
    _, state = module.apply(abstract.materialize(), X, capture_intermediates=True)
    for name in (f"{kind}_{number}" for kind in ("Dense", "LayerNorm") for number in range(3)):
        expected = rms(state["intermediates"][name]["__call__"][0])
        np.testing.assert_allclose(found.activations[name].rms, expected, rtol=1e-5)

"""Layers that compute parameters from parameters: weight and spectral normalization, bit for bit those of Flax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import lazymodel as lm


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.WeightNorm(linen.Dense(24))(x)
        return linen.SpectralNorm(linen.Dense(7))(x, update_stats=True)


class Nnx(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.weight = nnx.WeightNorm(nnx.Linear(20, 24, rngs=rngs), rngs=rngs)
        self.spectral = nnx.SpectralNorm(nnx.Linear(20, 7, rngs=rngs), rngs=rngs)
        linear = nnx.Linear(20, 16, rngs=rngs)
        self.centered = nnx.Param(linear.kernel[...] - linear.kernel[...].mean(0))


def assert_same(ours: Any, eager: Any) -> None:
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(eager), strict=True):
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape) and np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def columns(variable: Any) -> jax.P:
    divides = bool(variable.shape) and variable.shape[-1] % 8 == 0
    return jax.P(*[None] * (len(variable.shape) - 1), "model") if divides else jax.P()


def test_linen(mesh8: Any) -> None:
    x = jnp.ones((2, 20))
    abstract = lm.build_abstract(Linen(), jax.random.key(0), x)
    eager = Linen().init(jax.random.key(0), x)
    assert_same(abstract.shard(mesh8, columns).materialize(), eager)


def test_nnx(mesh8: Any) -> None:
    abstract = lm.build_abstract(Nnx, rngs=nnx.Rngs(1))
    eager = nnx.state(Nnx(rngs=nnx.Rngs(1)))
    assert_same(nnx.state(abstract.shard(mesh8, columns).materialize()), eager)

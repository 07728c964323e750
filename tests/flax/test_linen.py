"""Linen: the variables dict of `module.init`, bit for bit, boxes and all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import lazymodel as lm


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        h = nn.LayerNorm()(x)
        h = nn.Dense(4 * x.shape[-1], kernel_init=kernel_init)(h)
        h = nn.Dense(x.shape[-1], kernel_init=nn.initializers.normal(0.02))(nn.gelu(h))
        seen = self.variable("stats", "seen", lambda: jnp.zeros((), jnp.int32))
        seen.value += 0
        return x + h


class Decoder(nn.Module):
    layers: int = 3

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(64, 32)(tokens)
        for layer in range(self.layers):
            x = Block(name=f"block_{layer}")(x)
        return nn.Dense(64, use_bias=False)(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        layer = nn.scan(
            lambda block, carry, _: (nn.Dense(32)(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        return layer(self, x, None)[0]


TOKENS = jnp.zeros((2, 5), jnp.int32)


def assert_same(ours: Any, eager: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(eager)
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(eager), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


@pytest.mark.parametrize("tokens", [TOKENS, jax.ShapeDtypeStruct((2, 5), jnp.int32)])
def test_a_decoder_equals_init(tokens: Any) -> None:
    abstract = lm.build_abstract(Decoder(), jax.random.key(0), tokens)
    assert abstract.name == "Decoder"
    assert abstract["params/block_0/Dense_0/kernel"].shape == (32, 128)  # the box leaves no trace in the path
    variables = abstract.materialize()
    assert_same(variables, Decoder().init(jax.random.key(0), TOKENS))
    assert isinstance(variables["params"]["block_0"]["Dense_0"]["kernel"], nn.LogicallyPartitioned)


def test_sharded_over_a_mesh_of_two_axes(mesh42: Any) -> None:
    abstract = lm.build_abstract(Decoder(), {"params": jax.random.PRNGKey(1)}, TOKENS)
    rules = {r".*/kernel": jax.P("batch", "model"), r".*/embedding": jax.P(None, ("batch", "model"))}
    variables = abstract.shard(mesh42, rules).materialize()
    assert_same(variables, Decoder().init({"params": jax.random.PRNGKey(1)}, TOKENS))
    assert variables["params"]["Embed_0"]["embedding"].sharding.spec == jax.P(None, ("batch", "model"))


def test_programs_do_not_grow_with_depth() -> None:
    counts = []
    for layers in (2, 6):
        abstract = lm.build_abstract(Decoder(layers), jax.random.key(0), TOKENS)
        assert_same(abstract.materialize(), Decoder(layers).init(jax.random.key(0), TOKENS))
        counts.append(len(abstract.programs))
    assert counts[0] == counts[1]


def test_scanned_layers() -> None:
    x = jnp.ones((2, 32))
    abstract = lm.build_abstract(Scanned(), jax.random.key(2), x)
    assert_same(abstract.materialize(), Scanned().init(jax.random.key(2), x))


def test_init_that_needs_the_inputs_values_says_so() -> None:
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x - self.param("mean", lambda key: x.mean(0))

    eager = Mean().init(jax.random.key(0), jnp.arange(60.0).reshape(3, 20))
    abstract = lm.build_abstract(Mean(), jax.random.key(0), jnp.arange(60.0).reshape(3, 20))
    assert_same(abstract.materialize(), eager)
    with pytest.raises(lm.TraceError, match=r"params/mean.*ShapeDtypeStruct"):
        lm.build_abstract(Mean(), jax.random.key(0), jax.ShapeDtypeStruct((3, 20), jnp.float32))

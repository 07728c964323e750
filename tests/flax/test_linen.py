"""Linen: the variables dict of `module.init`, bit for bit, boxes and all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import lazymodel as lm
from tests.core.trace._eager import assert_same
from tests.small import shard_small


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


TOKENS = jnp.zeros((2, 5), jnp.int32)


def test_a_decoder_equals_init(mesh42: Any) -> None:
    """By inputs or their shapes, by one key or several, on one device and on a mesh of two axes."""
    eager = Decoder().init(jax.random.key(0), TOKENS)
    abstract = lm.build_abstract(Decoder(), jax.random.key(0), jax.ShapeDtypeStruct((2, 5), jnp.int32))
    assert abstract.name == "Decoder"
    assert abstract["params/block_0/Dense_0/kernel"].shape == (32, 128)  # the box leaves no trace in the path
    variables = abstract.materialize()
    assert_same(variables, eager)
    assert isinstance(variables["params"]["block_0"]["Dense_0"]["kernel"], nn.LogicallyPartitioned)
    abstract = lm.build_abstract(Decoder(), {"params": jax.random.key(0)}, TOKENS)
    rules = {r".*/kernel": jax.P("batch", "model"), r".*/embedding": jax.P(None, ("batch", "model"))}
    variables = abstract.shard(mesh42, rules).materialize()
    assert_same(variables, eager)
    assert variables["params"]["Embed_0"]["embedding"].sharding.spec == jax.P(None, ("batch", "model"))


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


def boxed(names: Any, init: Any = None) -> Any:
    return nn.with_logical_partitioning(init or nn.initializers.lecun_normal(), names)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: None = None) -> Any:
        h = nn.LayerNorm(scale_init=boxed(("embed",), nn.initializers.ones))(x)
        h = nn.Dense(32, kernel_init=boxed(("embed", "mlp")))(h)
        h = nn.with_logical_constraint(h, ("batch", "mlp"))
        return x + nn.Dense(16, kernel_init=boxed(("mlp", "embed")))(nn.gelu(h)), None


class Stack(nn.Module):
    remat: bool = True

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False) if self.remat else Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=4,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(x, None)
        x = nn.BatchNorm(use_running_average=not train)(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dense(8)(x)


class Lifted(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        experts = nn.vmap(
            nn.Dense,
            in_axes=None,
            out_axes=0,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            axis_size=4,
            metadata_params={nn.PARTITION_NAME: "experts"},
        )
        self.variable("cache", "seen", lambda: jnp.zeros((2, 3)))
        x = nn.MultiHeadDotProductAttention(2, decode=True)(x[None], x[None])[0] + experts(16)(x).mean(0)
        return nn.Sequential([nn.Dense(3), nn.relu])(nn.RNN(nn.LSTMCell(8))(x[None])[0])


class Norms(nn.Module):
    """Computes parameters from parameters."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.WeightNorm(nn.Dense(24))(x)
        return nn.SpectralNorm(nn.Dense(7))(x, update_stats=True)


class Leaves(nn.Module):
    """Weakly typed, and of NumPy."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scale = self.param("scale", lambda key: jnp.full((16,), 2.0))
        table = self.variable("constants", "table", lambda: np.array([2**40]))
        return x * scale + jnp.size(table.value)


AXIS_RULES = [("layers", None), ("embed", None), ("mlp", "model"), ("batch", "batch")]


@pytest.mark.parametrize(
    ("module", "key"),
    [
        (Stack(), {"params": 1, "dropout": 2}),
        pytest.param(Stack(remat=False), 0, marks=pytest.mark.large),
        (Lifted(), {"params": 1, "dropout": 2}),
        (Norms(), 0),
        (Leaves(), 0),
    ],
    ids=["remat", "scan", "vmap", "norms", "leaves"],
)
def test_lifted_transforms_and_mutable_collections(module: Any, key: Any, mesh8: Any) -> None:
    keys = jax.tree.map(jax.random.key, key)
    abstract = lm.build_abstract(module, keys, jax.ShapeDtypeStruct((2, 16), jnp.float32))
    # Operations one by one would be compiled one by one; together, some compute other bits, and leaves change types.
    init = module.init if isinstance(module, Norms | Leaves) else jax.jit(module.init)
    eager = init(keys, jnp.ones((2, 16)))
    assert_same(abstract.materialize(), eager)
    assert_same(shard_small(abstract, mesh8, lm.auto(), large=1).materialize(), eager)
    assert {path for path in abstract if abstract[path].trainable} == {
        path for path in abstract if path.startswith("params/")
    }
    assert {path.partition("/")[0] for path in abstract} == set(eager)


def test_keyword_inputs_and_axis_rules_as_flax_reads_them(mesh42: Any) -> None:
    x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
    abstract = lm.build_abstract(Stack(), jax.random.key(0), x, train=True)
    assert abstract["params/layers/Dense_0/kernel"].logical_axes == ("layers", "embed", "mlp")
    variables = abstract.shard(mesh42, AXIS_RULES).materialize()
    eager = Stack().init(jax.random.key(0), jnp.ones((2, 16)), train=True)
    assert_same(variables, eager)
    expected = nn.logical_to_mesh_sharding(nn.get_partition_spec(eager), mesh42, AXIS_RULES)
    for array, sharding in zip(jax.tree.leaves(variables), jax.tree.leaves(expected), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_moments_are_boxed_and_sharded_like_their_parameters(mesh42: Any) -> None:
    module, tx, x = Stack(), optax.adamw(1e-2), jnp.ones((8, 16))
    abstract = lm.build_abstract(module, jax.random.key(0), x).with_optimizer(tx).shard(mesh42, AXIS_RULES)
    variables, opt_state = abstract.materialize()
    eager = module.init(jax.random.key(0), x)
    assert_same((variables, opt_state), (eager, tx.init(eager["params"])))
    moment = opt_state[0].mu["layers"]["Dense_0"]["kernel"]
    assert isinstance(moment, nn.LogicallyPartitioned)
    assert moment.value.sharding == variables["params"]["layers"]["Dense_0"]["kernel"].value.sharding


def test_programs_do_not_grow_with_depth() -> None:
    counts = []
    for layers in (2, 6):
        abstract = lm.build_abstract(Decoder(layers), jax.random.key(0), TOKENS)
        assert_same(abstract.materialize(), Decoder(layers).init(jax.random.key(0), TOKENS))
        counts.append(len(abstract.programs))
    assert counts[0] == counts[1]

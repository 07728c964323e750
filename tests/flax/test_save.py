"""Saving Flax models: under the paths that they are built with, and back."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import lazymodel as lm


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layers[0]


def test_an_nnx_module_comes_back(tmp_path: Path, mesh8: jax.sharding.Mesh) -> None:
    abstract = lm.build_abstract(Net, rngs=nnx.Rngs(0)).shard(mesh8, {".*kernel": P("model")}, on_unmatched="ignore")
    model = abstract.materialize()
    lm.save(model, tmp_path / "net")
    with lm.open_checkpoint(tmp_path / "net") as ckpt:
        assert set(ckpt) == set(abstract)
        again = lm.build_abstract(Net, rngs=nnx.Rngs(1)).materialize(ckpt, initialize="nothing")
    pure = [jax.tree.leaves(nnx.to_pure_dict(nnx.state(net))) for net in (model, again)]
    for one, other in zip(*pure, strict=True):
        one, other = (
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (one, other)
        )
        np.testing.assert_array_equal(one, other)


def test_linen_variables_come_back_without_their_boxes(tmp_path: Path) -> None:
    kernel = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
    abstract = lm.build_abstract(linen.Dense(4, kernel_init=kernel), jax.random.key(0), jnp.ones((1, 3)))
    variables = abstract.materialize()
    lm.save(variables, tmp_path / "dense.safetensors")
    with lm.open_checkpoint(tmp_path / "dense.safetensors") as ckpt:
        assert set(ckpt) == set(abstract) == {"params/kernel", "params/bias"}
        again = abstract.materialize(ckpt, initialize="nothing")
    for one, other in zip(jax.tree.leaves(variables), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)

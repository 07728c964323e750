"""An NNX module whose arrays move to other devices."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm


def test_a_module_moves_and_computes_the_same(mesh8: Mesh) -> None:
    abstract = lm.build_abstract(nnx.Linear, 16, 32, rngs=nnx.Rngs(0))
    module = abstract.shard(mesh8, {"kernel": P("model"), "bias": P()}).materialize()
    four = Mesh(mesh8.devices[:4], ("model",))
    moved = lm.reshard(module, abstract.shard(four, {"kernel": P(None, "model"), "bias": P("model")}))
    assert type(moved) is nnx.Linear and moved is not module
    assert moved.kernel[...].sharding == NamedSharding(four, P(None, "model"))
    np.testing.assert_array_equal(moved.kernel[...], module.kernel[...])
    x = jax.numpy.ones((2, 16))
    np.testing.assert_allclose(moved(x), module(x), rtol=1e-4)

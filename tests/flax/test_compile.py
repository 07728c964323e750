"""Flax: what is called with a module or variables is compiled before these are there, and found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.compile_events import compile_events

X = np.linspace(-1, 1, 4 * 16, dtype="float32").reshape(4, 16)


class Model(nnx.Module):
    """Parameters, statistics, counts and keys, of which a call changes some; a tied layer."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(32, 32, kernel_init=_partitioned(), rngs=rngs)] * 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(self.norm(self.embed(x)))
        for block in self.blocks:
            x = block(x)
        return x


def _partitioned() -> Any:
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))


def loss(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def train(model: Model, optimizer: nnx.Optimizer[Model], x: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradients)
    return value


@pytest.fixture(params=["one device", "sharded"])
def abstract(request: pytest.FixtureRequest, mesh8: Mesh) -> lm.AbstractModel:
    model = lm.build_abstract(Model, rngs=nnx.Rngs(0))
    return model if request.param == "one device" else model.shard(mesh8, {"embed/kernel": P("model"), ".*": P()})


def test_nnx_jit(abstract: lm.AbstractModel) -> None:
    step = nnx.jit(lambda model, x: loss(model, x))
    model = abstract.materialize(compile=lm.Compile(step, X))
    with compile_events() as events:
        first, second = step(model, X), step(model, X)
    assert events == [] and first != second  # dropout's keys were counted on
    other = abstract.materialize()
    assert nnx.jit(lambda model, x: loss(model, x))(other, X) == first


@pytest.mark.parametrize("abstract", ["sharded"], indirect=True)
def test_nnx_split_and_merge(abstract: lm.AbstractModel) -> None:
    step = jax.jit(lambda graph, state, x: loss(nnx.merge(graph, state), x), static_argnums=0)
    model = abstract.materialize(compile=lm.Compile(step, X).of(nnx.split))
    with compile_events() as events:
        step(*nnx.split(model), X)
    assert events == []


@pytest.mark.parametrize(("abstract", "donated"), [("one device", ()), ("sharded", (0, 1))], indirect=["abstract"])
def test_training_with_an_nnx_optimizer(abstract: lm.AbstractModel, donated: tuple[int, ...]) -> None:
    def own(model: Model, optimizer: nnx.Optimizer[Model], x: jax.Array) -> jax.Array:
        return train(model, optimizer, x)

    step = nnx.jit(own, donate_argnums=donated)
    trained = abstract.with_optimizer(optax.adam(1e-2))
    model, optimizer = trained.materialize(compile=lm.Compile(step, X).of(lambda both: both))
    with compile_events() as events:
        step(model, optimizer, X)
    assert events == [] and optimizer.step[...] == 1


def test_references_are_refused() -> None:
    with nnx.var_defaults(ref=True):
        abstract = lm.build_abstract(nnx.Linear, 16, 4, rngs=nnx.Rngs(0))
    with pytest.raises(lm.LazyModelError, match="references or hijax objects .* load it without compile"):
        abstract.materialize(compile=lm.Compile(nnx.jit(lambda model, x: model(x)), X))


@pytest.mark.parametrize("boxed", [False, True])
def test_linen(mesh8: Mesh, boxed: bool) -> None:
    kernel_init = linen.initializers.lecun_normal()
    kernel_init = linen.with_partitioning(kernel_init, (None, "model")) if boxed else kernel_init
    module = linen.Dense(32, kernel_init=kernel_init)
    abstract = lm.build_abstract(module, jax.random.key(0), X)
    abstract = abstract.shard(mesh8) if boxed else abstract.shard(mesh8, {".*kernel": P("model"), ".*": P()})
    step = jax.jit(lambda variables, x: module.apply(variables, x))
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    variables = abstract.materialize(compile=lm.Compile(step, struct))
    with compile_events() as events:
        step(variables, X)
    assert events == []

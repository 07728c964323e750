"""Equinox modules are pytrees: built by the plain path, equal to eager construction, static fields and all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.core.trace._eager import assert_same

eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    scale: float
    name: str = eqx.field(static=True)

    def __init__(self, size: int, name: str, *, key: jax.Array):
        self.weight = jax.random.normal(key, (size, size)) / size**0.5
        self.bias = None
        self.scale = 0.5
        self.name = name

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.scale * (self.weight @ x)


class Model(eqx.Module):
    layers: list[Layer]
    mlp: Any
    norm: Any
    counter: jax.Array

    def __init__(self, size: int, depth: int, *, key: jax.Array):
        first, *rest = jax.random.split(key, depth + 1)
        self.layers = [Layer(size, f"layer {i}", key=k) for i, k in enumerate(rest)]
        self.mlp = eqx.nn.MLP(size, 3, 32, 2, key=first)
        self.norm = eqx.nn.LayerNorm(size)
        self.counter = jnp.zeros((), jnp.int32)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.mlp(self.norm(x))


@pytest.mark.large
def test_a_module_with_static_fields_over_eight_devices(mesh8: Any) -> None:
    abstract = lm.build_abstract(Model, 64, 3, key=jax.random.key(1))
    assert "layers/2/weight" in abstract and not any("name" in path or "scale" in path for path in abstract)
    model = abstract.shard(mesh8, {r"layers/\d+/weight": jax.P("model")}).materialize()
    eager = Model(64, 3, key=jax.random.key(1))
    assert_same(model, eager)
    assert isinstance(model, Model) and model.layers[1].name == "layer 1" and model.layers[1].scale == 0.5
    assert model.layers[1].weight.sharding.spec == jax.P("model")
    np.testing.assert_allclose(model(jnp.ones(64)), eager(jnp.ones(64)), rtol=1e-5)


def test_a_stack_of_layers() -> None:
    def stack(key: jax.Array) -> Layer:
        return eqx.filter_vmap(lambda k: Layer(16, "stacked", key=k))(jax.random.split(key, 4))

    abstract = lm.build_abstract(stack, jax.random.key(2))
    assert abstract["weight"].shape == (4, 16, 16)
    assert_same(abstract.materialize(), stack(jax.random.key(2)))


def test_training_as_equinox_does(mesh8: Any) -> None:
    optimizer = optax.adamw(1e-2)
    abstract = lm.build_abstract(Model, 64, 2, key=jax.random.key(0)).with_optimizer(optimizer)
    model, state = abstract.shard(mesh8, {r"layers/\d+/weight": jax.P("model")}).materialize()
    eager = Model(64, 2, key=jax.random.key(0))
    assert_same(state, optimizer.init(eqx.filter(eager, eqx.is_inexact_array)))
    assert state[0].mu.layers[0].weight.sharding.spec == jax.P("model")

    @eqx.filter_jit
    def step(model: Model, state: Any, x: jax.Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(3):
        model, state, loss = step(model, state, jnp.ones((4, 64)))
        losses.append(float(loss))
    assert losses[2] < losses[0]

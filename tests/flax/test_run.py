"""`run` with modules of NNX and Linen, and with models of other packages of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import lazymodel as lm
from tests.extras.run.models import assert_equal
from tests.extras.run.test_run import ran

WIDTH, LAYERS = 16, 4
X = jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.relu(self.up(self.norm(x)))))


class Model(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.layers, self.head = nnx.List([Block(rngs) for _ in range(layers)]), nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_statistics(model: Model, x: jax.Array) -> Any:
    """The model changes: batch statistics and counts of keys come back with the result."""
    return model(x), nnx.state(model, nnx.BatchStat), nnx.state(model, nnx.RngState)


def norms(model: Model, x: jax.Array) -> Any:
    return jax.tree.map(jnp.linalg.norm, nnx.grad(lambda model: (model(x) ** 2).mean())(model))


@pytest.mark.parametrize("function", [with_statistics, norms, nnx.jit(with_statistics)], ids=["calls", "norms", "jit"])
def test_nnx(function: Any) -> None:
    abstract = lm.build_abstract(Model, LAYERS, nnx.Rngs(0))
    found, report = ran(abstract, function, X)
    # Operations one by one would be compiled one by one.
    assert_equal(found, nnx.jit(function)(abstract.materialize(), X))
    assert report.calls > LAYERS


def test_nnx_model_that_is_returned() -> None:
    abstract = lm.build_abstract(Model, 2, nnx.Rngs(0))
    found, _ = ran(abstract, lambda model, x: (model(x), model)[1], X)
    model = abstract.materialize()
    model(X)
    assert type(found) is Model
    assert_equal(nnx.state(found, nnx.BatchStat), nnx.state(model, nnx.BatchStat))
    assert_equal(found(X), model(X))


def test_programs_of_nnx_do_not_grow_with_depth() -> None:
    reports = [ran(lm.build_abstract(Model, layers, nnx.Rngs(0)), with_statistics, X)[1] for layers in (4, 6)]
    assert len(reports[0].rows) == len(reports[1].rows) <= 4


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return nnx.tanh(layer(x))

        return forward(self.layers, x)


def test_nnx_scan(tmp_path: Any) -> None:
    abstract = lm.build_abstract(Stack, nnx.Rngs(0))
    lm.save(abstract, tmp_path / "model.safetensors")
    checkpoint = lm.open_checkpoint(tmp_path / "model.safetensors")
    for function in (lambda model, x: model(x), norms):
        found, report = ran(abstract, function, X, checkpoint=checkpoint)
        assert_equal(found, nnx.jit(function)(abstract.materialize(), X))
        assert report.whole == () and report.calls >= LAYERS
        assert max(row.variables_nbytes for row in report.rows) <= abstract.nbytes // LAYERS


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_references_are_refused(kind: str) -> None:
    with nnx.var_defaults(**{kind: True}):
        abstract = lm.build_abstract(nnx.Linear, WIDTH, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(lm.LazyModelError, match="references or hijax objects"):
        abstract.run(lambda model, x: model(x), X)


class Layers(linen.Module):
    """Linen layers, one by one or scanned."""

    scanned: bool

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.scanned:
            for _ in range(LAYERS):
                x = linen.Dropout(0.5, deterministic=False)(jnp.tanh(linen.Dense(WIDTH)(x)))
            return x
        stack = linen.scan(
            _Layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=LAYERS
        )
        return stack()(x, None)[0]


class _Layer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return linen.Dropout(0.5, deterministic=False)(jnp.tanh(linen.Dense(WIDTH)(x))), None


@pytest.mark.parametrize("scanned", [False, True])
def test_linen(scanned: bool) -> None:
    module = Layers(scanned)
    abstract = lm.build_abstract(module, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def norms(variables: Any, x: jax.Array, key: jax.Array) -> Any:
        loss = lambda variables: (module.apply(variables, x, rngs={"dropout": key}) ** 2).mean()  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(variables)
        return value, jax.tree.map(jnp.linalg.norm, gradients)

    found, report = ran(abstract, norms, X, jax.random.key(2))
    assert_equal(found, jax.jit(norms)(abstract.materialize(), X, jax.random.key(2)))
    assert report.calls >= LAYERS


def test_haiku() -> None:
    haiku = pytest.importorskip("haiku")
    net = haiku.transform(lambda x: haiku.nets.MLP([WIDTH] * LAYERS)(x))
    abstract = lm.build_abstract(net, jax.random.key(0), X)
    function = lambda params, x: net.apply(params, None, x)  # noqa: E731
    found, report = ran(abstract, function, X)
    assert_equal(found, function(abstract.materialize(), X))
    assert report.calls >= LAYERS - 1


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    abstract = lm.build_abstract(lambda key: eqx.nn.MLP(WIDTH, WIDTH, WIDTH, LAYERS, key=key), jax.random.key(0))

    @eqx.filter_jit
    def function(model: Any, x: jax.Array) -> Any:
        gradients = eqx.filter_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        return jax.vmap(model)(x), jax.tree.map(jnp.linalg.norm, jax.tree.leaves(gradients))

    found, report = ran(abstract, function, X)
    assert_equal(found, function(abstract.materialize(), X))
    assert report.calls >= LAYERS

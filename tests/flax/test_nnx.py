"""NNX: abstract construction equals eager construction, bit for bit, with the same module and the same rngs after."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymodel as lm
from lazymodel._programs.programs import ProgramCache
from lazymodel_flax import adapter


class Block(nnx.Module):
    def __init__(self, size: int, *, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, size, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(size, rngs=rngs)
        self.mlp = nnx.Linear(size, 4 * size, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.mask = nnx.Variable(jnp.arange(size))
        self.buffer = jnp.linspace(0, 1, size)  # a plain array, which tracing must not let escape


class Decoder(nnx.Module):
    def __init__(self, size: int, layers: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(64, size, rngs=rngs)
        self.layers = nnx.List([Block(size, rngs=rngs) for _ in range(layers)])
        self.head = self.embedding  # tied


class Stacked(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(16, 80, rngs=rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)


class KeepsRngs(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.inner = nnx.Dropout(0.5, rngs=rngs.fork())
        self.w = nnx.Param(jax.random.normal(rngs(), (64, 64)) / 3.0 + 1.0)
        self.linear = nnx.jit(lambda rngs: nnx.Linear(16, 8, rngs=rngs))(rngs)
        self.rngs = rngs


def model_and_optimizer(rngs: nnx.Rngs) -> Any:
    model = KeepsRngs(rngs=rngs)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def assert_same(ours: Any, eager: Any) -> None:
    a, b = (jax.tree_util.tree_flatten_with_path(nnx.state(node)) for node in (ours, eager))
    assert a[1] == b[1]
    for (path, x), (_, y) in zip(a[0], b[0], strict=True):
        if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert isinstance(x, jax.Array)
        assert not isinstance(x, jax.core.Tracer)
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def both(build: Any, *args: Any, seed: int = 0) -> tuple[lm.AbstractModel, Any]:
    """The abstract model and the eager one, having checked that both leave their rngs alike."""
    ours, theirs = nnx.Rngs(seed, dropout=9), nnx.Rngs(seed, dropout=9)
    abstract, eager = lm.build_abstract(build, *args, rngs=ours), build(*args, rngs=theirs)
    assert_same(ours, theirs)
    return abstract, eager


def test_a_decoder_equals_eager_construction() -> None:
    abstract, eager = both(Decoder, 32, 2)
    assert abstract.name == "Decoder"
    assert abstract["layers/1/attention/query/kernel"].shape == (32, 2, 16)
    assert not any("head" in path for path in abstract)
    model = abstract.materialize()
    assert_same(model, eager)
    assert isinstance(model, Decoder)
    assert model.head is model.embedding
    x = jnp.ones((2, 3, 32))
    assert np.array_equal(model.layers[0].mlp(x), eager.layers[0].mlp(x))
    assert isinstance(abstract.tree["layers"][0]["mlp"]["kernel"].get_value(), jax.ShapeDtypeStruct)


def test_sharded_over_eight_devices(mesh8: Any) -> None:
    abstract, eager = both(Decoder, 32, 2)
    sharded = abstract.shard(
        mesh8,
        lambda variable: jax.P(*[None] * (len(variable.shape) - 1), "model") if "mlp" in variable.path else jax.P(),
    )
    model = sharded.materialize()
    assert_same(model, eager)
    assert model.layers[1].mlp.kernel.get_value().sharding.spec == jax.P(None, "model")


@pytest.mark.parametrize("build", [Stacked, KeepsRngs, model_and_optimizer])
def test_transforms_forks_and_optimizers(build: Any) -> None:
    abstract, eager = both(build)
    assert_same(abstract.materialize(), eager)


def test_rngs_advance_so_that_the_next_module_differs() -> None:
    ours, theirs = nnx.Rngs(0), nnx.Rngs(0)
    for _ in range(2):
        abstract = lm.build_abstract(nnx.Linear, 8, 8, rngs=ours)
        assert_same(abstract.materialize(), nnx.Linear(8, 8, rngs=theirs))


def test_factories_without_rngs_and_plain_functions() -> None:
    def factory(seed: int) -> nnx.Module:
        return Stacked(rngs=nnx.Rngs(seed))

    assert_same(lm.build_abstract(factory, 5).materialize(), factory(5))
    plain = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (8, 4))}, jax.random.key(0))
    assert list(plain) == ["w"]
    assert np.array_equal(plain.materialize()["w"], jax.random.normal(jax.random.key(0), (8, 4)))
    assert not adapter.matches(dict, (), {})


def test_another_seed_compiles_nothing_and_depth_adds_no_programs() -> None:
    ProgramCache.clear_shared()
    first, _ = both(Decoder, 32, 1)
    first.materialize()
    assert first.programs.compiled > 0
    deep, eager = both(Decoder, 32, 4, seed=3)
    assert_same(deep.materialize(), eager)
    assert deep.programs.compiled == 0


def test_materializing_twice_gives_two_modules() -> None:
    abstract, _ = both(Decoder, 32, 1)
    a, b = abstract.materialize(), abstract.materialize()
    a.embedding.embedding.set_value(jnp.zeros((64, 32)))
    assert float(jnp.abs(b.embedding.embedding.get_value()).sum()) > 0


def test_untraceable_modules_name_their_line() -> None:
    class Bad(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            if rngs.params.uniform(()) > 0.5:  # the branch
                self.w = nnx.Param(jnp.ones(3))

    with pytest.raises(lm.TraceError, match="the branch"):
        lm.build_abstract(Bad, rngs=nnx.Rngs(0))


def test_the_core_imports_no_flax() -> None:
    code = (
        "import sys, jax, lazymodel as lm\n"
        "lm.build_abstract(lambda k: jax.random.normal(k, (2,)), jax.random.key(0))\n"
        "assert 'flax' not in sys.modules and 'lazymodel_flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers_are_not_changed() -> None:
    abstract = lm.build_abstract(nnx.Linear, 2, 3, rngs=nnx.Rngs(0))
    for step in (lambda: abstract.quantize("int8"), lambda: abstract.lora(2)):
        with pytest.raises(lm.LazyModelError, match="only Keras models are .* as a step"):
            step()

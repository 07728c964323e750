"""NNX: abstract construction equals eager construction, bit for bit, with the same rngs after: every kind of variable,
sharing, stacks, plain arrays, optimizers.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding

import lazymodel as lm
from tests.flax.modules import assert_same
from tests.small import shard_small


class Smoothed(nnx.Variable[jax.Array]):
    """A user's own variable type."""


class Kinds(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.lora = nnx.LoRALinear(8, 16, lora_rank=2, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=rngs)
        self.attention.init_cache((2, 4, 8))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.embed = nnx.Embed(32, 8, param_dtype=jnp.bfloat16, rngs=rngs)
        self.smoothed = Smoothed(jnp.zeros(4), decay=0.9)
        self.perturbation = nnx.Perturbation(jnp.zeros(3))
        self.pair = nnx.Variable({"a": jnp.ones(3), "b": jnp.arange(2)})
        self.nothing = nnx.Param(None)
        self.quantized = nnx.Variable(jnp.round(127 * jax.random.uniform(rngs.params(), (32, 32))).astype(jnp.int8))
        self.orthogonal = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (8, 8)))
        self.lora.kernel.set_metadata(note="frozen")
        self.embed.embedding[...] *= 2


class Plain(nnx.Module):
    """Arrays without a variable around them, and attributes that are no arrays."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.buffer = jnp.arange(4.0)
        self.table = np.arange(6, dtype=np.int32).reshape(2, 3)
        self.key = jax.random.key(3)
        self.drawn = jax.random.normal(rngs(), (3,))
        self.nested = nnx.data({"x": jnp.ones(2), "y": [jnp.zeros(3), 4]})
        self.parts = nnx.List([jnp.ones(2), nnx.Linear(2, 2, rngs=rngs)])
        self.named = nnx.Dict(a=nnx.Linear(2, 2, rngs=rngs), b=jnp.zeros(2))
        self.sequence = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), jax.nn.relu, nnx.Linear(2, 2, rngs=rngs))
        self.name, self.size, self.activation, self.dtype = "plain", 3, jax.nn.gelu, jnp.bfloat16
        self.shape = nnx.static((1, 2))


class Child(nnx.Module):
    def __init__(self, parent: nnx.Module):
        self.parent = parent
        self.same_values = nnx.Param(parent.shared.get_value())


class Shared(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.shared = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.alias = self.shared
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)] * 3)
        self.child = Child(self)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.linear(x)


class Vmapped(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        make = nnx.vmap(Layer, in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = nnx.split_rngs(splits=4)(make)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Scanned(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=4)
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), length=4)
        def make(scale: jax.Array, rngs: nnx.Rngs) -> Any:
            return scale, nnx.Linear(16, 16, rngs=rngs)

        _, self.layers = make(jnp.ones(()), rngs)


class Bridged(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linen = nnx.bridge.ToNNX(linen.Dense(4), rngs=rngs).lazy_init(jnp.ones((1, 3)))


@dataclasses.dataclass
class AsDataclass(nnx.Module):
    size: int
    rngs: dataclasses.InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(self.size, 4, rngs=rngs)


def as_dataclass(*, rngs: nnx.Rngs) -> nnx.Module:
    return AsDataclass(4, rngs)


def several(*, rngs: nnx.Rngs) -> Any:
    return {"first": Kinds(rngs=rngs), "rest": [jnp.ones(3), Shared(rngs=rngs)]}


class Partitioned(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.up = nnx.Linear(64, 128, kernel_init=kernel_init, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.lora = nnx.LoRA(64, 4, 64, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x + self.lora(x))


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


class KeepsRngs(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.inner = nnx.Dropout(0.5, rngs=rngs.fork())
        self.w = nnx.Param(jax.random.normal(rngs(), (64, 64)) / 3.0 + 1.0)
        self.linear = nnx.jit(lambda rngs: nnx.Linear(16, 8, rngs=rngs))(rngs)
        self.rngs = rngs


def model_and_optimizer(*, rngs: nnx.Rngs) -> Any:
    model = KeepsRngs(rngs=rngs)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


class Norms(nnx.Module):
    """Computes parameters from parameters."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.weight = nnx.WeightNorm(nnx.Linear(20, 24, rngs=rngs), rngs=rngs)
        self.spectral = nnx.SpectralNorm(nnx.Linear(20, 7, rngs=rngs), rngs=rngs)
        linear = nnx.Linear(20, 16, rngs=rngs)
        self.centered = nnx.Param(linear.kernel[...] - linear.kernel[...].mean(0))


class Leaves(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.weak = nnx.Param(jnp.full((4,), 2.0))
        self.wide = nnx.Variable(np.array([2**40]))
        self.table = np.array([1e300])


BUILDS = [
    Leaves,
    Kinds,
    Plain,
    Shared,
    Vmapped,
    Scanned,
    Bridged,
    as_dataclass,
    several,
    KeepsRngs,
    model_and_optimizer,
    Norms,
]


@pytest.mark.parametrize("build", BUILDS)
def test_a_module_equals_its_eager_twin_and_leaves_its_rngs_alike(build: Any, mesh8: Any) -> None:
    ours, theirs = nnx.Rngs(0, dropout=5), nnx.Rngs(0, dropout=5)
    abstract, eager = lm.build_abstract(build, rngs=ours), build(rngs=theirs)
    assert_same(ours, theirs)
    # Functions that make a linen bridge or a batch of layers keep closures, which no two builds share.
    graphs = build not in (Bridged, model_and_optimizer)
    assert_same(abstract.materialize(), eager, graphs=graphs)
    assert_same(shard_small(abstract, mesh8, lm.auto(), large=1).materialize(), eager, graphs=graphs)


def test_a_decoder_with_a_tied_head(tmp_path: Path) -> None:
    abstract, eager = lm.build_abstract(Decoder, 32, 2, rngs=nnx.Rngs(0)), Decoder(32, 2, rngs=nnx.Rngs(0))
    assert abstract.name == "Decoder"
    assert abstract["layers/1/attention/query/kernel"].shape == (32, 2, 16)
    assert not any("head" in path for path in abstract)
    assert isinstance(abstract.tree["layers"][0]["mlp"]["kernel"].get_value(), jax.ShapeDtypeStruct)
    model, second = abstract.materialize(), abstract.materialize()
    assert isinstance(model, Decoder) and model.head is model.embedding
    x = jnp.ones((2, 3, 32))
    assert np.array_equal(model.layers[0].mlp(x), eager.layers[0].mlp(x))
    lm.save(model, tmp_path / "net")
    other = lm.build_abstract(Decoder, 32, 2, rngs=nnx.Rngs(1))
    with lm.open_checkpoint(tmp_path / "net") as checkpoint:
        assert set(checkpoint) == set(abstract)
        again = other.materialize(checkpoint, initialize="nothing")
    assert_same(again, eager)
    model.embedding.embedding.set_value(jnp.zeros((64, 32)))
    assert_same(second, eager)


def test_what_is_shared_trainable_or_stacked() -> None:
    abstract = lm.build_abstract(Shared, rngs=nnx.Rngs(0))
    # The child's parameter is a variable of its own that begins as the same array.
    assert set(abstract) == {"alias", "child/same_values", "layers/0/bias", "layers/0/kernel"}
    model = abstract.materialize()
    assert model.alias is model.shared and model.child.parent is model and model.layers[0] is model.layers[2]

    abstract = lm.build_abstract(Kinds, rngs=nnx.Rngs(0))
    assert abstract["lora/lora/lora_a"].trainable and abstract["norm/scale"].trainable
    for path in ("norm/mean", "attention/cached_key", "dropout/rngs/key", "smoothed", "perturbation", "quantized"):
        assert not abstract[path].trainable, path

    abstract = lm.build_abstract(Vmapped, rngs=nnx.Rngs(0))
    assert abstract["layers/linear/kernel"].shape == (4, 16, 16)
    x = jnp.ones((2, 16))
    assert np.array_equal(abstract.materialize()(x), Vmapped(rngs=nnx.Rngs(0))(x))


@pytest.mark.parametrize("context", [True, False], ids=["in a mesh context", "without one"])
def test_sharding_metadata_stays_and_shards(context: bool, mesh8: Any) -> None:
    def make() -> Any:
        abstract = lm.build_abstract(Partitioned, rngs=nnx.Rngs(0)).with_optimizer(optax.adamw(1e-3))
        return abstract.shard(mesh8), abstract.shard(mesh8).materialize()

    with jax.set_mesh(mesh8):
        eager = Partitioned(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(eager, optax.adamw(1e-3), wrt=nnx.Param)
        if context:
            abstract, (module, ours) = make()
    if not context:
        abstract, (module, ours) = make()
    assert_same(module, eager)
    assert module.up.kernel.get_metadata("out_sharding") == (None, "model")
    for node in (module.up.kernel, ours.opt_state[0].mu["up"]["kernel"], ours.opt_state[0].nu["up"]["kernel"]):
        assert node.get_value().sharding.spec == jax.P(None, "model")
    assert abstract["optimizer/0/mu/up/kernel"].follows == "up/kernel"
    assert_same(ours, optimizer, graphs=False)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "injected hyperparameters": optax.inject_hyperparams(optax.adam)(1e-2),
    "accumulated gradients": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    "copies of parameters": optax.contrib.schedule_free_sgd(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_like_its_eager_twin(name: str) -> None:
    tx = OPTIMIZERS[name]
    model, optimizer = lm.build_abstract(Layer, nnx.Rngs(0)).with_optimizer(tx).materialize()
    eager = Layer(nnx.Rngs(0))
    theirs = nnx.Optimizer(eager, tx, wrt=nnx.Param)
    assert_same(optimizer, theirs)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: (model(jnp.ones((2, 16))) ** 2).mean())(model))

    for _ in range(2):
        step(model, optimizer)
        step(eager, theirs)
    assert_same(model, eager)
    assert_same(optimizer, theirs)


def test_only_lora_pairs_are_trained() -> None:
    abstract = lm.build_abstract(Kinds, rngs=nnx.Rngs(0)).with_optimizer(optax.adam(1e-3), trained=".*/lora_[ab]")
    state = {path for path, variable in abstract.items() if variable.follows is not None}
    moments = {f"optimizer/0/{moment}/lora/lora/lora_{part}" for moment in ("mu", "nu") for part in "ab"}
    assert state == {"optimizer/0/count", "optimizer/step", *moments}
    model, optimizer = abstract.materialize()
    before = np.asarray(model.lora.kernel.get_value())
    loss = nnx.grad(lambda m: (m.lora(jnp.ones((1, 8))) ** 2).sum(), argnums=nnx.DiffState(0, optimizer.wrt))
    optimizer.update(model, loss(model))
    assert np.array_equal(model.lora.kernel.get_value(), before)
    assert float(jnp.abs(model.lora.lora.lora_b.get_value()).sum()) > 0


class Kept(nnx.Module):
    def __init__(self, kernel_init: Any, rngs: nnx.Rngs):
        self.kernel_init = kernel_init
        self.kernel = nnx.Param(kernel_init(rngs.params(), (4, 4)))


class Scaled(nnx.Module):
    """Keeps an initializer that closes over an array, and over itself, as MaxText's attention does."""

    def __init__(self, scale: Any, rngs: nnx.Rngs):
        self.init = nnx.initializers.normal()
        factor = jnp.sqrt(scale)

        def scaled(*args: Any) -> jax.Array:
            return self.init(*args) / factor

        self.inner = Kept(scaled, rngs)


def test_arrays_that_kept_functions_close_over_have_their_values() -> None:
    for scale in (4, np.float32(4)):  # weakly typed, and not
        model = lm.build_abstract(Scaled, scale, rngs=nnx.Rngs(0)).materialize()
        eager = Scaled(scale, rngs=nnx.Rngs(0))
        assert np.array_equal(model.inner.kernel[...], eager.inner.kernel[...])
        ours, theirs = (built.inner.kernel_init(jax.random.key(1), (4, 4), jnp.bfloat16) for built in (model, eager))
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_an_array_without_a_value_that_a_kept_function_closes_over_is_refused() -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        weight = jax.random.normal(rngs.params(), (64, 64))
        return Kept(lambda *_: weight[:4, :4], rngs)

    with pytest.raises(lm.TraceError, match=r"'kernel_init' closes over a traced float32\[64, 64\].*nnx\.Variable"):
        lm.build_abstract(build, nnx.Rngs(0))


def test_factories_without_rngs_and_plain_functions() -> None:
    def factory(seed: int) -> nnx.Module:
        return Vmapped(rngs=nnx.Rngs(seed))

    assert_same(lm.build_abstract(factory, 5).materialize(), factory(5))
    plain = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (8, 4))}, jax.random.key(0))
    assert list(plain) == ["w"]
    assert np.array_equal(plain.materialize()["w"], jax.random.normal(jax.random.key(0), (8, 4)))
    assert dict(lm.build_abstract(dict)) == {}, "a class of no module"


def test_another_seed_compiles_nothing_and_depth_adds_no_programs(repetition: int) -> None:
    width = 24 + 2 * repetition  # for which nobody has programs yet
    first = lm.build_abstract(Decoder, width, 1, rngs=nnx.Rngs(0))
    first.materialize()
    assert first.programs.compiled > 0
    deep = lm.build_abstract(Decoder, width, 3, rngs=nnx.Rngs(3))
    assert_same(deep.materialize(), Decoder(width, 3, rngs=nnx.Rngs(3)))
    assert deep.programs.compiled == 0


def test_a_module_moves_and_computes_the_same(mesh8: Mesh) -> None:
    abstract = lm.build_abstract(nnx.Linear, 16, 32, rngs=nnx.Rngs(0))
    module = abstract.shard(mesh8, {"kernel": jax.P("model"), "bias": jax.P()}).materialize()
    four = Mesh(mesh8.devices[:4], ("model",))
    moved = lm.reshard(module, abstract.shard(four, {"kernel": jax.P(None, "model"), "bias": jax.P("model")}))
    assert type(moved) is nnx.Linear and moved is not module
    assert moved.kernel[...].sharding == NamedSharding(four, jax.P(None, "model"))
    np.testing.assert_array_equal(moved.kernel[...], module.kernel[...])
    x = jax.numpy.ones((2, 16))
    np.testing.assert_allclose(moved(x), module(x), rtol=1e-4)


def test_quantizing_without_qwix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qwix", None)
    abstract = lm.build_abstract(nnx.Linear, 16, 32, rngs=nnx.Rngs(0))
    for step in (lambda: abstract.quantize("int8"), lambda: abstract.lora(2)):
        with pytest.raises(lm.LazyModelError, match="pip install qwix"):
            step()


@pytest.mark.parametrize("live", [False, True])
def test_a_sampler_follows_its_trainer(mesh8: Mesh, live: bool) -> None:
    """The module of the sampler is changed in place, whatever becomes of the trainer's module."""
    low, high = (Mesh(devices, ("model",)) for devices in np.split(mesh8.devices, 2))
    trainer = lm.build_abstract(nnx.Linear, 16, 32, rngs=nnx.Rngs(0)).shard(
        low, {"kernel": jax.P("model"), "bias": jax.P()}
    )
    half = lm.build_abstract(nnx.Linear, 16, 32, param_dtype=jax.numpy.bfloat16, rngs=nnx.Rngs(1))
    sampler = half.shard(high, {"kernel": jax.P(None, "model"), "bias": jax.P("model")})
    training, sampling = trainer.materialize(), sampler.materialize()
    sync = lm.Sync(training, sampling) if live else lm.Sync(trainer, sampler)
    for factor in (1, 2, 3):
        if factor == 3:
            training = trainer.materialize()
            training.kernel = nnx.Param(training.kernel[...] * 2)
        training.kernel[...] = training.kernel[...] * factor
        assert sync(training, into=sampling) is sampling
        assert sampling.kernel[...].sharding == NamedSharding(high, jax.P(None, "model"))
        expected = np.asarray(training.kernel[...]).astype(jax.numpy.bfloat16)
        assert np.asarray(sampling.kernel[...]).tobytes() == expected.tobytes()
    sampling(jax.numpy.ones((2, 16), jax.numpy.bfloat16))

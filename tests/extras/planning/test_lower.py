"""The first call finds what was lowered and compiled before there was a model: counted in events of JAX' own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.compile_events import compile_events
from tests.large import mostly_large

Model = lm.AbstractModel[Any]

X = np.linspace(-1, 1, 8 * 64, dtype="float32").reshape(8, 64)
KEY = jax.random.key(5)
RULES = {"kernel": P("model"), ".*": P()}


def init(key: jax.Array) -> dict[str, Any]:
    """What arrays can be: strong, weakly typed, keys, a NumPy array and a number."""
    return {
        "kernel": jax.random.normal(key, (64, 64)),
        "scale": jnp.full((64,), 2.0),
        "rng": jax.random.fold_in(key, 1),
        "table": np.arange(64, dtype="float32"),
        "depth": 3,
    }


def forward(tree: Any, x: Any, key: Any = KEY, *, power: int = 1) -> Any:
    noise = jax.random.normal(tree["rng"], (64,)) + jax.random.uniform(key)
    return (x @ tree["kernel"] * tree["scale"] + tree["table"] * noise) ** power / tree["depth"]


def jitted(**options: Any) -> Any:
    """`forward`, compiled for nobody yet: JAX knows functions by their identity, whoever jits them."""

    def own(tree: Any, x: Any, key: Any = KEY, power: int = 1) -> Any:
        return forward(tree, x, key, power=power)

    return jax.jit(own, **options)


@pytest.fixture(scope="module")
def abstract() -> Model:
    return lm.build_abstract(init, jax.random.key(0))


def sharded(abstract: Model, mesh: Mesh) -> Model:
    return abstract.shard(mesh, RULES)


def check(model: Model, step: Any, *inputs: Any, given: Any = None, **keywords: Any) -> Any:
    """Compiles for some inputs, calls with others; the results, equal to those of an own compilation."""
    compile = lm.Compile(step, *(inputs if given is None else given), **keywords)
    loaded = model.materialize(compile=compile)
    with compile_events() as events:
        results = step(loaded, *inputs, **keywords)
    assert events == []
    return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize("where", mostly_large(["one device", "sharded"], ["sharded"]))
def test_arguments_as_users_pass_them(abstract: Model, mesh8: Mesh, where: str) -> None:
    model = abstract if where == "one device" else sharded(abstract, mesh8)
    placed = jax.device_put(X, NamedSharding(mesh8, P("model")) if where == "sharded" else jax.devices()[0])
    first = check(model, jitted(), X)
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    np.testing.assert_array_equal(first, check(model, jitted(), X, given=(struct,)))
    for inputs in ((placed,), (X, jax.random.key(5))):
        np.testing.assert_allclose(first, check(model, jitted(), *inputs), rtol=1e-5)
    check(model, jax.jit(lambda tree, x, by: forward(tree, x) * by), X, 3.0, given=(X, 2.0))
    check(model, jitted(static_argnames="power"), X, power=2)


def test_results_are_those_without_it_bit_for_bit(abstract: Model, mesh8: Mesh) -> None:
    model = sharded(abstract, mesh8)
    own = jitted()(model.materialize(), X)
    assert np.asarray(own).tobytes() == check(model, jitted(), X).tobytes()


def test_shardings_of_the_step_s_own(abstract: Model, mesh8: Mesh) -> None:
    model = sharded(abstract, mesh8)
    tree = {"kernel": P("model"), "scale": P(), "rng": P(), "table": P(), "depth": P()}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh8, spec), tree)
    batch = NamedSharding(mesh8, P("model"))
    check(model, jitted(in_shardings=(shardings, batch), out_shardings=batch), X)
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=batch)
    step = jitted(in_shardings=(shardings, batch), out_shardings=batch)
    check(model, step, jax.device_put(X, batch), given=(struct,))


def test_donated_arguments_and_results_that_go_in_again(mesh8: Mesh) -> None:
    optax = pytest.importorskip("optax")
    adam = optax.adam(1e-3)
    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (64, 64))}, jax.random.key(0))
    model = abstract.shard(mesh8, {"w": P(None, "model")}).with_optimizer(adam)

    def step(params: Any, state: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda tree: jnp.mean((x @ tree["w"]) ** 2))(params)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    params, state = model.materialize(compile=lm.Compile(jitted, X).of(lambda both: both))
    before = params["w"]
    with compile_events() as events:
        params, state, loss = jitted(params, state, X)
        params, state, second = jitted(params, state, X)
    assert events == [] and before.is_deleted() and second < loss


@pytest.mark.parametrize("kind", ["pinned_host", "explicit", "mesh in context"])
def test_shardings_of_other_kinds(abstract: Model, mesh8: Mesh, kind: str) -> None:
    if kind == "pinned_host":
        device = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        single = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (64, 64))}, KEY)
        model = single.with_variables({"w": dataclasses.replace(single["w"], sharding=device)})
        default = SingleDeviceSharding(jax.devices()[0])
        check(model, jax.jit(lambda tree, x: x @ jax.device_put(tree["w"], default)), X)
        return
    mesh = Mesh(mesh8.devices, mesh8.axis_names, axis_types=(AxisType.Explicit,)) if kind == "explicit" else mesh8
    model = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (64, 64))}, KEY).shard(mesh, {"w": P("model")})
    with jax.set_mesh(mesh):
        check(model, jax.jit(lambda tree, x: jnp.tanh(tree["w"]).sum() + x), X)


def test_settings_of_the_context_count(abstract: Model) -> None:
    with jax.default_matmul_precision("highest"):
        check(abstract, jitted(), X)
    step = jitted()
    with jax.default_matmul_precision("highest"):
        loaded = abstract.materialize(compile=lm.Compile(step, X))
    with compile_events() as events:
        step(loaded, X)
    assert [event for event in events if event.startswith("compile")] == ["compile jit(own)"]


def test_several_are_compiled(abstract: Model) -> None:
    steps = [jax.jit(lambda tree, x, n=n: forward(tree, x) + n) for n in range(3)]
    reports: list[lm.LoadReport] = []
    loaded = abstract.materialize(compile=[lm.Compile(step, X) for step in steps], report=reports.append)
    with compile_events() as events:
        for step in steps:
            step(loaded, X)
    assert events == []
    (report,) = reports
    assert [program.description for program in report.compiled] == ["<lambda>"] * 3
    assert all(program.seconds > 0 and program.cache == "" for program in report.compiled)
    assert report.lower_seconds > 0 and "compiled: <lambda> in " in str(report)
    assert report.to_dict()["compiled"][0]["memory"]["argument_nbytes"] > 64 * 64 * 4


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    abstract = lm.build_abstract(lambda key: eqx.nn.MLP(64, 4, 16, 1, key=key), jax.random.key(0))
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    step = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    check(abstract, step, X, given=(struct,))
    apply = jax.jit(lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x))
    static = eqx.filter(abstract.materialize(), eqx.is_array, inverse=True)
    loaded = abstract.materialize(compile=lm.Compile(apply, X).of(lambda model: (eqx.filter(model, eqx.is_array),)))
    with compile_events() as events:
        apply(eqx.filter(loaded, eqx.is_array), X)
    assert events == []


@pytest.mark.parametrize(
    ("compile", "message"),
    [
        ("train", "got 'train'"),
        ([lm.Compile("init")], r"Compile\('init'\) is for a plan"),
        (lm.Compile("forward"), r"Compile\('forward'\) is for a plan"),
        (lm.Compile("train", forward, X), r"Compile\('train', .*\) is for a plan"),
        (lm.Compile(forward, X), "forward is not jitted"),
        (lm.Compile("predict"), "only Keras models have functions of their own to compile"),
        (lm.Compile(jax.jit(forward), X).of(lambda model: model), "returned dict"),
    ],
)
def test_what_cannot_be_compiled_beside(abstract: Model, compile: Any, message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        abstract.materialize(compile=compile)


def test_a_step_that_does_not_trace_reads_nothing(abstract: Model) -> None:
    told: list[int] = []
    compile = lm.Compile(jax.jit(forward), np.ones((8, 63), "f"))
    with pytest.raises(TypeError, match="dot_general") as raised:
        abstract.materialize(compile=compile, progress=lambda done, total: told.append(done))
    assert told == [] and "forward was called with init as it will be" in raised.value.__notes__[-1]

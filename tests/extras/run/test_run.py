"""`run` returns what the function returns with the materialized model, whatever the function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.extras.run.models import (
    WIDTH,
    assert_equal,
    block,
    decoder,
    ends,
    forward,
    loss_of,
    norms_of,
    scanned,
    tokens,
)
from tests.large import mostly_large

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
LAYERS = 4


@pytest.fixture(scope="module")
def listed() -> Any:
    return lm.build_abstract(decoder(LAYERS), jax.random.key(0))


@pytest.fixture(scope="module")
def stacked() -> Any:
    return lm.build_abstract(decoder(LAYERS, stacked=True), jax.random.key(0))


def ran(abstract: Any, function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, lm.RunReport]:
    reports: list[lm.RunReport] = []
    found = abstract.run(function, *inputs, report=reports.append, **options)
    return found, reports[0]


def check(abstract: Any, function: Callable[..., Any], *inputs: Any, **options: Any) -> lm.RunReport:
    """Compares with the whole model; the whole is jitted unless the function has effects."""
    found, report = ran(abstract, function, *inputs, **options)
    assert_equal(found, jax.jit(function)(abstract.materialize(options.get("checkpoint")), *inputs))
    return report


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))


def body(function: Callable[[Any, jax.Array, jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The decoder with something else done for each layer."""

    def layers(blocks: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        for layer in blocks:
            x = function(layer, x, mask)
        return x

    return ends(layers)


def dropped(model: Any, tokens: Any, key: jax.Array) -> jax.Array:
    x = model["embedding"][tokens]
    for number, layer in enumerate(model["layers"]):
        x = x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, x.shape)
        x = jnp.tanh(x @ layer["out"])
    return x


def batched(model: Any, tokens: Any) -> jax.Array:
    return jax.vmap(forward, (None, 0))(model, jnp.stack([tokens, tokens[::-1]]))


def recurrent(model: Any, tokens: Any) -> jax.Array:
    """A scan over time, which takes its variables whole."""
    layer = model["layers"][0]
    x = model["embedding"][tokens]
    return jax.lax.scan(lambda c, row: (jnp.tanh(c @ layer["out"] + row), c), x[0], x)[1]


def looped(model: Any, tokens: Any) -> jax.Array:
    x, out = model["embedding"][tokens], model["layers"][1]["out"]
    x = jax.lax.while_loop(lambda x: jnp.abs(x).max() < 100, lambda x: (x + 1) @ jnp.abs(out), jnp.abs(x))
    return jax.lax.cond(x.sum() > 0, lambda x: x @ model["layers"][2]["out"], lambda x: x, x)


def mixed(model: Any, tokens: Any) -> Any:
    """In bfloat16, with the gradients' norms in float32."""
    gradients = jax.grad(lambda model: loss_of(forward)(jax.tree.map(lambda w: w.astype("bfloat16"), model), tokens))
    return jax.tree.map(lambda gradient: jnp.sqrt(jnp.square(gradient.astype(jnp.float32)).sum()), gradients(model))


def reductions(model: Any, tokens: Any) -> Any:
    """Cosines and histograms."""

    def reduced(g: jax.Array, w: jax.Array) -> Any:
        return (g * w).sum() / jnp.sqrt((g * g).sum() * (w * w).sum()), jnp.histogram(g, 4)[1]

    return jax.tree.map(reduced, jax.grad(loss_of(forward))(model, tokens), model)


def narrow(model: Any, tokens: Any) -> Any:
    """Numbers of four bits pass from layer to layer."""
    x = model["embedding"][tokens]
    small = (x * 3).astype("int4")
    for layer in model["layers"]:
        x = jnp.tanh(x @ layer["out"])
    return x + small.astype(x.dtype), small.astype("int8")


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "forward": forward,
    "a jitted function": jax.jit(forward),
    "jitted layers": body(jax.jit(block)),
    "donated": body(jax.jit(block, donate_argnums=1)),
    "checkpoint": norms_of(body(jax.checkpoint(block))),
    "custom_vjp": norms_of(body(lambda layer, x, mask: doubled(block(layer, x, mask)))),
    "vmap": batched,
    "scan over time": recurrent,
    "while and cond": looped,
    "norms": norms_of(forward),
    "bfloat16": mixed,
    "reductions": reductions,
    "int4": narrow,
    "value_and_grad": lambda model, tokens: jax.value_and_grad(loss_of(forward))(model, tokens)[0],
    "second derivatives": lambda model, tokens: jax.jvp(
        jax.grad(lambda x: loss_of(forward)({**model, "norm": x}, tokens)), (model["norm"],), (model["norm"],)
    )[1],
    "static results": lambda model, tokens: {"a": [model["norm"] * 2, "text", 3], "b": None, "c": np.arange(3)},
    "one array twice": lambda model, tokens: (model["norm"], model["norm"], model["norm"] + 1, tokens, tokens),
    "no variables": lambda model, tokens: tokens + jnp.arange(12),
    "only constants": lambda model, tokens: (jnp.float32(3), jnp.arange(4)),
    "cheap results": lambda model, tokens: [model["embedding"].T, model["layers"][3]["up"].astype("bfloat16")],
    "half of a variable": lambda model, tokens: [model["embedding"][:10], model["embedding"][-1], model["norm"][::2]],
    "branches": lambda model, tokens: [forward(model, tokens), forward(model, tokens[::-1]).sum()],
}

LONG = ("a jitted function", "custom_vjp", "vmap", "bfloat16", "reductions", "value_and_grad")


@pytest.mark.parametrize("name", mostly_large(FUNCTIONS, [name for name in FUNCTIONS if name not in LONG]))
def test_equals_the_whole(listed: Any, name: str) -> None:
    if name in ("static results", "only constants"):
        found, _ = ran(listed, FUNCTIONS[name], tokens())
        assert_equal(found, FUNCTIONS[name](listed.materialize(), tokens()))
    else:
        check(listed, FUNCTIONS[name], tokens())


def picked(model: Any, tokens: Any) -> jax.Array:
    """Layers of a stack, picked one by one."""
    x = model["embedding"][tokens]
    for number in range(LAYERS):
        x = block(jax.tree.map(lambda rows, number=number: rows[number], model["layers"]), x, jnp.ones((12, 12), bool))
    return x


def backwards(model: Any, tokens: Any) -> Any:
    x = model["embedding"][tokens]
    rows = jnp.arange(float(LAYERS))
    step = lambda x, each: (jnp.tanh(x @ each[0]["out"]) + each[1], x.mean(0))  # noqa: E731
    x, means = jax.lax.scan(step, x, (model["layers"], rows), reverse=True)
    return x, means, means[1], means.max(0)


def nested(model: Any, tokens: Any) -> jax.Array:
    """Scans over pairs of layers, and in each over its layers."""
    pairs = jax.tree.map(lambda rows: rows.reshape(2, 2, *rows.shape[1:]), model["layers"])
    inner = lambda x, layer: (jnp.tanh(x @ layer["out"]), None)  # noqa: E731
    return jax.lax.scan(lambda x, pair: (jax.lax.scan(inner, x, pair)[0], None), model["embedding"][tokens], pairs)[0]


SCANS: dict[str, Callable[[Any, Any], Any]] = {
    "scan": scanned,
    "reverse": backwards,
    "nested": nested,
    "picked": picked,
    "norms": norms_of(scanned),
    "whole": lambda model, tokens: model["layers"]["out"].sum(0),
    "norms of layers": lambda model, tokens: jnp.linalg.norm(
        jax.grad(loss_of(scanned))(model, tokens)["layers"]["up"], axis=(1, 2)
    ),
    "bfloat16": lambda model, tokens: scanned(jax.tree.map(lambda w: w.astype("bfloat16"), model), tokens),
    "checkpoint": norms_of(
        ends(
            lambda layers, x, mask: jax.lax.scan(
                jax.checkpoint(lambda x, layer: (block(layer, x, mask), None)), x, layers
            )[0]
        )
    ),
    "fori with an index": lambda model, tokens: jax.lax.fori_loop(
        0, LAYERS, lambda i, x: jnp.tanh(x @ model["layers"]["out"][i]), model["embedding"][tokens]
    ),
}


@pytest.mark.parametrize("name", mostly_large(SCANS, [name for name in SCANS if name not in ("norms", "picked")]))
def test_scans_equal_the_whole(stacked: Any, name: str) -> None:
    tolerance = 2e-2 if name == "bfloat16" else 1e-5
    found, _ = ran(stacked, SCANS[name], tokens())
    assert_equal(found, jax.jit(SCANS[name])(stacked.materialize(), tokens()), tolerance)


def test_keys_and_captured_arrays(listed: Any) -> None:
    scale, table = jnp.linspace(1, 2, WIDTH), np.linspace(0, 1, WIDTH, dtype="float32")
    check(listed, dropped, tokens(), jax.random.key(4))
    check(listed, lambda model, tokens: forward(model, tokens) @ model["embedding"] * scale + table, tokens())


def test_inputs_may_be_any_pytree(listed: Any) -> None:
    def function(model: Any, batch: Any, *, scale: float = 2.0) -> Any:
        assert isinstance(batch["how"], str) and isinstance(batch["tokens"], np.ndarray)
        return model["embedding"][batch["tokens"][: int(batch["tokens"].max())]] * scale, batch["how"]

    batch = {"tokens": np.asarray(tokens()), "how": "fast"}
    found, _ = ran(listed, function, batch)
    assert_equal(found, function(listed.materialize(), batch))


def test_variables_with_keys_integers_and_hosts(tmp_path: Any) -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        return {"keys": jax.random.split(key, 3), "n": jnp.arange(5), "host": np.arange(4.0), "two": jnp.full(4, 2.0)}

    abstract = lm.build_abstract(init, jax.random.key(0))

    def function(model: Any) -> Any:
        drawn = jax.vmap(lambda key: jax.random.normal(key, (4,)))(model["keys"])
        return drawn + model["host"].astype("float32"), model["n"][2], model["keys"], model["two"] * jnp.bfloat16(2)

    assert ran(abstract, lambda model: type(model["host"]).__name__)[0] == "ndarray"
    check(abstract, function)
    lm.save(abstract, tmp_path / "model.safetensors")
    check(abstract, function, checkpoint=lm.open_checkpoint(tmp_path / "model.safetensors"))


def test_scans_over_keys_constants_and_nothing(tmp_path: Any) -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        return {"keys": keys, "w": jnp.stack([jax.random.normal(each, (8, 8)) for each in keys])}

    def function(model: Any, x: jax.Array) -> Any:
        drawn = lambda x, row: (jnp.tanh(x @ row["w"]) + jax.random.normal(row["keys"], x.shape), x.sum())  # noqa: E731
        constants = lambda x, w: (x @ w, (1.0, jnp.zeros(3), w.sum()))  # noqa: E731
        squares = jax.lax.map(lambda w: w.T @ w, model["w"])
        return (
            jax.lax.scan(drawn, x, model),
            jax.lax.scan(constants, x, model["w"]),
            jax.lax.scan(constants, x, model["w"][:0]),
            (squares, squares.sum((0, 1)), jnp.linalg.norm(squares), x[:0] @ model["w"][0]),
        )

    abstract = lm.build_abstract(init, jax.random.key(0))
    lm.save(abstract, tmp_path / "model.safetensors")
    report = check(abstract, function, jnp.ones((2, 8)), checkpoint=lm.open_checkpoint(tmp_path / "model.safetensors"))
    assert sum(row.nbytes for row in report.whole) == 0
    check(abstract, function, jnp.ones((2, 8)))


OF_EACH = ("or", "and", "xor", "sum", "prod", "max", "min")
DTYPES = "bool int4 int8 uint8 int16 int32 uint32 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 complex64"


@pytest.mark.parametrize("dtype", mostly_large(DTYPES.split(), ["bool", "int4", "bfloat16"]))
def test_reductions_of_scans_in_every_dtype(dtype: str) -> None:
    weights = np.random.default_rng(0).integers(0, 7, (4, 6, 8)).astype(jnp.dtype(dtype))
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros(weights.shape, dtype), "x": jnp.zeros(2)})
    axes, names = [(0,), (0, 1), (0, 1, 2)], list(OF_EACH)
    if not jnp.issubdtype(dtype, jnp.integer):  # it overflows
        names.remove("prod")

    def function(model: Any) -> Any:
        _, layers = jax.lax.scan(lambda carry, x: (carry, ~x if dtype == "bool" else x + x), 0, model["w"])
        return {n: [getattr(jax.lax, f"reduce_{n}")(layers, each) for each in axes] for n in names}

    for name in [*names]:  # JAX refuses some, of bits of floats for example
        try:
            jax.eval_shape(lambda x, name=name: getattr(jax.lax, f"reduce_{name}")(x, (0,)), weights)
        except TypeError:
            names.remove(name)
    assert {"max", "min"} <= {*names} and (dtype == "complex64" or {"sum", "or"} & {*names})
    loaded = {"w": weights, "x": np.zeros(2, np.float32)}
    found, expected = abstract.run(function, checkpoint=loaded), jax.jit(function)(loaded)
    found, expected = jax.tree.map(np.asarray, (found, expected))
    if "sum" in names and jnp.issubdtype(dtype, jnp.floating):  # rounded once, which XLA's own are not
        whole = (weights + weights).astype(np.float64)
        expected["sum"][1:] = [whole.sum(each).astype(weights.dtype) for each in axes[1:]]
    for name in names:
        for mine, right in zip(found[name], expected[name], strict=True):
            assert mine.dtype == right.dtype and mine.shape == right.shape
            assert np.array_equal(mine.astype(complex), right.astype(complex), equal_nan=True), name


def test_empty_slices_of_scans_and_weak_types() -> None:
    weights = np.arange(24, dtype=np.float32).reshape(4, 6)
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros((4, 6)), "x": jnp.zeros(2)})

    def function(model: Any) -> Any:
        _, y = jax.lax.scan(lambda carry, x: (carry, x + 1), 0, model["w"])
        empty = [y[0:0], y[2:2] * 2, jnp.sum(y[1:1], 0), jnp.concatenate([y[4:], y[:1]])]
        return empty, jax.lax.scan(lambda carry, x: (carry + x, x), y[0], y[:0]), jnp.asarray(1.5), jnp.asarray(2) * 1

    loaded = {"w": weights, "x": weights[0, :2]}
    found, expected = abstract.run(function, checkpoint=loaded), jax.jit(function)(loaded)
    assert_equal(found, expected)
    weak = [each.weak_type for each in jax.tree.leaves(expected)]
    assert [each.weak_type for each in jax.tree.leaves(found)] == weak and {*weak} == {True, False}


def test_64_bits() -> None:
    with jax.enable_x64(True):
        abstract = lm.build_abstract(
            lambda key: [jax.random.normal(each, (8, 8), "float64") for each in jax.random.split(key, 3)],
            jax.random.key(0),
        )
        product = lambda model, x: x @ model[0] @ model[1] @ model[2] * 1e-300  # noqa: E731
        found, _ = ran(abstract, product, jnp.ones((2, 8)))
        assert_equal(found, product(abstract.materialize(), jnp.ones((2, 8))), 1e-12)


def test_programs_do_not_grow_with_depth() -> None:
    counts = []
    for layers in (6, 12):
        abstract = lm.build_abstract(decoder(layers), jax.random.key(0))
        reports = [ran(abstract, forward, tokens())[1], ran(abstract, dropped, tokens(), jax.random.key(1))[1]]
        if layers == 6:
            fewer = lm.build_abstract(decoder(4), jax.random.key(0))
            norms = [ran(each, norms_of(forward), tokens())[1] for each in (fewer, abstract)]
            assert len(norms[0].rows) == len(norms[1].rows) <= 8 and norms[1].calls > 12
        of_layers = lm.build_abstract(decoder(layers, stacked=True), jax.random.key(0))
        reports.append(ran(of_layers, scanned, tokens())[1])
        assert min(report.calls for report in reports) >= layers
        counts.append([len(report.rows) for report in reports])
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 4


def test_a_report_names_layers() -> None:
    """Those of stretches that are of one layer; no name where a stretch has variables of several."""
    abstract = lm.build_abstract(
        lambda: {"embedding": jnp.ones((8, 16)), "layers": [{"kernel": jnp.eye(16) * 2} for _ in range(6)]}
    )

    def function(model: Any, x: Any) -> Any:
        for layer in model["layers"]:
            x = jnp.tanh(x @ layer["kernel"])
        return x @ model["embedding"].T

    reports: list[lm.RunReport] = []
    abstract.run(function, np.ones((2, 16), "float32"), report=reports.append)
    layers = [row.layers for row in reports[0].rows]
    assert layers == [tuple(f"layers/{n}" for n in range(6)), ("embedding",)]
    assert "layers: layers/{0..5} by program 0, embedding by program 1" in str(reports[0])

    def both(model: Any, x: Any) -> Any:
        return x @ (model["layers"][0]["kernel"] + model["layers"][1]["kernel"])

    abstract.run(both, np.ones((2, 16), "float32"), report=reports.append)
    assert [row.layers for row in reports[1].rows] == [()] and "layers:" not in str(reports[1])

"""Growing: the larger model computes what the smaller one does where that is said, and costs no bytes before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lazymodel as lm
from tests.large import mostly_large

P = jax.P
SIZE, HIDDEN = 16, 24
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, 32)


def init(key: jax.Array, layers: int = 3, hidden: int = HIDDEN, experts: int = 0) -> Any:
    normal = jax.nn.initializers.normal(0.3)
    keys = iter(jax.random.split(key, 8 * layers + 2))

    def layer() -> Any:
        stack = (experts,) if experts else ()
        attention = {name: normal(next(keys), (SIZE, SIZE)) for name in ("q", "k", "v", "out")}
        mlp = {
            "up": normal(next(keys), (*stack, SIZE, hidden)),
            "up_bias": normal(next(keys), (*stack, hidden)),
            "down": normal(next(keys), (*stack, hidden, SIZE)),
        }
        made = {"attention": attention, "norm": jnp.ones(SIZE)}
        if not experts:
            return {**made, "mlp": mlp}
        return {**made, "experts": mlp, "router": normal(next(keys), (experts, SIZE))}

    return {"embed": normal(next(keys), (32, SIZE)), "layers": [layer() for _ in range(layers)]}


def apply(model: Any, tokens: jax.Array = TOKENS) -> jax.Array:
    x = model["embed"][tokens]
    for layer in model["layers"]:
        y, weights = x * layer["norm"] / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), layer["attention"]
        q, k, v = ((y @ weights[name]).reshape(*y.shape[:2], 2, -1) for name in "qkv")
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(y.shape) @ weights["out"]
        if "mlp" in layer:
            x = x + network(layer["mlp"], x)
        else:
            scores, chosen = jax.lax.top_k(x @ layer["router"].T, 2)
            outputs = jax.vmap(network, (0, None), -2)(layer["experts"], x)
            gates = jax.nn.softmax(scores)[..., None]
            x = x + (jnp.take_along_axis(outputs, chosen[..., None], -2) * gates).sum(-2)
    return x @ model["embed"].T


def network(weights: Any, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ weights["up"] + weights["up_bias"]) @ weights["down"]


@pytest.fixture(scope="module")
def small() -> Any:
    return lm.build_abstract(init, jax.random.key(0)).materialize()


@pytest.fixture
def checkpoint(small: Any, tmp_path: Path) -> Any:
    lm.save(small, tmp_path / "small.safetensors")
    return lm.open_checkpoint(tmp_path / "small.safetensors")


def materialize(weights: Any, mesh: Any, initialize: str = "nothing", **config: int) -> Any:
    abstract = lm.build_abstract(init, jax.random.key(5), **config)
    sharded = abstract.shard(mesh, lambda variable: P(*[None] * (len(variable.shape) - 1), "model"))
    return sharded.materialize(weights, initialize=initialize)


LAYERS = "layers/{layer}/{rest...}"
ADDED = ["layers/{layer}/attention/out", "layers/{layer}/mlp/down"]


@pytest.mark.parametrize(
    "method", mostly_large(["stack", "interleave", [0, 0, 1, 2, 2, 0, 1, 2]], ["interleave", [0, 0, 1, 2, 2, 0, 1, 2]])
)
def test_deeper_with_zero_outputs_is_the_same_function_bit_for_bit(
    method: Any, small: Any, checkpoint: Any, mesh8: Any
) -> None:
    grown = lm.grow.depth(checkpoint, LAYERS, 8, method=method, zero=ADDED)
    assert checkpoint.bytes_read == 0
    model = materialize(grown, mesh8, layers=8)
    run = jax.jit(apply)
    gathered = jax.device_get(model)  # one device: a sharded sum would be added up in another order
    np.testing.assert_array_equal(apply(gathered), apply(jax.device_get(small)))
    np.testing.assert_allclose(run(model), apply(small), rtol=2e-5, atol=1e-5)
    new = {"stack": 3, "interleave": 1}.get(method if isinstance(method, str) else "", 1)
    assert not np.asarray(model["layers"][new]["mlp"]["down"]).any()
    assert np.asarray(model["layers"][new]["mlp"]["up"]).any()


def test_zeros_are_not_read(checkpoint: Any, mesh8: Any) -> None:
    materialize(lm.grow.depth(checkpoint, LAYERS, 3, zero=ADDED), mesh8)
    once = checkpoint.bytes_read
    materialize(lm.grow.depth(checkpoint, LAYERS, 9, zero=["layers/{layer}/{rest...}"]), mesh8, layers=9)
    assert checkpoint.bytes_read == 2 * once > 0


@pytest.mark.parametrize(("method", "sources"), [("stack", [0, 1, 2, 0, 1]), ("interleave", [0, 0, 1, 1, 2])])
def test_copies_are_of_the_layers_that_the_method_says(
    method: str, sources: list[int], small: Any, checkpoint: Any
) -> None:
    grown = lm.grow.depth(checkpoint, LAYERS, 5, method=method)
    for new, source in enumerate(sources):
        np.testing.assert_array_equal(grown[f"layers/{new}/mlp/up"].read(), small["layers"][source]["mlp"]["up"])
    np.testing.assert_array_equal(grown["embed"].read(), small["embed"])
    assert len(grown) == 1 + 5 * 8
    assert grown.path == checkpoint.path


def test_stacked_layers(mesh8: Any) -> None:
    values = np.random.default_rng(0).normal(size=(16, 3, 4)).astype(np.float32)
    tensors = {"blocks/up": values, "blocks/down": values + 1, "embed": values[0]}
    grown = lm.grow.depth(tensors, "blocks/{rest}", 5, method="interleave", zero="blocks/down", axis=1)
    np.testing.assert_array_equal(grown["blocks/up"].read(), values[:, [0, 0, 1, 1, 2]])
    expected = (values + 1)[:, [0, 0, 1, 1, 2]]
    expected[:, [1, 3]] = 0
    np.testing.assert_array_equal(grown["blocks/down"].read(), expected)
    abstract = lm.build_abstract(lambda: {"blocks": {"down": jnp.zeros((16, 5, 4))}})
    placed = abstract.shard(mesh8, {".*": P("model")}).materialize({"blocks/down": grown["blocks/down"]})
    np.testing.assert_array_equal(placed["blocks"]["down"], expected)


INCOMING = {"layers/{layer}/mlp/up": -1, "layers/{layer}/mlp/up_bias": 0}
OUTGOING = {"layers/{layer}/mlp/down": 0}


@pytest.mark.parametrize(
    ("units", "uneven"), mostly_large([(48, 0.0), (64, 0.0), (32, 0.0), (64, 0.75), (24, 0.0)], [(48, 0.0), (64, 0.75)])
)
def test_wider_is_the_same_function(units: int, uneven: float, small: Any, checkpoint: Any, mesh8: Any) -> None:
    grown = lm.grow.width(checkpoint, units, incoming=INCOMING, outgoing=OUTGOING, uneven=uneven)
    assert checkpoint.bytes_read == 0
    model = materialize(grown, mesh8, hidden=units)
    np.testing.assert_allclose(jax.jit(apply)(model), apply(small), rtol=1e-4, atol=2e-5)
    down = np.asarray(model["layers"][0]["mlp"]["down"])
    if units > HIDDEN:
        first, copy = down[0], down[HIDDEN]
        assert np.array_equal(first, copy) == (uneven == 0)
        copies = down[0::HIDDEN]
        np.testing.assert_allclose(copies.sum(0), small["layers"][0]["mlp"]["down"][0], rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 6), more=st.integers(0, 14), uneven=st.sampled_from([0.0, 0.5]))
def test_wider_preserves_a_linear_map_for_any_counts(count: int, more: int, uneven: float) -> None:
    rng = np.random.default_rng(count)
    tensors = {"in": rng.normal(size=(3, count)), "out": rng.normal(size=(count, 5))}
    grown = lm.grow.width(tensors, count + more, incoming={"in": 1}, outgoing={"out": -2}, uneven=uneven)
    before, after = np.asarray(grown["in"]), np.asarray(grown["out"])
    np.testing.assert_array_equal(before, tensors["in"][:, np.arange(count + more) % count])
    np.testing.assert_allclose(before @ after, tensors["in"] @ tensors["out"], atol=1e-12)
    half = lm.grow.width({"w": np.ones((count, 1), jnp.bfloat16), "b": np.ones(count)}, count + more,
                         incoming={"b": 0}, outgoing={"w": 0}, uneven=uneven)  # fmt: skip
    assert half["w"].dtype == jnp.bfloat16


def test_experts_are_copies_and_the_function_is_the_same(small: Any, checkpoint: Any, mesh8: Any) -> None:
    names = {"layers/{layer}/mlp/{rest}": "layers/{layer}/experts/{rest}"}
    grown = lm.grow.experts(checkpoint, names, 4)
    assert checkpoint.bytes_read == 0
    assert not any("/mlp/" in name or "router" in name for name in grown)
    model = materialize(grown, mesh8, "missing", experts=4)
    assert np.asarray(model["layers"][0]["router"]).any()
    np.testing.assert_allclose(jax.jit(apply)(model), apply(small), rtol=1e-4, atol=2e-5)
    for expert in range(4):
        np.testing.assert_array_equal(model["layers"][1]["experts"]["up"][expert], small["layers"][1]["mlp"]["up"])


def test_experts_of_their_own_names_or_along_another_axis(small: Any, checkpoint: Any) -> None:
    names = {"layers/{layer}/mlp/{rest}": "layers/{layer}/moe/{expert}/{rest}"}
    grown = lm.grow.experts(checkpoint, names, 3)
    for expert in range(3):
        np.testing.assert_array_equal(grown[f"layers/2/moe/{expert}/down"].read(), small["layers"][2]["mlp"]["down"])
    assert "layers/2/moe/3/down" not in grown
    stacked = lm.grow.experts(checkpoint, {"layers/{layer}/mlp/up": "layers/{layer}/mlp/up"}, 3, axis=-1)
    assert stacked["layers/0/mlp/up"].shape == (SIZE, HIDDEN, 3)
    np.testing.assert_array_equal(stacked["layers/0/mlp/up"].read()[..., 2], small["layers"][0]["mlp"]["up"])


def test_growing_steps_combine_and_a_model_can_be_grown_in_place(small: Any, mesh8: Any) -> None:
    wider = lm.grow.width(small, 48, incoming=INCOMING, outgoing=OUTGOING)
    deeper = lm.grow.depth(wider, LAYERS, 6, method="interleave", zero=ADDED)
    model = materialize(deeper, mesh8, layers=6, hidden=48)
    np.testing.assert_allclose(jax.jit(apply)(model), apply(small), rtol=1e-4, atol=2e-5)


def tensors(**others: Any) -> dict[str, Any]:
    arrays = {f"h.{layer}.{name}": np.ones((4, 4)) for layer in range(2) for name in ("a", "b")}
    return {**arrays, **others}


GROW = {
    "depth": [
        (("g.{layer}.{rest}", 4), {}, "no tensor matches 'g.{layer}.{rest}'"),
        (("h.{layer}.{rest}", 1), {}, "2 layers, more than the 1"),
        (("h.{layer}.{rest}", 4), {"method": "double"}, "'stack' or 'interleave'"),
        (("h.{layer}.{rest}", 3), {"method": [0, 1]}, "3 numbers from 0 to 1"),
        (("h.{layer}.{rest}", 2), {"method": [1, 0], "zero": "h.{layer}.a"}, "0 to 1 in order"),
        (("h.{layer}.{rest}", 4), {"zero": "h.{layer}.c"}, "no tensor matches 'h.{layer}.c'"),
        (("h.{rest...}", 4), {}, "has no {layer}"),
        (("h.{layer}.a", 4), {"axis": 0}, "axis=0 is for layers that are stacked"),
        (("h.0.a", 4), {"axis": 2}, r"'h.0.a': there is no axis 2 in shape \[4, 4\]"),
    ],
    "width": [
        ((3,), {"incoming": {"h.0.a": 1}, "outgoing": {"h.0.b": 0}}, "there are 4 units"),
        ((8,), {"incoming": {"h.0.a": 1}, "outgoing": {"h.0.a": 0}}, "'h.0.a' matches two"),
        ((8,), {"incoming": {"h.0.a": 1}, "outgoing": {}}, "incoming and outgoing"),
        ((8,), {"incoming": {"h.0.a": 2}, "outgoing": {"h.0.b": 0}}, "there is no axis 2"),
        ((8,), {"incoming": {"h.0.a": 1}, "outgoing": {"h.0.b": 0}, "uneven": 1}, "uneven is"),
        ((8,), {"incoming": {"h.0.a": 1}, "outgoing": {"five": 0}}, "'five' has 5"),
    ],
    "experts": [
        (({"h.{layer}.a": "h.{layer}.{other}"}, 4), {}, "{other} of .* is not in"),
        (({"h.{layer}.a": "h.{layer}.b"}, 4), {}, "'h.0.b', which exists already"),
        (({"h.{layer}.a": "a"}, 4), {}, "'h.1.a' would become 'a'"),
        (({"h.{layer}.a": "x.{layer}"}, 0), {}, "at least one"),
        (({"h.{layer}.a": "x.{layer}"}, 2), {"axis": 4}, "there is no axis 4"),
    ],
}


@pytest.mark.parametrize(
    ("function", "given", "options", "match"), [(name, *case) for name, cases in GROW.items() for case in cases]
)
def test_errors_name_the_tensor_and_the_fix(function: str, given: Any, options: Any, match: str) -> None:
    with pytest.raises(lm.LazyModelError, match=match):
        getattr(lm.grow, function)(tensors(five=np.ones(5)), *given, **options)


@pytest.mark.parametrize(
    ("name", "match"), [("h.3.a", "layer 2 has nothing"), ("h.x.a", "found 'x'"), ("h.1.c", "layer 0 .* 'h.1.c'")]
)
def test_layers_are_numbered_and_alike(name: str, match: str) -> None:
    with pytest.raises(lm.LazyModelError, match=match):
        lm.grow.depth(tensors(**{name: 0}), "h.{layer}.{rest}", 6)
    with pytest.raises(lm.LazyModelError, match="layer 0 has nothing"):
        lm.grow.depth({"h.1.c": 0}, "h.{layer}.{rest}", 6)

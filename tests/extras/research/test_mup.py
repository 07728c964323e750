"""muP from two builds: equal to what the tables of Tensor Programs V say, worked out by hand for a width of four times.

An expectation is (kind, what the base's standard deviation, Adam's and SGD's learning rate are multiplied by). Table 3:

                    init. variance   Adam        SGD
    input, biases   1 / fan_in       1           fan_out
    hidden          1 / fan_in       1 / fan_in  1
    output          1 / fan_in²      1 / fan_in  1 / fan_in
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lazymodel as lm
from tests.trees import named

I = jax.nn.initializers  # noqa: E741 (short)
NORMAL = I.normal(0.02)
INPUT, HIDDEN, OUTPUT = ("input", 1, 1, 4), ("hidden", 1 / 2, 1 / 4, 1), ("output", 1 / 4, 1 / 4, 1 / 4)
VECTOR, FIXED = ("vector", 1, 1, 4), ("fixed", 1, 1, 1)
Shapes = Callable[[int], Mapping[str, tuple[int, ...]]]


def build(shapes: Shapes, width: int, initializer: Any = NORMAL) -> lm.AbstractModel:
    def init(key: jax.Array) -> Any:
        found = shapes(width)
        keys = jax.random.split(key, len(found))
        tree: dict[str, Any] = {}
        for own, (path, shape) in zip(keys, found.items(), strict=True):
            *places, name = path.split("/")
            node = tree
            for place in places:
                node = node.setdefault(place, {})
            vector = name in ("bias", "scale")
            node[name] = jnp.zeros(shape) if vector else initializer(own, shape, jnp.float32)
        return tree

    return lm.build_abstract(init, jax.random.key(0))


def both(shapes: Shapes, *sizes: int, initializer: Any = NORMAL) -> list[lm.AbstractModel]:
    return [build(shapes, size, initializer) for size in sizes or (64, 256)]


def mlp(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "first/kernel": (8, width),
        "first/bias": (width,),
        "second/kernel": (width, 2 * width),
        "third/kernel": (2 * width, width),
        "norm/scale": (width,),
        "last/kernel": (width, 10),
        "last/bias": (10,),
    }


def test_mlp_by_table_3() -> None:
    rules = (INPUT, VECTOR, HIDDEN, HIDDEN, VECTOR, OUTPUT, FIXED)
    expect(lm.mup(*both(mlp)), dict(zip(mlp(64), rules, strict=True)))


def transformer(width: int, *, heads: int, size: int) -> dict[str, tuple[int, ...]]:
    shapes = {"token_embedding/embedding": (100, width), "position_embedding/embedding": (32, width)}
    for layer in range(2):
        block = {
            "norm/scale": (width,),
            "attention/query/kernel": (width, heads, size),
            "attention/key/kernel": (width, heads, size),
            "attention/value/kernel": (width, heads, size),
            "attention/value/bias": (heads, size),
            "attention/out/kernel": (heads, size, width),
            "mlp/up/kernel": (width, 4 * width),
            "mlp/down/kernel": (4 * width, width),
        }
        shapes |= {f"blocks/{layer}/{name}": shape for name, shape in block.items()}
    return shapes


EMBEDDINGS = {"token_embedding/embedding": INPUT, "position_embedding/embedding": INPUT}
BLOCKS = {
    name: VECTOR if name.endswith(("scale", "bias")) else HIDDEN
    for name in transformer(64, heads=4, size=16)
    if name.startswith("blocks")
}


def test_transformer_with_its_own_readout_by_table_3_has_more_heads() -> None:
    def untied(width: int) -> dict[str, tuple[int, ...]]:
        return transformer(width, heads=width // 16, size=16) | {"lm_head/kernel": (width, 100)}

    scheme = lm.mup(*both(untied))
    expect(scheme, {**EMBEDDINGS, **BLOCKS, "lm_head/kernel": OUTPUT})
    assert scheme.output_multiplier == 1  # Table 3 needs none
    assert scheme.attention_scale == 1 / 4  # heads are as they were, so is 1 / √16


def test_transformer_with_a_tied_embedding_by_table_8_has_larger_heads() -> None:
    scheme = lm.mup(*both(lambda width: transformer(width, heads=4, size=width // 4)))
    expect(scheme, {**EMBEDDINGS, **BLOCKS})
    assert scheme.output_multiplier == 1 / 4  # Table 8: 1 / fan_in, relative to the base
    assert scheme.attention_scale == 4 / 64  # definition 4.1: 1 / d, as 1 / √d at the base's d of 16
    assert lm.mup(*both(lambda width: transformer(width, heads=4, size=width // 4)), tied=False).output_multiplier == 1


def test_convolutions_by_table_3() -> None:
    def convolutions(width: int) -> dict[str, tuple[int, ...]]:
        return {
            "conv_first/kernel": (7, 7, 3, width),
            "bn/scale": (width,),
            "conv_second/kernel": (3, 3, width, 2 * width),
            "depthwise/kernel": (3, 3, 2 * width, 1),
            "conv_last/kernel": (1, 1, 2 * width, width),
            "head/kernel": (width, 10),
        }

    scheme = lm.mup(*both(convolutions, initializer=I.he_normal()))
    table = {"conv_first/kernel": INPUT, "bn/scale": VECTOR, "conv_second/kernel": HIDDEN, "depthwise/kernel": INPUT}
    expect(scheme, {**table, "conv_last/kernel": HIDDEN, "head/kernel": OUTPUT})
    assert scheme["conv_last/kernel"].own_std == pytest.approx((2 / 512) ** 0.5)
    # He's follow hidden fan-ins, and for readouts are half of the way; of depthwise ones they take channels for it.
    assert scheme.factors == pytest.approx({"depthwise/kernel": 2, "head/kernel": 1 / 2})


def test_mixture_of_experts_by_table_3() -> None:
    def mixture(width: int) -> dict[str, tuple[int, ...]]:
        return {
            "moe/router/kernel": (width, 8),
            "moe/experts/up/kernel": (8, width, 4 * width),
            "moe/experts/down/kernel": (8, 4 * width, width),
        }

    table = {"moe/router/kernel": OUTPUT, "moe/experts/up/kernel": HIDDEN, "moe/experts/down/kernel": HIDDEN}
    expect(lm.mup(*both(mixture)), table)


def test_widths_that_grow_differently() -> None:
    def uneven(width: int) -> dict[str, tuple[int, ...]]:
        return {"up/kernel": (width, width * width // 64)}  # a fan-in of 4 and a fan-out of 16 times the base's

    assert expectation(lm.mup(*both(uneven)), "up/kernel") == ("hidden", 1 / 2, 1 / 4, 4)


# What dimensions are for ----------------------------------------------------------------------------------------------


def test_initializers_tell_where_names_do_not() -> None:
    def nameless(width: int) -> dict[str, tuple[int, ...]]:
        return {"a": (8, width), "b": (width, width), "c": (width, 10), "d/weight": (width, 12)}

    scheme = lm.mup(*both(nameless, initializer=I.lecun_normal()))
    expect(scheme, {"a": INPUT, "b": HIDDEN, "c": OUTPUT, "d/weight": OUTPUT})  # called as if it were (out, in)
    assert scheme["a"].source == "its initializer's fan-in"
    assert scheme["b"].source == "two dimensions that grow alike"
    with pytest.raises(lm.LazyModelError, match=r"ambiguous .* of 2 variables") as raised:
        lm.mup(*both(lambda width: {name: shape for name, shape in nameless(width).items() if name != "d/weight"}))
    assert """\n  (8, 64→256): axes={r'a': ("in", "out")}\n  (64→256, 10): axes={r'c'""" in str(raised.value)
    pair = both(lambda width: {name: shape for name, shape in nameless(width).items() if name != "d/weight"})
    expect(lm.mup(*pair, axes={"[ac]": ("in", "out")}), {"a": INPUT, "b": HIDDEN, "c": OUTPUT})
    assert lm.mup(*pair, axes={"a": ("out", None), "c": ("in", "out")})["a"].kind == "fixed"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (lambda w: {"value/kernel": (w, 1)}, OUTPUT),
        (lambda w: {"value/weight": (1, w), "value/bias": (1,)}, OUTPUT),  # Equinox' "scalar"
        (lambda w: {"to_mask/conv/kernel": (1, 1, w, 1)}, OUTPUT),
        (lambda w: {"to_mask/conv/weight": (1, w, 3, 3), "to_mask/conv/bias": (1,)}, OUTPUT),
        (lambda w: {"from_mask/conv/kernel": (3, 3, 1, w)}, INPUT),
        (lambda w: {"critic/out/kernel": (5, w, 1), "critic/out/bias": (5, 1)}, OUTPUT),  # an ensemble of five
        (lambda w: {"fc/kernel": (w, 7)}, OUTPUT),
        (lambda w: {"fc/weight": (7, w), "fc/bias": (7,)}, OUTPUT),
        (lambda w: {"fc/weight": (w, 7), "fc/bias": (w,)}, INPUT),
        (lambda w: {"fc/weight": (500, w), "other/weight": (w, 7), "other/bias": (w,)}, OUTPUT),  # one way in a model
        (lambda w: {"fc/weight": (w, 7), "other/weight": (8, w), "other/bias": (w,)}, OUTPUT),
        (lambda w: {"fc1_weight": (7, w), "fc1_bias": (7,), "fc2_weight": (8, 9), "fc2_bias": (9,)}, OUTPUT),
        (lambda w: {"lm_head/weight": (100, w)}, OUTPUT),
        (lambda w: {"moe/gate/weight": (w, 8)}, OUTPUT),
        (lambda w: {"embed/weight": (100, w)}, INPUT),
        (lambda w: {"user_embeddings/weight": (100, w)}, INPUT),
        (lambda w: {"model/embed_tokens/weight": (2 * w, w)}, INPUT),  # words may grow too: one is looked up
        (lambda w: {"position_embedding/embedding": (w // 2, w)}, INPUT),
        (lambda w: {"lm_head/kernel": (w, 3 * w)}, OUTPUT),
        (lambda w: {"mixer/A_log": (w, 16)}, INPUT),
        (lambda w: {"cls_token": (1, 1, w)}, VECTOR),
        (lambda w: {"mixer/A_log": (w,)}, VECTOR),
        (lambda w: {"attention/value/bias": (w // 4, w // 16), "attention/value/kernel": (8, w // 4, w // 16)}, None),
    ],
)
def test_readouts_and_vectors_and_tables(shapes: Shapes, expected: Any) -> None:
    scheme = lm.mup(*both(shapes), tied=False)
    path = next(iter(shapes(64)))
    row = expectation(scheme, path)
    assert row == expected if expected else row[0] == "vector"


@pytest.mark.parametrize(
    "shapes",
    [
        lambda w: {"head": (w,)},
        lambda w: {"head": (w, 1)},
        lambda w: {"fc1/weight": (500, w)},
        lambda w: {"fc1/w": (8, w)},
        lambda w: {"b/x_proj": (2 * w, 48), "b/dt_bias": (2 * w,)},  # whose bias is another's
        lambda w: {"value/kernel": (5, w, 1)},
        lambda w: {"up_conv_transpose/kernel": (3, 3, 3, w)},
        lambda w: {"embed/weight": (w, 8)},  # a layer of that name, since no words grow
        lambda w: {"a/weight": (w, 8), "b/weight": (w, 7), "b/bias": (w,), "c/weight": (8, w), "c/bias": (w,)},
    ],
)
def test_what_is_ambiguous_is_refused(shapes: Shapes) -> None:
    path = next(iter(shapes(64)))
    with pytest.raises(lm.LazyModelError, match="ambiguous .* of 1 variable") as raised:
        lm.mup(*both(shapes))
    assert path.split("/")[-1] in str(raised.value)
    sides = (*(None,) * (len(shapes(64)[path]) - 1), "in")
    given = lm.mup(*both(shapes), axes={path: sides if shapes(64)[path][-1] != 1 else (*sides[1:], None)})
    assert given[path].kind in ("output", "fixed")


def test_values_tell_a_vector_from_a_readout_of_one_number() -> None:
    """As LeCun's, they are of a readout; the same number everywhere is no readout's, but for zero, which may be."""

    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        return {"unit": (width,)}

    def lecun(key: Any, shape: Any, dtype: Any) -> Any:
        return jax.random.normal(key, shape, dtype) * shape[0] ** -0.5

    assert expectation(lm.mup(*both(shapes, initializer=lecun)), "unit") == OUTPUT
    assert expectation(lm.mup(*both(shapes, initializer=I.constant(0.5))), "unit") == VECTOR
    for unclear in (I.zeros, lambda key, shape, dtype: jnp.linspace(0, 1, *shape)):
        with pytest.raises(lm.LazyModelError, match=r"axes={r'unit': \("):
            lm.mup(*both(shapes, initializer=unclear))


def test_whether_the_embedding_is_the_readout_is_asked_where_another_readout_is_there() -> None:
    def scored(width: int) -> dict[str, tuple[int, ...]]:
        return {"embed/embedding": (100, width), "score/kernel": (width, 1)}

    with pytest.raises(lm.LazyModelError, match=r"'embed/embedding' .*'score/kernel' .*tied=True or tied=False"):
        lm.mup(*both(scored))
    assert [lm.mup(*both(scored), tied=tied).output_multiplier for tied in (True, False)] == [1 / 4, 1]
    assert lm.mup(*both(lambda width: {**scored(width), "out/kernel": (width, 100)})).output_multiplier == 1


def test_a_small_dimension_is_no_fan_in_by_chance() -> None:
    """Standard normal numbers are as He's would be of a fan-in of two, such as keys and values."""
    pair = both(lambda width: {"kv": (2, width, 2, width // 4)}, initializer=I.normal(1.0))
    expect(lm.mup(*pair), {"kv": HIDDEN})


def test_wrong_axes_are_refused() -> None:
    pair = both(mlp)
    for axes in ({"first/kernel": ("in",)}, {"first/kernel": ("in", "up")}, {"first/kernel": "in"}):
        with pytest.raises(lm.LazyModelError, match='"in", "out" or None for each dimension of'):
            lm.mup(*pair, axes=axes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(lm.LazyModelError, match="no variable matches 'fist/kernel'; closest: 'first/kernel'"):
        lm.mup(*pair, axes={"fist/kernel": ("in", "out")})


def test_depth_by_tensor_programs_6_and_completep() -> None:
    def deep(layers: int) -> dict[str, tuple[int, ...]]:
        blocks = {f"blocks/{layer}/up/kernel": (8 * layers, 8 * layers) for layer in range(layers)}
        return {"first/kernel": (3, 8 * layers), **blocks}

    pair = both(deep, 2, 8)  # four times as deep, and as wide
    assert lm.mup(*pair)["blocks/7/up/kernel"].adam == 1 / 4
    half, whole = (lm.mup(*pair, depth=power) for power in (0.5, 1.0))
    for path in ("blocks/0/up/kernel", "blocks/7/up/kernel"):
        assert expectation(half, path) == ("hidden", 1 / 2, 1 / 8, 1)  # Adam by 1 / √depth, SGD by 1
        assert expectation(whole, path) == ("hidden", 1 / 2, 1 / 4, 4)
    assert expectation(half, "first/kernel") == INPUT
    assert (half.branch_multiplier, whole.branch_multiplier) == (1 / 2, 1 / 4)


def test_layers_on_a_leading_axis_are_depth() -> None:
    def stacked(layers: int) -> dict[str, tuple[int, ...]]:
        return {"layers/norm/scale": (layers, 64), "layers/up/kernel": (layers, 64, 128)}

    scheme = lm.mup(*both(stacked, 2, 8), depth=0.5)
    assert [scheme[path].kind for path in scheme] == ["fixed", "fixed"]
    assert scheme["layers/up/kernel"].adam == scheme.branch_multiplier == 1 / 2


# What is made of it ---------------------------------------------------------------------------------------------------


def test_reinitialize_multiplies_the_models_own_values_bit_for_bit(mesh8: Any) -> None:
    def init(key: jax.Array, width: int) -> Any:
        a, b, c, d = jax.random.split(key, 4)
        query, key_ = jnp.split(I.normal(0.1)(b, (2 * width, width)), 2)
        return {
            "first": {"kernel": I.lecun_normal()(a, (8, width))},
            "query": {"kernel": query},
            "key": {"kernel": key_},
            "last": {"kernel": I.orthogonal()(c, (width, 16))},
            "half": {"kernel": I.uniform(0.1)(d, (width, 16), jnp.bfloat16)},
            "zero": {"kernel": jnp.zeros((width, 3))},
        }

    base, wide = (lm.build_abstract(init, jax.random.key(0), width) for width in (32, 128))
    scheme = lm.mup(base, wide)
    names = {"query/kernel": 1 / 2, "key/kernel": 1 / 2, "last/kernel": 1 / 2, "half/kernel": 1 / 4}
    assert scheme.factors == pytest.approx(names, rel=1e-5)
    own = named(wide.materialize())
    placed = wide.reinitialize(scheme).shard(mesh8, {".*/kernel": jax.P("model")})
    assert placed["query/kernel"].origin.endswith(" × 0.5")
    for path, found in named(placed.materialize()).items():
        expected = own[path] * jnp.asarray(scheme.factors.get(path, 1), own[path].dtype)
        assert np.array_equal(np.asarray(found), np.asarray(expected)), path
    same = lm.mup(wide, wide)
    assert not same.factors and set(same.multipliers("sgd").values()) == {1.0}


def test_models_that_do_not_belong_together_are_refused() -> None:
    small, wide = both(mlp)
    scheme = lm.mup(small, wide)
    other, cubed = (build(lambda width, rest=rest: {"first/kernel": (8, width, *rest)}, 64) for rest in ((), (1,)))
    unknown = both(
        lambda width: {"up/kernel": (width, width)}, initializer=lambda *args: jax.random.gamma(args[0], 2.0, *args[1:])
    )
    for call, message in (
        (lambda: small.reinitialize(scheme), r"'first/bias' has shape \(256,\); in init it is of shape \(64,\)"),
        (lambda: wide.reinitialize(scheme, key=0), "takes no initializer or key"),
        (lambda: lm.mup(other, small), "base model has no variable like 'first/bias'"),
        (lambda: lm.mup(small, other), "no variable like the base's 'first/bias'"),
        (lambda: lm.mup(small, {}), "compares abstract models, .* model is a dict"),
        (lambda: lm.mup(other, cubed), "the same number of dimensions"),
        (lambda: lm.mup(*unknown), "'up/kernel': the standard deviation .* cannot be inferred"),
    ):
        with pytest.raises(lm.LazyModelError, match=message):
            call()


def test_what_is_printed() -> None:
    text = repr(lm.mup(*both(lambda width: transformer(width, heads=4, size=width // 4))))
    assert "muP of init: 18 variables, relative to the base model" in text
    row = next(line for line in text.splitlines() if line.startswith("blocks/{0..1}/mlp/up"))
    assert "2  (64→256, 256→1024)" in row and row.split()[-7:-2] == ["hidden", "0.02", "0.01", "0.25", "1"]
    assert "output_multiplier = 0.25, of the logits: the embedding is the readout too (Table 8)" in text
    assert "attention_scale = 0.0625: √16 / 64" in text


def expectation(scheme: lm.Mup, path: str) -> tuple[Any, ...]:
    row = scheme[path]
    std = 1.0 if not row.base_std or not row.std else row.std / row.base_std
    return row.kind, pytest.approx(std), row.adam, row.sgd


def expect(scheme: lm.Mup, table: Mapping[str, Any]) -> None:
    assert {path: expectation(scheme, path) for path in scheme} == dict(table)


# Learning rates -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builds() -> Any:
    def init(key: jax.Array, width: int) -> Any:
        return {
            "up": {"kernel": I.lecun_normal()(key, (8, width))},
            "down": {"kernel": I.lecun_normal()(key, (width, 2))},
        }

    return [lm.build_abstract(init, jax.random.key(0), width) for width in (16, 64)]


def updates(tx: Any, params: Any, size: float = 1.0) -> dict[str, float]:
    given = jax.tree.map(lambda value: jnp.full_like(value, size), params)
    found, _ = jax.jit(lambda given: tx.update(given, tx.init(params), params))(given)
    return {name: round(float(layer["kernel"].min()), 4) for name, layer in found.items()}


def test_each_rule_is_told_from_what_the_optimizer_does(builds: Any) -> None:
    scheme, params = lm.mup(*builds), builds[1].materialize()
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.0, 1.0, 5)))
    for tx in (optax.adam(1.0), optax.lion(1.0), clipped):
        own, found = updates(tx, params), updates(scheme.optimizer(tx), params)
        assert found == pytest.approx({"up": own["up"], "down": own["down"] / 4}, abs=1e-4)
    assert updates(scheme.optimizer(optax.sgd(1.0, momentum=0.9)), params) == {"up": -4, "down": -0.25}
    assert updates(scheme.optimizer(optax.adam(1.0), rule="sgd"), params) == {"up": -4, "down": -0.25}
    rooted = optax.stateless(lambda updates, params: jax.tree.map(jnp.sqrt, updates))
    others = (optax.lamb(1.0), optax.lars(1.0), optax.contrib.muon(1.0), optax.adafactor(1.0), optax.novograd(1.0))
    for tx in (rooted, *others):
        with pytest.raises(lm.LazyModelError, match=r'pass rule="adam" or rule="sgd"'):
            scheme.optimizer(tx)
    adams = [
        optax.adafactor(1.0, multiply_by_parameter_scale=False),
        optax.radam(1.0),
        optax.rmsprop(1.0, momentum=0.9),
    ]
    adams += [optax.MultiSteps(optax.adam(1.0), 2).gradient_transformation(), optax.adamw(1.0, weight_decay=0.1)]
    for tx in adams:
        scheme.optimizer(tx)  # as Adam; RAdam begins as SGD
    with pytest.raises(lm.LazyModelError, match="takes an Optax gradient transformation; got 3"):
        scheme.optimizer(3)
    with pytest.raises(lm.LazyModelError, match="a rule is 'adam' or 'sgd'; got 'lion'"):
        scheme.multipliers("lion")  # pyright: ignore[reportArgumentType]


def test_its_state_is_the_optimizers_own(builds: Any) -> None:
    scheme, tx = lm.mup(*builds), optax.adamw(1e-2)
    stated = builds[1].reinitialize(scheme).with_optimizer(scheme.optimizer(tx))
    assert list(stated) == list(builds[1].with_optimizer(tx))
    params, state = stated.materialize()
    found, _ = jax.jit(scheme.optimizer(tx).update)(params, state, params)
    assert jax.tree.structure(found) == jax.tree.structure(params)


def test_an_array_that_is_no_variable_is_refused(builds: Any) -> None:
    tx = lm.mup(*builds).optimizer(optax.adam(1.0))
    params = {"up": {"kernal": np.ones((8, 64), "float32")}}
    with pytest.raises(lm.LazyModelError, match="an array at 'up/kernal', .* closest: 'up/kernel'"):
        tx.update(params, tx.init(params), params)

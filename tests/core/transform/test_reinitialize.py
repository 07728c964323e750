"""Reinitializing: bit-equal to calling the initializer, keys by path, one program a signature, errors that name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.core.trace._eager import same_bytes as same
from tests.large import mostly_large
from tests.trees import named

I = jax.nn.initializers  # noqa: E741 (short, in a long table)
KEY = jax.random.key(3)


def build(layers: int = 4, extra: bool = False) -> lm.AbstractModel:
    def init(key: jax.Array) -> Any:
        model: dict[str, Any] = {"count": jnp.arange(3)}
        if extra:
            key, own = jax.random.split(key)
            model["adapter"] = jax.random.normal(own, (8, 8))
        keys = jax.random.split(key, layers)
        model["layers"] = [
            {"kernel": I.lecun_normal()(key, (64, 32)), "bias": jnp.zeros(32), "out": I.normal(0.1)(key, (32, 64))}
            for key in keys
        ]
        model["dropout"] = jax.random.key(9)
        return model

    return lm.build_abstract(init, jax.random.key(0))


def arrays(abstract: lm.AbstractModel) -> dict[str, Any]:
    return named(abstract.materialize())


def test_path_key_is_the_documented_formula() -> None:
    digest = hashlib.sha256(b"layers/0/kernel").digest()
    words = [int.from_bytes(digest[start : start + 4], "big") for start in (0, 4)]
    expected = jax.random.fold_in(jax.random.fold_in(KEY, np.uint32(words[0])), np.uint32(words[1]))
    assert same(jax.random.key_data(lm.path_key(KEY, "layers/0/kernel")), jax.random.key_data(expected))


@pytest.mark.parametrize(
    "initializer",
    [
        pytest.param(I.normal(0.02), id="normal"),
        pytest.param(I.lecun_uniform(), id="lecun_uniform", marks=pytest.mark.large),
        pytest.param(I.orthogonal(0.5), id="orthogonal", marks=pytest.mark.large),
        pytest.param(I.zeros, id="zeros"),
        pytest.param(I.constant(0.3), id="constant", marks=pytest.mark.large),
        pytest.param(I.truncated_normal(0.1), id="truncated_normal", marks=pytest.mark.large),
    ],
)
def test_equals_the_eager_initializer_on_a_mesh(initializer: Any, mesh8: Any) -> None:
    original = build().shard(mesh8, {r".*/(kernel|out)": jax.P("model"), ".*": jax.P()})
    changed = original.reinitialize("layers/.*/kernel", initializer, key=KEY)
    before, after = arrays(original), arrays(changed)
    for path, array in after.items():
        if path.endswith("kernel"):
            expected = initializer(lm.path_key(KEY, path), (64, 32), jnp.float32)
            assert same(array, expected), path
            assert array.sharding.spec == jax.P("model")
        elif path != "dropout":
            assert same(array, before[path]), path


def test_one_program_for_all_layers_and_seeds_even_with_a_scale_for_each(mesh8: Any) -> None:
    rules = {"layers/{layer}/kernel": lm.initializers.depth_scaled(I.normal(0.5))}
    original = build(6).shard(mesh8, {".*/kernel": jax.P("model"), ".*": jax.P()})
    kernels = [f"layers/{layer}/kernel" for layer in range(6)]
    others = {path: np.zeros(v.shape, v.dtype) for path, v in original.items() if path not in [*kernels, "dropout"]}
    for seed in (1, 2):
        model = original.reinitialize(rules, key=seed)
        model.materialize(others, initialize="missing")
        assert len(model.programs) == 2  # the kernels', and the dropout key
    found = arrays(model)
    for layer, path in enumerate(kernels):
        normal = I.normal(0.5)(lm.path_key(jax.random.key(2), path), (64, 32), jnp.float32)
        assert same(found[path], normal * jnp.asarray(1 / np.sqrt(2 * (layer + 1)), jnp.float32))


def test_values_do_not_depend_on_other_variables() -> None:
    rules = {".*/(kernel|out)": I.normal(1.0)}
    few, more = (arrays(build(4, extra).reinitialize(rules, key=KEY)) for extra in (False, True))
    assert all(same(few[path], more[path]) for path in few if path.endswith(("/kernel", "/out")))
    own_few, own_more = arrays(build(4)), arrays(build(4, True))
    assert not same(own_few["layers/0/kernel"], own_more["layers/0/kernel"])  # by order of creation they do


def test_rekey_draws_the_models_own_values_from_keys_by_path() -> None:
    for extra in (False, True):
        found = arrays(build(4, extra).rekey(KEY))
        path = "layers/2/kernel"
        assert same(found[path], I.lecun_normal()(lm.path_key(KEY, path), (64, 32)))
        assert same(found["layers/1/out"], I.normal(0.1)(lm.path_key(KEY, "layers/1/out"), (32, 64)))
        assert same(jax.random.key_data(found["dropout"]), jax.random.key_data(jax.random.key(9)))
    part = arrays(build().rekey(KEY, ".*/out"))
    assert same(part["layers/0/kernel"], arrays(build())["layers/0/kernel"])


def test_rekey_of_stacked_layers_and_of_several_keys() -> None:
    def init(key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        layers = jax.vmap(lambda key: jax.random.normal(key, (4, 4)))(jax.random.split(a, 3))
        return {"layers": layers, "low_rank": jax.random.normal(b, (64, 2)) @ jax.random.normal(c, (2, 64))}

    found = lm.build_abstract(init, jax.random.key(0)).rekey(KEY).materialize()
    keys = jax.random.split(lm.path_key(KEY, "layers"), 3)
    assert same(found["layers"], jax.vmap(lambda key: jax.random.normal(key, (4, 4)))(keys))
    own = lm.path_key(KEY, "low_rank")
    b, c = jax.random.fold_in(own, 0), jax.random.fold_in(own, 1)
    assert same(found["low_rank"], jax.random.normal(b, (64, 2)) @ jax.random.normal(c, (2, 64)))


def test_rekey_of_variables_cut_from_one_array_is_all_or_none() -> None:
    def init(key: jax.Array) -> Any:
        q, k = jnp.split(jax.random.normal(key, (128, 128)), 2)
        return {"k": k, "q": q}

    abstract = lm.build_abstract(init, jax.random.key(0))
    found = abstract.rekey(KEY).materialize()
    whole = jax.random.normal(lm.path_key(KEY, abstract.recipes[0].paths[0]), (128, 128))
    assert same(jnp.concatenate([found["q"], found["k"]]), whole)
    with pytest.raises(lm.LazyModelError, match="'k' and 'q' are cut from one random array"):
        abstract.rekey(KEY, "k")
    with pytest.raises(lm.LazyModelError, match=r"no variable of init matches 'K'"):
        abstract.rekey(KEY, "K")
    with pytest.raises(lm.LazyModelError, match="key<fry>; the key given is a key<rbg>"):
        abstract.rekey(jax.random.key(0, impl="rbg"))


def test_callables_get_path_and_captures() -> None:
    seen: dict[str, Any] = {}

    def initializer(key: jax.Array, shape: Any, dtype: Any, path: str, layer: int, kind: str = "?") -> jax.Array:
        seen[path] = (shape, layer, kind)
        return jnp.full(shape, layer, dtype)

    found = arrays(build(12).reinitialize("layers/{layer}/{kind}", initializer))
    assert len(seen) == 36
    assert seen["layers/10/out"] == ((32, 64), 10, "out")
    assert (np.asarray(found["layers/10/out"]) == 10).all()


def test_first_pattern_wins_and_a_callable_may_decline() -> None:
    rules = {"layers/0/.*": I.ones, "layers/.*": I.zeros}
    found = arrays(build().reinitialize(rules))
    assert np.asarray(found["layers/0/kernel"]).all()
    assert not np.asarray(found["layers/1/kernel"]).any()
    found = arrays(build().reinitialize(lambda variable: I.ones if variable.path == "layers/1/bias" else None))
    assert [float(found[f"layers/{layer}/bias"][0]) for layer in range(4)] == [0, 1, 0, 0]


def test_weights_that_the_model_was_built_with_are_dropped_and_a_checkpoint_goes_first() -> None:
    constant = np.full((4, 4), 7, np.float32)
    abstract = lm.build_abstract(lambda w: {"w": w, "v": w * 1}, constant)
    assert abstract["w"].origin == "constant"
    changed = abstract.reinitialize("w", I.ones)
    assert changed["w"].origin == "fill"
    assert (np.asarray(changed.materialize()["w"]) == 1).all()
    assert (np.asarray(changed.materialize({"w": constant}, initialize="missing")["w"]) == 7).all()
    assert (np.asarray(abstract.materialize()["w"]) == 7).all()  # the model it came from is as it was


def test_an_array_returned_twice_is_two_variables() -> None:
    table = np.arange(8, dtype=np.float32)
    abstract = lm.build_abstract(lambda: {"a": jnp.zeros(8), "b": jnp.ones(8)})
    for value in (table, jnp.asarray(table)):
        found = abstract.reinitialize(".", lambda key, shape, dtype, value=value: value).materialize()
        assert same(found["a"], table)
        assert same(found["b"], table)


def test_errors_name_the_variable_and_the_mend() -> None:
    abstract = build()

    def fails(match: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(lm.LazyModelError, match=match):
            abstract.reinitialize(*args, **kwargs)

    fails(r"matches 'layer/\.\*/kernel'; closest: 'layers/", "layer/.*/kernel", I.zeros)
    fails(r"'layers/0/kernel' gets random values, and no key was given: pass key=", "layers/.*/kernel", I.normal())
    fails(r"'dropout' is a PRNG key", "dropout", I.zeros)
    fails(r"'layers/0/bias': expected float32\[32\], and its initializer returned float32\[3\]",
          "layers/0/bias", lambda key, shape, dtype: jnp.zeros(3))  # fmt: skip
    fails(r"expected float32\[32\], and its initializer returned int32\[32\]",
          "layers/0/bias", lambda key, shape, dtype: jnp.zeros(shape, int))  # fmt: skip
    fails(r"returned no array but NoneType", "layers/0/bias", lambda key, shape, dtype: None)
    fails(r"needs 'layer', which its pattern does not capture; write \{layer\}",
          "layers/./kernel", lm.initializers.depth_scaled(I.zeros))  # fmt: skip
    fails(r"\{layer\} captured 'bias'", "layers/0/{layer}", lm.initializers.depth_scaled(I.zeros))
    fails(r"an initializer is a callable of key, shape and dtype", "layers/0/bias", 3)
    fails(r"which initializer for 'count'", "count")
    fails(r"not a regular expression", "(", I.zeros)
    fails(r"all its answers are None", lambda variable: None)
    fails(r"a mapping of patterns has its own", {"count": I.zeros}, I.zeros)
    fails(r"'layers/0/bias'.*float32\[.*ValueError", "layers/0/bias", I.lecun_normal())  # of two dimensions
    fails(r"got uint32\[2\]. Raw keys become typed", "count", I.zeros, key=jnp.zeros(2, jnp.uint32))
    with pytest.raises(ZeroDivisionError) as raised:
        abstract.reinitialize("count", lambda key, shape, dtype: 1 / 0)
    assert raised.value.__notes__[0] == "while initializing 'count', int32[3]"


# Schemes --------------------------------------------------------------------------------------------------------------


def test_schemes() -> None:
    make = lm.initializers
    weights: dict[str, Any] = {"weights": ".*/kernel", "residual": ".*/out"}
    gpt2 = make.gpt2(4, weights=".*/(kernel|out)", residual=".*/out")
    mup = make.mup(hidden=".*/kernel", readout=".*/out", base=32, std=0.1)  # out is at the base width
    fixup = make.fixup(16, **weights, initializer=I.normal(1.0), depth=3)
    for rules, kernel, out in (
        (gpt2, 0.02, 0.02 / np.sqrt(8)), (mup, 0.1 / np.sqrt(2), 0.1), (fixup, 0.5, 0.0),
    ):  # fmt: skip
        found = arrays(build().reinitialize(rules, key=KEY))
        for path, shape, std in (("layers/3/kernel", (64, 32), kernel), ("layers/3/out", (32, 64), out)):
            expected = jax.random.normal(lm.path_key(KEY, path), shape) * std
            np.testing.assert_allclose(found[path], expected, rtol=1e-5)
    readout = make.width_scaled(0.1, 32, power=1.0, in_axis=(0, 1))(KEY, (8, 8, 4), jnp.bfloat16)
    expected = jax.random.normal(KEY, (8, 8, 4), jnp.bfloat16).astype(np.float32) * 0.05
    assert readout.dtype == jnp.bfloat16
    np.testing.assert_allclose(readout.astype(np.float32), expected, rtol=0.02)


@pytest.mark.parametrize("axis", mostly_large([0, 1, -1], [-1]))
def test_stacked_layers_are_initialized_one_by_one(axis: int, mesh8: Any) -> None:
    shape = [16, 24]
    shape.insert(axis % 3, 8)
    abstract = lm.build_abstract(lambda: {"w": jnp.zeros(shape)}).shard(mesh8, {"w": jax.P("model")})
    found = abstract.reinitialize("w", lm.initializers.stacked(I.lecun_normal(), axis), key=KEY).materialize()["w"]
    keys = jax.random.split(lm.path_key(KEY, "w"), 8)
    expected = jnp.stack([I.lecun_normal()(key, (16, 24), jnp.float32) for key in keys], axis)
    assert same(found, expected)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: lm.initializers.depth_scaled(I.zeros, 0), "at least one layer"),
        (lambda: lm.initializers.fixup(4, weights="a", residual="b", depth=1), "at least 2 kernels"),
        (lambda: lm.initializers.width_scaled(in_axis=2)(KEY, (3, 3), jnp.float32), "no axis of shape"),
        (lambda: lm.initializers.stacked(I.zeros, 2)(KEY, (3, 3), jnp.float32), "no axis 2"),
    ],
)
def test_schemes_refuse_what_they_cannot_do(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(lm.LazyModelError, match=match):
        make()

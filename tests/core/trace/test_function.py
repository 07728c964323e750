"""Tracing and slicing: every value equals eager execution bit for bit, and equal slices are one program."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.compile_events import compile_events
from tests.core.trace._eager import assert_same

KEY = jax.random.key(0)


def normal(key: Any, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) * 0.02


# --- what comes out -------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


Pair = collections.namedtuple("Pair", "left right")


def test_any_pytree_is_handed_back_as_it_was() -> None:
    def init(key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        return {
            "layers": [Layer(normal(a, 8, 4), jnp.zeros(4)), Layer(normal(b, 8, 4), jnp.zeros(4))],
            "pair": Pair(jnp.arange(6), jnp.array([True, False])),
            "nothing": None,
            "name": "decoder",
            "count": 3,
            "step": jnp.int32(0),
            "rng": c,
            "raw": jax.random.key_data(c),
            "empty": jnp.zeros((0, 5)),
            "table": np.linspace(0, 1, 5, dtype=np.float32),
        }

    model = lm.build_abstract(init, KEY)
    assert list(model) == [
        *("empty", "layers/0/kernel", "layers/0/bias", "layers/1/kernel", "layers/1/bias"),
        *("pair/left", "pair/right", "raw", "rng", "step", "table"),
    ]
    ours = model.materialize()
    assert_same(ours, init(KEY))
    assert isinstance(ours["layers"][0], Layer)
    assert isinstance(ours["pair"], Pair)
    assert model.tree["layers"][0].kernel.shape == (8, 4)
    assert model.tree["name"] == "decoder"


def test_a_single_array_and_colliding_paths() -> None:
    assert list(lm.build_abstract(lambda k: normal(k, 2, 2), KEY)) == ["value"]
    model = lm.build_abstract(lambda k: {"a/b": normal(k, 2), "a": {"b": normal(k, 3)}}, KEY)
    assert sorted(model) == ["a/b", "a/b#2"]
    assert_same(model.materialize(), {"a/b": normal(KEY, 2), "a": {"b": normal(KEY, 3)}})


def test_the_same_array_twice_is_two_variables_computed_once() -> None:
    def init(key: Any) -> Any:
        embedding = normal(key, 128, 64)
        return {"embedding": embedding, "head": embedding, "other": normal(key, 128, 64)}

    model = lm.build_abstract(init, KEY)
    assert list(model) == ["embedding", "head", "other"]
    assert [recipe.paths for recipe in model.recipes] == [("embedding", "head"), ("other",)]
    result = model.materialize()
    pointers = {array.unsafe_buffer_pointer() for array in result.values()}
    assert len(pointers) == 3, "a training step donates each"
    assert_same(result, init(KEY))
    assert_same(dict(model.stream(max_host_memory="64KiB")), init(KEY))
    for changed in (model.rekey(1), model.reinitialize("head", jax.nn.initializers.normal(), key=0)):
        drawn = changed.materialize()
        np.testing.assert_array_equal(drawn["embedding"], drawn["head"])
        assert not np.array_equal(drawn["embedding"], result["head"])
    with pytest.raises(lm.LazyModelError, match="'embedding' and 'head' are cut from one random array"):
        model.rekey(1, "embedding")


def test_static_arguments_stay_python_and_arrays_are_inputs() -> None:
    def init(key: Any, config: dict[str, Any], table: Any, *, scale: float) -> Any:
        assert isinstance(config["size"], int)
        assert callable(config["make"])
        return {"w": config["make"](key, (config["size"], 2)) * scale, "t": table * 2, "given": table}

    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    config = {"size": 5, "make": jax.random.normal, "name": "x"}
    model = lm.build_abstract(init, KEY, config, jnp.asarray(table), scale=0.3)
    assert_same(model.materialize(), init(KEY, config, jnp.asarray(table), scale=0.3))
    assert set(model.sources) == {"given"}


def test_shape_structs_stand_for_values_that_nothing_needs() -> None:
    struct = jax.ShapeDtypeStruct((3, 7), jnp.float32)
    model = lm.build_abstract(lambda k, x: normal(k, x.shape[-1], 2), KEY, struct)
    assert model["value"].shape == (7, 2)
    with pytest.raises(lm.TraceError, match=r"'w'.*ShapeDtypeStruct"):
        lm.build_abstract(lambda k, x: {"w": normal(k, 3, 7) * x}, KEY, struct)
    with pytest.raises(lm.TraceError, match="'x' needs the value of an argument"):
        lm.build_abstract(lambda x: {"x": x}, struct)


# --- the values that come out ---------------------------------------------------------------------------------------


def dtypes(key: Any) -> Any:
    return {
        "weak": jnp.asarray(2.0) * jnp.ones(20),
        "bf16": jax.random.normal(key, (40, 20), jnp.bfloat16) * 0.1,
        "f16": jax.random.uniform(key, (40, 20), jnp.float16) - 0.5,
        "complex": jax.random.normal(key, (40, 3), jnp.complex64) * 2,
        "int": jax.random.randint(key, (500,), 0, 10, jnp.int8),
        "f8": jax.random.normal(key, (40, 2)).astype(jnp.float8_e4m3fn),
    }


@jax.custom_vjp
def _scaled(x: Any) -> Any:
    return jnp.tanh(x) * 3.0


_scaled.defvjp(lambda x: (_scaled(x), x), lambda x, g: (g,))


def calls_loops_and_branches(key: Any) -> Any:
    w = jax.random.normal(key, (64, 80))
    return {
        "relu": jax.nn.relu(w) + 1.0,
        "custom_vjp": _scaled(normal(jax.random.fold_in(key, 1), 64, 80)),
        "remat": jax.checkpoint(lambda x: jnp.sin(x) * 2.0)(normal(jax.random.fold_in(key, 2), 64, 80)),
        "while": jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.7), (0, w))[1],
        "cond": jax.lax.cond(jax.random.bernoulli(key), lambda: normal(key, 70, 70), lambda: jnp.zeros((70, 70))),
        "vmapped": jax.vmap(lambda k: normal(k, 40, 30))(jax.random.split(key, 5)),
    }


def different_constants(key: Any) -> Any:
    """Which must never share a program."""

    def compiled(k: Any, c: Any) -> Any:  # `c` is a constant of the compiled function's own code
        return jax.jit(lambda k: (jax.random.normal(k, (80, 64)) + c, k))(k)[0]

    return {
        "a": compiled(key, 1.5),
        "b": compiled(key, 2.5),
        "c": compiled(key, np.full(64, 1.5, np.float32)),
        "d": compiled(key, np.full(64, 2.5, np.float32)),
        "e": jnp.zeros((80, 64)) - 0.0,
        "f": jnp.clip(jax.random.normal(key, (80, 64)), -1, 1),
        "g": jnp.clip(jax.random.normal(key, (80, 64)), -1, 2),
        "h": jax.random.normal(key, (80, 64)) ** 2,
        "i": jax.random.normal(key, (80, 64)) ** 3,
    }


def drawn(key: Any) -> Any:
    a, b = jax.random.split(key)
    return {"a": normal(a, 70, 64), "b": jax.random.bernoulli(jax.random.fold_in(b, 3), 0.3, (70, 64)), "k": b}


@pytest.mark.parametrize(
    ("init", "key"),
    [
        (dtypes, KEY),
        (calls_loops_and_branches, KEY),
        pytest.param(different_constants, KEY, marks=pytest.mark.large),
        pytest.param(drawn, jax.random.PRNGKey(3), marks=pytest.mark.large),
        (drawn, jax.random.key(3, impl="rbg")),
        pytest.param(drawn, jax.random.key(3, impl="unsafe_rbg"), marks=pytest.mark.large),
    ],
)
def test_values_are_those_of_eager_execution(init: Any, key: Any) -> None:
    assert_same(lm.build_abstract(init, key).materialize(), init(key))


@pytest.mark.large
def test_64_bit_programs_stay_64_bit_outside_the_context() -> None:
    def init(key: Any) -> Any:
        x = jax.random.normal(key, (30, 7), jnp.float64)
        return {"drawn": jax.random.normal(key, (40, 30), jnp.float64) * 0.1, "summed": (x - x.mean(0)) / x.std(0)}

    with jax.enable_x64(True):
        model, expected = lm.build_abstract(init, KEY), init(KEY)
    assert model["drawn"].dtype == np.float64
    assert_same(model.materialize(), expected)
    narrow = lm.build_abstract(lambda key: jax.random.normal(key, (40, 30)) * 0.1, KEY).materialize()
    assert narrow.dtype == np.float32


def test_constants_are_sources_or_inputs() -> None:
    table, big = np.arange(7.0, dtype=np.float32), jnp.arange(9000.0)

    def init(key: Any) -> Any:
        computed = {"sum": normal(key, 9000) + big, "scaled": table * normal(key, 7), "counted": jnp.arange(3) + 1}
        return {"table": table, "big": big, **computed}

    model = lm.build_abstract(init, KEY)
    assert set(model.sources) == {"table", "big"}
    assert model["big"].origin == "constant"
    assert_same(model.materialize(), init(KEY))


# --- how it is cut --------------------------------------------------------------------------------------------------


def deep(layers: int, size: int) -> Any:
    def init(key: Any) -> Any:
        tree = {}
        for layer in range(layers):
            a, b = jax.random.split(jax.random.fold_in(key, layer))
            scale = 0.02 / (2 * (layer + 1)) ** 0.5  # a Python float of its own for every layer
            tree[f"layer_{layer}"] = {
                "up": jax.nn.initializers.lecun_normal()(a, (size, 64)),
                "down": jax.random.normal(b, (64, size)) * scale,
                "norm": jnp.ones(4 * size),
                "bias": jnp.zeros(4 * size),
            }
        return tree

    return init


def test_programs_do_not_grow_with_depth_and_another_seed_compiles_nothing() -> None:
    many = lm.build_abstract(deep(12, 36), KEY)
    assert_same(many.materialize(), deep(12, 36)(KEY))
    assert len(many.programs) == many.programs.compiled == 3  # up, down, and one fill for ones and zeros
    for layers, key in ((2, KEY), (12, jax.random.key(7))):
        other = lm.build_abstract(deep(layers, 36), key)
        assert_same(other.materialize(), deep(layers, 36)(key))
        assert (len(other.programs), other.programs.compiled) == (3, 0)


def test_one_compilation_for_many_threads() -> None:
    results: dict[int, Any] = {}

    def work(seed: int) -> None:
        model = lm.build_abstract(deep(2, 44), jax.random.key(seed))
        results[seed] = model.materialize(), model.programs.compiled

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        assert_same(results[seed][0], deep(2, 44)(jax.random.key(seed)))
    assert sum(compiled for _, compiled in results.values()) == 3


def test_programs_are_kept_for_the_process_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazymodel._programs.jaxprs.PROGRAMS.most", 2)

    def compiled(size: int) -> int:
        model = lm.build_abstract(lambda key: jax.random.normal(key, (size, 52)), KEY)
        model.materialize()
        return model.programs.compiled

    assert [compiled(size) for size in (1, 2, 2, 3, 1, 3)] == [1, 1, 0, 1, 1, 0], "the last used two are kept"


def test_leaves_of_one_large_intermediate_are_computed_together() -> None:
    def init(key: Any) -> Any:
        qkv = jax.random.normal(key, (96, 96))
        q, k, v = jnp.split(qkv, 3, axis=1)
        other = jax.random.normal(jax.random.fold_in(key, 1), (96, 96))
        positions = jnp.arange(8192.0)  # shared too, but cheaper to make twice
        return {"q": q, "k": k, "v": v * 0.5, "a": other + positions[:96], "b": positions * 2, "twice": qkv}

    model, expected = lm.build_abstract(init, KEY), init(KEY)
    assert sorted(recipe.paths for recipe in model.recipes) == [("a",), ("b",), ("k", "q", "twice", "v")]
    assert_same(model.materialize(), expected)
    # Where a checkpoint has some of them, the others are computed alone; also on other devices than those.
    given = {path: np.asarray(expected[path]) for path in ("k", "v", "twice")}
    assert_same(model.materialize(given, initialize="missing"), expected)
    devices = jax.devices()
    places = {path: jax.sharding.SingleDeviceSharding(devices[number]) for number, path in enumerate(model)}
    apart = model.shard(jax.sharding.Mesh(np.array(devices[:1]), ("x",)), lambda variable: places[variable.path])
    arrays = apart.materialize()
    assert_same(arrays, expected)
    assert {path: array.sharding for path, array in arrays.items()} == places


def test_what_nothing_needs_is_not_computed() -> None:
    """Of a factorization and a product with it, the product is not even compiled where a checkpoint has it."""

    def init(key: Any) -> Any:
        q, r = jnp.linalg.qr(jax.random.normal(key, (90, 70)))
        return {"q": q, "r": r, "both": q @ r}

    model, expected = lm.build_abstract(init, KEY), init(KEY)
    assert [set(recipe.paths) for recipe in model.recipes] == [{"q", "r", "both"}]
    compiled: list[list[str]] = []
    for given in ({path: np.asarray(expected[path]) for path in ("q", "both")}, None):
        with compile_events() as events:
            assert_same(model.materialize(given, initialize="missing"), expected)
        compiled.append([event for event in events if event.startswith("compile")])
    assert len(compiled[0]) > 1 == len(compiled[1]), compiled


def test_leaves_of_one_scan_are_programs_of_their_own() -> None:
    def init(key: Any) -> Any:
        def layer(carry: Any, key: Any) -> Any:
            a, b = jax.random.split(key)
            return carry + 1, {"up": normal(a, 64, 80), "down": normal(b, 80, 64), "depth": carry}

        last, stacked = jax.lax.scan(layer, jnp.int32(0), jax.random.split(key, 6))
        return {"layers": stacked, "last": last}

    model = lm.build_abstract(init, KEY)
    assert all(len(recipe.paths) == 1 for recipe in model.recipes)
    assert_same(model.materialize(), init(KEY))
    nbytes = 6 * 64 * 80 * 4
    given = {path: np.zeros(v.shape, v.dtype) for path, v in model.items() if path != "layers/up"}
    plan = model.plan(given, initialize="missing")
    # The other leaf's stack is not among the temporaries.
    assert nbytes < plan.peak_nbytes < plan.device_nbytes + 2 * nbytes


def test_jit_of_the_whole_function_is_seen_through() -> None:
    init = jax.jit(deep(2, 32))
    model = lm.build_abstract(init, KEY)
    assert len(model.recipes) == 8
    assert_same(model.materialize(), init(KEY))


# --- what cannot be traced ------------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    if x.sum() > 0:  # the branch
        return x
    return -x


def uses_numpy(x: Any) -> Any:
    return np.linalg.norm(x)  # the conversion


def shapes(x: Any) -> Any:
    return jnp.zeros(x[0])  # the shape


def masks(x: Any) -> Any:
    return x[x > 0]  # the mask


@pytest.mark.parametrize(
    ("function", "line", "mend"),
    [
        (branches, "the branch", "jax.lax.cond"),
        (uses_numpy, "the conversion", "jax.numpy instead of NumPy"),
        (shapes, "the shape", "Python"),
        (masks, "the mask", "jnp.where"),
    ],
)
def test_untraceable_functions_name_the_line_and_the_mend(function: Any, line: str, mend: str) -> None:
    with pytest.raises(lm.TraceError) as caught:
        lm.build_abstract(function, jnp.arange(4))
    assert line in str(caught.value)
    assert mend in str(caught.value)
    assert f"test_function.py:{function.__code__.co_firstlineno + 1} in {function.__name__}" in str(caught.value)


def test_negative_dimensions_and_the_users_own_errors() -> None:
    with pytest.raises(lm.TraceError, match=r"'w' has the shape \(2, -1\)"):
        lm.build_abstract(lambda key: {"w": jax.random.normal(key, (2, -1))}, KEY)

    def init(key: Any) -> Any:
        raise ValueError("heads do not divide")

    with pytest.raises(ValueError, match="heads do not divide"):
        lm.build_abstract(init, KEY)


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.large
def test_wide_trees_are_not_quadratic_and_allocate_nothing() -> None:
    def calls_for(leaves: int) -> int:
        """Python and C function calls that tracing so many leaves takes."""

        def init(key: Any) -> Any:
            return [jax.random.normal(k, (4096, 4096)) * 0.02 for k in jax.random.split(key, leaves)]

        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            model = lm.build_abstract(init, KEY)
        finally:
            sys.setprofile(before)
        assert model.nbytes == leaves * 4096 * 4096 * 4
        assert len({r.signature for r in model.recipes}) == 1
        return calls

    calls_for(10)
    assert calls_for(400) < 1.5 * 8 * calls_for(50)  # quadratic would be sixty-four times

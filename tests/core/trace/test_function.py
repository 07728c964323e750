"""Tracing and slicing: every value equals eager execution bit for bit, and equal slices are one program."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
import threading
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazymodel._errors import TraceError
from lazymodel._model import AbstractModel
from lazymodel._programs.programs import ProgramCache, run_recipes
from lazymodel._trace.function import trace_function

KEY = jax.random.key(0)


def materialize(model: AbstractModel, sharding: Any = None) -> Any:
    """The model's object, its variables on one sharding, without the stream."""
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = {path: jnp.asarray(source) for path, source in model.sources.items()}
    arrays.update(run_recipes(model.recipes, dict.fromkeys(model, sharding), model.programs))
    return model.framework.rebuild(arrays)


def bits(array: Any) -> tuple[Any, ...]:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return ("key", array.dtype, *bits(jax.random.key_data(array)))
    return (array.shape, array.dtype, np.asarray(array).tobytes())


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(theirs), strict=True):
        if isinstance(b, jax.Array):
            assert bits(a) == bits(b), path
        else:
            assert a == b, path


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

    model = trace_function(init, (KEY,), {})
    assert list(model) == [
        *("empty", "layers/0/kernel", "layers/0/bias", "layers/1/kernel", "layers/1/bias"),
        *("pair/left", "pair/right", "raw", "rng", "step", "table"),
    ]
    expected = init(KEY)
    ours = materialize(model)
    assert isinstance(ours["table"], jax.Array)
    ours["table"] = expected["table"] = None if bits(ours["table"]) == bits(expected["table"]) else "differs"
    assert_same(ours, expected)
    assert isinstance(ours["layers"][0], Layer)
    assert isinstance(ours["pair"], Pair)
    structs = model.tree
    assert structs["layers"][0].kernel.shape == (8, 4)
    assert structs["name"] == "decoder"


def test_a_single_array_and_colliding_paths() -> None:
    assert list(trace_function(lambda k: normal(k, 2, 2), (KEY,), {})) == ["value"]
    model = trace_function(lambda k: {"a/b": normal(k, 2), "a": {"b": normal(k, 3)}}, (KEY,), {})
    assert sorted(model) == ["a/b", "a/b#2"]
    assert_same(materialize(model), {"a/b": normal(KEY, 2), "a": {"b": normal(KEY, 3)}})


def test_the_same_array_twice_is_one_variable_and_equal_arrays_are_two() -> None:
    def init(key: Any) -> Any:
        embedding = normal(key, 8, 4)
        return {"embedding": embedding, "head": embedding, "other": normal(key, 8, 4)}

    model = trace_function(init, (KEY,), {})
    assert list(model) == ["embedding", "other"]
    result = materialize(model)
    assert result["embedding"] is result["head"]
    assert result["embedding"] is not result["other"]
    assert_same(result, init(KEY))


def test_static_arguments_stay_python_and_arrays_are_inputs() -> None:
    def init(key: Any, config: dict[str, Any], table: Any, *, scale: float) -> Any:
        assert isinstance(config["size"], int)
        assert callable(config["make"])
        return {"w": config["make"](key, (config["size"], 2)) * scale, "t": table * 2, "given": table}

    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    config = {"size": 5, "make": jax.random.normal, "name": "x"}
    model = trace_function(init, (KEY, config, jnp.asarray(table)), {"scale": 0.3})
    assert_same(materialize(model), init(KEY, config, jnp.asarray(table), scale=0.3))
    assert set(model.sources) == {"given"}


def test_shape_structs_stand_for_values_that_nothing_needs() -> None:
    struct = jax.ShapeDtypeStruct((3, 7), jnp.float32)
    model = trace_function(lambda k, x: normal(k, x.shape[-1], 2), (KEY, struct), {})
    assert model["value"].shape == (7, 2)
    with pytest.raises(TraceError, match=r"'w'.*ShapeDtypeStruct"):
        trace_function(lambda k, x: {"w": normal(k, 3, 7) * x}, (KEY, struct), {})
    with pytest.raises(TraceError, match="'x' is an argument"):
        trace_function(lambda x: {"x": x}, (struct,), {})


def test_dtypes_follow_jit() -> None:
    def init(key: Any) -> Any:
        return {
            "weak": jnp.asarray(2.0) * jnp.ones(20),
            "bf16": jax.random.normal(key, (40, 20), jnp.bfloat16) * 0.1,
            "f16": jax.random.uniform(key, (40, 20), jnp.float16) - 0.5,
            "complex": jax.random.normal(key, (40, 3), jnp.complex64) * 2,
            "int": jax.random.randint(key, (500,), 0, 10, jnp.int8),
            "f8": jax.random.normal(key, (40, 2)).astype(jnp.float8_e4m3fn),
        }

    assert_same(materialize(trace_function(init, (KEY,), {})), init(KEY))


def test_64_bit_programs_stay_64_bit_outside_the_context() -> None:
    def init(key: Any) -> Any:
        return jax.random.normal(key, (40, 30), jnp.float64) * 0.1

    with jax.enable_x64(True):
        expected = init(KEY)
        model = trace_function(init, (KEY,), {})
    assert model["value"].dtype == np.float64
    assert bits(materialize(model)) == bits(expected)
    narrow = materialize(trace_function(lambda k: jax.random.normal(k, (40, 30)) * 0.1, (KEY,), {}))
    assert narrow.dtype == np.float32


# --- how it is cut --------------------------------------------------------------------------------------------------


def deep(layers: int) -> Any:
    def init(key: Any) -> Any:
        tree = {}
        for layer in range(layers):
            a, b = jax.random.split(jax.random.fold_in(key, layer))
            scale = 0.02 / (2 * (layer + 1)) ** 0.5  # a Python float of its own for every layer
            tree[f"layer_{layer}"] = {
                "up": jax.nn.initializers.lecun_normal()(a, (32, 64)),
                "down": jax.random.normal(b, (64, 32)) * scale,
                "norm": jnp.ones(128),
                "bias": jnp.zeros(128),
            }
        return tree

    return init


def test_programs_do_not_grow_with_depth_and_another_seed_compiles_nothing() -> None:
    ProgramCache.clear_shared()
    shallow, many = (trace_function(deep(layers), (KEY,), {}) for layers in (2, 12))
    assert_same(materialize(many), deep(12)(KEY))
    assert len(many.programs) == many.programs.compiled == 3  # up, down, and one fill for ones and zeros
    assert_same(materialize(shallow), deep(2)(KEY))
    other = trace_function(deep(12), (jax.random.key(7),), {})
    assert_same(materialize(other), deep(12)(jax.random.key(7)))
    assert len(other.programs) == 3
    assert shallow.programs.compiled == other.programs.compiled == 0


def test_leaves_of_one_large_intermediate_are_one_recipe() -> None:
    def init(key: Any) -> Any:
        qkv = jax.random.normal(key, (96, 96))
        q, k, v = jnp.split(qkv, 3, axis=1)
        other = jax.random.normal(jax.random.fold_in(key, 1), (96, 96))
        positions = jnp.arange(8192.0)  # shared too, but cheaper to make twice
        return {"q": q, "k": k, "v": v * 0.5, "a": other + positions[:96], "b": positions * 2, "twice": qkv}

    model = trace_function(init, (KEY,), {})
    assert sorted(recipe.paths for recipe in model.recipes) == [("a",), ("b",), ("k", "q", "twice", "v")]
    assert_same(materialize(model), init(KEY))
    (group,) = [recipe for recipe in model.recipes if len(recipe.paths) > 1]
    part = group.restricted_to(["q"])
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ((path, array),) = run_recipes([part], {"q": device}, ProgramCache())
    assert path == "q"
    assert bits(array) == bits(init(KEY)["q"])


def test_leaves_of_one_scan_are_programs_of_their_own() -> None:
    def init(key: Any) -> Any:
        def layer(carry: Any, key: Any) -> Any:
            a, b = jax.random.split(key)
            return carry + 1, {"up": normal(a, 64, 80), "down": normal(b, 80, 64), "depth": carry}

        last, stacked = jax.lax.scan(layer, jnp.int32(0), jax.random.split(key, 6))
        return {"layers": stacked, "last": last}

    model = trace_function(init, (KEY,), {})
    assert all(len(recipe.paths) == 1 for recipe in model.recipes)
    assert_same(materialize(model), init(KEY))
    up = next(recipe for recipe in model.recipes if recipe.paths == ("layers/up",))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    program = ProgramCache().get(up, [device])
    assert program.output_nbytes == 6 * 64 * 80 * 4
    assert program.temp_nbytes < 2 * program.output_nbytes  # the other leaf's stack is not among them


def test_jit_of_the_whole_function_is_seen_through() -> None:
    init = jax.jit(deep(2))
    ProgramCache.clear_shared()
    model = trace_function(init, (KEY,), {})
    assert len(model.recipes) == 8
    assert_same(materialize(model), init(KEY))


@jax.custom_vjp
def _scaled(x: Any) -> Any:
    return jnp.tanh(x) * 3.0


_scaled.defvjp(lambda x: (_scaled(x), x), lambda x, g: (g,))


def test_calls_loops_and_branches() -> None:
    def init(key: Any) -> Any:
        w = jax.random.normal(key, (64, 80))
        return {
            "relu": jax.nn.relu(w) + 1.0,
            "custom_vjp": _scaled(normal(jax.random.fold_in(key, 1), 64, 80)),
            "remat": jax.checkpoint(lambda x: jnp.sin(x) * 2.0)(normal(jax.random.fold_in(key, 2), 64, 80)),
            "while": jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.7), (0, w))[1],
            "cond": jax.lax.cond(jax.random.bernoulli(key), lambda: normal(key, 70, 70), lambda: jnp.zeros((70, 70))),
            "vmapped": jax.vmap(lambda k: normal(k, 40, 30))(jax.random.split(key, 5)),
        }

    assert_same(materialize(trace_function(init, (KEY,), {})), init(KEY))


def test_constants_are_sources_or_inputs() -> None:
    table, big = np.arange(7.0, dtype=np.float32), jnp.arange(9000.0)

    def init(key: Any) -> Any:
        return {"table": table, "big": big, "sum": normal(key, 9000) + big, "scaled": table * normal(key, 7)}

    model = trace_function(init, (KEY,), {})
    assert set(model.sources) == {"table", "big"}
    assert model["big"].origin == "constant"
    assert_same(
        {k: v for k, v in materialize(model).items() if k != "table"},
        {k: v for k, v in init(KEY).items() if k != "table"},
    )


def test_different_constants_never_share_a_program() -> None:
    def init(key: Any) -> Any:
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

    assert_same(materialize(trace_function(init, (KEY,), {})), init(KEY))


def test_raw_keys_and_other_generators() -> None:
    def init(key: Any) -> Any:
        a, b = jax.random.split(key)
        return {"a": normal(a, 70, 64), "b": jax.random.bernoulli(jax.random.fold_in(b, 3), 0.3, (70, 64)), "k": b}

    for key in (jax.random.PRNGKey(3), jax.random.key(3, impl="rbg"), jax.random.key(3, impl="unsafe_rbg")):
        assert_same(materialize(trace_function(init, (key,), {})), init(key))


# --- eager equality, at random --------------------------------------------------------------------------------------

UNARY = {
    "scale": lambda x: x * 0.37,
    "shift": lambda x: x + 1.25,
    "third": lambda x: x / 3.0,
    "tanh": jnp.tanh,
    "transpose": lambda x: x.T,
    "flip": lambda x: x[::-1],
    "normalize": lambda x: x / jnp.linalg.norm(x),
    "center": lambda x: x - x.mean(0),
    "half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "relu": jax.nn.relu,
    "jit": jax.jit(lambda x: x * 0.3 + 0.1),
}
BINARY = {"add": jnp.add, "mul": jnp.multiply, "matmul": jnp.matmul, "where": lambda a, b: jnp.where(a > 0, a, b)}


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Any], list[int]]:
    """A few random matrices, operations on what came before, and which results are returned."""
    nodes: list[Any] = [("leaf", draw(st.integers(0, 2))) for _ in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 6))):
        before = st.integers(0, len(nodes) - 1)
        if draw(st.booleans()):
            nodes.append((draw(st.sampled_from(sorted(UNARY))), draw(before)))
        else:
            nodes.append((draw(st.sampled_from(sorted(BINARY))), draw(before), draw(before)))
    outputs = draw(st.lists(st.integers(0, len(nodes) - 1), min_size=1, max_size=4))
    return nodes, outputs


@hypothesis.settings(max_examples=15, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(graphs(), st.integers(0, 3), st.integers(0, 2))
def test_random_graphs_equal_eager(graph: tuple[list[Any], list[int]], seed: int, axis: int) -> None:
    nodes, outputs = graph

    def init(key: Any) -> Any:
        values: list[Any] = []
        for name, *operands in nodes:
            if name == "leaf":
                values.append(jax.random.normal(jax.random.fold_in(key, operands[0]), (72, 72)))
            elif name in UNARY:
                values.append(UNARY[name](values[operands[0]]))
            else:
                values.append(BINARY[name](values[operands[0]], values[operands[1]]))
        return [values[index] for index in outputs]

    key = jax.random.key(seed)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spec = [jax.P(), jax.P("x"), jax.P(None, "x")][axis]
    assert_same(materialize(trace_function(init, (key,), {}), jax.NamedSharding(mesh, spec)), init(key))


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
    with pytest.raises(TraceError) as caught:
        trace_function(function, (jnp.arange(4),), {})
    assert line in str(caught.value)
    assert mend in str(caught.value)
    assert f"test_function.py:{function.__code__.co_firstlineno + 1} in {function.__name__}" in str(caught.value)


def test_the_users_own_errors_are_not_wrapped() -> None:
    def init(key: Any) -> Any:
        raise ValueError("heads do not divide")

    with pytest.raises(ValueError, match="heads do not divide"):
        trace_function(init, (KEY,), {})


# --- cost -----------------------------------------------------------------------------------------------------------


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
            model = trace_function(init, (KEY,), {})
        finally:
            sys.setprofile(before)
        assert model.nbytes == leaves * 4096 * 4096 * 4
        assert len({r.signature for r in model.recipes}) == 1
        return calls

    calls_for(10)
    assert calls_for(800) < 1.5 * 8 * calls_for(100)  # quadratic would be sixty-four times


def test_tracing_from_many_threads() -> None:
    results: dict[int, Any] = {}

    def work(seed: int) -> None:
        results[seed] = materialize(trace_function(deep(2), (jax.random.key(seed),), {}))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert_same(results[seed], deep(2)(jax.random.key(seed)))


def test_core_does_not_import_flax() -> None:
    code = "import sys, lazymodel._trace.function; assert not {'flax', 'keras', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

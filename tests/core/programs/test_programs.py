"""Programs: bit-identical to eager on any sharding, compiled once, bounded in memory."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazymodel._errors import LazyModelWarning
from lazymodel._programs.programs import InitRecipe, ProgramCache, run_recipes
from lazymodel._trace.function import trace_function

I = jax.nn.initializers  # noqa: E741 (short, in a long table)
KEY = jax.random.key(11)


def unit_rows(key: Any, shape: tuple[int, ...]) -> jax.Array:
    w = jax.random.normal(key, shape)
    return w / jnp.linalg.norm(w, axis=-1, keepdims=True)


INITIALIZERS: dict[str, Any] = {
    "zeros": I.zeros,
    "ones": I.ones,
    "constant": I.constant(0.3),
    "uniform": I.uniform(0.1),
    "normal": I.normal(0.02),
    "truncated_normal": I.truncated_normal(0.02),
    "glorot_normal": I.glorot_normal(),
    "glorot_uniform": I.glorot_uniform(),
    "xavier_normal": I.xavier_normal(),
    "xavier_uniform": I.xavier_uniform(),
    "he_normal": I.he_normal(),
    "he_uniform": I.he_uniform(),
    "kaiming_normal": I.kaiming_normal(),
    "kaiming_uniform": I.kaiming_uniform(),
    "lecun_normal": I.lecun_normal(),
    "lecun_uniform": I.lecun_uniform(),
    "fan_avg_uniform": I.variance_scaling(2.0, "fan_avg", "uniform"),
    "fan_out_normal": I.variance_scaling(0.5, "fan_out", "normal"),
    "fan_in_truncated": I.variance_scaling(1.0, "fan_in", "truncated_normal"),
    "orthogonal": I.orthogonal(1.5),
    "wide_orthogonal": lambda key, shape: I.orthogonal()(key, shape[::-1]).T,
    "bf16": lambda key, shape: I.lecun_normal()(key, shape, jnp.bfloat16),
    "fused_multiply_add": lambda key, shape: jax.random.normal(key, shape) * 0.02 + 1.0,
    "two_constants": lambda key, shape: jax.random.normal(key, shape) * 0.02 * 0.3 / 7.0,
    "unit_norm": lambda key, shape: (lambda w: w / jnp.linalg.norm(w))(jax.random.normal(key, shape)),
    "unit_columns": lambda key, shape: (lambda w: w / jnp.linalg.norm(w, axis=0))(jax.random.normal(key, shape)),
    "unit_rows": unit_rows,
    "centered": lambda key, shape: (lambda w: w - w.mean(0))(jax.random.normal(key, shape)),
    "softmax": lambda key, shape: jax.nn.softmax(jax.random.normal(key, shape)),
    "low_rank": lambda key, shape: jax.random.normal(key, (shape[0], 4)) @ jax.random.normal(key, (4, shape[1])),
    "permutation": lambda key, shape: jax.random.permutation(key, shape[0] * shape[1]).reshape(shape),
    "randint": lambda key, shape: jax.random.randint(key, shape, 0, 1000),
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.3, shape),
    "gumbel": lambda key, shape: jax.random.gumbel(key, shape),
    "laplace": lambda key, shape: jax.random.laplace(key, shape),
    "multivariate": lambda key, shape: jax.random.multivariate_normal(
        key, jnp.zeros(shape[1]), 2 * jnp.eye(shape[1]), shape[:1]
    ),
    "rotary": lambda key, shape: jnp.sin(jnp.arange(float(shape[0]))[:, None] / 1e4 ** jnp.linspace(0, 1, shape[1])),
}


def shardings(mesh8: Any, mesh42: Any) -> list[Any]:
    devices = jax.devices()
    two = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
    return [
        jax.sharding.SingleDeviceSharding(devices[0]),
        jax.NamedSharding(two, jax.P("x")),
        jax.NamedSharding(mesh8, jax.P(None, "model")),
        jax.NamedSharding(mesh42, jax.P("model", "batch")),
    ]


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", INITIALIZERS)
def test_equal_to_eager_on_every_sharding(name: str, mesh8: Any, mesh42: Any) -> None:
    shape = (80, 56)  # shards of seven columns: not a whole vector register
    expected = INITIALIZERS[name](KEY, shape)
    model = trace_function(INITIALIZERS[name], (KEY, shape), {})
    for sharding in shardings(mesh8, mesh42):
        for _, array in run_recipes(model.recipes, {"value": sharding}, model.programs):
            assert array.sharding.is_equivalent_to(sharding, 2)
            assert same(array, expected), sharding


# Whole-tree jit equals eager execution for these. It does not for `normal(0.02)` with jax 0.10: there XLA multiplies
# the two constants of `sqrt(2) * erf_inv(u) * 0.02` first.
@pytest.mark.parametrize("name", ["lecun_normal", "he_uniform", "truncated_normal", "ones"])
def test_standard_initializers_equal_whole_tree_jit(name: str, mesh8: Any) -> None:
    sharding = jax.NamedSharding(mesh8, jax.P("model"))
    init = INITIALIZERS[name]
    whole = jax.jit(lambda key: init(key, (256, 128)), out_shardings=sharding)(KEY)
    model = trace_function(lambda key: init(key, (256, 128)), (KEY,), {})
    ((_, array),) = run_recipes(model.recipes, {"value": sharding}, model.programs)
    assert same(array, whole)


@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (33, 7)])
def test_narrow_orthogonal_matrices(mesh8: Any, shape: tuple[int, int]) -> None:
    """Columns shorter than a vector register, which LAPACK wants one after the other."""
    init = I.orthogonal()
    sharding = jax.NamedSharding(mesh8, jax.P())
    for key in jax.random.split(KEY, 3):
        model = trace_function(init, (key, shape), {})
        ((_, array),) = run_recipes(model.recipes, {"value": sharding}, model.programs)
        assert same(array, init(key, shape))


def test_delta_orthogonal(mesh8: Any) -> None:
    init = I.delta_orthogonal()
    model = trace_function(init, (KEY, (3, 3, 16, 32)), {})
    sharding = jax.NamedSharding(mesh8, jax.P(None, None, None, "model"))
    ((_, array),) = run_recipes(model.recipes, {"value": sharding}, model.programs)
    assert same(array, init(KEY, (3, 3, 16, 32)))


def test_elementwise_programs_hold_their_shard_only(mesh8: Any) -> None:
    shape, sharding = (2048, 1024), jax.NamedSharding(mesh8, jax.P("model"))
    shard = 2048 * 1024 * 4 // 8

    def program(init: Any) -> Any:
        model = trace_function(init, (KEY, shape), {})
        return model.programs.get(model.recipes[0], [sharding])

    assert program(I.lecun_normal()).output_nbytes == shard
    assert program(I.lecun_normal()).temp_nbytes <= 4 * shard
    assert program(unit_rows).temp_nbytes >= 8 * shard  # a float sum: whole on every device, and the plan knows


def recipe(path: str = "w", shape: tuple[int, ...] = (64, 64)) -> InitRecipe:
    def function(data: Any) -> tuple[jax.Array, ...]:
        key = jax.random.wrap_key_data(data)
        return (jax.random.normal(key, shape), jnp.ones(shape))

    return InitRecipe((path, f"{path}/ones"), ("test", shape), function, (np.asarray(jax.random.key_data(KEY)),))


def test_restricted_recipes_compute_only_what_is_asked() -> None:
    whole = recipe()
    assert whole.restricted_to(["w", "w/ones"]) is whole
    part = whole.restricted_to(["w/ones"])
    assert part.paths == ("w/ones",)
    assert part.signature != whole.signature
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (ones,) = ProgramCache().get(part, [device])(part.inputs)
    assert same(ones, jnp.ones((64, 64)))


def test_a_recipe_whose_outputs_live_on_different_devices(mesh8: Any) -> None:
    a, b = (jax.sharding.SingleDeviceSharding(device) for device in jax.devices()[:2])
    arrays = dict(run_recipes([recipe()], {"w": a, "w/ones": b}, ProgramCache()))
    assert arrays["w"].sharding == a
    assert arrays["w/ones"].sharding == b


def test_one_compilation_for_many_recipes_and_threads() -> None:
    ProgramCache.clear_shared()
    cache, device = ProgramCache(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    threads = [threading.Thread(target=cache.get, args=(recipe(f"w{i}"), [device] * 2)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == cache.compiled == 1
    other = ProgramCache()
    other.get(recipe("x"), [device] * 2)
    assert (len(other), other.compiled) == (1, 0)
    other.get(recipe("x", (32, 32)), [device] * 2)
    assert (len(other), other.compiled) == (2, 1)


def test_the_shared_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ProgramCache.clear_shared()
    monkeypatch.setattr("lazymodel._programs.programs._SHARED_PROGRAMS", 2)
    cache, device = ProgramCache(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for size in (1, 2, 3):
        cache.get(recipe("w", (size,)), [device] * 2)
    assert len(ProgramCache._shared) == 2
    assert len(cache) == 3


def test_largest_temporaries_first() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = trace_function(lambda k: [jax.random.normal(k, (n, n)) for n in (8, 200, 90)], (KEY,), {})
    order = [path for path, _ in run_recipes(model.recipes, dict.fromkeys(model, device), model.programs)]
    assert order == ["1", "2", "0"]


def test_values_that_depend_on_the_sharding_warn(mesh8: Any) -> None:
    ProgramCache.clear_shared()
    sharding = jax.NamedSharding(mesh8, jax.P("model"))
    model = trace_function(lambda k: jax.random.normal(k, (128, 16)), (jax.random.key(0, impl="rbg"),), {})
    with pytest.warns(LazyModelWarning, match=r"'value'.*threefry"):
        list(run_recipes(model.recipes, {"value": sharding}, model.programs))
    with jax.threefry_partitionable(False):
        model = trace_function(lambda k: jax.random.normal(k, (128, 16)), (KEY,), {})
        with pytest.warns(LazyModelWarning, match="jax_threefry_partitionable"):
            list(run_recipes(model.recipes, {"value": sharding}, model.programs))
    replicated = jax.NamedSharding(mesh8, jax.P())
    model = trace_function(lambda k: jax.random.normal(k, (128, 16)), (KEY,), {})
    list(run_recipes(model.recipes, {"value": replicated}, model.programs))  # filterwarnings: an error if it warned


def test_values_that_depend_on_the_sharding_warn_once_a_model_and_for_every_model(mesh8: Any) -> None:
    def init(key: Any) -> Any:
        return [jax.random.normal(jax.random.fold_in(key, rows), (rows, 16)) for rows in (64, 128, 256)]

    ProgramCache.clear_shared()
    sharding = jax.NamedSharding(mesh8, jax.P("model"))
    for _ in range(2):  # the second model finds its programs compiled
        model = trace_function(init, (jax.random.key(0, impl="rbg"),), {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(run_recipes(model.recipes, dict.fromkeys(model, sharding), model.programs))
        (warning,) = caught
        assert warning.category is LazyModelWarning
        assert "'0' and 2 more variables" in str(warning.message) and "threefry" in str(warning.message)


def test_subsets_and_empty_arrays(mesh8: Any) -> None:
    assert list(run_recipes([], {}, ProgramCache())) == []
    model = trace_function(lambda k: jax.random.normal(k, (0, 8)) * 2, (KEY,), {})
    ((_, array),) = run_recipes(model.recipes, {"value": jax.NamedSharding(mesh8, jax.P("model"))}, model.programs)
    assert array.shape == (0, 8)

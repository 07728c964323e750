"""Init programs: as few as layers are different, bounded in memory, and moments that are read off them."""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from lazymodel.extras.research.fan_in_out import is_random, moments
from tests.compile_events import compile_events
from tests.core.materialize._variables import Recorder
from tests.core.trace._eager import assert_same
from tests.large import mostly_large

I = jax.nn.initializers  # noqa: E741 (short, in a table)
KEY = jax.random.key(11)
P = jax.P


def names(jaxpr: Any) -> list[str]:
    return [str(eqn.params.get("name", eqn.primitive.name)) for eqn in jaxpr.eqns]


def test_jax_is_left_as_it_was() -> None:
    """A mean is one kernel while a model is traced, as eagerly, and two equations of a program ever after."""

    @jax.jit
    def inner(x: Any) -> Any:
        return x.mean(1)

    def outer(x: Any) -> Any:
        return inner(x) - x.mean(0)[:3]

    abstract = lm.build_abstract(lambda key: outer(jax.random.normal(key, (3, 7))), KEY)
    assert_same(abstract.materialize(), outer(jax.random.normal(KEY, (3, 7))))
    jaxpr = jax.make_jaxpr(outer)(jnp.ones((3, 7)))
    assert names(jaxpr)[1:3] == ["reduce_sum", "div"]
    (called,) = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.params.get("name") == "inner"]
    assert names(called.jaxpr) == ["reduce_sum", "div"]


def test_kernels_do_not_grow_with_depth() -> None:
    """Layers of sums, each with a scale of its own: a deeper model compiles nothing more."""

    def init(key: Any, layers: int) -> Any:
        drawn = [jax.random.normal(k, (40, 24)) for k in jax.random.split(key, layers)]
        return [(w - w.mean(0)) / (jnp.linalg.norm(w) * (depth + 1.0)) for depth, w in enumerate(drawn)]

    expected = {layers: init(KEY, layers) for layers in (2, 9)}
    counts: list[int] = []
    for layers in (2, 9):
        model = lm.build_abstract(init, KEY, layers)
        with compile_events() as events:
            found = model.materialize()
        counts.append(sum(event.startswith("compile") for event in events))
        assert_same(found, expected[layers])
        assert len(model.programs) == 1
    assert counts[0] > 0 == counts[1]


def test_a_compiled_function_of_a_whole_model_keeps_a_kernel_for_each_variable() -> None:
    @jax.jit
    def init(key: Any) -> Any:
        x, tree = jnp.ones((1, 32)), {}
        for layer, k in enumerate(jax.random.split(key, 6)):
            tree[f"w{layer}"] = (lambda w: w / jnp.linalg.norm(w, axis=0))(jax.random.normal(k, (32, 32)))
            x = jnp.tanh(x @ tree[f"w{layer}"])  # a forward pass that nobody needs
        return tree

    model = lm.build_abstract(init, KEY)
    assert_same(model.materialize(), init(KEY))
    assert [recipe.paths for recipe in model.recipes] == [(f"w{layer}",) for layer in range(6)]
    assert len(model.programs) == 1


def test_what_is_drawn_takes_its_shards_and_what_is_summed_one_device(mesh8: Any) -> None:
    """As the plan says, and as the shards are."""
    shape, shard = (1024, 512), 1024 * 512 * 4 // 8

    def planned(init: Any, spec: jax.P) -> tuple[int, int]:
        sharded = lm.build_abstract(init, KEY).shard(mesh8, {".*": spec})
        plan = sharded.plan()
        (array,) = jax.tree.leaves(sharded.materialize())
        assert [each.data.nbytes for each in array.addressable_shards] == [shard] * 8
        return plan.device_nbytes, plan.peak_nbytes - plan.device_nbytes

    held, temporaries = planned(lambda key: I.lecun_normal()(key, shape), P("model"))
    assert held == shard and temporaries <= 4 * shard
    held, temporaries = planned(lambda key: (lambda w: w - w.mean(0))(jax.random.normal(key, shape)), P(None, "model"))
    assert held == shard and 16 * shard <= held + temporaries <= 48 * shard, "the whole twice or more"


def test_largest_temporaries_first() -> None:
    """While the devices are emptiest."""
    recorder = Recorder()
    abstract = lm.build_abstract(lambda key: [jax.random.normal(key, (n, n)) for n in (8, 200, 90)], KEY)
    abstract.materialize(progress=recorder)
    assert [path for _, _, path in recorder.calls if path in abstract] == ["1", "2", "0"]


def test_values_that_depend_on_the_sharding_warn(mesh8: Any) -> None:
    def init(key: Any) -> Any:
        return [jax.random.normal(jax.random.fold_in(key, rows), (rows, 16)) for rows in (64, 128, 256)]

    def warned(key: Any, spec: jax.P) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lm.build_abstract(init, key).shard(mesh8, {".*": spec}).materialize()
        assert all(issubclass(warning.category, lm.LazyModelWarning) for warning in caught)
        return [str(warning.message) for warning in caught]

    rbg = jax.random.key(0, impl="rbg")
    for _ in range(2):  # once a model, and for a second one, which finds its programs compiled
        (message,) = warned(rbg, P("model"))
        assert "'0' and 2 more variables" in message and "threefry" in message
    with jax.threefry_partitionable(False):
        (message,) = warned(KEY, P("model"))
        assert "jax_threefry_partitionable" in message
    assert warned(rbg, P()) == warned(KEY, P("model")) == []


def test_arrays_without_elements(mesh8: Any) -> None:
    abstract = lm.build_abstract(lambda key: jax.random.normal(key, (0, 8)) * 2, KEY)
    assert abstract.shard(mesh8, {".*": P("model")}).materialize().shape == (0, 8)


# --- moments --------------------------------------------------------------------------------------------------------

SHAPE = (64, 256)
DISTRIBUTIONS = {
    "normal": I.normal(0.3),
    "truncated_normal": I.truncated_normal(0.5),
    "off_center": lambda key, shape, dtype: jax.random.truncated_normal(key, -1.0, 0.5, shape, dtype) + 2,
    "uniform": I.uniform(0.1),
    "lecun_normal": I.lecun_normal(),
    "he_uniform": I.he_uniform(),
    "glorot_normal": I.glorot_normal(),
    "orthogonal": I.orthogonal(2.0),
    "constant": I.constant(0.3),
    "negative": lambda key, shape, dtype: -I.uniform(0.1)(key, shape, dtype) / 4,
    "both": lambda key, shape, dtype: jnp.concatenate([I.normal(0.1)(key, (32, 256)), jnp.zeros((32, 256))]),
    "layers": lambda key, shape, dtype: lm.initializers.stacked(I.lecun_normal())(key, (4, *shape), dtype),
}


@pytest.mark.parametrize("dtype", mostly_large([jnp.float32, jnp.bfloat16], [jnp.bfloat16]))
def test_moments_are_those_of_the_values_that_a_program_draws(dtype: Any) -> None:
    for name, initialize in DISTRIBUTIONS.items():
        if dtype == jnp.bfloat16 and name in ("orthogonal", "both"):
            continue  # which take float32 alone
        draw = functools.partial(cast(Any, initialize), shape=SHAPE, dtype=dtype)
        (found,) = moments(lm.build_abstract(lambda key, draw=draw: {"w": draw(key)}, KEY).recipes[0])
        values = np.asarray(draw(KEY), np.float64)
        assert found is not None, name
        assert found.std == pytest.approx(values.std(), rel=0.03, abs=1e-9), name
        near = 0.04 * (values.std() + abs(values.mean())) + 1e-9
        assert found.mean == pytest.approx(values.mean(), abs=near), name


def test_the_moments_of_lecun_are_exact_and_those_of_what_follows_unknown() -> None:
    def init(key: jax.Array) -> Any:
        return {
            "w": I.lecun_normal()(key, SHAPE),
            "relu": jax.nn.relu(I.normal()(key, SHAPE)),
            "count": jnp.arange(9.0),
        }

    abstract = lm.build_abstract(init, jax.random.key(0))
    found = {recipe.paths[0]: (moments(recipe)[0], is_random(recipe)) for recipe in abstract.recipes}
    assert found["w"][0] is not None and found["w"][0].std == pytest.approx(1 / 8, rel=1e-6)
    assert found["relu"] == (None, True)
    assert found["count"] == (None, False)

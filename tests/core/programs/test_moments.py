"""Moments read off init programs: those of what the programs draw."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from lazymodel._programs.moments import is_random, moments

I = jax.nn.initializers  # noqa: E741 (short)
SHAPE = (64, 256)
INITIALIZERS = {
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


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_to_those_of_values(name: str, dtype: Any) -> None:
    if dtype == jnp.bfloat16 and name in ("orthogonal", "both"):
        pytest.skip("float32 alone")
    initialize: Callable[..., Any] = INITIALIZERS[name]
    abstract = lm.build_abstract(lambda key: {"w": initialize(key, SHAPE, dtype)}, jax.random.key(1))
    (found,) = moments(abstract.recipes[0])
    values = np.asarray(initialize(jax.random.key(1), SHAPE, dtype), np.float64)
    assert found is not None
    assert found.std == pytest.approx(values.std(), rel=0.03, abs=1e-9)
    assert found.mean == pytest.approx(values.mean(), abs=0.04 * (values.std() + abs(values.mean())) + 1e-9)


def test_lecun_is_exact_and_what_else_there_is_unknown() -> None:
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

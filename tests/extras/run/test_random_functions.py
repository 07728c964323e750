"""Functions made at random, cut at random: always equal to the whole."""

from __future__ import annotations

import operator
import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lazymodel as lm
from tests.core.trace.test_random_programs import CASTS, OF_ANY, OF_FLOAT, OF_TWO
from tests.extras.run.models import assert_equal
from tests.extras.run.test_run import ran
from tests.large import mostly_large

SHAPES = [(7,), (16,), (8, 16), (16, 7), (16, 16), (4, 8, 16)]


def init(key: jax.Array) -> list[jax.Array]:
    return [jax.random.normal(jax.random.fold_in(key, number), shape) for number, shape in enumerate(SHAPES * 2)]


def random_function(seed: int) -> Callable[[Any, Any], Any]:
    """A function of the variables and an input, by numbers; of some, the gradient."""

    def function(model: Any, x: jax.Array) -> Any:
        rng = random.Random(seed)
        values = [x, *rng.sample(model, rng.randint(2, 6))]
        first = len(values)
        for _ in range(rng.randint(4, 14)):
            known = [value for value in values if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)]
            value = rng.choice(known[-4:] if rng.random() < 0.6 else known)
            others = [each for each in known if each.shape == value.shape]
            kind = rng.random()
            if kind < 0.1:
                operation, operands = operator.methodcaller("astype", rng.choice(CASTS.split())), [value]
            elif kind < 0.4:
                operation, operands = rng.choice(OF_TWO), [value, rng.choice(others)]
            elif kind < 0.6 or not jnp.issubdtype(value.dtype, jnp.floating):
                operation, operands = rng.choice(OF_ANY), [value]
            elif kind < 0.7:
                operation, operands = jax.grad(lambda v: jnp.sum(jnp.tanh(v * v)).astype(v.dtype)), [value]
            else:
                operation, operands = rng.choice(OF_FLOAT), [value]
            try:
                found = jax.tree.leaves(operation(*operands))
            except (TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
                continue  # not for this shape or dtype
            values += [each for each in found if each.size <= 1 << 12 and each.ndim <= 4]
        return rng.sample(values[first:], min(4, len(values) - first)) or values[-1:]

    return function


@pytest.fixture(scope="module")
def abstract() -> Any:
    return lm.build_abstract(init, jax.random.key(3))


def check(abstract: Any, seed: int) -> int:
    function, x = random_function(seed), jax.random.normal(jax.random.key(seed), (8, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, and of what overflows
        try:
            expected = jax.jit(function)(abstract.materialize(), x)
        except ValueError:  # it puts values on several devices
            return 0
        found, report = ran(abstract, function, x)
        assert_equal(found, expected, 1e-4)
        with pytest.raises(lm.DoesNotFitError) as raised:
            abstract.run(function, x, max_device_memory=1)
        least = raised.value.needed_nbytes
        assert least is not None
        if "returns" in str(raised.value):  # the results alone
            least = report.peak_nbytes
        limit = random.Random(seed).randint(least, max(least, report.peak_nbytes))
        found, report = ran(abstract, function, x, max_device_memory=limit)
        assert report.peak_nbytes <= limit
        assert_equal(found, expected, 1e-4)
    return report.calls


@pytest.mark.parametrize("seed", mostly_large(range(12), range(2)))
def test_random_functions(abstract: Any, seed: int) -> None:
    check(abstract, seed)


@pytest.mark.large
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_random_functions(abstract: Any, first: int) -> None:
    wrong = []
    for seed in range(first, first + 20):
        try:
            check(abstract, seed)
        except Exception as error:
            wrong.append((seed, f"{type(error).__name__}: {error}"[:300]))
    assert not wrong

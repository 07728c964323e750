"""Learning rate multipliers: on updates, by path, with the state of the optimizer itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lazymodel as lm

I = jax.nn.initializers  # noqa: E741 (short)


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
    found, _ = tx.update(given, tx.init(params), params)
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

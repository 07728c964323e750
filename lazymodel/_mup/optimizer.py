"""An Optax optimizer with a learning rate multiplier for each variable, found by its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.paths import path_text
from lazymodel._errors import LazyModelError
from lazymodel._mup.rules import Rule
from lazymodel._show.text import closest

_STEPS = 8  # of the trial that count, after as many: schedules begin with a rate of 0, and RAdam as SGD
# Sizes of gradients and parameters: gradients are large beside Adam's epsilon, and small, since norms may be clipped;
# parameters are small beside gradients, to which decay may be added.
_TRIALS = ((1e-2, 2e-3), (1e-1, 2e-3), (1e-2, 2e-2))
_TOLERANCE = 0.05


def scaled_optimizer(tx: Any, multipliers: Callable[[Rule], Mapping[str, float]], rule: Rule | None, name: str) -> Any:
    """`tx` with its updates multiplied; `multipliers` is path to multiplier, of a rule."""
    import optax  # pyright: ignore[reportMissingTypeStubs]

    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise LazyModelError(f"optimizer takes an Optax gradient transformation; got {tx!r}")
    tx = optax.with_extra_args_support(tx)
    by_path = multipliers(rule or _tried(tx))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(updates, state, params, **extra)
        return jax.tree_util.tree_map_with_path(scaled, updates), state

    def scaled(keys: Sequence[Any], update: Any) -> Any:
        factor = by_path[_path(keys, by_path, name)]
        return update if factor == 1 else update * jnp.asarray(factor, update.dtype)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _path(keys: Sequence[Any], known: Mapping[str, float], name: str) -> str:
    """The variable at a place in a tree of parameters: NNX's arrays are attributes, Linen's lack their collection."""
    path = path_text([key for key in keys if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")])
    for candidate in (path, f"params/{path}", path.removeprefix("params/")):
        if candidate in known:
            return candidate
    raise LazyModelError(
        f"the optimizer was given an array at {path!r}, which is no variable that {name} trains"
        f"{closest(path, known)}. Its parameters are a tree with the model's own paths, as materialize returns"
    )


def _tried(tx: Any) -> Rule:
    """Which rule an optimizer follows, of its updates of a matrix whose gradient stays as it is.

    Adam's are equally large for all elements and gradients, SGD's are the gradient times a number. Neither changes with
    the size of the parameters, as those of LAMB and Adafactor do, nor depends on other elements, as Muon's do.
    """
    random = np.random.default_rng(0)
    gradient = random.uniform(0.5, 1, (4, 4)) * random.choice([-1, 1], (4, 4))
    params = random.uniform(0.5, 1, (4, 4))
    try:
        small, large, moved = (_update(tx, size * gradient, scale * params) for size, scale in _TRIALS)
    except Exception as error:
        raise LazyModelError(
            f'which learning rates has this optimizer? Trying it failed ({error}): pass rule="adam" or rule="sgd"'
        ) from error
    growth = _TRIALS[1][0] / _TRIALS[0][0]
    if _alike(moved, small) and np.any(small):
        if _alike(large, small) and _alike(abs(small), np.mean(abs(small))):
            return "adam"
        if _alike(large, growth * small) and _alike(small / gradient, np.mean(small / gradient)):
            return "sgd"
    raise LazyModelError(
        "updates of this optimizer are neither equally large for all gradients, as Adam's, nor the gradient times a "
        "number, as SGD's, whatever the parameters are. There are no learning rates for it: LAMB, LARS, Muon and "
        "Adafactor scale by the size of a parameter or of a whole matrix. Adafactor without "
        'multiply_by_parameter_scale is as Adam. If it is as one of them, pass rule="adam" or rule="sgd"'
    )


def _update(tx: Any, gradient: Any, params: Any) -> Any:
    """The sum of later updates, without what does not depend on the gradient's sign: weight decay."""
    update, found = jax.jit(tx.update), []
    tree = {"trial": jnp.asarray(params, jnp.float32)}
    for sign in (1, -1):
        given = {"trial": jnp.asarray(sign * gradient, jnp.float32)}
        state, total = tx.init(tree), np.zeros(np.shape(gradient))
        for step in range(2 * _STEPS):
            updates, state = update(given, state, tree)
            total += np.asarray(updates["trial"]) * (step >= _STEPS)
        found.append(total)
    return (found[0] - found[1]) / 2


def _alike(found: Any, expected: Any) -> bool:
    return bool(np.allclose(found, expected, rtol=_TOLERANCE, atol=0))

"""An Optax optimizer with a learning rate multiplier for each variable, found by its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lazymodel._abstract.paths import path_text
from lazymodel._errors import LazyModelError
from lazymodel._mup.rules import Rule
from lazymodel._show.text import closest

_STEPS = 3  # of the trial; a schedule may begin with a rate of 0
_SIZES = (1e-3, 1e-2)  # of the trial's gradients: small, since norms may be clipped, and large beside Adam's epsilon
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
    """Which rule an optimizer follows: whether its updates grow with the gradient."""
    try:
        small, large = (_last_update(tx, size) for size in _SIZES)
    except Exception as error:
        raise LazyModelError(
            f'which learning rates has this optimizer? Trying it failed ({error}): pass rule="adam" or rule="sgd"'
        ) from error
    ratio = large / small if small else 0.0
    expected_ratios: dict[Rule, float] = {"adam": 1.0, "sgd": _SIZES[1] / _SIZES[0]}
    for rule, expected in expected_ratios.items():
        if abs(ratio / expected - 1) < _TOLERANCE:
            return rule
    raise LazyModelError(
        f"updates of this optimizer are {ratio:.3g} times as large for gradients {_SIZES[1] / _SIZES[0]:g} times as "
        'large, neither as Adam\'s (1) nor as SGD\'s: pass rule="adam" or rule="sgd"'
    )


def _last_update(tx: Any, size: float) -> float:
    params = {"trial": jnp.zeros((4, 4))}
    state, update = tx.init(params), params
    for _ in range(_STEPS):
        update, state = tx.update({"trial": jnp.full((4, 4), size)}, state, params)
    return float(jnp.abs(update["trial"]).max())

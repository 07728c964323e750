"""The adapter that `lazymodel.build_abstract` finds for Flax: chooses between Linen and NNX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from lazymodel._abstract.framework import ModelSpec
from lazymodel._trace.errors import watched
from lazymodel_flax import linen, nnx


class FlaxAdapter:
    """Recognizes Linen modules, NNX classes, and functions, which may return an NNX module.

    If a function does not return one, it is traced as the core would trace it, so matching it costs nothing.

    Example:
        >>> list(lm.build_abstract(nnx.Linear, 8, 16, rngs=nnx.Rngs(0)))
        ['bias', 'kernel']
        >>> list(lm.build_abstract(linen.Dense(16), jax.random.key(0), jax.numpy.ones((1, 8))))
        ['params/bias', 'params/kernel']
    """

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return linen.matches(build) or nnx.matches(build, args, kwargs)

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
        module = linen if linen.matches(build) else nnx
        with watched(build, args, kwargs):
            return module.build_abstract(build, args, kwargs)

    def arrays(self, model: Any) -> dict[str, Any] | None:
        found = nnx.arrays(model)
        return linen.by_path(model) if found is None and linen.has_boxes(model) else found

    def with_arrays(self, model: Any, arrays: Mapping[int, Any]) -> Any:
        if nnx.arrays(model) is not None:
            return nnx.with_arrays(model, arrays)
        return jax.tree.map(lambda leaf: arrays.get(id(leaf), leaf), model)


adapter = FlaxAdapter()

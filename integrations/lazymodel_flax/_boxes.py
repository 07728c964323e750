"""The boxes that Flax keeps arrays in: paths without them, and their axis names as an abstract model has these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lazymodel._abstract.paths import path_text
from lazymodel._abstract.spec import ModelSpec
from lazymodel._sharding.rules import resolve_logical


def variable_path(keys: Sequence[Any]) -> str:
    """The path without the attribute that a variable or box keeps its array in."""
    return path_text([key for key in keys if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")])


def by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by `variable_path`."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {variable_path(keys): leaf for keys, leaf in found}


def with_logical_axes(model: ModelSpec, names: Mapping[str, tuple[Any, Any]]) -> ModelSpec:
    """The model with `logical_axes` on its variables.

    `names` has by path axis names (a sequence, a PartitionSpec or a NamedSharding) and the variable's own rules for
    them, or None. Own rules are applied at once; names that they do not know stay.
    """
    variables = dict(model.variables)
    for path, (axes, rules) in names.items():
        if path in variables:
            axes = tuple(getattr(axes, "spec", axes))
            if rules:
                resolved, unknown = resolve_logical(axes, rules)
                axes = tuple(name if name in unknown else axis for name, axis in zip(axes, resolved, strict=True))
            variables[path] = dataclasses.replace(variables[path], logical_axes=axes)
    return model.with_variables(variables)

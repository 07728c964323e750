"""The boxes that Flax keeps arrays in: paths without them, and their axis names as an abstract model has these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen

from lazymodel._abstract.paths import PathOf, path_of, path_text
from lazymodel._abstract.spec import ModelSpec
from lazymodel._sharding.rules import resolve_logical
from lazymodel._trace.escaped import is_iterator


def variable_path(keys: Sequence[Any]) -> str:
    """The path without the attribute that a variable or box keeps its array in."""
    return path_text(_without_values(keys))


def _without_values(keys: Sequence[Any]) -> list[Any]:
    return [key for key in keys if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")]


def by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by their paths without the attributes that variables and boxes keep arrays in."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    name = path_of(tree)
    return {name(_without_values(keys)): leaf for keys, leaf in found}


def is_box(leaf: Any) -> bool:
    """Returns True for a box of Linen's around an array."""
    return isinstance(leaf, linen.meta.AxisMetadata)


def has_boxes(tree: Any) -> bool:
    """Returns True where there is a box in a tree."""
    return any(map(is_box, jax.tree.leaves(tree, is_leaf=lambda leaf: is_box(leaf) or is_iterator(leaf))))


def path_of_plain(tree: Any) -> PathOf:
    """The function that names the leaves of a tree without NNX objects, as `by_path` or the core does."""
    name = path_of(tree)
    return (lambda keys: name(_without_values(keys))) if has_boxes(tree) else name


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

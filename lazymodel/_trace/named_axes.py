"""The names that arrays of a result carry for their dimensions, as Haliax' and Penzai's `NamedArray` have them.

Told by what they look like, since neither package is imported: a `NamedArray` is a pytree of one array, whose axes are
in the structure. What the names mean is known in `_sharding/axis_names`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def named_axes(result: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[int, tuple[str | None, ...]]:
    """The names for each dimension, None where it has none, by the `id` of the array."""
    names: dict[int, tuple[str | None, ...]] = {}
    for node in jax.tree.leaves(result, is_leaf=lambda node: _is_named(node) or bool(is_leaf and is_leaf(node))):
        if not _is_named(node):
            continue
        if hasattr(node, "data_array"):  # Penzai: dimensions without a name come first
            array, axes = node.data_array, [str(name) for name in node.named_axes]
        else:
            array, axes = node.array, [str(axis.name) for axis in node.axes]
        unnamed = (None,) * (len(getattr(array, "shape", axes)) - len(axes))
        names[id(array)] = (*unnamed, *axes)
    return names


def _is_named(node: Any) -> bool:
    kinds = (("data_array", "named_axes"), ("array", "axes"))
    return type(node).__name__ == "NamedArray" and any(all(hasattr(node, name) for name in kind) for kind in kinds)

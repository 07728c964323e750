"""Arrays of a tree by path, as `lazymodel` and checkpoints call them."""

from __future__ import annotations

from typing import Any

import jax


def named(tree: Any) -> dict[str, Any]:
    """Path → leaf, with parts of a path joined by `/`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

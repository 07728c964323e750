"""NNX modules against their eager twins."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from tests.core.trace._eager import same_bytes


def states(module: Any) -> dict[str, Any]:
    """The arrays of a module by key path, of variables of any kind."""
    plain = nnx.with_vars(module, hijax=False, ref=False, allow_duplicates=True)
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.split(plain)[1])
    return {jax.tree_util.keystr(keys): leaf for keys, leaf in flat}


def assert_same(ours: Any, eager: Any, *, graphs: bool = True) -> None:
    """Equal types, metadata, attributes and sharing in the graph definition, kinds of variables, and every bit."""
    if graphs:
        same = nnx.split(ours)[0] == nnx.split(eager)[0]  # what differs would be thousands of lines
        assert same
    for (path, x), (_, y) in zip(nnx.iter_graph(ours), nnx.iter_graph(eager), strict=True):
        assert type(x) is type(y), path
        if isinstance(y, nnx.Variable):
            assert (x.hijax, x.ref) == (y.hijax, y.ref), path
    found, expected = states(ours), states(eager)
    assert list(found) == list(expected)
    for path, y in expected.items():
        assert isinstance(found[path], np.ndarray) == isinstance(y, np.ndarray), path
        assert not isinstance(found[path], jax.core.Tracer) and same_bytes(found[path], y), path
        assert getattr(found[path], "weak_type", None) == getattr(y, "weak_type", None), path

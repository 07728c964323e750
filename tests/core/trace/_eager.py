"""Models against the functions that build them: every leaf is that of eager execution, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lazymodel as lm

KEY = jax.random.key(3)


def assert_same(ours: Any, eager: Any, *, placed: bool = False) -> None:
    """Equal in structure, and in type, shape, dtype, weak type and bits of every leaf.

    `placed` is whether rules may have put NumPy arrays on devices.
    """
    assert jax.tree.structure(ours) == jax.tree.structure(eager)
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(eager), strict=True):
        where = jax.tree_util.keystr(path)
        if isinstance(y, jax.Array) or (placed and isinstance(x, jax.Array)):
            assert isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer), where
            assert same_bytes(x, y), f"{where} of {x.dtype}{x.shape} differs"
            assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False), where
        elif isinstance(y, np.ndarray):
            assert type(x) is type(y) and same_bytes(x, y), where
        else:
            assert type(x) is type(y) and (x is y or x == y), where


def same_bytes(a: Any, b: Any) -> bool:
    """Whether two arrays, of keys maybe, are equal bit for bit."""
    a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
    return (a.shape, a.dtype) == (b.shape, b.dtype) and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_eager(init: Callable[[Any], Any], *meshes: Any, key: Any = KEY, seed: int = 0) -> Any:
    """Compares every leaf on one device and on each mesh, sharded at random, with the function's own result."""
    expected, model = init(key), lm.build_abstract(init, key)
    assert_same(model.materialize(progress=False), expected)
    for mesh in meshes:
        rng = random.Random(seed)
        sharded = model.shard(mesh, lambda variable, rng=rng, mesh=mesh: random_spec(rng, variable.shape, mesh))
        found = sharded.materialize(progress=False)
        assert_same(found, expected, placed=True)
        for path, array in jax.tree_util.tree_flatten_with_path(found)[0]:
            # Not so the second place of one array, nor an array of NumPy.
            if isinstance(array, jax.Array) and (name := _name(path)) in model:
                assert array.sharding.is_equivalent_to(sharded[name].sharding, array.ndim), name
    return expected


def _name(path: Any) -> str:
    return "/".join(str(getattr(key, "idx", getattr(key, "key", ""))) for key in path) or "value"


def random_spec(rng: random.Random, shape: tuple[int, ...], mesh: Any) -> jax.P:
    """A random spec that divides the shape."""
    axes: list[Any] = [None] * len(shape)
    for axis in rng.sample(mesh.axis_names, len(mesh.axis_names)):
        places = [i for i, size in enumerate(shape) if axes[i] is None and size % mesh.shape[axis] == 0]
        if places:
            axes[rng.choice(places)] = axis
    return jax.P(*axes)

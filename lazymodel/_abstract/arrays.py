"""The arrays of a model that is there: by path, and as lazy tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.paths import flatten_paths
from lazymodel._errors import LazyModelError
from lazymodel._programs.keys import is_key
from lazymodel._tensors.device import DeviceLeaf
from lazymodel._tensors.lazy import LazyTensor, lazy


def named_arrays(model: Any) -> dict[str, Any]:
    """Path → array, each array under its first path, as `build_abstract` names variables; lazy ones under all."""
    known = (adapter.arrays(model) for adapter in adapters())
    if (found := next((arrays for arrays in known if arrays is not None), None)) is None:
        tree = dict(model) if isinstance(model, Mapping) else model
        found = flatten_paths(tree, only=(jax.Array, np.ndarray, LazyTensor))
    seen: set[int] = set()
    distinct = {
        path: leaf
        for path, leaf in found.items()
        if isinstance(leaf, LazyTensor) or not (id(leaf) in seen or seen.add(id(leaf)))
    }
    if not distinct:
        of_path = (
            f"; open it first: lm.open_checkpoint({os.fspath(model)!r})" if isinstance(model, str | os.PathLike) else ""
        )
        raise LazyModelError(f"there are no arrays in what was given, {type(model)}{of_path}")
    for name, array in distinct.items():
        if isinstance(array, jax.Array) and array.is_deleted():
            raise LazyModelError(f"{name!r} was deleted or donated; save what the last step returned instead")
    return distinct


def lazy_array(name: str, array: Any) -> LazyTensor:
    """A lazy tensor over an array of NumPy or JAX; of keys, over their data."""
    if not isinstance(array, jax.Array):
        return lazy(array, name)
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    return LazyTensor(DeviceLeaf(name, array))

"""The arrays of a model that is there: by path, and as lazy tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.paths import flatten_paths, is_trained_pair
from lazymodel._errors import LazyModelError
from lazymodel._programs.keys import is_key
from lazymodel._tensors.device import DeviceLeaf
from lazymodel._tensors.lazy import LazyTensor, lazy

ARRAYS = (jax.Array, np.ndarray, LazyTensor)
NUMBERS = (bool, int, float, np.bool_, np.number)


def named_arrays(model: Any, *, kinds: tuple[type, ...] = ARRAYS) -> dict[str, Any]:
    """Path → array, as `build_abstract` names variables; an array that is in several places is under each path."""
    if not (found := named_leaves(model, kinds)):
        # Not the path itself: of a signed URL it has a credential.
        of_path = "; a path is opened first: lm.open_checkpoint(path)" if isinstance(model, str | os.PathLike) else ""
        raise LazyModelError(f"there are no arrays in what was given, {type(model)}{of_path}")
    refuse_deleted(found)
    return found


def named_leaves(model: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """As `named_arrays`, of leaves of any kinds; there may be none."""
    return {path: leaf for path, leaf in _named(model, kinds).items() if isinstance(leaf, kinds)}


def refuse_deleted(arrays: Mapping[str, Any]) -> None:
    """Raises LazyModelError for an array whose buffers are gone."""
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.is_deleted():
            raise LazyModelError(f"{name!r} was deleted or donated; use what the last step returned instead")


def _named(model: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    for adapter in adapters():
        if (found := adapter.arrays(model)) is not None:
            return found
        if is_trained_pair(model) and (found := adapter.arrays(model[0])) is not None:
            return found | flatten_paths((None, model[1]), only=kinds)
    return flatten_paths(dict(model) if isinstance(model, Mapping) else model, only=kinds)


def lazy_array(name: str, array: Any) -> LazyTensor:
    """A lazy tensor over an array of NumPy or JAX; of keys, over their data."""
    if not isinstance(array, jax.Array):
        return lazy(array, name)
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    return LazyTensor(DeviceLeaf(name, array))

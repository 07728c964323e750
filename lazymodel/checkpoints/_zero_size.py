"""Arrays without elements in Orbax checkpoints, which Orbax refuses to save.

The tree has None where such an array belongs, which Orbax restores as None, and the custom metadata of the tree says
what is there: path, keys joined by `/` → dtype and shape.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._lazy import LazyTensor, lazy

ZERO_SIZE = "lazymodel_zero_size"


def zero_size_metadata(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What the custom metadata of a tree says about those of its arrays that have no elements; nothing if none has."""
    found = {name: [np.dtype(array.dtype).name, list(array.shape)] for name, array in arrays.items() if not array.size}
    return {ZERO_SIZE: found} if found else {}


def zero_size_tensors(custom: Any, file: str | os.PathLike[str]) -> dict[str, LazyTensor]:
    """The tensors without elements that the custom metadata of a tree names.

    Raises:
        CheckpointError: What it says is no dtype with a shape that has no elements.
    """
    found: Any = cast("dict[str, Any]", custom).get(ZERO_SIZE, {}) if isinstance(custom, dict) else {}
    try:
        return {name: lazy(np.empty(_shape(shape), _dtype(dtype)), name) for name, (dtype, shape) in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{os.fspath(file)}: expected dtypes and shapes of arrays without elements in {ZERO_SIZE!r}, found "
            f"{error}; it is corrupt"
        ) from error


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.name != name or (dtype.kind not in "biufc" and dtype.type.__module__ != ml_dtypes.bfloat16.__module__):
        raise ValueError(f"dtype {name!r}")
    return dtype


def _shape(shape: list[int]) -> tuple[int, ...]:
    if not all(type(extent) is int and 0 <= extent < 2**63 for extent in shape) or math.prod(shape) != 0:
        raise ValueError(f"shape {shape!r}"[:80])
    return tuple(shape)

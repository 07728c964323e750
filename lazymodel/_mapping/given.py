"""What a user gives as a checkpoint, by name: an open checkpoint, a mapping, a pytree, a live or an abstract model."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from typing import Any, cast

import jax

from lazymodel._abstract.arrays import ARRAYS, lazy_array, named_leaves, refuse_deleted
from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import CheckpointError
from lazymodel._mapping.values import lazy_values
from lazymodel._tensors.lazy import LazyTensor


def flat_checkpoint(checkpoint: Any) -> Mapping[str, Any] | None:
    """What a model is given to load, by path; None for None. Arrays on devices become lazy tensors over them.

    Raises:
        CheckpointError: It holds no tensors, such as a path that was not opened.
    """
    if isinstance(checkpoint, str | os.PathLike):
        name = os.fspath(cast("str | os.PathLike[str]", checkpoint)).partition("?")[0]  # a signed URL has a credential
        raise CheckpointError(f"{name!r} is a path, not a checkpoint; open it first: lm.open_checkpoint({name!r})")
    if isinstance(checkpoint, ModelSpec):
        return model_values(checkpoint)
    if checkpoint is None or (isinstance(checkpoint, Mapping) and jax.tree_util.all_leaves([checkpoint])):
        return cast(Any, checkpoint)
    if isinstance(checkpoint, dict) and jax.tree_util.all_leaves(checkpoint.values()):
        found = cast("dict[str, Any]", checkpoint)  # in its own order
    else:
        found = named_leaves(checkpoint, (object,) if isinstance(checkpoint, dict) else ARRAYS)
    if not found and not isinstance(checkpoint, Mapping):
        got = reprlib.repr(checkpoint)
        raise CheckpointError(f"a checkpoint is a mapping of path to tensor, or a pytree; got {got}, without arrays")
    refuse_deleted(found)
    return {name: lazy_array(name, leaf) if isinstance(leaf, jax.Array) else leaf for name, leaf in found.items()}


def given_checkpoint(checkpoint: Any) -> Mapping[str, Any]:
    """As `flat_checkpoint`, of what has to be there."""
    if (found := flat_checkpoint(checkpoint)) is None:
        raise CheckpointError(
            "a checkpoint is a mapping of path to tensor, or a pytree; got None. Open one: lm.open_checkpoint(path)"
        )
    return found


def given_tensors(given: Any) -> dict[str, LazyTensor]:
    """As `given_checkpoint`, every array as a lazy tensor."""
    return {name: lazy_array(name, array) for name, array in given_checkpoint(given).items()}


def model_values(model: ModelSpec) -> dict[str, LazyTensor]:
    """What an abstract model holds by all of its paths: what it ties is under each of them."""
    values = lazy_values(model)
    return values | {other: values[path] for other, path in model.aliases.items()}

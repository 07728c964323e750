"""The future values of abstract variables, as lazy tensors, and Keras' operations that lay them out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from lazymodel import AbstractVariable, LazyTensor
from lazymodel._abstract.framework import Framework
from lazymodel._abstract.spec import ModelSpec
from lazymodel._mapping.given import lazy_values
from lazymodel._programs.programs import InitRecipe
from lazymodel_keras import _upstream
from lazymodel_keras._record.patches import SharedPatches, active


def held_lazily(value: Any) -> LazyTensor | None:
    """The value as a lazy tensor, also of a Keras variable that holds or will hold one; None for everything else.

    An abstract variable will hold the value assigned to it while it was recorded, or its initial value.
    """
    if isinstance(value, keras.Variable):
        variable, value = value, _upstream.value(value)
        recording = active()
        if value is None and recording is not None and (recorded := recording.of(variable)) is not None:
            path, dtype = variable.path, jax.numpy.dtype(_upstream.own_dtype(variable))
            if recorded.value is not None:
                return recording.as_assigned(path, recorded.value, dtype)
            source, dtype = recorded.initial.source(path, tuple(variable.shape), dtype)
            recipes, sources = ((source,), {}) if isinstance(source, InitRecipe) else ((), {path: source})
            described = AbstractVariable(path, tuple(variable.shape), dtype)
            return lazy_values(ModelSpec({path: described}, recipes, sources, Framework(dict)))[path]
    return value if isinstance(value, LazyTensor) else None


def _axes(axis: Any) -> Any:
    return axis if axis is None or isinstance(axis, int) else tuple(axis)


_VIEWS: dict[str, Callable[..., Any]] = {
    "reshape": lambda x, newshape: np.reshape(x, tuple(newshape)),
    "transpose": lambda x, axes=None: np.transpose(x, axes),
    "squeeze": lambda x, axis=None: np.squeeze(x, _axes(axis)),
    "expand_dims": lambda x, axis: np.expand_dims(x, _axes(axis)),
    "concatenate": lambda xs, axis=0: np.concatenate(xs, axis),
}


def _viewing(view: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of `keras.ops` that returns views of lazy tensors, and of variables that hold one, unread."""

    def operation(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(x, list | tuple)
        held = [held_lazily(each) for each in (x if several else [x])]
        if any(tensor is None for tensor in held):
            return original(x, *args, **kwargs)
        return view(held if several else held[0], *args, **kwargs)

    return operation


lazy_operations = SharedPatches()


@lazy_operations.register
def _install(undo: contextlib.ExitStack) -> None:
    for name, view in _VIEWS.items():
        for module in (keras.ops, _upstream.OPS):
            lazy_operations.replace(undo, module, name, _viewing(view))

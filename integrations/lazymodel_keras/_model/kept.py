"""Keras models whose compiled programs follow from their objects, so that nothing is traced to recognize them.

A model of which every part comes from Keras or KerasHub computes what its classes, their attributes and the versions
of both packages decide. Parts of other packages, and methods that were replaced, are not described: then the function
is traced.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from lazymodel._kept import Description, UndecidedError
from lazymodel_keras import _upstream

PACKAGES = ("keras", "keras-hub")
_TRUSTED = ("keras", "keras_hub")
_KNOWN = (*_TRUSTED, "jax", "jaxlib", "numpy", "builtins", "functools", "abc", "typing", "inspect")
_PLAIN = (type(None), str, bytes, bool, int, float, complex, np.dtype, np.ndarray, np.generic, jax.Array, enum.Enum)
# Attributes that change no program: bookkeeping by id, the compiled functions, and what runs before and after them.
_IGNORED = {"_tracker", "_nodes", "_functional_layer_ids", "preprocessor"}
_IGNORED |= {f"{name}_function" for name in ("train", "test", "predict", "generate")}
_SMALL = 1 << 32  # larger ones are ids, by which optimizers know variables
_OF_VARIABLES = ("shape", "dtype", "trainable", "_autocast", "aggregation", "regularizer", "constraint")
_OF_VARIABLES += ("overwrite_with_gradient",)


def _root(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


@functools.cache
def _is_trusted(cls: type) -> bool:
    """Returns True for a class of Keras or KerasHub with the methods that it was written with."""
    own = [each for each in cls.__mro__ if _root(each) in _TRUSTED]
    values = [getattr(value, "__func__", value) for each in own for value in vars(each).values()]
    functions = [value for value in values if inspect.isroutine(value)]
    return _root(cls) in _TRUSTED and all(_root(function) in _KNOWN for function in functions)


class _ObjectDescription(Description):
    """Describes a graph of objects, which are numbered as they are found."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._found: list[Any] = []  # kept alive, so that no id is used again

    def text(self, *roots: Any) -> str:
        """Everything that can be reached from some objects. Raises UndecidedError if a part is unknown."""
        parts = [repr(self.parameter(roots))]
        parts += (repr(self._content(value)) for value in self._found)  # grows meanwhile
        return "\n".join(parts)

    def parameter(self, value: Any) -> Any:
        is_set = isinstance(value, set | frozenset)
        if is_set and not all(isinstance(item, _PLAIN) for item in value):
            raise UndecidedError("it has a set of objects")
        if isinstance(value, int) and value > _SMALL:
            if value not in self._numbers:
                raise UndecidedError("it has a large number, maybe the id of an object")
            return f"#{self._numbers[value]}"
        plain = isinstance(value, (*_PLAIN, list, tuple, Mapping)) and not isinstance(value, keras.Variable)
        if is_set or plain or (_root(type(value)) in ("jax", "jaxlib") and not callable(value)):
            return super().parameter(value)
        number = self._numbers.setdefault(id(value), len(self._found))
        if number == len(self._found):
            self._found.append(value)
        return f"#{number}"

    def _content(self, value: Any) -> Any:
        """An object without those that it refers to."""
        cls = type(value)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc) or _root(cls) == "jaxlib":
            if _root(value) not in _KNOWN:
                raise UndecidedError(f"{value} is not of Keras")
            cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
            line = getattr(getattr(value, "__code__", None), "co_firstlineno", 0)
            defaults = getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)
            return (value.__module__, value.__qualname__, line, self.parameter(defaults), self.parameter(cells))
        name = f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, types.MethodType):
            return (name, self.parameter(value.__func__), self.parameter(value.__self__))
        if isinstance(value, functools.partial):
            return (name, *map(self.parameter, (value.func, value.args, value.keywords)))
        if isinstance(value, inspect.Signature):
            return str(value)
        if not _is_trusted(cls):
            raise UndecidedError(f"{name} is not of Keras, or was changed")
        # Neither runs in a program; unseeded initializers have random seeds.
        if isinstance(value, (keras.initializers.Initializer, *_upstream.preprocessing_classes())):
            return name
        if isinstance(value, keras.Variable):
            attributes = {key: getattr(value, key, None) for key in _OF_VARIABLES}
        else:
            ignored = _IGNORED | ({"_initial_seed"} if isinstance(value, keras.random.SeedGenerator) else set())
            attributes = {key: attribute for key, attribute in vars(value).items() if key not in ignored}
        return (name, *((key, self.parameter(attributes[key])) for key in sorted(attributes)))


def decides(model: Any) -> str:
    """A text that decides what the functions of a model compute. Raises UndecidedError if there is none."""
    settings = keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format()
    settings += keras.config.is_flash_attention_enabled(), keras.config.is_nnx_enabled()
    return _ObjectDescription().text(model, settings, keras.distribution.distribution())

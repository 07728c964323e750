"""Keras models whose compiled programs follow from their objects, so that nothing is traced to recognize them.

A model of which every part comes from Keras or KerasHub computes what its classes, their attributes and the versions
of both packages decide. Parts of other packages, and methods that were replaced, are not described: then the function
is traced.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from lazymodel._programs.kept import Description, UndecidedError
from lazymodel_keras import _upstream

PACKAGES = ("keras", "keras-hub")
_TRUSTED = ("keras", "keras_hub")
_WITH_CODE = (*_TRUSTED, "jax", "jaxlib", "numpy")
_STANDARD = os.path.dirname(functools.__file__)
_ATOMS = (type(None), str, bytes, bool, int, float, complex, np.dtype, np.ndarray, np.generic, jax.Array, enum.Enum)
_PLAIN = (*_ATOMS, list, tuple, Mapping, jax.sharding.Mesh)
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)
# Attributes that change no program: bookkeeping by id, the compiled functions, and what runs before and after them.
_FUNCTIONS = ("train_function", "test_function", "predict_function", "generate_function")
_IGNORED = {"_tracker", "_nodes", "_functional_layer_ids", "preprocessor", *_FUNCTIONS}
_UNNAMED = (keras.random.SeedGenerator, keras.KerasTensor, keras.optimizers.Optimizer)  # but by numbers, and unseeded
_OF_UNNAMED = {"name", "_initial_seed"}
_SMALL = 1 << 32  # larger ones are ids, by which optimizers know variables
_TRAINED = ("regularizer", "constraint", "overwrite_with_gradient")
_OF_VARIABLES = ("shape", "dtype", "trainable", "_autocast", "aggregation", *_TRAINED)


def _root(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _is_known(function: Any) -> bool:
    """Returns True if a function or type is one of Keras, JAX, NumPy or Python, and not a replacement with its name."""
    if (code := getattr(function, "__code__", None)) is None:
        return _root(function) in (*_WITH_CODE, "", "builtins")
    folder = os.path.dirname(code.co_filename)
    packages = [sys.modules[name] for name in _WITH_CODE if name in sys.modules]
    inside = [folder == root or folder.startswith(root + os.sep) for root in map(_folder, packages)]
    return any(inside) or folder == _STANDARD or code.co_filename == "<string>"  # made by dataclasses


def _is_written(cls: type) -> bool:
    """Returns True if a class has the methods that it was written with."""
    values = (getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(cls).values())
    return all(_is_known(value) for value in values if inspect.isroutine(value))


def _folder(package: types.ModuleType) -> str:
    return os.path.dirname(package.__file__ or "")


class _ObjectDescription(Description):
    """Describes a graph of objects, which are numbered as they are found."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._found: list[Any] = []  # kept alive, so that no id is used again
        self._is_written = functools.cache(_is_written)  # for one description, since methods may be replaced any time

    def graph(self, *roots: Any) -> str:
        """Everything that can be reached from some objects. Raises UndecidedError if a part is unknown."""
        parts = [self.parameter(roots)]
        parts += map(self._content, self._found)  # grows meanwhile
        return self.text(parts)

    def parameter(self, value: Any) -> Any:
        is_set = isinstance(value, set | frozenset)
        if is_set and not all(isinstance(item, _ATOMS) for item in value):
            raise UndecidedError("it has a set of objects")
        if isinstance(value, int) and value > _SMALL:
            if value not in self._numbers:
                raise UndecidedError("it has a large number, maybe the id of an object")
            return f"#{self._numbers[value]}"
        if is_set or isinstance(value, _PLAIN) or (_root(type(value)) in ("jax", "jaxlib") and not callable(value)):
            return super().parameter(value)
        number = self._numbers.setdefault(id(value), len(self._found))
        if number == len(self._found):
            self._found.append(value)
        return f"#{number}"

    def _content(self, value: Any) -> Any:
        """An object without those that it refers to."""
        cls = type(value)
        if isinstance(value, _BY_NAME) or _root(cls) == "jaxlib":  # functions of `jax.jit` are of jaxlib
            if not _is_known(value):
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
        if isinstance(value, inspect.Signature | slice | range | types.EllipsisType):
            return str(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, re.Pattern):
            return (value.pattern, value.flags)
        own = [each for each in cls.__mro__ if _root(each) in _TRUSTED]
        if _root(cls) not in _TRUSTED or not all(map(self._is_written, own)):
            raise UndecidedError(f"{name} is not of Keras, or was changed")
        # Neither runs in a program; unseeded initializers have random seeds.
        if isinstance(value, (keras.initializers.Initializer, *_upstream.preprocessing_classes())):
            return name
        if isinstance(value, keras.Variable):
            attributes = {key: getattr(value, key, None) for key in _OF_VARIABLES}
            if value.trainable:  # by which optimizers exclude it
                attributes["path"] = value.path
        else:
            ignored = _IGNORED | (_OF_UNNAMED if isinstance(value, _UNNAMED) else set())
            attributes = {key: attribute for key, attribute in vars(value).items() if key not in ignored}
        return (name, *((key, self.parameter(attributes[key])) for key in sorted(attributes)))


def decides(model: Any) -> str:
    """A text that decides what the functions of a model compute. Raises UndecidedError if there is none."""
    settings = keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format()
    settings += keras.config.is_flash_attention_enabled(), keras.config.is_nnx_enabled()
    return _ObjectDescription().graph(model, settings, keras.distribution.distribution())

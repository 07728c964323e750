"""The adapter that `lazymodel.build_abstract` finds for Keras."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import keras

from lazymodel import AbstractModel, LazyModelError
from lazymodel._abstract.paths import unique_paths
from lazymodel_keras import _factories, _upstream
from lazymodel_keras._build import abstract_build
from lazymodel_keras._config import plan_model
from lazymodel_keras._convert import convert_model
from lazymodel_keras._keywords import check_constructor, check_from_preset, ours
from lazymodel_keras._model.skeleton import model_variables, replace


class KerasAdapter:
    """Builds Keras classes, bound methods of them such as `from_preset`, and factories that return Keras models.

    Example:
        >>> abstract = lm.build_abstract(keras_hub.models.GemmaBackbone, **config)
        >>> abstract["token_embedding/embeddings"].shape
        (64, 16)
    """

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `build` is a Keras class, a method bound to one, or a factory that may return a Keras model.

        A factory says so by being defined in Keras or KerasHub or with its return annotation. Of one that does not, its
        result will say so; see `_factories`.
        """
        known = _is_keras(build)
        return _factories.may_be_keras(build) if known is None else known

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractModel[Any]:
        """Runs `build(*args, **kwargs)` with every variable left abstract."""
        name = getattr(build, "__qualname__", type(build).__name__)
        if isinstance(build, keras.layers.Layer):
            raise LazyModelError(
                f"build_abstract got {build.name!r}, a {name} whose variables are there already: pass the class and "
                "its arguments, or a function that builds it. lm.reshard moves a model that is there"
            )
        if _is_keras(build) is None:
            return _factories.build_abstract(build, args, kwargs, name)
        _check_keywords(build, args, kwargs)
        return abstract_build(functools.partial(build, *args, **kwargs), what=name, loads=False)

    from_config = staticmethod(plan_model)
    convert = staticmethod(convert_model)

    def arrays(self, model: Any) -> dict[str, Any] | None:
        """The values of the variables of a model or layer, its optimizer's and metrics' included."""
        if not isinstance(model, keras.layers.Layer):
            return None
        variables = list({id(variable): variable for variable in model_variables(model)}.values())
        values = [variable.value for variable in variables]
        return dict(zip(unique_paths([variable.path for variable in variables]), values, strict=True))

    def with_arrays(self, model: Any, arrays: Mapping[int, Any]) -> Any:
        """The model itself, changed in place."""
        for variable in model_variables(model):
            if (array := arrays.get(id(variable.value))) is not None:
                replace(variable, array)
        return model


def _check_keywords(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises LazyModelError where a class of KerasHub, or its `from_preset`, would drop a keyword argument."""
    while isinstance(build, functools.partial):
        build, args, kwargs = build.func, (*build.args, *args), {**build.keywords, **kwargs}
    check_constructor(build, kwargs)
    cls = getattr(build, "__self__", None)
    if inspect.isclass(cls) and build.__name__ == "from_preset" and _upstream.hub_models() is not None:
        preset = args[0] if args else kwargs.get("preset")
        given = [name for name in kwargs if name != "preset" or args]
        check_from_preset(cls, preset, given, ours(taker="lazymodel_keras.from_preset"))


def _is_keras(build: Any) -> bool | None:
    """Whether something builds Keras models; None for a function that does not say."""
    while isinstance(build, functools.partial):
        build = build.func
    owner = build if inspect.isclass(build) else getattr(build, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return inspect.isclass(owner) and issubclass(owner, keras.layers.Layer)
    if (getattr(build, "__module__", None) or "").split(".")[0] in ("keras", "keras_hub"):
        return True
    try:
        returned: Any = typing.get_type_hints(build).get("return")
    except (NameError, TypeError, AttributeError):
        returned = None
    if returned != Any and inspect.isclass(returned):  # since Python 3.11 Any is a class
        return issubclass(returned, keras.layers.Layer)
    return None


adapter = KerasAdapter()

"""The adapter that `lazymodel.build_abstract` finds for Keras."""

from __future__ import annotations

import functools
import inspect
import traceback
import typing
from typing import Any

import jax
import keras
import numpy as np

from lazymodel import AbstractModel
from lazymodel._abstract import unique_paths
from lazymodel_keras import _upstream, hub
from lazymodel_keras._keywords import check_constructor, check_from_preset
from lazymodel_keras._model import model_variables
from lazymodel_keras._planning import plan_model
from lazymodel_keras._recording import Recording


class KerasAdapter:
    """Builds Keras classes, bound methods of them such as `from_preset`, and factories that return Keras models."""

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `build` is a Keras class, a method bound to one, or a factory that is known to return a Keras model.

        A factory says so by being defined in Keras or KerasHub or with its return annotation. One that does not, and
        takes no array (an init function takes a PRNG key), is traced with nothing allocated to see what it returns.
        """
        if inspect.isclass(build):
            return issubclass(build, keras.layers.Layer)
        owner = getattr(build, "__self__", None)
        if owner is not None and not inspect.ismodule(owner):
            return inspect.isclass(owner) and issubclass(owner, keras.layers.Layer)
        function = build.func if isinstance(build, functools.partial) else build
        if inspect.isclass(function) or getattr(function, "__self__", None) is not None:
            return self.matches(function, args, kwargs)
        if (getattr(function, "__module__", None) or "").split(".")[0] in ("keras", "keras_hub"):
            return True
        try:
            returned: Any = typing.get_type_hints(function).get("return")
        except (NameError, TypeError, AttributeError):
            returned = None
        if returned != Any and inspect.isclass(returned):  # since Python 3.11 Any is a class
            return issubclass(returned, keras.layers.Layer)
        leaves = jax.tree.leaves((args, kwargs))
        if not callable(build) or any(
            isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for leaf in leaves
        ):
            return False
        return _returns_layers(functools.partial(build, *args, **kwargs))

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractModel:
        """Runs `build(*args, **kwargs)` with every variable left abstract."""
        _check_keywords(build, args, kwargs)
        name = getattr(build, "__qualname__", type(build).__name__)
        return hub.abstract_build(functools.partial(build, *args, **kwargs), what=name, loads=False)

    def from_config(self, source: str, **options: Any) -> AbstractModel:
        """The abstract model that a preset, a folder or a `config.json` describes; see `plan_model`."""
        return plan_model(source, **options)

    def arrays(self, model: Any) -> dict[str, Any] | None:
        """The values of the variables of a model or layer, its optimizer's and metrics' included."""
        if not isinstance(model, keras.layers.Layer):
            return None
        variables = list({id(variable): variable for variable in model_variables(model)}.values())
        values = [variable.value for variable in variables]
        return dict(zip(unique_paths([variable.path for variable in variables]), values, strict=True))


def _check_keywords(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises LazyModelError where a class of KerasHub, or its `from_preset`, would drop a keyword argument."""
    while isinstance(build, functools.partial):
        build, args, kwargs = build.func, (*build.args, *args), {**build.keywords, **kwargs}
    check_constructor(build, kwargs)
    cls = getattr(build, "__self__", None)
    if inspect.isclass(cls) and build.__name__ == "from_preset" and _upstream.hub_models() is not None:
        given = dict(kwargs)
        preset = args[0] if args else given.pop("preset", None)
        check_from_preset(cls, preset, given, dict.fromkeys(hub.OURS, "lazymodel_keras.from_preset"))


def _returns_layers(build: Any) -> bool:
    """Whether calling `build` makes Keras layers; finds out under a trace, so that a JAX function allocates nothing."""
    found = False

    def probe() -> None:
        nonlocal found
        result = build()
        found = any(isinstance(leaf, keras.layers.Layer) for leaf in jax.tree.leaves(result))

    recording = Recording()
    try:
        with _upstream.undone_draws(), recording:
            jax.make_jaxpr(probe)()
    except Exception as error:  # whatever it is, it will be raised again, and explained, by the path that is taken
        # Some layers look at values while they are made, before their first variable (Swin's drop rates); under the
        # trace they have none.
        needed_a_value = isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError)
        found = bool(recording.recorded) or (needed_a_value and _raised_in_keras(error))
    return found


def _raised_in_keras(error: Exception) -> bool:
    """Whether code of a Keras or KerasHub layer led to the error; operations on arrays alone do not count."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(frame.f_locals.get("self"), keras.layers.Layer):
            return True
    return False


adapter = KerasAdapter()

"""Factories of which only the result says whether they are Keras': run once, traced and recorded at the same time.

Until it makes its first layer or optimizer, a factory is a JAX function like any other, of which nothing is computed.
From there on it leaves the trace and runs as Keras' own factories do. What returns no layer, and has made nothing of
Keras', is traced to its end, for whoever builds what it returned.

Two kinds are begun anew, and so run twice: what computed with JAX before its first layer, since a trace has no values
to give to layers; and what makes something of Keras' and does not return it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

import lazymodel
from lazymodel import AbstractModel
from lazymodel._trace.leaving import WayOut
from lazymodel_keras import _upstream
from lazymodel_keras._build import abstract_build
from lazymodel_keras._record.patches import active, while_recording
from lazymodel_keras._record.recording import Recording
from lazymodel_keras._record.session import require_jax

_TRACED = "_traced_by_lazymodel"


class _Left(BaseException):  # no Exception: nothing on the way out of the trace may take it for a failure
    """Ends a trace; `finish` says what was to come of it."""

    def __init__(self, finish: Callable[[], AbstractModel[Any]]) -> None:
        self.finish = finish


class _Returned(BaseException):
    """Ends a recording in which nothing of Keras' was made."""

    def __init__(self, result: Any) -> None:
        self.result = result


def may_be_keras(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is a function that takes no array, in a place where Keras models can be built abstractly."""
    if not callable(build) or hasattr(build, "init") or hasattr(build, _TRACED):
        return False
    if not jax.tree_util.all_leaves([build]):  # a model, of a framework whose models are pytrees
        return False
    arrays = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    if any(isinstance(leaf, arrays) for leaf in jax.tree.leaves((args, kwargs))):
        return False
    return not keras.config.is_nnx_enabled() and active() is None


def build_abstract(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> AbstractModel[Any]:
    """What `build(*args, **kwargs)`, called `what` in messages, builds, whosever it is."""

    def as_keras() -> AbstractModel[Any]:
        return abstract_build(functools.partial(build, *args, **kwargs), what=what, loads=False)

    def as_other() -> AbstractModel[Any]:
        return lazymodel.build_abstract(_named(lambda *args, **kwargs: build(*args, **kwargs), build), *args, **kwargs)

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not on_jax:
            result = build(*args, **kwargs)
            if any(isinstance(leaf, keras.layers.Layer) for leaf in jax.tree.leaves(result)):
                require_jax()
            return result
        return _run(functools.partial(build, *args, **kwargs), what, as_keras, as_other)

    on_jax = keras.backend.backend() == "jax"
    try:
        return lazymodel.build_abstract(_named(traced, build), *args, **kwargs)
    except _Left as left:
        finish = left.finish
    return finish()  # out here, where no exception is being handled


def _named(function: Any, build: Any) -> Any:
    """A function in a factory's place, which no adapter takes for a Keras factory."""
    functools.update_wrapper(function, build)
    function.__name__ = getattr(build, "__name__", type(build).__name__)
    setattr(function, _TRACED, True)
    return function


def _run(
    build: Callable[[], Any],
    what: str,
    as_keras: Callable[[], AbstractModel[Any]],
    as_other: Callable[[], AbstractModel[Any]],
) -> Any:
    """Runs a factory under a trace, and returns what is no Keras model; for Keras models raises `_Left`."""
    undo = _upstream.remembered_draws()

    def again(finish: Callable[[], AbstractModel[Any]]) -> _Left:
        undo()
        return _Left(finish)

    def made() -> None:
        if not way_out.take():
            raise again(as_keras)

    def recorded() -> Any:
        if finished:  # another model like the first
            return build()
        recording: Recording = active()
        recording.on_made = made
        try:
            result = build()
        finally:
            recording.on_made = None
        if any(isinstance(leaf, keras.layers.Layer) for leaf in jax.tree.leaves(result)):
            return result
        raise again(as_other) if way_out.left or recording.recorded else _Returned(result)

    finished = False
    with WayOut() as way_out:
        try:
            model = abstract_build(recorded, what=what, loads=False)
            finished = True
        except _Returned as returned:
            return returned.result
        except Exception as error:
            if way_out.left:
                raise _Left(functools.partial(_raise, error)) from None  # nothing for the trace to explain
            raise
    raise _Left(lambda: model)


def _raise(error: Exception) -> AbstractModel[Any]:
    raise error


@while_recording(keras.Operation, "__new__")
@while_recording(_upstream.OptimizerBase, "__init__")
def _tell(recording: Recording, original: Any, *args: Any, **kwargs: Any) -> Any:
    if recording.on_made is not None:
        recording.on_made()
    return original(*args, **kwargs)

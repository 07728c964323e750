"""Functions that only their result identifies as Keras factories: they run once, traced and recorded together.

Until it creates its first layer or optimizer, such a function is traced like any other, and small arrays are also
computed. From then on nothing is traced, and it runs like Keras' own factories. If the result is not of Keras, another
adapter handles it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras

import lazymodel
from lazymodel import AbstractModel, LazyModelError
from lazymodel._errors import warn
from lazymodel._show.text import format_bytes
from lazymodel._trace.valued import ValuedTrace
from lazymodel_keras import _upstream
from lazymodel_keras._build import finished, recorded
from lazymodel_keras._record.patches import active, while_recording
from lazymodel_keras._record.recording import Recording, recording_problem

_TRACED = "_traced_by_lazymodel"
_ANNOTATE = "Annotate it as `def build(...) -> keras.Model:`, and it runs as a Keras factory from the start"
_LARGE_NBYTES = 1 << 20


def may_be_keras(build: Any) -> bool:
    """Returns True for a function, which may return a Keras model."""
    if not callable(build) or hasattr(build, "init") or hasattr(build, _TRACED):
        return False
    return jax.tree_util.all_leaves([build])  # others are models of a framework whose models are pytrees


def build_abstract(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> AbstractModel[Any]:
    """Returns the abstract model of `build(*args, **kwargs)`, for any framework; `what` names it in messages."""
    outcome: list[Callable[[], AbstractModel[Any]]] = []  # filled if it is Keras'
    traces: list[ValuedTrace] = []
    inputs = any(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs)))

    def traced(*args: Any, **kwargs: Any) -> Any:
        run = functools.partial(build, *args, **kwargs)
        if inputs or recording_problem():
            return _traced(run, what)
        traces[:] = [ValuedTrace()]
        result = _valued(run, what, traces[0], outcome)
        return () if outcome else result

    functools.update_wrapper(traced, build)
    traced.__name__ = getattr(build, "__name__", type(build).__name__)
    setattr(traced, _TRACED, True)  # `may_be_keras` is then False
    model = lazymodel.build_abstract(traced, *args, **kwargs)
    return outcome[0]() if outcome else model


def _traced(run: Callable[[], Any], what: str) -> Any:
    """Runs a function that cannot be recorded; raises if it returns a Keras object."""
    outer: Recording | None = active()

    def reject() -> None:
        raise LazyModelError(
            recording_problem()
            or f"{what} takes arrays of JAX and returns a Keras model, whose layers need their values. {_ANNOTATE}; or "
            f"pass a function without arguments: build_abstract(lambda: {what}(...))"
        )

    if outer is not None:
        outer.on_made = reject
    try:
        result = run()
    finally:
        if outer is not None:
            outer.on_made = None
    if _has_keras(result):
        reject()
    return result


def _valued(
    run: Callable[[], Any], what: str, trace: ValuedTrace, outcome: list[Callable[[], AbstractModel[Any]]]
) -> Any:
    """Runs a function that may be a Keras factory; if so, `outcome` gets a callable that builds the model or raises."""
    recording = Recording()

    def made() -> None:
        if not trace.leave():
            raise LazyModelError(
                f"{what} makes Keras layers, but before computes arrays with JAX that are large or have side effects, "
                f"while it may still be a JAX function. {_ANNOTATE}"
            )

    with trace:
        recording.on_made = made
        try:
            result = recorded(recording, run, what, loads=False)
        except Exception as error:
            if not trace.left:
                raise
            outcome.append(functools.partial(_raise, error))  # outside of the trace, which would explain it
            return None
        finally:
            recording.on_made = None
    if _has_keras(result):
        outcome.append(functools.partial(finished, recording, run, result, what))
    elif trace.left:
        nbytes = sum(leaf.nbytes for leaf in _leaves(result) if isinstance(leaf, jax.Array))
        if nbytes > _LARGE_NBYTES:
            warn(
                f"{what} makes Keras layers and returns none of them, so the {format_bytes(nbytes)} of arrays that it "
                "returns were computed whole. Return the layers, and all of them are built abstractly"
            )
    return result


def _has_keras(result: Any) -> bool:
    return any(isinstance(leaf, keras.layers.Layer | keras.Variable) for leaf in _leaves(result))


def _leaves(result: Any) -> list[Any]:
    # NNX modules are pytrees that may contain themselves.
    return jax.tree.leaves(result, is_leaf=lambda leaf: not isinstance(leaf, tuple | list | dict))


def _raise(error: Exception) -> AbstractModel[Any]:
    raise error


@while_recording(keras.Operation, "__new__")
@while_recording(_upstream.OptimizerBase, "__init__")
def _notify(recording: Recording, original: Any, *args: Any, **kwargs: Any) -> Any:
    recording.is_outermost()
    if recording.on_made is not None:
        recording.on_made()
    return original(*args, **kwargs)

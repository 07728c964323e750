"""Running Keras code abstractly: every variable that it creates is noted, and so is what would be loaded into it."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Generator
from typing import Any

import jax
import keras

from lazymodel import LazyModelError
from lazymodel_keras import _upstream
from lazymodel_keras._record.initializers import GivenValue
from lazymodel_keras._record.patches import activated, active, recording_patches, while_recording
from lazymodel_keras._record.recording import Recording


def recording_problem() -> str:
    """Why this thread's Keras code cannot be recorded; an empty string where it can be."""
    if keras.backend.backend() != "jax":
        return (
            f"lazymodel needs Keras on JAX; the backend is {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=jax before Keras is imported."
        )
    if keras.config.is_nnx_enabled():
        return "Keras' NNX mode allocates every variable when it is created; unset KERAS_NNX_ENABLED"
    if active() is not None:
        return "models are already being built abstractly here; leave the outer block first"
    return ""


@contextlib.contextmanager
def session(recording: Recording) -> Generator[Recording]:
    """Within the block, this thread's Keras code is recorded; one recording may have several such blocks.

    Raises LazyModelError where another recording is running in this thread, or Keras cannot be recorded.
    """
    if problem := recording_problem():
        raise LazyModelError(problem)
    try:
        with recording_patches.needed(), _upstream.no_pending_variables(), recording.scope, activated(recording):
            yield recording
            recording.initialize_waiting()
    finally:
        recording.end()
        # A global seed generator that was first needed in here belongs to the process, not to the model.
        state = _upstream.global_seed_state()
        if (value := recording.known_value(state)) is not None:
            recording.forget(state)
            _upstream.initialize(state, GivenValue(value))


def record(build: Callable[[], Any], first: Recording | None = None) -> tuple[Recording, Any]:
    """Runs a build function abstractly; if it ran before, with the files at URLs and the initial values of that run."""
    new = Recording() if first is None else Recording(remote=first.remote, initialized=first.initialized)
    with session(new) as recording:
        return recording, build()


@while_recording(_upstream.VariableBase, "__init__")
def _initialize(
    recording: Recording,
    original: Any,
    self: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *rest: Any,
    **options: Any,
) -> None:
    ours = recording.is_outermost()
    if ours and not callable(initializer) and not isinstance(initializer, str):
        # Keras refuses to create a variable from an array in a StatelessScope; an initializer that returns it is fine.
        array = initializer.value if isinstance(initializer, keras.Variable) else initializer
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            array = _upstream.as_tensor(self, array, dtype)
        initializer, shape = GivenValue(array), tuple(array.shape)
        if dtype is None:  # JAX has no 64 bits, unless it is asked for them
            dtype = jax.dtypes.canonicalize_dtype(keras.backend.standardize_dtype(array.dtype)).name
    original(self, initializer, shape, dtype, *rest, **options)
    if ours or _upstream.value(self) is None:  # made while Keras traces a layer: abstract like all
        recording.add(self, _upstream.initializer(self))


@while_recording(keras.StatelessScope, "__exit__")
def _exit(recording: Recording, original: Any, self: Any, *exception: Any) -> None:
    original(self, *exception)
    if _upstream.current_scope() is recording.scope and self.initialize_variables:
        recording.initialize_waiting()


@while_recording(_upstream.OptimizerBase, "build")
def _build(recording: Recording, original: Any, self: Any, variables: Any) -> None:
    original(self, variables)
    recording.optimizers.append((weakref.ref(self), [weakref.ref(variable) for variable in variables]))


@while_recording(_upstream.OPS, "copy")
def _copy(recording: Recording, original: Any, x: Any) -> Any:
    # ScheduleFreeAdamW assigns copies of the variables to its own. What is assigned may as well be the variable: it has
    # no value yet. Others may keep the copy, so they are given one.
    abstract = recording.of(x) is not None and _upstream.value(x) is None
    building = abstract and isinstance(sys._getframe(3).f_locals.get("self"), keras.Optimizer)
    return x if building else original(x)

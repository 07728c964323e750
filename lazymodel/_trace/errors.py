"""Saying what an init function did that cannot be traced: the line of the user's own code, and the mend."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

import jax

from lazymodel._errors import TraceError

_NEED_VALUES = (
    jax.errors.ConcretizationTypeError,  # TracerBoolConversionError among others
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)
_LIBRARIES = ("lazymodel", "jax", "jaxlib", "numpy", "flax", "lazymodel_flax", "lazymodel_keras")
_MENDS = (
    (jax.errors.TracerArrayConversionError, "use jax.numpy instead of NumPy on arrays that depend on the arguments"),
    (jax.errors.TracerBoolConversionError, "branch on static values, or use jax.lax.cond or jnp.where"),
    (jax.errors.TracerIntegerConversionError, "pass what is used as an index or a shape as a Python int"),
    (jax.errors.NonConcreteBooleanIndexError, "use jnp.where instead of a boolean mask that depends on the arguments"),
    (jax.errors.UnexpectedTracerError, "return arrays instead of storing them in globals or outer objects"),
)


def raise_explained(error: Exception) -> NoReturn:
    """Raises what to tell the user about an error raised while tracing; the error itself if it is not about that."""
    # JAX reports a traced shape as a plain TypeError.
    about_shapes = isinstance(error, TypeError) and ("concrete values" in str(error) or "Tracer" in str(error))
    if not about_shapes and not isinstance(error, _NEED_VALUES):
        raise error
    otherwise = "pass what decides shapes or branches as Python values, which stay static, not as arrays"
    mend = next((text for kind, text in _MENDS if isinstance(error, kind)), otherwise)
    reason = str(error).strip().splitlines()[0]
    raise TraceError(
        f"{_user_line(error.__traceback__)} needs the value of an array, and tracing has only its shape and dtype: "
        f"{mend}. JAX says: {type(error).__name__}: {reason}"
    ) from error


def refuse_negative(jaxpr: Any, paths: Sequence[str]) -> None:
    """Raises TraceError where a function makes an array with a negative dimension, which JAX lets pass in a trace."""
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            if min(getattr(var.aval, "shape", ()), default=0) >= 0:
                continue
            path = next((repr(path) for out, path in zip(jaxpr.outvars, paths, strict=True) if out is var), "an array")
            source = eqn.source_info.traceback
            line = _user_line(source and source.as_python_traceback())
            raise TraceError(f"{line} makes {path} of shape {var.aval.shape}: expected dimensions from 0 on")


def _user_line(trace: TracebackType | None) -> str:
    """The innermost line outside libraries, as `file.py:12 in init: 'source'`."""
    libraries = map(sys.modules.get, _LIBRARIES)
    files = [file for library in libraries if (file := getattr(library, "__file__", None))]
    roots = [os.path.dirname(os.path.abspath(file)) + os.sep for file in files]
    standard = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    for frame in reversed(traceback.extract_tb(trace)):
        path = os.path.abspath(frame.filename)
        standard_module = path.startswith(standard) and "site-packages" not in path
        if not path.startswith(tuple(roots)) and not standard_module and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()!r}"
    return "the init function"

"""From what will be called to programs: traced and lowered on a model of which there are shapes alone.

Responsible for lowering as the later call will, so that this call finds what was compiled: with the shardings, layouts
and weak types that arrays will have. Compiling is `_compile/beside`'s matter, or a plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from lazymodel._abstract.framework import LoweredFunction
from lazymodel._abstract.placement import stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._compile.compile import FORWARD, INIT, Compile
from lazymodel._errors import LazyModelError


def arriving(model: ModelSpec, shardings: Mapping[str, Sharding]) -> dict[str, jax.ShapeDtypeStruct]:
    """Path → what the finished array will be; `shardings` are those that it is materialized with."""
    structs: dict[str, jax.ShapeDtypeStruct] = {}
    for path, variable in model.items():
        struct = variable.struct
        if variable.sharding is None and not stays_on_host(variable):
            struct = struct.update(sharding=shardings[path])
        elif stays_on_host(variable):
            struct = struct.update(sharding=None)
        structs[path] = struct
    return structs


def lower(model: ModelSpec, compile: Compile, shardings: Mapping[str, Sharding]) -> Sequence[LoweredFunction]:
    """The programs that a call will run, traced and lowered; nothing is compiled.

    Raises:
        LazyModelError: What is compiled is nothing that is called with a finished model, or is not jitted.
        Exception: Whatever tracing the function raises.
    """
    structs = arriving(model, shardings)
    if compile.function is None and compile.what not in (INIT, FORWARD):
        sizes: Any = {"batch": compile.batch, "sequence": compile.sequence}
        return model.framework.lowered(compile.what, structs, inputs=compile.inputs, **sizes)
    if not compile.is_step:
        raise LazyModelError(
            f"Compile({compile.what!r}{', function' if compile.function else ''}) is for a plan, which makes a program "
            "of its own of it. To compile beside the stream, pass the jitted function that will be called with the "
            "model, Compile(step, batch), or a Keras model's own 'predict', 'train' or 'generate'"
        )
    function: Any = compile.function
    if not callable(getattr(function, "lower", None)):
        raise LazyModelError(
            f"{compile.name} is not jitted, so nothing that is compiled for it would be found when it is called: pass "
            "the very function that will be called, of jax.jit, nnx.jit or equinox.filter_jit"
        )
    with model.framework.outlined(structs) as outlined:
        parts = (outlined,) if compile.split is None else compile.split(outlined)
        lowered = function.lower(*parts, *compile.inputs, **compile.keywords)
    return [LoweredFunction(compile.name, lowered)]

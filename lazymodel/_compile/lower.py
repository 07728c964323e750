"""Traces and lowers functions that will be called with a model, while the model consists of shapes only.

Responsible for lowering like the later call, so that this call finds the compiled program: with the future shardings,
layouts and weak types of arrays, in the thread and the context (mesh, default precision) of the caller.
`_compile/background`, or a plan, compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from lazymodel._abstract.framework import LoweredFunction
from lazymodel._abstract.placement import stays_on_host
from lazymodel._abstract.spec import AnyModel, ModelSpec
from lazymodel._compile.compile import FORWARD, INIT, Compile
from lazymodel._errors import LazyModelError
from lazymodel._show.timeline import Timeline


def checked(compile: Compile | Sequence[Compile] | None) -> tuple[Compile, ...]:
    """Checks the functions to compile in the background; raises LazyModelError for others, and those for plans only."""
    given: Any = () if compile is None else compile
    found: tuple[Any, ...] = (*given,) if isinstance(given, list | tuple) else (given,)
    for each in found:
        if not isinstance(each, Compile):
            raise LazyModelError(
                f"compile is a lazymodel.Compile, such as Compile(step, batch), or a list; got {each!r}"
            )
        if not each.is_step and (each.function is not None or each.what in (INIT, FORWARD)):
            raise LazyModelError(
                f"Compile({each.what!r}{', function' if each.function else ''}) is for a plan, which builds its own "
                "program from it. To compile alongside the stream, pass the jitted function that will be called with "
                "the model, Compile(step, batch), or a Keras model's own 'predict', 'train' or 'generate'"
            )
        if each.is_step and not callable(getattr(each.function, "lower", None)):
            raise LazyModelError(
                f"{each.name} is not jitted, so nothing that is compiled for it would be found when it is called: pass "
                "the same function that will be called, as jax.jit, nnx.jit or equinox.filter_jit returned it"
            )
    return found


def prepared(
    model: AnyModel, compile: Compile | Sequence[Compile] | None, timeline: Timeline
) -> tuple[AnyModel, tuple[Compile, ...]]:
    """Returns the functions to compile in the background, `checked`, and the model with the variables that its own
    functions would create on their first call, such as an optimizer's state.
    """
    compiles = checked(compile)
    for each in compiles:
        if not each.is_step:
            with timeline.span("lower", "preparing"):
                model = model.framework.prepared(model, each.what, **_call_options(each))
    return model, compiles


def arriving(model: ModelSpec, shardings: Mapping[str, Sharding]) -> dict[str, jax.ShapeDtypeStruct]:
    """Path → struct of the finished array; `shardings` are those that it is materialized with."""
    structs: dict[str, jax.ShapeDtypeStruct] = {}
    for path, variable in model.items():
        struct = variable.struct
        if stays_on_host(variable):
            struct = struct.update(sharding=None)
        elif variable.sharding is None and variable.layout is None:
            struct = struct.update(sharding=shardings[path])
        structs[path] = struct
    return structs


def lower(model: ModelSpec, compile: Compile, shardings: Mapping[str, Sharding]) -> Sequence[LoweredFunction]:
    """The programs that a call will run, traced and lowered; nothing is compiled.

    A function that is not jitted is jitted here, for a plan.

    Raises:
        LazyModelError: The model has no such function of its own, or cannot be outlined.
        Exception: Any exception from tracing the function, with a note on its origin.
    """
    structs = arriving(model, shardings)
    if not compile.is_step:
        return model.framework.lowered(compile.what, structs, **_call_options(compile))
    function: Any = compile.function
    if not callable(getattr(function, "lower", None)):
        function = jax.jit(function)
    inputs, keywords = (_outlined(given, model) for given in (compile.inputs, dict(compile.keywords)))
    with model.framework.outlined(structs) as whole:
        try:
            parts = (whole,) if compile.split is None else _parts(compile.split, whole)
            lowered = function.lower(*parts, *inputs, **keywords)
        except LazyModelError:
            raise
        except Exception as error:
            error.add_note(
                f"lazymodel: {compile.name} was called with {model.name} as it will be, to compile it beforehand "
                "(compile=); no weights were read. Its first call would fail like this."
            )
            raise
    # Results of Flax and Equinox are wrappers of JAX' own.
    return [LoweredFunction(compile.name, getattr(lowered, "lowered", lowered))]


def _call_options(compile: Compile) -> dict[str, Any]:
    """Keywords that describe the call of a model's own function."""
    return {"inputs": compile.inputs, "batch": compile.batch, "sequence": compile.sequence}


def _outlined(tree: Any, model: ModelSpec) -> Any:
    """Inputs with outlines in place of structs; unchanged if they have none."""

    def outline(leaf: Any) -> Any:
        return model.framework.outline(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    has_structs = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
    return jax.tree.map(outline, tree) if has_structs else tree


def _parts(split: Callable[[Any], Any], model: Any) -> tuple[Any, ...]:
    parts = split(model)
    if not isinstance(parts, list | tuple):
        raise LazyModelError(
            f"of() takes a function that returns a tuple of the step's arguments from the model; it returned "
            f"{type(parts).__name__}. For one part return (part,)"
        )
    return (*parts,)

"""From a JAX init function to an `AbstractModel`: trace once, slice per variable.

The function is traced to a jaxpr with its array arguments as run-time inputs, `_trace/graph` cuts that into init
recipes, and compiling and running these is in `_programs/programs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lazymodel._abstract.framework import Framework
from lazymodel._abstract.host_arrays import is_host_variable
from lazymodel._abstract.paths import path_text, unique_paths
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._errors import TraceError
from lazymodel._programs.jaxprs import is_weak
from lazymodel._programs.keys import is_key
from lazymodel._trace.errors import explain
from lazymodel._trace.escaped import is_iterator, refuse_empty, refuse_escaped
from lazymodel._trace.graph import Graph
from lazymodel._trace.inlined import keep_inlined
from lazymodel._trace.program import Program, Value
from lazymodel._trace.small import on_host


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str | None = None,
    path_of: Callable[[Sequence[Any]], str] | None = None,
) -> ModelSpec:
    """What `build_abstract(function, *args, **kwargs)` does for a function that JAX can trace.

    A `jax.ShapeDtypeStruct` among the arguments stands for an array whose values no variable needs. An array that
    occurs twice in the result is one variable under its first path, and the same array in both places once rebuilt.
    Arrays are weakly typed where the function's own are; outputs that are no arrays are handed back as they are.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        name: What to call the model; the function's name by default.
        path_of: Names a leaf of the result from its `jax.tree_util` key path; by default the keys joined by `/`.
    """
    called: str = name or getattr(function, "__name__", type(function).__name__)
    outputs = _trace(function, args, kwargs, path_of or path_text, called)
    with on_host():
        graph = Graph(outputs.jaxpr, outputs.inputs)
    variables: dict[str, AbstractVariable] = {}
    sources: dict[str, np.ndarray[Any, Any]] = {}
    computed: dict[str, Value] = {}
    results = iter(graph.results)
    for path in outputs.paths:
        if (array := outputs.on_host.get(path)) is not None:
            sources[path] = array
            variables[path] = AbstractVariable(
                path, array.shape, array.dtype, origin="constant", trainable=False, on_host=True
            )
            continue
        value = next(results)
        aval = value.aval
        if value.step is None and value.data is None:
            raise TraceError(
                f"{path!r} is an argument that was given as a ShapeDtypeStruct, so it has no value; pass an array"
            )
        # What was computed is initialized, even if it is known already: a checkpoint that lacks it lacks something.
        if value.data is not None and not value.evaluated and not is_key(aval.dtype):
            sources[path] = value.data
        else:
            computed[path] = value
        variables[path] = AbstractVariable(
            path, tuple(aval.shape), aval.dtype, origin="constant", weak_type=is_weak(aval)
        )
    recipes = graph.recipes(list(computed.items()))
    for recipe in recipes:
        for path in recipe.paths:
            variables[path] = dataclasses.replace(variables[path], origin=recipe.origin)

    def structure(mapping: Mapping[str, Any]) -> Any:
        leaves = [mapping[leaf.path] if isinstance(leaf, _Slot) else leaf for leaf in outputs.leaves]
        return jax.tree.unflatten(outputs.treedef, leaves)

    return ModelSpec(
        variables=variables,
        recipes=recipes,
        sources=sources,
        framework=Framework(structure),
        name=called,
    )


def known_value(model: ModelSpec, path: str) -> np.ndarray[Any, Any] | None:
    """The value of a traced variable, if it is known without running a program; key data for PRNG keys."""
    if path in model.sources:
        return model.sources[path]
    for recipe in model.recipes:
        if recipe.paths == (path,) and isinstance(recipe.function, Program) and not recipe.function.plan:
            return recipe.inputs[0]
    return None


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where in the result an array goes."""

    path: str


@dataclasses.dataclass
class _Outputs:
    """A traced function."""

    inputs: list[Any]  # the array arguments
    jaxpr: Any = None  # of these, in order, to the distinct `jax.Array`s of the result
    paths: list[str] = dataclasses.field(default_factory=list)  # for each distinct array
    on_host: dict[str, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict)  # those of them that are NumPy's
    leaves: list[Any] = dataclasses.field(
        default_factory=list
    )  # the result's: a slot for each array, all else as it is
    treedef: Any = None  # the result's structure


def _trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    path_of: Callable[[Sequence[Any]], str],
    name: str,
) -> _Outputs:
    arguments, in_tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    # NumPy arrays are no inputs: eager execution computes with them in NumPy, and in 64 bits, until JAX is given them.
    where = [index for index, leaf in enumerate(arguments) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))]
    outputs = _Outputs([arguments[index] for index in where])

    def flat(*arrays: Any) -> list[Any]:
        filled = list(arguments)
        for index, array in zip(where, arrays, strict=True):
            filled[index] = array
        positional, named = jax.tree.unflatten(in_tree, filled)
        result = function(*positional, **named)
        found, outputs.treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_iterator)
        names = unique_paths([path_of(path) for path, _ in found])
        slots: dict[int, _Slot] = {}
        results: list[Any] = []
        others: list[tuple[str, Any]] = []
        for path, (_, leaf) in zip(names, found, strict=True):
            host = is_host_variable(leaf)
            if not host and not isinstance(leaf, jax.Array):
                others.append((path, leaf))
            elif id(leaf) not in slots:  # `found` keeps every leaf alive, so ids are not used twice
                slots[id(leaf)] = _Slot(path)
                outputs.paths.append(path)
                if host:
                    outputs.on_host[path] = leaf
                else:
                    results.append(leaf)
            outputs.leaves.append(slots.get(id(leaf), leaf))
        refuse_escaped(others, outputs.treedef)
        if not slots:
            refuse_empty(result, others, name)
        return results

    try:
        with keep_inlined():
            outputs.jaxpr = jax.make_jaxpr(flat)(*outputs.inputs)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error
    return outputs

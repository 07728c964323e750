"""Turns a JAX init function into an abstract model: traces it to a jaxpr, once, with its arrays as run-time inputs.

`_trace/graph` divides the jaxpr into init recipes, and `_programs/programs` compiles and runs these.

A function that needs the values of arrays is traced again with `ValuedTrace`: what it computes from constants is both
traced and computed, so it can use them where only concrete values work.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from lazymodel._abstract.framework import Derived, Framework, Leaf, ModelSpec
from lazymodel._abstract.variable import NUMBERS, AbstractVariable, PathOf, automatic, is_host_variable, unique_paths
from lazymodel._abstract.variable import path_of as path_of_tree
from lazymodel._errors import TraceError
from lazymodel._programs.jax_private import ValuedTrace, keep_inlined
from lazymodel._programs.jaxprs import is_key, is_weak, without_mesh
from lazymodel._trace.errors import explained, is_iterator, on_host, refuse_empty, refuse_escaped, refuse_stale
from lazymodel._trace.graph import Graph, Program, Value

_LOG = logging.getLogger(__name__)


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str | None = None,
    path_of: PathOf | None = None,
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    once: bool = False,
) -> ModelSpec:
    """Implements `build_abstract(function, *args, **kwargs)` for a function that JAX can trace.

    A `jax.ShapeDtypeStruct` among the arguments stands for an array whose values no variable needs. An array that
    occurs twice in the result is two variables that begin equal, since training moves leaves of a pytree apart. Arrays
    are weakly typed if the function's own are; outputs other than arrays are returned unchanged. `name` is the name of
    the model, by default the function's name; `path_of` names a leaf of the result from its `jax.tree_util` key path,
    by default by the keys joined by `/`. With `derive`, the argument is a mapping of structs, and variables that need
    their values are `derived` by this function. A function that cannot be traced is called again in other ways, after
    the draws of Python's and NumPy's global generators are undone; with `once`, it is not: it has other state.

    Raises:
        TraceError: The function needs values that tracing does not have, or its result hides arrays.
    """
    called: str = name or getattr(function, "__name__", type(function).__name__)
    undo = _remembered_draws()
    try:
        with without_mesh():
            given: Any = jax.tree.map(_on_auto_axes, (args, kwargs))
            found, jaxpr, inputs = trace(function, given[0], given[1], path_of, called, once=once)
    except Exception:
        if once or jax.sharding.get_abstract_mesh().empty:
            raise
        undo()
        found, jaxpr, inputs = trace(function, args, kwargs, path_of, called)  # it may name axes of the mesh
    with without_mesh(), on_host():
        graph = Graph(jaxpr, inputs)
    variables: dict[str, AbstractVariable] = {}
    sources: dict[str, np.ndarray[Any, Any]] = {}
    computed: dict[str, Value] = {}
    derived: list[str] = []
    results = iter(graph.results)
    for path, array in found.arrays.items():
        axes = found.axes.get(path)
        if array is not None:
            sources[path] = array
            variables[path] = AbstractVariable(
                path, array.shape, array.dtype, origin="constant", trainable=False, logical_axes=axes, on_host=True
            )
            continue
        value = next(results)
        aval, shape, weak = value.aval, tuple(value.aval.shape), is_weak(value.aval)
        variables[path] = AbstractVariable(
            path, shape, aval.dtype, origin="constant", logical_axes=axes, weak_type=weak
        )
        if derive is not None and value.needs_struct():
            derived.append(path)
        # Computed values are initialized, even if known already: a checkpoint should contain them.
        elif value.data is not None and not value.evaluated and not is_key(aval.dtype):
            sources[path] = value.data
        else:
            computed[path] = value
    recipes = graph.recipes(list(computed.items()))
    origins = {path: recipe.origin for recipe in recipes for path in recipe.paths}
    origins |= dict.fromkeys(derived, "of parameters")
    variables |= {path: dataclasses.replace(variables[path], origin=origin) for path, origin in origins.items()}
    later = Derived(tuple(derived), tuple(args[0]), derive) if derive is not None and derived else None
    framework = Framework(found.unflatten)
    return ModelSpec(
        variables, recipes, sources, framework, name=called, equal=found.equal, derived=later, numbers=found.numbers
    )


def _remembered_draws() -> Callable[[], None]:
    """Returns a function that undoes what is drawn from now on from the global generators of Python and NumPy."""
    python, numpy = random.getstate(), np.random.get_state()

    def undo() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return undo


def _on_auto_axes(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return automatic(leaf) if is_array else leaf


def known_value(model: ModelSpec, path: str) -> np.ndarray[Any, Any] | None:
    """The value of a traced variable, if it is known without running a program; key data for PRNG keys."""
    if path in model.sources:
        return model.sources[path]
    for recipe in model.recipes:
        if recipe.paths == (path,) and isinstance(recipe.function, Program) and not recipe.function.plan:
            return recipe.inputs[0]
    return None


@dataclasses.dataclass(frozen=True)
class Flat:
    """The flattened result of a function."""

    leaves: list[Any]  # `Leaf` for arrays and numbers, everything else unchanged
    arrays: dict[str, Any]  # path → array; None for JAX arrays after tracing
    others: list[tuple[str, Any]]  # path and leaf of everything that is not an array
    treedef: Any
    axes: dict[str, tuple[str | None, ...]]  # path → the names of dimensions, for arrays that have some
    numbers: dict[str, Any]  # path → number, of Python or NumPy
    equal: dict[str, str]  # other paths of an array that occurs twice → its first path

    def unflatten(self, mapping: Mapping[str, Any]) -> Any:
        mapping = {**self.numbers, **mapping}
        leaves = [mapping[leaf.path] if isinstance(leaf, Leaf) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def traced(self) -> Flat:
        """The same without tracers, which are invalid after tracing."""
        arrays = {path: None if isinstance(array, jax.Array) else array for path, array in self.arrays.items()}
        return dataclasses.replace(self, arrays=arrays)


def _named_axes(result: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[int, tuple[str | None, ...]]:
    """`id` of the array → the name of each dimension, or None for a dimension without a name.

    A `NamedArray` of Haliax or Penzai is a pytree of one array, with the axes in the structure. It is recognized by its
    attributes, since neither package is imported; `_sharding/roles` knows the meaning of the names.
    """
    names: dict[int, tuple[str | None, ...]] = {}
    for node in jax.tree.leaves(result, is_leaf=lambda node: _is_named(node) or bool(is_leaf and is_leaf(node))):
        if not _is_named(node):
            continue
        if hasattr(node, "data_array"):  # Penzai: dimensions without a name come first
            array, axes = node.data_array, [str(name) for name in node.named_axes]
        else:
            array, axes = node.array, [str(axis.name) for axis in node.axes]
        unnamed = (None,) * (len(getattr(array, "shape", axes)) - len(axes))
        names[id(array)] = (*unnamed, *axes)
    return names


def _is_named(node: Any) -> bool:
    kinds = (("data_array", "named_axes"), ("array", "axes"))
    return type(node).__name__ == "NamedArray" and any(all(hasattr(node, name) for name in kind) for kind in kinds)


def flattened(result: Any, path_of: PathOf, is_leaf: Callable[[Any], bool] | None = None) -> Flat:
    """A result as its leaves, named by their `jax.tree_util` key paths."""
    found, treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_leaf)
    flat = Flat([], {}, [], treedef, {}, {}, {})
    names = _named_axes(result, is_leaf)
    first: dict[int, str] = {}
    for path, (_, leaf) in zip(unique_paths([path_of(keys) for keys, _ in found]), found, strict=True):
        if not isinstance(leaf, jax.Array) and not is_host_variable(leaf):
            flat.others.append((path, leaf))
            if is_number := isinstance(leaf, NUMBERS):
                flat.numbers[path] = leaf
            flat.leaves.append(Leaf(path) if is_number else leaf)
            continue
        flat.arrays[path] = leaf
        flat.leaves.append(Leaf(path))
        if any(axes := names.get(id(leaf), ())):
            flat.axes[path] = axes
        # `found` keeps every leaf alive, so ids are not reused.
        if (equal := first.setdefault(id(leaf), path)) != path:
            flat.equal[path] = equal
    return flat


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    path_of: PathOf | None,
    name: str,
    *,
    once: bool = False,
) -> tuple[Flat, Any, list[Any]]:
    """The result, its jaxpr from array arguments to the `jax.Array`s of the result, and these arguments."""
    arguments, in_tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    # NumPy arrays are not inputs: eager execution computes with them in NumPy, in 64 bits, until JAX gets them.
    where = [index for index, leaf in enumerate(arguments) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))]
    inputs, outputs = [arguments[index] for index in where], list[Flat]()

    def flat(*arrays: Any) -> list[Any]:
        filled = list(arguments)
        for index, array in zip(where, arrays, strict=True):
            filled[index] = array
        positional, named = jax.tree.unflatten(in_tree, filled)
        result = function(*positional, **named)
        found = flattened(result, path_of or path_of_tree(result), is_iterator)
        refuse_escaped(found.others, found.treedef)
        if not found.arrays:
            refuse_empty(result, found.others, name)
        outputs.append(found.traced())
        return [array for array in found.arrays.values() if isinstance(array, jax.Array)]

    undo = _remembered_draws()
    try:
        jaxpr = _jaxpr(flat, inputs)
    except Exception as error:
        if once or explained(error) is None:
            raise
        undo()
        jaxpr = _jaxpr_with_values(flat, inputs, name)
    refuse_stale(jaxpr, function)
    traced = (path for path, array in outputs[-1].arrays.items() if array is None)
    for path, aval in zip(traced, jaxpr.out_avals, strict=True):
        if min(aval.shape, default=0) < 0:  # which JAX accepts in a trace
            raise TraceError(f"{path!r} has the shape {aval.shape}: expected dimensions from 0 on")
    return outputs[-1], jaxpr, inputs


def _jaxpr(flat: Callable[..., list[Any]], inputs: Sequence[Any]) -> Any:
    with keep_inlined():
        return jax.make_jaxpr(flat)(*inputs)


def _jaxpr_with_values(flat: Callable[..., list[Any]], inputs: Sequence[Any], name: str) -> Any:
    """The jaxpr of a function that needs the values of arrays, of which constants get some while it is traced.

    What it computes from constants is computed at once, as in eager execution, up to a number of bytes.
    """
    traces: list[ValuedTrace] = []  # kept until the outer trace ends

    def valued(*arrays: Any) -> list[Any]:
        traces.append(ValuedTrace())
        with traces[-1]:
            return flat(*arrays)

    try:
        jaxpr = _jaxpr(valued, inputs)
    except Exception as error:
        raise explained(error, traces[-1].left_nbytes) or error  # noqa: B904 (it has its cause)
    _LOG.info("%s needs values while it is traced: %d bytes are computed from constants", name, traces[-1].nbytes)
    return jaxpr

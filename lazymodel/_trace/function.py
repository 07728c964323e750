"""Turns a JAX init function into an abstract model: traces it to a jaxpr, once, with its arrays as run-time inputs.

`_trace/graph` divides the jaxpr into init recipes, and `_programs/programs` compiles and runs these.

A trace in which small arrays have values, for a function that only its result identifies as JAX' own or another's.

Values that the function computes from constants are both traced and computed, so it can use them where only concrete
values work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self, cast

import jax
import numpy as np
from jax._src import core  # there is no public API for replacing a trace
from jax.core import Tracer

from lazymodel._abstract.framework import Derived, Framework, ModelSpec
from lazymodel._abstract.variable import AbstractVariable, PathOf, automatic, is_host_variable, unique_paths
from lazymodel._abstract.variable import path_of as path_of_tree
from lazymodel._errors import TraceError
from lazymodel._programs.jaxprs import equations, inner_jaxprs, is_key, is_weak, without_mesh
from lazymodel._trace.errors import is_iterator, on_host, raise_explained, refuse_empty, refuse_escaped
from lazymodel._trace.graph import Graph, Program, Value, keep_inlined


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str | None = None,
    path_of: PathOf | None = None,
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> ModelSpec:
    """Implements `build_abstract(function, *args, **kwargs)` for a function that JAX can trace.

    A `jax.ShapeDtypeStruct` among the arguments stands for an array whose values no variable needs. An array that
    occurs twice in the result is one variable under its first path, and the same array in both places once rebuilt.
    Arrays are weakly typed if the function's own are; outputs other than arrays are returned unchanged.
    `name` is the name of the model, by default the function's name; `path_of` names a leaf of the result from its
    `jax.tree_util` key path, by default by the keys joined by `/`. With `derive`, the argument is a mapping of structs,
    and variables that need their values are `derived` by this function.

    Raises:
        TraceError: The function needs values that tracing does not have, or its result hides arrays.
    """
    called: str = name or getattr(function, "__name__", type(function).__name__)
    try:
        with without_mesh():
            given: Any = jax.tree.map(_on_auto_axes, (args, kwargs))
            found, jaxpr, inputs = trace(function, given[0], given[1], path_of, called)
    except Exception:
        if jax.sharding.get_abstract_mesh().empty:
            raise
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
    return ModelSpec(variables, recipes, sources, framework, name=called, aliases=found.aliases, derived=later)


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
class _Slot:
    """The place of an array in the result."""

    path: str


@dataclasses.dataclass(frozen=True)
class Flat:
    """The flattened result of a function: an array that occurs twice is listed once, under its first path."""

    leaves: list[Any]  # slots for arrays, everything else unchanged
    arrays: dict[str, Any]  # path → array; None for JAX arrays after tracing
    others: list[tuple[str, Any]]  # path and leaf of everything that is not an array
    treedef: Any
    axes: dict[str, tuple[str | None, ...]]  # path → the names of dimensions, for arrays that have some
    aliases: dict[str, str]  # other paths of an array that occurs twice → its first path

    def unflatten(self, mapping: Mapping[str, Any]) -> Any:
        leaves = [mapping[leaf.path] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
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
    flat = Flat([], {}, [], treedef, {}, {})
    names = _named_axes(result, is_leaf)
    slots: dict[int, _Slot] = {}
    for path, (_, leaf) in zip(unique_paths([path_of(keys) for keys, _ in found]), found, strict=True):
        if not isinstance(leaf, jax.Array) and not is_host_variable(leaf):
            flat.others.append((path, leaf))
        elif id(leaf) not in slots:  # `found` keeps every leaf alive, so ids are not reused
            slots[id(leaf)] = _Slot(path)
            flat.arrays[path] = leaf
            if any(axes := names.get(id(leaf), ())):
                flat.axes[path] = axes
        else:
            flat.aliases[path] = slots[id(leaf)].path
        flat.leaves.append(slots.get(id(leaf), leaf))
    return flat


def trace(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], path_of: PathOf | None, name: str
) -> tuple[Flat, Any, list[Any]]:
    """The result, its jaxpr from array arguments to the distinct `jax.Array`s of the result, and these arguments."""
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

    try:
        with keep_inlined():
            jaxpr = jax.make_jaxpr(flat)(*inputs)
    except Exception as error:
        raise_explained(error)
    traced = (path for path, array in outputs[-1].arrays.items() if array is None)
    for path, aval in zip(traced, jaxpr.out_avals, strict=True):
        if min(aval.shape, default=0) < 0:  # which JAX accepts in a trace
            raise TraceError(f"{path!r} has the shape {aval.shape}: expected dimensions from 0 on")
    return outputs[-1], jaxpr, inputs


# Bytes of all computed values. Large models are still built abstractly; tables that layers take are small.
_COMPUTED_NBYTES = 32 << 20
_ALWAYS_NBYTES = 1 << 10  # arrays up to this size are always computed: a seed, a scalar


class ValuedTrace(core.Trace):
    """Replaces the current trace; used as a context manager, and kept until that trace ends.

    An array with a value is an ordinary `jax.Array`, which the other trace knows as the result of the traced operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trace: Any = core.trace_ctx.trace
        # Objects of NNX may only be changed in the trace in which they were created.
        self._weakref, self.requires_low = self._trace._weakref, self._trace.requires_low
        self._available = _COMPUTED_NBYTES
        self._passed = len(self._equations)  # number of equations that existed before, or have values
        self._kept: list[tuple[Any, Any]] = []  # values, identified by their `id`, and their tracers
        self._stack = contextlib.ExitStack()
        self.left = False

    def __enter__(self) -> Self:
        self._stack.enter_context(core.set_current_trace(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def _equations(self) -> Any:
        return self._trace.frame.tracing_eqns

    def leave(self) -> bool:
        """From here on JAX computes without tracing. Returns False if something without a value was traced."""
        if self.left or core.trace_ctx.trace is not self:
            return True
        if len(self._equations) > self._passed:
            return False
        self._stack.enter_context(keep_inlined(False))
        self._stack.enter_context(core.eval_context())
        self.left = True
        return True

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        before = len(self._equations)
        traced = self._trace.process_primitive(primitive, args, params)
        results = traced if primitive.multiple_results else [traced]
        if not results or any(isinstance(arg, core.Tracer) for arg in args):
            return traced
        nbytes = sum(map(_nbytes, results))
        inner = (eqn for jaxpr in inner_jaxprs(SimpleNamespace(params=params)) for eqn in equations(jaxpr))
        largest = max([nbytes, *(_size(var.aval) for eqn in inner for var in eqn.outvars)])
        if largest > max(self._available, _ALWAYS_NBYTES):
            return traced
        with jax.ensure_compile_time_eval():
            computed = self._trace.process_primitive(primitive, args, params)
        values = computed if primitive.multiple_results else [computed]
        self._available -= nbytes
        self._passed += len(self._equations) - before
        self._kept += zip(values, results, strict=True)
        self._trace.frame.constid_to_tracer.update((id(value), result) for value, result in self._kept[-len(values) :])
        return computed

    # Eager execution runs the bodies of these step by step.

    def process_call(self, primitive: Any, function: Any, args: Any, params: Any, /) -> Any:
        return self._run(function, args)

    def process_custom_jvp_call(self, primitive: Any, function: Any, jvp: Any, args: Any, /, **_: Any) -> Any:
        return self._run(function, args)

    def process_custom_vjp_call(self, primitive: Any, function: Any, fwd: Any, bwd: Any, args: Any, /, **_: Any) -> Any:
        return self._run(function, args)

    def _run(self, function: Any, args: Any) -> Any:
        with core.set_current_trace(self):
            return function.call_wrapped(*args)

    def stage_value(self, val: Any) -> Any:
        small = getattr(val, "nbytes", 0) <= self._available
        return (core.eval_trace if small and not isinstance(val, core.Tracer) else self._trace).stage_value(val)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)  # methods that not every trace has, such as `shard_map`


def _nbytes(result: Any) -> float:
    """Bytes of a traced array; infinite if it has a value already, or comes from a side effect."""
    if not isinstance(result, core.Tracer) or getattr(cast(Any, result).parent, "effects", None):
        return math.inf
    return _size(result.aval)


def _size(aval: Any) -> float:
    return aval.size * aval.dtype.itemsize if isinstance(aval, core.ShapedArray) else math.inf

"""Flax NNX: a module class or a factory and its arguments → the module that it would build.

The `nnx.Rngs` among the arguments become run-time inputs: their keys are traced, so another seed compiles nothing.
The module's structure (its graph definition) is static, its state leaves are the variables, with paths such as
`layers/0/attention/kernel`. A module that is used twice is one set of variables, as `nnx.split` has it.
The axis names of `nnx.with_partitioning` are the variables' `logical_axes`. What is trained is every `nnx.Param`.
How variables are kept (`nnx.var_defaults`, eager sharding) is `_variable_modes`' matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from lazymodel import AbstractVariable, LazyModelError, TraceError
from lazymodel._abstract.framework import Framework, Optimizer, Training
from lazymodel._abstract.paths import OPTIMIZER, PathOf, is_trained_pair, path_text, trained_path
from lazymodel._abstract.spec import ModelSpec
from lazymodel._programs.jaxprs import with_weak_type
from lazymodel._programs.keys import is_key
from lazymodel._trace.escaped import cells_with_tracers, is_iterator, refuse_empty, refuse_escaped
from lazymodel._trace.function import known_value, trace_function
from lazymodel_flax._boxes import by_path, path_of_plain, variable_path, with_logical_axes
from lazymodel_flax._variable_modes import (
    Modes,
    as_plain,
    refuse_references,
    resolve_sharding,
    suspend_sharding,
    update_counts,
)


def matches(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is an NNX class, is given NNX objects such as `nnx.Rngs`, or is a function, which may return one."""
    if isinstance(build, type):
        return issubclass(build, nnx.Pytree)
    if _is_node(build):
        return True
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_node)
    return callable(build) and (any(_is_node(leaf) for leaf in leaves) or not hasattr(build, "init"))


def build_abstract(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
    """What `build(*args, **kwargs)` would build: a module, or any pytree with NNX objects in it, or without.

    NNX objects among the arguments are left as eager construction would leave them: the counts of an `nnx.Rngs` have
    advanced, so the next module built with it gets other keys.

    Raises:
        TraceError: As `trace_function`.
        LazyModelError: `build` is built already, or makes a variable a reference on its own.
    """
    if _is_node(build):
        raise LazyModelError(f"build_abstract got a {type(build).__name__} that is built already: pass its class")
    name = getattr(build, "__name__", type(build).__name__)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    where = [index for index, leaf in enumerate(leaves) if _is_node(leaf)]
    given = tuple(leaves[index] for index in where)
    modes = Modes.current()
    # Split together, so that one object given twice stays one.
    graphdef, counts, state = nnx.split(as_plain(given), nnx.RngCount, ...)
    rest = [None if _is_node(leaf) else leaf for leaf in leaves]
    built: list[_Built] = []
    closures: list[tuple[str, types.CellType]] = []

    def pure(rest: list[Any], state: Any) -> Any:
        # Counts are known, so they count in NumPy. Traced, each would be compared by its sharding, for which some JAX
        # versions search the whole trace: quadratic in the number of layers.
        nodes = nnx.merge(graphdef, jax.tree.map(_count, counts), state)
        placed = dict(zip(where, nodes, strict=True))
        args, kwargs = jax.tree.unflatten(treedef, [placed.get(index, leaf) for index, leaf in enumerate(rest)])
        with modes.suspended():
            result = build(*args, **kwargs)
        known: dict[int, jax.Array] = {}  # a count that two places hold stays one array
        after = [_as_count(leaf, known) for leaf in jax.tree.leaves(nnx.state(nodes))]
        closures.clear()
        leaves = jax.tree.leaves(result, is_leaf=lambda leaf: _is_node(leaf) or is_iterator(leaf))
        if not any(_is_node(leaf) for leaf in leaves):
            built.append(_Built(None, None, (), {}, frozenset(), path_of_plain(result)))
            _check_plain(result, leaves, name)
            return result, after
        refuse_references(result)
        after += _mark_buffers(result, closures)
        resolve_sharding(result)
        structure, found = nnx.split(result)
        flat, found_def = jax.tree_util.tree_flatten_with_path(found)
        own = _own_path(result)
        paths = tuple(own(variable_path(keys)) for keys, _ in flat)
        if not any(isinstance(leaf, (jax.Array, np.ndarray)) for _, leaf in flat):
            refuse_empty(result, list(zip(paths, (leaf for _, leaf in flat), strict=True)), name)
        axes = {own(path): names for path, names in _axis_names(found).items()}
        built.append(_Built(structure, found_def, paths, axes, frozenset(map(own, _params(found)))))
        return [_as_count(leaf, known) for _, leaf in flat], after

    def path_of(keys: Sequence[Any]) -> str:
        if keys[0].idx == 1:
            return f"{_AFTER}{keys[1].idx}"
        paths = built[-1].paths
        return paths[keys[1].idx] if built[-1].graphdef is not None else built[-1].path_of(keys[1:])

    # None is a pytree without leaves, so the holes that nodes leave in `rest` trace to themselves.
    model = trace_function(pure, (rest, state), {}, name=name, path_of=path_of)
    _advance(given, model, closures)
    return with_logical_axes(_as_module(model, built[-1], modes), built[-1].axes)


def arrays(model: Any) -> dict[str, Any] | None:
    """The arrays of a module, or of a pytree with NNX objects in it, by path; None for what has none."""
    if not any(_is_node(leaf) for leaf in jax.tree.leaves(model, is_leaf=_is_node)):
        return None
    own = _own_path(model)
    return {own(path): leaf for path, leaf in by_path(nnx.split(as_plain(model))[1]).items()}


def _own_path(tree: Any) -> Callable[[str], str]:
    """What makes the paths in the state of a tree those of its variables: in a pair of a module and its optimizer
    they are as `with_optimizer` has them.
    """
    if type(tree) is tuple and len(tree) == 2 and type(tree[1]) is nnx.Optimizer:
        return lambda path: trained_path(path).replace(f"{OPTIMIZER}opt_state/", OPTIMIZER, 1)
    return trained_path if is_trained_pair(tree) else str


def with_arrays(model: Any, arrays: Mapping[int, Any]) -> Any:
    """A module, or a pytree with NNX objects in it, with other arrays in the places of some, by their `id`."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: arrays.get(id(leaf), leaf), state))


# Paths of what the given NNX objects hold once `build` has run; no variables of the model.
_AFTER = "\0after/"


@dataclasses.dataclass(frozen=True)
class _Built:
    """What tracing found."""

    graphdef: Any  # the result's graph definition; None where there are no NNX objects in it
    state_def: Any  # the structure of its state
    paths: tuple[str, ...]  # a path for each leaf of the state
    axes: Mapping[str, tuple[Any, Any]]  # see `_axis_names`
    params: frozenset[str]  # the paths of what an `nnx.Param` holds
    path_of: PathOf = path_text  # names what is in a result without NNX objects


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


class _Count(np.ndarray[Any, Any]):
    """A count that hands out copies: NNX counts in place, and a trace would keep a view of it."""

    def __getitem__(self, index: Any) -> Any:
        return _count(super().__getitem__(index))


def _count(value: Any) -> _Count:
    return np.array(value).view(_Count)


def _as_count(leaf: Any, known: dict[int, jax.Array]) -> Any:
    """A count as the array that it is in eager execution, with its value."""
    if not isinstance(leaf, _Count):
        return leaf
    with jax.ensure_compile_time_eval():
        return known.setdefault(id(leaf), jax.numpy.asarray(np.array(leaf, subok=False)))


def _params(state: Any) -> frozenset[str]:
    return frozenset(by_path(nnx.filter_state(state, nnx.Param)))


def _axis_names(state: Any) -> dict[str, tuple[Any, Any]]:
    """Path to the axis names of each variable that has some, and its own rules for them or None."""
    found = by_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    metadata = {path: variable.get_metadata() for path, variable in found.items() if isinstance(variable, nnx.Variable)}
    named = {path: given for path, given in metadata.items() if given.get("out_sharding") is not None}
    return {path: (given["out_sharding"], given.get("sharding_rules")) for path, given in named.items()}


def _check_plain(result: Any, leaves: Sequence[Any], name: str) -> None:
    """Checks a result without NNX objects as the core would; what it has besides arrays is checked there."""
    if not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
        flat, treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_iterator)
        named = [(path_text(keys), leaf) for keys, leaf in flat]
        refuse_escaped(named, treedef)
        refuse_empty(result, named, name)


def _mark_buffers(result: Any, closures: list[tuple[str, types.CellType]]) -> list[Any]:
    """Marks plain arrays that modules hold as data, which NNX does by itself for concrete arrays only.

    Otherwise they would count as static, and the tracers would escape in the graph definition. Arrays that functions
    among the attributes close over, such as the scale of an initializer that a layer keeps, are taken out and given
    back; `closures` gets their cells, for `_advance` to fill once there are values. What else such a function closes
    over, of the types of the result's modules, is one of them as it was built, which `nnx.merge` leaves there as well.

    Raises:
        TraceError: One is elsewhere in an attribute that is static for NNX, and so lost.
    """
    nodes = list(nnx.iter_graph(result))
    own, taken = {type(node) for _, node in nodes if isinstance(node, nnx.Module)}, list[Any]()
    for path, node in nodes:
        if not isinstance(node, nnx.Pytree):
            continue
        data = getattr(node, "_pytree__nodes", {})  # what NNX goes into by itself
        for name, value in list(vars(node).items()):
            if isinstance(value, jax.Array):
                setattr(node, name, nnx.data(value))
            elif name not in _OF_NNX and not data.get(name, False):
                place = "/".join(map(str, (*path, name)))
                for cell in cells_with_tracers(value, own):
                    closures.append((place, cell))
                    taken.append(cell.cell_contents)
                    cell.cell_contents = None
                refuse_escaped([(place, value)], known=own)
    return taken


# What NNX itself keeps in a module, its trace among them.
_OF_NNX = ("_pytree__state", "_pytree__nodes")


def _advance(given: tuple[Any, ...], model: ModelSpec, closures: Sequence[tuple[str, types.CellType]]) -> None:
    """Updates the counts of the user's own `nnx.Rngs`, as building eagerly would have, and fills closures."""
    _, after = model.framework.structure({path: path for path in model})
    state = nnx.state(as_plain(given))
    leaves, treedef = jax.tree.flatten(state)
    updated: list[Any] = []
    for path, leaf in zip(after, leaves, strict=False):  # after them, what closures held
        # Only counts: keys do not change, and other state is not known before it is materialized.
        value = known_value(model, path) if leaf.dtype == np.uint32 else None
        updated.append(leaf if value is None else jax.numpy.asarray(value))
    update_counts(given, jax.tree.unflatten(treedef, updated))
    for path, (place, cell) in zip(after[len(leaves) :], closures, strict=True):
        if (value := known_value(model, path)) is None or is_key(model[path].dtype):
            raise TraceError(
                f"a function that the module keeps at {place!r} closes over a traced {model[path].dtype.name}"
                f"{list(model[path].shape)}, which has no value before it is materialized: keep it in an `nnx.Variable`"
            )
        cell.cell_contents = with_weak_type(jax.numpy.asarray(value), model[path].weak_type)


def _as_module(model: ModelSpec, built: _Built, modes: Modes) -> ModelSpec:
    """The model without what is not the module's own, rebuilding the module itself."""
    own = {path: variable for path, variable in model.items() if not path.startswith(_AFTER)}
    if built.graphdef is not None:
        own = {path: dataclasses.replace(own[path], trainable=path in built.params) for path in own}
    kept = ((recipe, [path for path in recipe.paths if path in own]) for recipe in model.recipes)
    return dataclasses.replace(
        model,
        variables=own,
        framework=_Results(model.framework) if built.graphdef is None else _Module(model.framework, built, modes),
        recipes=tuple(recipe.restricted_to(paths) for recipe, paths in kept if paths),
        sources={path: source for path, source in model.sources.items() if path in own},
        aliases={other: path for other, path in model.aliases.items() if not other.startswith(_AFTER)},
    )


class _Results(Framework):
    """What a function returned, without what comes after it."""

    def __init__(self, traced: Framework) -> None:
        super().__init__(lambda leaves: traced.structure(_Filled(leaves))[0])


class _Module(_Results):
    """NNX modules, split and merged again."""

    def __init__(self, traced: Framework, built: _Built, modes: Modes) -> None:
        super().__init__(traced)
        self._built, self._modes = built, modes

    def structure(self, leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self._built.state_def, super().structure(leaves))

    def _merged(self, leaves: Mapping[str, Any]) -> Any:
        return nnx.merge(self._built.graphdef, self.structure(leaves))

    def rebuild(self, arrays: Mapping[str, Any]) -> Any:
        return self._modes.applied(self._merged(arrays))

    def outline(self, struct: jax.ShapeDtypeStruct) -> Any:
        return struct  # as `nnx.eval_shape` has it; of a `jax.Array` NNX asks the type, which only real ones have

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        if self._modes.hijax or self._modes.ref:
            raise LazyModelError(
                "a model whose variables are references or hijax objects (nnx.var_defaults) cannot be described by "
                "shapes alone, which compiling before it is there needs; load it without compile"
            )
        yield self._merged(structs)

    def start_training(
        self, variables: Mapping[str, AbstractVariable], optimizer: Optimizer, leaves: Mapping[str, Any]
    ) -> Training:
        structs = {path: dataclasses.replace(v, sharding=None, layout=None).struct for path, v in variables.items()}
        trained = nnx.Param if frozenset(leaves) == self._built.params else _Trained(frozenset(leaves))
        module, own_modes = self._merged({**structs, **leaves}), Modes.current()
        # State takes over the axis names of its parameters, and would be put on a mesh right here too.
        suspend_sharding(module)
        with own_modes.suspended():
            started = nnx.Optimizer(module, cast(Any, optimizer), wrt=trained)
        resolve_sharding(started)
        graphdef, state = nnx.split(started)

        def finish(module: Any, state: Any) -> Any:
            return module, own_modes.applied(nnx.merge(graphdef, state))

        return Training(state, finish, _state_path, {path: path for path in leaves})


@dataclasses.dataclass(frozen=True)
class _Trained:
    """An NNX filter: the variables at some paths."""

    paths: frozenset[str]

    def __call__(self, path: Sequence[Any], value: Any) -> bool:
        return "/".join(map(str, path)) in self.paths


def _state_path(keys: Sequence[Any]) -> str:
    """The path of a leaf of an `nnx.Optimizer`, without the attribute that it keeps Optax' state in."""
    return variable_path(keys).removeprefix("opt_state/")


class _Filled(dict[str, Any]):
    """A mapping with None for what comes after the build."""

    def __missing__(self, path: str) -> None:
        if not path.startswith(_AFTER):
            raise KeyError(path)

"""The adapter that `lazymodel.build_abstract` finds for Flax: Linen modules, NNX classes, and functions.

Linen: a module and its init arguments become the variables dict that `module.init` would return. Paths start with the
collection, such as `params/Dense_0/kernel`; boxes around arrays are in the rebuilt variables and not in the paths.

NNX: a class or a factory and its arguments become the module that it would build. The keys of `nnx.Rngs` among the
arguments are run-time inputs; the module's structure is static, and the leaves of its state are the variables. Only
plain variables without a mesh can be traced: JAX returns no references from a trace, hijax variables trace to equations
with effects, and a mesh need not exist yet. So a module is built of plain variables, and is converted to what eager
construction gives (`nnx.var_defaults`, eager sharding) when it is rebuilt.

Axis names of both are the variables' `logical_axes`. `params` and every `nnx.Param` are trainable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from flax import linen, nnx
from jax.sharding import Mesh

from lazymodel import AbstractVariable, LazyModelError, TraceError
from lazymodel._abstract.framework import Framework, ModelSpec, OpenedArguments, Optimizer, Training
from lazymodel._abstract.pairs import LoraPair, named_pairs
from lazymodel._abstract.variable import (
    OPTIMIZER,
    PathOf,
    is_trained_pair,
    path_of,
    path_text,
    trained_path,
)
from lazymodel._errors import warn
from lazymodel._programs.jaxprs import is_key, with_weak_type
from lazymodel._sharding.follow import follow_weights, from_read
from lazymodel._sharding.shard import on_own_meshes, resolve_logical
from lazymodel._show.text import listed
from lazymodel._trace.errors import cells_with_tracers, is_iterator, refuse_empty, refuse_escaped, watched
from lazymodel._trace.function import known_value, trace_function
from lazymodel_flax import _qwix
from lazymodel_flax._layers import NO_LAYERS, Layers
from lazymodel_flax._modes import LATER, Modes, as_plain, refuse_references, set_eager, variables_of

_PARAMS = "params/"  # prefix of the paths of the collection that Linen trains
# Paths of the state of given NNX objects after `build` has run; these are not variables of the model.
_AFTER = "\0after/"
# Attributes that NNX itself keeps in a module, its trace state among them.
_OF_NNX = ("_pytree__state", "_pytree__nodes")


class FlaxAdapter:
    """Recognizes Linen modules, NNX classes, and functions, which may return an NNX module.

    If a function does not return one, it is traced as the core would trace it, so matching it costs nothing.

    Example:
        >>> list(lm.build_abstract(nnx.Linear, 8, 16, rngs=nnx.Rngs(0)))
        ['bias', 'kernel']
        >>> list(lm.build_abstract(linen.Dense(16), jax.random.key(0), jax.numpy.ones((1, 8))))
        ['params/bias', 'params/kernel']
    """

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if _is_linen(build) or _is_node(build):
            return True
        if isinstance(build, type):
            return issubclass(build, nnx.Pytree)
        return callable(build) and (_has_nodes((args, kwargs)) or not hasattr(build, "init"))

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
        with watched(build, args, kwargs):
            return _build_linen(build, args, kwargs) if _is_linen(build) else _build_nnx(build, args, kwargs)

    def arrays(self, model: Any) -> dict[str, Any] | None:
        if _has_nodes(model):
            own = _own_path(model)
            return {own(path): leaf for path, leaf in _by_path(nnx.split(as_plain(model))[1]).items()}
        return _by_path(model) if _has_boxes(model) else None

    def states(self, model: Any) -> Any:
        """The tree with the state of each NNX object in its place."""
        if not _has_nodes(model):
            return model
        return jax.tree.map(lambda x: nnx.split(as_plain(x))[1] if _is_node(x) else x, model, is_leaf=_is_node)

    def lora_pairs(self, model: Any) -> list[LoraPair] | None:
        if not _has_nodes(model):
            return None
        shapes = {path: np.shape(array) for path, array in (self.arrays(model) or {}).items()}
        return _qwix.with_scales(named_pairs(shapes), model, _own_path(model))

    def places(self, model: Any) -> _Places | None:
        """The variables of a module or state, whose arrays can be replaced in place; None for anything else."""
        if isinstance(model, nnx.State):
            found = {"/".join(map(str, keys)): leaf for keys, leaf in model.flat_state()}
            plain = all(isinstance(leaf, nnx.Variable) and not leaf.hijax and not leaf.ref for leaf in found.values())
            return _Places(found) if plain else None
        if not isinstance(model, nnx.Module) or any(node.hijax or node.ref for node in variables_of(model)):
            return None
        nodes = dict(nnx.iter_graph(model))
        found = {"/".join(map(str, path)): node for path, node in nodes.items() if isinstance(node, nnx.Variable)}
        edges: list[tuple[Any, Any, Any]] = []
        for path, node in nodes.items():
            parent = nodes.get(path[:-1])
            is_object = isinstance(parent, nnx.Pytree)
            if path:
                edges.append((vars(parent), str(path[-1]), node) if is_object else (parent, path[-1], node))
        places = _Places(found, edges)
        return places if places.valid() else None

    def opened(self, args: Any, kwargs: Any) -> OpenedArguments | None:
        """The arrays of NNX objects and of all else that a function is called with."""
        given = args, kwargs
        if not _has_nodes(given):
            return None
        graphdef, arrays = nnx.split(given)
        return OpenedArguments(
            arrays,
            lambda arrays: nnx.merge(graphdef, arrays),
            lambda given: nnx.state(given, nnx.Variable),
            lambda state: nnx.update(given, state),
        )

    def with_arrays(self, model: Any, arrays: Mapping[int, Any]) -> Any:
        graphdef, state = nnx.split(model) if _has_nodes(model) else (None, model)
        state = jax.tree.map(lambda leaf: arrays.get(id(leaf), leaf), state)
        return state if graphdef is None else nnx.merge(graphdef, state)


class _Places:
    """Variables by path. Those of a module are found once: walking through it takes longer than the rest of a call.

    `edges` are all its objects: what holds one, the key there, and the object.
    """

    def __init__(self, variables: Mapping[str, Any], edges: Sequence[tuple[Any, Any, Any]] = ()) -> None:
        self._variables, self._edges = variables, edges

    def valid(self) -> bool:
        """Returns True as long as it is known to be a module that consists of the same objects."""
        try:
            for holder, key, node in self._edges:  # faster than `all` of a generator
                if holder[key] is not node:
                    return False
        except (LookupError, TypeError):
            return False
        return bool(self._edges)

    def arrays(self) -> dict[str, Any]:
        """The array of each variable."""
        return {path: variable.get_raw_value() for path, variable in self._variables.items()}

    def put(self, arrays: Mapping[int, Any]) -> None:
        """Replaces arrays, by the `id` of the old ones."""
        for variable in self._variables.values():
            if (array := arrays.get(id(variable.get_raw_value()))) is not None:
                variable.set_raw_value(array)


adapter = FlaxAdapter()


# Linen ----------------------------------------------------------------------------------------------------------------


def _is_linen(build: Any) -> bool:
    return isinstance(build, linen.Module) or (isinstance(build, type) and issubclass(build, linen.Module))


def _build_linen(module: linen.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
    """The abstract model of what `module.init(*args, **kwargs)` would return; inputs may be `jax.ShapeDtypeStruct`."""
    if isinstance(module, type):
        raise LazyModelError(
            f"build_abstract got the Linen class {module.__name__}: pass a module, {module.__name__}(…), then the "
            "arguments of its init, a key and inputs"
        )
    model = trace_function(module.init, args, kwargs, name=type(module).__name__, path_of=_variable_path)
    tree = model.framework.structure({path: path for path in model})
    boxes = [box for box in jax.tree.leaves(tree, is_leaf=_is_box) if isinstance(box, linen.Partitioned)]
    model = _with_logical_axes(model, {box.value: (box.names, *_own(vars(box), "rules")) for box in boxes})
    trainable = {path: dataclasses.replace(model[path], trainable=path.startswith(_PARAMS)) for path in model}
    return dataclasses.replace(model, variables=trainable, framework=_Linen(model.framework.structure))


class _Linen(Framework):
    """Variables dicts; an optimizer gets only the parameters."""

    def start_training(
        self, variables: Mapping[str, AbstractVariable], optimizer: Optimizer, leaves: Mapping[str, Any]
    ) -> Training:
        # Like `TrainState.create(params=variables["params"])`; boxes of variables that are not trained hold None.
        params = self.structure({path: leaves.get(path) for path in variables})["params"]
        places = {path.removeprefix(_PARAMS): path for path in leaves}
        return Training(optimizer.init(params), lambda variables, state: (variables, state), _variable_path, places)


def _variable_path(keys: Sequence[Any]) -> str:
    """The path without the attribute in which a variable or box keeps its array."""
    return path_text(_without_values(keys))


def _without_values(keys: Sequence[Any]) -> list[Any]:
    return [key for key in keys if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")]


def _by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by their paths, without the attributes in which variables and boxes keep arrays."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    name = path_of(tree)
    return {name(_without_values(keys)): leaf for keys, leaf in found}


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, linen.meta.AxisMetadata)


def _has_boxes(tree: Any) -> bool:
    """Returns True if a tree contains one of Linen's boxes around an array."""
    return any(map(_is_box, jax.tree.leaves(tree, is_leaf=lambda leaf: _is_box(leaf) or is_iterator(leaf))))


def _path_of_plain(tree: Any) -> PathOf:
    """The function that names the leaves of a tree without NNX objects, like `_by_path` or the core."""
    name = path_of(tree)
    return (lambda keys: name(_without_values(keys))) if _has_boxes(tree) else name


def _own(metadata: Mapping[str, Any], rules: str) -> tuple[Any, Any]:
    """A variable's own rules for its axis names, and its own mesh; None for what it has not."""
    return metadata.get(rules), metadata.get("mesh")


def _with_logical_axes(model: ModelSpec, names: Mapping[str, tuple[Any, Any, Any]]) -> ModelSpec:
    """The model with `logical_axes` on its variables, and on the meshes that some carry.

    `names` maps path → axis names (a sequence, a PartitionSpec or a NamedSharding), and `_own` rules and mesh. Own
    rules are applied at once; names without an own rule stay.
    """
    variables, meshes = dict(model.variables), dict[str, Mesh]()
    for path, (axes, rules, mesh) in names.items():
        if path in variables:
            mesh = getattr(axes, "mesh", mesh)
            axes = tuple(getattr(axes, "spec", axes))
            if rules:
                resolved, unknown = resolve_logical(axes, rules)
                axes = tuple(name if name in unknown else axis for name, axis in zip(axes, resolved, strict=True))
            variables[path] = dataclasses.replace(variables[path], logical_axes=axes)
            if isinstance(mesh, Mesh):
                meshes[path] = mesh
    return model.with_variables(on_own_meshes(variables, meshes) if meshes else variables)


# NNX ------------------------------------------------------------------------------------------------------------------


def _counts(nodes: Any) -> list[Any]:
    """The state of NNX objects that is known after a build: counts. Keys do not change, the rest is materialized."""
    return [node for node in variables_of(nodes) if isinstance(node, nnx.RngCount)]


def _build_nnx(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
    """The abstract model of `build(*args, **kwargs)`: a module, or any pytree, with NNX objects or without.

    NNX objects among the arguments change as in eager construction: the counts of an `nnx.Rngs` have advanced, so the
    next module built with it gets other keys.

    Raises:
        TraceError: As for `trace_function`.
        LazyModelError: `build` is built already, or its code makes a variable a reference.
    """
    if _is_node(build):
        raise LazyModelError(f"build_abstract got a {type(build).__name__} that is built already: pass its class")
    name = getattr(build, "__name__", type(build).__name__)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    where = [index for index, leaf in enumerate(leaves) if _is_node(leaf)]
    given = tuple(leaves[index] for index in where)
    modes = Modes.current()
    # Split together, so that one object given twice stays one object.
    graphdef, counts, state = nnx.split(as_plain(given), nnx.RngCount, ...)
    rest = [None if _is_node(leaf) else leaf for leaf in leaves]
    built: list[_Built] = []
    closures: list[tuple[str, types.CellType]] = []

    def pure(rest: list[Any], state: Any) -> Any:
        # Counts are known, so they count in NumPy. If traced, each would be compared by its sharding, for which some
        # JAX versions search the whole trace: quadratic in the number of layers.
        nodes = nnx.merge(graphdef, jax.tree.map(_count, counts), state)
        placed = dict(zip(where, nodes, strict=True))
        args, kwargs = jax.tree.unflatten(treedef, [placed.get(index, leaf) for index, leaf in enumerate(rest)])
        with modes.suspended():
            result = build(*args, **kwargs)
        after = [_as_count(node.get_value()) for node in _counts(nodes)]
        closures.clear()
        leaves = jax.tree.leaves(result, is_leaf=lambda leaf: _is_node(leaf) or is_iterator(leaf))
        if not any(map(_is_node, leaves)):
            built.append(_Built(None, _path_of_plain(result)))
            _check_plain(result, leaves, name)
            return result, after
        refuse_references(result)
        after += _mark_buffers(result, closures)
        set_eager(result, LATER, True)
        structure, found = nnx.split(result)
        own = _own_path(result)
        by_path = {own(path): leaf for path, leaf in _by_path(found).items()}
        if not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in by_path.values()):
            refuse_empty(result, [*by_path.items()], name)
        axes = {own(path): names for path, names in _axis_names(found).items()}
        params = frozenset(map(own, _by_path(nnx.filter_state(found, nnx.Param))))
        layers = Layers.of(result, own)
        built.append(_Built(structure, lambda keys: own(_variable_path(keys)), axes, params, layers=layers))
        return jax.tree.map(_as_count, found), after

    def path_of(keys: Sequence[Any]) -> str:
        return f"{_AFTER}{keys[1].idx}" if keys[0].idx == 1 else built[-1].path_of(keys[1:])

    # None is a pytree without leaves, so the places of nodes in `rest` trace to None.
    model = trace_function(pure, (rest, state), {}, name=name, path_of=path_of)
    _advance(given, model, closures)
    return _with_logical_axes(_as_module(model, built[-1], modes), built[-1].axes)


def _own_path(tree: Any) -> Callable[[str], str]:
    """A function that turns paths in the state of a tree into those of its variables: for a pair of a module and its
    optimizer, the paths of `with_optimizer`.
    """
    if type(tree) is tuple and len(tree) == 2 and type(tree[1]) is nnx.Optimizer:
        return lambda path: trained_path(path).replace(f"{OPTIMIZER}opt_state/", OPTIMIZER, 1)
    plain = jax.tree.map(lambda leaf: None if _is_node(leaf) else leaf, tree, is_leaf=_is_node)
    return trained_path if is_trained_pair(plain) else str


@dataclasses.dataclass(frozen=True)
class _Built:
    """Findings of a trace."""

    graphdef: Any  # the result's graph definition; None if it contains no NNX objects
    path_of: PathOf  # names the leaves of its state, or of a result without NNX objects
    axes: Mapping[str, tuple[Any, Any, Any]] = dataclasses.field(default_factory=dict[str, tuple[Any, Any, Any]])
    params: frozenset[str] = frozenset()  # the paths of values of the kind that is trained
    trained: type[nnx.Variable[Any]] = nnx.Param  # that kind
    rules: tuple[Any, ...] = ()  # Qwix' rules by which it was quantized
    layers: Layers = NO_LAYERS  # what these need to be whole


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _has_nodes(tree: Any) -> bool:
    return any(map(_is_node, jax.tree.leaves(tree, is_leaf=_is_node)))


class _Count(np.ndarray[Any, Any]):
    """A count whose items are copies: NNX counts in place, and a trace would keep a view of it."""

    def __getitem__(self, index: Any) -> Any:
        return _count(super().__getitem__(index))


def _count(value: Any) -> _Count:
    return np.array(value).view(_Count)


def _as_count(leaf: Any) -> Any:
    """A count as an array with its value, as in eager execution."""
    if not isinstance(leaf, _Count):
        return leaf
    with jax.ensure_compile_time_eval():
        return jax.numpy.asarray(np.array(leaf, subok=False))


def _axis_names(state: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Path → axis names of each variable that has some, and its `_own` rules and mesh."""
    found = _by_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    metadata = {path: variable.get_metadata() for path, variable in found.items() if isinstance(variable, nnx.Variable)}
    named = {path: given for path, given in metadata.items() if given.get("out_sharding") is not None}
    return {path: (given["out_sharding"], *_own(given, "sharding_rules")) for path, given in named.items()}


def _check_plain(result: Any, leaves: Sequence[Any], name: str) -> None:
    """Checks that a result without NNX objects has arrays; the core checks the arrays themselves."""
    if not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
        flat, treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=is_iterator)
        named = [(path_text(keys), leaf) for keys, leaf in flat]
        refuse_escaped(named, treedef)
        refuse_empty(result, named, name)


def _mark_buffers(result: Any, closures: list[tuple[str, types.CellType]]) -> list[Any]:
    """Marks plain arrays that modules hold as data, which NNX itself only does for concrete arrays.

    Otherwise they would count as static, and the tracers would leak in the graph definition. Arrays in closures of
    functions among the attributes, such as the scale of an initializer that a layer keeps, are taken out and returned;
    `closures` gets their cells, which `_advance` fills once there are values. If such a function closes over an object
    with the type of one of the result's modules, it is that module as it was built, and `nnx.merge` leaves it there.

    Raises:
        TraceError: A traced array is elsewhere in an attribute that is static for NNX, and would be lost.
    """
    nodes = list(nnx.iter_graph(result))
    own, taken = {type(node) for _, node in nodes if isinstance(node, nnx.Module)}, list[Any]()
    for path, node in nodes:
        if not isinstance(node, nnx.Pytree):
            continue
        data = getattr(node, "_pytree__nodes", {})  # attributes that NNX traverses itself
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


def _advance(given: tuple[Any, ...], model: ModelSpec, closures: Sequence[tuple[str, types.CellType]]) -> None:
    """Updates the counts of the user's own `nnx.Rngs`, as building eagerly would, and fills closures."""
    _, after = model.framework.structure({path: path for path in model})
    counts = _counts(given)
    for node, path in zip(counts, after, strict=False):  # the values of closures follow
        if (value := known_value(model, path)) is not None:
            node.set_value(jax.numpy.asarray(value))
    for path, (place, cell) in zip(after[len(counts) :], closures, strict=True):
        if (value := known_value(model, path)) is None or is_key(model[path].dtype):
            raise TraceError(
                f"a function that the module keeps at {place!r} closes over a traced {model[path].dtype.name}"
                f"{list(model[path].shape)}, which has no value before it is materialized: keep it in an `nnx.Variable`"
            )
        cell.cell_contents = with_weak_type(jax.numpy.asarray(value), model[path].weak_type)


def _as_module(model: ModelSpec, built: _Built, modes: Modes) -> ModelSpec:
    """The model without variables that are not the module's own; it rebuilds the module itself."""
    own = {path: variable for path, variable in model.items() if not path.startswith(_AFTER)}
    parts = model.framework, [path for path in model if path not in own]
    framework = _Results(*parts) if built.graphdef is None else _Module(*parts, built, modes)
    if built.graphdef is not None:
        own = {path: dataclasses.replace(own[path], trainable=path in built.params) for path in own}
    kept = ((recipe, [path for path in recipe.paths if path in own]) for recipe in model.recipes)
    return dataclasses.replace(
        model,
        variables=own,
        framework=framework,
        recipes=tuple(recipe.restricted_to(paths) for recipe, paths in kept if paths),
        sources={path: source for path, source in model.sources.items() if path in own},
        equal={other: path for other, path in model.equal.items() if not other.startswith(_AFTER)},
    )


class _Results(Framework):
    """The result of a function, without the state that follows it."""

    def __init__(self, traced: Framework, after: Sequence[str]) -> None:
        super().__init__(lambda leaves: traced.structure({**dict.fromkeys(after), **leaves})[0])


# A module that Qwix has changed while it was traced: as it was traced, what that found, and what Qwix returned.
_Traced: TypeAlias = "tuple[ModelSpec, _Built, _qwix.Changed]"


class _Module(_Results):
    """NNX modules, split and merged again."""

    def __init__(self, traced: Framework, after: Sequence[str], built: _Built, modes: Modes) -> None:
        super().__init__(traced, after)
        self._built, self._modes = built, modes

    def _merged(self, leaves: Mapping[str, Any]) -> Any:
        return nnx.merge(self._built.graphdef, self.structure(leaves))

    def check_sharded(self, variables: Mapping[str, AbstractVariable]) -> None:
        if found := self._built.layers.unusable(variables):
            warn(
                f"{listed(map(repr, found))}: sharded over Explicit axes along a dimension in which Flax' layer takes "
                "rows or convolves. Its result has no sharding that JAX can derive, so each call raises "
                "ShardingTypeError. Make the mesh with Auto axes, jax.make_mesh(shape, names, "
                "axis_types=(jax.sharding.AxisType.Auto,) * len(names)), or call the layer with out_sharding="
            )

    def rebuild(self, arrays: Mapping[str, Any]) -> Any:
        return self._modes.applied(self._merged(arrays))

    def outline(self, struct: jax.ShapeDtypeStruct) -> Any:
        return struct  # like `nnx.eval_shape`; NNX checks the type of a `jax.Array`, which only real ones have

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        if self._modes.hijax or self._modes.ref:
            raise LazyModelError(
                "a model whose variables are references or hijax objects (nnx.var_defaults) cannot be described by "
                "shapes alone, as compiling before loading requires; load it without compile"
            )
        yield self._merged(structs)

    def traceable(self) -> Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Any]]:
        if self._modes.hijax or self._modes.ref:
            raise LazyModelError(
                "run: the variables of the model are references or hijax objects (nnx.var_defaults), which are mutable "
                "arrays that no program of several can share. Build it without them, or materialize it"
            )
        return super().traceable()

    def lora_pairs(self, variables: Mapping[str, AbstractVariable]) -> list[LoraPair]:
        module = self._merged({path: v.struct for path, v in variables.items()})
        return _qwix.with_scales(super().lora_pairs(variables), module, _own_path(module))

    def start_training(
        self, variables: Mapping[str, AbstractVariable], optimizer: Optimizer, leaves: Mapping[str, Any]
    ) -> Training:
        structs = {path: dataclasses.replace(v, sharding=None, layout=None).struct for path, v in variables.items()}
        whole = frozenset(leaves) == self._built.params
        trained = self._built.trained if whole else _Trained(frozenset(leaves))
        module, own_modes = self._merged({**structs, **leaves}), Modes.current()
        # State takes over the axis names of its parameters, and would also be put on a mesh here.
        set_eager(module, True, LATER)
        with own_modes.suspended():
            started = nnx.Optimizer(module, cast(Any, optimizer), wrt=trained)
        set_eager(started, LATER, True)
        graphdef, state = nnx.split(started)

        def finish(module: Any, state: Any) -> Any:
            return module, own_modes.applied(nnx.merge(graphdef, state))

        return Training(state, finish, _state_path, {path: path for path in leaves})

    def quantize(self, model: ModelSpec, how: Any, filters: Any, inputs: Any) -> ModelSpec:
        if model.conversions or self._built.trained is nnx.LoRAParam:
            what = "is quantized" if model.conversions else "has LoRA pairs"
            raise LazyModelError(f"{model.name} {what} already; quantize comes before lora, with all rules at once")
        provider, rules = _qwix.quantization(how, filters)
        *_, changed = found = self._traced(model, provider, inputs, rules)
        if kernels := _qwix.transposed(model, changed.weights):
            if not rules:
                raise LazyModelError(
                    f"{kernels[0]!r} is used transposed, and cannot be quantized for its other uses: exclude its "
                    "module by a first rule without weight_qtype, or give quantize the rules instead of a provider"
                )
            provider, rules = _qwix.excluding(rules, kernels)
            *_, changed = found = self._traced(model, provider, inputs, rules)
        if not changed.weights:
            raise LazyModelError(f"quantize({how!r}) changes nothing: its rules match no kernel of {model.name}")
        return self._with(model, found)

    def lora(self, model: ModelSpec, rank: Any, targets: str | None, inputs: Any) -> ModelSpec:
        rules = self._built.rules
        if self._built.trained is nnx.LoRAParam:
            raise LazyModelError(f"{model.name} has LoRA pairs already: give lora one regex for all targets")
        found = self._traced(model, _qwix.pairs(model, rank, targets, rules), inputs, rules)
        if not found[1].params:
            raise LazyModelError(f"lora changes nothing: no kernel of {model.name} is a target")
        return self._with(model, found)

    def _traced(self, model: ModelSpec, provider: Any, inputs: Any, rules: tuple[Any, ...]) -> _Traced:
        """The module as Qwix changes it: quantized kernels and LoRA pairs among its variables."""
        structs = {path: dataclasses.replace(v, sharding=None, layout=None).struct for path, v in model.items()}
        module = self._merged(structs)
        if not isinstance(module, nnx.Module) or self._modes.hijax or self._modes.ref:
            raise LazyModelError(f"Qwix changes one nnx.Module of plain variables; {model.name} is another object")
        call = _qwix.Call.of(model, module, inputs)
        found: list[tuple[_Built, _qwix.Changed]] = []

        def change(structs: Mapping[str, Any], args: Any, kwargs: Any, *, labelled: bool) -> Any:
            module = self._merged(structs)
            set_eager(module, True, LATER)
            with self._modes.suspended():
                changed = _qwix.change(provider, module, _qwix.Call(args, kwargs, call.rngs), labelled=labelled)
            set_eager(changed.module, LATER, True)
            graphdef, state = nnx.split(changed.module)
            pairs = frozenset(_by_path(nnx.filter_state(state, nnx.LoRAParam))) - structs.keys()
            names = {path: axes for path, axes in _axis_names(state).items() if path in pairs}
            trained = nnx.LoRAParam if pairs else nnx.Param
            layers = self._built.layers.without(changed.weights)
            found.append((_Built(graphdef, _variable_path, names, pairs, trained, rules, layers), changed))
            return state, []

        def trace(*, labelled: bool) -> ModelSpec:
            traced = functools.partial(change, labelled=labelled)
            given = (structs, call.args, call.kwargs)
            return trace_function(
                traced, given, {}, name=model.name, path_of=lambda keys: _variable_path(keys[1:]), derive=dict
            )

        try:
            try:
                traced = trace(labelled=True)
            except AssertionError:  # Qwix': a kernel that is used in another shape has fewer or more names than axes
                traced = trace(labelled=False)
        except Exception as error:
            error.add_note(f"while Qwix called {model.name} with {inputs!r}")
            raise
        return traced, *found[-1]

    def _with(self, model: ModelSpec, found: _Traced) -> ModelSpec:
        """The model with the variables of a traced module that Qwix has changed."""
        traced, built, changed = found
        conversions, variables = _qwix.conversions(model, changed.weights)
        known, computed = {**model, **variables}, set(() if traced.derived is None else traced.derived.paths)
        if others := [path for path in traced if path not in known and (path in computed or path not in built.params)]:
            raise LazyModelError(
                f"{listed(map(repr, others))}: a call of {model.name} makes these variables, and they have values only "
                "once it runs (ranges of activations, or what a module keeps of its inputs). Use rules without "
                "act_static_scale, or load the model and call qwix.quantize_model"
            )
        for path in traced:
            if path not in known:
                of = path.removesuffix("_lora_a").removesuffix("_lora_b")
                dims = changed.dims.get(path)
                known[path] = dataclasses.replace(traced[path], weight=None if dims is None else (of, dims))
        trainable = {
            path: dataclasses.replace(v, trainable=path in built.params if built.params else v.trainable)
            for path, v in known.items()
        }
        new = [path for path in traced if path in built.params]
        kept = ((recipe, [path for path in recipe.paths if path in new]) for recipe in traced.recipes)
        result = dataclasses.replace(
            model,
            variables={path: trainable[path] for path in traced},
            recipes=(*model.recipes, *(recipe.restricted_to(paths) for recipe, paths in kept if paths)),
            sources={**model.sources, **{path: traced.sources[path] for path in new if path in traced.sources}},
            framework=_Module(traced.framework, [], built, self._modes),
            conversions=(*model.conversions, *conversions),
        )
        read = _with_logical_axes(result.as_read(), built.axes)
        return from_read(result, {**read.variables, **follow_weights(read.variables, new)})


@dataclasses.dataclass(frozen=True)
class _Trained:
    """An NNX filter: the variables at some paths."""

    paths: frozenset[str]

    def __call__(self, path: Sequence[Any], value: Any) -> bool:
        return "/".join(map(str, path)) in self.paths


def _state_path(keys: Sequence[Any]) -> str:
    """The path of a leaf of an `nnx.Optimizer`, without the attribute in which it keeps Optax' state."""
    return _variable_path(keys).removeprefix("opt_state/")

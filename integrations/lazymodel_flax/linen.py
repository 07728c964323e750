"""Flax Linen: a module and its init arguments → the variables dict that `module.init` would return.

Paths start with the collection, such as `params/Dense_0/kernel`. Boxes around arrays (`nn.LogicallyPartitioned`) are
in the rebuilt variables and not in the paths; their axis names are the variables' `logical_axes`. The collection
`params` is trainable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen

from lazymodel import AbstractVariable, LazyModelError
from lazymodel._abstract.framework import Framework, ModelSpec, Optimizer, Training
from lazymodel._abstract.variable import PathOf, path_of, path_text
from lazymodel._sharding.shard import resolve_logical
from lazymodel._trace.errors import is_iterator
from lazymodel._trace.function import trace_function

_PARAMS = "params/"  # prefix of the paths of the collection that Flax trains


def matches(build: Any) -> bool:
    """Returns True for a Linen module, or the class of one."""
    return isinstance(build, linen.Module) or (isinstance(build, type) and issubclass(build, linen.Module))


def build_abstract(module: linen.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
    """The abstract model of the variables dict that `module.init(*args, **kwargs)` would return.

    Args:
        module: An unbound Linen module; a class, which has no sizes yet, raises LazyModelError.
        args: The PRNG key or dict of keys, then the inputs of the module; inputs may be `jax.ShapeDtypeStruct`.
        kwargs: Keyword arguments of `init`.
    """
    if isinstance(module, type):
        raise LazyModelError(
            f"build_abstract got the Linen class {module.__name__}: pass a module, {module.__name__}(…), then the "
            "arguments of its init, a key and inputs"
        )

    model = trace_function(module.init, args, kwargs, name=type(module).__name__, path_of=variable_path)
    tree = model.framework.structure({path: path for path in model})
    boxes = [box for box in jax.tree.leaves(tree, is_leaf=_is_box) if isinstance(box, linen.Partitioned)]
    model = with_logical_axes(model, {box.value: (box.names, getattr(box, "rules", None)) for box in boxes})
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
        return Training(optimizer.init(params), lambda variables, state: (variables, state), variable_path, places)


# Paths without the boxes in which Flax keeps arrays, and axis names ---------------------------------------------------


def variable_path(keys: Sequence[Any]) -> str:
    """The path without the attribute in which a variable or box keeps its array."""
    return path_text(_without_values(keys))


def _without_values(keys: Sequence[Any]) -> list[Any]:
    return [key for key in keys if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")]


def by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by their paths, without the attributes in which variables and boxes keep arrays."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    name = path_of(tree)
    return {name(_without_values(keys)): leaf for keys, leaf in found}


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, linen.meta.AxisMetadata)


def has_boxes(tree: Any) -> bool:
    """Returns True if a tree contains one of Linen's boxes around an array."""
    return any(map(_is_box, jax.tree.leaves(tree, is_leaf=lambda leaf: _is_box(leaf) or is_iterator(leaf))))


def path_of_plain(tree: Any) -> PathOf:
    """The function that names the leaves of a tree without NNX objects, like `by_path` or the core."""
    name = path_of(tree)
    return (lambda keys: name(_without_values(keys))) if has_boxes(tree) else name


def with_logical_axes(model: ModelSpec, names: Mapping[str, tuple[Any, Any]]) -> ModelSpec:
    """The model with `logical_axes` on its variables.

    `names` maps path → axis names (a sequence, a PartitionSpec or a NamedSharding) and the variable's own rules for
    them, or None. Own rules are applied at once; names without an own rule stay.
    """
    variables = dict(model.variables)
    for path, (axes, rules) in names.items():
        if path in variables:
            axes = tuple(getattr(axes, "spec", axes))
            if rules:
                resolved, unknown = resolve_logical(axes, rules)
                axes = tuple(name if name in unknown else axis for name, axis in zip(axes, resolved, strict=True))
            variables[path] = dataclasses.replace(variables[path], logical_axes=axes)
    return model.with_variables(variables)

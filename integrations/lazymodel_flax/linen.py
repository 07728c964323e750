"""Flax Linen: a module and its init arguments → the variables dict that `module.init` would return.

Paths start with the collection, such as `params/Dense_0/kernel`. Boxes around arrays (`nn.LogicallyPartitioned`)
are kept by the rebuilt variables and leave no trace in the paths; their axis names are the variables' `logical_axes`.
What is trained is the collection `params`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen

from lazymodel import AbstractVariable, LazyModelError
from lazymodel._abstract.framework import Framework, Optimizer, Training
from lazymodel._abstract.spec import ModelSpec
from lazymodel._trace.function import trace_function
from lazymodel_flax._boxes import by_path, has_boxes, is_box, variable_path, with_logical_axes

_PARAMS = "params/"  # how the paths of the collection that Flax trains begin


def matches(build: Any) -> bool:
    """Whether this is a Linen module, or the class of one."""
    return isinstance(build, linen.Module) or (isinstance(build, type) and issubclass(build, linen.Module))


def build_abstract(module: linen.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelSpec:
    """What `module.init(*args, **kwargs)` would return; `materialize` returns the variables dict.

    Args:
        module: An unbound Linen module; a class, which has no sizes yet, is a LazyModelError.
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
    boxes = [box for box in jax.tree.leaves(tree, is_leaf=is_box) if isinstance(box, linen.Partitioned)]
    model = with_logical_axes(model, {box.value: (box.names, getattr(box, "rules", None)) for box in boxes})
    trainable = {path: dataclasses.replace(model[path], trainable=path.startswith(_PARAMS)) for path in model}

    return dataclasses.replace(model, variables=trainable, framework=_Linen(model.framework.structure))


class _Linen(Framework):
    """Variables dicts, of which an optimizer gets the parameters."""

    def start_training(
        self, variables: Mapping[str, AbstractVariable], optimizer: Optimizer, leaves: Mapping[str, Any]
    ) -> Training:
        # As `TrainState.create(params=variables["params"])` does; boxes of what is not trained hold None.
        params = self.structure({path: leaves.get(path) for path in variables})["params"]
        places = {path.removeprefix(_PARAMS): path for path in leaves}
        return Training(optimizer.init(params), lambda variables, state: (variables, state), variable_path, places)


def arrays(variables: Any) -> dict[str, Any] | None:
    """The leaves of a tree by path, without the boxes; None for what has no boxes."""
    return by_path(variables) if has_boxes(variables) else None

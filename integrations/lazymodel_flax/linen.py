"""Flax Linen: a module and its init arguments → the variables dict that `module.init` would return.

Paths start with the collection, such as `params/Dense_0/kernel`. Boxes around arrays (`nn.LogicallyPartitioned`)
are kept by the rebuilt variables and leave no trace in the paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen

from lazymodel import AbstractModel
from lazymodel._trace import path_text, trace_function


def matches(build: Any) -> bool:
    """Whether this is a Linen module (an instance: a class has no sizes yet)."""
    return isinstance(build, linen.Module)


def build_abstract(module: linen.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractModel:
    """What `module.init(*args, **kwargs)` would return.

    Args:
        module: An unbound Linen module.
        args: The PRNG key or dict of keys, then the inputs of the module; inputs may be `jax.ShapeDtypeStruct`.
        kwargs: Keyword arguments of `init`.

    Returns:
        An abstract model whose `materialize` returns the variables dict.

    Raises:
        TraceError: Initializing depends on the values of the inputs.
    """

    def init(*args: Any, **kwargs: Any) -> Any:
        return module.init(*args, **kwargs)

    return trace_function(init, args, kwargs, name=type(module).__name__, path_of=_path)


def _path(keys: Sequence[Any]) -> str:
    """The path without the attribute that a box keeps its array in."""
    return path_text([key for key in keys if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")])

"""Which variables of Flax' own layers must not be sharded over Explicit axes, on which JAX derives results' shardings.

For products of matrices, it depends on the inputs whether JAX can derive it, so nothing is said of them. For the layers
here JAX never can, unless the call gives `out_sharding`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from lazymodel import AbstractVariable

# Layer → the name of its variable, and how many leading dimensions must be whole: the rows of a table, of which some
# are taken, and all dimensions of a convolution's kernel. Exact types: a class of the user may call them otherwise.
_WHOLE: dict[type, tuple[str, int | None]] = {
    nnx.Embed: ("embedding", 1),
    nnx.Conv: ("kernel", None),
    nnx.ConvTranspose: ("kernel", None),
}


class Layers(NamedTuple):
    """What the code of an NNX module needs to be whole."""

    whole: Mapping[str, int | None]  # path of a variable → its number of leading dimensions for which that holds
    kinds: frozenset[type]  # the user's classes of modules

    @classmethod
    def of(cls, nodes: Any, own: Callable[[str], str]) -> Layers:
        """Those of NNX objects. `own` gives a variable's path in the model."""
        modules = [(path, node) for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Module)]
        known = [(path, _WHOLE[type(node)]) for path, node in modules if type(node) in _WHOLE]
        whole = {own("/".join(map(str, (*path, name)))): count for path, (name, count) in known}
        bases = {base for _, node in modules for base in type(node).__mro__ if issubclass(base, nnx.Module)}
        return cls(whole, frozenset(base for base in bases if base.__module__.partition(".")[0] != "flax"))

    def without(self, paths: Mapping[str, Any]) -> Layers:
        """Without variables that others replace."""
        return self._replace(whole={path: count for path, count in self.whole.items() if path not in paths})

    def unusable(self, variables: Mapping[str, AbstractVariable]) -> list[str]:
        """The paths of variables whose sharding makes every call of their layers fail."""
        placed = [(variables[path], count) for path, count in self.whole.items() if path in variables]
        found = [
            variable.path
            for variable, count in placed
            if variable.shape[0] > 1 and not variable.on_host and _is_explicit(variable.sharding, count)
        ]
        return [] if any(map(_says_sharding, self.kinds if found else ())) else found


NO_LAYERS = Layers({}, frozenset())


def _is_explicit(sharding: Any, count: int | None) -> bool:
    """Returns True if one of some leading dimensions is sharded over an Explicit axis."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return False
    kinds = zip(sharding.mesh.shape.items(), sharding.mesh.axis_types, strict=True)
    explicit = {name for (name, size), kind in kinds if size > 1 and kind == AxisType.Explicit}
    return any(explicit.intersection(axes if isinstance(axes, tuple) else (axes,)) for axes in sharding.spec[:count])


def _says_sharding(kind: type) -> bool:
    """Returns True if the code of a class may give calls of its layers `out_sharding`."""
    try:
        return "out_sharding" in inspect.getsource(kind)
    except (OSError, TypeError):  # its source is unknown
        return True

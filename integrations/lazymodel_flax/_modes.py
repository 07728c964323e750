"""How NNX keeps its variables: plain, as hijax objects or as references, and on the mesh of the context or not.

While a module is traced, its variables are plain and on no mesh; they are converted when it is rebuilt.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator
from typing import Any, cast

import jax
from flax import nnx

from lazymodel import LazyModelError
from lazymodel._programs.jaxprs import CONFIG

# Replaces True as the `eager_sharding` of variables while they are built: false, and set by no code of their own.
LATER = ""


@dataclasses.dataclass(frozen=True)
class Modes:
    """The way in which new variables are kept."""

    hijax: bool  # as hijax objects
    ref: bool  # their arrays as references
    eager: bool  # variables with axis names on the mesh of the context

    @classmethod
    def current(cls) -> Modes:
        """The current state of `nnx.var_defaults` and `nnx.use_eager_sharding`."""
        defaults = nnx.var_defaults()
        return cls(bool(defaults.hijax), bool(defaults.ref), bool(nnx.using_eager_sharding()))

    @contextlib.contextmanager
    def suspended(self) -> Generator[None]:
        """Keeps new variables plain, and on no mesh; `set_eager` and `applied` convert them later.

        The traces of jitted functions in the block are separate from all others: `nnx.jit` caches the module that a
        function returned, with its metadata. The default device is a part of the cache key of traces, and has no other
        effect on a trace.
        """
        device, first = CONFIG.jax_default_device, jax.local_devices()[0]
        other = first if device is None else None if device == first else device
        traces, later = jax.default_device(cast(Any, other)), cast(bool, LATER if self.eager else False)
        with nnx.var_defaults(hijax=False, ref=False), nnx.use_eager_sharding(later), traces:
            yield

    def applied(self, module: Any) -> Any:
        """A module of plain variables, converted to variables that are kept in this way."""
        if not (self.hijax or self.ref):
            return module
        return nnx.with_vars(module, hijax=self.hijax, ref=self.ref, allow_duplicates=True)


def as_plain(nodes: Any) -> Any:
    """NNX objects with plain variables; the objects themselves if they have only these."""
    special = any(node.hijax or node.ref for node in variables_of(nodes))
    return nnx.with_vars(nodes, hijax=False, ref=False, allow_duplicates=True) if special else nodes


def variables_of(nodes: Any) -> Iterator[Any]:
    return (node for _, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Variable))


def set_eager(nodes: Any, before: Any, after: Any) -> None:
    """Replaces one value of `eager_sharding` in the metadata of variables, which says if they are put on a mesh."""
    for node in variables_of(nodes):
        if node.get_metadata("eager_sharding", None) is before:
            node.set_metadata(eager_sharding=after)


def refuse_references(result: Any) -> None:
    """Raises LazyModelError if the code of a variable makes it a reference or a hijax object."""
    for path, node in nnx.iter_graph(result):
        if isinstance(node, nnx.Variable) and (node.hijax or node.ref):
            kind = "hijax" if node.hijax else "ref"
            raise LazyModelError(
                f"{'/'.join(map(str, path))!r} is made with {kind}=True of its own, and such variables cannot be "
                f"traced: build the whole model under nnx.var_defaults({kind}=True) instead"
            )

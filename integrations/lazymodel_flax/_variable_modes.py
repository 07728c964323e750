"""How NNX keeps its variables: plain, as references or as hijax objects, and put on a mesh at once or not.

Only plain variables that are put nowhere can be traced: JAX returns no references from a trace, hijax variables trace
to equations with effects, and a mesh need not be there yet. So a module is built of plain variables, and becomes what
eager construction makes of it when it is rebuilt.
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


@dataclasses.dataclass(frozen=True)
class _Later:
    """Stands for `eager_sharding` in a variable's metadata while it is built: false, and knows what it will be.

    A variable that was given `eager_sharding` by its own code has a bool instead.
    """

    value: bool

    def __bool__(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Modes:
    """How new variables are kept."""

    hijax: bool  # as hijax objects
    ref: bool  # their arrays as references
    eager: bool  # those with axis names on the mesh of the context

    @classmethod
    def current(cls) -> Modes:
        """As `nnx.var_defaults` and `nnx.use_eager_sharding` say right now."""
        defaults = nnx.var_defaults()
        return cls(bool(defaults.hijax), bool(defaults.ref), bool(nnx.using_eager_sharding()))

    @contextlib.contextmanager
    def suspended(self) -> Generator[None]:
        """New variables are plain, and put nowhere; `resolve_sharding` and `applied` make up for it."""
        later = cast(bool, _Later(self.eager))
        with nnx.var_defaults(hijax=False, ref=False), nnx.use_eager_sharding(later), _own_traces():
            yield

    def applied(self, module: Any) -> Any:
        """A module of plain variables as one of variables that are kept like this."""
        if not (self.hijax or self.ref):
            return module
        return nnx.with_vars(module, hijax=self.hijax, ref=self.ref, allow_duplicates=True)


def as_plain(nodes: Any) -> Any:
    """NNX objects with plain variables; themselves where they have no others."""
    return nnx.with_vars(nodes, hijax=False, ref=False, allow_duplicates=True) if _is_special(nodes) else nodes


def update_counts(nodes: Any, state: Any) -> None:
    """Takes counts over from a state; `nnx.update` alone would put arrays in the place of references."""
    if not _is_special(nodes):
        nnx.update(nodes, state)
        return
    counts = {path: node for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.RngCount)}
    for path, new in nnx.to_flat_state(state):
        if path in counts:
            counts[path][...] = new.get_value()


def _is_special(nodes: Any) -> bool:
    return any(node.hijax or node.ref for node in _variables(nodes))


def _variables(nodes: Any) -> Iterator[Any]:
    return (node for _, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Variable))


def suspend_sharding(nodes: Any) -> None:
    """Keeps variables that are put on a mesh from it for now, with what is made in their likeness."""
    for node in _variables(nodes):
        if node.get_metadata("eager_sharding", False) is True:
            node.set_metadata(eager_sharding=_Later(True))


def resolve_sharding(nodes: Any) -> None:
    """Says of every variable whether one like it is put on a mesh, as eager construction would have."""
    for node in _variables(nodes):
        if isinstance(mode := node.get_metadata("eager_sharding", False), _Later):
            node.set_metadata(eager_sharding=mode.value)


def refuse_references(result: Any) -> None:
    """Raises LazyModelError where a variable insists on being a reference or a hijax object."""
    for path, node in nnx.iter_graph(result):
        if isinstance(node, nnx.Variable) and (node.hijax or node.ref):
            kind = "hijax" if node.hijax else "ref"
            raise LazyModelError(
                f"{'/'.join(map(str, path))!r} is made with {kind}=True of its own, and such variables cannot be "
                f"traced: build the whole model under nnx.var_defaults({kind}=True) instead"
            )


@contextlib.contextmanager
def _own_traces() -> Generator[None]:
    """Keeps what jitted functions trace to apart from what they trace to for others.

    `nnx.jit` remembers the module that a function returned, metadata and all, so that another call would get variables
    that are not put on a mesh, or get ours from a trace in which they are. The default device is a part of the key that
    traces are remembered under, and makes no other difference to a trace.
    """
    device, first = CONFIG.jax_default_device, jax.local_devices()[0]
    other = first if device is None else None if device == first else device
    with jax.default_device(cast(Any, other)):
        yield

"""Whether devices can run anything: those that are here can, those of planning meshes cannot.

Responsible for telling them apart, and for the error of what needs devices that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, NamedSharding, Sharding

from lazymodel._errors import LazyModelError

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractVariable


def is_live(device: Any) -> bool:
    """Whether a device can run anything, and not only be compiled for."""
    return "CompileOnly" not in type(device.client).__name__


def is_arithmetic(sharding: Any) -> bool:
    """Whether a sharding is over a mesh without devices, for which nothing can even be compiled."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def require_live(variables: Mapping[str, AbstractVariable]) -> None:
    """Checks that every variable's devices are here, or in another process of this program.

    Raises:
        LazyModelError: One's are not.
    """
    known: set[Any] = set()  # few meshes serve many variables
    for path, variable in variables.items():
        sharding: Sharding | None = variable.sharding
        holder: Any = sharding.mesh if isinstance(sharding, NamedSharding) else sharding
        if sharding is None or holder in known:
            continue
        if is_arithmetic(sharding):
            what = "a mesh without devices (as lazymodel.arithmetic_mesh makes), for planning only"
        elif not is_live(next(iter(sharding.device_set))):
            what = "devices that are not here (as lazymodel.topology has), for planning and compiling only"
        else:
            known.add(holder)
            continue
        raise LazyModelError(
            f"{path!r} is sharded over {what}; shard the model over a jax.sharding.Mesh of jax.devices() before it is "
            "materialized"
        )

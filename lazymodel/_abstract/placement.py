"""Placement: the sharding of every variable, the devices that hold it, and the bytes on each.

Devices may exist, be compile-only, or be mere numbers of a mesh. Their free memory is not considered here.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from lazymodel._abstract.variable import AbstractVariable, is_offloaded

Signature: TypeAlias = "frozenset[Hashable]"


def device_shardings(variables: Mapping[str, AbstractVariable]) -> dict[str, Sharding]:
    """The sharding that each variable will be materialized with; the default device if none was assigned."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {path: variable.sharding or default for path, variable in variables.items()}


def is_narrowed(dtype: Any) -> bool:
    """Returns True if arrays of a NumPy dtype lose bits on their way to a device."""
    return bool(np.dtype(dtype) != jax.dtypes.canonicalize_dtype(dtype))


def stays_on_host(variable: AbstractVariable) -> bool:
    """Returns True if a variable is materialized as a NumPy array, and no device holds any of it."""
    if not variable.on_host:
        return False
    split = variable.sharding is not None and not variable.sharding.is_fully_replicated
    return not split or is_narrowed(variable.dtype)


class Placement:
    """The devices of shardings, grouped by what they hold.

    Every device of a mesh holds as many bytes of a variable as any other, so thousands of variables on thousands of
    devices form one group.

    Attributes:
        group: Path → the key of its devices, a mesh or a set.
        devices: Device → the groups that it belongs to; numbers stand for the devices of a mesh that has none.
        signatures: The number of devices that belong to the same groups.
        meshes: The meshes of all shardings that have one.
    """

    def __init__(self, shardings: Mapping[str, Sharding]) -> None:
        self.shardings = shardings
        self.group: dict[str, Hashable] = {
            path: sharding.mesh if isinstance(sharding, NamedSharding) else frozenset(sharding.device_set)
            for path, sharding in shardings.items()
        }
        members: dict[Any, set[Hashable]] = collections.defaultdict(set)
        for group in dict.fromkeys(self.group.values()):
            for device in _members(group):
                members[device].add(group)
        self.devices: dict[Any, Signature] = {device: frozenset(groups) for device, groups in members.items()}
        self.signatures = collections.Counter(self.devices.values())
        self.meshes: list[Any] = [g for g in dict.fromkeys(self.group.values()) if not isinstance(g, frozenset)]

    def held(self, amounts: Mapping[str, int]) -> dict[Signature, int]:
        """Bytes on each kind of device, from bytes by path."""
        by_group: collections.Counter[Hashable] = collections.Counter()
        for path, nbytes in amounts.items():
            by_group[self.group[path]] += nbytes
        return {signature: sum(by_group[group] for group in signature) for signature in self.signatures}

    def most_loaded(self, amounts: Mapping[str, int]) -> tuple[Signature, int]:
        """The kind of device with most of these bytes, and their number."""
        return max(self.held(amounts).items(), key=lambda item: item[1], default=(frozenset[Hashable](), 0))


def _members(group: Any) -> Iterator[Any]:
    if isinstance(group, frozenset):
        yield from cast("frozenset[Any]", group)
    else:
        yield from range(group.size) if isinstance(group, AbstractMesh) else group.devices.flat


def device_nbytes(variables: Iterable[AbstractVariable]) -> dict[Any, int]:
    """Bytes on each device that holds any of these variables, for variables with a sharding."""
    placed = {variable.path: variable for variable in variables if variable.sharding is not None}
    placement = Placement({path: cast("Sharding", variable.sharding) for path, variable in placed.items()})
    held = placement.held({path: resident_nbytes(variable) for path, variable in placed.items()})
    return {device: held[signature] for device, signature in placement.devices.items()}


def resident_nbytes(variable: AbstractVariable) -> int:
    """Bytes of a variable on each device of its sharding."""
    return 0 if stays_on_host(variable) or is_offloaded(variable.sharding) else variable.shard_nbytes


def offloaded_nbytes(variable: AbstractVariable) -> int:
    """Bytes of a variable that a host keeps for each of its devices."""
    return variable.shard_nbytes if is_offloaded(variable.sharding) and not stays_on_host(variable) else 0

"""An abstract model as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from lazymodel._table import Row, Table, folded_table, shape_text, spec_text
from lazymodel._text import format_bytes, plural

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractModel, AbstractVariable


def model_table(model: AbstractModel) -> Table:
    """A row for variables that differ only in numbers, largest first where there are too many."""
    sharded = any(variable.sharding is not None for variable in model.values())
    title = (
        f"{model.name}: {plural(len(model), 'variable')}, {plural(model.num_parameters, 'parameter')}, "
        f"{format_bytes(model.nbytes)}"
    )
    if sharded:
        per_device, devices = _fullest_device(model.values())
        title += f", {format_bytes(per_device)} per device on {plural(devices, 'device')}"

    def row(variable: AbstractVariable) -> Row:
        cells = (shape_text(variable.shape), variable.dtype.name)
        if sharded:
            other = None if variable.sharding is None else type(variable.sharding).__name__
            cells += (spec_text(variable.spec) if variable.spec is not None or other is None else other,)
        return Row(variable.path, cells, variable.shard_nbytes, variable.origin)

    headings = ("shape", "dtype", *(("spec", "bytes/device") if sharded else ("bytes",)), "origin")
    return folded_table(title, headings, map(row, model.values()))


def _fullest_device(variables: Iterable[AbstractVariable]) -> tuple[int, int]:
    """Bytes on the device that holds most, and the number of devices that hold anything."""
    by_sharding: dict[Any, int] = {}
    anywhere = 0
    for variable in variables:
        sharding = variable.sharding
        if sharding is None:
            anywhere += variable.shard_nbytes
        else:
            # Variables of one mesh share their devices: no need to walk thousands of devices once a variable.
            key: Any = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else sharding
            by_sharding[key] = by_sharding.get(key, 0) + variable.shard_nbytes
    per_device: dict[Any, int] = {}
    for key, nbytes in by_sharding.items():
        devices: Iterable[Any]
        if isinstance(key, jax.sharding.Mesh):
            devices = key.devices.flat
        elif isinstance(key, jax.sharding.AbstractMesh):
            devices = range(key.size)
        else:
            devices = key.device_set
        for device in devices:
            per_device[device] = per_device.get(device, 0) + nbytes
    return anywhere + max(per_device.values(), default=0), max(len(per_device), 1)

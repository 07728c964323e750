"""An abstract model as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazymodel._placement import device_nbytes
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
        held = device_nbytes(model.values())
        anywhere = sum(variable.shard_nbytes for variable in model.values() if variable.sharding is None)
        title += f", {format_bytes(max(held.values()) + anywhere)} per device on {plural(len(held), 'device')}"

    def row(variable: AbstractVariable) -> Row:
        cells = (shape_text(variable.shape), variable.dtype.name)
        if sharded:
            other = None if variable.sharding is None else type(variable.sharding).__name__
            cells += (spec_text(variable.spec) if variable.spec is not None or other is None else other,)
        return Row(variable.path, cells, variable.shard_nbytes, variable.origin)

    headings = ("shape", "dtype", *(("spec", "bytes/device") if sharded else ("bytes",)), "origin")
    return folded_table(title, headings, map(row, model.values()))

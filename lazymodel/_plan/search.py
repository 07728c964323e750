"""The search for the smallest slice of a TPU generation, or the fewest GPUs, on which a model fits."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any, cast

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import resident_nbytes
from lazymodel._compile import Compile
from lazymodel._devices.hardware import (
    arithmetic_mesh,
    check_axes,
    has_libtpu,
    topology,
    topology_names,
    tpu_generation,
)
from lazymodel._devices.hardware import device_memory as known_memory
from lazymodel._errors import DoesNotFitError, LazyModelError, LazyModelWarning, ShardingError
from lazymodel._plan.make import plan
from lazymodel._plan.what_if import WhatIf
from lazymodel._sharding.shard import Rules, named_rules, shard
from lazymodel._show.table import Column, Report, Table
from lazymodel._show.text import format_bytes, parse_bytes

_GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# How many candidates that fit by arithmetic are compiled before the search stops.
_CONFIRMED = 6
_INIT_PROGRAMS = Compile("init")


@dataclasses.dataclass(frozen=True)
class TopologyRow:
    """One slice that was considered."""

    name: str  # its name, for `topology`
    num_devices: int  # devices in it
    axes: Mapping[str, int]  # axis name to size
    # Bytes that a device must have by arithmetic, `MemoryPlan.needed_nbytes`; None where no plan was made because
    # the variables alone, split evenly over all devices, are too large.
    device_nbytes: int | None
    compiled_nbytes: int | None  # the same according to the compiler; None if nothing was compiled
    fits: bool  # True if it fits, by the compiler if it was compiled, else by arithmetic
    reason: str = ""  # why it does not fit; empty if it fits
    counted: str = ""  # what was counted, with its dtypes, and what was not; empty if no plan was made


@dataclasses.dataclass(frozen=True, repr=False)
class TopologyTable(Report):
    """The result of `smallest_topology`, smallest slice first."""

    model: str  # the model's name
    device_memory: int  # bytes that one device has
    rows: tuple[TopologyRow, ...]  # all slices considered; the last one fits

    @property
    def smallest(self) -> TopologyRow:
        """The smallest slice that fits."""
        return next(row for row in self.rows if row.fits)

    def table(self) -> Table:
        """The table, with a row for each slice."""

        def cells(row: TopologyRow) -> tuple[str, ...]:
            mesh = ", ".join(f"{axis}={length}" for axis, length in row.axes.items())
            verdict = "yes" if row.fits else f"no: {row.reason}"
            amounts = ("–" if n is None else format_bytes(n) for n in (row.device_nbytes, row.compiled_nbytes))
            return row.name, f"{row.num_devices:,}", mesh, *amounts, verdict

        title = f"{self.model} on devices of {format_bytes(self.device_memory)}"
        numbers = map(Column.number, ("arithmetic", "compiled"))
        columns = (Column("topology"), Column.number("devices"), Column("mesh"), *numbers, Column("fits"))
        lines = list(filter(None, dict.fromkeys(row.counted for row in self.rows)))
        return Table(title, columns, list(map(cells, self.rows)), lines)


def smallest_topology(
    abstract: ModelSpec,
    device: str,
    rules: Rules | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    max_devices: int = 1024,
    device_memory: int | str | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    what_if: WhatIf | None = None,
    compile: Compile | None = _INIT_PROGRAMS,
) -> TopologyTable:
    """The smallest slice of one generation on which a model fits: found by arithmetic, confirmed by the compiler.

    Args:
        abstract: The model; shardings that it has are replaced.
        device: A TPU generation, `"v5e"`, or a GPU, `"H100"`; 1, 2, 4, … of these are tried by arithmetic alone.
        rules: As for `AbstractModel.shard`.
        axes: As for `topology`; a size of -1 takes what a slice has. None means one axis, `"model"`.
        max_devices: Largest slice to consider.
        device_memory: Bytes of one device to use, or `"14GiB"`, if less than all.
        checkpoint: As for `AbstractModel.plan`.
        what_if: As for `AbstractModel.plan`.
        compile: What to compile as confirmation, as for `AbstractModel.plan`; None uses arithmetic alone, without
            libtpu.

    Raises:
        DoesNotFitError: It fits on no slice; names the nearest one, and what is missing.
        ShardingError: The rules fit on no slice.
        LazyModelError: The device is unknown, or libtpu is not installed and there is something to compile.

    Example:
        >>> lm.smallest_topology(abstract, "v5e", "auto", device_memory="32KiB", compile=None).smallest.name
        'v5e:2x2'
    """
    if not isinstance(cast(Any, device), str):
        raise LazyModelError(f"device is a TPU generation or a GPU, such as 'v5e' or 'H100'; got {device!r}")
    known = known_memory(device)
    if tpu_generation(device) is None and known is not None:
        names, compile = [f"{device}:{count}" for count in _GPU_COUNTS], None
    else:
        names = topology_names(device)
        if compile is not None and not has_libtpu():
            raise LazyModelError(
                'confirming by the compiler needs libtpu: pip install "lazymodel[tpu]", or pass compile=None'
            )
    assert known is not None  # every generation is in the table
    limit = known if device_memory is None else parse_bytes(device_memory, name="device_memory", at_least=1)
    check_axes(axes)
    options = {"checkpoint": checkpoint, "what_if": what_if, "device_memory": limit}
    search = _Search(abstract, named_rules(rules), axes, limit, options)
    rows: list[TopologyRow] = []
    for name in names:
        if arithmetic_mesh(name).size > max_devices:
            break
        row = search.by_arithmetic(name)
        if row.fits and compile is not None:
            row = search.by_compiler(row, compile)
        rows.append(row)
        if row.fits:
            return TopologyTable(abstract.name, limit, tuple(rows))
        if sum(row.compiled_nbytes is not None for row in rows) >= _CONFIRMED:
            break
    if search.mismatches and len(search.mismatches) == len(rows):  # memory is not the reason
        first = search.mismatches[0]
        raise ShardingError(f"the rules fit on no {device} slice. {rows[0].name}: {first}") from first
    raise DoesNotFitError(_nowhere(abstract, device, limit, max_devices, rows))


@dataclasses.dataclass(frozen=True)
class _Search:
    """A search for topologies; `mismatches` collects errors of the rules on slices."""

    model: ModelSpec
    rules: Any
    axes: Mapping[str, int] | None
    limit: int  # bytes of a device
    options: Mapping[str, Any]  # keywords of every plan
    mismatches: list[ShardingError] = dataclasses.field(default_factory=list[ShardingError])

    def sharded(self, mesh: Any) -> ModelSpec:
        # Unmatched variables are the same on every mesh; sharding on the chosen mesh warns about them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LazyModelWarning)
            return shard(self.model, mesh, self.rules)

    def by_arithmetic(self, name: str) -> TopologyRow:
        size = arithmetic_mesh(name).size
        row = TopologyRow(name, size, dict(self.axes or {}), None, None, False)
        try:
            mesh = arithmetic_mesh(name, self.axes)
        except LazyModelError as error:
            return dataclasses.replace(row, reason=_first_line(error))
        row = dataclasses.replace(row, axes=dict(mesh.shape))
        nbytes = sum(variable.nbytes for variable in self.model.values() if not variable.on_host)
        try:
            if nbytes > self.limit * size:  # without what rules offload, which is not on devices
                sharded = self.sharded(mesh).values()
                nbytes = sum(variable.nbytes for variable in sharded if resident_nbytes(variable))
            if nbytes <= self.limit * size:
                return self._judged(row, mesh, None, "device_nbytes")
        except ShardingError as error:
            if nbytes <= self.limit * size:
                self.mismatches.append(error)
                return dataclasses.replace(row, reason=_first_line(error))
        reason = f"{format_bytes(math.ceil(nbytes / size))} a device even if everything is split"
        return dataclasses.replace(row, reason=reason)

    def by_compiler(self, row: TopologyRow, compile: Compile) -> TopologyRow:
        try:
            return self._judged(row, topology(row.name, row.axes), compile, "compiled_nbytes")
        except DoesNotFitError as error:
            needed = error.needed_nbytes or 0
            return dataclasses.replace(row, compiled_nbytes=needed, fits=False, reason=_first_line(error))

    def _judged(self, row: TopologyRow, mesh: Any, compile: Compile | None, nbytes: str) -> TopologyRow:
        found = plan(self.sharded(mesh), compile=compile, **self.options)
        short, fits = found.needed_nbytes - self.limit, bool(found.fits)
        reason = f"{format_bytes(short)} too little" if short > 0 else "" if fits else found.verdict()
        own = {nbytes: found.needed_nbytes, "fits": fits, "reason": reason, "counted": found.counted_text()}
        return dataclasses.replace(row, **own)


def _nowhere(abstract: ModelSpec, device: str, limit: int, max_devices: int, rows: list[TopologyRow]) -> str:
    start = (
        f"{abstract.name} ({format_bytes(abstract.nbytes)}) fits on no {device} slice of at most {max_devices} devices"
    )
    if not rows:
        return f"{start}: the smallest slice has more"
    known = {needed: row for row in reversed(rows) if (needed := row.compiled_nbytes or row.device_nbytes)}
    needed, nearest = min(known.items(), default=(0, rows[-1]), key=lambda item: item[0])
    if needed <= limit:  # the reason is another one than a plan's bytes
        return f"{start} of {format_bytes(limit)}; {nearest.name}: {nearest.reason}"
    return (
        f"{start} of {format_bytes(limit)}; nearest is {nearest.name} with {format_bytes(needed)} on a device. "
        "Rules that split more, more axes, a smaller dtype or a larger max_devices would help."
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]

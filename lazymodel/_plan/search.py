"""The search for the smallest slice of a TPU generation, or the fewest cards, on which a model fits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from lazymodel._abstract.placement import resident_nbytes
from lazymodel._abstract.spec import ModelSpec
from lazymodel._compile.compile import Compile
from lazymodel._devices.hardware import device_memory as known_memory
from lazymodel._devices.hardware import tpu_generation
from lazymodel._devices.topology import arithmetic_mesh, check_axes, has_libtpu, topology, topology_names
from lazymodel._errors import DoesNotFitError, LazyModelError, ShardingError
from lazymodel._plan.make import plan
from lazymodel._plan.plan import MemoryPlan
from lazymodel._plan.what_if import WhatIf
from lazymodel._sharding.rules import Rules, named_rules
from lazymodel._sharding.shard import shard
from lazymodel._show.table import Table, Tabled
from lazymodel._show.text import format_bytes, parse_bytes

_CARD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# How many candidates that fit by arithmetic are given to the compiler before the search gives up.
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
    compiled_nbytes: int | None  # the same as the compiler says; None where it was not asked
    fits: bool  # whether it fits by the best knowledge there is
    reason: str = ""  # why not; empty where it fits
    counted: str = ""  # what was counted, with its dtypes, and what was not; empty where no plan was made


@dataclasses.dataclass(frozen=True, repr=False)
class TopologyTable(Tabled):
    """What `smallest_topology` found, smallest slice first."""

    model: str  # the model's name
    device_memory: int  # bytes that one device has
    rows: tuple[TopologyRow, ...]  # all slices considered; the last one fits

    @property
    def smallest(self) -> TopologyRow:
        """The smallest slice that fits."""
        return next(row for row in self.rows if row.fits)

    def table(self) -> Table:
        """What is shown: a row a slice."""

        def cells(row: TopologyRow) -> tuple[str, ...]:
            mesh = ", ".join(f"{axis}={length}" for axis, length in row.axes.items())
            verdict = "yes" if row.fits else f"no: {row.reason}"
            amounts = ("–" if n is None else format_bytes(n) for n in (row.device_nbytes, row.compiled_nbytes))
            return row.name, f"{row.num_devices:,}", mesh, *amounts, verdict

        title = f"{self.model} on devices of {format_bytes(self.device_memory)}"
        columns = ("topology", "devices", "mesh", "arithmetic", "compiled", "fits")
        right = frozenset(("devices", "arithmetic", "compiled"))
        lines = list(filter(None, dict.fromkeys(row.counted for row in self.rows)))
        return Table(title, columns, list(map(cells, self.rows)), right, lines)


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
        device: A TPU generation, `"v5e"`, or a card, `"H100"`, of which 1, 2, 4, … are tried by arithmetic alone.
        rules: As for `AbstractModel.shard`.
        axes: As for `topology`; a size of -1 takes what a slice has. None is one axis, `"model"`.
        max_devices: Largest slice to consider.
        device_memory: Bytes of one device, or `"14GiB"`, if less than the device has is to be used.
        checkpoint: As for `AbstractModel.plan`.
        what_if: As for `AbstractModel.plan`.
        compile: What is compiled to confirm, as for `AbstractModel.plan`; None is arithmetic alone, for which libtpu
            need not be installed.

    Raises:
        DoesNotFitError: It fits on none; names the one that comes nearest, and by how much.
        ShardingError: The rules fit on none.
        LazyModelError: The device is unknown, or libtpu is not installed and there is something to compile.

    Example:
        >>> lm.smallest_topology(abstract, "v5e", "auto", device_memory="32KiB", compile=None).smallest.name
        'v5e:2x2'
    """
    given: Any = device
    if not isinstance(given, str):
        raise LazyModelError(f"a TPU generation or a card is named, such as 'v5e' or 'H100'; got {given!r}")
    known = known_memory(device)
    if tpu_generation(device) is None and known is not None:
        names, compile = [f"{device}:{count}" for count in _CARD_COUNTS], None
    else:
        names = topology_names(device)
        if compile is not None and not has_libtpu():
            raise LazyModelError(
                'confirming by the compiler needs libtpu: pip install "lazymodel[tpu]", or pass compile=None'
            )
    assert known is not None  # every generation is in the table
    limit = known if device_memory is None else parse_bytes(device_memory, name="device_memory", at_least=1)
    check_axes(axes)
    rules = named_rules(rules)

    def sharded(mesh: Any) -> ModelSpec:
        # What rules leave unmatched is the same on every mesh, and said when the chosen one is sharded.
        return shard(abstract, mesh, rules, on_unmatched="ignore")

    def planned(mesh: Any, compile: Compile | None) -> MemoryPlan:
        return plan(sharded(mesh), checkpoint, device_memory=limit, what_if=what_if, compile=compile)

    rows: list[TopologyRow] = []
    misfits: list[ShardingError] = []
    for name in names:
        if arithmetic_mesh(name).size > max_devices:
            break
        row = _consider(abstract, name, axes, limit, sharded, planned, misfits)
        if row.fits and compile is not None:
            row = _confirm(row, limit, compile, planned)
        rows.append(row)
        if row.fits:
            return TopologyTable(abstract.name, limit, tuple(rows))
        if sum(row.compiled_nbytes is not None for row in rows) >= _CONFIRMED:
            break
    if misfits and len(misfits) == len(rows):  # no matter of memory
        raise ShardingError(f"the rules fit on no {device} slice. {rows[0].name}: {misfits[0]}") from misfits[0]
    raise DoesNotFitError(_nowhere(abstract, device, limit, max_devices, rows))


def _consider(
    abstract: ModelSpec,
    name: str,
    axes: Mapping[str, int] | None,
    limit: int,
    sharded: Callable[[Any], ModelSpec],
    planned: Callable[[Any, None], MemoryPlan],
    misfits: list[ShardingError],
) -> TopologyRow:
    """One slice by arithmetic; an error of the rules there is appended to `misfits`."""
    size = arithmetic_mesh(name).size
    row = TopologyRow(name, size, dict(axes or {}), None, None, False)
    try:
        mesh = arithmetic_mesh(name, axes)
    except LazyModelError as error:
        return dataclasses.replace(row, reason=_first_line(error))
    row = dataclasses.replace(row, axes=dict(mesh.shape))
    nbytes = sum(variable.nbytes for variable in abstract.values() if not variable.on_host)
    if nbytes > limit * size:
        with contextlib.suppress(ShardingError):  # what rules offload is no device's
            nbytes = sum(variable.nbytes for variable in sharded(mesh).values() if resident_nbytes(variable))
    if nbytes > limit * size:
        reason = f"{format_bytes(math.ceil(nbytes / size))} a device even if everything is split"
        return dataclasses.replace(row, reason=reason)
    try:
        found = planned(mesh, None)
    except ShardingError as error:
        misfits.append(error)
        return dataclasses.replace(row, reason=_first_line(error))
    return _judged(row, found, limit, device_nbytes=found.needed_nbytes)


def _confirm(
    row: TopologyRow, limit: int, compile: Compile, planned: Callable[[Any, Compile], MemoryPlan]
) -> TopologyRow:
    """One slice by the compiler."""
    try:
        found = planned(topology(row.name, row.axes), compile)
    except DoesNotFitError as error:
        needed = error.needed_nbytes or 0
        return dataclasses.replace(row, compiled_nbytes=needed, fits=False, reason=_first_line(error))
    return _judged(row, found, limit, compiled_nbytes=found.needed_nbytes)


def _judged(row: TopologyRow, found: MemoryPlan, limit: int, **nbytes: int) -> TopologyRow:
    short, fits = found.needed_nbytes - limit, bool(found.fits)
    reason = f"{format_bytes(short)} too little" if short > 0 else "" if fits else found.verdict()
    return dataclasses.replace(row, fits=fits, reason=reason, counted=found.counted_text(), **nbytes)


def _nowhere(abstract: ModelSpec, device: str, limit: int, max_devices: int, rows: list[TopologyRow]) -> str:
    size = format_bytes(abstract.nbytes)
    start = f"{abstract.name} ({size}) fits on no {device} slice of at most {max_devices} devices"
    if known := {needed: row for row in reversed(rows) if (needed := row.compiled_nbytes or row.device_nbytes)}:
        needed, nearest = min(known.items(), key=lambda item: item[0])
        if needed <= limit:  # its devices have enough
            return f"{start}; {nearest.name}: {nearest.reason}"
        return (
            f"{start} of {format_bytes(limit)}; nearest is {nearest.name} with {format_bytes(needed)} on a device. "
            "Rules that split more, more axes, a smaller dtype or a larger max_devices would help."
        )
    if not rows:
        return f"{start}: the smallest slice has more"
    return f"{start} of {format_bytes(limit)}; {rows[-1].name}: {rows[-1].reason}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]

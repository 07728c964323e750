"""The memory plan: its numbers, as tables and plain values; shows if a model fits, or which devices would fit it.

`_plan/make` computes the numbers.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from lazymodel._devices.hardware import CompiledMemory
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._plan.use import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from lazymodel._show.table import ACTIONS, Column, Report, Table, Tabled, placed_text, plain, shape_text, spec_text
from lazymodel._show.text import PALETTE, empty_figure, finished_figure, format_bytes, parse_bytes, plural

_WIDTH, _HEIGHT = 800, 24  # pixels of a bar on a page
_GIB = 2**30
_OTHER = "#999999"
_COLOURS: dict[str, str] = {
    **dict(zip(("parameters", "LoRA", "optimizer state", "gradients", "activations"), PALETTE, strict=False)),
    "held": PALETTE[0],
    "temporaries": _OTHER,
    "peak while materializing": _OTHER,
}
_LIMIT = PALETTE[5]

_OFFENDERS = 5  # how many variables `check` names
_LARGEST = 3  # how many variables the table names if the model does not fit


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One variable in a plan."""

    path: str  # the variable's path
    shape: tuple[int, ...]  # its global shape
    dtype: Any  # its dtype
    spec: PartitionSpec | None  # its partition spec, or None for a variable on one device
    shard_nbytes: int  # bytes that each of its devices holds in its own memory
    nbytes: int  # bytes of the whole variable
    action: str  # `"load"` from a checkpoint, `"initialize"` by a program, or `"constant"`
    source: str  # file and tensor, or the initializer, as text
    # Bytes that each of its devices holds for it while the model is used: the variable (quantized if requested), its
    # LoRA pair, its gradient and the slots of an optimizer from a `WhatIf`. Optimizer state that the model has is in
    # rows of its own.
    used_nbytes: int = 0
    memory_kind: str | None = None  # its kind of memory, such as `pinned_host`; None is the devices' own memory
    offloaded_nbytes: int = 0  # bytes that the host keeps for it for each of its devices, slots of a `WhatIf` included
    why: str = ""  # the reason for its sharding
    padding_nbytes: int = 0  # bytes of `shard_nbytes` that only fill up the tiles of a TPU

    @property
    def most_nbytes(self) -> int:
        """Bytes that each of its devices must have for it, materializing or in use."""
        return max(self.shard_nbytes, self.used_nbytes)


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """One step of materializing, on the most loaded device."""

    path: str  # of the variable that is created, or of the first one that a program creates
    action: str  # as in `PlanRow`
    held_nbytes: int  # bytes held after it is created
    peak_nbytes: int  # most bytes held while it is created, temporaries included
    offloaded_nbytes: int = 0  # bytes that the host keeps for the device after it is created


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """Bytes that one process will hold and read."""

    index: int  # its `process_index`
    num_devices: int  # how many of the model's devices belong to it
    device_nbytes: int  # bytes that these devices hold together after loading
    read_nbytes: int  # bytes that it reads from files, every distinct shard once
    staging_nbytes: int  # limit of the host memory that these bytes pass through; `max_host_memory` lowers it
    # Most host memory while loading and in use: staging, what is kept for devices and, if these are CPUs, what they
    # hold.
    peak_nbytes: int
    offloaded_nbytes: int = 0  # bytes that it keeps for its devices in use, in memory such as `pinned_host`


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan(Report):
    """Memory, bytes and programs of materializing and using a model.

    Attributes:
        name: The model's name.
        rows: One row per variable, in the model's order.
        device_nbytes: Bytes of the most loaded device after loading.
        peak_nbytes: Most bytes that a device holds while materializing, temporaries of the init programs included.
        read_nbytes: Bytes that this process reads from files, every distinct shard once. For devices that do not exist,
            bytes of the process that reads most.
        host_nbytes: Bytes of the largest single shard that passes through this process's host memory.
        num_devices: Number of devices that hold anything.
        device_memory: Bytes that one device has, or None without a limit (CPU).
        programs: Number of compiled init programs; 0 where their temporaries are estimated.
        parts: Bytes that the most loaded device holds while the model is used, by kind: `"parameters"`, `"LoRA"`,
            `"optimizer state"`, `"gradients"`, `"activations"` (with all other temporaries of a compiled program, and
            for a training step its gradients).
        counted: For each kind in `parts` the dtypes that were counted, or how activations were. A kind that is missing
            was not counted, activations above all.
        timeline: The steps of materializing, in order.
        hosts: One row per process; empty for a mesh without devices.
        device_kind: The kind of the devices, or an empty string.
        mesh: Axis names and sizes; empty without a mesh.
        compiled: The compiler's numbers for the forward pass or training step, if one was compiled.
        offloaded_nbytes: Bytes that the most loaded host keeps for its devices, in memory such as `pinned_host`.
        host_memory: Bytes that one host has, if given, or if known and something is offloaded; otherwise None.
        notes: Remarks on how the numbers were computed.

    Example:
        >>> plan = sharded.plan(device_memory="16GiB").check()
        >>> plan.device_nbytes, plan.num_devices, plan.fits
        (16384, 8, True)
    """

    name: str
    rows: tuple[PlanRow, ...]
    device_nbytes: int
    peak_nbytes: int
    read_nbytes: int
    host_nbytes: int
    num_devices: int
    device_memory: int | None
    programs: int
    parts: Mapping[str, int]
    counted: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    timeline: tuple[PlanStep, ...] = ()
    hosts: tuple[HostPlan, ...] = ()
    device_kind: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    compiled: CompiledMemory | None = None
    offloaded_nbytes: int = 0
    host_memory: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def used_nbytes(self) -> int:
        """Bytes of the most loaded device while the model is used: the sum of `parts`."""
        return sum(self.parts.values())

    @property
    def needed_nbytes(self) -> int:
        """Bytes that a device must have, to materialize the model and to use it."""
        return max(self.peak_nbytes, self.used_nbytes)

    @property
    def needed_host_nbytes(self) -> int:
        """Bytes that a host must have, to materialize the model and to keep what is offloaded."""
        return max([self.offloaded_nbytes, *(host.peak_nbytes for host in self.hosts)])

    @property
    def fits(self) -> bool | None:
        """True if the bytes `counted` fit devices, and hosts if these count; None if that is unknown."""
        if self._host_short() > 0:
            return False
        return None if self.device_memory is None else self.needed_nbytes <= self.device_memory

    @property
    def error_nbytes(self) -> int:
        """The error of the bytes on a device: a quarter of activations that are estimated."""
        return self.parts[ACTIVATIONS] // 4 if self.counted.get(ACTIVATIONS) == "estimated" else 0

    @property
    def tight(self) -> bool:
        """True if less is left on a device than the error of the estimate."""
        return bool(self.fits) and (self.device_memory or 0) - self.needed_nbytes < self.error_nbytes

    def _host_short(self) -> int:
        """Bytes that are missing on a host, as far as is known; negative if bytes are left."""
        return 0 if self.host_memory is None else self.needed_host_nbytes - self.host_memory

    def check(self, device_memory: int | str | None = None) -> MemoryPlan:
        """Returns the plan itself if it fits `device_memory`, in bytes or as `"16GiB"`; None takes the plan's own.

        Raises:
            DoesNotFitError: It does not fit, or hosts have too little memory; names the largest variables and hints.
        """
        limit = self.device_memory
        if device_memory is not None:
            limit = parse_bytes(device_memory, name="device_memory", at_least=1)
        if self.host_memory is not None and self._host_short() > 0:
            raise self._too_large(
                "host", f"{format_bytes(self.offloaded_nbytes)} of them kept for its devices",
                self.needed_host_nbytes, self.host_memory, self._largest(_OFFENDERS, "offloaded_nbytes"),
                "Keep less there, split it over more hosts, or use a smaller dtype.",
            )  # fmt: skip
        if limit is not None and self.needed_nbytes > limit:
            how = f"{format_bytes(self.device_nbytes)} once materialized"
            if set(self.parts) - {PARAMETERS}:
                how += f"; in use {format_bytes(self.used_nbytes)}: {self._listed_parts()}"
            names = self._largest(_OFFENDERS, "most_nbytes")
            raise self._too_large("device", how, self.needed_nbytes, limit, names, self.hint(limit))
        return self

    def _too_large(self, place: str, how: str, needed: int, limit: int, largest: str, hint: str) -> DoesNotFitError:
        return DoesNotFitError(
            f"{self.name} needs {format_bytes(needed)} on a {place} ({how}) and a {place} has {format_bytes(limit)}, "
            f"{format_bytes(needed - limit)} too little. {largest and f'Largest on a {place}: {largest}. '}{hint}",
            needed_nbytes=needed,
            limit_nbytes=limit,
        )

    def _replicated(self, row: PlanRow) -> bool:
        return row.shard_nbytes - row.padding_nbytes == row.nbytes and row.memory_kind is None and self.num_devices > 1

    def _largest(self, count: int, key: str) -> str:
        """The variables with the largest values of an attribute of rows, as text."""
        return ", ".join(
            f"{row.path} {format_bytes(getattr(row, key))}{' (replicated)' if self._replicated(row) else ''}"
            for row in heapq.nlargest(count, self.rows, key=lambda row: getattr(row, key))
            if getattr(row, key)
        )

    def hint(self, device_memory: int) -> str:
        """Suggests, by arithmetic, how the model would fit devices with this many bytes."""
        if (state := self.parts.get(OPTIMIZER, 0)) and self.needed_nbytes - state <= device_memory:
            return (
                "With the optimizer state in hosts' memory (memory_kind='pinned_host') it would fit, by arithmetic; or "
                "shard these further, use more devices, or a smaller dtype."
            )
        replicated, fixed = self._fixed()
        if replicated > device_memory // 2:
            whole = f"{format_bytes(replicated)} are replicated on every device, and more devices do not change that"
            return f"{whole}: shard these further, or use a smaller dtype."
        if fixed >= device_memory:
            same = f"{format_bytes(fixed)} of a device are activations or replicated variables"
            return f"{same}: use a smaller batch or sequence, or split the batch over more devices."
        split = (self.needed_nbytes - fixed) * self.num_devices
        devices = 1 << max(math.ceil(split / (device_memory - fixed)) - 1, 0).bit_length()
        return (
            f"With everything else split evenly it would fit {devices:,} such devices. Shard these further, use more "
            "devices, or a smaller dtype such as bfloat16."
        )

    def _fixed(self) -> tuple[int, int]:
        """Bytes of a device that do not shrink with more devices: replicated ones, and these with activations."""
        replicated = sum(row.most_nbytes for row in self.rows if self._replicated(row))
        return replicated, self.parts.get(ACTIVATIONS, 0) + replicated

    def by_module(self, depth: int = 1) -> Modules:
        """Sums the variables by module, as named by the first parts of their paths, to this depth (at least 1).

        Example:
            >>> print(sharded.plan().by_module(depth=2))
            init by module
            module  count  variables each  bytes each  in use each  bytes/device
            ────────────────────────────────────────────────────────────────────
            down        1               1   64.00 KiB     8.00 KiB      8.00 KiB
            up          1               1   64.00 KiB     8.00 KiB      8.00 KiB
        """
        if type(depth) is not int or depth < 1:
            raise LazyModelError(f"depth is a number of path parts, from 1; got {depth!r}")
        sums: dict[tuple[str, ...], list[int]] = {}
        for row in self.rows:
            parts = tuple(row.path.split("/"))
            for length in range(1, min(depth, max(len(parts) - 1, 1)) + 1):
                entry = sums.setdefault(parts[:length], [0, 0, 0, 0])
                for index, amount in enumerate((1, row.nbytes, row.shard_nbytes, row.used_nbytes)):
                    entry[index] += amount
        first = {prefix: position for position, prefix in enumerate(sums)}
        order = sorted(sums, key=lambda prefix: [first[prefix[: n + 1]] for n in range(len(prefix))])
        modules = Modules(ModuleRow("/".join(prefix), len(prefix), *sums[prefix]) for prefix in order)
        modules.name = self.name
        return modules

    def plot(self, path: Any = None) -> Any:
        """Draws what a device holds against its memory, and the timeline; returns a `matplotlib.figure.Figure`.

        Args:
            path: A file to write (`.png`, `.svg`, …); None only returns the figure.

        Raises:
            LazyModelError: matplotlib is not installed, or the file cannot be written.
        """
        figure = empty_figure((9.6, 3.6))
        left, right = figure.subplots(1, 2, width_ratios=(1, 2))
        while_made = {"held": self.device_nbytes, "peak while materializing": self.peak_nbytes - self.device_nbytes}
        for where, parts in (("in use", self.parts), ("materializing", while_made)):
            bottom = 0.0
            for kind, nbytes in parts.items():
                label = f"{kind}, {format_bytes(nbytes)}"
                left.bar(where, nbytes / _GIB, bottom=bottom, color=_COLOURS.get(kind), label=label)
                bottom += nbytes / _GIB
        left.set_ylabel("GiB on the most loaded device")
        steps = range(1, len(self.timeline) + 1)
        after, during = ([getattr(s, n) / _GIB for s in self.timeline] for n in ("held_nbytes", "peak_nbytes"))
        for label, least, most in (("temporaries", after, during), ("held", 0, after)):
            right.fill_between(steps, least, most, step="mid", color=_COLOURS[label], linewidth=0, label=label)
        right.set_xlabel("step of materializing")
        for axes in (left, right):
            if (limit := self.device_memory) is not None:
                label = f"device memory, {format_bytes(limit)}"
                axes.axhline(limit / _GIB, color=_LIMIT, linestyle="--", linewidth=1, label=label)
            axes.legend(fontsize=7, frameon=False)
            axes.set_ylim(0, None)
        return finished_figure(figure, self.name, path)

    def drawing(self) -> str:
        """An SVG of what the most loaded device holds in use, by kind, against its memory."""
        limit, at = self.device_memory, 0.0
        scale = _WIDTH / max(self.used_nbytes, limit or 0, 1)
        shapes, labels = list[str](), list[tuple[str, str]]()
        for kind, nbytes in self.parts.items():
            colour, width = _COLOURS.get(kind, _OTHER), nbytes * scale
            shapes.append(f'<rect x="{at:.1f}" width="{width:.1f}" height="{_HEIGHT}" fill="{colour}"/>')
            labels.append((colour, f"{kind}, {format_bytes(nbytes)}"))
            at += width
        if limit is not None:
            shapes.append(f'<rect x="{limit * scale - 2:.1f}" width="2" height="{_HEIGHT}" fill="{_LIMIT}"/>')
            labels.append((_LIMIT, f"device memory, {format_bytes(limit)}"))
        for row, (colour, label) in enumerate(labels, start=2):
            y = row * _HEIGHT
            shapes.append(f'<text y="{y}" fill="{colour}">■ <tspan fill="currentColor">{label}</tspan></text>')
        size = f'width="{_WIDTH}" height="{(len(labels) + 2) * _HEIGHT}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(shapes)}</svg>'

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, strings and numbers, which `json` writes and reads back equal."""
        found = plain(self)
        for name in ("fits", "tight", "needed_nbytes", "needed_host_nbytes", "used_nbytes"):
            found[name] = getattr(self, name)
        found["not_counted"] = [] if ACTIVATIONS in self.parts else [ACTIVATIONS]
        found["modules"] = plain(self.by_module(depth=2))
        return found | {"variables": found.pop("rows")}

    def table(self) -> Table:
        """The variables, and a summary below."""

        def cells(row: PlanRow) -> tuple[Any, ...]:
            action = ACTIONS.get(row.action, row.action)
            away = not (row.shard_nbytes or row.memory_kind) and row.nbytes
            spec = "on the host" if away else placed_text(spec_text(row.spec), row.memory_kind)
            note = action + (f": {row.source}" if row.action == "initialize" else "")
            names = row.path, shape_text(row.shape), row.dtype.name, spec
            return *names, row.shard_nbytes, row.used_nbytes, note, row.source, row.why

        nbytes = format_bytes(sum(row.nbytes for row in self.rows))
        title = f"{self.name}: plan for {plural(len(self.rows), 'variable')}, {nbytes}"
        columns = (
            Column.names("variable"), Column("shape"), Column("dtype"), Column("partition spec"),
            Column.nbytes("bytes/device"), Column.nbytes("bytes on a device", page=True),
            Column.notes("value"), Column.in_pages("from"), Column.in_pages("why"),
        )  # fmt: skip
        lines = [*self._device_lines(), *self._host_lines(), *self.notes]
        return Table(title, columns, [*map(cells, self.rows)], lines)

    def _device_lines(self) -> Iterable[str]:
        if self.mesh or self.device_kind:
            mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
            yield " of ".join(filter(None, (mesh and f"mesh: {mesh}", self.device_kind)))
        device = "device" if self.num_devices == 1 else f"most loaded of {self.num_devices:,} devices"
        yield (
            f"{device}: {format_bytes(self.device_nbytes)} resident, "
            f"{format_bytes(self.peak_nbytes)} at the peak while materializing"
        )
        yield self.counted_text()
        if len(self.parts) > 1 or self.used_nbytes != self.device_nbytes:
            yield f"in use{self._beside()}: {format_bytes(self.used_nbytes)}: {self._listed_parts()}"
        if self.device_memory is not None:
            yield f"device memory: {format_bytes(self.device_memory)}; {self._device_verdict(self.device_memory)}"
            if self.needed_nbytes > self.device_memory:
                yield f"largest on a device: {self._largest(_LARGEST, 'most_nbytes')}"
                yield self.hint(self.device_memory)

    def _host_lines(self) -> Iterable[str]:
        for action in dict.fromkeys(row.action for row in self.rows):
            sizes = [row.nbytes for row in self.rows if row.action == action]
            line = f"{ACTIONS.get(action, action)}: {plural(len(sizes), 'variable')}, {format_bytes(sum(sizes))}"
            if action == "load":
                reader = "this process" if len(self.hosts) <= 1 else "the process that reads most"
                line += f"; {reader} reads {format_bytes(self.read_nbytes)}"
                line += f", its largest shard in host memory is {format_bytes(self.host_nbytes)}"
            elif action == "initialize" and self.programs:
                line += f"; {plural(self.programs, 'compiled program')}"
            yield line
        if self.hosts:
            largest = max(host.peak_nbytes for host in self.hosts)
            each = "host" if len(self.hosts) == 1 else f"each of {len(self.hosts):,} hosts, at most"
            yield f"{each}: {format_bytes(largest)} of host memory while materializing"
        if self.offloaded_nbytes:
            yield f"offloaded: {format_bytes(self.offloaded_nbytes)} that a host keeps for its devices"
        if self.host_memory is not None:
            verdict = _verdict(self.needed_host_nbytes, self.host_memory)
            yield f"host memory: {format_bytes(self.host_memory)}; {verdict}"

    def _beside(self) -> str:
        beside = [kind for kind in (GRADIENTS, OPTIMIZER) if self.parts.get(kind)]
        return f", with {' and '.join(beside)}" if beside else ""

    def _listed_parts(self) -> str:
        return ", ".join(f"{format_bytes(nbytes)} {kind}" for kind, nbytes in self.parts.items())

    def verdict(self) -> str:
        """The verdict: if it fits devices, with how many bytes left; or that it does not fit hosts."""
        fits_device = self.device_memory is None or self.needed_nbytes <= self.device_memory
        if fits_device and (short := self._host_short()) > 0:
            return f"does not fit a host, {format_bytes(short)} short"
        return "unknown" if self.device_memory is None else self._device_verdict(self.device_memory)

    def _device_verdict(self, limit: int) -> str:
        without = "" if ACTIVATIONS in self.parts else " without activations"
        text = _verdict(self.needed_nbytes, limit).replace("fits,", f"fits{without},")
        if not self.tight:
            return text
        return (
            f"{text.replace('fits', 'tight')}, less than the error of the estimate, {format_bytes(self.error_nbytes)}"
        )

    def counted_text(self) -> str:
        """Describes what was counted on devices, with dtypes, and what was not counted."""
        counted = ", ".join(f"{kind} ({how})" for kind, how in self.counted.items())
        if ACTIVATIONS in self.parts:
            return f"counted: {counted}"
        how = "add WhatIf(batch=…, sequence=…) for an estimate, plan(compile=…) for the compiler's count"
        return f"counted: {counted}; not counted: activations ({how})"


def _verdict(needed: int, limit: int) -> str:
    spare = limit - needed
    return f"fits, {format_bytes(spare)} to spare" if spare >= 0 else f"does not fit, {format_bytes(-spare)} short"


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """One module of a plan: the variables whose paths begin with its path."""

    path: str
    depth: int  # parts of the path
    variables: int  # number of its variables
    nbytes: int  # their bytes, each variable counted once
    shard_nbytes: int  # their bytes on a device that holds all of them
    used_nbytes: int  # the same while the model is used; see `PlanRow`


class Modules(Tabled, list[ModuleRow]):
    """A plan by module, outer modules before inner ones; prints as a table."""

    name = ""

    def table(self) -> Table:
        """Rows indented by their depth; rows of one depth may be folded."""
        numbers = map(Column.number, ("variables each", "bytes each", "in use each"))
        columns = (Column.names("module"), *numbers, Column.nbytes("bytes/device"))
        cells = [
            ("  " * (each.depth - 1) + each.path, f"{each.variables:,}", format_bytes(each.nbytes),
             format_bytes(each.used_nbytes), each.shard_nbytes)
            for each in self
        ]  # fmt: skip
        return Table(f"{self.name} by module", columns, cells)

"""The memory plan: what it says, in numbers, tables and plain values, whether it fits and what would.

How its numbers come to be is decided in `_plan/make`.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from lazymodel._devices.compiler import CompiledMemory
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._plan.figures import bar, figure
from lazymodel._plan.fleet import Way
from lazymodel._plan.page import PageRow, plan_sections
from lazymodel._plan.what_if import ACTIVATIONS, OPTIMIZER, PARAMETERS
from lazymodel._show.page import Section, save_page
from lazymodel._show.table import ACTIONS, Row, Table, Tabled, folded_table, placed_text, shape_text, spec_text
from lazymodel._show.text import format_bytes, parse_bytes, plural

_OFFENDERS = 5  # how many `check` names
_LARGEST = 3  # how many the table names of what does not fit


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One variable in a plan."""

    path: str  # the variable's path
    shape: tuple[int, ...]  # its global shape
    dtype: Any  # its dtype
    spec: PartitionSpec | None  # its partition spec, or None where it lives on one device
    shard_nbytes: int  # bytes that each of its devices holds in its own memory
    nbytes: int  # bytes of the whole variable
    action: str  # `"load"` from a checkpoint, `"initialize"` by a program, or `"constant"`
    source: str  # file and tensor, or the initializer, for people
    # Bytes that each of its devices holds for it while the model is used: itself, quantized if that was asked
    # for, its LoRA pair, its gradient and the slots of an optimizer that is only stated. Optimizer state that the
    # model has is rows of its own.
    used_nbytes: int = 0
    memory_kind: str | None = None  # the kind of memory that it lies in, such as `pinned_host`; None is devices' own
    offloaded_nbytes: int = 0  # bytes that the host keeps for it, for each of its devices; slots only stated count too
    why: str = ""  # it has its sharding

    @property
    def most_nbytes(self) -> int:
        """Bytes that each of its devices must have for it, materializing or in use."""
        return max(self.shard_nbytes, self.used_nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `MemoryPlan.to_dict`."""
        entries = self.spec if self.spec is not None else ()
        spec = [list(entry) if isinstance(entry, tuple) else None if entry is None else str(entry) for entry in entries]
        own = {"shape": list(self.shape), "dtype": self.dtype.name, "spec": None if self.spec is None else spec}
        return vars(self) | own


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """One step of materializing, on the fullest device."""

    path: str  # of the variable that is made, or the first of those that one program makes
    action: str  # as in `PlanRow`
    held_nbytes: int  # bytes held once it is made
    peak_nbytes: int  # most bytes held while it is made, temporaries included
    offloaded_nbytes: int = 0  # bytes that the host keeps for the device once it is made


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """What one process will hold and read."""

    index: int  # its `process_index`
    num_devices: int  # how many of the model's devices are its own
    device_nbytes: int  # bytes that these hold together once everything is there
    read_nbytes: int  # bytes that it reads from files, every distinct shard once
    staging_nbytes: int  # ceiling of the host memory through which those pass; `max_host_memory` lowers it
    # Most host memory meanwhile and in use: the staging, what is kept for devices and, where these are CPUs, what they
    # hold.
    peak_nbytes: int
    offloaded_nbytes: int = 0  # bytes that it keeps for its devices in use, in kinds of memory such as `pinned_host`


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan(Tabled):
    """What materializing a model will cost, and using it.

    Attributes:
        name: The model's name.
        rows: One a variable, in the model's order.
        device_nbytes: Bytes of the fullest device once everything is there.
        peak_nbytes: Most bytes that a device holds while materializing, temporaries of the init programs included.
        read_nbytes: Bytes that this process reads from files, every distinct shard once. For devices that are not here,
            those of the process that reads most.
        host_nbytes: Bytes of the largest single shard that passes through this process's host memory.
        num_devices: Number of devices that hold anything.
        device_memory: Bytes that one device has, or None where there is no limit to speak of (CPU).
        programs: Number of compiled init programs; 0 where their temporaries are estimated.
        parts: What a device holds while the model is used, on the fullest device, by kind: `"parameters"`, `"LoRA"`,
            `"optimizer state"`, `"gradients"`, `"activations"` (with all other temporaries of what was compiled, of a
            training step its gradients too).
        counted: Of each kind in `parts` the dtypes of what was counted, or how activations were. What lacks in it was
            not counted, activations first of all.
        timeline: The steps of materializing, in order.
        hosts: One a process; empty for a mesh without devices.
        ways: `"read"` and `"exchange"`, each with what every host reads and exchanges where several hold the same, and
            with the seconds that takes; empty where there are not several hosts, or it is not known how many.
        device_kind: What the devices are called, or an empty string.
        mesh: Axis names and sizes; empty without a mesh.
        compiled: What the compiler said about the forward pass or training step, if one was compiled.
        offloaded_nbytes: Bytes that the fullest host keeps for its devices, in kinds of memory such as `pinned_host`.
        host_memory: Bytes that one host has, where that was stated, or is known and something is offloaded; else None.
        notes: What a reader has to know about how the numbers came to be.

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
    ways: Mapping[str, Way] = dataclasses.field(default_factory=dict[str, Way])
    device_kind: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    compiled: CompiledMemory | None = None
    offloaded_nbytes: int = 0
    host_memory: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def used_nbytes(self) -> int:
        """Bytes of the fullest device while the model is used: the sum of `parts`."""
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
        """Whether what was `counted` fits devices, and hosts where these count; None where that is not known."""
        if self._host_short() > 0:
            return False
        return None if self.device_memory is None else self.needed_nbytes <= self.device_memory

    def _host_short(self) -> int:
        """Bytes that a host lacks, as far as is known; negative for what it can spare."""
        return 0 if self.host_memory is None else self.needed_host_nbytes - self.host_memory

    def check(self, device_memory: int | str | None = None) -> MemoryPlan:
        """Returns the plan itself if it fits `device_memory`, in bytes or as `"16GiB"`; None takes the plan's own.

        Raises:
            DoesNotFitError: It does not, or hosts have too little; names what takes most there, and what would fit.
        """
        self._check_hosts()
        given = device_memory is not None
        limit = parse_bytes(device_memory, name="device_memory", at_least=1) if given else self.device_memory
        if limit is None or self.needed_nbytes <= limit:
            return self
        in_use = f"; in use {format_bytes(self.used_nbytes)}: {self._listed_parts()}"
        use = in_use if set(self.parts) - {PARAMETERS} else ""
        raise DoesNotFitError(
            f"{self.name} needs {format_bytes(self.needed_nbytes)} on a device ({format_bytes(self.device_nbytes)} "
            f"once materialized{use}) and a device has {format_bytes(limit)}, "
            f"{format_bytes(self.needed_nbytes - limit)} too little. "
            f"Largest on a device: {self._largest(_OFFENDERS)}. {self.mend(limit)}",
            needed_nbytes=self.needed_nbytes,
            limit_nbytes=limit,
        )

    def _check_hosts(self) -> None:
        if (short := self._host_short()) <= 0:
            return
        largest = heapq.nlargest(_OFFENDERS, self.rows, key=lambda row: row.offloaded_nbytes)
        names = [f"{row.path} {format_bytes(row.offloaded_nbytes)}" for row in largest if row.offloaded_nbytes]
        listed = f" Largest there, for each device: {', '.join(names)}." if names else ""
        raise DoesNotFitError(
            f"{self.name} needs {format_bytes(self.needed_host_nbytes)} of host memory on a host, "
            f"{format_bytes(self.offloaded_nbytes)} of them kept there for its devices, and a host has "
            f"{format_bytes(self.host_memory or 0)}, {format_bytes(short)} too little.{listed} "
            "Keep less there, split it over more hosts, or use a smaller dtype.",
            needed_nbytes=self.needed_host_nbytes,
            limit_nbytes=self.host_memory,
        )

    def _replicated(self, row: PlanRow) -> bool:
        return row.shard_nbytes == row.nbytes and row.memory_kind is None and self.num_devices > 1

    def _largest(self, count: int) -> str:
        """The variables that take most of a device."""
        return ", ".join(
            f"{row.path} {format_bytes(row.most_nbytes)}{' (replicated)' if self._replicated(row) else ''}"
            for row in heapq.nlargest(count, self.rows, key=lambda row: row.most_nbytes)
        )

    def mend(self, device_memory: int) -> str:
        """What would make it fit devices of this many bytes, by arithmetic, as a sentence or two."""
        if (state := self.parts.get(OPTIMIZER, 0)) and self.needed_nbytes - state <= device_memory:
            return (
                "With the optimizer state in hosts' memory (memory_kind='pinned_host') it would fit, by arithmetic; or "
                "shard these further, use more devices, or a smaller dtype."
            )
        replicated, fixed = self._fixed()
        if replicated > device_memory // 2:
            whole = f"{format_bytes(replicated)} are replicated on every device, which no number of devices mends"
            return f"{whole}: shard these further, or use a smaller dtype."
        if fixed >= device_memory:
            same = f"{format_bytes(fixed)} of a device are activations or replicated variables"
            return f"{same}: use a smaller batch or sequence, or split the batch over more devices."
        split = (self.needed_nbytes - fixed) * self.num_devices
        devices = 1 << max(math.ceil(split / (device_memory - fixed)) - 1, 0).bit_length()
        wide = any(row.dtype.itemsize >= 4 and jax.numpy.issubdtype(row.dtype, jax.numpy.floating) for row in self.rows)
        return (
            f"With everything else split evenly it would fit {devices:,} such devices"
            f"{', or half as many in bfloat16' if wide else ''}. Shard these further, use more devices, or a smaller "
            "dtype."
        )

    def _fixed(self) -> tuple[int, int]:
        """Bytes of a device that more devices do not change: what is replicated, and that with activations."""
        replicated = sum(row.most_nbytes for row in self.rows if self._replicated(row))
        return replicated, self.parts.get(ACTIVATIONS, 0) + replicated

    def by_module(self, depth: int = 1) -> Modules:
        """The variables summed over the modules that their paths name, down to this many parts of a path, at least 1.

        Example:
            >>> print(sharded.plan().by_module(depth=2))
            init by module
            module        count  variables each  bytes each  in use each  bytes/device
            ────────────────────────────────────────────────────────────────────────────────────────
            down              1  1               64.00 KiB   8.00 KiB         8.00 KiB
            up                1  1               64.00 KiB   8.00 KiB         8.00 KiB
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
        return Modules(self.name, tuple(ModuleRow("/".join(prefix), len(prefix), *sums[prefix]) for prefix in order))

    def plot(self, path: Any = None) -> Any:
        """Draws what a device holds against what it has, and the timeline; returns a `matplotlib.figure.Figure`.

        Args:
            path: A file to write (`.png`, `.svg`, …); None only returns the figure.

        Raises:
            LazyModelError: matplotlib is not installed, or the file cannot be written.
        """
        amounts = [(step.held_nbytes, step.peak_nbytes) for step in self.timeline]
        bars = self.device_nbytes, self.peak_nbytes, self.device_memory
        return figure(self.name, self.parts, amounts, *bars, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as a page: one HTML file that needs no network; needs plotly.

        It shows what a device holds in use and while materializing, modules by size, and every variable with its
        sharding drawn on the mesh and the reason for it, to be filtered by path.

        Raises:
            LazyModelError: plotly is not installed, or the file cannot be written.

        Example:
            >>> sharded.plan().save("plan.html")
        """
        save_page(path, f"{self.name}: memory plan", self.sections())

    def sections(self) -> list[Section]:
        """What its page shows."""

        def row(row: PlanRow) -> PageRow:
            entries = [*(row.spec or ()), *[None] * len(row.shape)][: len(row.shape)]
            axes = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
            shown = row.path, row.shape, row.dtype.name, axes, row.used_nbytes, row.action, row.source, row.why
            return PageRow(*shown)

        timeline = [(step.path, step.held_nbytes, step.peak_nbytes) for step in self.timeline]
        lines = [*self._device_lines(), *self._host_lines(), *self.notes]
        _, fixed = self._fixed()
        split = max(self.needed_nbytes - fixed, 0) * self.num_devices
        return plan_sections(
            lines, self.parts, timeline, self.device_memory, list(map(row, self.rows)), self.mesh, fixed, split
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, strings and numbers that `json.dumps` takes and gives back equal."""
        plain = dataclasses.asdict(
            dataclasses.replace(
                self, rows=(), mesh=dict(self.mesh), parts=dict(self.parts), counted=dict(self.counted), ways={}
            )
        )
        del plain["rows"]
        return {
            "fits": self.fits,
            "not_counted": [] if ACTIVATIONS in self.parts else [ACTIVATIONS],
            "needed_nbytes": self.needed_nbytes,
            "needed_host_nbytes": self.needed_host_nbytes,
            "used_nbytes": self.used_nbytes,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
            "ways": {name: way.to_dict() for name, way in self.ways.items()},
            "modules": [dataclasses.asdict(module) for module in self.by_module(depth=2)],
            "variables": [row.to_dict() for row in self.rows],
        }

    def table(self) -> Table:
        """What is shown: the variables, and a summary below them."""

        def row(row: PlanRow) -> Row:
            note = ACTIONS.get(row.action, row.action) + (f": {row.source}" if row.action == "initialize" else "")
            away = not (row.shard_nbytes or row.memory_kind) and row.nbytes
            spec = "on the host" if away else placed_text(spec_text(row.spec), row.memory_kind)
            return Row(row.path, (shape_text(row.shape), row.dtype.name, spec), row.shard_nbytes, note)

        nbytes = format_bytes(sum(row.nbytes for row in self.rows))
        title = f"{self.name}: plan for {plural(len(self.rows), 'variable')}, {nbytes}"
        headings = ("shape", "dtype", "partition spec", "bytes/device", "value")
        lines = [*self._device_lines(), *self._host_lines(), *self.notes]
        return folded_table(title, headings, map(row, self.rows), lines)

    def _device_lines(self) -> Iterable[str]:
        if self.mesh or self.device_kind:
            mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
            yield " of ".join(filter(None, (mesh and f"mesh: {mesh}", self.device_kind)))
        device = "device" if self.num_devices == 1 else f"each of {self.num_devices:,} devices, on the fullest"
        yield (
            f"{device}: {format_bytes(self.device_nbytes)} resident, "
            f"{format_bytes(self.peak_nbytes)} at the peak while materializing"
        )
        yield self.counted_text()
        if len(self.parts) > 1 or self.used_nbytes != self.device_nbytes:
            yield f"in use: {format_bytes(self.used_nbytes)}: {self._listed_parts()}"
        if self.device_memory is not None:
            yield f"device memory: {format_bytes(self.device_memory)}; {self._device_verdict(self.device_memory)}"
            if self.needed_nbytes > self.device_memory:
                yield f"largest on a device: {self._largest(_LARGEST)}"
                yield self.mend(self.device_memory)

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
            fullest = max(host.peak_nbytes for host in self.hosts)
            each = "host" if len(self.hosts) == 1 else f"each of {len(self.hosts):,} hosts, at most"
            yield f"{each}: {format_bytes(fullest)} of host memory while materializing"
        if self.offloaded_nbytes:
            yield f"offloaded: {format_bytes(self.offloaded_nbytes)} that a host keeps for its devices"
        if self.host_memory is not None:
            verdict = _verdict(self.needed_host_nbytes, self.host_memory)
            yield f"host memory: {format_bytes(self.host_memory)}; {verdict}"
        for name, way in self.ways.items():
            yield f"replicas={name!r}: {way.text()}"

    def _listed_parts(self) -> str:
        return ", ".join(f"{format_bytes(nbytes)} {kind}" for kind, nbytes in self.parts.items())

    def verdict(self) -> str:
        """Whether it fits devices, and with what to spare; or that it does not fit hosts."""
        fits_device = self.device_memory is None or self.needed_nbytes <= self.device_memory
        if fits_device and (short := self._host_short()) > 0:
            return f"does not fit a host, {format_bytes(short)} short"
        return "unknown" if self.device_memory is None else self._device_verdict(self.device_memory)

    def _device_verdict(self, limit: int) -> str:
        without = "" if ACTIVATIONS in self.parts else " without activations"
        return _verdict(self.needed_nbytes, limit).replace("fits,", f"fits{without},")

    def counted_text(self) -> str:
        """What was counted of devices, with its dtypes, and what was not."""
        counted = ", ".join(f"{kind} ({how})" for kind, how in self.counted.items())
        if ACTIVATIONS in self.parts:
            return f"counted: {counted}"
        how = "plan(compile=…) counts and WhatIf(batch=…, sequence=…) estimates them"
        return f"counted: {counted}; not counted: activations ({how})"

    def _repr_html_(self) -> str:
        modules = self.by_module(depth=2)
        more = f"<details><summary>by module</summary>{modules._repr_html_()}</details>" if len(modules) > 1 else ""
        full = max(self.needed_nbytes, self.device_memory or 0, 1)
        return f"{bar(self.parts, full)}{super()._repr_html_()}{more}"


def _verdict(needed: int, limit: int) -> str:
    spare = limit - needed
    return f"fits, {format_bytes(spare)} to spare" if spare >= 0 else f"does not fit, {format_bytes(-spare)} short"


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """One module of a plan: the variables whose paths begin with its own."""

    path: str
    depth: int  # parts of the path
    variables: int  # how many it has
    nbytes: int  # their bytes, each counted once
    shard_nbytes: int  # bytes of them on a device that holds all
    used_nbytes: int  # the same while the model is used; see `PlanRow`


@dataclasses.dataclass(frozen=True, repr=False)
class Modules(Tabled, Sequence[ModuleRow]):
    """A plan by module, outer modules before what they hold; prints as a table."""

    name: str
    rows: tuple[ModuleRow, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def table(self) -> Table:
        """What is shown: rows indented by their depth, of which those of one depth may fold."""

        def row(module: ModuleRow) -> Row:
            path = "  " * (module.depth - 1) + module.path
            cells = (f"{module.variables:,}", format_bytes(module.nbytes), format_bytes(module.used_nbytes))
            return Row(path, cells, module.shard_nbytes, "")

        headings = ("variables each", "bytes each", "in use each", "bytes/device", "")
        return folded_table(f"{self.name} by module", headings, map(row, self.rows), noun="module")

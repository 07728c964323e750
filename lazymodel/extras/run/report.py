"""The report of `run`: what was read, which programs ran, and the most that a device held.

Everything in it is known before anything is read, except for bytes of files and times.
"""

from __future__ import annotations

import dataclasses

from lazymodel._show.table import Column, Report, Table
from lazymodel._show.text import folded_names, format_bytes, listed, plural


@dataclasses.dataclass(frozen=True)
class ProgramRow:
    """One compiled program of a run.

    Attributes:
        calls: The number of stretches that it ran.
        equations: The number of its equations.
        variables_nbytes: Bytes on a device of the variables that its largest call takes.
        live_nbytes: Bytes on a device of inputs, constants and results of other stretches during that call.
        temporary_nbytes: Bytes on a device of its results and temporaries, according to the compiler.
        peak_nbytes: The most that a device holds during a call, with what is kept and read ahead.
        layers: The paths of the modules that its stretches are of, without stretches of several layers.
    """

    calls: int
    equations: int
    variables_nbytes: int
    live_nbytes: int
    temporary_nbytes: int
    peak_nbytes: int
    layers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class WholeRow:
    """Variables that could not be taken one after the other.

    Attributes:
        reason: The operation that takes them, or why a stack of layers is not read layer by layer.
        paths: Their paths.
        nbytes: Their bytes on a device.
    """

    reason: str
    paths: tuple[str, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class RunReport(Report):
    """The report of running a function of a model that is never whole, in this process.

    Attributes:
        name: The model's name.
        process_index: The index of this process, from 0.
        process_count: The number of processes.
        rows: One row per program, in the order of their first calls.
        variables: The number of variables that the function uses.
        model_nbytes: Bytes on a device of the whole model.
        loaded_nbytes: Bytes on a device of variables that were read, those that were read again included.
        made_nbytes: Bytes on a device of variables that were initialized, likewise.
        again_nbytes: Bytes of both that were read or made again.
        results_nbytes: Bytes on a device of what the function returned.
        limit_nbytes: `max_device_memory`; None if it was not given.
        whole: Variables that were taken whole.
        read_nbytes: Tensor bytes that this process read from files.
        plan_seconds: Seconds until every program was compiled and reading began.
        seconds: Wall-clock seconds of the whole call.

    Example:
        >>> reports = []
        >>> forward = lambda model, x: x @ model["up"]["kernel"] @ model["down"]["kernel"]
        >>> y = abstract.run(forward, np.ones((8, 64), "float32"), report=reports.append)
        >>> reports[0].calls, reports[0].peak_nbytes < 2 * abstract.nbytes
        (2, True)
    """

    name: str
    process_index: int
    process_count: int
    rows: tuple[ProgramRow, ...]
    variables: int
    model_nbytes: int
    loaded_nbytes: int
    made_nbytes: int
    again_nbytes: int
    results_nbytes: int
    limit_nbytes: int | None
    whole: tuple[WholeRow, ...]
    read_nbytes: int = 0
    plan_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def calls(self) -> int:
        """The number of program calls."""
        return sum(row.calls for row in self.rows)

    @property
    def peak_nbytes(self) -> int:
        """The most that a device holds at a time: variables, inputs, intermediate values, results, temporaries."""
        return max(row.peak_nbytes for row in self.rows)

    def table(self) -> Table:
        """The tables."""
        title = (
            f"{self.name}: ran {plural(self.calls, 'call')} of {plural(len(self.rows), 'program')}, with at most "
            f"{format_bytes(self.peak_nbytes)} on a device, in {self.seconds:.2f} s"
        )
        if self.process_count > 1:
            title += f", by process {self.process_index} of {self.process_count}"
        columns = (
            Column("program"), Column.number("calls"), Column.number("equations"), Column.nbytes("variables"),
            Column.nbytes("live"), Column.nbytes("results, temporaries"), Column.nbytes("peak"),
        )  # fmt: skip
        rows = [
            (str(number), *map(str, row[:2]), *row[2:-1])
            for number, row in enumerate(map(dataclasses.astuple, self.rows))
        ]
        return Table(title, columns, rows, self._lines())

    def _lines(self) -> list[str]:
        lines = [f"the model: {format_bytes(self.model_nbytes)} on a device, {self.variables:,} variables used"]
        named = [(number, folded_names(row.layers)) for number, row in enumerate(self.rows) if row.layers]
        lines += (
            [f"layers: {listed(f'{listed(names)} by program {number}' for number, names in named)}"] if named else []
        )
        if self.loaded_nbytes:
            lines.append(f"read: {format_bytes(self.loaded_nbytes)}, from {format_bytes(self.read_nbytes)} of files")
        if self.made_nbytes:
            lines.append(f"initialized: {format_bytes(self.made_nbytes)}")
        if self.again_nbytes:
            lines.append(f"again: {format_bytes(self.again_nbytes)} of these, for a later use")
        for row in self.whole:
            names = listed(folded_names(row.paths))
            lines.append(f"whole: {format_bytes(row.nbytes)}, {row.reason}: {names}")
        if self.limit_nbytes is not None:
            lines.append(f"limit: {format_bytes(self.limit_nbytes)} on a device")
        lines.append(f"time: {self.plan_seconds:.2f} s until reading began, {self.seconds:.2f} s in all")
        return lines

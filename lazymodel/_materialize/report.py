"""The load report: what a materialization did with every variable, and its cost in this process.

It consists of plain values that outlive the checkpoint: a report holds no tensor, array or device.
`_materialize/materialize` decides what is loaded, and measures the cost.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lazymodel._mapping.resolve import LoadPlan
from lazymodel._materialize.background import CompiledProgram
from lazymodel._show.progress import Progress, Timeline, announce
from lazymodel._show.table import ACTIONS, Column, Report, Table, shape_text
from lazymodel._show.text import folded_names, format_bytes, listed, plural
from lazymodel._tensors.buffers import peak_memory
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import needed_nbytes
from lazymodel._tensors.stored import (
    MismatchedTensor,
    StoredTensor,
    is_initial,
    remote_sizes,
    stored_tensors,
    unused_tensors,
)

_LEAST = 0.005  # seconds; a shorter time would be 0.00


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """One variable's row of the report.

    Attributes:
        path: The variable's path.
        shape: Its global shape.
        dtype: The name of its dtype.
        nbytes: Bytes of the whole variable, over all devices, counted once.
        action: `"load"` from a checkpoint, `"initialize"` by a program, or `"constant"`, a value that it was built
            with.
        initializer: The initializer of its value, if any.
        tensors: The tensors that it was loaded from: one, or those that were joined into it.
        needed_nbytes: Bytes, as stored in files, of its distinct shards in this process.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    action: str
    initializer: str = ""
    tensors: tuple[StoredTensor, ...] = ()
    needed_nbytes: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class LoadReport(Report):
    """The report of materializing a model, in this process.

    `print(report)` shows a table in which variables that differ only in numbers share a row; `to_dict` has everything.

    Attributes:
        name: The model's name.
        process_index: The index of this process, from 0.
        process_count: The number of processes.
        rows: One row per variable, in the model's order.
        unused: Tensors of the checkpoint that no variable used. For Keras presets, tensors of the opened weight files
            that KerasHub did not request.
        mismatched: Tensors that were left out because of their shapes; their variables are not among the loaded ones.
        notes: What differs on purpose from what the framework's own loader makes of the checkpoint, as texts.
        filled: Variables without a tensor that began equal to another variable → that one, whose tensor they got.
        files: Path → size in bytes of every file that was loaded from; None if it is not a single file.
        needed_nbytes: Bytes, as stored in files, of all distinct shards of this process. A tensor that two variables
            are loaded from counts twice; a shard that several devices hold counts once.
        read_nbytes: Tensor bytes that this process read from files meanwhile. More than needed if reading through
            a gap is faster than seeking over it, or if a file can only be read in whole chunks; less if
            processes exchange bytes that several of them hold.
        fetched_nbytes: Bytes that this process fetched over a network meanwhile, headers and repeated ones included.
        requests: Number of these requests, failed ones included; `retries` is how many of them repeated another.
        seconds: Wall-clock seconds of the whole call.
        initialize_seconds: Seconds spent only on initializing: until every init program was compiled and started, and
            after streaming until the last one was done. Time in which devices compute while files are read does not
            count.
        stream_seconds: Seconds in between, until every array that is loaded was complete on its devices.
        wait_seconds: Seconds of these in which threads waited for files, on average; None if a library read them, or if
            values were converted while they were read.
        convert_seconds: Seconds in which threads converted and placed values, likewise.
        exchanged_nbytes: Bytes that this process's devices got from other devices instead of files.
        compiled: The programs compiled alongside, in the order in which they were given.
        lower_seconds: Seconds of the call spent on tracing and lowering them, before anything was read.
        compile_seconds: Seconds of the call spent only on compiling them, after everything else was done.
        timeline: The durations of all steps since the process started, as a sequence of spans (`name`, `start`, `stop`,
            `detail`): imports, building the model, and each part of the call. `timeline.span(name)` adds further steps,
            such as the model's first call, which `plot` and the text then show.

    Example:
        >>> reports = []
        >>> model = sharded.materialize(lm.open_checkpoint("model.safetensors"), report=reports.append)
        >>> len(reports[0].loaded), reports[0].needed_nbytes
        (2, 131072)
        >>> with reports[0].timeline.span("first step"):
        ...     total = jax.block_until_ready(jax.jit(lambda tree: tree["up"]["kernel"].sum())(model))
        >>> reports[0].timeline[-1].name
        'first step'
    """

    name: str
    process_index: int
    process_count: int
    rows: tuple[LoadRow, ...]
    unused: tuple[StoredTensor, ...]
    mismatched: tuple[MismatchedTensor, ...]
    filled: Mapping[str, str]
    files: Mapping[str, int | None]
    needed_nbytes: int
    read_nbytes: int
    fetched_nbytes: int
    requests: int
    retries: int
    seconds: float
    initialize_seconds: float
    stream_seconds: float
    wait_seconds: float | None = None
    convert_seconds: float | None = None
    exchanged_nbytes: int = 0
    compiled: tuple[CompiledProgram, ...] = ()
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    timeline: Timeline = dataclasses.field(default_factory=Timeline)

    @property
    def loaded(self) -> tuple[LoadRow, ...]:
        """The variables that were loaded."""
        return tuple(row for row in self.rows if row.action == "load")

    @property
    def initialized(self) -> tuple[LoadRow, ...]:
        """The variables that were initialized."""
        return tuple(row for row in self.rows if row.action == "initialize")

    @property
    def constants(self) -> tuple[LoadRow, ...]:
        """The variables that kept a value that the model was built with."""
        return tuple(row for row in self.rows if row.action == "constant")

    @property
    def gb_per_second(self) -> float | None:
        """Gigabytes (10⁹) read per second of streaming; None if nothing was read."""
        if not self.read_nbytes or self.stream_seconds <= 0:
            return None
        return self.read_nbytes / 1e9 / self.stream_seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, strings and numbers, which `json` writes and reads back equal."""
        return super().to_dict() | {"gb_per_second": self.gb_per_second}

    def plot(self, path: Any = None) -> Any:
        """Draws the timeline; returns a `matplotlib.figure.Figure`.

        Args:
            path: A file to write (`.png`, `.svg`, …); None only returns the figure.

        Raises:
            LazyModelError: matplotlib is not installed, or the file cannot be written.
        """
        return self.timeline.plot(self.table().title, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as a page: one HTML file without scripts.

        It shows the timeline, and the source of every variable's value.

        Raises:
            LazyModelError: The file cannot be written.

        Example:
            >>> model = sharded.materialize(report=lambda report: report.save("load.html"))
        """
        super().save(path)

    def page_tables(self) -> list[Table]:
        """The tables of its page."""
        tables = [self.table(), *([self.timeline.table()] if self.timeline else [])]
        if self.unused:
            columns = (Column("tensor"), Column("dtype"), Column.nbytes("bytes"), Column("file"))
            unused = [(each.name, each.dtype, each.nbytes or 0, each.file) for each in self.unused]
            tables.append(Table("Unused tensors", columns, unused))
        if self.mismatched:
            names = ("variable", "expected", "found", "tensor", "file")
            other = [
                (each.path, *map(shape_text, (each.expected, each.found)), each.tensor.name, each.tensor.file)
                for each in self.mismatched
            ]
            tables.append(Table("Did not match", [*map(Column, names)], other))
        return tables

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self.timeline}" if self.timeline else super().__repr__()

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (self.timeline._repr_html_() if self.timeline else "")

    def table(self) -> Table:
        """The tables."""
        title = (
            f"{self.name}: materialized {plural(len(self.rows), 'variable')}, "
            f"{format_bytes(sum(row.nbytes for row in self.rows))}, in {self.seconds:.2f} s"
        )
        if self.process_count > 1:
            title += f", by process {self.process_index} of {self.process_count}"
        columns = (
            Column.names("variable"), Column("shape"), Column("dtype"), Column.nbytes("bytes"), Column.notes("value"),
            Column.in_pages("file"), Column.nbytes("read for this process", page=True),
        )  # fmt: skip
        return Table(title, columns, [*map(_cells, self.rows)], self._lines())

    def _lines(self) -> list[str]:
        lines: list[str] = []
        for rows in (self.loaded, self.initialized, self.constants):
            if rows:
                action, nbytes = ACTIONS.get(rows[0].action, rows[0].action), sum(row.nbytes for row in rows)
                lines.append(f"{action}: {plural(len(rows), 'variable')}, {format_bytes(nbytes)}")
        if self.needed_nbytes or self.read_nbytes:
            rate = "" if self.gb_per_second is None else f", {self.gb_per_second:.2f} GB/s"
            read, needed = format_bytes(self.read_nbytes), format_bytes(self.needed_nbytes)
            lines.append(f"read: {read} of files, {needed} needed{rate}")
        if self.exchanged_nbytes:
            lines.append(f"exchanged: {format_bytes(self.exchanged_nbytes)} from other devices")
        if self.requests:
            again = f", {self.retries:,} of them again" if self.retries else ""
            lines.append(f"fetched: {format_bytes(self.fetched_nbytes)} in {plural(self.requests, 'request')}{again}")
        for program in self.compiled:
            cache = program.cache and f", a {program.cache} of the persistent cache"
            lines.append(f"compiled: {program.description} in {program.seconds:.2f} s{cache}")
        time = f"time: {self.initialize_seconds:.2f} s initializing, {self.stream_seconds:.2f} s streaming"
        if self.wait_seconds is not None and self.convert_seconds is not None:
            time += f" ({self.wait_seconds:.2f} s waiting for files, {self.convert_seconds:.2f} s converting)"
        if self.compiled:
            time += f", {self.lower_seconds:.2f} s lowering before and {self.compile_seconds:.2f} s compiling after"
        lines.append(time)
        if self.unused:
            nbytes = format_bytes(sum(tensor.nbytes or 0 for tensor in self.unused))
            names = listed(folded_names(tensor.name for tensor in self.unused))
            lines.append(f"unused: {plural(len(self.unused), 'tensor')}, {nbytes}: {names}")
        if self.mismatched:
            texts = listed(map(str, self.mismatched))
            lines.append(f"did not match: {plural(len(self.mismatched), 'tensor')}: {texts}")
        if self.filled:
            began = listed(f"{path!r} of {other!r}" for path, other in self.filled.items())
            lines.append(f"not in the checkpoint, and began equal to another: {began}")
        lines += [f"note: {note}" for note in self.notes]
        if self.files:
            sizes = (f"{file} ({'size unknown' if n is None else format_bytes(n)})" for file, n in self.files.items())
            lines.append(f"files: {listed(sizes)}")
        return lines


def _cells(row: LoadRow) -> tuple[Any, ...]:
    note, dtype = ACTIONS.get(row.action, row.action), row.dtype
    if row.action == "initialize":
        note += f": {row.initializer}"
    elif row.tensors:
        first, *others = row.tensors
        file, named = os.path.basename(first.file), first.name != row.path
        note += (f": {first.name}" if named else "") + (f" {'of' if named else 'from'} {file}" if file else "")
        note += f" and {len(others):,} more" if others else ""
        stored = ", ".join(dict.fromkeys(tensor.dtype for tensor in row.tensors))
        dtype = dtype if stored == dtype else f"{stored} → {dtype}"
    files = listed(dict.fromkeys(tensor.file for tensor in row.tensors))
    return row.path, shape_text(row.shape), dtype, row.nbytes, note, files, row.needed_nbytes


def threads_seconds(read: float, timed: float, waited: float, filled: float, seconds: float) -> dict[str, float]:
    """What threads did during a stream: their seconds in files, and beyond these, by how many of them worked.

    Args:
        read: Bytes that were read.
        timed: Those of them of which the time is known.
        waited: Seconds of all threads in files.
        filled: Seconds of all threads in filling shards, reading included.
        seconds: Seconds of the stream.
    """
    filled = max(filled, waited)  # values that stay on the host are read without the stream
    threads = max(filled / seconds, 1.0) if seconds else 1.0
    known = read and read == timed
    return {"wait_seconds": waited / threads, "convert_seconds": (filled - waited) / threads} if known else {}


def _load_line(name: str, costs: Mapping[str, Any], timeline: Timeline, seconds: float) -> str:
    """What a load cost, in one line; what is not known is left out."""
    read, streamed = costs["read_nbytes"], timeline.seconds("stream")
    parts = [f"{name}: loaded " + (f"{read / 1e9:.3g} GB " if read else "") + f"in {seconds:.2f} s"]
    parts += [f"{read / 1e9 / streamed:.2f} GB/s"] if read and streamed else []
    compiling = sum(span.seconds for span in timeline if span.label == "initialize: compiling")
    took = {
        "waiting for files": costs.get("wait_seconds"),
        "converting": costs.get("convert_seconds"),
        "compiling": compiling + timeline.seconds("lower") + costs["compile_seconds"],
    }
    parts += [f"{each:.2f} s {what}" for what, each in took.items() if each is not None and each >= _LEAST]
    if (peak := peak_memory()) is not None:
        parts.append(f"this process held at most {format_bytes(peak)} so far")
    return ", ".join(parts)


def report_load(
    load: LoadPlan,
    costs: Mapping[str, Any],
    timeline: Timeline,
    seconds: float,
    bar: Progress,
    deliver: Callable[[LoadReport], object] | None,
) -> None:
    """Says in a line what a load cost, and delivers its report if that was asked for.

    It took so many seconds; `costs` are further attributes of the report.
    """
    if any(load.from_file(path) for path in load.sources):
        announce(bar, "; ".join([_load_line(load.model.name, costs, timeline, seconds), *load.model.notes]))
    if deliver is not None:
        deliver(_make_report(load, costs, timeline, seconds))


def _make_report(load: LoadPlan, costs: Mapping[str, Any], timeline: Timeline, seconds: float) -> LoadReport:
    model, given = load.model, {} if load.checkpoint is None else load.checkpoint
    initializers = {path: recipe.origin for recipe in load.recipes for path in recipe.paths}
    rows: list[LoadRow] = []
    for path, variable in model.items():
        row = functools.partial(LoadRow, path, variable.shape, variable.dtype.name, variable.nbytes)
        source = load.sources.get(path)
        if path in initializers:
            rows.append(row("initialize", initializers[path]))
        elif path in load.given or (isinstance(source, LazyTensor) and not is_initial(source)):
            rows.append(row("load", "", stored_tensors(source, path), needed_nbytes(source, load.shardings[path])))
        elif source is None or is_initial(source):
            rows.append(row("initialize", variable.origin))
        else:
            rows.append(row("constant"))
    files = dict.fromkeys(tensor.file for row in rows for tensor in row.tensors if tensor.file)
    remote = remote_sizes(load.sources.values())
    # For a checkpoint from `map_checkpoint`, also the tensors that the mapping did not use.
    unmapped = unused_tensors(getattr(given, "source", {}), getattr(given, "unused", ()))
    return LoadReport(
        name=model.name,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        rows=tuple(rows),
        unused=(*model.unused, *unused_tensors(given, load.unused), *unmapped),
        mismatched=(*model.mismatched, *load.mismatched),
        filled=dict(load.filled),
        files={file: remote[file] if file in remote else _size(file) for file in files},
        needed_nbytes=sum(row.needed_nbytes for row in rows),
        seconds=seconds,
        initialize_seconds=timeline.seconds("initialize"),
        stream_seconds=timeline.seconds("stream"),
        lower_seconds=timeline.seconds("lower"),
        notes=load.model.notes,
        timeline=timeline,
        **costs,
    )


def _size(file: str) -> int | None:
    """Bytes of a file; None for a folder, or a file that no longer exists."""
    try:
        return os.path.getsize(file) if os.path.isfile(file) else None
    except OSError:
        return None

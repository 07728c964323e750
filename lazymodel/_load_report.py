"""The load report: what a materialization did with every variable, and what it cost this process.

Responsible for describing, in plain values that outlive the checkpoint: a report holds no tensor, array or device.
What is loaded is decided in `_materialize`, which measures too; how a report looks as a table is in `_report`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Sharding

from lazymodel._lazy import LazyTensor
from lazymodel._stored import MismatchedTensor, StoredTensor, is_initial, needed_nbytes, stored_tensors, unused_tensors

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractModel
    from lazymodel._materialize import Choice


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """What became of one variable.

    Attributes:
        path: The variable's path.
        shape: Its global shape.
        dtype: The name of its dtype.
        nbytes: Bytes of the whole variable, over all devices, counted once.
        action: `"load"` from a checkpoint, `"initialize"` by a program, or `"constant"`, a value that it was built
            with.
        initializer: What initialized it, where something did.
        tensors: What it was loaded from: one tensor, or those that were joined into it.
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
class LoadReport:
    """What materializing a model did, in this process.

    `print(report)` shows a table in which variables that differ only in numbers share a row; `to_dict` has it all.

    Attributes:
        name: The model's name.
        process_index: Which of the processes this is, from 0.
        process_count: How many there are.
        rows: One a variable, in the model's order.
        unused: Tensors of the checkpoint that no variable took. For Keras presets, tensors of the weight files that
            were opened and that KerasHub did not ask for.
        mismatched: Tensors that were left out for their shapes; their variables are not among the loaded ones.
        files: Path to size in bytes of every file that was loaded from; None for what is not a single file.
        needed_nbytes: Bytes, as stored in files, of all distinct shards of this process. A tensor that two variables
            are loaded from counts twice; what several devices hold alike counts once.
        read_nbytes: Tensor bytes that this process read from files meanwhile. More than needed where reading through
            a gap is faster than seeking over it, or where a file can only be read in whole chunks.
        seconds: Wall-clock seconds of the whole call.
        initialize_seconds: Seconds of it that initializing took by itself: until every init program was compiled and
            started, and after streaming until the last of them was done. What devices compute while files are read
            takes no time of its own.
        stream_seconds: Seconds in between, until every array that is loaded was complete on its devices.
    """

    name: str
    process_index: int
    process_count: int
    rows: tuple[LoadRow, ...]
    unused: tuple[StoredTensor, ...]
    mismatched: tuple[MismatchedTensor, ...]
    files: Mapping[str, int | None]
    needed_nbytes: int
    read_nbytes: int
    seconds: float
    initialize_seconds: float
    stream_seconds: float

    @property
    def loaded(self) -> tuple[LoadRow, ...]:
        """The variables that were loaded."""
        return self._of("load")

    @property
    def initialized(self) -> tuple[LoadRow, ...]:
        """The variables that were initialized."""
        return self._of("initialize")

    @property
    def constants(self) -> tuple[LoadRow, ...]:
        """The variables that kept a value that the model was built with."""
        return self._of("constant")

    @property
    def gb_per_second(self) -> float | None:
        """Bytes read, in units of 10⁹, a second of streaming; None where nothing was read."""
        if not self.read_nbytes or self.stream_seconds <= 0:
            return None
        return self.read_nbytes / 1e9 / self.stream_seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, strings and numbers that `json.dumps` takes and gives back equal."""
        return json.loads(json.dumps(dataclasses.asdict(self) | {"gb_per_second": self.gb_per_second}))

    def _of(self, action: str) -> tuple[LoadRow, ...]:
        return tuple(row for row in self.rows if row.action == action)

    def __repr__(self) -> str:
        from lazymodel._report import load_text

        return load_text(self)

    def _repr_html_(self) -> str:
        from lazymodel._report import load_html

        return load_html(self)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What `_materialize` measured: see the attributes of the same names in `LoadReport`."""

    read_nbytes: int
    initialize_seconds: float
    stream_seconds: float


def make_report(
    model: AbstractModel,
    choice: Choice,
    checkpoint: Mapping[str, Any] | None,
    shardings: Mapping[str, Sharding],
    costs: Costs,
    seconds: float,
) -> LoadReport:
    """The report on a model that was materialized from these choices.

    Args:
        model: What was materialized.
        choice: Where its values came from.
        checkpoint: What `choice.unused` names tensors of.
        shardings: Path to sharding.
        costs: What was measured.
        seconds: Wall-clock seconds of everything.
    """
    initializers = {path: recipe.origin for recipe in choice.recipes for path in recipe.paths}
    rows: list[LoadRow] = []
    for path, variable in model.items():
        row = LoadRow(path, variable.shape, variable.dtype.name, variable.nbytes, "constant")
        source = choice.sources.get(path)
        if path in initializers:
            row = dataclasses.replace(row, action="initialize", initializer=initializers[path])
        elif path in choice.given or (isinstance(source, LazyTensor) and not is_initial(source)):
            tensors = stored_tensors(source, path)
            needed = needed_nbytes(source, shardings[path])
            row = dataclasses.replace(row, action="load", tensors=tensors, needed_nbytes=needed)
        elif source is None or is_initial(source):
            row = dataclasses.replace(row, action="initialize", initializer=variable.origin)
        rows.append(row)
    files = dict.fromkeys(tensor.file for row in rows for tensor in row.tensors if tensor.file)
    given = {} if checkpoint is None else checkpoint
    return LoadReport(
        name=model.name,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        rows=tuple(rows),
        unused=(*model.unused, *unused_tensors(given, choice.unused), *_unmapped(given)),
        mismatched=(*model.mismatched, *choice.mismatched),
        files={file: _size(file) for file in files},
        needed_nbytes=sum(row.needed_nbytes for row in rows),
        read_nbytes=costs.read_nbytes,
        seconds=seconds,
        initialize_seconds=costs.initialize_seconds,
        stream_seconds=costs.stream_seconds,
    )


def _unmapped(checkpoint: Mapping[str, Any]) -> tuple[StoredTensor, ...]:
    """What a mapping took nothing from, where the checkpoint is what `map_checkpoint` made of another one."""
    return unused_tensors(getattr(checkpoint, "source", {}), getattr(checkpoint, "unused", ()))


def _size(file: str) -> int | None:
    """Bytes of a file; None for a folder, or what is no longer there."""
    try:
        return os.path.getsize(file) if os.path.isfile(file) else None
    except OSError:
        return None

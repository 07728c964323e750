"""`plans`: what must be rented for a model, and which line of code makes it fit.

For each topology it tries meshes of two axes, `fsdp` and `model`, then recomputation and host memory for an optimizer,
cheapest change first. All of it is arithmetic of `_plan/make` and `what_if`.
"""

from __future__ import annotations

import dataclasses
import html
import math
import shlex
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import PINNED_HOST
from lazymodel._errors import LazyModelError, LazyModelWarning, ShardingError
from lazymodel._plan.make import plan
from lazymodel._plan.plan import MemoryPlan
from lazymodel._sharding.describe import describe
from lazymodel._sharding.roles import DATA_AXES, ROLES
from lazymodel._sharding.shard import Rules, named_rules, shard
from lazymodel._show.table import Column, Report, Table
from lazymodel._show.text import format_bytes
from lazymodel.extras.planning.topologies import arithmetic_mesh
from lazymodel.extras.planning.what_if import REMATS, WhatIf, stated

_UNEVEN = ("vocabulary", "entries", "features")  # `auto` splits another dimension where these do not divide
_CODE_WIDTH = 78  # columns of the lines to paste

# Options of `lazymodel plan` for fields of a `WhatIf`; those of its other fields do not exist.
_OPTIONS = {
    "optimizer": "--optimizer", "moments": "--moments", "master_weights": "--master-weights", "batch": "--batch",
    "sequence": "--sequence", "remat": "--remat", "lora_rank": "--lora-rank", "quantize": "--quantize",
    "memory_kind": "--optimizer-on-host",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TopologyPlan:
    """The cheapest way in which a model fits a topology; if there is none, the way that needs least.

    Attributes:
        topology: Its name, for `arithmetic_mesh`.
        mesh: Axis names and sizes.
        changes: Fields of the `WhatIf` that had to change, with their values.
        plan: The plan with these.
    """

    topology: str
    mesh: Mapping[str, int]
    changes: Mapping[str, Any]
    plan: MemoryPlan

    @property
    def rented_nbytes(self) -> int:
        """Memory of all its devices."""
        return self.plan.num_devices * (self.plan.device_memory or 0)

    @property
    def spare_nbytes(self) -> int:
        """Bytes that are left on the most loaded device; negative if bytes are missing."""
        return (self.plan.device_memory or 0) - self.plan.needed_nbytes

    @property
    def verdict(self) -> str:
        """`"fits"`, `"tight"` (less is left than the error of the estimate) or `"does not fit"`, with what is meant."""
        if self.spare_nbytes >= 0 and not self.plan.fits:
            return "does not fit a host"
        return "does not fit" if not self.plan.fits else "tight" if self.plan.tight else "fits"


@dataclasses.dataclass(frozen=True, repr=False)
class Plans(Report):
    """The result of `plans`, one row for each topology; prints as a table, with lines to paste below it.

    Attributes:
        model: The model's name.
        rows: One for each topology, in the order given.
        what_if: The `WhatIf` given.
        options: Further keywords of the plans.
        rules: The rules as code; empty for rules that are not `lazymodel.auto()`.
        source: What `lazymodel plan` is called with, before the options that are chosen here.
    """

    model: str
    rows: tuple[TopologyPlan, ...]
    what_if: WhatIf
    options: Mapping[str, Any]
    rules: str = "lm.auto()"
    source: str = "CONFIG"

    @property
    def best(self) -> TopologyPlan | None:
        """The row that fits with the least memory of all devices together, a tight one if no other fits."""
        fitting = [row for row in self.rows if row.plan.fits]
        return min(fitting, key=lambda row: (row.plan.tight, row.rented_nbytes), default=None)

    @property
    def python(self) -> str:
        """The line of Python that plans the best row; empty if nothing fits."""
        if self.best is None:
            return ""
        given = dataclasses.replace(self.what_if, **self.best.changes)
        fields = ", ".join(f"{name}={value!r}" for name, value in _fields(given))
        options = [f"what_if=lm.WhatIf({fields})"] if fields else []
        options += [f"{name}={value!r}" for name, value in self.options.items() if value is not None]
        mesh = f"lm.arithmetic_mesh({self.best.topology!r}, {dict(self.best.mesh)!r})"
        return f"abstract.shard({mesh}, {self.rules or 'rules'}).plan({', '.join(options)})"

    @property
    def shell(self) -> str:
        """The command that plans the best row; empty if nothing fits, or if no option states what was given."""
        if self.best is None:
            return ""
        given = dict(_fields(dataclasses.replace(self.what_if, **self.best.changes)))
        if given.keys() - _OPTIONS.keys() or not isinstance(given.get("optimizer", ""), str):
            return ""
        axes = ",".join(f"{axis}={size}" for axis, size in self.best.mesh.items())
        parts = [self.source, "--topology", self.best.topology, "--mesh", axes]
        for name, value in given.items():
            parts += [_OPTIONS[name], *([] if name == "memory_kind" else [str(value)])]
        for name, value in self.options.items():
            parts += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        return " ".join(["lazymodel", "plan", parts[0], *map(shlex.quote, parts[1:])])

    def table(self) -> Table:
        """A row for each topology."""

        def cells(row: TopologyPlan) -> tuple[str, ...]:
            found, sign = row.plan, "" if row.spare_nbytes >= 0 else "-"
            on_host = format_bytes(found.offloaded_nbytes) if found.offloaded_nbytes else "–"
            amounts = format_bytes(found.needed_nbytes), f"{sign}{format_bytes(abs(row.spare_nbytes))}", on_host
            mesh = ", ".join(f"{axis}={size}" for axis, size in row.mesh.items())
            changes = ", ".join(f"{name}={value!r}" for name, value in row.changes.items())
            return row.topology, mesh, changes or "–", *amounts, row.verdict

        first = Column("topology"), Column("mesh"), Column("change")
        numbers = map(Column.number, ("most loaded device", "spare", "on a host"))
        title = f"{self.model}: plans for {', '.join(row.topology for row in self.rows)}"
        return Table(title, (*first, *numbers, Column("verdict")), [*map(cells, self.rows)], [*self._lines()])

    def _lines(self) -> Iterator[str]:
        yield from dict.fromkeys(row.plan.counted_text() for row in self.rows)
        for row in self.rows:
            if "batch" in row.changes:
                asked, parts, batch = self.what_if.batch, _data_parts(row.mesh), row.changes["batch"]
                yield f"{row.topology}: a batch of {asked} does not divide into {parts} parts; {batch} does"
            yield from (f"{row.topology}: {note}" for note in row.plan.notes if note.startswith("number of hosts"))
        tight = [row for row in self.rows if row.verdict == "tight"]
        yield from (f"{row.topology}: {row.plan.verdict()}" for row in tight)
        if self.best is None:
            yield "nothing fits; more or larger devices, a smaller batch or sequence, or LoRA on quantized weights may"

    @property
    def code(self) -> str:
        """The lines of Python and of a shell that plan the best row, as text; empty if nothing fits."""
        if self.best is None:
            return ""
        options: Any = {"width": _CODE_WIDTH, "break_long_words": False, "break_on_hyphens": False}
        commands = " \\\n  ".join(textwrap.wrap(self.shell, **options))
        python = "\n  ".join(textwrap.wrap(self.python, **options))
        return f"{self.best.topology}, in Python and as a command:\n{python}\n{commands}"

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self.code}".rstrip()

    def page_tables(self) -> list[Table]:
        """The tables of its page: the comparison, and every plan."""
        plans = ((row.topology, row.plan.table()) for row in self.rows)
        return [self.table(), *(dataclasses.replace(t, title=f"{name}: {t.title}") for name, t in plans)]

    def drawing(self) -> str:
        """The bars of all plans."""
        bars = "".join(f"<p>{row.topology}</p>{row.plan.drawing()}" for row in self.rows)
        return f"{bars}<pre>{html.escape(self.code)}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Every row with its plan, as lists, dicts, strings and numbers."""
        rows = [
            {"topology": row.topology, "mesh": dict(row.mesh), "changes": dict(row.changes), "verdict": row.verdict,
             "spare_nbytes": row.spare_nbytes, "plan": row.plan.to_dict()}
            for row in self.rows
        ]  # fmt: skip
        best = None if self.best is None else self.best.topology
        return {"model": self.model, "rows": rows, "best": best, "python": self.python, "shell": self.shell}


def plans(
    abstract: ModelSpec,
    *topologies: str,
    what_if: WhatIf | None = None,
    rules: Rules | None = None,
    axes: Mapping[str, int] | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    hosts: int | None = None,
) -> Plans:
    """What must be rented for a model, and which line of code makes it fit: a row for each topology.

    On each, these are tried by arithmetic, and the first that fits is taken:

    - meshes `{"fsdp": n, "model": m}` where m divides heads, experts and the insides of MLPs, and n divides the batch.
      For training the smallest m is tried first, since that sends least, otherwise the largest;
    - for training what `what_if` leaves out: `remat="attention"`, then `"full"`, then the optimizer's slots in hosts'
      memory, with each of these;
    - if no n divides the batch, larger batches that a mesh divides.

    A row is tight if less memory is left than the error of the estimate, a quarter of the activations. It counts if it
    fits no better without host memory.

    Args:
        abstract: The model; shardings that it has are replaced.
        *topologies: As for `arithmetic_mesh`: TPU slices, `"v5p-32"`, or a GPU and their number, `"H100:8"`.
        what_if: What the plans count, as for `AbstractModel.plan`.
        rules: As for `AbstractModel.shard`; None is `lazymodel.auto()`.
        axes: The mesh to use, as for `arithmetic_mesh`; None tries several.
        device_memory: As for `AbstractModel.plan`, likewise the others.

    Raises:
        LazyModelError: There is no topology, or an argument is invalid.
        ShardingError: The rules fit no mesh of a topology.

    Example:
        >>> found = lm.plans(abstract, "v5e-1", "v5e-8", what_if=lm.WhatIf("adamw"), device_memory="100KiB")
        >>> [(row.topology, row.verdict, row.spare_nbytes) for row in found.rows]
        [('v5e-1', 'does not fit', -159744), ('v5e-8', 'fits', 4096)]
        >>> eval(found.python, {"lm": lm, "abstract": abstract}).fits
        True
    """
    if not topologies:
        raise LazyModelError("plans needs at least one topology, such as 'v5p-32' or 'H100:8'")
    given = stated(what_if)
    options = {"device_memory": device_memory, "host_memory": host_memory, "hosts": hosts}
    for topology in topologies:
        arithmetic_mesh(topology, axes)  # all names are checked first
    chosen = named_rules("auto" if rules is None else rules)
    search = _Search(abstract, chosen, given, options, _most_parts(abstract))
    rows = tuple(search.row(topology, axes) for topology in topologies)
    automatic = chosen == named_rules("auto")
    return Plans(abstract.name, rows, given, options, "lm.auto()" if automatic else "")


class _Try(NamedTuple):
    """A mesh, with the model on it, and the changes that it needs."""

    axes: dict[str, int]
    sharded: ModelSpec
    changes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Search:
    model: ModelSpec
    rules: Any
    what_if: WhatIf
    options: Mapping[str, Any]  # keywords of every plan
    most_parts: int  # in multiples of which nothing in the model can be split by `model`; 0 if that is unknown

    def row(self, topology: str, axes: Mapping[str, int] | None) -> TopologyPlan:
        """The cheapest way that fits."""
        tries = [*self._tries(topology, axes)]
        rows: list[TopologyPlan] = []
        for group in ([each for each in tries if not each.changes], [each for each in tries if each.changes]):
            ends = [self._planned(topology, each, self._changes()[-1][-1]) for each in group]
            # Whatever takes more memory than the last changes does not fit either.
            left = [each for each, end in zip(group, ends, strict=True) if end.spare_nbytes >= 0]
            for some in self._changes():
                tight: list[TopologyPlan] = []
                for changes in some:
                    fitting = [row for each in left if (row := self._planned(topology, each, changes)).plan.fits]
                    if found := next((row for row in fitting if not row.plan.tight), None):
                        return found
                    tight += fitting
                if tight:
                    return min(tight, key=lambda row: row.plan.needed_nbytes)
            rows += ends
        return min(rows, key=lambda row: row.plan.needed_nbytes)

    def _planned(self, topology: str, each: _Try, changes: Mapping[str, Any]) -> TopologyPlan:
        changes = {**each.changes, **changes}
        found = plan(each.sharded, what_if=dataclasses.replace(self.what_if, **changes), **self.options)
        return TopologyPlan(topology, each.axes, changes, found)

    def _tries(self, topology: str, axes: Mapping[str, int] | None) -> Iterator[_Try]:
        size, failed, any_mesh = arithmetic_mesh(topology).size, None, False
        sizes = [m for m in range(1, size + 1) if size % m == 0 and self.most_parts % m == 0]
        if self.what_if.optimizer is None and self.model.optimized is None:
            sizes.reverse()
        for m in sizes if axes is None else [1]:
            mesh: Any = arithmetic_mesh(topology, axes or _axes(size // m, m))
            with warnings.catch_warnings():
                # Unmatched variables are the same on every mesh; sharding on the chosen mesh warns about them.
                warnings.simplefilter("ignore", LazyModelWarning)
                try:
                    sharded = shard(self.model, mesh, self.rules)
                except ShardingError as error:
                    failed = failed or error
                    continue
            any_mesh, parts = True, _data_parts(mesh.shape)
            whole = -(-(self.what_if.batch or 0) // parts) * parts
            changes = {} if whole == (self.what_if.batch or 0) else {"batch": whole}
            yield _Try(dict(mesh.shape), sharded, changes)
        if failed and not any_mesh:
            raise failed

    def _changes(self) -> list[list[dict[str, Any]]]:
        """Changes of the `WhatIf`: to compute attention or layers again; then the same with slots on hosts."""
        given, found = self.what_if, [dict[str, Any]()]
        if given.optimizer is None:
            return [found]
        if given.batch is not None:
            known = REMATS.index(given.remat) + 1 if given.remat else 0
            found += [{"remat": remat} for remat in REMATS[known:]]
        return [found] if given.memory_kind else [found, [{**each, "memory_kind": PINNED_HOST} for each in found]]


def _fields(what_if: WhatIf) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(what_if):
        if (value := getattr(what_if, field.name)) is not None:
            yield field.name, value


def _axes(fsdp: int, model: int) -> dict[str, int]:
    return {axis: size for axis, size in {"fsdp": fsdp, "model": model}.items() if size > 1} or {"fsdp": 1}


def _data_parts(mesh: Mapping[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis in DATA_AXES)


def _most_parts(model: ModelSpec) -> int:
    """The largest number that divides what tensor parallelism splits: heads, experts, the insides of MLPs."""
    common = 0
    for each in describe(model.variables).values():
        first = ROLES[each.role].tensor[:1]
        for label, units in zip(each.labels, each.units, strict=True):
            if label in first and label not in _UNEVEN and units > 1:
                common = math.gcd(common, units)
    return common

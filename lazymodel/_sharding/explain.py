"""The verb `explain`: why one variable is where it is, and how a whole model spreads over its devices.

Responsible for gathering and wording it. The reasons themselves come with the variables, from `_sharding/shard` and
`_sharding/auto`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, overload

from jax.sharding import NamedSharding

from lazymodel._abstract.placement import device_nbytes
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable, Reason
from lazymodel._show.table import Row, grouped
from lazymodel._show.text import format_bytes, printable

_LISTED = 12  # lines of each kind that a report has before it only counts


@overload
def explain(model: ModelSpec, path: str) -> Explanation: ...
@overload
def explain(model: ModelSpec, path: None = None) -> ShardingReport: ...
def explain(model: ModelSpec, path: str | None = None) -> Explanation | ShardingReport:
    """Why a variable has its sharding, or without a path how the whole model spreads over its devices.

    Args:
        path: A variable's path.

    Returns:
        Both print as text. For a variable: its spec, shard bytes, the rule or role that decided, and what else was
        considered. For the model: bytes on the fullest and emptiest device, what is replicated and why, what
        `repair` mended, and rules that matched nothing.

    Raises:
        KeyError: There is no such variable.

    Example:
        >>> abstract.shard(mesh, lm.auto()).explain("up/kernel")
        up/kernel: float32 (64, 256), 64.00 KiB
          spec: P(None, 'model'); each of 8 devices holds (64, 32), 8.00 KiB
          role: mlp_up; dimensions: in, out
          why (proposed): out (256) in 8 parts over 'model'; split by columns: no communication before the next layer
          axis 'model' (8) divides dimensions 0, 1
    """
    return _explain_model(model) if path is None else Explanation(model[path])


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Why a variable has its sharding; prints as a few lines.

    Attributes:
        variable: The variable, with its sharding and the reason for it.
    """

    variable: AbstractVariable

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what one device holds."""
        sharding = self.variable.sharding
        return self.variable.shape if sharding is None else tuple(sharding.shard_shape(self.variable.shape))

    @property
    def alternatives(self) -> Mapping[str, tuple[int, ...]]:
        """For each axis of the mesh and its size, the dimensions that it divides."""
        sharding, shape = self.variable.sharding, self.variable.shape
        axes = sharding.mesh.shape if isinstance(sharding, NamedSharding) else {}
        return {
            f"{axis!r} ({size})": tuple(dim for dim, length in enumerate(shape) if length and length % size == 0)
            for axis, size in axes.items()
            if size > 1
        }

    def __str__(self) -> str:
        variable, sharding = self.variable, self.variable.sharding
        lines = [f"{variable.path}: {variable.dtype.name} {variable.shape}, {format_bytes(variable.nbytes)}"]
        if sharding is None:
            return f"{lines[0]}\n  no sharding was assigned; it goes to one device"
        reason = variable.reason or Reason("given", "an active distribution, or the model's builder, gave it")
        spec: Any = variable.spec if variable.spec is not None else sharding
        holds = f"each of {sharding.num_devices} devices holds" if sharding.num_devices > 1 else "one device holds"
        lines.append(f"spec: {spec}; {holds} {self.shard_shape}, {format_bytes(variable.shard_nbytes)}")
        if variable.layout is not None:
            lines.append(f"layout: dimensions from major to minor {variable.layout.major_to_minor}")
        known = {"role": reason.role, "dimensions": ", ".join(reason.labels)}
        if any(known.values()):
            lines.append("; ".join(f"{what}: {text}" for what, text in known.items() if text))
        lines += [f"why ({reason.kind}): {reason.text}", *(f"considered: {text}" for text in reason.tried)]
        for axis, dims in self.alternatives.items():
            numbers = f"dimension{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}" if dims else "no dimension"
            lines.append(f"axis {axis} divides {numbers}")
        return "\n  ".join(lines)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingReport:
    """How a model spreads over its devices; prints as a summary.

    Attributes:
        name: The model's name.
        nbytes: Bytes of all variables, each counted once.
        num_devices: Devices that hold anything.
        fullest_nbytes: Bytes on the device that holds most.
        emptiest_nbytes: Bytes on the one that holds least.
        replicated: Path and reason of every variable that is whole on each of several devices, largest first.
        replicated_nbytes: Bytes that these take on each device.
        unmatched: Paths that no rule matched.
        repaired: Path and reason of what `repair` mended.
        notes: What is to be said of the rules: those that matched nothing.
    """

    name: str
    nbytes: int
    num_devices: int
    fullest_nbytes: int
    emptiest_nbytes: int
    replicated: Mapping[str, str]
    replicated_nbytes: int
    unmatched: tuple[str, ...]
    repaired: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def imbalance(self) -> float:
        """Bytes on the fullest device by bytes on the average of an even split; 1.0 is a perfect split."""
        return self.fullest_nbytes * self.num_devices / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {format_bytes(self.nbytes)} on {self.num_devices} devices, "
            f"{format_bytes(self.fullest_nbytes)} on the fullest, "
            f"{format_bytes(self.emptiest_nbytes)} on the emptiest, {self.imbalance:.2f} × an even split"
        ]
        each = f", {format_bytes(self.replicated_nbytes)} each"
        for title, found, more in (
            ("replicated", self.replicated, each),
            ("repaired", self.repaired, ""),
            ("matched by no rule", dict.fromkeys(self.unmatched, ""), ""),
        ):
            if found:
                lines += [f"{title}: {len(found)} variables{more}", *_listed(found.items())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def _explain_model(model: ModelSpec) -> ShardingReport:
    variables = sorted(model.values(), key=lambda variable: -variable.nbytes)
    replicated = [
        variable
        for variable in variables
        if variable.sharding is not None
        and variable.sharding.num_devices > 1
        and variable.shard_nbytes == variable.nbytes
    ]
    by_kind: dict[str, list[AbstractVariable]] = {}
    for variable in variables:
        by_kind.setdefault("" if variable.reason is None else variable.reason.kind, []).append(variable)
    per_device = device_nbytes(variables)
    return ShardingReport(
        name=model.name,
        nbytes=model.nbytes,
        num_devices=max(len(per_device), 1),
        fullest_nbytes=max(per_device.values(), default=model.nbytes),
        emptiest_nbytes=min(per_device.values(), default=model.nbytes),
        replicated={variable.path: _words(variable) for variable in replicated},
        replicated_nbytes=sum(variable.nbytes for variable in replicated),
        unmatched=tuple(variable.path for variable in by_kind.get("unmatched", ())),
        repaired={variable.path: _words(variable) for variable in by_kind.get("repaired", ())},
        notes=model.sharding_notes,
    )


def _words(variable: AbstractVariable) -> str:
    reason = "given" if variable.reason is None else variable.reason.text
    return f"{variable.shape}, {format_bytes(variable.nbytes)}: {reason}"


def _listed(entries: Iterable[tuple[str, str]]) -> list[str]:
    """A line for all paths that differ in numbers only; where several lines would say the same, it is said once."""
    rows: list[Row] = []
    for path, text in entries:
        what, _, why = text.partition(": ")
        rows.append(Row(printable(path), (what,), 0, printable(why)))
    groups = grouped(rows)
    sentences: dict[str, list[str]] = {}
    for group in groups[:_LISTED]:
        times = f" × {group.count}" if group.count > 1 else ""
        sentences.setdefault(group.note, []).append(f"{group.name}{times} {group.cells[0]}".rstrip())
    lines: list[str] = []
    for why, names in sentences.items():
        if why and len(names) > 1:
            lines += [f"  {why}:", *(f"    {name}" for name in names)]
        else:
            lines += [f"  {name}: {why}" if why else f"  {name}" for name in names]
    left = sum(group.count for group in groups[_LISTED:])
    return [*lines, f"  … and {left:,} more"] if left else lines

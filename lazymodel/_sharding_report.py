"""What the sharding pass did, for people: why one variable is where it is, and how a whole model spreads over devices.

Responsible for gathering and wording it. The reasons themselves come with the variables, from `_sharding` and `_auto`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding

from lazymodel._bytes import format_bytes
from lazymodel._placement import device_nbytes
from lazymodel._report import _grouped, _printable, _Row

if TYPE_CHECKING:
    from lazymodel._abstract import AbstractModel, AbstractVariable
    from lazymodel._sharding import Reason

_LISTED = 12  # lines of each kind that a report has before it only counts


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Why a variable has its sharding; prints as a few lines.

    Attributes:
        variable: The variable, with its sharding.
        reason: What decided, or None where it has no sharding or was given one by something else than `shard`.
        shard_shape: The shape of what one device holds.
        alternatives: For each axis of the mesh, the dimensions that it divides.
    """

    variable: AbstractVariable
    reason: Reason | None
    shard_shape: tuple[int, ...]
    alternatives: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        variable, reason = self.variable, self.reason
        lines = [f"{variable.path}: {variable.dtype.name} {variable.shape}, {format_bytes(variable.nbytes)}"]
        if variable.sharding is None:
            return f"{lines[0]}\n  no sharding was assigned; it goes to one device"
        spec: Any = variable.spec if variable.spec is not None else variable.sharding
        devices = variable.sharding.num_devices
        holds = f"each of {devices} devices holds" if devices > 1 else "one device holds"
        lines.append(f"spec: {spec}; {holds} {self.shard_shape}, {format_bytes(variable.shard_nbytes)}")
        if variable.layout is not None:
            lines.append(f"layout: dimensions from major to minor {variable.layout.major_to_minor}")
        if reason is not None and reason.role:
            labels = f"; dimensions: {', '.join(reason.labels)}" if reason.labels else ""
            lines.append(f"role: {reason.role}{labels}")
        elif reason is not None and reason.labels:
            lines.append(f"dimensions: {', '.join(reason.labels)}")
        why = "an active distribution, or the model's builder, gave it" if reason is None else reason.text
        lines.append(f"why ({'given' if reason is None else reason.kind}): {why}")
        if reason is not None:
            lines.extend(f"considered: {text}" for text in reason.tried)
        for axis, dims in self.alternatives.items():
            divides = (
                f"divides dimension{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"
                if dims
                else ("divides no dimension")
            )
            lines.append(f"axis {axis} {divides}")
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
        if self.replicated:
            lines.append(f"replicated: {len(self.replicated)} variables, {format_bytes(self.replicated_nbytes)} each")
            lines.extend(_listed(self.replicated.items()))
        if self.repaired:
            lines.append(f"repaired: {len(self.repaired)} variables")
            lines.extend(_listed(self.repaired.items()))
        if self.unmatched:
            lines.append(f"matched by no rule: {len(self.unmatched)} variables")
            lines.extend(_listed((path, "") for path in self.unmatched))
        lines.extend(f"note: {note}" for note in self.notes)
        return "\n".join(lines)

    __repr__ = __str__


def explain_variable(variable: AbstractVariable) -> Explanation:
    """Why the variable has its sharding."""
    alternatives: dict[str, tuple[int, ...]] = {}
    sharding = variable.sharding
    if isinstance(sharding, NamedSharding):
        for axis, size in sharding.mesh.shape.items():
            if size > 1:
                dims = tuple(dim for dim, length in enumerate(variable.shape) if length and length % size == 0)
                alternatives[f"{axis!r} ({size})"] = dims
    shard_shape = variable.shape if sharding is None else tuple(sharding.shard_shape(variable.shape))
    return Explanation(variable, variable.reason, shard_shape, alternatives)


def explain_model(model: AbstractModel) -> ShardingReport:
    """How the model's variables spread over their devices."""
    variables = sorted(model.values(), key=lambda variable: -variable.nbytes)
    replicated = [
        variable
        for variable in variables
        if variable.sharding is not None
        and variable.sharding.num_devices > 1
        and variable.shard_nbytes == variable.nbytes
    ]
    per_device = device_nbytes(variables)
    repaired = [
        variable for variable in variables if variable.reason is not None and variable.reason.kind == "repaired"
    ]
    return ShardingReport(
        name=model.name,
        nbytes=model.nbytes,
        num_devices=max(len(per_device), 1),
        fullest_nbytes=max(per_device.values(), default=model.nbytes),
        emptiest_nbytes=min(per_device.values(), default=model.nbytes),
        replicated={variable.path: _words(variable) for variable in replicated},
        replicated_nbytes=sum(variable.nbytes for variable in replicated),
        unmatched=tuple(v.path for v in variables if v.reason is not None and v.reason.kind == "unmatched"),
        repaired={variable.path: _words(variable) for variable in repaired},
        notes=model.sharding_notes,
    )


def _words(variable: AbstractVariable) -> str:
    reason = "given" if variable.reason is None else variable.reason.text
    return f"{variable.shape}, {format_bytes(variable.nbytes)}: {reason}"


def _listed(entries: Iterable[tuple[str, str]]) -> list[str]:
    """A line for all paths that differ in numbers only; where several lines would say the same, it is said once."""
    rows: list[_Row] = []
    for path, text in entries:
        what, _, why = text.partition(": ")
        rows.append(_Row(_printable(path), (what,), 0, _printable(why)))
    groups = _grouped(rows)
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

"""The method `explain`: the reason for one variable's sharding, and how a whole model spreads over its devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, overload

from jax.sharding import NamedSharding

from lazymodel._abstract.placement import device_nbytes, offloaded_nbytes, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable, Reason
from lazymodel._show.table import Column, Report, Table, placed_text
from lazymodel._show.text import format_bytes, grouped_by, plural


@overload
def explain(model: ModelSpec, path: str) -> Explanation: ...
@overload
def explain(model: ModelSpec, path: None = None) -> ShardingReport: ...
def explain(model: ModelSpec, path: str | None = None) -> Explanation | ShardingReport:
    """Explains why a variable has its sharding or, without a path, how the whole model spreads over its devices.

    Args:
        path: A variable's path.

    Returns:
        Both print as text. For a variable: its spec, shard bytes, the rule or role that decided, and the alternatives
        considered. For the model: bytes on the most and least loaded device, replicated variables and why, variables
        that `repair` changed, guesses of `auto`, and rules that matched nothing.

    Raises:
        KeyError: There is no such variable.

    Example:
        >>> abstract.shard(mesh, lm.auto()).explain("up/kernel")
        up/kernel: float32 (64, 256), 64.00 KiB
          spec: P(None, 'model'); each of 8 devices holds (64, 32), 8.00 KiB
          role: mlp_up; dimensions: in, out; inferred from: its name
          why (proposed): out (256) in 8 parts over 'model'; split by columns: no communication before the next layer
          axis 'model' (8) divides dimensions 0, 1
    """
    return _explain_model(model) if path is None else Explanation(model[path])


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The reason for the sharding of a variable; prints as a few lines."""

    variable: AbstractVariable

    def __str__(self) -> str:
        variable, sharding = self.variable, self.variable.sharding
        lines = [f"{variable.path}: {variable.dtype.name} {variable.shape}, {format_bytes(variable.nbytes)}"]
        if stays_on_host(variable):
            return f"{lines[0]}\n  on the host: {_why(variable)}"
        if sharding is None:
            return f"{lines[0]}\n  no sharding was assigned; it is placed on one device"
        reason = variable.reason or Reason("given", "set by an active distribution or by the model's builder")
        spec: Any = variable.spec if variable.spec is not None else sharding
        holds = f"each of {sharding.num_devices} devices holds" if sharding.num_devices > 1 else "one device holds"
        if (kind := variable.memory_kind) is not None:
            spec, holds = placed_text(spec, kind), f"for each of {sharding.num_devices} devices its host holds"
        shape = tuple(sharding.shard_shape(variable.shape))
        lines.append(f"spec: {spec}; {holds} {shape}, {format_bytes(variable.shard_nbytes)}")
        if variable.layout is not None:
            lines.append(f"layout: dimensions from major to minor {variable.layout.major_to_minor}")
        known = {"role": reason.role, "dimensions": ", ".join(reason.labels), "inferred from": reason.told_from}
        if any(known.values()):
            lines.append("; ".join(f"{what}: {text}" for what, text in known.items() if text))
        lines += [f"why ({reason.kind}): {reason.text}", *(f"considered: {text}" for text in reason.tried)]
        axes = sharding.mesh.shape if isinstance(sharding, NamedSharding) else {}
        for axis, size in axes.items():
            dims = [str(dim) for dim, length in enumerate(variable.shape) if length and length % size == 0]
            numbers = f"dimension{'s' if len(dims) > 1 else ''} {', '.join(dims)}" if dims else "no dimension"
            lines += [f"axis {axis!r} ({size}) divides {numbers}"] if size > 1 else []
        return "\n  ".join(lines)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingReport(Report):
    """How a model spreads over its devices; prints as a table of variables that are not simply split, and a summary."""

    name: str  # the model's name
    nbytes: int  # bytes of all variables that devices hold, each counted once
    num_devices: int  # devices that hold anything
    fullest_nbytes: int  # bytes on the most loaded device
    emptiest_nbytes: int  # bytes on the least loaded device
    # Path and reason of every variable that several devices hold in full, largest first.
    replicated: Mapping[str, str]
    replicated_nbytes: int  # bytes that these take on each device
    # Path and reason of NumPy arrays that stay on the host; devices hold nothing of them.
    on_host: Mapping[str, str]
    offloaded: Mapping[str, str]  # path and reason of variables in the hosts' memory, such as `pinned_host`
    offloaded_nbytes: int  # bytes of these that a host holds for one device, at most
    unmatched: tuple[str, ...]  # paths that no rule matched
    repaired: Mapping[str, str]  # path and reason of variables that `repair` changed
    guessed: Mapping[str, str]  # path → what the guess of `auto` for the dimension to split is based on
    notes: tuple[str, ...]  # one for each rule that matched nothing

    @property
    def imbalance(self) -> float:
        """Bytes on the most loaded device by bytes on the average of an even split; 1.0 is a perfect split."""
        return self.fullest_nbytes * self.num_devices / self.nbytes if self.nbytes else 1.0

    def table(self) -> Table:
        """A table with one row for equal variables whose paths differ only in numbers."""
        title = (
            f"{self.name}: {format_bytes(self.nbytes)} on {self.num_devices} devices, "
            f"{format_bytes(self.fullest_nbytes)} on the most loaded, "
            f"{format_bytes(self.emptiest_nbytes)} on the least loaded, {self.imbalance:.2f} × an even split"
        )
        cells: list[tuple[str, ...]] = []
        lines: list[str] = []
        for what, found, more in (
            ("replicated", self.replicated, f", {format_bytes(self.replicated_nbytes)} each"),
            ("on the host", self.on_host, ""),
            ("in the host's memory", self.offloaded, f", {format_bytes(self.offloaded_nbytes)} for each device"),
            ("repaired", self.repaired, ""),
            ("split by a guess", self.guessed, "; rules by path override it"),
            ("matched by no rule", dict.fromkeys(self.unmatched, ""), ""),
        ):
            parted = ((path, *text.partition(": ")) for path, text in found.items())
            cells += [(path, what, shape, why) for path, shape, _, why in parted]
            lines += [f"{what}: {plural(len(found), 'variable')}{more}"] if found else []
        columns = (Column.names("variable"), Column(""), Column(""), Column.notes("why"))
        return Table(title, columns, cells, [*lines, *(f"note: {note}" for note in self.notes)])


def _explain_model(model: ModelSpec) -> ShardingReport:
    variables = sorted(model.values(), key=lambda variable: -variable.nbytes)
    offloaded = [variable for variable in variables if offloaded_nbytes(variable)]
    elsewhere = {variable.path for variable in offloaded}
    placed = [variable for variable in variables if not stays_on_host(variable) and variable.path not in elsewhere]
    nbytes, per_device = sum(variable.nbytes for variable in placed), device_nbytes(placed)
    apart = (variable for variable in placed if variable.sharding is not None and variable.sharding.num_devices > 1)
    replicated = [variable for variable in apart if variable.shard_nbytes == variable.nbytes]
    by_kind = grouped_by(variables, lambda variable: "" if variable.reason is None else variable.reason.kind)
    return ShardingReport(
        name=model.name,
        nbytes=nbytes,
        num_devices=max(len(per_device), 1),
        fullest_nbytes=max(per_device.values(), default=nbytes),
        emptiest_nbytes=min(per_device.values(), default=nbytes),
        replicated=_words(replicated),
        replicated_nbytes=sum(variable.nbytes for variable in replicated),
        on_host=_words(variable for variable in variables if stays_on_host(variable)),
        offloaded=_words(offloaded),
        offloaded_nbytes=sum(map(offloaded_nbytes, offloaded)),
        unmatched=tuple(variable.path for variable in by_kind.get("unmatched", ())),
        repaired=_words(by_kind.get("repaired", ())),
        guessed={
            v.path: f"{v.shape}, {v.spec}: {v.reason.told_from}" for v in variables if v.reason and v.reason.guessed
        },
        notes=model.sharding_notes,
    )


def _why(variable: AbstractVariable) -> str:
    if stays_on_host(variable) and (variable.reason is None or variable.reason.kind != "host"):
        return "a NumPy array, which nothing splits over devices"
    return "given" if variable.reason is None else variable.reason.text


def _words(variables: Iterable[AbstractVariable]) -> dict[str, str]:
    return {v.path: f"{v.shape}, {format_bytes(v.nbytes)}: {_why(v)}" for v in variables}

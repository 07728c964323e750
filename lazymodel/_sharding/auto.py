"""`auto`: shardings for a model that brings none, and a reason with each.

Responsible for placing the labelled dimensions of `_sharding/roles` on mesh axes, in the order that each role gives; of
them the first that divides is taken. What belongs to another variable is split as that one is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from jax.sharding import Mesh, PartitionSpec

from lazymodel._abstract.paths import rule_path
from lazymodel._abstract.variable import AbstractVariable, Reason
from lazymodel._errors import ShardingError
from lazymodel._sharding.axis_names import (
    DATA_NAMES,
    EXPERT_NAMES,
    FSDP_NAMES,
    TENSOR_NAMES,
    are_mesh_axes,
    flat_axes,
)
from lazymodel._sharding.describe import Described, describe
from lazymodel._sharding.host import Host
from lazymodel._sharding.roles import ROLES, Role
from lazymodel._show.text import closest, format_bytes

Axes: TypeAlias = "str | Sequence[str] | None"
Proposals: TypeAlias = "dict[str, tuple[PartitionSpec | Host, Reason]]"


@dataclasses.dataclass(frozen=True)
class Auto:
    """Automatic sharding rules; made by `auto`."""

    tensor: tuple[str, ...] | None = None
    fsdp: tuple[str, ...] | None = None
    expert: tuple[str, ...] | None = None
    host: str | None = None

    def propose(self, variables: Mapping[str, AbstractVariable], mesh: Mesh, *, large: int) -> Proposals:
        """A spec for every variable, which fits it on this mesh, and why it was chosen.

        What has `large` bytes or more is split wherever that is possible, whatever its role.

        Raises:
            ShardingError: The mesh lacks an axis that was named, or the axes cannot be told from their names; or no
                variable is one for the host.
        """
        proposer = _Proposer(variables, *self._axes(mesh), mesh, large)
        proposals: Proposals = {path: proposer.proposal(path) for path in variables}
        return proposals if self.host is None else proposals | self._on_host(proposals, self.host)

    @staticmethod
    def _on_host(proposals: Proposals, pattern: str) -> Proposals:
        """Those of variables that go to the host's memory."""
        try:
            found = [path for path in proposals if re.fullmatch(pattern, rule_path(path))]
        except (re.error, TypeError) as error:
            raise ShardingError(f"auto: host={pattern!r} is not a regular expression: {error}") from error
        if not found:
            paths = [rule_path(path) for path in proposals]
            raise ShardingError(f"auto: host={pattern!r} matches no variable{closest(pattern, paths)}")
        return {path: (Host(cast(Any, proposals[path][0])), proposals[path][1]) for path in found}

    def _axes(self, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        names = tuple(map(str, mesh.axis_names))
        given = [axis for axes in (self.tensor, self.fsdp, self.expert) for axis in axes or ()]
        for axis in given:
            if axis not in names:
                raise ShardingError(f"auto: the mesh has no axis {axis!r}; its axes are {', '.join(map(repr, names))}")
            if given.count(axis) > 1:
                raise ShardingError(f"auto: axis {axis!r} is named twice; each axis serves one kind of parallelism")
        free = [name for name in names if name not in given]

        def axes(given: tuple[str, ...] | None, *known: Sequence[str]) -> tuple[str, ...]:
            named = (tuple(name for name in free if name.lower() in names) for names in known)
            return next(filter(None, named), ()) if given is None else given

        tensor, expert = axes(self.tensor, TENSOR_NAMES), axes(self.expert, EXPERT_NAMES)
        fsdp = axes(self.fsdp, FSDP_NAMES, DATA_NAMES)
        if not (tensor or fsdp or expert) and self.tensor is None:
            if len(free) != 1:
                raise ShardingError(
                    f"auto: nothing is known of mesh axes {', '.join(map(repr, names))}; say what they are for: "
                    f"lm.auto(tensor={names[-1]!r}, fsdp={names[0]!r})"
                )
            tensor = (free[0],)
        return tensor, fsdp, expert


def auto(*, tensor: Axes = None, fsdp: Axes = None, expert: Axes = None, host: str | None = None) -> Auto:
    """Rules that propose a sharding for every variable of any model: `abstract.shard(mesh, lm.auto())`.

    What the model says itself comes first: mesh axes or logical names for the dimensions of a variable (Flax'
    partitioning metadata; Tunix, MaxText, Haliax, Penzai). Without, a proposal follows from a variable's role, told
    from its path, shape and neighbours: vocabularies, attention heads (never split inside a head), MLPs by columns and
    then by rows, experts, output channels; biases, LoRA factors, quantization scales and optimizer slots follow the
    variable that they belong to. Where the first choice of dimension does not divide, the next one is taken; nothing of
    1 MiB (`large` of `shard`) or more is replicated unless no dimension divides. The same model and mesh give the same
    proposal. `AbstractModel.explain` tells why.

    Args:
        tensor: Mesh axes for tensor parallelism. None takes those named `model`, `tensor`, `tp`, `mp`, `mdl`,
            `tensor_parallel` or `model_parallel`, or the only axis of a mesh, if its name says nothing else. `()` for
            none, here and below.
        fsdp: Mesh axes over which parameters are stored in pieces and gathered for use (fully-sharded data
            parallelism). None takes those named `fsdp`, `zero` or `fully_sharded`, and without such those named
            `data`, `batch`, `dp` or `data_parallel`.
        expert: Mesh axes for experts. None takes those named `expert`, `experts`, `ep` or `expert_parallel`. Without
            one, experts that all compute are split over the tensor and fsdp axes together; those used one by one,
            beside their router, over the tensor axes, or as any MLP is where there are fsdp axes. What is not an
            expert is stored in pieces over these axes too.
        host: Regex of whole paths (`re.fullmatch`): variables that go to the hosts' memory, split as they would be on
            devices, as by a rule with `lazymodel.Host`.

    Example:
        >>> abstract.shard(mesh, lm.auto())["up/kernel"].spec
        P(None, 'model')
    """
    return Auto(_as_axes(tensor), _as_axes(fsdp), _as_axes(expert), host)


def _as_axes(axes: Any) -> tuple[str, ...] | None:
    if not isinstance(axes, str | Sequence | None):
        raise ShardingError(f"auto: axes are the name of a mesh axis, a sequence of names or None; got {axes!r}")
    return None if axes is None else (axes,) if isinstance(axes, str) else tuple(cast("Sequence[str]", axes))


class _Placement:
    """One variable's dimensions while axes are placed on them."""

    def __init__(self, described: Described, shape: tuple[int, ...], mesh: Mesh) -> None:
        self.described, self.shape, self.mesh = described, shape, mesh
        self.axes: list[tuple[str, ...]] = [()] * len(shape)
        self.tried: dict[str, None] = {}
        self.why = ""

    def place(
        self, axes: tuple[str, ...], dims: Sequence[int], *, whole_units: bool = True, apart: bool = True
    ) -> bool:
        """Puts axes that have no dimension on the first of these that divides, free ones first, `apart` if need be.

        Returns whether all have one.
        """
        axes = tuple(axis for axis in axes if self.mesh.shape[axis] > 1 and not any(axis in on for on in self.axes))
        if not axes:
            return True
        for dim in sorted(dims, key=lambda dim: bool(self.axes[dim])):
            if self._fits(dim, axes, whole_units=whole_units):
                self.axes[dim] += axes
                return True
        each = sorted(axes, key=lambda axis: -self.mesh.shape[axis]) if apart and len(axes) > 1 else ()
        placed = [self.place((axis,), dims, whole_units=whole_units) for axis in each]  # all of them that can be
        return bool(placed) and all(placed)

    def _fits(self, dim: int, axes: tuple[str, ...], *, whole_units: bool) -> bool:
        parts = self.parts((*self.axes[dim], *axes))
        size, units, label = self.shape[dim], self.described.units[dim], self.described.labels[dim]
        where = f"dimension {dim} ({label}, {size})"
        over = f"{parts} parts over {_names(axes)}"
        if not size or size % parts:
            self.tried[f"{where} does not divide into {over}"] = None
        elif whole_units and units % parts:
            what = "whole heads in it are not known" if units == 1 else f"its {units} heads do not divide"
            self.tried[f"{where} is not split into {over}: {what}"] = None
        else:
            return True
        return False

    def parts(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def proposal(self, chosen: Sequence[str]) -> tuple[PartitionSpec, Reason]:
        """The spec and why; along which dimension the axes `chosen` split it matters."""
        split = ", ".join(
            f"{label} ({size}) in {self.parts(axes)} parts over {_names(axes)}"
            for label, size, axes in zip(self.described.labels, self.shape, self.axes, strict=True)
            if axes
        )
        text = "; ".join(filter(None, (split, self.why)))
        spec = trimmed([axes[0] if len(axes) == 1 else axes or None for axes in self.axes])
        described = self.described
        unsure = described.guessed or not described.ordered or described.role == "other"
        guessed = unsure and any(axis in chosen for axes in self.axes for axis in axes)
        told = described.told_from or ("a guess: nothing is known of its name and shape" if guessed else "")
        if described.role == "convolution" and not guessed:
            size_in, out = self.shape[described.labels.index("in")], described.labels.index("out")
            if size_in > self.shape[out] and any(axis in chosen for axis in self.axes[out]):
                guessed, told = True, f"{told}; it narrows, so that splitting what comes in may send less"
        return spec, Reason("proposed", text, described.role, described.labels, tuple(self.tried), told, guessed)


@dataclasses.dataclass
class _Proposer:
    variables: Mapping[str, AbstractVariable]
    tensor: tuple[str, ...]
    fsdp: tuple[str, ...]
    expert: tuple[str, ...]
    mesh: Mesh
    large: int

    def __post_init__(self) -> None:
        self.described = describe(self.variables)
        self.placed: dict[str, _Placement] = {}

    def proposal(self, path: str) -> tuple[PartitionSpec, Reason]:
        return self._placement(path).proposal((*self.tensor, *self.expert))

    def _placement(self, path: str) -> _Placement:
        """The placement of a variable, after that of the variable that it follows."""
        if path in self.placed:
            return self.placed[path]
        variable, described, row = self.variables[path], self.described[path], ROLES[self.described[path].role]
        placement = self.placed[path] = _Placement(described, variable.shape, self.mesh)
        large = variable.nbytes >= self.large
        if self.mesh.size == 1:
            placement.why = "the mesh has one device"
            return placement
        if (said := self._as_model_says(placement, variable)) is not None:
            placement.why = said
        elif described.follows is not None:
            placement.why = self._follow(placement, described.follows, large=large)
        elif row.tensor:
            placement.why = self._order(placement, row, large=large)
        elif not large:
            # Gathering a small one costs a message, keeping it almost nothing.
            less = f"{row.name} of {format_bytes(variable.nbytes)}, less than {format_bytes(self.large)}"
            small = f"{less}: replicated, a copy costs less than gathering it"
            placement.why = small if variable.shape else "a scalar"
        else:
            placement.why = "large, so it is stored in pieces"
        if large and not any(placement.axes):
            self._anywhere(placement)
            if not any(placement.axes):
                placement.why = "replicated: no dimension divides by any axis of the mesh"
        return placement

    def _as_model_says(self, placement: _Placement, variable: AbstractVariable) -> str | None:
        """Splits a variable over the mesh axes, or those that serve as what they are called, that its metadata names.

        Axes that the metadata does not use are placed as for any variable of its role, if it is large. Returns None
        where there is no such metadata, and for small vectors.
        """
        names = variable.logical_axes or ()
        if len(names) > len(variable.shape) or not are_mesh_axes(names, self.mesh.axis_names):
            return None
        row = ROLES[placement.described.role]
        if variable.nbytes < self.large and len(variable.shape) == 1 and not row.tensor:
            return None  # splitting norms, as Tunix does, has half as much again sent
        for dim, name in enumerate(names):
            for axis in flat_axes(name):
                placement.place(self._serving(axis), (dim,), whole_units=False)
        why = f"as the variable's own metadata {tuple(names)} says"
        if variable.nbytes >= self.large and row.tensor:
            before = list(placement.axes)
            self._order(placement, row, large=True)
            why += "" if before == placement.axes else "; over what else the mesh has, as its role wants"
        return why if any(placement.axes) else f"{why}: no dimension that it names divides"

    def _serving(self, axis: str) -> tuple[str, ...]:
        """The mesh axes that serve as one of this name."""
        kinds = (
            (TENSOR_NAMES, self.tensor),
            (FSDP_NAMES, self.fsdp),
            (DATA_NAMES, self.fsdp),
            (EXPERT_NAMES, self.expert),
        )
        used = (*self.tensor, *self.fsdp, *self.expert)
        if axis in used:
            return (axis,)
        return next((axes for names, axes in kinds if axis.lower() in names), ())

    def _order(self, placement: _Placement, order: Role, *, large: bool) -> str:
        labels, expert = placement.described.labels, order.tensor[0] == "experts"

        def dims(wanted: Sequence[str]) -> list[int]:
            return [dim for label in wanted for dim, found in enumerate(labels) if found == label]

        fsdp, tensor, why = self.fsdp if expert else (*self.fsdp, *self.expert), order.tensor, order.why
        if expert and self.expert:
            # If there are too few experts for the axis, it splits what is inside them.
            placed = placement.place(self.expert, dims(tensor))
            placed &= placement.place(self.tensor, dims((*tensor[1:], "experts")))
        else:
            if order.name == "lookup_table":  # what is looked up is far more than what is made of it
                placement.place((*fsdp, *self.tensor), dims(tensor[:1]), apart=False)
            elif expert and placement.described.bank:  # what each device's experts add to a token is summed once
                placement.place((*self.tensor, *fsdp), dims(tensor[:1]), apart=False)
            elif expert and placement.parts(fsdp) > 1:  # used one by one: pieces of a stack would all be sent around
                tensor, why = (tensor[1], tensor[0], tensor[2]), "each expert is split as any MLP is"
            elif order.name == "query_key_value" and not large:  # fewer key heads than devices: each needs the whole
                tensor = tensor[:1]
            placed = placement.place(self.tensor, dims(tensor))
        first = dims(tensor[:1])
        why = why if first and any(set(self.tensor) & set(placement.axes[dim]) for dim in first) else ""
        # Alone, it takes columns: over rows, XLA may add up activations of the whole batch instead of gathering the
        # much smaller weight (half the bytes for the queries of a compiled Gemma block).
        alone = order.fsdp[0] == "in" and not any(self.mesh.shape[axis] > 1 for axis in self.tensor)
        stored = dims(order.tensor if alone else order.fsdp)
        if not large and any(placement.axes):  # a small one is not cut again along what is cut already
            stored = [dim for dim in stored if not placement.axes[dim]]
        # A head stays whole in storage too, where there is another way, and a small one that is cut already.
        if stored and not placement.place(fsdp, stored) and (large or not any(placement.axes)):
            placed &= placement.place(fsdp, stored, whole_units=False)
        if not large and placement.tried and not any(placement.axes):
            why = f"replicated, since {next(iter(placement.tried))}"
        elif not placed:
            why = f"{why}; not split over every axis" if why else "not split over every axis: no dimension divides"
        elif not why and placement.tried:
            why = f"since {next(iter(placement.tried))}"
        return why

    def _follow(self, placement: _Placement, follows: str, *, large: bool) -> str:
        """Splits a variable as the one that it belongs to is."""
        other = self._placement(follows)
        # Of small ones only what saves communication: a bias stays with its columns, and is not stored in pieces.
        slot = placement.described.role == "optimizer_slot"
        keep = {axis for axis in self.mesh.axis_names if slot or large or axis in (*self.tensor, *self.expert)}
        for dim, source in enumerate(placement.described.dims):
            axes = () if source is None else tuple(axis for axis in other.axes[source] if axis in keep)
            if placement.shape[dim] % placement.parts(axes) == 0:
                placement.axes[dim] = axes
            else:
                size = placement.shape[dim]
                placement.tried[f"dimension {dim} ({size}) does not divide as that of {follows!r}"] = None
        return f"split as {follows}" if any(placement.axes) else f"replicated, as {follows} is along these dimensions"

    def _anywhere(self, placement: _Placement) -> None:
        """Stores a large variable in pieces, along the largest dimension that divides; layers if no other does."""
        labels = placement.described.labels
        dims = sorted(range(len(labels)), key=lambda dim: (-placement.shape[dim], -dim))  # columns of what is square
        for layers in (False, True):
            for axes in (self.tensor, (*self.fsdp, *self.expert)) if not any(placement.axes) else ():
                placement.place(axes, [dim for dim in dims if (labels[dim] == "layers") == layers], whole_units=False)


def trimmed(entries: Sequence[Any]) -> PartitionSpec:
    """A spec without the last entries that split nothing."""
    count = max((index + 1 for index, entry in enumerate(entries) if entry is not None), default=0)
    return PartitionSpec(*entries[:count])


def _names(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes))

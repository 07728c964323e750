"""`auto`: shardings for a model that has none, with a reason for each.

Responsible for placing the labelled dimensions of `_sharding/roles` on mesh axes, in the order that each role gives;
the first dimension that divides is used. A variable that belongs to another one is split like it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from jax.sharding import Mesh, PartitionSpec

from lazymodel._abstract.variable import AbstractVariable, Reason, flat_axes, matched_paths, rule_path
from lazymodel._errors import ShardingError
from lazymodel._sharding.describe import Described, describe
from lazymodel._sharding.follow import trimmed
from lazymodel._sharding.roles import ROLES, Host, Role
from lazymodel._show.text import closest, format_bytes

Axes: TypeAlias = "str | Sequence[str] | None"
Proposals: TypeAlias = "dict[str, tuple[PartitionSpec | Host, Reason]]"

# Purpose of a mesh axis → its common names. `batch` is the data axis of keras.distribution; published Keras layouts
# split parameters over it too.
_MESH_AXES = {
    "tensor": ("model", "tensor", "tp", "mp", "tensor_parallel", "model_parallel", "mdl"),
    "fsdp": ("fsdp", "zero", "fully_sharded"),
    "data": ("data", "batch", "dp", "data_parallel"),
    "expert": ("expert", "experts", "ep", "expert_parallel"),
}


@dataclasses.dataclass(frozen=True)
class Auto:
    """Automatic sharding rules; made by `auto`."""

    tensor: tuple[str, ...] | None = None
    fsdp: tuple[str, ...] | None = None
    expert: tuple[str, ...] | None = None
    host: str | None = None

    def propose(self, variables: Mapping[str, AbstractVariable], mesh: Mesh, *, large: int) -> Proposals:
        """A spec for every variable that fits it on this mesh, and the reason for it.

        A variable of `large` bytes or more is split if any dimension divides, whatever its role.

        Raises:
            ShardingError: The mesh does not have a named axis, its axis names do not show what they are for, or `host`
                matches no variable.
        """
        proposer = _Proposer(variables, *self._axes(mesh), mesh, large)
        proposals: Proposals = {path: proposer.proposal(path) for path in variables}
        if self.host is None:
            return proposals
        found = matched_paths(self.host, proposals, ShardingError, "auto: host")
        if not found:
            hint = closest(self.host, [rule_path(path) for path in proposals])
            raise ShardingError(f"auto: host={self.host!r} matches no variable{hint}")
        return proposals | {path: (Host(cast(Any, proposals[path][0])), proposals[path][1]) for path in found}

    def _axes(self, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        names = tuple(map(str, mesh.axis_names))
        given = [axis for axes in (self.tensor, self.fsdp, self.expert) for axis in axes or ()]
        for axis in given:
            if axis not in names:
                raise ShardingError(f"auto: the mesh has no axis {axis!r}; its axes are {', '.join(map(repr, names))}")
            if given.count(axis) > 1:
                raise ShardingError(f"auto: axis {axis!r} is named twice; each axis serves one kind of parallelism")
        free = [name for name in names if name not in given]

        def axes(given: tuple[str, ...] | None, *kinds: str) -> tuple[str, ...]:
            named = (tuple(name for name in free if name.lower() in _MESH_AXES[kind]) for kind in kinds)
            return next(filter(None, named), ()) if given is None else given

        tensor, expert = axes(self.tensor, "tensor"), axes(self.expert, "expert")
        fsdp = axes(self.fsdp, "fsdp", "data")
        if not (tensor or fsdp or expert) and self.tensor is None:
            if len(free) != 1:
                raise ShardingError(
                    f"auto: nothing is known of mesh axes {', '.join(map(repr, names))}; pass what they are for: "
                    f"lm.auto(tensor={names[-1]!r}, fsdp={names[0]!r})"
                )
            tensor = (free[0],)
        return tensor, fsdp, expert


def auto(*, tensor: Axes = None, fsdp: Axes = None, expert: Axes = None, host: str | None = None) -> Auto:
    """Rules that propose a sharding for every variable of any model: `abstract.shard(mesh, lm.auto())`.

    The model's own names come first: mesh axes or logical names for the dimensions of a variable (Flax' partitioning
    metadata; Tunix, MaxText, Haliax, Penzai). Without them, a proposal follows from a variable's role, which is
    inferred from its path, shape and neighbours: vocabularies, attention heads (never split inside a head), MLPs by
    columns and then by rows, experts, output channels; biases, LoRA factors, quantization scales and optimizer slots
    follow the variable that they belong to. If the first choice of dimension does not divide, the next one is used;
    nothing of 1 MiB (`large` of `shard`) or more is replicated unless no dimension divides. The same model and mesh
    give the same proposal. `AbstractModel.explain` gives the reasons.

    Args:
        tensor: Mesh axes for tensor parallelism. None takes those named `model`, `tensor`, `tp`, `mp`, `mdl`,
            `tensor_parallel` or `model_parallel`, or the only axis of a mesh, unless its name means something else.
            `()` means none, here and below.
        fsdp: Mesh axes over which parameters are stored in shards (fully-sharded data parallelism); `pin_batch` makes
            steps that gather them for use. Tables are split over them by entries, not by features. None takes those
            named `fsdp`, `zero` or `fully_sharded`; without any, those named `data`, `batch`, `dp` or `data_parallel`.
        expert: Mesh axes for experts. None takes those named `expert`, `experts`, `ep` or `expert_parallel`. Without
            one, experts that all compute are split over the tensor and fsdp axes together. Experts used one by one,
            in the same layer as their router, are split over the tensor axes or, with fsdp axes, like any MLP.
            Variables that are not experts are stored in shards over these axes too.
        host: Regex of whole paths (`re.fullmatch`): variables that are stored in the hosts' memory, split as they
            would be on devices, like a rule with `lazymodel.Host`.

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
    """The dimensions of one variable, while axes are placed on them."""

    def __init__(self, described: Described, shape: tuple[int, ...], mesh: Mesh) -> None:
        self.described, self.shape, self.mesh = described, shape, mesh
        self.axes: list[tuple[str, ...]] = [()] * len(shape)
        self.tried: dict[str, None] = {}
        self.why = ""

    def place(
        self, axes: tuple[str, ...], dims: Sequence[int], *, whole_units: bool = True, apart: bool = True
    ) -> bool:
        """Puts the axes not placed yet on the first of these dimensions that divides, free ones first.

        With `apart`, axes that fit no dimension together are placed one by one. Returns True if all are placed.
        """
        axes = tuple(axis for axis in axes if self.mesh.shape[axis] > 1 and not any(axis in on for on in self.axes))
        if not axes:
            return True
        for dim in sorted(dims, key=lambda dim: bool(self.axes[dim])):
            if self._fits(dim, axes, whole_units=whole_units):
                self.axes[dim] += axes
                return True
        each = sorted(axes, key=lambda axis: -self.mesh.shape[axis]) if apart and len(axes) > 1 else ()
        placed = [self.place((axis,), dims, whole_units=whole_units) for axis in each]  # no early exit: as many as fit
        return bool(placed) and all(placed)

    def _fits(self, dim: int, axes: tuple[str, ...], *, whole_units: bool) -> bool:
        parts = self.parts((*self.axes[dim], *axes))
        size, units, label = self.shape[dim], self.described.units[dim], self.described.labels[dim]
        where = f"dimension {dim} ({label}, {size})"
        over = f"{parts} parts over {_names(axes)}"
        if not size or size % parts:
            self.tried[f"{where} does not divide into {over}"] = None
        elif whole_units and units % parts:
            what = "its number of heads is unknown" if units == 1 else f"its {units} heads do not divide"
            self.tried[f"{where} is not split into {over}: {what}"] = None
        else:
            return True
        return False

    def parts(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def proposal(self, chosen: Sequence[str]) -> tuple[PartitionSpec, Reason]:
        """The spec and its reason; it is a guess only if one of the axes `chosen` splits an uncertain dimension."""
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
        source = described.told_from or ("a guess: its name and shape are unknown" if guessed else "")
        if described.role == "convolution" and not guessed:
            size_in, out = self.shape[described.labels.index("in")], described.labels.index("out")
            if size_in > self.shape[out] and any(axis in chosen for axis in self.axes[out]):
                guessed, source = True, f"{source}; it narrows, so splitting the input may send less"
        return spec, Reason("proposed", text, described.role, described.labels, tuple(self.tried), source, guessed)


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
        if (by_metadata := self._by_metadata(placement, variable)) is not None:
            placement.why = by_metadata
        elif described.follows is not None:
            placement.why = self._follow(placement, described.follows, large=large)
        elif row.tensor:
            placement.why = self._order(placement, row, large=large)
        elif not large:
            # Gathering a small variable costs a message; a copy of it costs almost no memory.
            less = f"{row.name} of {format_bytes(variable.nbytes)}, less than {format_bytes(self.large)}"
            small = f"{less}: replicated, a copy costs less than gathering it"
            placement.why = small if variable.shape else "a scalar"
        else:
            placement.why = "large, so it is stored in shards"
        if large and not any(placement.axes):
            self._anywhere(placement)
            if not any(placement.axes):
                placement.why = "replicated: no dimension divides by any axis of the mesh"
        return placement

    def _by_metadata(self, placement: _Placement, variable: AbstractVariable) -> str | None:
        """Splits a variable over the mesh axes that its metadata names, or over axes of the same purpose.

        Axes that the metadata does not use are placed as for any variable of its role, if it is large. Returns None
        if there is no such metadata, and for small vectors.
        """
        names = variable.logical_axes or ()
        if len(names) > len(variable.shape) or not _are_mesh_axes(names, self.mesh.axis_names):
            return None
        row = ROLES[placement.described.role]
        if variable.nbytes < self.large and len(variable.shape) == 1 and not row.tensor:
            return None  # splitting norms, as Tunix does, sends half as much again
        for dim, name in enumerate(names):
            for axis in flat_axes(name):
                placement.place(self._serving(axis), (dim,), whole_units=False)
        why = f"from the variable's own metadata {tuple(names)}"
        if variable.nbytes >= self.large and row.tensor:
            before = list(placement.axes)
            self._order(placement, row, large=True)
            why += "" if before == placement.axes else "; over the other axes of the mesh, by its role"
        return why if any(placement.axes) else f"{why}: none of the dimensions it names divides"

    def _serving(self, axis: str) -> tuple[str, ...]:
        """The mesh axes with the purpose of an axis of this name."""
        if axis in (*self.tensor, *self.fsdp, *self.expert):
            return (axis,)
        kinds = {"tensor": self.tensor, "fsdp": self.fsdp, "data": self.fsdp, "expert": self.expert}
        return next((axes for kind, axes in kinds.items() if axis.lower() in _MESH_AXES[kind]), ())

    def _order(self, placement: _Placement, order: Role, *, large: bool) -> str:
        labels, expert = placement.described.labels, order.tensor[0] == "experts"

        def dims(required: Sequence[str]) -> list[int]:
            return [dim for label in required for dim, found in enumerate(labels) if found == label]

        fsdp, tensor, why = self.fsdp if expert else (*self.fsdp, *self.expert), order.tensor, order.why
        if expert and self.expert:
            # If there are too few experts for the axis, it splits what is inside them.
            placed = placement.place(self.expert, dims(tensor))
            placed &= placement.place(self.tensor, dims((*tensor[1:], "experts")))
        else:
            if expert and placement.described.bank:  # the outputs of each device's experts are summed once per token
                placement.place((*self.tensor, *fsdp), dims(tensor[:1]), apart=False)
            elif expert and placement.parts(fsdp) > 1:  # used one by one: every part of a split stack would be sent
                tensor, why = (tensor[1], tensor[0], tensor[2]), "each expert is split like any MLP"
            elif order.name == "query_key_value" and not large:  # with fewer key heads than devices, each needs all
                tensor = tensor[:1]
            placed = placement.place(self.tensor, dims(tensor))
        first = dims(tensor[:1])
        why = why if first and any(set(self.tensor) & set(placement.axes[dim]) for dim in first) else ""
        # Without tensor axes, split columns: for rows, XLA may add up activations of the whole batch, not gather the
        # much smaller weight (half the bytes for the queries of a compiled Gemma block).
        alone = order.fsdp[:1] == ("in",) and not any(self.mesh.shape[axis] > 1 for axis in self.tensor)
        stored = dims(order.tensor if alone else order.fsdp)
        if not large and any(placement.axes):  # a small variable splits a dimension once, a table its entries
            stored = [dim for dim in stored if not placement.axes[dim] or "features" in labels]
        # Storage splits a head only if nothing else divides, and not for a small variable that is split already.
        if stored and not placement.place(fsdp, stored) and (large or not any(placement.axes)):
            placed &= placement.place(fsdp, stored, whole_units=False)
        if not large and placement.tried and not any(placement.axes):
            why = f"replicated, since {next(iter(placement.tried))}"
        elif not placed:
            why = f"{why}; not split over every axis" if why else "not split over every axis: no dimension divides"
        elif not why and placement.tried:
            why = f"since {next(iter(placement.tried))}"
        if not why and not any(placement.axes):
            why = f"replicated: a {order.name} of this size is split over axes of tensor parallelism alone"
        return why

    def _follow(self, placement: _Placement, follows: str, *, large: bool) -> str:
        """Splits a variable like the one that it belongs to."""
        other = self._placement(follows)
        # Small variables are split only to save communication: a bias stays with its columns, without fsdp axes.
        slot = placement.described.role == "optimizer_slot"
        keep = {axis for axis in self.mesh.axis_names if slot or large or axis in (*self.tensor, *self.expert)}
        for dim, source in enumerate(placement.described.dims):
            axes = () if source is None else tuple(axis for axis in other.axes[source] if axis in keep)
            if placement.shape[dim] % placement.parts(axes) == 0:
                placement.axes[dim] = axes
            else:
                size = placement.shape[dim]
                placement.tried[f"dimension {dim} ({size}) does not divide like that of {follows!r}"] = None
        return f"split like {follows}" if any(placement.axes) else f"replicated like {follows} in these dimensions"

    def _anywhere(self, placement: _Placement) -> None:
        """Splits a large variable along the largest dimension that divides; along layers only if no other does.

        Tables are split by features only if their entries do not divide.
        """
        labels = placement.described.labels
        size = placement.shape
        # The last of equal ones: columns of a square.
        dims = sorted(range(len(labels)), key=lambda dim: (labels[dim] == "features", -size[dim], -dim))
        for layers in (False, True):
            for axes in (self.tensor, (*self.fsdp, *self.expert)) if not any(placement.axes) else ():
                allowed = [dim for dim in dims if (labels[dim] == "layers") == layers]
                if any(placement.axes):
                    allowed = [dim for dim in allowed if labels[dim] != "features"]
                placement.place(axes, allowed, whole_units=False)


def _names(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes))


def _are_mesh_axes(names: Sequence[Any], mesh_axes: Sequence[str]) -> bool:
    """Returns True if a variable has names and all are of mesh axes: axes of this mesh, or common names of such."""
    known = {*mesh_axes, *sum(_MESH_AXES.values(), ())}
    flat = [axis for name in names for axis in flat_axes(name)]
    return bool(flat) and all(axis in known or axis.lower() in known for axis in flat)

"""Every form of rules as one mapping, path → spec and reason; checks of specs; variables split like another.

Each dimension of a LoRA factor, a quantization scale or of optimizer state is split like the dimension of its weight
that it corresponds to. `_sharding/shard` assigns the results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.variable import AbstractVariable, Reason, in_memory, matched_paths, rule_path
from lazymodel._errors import ShardingError
from lazymodel._sharding.auto import Auto, auto, trimmed
from lazymodel._sharding.describe import describe
from lazymodel._sharding.roles import Host, Role, flat_axes
from lazymodel._show.text import closest


@runtime_checkable
class Proposer(Protocol):
    """Rules that look at the whole model at once, as `auto` does."""

    def propose(
        self, variables: Mapping[str, AbstractVariable], mesh: Mesh, *, large: int
    ) -> Mapping[str, tuple[Any, Reason | str]]:
        """Maps path → (spec, reason as text or `Reason`); a path that is left out counts as matched by no rule.

        `large` is the number of bytes from which replicating a variable gives a warning.
        """
        ...


Spec: TypeAlias = PartitionSpec | Host | Sharding | Format | Sequence[Any] | None
# Keys are path regexes and roles; a Mapping is invariant in them, so `str | Role` would reject a `dict[str, …]`.
Rules: TypeAlias = (
    Mapping[Any, Spec]
    | Callable[[AbstractVariable], Spec]
    | Sequence[tuple[str, Any]]
    | Proposer
    | Callable[..., Auto]
    | Literal["auto"]
)
_Found: TypeAlias = "dict[str, tuple[Any, Reason]]"  # path → the answer of a rule and its reason


def read_rules(
    rules: Any, variables: Mapping[str, AbstractVariable], mesh: Mesh, large: int
) -> tuple[_Found, tuple[str, ...]]:
    """Any form of rules except a name: path → spec and reason, and a note on each rule without a match.

    Variables that no rule matches are left out. So is optimizer state, unless patterns of a mapping match only state.
    """
    own = {path: variable for path, variable in variables.items() if variable.follows is None}
    if isinstance(rules, Mapping):
        return _by_mapping(cast("Mapping[Any, Any]", rules), variables, own)
    found: dict[str, tuple[Any, Reason | str]] = {}
    where = "the result"
    if isinstance(rules, Proposer):
        found = dict(rules.propose(own, mesh, large=large))
    elif callable(rules):
        where += f" of the callable {getattr(rules, '__qualname__', type(rules).__name__)}"
        reason = Reason("callable", f"returned by {where.removeprefix('the result of ')}")
        found = {path: (rules(variable), reason) for path, variable in own.items()}
        found = {path: answer for path, answer in found.items() if answer[0] is not None}
    elif rules is None or (isinstance(rules, Sequence) and not isinstance(rules, str | PartitionSpec)):
        return _by_axis_names(rules, own, mesh), ()
    else:
        raise ShardingError(
            "rules are a mapping of path regex to PartitionSpec, a Keras LayoutMap, a callable taking a variable, "
            f"a sequence of (logical axis, mesh axis) or lm.auto(); got {type(rules).__name__}"
            + (f". For all variables: {{'.*': {rules!r}}}" if isinstance(rules, PartitionSpec | Host) else "")
        )
    for path, (spec, _) in found.items():
        _check_is_spec(spec, f"{where} for {path!r}")
    texts = {
        path: (spec, Reason("proposed", why) if isinstance(why, str) else why) for path, (spec, why) in found.items()
    }
    return texts, ()


def named_rules(rules: Any, what: str = "rules") -> Any:
    """Returns the rules for a name or for the function that makes them; others unchanged. `what`: the parameter's name.

    Raises:
        ShardingError: The name is unknown.
    """
    if isinstance(rules, str) and rules != "auto":
        raise ShardingError(
            f"{what}={rules!r} is not known{closest(rules, ['auto'])}; the only name is 'auto', short for lm.auto(). "
            f"A rule for paths is written {{{rules!r}: PartitionSpec(…)}}"
        )
    return auto() if rules is auto or rules is Auto or isinstance(rules, str) else rules


def is_layout_map(rules: Any) -> bool:
    """Returns True if a mapping is Keras' LayoutMap, which carries a device mesh."""
    return hasattr(rules, "device_mesh")


def _by_mapping(
    table: Mapping[str | Role, Any], variables: Mapping[str, AbstractVariable], own: Mapping[str, AbstractVariable]
) -> tuple[_Found, tuple[str, ...]]:
    """The first key that matches; optimizer state is not matched by keys that match a parameter."""
    exclusive = is_layout_map(table)
    matched: dict[str, list[str | Role]] = {}
    notes: list[str] = []
    described = describe(own) if any(isinstance(key, Role) for key in table) else {}
    for key, spec in table.items():
        if isinstance(key, Role):
            _check_is_spec(spec, f"rule {key.name}")
            paths, note = [p for p in own if described[p].role == key.name], f"no variable has the role {key.name!r}"
        else:
            _check_is_spec(spec, f"rule {key!r}")
            paths = matched_paths(key, own, ShardingError, "rule")
            paths = paths or ([] if exclusive else matched_paths(key, variables, ShardingError, "rule"))
            note = "" if paths else f"rule {key!r} matches no variable{closest(key, map(rule_path, own))}"
        notes += [] if paths else [note]
        for path in paths:
            matched.setdefault(path, []).append(key)
    found: _Found = {}
    for path, keys in matched.items():
        first = next((key for key in keys if key == rule_path(path)), keys[0]) if exclusive else keys[0]
        if exclusive and len(keys) > 1 and first != rule_path(path):
            raise ShardingError(
                f"{path!r} is matched by more than one key of the LayoutMap: {', '.join(map(repr, keys))}; "
                "make them exclusive"
            )
        by_role = isinstance(first, Role)
        text, role = (f"rule for role {first.name!r}", first.name) if by_role else (f"rule {first!r} matches", "")
        found[path] = table[first], Reason("rule", text, role)
    return found, tuple(notes)


def _by_axis_names(rules: Sequence[Any] | None, variables: Mapping[str, AbstractVariable], mesh: Mesh) -> _Found:
    """For variables that carry names for their axes: mesh axes, or logical axes that the rules map to these."""
    for rule in rules or ():
        pair = isinstance(rule, Sequence) and len(cast("Sequence[Any]", rule)) == 2 and isinstance(rule[0], str)
        if not pair or isinstance(rule[1], PartitionSpec):
            raise ShardingError(
                "rules in a sequence must be pairs of a logical axis and a mesh axis, a tuple of them or None; got "
                f"{rule!r}. Rules by path are a mapping, {{path pattern: PartitionSpec}}"
            )
    if not any(variable.logical_axes for variable in variables.values()):
        uses = "rules are pairs of logical and mesh axes, and" if rules is not None else "shard() without rules uses"
        uses += "" if rules is not None else " the axis names that variables carry, and"
        raise ShardingError(
            f"{uses} no variable of this model carries names for its axes. Give rules, such as lm.auto()"
        )
    found: _Found = {}
    for path, variable in variables.items():
        if (names := variable.logical_axes) is None:
            continue
        if len(names) > len(variable.shape):
            raise ShardingError(
                f"{path!r} of shape {variable.shape} has more axis names than dimensions: {tuple(names)}"
            )
        if repeated := [name for name in names if isinstance(name, str) and names.count(name) > 1]:
            raise ShardingError(f"{path!r}: axis {repeated[0]!r} occurs more than once in {tuple(names)}")
        if rules is not None:
            entries, unknown = resolve_logical(names, rules)
            if not unknown or any(entries):  # else replicated, with a warning if it is large
                left = f"; no rule for {', '.join(map(repr, unknown))}, which are not split" if unknown else ""
                reason = Reason("logical", f"logical axes {names}{left}", labels=(*map(str, names),))
                found[path] = PartitionSpec(*entries), reason
            continue
        if absent := [axis for name in names for axis in flat_axes(name) if axis not in mesh.shape]:
            raise ShardingError(
                f"{path!r} has axes {names}, and {absent[0]!r} is not an axis of the mesh "
                f"({', '.join(map(repr, mesh.axis_names))}). If it is a logical axis, give rules: "
                f"shard(mesh, [({absent[0]!r}, {mesh.axis_names[-1]!r}), …])"
            )
        found[path] = PartitionSpec(*names), Reason("metadata", "from the variable's own metadata")
    return found


def resolve_logical(names: Sequence[Any], rules: Sequence[tuple[str, Any]]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Mesh axes for the logical axes of one variable, and the logical axes without a rule.

    As in `flax.linen.logical_to_mesh_axes`, a rule whose mesh axes already split another dimension is skipped, and the
    next rule of the same logical axis is tried.
    """
    resolved: dict[str, Any] = {}
    used: set[str] = set()
    for logical, target in rules:
        if logical in names and logical not in resolved and not used.intersection(flat_axes(target)):
            resolved[logical] = target if target is None or isinstance(target, str) else tuple(target)
            used.update(flat_axes(target))
    known = {logical for logical, _ in rules}
    unknown = tuple(name for name in names if isinstance(name, str) and name not in known)
    return tuple(resolved.get(name) for name in names), unknown


def _check_is_spec(spec: Any, where: str) -> None:
    """Raises ShardingError unless it is a PartitionSpec, sequence, None, Host, sharding or Keras' TensorLayout."""
    if isinstance(spec, Host):
        if isinstance(cast(Any, spec.spec), Host | Sharding | Format):
            raise ShardingError(
                f"{where}: lm.Host takes a PartitionSpec; for a sharding, "
                f"use sharding.with_memory_kind({spec.memory_kind!r})"
            )
        spec = spec.spec
    if spec is None or isinstance(spec, PartitionSpec | Sharding | Format):
        return
    entries = getattr(spec, "axes", spec)
    expected = f"{where}: a spec is a PartitionSpec or a tuple of axis names; got"
    if isinstance(entries, str):
        raise ShardingError(
            f"{expected} {entries!r}. Write PartitionSpec({entries!r}) to split the first dimension, "
            f"PartitionSpec(None, {entries!r}) for the second"
        )
    if not isinstance(entries, Sequence):
        raise ShardingError(f"{expected} {spec!r}. PartitionSpec() replicates")
    for entry in cast("Sequence[Any]", entries):
        if not all(isinstance(name, Hashable) for name in (entry if isinstance(entry, list | tuple) else (entry,))):
            raise ShardingError(f"{where}: an entry of a spec is an axis name, a tuple of them, or None; got {entry!r}")


def check_spec(variable: AbstractVariable, spec: Any, mesh: Mesh) -> PartitionSpec:
    """The spec as a `PartitionSpec`; raises ShardingError if it does not fit the variable on the mesh."""
    entries = cast("Sequence[Any]", () if spec is None else getattr(spec, "axes", spec))
    spec = PartitionSpec(*(tuple(cast("list[Any]", each)) if isinstance(each, list) else each for each in entries))
    shape, where = variable.shape, f"{variable.path!r} of shape {variable.shape} with {spec}"
    if len(spec) > len(shape):
        raise ShardingError(
            f"{where}: the spec has {len(spec)} entries for {len(shape)} dimensions; drop the last ones"
        )
    used: set[str] = set()
    for dimension, axes in enumerate(map(flat_axes, spec)):
        for axis in axes:
            if axis not in mesh.shape:
                known = ", ".join(f"{name!r} ({size})" for name, size in mesh.shape.items())
                raise ShardingError(
                    f"{where}: the mesh has no axis {axis!r}{closest(axis, mesh.shape)}; its axes are {known}"
                )
            if axis in used:
                raise ShardingError(f"{where}: axis {axis!r} is used twice; a mesh axis can split one dimension only")
            used.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dimension] % parts:
            fitting = [str(index) for index, size in enumerate(shape) if size and size % parts == 0]
            hint = f"dimension {' or '.join(fitting)} would divide" if fitting else "no dimension divides; replicate it"
            raise ShardingError(
                f"{where}: dimension {dimension} of size {shape[dimension]} does not divide into {parts} "
                f"parts (axis {', '.join(map(repr, axes))}); {hint}"
            )
    return spec


# Variables that are split like another one ----------------------------------------------------------------------------


def along(sharding: Any, dims: Sequence[int | None], shape: Sequence[int]) -> Any:
    """The sharding of an array of this shape that belongs to one with this `sharding`; unchanged if that has no spec.

    `dims` gives for each dimension the corresponding one of the other array, or None. A dimension that does not divide
    is not split, such as one with fewer quantization scales than parts. The kind of memory is the same.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    of_other = dict(enumerate(sharding.spec))
    entries = [None if dim is None else of_other.get(dim) for dim in dims]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in flat_axes(entry)) for entry in entries]
    fitting = [None if size % count else entry for size, count, entry in zip(shape, parts, entries, strict=True)]
    return NamedSharding(sharding.mesh, trimmed(fitting), memory_kind=sharding.memory_kind)


def follow_weights(variables: Mapping[str, AbstractVariable], paths: Iterable[str]) -> dict[str, AbstractVariable]:
    """LoRA pairs and quantization scales among the paths, each split like the weight that it belongs to.

    Omits those whose weight is unknown, has no sharding, or is itself one of the paths.
    """
    described = describe(variables)
    left = set(paths)
    followed: dict[str, AbstractVariable] = {}
    for path, variable in variables.items():
        role = described[path]
        weight = variables.get(role.follows or "") if path in left and role.role in ("lora", "scale") else None
        if weight is None or weight.path in left or weight.sharding is None:
            continue
        sharding = along(weight.sharding, role.dims, variable.shape)
        sharding = in_memory(sharding, None, path) if role.role == "lora" else sharding
        spec = f"{sharding.spec}, " if isinstance(sharding, NamedSharding) else ""
        text = f"{spec}with {weight.path!r}, which it belongs to"
        followed[path] = dataclasses.replace(variable, sharding=sharding, reason=Reason("follows", text))
    return followed


def lora_shardings(sharding: Any, shape: tuple[int, ...], rank: int) -> tuple[Any, Any]:
    """The shardings of the LoRA pair of a weight of shape (…, n), which Keras makes (…, rank) and (rank, n).

    A pair is trained, so it is on devices even if its weight is in host memory.
    """
    *rest, last = range(len(shape))
    sharding = in_memory(sharding, None, "")
    return along(sharding, [*rest, None], (*shape[:-1], rank)), along(sharding, [None, last], (rank, shape[-1]))


def follow(
    state: Mapping[str, AbstractVariable],
    assigned: Mapping[str, AbstractVariable],
    mesh: Any = None,
    memory_kind: str | None = None,
) -> dict[str, AbstractVariable]:
    """Optimizer state, each variable placed like its parameter; without a parameter, on every device of the mesh.

    Its kind of memory does not depend on its parameter's. State without a parameter is small, and on devices.
    """
    if mesh is None:
        shardings = (variable.sharding for variable in assigned.values())
        mesh = next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)
    mesh = getattr(mesh, "backend_mesh", mesh)
    placed: dict[str, AbstractVariable] = {}
    for path, variable in state.items():
        parameter = assigned.get(variable.follows or "")
        sharding = layout = None
        text = "optimizer state of no parameter, replicated"
        if parameter is not None and parameter.shape == variable.shape:
            sharding = parameter.sharding
            layout = parameter.layout if parameter.dtype == variable.dtype else None
            text = f"as {parameter.path!r}, whose optimizer state it is"
        elif parameter is not None and isinstance(parameter.sharding, NamedSharding):
            sharding = _related(parameter.sharding, parameter.shape, variable.shape)
            text = f"{sharding.spec}, from the sharding of {parameter.path!r}, whose optimizer state it is"
        elif mesh is not None:
            sharding = NamedSharding(mesh, PartitionSpec())
        if parameter is not None:
            sharding = in_memory(sharding, memory_kind, path)
            layout = None if memory_kind else layout
        reason = None if sharding is None else Reason("optimizer", text)
        placed[path] = dataclasses.replace(variable, sharding=sharding, layout=layout, reason=reason)
    return placed


def _related(sharding: NamedSharding, parameter: tuple[int, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of state of another shape than its parameter's.

    A history, as L-BFGS keeps, has further leading dimensions. Factored second moments have one dimension less. If the
    missing one may be either of two that are split differently, as for square matrices, the state, which is small, is
    replicated.
    """
    own = list(range(len(parameter)))
    candidates = [[dim for dim in own if dim != left_out] for left_out in own]
    found = {along(sharding, dims, shape) for dims in candidates if tuple(parameter[dim] for dim in dims) == shape}
    if own and shape[-len(own) :] == parameter:
        found = {along(sharding, [None] * (len(shape) - len(own)) + own, shape)}
    return found.pop() if len(found) == 1 else NamedSharding(sharding.mesh, PartitionSpec())

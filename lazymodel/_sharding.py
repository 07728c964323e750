"""The sharding pass: rules in, a checked sharding for every variable out, with the reason for it.

Responsible for reading every form of rule, for matching, for saying what does not fit before a byte moves, and for
mending it where that was asked for. Not responsible for how a sharding is carried out, nor for proposing one (`_auto`).
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract import AbstractVariable
from lazymodel._auto import Auto, Proposal
from lazymodel._bytes import format_bytes, parse_bytes
from lazymodel._errors import LazyModelWarning, ShardingError
from lazymodel._report import closest
from lazymodel._roles import Role, describe, rule_path
from lazymodel._specs import check_is_spec, named_rules, spec_entries


@runtime_checkable
class Proposer(Protocol):
    """Rules that look at the whole model at once, as `auto` does."""

    def propose(self, variables: Mapping[str, AbstractVariable], mesh: Mesh, *, large: int) -> Mapping[str, Proposal]:
        """Path to proposal; a path that is left out counts as matched by no rule.

        Args:
            variables: Path to variable.
            mesh: The mesh.
            large: Bytes from which on replicating a variable is worth a warning.
        """
        ...


Spec: TypeAlias = PartitionSpec | Sharding | Format | Sequence[Any] | None
# Keys are path regexes and roles; a Mapping is invariant in them, so `str | Role` would refuse a `dict[str, …]`.
Rules: TypeAlias = (
    Mapping[Any, Spec]
    | Callable[[AbstractVariable], Spec]
    | Sequence[tuple[str, Any]]
    | Proposer
    | Callable[..., Auto]
    | Literal["auto"]
)

_LISTED = 8  # how many paths a message names before it only counts


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a variable has its sharding.

    Attributes:
        kind: `rule` (of a mapping), `callable`, `logical` (axis rules), `metadata` (the variable's own), `proposed`
            (by `auto` or another proposer), `follows` (the weight that it belongs to), `repaired`, `optimizer` (state,
            as its parameter), `host` (a NumPy array that devices cannot hold), or `unmatched`.
        text: The reason, for people.
        role: What `auto` or a rule by role took the variable for.
        labels: What each of its dimensions is, where that is known.
        tried: What was considered before and does not fit.
    """

    kind: str
    text: str
    role: str = ""
    labels: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()


def assign(
    variables: Mapping[str, AbstractVariable],
    mesh: Mesh,
    rules: Rules | None,
    *,
    on_unmatched: str = "warn",
    large: int | str = "1MiB",
    repair: bool | Auto = False,
) -> tuple[dict[str, AbstractVariable], tuple[str, ...]]:
    """Gives every variable a sharding.

    Rules are one of

    - a mapping of path regex to spec. The whole path must match (`re.fullmatch`); the first rule that matches, in
      the mapping's order, is taken. A key may also be a `role`. A pattern that matches no variable is an error.
    - a Keras `LayoutMap`, read in the same way, but as Keras reads it: a pattern that matches nothing is only
      warned about, because published maps serve several models.
    - a callable of a variable; None means that no rule applies.
    - a sequence of (logical axis, mesh axis, tuple of them or None), for variables that carry names for their axes, as
      Flax' do. As in Flax, rules are tried in their order, each mesh axis splits one dimension only, and a logical axis
      without a rule is not split.
    - `auto(...)`, also as `"auto"`, or any other `Proposer`.
    - None: variables carry names of mesh axes, and these are used.

    LoRA pairs and quantization scales that no rule matches are split like the weight that they belong to.

    A spec is a `PartitionSpec`, a tuple or list of axis names, None (replicate), or a whole `NamedSharding` or
    `jax.experimental.layout.Format` (a layout on the device and a sharding).

    Args:
        variables: Path to variable.
        mesh: The devices and their axis names; an object with a `backend_mesh`, as Keras' `DeviceMesh`, is unwrapped.
        rules: As above.
        on_unmatched: What to do about variables of at least `large` bytes that no rule matches (they are replicated
            on every device): `"warn"`, `"error"` or `"ignore"`.
        large: That threshold, in bytes or as text.
        repair: Whether a spec that does not fit, and a large variable that no rule matches, take what `auto` proposes
            instead, and dead rules are only noted; an `auto(...)` says which axes are for what.

    Returns:
        The variables with shardings and reasons, and notes on rules that matched nothing.

    Raises:
        ShardingError: A rule matches nothing, or a spec does not fit its variable or the mesh. All misfits of one
            call are reported together.
    """
    if on_unmatched not in ("warn", "error", "ignore"):
        raise ShardingError(f"on_unmatched is 'warn', 'error' or 'ignore'; got {on_unmatched!r}")
    mesh = _as_mesh(mesh)
    rules, repair = named_rules(rules), named_rules(repair, "repair")
    threshold = parse_bytes(large, name="large")
    answers, dead, lenient = _read(rules, variables, mesh, threshold)
    notes = tuple(_dead_message(pattern, variables) for pattern in dead)
    if notes and not repair:
        if not lenient:
            raise ShardingError(f"{'; '.join(notes)}. Mend the pattern (the whole path must match) or remove the rule.")
        warnings.warn("; ".join(notes), LazyModelWarning, stacklevel=3)

    assigned: dict[str, AbstractVariable] = {}
    without_rule: list[str] = []
    misfits: dict[str, str] = {}
    for path, variable in variables.items():
        answer = answers(variable)
        if answer is None:
            without_rule.append(path)
            answer = None, Reason("unmatched", "replicated, since no rule matches it")
        try:
            assigned[path] = _placed(variable, *answer, mesh)
        except ShardingError as error:
            misfits[path] = str(error)
    followed = follow_weights(assigned, without_rule) if without_rule and mesh.size > 1 else {}
    assigned = {path: followed.get(path, variable) for path, variable in assigned.items()}
    unmatched = [
        variables[path]
        for path in without_rule
        if path not in followed and variables[path].nbytes >= threshold and mesh.size > 1
    ]
    if repair and (misfits or unmatched):
        proposals = (repair if isinstance(repair, Auto) else Auto()).propose(variables, mesh, large=threshold)
        broken = {**{variable.path: "no rule matches it" for variable in unmatched}, **misfits}
        mended = {path: _mended(variables[path], proposals[path], why, mesh) for path, why in broken.items()}
        # In the model's own order, which `dict.update` would not keep for the ones that were left out.
        assigned = {path: mended.get(path) or assigned[path] for path in variables}
    elif misfits:
        listed = list(misfits.values())
        more = f"\n… and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        raise ShardingError("\n".join(listed[:_LISTED]) + more + "\nrepair=True of shard() mends them.")
    elif unmatched and on_unmatched != "ignore":
        message = _unmatched_message(unmatched, threshold, mesh)
        if on_unmatched == "error":
            raise ShardingError(message)
        warnings.warn(message, LazyModelWarning, stacklevel=3)
    return assigned, notes


def follow_weights(variables: Mapping[str, AbstractVariable], paths: Iterable[str]) -> dict[str, AbstractVariable]:
    """Those of the paths that are LoRA pairs or quantization scales, each split like the weight that it belongs to.

    Left out are those whose weight is not known, has no sharding, or is one of the paths itself.

    Args:
        variables: Path to variable, with shardings as far as they are known.
        paths: Of the variables for which nothing else says how they are split.
    """
    described = describe(variables)
    left = set(paths)
    followed: dict[str, AbstractVariable] = {}
    for path in variables:
        weight = variables.get(described[path].follows or "")
        if path not in left or weight is None or weight.path in left or weight.sharding is None:
            continue
        if described[path].role not in ("lora", "scale"):
            continue
        variable, sharding = variables[path], weight.sharding
        text = f"with {weight.path!r}, which it belongs to"
        if isinstance(sharding, NamedSharding):
            of_weight = (*sharding.spec, *(None,) * len(weight.shape))
            entries = [None if dim is None else of_weight[dim] for dim in described[path].dims]
            for dim, entry in enumerate(entries):
                axes: tuple[str, ...] = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
                if variable.shape[dim] % math.prod(sharding.mesh.shape[axis] for axis in axes):
                    entries[dim] = None  # fewer groups of elements with a scale each than parts
            while entries and entries[-1] is None:
                entries.pop()
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
            text = f"{sharding.spec}, {text}"
        followed[path] = dataclasses.replace(variable, sharding=sharding, reason=Reason("follows", text))
    return followed


def _placed(variable: AbstractVariable, answer: Any, reason: Reason, mesh: Mesh) -> AbstractVariable:
    """The variable with the sharding that an answer of the rules stands for.

    Raises:
        ShardingError: It does not fit.
    """
    layout: Any = None
    if isinstance(answer, Format):
        layout = cast("Any", answer.layout)
        if answer.sharding is None or not (layout is None or hasattr(layout, "major_to_minor")):
            raise ShardingError(
                f"{variable.path!r}: a Format needs a sharding and a layout that is written out, not AUTO; got {answer}"
            )
        if layout is not None and sorted(layout.major_to_minor) != list(range(len(variable.shape))):
            raise ShardingError(
                f"{variable.path!r} of shape {variable.shape}: the layout's major_to_minor {layout.major_to_minor} is "
                "no order of its dimensions"
            )
        answer = answer.sharding
    if isinstance(answer, NamedSharding) and isinstance(answer.mesh, Mesh):
        check_spec(variable, answer.spec, answer.mesh)
    sharding = answer if isinstance(answer, Sharding) else NamedSharding(mesh, check_spec(variable, answer, mesh))
    return dataclasses.replace(variable, sharding=sharding, layout=layout, reason=reason)


def _mended(variable: AbstractVariable, proposal: Proposal, why: str, mesh: Mesh) -> AbstractVariable:
    reason = Reason("repaired", f"{proposal.text} (repaired: {why})", proposal.role, proposal.labels, proposal.tried)
    return _placed(variable, proposal.spec, reason, mesh)


def check_spec(variable: AbstractVariable, spec: Any, mesh: Mesh) -> PartitionSpec:
    """A spec as a `PartitionSpec` that is known to fit the variable on the mesh.

    Raises:
        ShardingError: It has more dimensions than the variable, names an axis that the mesh lacks, uses an axis
            twice, or splits a dimension into unequal parts.
    """
    check_is_spec(spec, repr(variable.path))
    entries = spec_entries(spec)
    where = f"{variable.path!r} of shape {variable.shape} with {PartitionSpec(*entries)}"
    if len(entries) > len(variable.shape):
        raise ShardingError(
            f"{where}: the spec has {len(entries)} entries for {len(variable.shape)} dimensions; drop the last ones"
        )
    used: set[str] = set()
    for dimension, entry in enumerate(entries):
        axes: tuple[str, ...] = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for axis in axes:
            if axis not in mesh.shape:
                raise ShardingError(
                    f"{where}: the mesh has no axis {axis!r}; its axes are "
                    f"{', '.join(f'{name!r} ({size})' for name, size in mesh.shape.items())}"
                )
            if axis in used:
                raise ShardingError(f"{where}: axis {axis!r} is used twice; a mesh axis can split one dimension only")
            used.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if variable.shape[dimension] % parts:
            fitting = [index for index, size in enumerate(variable.shape) if size and size % parts == 0]
            mend = (
                f"dimension {' or '.join(map(str, fitting))} would divide"
                if fitting
                else "no dimension divides; replicate it with PartitionSpec() or use a mesh whose axis divides it"
            )
            raise ShardingError(
                f"{where}: dimension {dimension} of size {variable.shape[dimension]} does not divide into {parts} "
                f"parts (axis {', '.join(map(repr, axes))}); {mend}"
            )
    return PartitionSpec(*entries)


def resolve_logical(names: Sequence[Any], rules: Sequence[tuple[str, Any]]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Mesh axes for the logical axes of one variable, and the logical axes that no rule knows.

    The semantics are those of `flax.linen.logical_to_mesh_axes`: a rule whose mesh axes already split another dimension
    is passed over for the next one of the same logical axis.
    """
    resolved: dict[int, Any] = {}
    used: set[str] = set()
    for logical, target in rules:
        if logical not in names:
            continue
        position = list(names).index(logical)
        axes = () if target is None else (target,) if isinstance(target, str) else tuple(target)
        if position not in resolved and not used.intersection(axes):
            resolved[position] = target if target is None or isinstance(target, str) else axes
            used.update(axes)
    known = {logical for logical, _ in rules}
    unknown = tuple(name for name in names if isinstance(name, str) and name not in known)
    return tuple(resolved.get(position) for position in range(len(names))), unknown


# Takes a variable and gives what a rule says of it and why, or None where no rule matches it.
_Answers: TypeAlias = "Callable[[AbstractVariable], tuple[Any, Reason] | None]"


def _read(
    rules: Any, variables: Mapping[str, AbstractVariable], mesh: Mesh, large: int
) -> tuple[_Answers, list[str | Role], bool]:
    """Any form of rules as a function of a variable; the dead patterns; whether those are tolerated."""
    if rules is None:
        return _metadata_answers(variables, mesh), [], False
    if isinstance(rules, Proposer):
        proposals = rules.propose(variables, mesh, large=large)

        def propose(variable: AbstractVariable) -> tuple[Any, Reason] | None:
            found = proposals.get(variable.path)
            return found and (found.spec, Reason("proposed", found.text, found.role, found.labels, found.tried))

        return propose, [], False
    if isinstance(rules, Mapping):
        # Keras' LayoutMap: a mapping that carries its own device mesh. The core imports no Keras to ask for the class.
        lenient = hasattr(cast("Any", rules), "device_mesh")
        table = cast("Mapping[str | Role, Any]", rules)
        answers, dead = _mapping_answers(table, variables, lenient=lenient)
        return answers, dead, lenient
    if callable(rules):
        function = cast("Callable[[AbstractVariable], Any]", rules)
        name = getattr(function, "__qualname__", type(function).__name__)

        def call(variable: AbstractVariable) -> tuple[Any, Reason] | None:
            answer = function(variable)
            if answer is None:
                return None
            check_is_spec(answer, f"the callable {name}, of {variable.path!r}")
            return answer, Reason("callable", f"as the callable {name} says")

        return call, [], False
    if isinstance(rules, Sequence) and not isinstance(rules, str | PartitionSpec):
        return _logical_answers(cast("Sequence[Any]", rules), variables), [], False
    raise ShardingError(
        "rules are a mapping of path regex to PartitionSpec, a Keras LayoutMap, a callable taking a variable, "
        f"a sequence of (logical axis, mesh axis) or lm.auto(); got {type(rules).__name__}"
        + (f". For all variables: {{'.*': {rules!r}}}" if isinstance(rules, PartitionSpec) else "")
    )


def _mapping_answers(
    table: Mapping[str | Role, Any], variables: Mapping[str, AbstractVariable], *, lenient: bool
) -> tuple[_Answers, list[str | Role]]:
    patterns: dict[str | Role, re.Pattern[str]] = {}
    for key, spec in table.items():
        check_is_spec(spec, f"rule {key.name if isinstance(key, Role) else key!r}")
        if isinstance(key, Role):
            continue
        try:
            patterns[key] = re.compile(key)
        except re.error as error:
            raise ShardingError(
                f"rule {error.pattern!r} is not a regular expression: {error}; `.*` stands for any text"
            ) from error
        except TypeError as error:
            raise ShardingError(f"a rule's key is a path regex or a role; got {key!r}") from error
    described = describe(variables) if len(patterns) < len(table) else {}
    matches: dict[str, str | Role] = {}
    alive: set[str | Role] = set()
    for path in variables:
        name = rule_path(path)
        found = [
            key
            for key in table
            if (key.name == described[path].role if isinstance(key, Role) else patterns[key].fullmatch(name))
        ]
        alive.update(found)
        if lenient and name in patterns:
            found = [name]
        if lenient and len(found) > 1:
            raise ShardingError(
                f"{path!r} is matched by more than one key of the LayoutMap: {', '.join(map(repr, found))}; "
                "make them exclusive"
            )
        if found:
            matches[path] = found[0]

    def answer(variable: AbstractVariable) -> tuple[Any, Reason] | None:
        key = matches.get(variable.path)
        if key is None:
            return None
        text = f"rule for role {key.name!r}" if isinstance(key, Role) else f"rule {key!r} matches"
        return table[key], Reason("rule", text, key.name if isinstance(key, Role) else "")

    return answer, [key for key in table if key not in alive]


def _logical_answers(rules: Sequence[Any], variables: Mapping[str, AbstractVariable]) -> _Answers:
    for rule in rules:
        pair = isinstance(rule, Sequence) and len(cast("Sequence[Any]", rule)) == 2 and isinstance(rule[0], str)
        if not pair or isinstance(rule[1], PartitionSpec):
            raise ShardingError(
                "rules in a sequence are pairs of a logical axis and a mesh axis, a tuple of them or None; got "
                f"{rule!r}. Rules by path are a mapping, {{path pattern: PartitionSpec}}"
            )
    if not any(variable.logical_axes for variable in variables.values()):
        raise ShardingError(
            "rules are pairs of logical and mesh axes, and no variable of this model carries names for its axes. "
            "Give rules by path, or lm.auto()."
        )

    def answer(variable: AbstractVariable) -> tuple[Any, Reason] | None:
        names = variable.logical_axes
        if names is None:
            return None
        _check_names(variable, names)
        entries, unknown = resolve_logical(names, rules)
        if unknown and not any(entries):
            return None  # replicated, and said so if it is large
        text = f"logical axes {names}"
        if unknown:
            text += f"; no rule for {', '.join(map(repr, unknown))}, which are not split"
        return PartitionSpec(*entries), Reason("logical", text, labels=tuple(str(name) for name in names))

    return answer


def _metadata_answers(variables: Mapping[str, AbstractVariable], mesh: Mesh) -> _Answers:
    if not any(variable.logical_axes for variable in variables.values()):
        raise ShardingError(
            "shard() without rules uses the axis names that variables carry, and no variable of this model does. "
            "Give rules, such as lm.auto()."
        )

    def answer(variable: AbstractVariable) -> tuple[Any, Reason] | None:
        names = variable.logical_axes
        if names is None:
            return None
        _check_names(variable, names)
        for name in names:
            for axis in (name,) if isinstance(name, str) else name or ():
                if axis not in mesh.shape:
                    raise ShardingError(
                        f"{variable.path!r} has axes {names}, and {axis!r} is no axis of the mesh "
                        f"({', '.join(map(repr, mesh.axis_names))}). If it is a logical axis, give rules: "
                        f"shard(mesh, [({axis!r}, {mesh.axis_names[-1]!r}), …])"
                    )
        return PartitionSpec(*names), Reason("metadata", "as the variable's own metadata says")

    return answer


def _check_names(variable: AbstractVariable, names: Sequence[Any]) -> None:
    if len(names) > len(variable.shape):
        raise ShardingError(
            f"{variable.path!r} of shape {variable.shape} has more axis names than dimensions: {tuple(names)}"
        )
    if repeated := [name for name in names if isinstance(name, str) and list(names).count(name) > 1]:
        raise ShardingError(f"{variable.path!r}: axis {repeated[0]!r} occurs more than once in {tuple(names)}")


def _dead_message(key: str | Role, variables: Mapping[str, AbstractVariable]) -> str:
    if isinstance(key, Role):
        return f"no variable has the role {key.name!r}"
    return f"rule {key!r} matches no variable{closest(key, [rule_path(path) for path in variables])}"


def _as_mesh(mesh: Any) -> Mesh:
    mesh = getattr(mesh, "backend_mesh", mesh)
    if isinstance(mesh, AbstractMesh):
        return cast("Mesh", mesh)  # a mesh without devices has the names and sizes, which is all that is used here
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            f"mesh is a jax.sharding.Mesh; got {type(mesh).__name__}. "
            "Make one with jax.sharding.Mesh(devices, axis_names)."
        )
    return mesh


def _unmatched_message(unmatched: list[AbstractVariable], threshold: int, mesh: Mesh) -> str:
    unmatched = sorted(unmatched, key=lambda variable: -variable.nbytes)
    listed = ", ".join(f"{v.path} {v.shape} {format_bytes(v.nbytes)}" for v in unmatched[:_LISTED])
    more = f", and {len(unmatched) - _LISTED} more" if len(unmatched) > _LISTED else ""
    return (
        f"{len(unmatched)} variables of at least {format_bytes(threshold)} match no sharding rule and are replicated "
        f"on all {mesh.size} devices ({format_bytes(sum(v.nbytes for v in unmatched))} each): {listed}{more}. "
        "Add a rule for them, or pass repair=True; PartitionSpec() says that replication is meant."
    )

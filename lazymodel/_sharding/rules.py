"""Reads every form of rules and specs: turns them into one function of a variable.

`_sharding/shard` checks that a spec fits its variable.

Variables that are split like another one: LoRA pairs, quantization scales, optimizer state.

Responsible for one rule, that each dimension is split like the dimension that it corresponds to, and for finding the
variable that another one follows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.variable import AbstractVariable, Reason, in_memory, rule_path
from lazymodel._errors import ShardingError
from lazymodel._sharding.auto import Auto, auto, trimmed
from lazymodel._sharding.describe import describe
from lazymodel._sharding.roles import Host, Role
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
# Takes a variable; returns the answer of a rule and its reason, or None where no rule matches.
Answers: TypeAlias = "Callable[[AbstractVariable], tuple[Any, Reason] | None]"


def read_rules(
    rules: Any, variables: Mapping[str, AbstractVariable], mesh: Mesh, large: int
) -> tuple[Answers, tuple[str, ...], bool]:
    """Any form of rules except a name: as a function of a variable, rules without a match, True if these only warn."""
    if rules is None:
        return _axis_answers(None, variables, mesh), (), False
    if isinstance(rules, Proposer):
        proposals = rules.propose(variables, mesh, large=large)

        def proposed(variable: AbstractVariable) -> tuple[Any, Reason] | None:
            if (found := proposals.get(variable.path)) is None:
                return None
            return found[0], Reason("proposed", found[1]) if isinstance(found[1], str) else found[1]

        return proposed, (), False
    if isinstance(rules, Mapping):
        lenient = is_layout_map(rules)
        return *_mapping_answers(cast("Mapping[str | Role, Any]", rules), variables, lenient=lenient), lenient
    if callable(rules):
        function = cast("Callable[[AbstractVariable], Any]", rules)
        name = getattr(function, "__qualname__", type(function).__name__)

        def call(variable: AbstractVariable) -> tuple[Any, Reason] | None:
            answer = function(variable)
            check_is_spec(answer, f"the result of the callable {name} for {variable.path!r}")
            return None if answer is None else (answer, Reason("callable", f"returned by the callable {name}"))

        return call, (), False
    if isinstance(rules, Sequence) and not isinstance(rules, str | PartitionSpec):
        return _axis_answers(cast("Sequence[Any]", rules), variables, mesh), (), False
    raise ShardingError(
        "rules are a mapping of path regex to PartitionSpec, a Keras LayoutMap, a callable taking a variable, "
        f"a sequence of (logical axis, mesh axis) or lm.auto(); got {type(rules).__name__}"
        + (f". For all variables: {{'.*': {rules!r}}}" if isinstance(rules, PartitionSpec | Host) else "")
    )


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


def _mapping_answers(
    table: Mapping[str | Role, Any], variables: Mapping[str, AbstractVariable], *, lenient: bool
) -> tuple[Answers, tuple[str, ...]]:
    patterns: dict[str | Role, re.Pattern[str]] = {}
    for key, spec in table.items():
        check_is_spec(spec, f"rule {key.name if isinstance(key, Role) else key!r}")
        try:
            if not isinstance(key, Role):
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
        if isinstance(key, Role):
            return table[key], Reason("rule", f"rule for role {key.name!r}", key.name)
        return None if key is None else (table[key], Reason("rule", f"rule {key!r} matches"))

    paths = [rule_path(path) for path in variables]
    return answer, tuple(
        f"no variable has the role {key.name!r}"
        if isinstance(key, Role)
        else f"rule {key!r} matches no variable{closest(key, paths)}"
        for key in table
        if key not in alive
    )


def _axis_answers(rules: Sequence[Any] | None, variables: Mapping[str, AbstractVariable], mesh: Mesh) -> Answers:
    """Answers for variables that carry names for their axes: mesh axes, or logical axes that the rules map to these."""
    for rule in rules or ():
        pair = isinstance(rule, Sequence) and len(cast("Sequence[Any]", rule)) == 2 and isinstance(rule[0], str)
        if not pair or isinstance(rule[1], PartitionSpec):
            raise ShardingError(
                "rules in a sequence must be pairs of a logical axis and a mesh axis, a tuple of them or None; got "
                f"{rule!r}. Rules by path are a mapping, {{path pattern: PartitionSpec}}"
            )
    if not any(variable.logical_axes for variable in variables.values()):
        uses = "shard() without rules uses the axis names that variables carry, and no variable of this model does"
        raise ShardingError(
            f"{uses}. Give rules, such as lm.auto()."
            if rules is None
            else "rules are pairs of logical and mesh axes, and no variable of this model carries names for its axes. "
            "Give rules by path, or lm.auto()."
        )

    def answer(variable: AbstractVariable) -> tuple[Any, Reason] | None:
        names = variable.logical_axes
        if names is None:
            return None
        if len(names) > len(variable.shape):
            raise ShardingError(
                f"{variable.path!r} of shape {variable.shape} has more axis names than dimensions: {tuple(names)}"
            )
        if repeated := [name for name in names if isinstance(name, str) and names.count(name) > 1]:
            raise ShardingError(f"{variable.path!r}: axis {repeated[0]!r} occurs more than once in {tuple(names)}")
        if rules is not None:
            entries, unknown = resolve_logical(names, rules)
            if unknown and not any(entries):
                return None  # replicated, with a warning if it is large
            left = f"; no rule for {', '.join(map(repr, unknown))}, which are not split" if unknown else ""
            return PartitionSpec(*entries), Reason("logical", f"logical axes {names}{left}", labels=(*map(str, names),))
        for axis in (axis for name in names for axis in ((name,) if isinstance(name, str) else name or ())):
            if axis not in mesh.shape:
                raise ShardingError(
                    f"{variable.path!r} has axes {names}, and {axis!r} is not an axis of the mesh "
                    f"({', '.join(map(repr, mesh.axis_names))}). If it is a logical axis, give rules: "
                    f"shard(mesh, [({axis!r}, {mesh.axis_names[-1]!r}), …])"
                )
        return PartitionSpec(*names), Reason("metadata", "from the variable's own metadata")

    return answer


def resolve_logical(names: Sequence[Any], rules: Sequence[tuple[str, Any]]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Mesh axes for the logical axes of one variable, and the logical axes without a rule.

    As in `flax.linen.logical_to_mesh_axes`, a rule whose mesh axes already split another dimension is skipped, and the
    next rule of the same logical axis is tried.
    """
    resolved: dict[int, Any] = {}
    used: set[str] = set()
    for logical, target in rules:
        if logical not in names:
            continue
        position = list(names).index(logical)
        entry = target if target is None or isinstance(target, str) else tuple(target)
        if position not in resolved and not used.intersection(axes_of(entry)):
            resolved[position] = entry
            used.update(axes_of(entry))
    known = {logical for logical, _ in rules}
    unknown = tuple(name for name in names if isinstance(name, str) and name not in known)
    return tuple(resolved.get(position) for position in range(len(names))), unknown


def check_is_spec(spec: Any, where: str) -> None:
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
        names = cast("Sequence[Any]", entry) if isinstance(entry, list | tuple) else (entry,)
        if not all(isinstance(name, Hashable) for name in names):
            raise ShardingError(f"{where}: an entry of a spec is an axis name, a tuple of them, or None; got {entry!r}")


def spec_entries(spec: Any) -> tuple[Any, ...]:
    """The entries of any form of spec that `check_is_spec` accepts, except a sharding."""
    if spec is None:
        return ()
    entries = cast("Sequence[Any]", getattr(spec, "axes", spec))
    return tuple(tuple(cast("list[Any]", entry)) if isinstance(entry, list) else entry for entry in entries)


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a spec names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def along(sharding: Any, dims: Sequence[int | None], shape: Sequence[int]) -> Any:
    """The sharding of an array of this shape that belongs to one with this `sharding`; unchanged if that has no spec.

    `dims` gives for each dimension the corresponding one of the other array, or None. A dimension that does not divide
    is not split, such as one with fewer quantization scales than parts. The kind of memory is the same.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    of_other = dict(enumerate(sharding.spec))
    entries = [None if dim is None else of_other.get(dim) for dim in dims]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in axes_of(entry)) for entry in entries]
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

"""The methods `shard`, which gives every variable a checked sharding and a reason, and `explain`, which shows both.

Any form of rules becomes one mapping, path → spec and reason. Each dimension of a LoRA factor, a quantization scale or
of optimizer state is split like the dimension of its weight that it corresponds to. `auto` makes proposals.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast, overload, runtime_checkable

from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.framework import AnyModel, ModelSpec
from lazymodel._abstract.garbage import no_full_collections
from lazymodel._abstract.variable import (
    AbstractVariable,
    Reason,
    device_nbytes,
    flat_axes,
    in_memory,
    kept_on_host,
    matched_paths,
    offloaded_nbytes,
    rule_path,
    stays_on_host,
)
from lazymodel._errors import ShardingError, warn
from lazymodel._extras import extra
from lazymodel._sharding.describe import describe
from lazymodel._sharding.follow import follow, follow_weights, from_read
from lazymodel._sharding.roles import Host, Role
from lazymodel._show.progress import Span
from lazymodel._show.table import Column, Report, Table, placed_text
from lazymodel._show.text import (
    closest,
    first_lines,
    fold,
    format_bytes,
    grouped_by,
    listed,
    plural,
    unnumbered,
)


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
    | Callable[..., Proposer]
    | Literal["auto"]
)
_Found: TypeAlias = "dict[str, tuple[Any, Reason]]"  # path → the answer of a rule and its reason


LARGE = 1 << 20  # bytes from which replicating a variable is a warning, and `auto` splits what it can


@no_full_collections()
def shard(
    model: AnyModel,
    mesh: Mesh,
    rules: Rules | None = None,
    *,
    on_unmatched: str = "warn",
) -> AnyModel:
    """Assigns a sharding to every variable.

    Rules are one of

    - `lazymodel.auto(...)`, also as `"auto"`, or any other object whose method
      `propose(variables, mesh, *, large)` returns path → (spec, reason as text).
    - a mapping of path regex to spec. The whole path must match (`re.fullmatch`); the first rule that matches, in
      the mapping's order, is used. A key may also be a `lazymodel.role`. A pattern that matches no variable raises.
    - a Keras `LayoutMap`, read in the same way, but as Keras reads it: a pattern that matches nothing only warns,
      because published maps serve several models.
    - a callable that takes a variable; if it returns None, no rule applies.
    - a sequence of (logical axis, mesh axis, tuple of them or None), for variables that carry names for their axes, as
      Flax' do. As in Flax, rules are tried in their order, each mesh axis splits one dimension only, and a logical axis
      without a rule is not split.
    - None: variables carry names of mesh axes, as Flax' partitioning metadata does, and these are used.

    A spec is a `PartitionSpec`, a tuple or list of axis names, None (replicate), a `lazymodel.Host` of one of these
    (in the host's memory), or a whole `NamedSharding` or `jax.experimental.layout.Format` (a layout on the device and a
    sharding).

    Variables that no rule matches are replicated, except those that carry a mesh (`nnx.Param(x, sharding=, mesh=)`),
    which stay on it, and LoRA pairs and quantization scales, which are split like their weight. For NNX modules, rules
    are for kernels as before `quantize`, and what replaces a kernel is split like it. Optimizer state is sharded like
    its parameters, even if rules match its paths. Only the patterns of a mapping that match no parameter apply to it
    (to spread it over data-parallel devices, say). `with_optimizer` and those patterns decide in which memory it is.

    Args:
        mesh: The devices and their axis names; an object with a `backend_mesh`, as Keras' `DeviceMesh`, is unwrapped.
        rules: As above.
        on_unmatched: What to do about variables of 1 MiB or more that no rule matches, which are replicated on every
            device: `"warn"` or `"error"`. `"auto"` gives these, and variables whose sharding does not fit, the sharding
            that `lazymodel.auto()` proposes, without a warning; `explain()` lists them, and the rules that matched
            nothing.

    Raises:
        ShardingError: A rule matches nothing, names an unknown axis, uses one twice, does not divide a dimension
            or has more dimensions than the variable. All mismatches of one call are reported together.

    Example:
        >>> sharded = abstract.shard(mesh, {"up/kernel": P(None, "model"), "down/.*": P("model")})
        >>> sharded["down/kernel"].spec
        P('model',)
    """
    start = time.perf_counter()
    if on_unmatched not in ("error", "warn", "auto"):
        raise ShardingError(f"on_unmatched is 'error', 'warn' or 'auto'; got {on_unmatched!r}")
    mesh = getattr(cast(Any, mesh), "backend_mesh", mesh)
    if not isinstance(cast(Any, mesh), Mesh | AbstractMesh):  # only names and sizes are used
        hint = "Make one with jax.sharding.Mesh(devices, axis_names)."
        raise ShardingError(f"mesh is a jax.sharding.Mesh; got {type(mesh).__name__}. {hint}")
    rules = named_rules(rules)
    changed, model = model, model.as_read()
    found, notes = read_rules(rules, model, mesh, LARGE)
    if notes and on_unmatched != "auto":
        if not is_layout_map(rules):
            raise ShardingError(f"{'; '.join(notes)}. Fix the pattern (the whole path must match) or remove the rule.")
        warn("; ".join(notes))
    own = {path: variable for path, variable in model.items() if variable.follows is None}
    state = {path: variable for path, variable in model.items() if variable.follows is not None}
    kind = None if model.optimized is None else model.optimized.memory_kind
    ruled = own | {path: variable for path, variable in state.items() if path in found}
    assigned = _assigned(ruled, found, mesh, kind, on_unmatched)
    following = {path: variable for path, variable in state.items() if path not in found}
    assigned |= follow(following, {path: assigned[path] for path in own}, mesh, kind)
    variables = kept_on_host({path: assigned[path] for path in own | state})
    model.framework.check_sharded(variables)
    spent = (*model.spent, Span.since(start, "shard"))
    return dataclasses.replace(from_read(changed, variables), sharding_notes=notes, spent=spent)


def _assigned(
    variables: Mapping[str, AbstractVariable],
    found: Mapping[str, tuple[Any, Reason]],
    mesh: Mesh,
    kind: str | None,
    on_unmatched: str,
) -> dict[str, AbstractVariable]:
    """The variables with shardings and reasons. `found`: answers of the rules; `kind`: of the optimizer's memory."""
    hosts: dict[str, Host] = {}
    assigned: dict[str, AbstractVariable] = {}
    mismatches: dict[str, str] = {}
    unmatched = Reason("unmatched", "replicated, since no rule matches it")
    kept: Any = {path: (each.sharding, each.reason) for path, each in variables.items() if _on_own_mesh(each)}
    found = kept | found
    for path, variable in variables.items():
        spec, reason = found.get(path, (None, unmatched))
        if kind is not None and variable.follows is not None and not isinstance(spec, Host | Sharding | Format):
            spec = Host(spec, kind)
        if isinstance(spec, Host):  # raises for an unknown kind of memory, which `auto` cannot fix
            in_memory(NamedSharding(mesh, PartitionSpec()), spec.memory_kind, path)
            hosts[path] = spec
        try:
            assigned[path] = _placed(variable, spec, reason, mesh)
        except ShardingError as error:
            mismatches[path] = str(error)
    left = [path for path in variables if path not in found] if mesh.size > 1 else []
    followed = follow_weights(assigned, left) if left else {}
    assigned |= followed
    replicated = [variables[p] for p in left if p not in followed and variables[p].nbytes >= LARGE]
    if on_unmatched == "auto" and (mismatches or replicated):
        proposals = extra("auto")().propose(variables, mesh, large=LARGE)
        mismatches |= {variable.path: "no rule matches it" for variable in replicated}
        for path, why in mismatches.items():
            spec, reason = proposals[path]
            spec = Host(spec, hosts[path].memory_kind) if path in hosts and not isinstance(spec, Host) else spec
            reason = dataclasses.replace(reason, kind="repaired", text=f"{reason.text} (repaired: {why})")
            assigned[path] = _placed(variables[path], spec, reason, mesh)
    elif mismatches:
        # Paths that differ only in their numbers share one line.
        groups = grouped_by(mismatches, lambda path: (unnumbered(path), mismatches[path].replace(repr(path), "", 1)))
        lines = first_lines([repr(fold(paths)) + text for (_, text), paths in groups.items()])
        hint = "Fix the rules, or pass on_unmatched='auto', which uses the shardings of lm.auto() for these."
        raise ShardingError("\n".join([*lines, hint]))
    elif most := [variable for variable in replicated if not variable.on_host]:
        most.sort(key=lambda variable: -variable.nbytes)
        message = (
            f"{len(most)} variables of at least {format_bytes(LARGE)} match no sharding rule and are replicated on "
            f"all {mesh.size} devices ({format_bytes(sum(v.nbytes for v in most))} each): "
            f"{listed(f'{v.path} {v.shape} {format_bytes(v.nbytes)}' for v in most)}. Add a rule for them "
            "(PartitionSpec() replicates), or pass on_unmatched='auto' to split them."
        )
        if on_unmatched == "error":
            raise ShardingError(message)
        warn(message)
    return assigned


def _placed(variable: AbstractVariable, spec: Any, reason: Reason, mesh: Mesh) -> AbstractVariable:
    """The variable with the sharding that a rule gave; raises ShardingError if it does not fit."""
    layout: Any = None
    kind: str | None = None
    if isinstance(spec, Host):
        spec, kind = spec.spec, spec.memory_kind
    if isinstance(spec, Format):
        layout, format = cast("Any", spec.layout), spec
        spec, order = format.sharding, cast(Any, getattr(layout, "major_to_minor", None))
        if spec is None or (layout is not None and order is None):
            raise ShardingError(
                f"{variable.path!r}: a Format needs a sharding and a layout that is written out, not AUTO; got {format}"
            )
        if layout is not None and sorted(order) != list(range(len(variable.shape))):
            raise ShardingError(
                f"{variable.path!r} of shape {variable.shape}: the layout's major_to_minor {order} is not an order of "
                "its dimensions"
            )
    if isinstance(spec, NamedSharding) and isinstance(spec.mesh, Mesh):
        check_spec(variable, spec.spec, spec.mesh)
    sharding = spec if isinstance(spec, Sharding) else NamedSharding(mesh, check_spec(variable, spec, mesh))
    sharding = sharding if kind is None else in_memory(sharding, kind, variable.path)
    return dataclasses.replace(variable, sharding=sharding, layout=layout, reason=reason)


def on_own_meshes(variables: Mapping[str, AbstractVariable], meshes: Mapping[str, Mesh]) -> dict[str, AbstractVariable]:
    """Variables of which some carry a mesh, placed on it by the axes that they name; `shard` leaves them there.

    The others are replicated on the first of the meshes until `shard` places them, so that one function takes all.

    Raises:
        ShardingError: A mesh does not fit.
    """
    first = next(iter(meshes.values()))
    own = Reason("own mesh", "on the mesh in the variable's own metadata")
    beside = Reason("unmatched", "replicated on the mesh that other variables carry")

    def placed(variable: AbstractVariable) -> AbstractVariable:
        mesh, axes = meshes.get(variable.path), PartitionSpec(*(variable.logical_axes or ()))
        return _placed(variable, axes, own, mesh) if mesh else _placed(variable, None, beside, first)

    return kept_on_host({path: placed(variable) for path, variable in variables.items()})


def _on_own_mesh(variable: AbstractVariable) -> bool:
    return variable.reason is not None and variable.reason.kind == "own mesh"


# Rules ----------------------------------------------------------------------------------------------------------------


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


def named_rules(rules: Any) -> Any:
    """Returns the rules for a name or for the function that makes them; others unchanged.

    Raises:
        ShardingError: The name is unknown.
    """
    if isinstance(rules, str) and rules != "auto":
        raise ShardingError(
            f"rules={rules!r} is not known{closest(rules, ['auto'])}; the only name is 'auto', short for lm.auto(). "
            f"A rule for paths is written {{{rules!r}: PartitionSpec(…)}}"
        )
    named = isinstance(rules, str) or (callable(rules) and (rules is extra("auto") or rules is extra("Auto")))
    return extra("auto")() if named else rules


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
        if (names := variable.logical_axes) is None or (rules is None and _on_own_mesh(variable)):
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


# Reports --------------------------------------------------------------------------------------------------------------


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
        that `on_unmatched="auto"` changed, guesses of `auto`, and rules that matched nothing.

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
    repaired: Mapping[str, str]  # path and reason of variables that `on_unmatched="auto"` changed
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
            ("replicated", self.replicated, f", {format_bytes(self.replicated_nbytes)} in all on each device"),
            ("on the host", self.on_host, ""),
            ("in the host's memory", self.offloaded, f", {format_bytes(self.offloaded_nbytes)} for each device"),
            ("repaired", self.repaired, ""),
            ("split by a guess", self.guessed, "; rules by path override it"),
            ("matched by no rule", dict.fromkeys(self.unmatched, ""), ""),
        ):
            parted = ((path, *text.partition(": ")) for path, text in found.items())
            cells += [(path, what, shape, why) for path, shape, _, why in parted]
            lines += [f"{what}: {plural(len(found), 'variable')}{more}"] if found else []
        columns = (Column.names("variable"), Column("sharding"), Column("shape"), Column.notes("why"))
        return Table(title, columns, cells, [*lines, *(f"note: {note}" for note in self.notes)])


def _explain_model(model: ModelSpec) -> ShardingReport:
    variables = sorted(model.values(), key=lambda variable: -variable.nbytes)
    offloaded = [variable for variable in variables if offloaded_nbytes(variable)]
    elsewhere = {variable.path for variable in offloaded}
    placed = [variable for variable in variables if not stays_on_host(variable) and variable.path not in elsewhere]
    nbytes, per_device = sum(variable.nbytes for variable in placed), device_nbytes(placed)
    apart = (variable for variable in placed if variable.sharding is not None and variable.sharding.num_devices > 1)
    replicated = [variable for variable in apart if variable.shard_nbytes - variable.padding_nbytes == variable.nbytes]
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

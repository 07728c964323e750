"""The method `shard`: takes rules and gives every variable a checked sharding, with the reason for it.

A sharding that does not fit raises before any data is read, or is repaired if `repair` is set.

The method `explain`: the reason for one variable's sharding, and how a whole model spreads over its devices.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast, overload

from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.arrays import device_nbytes, kept_on_host, offloaded_nbytes, stays_on_host
from lazymodel._abstract.framework import AnyModel, ModelSpec
from lazymodel._abstract.variable import AbstractVariable, Reason, in_memory, rule_path
from lazymodel._errors import ShardingError, warn
from lazymodel._sharding.auto import Auto
from lazymodel._sharding.roles import Host
from lazymodel._sharding.rules import (
    Rules,
    axes_of,
    check_is_spec,
    follow,
    follow_weights,
    is_layout_map,
    named_rules,
    read_rules,
    spec_entries,
)
from lazymodel._show.table import Column, Report, Table, placed_text
from lazymodel._show.text import (
    closest,
    first_lines,
    fold,
    format_bytes,
    grouped_by,
    listed,
    parse_bytes,
    plural,
    unnumbered,
)
from lazymodel._show.timeline import Span


def shard(
    model: AnyModel,
    mesh: Mesh,
    rules: Rules | None = None,
    *,
    on_unmatched: str = "warn",
    large: int | str = "1MiB",
    repair: bool | Auto = False,
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

    Variables that no rule matches are replicated, except LoRA pairs and quantization scales, which are split like the
    weight that they belong to. Optimizer state (`with_optimizer`) is sharded like the parameters that it belongs to,
    even if rules match its own paths. Only the patterns of a mapping that match no parameter apply to it (to spread it
    over data-parallel devices, for example). `with_optimizer` and those patterns decide in which memory it is stored.

    Args:
        mesh: The devices and their axis names; an object with a `backend_mesh`, as Keras' `DeviceMesh`, is unwrapped.
        rules: As above.
        on_unmatched: What to do about variables of at least `large` bytes that no rule matches (they are replicated
            on every device): `"warn"`, `"error"` or `"ignore"`.
        large: That threshold, in bytes or as `"16MiB"`. `lazymodel.auto()` replicates nothing of this size that can
            be split.
        repair: True gives variables whose sharding does not fit, and variables of at least `large` bytes that no rule
            matches, the sharding that `lazymodel.auto()` proposes, without a warning. `explain()` lists them, and the
            rules that matched nothing. Pass an `auto(...)` to set which axes are for what.

    Raises:
        ShardingError: A rule matches nothing, names an unknown axis, uses one twice, does not divide a dimension
            or has more dimensions than the variable. All mismatches of one call are reported together.

    Example:
        >>> sharded = abstract.shard(mesh, {"up/kernel": P(None, "model"), "down/.*": P("model")})
        >>> sharded["down/kernel"].spec
        P('model',)
    """
    start = time.perf_counter()
    own = {path: variable for path, variable in model.items() if variable.follows is None}
    state = {path: variable for path, variable in model.items() if variable.follows is not None}
    own_rules, state_rules, ruled = _split_rules(rules, own, state)
    assigned, notes = assign(own, mesh, own_rules, on_unmatched=on_unmatched, large=large, repair=repair)
    kind = None if model.optimized is None else model.optimized.memory_kind
    following = follow(state, assigned, mesh, kind)
    if state_rules:
        if kind is not None:  # a spec has no kind of memory; a whole sharding, or `Host`, has one
            whole = Host | Sharding | Format
            state_rules = {k: v if isinstance(v, whole) else Host(v, kind) for k, v in state_rules.items()}
        placed, more = assign(ruled, mesh, state_rules, on_unmatched=on_unmatched, large=large, repair=repair)
        following |= placed
        notes += more
    variables = kept_on_host({**assigned, **following})
    spent = (*model.spent, Span.since(start, "shard"))
    return dataclasses.replace(model, variables=variables, sharding_notes=notes, spent=spent)


def _split_rules(
    rules: Any, own: Mapping[str, AbstractVariable], state: Mapping[str, AbstractVariable]
) -> tuple[Any, dict[str, Any], dict[str, AbstractVariable]]:
    """Rules for parameters, the rules of a mapping that match optimizer state only, and the state that these match."""
    if not state or not isinstance(rules, Mapping) or is_layout_map(rules):
        return rules, {}, {}
    table = cast("Mapping[Any, Any]", rules)

    def matched(key: Any, paths: Iterable[str]) -> set[str]:
        try:
            pattern = re.compile(key) if isinstance(key, str) else None
        except re.error:  # `assign` raises for it
            pattern = None
        return {path for path in paths if pattern is not None and pattern.fullmatch(rule_path(path))}

    only = {key: matched(key, state) for key in table if not matched(key, own)}
    for_state = {key: table[key] for key, paths in only.items() if paths}
    ruled = set[str]().union(*only.values())
    own_rules = {key: spec for key, spec in table.items() if key not in for_state}
    return own_rules, for_state, {path: variable for path, variable in state.items() if path in ruled}


def assign(
    variables: Mapping[str, AbstractVariable],
    mesh: Mesh,
    rules: Rules | None,
    *,
    on_unmatched: str = "warn",
    large: int | str = "1MiB",
    repair: bool | Auto = False,
) -> tuple[dict[str, AbstractVariable], tuple[str, ...]]:
    """The variables with shardings and reasons, and notes on rules that matched nothing; see `shard`."""
    if on_unmatched not in ("warn", "error", "ignore"):
        raise ShardingError(f"on_unmatched is 'warn', 'error' or 'ignore'; got {on_unmatched!r}")
    mesh = _as_mesh(mesh)
    rules, repair = named_rules(rules), named_rules(repair, "repair")
    threshold = parse_bytes(large, name="large")
    answers, notes, lenient = read_rules(rules, variables, mesh, threshold)
    if notes and not repair:
        if not lenient:
            raise ShardingError(f"{'; '.join(notes)}. Fix the pattern (the whole path must match) or remove the rule.")
        warn("; ".join(notes))

    assigned: dict[str, AbstractVariable] = {}
    without_rule: list[str] = []
    hosts: dict[str, Host] = {}
    mismatches: dict[str, str] = {}
    for path, variable in variables.items():
        if (answer := answers(variable)) is None:
            without_rule.append(path)
            answer = None, Reason("unmatched", "replicated, since no rule matches it")
        if isinstance(answer[0], Host):  # raises for an unknown kind of memory, which `repair` cannot fix
            in_memory(NamedSharding(mesh, PartitionSpec()), answer[0].memory_kind, path)
            hosts[path] = answer[0]
        try:
            assigned[path] = _placed(variable, *answer, mesh)
        except ShardingError as error:
            mismatches[path] = str(error)
    without_rule = without_rule if mesh.size > 1 else []
    followed = follow_weights(assigned, without_rule) if without_rule else {}
    assigned |= followed
    left = (variables[path] for path in without_rule if path not in followed)
    unmatched = [variable for variable in left if variable.nbytes >= threshold]
    if repair and (mismatches or unmatched):
        proposals = (repair if isinstance(repair, Auto) else Auto()).propose(variables, mesh, large=threshold)
        mismatches |= {variable.path: "no rule matches it" for variable in unmatched}
        for path, why in mismatches.items():
            spec, reason = proposals[path]
            spec = Host(spec, hosts[path].memory_kind) if path in hosts and not isinstance(spec, Host) else spec
            reason = dataclasses.replace(reason, kind="repaired", text=f"{reason.text} (repaired: {why})")
            assigned[path] = _placed(variables[path], spec, reason, mesh)
        assigned = {path: assigned[path] for path in variables}  # in the model's own order
    elif mismatches:
        hint = "Fix the rules, or pass repair=True to shard(), which uses the shardings of lm.auto() for these."
        # Paths that differ only in their numbers share one line.
        groups = grouped_by(mismatches, lambda path: (unnumbered(path), mismatches[path].replace(repr(path), "", 1)))
        folded = [repr(fold(paths)) + text for (_, text), paths in groups.items()]
        raise ShardingError("\n".join([*first_lines(folded), hint]))
    elif on_unmatched != "ignore" and (replicated := [variable for variable in unmatched if not variable.on_host]):
        message = _unmatched_message(replicated, threshold, mesh)
        if on_unmatched == "error":
            raise ShardingError(message)
        warn(message)
    return assigned, notes


def _placed(variable: AbstractVariable, answer: Any, reason: Reason, mesh: Mesh) -> AbstractVariable:
    """The variable with the sharding that a rule gave; raises ShardingError if it does not fit."""
    layout: Any = None
    kind: str | None = None
    if isinstance(answer, Host):
        check_is_spec(answer, repr(variable.path))
        answer, kind = answer.spec, answer.memory_kind
    if isinstance(answer, Format):
        layout = cast("Any", answer.layout)
        if answer.sharding is None or not (layout is None or hasattr(layout, "major_to_minor")):
            raise ShardingError(
                f"{variable.path!r}: a Format needs a sharding and a layout that is written out, not AUTO; got {answer}"
            )
        if layout is not None and sorted(layout.major_to_minor) != list(range(len(variable.shape))):
            raise ShardingError(
                f"{variable.path!r} of shape {variable.shape}: the layout's major_to_minor {layout.major_to_minor} is "
                "not an order of its dimensions"
            )
        answer = answer.sharding
    if isinstance(answer, NamedSharding) and isinstance(answer.mesh, Mesh):
        check_spec(variable, answer.spec, answer.mesh)
    sharding = answer if isinstance(answer, Sharding) else NamedSharding(mesh, check_spec(variable, answer, mesh))
    sharding = sharding if kind is None else in_memory(sharding, kind, variable.path)
    return dataclasses.replace(variable, sharding=sharding, layout=layout, reason=reason)


def check_spec(variable: AbstractVariable, spec: Any, mesh: Mesh) -> PartitionSpec:
    """The spec as a `PartitionSpec`; raises ShardingError if it does not fit the variable on the mesh."""
    check_is_spec(spec, repr(variable.path))
    entries = spec_entries(spec)
    where = f"{variable.path!r} of shape {variable.shape} with {PartitionSpec(*entries)}"
    if len(entries) > len(variable.shape):
        raise ShardingError(
            f"{where}: the spec has {len(entries)} entries for {len(variable.shape)} dimensions; drop the last ones"
        )
    used: set[str] = set()
    for dimension, axes in enumerate(map(axes_of, entries)):
        for axis in axes:
            if axis not in mesh.shape:
                raise ShardingError(
                    f"{where}: the mesh has no axis {axis!r}{closest(axis, mesh.shape)}; its axes are "
                    f"{', '.join(f'{name!r} ({size})' for name, size in mesh.shape.items())}"
                )
            if axis in used:
                raise ShardingError(f"{where}: axis {axis!r} is used twice; a mesh axis can split one dimension only")
            used.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if variable.shape[dimension] % parts:
            fitting = [str(index) for index, size in enumerate(variable.shape) if size and size % parts == 0]
            hint = "no dimension divides; replicate it with PartitionSpec() or use a mesh whose axis divides it"
            hint = f"dimension {' or '.join(fitting)} would divide" if fitting else hint
            raise ShardingError(
                f"{where}: dimension {dimension} of size {variable.shape[dimension]} does not divide into {parts} "
                f"parts (axis {', '.join(map(repr, axes))}); {hint}"
            )
    return PartitionSpec(*entries)


def _as_mesh(mesh: Any) -> Mesh:
    mesh = getattr(mesh, "backend_mesh", mesh)
    if not isinstance(mesh, Mesh | AbstractMesh):  # only names and sizes are used, and an AbstractMesh has both
        hint = "Make one with jax.sharding.Mesh(devices, axis_names)."
        raise ShardingError(f"mesh is a jax.sharding.Mesh; got {type(mesh).__name__}. {hint}")
    return cast("Mesh", mesh)


def _unmatched_message(unmatched: list[AbstractVariable], threshold: int, mesh: Mesh) -> str:
    largest = sorted(unmatched, key=lambda variable: -variable.nbytes)
    described = listed(f"{v.path} {v.shape} {format_bytes(v.nbytes)}" for v in largest)
    return (
        f"{len(unmatched)} variables of at least {format_bytes(threshold)} match no sharding rule and are replicated "
        f"on all {mesh.size} devices ({format_bytes(sum(v.nbytes for v in unmatched))} each): {described}. "
        "Add a rule for them, or pass repair=True to shard() to split them; PartitionSpec() as a rule replicates them."
    )


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

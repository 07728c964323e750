"""The sharding pass: rules in, a checked `NamedSharding` for every variable out.

Responsible for reading every form of rule, for matching, and for saying what does not fit before a byte moves.
Not responsible for how a sharding is carried out.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract import AbstractVariable
from lazymodel._bytes import format_bytes, parse_bytes
from lazymodel._errors import LazyModelWarning, ShardingError
from lazymodel._report import closest

Rules: TypeAlias = (
    "Mapping[str, PartitionSpec | Sequence[Any] | None] | Callable[[AbstractVariable], PartitionSpec | Sharding | None]"
)

_LISTED = 8  # how many paths a message names before it only counts


def assign(
    variables: Mapping[str, AbstractVariable],
    mesh: Mesh,
    rules: Rules,
    *,
    on_unmatched: str = "warn",
    large: int | str = "1MiB",
) -> dict[str, AbstractVariable]:
    """Gives every variable a sharding.

    Rules are one of

    - a mapping of path regex to spec. The whole path must match (`re.fullmatch`); the first rule that matches, in
      the mapping's order, is taken. A spec is a `PartitionSpec`, a tuple or list of axis names, or None (replicate).
      A pattern that matches no variable is an error.
    - a Keras `LayoutMap`, read in the same way, but as Keras reads it: a pattern that matches nothing is only
      warned about, because published maps serve several models.
    - a callable `variable -> PartitionSpec | NamedSharding | None`; None means that no rule applies.

    Args:
        variables: Path to variable.
        mesh: The devices and their axis names; an object with a `backend_mesh`, as Keras' `DeviceMesh`, is unwrapped.
        rules: As above.
        on_unmatched: What to do about variables of at least `large` bytes that no rule matches (they are replicated
            on every device): `"warn"`, `"error"` or `"ignore"`.
        large: That threshold, in bytes or as text.

    Raises:
        ShardingError: A rule matches nothing, or a spec does not fit its variable or the mesh. All misfits of one
            call are reported together.
    """
    if on_unmatched not in ("warn", "error", "ignore"):
        raise ShardingError(f"on_unmatched is 'warn', 'error' or 'ignore'; got {on_unmatched!r}")
    mesh = _as_mesh(mesh)
    lookup, dead, lenient = _lookup(rules, variables)
    if dead:
        names = [rule_path(path) for path in variables]
        message = "; ".join(f"rule {pattern!r} matches no variable{closest(pattern, names)}" for pattern in dead)
        if not lenient:
            raise ShardingError(f"{message}. Mend the pattern (the whole path must match) or remove the rule.")
        warnings.warn(message, LazyModelWarning, stacklevel=3)

    assigned: dict[str, AbstractVariable] = {}
    unmatched: list[AbstractVariable] = []
    misfits: list[str] = []
    threshold = parse_bytes(large)
    for path, variable in variables.items():
        answer = lookup(variable)
        if answer is _UNMATCHED:
            if variable.nbytes >= threshold and mesh.size > 1:
                unmatched.append(variable)
            answer = PartitionSpec()
        try:
            sharding = (
                answer if isinstance(answer, Sharding) else NamedSharding(mesh, check_spec(variable, answer, mesh))
            )
        except ShardingError as error:
            misfits.append(str(error))
            continue
        assigned[path] = dataclasses.replace(variable, sharding=sharding)
    if misfits:
        more = f"\n… and {len(misfits) - _LISTED} more" if len(misfits) > _LISTED else ""
        raise ShardingError("\n".join(misfits[:_LISTED]) + more)
    if unmatched and on_unmatched != "ignore":
        message = _unmatched_message(unmatched, threshold, mesh)
        if on_unmatched == "error":
            raise ShardingError(message)
        warnings.warn(message, LazyModelWarning, stacklevel=3)
    return assigned


def check_spec(variable: AbstractVariable, spec: Any, mesh: Mesh) -> PartitionSpec:
    """A spec as a `PartitionSpec` that is known to fit the variable on the mesh.

    Raises:
        ShardingError: It has more dimensions than the variable, names an axis that the mesh lacks, uses an axis
            twice, or splits a dimension into unequal parts.
    """
    entries = _entries(spec)
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


def rule_path(path: str) -> str:
    """The path that rules see: without the `#2` that keeps equal paths apart."""
    return re.sub(r"#\d+$", "", path)


def device_shardings(variables: Mapping[str, AbstractVariable]) -> dict[str, Sharding]:
    """The sharding that each variable will be materialized with; one default device where none was assigned."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {path: variable.sharding or default for path, variable in variables.items()}


_UNMATCHED = object()


def _lookup(
    rules: Any, variables: Mapping[str, AbstractVariable]
) -> tuple[Callable[[AbstractVariable], Any], list[str], bool]:
    """A function from variable to spec, sharding or `_UNMATCHED`; the dead patterns; whether those are tolerated."""
    if isinstance(rules, Mapping):
        table = cast("Mapping[str, Any]", rules)
        # Keras' LayoutMap: a mapping that carries its own device mesh. The core imports no Keras to ask for the class.
        lenient = hasattr(rules, "device_mesh")
        try:
            patterns = {pattern: re.compile(pattern) for pattern in table}
        except re.error as error:
            raise ShardingError(f"rule {error.pattern!r} is not a regular expression: {error}") from error
        matches: dict[str, str] = {}
        alive: set[str] = set()
        for path in variables:
            name = rule_path(path)
            found = [pattern for pattern, regex in patterns.items() if regex.fullmatch(name)]
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
        dead = [pattern for pattern in patterns if pattern not in alive]
        return (lambda v: table[matches[v.path]] if v.path in matches else _UNMATCHED), dead, lenient
    if callable(rules):
        function = cast("Callable[[AbstractVariable], Any]", rules)

        def call(variable: AbstractVariable) -> Any:
            answer = function(variable)
            return _UNMATCHED if answer is None else answer

        return call, [], False
    raise ShardingError(
        "rules are a mapping of path regex to PartitionSpec, a Keras LayoutMap, or a callable taking a variable; "
        f"got {type(rules).__name__}"
    )


def _entries(spec: Any) -> tuple[Any, ...]:
    """The entries of any form of spec: PartitionSpec, sequence, None, or Keras' TensorLayout."""
    if spec is None:
        return ()
    if hasattr(spec, "axes"):
        spec = spec.axes
    if isinstance(spec, str) or not isinstance(spec, Sequence | PartitionSpec):
        raise ShardingError(f"a spec is a PartitionSpec or a tuple of axis names; got {spec!r}")
    entries = cast("Sequence[Any]", spec)
    return tuple(tuple(cast("list[Any]", entry)) if isinstance(entry, list) else entry for entry in entries)


def _as_mesh(mesh: Any) -> Mesh:
    mesh = getattr(mesh, "backend_mesh", mesh)
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
        "Add a rule for them; PartitionSpec() says that replication is meant."
    )

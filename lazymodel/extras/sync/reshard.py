"""Moves arrays of live models between shardings: the function `reshard`, and copies of arrays for `materialize`.

`reshard` is `extras/sync/sync` without a mapping: `extras/sync/transfer` has the programs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, Sharding

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import AbstractVariable, flatten_paths, sharding_text
from lazymodel._devices.collective import CollectiveScope, agreement, layout_of
from lazymodel._devices.hardware import is_live
from lazymodel._errors import LazyModelError, ShardingError
from lazymodel._materialize.stream import StreamItem
from lazymodel._programs.jaxprs import stored_as
from lazymodel._show.progress import ProgressTo, delivery, progress_for, reported
from lazymodel._show.table import Column, Report, Table, change_text, shape_text
from lazymodel._show.text import closest, format_bytes, parse_bytes, plural
from lazymodel._tensors import shards
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import DeviceTensor, grouped
from lazymodel.extras.sync.pieces import VariableSource, copies_of, device_order
from lazymodel.extras.sync.transfer import (
    Group,
    Move,
    Struct,
    device_nbytes,
    grouped_moves,
    held_nbytes,
    struct_of,
)


@dataclasses.dataclass(frozen=True)
class ReshardRow:
    """One variable's row of the report.

    Attributes:
        path: Its path.
        shape: Its global shape.
        dtype: The name of its dtype.
        nbytes: Bytes of the whole variable, counted once.
        before: Its partition spec, or sharding, as text, and its kind of memory unless that is the devices' own.
        after: The same for its new sharding.
        way: `"kept"`, or `"devices"` if it moved from device to device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    before: str
    after: str
    way: str


@dataclasses.dataclass(frozen=True, repr=False)
class ReshardReport(Report):
    """The report of moving a model to other shardings.

    Attributes:
        rows: One row per variable, in the model's order.
        moved_nbytes: Bytes of the variables that moved, each counted once.
        held_nbytes: Bytes of the model on the most loaded device before, and after.
        peak_nbytes: Most bytes that a device held meanwhile, with the compiler's numbers for temporaries.
        num_groups: The number of groups in which they moved.
        seconds: Wall-clock seconds of the whole call.

    Example:
        >>> reports = []
        >>> moved = lm.reshard(model, jax.sharding.NamedSharding(mesh, P()), report=reports.append)
        >>> reports[0].moved_nbytes, reports[0].held_nbytes
        (131072, (16384, 147456))
    """

    rows: tuple[ReshardRow, ...]
    moved_nbytes: int
    held_nbytes: tuple[int, int]
    peak_nbytes: int
    num_groups: int
    seconds: float

    def table(self) -> Table:
        """The rows, one for each variable."""
        title = (
            f"resharded {plural(len(self.rows), 'variable')}, {format_bytes(sum(row.nbytes for row in self.rows))}, "
            f"in {self.seconds:.2f} s"
        )
        same = map(Column, ("shape", "dtype", "before → after"))
        columns = (Column.names("variable"), *same, Column.nbytes("bytes"), Column.notes("way"))
        rows = [
            (r.path, shape_text(r.shape), r.dtype, change_text(r.before, r.after), r.nbytes, r.way) for r in self.rows
        ]
        before, after = map(format_bytes, self.held_nbytes)
        lines = [
            f"moved: {format_bytes(self.moved_nbytes)} in {plural(self.num_groups, 'group')}",
            f"most loaded device: {before} before, {after} after, {format_bytes(self.peak_nbytes)} at the peak",
        ]
        return Table(title, columns, rows, lines)


def reshard(
    tree: Any,
    shardings: Any,
    *,
    max_device_memory: int | str = "1GiB",
    donate: bool = False,
    progress: ProgressTo = None,
    report: bool | Callable[[ReshardReport], object] | None = None,
) -> Any:
    """Moves a live model to other shardings, on the same devices or others, one variable at a time; equal bit for bit.

    For example from a trainer's layout to a sampler's, from eight devices to four of them, or to the hosts' memory and
    back (shardings with a `memory_kind`). They move from device to device, and no device ever holds more of a variable
    than its shards. If there are several processes, all of them must call this, and devices must stay the same.

    Args:
        tree: Any pytree of arrays, or a model of a known framework. Leaves other than `jax.Array` are left unchanged.
        shardings: One sharding for all; a mapping of path to sharding, with paths as in `build_abstract`; a
            pytree of shardings with the arrays' structure; or an abstract model that was sharded, which is the way to
            use rules. Variables without a sharding stay where they are.
        max_device_memory: Bytes of a device, or `"1GiB"`, of the variables in a group. Processes wait for each other
            before each group. A variable that takes more is a group.
        donate: True deletes each array once its copy is in place. With False, a device holds both in the end.
        progress: As for `materialize`, in bytes of whole variables.
        report: True prints a `ReshardReport` in the end; a callable gets it instead.

    Returns:
        A model of the same structure; a Keras model is changed in place, and returned.

    Raises:
        ShardingError: A path does not exist, or a sharding does not divide its variable.
        LazyModelError: An array is deleted, devices are not of this process or only planned for, or a process failed.

    Example:
        >>> sampler = Mesh(np.array(jax.devices()[:4]), ("model",))
        >>> moved = lm.reshard(model, abstract.shard(sampler, {".*": P(None, "model")}))
        >>> moved["up"]["kernel"].sharding.mesh.size, model["up"]["kernel"].sharding.mesh.size
        (4, 8)
    """
    start = time.perf_counter()
    limit = parse_bytes(max_device_memory, name="max_device_memory", at_least=1)
    deliver = delivery(cast(Any, report))
    arrays, same, rebuild = live_arrays(tree)
    terms = {"done": "resharded", "given": "models differ", "hint": "Move the same model in all processes"}
    with agreement(arrays, **terms) as stage:
        moves = _moves(arrays, _targets(arrays, same, shardings))
        stage.outcome = f"move {len(moves)} arrays"
        stage.details = "\n".join(f"{move.path} {layout_of(move.target)}" for move in moves)
        devices = device_nbytes(map(struct_of, arrays.values()))
        held = peak = max(devices.values())
        sources = {move.path: struct_of(arrays[move.path]) for move in moves}
        rounds = _rounds(moves, sources, limit)
    moved: dict[int, jax.Array] = {}  # `id` of the old array → new array
    moving, bar = sum(arrays[move.path].nbytes for move in moves), progress_for(progress)
    described = f"resharding {plural(len(moves), 'variable')}"
    with reported(bar, moving, described), agreement(arrays, **terms) as stage:
        for groups in rounds:
            stage.meet()
            for group in groups:
                (path,) = group.sources
                source = arrays[path]
                devices.update(device_nbytes(group.wanted))
                peak = max(peak, max(devices.values()) + group.program.nbytes)
                (moved[id(source)],) = stage.together(lambda: group.program([source], []))  # noqa: B023
                if donate:
                    devices.subtract(device_nbytes([sources[path]]))
                    source.delete()
                bar.advance(moved[id(source)].nbytes, path)
            stage.check()
    result = rebuild(moved)
    if deliver is not None:
        seconds, both = time.perf_counter() - start, (held, max(devices.values()))
        rows = tuple(_row(path, source, moved.get(id(source))) for path, source in arrays.items())
        deliver(cast(Any, ReshardReport(rows, moving, both, peak, len(rounds), seconds)))
    return result


def _row(path: str, source: jax.Array, moved: jax.Array | None) -> ReshardRow:
    before, after = (sharding_text(each.sharding) for each in (source, source if moved is None else moved))
    way = "kept" if moved is None else "devices"
    return ReshardRow(path, tuple(source.shape), source.dtype.name, source.nbytes, before, after, way)


def live_arrays(tree: Any) -> tuple[dict[str, jax.Array], dict[str, str], Callable[[Mapping[int, Any]], Any]]:
    """A model's arrays by path, each once; all paths → the path under which the array is listed; and a function that
    replaces arrays, by the `id` of the old ones.
    """
    for adapter in adapters():
        if (found := adapter.arrays(tree)) is not None:
            break
    else:
        adapter, found = None, flatten_paths(tree)

    def rebuild(moved: Mapping[int, Any]) -> Any:
        def replaced(leaf: Any) -> Any:
            return moved.get(id(leaf), leaf)

        return jax.tree.map(replaced, tree) if adapter is None else adapter.with_arrays(tree, moved)

    first = {id(array): path for path, array in reversed(found.items()) if isinstance(array, jax.Array)}
    same = {path: first[id(array)] for path, array in found.items() if id(array) in first}
    arrays = {path: found[path] for path in same if same[path] == path}
    if not arrays:
        raise LazyModelError(f"there are no arrays of JAX in what was given to move, {type(tree)}")
    for path, array in arrays.items():
        if array.is_deleted():
            raise LazyModelError(f"{path!r} was deleted or donated; move what the last step returned instead")
    return arrays, same, rebuild


def _targets(arrays: Mapping[str, jax.Array], same: Mapping[str, str], shardings: Any) -> dict[str, Sharding]:
    """The target sharding of each array that is named."""
    if isinstance(shardings, Sharding):
        return dict.fromkeys(arrays, shardings)
    leaf = (Sharding, AbstractVariable)
    tree = dict(shardings) if isinstance(shardings, ModelSpec) else shardings
    found = flatten_paths(tree) if isinstance(tree, Mapping) or jax.tree.leaves(tree) else {}
    targets: dict[str, Sharding] = {}
    for path, value in found.items():
        sharding = value.sharding if isinstance(value, AbstractVariable) else value
        if not isinstance(value, leaf) or sharding is None:
            what = "has no sharding yet" if isinstance(value, AbstractVariable) else f"is {value!r}, not a sharding"
            raise ShardingError(f"{path!r} {what}; give jax.sharding.NamedSharding(mesh, spec), or an abstract model")
        if path not in same:
            raise ShardingError(f"the model has no array {path!r}{closest(path, same)}")
        first = same[path]
        if not targets.setdefault(first, sharding).is_equivalent_to(sharding, arrays[first].ndim):
            raise ShardingError(
                f"{path!r} and {first!r} are one array: expected one sharding, found {sharding} and {targets[first]}; "
                "give both the same, or copy the array"
            )
    if not targets:
        raise ShardingError(f"there is no sharding in what was given as shardings, {type(shardings)}")
    return targets


def _moves(arrays: Mapping[str, jax.Array], targets: Mapping[str, Sharding]) -> list[Move]:
    """Arrays that move, in the model's order."""
    moves: list[Move] = []
    wrong: list[str] = []
    for path, source in arrays.items():
        target = targets.get(path)
        if target is None or target.is_equivalent_to(source.sharding, source.ndim):
            continue
        try:
            target.shard_shape(source.shape)
        except ValueError as error:
            wrong.append(f"{path!r}: {target} does not divide {tuple(source.shape)}: {error}")
            continue
        if planned := [device for device in cast(Any, target).device_set if not is_live(device)]:
            raise LazyModelError(f"{path!r} would go to {planned[0]}, which is only planned for")
        local = source.is_fully_addressable and target.is_fully_addressable
        if not local and device_order(source.sharding) != device_order(target):
            raise LazyModelError(
                f"{path!r}: some of its devices, before or after, are those of other processes, and it can only move "
                "between processes if the devices and their order stay the same. Use a mesh of the same devices "
                "in the same order, or save it and load it there"
            )
        moves.append(_move(path, source, target))
    if wrong:
        raise ShardingError("; ".join(wrong[:3]) + (f" ({len(wrong)} variables)" if len(wrong) > 3 else ""))
    return moves


def _move(path: str, source: jax.Array, target: Sharding) -> Move:
    """How an array gets another sharding."""
    shape, dtype = stored_as(source.shape, source.dtype)
    names, copies = copies_of(path, LazyTensor(VariableSource(path, shape, dtype)), shape)
    return Move(path, struct_of(source, target), names or (path,), copies)


def device_moves(items: Iterable[StreamItem]) -> list[tuple[Move, jax.Array]]:
    """The items whose tensors are arrays on the devices where they go, so that they need not pass through the host.

    Hosts copy small arrays, and arrays in their own memory, before a program would be compiled.
    """
    moves: list[tuple[Move, jax.Array]] = []
    for item in items:
        tensor = cast(LazyTensor, item.tensor)
        source = tensor.source
        if not isinstance(source, DeviceTensor) or tensor.dtype != item.dtype or not tensor.is_whole:
            continue
        fast = tensor.nbytes < shards.SMALL or shards.boxes_for(item.sharding, item.shape).on_host
        known = all(isinstance(sharding, NamedSharding) for sharding in (source.array.sharding, item.sharding))
        if (source.complete and fast) or not known:
            continue
        if device_order(source.array.sharding) == device_order(item.sharding):
            moves.append((_move(item.path, source.array, item.sharding), source.array))
    return moves


def copied(moves: Iterable[tuple[Move, jax.Array]], stage: CollectiveScope) -> Iterator[tuple[str, jax.Array]]:
    """Yields (path, array): copies of arrays from device to device, group by group. All processes call this."""
    arrays = {move.path: array for move, array in moves}
    sources = {path: struct_of(array) for path, array in arrays.items()}
    for groups in _rounds([move for move, _ in moves], sources, shards.GROUP):
        stage.meet()
        for group in groups:
            (path,) = group.sources
            (array,) = stage.together(lambda: group.program([arrays[path]], []))  # noqa: B023
            yield path, array


def _rounds(moves: Sequence[Move], sources: Mapping[str, Struct], limit: int) -> list[list[Group]]:
    """Arrays that move one after the other, in rounds of at most `limit` bytes of a device, if possible.

    They do not move at the same time: on CPUs, two programs of several processes that run at once can wait for each
    other. Processes meet once for a round.
    """
    groups = {group.targets[0]: group for group in grouped_moves(moves, sources, limit, reuse=False)}
    nbytes = {move.path: held_nbytes(move.target) for move in moves}
    return [[groups[path] for path in paths] for paths in grouped(nbytes, limit)]

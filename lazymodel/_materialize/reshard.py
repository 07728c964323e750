"""Moves arrays between shardings: the function `reshard` for live models, and the exchange of what processes read.

`reshard` is `_materialize/sync` without a mapping: `_materialize/transfer` has the programs. In an exchange each
process reads a part of a variable that several hold (`_tensors/shards` decides which), and a compiled identity combines
the parts.

A program contains collective operations, so all processes run the same programs in the same order: the selection
depends only on shapes, shardings and files, and the processes have verified that these are the same everywhere.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import AbstractVariable, adapters, flatten_paths, is_offloaded
from lazymodel._devices.collective import CollectiveScope, agreement
from lazymodel._devices.hardware import is_live
from lazymodel._errors import CheckpointError, LazyModelError, ShardingError
from lazymodel._materialize.pieces import Variable, copies_of, device_order
from lazymodel._materialize.stream import StreamItem, in_file_order
from lazymodel._materialize.transfer import Array, Group, Move, grouped_moves
from lazymodel._programs.jaxprs import is_key, stored_as
from lazymodel._show.progress import ProgressTo, Timeline, delivery, progress_for
from lazymodel._show.table import Column, Report, Table, placed_text, shape_text, spec_text
from lazymodel._show.text import closest, format_bytes, listed, parse_bytes, plural
from lazymodel._tensors import shards
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import (
    DeviceTensor,
    ReadPartition,
    divide,
    grouped,
    is_exchanged,
    mesh_processes,
)


def through(
    array: jax.Array, shardings: Iterable[Sharding], finish: Callable[[jax.Array], jax.Array] | None = None
) -> jax.Array:
    """While tracing: an array moved through shardings one after the other, then cut; equal bit for bit.

    The array is moved as integers of the same bits: XLA may move small floats through wider ones, which changes
    signalling NaNs.
    """
    dtype, bits = array.dtype, 0
    if not is_key(dtype) and np.dtype(dtype).kind not in "biuc" and dtype.itemsize < 4:
        bits = jax.dtypes.itemsize_bits(dtype)
        array = jax.lax.bitcast_convert_type(array, f"uint{bits}").astype(f"uint{max(bits, 8)}")
    for sharding in shardings:
        array = jax.lax.with_sharding_constraint(array, sharding)
    if finish is not None:
        array = finish(array)
    return jax.lax.bitcast_convert_type(array.astype(f"uint{bits}"), dtype) if bits else array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A variable that is read in parts and exchanged."""

    item: StreamItem
    partition: ReadPartition

    @property
    def part(self) -> StreamItem:
        """The item to read: the parts of all devices."""
        tensor = self.partition.padded(cast(LazyTensor, self.item.tensor).astype(self.item.dtype))
        sharding = NamedSharding(_auto(self.partition.mesh), self.partition.specs[0])
        return dataclasses.replace(self.item, tensor=tensor, shape=tensor.shape, sharding=sharding)

    @property
    def nbytes(self) -> int:
        """Bytes of a device for its part and for exchanging it, in addition to its final bytes."""
        return self.partition.spent_elements * self.item.dtype.itemsize

    def arriving_nbytes(self) -> int:
        """Bytes that the devices of this process get from others."""
        here = np.flatnonzero(mesh_processes(self.partition.mesh) == jax.process_index())
        own = int(self.partition.own_elements()[here].sum())
        return max(len(here) * self.partition.box_elements - own, 0) * self.item.dtype.itemsize

    def whole(self, part: jax.Array) -> jax.Array:
        """The variable, from the parts that all devices have read; a collective operation."""
        with jax.set_mesh(_auto(self.partition.mesh)):  # the user's current mesh may differ
            array = _exchange_program(self.partition)(part)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.item.shape, self.item.sharding, shards)


def exchanges(items: Iterable[StreamItem], replicas: str | None) -> dict[str, Exchange]:
    """Path → variable to exchange, in the order in which a stream yields the variables.

    Args:
        items: The items to read; tensors are lazy.
        replicas: `"exchange"`, `"read"`, or None to exchange only what comes over a network.
    """
    found: dict[str, Exchange] = {}
    for item in in_file_order(items):
        tensor = cast(LazyTensor, item.tensor)
        if not is_exchanged(tensor, replicas):
            continue
        mesh = item.sharding.mesh if isinstance(item.sharding, NamedSharding) else None
        # A process without devices of the mesh does not take part in its programs.
        if not isinstance(mesh, Mesh) or not item.sharding.addressable_devices:
            continue
        partition = divide(tensor, item.sharding, mesh_processes(mesh))
        if partition is not None:
            found[item.path] = Exchange(item, partition)
    return found


def exchanged(
    arriving: Iterator[tuple[str, jax.Array]],
    exchanges: Mapping[str, Exchange],
    stage: CollectiveScope,
    timeline: Timeline,
) -> Generator[tuple[str, jax.Array]]:
    """Yields the (path, array) pairs of a stream, with parts exchanged for their variables, group by group.

    The processes of the stage meet before each group: an exchange that only some of them begin would never end.

    Raises:
        CheckpointError: Exchanging failed, for example because another process was killed, or the stage failed
            elsewhere; also every error of the stream.
    """
    parts: dict[str, jax.Array] = {}
    nbytes = {path: each.nbytes for path, each in exchanges.items()}
    ends = {paths[-1] for paths in grouped(nbytes, shards.GROUP)}
    for path, array in arriving:
        if path not in exchanges:
            yield path, array
            continue
        parts[path] = array
        del array
        if path in ends:
            stage.meet()
            paths = list(parts)

            def run(paths: Sequence[str] = paths) -> list[jax.Array]:
                return [exchanges[path].whole(parts.pop(path)) for path in paths]

            try:
                # Wait, because each program has temporaries.
                with timeline.span("exchange"):
                    arrays = stage.together(run)
            except jax.errors.JaxRuntimeError as error:
                raise CheckpointError(
                    f"what processes had read could not be exchanged between them ({listed(map(repr, paths))}): {error}"
                ) from error
            yield from zip(paths, arrays, strict=True)
            del arrays
    assert not parts


@functools.lru_cache(maxsize=256)
def _exchange_program(partition: ReadPartition) -> Callable[[jax.Array], jax.Array]:
    """The program that exchanges an array: the identity, apart from the padding of its parts."""
    shardings = [NamedSharding(_auto(partition.mesh), spec) for spec in partition.specs]
    axis, shape = partition.axis, partition.shape

    def cut(padded: jax.Array) -> jax.Array:
        groups = padded.reshape(*shape[:axis], partition.groups, partition.padded_rows, *shape[axis + 1 :])
        return jax.lax.slice_in_dim(groups, 0, partition.rows, axis=axis + 1).reshape(partition.shape)

    def exchange(parts: jax.Array) -> jax.Array:
        return through(parts, shardings, cut if partition.padded_rows > partition.rows else None)

    return jax.jit(exchange, out_shardings=shardings[-1])


@functools.lru_cache(maxsize=64)
def _auto(mesh: Mesh) -> Mesh:
    """The same devices with automatic axes, without settings of the user's own mesh."""
    return Mesh(mesh.devices, mesh.axis_names)


# With donation, a group takes at most this fraction of the bytes on the most loaded device: the peak stays near the
# model's own bytes, however small it is, and the time for so many waits is negligible.
_PART = 16


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
        num_groups: The number of steps in which they moved.
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
        same = map(Column, ("shape", "dtype", "before", "after"))
        columns = (Column.names("variable"), *same, Column.nbytes("bytes"), Column.notes("way"))
        rows = [(r.path, shape_text(r.shape), r.dtype, r.before, r.after, r.nbytes, r.way) for r in self.rows]
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
    """Moves a live model to other shardings, on the same devices or others, group by group; equal bit for bit.

    For example from a trainer's layout to a sampler's, from eight devices to four of them, or to the hosts' memory and
    back (shardings with a `memory_kind`). They move from device to device, and no device ever holds more of a variable
    than its shards. If there are several processes, all of them must call this, and devices must stay the same.

    Args:
        tree: Any pytree of arrays, or a model of a known framework. Leaves other than `jax.Array` are left unchanged.
        shardings: One sharding for all; a mapping of path to sharding, with paths as in `build_abstract`; a
            pytree of shardings with the arrays' structure; or an abstract model that was sharded, which is the way to
            use rules. Variables without a sharding stay where they are.
        max_device_memory: Bytes of a device, or `"1GiB"`, that buffers for a group of variables may take while
            they move. A variable that takes more moves alone.
        donate: True deletes each array once its copy is in place. Groups are then at most a sixteenth of the model.
            With False, a device holds both in the end.
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
    sharings = [array.sharding for array in arrays.values()]
    with agreement(sharings, **terms) as stage:
        moves = _moves(arrays, _targets(arrays, same, shardings))
        stage.outcome = f"move {len(moves)} arrays"
        stage.details = "\n".join(f"{move.path} {move.target.shape} {move.target.sharding}" for move in moves)
        counts = _Counts(arrays.values())
        if donate:
            limit = max(min(limit, counts.held // _PART), 1)
        sources = {move.path: Array.of(arrays[move.path]) for move in moves}
        groups = grouped_moves(moves, sources, limit, reuse=False)
    moved: dict[int, jax.Array] = {}  # `id` of the old array → new array
    moving, bar = sum(arrays[move.path].nbytes for move in moves), progress_for(progress)
    bar.start(moving, f"resharding {plural(len(moves), 'variable')}")
    try:
        with agreement(sharings, **terms) as stage:
            for group in groups:
                given = [arrays[path] for path in group.sources]
                counts.group(group, given, donate=donate)
                stage.meet()
                for source, array in zip(given, stage.together(lambda: group.program(given, [])), strict=True):  # noqa: B023
                    if donate:
                        source.delete()
                    moved[id(source)] = array
                bar.advance(sum(array.nbytes for array in given), group.sources[-1])
                stage.check()
    finally:
        bar.finish()
    result = rebuild(moved)
    if deliver is not None:
        seconds, held = time.perf_counter() - start, (counts.held, counts.now())
        rows = tuple(_row(path, source, moved.get(id(source))) for path, source in arrays.items())
        deliver(cast(Any, ReshardReport(rows, moving, held, counts.peak, counts.groups, seconds)))
    return result


def _row(path: str, source: jax.Array, moved: jax.Array | None) -> ReshardRow:
    before, after = _text(source.sharding), _text((source if moved is None else moved).sharding)
    way = "kept" if moved is None else "devices"
    return ReshardRow(path, tuple(source.shape), source.dtype.name, source.nbytes, before, after, way)


class _Counts:
    """Bytes that devices hold, from move to move."""

    def __init__(self, arrays: Iterable[jax.Array]) -> None:
        self._devices: collections.Counter[Any] = collections.Counter()
        for array in arrays:
            self._add(array, array.sharding, 1)
        self.held = self.peak = self.now()
        self.groups = 0

    def now(self) -> int:
        """Bytes of the most loaded device."""
        return max(self._devices.values(), default=0)

    def group(self, group: Group, sources: Sequence[jax.Array], *, donate: bool) -> None:
        """Counts the bytes of a group that moves."""
        self.groups += 1
        for source, target in zip(sources, group.wanted, strict=True):
            self._add(source, target.sharding, 1)
        self.peak = max(self.peak, self.now() + group.program.nbytes)
        for source in sources if donate else ():
            self._add(source, source.sharding, -1)

    def _add(self, array: jax.Array, sharding: Sharding, sign: int) -> None:
        nbytes = Array(array.shape, array.dtype, sharding).shard_nbytes
        self._devices.update(dict.fromkeys(cast(Any, sharding).device_set, sign * nbytes))


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
    names, copies = copies_of(path, LazyTensor(Variable(path, shape, dtype)), shape)
    return Move(path, Array(source.shape, source.dtype, target), names or (path,), copies)


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
    sources = {path: Array.of(array) for path, array in arrays.items()}
    for group in grouped_moves([move for move, _ in moves], sources, shards.GROUP, reuse=False):
        given = [arrays[path] for path in group.sources]
        stage.meet()
        yield from zip(group.targets, stage.together(lambda: group.program(given, [])), strict=True)  # noqa: B023


def _text(sharding: Sharding) -> str:
    spec = getattr(sharding, "spec", None)
    text = type(sharding).__name__ if spec is None else spec_text(spec)
    return placed_text(text, sharding.memory_kind if is_offloaded(sharding) else None)

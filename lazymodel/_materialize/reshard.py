"""The verb `reshard`: a live model moves to other shardings, or to other devices.

Arrays whose devices stay the same are moved by a compiled identity, from device to device; others pass through the host
in pieces, as if the old devices were a checkpoint. Which array of a framework's model is which is its adapter's matter.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.memory import in_memory, is_offloaded, on_device
from lazymodel._abstract.paths import flatten_paths
from lazymodel._abstract.spec import ModelSpec
from lazymodel._abstract.variable import AbstractVariable
from lazymodel._devices.agreement import Stage, agreement
from lazymodel._devices.hardware import is_live
from lazymodel._errors import LazyModelError, ShardingError
from lazymodel._materialize.bits import as_moved, from_moved
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._programs.kernels import with_shards
from lazymodel._programs.keys import as_keys, is_key
from lazymodel._show.progress import Progress, ProgressTo, delivery, progress_for
from lazymodel._show.table import Row, Table, Tabled, folded_table, placed_text, shape_text, spec_text
from lazymodel._show.text import closest, format_bytes, parse_bytes, plural
from lazymodel._tensors.device import DeviceLeaf
from lazymodel._tensors.division import grouped
from lazymodel._tensors.lazy import LazyTensor

# With donation, a group takes at most this part of what the fullest device holds: the peak stays near the model's own
# bytes, however small it is, and so many waits take no time that counts.
_PART = 16
_LEAST_HOST = 16 << 20  # bytes of host memory below which reading in pieces becomes slow


@dataclasses.dataclass(frozen=True)
class ReshardRow:
    """What became of one variable.

    Attributes:
        path: Its path.
        shape: Its global shape.
        dtype: The name of its dtype.
        nbytes: Bytes of the whole variable, counted once.
        before: Its partition spec, or sharding, as text, and its kind of memory unless that is devices' own.
        after: The same of what it has now.
        way: `"kept"`, `"devices"` where it went from device to device, or `"host"` where it passed through this host.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    before: str
    after: str
    way: str


@dataclasses.dataclass(frozen=True, repr=False)
class ReshardReport(Tabled):
    """What moving a model to other shardings took.

    Attributes:
        rows: One a variable, in the model's order.
        moved_nbytes: Bytes of the variables that moved, each counted once.
        held_nbytes: Bytes of the model on the fullest device before, and after.
        peak_nbytes: Most bytes that a device held meanwhile, by what the compiler said of temporaries.
        num_groups: In how many steps they moved.
        seconds: Wall-clock seconds of it all.

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

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, strings and numbers."""
        plain = dataclasses.asdict(self)
        return plain | {"held_nbytes": list(self.held_nbytes), "rows": [dict(row) for row in plain["rows"]]}

    def table(self) -> Table:
        """What is shown."""
        title = (
            f"resharded {plural(len(self.rows), 'variable')}, {format_bytes(sum(row.nbytes for row in self.rows))}, "
            f"in {self.seconds:.2f} s"
        )
        rows = [
            Row(row.path, (shape_text(row.shape), row.dtype, row.before, row.after), row.nbytes, row.way)
            for row in self.rows
        ]
        before, after = map(format_bytes, self.held_nbytes)
        lines = [
            f"moved: {format_bytes(self.moved_nbytes)} in {plural(self.num_groups, 'group')}",
            f"fullest device: {before} before, {after} after, {format_bytes(self.peak_nbytes)} at the peak",
        ]
        return folded_table(title, ("shape", "dtype", "before", "after", "bytes", "way"), rows, lines)


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

    From a trainer's layout to a sampler's, say, from eight devices to four of them, or to the hosts' memory and back
    (shardings with a `memory_kind`). Arrays whose devices stay the same go from device to device, in one process or
    many, all of which must call this. Others pass through this host's memory in pieces, and must be on devices of this
    process before and after.

    Args:
        tree: Any pytree of arrays, or a model of a known framework. What is no `jax.Array` is left as it is.
        shardings: A sharding for all; a mapping of path to sharding, with paths as `build_abstract` gives them; a
            pytree of shardings with the arrays' places; or an abstract model that was sharded, which is how rules are
            given. Variables that it does not name stay where they are.
        max_device_memory: Bytes of a device, or `"1GiB"`, that a group of variables may take in their new places while
            they move, temporaries included, and that pass through the host at a time. A variable that takes more moves
            alone.
        donate: Whether the arrays are given up as they move: each is deleted once it is in its new place. Groups are
            then at most a sixteenth of the model. If not, a device holds both in the end.
        progress: As for `materialize`, in bytes of whole variables.
        report: True prints a `ReshardReport` in the end; a callable is given it instead.

    Returns:
        A model of the same structure; a Keras model is changed in place, and returned.

    Raises:
        ShardingError: A path is not there, or a sharding does not divide its variable.
        LazyModelError: An array is deleted, devices are not this process's or only planned for, or a process failed.

    Example:
        >>> sampler = Mesh(np.array(jax.devices()[:4]), ("model",))
        >>> moved = lm.reshard(model, abstract.shard(sampler, {".*": P(None, "model")}))
        >>> moved["up"]["kernel"].sharding.mesh.size, model["up"]["kernel"].sharding.mesh.size
        (4, 8)
    """
    start = time.perf_counter()
    limit = parse_bytes(max_device_memory, name="max_device_memory", at_least=1)
    deliver = delivery(cast(Any, report))
    arrays, same, rebuild = _arrays(tree)
    terms = {"done": "resharded", "given": "models differ", "mend": "Move the same model in all processes"}
    sharings = [array.sharding for array in arrays.values()]
    with agreement(sharings, **terms) as stage:
        moves = _moves(arrays, _targets(arrays, same, shardings))
        stage.outcome = f"move {len(moves)} arrays"
        stage.details = "\n".join(f"{move.path} {move.source.shape} {move.target}" for move in moves)
        counts = _Counts(arrays.values())
        if donate:
            limit = max(min(limit, counts.held // _PART), 1)
    with agreement(sharings, **terms) as stage:
        moved = _move_all(moves, limit, donate, progress_for(progress), stage, counts)
    result = rebuild(moved)
    if deliver is not None:
        deliver(cast(Any, _report(arrays, moves, counts, moved, time.perf_counter() - start)))
    return result


@dataclasses.dataclass(frozen=True)
class _Move:
    """An array, where it goes, and how."""

    path: str
    source: jax.Array
    target: Sharding
    compiled: bool  # whether it goes from device to device

    @functools.cached_property
    def program(self) -> tuple[Any, int]:
        """The compiled program, and bytes of a device that it takes."""
        return _program(self.source.shape, self.source.dtype, self.source.sharding, self.target)

    @property
    def nbytes(self) -> int:
        """Bytes of a device that its new place takes, and moving it there."""
        if self.compiled:
            return self.program[1]
        return 0 if is_offloaded(self.target) else _shard_nbytes(self.source, self.target)


class _Counts:
    """What devices hold, from move to move."""

    def __init__(self, arrays: Any) -> None:
        self._devices: collections.Counter[Any] = collections.Counter()
        for array in arrays:
            self._add(array, array.sharding, 1)
        self.held = self.peak = self.now()
        self.groups = 0

    def now(self) -> int:
        """Bytes of the fullest device."""
        return max(self._devices.values(), default=0)

    def group(self, moves: Sequence[_Move], *, donate: bool) -> None:
        """Notes the bytes of a group that moves."""
        self.groups += 1
        for move in moves:
            self._add(move.source, move.target, 1)
        known = (0 if is_offloaded(move.target) else _shard_nbytes(move.source, move.target) for move in moves)
        extra = sum(move.nbytes for move in moves) - sum(known)
        self.peak = max(self.peak, self.now() + extra)
        for move in moves if donate else ():
            self._add(move.source, move.source.sharding, -1)

    def _add(self, array: jax.Array, sharding: Sharding, sign: int) -> None:
        nbytes = 0 if is_offloaded(sharding) else sign * _shard_nbytes(array, sharding)
        self._devices.update(dict.fromkeys(cast(Any, sharding).device_set, nbytes))


def _shard_nbytes(array: jax.Array, sharding: Sharding) -> int:
    return int(np.prod(sharding.shard_shape(array.shape), dtype=int)) * array.dtype.itemsize


def _arrays(tree: Any) -> tuple[dict[str, jax.Array], dict[str, str], Callable[[Mapping[int, Any]], Any]]:
    """A model's arrays by path, each once; the path of each array by all of its paths; and what puts others, by the
    old ones' `id`, into their places.
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
    """The sharding that each array is to have, of those that are named."""
    if isinstance(shardings, Sharding):
        return dict.fromkeys(arrays, shardings)
    leaf = (Sharding, AbstractVariable)
    tree = dict(shardings) if isinstance(shardings, ModelSpec) else shardings
    found = flatten_paths(tree) if isinstance(tree, Mapping) or jax.tree.leaves(tree) else {}
    targets: dict[str, Sharding] = {}
    for path, value in found.items():
        sharding = value.sharding if isinstance(value, AbstractVariable) else value
        if not isinstance(value, leaf) or sharding is None:
            what = "has no sharding yet" if isinstance(value, AbstractVariable) else f"is {value!r}, no sharding"
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


def _moves(arrays: Mapping[str, jax.Array], targets: Mapping[str, Sharding]) -> list[_Move]:
    """What is to move, in the model's order."""
    moves: list[_Move] = []
    misfits: list[str] = []
    for path, source in arrays.items():
        target = targets.get(path)
        if target is None or target.is_equivalent_to(source.sharding, source.ndim):
            continue
        try:
            target.shard_shape(source.shape)
        except ValueError as error:
            misfits.append(f"{path!r}: {target} does not divide {tuple(source.shape)}: {error}")
            continue
        if planned := [device for device in cast(Any, target).device_set if not is_live(device)]:
            raise LazyModelError(f"{path!r} would go to {planned[0]}, which is only planned for")
        # Programs are for devices in an order, which two meshes of the same devices need not have.
        compiled = _devices(source.sharding) == _devices(target)
        if not compiled and not (source.is_fully_addressable and target.is_fully_addressable):
            raise LazyModelError(
                f"{path!r}: some of its devices, before or after, are those of other processes, and only where the "
                "devices and their order stay the same can it move between processes. Use a mesh of the same devices "
                "in the same order, or save it and load it there"
            )
        moves.append(_Move(path, source, target, compiled))
    if misfits:
        raise ShardingError("; ".join(misfits[:3]) + (f" ({len(misfits)} variables)" if len(misfits) > 3 else ""))
    return moves


def _devices(sharding: Sharding) -> Sequence[Any]:
    """The devices of a sharding in its own order; something of its own where that is not known."""
    if isinstance(sharding, NamedSharding):
        return tuple(cast(Any, sharding.mesh).devices.flat)
    devices = tuple(cast(Any, sharding).device_set)
    return devices if len(devices) == 1 else (sharding,)


def _move_all(
    moves: Sequence[_Move], limit: int, donate: bool, progress: Progress, stage: Stage, counts: _Counts
) -> dict[int, jax.Array]:
    """Moves everything; returns new arrays by the `id` of the old ones."""
    moved: dict[int, jax.Array] = {}
    progress.start(sum(move.source.nbytes for move in moves), f"resharding {plural(len(moves), 'variable')}")
    try:
        for move, array in itertools.chain(
            _through_devices([move for move in moves if move.compiled], limit, donate, stage, counts),
            _through_host([move for move in moves if not move.compiled], limit, donate, counts),
        ):
            moved[id(move.source)] = array
            progress.advance(move.source.nbytes, move.path)
            stage.check()
    finally:
        progress.finish()
    return moved


def _through_devices(
    moves: Sequence[_Move], limit: int, donate: bool, stage: Stage, counts: _Counts
) -> Iterator[tuple[_Move, jax.Array]]:
    by_path = {move.path: move for move in moves}
    for paths in grouped({move.path: move.nbytes for move in moves}, limit):
        group = [by_path[path] for path in paths]
        counts.group(group, donate=donate)
        stage.meet()
        arrays = stage.together(lambda group=group: [with_shards(move.program[0](move.source)) for move in group])
        for move, array in zip(group, arrays, strict=True):
            yield from _moved(move, array, donate)


def _through_host(
    moves: Sequence[_Move], limit: int, donate: bool, counts: _Counts
) -> Iterator[tuple[_Move, jax.Array]]:
    by_path = {move.path: move for move in moves}
    items: list[StreamItem] = []
    for move in moves:
        data = jax.random.key_data(move.source) if is_key(move.source.dtype) else move.source
        tensor = LazyTensor(DeviceLeaf(move.path, data))
        items.append(StreamItem(move.path, tensor, tensor.shape, tensor.dtype, move.target))
    for path, array in stream(items, max_host_memory=max(limit, _LEAST_HOST)):
        move = by_path[path]
        counts.group([move], donate=donate)
        yield from _moved(move, as_keys(array, move.source.dtype), donate)


def _moved(move: _Move, array: jax.Array, donate: bool) -> Iterator[tuple[_Move, jax.Array]]:
    jax.block_until_ready(array)
    if donate:
        move.source.delete()
    yield move, array


@functools.lru_cache(maxsize=1024)
def _program(shape: tuple[int, ...], dtype: Any, source: Sharding, target: Sharding) -> tuple[Any, int]:
    """The program that moves arrays of a kind, and bytes of a device that it takes, its result included."""
    here, there = (cast(Sharding, in_memory(sharding, None, "")) for sharding in (source, target))

    def move(array: jax.Array) -> jax.Array:
        array = on_device(array, source)  # where bits are computed with, and devices send
        bits = array if is_key(dtype) else as_moved(array)
        for sharding in (here, _finest(there, shape), there):
            bits = jax.lax.with_sharding_constraint(bits, sharding)
        return bits if is_key(dtype) else from_moved(bits, np.dtype(dtype))

    struct = jax.ShapeDtypeStruct(shape, dtype, sharding=source)
    program = jax.jit(move, out_shardings=target)
    memory = program.lower(struct).compile().memory_analysis()  # which calling it finds
    return program, int(memory.output_size_in_bytes + memory.temp_size_in_bytes) if memory else 0


def _finest(target: Sharding, shape: tuple[int, ...]) -> Sharding:
    """The sharding that splits what the target replicates, as far as it divides.

    Every device then receives its part of what it will hold, and gathers the rest. Without this stop on the way XLA's
    partitioner may gather the whole array on every device.
    """
    if not isinstance(target, NamedSharding) or not isinstance(target.mesh, Mesh):
        return target
    sizes = target.mesh.shape
    entries = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in target.spec]
    entries += [()] * (len(shape) - len(entries))
    used = {name for names in entries for name in names}
    for name in (name for name in target.mesh.axis_names if name not in used):
        for axis, names in enumerate(entries):
            if shape[axis] and shape[axis] % math.prod(sizes[each] for each in (*names, name)) == 0:
                entries[axis] = (*names, name)
                break
    return NamedSharding(target.mesh, PartitionSpec(*entries))


def _report(
    arrays: Mapping[str, jax.Array],
    moves: Sequence[_Move],
    counts: _Counts,
    moved: Mapping[int, jax.Array],
    seconds: float,
) -> ReshardReport:
    ways = {move.path: "devices" if move.compiled else "host" for move in moves}
    rows: list[ReshardRow] = []
    for path, source in arrays.items():
        texts = _text(source.sharding), _text(moved.get(id(source), source).sharding)
        about = ReshardRow(path, tuple(source.shape), source.dtype.name, source.nbytes, *texts, ways.get(path, "kept"))
        rows.append(about)
    moving = sum(move.source.nbytes for move in moves)
    return ReshardReport(tuple(rows), moving, (counts.held, counts.now()), counts.peak, counts.groups, seconds)


def _text(sharding: Sharding) -> str:
    spec = getattr(sharding, "spec", None)
    text = type(sharding).__name__ if spec is None else spec_text(spec)
    return placed_text(text, sharding.memory_kind if is_offloaded(sharding) else None)

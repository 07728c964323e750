"""The exchange: each process reads a part of what several hold, and devices bring the parts together.

Responsible for which variables are exchanged, for the programs that do it, and for how many are under way at a time.
Who reads which part is in `_tensors/division`, how it is read in `_materialize/stream`, and how processes wait for one
another in `_devices/agreement`.

A program has collective operations in it, so all processes run the same ones in the same order: what is exchanged
follows from shapes, shardings and files, of which the processes have agreed that they are the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._devices.agreement import Stage
from lazymodel._errors import CheckpointError
from lazymodel._materialize.bits import from_moved, moved_dtype
from lazymodel._materialize.stream import StreamItem, in_file_order
from lazymodel._show.text import listed
from lazymodel._show.timeline import Timeline
from lazymodel._tensors import division as dividing
from lazymodel._tensors.division import (
    Division,
    PartsLeaf,
    check_replicas,
    divide,
    grouped,
    is_exchanged,
    mesh_processes,
)
from lazymodel._tensors.lazy import LazyTensor

# Arrays of one program, where so many are alike: each program is a round over the network for every process; more would
# make a group of large arrays longer than it need be.
_TOGETHER = 8


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How one variable is read and exchanged."""

    item: StreamItem
    division: Division

    @property
    def part(self) -> StreamItem:
        """What is read of it: the parts of all devices."""
        dtype = moved_dtype(self.item.dtype)
        leaf = PartsLeaf(cast(LazyTensor, self.item.tensor).astype(self.item.dtype), self.division, dtype)
        mesh = _auto(self.division.mesh)
        sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
        return StreamItem(self.item.path, LazyTensor(leaf), leaf.shape, dtype, sharding)

    @property
    def nbytes(self) -> int:
        """Bytes of a device that its part and exchanging it take, besides what it holds in the end."""
        return self.division.spent_elements * self.item.dtype.itemsize

    def own_nbytes(self) -> int:
        """Bytes that this process reads."""
        return int(self.division.all_own_elements()[self._here()].sum()) * self.item.dtype.itemsize

    def held_nbytes(self) -> int:
        """Bytes that the devices of this process hold in the end."""
        return len(self._here()) * self.division.box_elements * self.item.dtype.itemsize

    def _here(self) -> np.ndarray:
        """The positions of this process's devices in the mesh."""
        return np.flatnonzero(mesh_processes(self.division.mesh) == jax.process_index())

    @property
    def signature(self) -> tuple[Division, np.dtype[Any]]:
        """What has the same program."""
        return self.division, self.item.dtype


def exchanges(items: Iterable[StreamItem], replicas: str | None) -> dict[str, Exchange]:
    """What is exchanged of what is to be read, by path, in the order in which a stream yields it.

    Args:
        items: What is read; tensors are lazy.
        replicas: `"exchange"`, `"read"`, or None for what comes over a network.
    """
    check_replicas(replicas)
    found: dict[str, Exchange] = {}
    for item in in_file_order(items):
        tensor = cast(LazyTensor, item.tensor)
        if not is_exchanged(tensor, replicas) or jax.process_count() == 1:
            continue
        mesh = item.sharding.mesh if isinstance(item.sharding, NamedSharding) else None
        # A process without devices of the mesh has no part in its programs.
        if not isinstance(mesh, Mesh) or not item.sharding.addressable_devices:
            continue
        division = divide(tensor, item.sharding, mesh_processes(mesh))
        if division is not None:
            found[item.path] = Exchange(item, division)
    return found


def exchanged(
    arriving: Iterator[tuple[str, jax.Array]], exchanges: Mapping[str, Exchange], stage: Stage, timeline: Timeline
) -> Iterator[tuple[str, jax.Array]]:
    """What a stream yields, (path, array), with the parts of variables exchanged for the variables, group by group.

    The processes of the stage meet before each group: an exchange that only some of them begin has no end.

    Raises:
        CheckpointError: Exchanging failed, as when another process was killed meanwhile, or the stage failed elsewhere;
            and whatever the stream raises.
    """
    group: dict[str, jax.Array] = {}
    ends = {paths[-1] for paths in grouped({path: each.nbytes for path, each in exchanges.items()}, dividing.GROUP)}
    for path, array in arriving:
        if path not in exchanges:
            yield path, array
            continue
        group[path] = array
        del array
        if path in ends:
            stage.meet()
            yield from _exchange(group, exchanges, stage, timeline)
    assert not group


def _exchange(
    group: dict[str, jax.Array], exchanges: Mapping[str, Exchange], stage: Stage, timeline: Timeline
) -> Iterator[tuple[str, jax.Array]]:
    """Exchanges a group, and empties it."""
    alike: dict[Any, list[str]] = {}
    for path in group:
        alike.setdefault(exchanges[path].signature, []).append(path)
    for (division, dtype), paths in alike.items():
        while paths:
            count = _TOGETHER if len(paths) >= _TOGETHER else 1
            now, paths = paths[:count], paths[count:]
            parts = [group.pop(path) for path in now]
            try:
                # Waited for, because each program has its temporaries.
                with timeline.span("exchange"):
                    arrays = stage.together(functools.partial(_run, division, dtype, parts))
            except jax.errors.JaxRuntimeError as error:
                raise CheckpointError(
                    f"what processes had read could not be exchanged between them ({listed(map(repr, now))}): {error}"
                ) from error
            del parts
            for path, array in zip(now, arrays, strict=True):
                item = exchanges[path].item
                shards = [shard.data for shard in array.addressable_shards]
                yield path, jax.make_array_from_single_device_arrays(item.shape, item.sharding, shards)


def _run(division: Division, dtype: np.dtype[Any], parts: Sequence[jax.Array]) -> Sequence[jax.Array]:
    with jax.set_mesh(_auto(division.mesh)):  # the user's own may be another one
        return _program(division, dtype, len(parts))(*parts)


@functools.lru_cache(maxsize=256)
def _program(division: Division, dtype: np.dtype[Any], count: int) -> Callable[..., Sequence[jax.Array]]:
    """The program that exchanges arrays which are divided alike: their parts to themselves."""
    mesh = _auto(division.mesh)
    entries = {axis: division.axes[position] or None for position, axis in enumerate(division.order)}
    whole = PartitionSpec(*(entries[axis] for axis in range(len(entries))))

    def exchange(*parts: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_exchange_part(part, division, dtype) for part in parts)

    mapped = jax.shard_map(
        exchange,
        mesh=mesh,
        in_specs=(PartitionSpec(tuple(mesh.axis_names)),) * count,
        out_specs=(whole,) * count,
        check_vma=False,  # what an all-gather returns is the same everywhere, which is not seen through all-to-all
    )
    return jax.jit(mapped)


def _exchange_part(part: jax.Array, division: Division, dtype: np.dtype[Any]) -> jax.Array:
    """A device's shard of an array, of its part of it."""
    # From the innermost members outward, so that rows come to lie in their order.
    for position in reversed(division.spread):
        along = 1 + position - division.lead
        part = jax.lax.all_to_all(part, division.axes[position], split_axis=along, concat_axis=0, tiled=True)
    if division.gathered:
        part = jax.lax.all_gather(part, division.gathered, axis=0, tiled=True)
    rows = part[: division.num_rows].reshape(division.box)
    values = rows.transpose([division.order.index(axis) for axis in range(rows.ndim)])
    return from_moved(values, dtype)


@functools.lru_cache(maxsize=64)
def _auto(mesh: Mesh) -> Mesh:
    """The same devices without anything that the user's own mesh says of how programs are written."""
    return Mesh(mesh.devices, mesh.axis_names)

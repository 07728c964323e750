"""The exchange: each process reads a part of a variable that several hold, and devices combine the parts.

Responsible for selecting the variables to exchange, for the compiled identities that move arrays from one sharding to
another, and for how many of these are in flight. `_tensors/read_partition` decides who reads which part,
`_materialize/stream` reads it, and processes wait for one another in `_devices/collective`.

A program contains collective operations, so all processes run the same programs in the same order: the selection
depends only on shapes, shardings and files, and the processes have verified that these are the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from lazymodel._devices.collective import CollectiveScope
from lazymodel._errors import CheckpointError
from lazymodel._materialize.stream import StreamItem, in_file_order
from lazymodel._programs.keys import is_key
from lazymodel._show.text import listed
from lazymodel._show.timeline import Timeline
from lazymodel._tensors import read_partition
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.read_partition import (
    ReadPartition,
    check_replicas,
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
            array = _program(self.partition)(part)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.item.shape, self.item.sharding, shards)


def exchanges(items: Iterable[StreamItem], replicas: str | None) -> dict[str, Exchange]:
    """Path → variable to exchange, in the order in which a stream yields the variables.

    Args:
        items: The items to read; tensors are lazy.
        replicas: `"exchange"`, `"read"`, or None to exchange only what comes over a network.
    """
    check_replicas(replicas)
    found: dict[str, Exchange] = {}
    for item in in_file_order(items):
        tensor = cast(LazyTensor, item.tensor)
        if not is_exchanged(tensor, replicas) or jax.process_count() == 1:
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
    ends = {paths[-1] for paths in grouped(nbytes, read_partition.GROUP)}
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
def _program(partition: ReadPartition) -> Callable[[jax.Array], jax.Array]:
    """The program that exchanges an array: the identity, apart from the padding of its parts."""
    shardings = [NamedSharding(_auto(partition.mesh), spec) for spec in partition.specs]
    axis, shape = partition.axis, partition.padded_shape

    def cut(padded: jax.Array) -> jax.Array:
        groups = padded.reshape(*shape[:axis], partition.shards, partition.padded_rows, *shape[axis + 1 :])
        return jax.lax.slice_in_dim(groups, 0, partition.rows, axis=axis + 1).reshape(partition.shape)

    def exchange(parts: jax.Array) -> jax.Array:
        return through(parts, shardings, cut if partition.padded_rows > partition.rows else None)

    return jax.jit(exchange, out_shardings=shardings[-1])


@functools.lru_cache(maxsize=64)
def _auto(mesh: Mesh) -> Mesh:
    """The same devices with automatic axes, without settings of the user's own mesh."""
    return Mesh(mesh.devices, mesh.axis_names)

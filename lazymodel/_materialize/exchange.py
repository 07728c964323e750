"""The exchange of what processes read: each byte that several of them need is read by one.

A variable is read in parts, one for each process that holds it (`_tensors/shards` decides which), and a compiled
identity combines the parts. Small variables of a remote file are shared as bytes instead: their parts would be so close
together in the file that every process would fetch all of them. The processes divide these bytes evenly, give them to
all in one program, and the stream then reads from memory.

A program contains collective operations, so all processes run the same programs in the same order: the selection
depends only on shapes, shardings and files, and the processes have verified that these are the same everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lazymodel._devices.collective import CollectiveScope
from lazymodel._devices.hardware import process_mesh
from lazymodel._errors import CheckpointError
from lazymodel._materialize.stream import StreamItem
from lazymodel._programs.jaxprs import PROGRAMS, is_key
from lazymodel._remote.path import holding, reading_ahead
from lazymodel._show.progress import Timeline
from lazymodel._show.text import listed
from lazymodel._tensors import shards
from lazymodel._tensors.boxes import whole_box
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import ReadPartition, divide, grouped, is_exchanged, is_shared, mesh_processes
from lazymodel._tensors.tensor_source import required_ranges


def _through(
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
class ExchangedItem:
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


def exchanges(items: Iterable[StreamItem], replicas: str | None) -> dict[str, ExchangedItem]:
    """Path → variable to exchange, in the order of the items.

    Args:
        items: The items to read, in file order; tensors are lazy.
        replicas: `"exchange"`, `"read"`, or None to exchange only what comes over a network.
    """
    found: dict[str, ExchangedItem] = {}
    for item in items:
        tensor = cast(LazyTensor, item.tensor)
        if not is_exchanged(tensor, replicas):
            continue
        mesh = item.sharding.mesh if isinstance(item.sharding, NamedSharding) else None
        # A process without devices of the mesh does not take part in its programs.
        if not isinstance(mesh, Mesh) or not item.sharding.addressable_devices:
            continue
        partition = divide(tensor, item.sharding, mesh_processes(mesh))
        if partition is not None:
            found[item.path] = ExchangedItem(item, partition)
    return found


def exchanged(
    arriving: Iterator[tuple[str, jax.Array]],
    exchanges: Mapping[str, ExchangedItem],
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
            paths, arrays = list(parts), list[jax.Array]()
            # One program at a time: each has temporaries, and on CPUs two that run at once can wait for each other.
            with timeline.span("exchange"), _named(paths):
                for path in paths:
                    arrays += stage.together(lambda: [exchanges[path].whole(parts.pop(path))])  # noqa: B023
            yield from zip(paths, arrays, strict=True)
            del arrays
    assert not parts


@contextlib.contextmanager
def _named(paths: Iterable[str]) -> Generator[None]:
    """Raises CheckpointError, with the names of variables, if exchanging fails, as when a process is killed."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise CheckpointError(
            f"what processes had read could not be exchanged between them ({listed(map(repr, paths))}): {error}"
        ) from error


def _exchange_program(partition: ReadPartition) -> Callable[[jax.Array], jax.Array]:
    """The program that exchanges an array: the identity, apart from the padding of its parts."""
    shardings = [NamedSharding(_auto(partition.mesh), spec) for spec in partition.specs]
    axis, shape = partition.axis, partition.shape

    def cut(padded: jax.Array) -> jax.Array:
        groups = padded.reshape(*shape[:axis], partition.groups, partition.padded_rows, *shape[axis + 1 :])
        return jax.lax.slice_in_dim(groups, 0, partition.rows, axis=axis + 1).reshape(partition.shape)

    def exchange(parts: jax.Array) -> jax.Array:
        return _through(parts, shardings, cut if partition.padded_rows > partition.rows else None)

    return PROGRAMS.get(("exchange", partition), lambda: jax.jit(exchange, out_shardings=shardings[-1]))


def _auto(mesh: Mesh) -> Mesh:
    """The same devices with automatic axes, without settings of the user's own mesh."""
    return Mesh(mesh.devices, mesh.axis_names)


SHARED = 32 << 20  # bytes of small variables that a host, and each of its devices, holds at a time


@dataclasses.dataclass(frozen=True)
class Share:
    """Small variables whose bytes the processes read together."""

    items: Sequence[StreamItem]
    ranges: Sequence[tuple[ByteReader, int, int]]  # first byte and the byte after the last; disjoint, in file order

    @property
    def nbytes(self) -> int:
        """Bytes that all processes together read."""
        return sum(stop - start for _, start, stop in self.ranges)

    def arriving_nbytes(self) -> int:
        """Bytes that this process gets from others."""
        return self.nbytes - sum(stop - start for _, start, stop in self.own_ranges())

    def own_ranges(self) -> Iterator[tuple[ByteReader, int, int]]:
        """The part that this process reads."""
        each = -(-self.nbytes // jax.process_count())
        first = jax.process_index() * each
        for reader, start, stop in self.ranges:
            begin, end = max(start, start + first), min(stop, start + first + each)
            if begin < end:
                yield reader, begin, end
            first -= stop - start

    def read(self, stage: CollectiveScope) -> np.ndarray:
        """The bytes of all ranges, one after the other; a collective operation.

        Raises CheckpointError if they cannot be read or exchanged, in this or another process.
        """
        own = np.zeros(-(-self.nbytes // jax.process_count()), np.uint8)
        ranges, done = [*self.own_ranges()], 0
        with reading_ahead([(reader, np.array([[start, stop]])) for reader, start, stop in ranges]):
            for reader, start, stop in ranges:
                reader.read_into(start, own[done : done + stop - start])
                done += stop - start
        stage.meet()
        with _named(item.path for item in self.items):
            (everything,) = stage.together(lambda: [_everywhere(own)])
        return np.asarray(everything.addressable_data(0))


def shares(items: Iterable[StreamItem], replicas: str | None, limit: int) -> list[Share]:
    """Small variables of remote files, in the order of the items, in rounds of at most `limit` bytes."""
    found: dict[str, tuple[StreamItem, list[tuple[ByteReader, int, int]]]] = {}
    for item in items:
        mesh = item.sharding.mesh if isinstance(item.sharding, NamedSharding) else None
        processes = mesh_processes(mesh) if isinstance(mesh, Mesh) else np.zeros(1)
        # All processes run the programs, so a variable of only some of them is not shared.
        if len(np.unique(processes)) < jax.process_count():
            continue
        if is_shared(item.tensor, item.sharding, processes, replicas):
            needed = required_ranges(cast(LazyTensor, item.tensor), [whole_box(item.shape)])
            ranges = [(reader, *pair) for reader, pairs in needed for pair in pairs.tolist()]
            if 0 < sum(stop - start for _, start, stop in ranges) <= limit:
                found[item.path] = item, ranges
    nbytes = {path: sum(stop - start for _, start, stop in ranges) for path, (_, ranges) in found.items()}
    rounds: list[Share] = []
    for paths in grouped(nbytes, min(limit, SHARED)):
        order: dict[ByteReader, list[tuple[int, int]]] = {}
        for reader, start, stop in (each for path in paths for each in found[path][1]):
            order.setdefault(reader, []).append((start, stop))
        merged: list[tuple[ByteReader, int, int]] = []
        for reader, pairs in order.items():
            for start, stop in sorted(pairs):
                if merged and merged[-1][0] is reader and start <= merged[-1][2]:
                    start, stop = merged[-1][1], max(stop, merged.pop()[2])
                merged.append((reader, start, stop))
        rounds.append(Share([found[path][0] for path in paths], merged))
    return rounds


def shared(
    shares: Iterable[Share],
    read: Callable[[Sequence[StreamItem]], Generator[tuple[str, jax.Array]]],
    stage: CollectiveScope,
    timeline: Timeline,
) -> Generator[tuple[str, jax.Array]]:
    """Yields the (path, array) pairs of small variables, round by round.

    Args:
        shares: The rounds, the same in all processes.
        read: The stream of some items.
        stage: The stage of the processes, which meet before each round.
        timeline: Gets the time of the rounds.
    """
    for share in shares:
        with timeline.span("exchange"):
            data = share.read(stage)
        with holding(share.ranges, data), contextlib.closing(read(share.items)) as arriving:
            yield from arriving
        del data


def _everywhere(own: np.ndarray) -> jax.Array:
    """The bytes of all processes, in their order, on devices of each; a collective operation.

    `multihost_utils.process_allgather` would wait in it, so that nobody would notice a process that is killed.
    """
    mesh = process_mesh(jax.devices())
    with jax.set_mesh(mesh):  # the user's current mesh may differ
        parts = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("process")), own)
        everywhere = NamedSharding(mesh, PartitionSpec())
        return PROGRAMS.get(("replicated", mesh), lambda: jax.jit(_same, out_shardings=everywhere))(parts)


def _same(parts: jax.Array) -> jax.Array:
    return parts

"""Where the parts of arrays are on devices, and which process reads which.

Contains the boxes of a sharding, an array on devices as a source of tensors, the rules for host buffers that are given
to a device (`keeps`), and `divide`, by which each byte that several processes need is read by one of them.
`extras/sync/reshard` brings such parts together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from lazymodel._errors import LazyModelError
from lazymodel._tensors.boxes import Box, BoxKey, box_key, box_of, box_shape, intersect, shift, slabs
from lazymodel._tensors.buffers import ALIGNMENT, Workspace
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.convert import Steps, assign
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.stored import stored_itemsize
from lazymodel._tensors.tensor_source import TensorSource, View


class DeviceTensor(TensorSource):
    """An array on devices, of which this process may hold only a part.

    Attributes:
        complete: True if all of it is on this process's devices.
        owned: The boxes that this process writes if several processes hold the array: those of its first replicas.
    """

    def __init__(self, name: str, array: jax.Array) -> None:
        super().__init__(name, tuple(array.shape), np.dtype(array.dtype))
        self.array = array
        self.complete = array.is_fully_addressable
        self.owned: list[Box] = []
        self._shards: dict[BoxKey, Any] = {}
        for shard in array.addressable_shards:
            key = box_key(shard.index, self.shape)
            self._shards.setdefault(key, shard)
            if shard.replica_id == 0:
                self.owned.append(box_of(key))

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        filled = 0
        for key, shard in self._shards.items():
            common = intersect(box, box_of(key))
            if common is None:
                continue
            target = out[(*shift(common, box), ...)]
            filled += target.size
            within = shift(common, box_of(key))
            if on_host(shard.device):
                assign(target, np.asarray(shard.data)[(*within, ...)], steps)  # no copy
                continue
            data = shard.data
            if in_other_memory(shard.device, data.sharding.memory_kind):
                data = jax.device_put(data, SingleDeviceSharding(shard.device))  # where it can be sliced
            # Copies of chunks that die here: NumPy's copy of a whole shard would stay with the array.
            for chunk in slabs(target.shape, max(workspace.available // (2 * self.dtype.itemsize), 1)):
                start = [w.start + p.start for w, p in zip(within, chunk, strict=True)]
                with jax.enable_x64(True) if max(start, default=0) >= 2**31 else contextlib.nullcontext():
                    values = np.asarray(_slice(data, start, box_shape(chunk)))
                assign(target[(*chunk, ...)], values, steps)
        if filled < out.size:
            raise LazyModelError(
                f"{self.name!r}: a part of it is on the devices of another process, so it cannot be read here. With "
                "several processes, a function for saving may only use views, np.stack, np.concatenate and scalars"
            )


@functools.partial(jax.jit, static_argnums=2)
def _slice(array: jax.Array, start: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, start, shape)


# Memory of known platforms: a `"host"` platform uses the host's memory, and a buffer becomes the array's own; a
# platform with its `"own"` memory gets a copy. Other platforms are unknown: JAX passes NumPy arrays, with
# `may_alias=False` too, in a way that lets a runtime keep them (HostBufferSemantics::kImmutableZeroCopy of
# https://github.com/openxla/xla/blob/main/xla/pjrt/pjrt_client.h).
MEMORIES = {"cpu": "host", "gpu": "own", "cuda": "own", "rocm": "own", "tpu": "own"}


def on_host(device: Any) -> bool:
    """Returns True if a device uses the host's memory."""
    return MEMORIES.get(device.platform) == "host"


def keeps(device: Any, memory_kind: str | None) -> bool:
    """Returns True if an array may use the NumPy buffer from which it was made even after it is ready.

    If not, the buffer has been read completely by then, and may be overwritten. Before that it never may:
    `jax.device_put` returns before the transfer has begun.
    """
    return MEMORIES.get(device.platform) != "own" or in_other_memory(device, memory_kind)


def in_other_memory(device: Any, memory_kind: str | None) -> bool:
    """Returns True if a kind of memory is not the device's own, such as `"pinned_host"`; little is computed there."""
    return memory_kind is not None and memory_kind != device.default_memory().kind


class Layout(NamedTuple):
    """Where arrays for some boxes are in a buffer for all of them."""

    places: list[tuple[tuple[int, ...], int]]  # shape and first byte, which is aligned
    nbytes: int


def layout(boxes: Iterable[Box], itemsize: int) -> Layout:
    """The layout of a buffer for boxes."""
    places: list[tuple[tuple[int, ...], int]] = []
    end = 0
    for shape in map(box_shape, boxes):
        places.append((shape, end))
        nbytes = math.prod(shape) * itemsize
        end += nbytes + -nbytes % ALIGNMENT
    return Layout(places, end)


class Boxes:
    """Parts of an array that this process's devices hold. Made once for many variables; see `boxes_for`.

    Attributes:
        devices: For each distinct box, the devices that hold it.
        sizes: Elements of each of the `boxes`.
        on_host: True if all devices use the host's memory.
        keeps: True if an array may use the buffers from which it was made even after it is ready.
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]) -> None:
        self.devices: dict[BoxKey, list[Any]] = {}
        for device, index in cast(Any, sharding).addressable_devices_indices_map(shape).items():
            self.devices.setdefault(box_key(index, shape), []).append(device)
        self.boxes: list[Box] = [box_of(key) for key in self.devices]
        self.sizes = [math.prod(box_shape(box)) for box in self.boxes]
        everywhere = [device for devices in self.devices.values() for device in devices]
        self.on_host = all(map(on_host, everywhere))
        self.keeps = any(keeps(device, cast(Any, sharding).memory_kind) for device in everywhere)
        self._sharding, self._shape = sharding, shape
        self._numbers: dict[Any, int] = {}
        self._layouts: dict[int, Layout] = {}

    def layout(self, itemsize: int) -> Layout:
        """As the function `layout`, for all boxes."""
        if itemsize not in self._layouts:
            self._layouts[itemsize] = layout(self.boxes, itemsize)
        return self._layouts[itemsize]

    def array(self, shards: Sequence[np.ndarray], dtype: np.dtype[Any]) -> jax.Array:
        """The array with these values in its boxes. Devices that use the host's memory keep the buffers."""

        # On CPU, replicas share a shard's memory. That is safe: XLA never writes into borrowed memory, donated or not
        # (tests/core/materialize/test_stream.py checks this). One call for all devices is 7 × as fast as one each.
        def find(index: Any) -> np.ndarray:
            key = tuple([(part.start, part.stop) for part in index])
            if key not in self._numbers:
                self._numbers[key] = list(self.devices).index(box_key(index, self._shape))
            return shards[self._numbers[key]]

        return jax.make_array_from_callback(self._shape, self._sharding, find, dtype=dtype)


@functools.lru_cache(maxsize=4096)
def boxes_for(sharding: Sharding, shape: tuple[int, ...]) -> Boxes:
    """The boxes of a sharding. A model has few different ones, however many variables it has."""
    return Boxes(sharding, shape)


# Bytes of a variable below which every process reads it: a request for its file's neighbourhood is made anyway, while
# an exchange costs every process a program and a round over the network, which takes as long as reading this.
SMALL = 64 << 10
# Limit, in bytes per device, of the parts that wait for their exchange and of the memory for exchanging them. It is a
# tenth of a device's memory and enough to spend seconds on, so waiting for other processes between two groups costs
# nothing.
GROUP = 1 << 30
_PADDING = 1 / 16  # of what a group reads: how uneven shares may be before another axis is divided


@dataclasses.dataclass(frozen=True)
class ReadPartition:
    """A finer layout in which an array is read. Shares that do not divide evenly are padded to `each`."""

    mesh: Any  # a `Mesh` or `AbstractMesh`
    shape: tuple[int, ...]
    specs: tuple[PartitionSpec, ...]  # layouts from that one to the array's own; one collective between each two
    axis: int  # the axis that the members of a group divide
    groups: int  # parts along `axis` in the array's own layout
    members: tuple[str, ...]  # mesh axes that connect the devices of a group, in the order of their shares
    each: int  # indices of `axis` that a member reads
    box_elements: int  # elements that a device holds in the end
    row_elements: int  # elements of one index of `axis` that a member reads
    spent_elements: int  # elements that a device holds in addition: its part, and memory for exchanging it

    @property
    def rows(self) -> int:
        """Indices of `axis` that a group reads."""
        return self.shape[self.axis] // self.groups

    @property
    def padded_rows(self) -> int:
        return self.each * mesh_size(self.mesh, self.members)

    def own_elements(self) -> np.ndarray:
        """Elements that each device reads, by its position in the flattened mesh."""
        sizes = tuple(self.mesh.shape.values())
        places = dict(zip(self.mesh.axis_names, np.indices(sizes), strict=True))
        member = np.zeros(sizes, np.int64)
        for name in self.members:
            member = member * self.mesh.shape[name] + places[name]
        return np.clip(self.rows - member * self.each, 0, self.each).ravel() * self.row_elements

    def padded(self, tensor: LazyTensor) -> LazyTensor:
        """The tensor as it is read. Nothing is read for the padding."""
        if self.padded_rows == self.rows:
            return tensor
        shape = (*self.shape[: self.axis], self.padded_rows - self.rows, *self.shape[self.axis + 1 :])
        padding = np.broadcast_to(np.zeros((), tensor.dtype), shape)
        numpy: Any = np  # its functions accept lazy tensors, but its types do not
        parts = [each for part in numpy.split(tensor, self.groups, self.axis) for each in (part, padding)]
        return numpy.concatenate(parts, self.axis, dtype=tensor.dtype)


def divide(tensor: LazyTensor, sharding: Sharding, processes: np.ndarray) -> ReadPartition | None:
    """Divides a tensor among its holders. Returns None if each reads what it holds: if the tensor is small, if no two
    processes would read the same bytes, or if its devices are in no mesh or hold it in memory other than their own.

    The devices that hold a region divide it along an outer axis of the file, so that each reads one range of it. If
    regions are columns whose rows are so short that reading them would read the bytes of their neighbours too, all
    devices that hold some of the columns are one group, and divide whole rows.

    Args:
        tensor: The tensor to read, of the sharded array's shape.
        sharding: Its sharding.
        processes: The process of every device of its mesh, as an array of the mesh's shape.
    """
    if not isinstance(sharding, NamedSharding) or tensor.nbytes < SMALL:
        return None
    mesh, shape, kind = sharding.mesh, tensor.shape, sharding.memory_kind
    if in_other_memory(mesh.devices.flat[0], kind) if isinstance(mesh, Mesh) else "host" in (kind or ""):
        return None
    axes = spec_axes(sharding.spec, len(shape))
    read_by = tensor.source.readers() or (ByteReader,)
    call, gap = max(source.row_call for source in read_by), max(source.row_gap for source in read_by)

    def short(axis: int, parts: int) -> bool:
        """Returns True if runs of so many parts of an axis cannot be read without the bytes between them."""
        run = shape[axis] // parts * abs(tensor.addresses.strides[axis])
        return parts > 1 and run < call and run * (parts - 1) < gap

    first, *others = tensor.file_order()
    sizes = [mesh_size(mesh, names) for names in axes]
    spread = [axis for axis in others if short(axis, sizes[axis])]
    gathered = tuple(name for name in mesh.axis_names if not any(name in names for names in axes))
    members = (*gathered, *(name for axis in spread for name in axes[axis]))
    places, count = [mesh.axis_names.index(name) for name in members], mesh_size(mesh, members)
    holders = np.moveaxis(processes, places, range(-len(places), 0)).reshape(-1, count)
    if (holders == holders[:, :1]).all():
        return None
    found: list[tuple[float, int, int]] = []  # padding, axis and share of each axis that may be divided
    for axis in (first, *(axis for axis in others if axis not in spread and not short(axis, sizes[axis] * count))):
        rows = shape[axis] // sizes[axis]
        each = -(-rows // count)
        if axis == first:  # the chunks of a file are read whole
            each += -each % tensor.source.row_step
        found.append((each * count / rows - 1, axis, each))
    _, axis, each = next((one for one in found if one[0] <= _PADDING), min(found))
    now, specs = [*axes], [PartitionSpec(*axes)]
    now[axis] += gathered
    specs.insert(0, PartitionSpec(*now))
    for other in spread:  # the innermost members are the first to be spread
        now[axis], now[other] = now[axis] + now[other], ()
        specs.insert(0, PartitionSpec(*now))
    box = math.prod(extent // size for extent, size in zip(shape, sizes, strict=True))
    row = box // (shape[axis] // sizes[axis]) * math.prod(sizes[other] for other in spread)
    # As in XLA:CPU: a buffer for each operation, the last of which is rearranged into the result.
    spent = each * row * (1 + bool(spread) + mesh_size(mesh, gathered))
    return ReadPartition(mesh, tuple(shape), tuple(specs), axis, sizes[axis], members, each, box, row, spent)


def spec_axes(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension of an array."""
    entries = (entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec)
    return [*entries, *((),) * (ndim - len(spec))]


def check_replicas(replicas: str | None) -> None:
    """Raises LazyModelError if this is not a way of loading replicas."""
    if replicas not in ("read", "exchange", None):
        raise LazyModelError(f"expected replicas='read', 'exchange' or None, got {replicas!r}")


def is_exchanged(tensor: LazyTensor, replicas: str | None) -> bool:
    """Returns True if only one of several processes that hold a tensor reads it, as `materialize` documents it."""
    read_by = tensor.source.readers()
    wanted = replicas == "exchange" or (replicas is None and any(source.remote for source in read_by))
    return wanted and bool(read_by)


# Limit, in bytes, of a variable that is shared: every process gets all of it, also what it does not need.
_MOST_SHARED = 4 << 20


def is_shared(tensor: Any, sharding: Sharding, processes: np.ndarray, replicas: str | None) -> bool:
    """Returns True if processes read a remote tensor's bytes together, and all get all of them: if the gaps between
    the parts that a process would read of it are so short that they would be read too.

    Args:
        tensor: The tensor to read, of the sharded array's shape.
        sharding: Its sharding.
        processes: The process of every device of its mesh, as an array of the mesh's shape.
        replicas: As for `materialize`.
    """
    sources = tensor.source.readers() if isinstance(tensor, LazyTensor) else ()
    nbytes = int(tensor.size * stored_itemsize(tensor.source)) if sources else 0
    count = len(np.unique(processes))
    if count == 1 or not 0 < nbytes <= _MOST_SHARED or not is_exchanged(tensor, replicas):
        return False
    if not all(source.remote for source in sources):
        return False
    if (partition := divide(tensor, sharding, processes)) is not None:
        count = min(count, mesh_size(partition.mesh, partition.members))
        nbytes //= partition.groups
    return nbytes - nbytes // count < max(source.row_gap for source in sources)


def mesh_size(mesh: Any, names: Iterable[str]) -> int:
    """Number of devices along some axes of a mesh."""
    return math.prod(mesh.shape[name] for name in names)


def mesh_processes(mesh: Any) -> np.ndarray:
    """The process of each device of a mesh."""
    return np.array([device.process_index for device in mesh.devices.flat]).reshape(mesh.devices.shape)


def grouped(nbytes: Mapping[str, float], limit: float) -> Iterator[list[str]]:
    """Divides paths, in order, into groups of at most `limit` bytes; a path with more bytes is a group of its own."""
    group: list[str] = []
    together = 0.0
    for path, each in nbytes.items():
        if group and together + each > limit:
            yield group
            group, together = [], 0
        group.append(path)
        together += each
    if group:
        yield group


def needed_nbytes(source: Any, sharding: Sharding) -> int:
    """Bytes, as stored in files, of the distinct shards of a tensor in this process; 0 for an array in memory."""
    if not isinstance(source, View):
        return 0
    boxes = boxes_for(sharding, source.shape).boxes
    # Elements that are broadcast are stored once.
    elements = sum(math.prod(source.geometry(box).normalized().shape) for box in boxes)
    return int(elements * stored_itemsize(source.source))

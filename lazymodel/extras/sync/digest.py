"""Digests of values: the function `digest`, 64 bits for each array, on devices or in files, without moving anything.

The digest of an array is two sums modulo 2**32, over its elements, of what two functions make of an element's bits and
its flat index. So parts of an array add up in any order, and the result does not depend on how it is divided. On
devices, one program computes the sums of all shards that count, those of each box's first replica; files are read in
chunks, for which the same arithmetic runs on the CPU (NumPy takes several times as long). Only sums leave a device; a
thread that reads holds 4 MiB of values and 16 MiB of temporaries.

It finds accidents, and keeps out nobody: whoever wants to can make other values with the same digest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lazymodel._devices.collective import agreement
from lazymodel._errors import LazyModelError
from lazymodel._mapping.resolve import given_tensors, opened
from lazymodel._mapping.table import WeightMap, map_checkpoint
from lazymodel._programs.jaxprs import PROGRAMS, is_key, without_mesh
from lazymodel._remote.path import reading_ahead
from lazymodel._show.table import Column, Report, Table, Tabled, change_text, plain, shape_text
from lazymodel._show.text import folded_names, listed, plural
from lazymodel._tensors.boxes import Box, BoxKey, box_key, box_shape, c_strides, slabs
from lazymodel._tensors.buffers import Scratch, cores, parallel
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import DeviceTensor, in_other_memory
from lazymodel._tensors.tensor_source import fill, required_ranges

# Odd factors for the low 31 bits of the index and for the higher ones, what is added, and pairs of a shift and a factor
# that mix all bits, with a last shift (of C. Wellons' hash prospector, and of MurmurHash3). The first factors differ by
# 2 modulo 4, so that no two pairs of 32 bits and an index below 2**31 are alike to both functions.
_MIXES = (
    (0x9E3779B1, 0xC2B2AE3D, 0x243F6A88, ((16, 0x21F0AAAD), (15, 0xD35A2D97)), 15),
    (0x85EBCA77, 0x27D4EB2F, 0x13198A2E, ((16, 0x85EBCA6B), (13, 0xC2B2AE35)), 16),
)
_LOW = 31  # bits of the index that the first factor is for
_MASK = (1 << _LOW) - 1
_CHUNK = 4 << 20  # bytes of a tensor that a thread reads at once
_BLOCK = 1 << 16  # elements that are mixed at once, in the caches
_WORKSPACE = 16 << 20  # bytes of temporaries of a thread that reads
_TERMS = {"done": "digested", "given": "models differ", "hint": "Digest the same model in all processes"}


class DigestRow(NamedTuple):
    """What is known of an array: its shape, the name of its dtype, and its digest, 16 hexadecimal digits."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


class Digest(Tabled, dict[str, int]):
    """The digests of arrays: path → 64 bits. Two are equal if paths, shapes, dtypes and bits are.

    Attributes:
        rows: Path → shape, dtype and digest.

    Example:
        >>> found = lm.digest({"w": np.zeros((2, 3), "float32")})
        >>> found.to_dict()
        {'w': {'shape': [2, 3], 'dtype': 'float32', 'digest': 'd84d6e31292908ae'}}
        >>> found == lm.Digest.from_dict(found.to_dict())
        True
    """

    def __init__(self, rows: Mapping[str, DigestRow]) -> None:
        super().__init__({path: int(row.digest, 16) for path, row in rows.items()})
        self.rows = dict(rows)

    def __eq__(self, other: object) -> bool:
        return self.rows == other.rows if isinstance(other, Digest) else NotImplemented

    def diff(self, other: Digest) -> DigestDifference:
        """What differs; false, as a boolean, if nothing does."""
        both = {path: (row, other.rows[path]) for path, row in self.rows.items() if path in other.rows}
        mine, theirs = (tuple(path for path in each if path not in both) for each in (self, other))
        return DigestDifference(
            mine, theirs, {path: rows for path, rows in both.items() if rows[0] != rows[1]}, len(both)
        )

    def to_dict(self) -> dict[str, Any]:
        """Path → shape, dtype and digest, in types of JSON."""
        return plain(self.rows)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Digest:
        """The inverse of `to_dict`. Raises LazyModelError for anything else."""
        try:
            return cls(
                {path: DigestRow(tuple(row["shape"]), row["dtype"], row["digest"]) for path, row in found.items()}
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LazyModelError(f"expected what Digest.to_dict returns, found {reprlib.repr(found)}") from error

    def table(self) -> Table:
        """A row for each array."""
        columns = Column.names("array"), Column("digest"), Column("dtype"), Column("shape")
        cells = [(path, row.digest, row.dtype, shape_text(row.shape)) for path, row in self.rows.items()]
        return Table(f"digest of {plural(len(self), 'array')}", columns, cells)


@dataclasses.dataclass(frozen=True, repr=False)
class DigestDifference(Report):
    """What differs between two digests, a and b; true if anything does.

    Attributes:
        only_in_a, only_in_b: Paths that the other does not have.
        differing: Path → the rows of both, where shape, dtype or digest differ.
        compared: Number of paths that both have.
    """

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    differing: Mapping[str, tuple[DigestRow, DigestRow]]
    compared: int

    def __bool__(self) -> bool:
        return bool(self.only_in_a or self.only_in_b or self.differing)

    def to_dict(self) -> dict[str, Any]:
        """The result in types of JSON."""
        return {"same": not self, **super().to_dict()}

    def table(self) -> Table:
        """A row for arrays that differ, and whose paths differ only in numbers."""
        cells = [
            (path, change_text(a.dtype, b.dtype), change_text(shape_text(a.shape), shape_text(b.shape)))
            for path, (a, b) in self.differing.items()
        ]
        lines = [f"only in a: {listed(folded_names(self.only_in_a))}"] if self.only_in_a else []
        lines += [f"only in b: {listed(folded_names(self.only_in_b))}"] if self.only_in_b else []
        both = plural(self.compared, "array")
        title = f"{len(self.differing):,} of {both} that both have differ" if self else f"the same, {both}"
        return Table(title, (Column.names("array"), Column("dtype"), Column("shape")), cells, lines)


def digest(model: Any, mapping: WeightMap | Any = None, abstract: Any = None) -> Digest:
    """Digests of all arrays of a model or a checkpoint; equal for equal bits, wherever and however these are stored.

    They do not depend on sharding, mesh, number of processes, framework and format. Arrays on devices are read where
    they are, once each, however many devices hold them; files in chunks. This finds accidents, such as a wrong row, but
    is no cryptographic hash. If several processes share the arrays, all of them must call this, and all get the result.

    Args:
        model: A live model, any pytree of arrays, with paths as of `save`; a checkpoint, its path or its URL, quantized
            ones decoded; or an abstract model, whose initial values are computed chunk by chunk.
        mapping: None, or what `map_checkpoint` takes to give a checkpoint the names and layouts of a model.
        abstract: The model, abstract or live, that a `WeightMap` is for.

    Raises:
        LazyModelError: There are no arrays, one was deleted, or a process failed.
        CheckpointError: A tensor cannot be read, or the mapping does not match.

    Example:
        >>> lm.digest(model) == lm.digest("model.safetensors")
        True
        >>> bool(lm.digest(model).diff(lm.digest(abstract)))
        False
    """
    given = opened(model)
    tensors = given_tensors(given if mapping is None else map_checkpoint(given, mapping, abstract))
    if not tensors:
        raise LazyModelError(f"there are no arrays in what was given, {type(model)}")
    live = {
        path: tensor.source.array
        for path, tensor in tensors.items()
        if isinstance(tensor.source, DeviceTensor) and tensor.is_whole
    }
    found = digest_arrays(live).rows
    sums = _read_sums({path: tensor for path, tensor in tensors.items() if path not in live})
    return Digest({path: found[path] if path in live else _row(each, sums[path]) for path, each in tensors.items()})


def _row(array: Any, sums: Sequence[int]) -> DigestRow:
    digits = "".join(f"{each % (1 << 32):08x}" for each in sums)
    return DigestRow(tuple(array.shape), np.dtype(array.dtype).name, digits)


# The arithmetic -------------------------------------------------------------------------------------------------------


def _mixed(words: Sequence[jax.Array], low: Any, high: Any, counts: Any = None) -> jax.Array:
    """The two sums (`uint32[2]`) over elements of these 32-bit words and indices; where `counts`, if that is given."""
    mixed: list[Any] = []
    for factor, carry, value, rounds, last in _MIXES:
        state = low * np.uint32(factor) + (high * np.uint32(carry) + np.uint32(value))
        for word in words:
            state = state + word
            for shift, multiplier in rounds:
                state = (state ^ (state >> np.uint32(shift))) * np.uint32(multiplier)
            state = state ^ (state >> np.uint32(last))
        mixed.append(state if counts is None else jnp.where(counts, state, np.uint32(0)))
    # One reduction of both: XLA:CPU would compute and read everything twice for two.
    zeros = (np.uint32(0), np.uint32(0))
    axes = tuple(range(mixed[0].ndim))
    return jnp.stack(lax.reduce(tuple(mixed), zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), axes))


def _words(values: jax.Array) -> list[jax.Array]:
    """The bits of elements in words, in the order of a little-endian file."""
    if jnp.issubdtype(values.dtype, np.complexfloating):
        return [*_words(values.real), *_words(values.imag)]
    if values.dtype == np.bool_:
        return [values.astype(np.uint32)]
    bits = lax.bitcast_convert_type(values, jnp.dtype(f"uint{jax.dtypes.itemsize_bits(values.dtype)}"))
    upper = [(bits >> np.uint64(32)).astype(np.uint32)] if bits.dtype.itemsize == 8 else []
    return [bits.astype(np.uint32), *upper]


# On devices -----------------------------------------------------------------------------------------------------------


def digest_arrays(arrays: Mapping[str, jax.Array], *, agreed: bool = True) -> Digest:
    """The digests of arrays on devices. PRNG keys count as their data.

    Args:
        arrays: Path → array.
        agreed: True adds up what all processes have of arrays that they share, and all of them must call this. False
            only counts the shards of this process; of each box, the process that has its first replica.
    """
    arrays = {path: jax.random.key_data(array) if is_key(array.dtype) else array for path, array in arrays.items()}
    with agreement(arrays if agreed else {}, **_TERMS) as stage:
        started = {path: _started(arrays[path]) for path in sorted(arrays)}
        own = {path: np.asarray(sums, np.int64).reshape(-1, 2).sum(0).tolist() for path, sums in started.items()}
        every = iter(stage.added([each for sums in own.values() for each in sums]))
        # What is all in this process is its own: others may have other arrays under the same path.
        found = {
            path: own[path] if arrays[path].is_fully_addressable else both
            for path, both in zip(own, zip(every, every, strict=True), strict=True)
        }
    return Digest({path: _row(array, found[path]) for path, array in arrays.items()})


@without_mesh()
def _started(array: jax.Array) -> Any:
    """The sums of the shards that count here, which are being computed: `uint32[shards, 2]`."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0] if array.size else []
    if not shards:
        return ()
    data, devices, kind = (
        [shard.data for shard in shards],
        [shard.device for shard in shards],
        array.sharding.memory_kind,
    )
    if away := in_other_memory(devices[0], kind):
        data = [jax.device_put(each, SingleDeviceSharding(device)) for each, device in zip(data, devices, strict=True)]
    # The shards one after the other are an array of which they are the shards, on devices of this process alone.
    shape, wide = data[0].shape, array.size > 1 << _LOW
    sharding = NamedSharding(Mesh(np.array(devices), "shard"), PartitionSpec(*["shard"][: len(shape)]))
    joined = (len(data) * shape[0], *shape[1:]) if shape else ()
    values = jax.make_array_from_single_device_arrays(joined, sharding, data)
    strides = c_strides(array.shape, 1)
    starts = tuple(_start(box_key(shard.index, array.shape), strides) for shard in shards)
    key = ("digest", shape, array.dtype, array.shape, starts, sharding)
    with jax.enable_x64(wide or array.dtype.itemsize >= 8):
        sums = PROGRAMS.get(key, lambda: _program(array.shape, starts, sharding, wide))(values)
        return jax.block_until_ready(sums) if away else sums


def _start(key: BoxKey, strides: Sequence[int]) -> int:
    """The flat index of a box's first element."""
    return sum(first * stride for (first, _), stride in zip(key, strides, strict=True))


def _program(shape: tuple[int, ...], starts: Sequence[int], sharding: NamedSharding, wide: bool) -> Any:
    """The program for shards, at these flat indices, of an array of this shape; `wide` if it is large."""
    kind = np.uint64 if wide else np.uint32

    def sums(values: jax.Array) -> jax.Array:
        index: Any = jnp.array(starts, kind)[lax.axis_index("shard")]
        for axis, stride in enumerate(c_strides(shape, 1)):
            index = index + lax.broadcasted_iota(kind, values.shape, axis) * kind(stride)
        low, high = (index, 0) if not wide else (index & kind(_MASK), index >> kind(_LOW))
        return _mixed(_words(values), jnp.uint32(low), jnp.uint32(high))[None]

    specs: Any = {"in_specs": sharding.spec, "out_specs": PartitionSpec("shard")}
    return jax.jit(jax.shard_map(sums, mesh=sharding.mesh, check_vma=False, **specs))


# From files -----------------------------------------------------------------------------------------------------------


def _read_sums(tensors: Mapping[str, LazyTensor]) -> dict[str, tuple[int, int]]:
    """The sums of tensors that are read, or computed, in threads."""
    jobs = [
        (name, box)
        for name in sorted(tensors, key=lambda name: (tensors[name].file, tensors[name].offset))
        for box in slabs(tensors[name].shape, _CHUNK // tensors[name].itemsize)
    ]
    last = {name: number for number, (name, _) in enumerate(jobs)}
    scratch = Scratch(_WORKSPACE)
    found: dict[str, tuple[int, int]] = dict.fromkeys(tensors, (0, 0))
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names others only
        device = jax.local_devices()[0]

    def sums(job: tuple[str, Box]) -> list[int]:
        tensor, box, buffer = tensors[job[0]], job[1], scratch.buffer(_CHUNK)
        values = buffer[: math.prod(box_shape(box)) * tensor.itemsize].view(tensor.dtype).reshape(box_shape(box))
        fill(tensor, [box], [values], scratch.workspace)
        start = _start(box_key(box, tensor.shape), c_strides(tensor.shape, 1))
        numbers = np.array([start & _MASK, start >> _LOW, values.size], np.uint32)
        words = jax.device_put(buffer.view(f"u{min(tensor.itemsize, 4)}"), device)  # no copy on CPUs
        how = tensor.itemsize, jax.dtypes.itemsize_bits(tensor.dtype), tensor.size > 1 << _LOW
        return np.asarray(_of_chunk(words, numbers, *how)).tolist()  # waits: the next chunk goes into the same buffer

    ranges = [each for name, box in jobs for each in required_ranges(tensors[name], [box])]
    with reading_ahead(ranges), parallel(sums, jobs, cores(), "digest") as results:
        for number, ((name, _), both) in enumerate(zip(jobs, results, strict=True)):
            found[name] = found[name][0] + both[0], found[name][1] + both[1]
            if number == last[name]:
                tensors[name].source.release()
    return found


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _of_chunk(buffer: jax.Array, numbers: jax.Array, itemsize: int, bits: int, wide: bool) -> jax.Array:
    """The sums of a chunk at the start of a buffer; `numbers`: low and high bits of its flat index, and its size."""
    words, (low, high, size) = buffer.reshape(-1, max(itemsize // 4, 1)), numbers
    mask = np.uint32((1 << min(bits, 32)) - 1)

    def add(number: Any, total: jax.Array) -> jax.Array:
        block = lax.dynamic_slice_in_dim(words, number * _BLOCK, _BLOCK).astype(np.uint32) & mask
        place = lax.iota(np.uint32, _BLOCK) + number * np.uint32(_BLOCK)
        index, parts = low + place, [block[:, part] for part in range(words.shape[1])]
        lower, upper = (index & _MASK, high + (index >> _LOW)) if wide else (index, np.uint32(0))
        return total + _mixed(parts, lower, upper, place < size)

    return lax.fori_loop(np.uint32(0), (size + (_BLOCK - 1)) // _BLOCK, add, jnp.zeros(2, np.uint32))

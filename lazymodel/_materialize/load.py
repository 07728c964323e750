"""What a load reads, and how: in parts that processes exchange, shared, copied from devices, or simply streamed.

`publish_fingerprint` says what a process loads and initializes, so that all processes do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding

from lazymodel._abstract.variable import host_array, stays_on_host
from lazymodel._devices.collective import CollectiveScope, layout_of
from lazymodel._extras import extra
from lazymodel._mapping.resolve import LoadPlan
from lazymodel._materialize.exchange import exchanged, exchanges, shared, shares
from lazymodel._materialize.stream import StreamItem, in_file_order, read_items
from lazymodel._programs.jaxprs import as_keys
from lazymodel._show.progress import Timeline
from lazymodel._tensors.buffers import parallel
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.shards import DeviceTensor, boxes_for, check_replicas
from lazymodel._tensors.tensor_source import ArrayTensor, CompositeSource, TensorSource

_SHARED = 8  # the part of `max_host_memory` that may hold the bytes of small variables, which processes share
AHEAD = 128 << 20  # bytes of values that are not kept, read in a turn by a process: enough to keep files busy
_READERS = 8  # files that are sampled at a time: the work is waiting for a disk


def nbytes_here(array: Any, sharding: Sharding) -> int:
    """Bytes of all distinct shards that this process's devices hold of anything with a shape and a dtype."""
    return sum(boxes_for(sharding, tuple(array.shape)).sizes) * array.dtype.itemsize


class Reading:
    """What is read: `shares` and `items`, those with `exchanges` in parts; `moves` are copied from devices.

    Args:
        load: The sources of all values.
        tensors: Path → tensor of those that are read.
        budget: Bytes of the host's memory.
        replicas: As for `materialize`.
        kept: True if all values are kept: only then arrays are copied from device to device, many at a time.
    """

    def __init__(
        self, load: LoadPlan, tensors: Mapping[str, Any], budget: int, replicas: str | None, *, kept: bool
    ) -> None:
        check_replicas(replicas)
        self.load, self._budget = load, budget
        # Values that are not kept: others are computed from them.
        self._passing = {each.variable.path for each in load.model.conversions if each.variable.path in load.model}
        self._on_host = {path: tensor for path, tensor in tensors.items() if stays_on_host(load.model[path])}
        items = in_file_order(
            # Keys are read as their key data, whose trailing dimension no spec names.
            StreamItem(path, lazy(tensors[path], path), *variable.stored, load.shardings[path])
            for path, variable in load.model.items()
            if path in tensors and path not in self._on_host
        )
        live = [item for item in items if kept and isinstance(cast(LazyTensor, item.tensor).source, DeviceTensor)]
        self.moves = extra("device_moves")(live) if live else []
        moved = {move.path for move, _ in self.moves}
        items = [item for item in items if item.path not in moved]
        several = jax.process_count() > 1
        self.shares = shares(items, replicas, budget // _SHARED) if several else []
        together = {item.path for share in self.shares for item in share.items}
        items = [item for item in items if item.path not in together]
        self.exchanges = exchanges(items, replicas) if several else {}
        parts = {path: exchange.part for path, exchange in self.exchanges.items()}
        self.items = self._in_turns([parts.get(item.path, item) for item in items])

    def values(
        self,
        stage: CollectiveScope,
        timeline: Timeline,
        on_bytes: Callable[[int], None] | None = None,
        hold: Callable[[Callable[[], bool]], None] | None = None,
    ) -> Generator[tuple[str, Any]]:
        """Yields (path, value) of all that is read. Raises at once if something cannot be read within the budget.

        `on_bytes` and `hold` are those of the stream.
        """

        def read(items: Sequence[StreamItem], budget: int) -> Generator[tuple[str, jax.Array]]:
            return read_items(items, budget, on_bytes, hold)

        return self._values(read(self.items, self._budget), read, stage, timeline)

    def _values(
        self,
        arriving: Generator[tuple[str, jax.Array]],
        read: Callable[[Sequence[StreamItem], int], Generator[tuple[str, jax.Array]]],
        stage: CollectiveScope,
        timeline: Timeline,
    ) -> Generator[tuple[str, Any]]:
        def read_shared(items: Sequence[StreamItem]) -> Generator[tuple[str, jax.Array]]:
            return read(self._in_turns(items), self._budget - self._budget // _SHARED)  # the rest has the bytes

        copies: Iterable[tuple[str, jax.Array]] = extra("copied")(self.moves, stage) if self.moves else ()
        together = shared(self.shares, read_shared, stage, timeline)
        if self.exchanges:
            arriving = exchanged(arriving, self.exchanges, stage, timeline)
        with contextlib.closing(together), contextlib.closing(arriving):  # a failure here ends their threads at once
            for path, array in itertools.chain(copies, together, arriving):
                value = as_keys(array, self.load.model[path].dtype)
                del array  # only the caller holds it, so that it can be freed before the next one
                yield path, value
                del value
        for path, tensor in self._on_host.items():
            yield path, host_array(self.load.model[path], tensor)

    @property
    def streamed(self) -> list[StreamItem]:
        """All items of the stream, of which it reports every byte."""
        return [*self.items, *(item for share in self.shares for item in share.items)]

    def details(self) -> Iterator[str]:
        """The programs that copy arrays or exchange parts, in order: the same in all processes."""
        yield from (f"copy {move.path} {layout_of(array)}" for move, array in self.moves)
        yield from (f"share {share.nbytes} {[item.path for item in share.items]}" for share in self.shares)
        yield from (f"exchange {path} {exchange.partition}" for path, exchange in self.exchanges.items())

    @property
    def arriving_nbytes(self) -> int:
        """Bytes that the devices of this process get from others instead of files."""
        return sum(each.arriving_nbytes() for each in (*self.exchanges.values(), *self.shares))

    def _in_turns(self, items: Iterable[StreamItem]) -> list[StreamItem]:
        """The items, with turns by which few values that are not kept are on devices at once: those of two turns."""
        turn = taken = 0
        found: list[StreamItem] = []
        for item in items:
            if item.path in self._passing:
                nbytes = nbytes_here(item, item.sharding)
                turn, taken = (turn + 1, nbytes) if taken and taken + nbytes > AHEAD else (turn, taken + nbytes)
            found.append(dataclasses.replace(item, turn=turn))
        return found


def publish_fingerprint(
    stage: CollectiveScope, load: LoadPlan, programs: Iterable[str] = (), details: Iterable[str] = ()
) -> None:
    """Publishes what this process initializes (with its keys and seeds) and loads (tensors and their files).

    Args:
        programs: Names of the programs that are compiled meanwhile, for messages.
        details: Further texts that must be equal in all processes, in order; not computed for a single process.
    """
    stage.outcome = f"load {len(load.sources)} variables and initialize {len(load.initialized)}"
    if load.initialized:
        drawn = zlib.crc32(b"".join(_content(each) for recipe in load.recipes for each in recipe.inputs))
        stage.outcome += f" (of keys and seeds {drawn:08x}): {', '.join(load.initialized)}"
    if jax.process_count() == 1:
        return
    loaded: list[str] = []
    files: dict[ByteReader, None] = {}
    for path, value in sorted(load.sources.items()):
        parts = [value] if not isinstance(value, LazyTensor) else [*_origins(value.source)]
        files |= dict.fromkeys(part.origin for part in parts if isinstance(part, ByteReader))
        content = b"".join(map(_content, parts)).hex()
        loaded.append(f"{path} {getattr(value, 'dtype', '')} {np.shape(value)} {getattr(value, 'offset', 0)} {content}")
    with parallel(lambda file: file.fingerprint(), files, _READERS, "fingerprint") as contents:
        stage.files = [(file.path, content) for file, content in zip(files, contents, strict=True)]
    stage.outcome += "".join(f", compile {program}" for program in programs)
    stage.details = "\n".join([*loaded, *details])


def _origins(source: TensorSource) -> Iterator[Any]:
    """The files and arrays in memory that a tensor consists of."""
    if isinstance(source, ArrayTensor):
        yield source.array
    elif isinstance(source, CompositeSource):
        for piece in source.pieces:
            yield from _origins(piece.source)
    else:
        yield from source.readers()


def _content(value: object) -> bytes:
    """A hash of an array in memory."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return b""
    return zlib.crc32(cast(Any, np.ascontiguousarray(value).reshape(-1).view(np.uint8))).to_bytes(4)

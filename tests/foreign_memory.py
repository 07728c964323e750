"""CPU devices that count as devices with memory of their own, to which transfers are as late as they may be.

JAX hands an aligned NumPy buffer over to a CPU device without a copy, so what it does on accelerators cannot be seen on
one. Here an array's memory is filled with nonsense when `jax.device_put` or `jax.make_array_from_callback` returns, and
gets its values from the NumPy buffer only in a thread, at the last moment: when something waits for them with
`jax.block_until_ready`, or by whim, in random order and in two halves. Whoever reads the array without having waited
finds the nonsense; a buffer that was written, given back or moved in between is told of in `wrongs`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from lazymodel._tensors.buffers import empty_aligned
from lazymodel._tensors.shards import MEMORIES, boxes_for

_NONSENSE = 0xA5


@contextlib.contextmanager
def foreign_memory(seed: int = 0) -> Iterator[Transfers]:
    """CPU devices have memory of their own until the end of the `with` block; at its end no buffer may be wrong."""
    with Transfers(seed) as transfers, pytest.MonkeyPatch.context() as patch:
        patch.setitem(MEMORIES, "cpu", "own")
        boxes_for.cache_clear()
        put, ready = jax.device_put, jax.block_until_ready

        def device_put(x: Any, place: Any = None, **options: Any) -> Any:
            late = isinstance(x, np.ndarray) and isinstance(place, SingleDeviceSharding)
            return transfers.start(x, put, place) if late else put(x, place, **options)

        def make_array(shape: Any, sharding: Any, callback: Callable[[Any], Any], dtype: Any = None) -> jax.Array:
            indices = sharding.addressable_devices_indices_map(shape)
            places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in indices]
            pairs = zip(indices.values(), places, strict=True)
            parts = [transfers.start(callback(index), put, place) for index, place in pairs]
            return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)

        def block_until_ready(tree: Any) -> Any:
            transfers.wait(tree)
            return ready(tree)

        patch.setattr("lazymodel._materialize.stream.empty_aligned", transfers.buffers.empty)
        patch.setattr(jax, "device_put", device_put)
        patch.setattr(jax, "make_array_from_callback", make_array)
        patch.setattr(jax, "block_until_ready", block_until_ready)
        try:
            yield transfers
        finally:
            boxes_for.cache_clear()
    assert not transfers.wrongs, transfers.wrongs[0]


@contextlib.contextmanager
def unknown_memory() -> Iterator[None]:
    """CPU devices are of a platform that nothing is known of until the end of the `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(MEMORIES, "cpu")
        boxes_for.cache_clear()
        try:
            yield
        finally:
            boxes_for.cache_clear()


class Buffers:
    """The buffers that a stream allocates: how many, and bytes of those that anybody holds at a time, at most."""

    def __init__(self) -> None:
        self.made = self.nbytes = self.most_nbytes = 0
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """As `empty_aligned`, counted."""
        buffer = empty_aligned(shape, dtype)
        base = buffer
        while isinstance(base.base, np.ndarray):
            base = base.base
        weakref.finalize(base, self._add, -buffer.nbytes)
        self.made += 1
        self._add(buffer.nbytes)
        return buffer

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.most_nbytes = max(self.most_nbytes, self.nbytes)


@dataclasses.dataclass(eq=False)
class _Transfer:
    values: np.ndarray  # the buffer that is read, kept alive as JAX does
    array: jax.Array  # whose memory is written
    expected: bytes  # what the buffer held when the transfer started
    whole: Callable[[np.ndarray], jax.Array]  # an array of values, at once
    error: Exception | None = None
    done: bool = False


class Transfers:
    """Those that were started and are not done, and a thread that does them.

    Attributes:
        started: How many there were.
        most_nbytes: Bytes of the NumPy buffers of those that were under way at a time, at most, each counted once.
        buffers: The NumPy buffers that the stream made.
        wrongs: What happened to buffers that must not have.
        held: Whether none is done before someone waits for it.
        on_start: Called with the number of each before it starts; what it raises, starting it raises.
        on_read: Called with how many were done when one has read its first half; what it raises, waiting raises.
    """

    def __init__(self, seed: int) -> None:
        self.started = self.most_nbytes = self.done = 0
        self.buffers = Buffers()
        self.wrongs: list[str] = []
        self.held = False
        self.on_start: Callable[[int], object] = lambda number: None
        self.on_read: Callable[[int], object] = lambda number: None
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._pending: list[_Transfer] = []
        self._by_address: dict[int, _Transfer] = {}  # those that are pending or have failed
        self._waiting = self._whims = 0
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="late-transfers", daemon=True)

    def __enter__(self) -> Transfers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def under_way(self) -> int:
        """How many are."""
        return len(self._pending)

    def start(self, values: np.ndarray, put: Callable[..., jax.Array], place: SingleDeviceSharding) -> jax.Array:
        """An array that will have these values."""
        self.on_start(self.started)
        if not values.size:
            return put(values, place)
        array = put(np.zeros(values.shape, values.dtype), place).block_until_ready()
        address = array.unsafe_buffer_pointer()
        ctypes.memset(address, _NONSENSE, _device_nbytes(values))
        with self._changed:
            self.started += 1
            transfer = _Transfer(values, array, values.tobytes(), lambda values: put(values, place))
            self._pending.append(transfer)
            self._by_address[address] = transfer
            buffers = {each.values.ctypes.data: each.values.nbytes for each in self._pending}
            self.most_nbytes = max(self.most_nbytes, sum(buffers.values()))
            if not self.held and self._random.random() < 0.3:
                self._whims += 1
                self._changed.notify_all()
        return array

    def wait(self, tree: Any) -> None:
        """Waits for all arrays of a tree; raises what a transfer raised."""
        for leaf in jax.tree.leaves(tree):
            if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
                continue
            for shard in leaf.addressable_shards:
                with self._changed:
                    transfer = self._by_address.get(shard.data.unsafe_buffer_pointer())
                    if transfer is None:
                        continue
                    self._waiting += 1
                    self._changed.notify_all()
                    self._changed.wait_for(lambda transfer=transfer: transfer.done)
                    self._waiting -= 1
                    if transfer.error is not None:
                        raise transfer.error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or (self._pending and (self._waiting or self._whims)))
                if self._ended:
                    return
                self._whims = max(self._whims - 1, 0)
                transfer = self._random.choice(self._pending)
            try:
                self._copy(transfer)
            except Exception as error:
                transfer.error = error
            with self._changed:
                self._pending.remove(transfer)
                if transfer.error is None:
                    del self._by_address[transfer.array.unsafe_buffer_pointer()]
                transfer.values = np.empty(0)  # nobody holds the buffer now
                transfer.done = True
                self.done += 1
                self._changed.notify_all()
            del transfer

    def _copy(self, transfer: _Transfer) -> None:
        values, half = transfer.values, len(transfer.expected) // 2
        first = values.tobytes()[:half]
        self.on_read(self.done)
        read = first + values.tobytes()[half:]
        if read != transfer.expected:
            self.wrongs.append(f"a buffer {values.dtype}{values.shape} was written before a transfer had read it")
        address, size = transfer.array.unsafe_buffer_pointer(), _device_nbytes(values)
        if size == len(read):
            ctypes.memmove(address, read, size)
        else:
            whole = transfer.whole(np.frombuffer(read, values.dtype).reshape(values.shape)).block_until_ready()
            ctypes.memmove(address, whole.unsafe_buffer_pointer(), size)


def _device_nbytes(values: np.ndarray) -> int:
    """Bytes of an array on a device, which has several elements of less than a byte in one."""
    return -(-values.size * bits(values.dtype) // 8)


def bits(dtype: np.dtype[Any]) -> int:
    """Bits of an element that count."""
    if dtype.kind in "biufc":
        return 8 * dtype.itemsize
    return (ml_dtypes.iinfo if jax.numpy.issubdtype(dtype, np.integer) else ml_dtypes.finfo)(dtype).bits

"""Shards that are larger than the host memory there is: they come to their devices in bands, and are joined there."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_of, box_shape, intersect, shift, slabs, unshift
from lazymodel._tensors.buffers import Workspace, empty_aligned
from lazymodel._tensors.fill import fill
from lazymodel._tensors.leaves import Part, View
from lazymodel._tensors.shards import in_other_memory


def band_parts(
    tensor: View,
    places: Mapping[BoxKey, Sequence[SingleDeviceSharding]],
    nbytes: int,
    done: Callable[[dict[BoxKey, list[jax.Array]]], None],
) -> list[Part]:
    """Parts that each fill a band of the region of some boxes, and put it where it belongs on the devices.

    Bands, of at most `nbytes`, go along the file's outermost axis, so that what is one pass over the file stays one.
    `done` is called by the last part with the shards of each box.
    """
    boxes = {key: box_of(key) for key in places}
    region = bounding(list(boxes.values()))
    order = tensor.box(region).file_order()
    extents = box_shape(region)
    pieces = list(slabs(tuple(extents[axis] for axis in order), max(nbytes // tensor.itemsize, 1)))
    assembly = _Assembly(places, tensor.dtype)
    last = threading.Lock()
    left = len(pieces)

    def run(workspace: Workspace, piece: Box) -> None:
        nonlocal left
        band = unshift(tuple(piece[order.index(axis)] for axis in range(len(piece))), region)
        wanted = {key: common for key, box in boxes.items() if (common := intersect(box, band)) is not None}
        outs = [empty_aligned(box_shape(common), tensor.dtype) for common in wanted.values()]
        fill(tensor, list(wanted.values()), outs, workspace)
        corners = [shift(common, boxes[key]) for key, common in wanted.items()]
        assembly.put(dict(zip(wanted, zip(outs, corners, strict=True), strict=True)))
        with last:
            left -= 1
            if left:
                return
        done(assembly.shards())

    size = tensor.itemsize
    return [Part(math.prod(box_shape(piece)) * size, functools.partial(run, piece=piece)) for piece in pieces]


class _Assembly:
    """Shards that come to their devices in pieces, from any thread."""

    def __init__(self, places: Mapping[BoxKey, Sequence[SingleDeviceSharding]], dtype: np.dtype[Any]) -> None:
        self._lock, self._places, self._dtype = threading.Lock(), places, dtype
        # As integers: XLA may move small floats through wider ones, which changes signalling NaNs.
        self._bits = dtype if dtype.kind in "biuc" else np.dtype(f"u{dtype.itemsize}")
        # In the devices' own memory: elsewhere nothing can be put together.
        self._joined = {key: [_own(place) for place in where] for key, where in places.items()}
        self._buffers = {
            key: [_zeros(box_shape(box_of(key)), self._bits, place) for place in where]
            for key, where in self._joined.items()
        }

    def put(self, pieces: Mapping[BoxKey, tuple[np.ndarray, Box]]) -> None:
        """Puts a piece of each shard where it belongs in it; all are read completely when this returns."""
        # All of them start before any is waited for.
        put = {
            key: [copy_to(place, piece.view(self._bits)) for place in self._joined[key]]
            for key, (piece, _) in pieces.items()
        }
        jax.block_until_ready(put)
        with self._lock:
            for key, (_, corner) in pieces.items():
                buffers = self._buffers[key]
                for number, piece in enumerate(put[key]):
                    buffers[number] = _updated(buffers[number], piece, corner)
            jax.block_until_ready([self._buffers[key] for key in pieces])

    def shards(self) -> dict[BoxKey, list[jax.Array]]:
        """All of them, complete."""
        return {
            key: [
                jax.device_put(_as_dtype(buffer, self._dtype), place)  # which is there already, but for other memory
                for buffer, place in zip(self._buffers.pop(key), where, strict=True)
            ]
            for key, where in self._places.items()
        }


def copy_to(place: SingleDeviceSharding, values: np.ndarray) -> jax.Array:
    """A copy on a device that is no host; when it is ready, and `keeps` denies it, `values` may be written again."""
    return jax.device_put(values, place)


def _own(place: SingleDeviceSharding) -> SingleDeviceSharding:
    (device,) = place.device_set
    return SingleDeviceSharding(device) if in_other_memory(device, place.memory_kind) else place


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=sharding)()


def _updated(buffer: jax.Array, piece: jax.Array, corner: Box) -> jax.Array:
    long = any(part.start >= 2**31 for part in corner)
    with jax.enable_x64(True) if long else contextlib.nullcontext():
        return _update(buffer, piece, [(np.int64 if long else np.int32)(part.start) for part in corner])


@functools.partial(jax.jit, donate_argnums=0)
def _update(buffer: jax.Array, piece: jax.Array, corner: list[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, piece, corner)


def _as_dtype(buffer: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The same bits as elements of a dtype; those of less than a byte are in the lower bits of one."""
    if buffer.dtype == dtype:
        return buffer
    info = ml_dtypes.iinfo if jax.numpy.issubdtype(dtype, np.integer) else ml_dtypes.finfo
    return _bitcast(buffer, dtype) if info(dtype).bits >= 8 else _narrowed(buffer, dtype, info(dtype).bits)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _bitcast(buffer: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(buffer, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _narrowed(buffer: jax.Array, dtype: Any, bits: int) -> jax.Array:
    values = (buffer & np.uint8(2**bits - 1)).astype(f"uint{bits}")
    return jax.lax.bitcast_convert_type(values, dtype)

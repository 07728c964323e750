"""Shards that are larger than the host memory there is: they come to their devices in bands, and are joined there."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_of, box_shape, intersect, shift, slabs, unshift
from lazymodel._tensors.buffers import Workspace, empty_aligned
from lazymodel._tensors.fill import fill
from lazymodel._tensors.leaves import Part, View


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
        for (key, common), out in zip(wanted.items(), outs, strict=True):
            assembly.put(key, out, shift(common, boxes[key]))
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
        self._buffers = {
            key: [_zeros(box_shape(box_of(key)), self._bits, place) for place in where] for key, where in places.items()
        }

    def put(self, key: BoxKey, piece: np.ndarray, corner: Box) -> None:
        """Puts a piece where it belongs in a shard; `piece` is read completely when this returns."""
        start = [np.int32(part.start) if part.start < 2**31 else np.int64(part.start) for part in corner]
        buffers = self._buffers[key]
        for number, place in enumerate(self._places[key]):
            put = copy_to(place, piece.view(self._bits))
            jax.block_until_ready(put)
            with self._lock:
                buffers[number] = _update(buffers[number], put, start)
                jax.block_until_ready(buffers[number])

    def shards(self) -> dict[BoxKey, list[jax.Array]]:
        """All of them, complete."""
        if self._bits == self._dtype:
            return self._buffers
        return {key: [_bitcast(buffer, self._dtype) for buffer in buffers] for key, buffers in self._buffers.items()}


def copy_to(place: SingleDeviceSharding, values: np.ndarray) -> jax.Array:
    """A copy on a device that is no host; when it is ready, `values` may be written again."""
    return jax.device_put(values, place)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=sharding)()


@functools.partial(jax.jit, donate_argnums=0)
def _update(buffer: jax.Array, piece: jax.Array, corner: list[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, piece, corner)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _bitcast(buffer: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(buffer, dtype)

"""Shards larger than the available host memory: they are sent to their devices in chunks, and joined there."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from lazymodel._tensors.boxes import Box, BoxKey, bounding, box_of, box_shape, intersect, shift, slabs, unshift
from lazymodel._tensors.buffers import Workspace, empty_aligned
from lazymodel._tensors.fill import fill
from lazymodel._tensors.shards import in_other_memory
from lazymodel._tensors.tensor_source import Part, View


def chunk_parts(
    tensor: View,
    places: Mapping[BoxKey, Sequence[SingleDeviceSharding]],
    nbytes: int,
    done: Callable[[dict[BoxKey, list[jax.Array]]], None],
) -> list[Part]:
    """Parts that each fill a chunk of the region around some boxes, and copy it to its place on the devices.

    Chunks, of at most `nbytes`, run along the file's outermost axis, so that the file is still read in one pass.
    The last part calls `done` with the shards of each box.
    """
    boxes = {key: box_of(key) for key in places}
    region = bounding(list(boxes.values()))
    order = tensor.box(region).file_order()
    extents = box_shape(region)
    chunks = list(slabs(tuple(extents[axis] for axis in order), max(nbytes // tensor.itemsize, 1)))
    dtype, lock, left = tensor.dtype, threading.Lock(), len(chunks)
    # As integers: XLA may move small floats through wider ones, which changes signalling NaNs.
    bits = dtype if dtype.kind in "biuc" else np.dtype(f"u{dtype.itemsize}")
    # In the devices' own memory: arrays cannot be updated in other kinds of memory.
    own = {key: [_own(place) for place in where] for key, where in places.items()}
    buffers = {key: [_zeros(box_shape(boxes[key]), bits, place) for place in where] for key, where in own.items()}

    def run(workspace: Workspace, part: Box) -> None:
        nonlocal left
        chunk = unshift(tuple(part[order.index(axis)] for axis in range(len(part))), region)
        regions = {key: common for key, box in boxes.items() if (common := intersect(box, chunk)) is not None}
        outs = [empty_aligned(box_shape(common), dtype) for common in regions.values()]
        fill(tensor, list(regions.values()), outs, workspace)
        # All transfers start before any is waited for, and have read their buffers completely when this returns.
        pairs = zip(regions, outs, strict=True)
        put = {key: [copy_to(place, out.view(bits)) for place in own[key]] for key, out in pairs}
        jax.block_until_ready(put)
        with lock:
            for key, common in regions.items():
                corner = shift(common, boxes[key])
                joined = zip(buffers[key], put[key], strict=True)
                buffers[key] = [_updated(buffer, values, corner) for buffer, values in joined]
            jax.block_until_ready([buffers[key] for key in regions])
            left -= 1
            if left:
                return
        # The shards are complete, except for those in another kind of memory.
        shards = {key: zip(buffers.pop(key), where, strict=True) for key, where in places.items()}
        done({key: [jax.device_put(_as(each, dtype), place) for each, place in pairs] for key, pairs in shards.items()})

    return [Part(math.prod(box_shape(chunk)) * tensor.itemsize, functools.partial(run, part=chunk)) for chunk in chunks]


def copy_to(place: SingleDeviceSharding, values: np.ndarray) -> jax.Array:
    """A copy on a device other than the host; when it is ready and `keeps` is False, `values` may be overwritten."""
    return jax.device_put(values, place)


def _own(place: SingleDeviceSharding) -> SingleDeviceSharding:
    (device,) = place.device_set
    return SingleDeviceSharding(device) if in_other_memory(device, place.memory_kind) else place


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: SingleDeviceSharding) -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=sharding)()


def _updated(buffer: jax.Array, chunk: jax.Array, corner: Box) -> jax.Array:
    long = any(part.start >= 2**31 for part in corner)
    with jax.enable_x64(True) if long else contextlib.nullcontext():
        return _update(buffer, chunk, [(np.int64 if long else np.int32)(part.start) for part in corner])


@functools.partial(jax.jit, donate_argnums=0)
def _update(buffer: jax.Array, chunk: jax.Array, corner: list[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, chunk, corner)


def _as(buffer: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The same bits as elements of a dtype; elements of less than a byte are in the lower bits of a byte."""
    if buffer.dtype == dtype:
        return buffer
    bits = jax.dtypes.itemsize_bits(dtype)
    # A smaller result cannot reuse the memory of its argument.
    return jax.jit(_recast, donate_argnums=0 if bits >= 8 else (), static_argnums=(1, 2))(buffer, dtype, bits)


def _recast(buffer: jax.Array, dtype: Any, bits: int) -> jax.Array:
    return jax.lax.bitcast_convert_type(buffer if bits >= 8 else buffer.astype(f"uint{bits}"), dtype)

"""Bytes that an array takes on a device: elements of less than a byte, and the tiles of TPUs, by arithmetic.

A TPU keeps an array in tiles of 128 columns and of 1, 2, 4 or 8 rows. Its compiler takes as columns and rows the two
dimensions that leave the fewest bytes unused, and fills both up; arrays in its host's memory have the same tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from lazymodel._devices.hardware import tpu_generation

_COLUMNS, _ROWS = 128, 8
# Up to v3 a tile has at least 1,024 bytes, and no element less than one; since v4 it has 512, and elements are packed.
_EARLY = ("v2", "v3")
_TILE_NBYTES, _EARLY_TILE_NBYTES = 512, 1024


def element_bits(dtype: Any, device: Any) -> int:
    """Bits that an element takes. XLA packs elements of less than a byte on GPUs and TPUs, and not on CPUs."""
    return 8 * dtype.itemsize if device is None else _element_bits(dtype, device.platform, device.device_kind)


@functools.lru_cache(maxsize=1024)  # plans ask several times for each variable
def _element_bits(dtype: Any, platform: str, kind: str) -> int:
    packed = platform != "cpu" and not _is_early(kind)
    return jax.dtypes.itemsize_bits(dtype) if packed else 8 * dtype.itemsize


def packed_nbytes(shape: Sequence[int], dtype: Any, device: Any) -> int:
    """Bytes of an array on a device, without padding."""
    return -(-math.prod(shape) * element_bits(dtype, device) // 8)


def array_nbytes(shape: Sequence[int], dtype: Any, device: Any, order: Sequence[int] | None = None) -> int:
    """Bytes that an array takes on a device, with padding.

    Args:
        shape: Its shape, or that of a device's shard.
        dtype: A NumPy dtype, not one of PRNG keys.
        device: A `jax.Device`, or an abstract one with `platform` and `device_kind`; None if it is unknown.
        order: Its dimensions from major to minor; None is the compiler's choice.
    """
    return packed_nbytes(tiled_shape(tuple(shape), dtype, device, order), dtype, device)


def tiled_shape(shape: tuple[int, ...], dtype: Any, device: Any, order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The shape that takes the same bytes without padding; of a TPU's vector or scalar, its elements as a vector."""
    if device is None or device.platform != "tpu" or 0 in shape:
        return shape
    tile = _EARLY_TILE_NBYTES if _is_early(device.device_kind) else _TILE_NBYTES
    # Elements of 64 bits are two arrays of 32.
    least = 8 * tile // (_COLUMNS * min(element_bits(dtype, device), 32))
    return _tiled(shape, least, None if order is None else tuple(order))


@functools.lru_cache(maxsize=4096)
def _tiled(shape: tuple[int, ...], least: int, order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape filled up to tiles of at least so many rows."""
    if len(shape) < 2:
        rows = -(-math.prod(shape) // _COLUMNS)
        return (_up(rows, _rows(rows, least)) * _COLUMNS,)

    def filled(rows: int, columns: int, least: int = least) -> tuple[int, ...]:
        units = {rows: _rows(shape[rows], least), columns: _COLUMNS}
        return tuple(_up(size, units.get(place, 1)) for place, size in enumerate(shape))

    if order is not None:
        return filled(*order[-2:])
    places = range(len(shape))[::-1]
    pairs = [(rows, columns) for columns in places for rows in places if rows != columns]
    # The compiler chooses as if the 16 rows that elements of two bits need were 8.
    return filled(*min(pairs, key=lambda pair: math.prod(filled(*pair, min(least, _ROWS)))))


def _rows(size: int, least: int) -> int:
    """Rows of a tile: the power of two that holds a dimension, within limits."""
    return max(least, min(_ROWS, 1 << (size - 1).bit_length()))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@functools.lru_cache(maxsize=64)
def _is_early(kind: str) -> bool:
    generation = tpu_generation(kind)
    return generation is not None and generation.name in _EARLY

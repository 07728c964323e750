"""Arrays on devices as lazy tensors, of which a process may hold only a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._file_source import Convert, Workspace, assign, slabs
from lazymodel._geometry import Box, box_shape, intersect, shift
from lazymodel._lazy_tensor import LazyTensor, Leaf, lazy

_jax = cast(Any, jax)  # parts of JAX's own annotations are incomplete


class DeviceLeaf(Leaf):
    """An array on devices, of which this process may hold only a part.

    Attributes:
        array: The array.
        complete: Whether all of it is on this process's devices.
        owned: The boxes that this process is to write where several hold the array: those of its first replicas.
    """

    def __init__(self, name: str, array: jax.Array) -> None:
        self.name, self.file, self.offset, self.array = name, "", 0, array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.complete = array.is_fully_addressable
        self._shards: dict[Any, tuple[Box, Any]] = {}
        self.owned: list[Box] = []
        for shard in array.addressable_shards:
            key = tuple(part.indices(extent)[:2] for part, extent in zip(shard.index, self.shape, strict=True))
            box = tuple(slice(start, stop) for start, stop in key)
            if key not in self._shards:
                self._shards[key] = (box, shard)
            if shard.replica_id == 0:
                self.owned.append(box)

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        filled = 0
        for where, shard in self._shards.values():
            common = intersect(box, where) if self.shape else box
            if common is None:
                continue
            target = out[(*shift(common, box), ...)]
            filled += target.size
            within = shift(common, where)
            if shard.device.platform == "cpu":
                assign(target, np.asarray(shard.data)[(*within, ...)], steps)  # not a copy
                continue
            # Copies of pieces that die here: NumPy's copy of a whole shard would stay with the array.
            for piece in slabs(target.shape, max(workspace.room // (2 * self.dtype.itemsize), 1)):
                start = [w.start + p.start for w, p in zip(within, piece, strict=True)]
                values = np.asarray(_slice(shard.data, start, box_shape(piece)))
                assign(target[(*piece, ...)], values, steps)
        if filled < out.size:
            raise LazyModelError(
                f"{self.name!r}: a part of it is on another process's devices, so it cannot be read here. With several "
                "processes, a function for saving may only use views, np.stack, np.concatenate and scalars"
            )


def _sliced(array: jax.Array, start: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, start, shape)


_slice = _jax.jit(_sliced, static_argnums=2)


def _lazy_array(name: str, array: Any) -> LazyTensor:
    if not isinstance(array, jax.Array):
        return lazy(array, name)
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return LazyTensor(DeviceLeaf(name, array))

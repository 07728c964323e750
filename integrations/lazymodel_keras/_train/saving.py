"""Keras' own ways of saving, without a copy of the whole model on the host.

Keras asks every variable for a NumPy array. JAX makes one of the whole sharded array and keeps it for as long as that
lives: after `save_weights` the host holds the model once more. Here Keras is given stand-ins that know a variable's
shape and dtype, and where HDF5 would copy one's values, these are written from the shards, a slab at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import jax
import keras
import numpy as np

from lazymodel._save.hdf5 import reserving_properties
from lazymodel._tensors.boxes import slabs
from lazymodel._tensors.device import DeviceLeaf
from lazymodel._tensors.lazy import LazyTensor
from lazymodel_keras import _upstream
from lazymodel_keras._record.patches import SharedPatches
from lazymodel_keras._train import whole_saving

_SLAB = 16 << 20  # bytes written at a time


@contextlib.contextmanager
def streamed_saving() -> Generator[None]:
    """Within the block, what Keras and KerasHub save goes through the host's memory a few MiB at a time.

    For `model.save_to_preset`, `save_weights` (sharded too), `model.save` and callbacks that call them, such as
    `keras.callbacks.ModelCheckpoint` in a `fit` inside the block. What is in the files is the same. `model.save` of a
    `.keras` file needs the weights' size once more on disk, in a temporary file beside it.

    Each call replaces what is there completely or not at all: at every moment the path opens as what was saved before
    or as what is saved now, whatever fails or is killed, and other files in the folder stay. A second saver of the same
    path is refused. What a killed one left (`.NAME.lazymodel-saving` beside a path, `.lazymodel-saving` beside sharded
    weights) the next one removes. A preset, and a model saved with `zipped=False`, is a new folder in the place of the
    old one, with links to the files that it keeps, so it cannot be a mount point. The disk needs room for old and new.

    All of the model has to be on this process's devices; with several processes, save with `lazymodel.save` or
    `keras.callbacks.OrbaxCheckpoint`.

    Raises:
        LazyModelError: From the call that saves: a part of a variable is on another process's devices, another saver
            is at the same path, or the system refuses to write there.

    Example:
        >>> with lk.streamed_saving():
        ...     model.save_to_preset("saved")
        >>> lm.open_checkpoint("saved").nbytes == lm.open_checkpoint("preset").nbytes
        True
    """
    with _patches.needed():
        yield


class _StandIn(np.ndarray):
    """An array without values of its own, for a variable whose values are to be written from its shards."""

    tensor: LazyTensor

    @classmethod
    def of(cls, path: str, array: Any) -> _StandIn:
        tensor = array if isinstance(array, LazyTensor) else LazyTensor(DeviceLeaf(path, array))
        made = np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape).view(cls)
        made.tensor = tensor
        return made


class Reserved(NamedTuple):
    """Room in an HDF5 file for a tensor."""

    file: Path
    tensor: LazyTensor
    offset: int  # byte in the file


@contextlib.contextmanager
def reserving() -> Generator[list[Reserved]]:
    """Within the block, what `streamed_saving` would write from shards gets room in its file, and is in the list."""
    _thread.reserved = reserved = list[Reserved]()
    try:
        with _patches.needed():
            yield reserved
    finally:
        _thread.reserved = None


_patches = SharedPatches()
_thread = threading.local()


@_patches.register
def _install(undo: contextlib.ExitStack) -> None:
    whole_saving.install(undo, _patches)


@_patches.replacing(_upstream.SAVING_LIB, "is_memory_sufficient")
def _is_memory_sufficient(original: Any, model: Any) -> bool:
    return False  # Keras writes a .keras file's weights to disk first then


@_patches.replacing(_upstream.SAVING_LIB.H5IOStore, "__setitem__")
@_patches.replacing(_upstream.SAVING_LIB.ShardedH5IOStore, "__setitem__")
def _set(original: Any, self: Any, key: str, value: Any) -> None:
    array = value.value if isinstance(value, keras.Variable) else value
    if isinstance(array, jax.Array | LazyTensor):
        value = _StandIn.of(getattr(value, "path", "a value"), array)
    original(self, key, value)


@_patches.replacing(_upstream.BACKEND, "convert_to_numpy")
def _convert(original: Any, x: Any) -> Any:
    return x if isinstance(x, _StandIn) else original(x)


@_patches.replacing(h5py.Group, "create_dataset")
def _create(
    original: Any, self: Any, name: Any, shape: Any = None, dtype: Any = None, data: Any = None, **options: Any
) -> Any:
    if not isinstance(data, _StandIn):
        return original(self, name, shape, dtype, data, **options)
    reserved: list[Reserved] | None = getattr(_thread, "reserved", None)
    if reserved is not None:
        dataset = original(self, name, data.shape, data.dtype, dcpl=reserving_properties(), **options)
        if data.size:
            reserved.append(Reserved(Path(self.file.filename), data.tensor, dataset.id.get_offset()))
        return dataset
    dataset = original(self, name, data.shape, data.dtype, **options)
    for slab in slabs(data.shape, max(_SLAB // data.dtype.itemsize, 1)):
        dataset[slab] = np.asarray(data.tensor[slab])
    return dataset

"""Keras' own ways of saving, without a copy of the whole model on the host.

Keras asks every variable for a NumPy array. JAX makes one of the whole sharded array and keeps it with the array for as
long as that lives: after `save_weights` or `save_to_preset` the host holds the model once more, and `model.save` writes
to memory on top of that before it writes to disk. Here each variable is read from its shards into an array that dies
once it is written. The files are as Keras writes them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Generator
from typing import Any

import jax
import keras
import numpy as np

from lazymodel._lazy_tensor import LazyTensor
from lazymodel._save import DeviceLeaf
from lazymodel_keras import _upstream
from lazymodel_keras._recording import SharedPatches, replace

_thread = threading.local()


@contextlib.contextmanager
def streamed_saving() -> Generator[None, None, None]:
    """Within the block, what Keras and KerasHub save takes one variable at a time through the host's memory.

    For `model.save_to_preset`, `save_weights` (sharded too), `model.save` and callbacks that call them, such as
    `keras.callbacks.ModelCheckpoint` in a `fit` inside the block. What is in the files is the same. `model.save` of a
    `.keras` file needs the weights' size once more on disk, in a temporary file beside it.

    All of the model has to be on this process's devices; with several processes, save with `lazymodel.save` or
    `keras.callbacks.OrbaxCheckpoint`.

    Raises:
        LazyModelError: From the call that saves: a part of a variable is on another process's devices.

    Example:
        >>> with streamed_saving():
        ...     model.save_to_preset("folder")
    """
    before = getattr(_thread, "streams", False)
    _thread.streams = True
    try:
        with _patches.needed():
            yield
    finally:
        _thread.streams = before


def _install(undo: contextlib.ExitStack) -> None:
    for store in (_upstream.SAVING_LIB.H5IOStore, _upstream.SAVING_LIB.ShardedH5IOStore):
        replace(undo, store, "__setitem__", _setting(vars(store)["__setitem__"]))
    original = _upstream.SAVING_LIB.is_memory_sufficient

    @functools.wraps(original)
    def is_memory_sufficient(model: Any) -> bool:
        # Keras writes a .keras file's weights to disk first where memory does not suffice.
        return not _streams() and original(model)

    replace(undo, _upstream.SAVING_LIB, "is_memory_sufficient", is_memory_sufficient)


_patches = SharedPatches(_install)


def _streams() -> bool:
    return getattr(_thread, "streams", False)


def _setting(original: Any) -> Any:
    @functools.wraps(original)
    def setitem(self: Any, key: str, value: Any) -> None:
        original(self, key, _on_host(value) if _streams() else value)

    return setitem


def _on_host(value: Any) -> Any:
    """The values in an array that nothing else holds."""
    array = value.value if isinstance(value, keras.Variable) else value
    if not isinstance(array, jax.Array):
        return value
    return np.asarray(LazyTensor(DeviceLeaf(getattr(value, "path", "a value"), array)))

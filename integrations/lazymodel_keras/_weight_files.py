"""Weight files as Keras and KerasHub open them, handing out lazy tensors instead of arrays.

Keras reads `.weights.h5` through its `H5IOStore`; KerasHub's Hugging Face and timm converters read through
`safetensors.safe_open`. While a recording runs, the first returns lazy tensors and the second is replaced by
`LazySafeOpen`; both are otherwise as upstream has them, failures included, because loaders probe.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from lazymodel import CheckpointError, LazyTensor, open_checkpoint
from lazymodel.checkpoints import SafetensorsFile, lazy_dataset
from lazymodel_keras import _upstream


class LazySafeOpen:
    """What `safetensors.safe_open(path, framework="np")` returns, with lazy tensors."""

    def __init__(self, path: str, asked: set[str]) -> None:
        self._file = SafetensorsFile(path)
        self._asked = asked

    def __enter__(self) -> LazySafeOpen:
        return self

    def __exit__(self, *exception: object) -> None:
        pass  # the tensors that were handed out keep the file open for as long as they live

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._file.keys())

    def offset_keys(self) -> list[str]:
        """The names of the tensors; safetensors orders them by offset."""
        return self.keys()

    def metadata(self) -> dict[str, str]:
        """The file's own metadata."""
        return dict(self._file.metadata)

    def get_tensor(self, name: str) -> LazyTensor:
        """The tensor, unread."""
        if name not in self._file:
            # As safetensors does: converters probe for names and catch this.
            raise CheckpointError(f"{self._file.path} has no tensor {name!r}")
        self._asked.add(name)
        return self._file[name]

    # A slice of a lazy tensor is a lazy tensor.
    get_slice = get_tensor


def patch(undo: contextlib.ExitStack, active: Callable[[], Any]) -> None:
    """Installs the lazy ways of reading until `undo` closes; they act where `active()` is a recording."""
    from lazymodel_keras._recording import replace

    store = _upstream.WeightsStore
    original_getitem, original_open = store.__getitem__, store._get_h5_file

    def getitem(self: Any, key: str) -> Any:
        recording = active()
        if recording is None or self.mode != "r":
            return original_getitem(self, key)
        dataset = self._h5_entry_group[key]
        name = dataset.name.lstrip("/")
        if self.archive is not None:
            # An archive is read in place; one that was compressed again afterwards is read the stock way.
            with contextlib.suppress(CheckpointError):
                return open_checkpoint(self.archive.filename)[name]
            return original_getitem(self, key)
        path = os.fsdecode(self.h5_file.filename)
        if not os.path.exists(path):
            return original_getitem(self, key)  # a file held in memory
        recording.files.setdefault(path, set()).add(name)
        return lazy_dataset(dataset, file=path)

    def get_h5_file(self: Any, path_or_io: Any, mode: str | None = None) -> Any:
        recording = active()
        if recording is None or (mode or self.mode) != "r" or self.archive or hasattr(path_or_io, "read"):
            return original_open(self, path_or_io, mode)
        try:
            file = original_open(self, path_or_io, mode)
        except OSError as error:
            open_checkpoint(path_or_io)  # says what is wrong with the file: missing, truncated, an LFS pointer
            raise CheckpointError(f"{path_or_io}: cannot be opened as HDF5: {error}") from error
        recording.files.setdefault(str(path_or_io), set())
        return file

    replace(undo, store, "__getitem__", getitem)
    replace(undo, store, "_get_h5_file", get_h5_file)

    try:
        import safetensors
    except ImportError:
        return  # KerasHub says so itself when a converter needs it
    original_safe_open: Any = safetensors.safe_open

    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        recording = active()
        if recording is None:
            return original_safe_open(filename, *args, **kwargs)
        path = os.fspath(filename)
        return LazySafeOpen(path, recording.files.setdefault(path, set()))

    for module in _upstream.modules_with_safe_open(original_safe_open):
        replace(undo, module, "safe_open", safe_open)
    replace(undo, safetensors, "safe_open", safe_open)

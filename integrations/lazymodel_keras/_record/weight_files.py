"""Weight files as Keras and KerasHub open them, handing out lazy tensors instead of arrays.

Keras reads `.weights.h5` through its `H5IOStore`, legacy HDF5 files layer by layer and Orbax checkpoints with Orbax;
KerasHub's Hugging Face and timm converters read through `safetensors.safe_open`. While a recording runs, these return
lazy tensors instead; they are otherwise as upstream has them, failures included, because loaders probe.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from lazymodel import CheckpointError, LazyTensor, open_checkpoint
from lazymodel.checkpoints import SafetensorsFile
from lazymodel_keras import _upstream
from lazymodel_keras._record.hugging_face import refuse_quantized
from lazymodel_keras._record.patches import active, register, replace


class LazySafeOpen:
    """What `safetensors.safe_open(path, framework="np")` returns, with lazy tensors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> LazySafeOpen:
        return self

    def __exit__(self, *exception: object) -> None:
        pass  # the tensors that were handed out keep the file open for as long as they live

    def keys(self) -> list[str]:
        return list(self._file.tensors.keys())

    offset_keys = keys  # safetensors orders them by offset

    def metadata(self) -> dict[str, str]:
        return dict(self._file.tensors.metadata)

    def get_tensor(self, name: str) -> LazyTensor:
        if name not in self._file.tensors:
            # As safetensors does: converters probe for names and catch this.
            raise CheckpointError(
                f"{self._file.tensors.path} has no tensor {name!r}{known_layers(name, self._file.tensors.keys())}"
            )
        return self._file[name]

    # A slice of a lazy tensor is a lazy tensor.
    get_slice = get_tensor


def known_layers(name: str, names: Iterable[str]) -> str:
    """What to add about a lacking tensor whose like exist for lower numbers only: that layers are lacking."""
    stored = list(names)
    for number in re.finditer(r"(?<![0-9])[0-9]{1,9}(?![0-9])", name):
        before, after = re.escape(name[: number.start()]), re.escape(name[number.end() :])
        like = re.compile(rf"(?:.*\.)?{before}([0-9]{{1,9}}){after}")
        found = sorted(int(match[1]) for match in map(like.fullmatch, stored) if match)
        if found and int(number[0]) > found[-1]:
            return (
                f", nor any like it from number {number[0]} on: it has those of {found[0]} to {found[-1]}. Does the "
                "configuration have more layers than the checkpoint?"
            )
    return ""


@register
def _install(undo: contextlib.ExitStack) -> None:
    store, open_file = _upstream.WeightsStore, _upstream.WEIGHTS_STORE_OPEN
    original_getitem, original_open = store.__getitem__, vars(store)[open_file]

    def getitem(self: Any, key: str) -> Any:
        recording = active()
        if recording is None or self.mode != "r":
            return original_getitem(self, key)
        name = _upstream.stored_name(self, key)
        if self.archive is None:
            path = os.fsdecode(self.h5_file.filename)
            if path in recording.files:
                return recording.files[path][name]
            recording.refuse_unverified(f"{name!r} of {path}")  # what is no file on disk is held in memory
            return original_getitem(self, key)
        # An archive is read in place; one that was compressed again afterwards is read the stock way.
        with contextlib.suppress(CheckpointError):
            return recording.open(os.fspath(self.archive.filename), open_checkpoint)[name]
        return original_getitem(self, key)

    def get_h5_file(self: Any, path_or_io: Any, mode: str | None = None) -> Any:
        recording = active()
        if recording is not None and (mode or self.mode) == "r":
            # Checked by us first: our errors say what is wrong with the file.
            if self.archive:
                recording.check_content(os.fspath(self.archive.filename))
            elif not hasattr(path_or_io, "read"):
                recording.open(os.fspath(path_or_io), open_checkpoint)
        return original_open(self, path_or_io, mode)

    replace(undo, store, "__getitem__", getitem)
    replace(undo, store, open_file, get_h5_file)


@register
def _install_safe_open(undo: contextlib.ExitStack) -> None:
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
        try:
            refuse_quantized(path)
        except CheckpointError as error:
            recording.refuse(error)  # converters probe
        return LazySafeOpen(recording.open(path, SafetensorsFile))

    for module in _upstream.modules_with_safe_open(original_safe_open):
        replace(undo, module, "safe_open", safe_open)
    replace(undo, safetensors, "safe_open", safe_open)


@register
def _install_whole_models(undo: contextlib.ExitStack) -> None:
    """For files of whole models, `.keras` and legacy HDF5."""
    library, legacy = _upstream.SAVING_LIB, _upstream.LEGACY_H5
    is_memory_sufficient = library.is_memory_sufficient
    load_subset, load_optimizer = (
        legacy.load_subset_weights_from_hdf5_group,
        legacy.load_optimizer_weights_from_hdf5_group,
    )
    # Keras before 3.15 follows any link in a legacy file; ours are checked when `open_checkpoint` reads them.
    dataset_of: Callable[[Any, str], Any] = getattr(legacy, "safe_get_h5_dataset", operator.getitem)
    group_of: Callable[[Any, str], Any] = getattr(legacy, "safe_get_h5_group", operator.getitem)

    def memory_sufficient(model: Any) -> Any:
        if active() is None:
            return is_memory_sufficient(model)
        # Keras would copy the weights of a `.keras` file into memory or beside the file, and reads them in place where
        # neither works.
        raise MemoryError("weights are read in place")

    def lazily(original: Any, group: Any, holder: Any) -> Any:
        recording = active()
        if recording is None:
            return original(group)
        names = legacy.load_attributes_from_hdf5_group(holder, "weight_names")
        path = os.fsdecode(holder.file.filename)
        if not os.path.isfile(path):
            return original(group)
        file = recording.open(path, open_checkpoint)
        return [file[dataset_of(holder, name).name.lstrip("/")] for name in names]

    def load_weights(group: Any) -> Any:
        return lazily(load_subset, group, group)

    def load_optimizer_weights(group: Any) -> Any:
        return lazily(load_optimizer, group, group_of(group, "optimizer_weights"))

    replace(undo, library, "is_memory_sufficient", memory_sufficient)
    replace(undo, legacy, "load_subset_weights_from_hdf5_group", load_weights)
    replace(undo, legacy, "load_optimizer_weights_from_hdf5_group", load_optimizer_weights)

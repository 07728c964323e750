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
from lazymodel_keras._record.patches import active, recording_patches, replace, while_recording


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
            raise CheckpointError(f"{self._file.tensors.path} has no tensor {name!r}{known_layers(name, self.keys())}")
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


@while_recording(_upstream.WeightsStore, "__getitem__")
def _get(recording: Any, original: Any, self: Any, key: str) -> Any:
    if self.mode != "r":
        return original(self, key)
    name = _upstream.stored_name(self, key)
    if self.archive is None:
        path = os.fsdecode(self.h5_file.filename)
        if path in recording.files:
            return recording.files[path][name]
        recording.refuse_unverified(f"{name!r} of {path}")  # what is no file on disk is held in memory
        return original(self, key)
    # An archive is read in place; one that was compressed again afterwards is read the stock way.
    with contextlib.suppress(CheckpointError):
        return recording.open(os.fspath(self.archive.filename), open_checkpoint)[name]
    return original(self, key)


@while_recording(_upstream.WeightsStore, _upstream.WEIGHTS_STORE_OPEN)
def _open(recording: Any, original: Any, self: Any, path_or_io: Any, mode: str | None = None) -> Any:
    if (mode or self.mode) == "r":
        # Checked by us first: our errors say what is wrong with the file.
        if self.archive:
            recording.check_content(os.fspath(self.archive.filename))
        elif not hasattr(path_or_io, "read"):
            recording.open(os.fspath(path_or_io), open_checkpoint)
    return original(self, path_or_io, mode)


@recording_patches.register
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


# Files of whole models, `.keras` and legacy HDF5. Keras before 3.15 follows any link in a legacy file; ours are checked
# when `open_checkpoint` reads them.
_LEGACY = _upstream.LEGACY_H5
_dataset_of: Callable[[Any, str], Any] = getattr(_LEGACY, "safe_get_h5_dataset", operator.getitem)
_group_of: Callable[[Any, str], Any] = getattr(_LEGACY, "safe_get_h5_group", operator.getitem)


@while_recording(_upstream.SAVING_LIB, "is_memory_sufficient")
def _is_memory_sufficient(recording: Any, original: Any, model: Any) -> Any:
    # Keras would copy the weights of a `.keras` file into memory or beside the file, and reads them in place where
    # neither works.
    raise MemoryError("weights are read in place")


@while_recording(_LEGACY, "load_subset_weights_from_hdf5_group")
def _load_weights(recording: Any, original: Any, group: Any) -> Any:
    return _lazily(recording, original, group, group)


@while_recording(_LEGACY, "load_optimizer_weights_from_hdf5_group")
def _load_optimizer_weights(recording: Any, original: Any, group: Any) -> Any:
    return _lazily(recording, original, group, _group_of(group, "optimizer_weights"))


def _lazily(recording: Any, original: Any, group: Any, holder: Any) -> Any:
    names = _LEGACY.load_attributes_from_hdf5_group(holder, "weight_names")
    path = os.fsdecode(holder.file.filename)
    if not os.path.isfile(path):
        return original(group)
    file = recording.open(path, open_checkpoint)
    return [file[_dataset_of(holder, name).name.lstrip("/")] for name in names]

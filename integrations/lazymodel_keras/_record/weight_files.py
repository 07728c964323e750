"""Weight files as Keras and KerasHub open them, handing out lazy tensors instead of arrays.

Keras reads `.weights.h5` through its `H5IOStore`, legacy HDF5 files layer by layer and Orbax checkpoints with Orbax;
KerasHub's Hugging Face and timm converters read through `safetensors.safe_open`. While a recording runs, these return
lazy tensors instead; they are otherwise as upstream has them, failures included, because loaders probe.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import h5py

from lazymodel import CheckpointError, LazyTensor, open_checkpoint
from lazymodel._remote.path import RemotePath
from lazymodel.checkpoints import SafetensorsFile
from lazymodel.checkpoints._decoded import DecodedFile
from lazymodel.checkpoints._hdf5_dataset import H5File
from lazymodel.checkpoints._untrusted import zip_member
from lazymodel_keras import _upstream
from lazymodel_keras._record.patches import active, recording_patches, replace, while_recording
from lazymodel_keras._record.remote import StandIn


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
        path = str(recording.remote.location(os.fsdecode(self.h5_file.filename)))
        if path in recording.files:
            return recording.files[path][name]
        recording.refuse_unverified(f"{name!r} of {path}")  # what is no file on disk is held in memory
        return original(self, key)
    # An archive is read in place; one that was compressed again afterwards is read the stock way.
    path = recording.remote.location(os.fspath(self.archive.filename))
    with contextlib.suppress(*() if isinstance(path, RemotePath) else (CheckpointError,)):
        return recording.open(path, open_checkpoint)[name]
    return original(self, key)


@while_recording(_upstream.WeightsStore, _upstream.WEIGHTS_STORE_OPEN)
def _open(recording: Any, original: Any, self: Any, path_or_io: Any, mode: str | None = None) -> Any:
    if (mode or self.mode) == "r":
        # Checked by us first: our errors say what is wrong with the file.
        if self.archive:
            where = recording.remote.location(os.fspath(self.archive.filename))
            recording.check_content(where)
            if isinstance(where, RemotePath):
                # Python's own reading of a member goes through all that lies before a place in it.
                recording.open(where, open_checkpoint)
                member = zip_member(where, self.archive.getinfo(str(path_or_io)))
                return H5File(where, member.start, member.size).open()
        elif not hasattr(path_or_io, "read"):
            path = os.fspath(path_or_io)
            where = recording.remote.location(path)
            recording.open(where, open_checkpoint)
            if isinstance(where, RemotePath):
                return h5py.File(StandIn(where, path), "r")
    return original(self, path_or_io, mode)


@while_recording(_upstream.AssetStore, "__init__")
def _extract_assets(
    recording: Any, original: Any, self: Any, root_path: Any, archive: Any = None, **options: Any
) -> Any:
    """Has Keras extract the assets of an archive; it would extract the weights as well."""
    if archive is None or archive.mode != "r":
        return original(self, root_path, archive=archive, **options)
    everything = archive.filelist
    archive.filelist = [info for info in everything if "/" in info.filename]  # the weights lie at the top
    try:
        return original(self, root_path, archive=archive, **options)
    finally:
        archive.filelist = everything


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
        name = os.fspath(filename)
        if (gguf := recording.remote.gguf(name)) is not None:
            return LazySafeOpen(recording.open(name, lambda _: gguf.tensors(fresh=recording.verify is not False)))
        path = recording.remote.location(name)
        if (whole := recording.decoded(path)) is not None:
            return LazySafeOpen(recording.open(path, lambda where: DecodedFile(whole, str(where))))
        return LazySafeOpen(recording.open(path, SafetensorsFile))

    for module in _upstream.modules_with("safe_open", original_safe_open):
        replace(undo, module, "safe_open", safe_open)
    replace(undo, safetensors, "safe_open", safe_open)


@while_recording(_upstream.safetensors_loader, "__init__")
def _list_tensors(recording: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Has KerasHub look for the tensors of a quantized folder by their plain names, not by those of the index."""
    original(self, *args, **kwargs)
    if (index := self.safetensor_config) is None:
        return
    path = recording.remote.location(os.fspath(_upstream.index_of(self)))
    if (whole := recording.decoded(path if isinstance(path, RemotePath) else str(Path(path)))) is not None:
        shards = {PurePosixPath(shard).name: shard for shard in index["weight_map"].values()}
        names = {name: shards[PurePosixPath(whole.file_of(name)).name] for name in whole}
        self.safetensor_config = {**index, "weight_map": names}


@recording_patches.register
def _install_get_file(undo: contextlib.ExitStack) -> None:
    if (original_get_file := _upstream.get_preset_file()) is None:
        return

    @functools.wraps(original_get_file)
    def get_file(preset: Any, path: Any) -> Any:
        recording = active()
        if recording is None or not recording.remote.holds(preset):
            return original_get_file(preset, path)
        return recording.remote.file(preset, path)

    # Converters are imported when they are first needed, and then keep this function; outside of recordings it is
    # KerasHub's own.
    for module in _upstream.modules_with("get_file", original_get_file):
        replace(undo, module, "get_file", get_file)


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
    path = recording.remote.location(os.fsdecode(holder.file.filename))
    if isinstance(path, str) and not os.path.isfile(path):
        return original(group)
    file = recording.open(path, open_checkpoint)
    return [file[_dataset_of(holder, name).name.lstrip("/")] for name in names]

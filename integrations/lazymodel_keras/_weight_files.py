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
from pathlib import Path
from typing import Any, cast

from lazymodel import CheckpointError, LazyTensor, open_checkpoint
from lazymodel.checkpoints import SafetensorsFile
from lazymodel.checkpoints._untrusted import read_json_file, require_shards, shard_path, weight_map
from lazymodel_keras import _upstream
from lazymodel_keras._hugging_face import refuse_quantized


class LazySafeOpen:
    """What `safetensors.safe_open(path, framework="np")` returns, with lazy tensors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> LazySafeOpen:
        return self

    def __exit__(self, *exception: object) -> None:
        pass  # the tensors that were handed out keep the file open for as long as they live

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._file.tensors.keys())

    def offset_keys(self) -> list[str]:
        """The names of the tensors; safetensors orders them by offset."""
        return self.keys()

    def metadata(self) -> dict[str, str]:
        """The file's own metadata."""
        return dict(self._file.tensors.metadata)

    def get_tensor(self, name: str) -> LazyTensor:
        """The tensor, unread."""
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


def checkpoint_files(path: str) -> list[str]:
    """The files that decide what a weight file's checkpoint holds: the index that names it and all shards, or itself.

    Loaders read the index by themselves and open one shard after the other. Hashing all at the first takes as long as
    the slowest of several threads, not as all together.

    Args:
        path: An absolute path.

    Raises:
        CheckpointError: An index beside it cannot be read, or a shard is missing.
    """
    folder = Path(path).parent
    for index in sorted((*folder.glob("*.safetensors.index.json"), *folder.glob("*.weights.json"))):
        shards: dict[Path, None] = {}
        for names in weight_map(read_json_file(index), index).values():
            listed = cast("list[Any]", names) if isinstance(names, list) else [names]
            shards |= dict.fromkeys(shard_path(index, name) for name in listed)
        if Path(path) in shards:
            require_shards(index, list(shards))
            return [str(index), *map(str, shards)]
    return [path]


def patch(undo: contextlib.ExitStack, active: Callable[[], Any]) -> None:
    """Installs the lazy ways of reading until `undo` closes; they act where `active()` is a recording."""
    from lazymodel_keras._recording import replace

    store = _upstream.WeightsStore
    original_getitem, original_open = store.__getitem__, store._get_h5_file

    def getitem(self: Any, key: str) -> Any:
        recording = active()
        if recording is None or self.mode != "r":
            return original_getitem(self, key)
        name = self._h5_entry_group[key].name.lstrip("/")
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
    replace(undo, store, "_get_h5_file", get_h5_file)
    _patch_whole_models(undo, active)

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


def _patch_whole_models(undo: contextlib.ExitStack, active: Callable[[], Any]) -> None:
    """The part of `patch` for files of whole models, `.keras`, legacy HDF5 and Orbax."""
    from lazymodel_keras._recording import replace

    library, legacy, interface = _upstream.SAVING_LIB, _upstream.LEGACY_H5, _upstream.SAVING_API
    is_memory_sufficient = library.is_memory_sufficient
    load_subset, load_optimizer = (
        legacy.load_subset_weights_from_hdf5_group,
        legacy.load_optimizer_weights_from_hdf5_group,
    )
    load_orbax = getattr(interface, "_load_model_from_orbax_checkpoint", None)  # from Keras 3.14 on
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

    def load_from_orbax(filepath: Any, custom_objects: Any = None, compile: bool = True, safe_mode: bool = True) -> Any:
        if active() is None:
            assert load_orbax is not None
            return load_orbax(filepath, custom_objects, compile, safe_mode)
        from lazymodel_keras._restore import model_from_orbax

        return model_from_orbax(filepath, custom_objects, compile, safe_mode)

    replace(undo, library, "is_memory_sufficient", memory_sufficient)
    replace(undo, legacy, "load_subset_weights_from_hdf5_group", load_weights)
    replace(undo, legacy, "load_optimizer_weights_from_hdf5_group", load_optimizer_weights)
    if load_orbax is not None:
        replace(undo, interface, "_load_model_from_orbax_checkpoint", load_from_orbax)

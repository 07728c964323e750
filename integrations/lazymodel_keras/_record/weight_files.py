"""Weight files as Keras and KerasHub open them, which return lazy tensors instead of arrays.

Keras reads `.weights.h5` through its `H5IOStore`, legacy HDF5 files layer by layer and Orbax checkpoints with Orbax;
KerasHub's Hugging Face and timm converters read through `safetensors.safe_open`. While a recording runs, these return
lazy tensors; everything else is as upstream, errors included, because loaders probe.

This module also changes KerasHub's own loaders and converters: presets that were saved quantized keep their dtype
policies, and GPT-OSS' experts, which its converter would decode on the host, are decoded when they are read.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from lazymodel import CheckpointError, LazyTensor, open_checkpoint
from lazymodel._quantized.scaled import CODES, Float4Tensor, scaled_pairs
from lazymodel._remote.path import RemotePath
from lazymodel.checkpoints import SafetensorsFile
from lazymodel.checkpoints._hdf5 import H5File
from lazymodel.checkpoints._untrusted import member_start
from lazymodel_keras import _upstream
from lazymodel_keras._gguf.folder import converter
from lazymodel_keras._record.patches import active, recording_patches, replace, while_recording
from lazymodel_keras._record.remote import StandIn


class LazySafeOpen:
    """The result of `safetensors.safe_open(path, framework="np")`, with lazy tensors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> LazySafeOpen:
        return self

    def __exit__(self, *exception: object) -> None:
        pass  # returned tensors keep the file open as long as they exist

    def keys(self) -> list[str]:
        return list(self._file.tensors.keys())

    offset_keys = keys  # safetensors orders them by offset

    def metadata(self) -> dict[str, str]:
        return dict(self._file.tensors.metadata)

    def get_tensor(self, name: str) -> LazyTensor:
        if name not in self._file.tensors:
            # Like safetensors: converters probe for names and catch this.
            raise CheckpointError(f"{self._file.tensors.path} has no tensor {name!r}{known_layers(name, self.keys())}")
        return self._file[name]

    # A slice of a lazy tensor is a lazy tensor.
    get_slice = get_tensor


def known_layers(name: str, names: Iterable[str]) -> str:
    """Returns a hint that layers are missing, if tensors like a missing one exist for lower numbers only."""
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
        recording.refuse_unverified(f"{name!r} of {path}")  # anything but a file on disk is held in memory
        return original(self, key)
    # An archive is read in place; one with compressed members is read as stock Keras does.
    path = recording.remote.location(os.fspath(self.archive.filename))
    with contextlib.suppress(*() if isinstance(path, RemotePath) else (CheckpointError,)):
        return recording.open(path, open_checkpoint)[name]
    return original(self, key)


@while_recording(_upstream.WeightsStore, _upstream.WEIGHTS_STORE_OPEN)
def _open(recording: Any, original: Any, self: Any, path_or_io: Any, mode: str | None = None) -> Any:
    if (mode or self.mode) == "r":
        # We check the file first: our errors describe the problem.
        if self.archive:
            where = recording.remote.location(os.fspath(self.archive.filename))
            recording.check_content(where)
            if isinstance(where, RemotePath):
                # Python's own reading of a member reads everything before a position in it.
                recording.open(where, open_checkpoint)
                info = self.archive.getinfo(str(path_or_io))
                return H5File(where, member_start(where, info), info.file_size).open()
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
    """Makes Keras extract only the assets of an archive; it would extract the weights as well."""
    if archive is None or archive.mode != "r":
        return original(self, root_path, archive=archive, **options)
    everything = archive.filelist
    archive.filelist = [info for info in everything if "/" in info.filename]  # the weights are at the top level
    try:
        return original(self, root_path, archive=archive, **options)
    finally:
        archive.filelist = everything


@while_recording(_upstream.safetensors, "safe_open")
def _safe_open(recording: Any, original: Any, filename: Any, *_: Any, **__: Any) -> LazySafeOpen:
    name = os.fspath(filename)
    if (gguf := recording.remote.gguf(name)) is not None:
        fresh = recording.options.verify is not False
        return LazySafeOpen(recording.open(name, lambda _: gguf.tensors(fresh=fresh)))
    path = recording.remote.location(name)
    if (whole := recording.decoded(path)) is not None:
        recording.check_content(path)
        return LazySafeOpen(recording.open(path, lambda _: whole, whole.path))  # any shard stands for the whole
    return LazySafeOpen(recording.open(path, SafetensorsFile))


@while_recording(_upstream.safetensors_loader, "__init__")
def _list_tensors(recording: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes KerasHub look for the tensors of a quantized folder by their plain names, not by those of the index."""
    original(self, *args, **kwargs)
    if (index := self.safetensor_config) is None:
        return
    path = recording.remote.location(os.fspath(_upstream.index_of(self)))
    if (whole := recording.decoded(path if isinstance(path, RemotePath) else str(Path(path)))) is not None:
        any_shard = next(iter(index["weight_map"].values()))
        self.safetensor_config = {**index, "weight_map": dict.fromkeys(whole, any_shard)}


@while_recording(_upstream.preset_utils, "get_file")
def _get_file(recording: Any, original: Any, preset: Any, path: Any) -> Any:
    return recording.remote.file(preset, path) if recording.remote.holds(preset) else original(preset, path)


# Files of whole models, `.keras` and legacy HDF5. Keras before 3.15 follows any link in a legacy file;
# `open_checkpoint` checks the files that we read.
_LEGACY = _upstream.LEGACY_H5
_dataset_of: Callable[[Any, str], Any] = getattr(_LEGACY, "safe_get_h5_dataset", operator.getitem)
_group_of: Callable[[Any, str], Any] = getattr(_LEGACY, "safe_get_h5_group", operator.getitem)


@while_recording(_upstream.SAVING_LIB, "is_memory_sufficient")
def _is_memory_sufficient(recording: Any, original: Any, model: Any) -> Any:
    # Keras would copy the weights of a `.keras` file into memory or to a file next to it; it reads them in place if
    # neither works.
    raise MemoryError("weights are read in place")


@while_recording(_LEGACY, "load_subset_weights_from_hdf5_group")
@while_recording(_LEGACY, "load_optimizer_weights_from_hdf5_group")
def _read_legacy(recording: Any, original: Any, group: Any) -> Any:
    holder = _group_of(group, "optimizer_weights") if "optimizer" in original.__name__ else group
    names = _LEGACY.load_attributes_from_hdf5_group(holder, "weight_names")
    path = recording.remote.location(os.fsdecode(holder.file.filename))
    if isinstance(path, str) and not os.path.isfile(path):
        return original(group)
    file = recording.open(path, open_checkpoint)
    return [file[_dataset_of(holder, name).name.lstrip("/")] for name in names]


# KerasHub's loaders and converters -----------------------------------------------------------------------------------


@recording_patches.register
def _install_from_preset(undo: contextlib.ExitStack) -> None:
    for cls in _upstream.classes_defining("from_preset"):
        recording_patches.replace(undo, cls, "from_preset", _from_preset)


def _from_preset(original: Any, cls: Any, preset: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes KerasHub's messages show a URL without its secrets, and reads a GGUF file for this class."""
    recording = active()
    if recording is not None and recording.remote.holds(preset):
        preset = recording.remote.folder(preset, cls)
    return original(cls, preset, *args, **kwargs)


@while_recording(_upstream.transformers_loader, "__init__")
def _convert_otherwise(recording: Any, original: Any, self: Any, preset: Any, config: Any) -> None:
    """Makes one of our converters convert a GGUF file of a model that KerasHub has no converter for."""
    folder = recording.remote.gguf_preset(preset)
    ours = None if folder is None else converter(folder.row)
    original(self, preset, config if ours is None else {**config, "model_type": "llama"})
    if ours is not None:
        self.config, self.converter = config, ours


@while_recording(_upstream.preset_loader_class, "get_backbone_kwargs")
def _keep_saved_policies(recording: Any, original: Any, self: Any, **kwargs: Any) -> Any:
    """Keeps the dtype policies of a quantized preset, which its loader would overwrite with None."""
    own, others = original(self, **kwargs)
    saved = (self.config.get("config") or {}).get("dtype")
    if own.get("dtype") is None and isinstance(saved, dict) and _is_quantized(keras.dtype_policies.get(saved)):
        own["dtype"] = saved
    return own, others


def _is_quantized(policy: Any) -> bool:
    policies = policy.values() if isinstance(policy, keras.dtype_policies.DTypePolicyMap) else [policy]
    return any(policy.quantization_mode is not None for policy in policies)


_EXPERTS = ("gate_up_proj", "down_proj")


class _WithoutExperts:
    """A loader of a GPT-OSS folder that returns one block of zeros in place of the numbers of all experts."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def get_tensor(self, name: str) -> Any:
        shapes = {"blocks": (1, 1, 1, CODES), "scales": (1, 1, 1)}
        shape = shapes.get(name.rpartition("_")[2])
        return self._loader.get_tensor(name) if shape is None else np.zeros(shape, np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _pairs() -> np.ndarray[Any, Any]:
    """The values of two numbers and their scale as KerasHub computes them: the largest scale is infinite, not NaN."""
    with np.errstate(over="ignore"):
        return scaled_pairs(2.0 ** (np.arange(256).astype(np.float32) - 127.0))


@while_recording(_upstream.gpt_oss_converter, "convert_weights")
def _decode_lazily(recording: Any, original: Any, backbone: Any, loader: Any, config: Any) -> None:
    """Makes the experts decode when they are read: KerasHub's converter holds all of them on the host, in float32."""
    experts = [layer.sparse_moe_block.experts for layer in backbone.transformer_layers]
    with contextlib.ExitStack() as undo:
        for of, name in itertools.product(experts, _EXPERTS):
            replace(undo, getattr(of, name), "assign", lambda value: None)
        original(backbone, _WithoutExperts(loader), config)
    for (index, of), name in itertools.product(enumerate(experts), _EXPERTS):
        stored = f"model.layers.{index}.mlp.experts.{name}"
        blocks, scales = (loader.get_tensor(f"{stored}_{kind}") for kind in ("blocks", "scales"))
        if (blocks.dtype, scales.dtype, blocks.shape) != (np.uint8, np.uint8, (*scales.shape, CODES)):
            raise CheckpointError(
                f"{stored}_blocks: expected uint8 of shape {(*scales.shape, CODES)}, like its scales, found "
                f"{blocks.dtype} {blocks.shape} and {scales.dtype} scales"
            )
        getattr(of, name).assign(np.transpose(LazyTensor(Float4Tensor(blocks, scales, _pairs)), (0, 2, 1)))

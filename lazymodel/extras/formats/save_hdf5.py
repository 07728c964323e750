"""HDF5 files to write, laid out as Keras' own `.weights.h5` and sharded `.weights.json`.

HDF5's library makes the file's structure, datasets whose bytes are reserved and not written, in memory that keeps what
it writes and nothing in between. The bytes of tensors are then written to their places like those of any other format:
chunk by chunk, in threads, by the process that has them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymodel._errors import LazyModelError, warn
from lazymodel._remote.path import LocalPath
from lazymodel._save.atomic import Staging, writing
from lazymodel._save.disk import DiskDestination, FileDestination, replace_shards
from lazymodel._save.files import SavedFile, SaveOptions, grouped
from lazymodel._tensors.byte_reader import Seekable
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._open import staging_folder
from lazymodel.checkpoints._untrusted import is_numpys
from lazymodel.extras.formats.hdf5 import import_h5py

_BFLOAT16 = np.dtype(jnp.bfloat16)


def _layout(tensors: Mapping[str, LazyTensor], path: Path, options: SaveOptions) -> list[SavedFile]:
    """One file of the path's name; or, where that is an index (`.weights.json`), shards as Keras names them."""
    for name, tensor in tensors.items():
        if not is_numpys(tensor.dtype) and tensor.dtype != _BFLOAT16:
            raise LazyModelError(
                f"{name!r}: HDF5 weights have NumPy's numbers and bfloat16, and no {tensor.dtype.name}; cast it, or "
                "save as safetensors"
            )
        if re.search(r"[\0\ud800-\udfff]", name) or not all(part not in ("", ".") for part in name.split("/")):
            raise LazyModelError(f"{name!r} cannot be the path of a dataset in HDF5; rename it with a mapping")
    if path.suffix != ".json":
        return [_file(path.name, tensors)]
    groups = grouped(tensors, options.shard_size, lambda _, tensor: tensor.nbytes)
    base = path.stem.replace(".weights", "")
    return [_file(f"{base}_{number:05}.weights.h5", group) for number, group in enumerate(groups)]


def hdf5_destination(path: LocalPath, tensors: Mapping[str, LazyTensor], options: SaveOptions) -> DiskDestination:
    """The file, or the index and shards, that tensors go to."""
    kind = _Shards if path.suffix == ".json" else FileDestination
    return kind(path, _layout(tensors, path, options), options)


class _Shards(DiskDestination):
    """An index, `x.weights.json`, with its shards. Other files in the folder stay."""

    def __init__(self, path: LocalPath, files: list[SavedFile], options: SaveOptions) -> None:
        super().__init__(path.parent, files, options, inside=True, rivals=[staging_folder(path.parent)])
        self._index = path

    def _there(self) -> LocalPath | None:
        return self._index if self._index.exists() else None

    def commit(self) -> None:
        weights: dict[str, Any] = {}
        for file in self.files:
            for name, _, _ in file.tensors:
                shards = weights.setdefault(f"/{name}".rpartition("/")[0] or "/", [])
                shards += [file.name] * (file.name not in shards)
        total = sum(tensor.nbytes for file in self.files for _, tensor, _ in file.tensors)
        weights = {group: shards[0] if len(shards) == 1 else shards for group, shards in weights.items()}
        content = {"metadata": {"total_size": total}, "weight_map": weights}
        with writing(self._index):
            (self._stage.new / self._index.name).write_text(json.dumps(content, indent=4), encoding="utf-8")
        replace_keras_shards(self._stage, self._index.name)


def replace_keras_shards(stage: Staging, index: str) -> None:
    """Puts the index and shards that are in `stage.new` in place, under the names that they have there."""
    base = index.removesuffix(".json").replace(".weights", "")
    pattern = re.compile(re.escape(base) + r"_(\d{5,})\.weights\.h5")
    with writing(stage.destination):
        old = [name for name in os.listdir(stage.destination) if name == index or pattern.fullmatch(name)]

    def other(name: str, attempt: int) -> str:
        match = pattern.fullmatch(name)
        assert match is not None, name
        return f"{base}_{attempt * 10**5 + int(match[1])}.weights.h5"

    if error := replace_shards(stage, index, old, other, _link, needs_names=True):
        where = stage.destination / index
        warn(f"{where} is saved, under names of shards that Keras does not look for. Save once more: {error}")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


class _Sparse(Seekable):
    """A file in memory of which only what was written takes any."""

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []  # where, and what, in the order of writing

    def write(self, data: Any) -> int:
        self.written.append((self.position, bytes(data)))
        self.position += len(data)
        self.size = max(self.size, self.position)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self.size = self.position if size is None else size
        return self.size

    def readinto(self, buffer: Any) -> int:
        raise AssertionError("HDF5 reads what it is about to write")


def _file(name: str, tensors: Mapping[str, LazyTensor]) -> SavedFile:
    h5py = import_h5py()
    made = _Sparse()
    reserved = reserving_properties()
    placed: list[tuple[str, LazyTensor, int]] = []
    with h5py.File(made, "w") as file:
        for path, tensor in tensors.items():
            group, _, key = path.rpartition("/")
            try:
                parent = file.require_group(group or "/")
                kind = h5py.h5t.py_create(tensor.dtype, logical=True)
                space = h5py.h5s.create_simple(tensor.shape) if tensor.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
                dataset = h5py.h5d.create(parent.id, key.encode(), kind, space, reserved)
            except (TypeError, ValueError) as error:  # a group by this name, or a dataset by one of its parts
                raise LazyModelError(
                    f"{path!r}: HDF5 has a tree of names, and this one is also a part of another; rename it"
                ) from error
            if tensor.dtype == _BFLOAT16:
                h5py.Dataset(dataset).attrs["dtype"] = "bfloat16"
            placed.append((path, tensor, dataset.get_offset() if tensor.size else 0))
    placed.sort(key=lambda each: each[2])
    return SavedFile(name, b"", tuple(placed), made.size, tuple(made.written))


def reserving_properties() -> Any:
    """HDF5's property list of a dataset that has its bytes in the file from the start, and no values in them."""
    h5py = import_h5py()
    reserved = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    reserved.set_layout(h5py.h5d.CONTIGUOUS)
    reserved.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    reserved.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    reserved.set_obj_track_times(False)  # the same bytes in every process
    return reserved

"""The verb `save`: a model's arrays to safetensors or Orbax, a piece of a tensor at a time.

Values go the way that loading takes, backwards: an array is the leaf of a lazy tensor (`DeviceLeaf`), a mapping is
NumPy on such tensors, and what is written is read out of them box by box, so that nothing is gathered.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from lazymodel._abstract.arrays import lazy_array, named_arrays
from lazymodel._abstract.spec import ModelSpec
from lazymodel._devices.agreement import agreement
from lazymodel._errors import LazyModelError
from lazymodel._mapping.table import WeightMap
from lazymodel._mapping.values import lazy_values
from lazymodel._remote.path import Location, remote_path
from lazymodel._remote.url import is_url
from lazymodel._save.destination import TERMS, FileDestination, FolderDestination, SaveOptions
from lazymodel._save.orbax import save_orbax
from lazymodel._save.remote import save_remote
from lazymodel._save.safetensors import layout
from lazymodel._save.write import check_budget, write_files
from lazymodel._show.progress import Progress
from lazymodel._show.text import closest, parse_budget, parse_bytes
from lazymodel._tensors.boxes import fresh_view, geometry_of
from lazymodel._tensors.device import DeviceLeaf
from lazymodel._tensors.lazy import LazyTensor

_DEFAULT_BUDGET = 256 << 20  # bytes; all threads with all they take, beyond which nothing gets faster

WriteFunction: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Mapping[str, Any]]"


def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    mapping: WeightMap | WriteFunction | None = None,
    format: str = "safetensors",
    max_shard_size: int | str = "5GB",
    max_host_memory: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model's arrays, or any others, to a checkpoint; each shard is copied to the host once, in pieces.

    Where several processes share the arrays, all of them must call this with the same arguments. Each writes the
    shards that only it, or it first, holds, into files on a file system that all share; in a bucket each writes files
    of its own, for which the devices send it what others hold. It fails in all or in none.

    At each instant the path opens as the complete old checkpoint or the complete new one. On disks everything is
    written to a folder `.*.lazymodel-saving` first, and one rename makes it count. In a bucket files are uploaded in
    parts, shards under names of this save alone, and one request for the index, or the last of the one file's upload,
    makes them count. A failure, a full disk or a kill before that leaves what was there, and the next save removes what
    a killed one left; but for parts of its uploads, which a rule of the bucket for incomplete uploads has to. Files
    that are not of the checkpoint stay; of two savers at once one is refused, in buckets the last to finish, as is what
    would hide a checkpoint of another format.

    Args:
        model: A mapping of path to array, any pytree of arrays, or a model of a known framework. Paths are those of
            `build_abstract`. Lazy tensors of another checkpoint are taken as well, which converts it. An abstract model
            is initialized, or loaded from what it was built with, straight into the files, and may be larger than the
            machine. PRNG keys are saved as their key data; what is no array is left out.
        path: A file that ends with `.safetensors`, of any size; or a folder, which may hold other files. Either may be
            a URL that begins with `s3://`, `gs://` or `az://`. For Orbax a folder on a disk.
        mapping: The `WeightMap` that the model was loaded with, undone; or a function that takes path → `LazyTensor`
            and returns a flat dict of tensor name → lazy tensor or array, made with NumPy. None keeps the paths.
        format: `"safetensors"` or `"orbax"`. Orbax (package `orbax-checkpoint`) saves arrays as they are, so there a
            mapping may rename them and no more; its tree has the parts of the paths as keys.
        max_shard_size: Bytes of tensors of one file in a folder, or `"5GB"`. A larger tensor has a file to itself.
        max_host_memory: Ceiling for the host's staging memory in bytes, or `"1GiB"`; None is 256 MiB, and more where
            something has to be initialized whole. Orbax takes what it takes.
        metadata: Strings to strings, for the header of every safetensors file. `{"format": "pt"}` is added unless
            `format` is given: Hugging Face's loaders ask for it, and it says that names and layouts are PyTorch's.
        progress: As for `materialize`, in bytes that this process writes.
        overwrite: Whether a checkpoint that is there already is replaced. One of another format never is, nor an Orbax
            folder with other files in it: both are errors before anything is written.
        storage_options: For URLs, as of `open_checkpoint`.

    Raises:
        LazyModelError: There is a checkpoint already, or a saver at work on it; a dtype does not exist in the format,
            the mapping does not fit, the disk is full, or a file cannot be written. What was there is as it was.
        CheckpointError: Another process failed, or a lazy tensor cannot be read.

    Example:
        >>> lm.save(model, "folder", max_shard_size="64KiB")
        >>> lm.open_checkpoint("folder").files
        ['folder/model-00001-of-00002.safetensors', 'folder/model-00002-of-00002.safetensors']
    """
    arrays, shardings = _values(model)
    if format not in ("safetensors", "orbax"):
        raise LazyModelError(f"format is 'safetensors' or 'orbax'; got {format!r}")
    where = _located(path, storage_options, format)
    tensors = _map({name: lazy_array(name, array) for name, array in arrays.items()}, mapping)
    if format == "orbax":
        save_orbax({name: _plain(name, tensor) for name, tensor in tensors.items()}, Path(path), overwrite=overwrite)
        return
    options = SaveOptions(
        shard_size=None
        if where.suffix == ".safetensors"
        else parse_bytes(max_shard_size, name="max_shard_size", at_least=1),
        budget=_default_budget(tensors) if max_host_memory is None else parse_budget(max_host_memory),
        metadata={"format": "pt"} | dict(metadata or {}),
        progress=progress,
        overwrite=overwrite,
    )
    if isinstance(where, Path):
        _save_files(tensors, where, shardings, options)
    else:
        save_remote(tensors, where, shardings, options)


def _values(model: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """What is saved, by path, and the shardings whose processes save it together."""
    if isinstance(model, ModelSpec):
        several = jax.process_count() > 1  # a single one may save what is planned for other devices
        return lazy_values(model), [v.sharding for v in model.values() if several and v.sharding is not None]
    arrays = named_arrays(model)
    return arrays, [array.sharding for array in arrays.values() if isinstance(array, jax.Array)]


def _default_budget(tensors: Mapping[str, LazyTensor]) -> int:
    """Enough for what has to be computed whole, which else would be refused."""
    return _DEFAULT_BUDGET + 2 * max((tensor.leaf.unit_nbytes for tensor in tensors.values()), default=0)


def _located(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, format: str) -> Location:
    if not is_url(path):
        if storage_options:
            raise LazyModelError(f"{os.fspath(path)}: storage_options are for URLs, found a path")
        return Path(path)
    where = remote_path(os.fspath(path), storage_options)
    if format == "orbax":
        raise LazyModelError(
            f"{where}: Orbax checkpoints are saved to disks only, expected a path, found a URL. Save as safetensors"
        )
    return where


def _save_files(tensors: dict[str, LazyTensor], path: Path, shardings: Sequence[Any], options: SaveOptions) -> None:
    """Saves to a file system that all processes share."""
    shared = not all(sharding.is_fully_addressable for sharding in shardings)
    processes = {device.process_index for sharding in shardings for device in sharding.device_set}
    leads = not shared or jax.process_index() == min(processes)
    with contextlib.ExitStack() as stack:
        with agreement(shardings, **TERMS) as stage:
            files, checksum = layout(tensors, options.shard_size, options.metadata)
            check_budget(files, options.budget)
            single = options.shard_size is None
            target = FileDestination(path, files) if single else FolderDestination(path, files)
            if leads:
                stack.enter_context(target.begun(overwrite=options.overwrite))
            stage.outcome = f"write {len(tensors)} tensors (checksum {checksum})"
        with agreement(shardings, **TERMS) as stage:
            write_files(target, options.budget, options.progress, stage.check, leads=leads)
        with agreement(shardings, **TERMS):
            if leads:
                target.commit()


def _map(arrays: dict[str, LazyTensor], mapping: WeightMap | WriteFunction | None) -> dict[str, LazyTensor]:
    """The tensors to write, by name."""
    if mapping is None:
        return arrays
    written: Any = mapping.write(arrays) if isinstance(mapping, WeightMap) else mapping(_Named(arrays))
    if not isinstance(written, Mapping):
        raise LazyModelError(f"a function for saving returns a dict of tensor name to tensor; got {type(written)}")
    tensors: dict[str, LazyTensor] = {}
    for name, value in cast("Mapping[Any, Any]", written).items():
        if not isinstance(name, str) or not isinstance(value, LazyTensor | np.ndarray | np.generic | jax.Array):
            raise LazyModelError(
                f"a function for saving returns a flat dict of tensor name to tensor; got {name!r}: {type(value)}"
            )
        tensors[name] = lazy_array(name, value)
    return tensors


class _Named(dict[str, LazyTensor]):
    """Arrays by path, for a function that may ask for one that is not there."""

    def __missing__(self, path: str) -> LazyTensor:
        raise LazyModelError(f"the model has no variable {path!r}{closest(path, self)}")


def _plain(name: str, tensor: LazyTensor) -> Any:
    """The array that a lazy tensor is all of, as it is."""
    leaf = tensor.leaf
    geometry = geometry_of(fresh_view(leaf.shape, leaf.dtype.itemsize))
    if tensor.steps or tensor.geometry() != geometry:
        raise LazyModelError(f"{name!r}: Orbax saves arrays as they are, so a mapping may only rename them")
    if isinstance(leaf, DeviceLeaf):
        return leaf.array
    return tensor.read()

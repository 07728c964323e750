"""The verb `save`: a model's arrays, or another checkpoint's, to files of any format, a piece of a tensor at a time.

Values go the way that loading takes, backwards: an array is the leaf of a lazy tensor (`DeviceLeaf`), a mapping is
NumPy on such tensors, and what is written is read out of them box by box, so that nothing is gathered.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from lazymodel._abstract.arrays import lazy_array, named_arrays
from lazymodel._abstract.spec import ModelSpec
from lazymodel._devices.agreement import agreement
from lazymodel._errors import LazyModelError
from lazymodel._mapping.given import model_values
from lazymodel._mapping.table import WeightMap
from lazymodel._remote.path import Location, remote_path
from lazymodel._remote.url import is_url
from lazymodel._save import hdf5, numpy, zarr
from lazymodel._save.atomic import writing
from lazymodel._save.destination import TERMS, Destination, FileDestination, FolderDestination, SaveOptions
from lazymodel._save.hdf5 import Hdf5Shards
from lazymodel._save.numpy import NpyDestination, NpzDestination
from lazymodel._save.orbax import save_orbax
from lazymodel._save.remote import save_remote
from lazymodel._save.safetensors import layout
from lazymodel._save.write import check_budget, write_files
from lazymodel._save.zarr import OrbaxDestination
from lazymodel._show.progress import Progress
from lazymodel._show.text import closest, parse_budget, parse_bytes
from lazymodel._tensors.boxes import fresh_view, geometry_of
from lazymodel._tensors.device import DeviceLeaf
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import ArrayLeaf

_SUFFIXES = {
    ".safetensors": "safetensors", ".weights.json": "hdf5", ".h5": "hdf5", ".hdf5": "hdf5", ".npz": "numpy",
}  # fmt: skip
# What others write; a folder of such a name would be taken for one of theirs.
_OF_OTHERS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".onnx", ".keras", ".safetensor", ".zip")
DEFAULT_BUDGET = 256 << 20  # bytes; all threads with all they take, beyond which nothing gets faster

WriteFunction: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Mapping[str, Any]]"


def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    mapping: WeightMap | WriteFunction | None = None,
    format: str | None = None,
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
            `build_abstract`; in a pair with an Optax state or `nnx.Optimizer`, of `with_optimizer`. Arrays in several
            places are under each path, PRNG keys are key data, what is no array is left out. An abstract model is
            initialized, or loaded from what it was built with, straight into the files.
        path: A file that ends with `.safetensors`, or a folder, which may hold other files; on a disk, or a URL that
            begins with `s3://`, `gs://` or `az://`. On disks also `.weights.h5` or `.h5`, as Keras writes them,
            `.weights.json` for shards of it, and NumPy's `.npz`; for Orbax and `.npy` files a folder.
        mapping: The `WeightMap` that the model was loaded with, undone; or a function that takes path → `LazyTensor`
            and returns a flat dict of tensor name → lazy tensor or array, made with NumPy. None keeps the paths.
        format: `"safetensors"`, `"hdf5"`, `"numpy"`, or of folders `"npy"`, a file an array, and `"orbax"`; None goes
            by the suffix, and a folder is safetensors. Orbax' tree has the parts of paths as keys. Orbax itself saves
            arrays as they are; tensors of files, and what a mapping changed, become plain zarr arrays.
        max_shard_size: Bytes of tensors of one file in a folder, or `"5GB"`. A larger tensor has a file to itself.
        max_host_memory: Ceiling for staging in bytes, or `"1GiB"`; None is 256 MiB, and more where something has to be
            initialized whole. Orbax takes what it takes.
        metadata: Strings to strings, for the header of every safetensors file. `{"format": "pt"}` is added unless
            `format` is given: Hugging Face's loaders ask for it, and it says that names and layouts are PyTorch's.
        progress: As for `materialize`, in bytes that this process writes.
        overwrite: Whether a checkpoint that is there already is replaced. One of another format never is, nor an Orbax
            folder with other files in it.
        storage_options: For URLs, as of `open_checkpoint`.

    Raises:
        LazyModelError: There is a checkpoint already, or a saver at work on it; the format lacks a dtype, the mapping
            does not fit, the disk is full, or a file cannot be written. What was there is as it was.
        CheckpointError: Another process failed, or a lazy tensor cannot be read.

    Example:
        >>> lm.save(model, "folder", max_shard_size="64KiB")
        >>> lm.open_checkpoint("folder").files
        ['folder/model-00001-of-00002.safetensors', 'folder/model-00002-of-00002.safetensors']
    """
    (arrays, shardings), format = _values(model), _format(path, format)
    where = _located(path, storage_options, format)
    tensors = mapped({name: lazy_array(name, array) for name, array in arrays.items()}, mapping)
    if format == "orbax":
        plain = {name: _plain(tensor) for name, tensor in tensors.items()}
        if all(array is not None for array in plain.values()):
            save_orbax(plain, Path(path), overwrite=overwrite)
            return
    size = parse_bytes(max_shard_size, name="max_shard_size", at_least=1)
    options = SaveOptions(
        shard_size=None if where.suffix == ".safetensors" else size,
        budget=default_budget(tensors) if max_host_memory is None else parse_budget(max_host_memory),
        metadata={"format": "pt"} | dict(metadata or {}),
        progress=progress,
        overwrite=overwrite,
    )
    if isinstance(where, Path):
        _save_files(tensors, where, shardings, options, format)
    else:
        save_remote(tensors, where, shardings, options)


def _format(path: str | os.PathLike[str], format: str | None) -> str:
    """The format to save in; a file's suffix says so, and for a folder it is safetensors unless told."""
    if format is not None and format not in (known := sorted({*_SUFFIXES.values(), "npy", "orbax"})):
        raise LazyModelError(f"format is one of {', '.join(known)}, or None; got {format!r}")
    name = os.fspath(path).partition("?")[0]
    said = next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)
    if name.lower().endswith(_OF_OTHERS):
        raise LazyModelError(
            f"{name}: lazymodel writes no such files; the name is a folder's, or ends with one of "
            f"{', '.join(_SUFFIXES)}"
        )
    if said is None and format in ("hdf5", "numpy"):
        names = (
            "x.weights.h5, or x.weights.json with shards beside it" if format == "hdf5" else 'x.npz, or format="npy"'
        )
        raise LazyModelError(f"{name}: format={format!r} writes files; expected a name such as {names}")
    if None not in (said, format) and said != format:
        raise LazyModelError(f"{name}: the name is one of {said}, and format={format!r}; leave one of them out")
    return format or said or "safetensors"


def _values(model: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """What is saved, by path, and the shardings whose processes save it together."""
    if isinstance(model, ModelSpec):
        several = jax.process_count() > 1  # a single one may save what is planned for other devices
        return model_values(model), [v.sharding for v in model.values() if several and v.sharding is not None]
    arrays = named_arrays(model)
    return arrays, [array.sharding for array in arrays.values() if isinstance(array, jax.Array)]


def default_budget(tensors: Mapping[str, LazyTensor]) -> int:
    """Enough for what has to be computed whole, which else would be refused."""
    return DEFAULT_BUDGET + 2 * max((tensor.leaf.unit_nbytes for tensor in tensors.values()), default=0)


def _located(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, format: str) -> Location:
    if not is_url(path):
        if storage_options:
            raise LazyModelError(f"{os.fspath(path)}: storage_options are for URLs, found a path")
        with writing(Path(path)):
            if not os.path.isabs(path):
                os.getcwd()  # it may have been removed
            with contextlib.suppress(FileNotFoundError):
                os.lstat(path)  # the name may be too long
        return Path(path)
    where = remote_path(os.fspath(path), storage_options)
    if format != "safetensors":
        raise LazyModelError(
            f"{where}: only safetensors are saved to buckets, expected a path for {format}, found a URL. Save as "
            "safetensors, or to a disk first"
        )
    return where


def _laid_out(tensors: dict[str, LazyTensor], path: Path, options: SaveOptions, format: str) -> tuple[Destination, int]:
    """Which files there will be, and where; with a checksum of it, the same in every process."""
    if format == "safetensors":
        files, checksum = layout(tensors, options.shard_size, options.metadata)
        return FileDestination(path, files) if options.shard_size is None else FolderDestination(path, files), checksum
    if format == "numpy":
        target = NpzDestination(path, [numpy.layout(tensors, path.name)])
    elif format == "npy":
        target = NpyDestination(Path(os.path.realpath(path)), numpy.folder_layout(tensors))
    elif format == "orbax":
        target = OrbaxDestination(Path(os.path.realpath(path)), zarr.layout(tensors))
    else:
        assert options.shard_size is not None
        files = hdf5.layout(tensors, path, options.shard_size)
        target = Hdf5Shards(path, files) if path.suffix == ".json" else FileDestination(path, files)
    said = [
        (file.name, name, tensor.dtype.name, tensor.shape, at)
        for file in target.files
        for name, tensor, at in file.tensors
    ]
    return target, zlib.crc32(repr(said).encode())


def _save_files(
    tensors: dict[str, LazyTensor], path: Path, shardings: Sequence[Any], options: SaveOptions, format: str
) -> None:
    """Saves to a file system that all processes share."""
    shared = not all(sharding.is_fully_addressable for sharding in shardings)
    processes = {device.process_index for sharding in shardings for device in sharding.device_set}
    leads = not shared or jax.process_index() == min(processes)
    with contextlib.ExitStack() as stack:
        with agreement(shardings, **TERMS) as stage:
            target, checksum = _laid_out(tensors, path, options, format)
            check_budget(target.files, options.budget)
            if leads:
                stack.enter_context(target.begun(overwrite=options.overwrite))
            stage.outcome = f"write {len(tensors)} tensors (checksum {checksum})"
        with agreement(shardings, **TERMS) as stage:
            write_files(target, options.budget, options.progress, stage.check, leads=leads)
        with agreement(shardings, **TERMS):
            if leads:
                target.commit()


def mapped(arrays: dict[str, LazyTensor], mapping: WeightMap | WriteFunction | None) -> dict[str, LazyTensor]:
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


def _plain(tensor: LazyTensor) -> Any:
    """The array in memory that a lazy tensor is all of, as it is; None where it is none."""
    leaf = tensor.leaf
    if tensor.steps or tensor.geometry() != geometry_of(fresh_view(leaf.shape, leaf.dtype.itemsize)):
        return None
    if isinstance(leaf, DeviceLeaf):
        return leaf.array
    return tensor.read() if isinstance(leaf, ArrayLeaf) else None

"""A model into files of any format: `save`, and what all that is saved is written with, `write_to`.

Values go the way that loading takes, backwards: an array is the leaf of a lazy tensor (`DeviceTensor`), a mapping is
NumPy on such tensors, and what is written is read out of them box by box, so that nothing is gathered.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import lazy_array, named_arrays
from lazymodel._devices.collective import agreement
from lazymodel._errors import LazyModelError
from lazymodel._extras import extra
from lazymodel._mapping.resolve import lazy_values
from lazymodel._mapping.table import WeightMap
from lazymodel._remote.path import LocalPath, Location, RemotePath, location
from lazymodel._save import safetensors
from lazymodel._save.atomic import writing
from lazymodel._save.disk import FileDestination, FolderDestination
from lazymodel._save.files import Destination, SaveOptions
from lazymodel._save.store import StoreDestination
from lazymodel._save.write import share_of
from lazymodel._show.progress import Progress
from lazymodel._show.text import closest, parse_bytes, plural
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._open import SUFFIXES

_SUFFIXES = {".safetensors": "safetensors", ".weights.json": "hdf5", ".h5": "hdf5", ".hdf5": "hdf5"}
# Suffixes of files that are not written; a folder of such a name would look like one.
_NOT_WRITTEN = (
    *(suffix for suffix in SUFFIXES if not suffix.endswith(tuple(_SUFFIXES))),
    *(".msgpack", ".onnx", ".safetensor", ".zip"),
)
# The terms of errors if processes that save together disagree.
TERMS = {"done": "saved", "given": "tensors differ", "hint": "Save the same model in all processes"}

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
    that are not of the checkpoint stay. If two savers run, one raises, in buckets the last to finish; so does a save
    that would hide a checkpoint of another format.

    Args:
        model: A mapping of path to array, any pytree of arrays, or a model of a known framework. Paths are those of
            `build_abstract`; in a pair with an Optax state or `nnx.Optimizer`, of `with_optimizer`. Arrays in several
            places are under each path, PRNG keys are key data, numbers are arrays without dimensions; strings and the
            like are left out. An abstract model is initialized, or loaded from what it was built with, straight into
            the files.
        path: A file that ends with `.safetensors`, or a folder, which may hold other files; on a disk, or a URL that
            begins with `s3://`, `gs://` or `az://`. On disks also `.weights.h5` or `.h5`, as Keras writes them,
            `.weights.json` for shards of it; for Orbax a folder.
        mapping: The `WeightMap` that the model was loaded with, undone; or a function that takes path → `LazyTensor`
            and returns a flat dict of tensor name → lazy tensor or array, made with NumPy. None keeps the paths.
        format: `"safetensors"`, `"hdf5"`, or of folders `"orbax"`; None goes by the suffix, and a folder is
            safetensors. Orbax restores what it is given into the tree that was saved, of NNX objects into their states;
            of a mapping, and of Keras models, into dicts with the parts of paths as keys. Without a target it returns
            NumPy arrays.
        max_shard_size: Bytes of tensors of one file in a folder, or `"5GB"`. A larger tensor has a file to itself.
        max_host_memory: Ceiling for staging in bytes, or `"1GiB"`; None is 256 MiB, and more where something has to be
            initialized whole.
        metadata: Strings to strings, for the header of every safetensors file. `{"format": "pt"}` is added unless
            `format` is given: Hugging Face's loaders ask for it, and it says that names and layouts are PyTorch's.
        progress: As for `materialize`, in bytes that this process writes.
        overwrite: Whether a checkpoint that is there already is replaced. One of another format never is, nor an Orbax
            folder with other files in it.
        storage_options: For URLs, as of `open_checkpoint`.

    Raises:
        LazyModelError: There is a checkpoint already, or another saver at work on it; the format does not have a dtype,
            the mapping does not fit, the disk is full, or a file cannot be written. What was there is as it was.
        CheckpointError: Another process failed, or a lazy tensor cannot be read.

    Example:
        >>> lm.save(model, "folder", max_shard_size="64KiB")
        >>> lm.open_checkpoint("folder").files
        ['folder/model-00001-of-00002.safetensors', 'folder/model-00002-of-00002.safetensors']
    """
    arrays, held = values_of(model)
    with agreement(held, **TERMS):
        format, tree = _format(path, format), None
        if format == "orbax" and mapping is None:
            arrays, tree = extra("by_keys")(model, arrays)
        where = _located(path, storage_options, format)
        tensors = mapped({name: lazy_array(name, array) for name, array in arrays.items()}, mapping)
        size = parse_bytes(max_shard_size, name="max_shard_size", at_least=1)
        options = SaveOptions.given(
            tensors,
            max_host_memory,
            progress,
            shard_size=None if where.suffix == ".safetensors" else size,
            metadata={"format": "pt"} | dict(metadata or {}),
        )
    write_to(lambda: _destination(tensors, where, format, options, held, tree), held, options, overwrite=overwrite)


def write_to(
    make: Callable[[], Destination], held: Mapping[str, Any], options: SaveOptions, *, overwrite: bool
) -> None:
    """Writes to a destination, in all processes or in none: what they write is staged until the leading one commits.

    `held` are the variables whose processes save together.
    """
    several, leads = roles(held)
    with contextlib.ExitStack() as stack:
        with agreement(held, **TERMS) as scope:
            target = make()
            placed = [(file.name, placed) for file in target.files for placed in file.tensors]
            named = [(file, name, each.dtype.name, each.shape, at) for file, (name, each, at) in placed]
            files = [file.name for file in target.files]
            first = repr(files[0] if files else "")
            scope.outcome = f"write {plural(len(placed), 'tensor')} to {plural(len(files), 'file')}, {first} first"
            scope.details = repr((files, named, options.budget, sorted(options.metadata.items())))
            if several:
                scope.shares = {name: share_of(each, leads=leads) for _, (name, each, _) in placed}
            stack.enter_context(target.stage(leads=leads, overwrite=overwrite))
        try:
            with agreement(held, **TERMS) as scope:
                target.write(scope)
        except BaseException:
            target.abort()
            raise
        with agreement(held, **TERMS) as scope:
            scope.consequence = "while the new checkpoint was put in place: the old one is there, or the new one"
            if leads:
                target.commit()
                scope.consequence = "but the new checkpoint is saved"


def roles(held: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether several processes save together, and whether this is the one that does what only one has to do."""
    shardings = [each.sharding for each in held.values()]
    several = not all(sharding.is_fully_addressable for sharding in shardings)
    processes = {device.process_index for sharding in shardings for device in sharding.device_set}
    return several, not several or jax.process_index() == min(processes)


def _format(path: str | os.PathLike[str], format: str | None) -> str:
    """The format to save in; by default that of the suffix, and safetensors for a folder."""
    if format is not None and format not in (known := sorted({*_SUFFIXES.values(), "orbax"})):
        raise LazyModelError(f"format is one of {', '.join(known)}, or None; got {format!r}")
    name = os.fspath(path).partition("?")[0]
    by_name = next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)
    if name.lower().endswith(_NOT_WRITTEN):
        raise LazyModelError(
            f"{name}: lazymodel writes no such files; the name is a folder's, or ends with one of "
            f"{', '.join(_SUFFIXES)}"
        )
    if by_name is None and format == "hdf5":
        names = "x.weights.h5, or x.weights.json with its shards"
        raise LazyModelError(f"{name}: format={format!r} writes files; expected a name such as {names}")
    if None not in (by_name, format) and by_name != format:
        raise LazyModelError(f"{name}: the name is one of {by_name}, and format={format!r}; leave one of them out")
    return format or by_name or "safetensors"


def values_of(model: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Returns the tensors to save, by path, and those of them whose processes save together."""
    if isinstance(model, ModelSpec):
        several = jax.process_count() > 1  # a single one may save what is planned for other devices
        numbers = {path: np.asarray(number) for path, number in model.numbers.items()}
        held = {path: v for path, v in model.items() if several and v.sharding is not None}
        return lazy_values(model) | numbers, held
    arrays = named_arrays(model, numbers=True)
    return arrays, {path: array for path, array in arrays.items() if isinstance(array, jax.Array)}


def _located(path: str | os.PathLike[str], options: Mapping[str, Any] | None, format: str) -> Location:
    where = location(path, options)
    if isinstance(where, LocalPath):
        with writing(where):
            if not os.path.isabs(path):
                os.getcwd()  # it may have been removed
            with contextlib.suppress(FileNotFoundError):
                os.lstat(path)  # the name may be too long
        return where
    if format != "safetensors":
        raise LazyModelError(
            f"{where}: only safetensors are saved to buckets, expected a path for {format}, found a URL. Save as "
            "safetensors, or to a disk first"
        )
    return where


def _destination(
    tensors: dict[str, LazyTensor],
    where: Location,
    format: str,
    options: SaveOptions,
    held: Mapping[str, Any],
    tree: Mapping[Any, Any] | None,
) -> Destination:
    """The files that there will be, and where; the same in every process."""
    if isinstance(where, RemotePath):
        return StoreDestination(where, safetensors.layout(tensors, options), options, held)
    if format == "orbax":
        return extra("OrbaxDestination")(where, tensors, tree, options)
    if format == "hdf5":
        return extra("hdf5_destination")(where, tensors, options)
    kind = FileDestination if options.shard_size is None else FolderDestination
    return kind(where, safetensors.layout(tensors, options), options)


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

"""Into files of any format: a model (`save`), a step of training (`save_step`), another checkpoint (`convert`).

Values go the way that loading takes, backwards: an array is the leaf of a lazy tensor (`DeviceTensor`), a mapping is
NumPy on such tensors, and what is written is read out of them box by box, so that nothing is gathered.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import operator
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.frameworks import adapters
from lazymodel._abstract.variable import lazy_array, named_arrays
from lazymodel._devices.collective import agreement
from lazymodel._errors import CheckpointError, LazyModelError, warn
from lazymodel._extras import extra
from lazymodel._mapping.resolve import lazy_values
from lazymodel._mapping.table import WeightMap
from lazymodel._remote.path import LocalPath, Location, RemotePath, location, matching
from lazymodel._remote.url import is_url
from lazymodel._save import hdf5, orbax
from lazymodel._save.atomic import staging, writing
from lazymodel._save.destination import SINGLE, Destination, FileDestination, FolderDestination, SaveOptions, layout
from lazymodel._save.hdf5 import Hdf5Shards
from lazymodel._save.orbax import OrbaxDestination
from lazymodel._save.remote import RemoteDestination, check_writable, delete
from lazymodel._save.write import check_budget, share_of, write_files
from lazymodel._show.progress import Progress, ProgressTo, progress_for, reported
from lazymodel._show.text import closest, listed, parse_budget, parse_bytes, plural
from lazymodel._tensors.boxes import Box, box_shape, slabs
from lazymodel._tensors.casting import converted, refusal
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import compared
from lazymodel.checkpoints._checkpoint import DECIDING, KEY, described, is_complete, step_folders
from lazymodel.checkpoints._open import SUFFIXES, open_checkpoint, staging_folder, weight_files
from lazymodel.checkpoints._orbax import find_item

_SUFFIXES = {".safetensors": "safetensors", ".weights.json": "hdf5", ".h5": "hdf5", ".hdf5": "hdf5"}
# Suffixes of files that are not written; a folder of such a name would look like one.
_NOT_WRITTEN = (
    *(suffix for suffix in SUFFIXES if not suffix.endswith(tuple(_SUFFIXES))),
    *(".msgpack", ".onnx", ".safetensor", ".zip"),
)
# The terms of errors if processes that save together disagree.
TERMS = {"done": "saved", "given": "tensors differ", "hint": "Save the same model in all processes"}
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
            arrays, tree = orbax.by_keys(model, arrays)
        where = _located(path, storage_options, format)
        tensors = mapped({name: lazy_array(name, array) for name, array in arrays.items()}, mapping)
        size = parse_bytes(max_shard_size, name="max_shard_size", at_least=1)
        options = SaveOptions(
            shard_size=None if where.suffix == ".safetensors" else size,
            budget=parse_budget(max_host_memory, default_budget(tensors)),
            metadata={"format": "pt"} | dict(metadata or {}),
            bar=progress_for(progress),
        )
    shardings = [each.sharding for each in held.values()]
    write_to(lambda: _destination(tensors, where, format, options, shardings, tree), held, options, overwrite=overwrite)


def write_to(
    make: Callable[[], Destination | RemoteDestination],
    held: Mapping[str, Any],
    options: SaveOptions,
    *,
    overwrite: bool,
) -> None:
    """Writes to a destination, in all processes or in none: what they write is staged until the leading one commits.

    `held` are the variables whose processes save together.
    """
    several, leads = _roles(held)
    with contextlib.ExitStack() as stack:
        with agreement(held, **TERMS) as stage:
            target = make()
            named = [
                (file.name, [(n, each.dtype.name, each.shape, at) for n, each, at in file.tensors])
                for file in target.files
            ]
            count = sum(len(file.tensors) for file in target.files)
            first = repr(named[0][0] if named else "")
            stage.outcome = f"write {plural(count, 'tensor')} to {plural(len(named), 'file')}, {first} first"
            stage.details = repr((named, options.budget, sorted(options.metadata.items())))
            if several:
                stage.shares = {
                    name: share_of(each, leads=leads) for file in target.files for name, each, _ in file.tensors
                }
            stack.enter_context(target.staged(leads=leads, overwrite=overwrite))
        try:
            with agreement(held, **TERMS) as stage:
                if isinstance(target, RemoteDestination):
                    target.write(stage)
                else:
                    write_files(target, options.budget, options.bar, stage, leads=leads)
        except BaseException:
            target.withdraw()
            raise
        with agreement(held, **TERMS) as stage:
            stage.consequence = "while the new checkpoint was put in place: the old one is there, or the new one"
            if leads:
                target.commit()
                stage.consequence = "but the new checkpoint is saved"


def _roles(held: Mapping[str, Any]) -> tuple[bool, bool]:
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


def default_budget(tensors: Mapping[str, LazyTensor]) -> int:
    """Enough for tensors that have to be computed whole."""
    return DEFAULT_BUDGET + 2 * max((tensor.source.min_scratch_nbytes for tensor in tensors.values()), default=0)


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
    shardings: Sequence[Any],
    tree: Mapping[orbax.Keys, Any] | None = None,
) -> Destination | RemoteDestination:
    """The files that there will be, and where; the same in every process."""
    save_id = secrets.token_hex(8)
    if isinstance(where, RemotePath):
        check_writable(where)
        files = layout(tensors, options.shard_size, options.metadata, save_id)
        return RemoteDestination(where, files, options, shardings, save_id)
    if format == "safetensors":
        files = layout(tensors, options.shard_size, options.metadata, save_id)
        target = FileDestination(where, files) if options.shard_size is None else FolderDestination(where, files)
    elif format == "orbax":
        target = OrbaxDestination(LocalPath(os.path.realpath(where)), orbax.layout(tensors, tree))
    else:
        assert options.shard_size is not None
        files = hdf5.layout(tensors, where, options.shard_size)
        target = Hdf5Shards(where, files) if where.suffix == ".json" else FileDestination(where, files)
    check_budget(target.files, options.budget)
    return target


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


_CHUNK = 8 << 20  # bytes of each side that are compared at a time
_LEAST = 64 << 10  # and at least, whatever the budget: a number at a time, each with its chunk, takes forever
_THREADS = 2  # that compare: reading and comparing overlap


def convert(
    source: str,
    destination: str,
    *,
    format: str | None = None,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    mapping: WeightMap | WriteFunction | None = None,
    adapters: Sequence[Any] = (),
    verify: bool = False,
    max_host_memory: int | str | None = None,
    progress: ProgressTo = None,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Saves a checkpoint as another one; returns what `verify` found different, which is nothing where all is well.

    Args:
        source: As for `open_checkpoint`, with `source_options`; what is quantized is decoded.
        destination: As for `save`, as are `format`, `mapping`, `max_host_memory` (bytes), `progress`,
            `storage_options` and further options.
        dtype: The dtype of all floating-point tensors, such as `"bfloat16"`; others stay as they are.
        include: Patterns of names as shells have them (`*`, `?`, `[…]`, case and all); nothing else is converted.
        exclude: Patterns of names that are not.
        adapters: LoRA adapters that `open_adapter` opened, to merge one after another.
        verify: Whether to read everything back and compare it with the source.

    Raises:
        LazyModelError: As `open_checkpoint` and `save`; a pattern matches nothing, or nothing is left; the dtype is
            none of floating point; source and destination are the same.
    """
    wanted = None if dtype is None else _floating(dtype)
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(source, source_options))
        for adapter in adapters:
            checkpoint = stack.enter_context(extra("merge")(checkpoint, adapter))
        if not is_url(destination):
            _check_apart(destination, [source, *checkpoint.files], format)
            _check_hidden(destination, source)
        names = selected(list(checkpoint), include, exclude)
        tensors = mapped({name: checkpoint[name] for name in names}, mapping)
        if wanted is not None:
            tensors = {name: _cast(name, tensor, wanted, checkpoint) for name, tensor in tensors.items()}
        # A safetensors file's metadata says whose names and layouts it has: still true. Other formats' is not copied.
        own = checkpoint.metadata if checkpoint.format == "safetensors" and mapping is None else None
        save(
            tensors,
            destination,
            format=format,
            metadata=own,
            max_host_memory=max_host_memory,
            progress=progress,
            storage_options=storage_options,
            **options,
        )
        if not verify:
            return []
        with open_checkpoint(destination, storage_options) as found:
            forget([] if is_url(destination) else found.files)
            budget = parse_budget(max_host_memory, DEFAULT_BUDGET)
            return list(differences(tensors, found, progress_for(progress), budget))


def _floating(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(jnp.dtype(name))
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise LazyModelError(f"expected a floating-point dtype such as bfloat16, float16 or float32, found {name!r}")
    return dtype


def _cast(name: str, tensor: LazyTensor, dtype: np.dtype[Any], names: Mapping[str, Any]) -> LazyTensor:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor
    if why := refusal(name, tensor, dtype, tensor.file, names):
        raise CheckpointError(why)
    return converted(tensor, dtype)


def selected(names: list[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    for pattern in (*include, *exclude):
        if not fnmatch.filter(names, pattern):
            raise LazyModelError(f"pattern {pattern!r} matches no tensor{closest(pattern, names)}")

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    left = [name for name in names if (not include or fits(name, include)) and not fits(name, exclude)]
    if not left:
        raise LazyModelError(f"no tensor is left of {listed(map(repr, names))}; give other patterns")
    return left


def _check_apart(destination: str, files: Sequence[str], format: str | None) -> None:
    """Raises LazyModelError if the source is the destination, or inside it."""
    where = os.path.realpath(destination)
    here = [file for file in files if not is_url(file)]
    for file in (*map(os.path.abspath, here), *map(os.path.realpath, here)):
        below = where + os.sep if format == "orbax" else None  # a folder that is replaced as a whole
        if where.endswith(".weights.json"):
            below = f"{where.removesuffix('.weights.json')}_"  # what its shards' names begin with
        if where in (file, os.path.dirname(file)) or (below is not None and file.startswith(below)):
            raise LazyModelError(f"{destination} is what is converted, or its folder; convert to another path")


def _check_hidden(destination: str, source: str) -> None:
    """Raises LazyModelError where a folder that is converted would be another checkpoint with the new one in it."""
    if is_url(source) or not os.path.isdir(source):
        return
    where, folder = os.path.realpath(destination), os.path.realpath(source)
    files = weight_files(LocalPath(folder))
    loose = bool(files) and files[0].suffix == ".safetensors" and files[0].name != SINGLE
    if loose and os.path.dirname(where) == folder and where.endswith(".safetensors"):
        raise LazyModelError(
            f"{destination} would be a part of {source}, which is what is converted; convert to another path"
        )


def forget(files: Sequence[str]) -> None:
    """Has the system read files from the disk again rather than from memory, if it can."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        if os.path.isfile(file):
            with open(file, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def differences(
    expected: Mapping[str, LazyTensor],
    found: Mapping[str, LazyTensor],
    bar: Progress,
    budget: int,
) -> Iterator[str]:
    """Yields a text for each tensor that differs, bit for bit, between two checkpoints."""
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in found or name not in expected:
            yield f"{name!r} is {'missing' if name in expected else 'unexpected'}"
    common = {name: (tensor, found[name]) for name, tensor in expected.items() if name in found}
    unit = max(
        (one.source.min_scratch_nbytes + two.source.min_scratch_nbytes for one, two in common.values()), default=0
    )
    threads = max(min(_THREADS, budget // (unit + 4 * _CHUNK)), 1)
    chunk = max(min(_CHUNK, (budget // threads - unit) // 4), _LEAST)
    jobs, different = list[tuple[str, Box]](), set[str]()
    for name, (one, two) in common.items():
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            yield f"{name!r}: expected {_described(one)}, found {_described(two)}"
        elif one.size:
            jobs += [(name, box) for box in slabs(one.shape, max(chunk // one.itemsize, 1))]

    def equal(one: np.ndarray, two: np.ndarray) -> bool:
        return np.array_equal(one.reshape(-1).view(np.uint8), two.reshape(-1).view(np.uint8))

    total = sum(one.nbytes for one, _ in common.values())
    with reported(bar, total, "verifying"), compared(common, jobs, equal, threads, chunk + unit) as results:
        for (name, box), same in zip(jobs, results, strict=True):
            bar.advance(math.prod(box_shape(box)) * common[name][0].itemsize, name)
            if not same and name not in different:
                different.add(name)
                ranges = ", ".join(f"{part.start}:{part.stop}" for part in box)
                yield f"{name!r}: expected other bytes in [{ranges}]"


def _described(tensor: LazyTensor) -> str:
    return f"{tensor.dtype.name}{list(tensor.shape)}"


def save_step(
    model: Any,
    folder: str | os.PathLike[str],
    step: int,
    *,
    metadata: Mapping[str, Any] | None = None,
    data: Any = None,
    max_to_keep: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Saves a step of training, completely or not at all, for `restore` to resume from.

    A step is a folder of safetensors, `folder/100/`, written as by `save`, with all that it promises of failures, kills
    and several processes. It counts when it is complete; earlier steps stay as they are until then.

    Args:
        model: As of `save`: what an abstract model materialized, as training left it.
        folder: A folder of steps, and of no other checkpoint. Or a URL that begins with `s3://`, `gs://` or `az://`.
        step: The number of the step, from 0.
        metadata: Anything else to save, of types that JSON has; `training_state` returns it.
        data: The state of a data iterator, `iterator.get_state()`: bytes, or of types that JSON has. Where several
            processes save, it is the same in all of them.
        max_to_keep: Number of steps that stay, those of the highest numbers and this one; None for all. Leftovers of
            killed savers in earlier steps are removed, too.
        storage_options: For URLs, as of `open_checkpoint`.
        **options: Those of `save`, such as `max_host_memory` (bytes, or `"1GiB"`), `overwrite` and `progress`.

    Raises:
        LazyModelError: As `save`; there is another checkpoint in the folder, which would hide the step; or `metadata`
            or `data` has other types.
        CheckpointError: Another process failed.

    Example:
        >>> trained = sharded.with_optimizer(optax.adamw(1e-3))
        >>> model, state = trained.materialize()
        >>> lm.save_step((model, state), "steps", 5, metadata={"loss": 0.5}, max_to_keep=3)
        >>> model, state = lm.restore(trained, "steps")
    """
    if unknown := [name for name in options if name in ("mapping", "format")]:
        raise LazyModelError(f"save_step takes no argument {unknown[0]}: steps are safetensors under the model's paths")
    held = values_of(model)[1]
    with agreement(held, **TERMS):
        if max_to_keep is not None and (not isinstance(cast(Any, max_to_keep), int) or max_to_keep < 1):
            raise LazyModelError(f"max_to_keep is a number of steps, from 1, or None for all; got {max_to_keep!r}")
        for adapter in adapters():
            if advice := getattr(adapter, "step_advice", _no_advice)(model):
                raise LazyModelError(f"save_step: {advice}")
        number = _number(step)
        about = {KEY: json.dumps(described(metadata, data))}
        _check_folder(location(folder, storage_options))
        where = os.fspath(folder).rstrip("/")
    save(model, f"{where}/{number}", metadata=about, storage_options=storage_options, **options)
    if max_to_keep is not None and _roles(held)[1]:
        try:
            failures = _remove_old(location(where, storage_options), number, max_to_keep)
        except CheckpointError as error:
            failures = [str(error)]
        if failures:
            warn(
                f"step {number} is saved, but not all of older ones could be removed: {listed(failures)}. The next "
                "save tries again"
            )


def _no_advice(model: Any) -> str:
    return ""


def _number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise LazyModelError(f"step is a number from 0; got {step!r}")
    return number


def _check_folder(folder: Location) -> None:
    """Raises LazyModelError where what is in a folder would hide a step."""
    if folder.suffix == ".safetensors" or not (folder.is_dir() or not folder.exists()):
        raise LazyModelError(f"{folder} is the name of a file; give the folder of steps")
    if folder.is_dir() and (found := [file.name for file in weight_files(folder)] or _item(folder)):
        raise LazyModelError(f"{folder} has a checkpoint, {found[0]}, which would hide the step; use another folder")


def _item(folder: Location) -> list[str]:
    try:
        return [] if (item := find_item(folder)) is None else [str(item)]
    except CheckpointError:  # of Orbax, too, though it cannot be opened
        return ["of Orbax"]


def _remove_old(folder: Location, saved: int, most: int) -> list[str]:
    """Removes complete steps beyond the newest, and what killed savers left in earlier ones.

    Returns what could not be removed, in words.
    """
    failures: list[str] = []
    kept = 0
    for number, step in step_folders(folder):
        complete = is_complete(step)
        kept += complete
        goes = number != saved and (kept > most if complete else number < saved)
        # What makes it count goes first, so that a step is never there without its shards.
        names = [*DECIDING, *(path.name for path in matching(step, "model-*.safetensors"))] if goes else []
        if isinstance(step, RemotePath):
            deciding, shards = names[: len(DECIDING)], names[len(DECIDING) :]
            failures += delete([step / name for name in deciding]) or delete([step / name for name in shards])
        elif goes or (complete and staging_folder(step, inside=True).exists()):
            failures += _removed(step, names)
    return failures


def _removed(step: Path, names: Sequence[str]) -> list[str]:
    """Removes files of a step, and what a killed saver left there."""
    try:
        with writing(step):
            with staging(step, inside=True):  # so that nobody saves there meanwhile
                for name in names:
                    (step / name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another saver removed it as well
                if not os.listdir(step):  # there may be files of others
                    step.rmdir()
    except LazyModelError as error:
        return [str(error)]
    return []

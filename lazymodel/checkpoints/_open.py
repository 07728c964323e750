"""`open_checkpoint`, which finds out the format of a path, and the one table of formats."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from lazymodel._devices.agreement import opening
from lazymodel._devices.coordination import run_store
from lazymodel._errors import CheckpointError
from lazymodel._remote.hugging_face import cached_commit, cached_snapshot, is_offline
from lazymodel._remote.path import Location, RemotePath, remote_path
from lazymodel._remote.requests import Unavailable
from lazymodel._remote.url import is_url
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint
from lazymodel.checkpoints._decoded import DecodedCheckpoint, decoded
from lazymodel.checkpoints._foreign import foreign
from lazymodel.checkpoints._gguf import model_files, open_gguf, split_names
from lazymodel.checkpoints._hdf5 import open_archive, open_hdf5
from lazymodel.checkpoints._numpy import npy_names, open_npy, open_npy_folder, open_npz
from lazymodel.checkpoints._orbax import open_orbax
from lazymodel.checkpoints._orbax_folder import find_item
from lazymodel.checkpoints._safetensors import SafetensorsFile
from lazymodel.checkpoints._shards import by_shard, open_indexed, open_loose
from lazymodel.checkpoints._steps import newest_step
from lazymodel.checkpoints._untrusted import check_pointer, read_json_file, require_shards, shard_path, weight_map
from lazymodel.checkpoints._verify import Verify, verify_files
from lazymodel.checkpoints._verify_remote import verify_objects

SAVING = ".lazymodel-saving"  # what the names of savers' own folders end in
OLD = "old"  # in one: the folder that is being replaced, where the file system cannot exchange two in one step


class Format(NamedTuple):
    """A kind of file: what its names end in, what its content begins with, and how it is opened."""

    name: str
    suffixes: tuple[str, ...]
    magic: bytes | None
    open: Callable[[Any], Checkpoint]  # of a `Location`
    shard: Format | None = None  # the format of the files that it names, where it is an index
    grouped: bool = False  # whether its indexes list groups of tensors, each perhaps in several shards


def _index_of(suffix: str, kind: Format) -> Format:
    def open_index(index: Location) -> Checkpoint:
        weights = weight_map(read_json_file(index), index)
        return JoinedCheckpoint(index, open_indexed(index, weights, kind.open, grouped=kind.grouped))

    return Format(kind.name, (suffix,), None, open_index, kind)


SAFETENSORS = Format("safetensors", (".safetensors",), None, SafetensorsFile)
_HDF5 = Format("hdf5", (".weights.h5", ".h5", ".hdf5"), b"\x89HDF\r\n\x1a\n", open_hdf5, grouped=True)
# The first one that a file's name or content fits is its format.
_FORMATS = (
    _index_of(".safetensors.index.json", SAFETENSORS),
    _index_of(".weights.json", _HDF5),
    SAFETENSORS,
    _HDF5,
    Format("numpy", (".npz",), None, open_npz),
    Format("numpy", (".npy",), b"\x93NUMPY", open_npy),
    Format("hdf5", (".keras",), b"PK\x03\x04", open_archive),
    Format("gguf", (".gguf",), b"GGUF", open_gguf),
)
_SUPPORTED = (
    "a .safetensors file, a folder of them (with or without *.safetensors.index.json), Keras weights (.weights.h5, "
    ".weights.json, .h5), a .keras archive, a Keras Hub preset folder, an Orbax checkpoint (an item, a step, or a "
    "folder of steps), a folder of numbered folders with safetensors, a .gguf file or a folder of one model's, or "
    "NumPy's .npz and .npy, or a folder of .npy"
)


def format_of(file: Location, head: bytes = b"") -> Format | None:
    """The format of a file of this name whose content begins like this."""
    return next(
        (
            kind
            for kind in _FORMATS
            if file.name.endswith(kind.suffixes) or (kind.magic and head.startswith(kind.magic))
        ),
        None,
    )


def open_checkpoint(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    verify: Verify = False,
) -> Checkpoint:
    """Opens a checkpoint without reading its tensors; the format is found from the path and its first bytes.

    Args:
        path: A path or URL of a safetensors file or a folder with `*.safetensors.index.json`, `model.safetensors` or
            other safetensors files; a Keras `.weights.h5`, `.weights.json` (sharded) or `.keras` file; a Keras Hub
            preset folder (`model.weights.h5` or `model.weights.json`); an Orbax checkpoint: the folder of its arrays,
            of a step, or of steps, of which the newest committed one is opened; a folder of folders with numbers for
            names, of which the newest with an index or a `model.safetensors` is opened; a `.gguf` file, any file of a
            split one, or their folder; a `.npz` or `.npy` file; or a folder with nothing of these but `.npy` files in
            it and its folders, whose paths are the names. Archives are read in place. A Hugging Face folder that is
            quantized opens as the plain checkpoint that it stands for; see docs/quantized.md.
        storage_options: For URLs: what obstore's store takes, such as `{"region": "…"}`; see docs/buckets.md.
        verify: Whether to hash the files first, index and all, and refuse content that is not what is stated: True for
            the hashes that a Hugging Face cache or download, or a manifest such as `SHA256SUMS` in the folder, states;
            the path of a manifest; or a mapping of file name, relative to the checkpoint's folder, to
            `"sha256:<hex>"`. This reads every file once. Of a URL, True takes the hashes that the Hugging Face hub or
            a manifest beside it states.

    Where several processes run (`jax.distributed`), opening takes part in what they agree on: all of them open the same
    checkpoints, and where one cannot, its error is raised in the others as well, when they come to materialize or save.

    Returns:
        A mapping of tensor name to `LazyTensor`. Names are the file's own: for Keras files the dataset's path, such
        as `layers/dense/vars/0`; for Orbax the keys of the saved tree joined by `/`, such as
        `trainable_variables/sequential/dense/kernel` for what `keras.callbacks.OrbaxCheckpoint` saved.

    Raises:
        CheckpointError: Nothing is there, the format is unknown, or a file is truncated, inconsistent or hostile; an
            Orbax checkpoint was never committed, or has several items with arrays, which are then listed; with
            `verify`, also a file whose content has another hash, or whose hash nobody states.

    Example:
        >>> lm.open_checkpoint("model.safetensors")["up/kernel"]
        LazyTensor('up/kernel', float32[64, 256] in model.safetensors)
    """
    with opening():
        where = located(path, storage_options)
        if verify is False:
            try:
                return open_located(where)
            except CheckpointError:
                if (now := _replaced(where, path, storage_options)) is None:
                    raise
            return open_located(now)
        with open_located(where) as unverified:
            files = content_files(unverified)
        if isinstance(where, RemotePath):
            verify_objects(files, verify, where.parent if where.is_file() else where)
            return open_located(where)  # once more, and pinned to what was hashed
        hashed = verify_files(files, verify, where if where.is_dir() else where.parent)
        checkpoint = open_located(where)  # once more, so that headers and index, too, are those that were hashed
        try:
            for source in hashed:
                source.check_unchanged()
        except CheckpointError:
            checkpoint.close()
            raise
        return checkpoint


def _replaced(
    where: Location, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> Location | None:
    """Where a checkpoint is in a bucket that took the place of another one while that was opened, if one did."""

    def state(there: RemotePath) -> list[Any]:
        files = weight_files(there) if there.is_dir() else [there]
        return [(str(file), there.store.find(file.key)) for file in cast("Sequence[RemotePath]", files)]

    if not isinstance(where, RemotePath) or not where.store.lists:
        return None
    now = cast(RemotePath, located(path, storage_options))
    return now if state(now) != state(where) else None


def content_files(checkpoint: Checkpoint) -> list[str]:
    """Paths of the files that decide what a checkpoint holds: those of its tensors, and its index if it has one."""
    path = checkpoint.path
    index = [path] if (path.endswith(".json") if is_url(path) else os.path.isfile(path)) else []
    config = [checkpoint.config] if isinstance(checkpoint, DecodedCheckpoint) else []
    return list(dict.fromkeys([*index, *config, *checkpoint.files]))


def staging_folder(destination: Path, *, inside: bool = False) -> Path:
    """Where a saver of a destination has its folder; the same in every process."""
    return destination / SAVING if inside else destination.parent / f".{destination.name}{SAVING}"


def located(path: str | os.PathLike[str] | RemotePath, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Where a path or URL leads, to something that is there; CheckpointError if nothing is.

    What lies complete in the local cache of the Hugging Face hub is there and nowhere else.
    """
    if isinstance(path, RemotePath):
        return path
    if not isinstance(cast(Any, path), str | os.PathLike):
        raise CheckpointError(f"open_checkpoint takes a path or URL, text or a pathlib.Path; got {reprlib.repr(path)}")
    if not is_url(path):
        if storage_options:
            raise CheckpointError(f"{os.fspath(path)}: storage_options are for URLs, found a path")
        return existing(path)
    where = remote_path(cast(str, path), storage_options)
    if (cached := cached_copy(where)) is not None:
        return cached.path
    if where.store.lists and not where.exists():
        raise CheckpointError(f"there is no checkpoint at {where}: the store has nothing there")
    return where


def existing(path: str | os.PathLike[str]) -> Path:
    """A path at which something is; CheckpointError if nothing is, or what is there must not be looked at."""
    try:
        os.stat(path)
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        old = staging_folder(Path(path)) / OLD
        if not os.path.lexists(path) and os.path.isdir(old):
            return old
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointError(f"there is no checkpoint at {os.fspath(path)}: {reason}") from error
    return Path(path)


class CachedCopy(NamedTuple):
    """Where something of the Hugging Face hub lies on this machine, and whether the hub cannot be asked for more."""

    path: Path
    offline: bool


def cached_copy(where: RemotePath) -> CachedCopy | None:
    """What the local cache of the Hugging Face hub has of a place in it: a file, or all weights of a folder.

    Of a revision, the commit that the hub says it is; where the hub cannot be reached, or must not be asked
    (`HF_HUB_OFFLINE`), the one that it was. Several processes, of which one may have what another lacks, all ask the
    hub: they divide between them what comes from there, and must come to the same division.

    Raises:
        CheckpointError: The hub cannot be asked, and not all is in the cache.
    """
    repository = where.store.repository
    if repository is None or (run_store() is not None and not is_offline()):
        return None
    known = cached_commit(repository.name, repository.revision)
    stale = None if known is None else _in_snapshot(cached_snapshot(repository.name, known), where.key)
    why = "HF_HUB_OFFLINE is set"
    if not is_offline():
        try:
            # With a copy there, a hub that does not answer is not waited for.
            snapshot = cached_snapshot(repository.name, where.store.commit(once=stale is not None))
            path = _in_snapshot(snapshot, where.key)
            if path is None or (
                path.is_dir() and not all((path / file.name).is_file() for file in weight_files(where))
            ):
                return None
            return CachedCopy(path, False)
        except Unavailable as error:
            why = str(error)
    if stale is not None:
        return CachedCopy(stale, True)
    raise CheckpointError(
        f"{where}: {why}, and the local cache of the hub does not have all of its weights. Download it while the hub "
        "can be reached, or give the path of a folder that has them."
    )


def _in_snapshot(snapshot: Path | None, key: str) -> Path | None:
    """A place in a snapshot of a repository, if all weights that belong to it are there."""
    if snapshot is None or not (where := snapshot / key).exists():
        return None
    try:
        there = weight_files(where) if where.is_dir() else [where]
        files = [file.parent / name for file in there for name in split_names(file.name)]
        for file in files:
            kind = format_of(file)
            if kind is not None and kind.shard is not None:
                weights = weight_map(read_json_file(file), file)
                require_shards(
                    file, [shard_path(file, shard) for shard in by_shard(weights, file, grouped=kind.grouped)]
                )
    except CheckpointError:
        return None
    return where if files and all(file.is_file() for file in files) else None


def weight_files(folder: Location) -> Sequence[Location]:
    """The files of a folder that are its checkpoint: an index, the only weight file, or all safetensors files."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / "model.safetensors.index.json"
    if len(indexes) > 1 and preferred not in indexes:
        raise CheckpointError(f"{folder} has {len(indexes)} index files; open one of {[str(i) for i in indexes]}")
    if indexes:
        return [preferred if preferred in indexes else indexes[0]]
    for name in ("model.safetensors", "model.weights.json", "model.weights.h5"):
        if (folder / name).exists():
            return [folder / name]
    return sorted(folder.glob("*.safetensors")) or model_files(folder)


def no_checkpoint(folder: Location) -> CheckpointError:
    """The error for a folder in which nothing is known."""
    found = foreign(file.name for file in folder.glob("*"))
    return CheckpointError(f"found no checkpoint in folder {folder}; {found}supported: {_SUPPORTED}")


def _known_format(file: Location) -> Format | None:
    kind = format_of(file, check_pointer(file))
    # PyTorch's files are archives as well, and Equinox' are NumPy's one after the other.
    shared = kind is not None and kind.open in (open_archive, open_npy) and not file.name.endswith(kind.suffixes)
    return None if shared and foreign([file.name]) else kind


def open_located(where: Location, *, as_stored: bool = False) -> Checkpoint:
    """Opens what is at a place, decoded where the configuration beside it says that it is quantized."""
    files = weight_files(where) if where.is_dir() else [where]
    if not files:
        if (item := find_item(where)) is not None:
            return open_orbax(where, item)
        if (step := newest_step(where)) is not None:
            return open_located(step, as_stored=as_stored)
        if names := npy_names(where):
            return open_npy_folder(where, names)
        raise no_checkpoint(where)
    if where.is_dir() and files[0].suffix == ".safetensors":
        checkpoint = JoinedCheckpoint(where, open_loose(where, files, SafetensorsFile))
    elif (kind := _known_format(files[0])) is None:
        raise CheckpointError(f"{where} is in no known format; {foreign([where.name])}supported: {_SUPPORTED}")
    else:
        checkpoint = kind.open(files[0])
    if as_stored or checkpoint.format != SAFETENSORS.name:
        return checkpoint
    return decoded(checkpoint, where if where.is_dir() else where.parent)

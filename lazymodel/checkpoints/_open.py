"""`open_checkpoint`, which finds out the format of a path, and the one table of formats.

Finding the contents of a path collects all that is wrong with it: opening raises that, and `lazymodel
inspect` shows it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from lazymodel._devices.collective import opening, run_store
from lazymodel._errors import CheckpointError
from lazymodel._extras import extra
from lazymodel._remote.hub import cached_commit, cached_snapshot, is_offline
from lazymodel._remote.path import LocalPath, Location, RemotePath, location, matching
from lazymodel._remote.requests import Unavailable
from lazymodel._remote.url import is_url
from lazymodel._show.text import listed
from lazymodel.checkpoints._checkpoint import Checkpoint, Verify, newest_step
from lazymodel.checkpoints._hugging_face import DecodedCheckpoint, decoded
from lazymodel.checkpoints._safetensors import Contents, Index, SafetensorsFile, is_numbered, loose_files
from lazymodel.checkpoints._untrusted import check_pointer, indexed_shards, read_json_file, weight_map

T = TypeVar("T")

SAVING = ".lazymodel-saving"  # what the names of savers' own folders end in
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_LOOKS = 10  # at a folder that changes while it is looked at, which takes longer than replacing what is in it
OLD = "old"  # in one: the folder that is being replaced, where the file system cannot exchange two in one step


def _by(name: str) -> Callable[[Location], Checkpoint]:
    """What opens the files of a format that is an extra, which is loaded for the first of them."""
    return lambda path: extra(name)(path)


class Format(NamedTuple):
    """A kind of file: what its names end in, what its content begins with, and how it is opened."""

    name: str
    suffixes: tuple[str, ...]
    magic: bytes | None
    open: Callable[[Any], Checkpoint]  # of a `Location`; of an index, the files that it names
    shards: str = ""  # what names of the shards end in, where it is an index
    grouped: bool = False  # whether the index lists groups of tensors, each perhaps in several shards


_NUMPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
_MSGPACK = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)[ -~]", re.DOTALL)  # {"text": …}
# The first one that a file's name or content fits is its format.
_FORMATS = (
    Format("safetensors", (".safetensors.index.json",), None, SafetensorsFile, ".safetensors"),
    Format("hdf5", (".weights.json",), None, _by("open_hdf5"), ".weights.h5", grouped=True),
    Format("pytorch", (".bin.index.json",), None, _by("PyTorchFile"), ".bin"),
    Format("msgpack", (".msgpack.index.json",), None, _by("MsgpackFile"), ".msgpack"),
    Format("safetensors", (".safetensors",), None, SafetensorsFile),
    Format("hdf5", (".weights.h5", ".h5", ".hdf5"), b"\x89HDF\r\n\x1a\n", _by("open_hdf5")),
    Format("numpy", (".npz",), None, _by("open_npz")),
    Format("numpy", (".npy",), _NUMPY, _by("open_npy")),
    Format("gguf", (".gguf",), b"GGUF", _by("open_gguf")),
    Format("pytorch", (".bin", ".pt", ".pth", ".ckpt", ".pth.tar"), None, _by("PyTorchFile")),
    Format("hdf5", (".keras",), _ZIP, _by("open_archive")),
    Format("msgpack", (".msgpack",), None, _by("MsgpackFile")),  # of `checkpoint_10`, the content tells
)
SUFFIXES = tuple(suffix for kind in _FORMATS for suffix in kind.suffixes)
_SUPPORTED = (
    "a .safetensors file, a folder of them (with or without *.safetensors.index.json), Keras weights (.weights.h5, "
    ".weights.json, .h5), a .keras archive, a Keras Hub preset folder, an Orbax checkpoint (an item, a step, or a "
    "folder of steps), a folder of numbered folders with safetensors, a .gguf file or a folder of one model's, "
    "NumPy's .npz and .npy, or a folder of .npy, PyTorch's .bin, .pt, .pth and .ckpt (with or without "
    "*.bin.index.json), or Flax' .msgpack (with or without *.msgpack.index.json) and checkpoint_N"
)


EQUINOX = "leaves of an Equinox model, which have no names"
SAVE_EQUINOX = (
    "save it as safetensors: `with open(path, 'rb') as file: lm.save(eqx.tree_deserialise_leaves(file, abstract.tree), "
    "'model.safetensors')`, with `abstract = lm.build_abstract(...)` and, if a line of JSON comes first, "
    "`file.readline()` before"
)
_HEAD = 1 << 16  # bytes that are looked at, to know what a file is; a first line of text may be long
# Formats that are known and not read: patterns of names, what such a file is, and how it becomes one that is read. The
# first that fits is meant.
_FOREIGN = (
    (
        ("*.distcp",),
        "a checkpoint of torch.distributed",
        "save it as a file that is read, where PyTorch is: "
        '`torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, "model.pt")`',
    ),
    (
        ("*.pt2",),
        "a program of torch.export",
        "save its weights as a file that is read, where PyTorch is: "
        '`torch.save(torch.export.load(path).state_dict, "model.pt")`',
    ),
    (
        ("*.index", "*.data-?????-of-?????", "saved_model.pb"),
        "a checkpoint of TensorFlow",
        'save it as Keras weights, where it can be loaded: `model.save_weights("model.weights.h5")`',
    ),
    (("*.eqx",), EQUINOX, SAVE_EQUINOX),
    (
        ("*.tar", "*.tar.*", "*.tgz", "*.gz", "*.lz4", "*.zst", "*.xz", "*.bz2"),
        "a packed archive",
        "unpack it, and open what is in it",
    ),
    (
        ("*.pkl", "*.pickle"),
        "a Python pickle, which can run any code when it is read",
        'save it as safetensors, if you trust it: `lm.save(tree, "model.safetensors")`',
    ),
)
_BEGINNINGS = {
    EQUINOX: re.compile(rb"\{[^\n]*\n\x93NUMPY"),  # after a line of hyperparameters
}


def foreign(names: Iterable[str], head: bytes = b"") -> str:
    """The kind of file that the first of these names is known for, or one with this beginning, and the fix; empty if
    none is known.
    """
    there = sorted(names)
    for patterns, what, fix in _FOREIGN:
        begins = what in _BEGINNINGS and _BEGINNINGS[what].match(head)
        for name in there:
            if begins or any(fnmatchcase(name, pattern) for pattern in patterns):
                return f"{name} looks like {what}; {fix}. "
    return ""


def format_of(file: Location, head: bytes = b"") -> Format | None:
    """The format of a file of this name whose content begins like this."""
    for kind in _FORMATS:
        if file.name.endswith(kind.suffixes) or (kind.magic and head.startswith(kind.magic)):
            return kind
    return _FORMATS[-1] if _MSGPACK.match(head) else None


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
            it and its folders, whose paths are the names; a file of PyTorch's (`.bin`, `.pt`, `.pth`, `.ckpt`), an
            index of such, or a folder that only has these; a file of Flax' msgpack, an index of such, or a folder that
            only has these, of which the newest `checkpoint_N` is opened. Archives are read in place. A Hugging Face
            folder that is quantized opens as the plain checkpoint that it encodes; see docs/quantized.md.
        storage_options: For URLs: what obstore's store takes, such as `{"region": "…"}`; see docs/buckets.md.
        verify: Whether to hash the files first, index and all, and refuse content that is not what is stated: True for
            the hashes that a Hugging Face cache or download, or a manifest such as `SHA256SUMS` in the folder, states;
            the path of a manifest; or a mapping of file name, relative to the checkpoint's folder, to
            `"sha256:<hex>"`. This reads every file once. For a URL, True takes the hashes that the Hugging Face hub or
            a manifest in the same folder states.

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
                # A bucket in which another checkpoint took its place meanwhile is looked at once more.
                now = where.anew()
                if now is where or _fingerprints(now) == _fingerprints(where):
                    raise
            return open_located(now)
        with open_located(where) as unverified:
            files = content_files(unverified)
        hashed = extra("verify_files")(files, verify, where.parent if where.is_file() else where)
        checkpoint = open_located(where)  # once more, so that headers and index, too, are those that were hashed
        try:
            for source in hashed:
                source.check_unchanged()
        except CheckpointError:
            checkpoint.close()
            raise
        return checkpoint


def _fingerprints(place: Location) -> list[tuple[str, str]]:
    """The files of a checkpoint in a bucket as they are now: what its list says may be outdated."""
    found = list[tuple[str, str]]()
    for file in weight_files(place) if place.is_dir() else [place]:
        with contextlib.suppress(FileNotFoundError):
            file.stat()
            found.append((str(file), file.fingerprint()))
    return found


def content_files(checkpoint: Checkpoint) -> list[str]:
    """Paths of the files that decide what a checkpoint holds: those of its tensors, and its index if it has one."""
    path = checkpoint.path
    index = [path] if (path.endswith(".json") if is_url(path) else os.path.isfile(path)) else []
    config = [checkpoint.config] if isinstance(checkpoint, DecodedCheckpoint) else []
    return list(dict.fromkeys([*index, *config, *checkpoint.files]))


def staging_folder(destination: Path, *, inside: bool = False) -> Path:
    """Where a saver of a destination has its folder; the same in every process."""
    return destination / SAVING if inside else destination.parent / f".{destination.name}{SAVING}"


def located(path: str | os.PathLike[str] | RemotePath, options: Mapping[str, Any] | None = None) -> Location:
    """Where a path or URL leads, to something that is there; CheckpointError if nothing is.

    If the local cache of the Hugging Face hub has all of it, that is the place.
    """
    where = location(path, options)
    if isinstance(where, LocalPath):
        return existing(cast(Any, path))
    if (cached := cached_copy(where)) is not None:
        return cached.path
    if where.lists and not where.exists():
        raise CheckpointError(f"there is no checkpoint at {where}: the store has nothing there")
    return where


def existing(path: str | os.PathLike[str]) -> LocalPath:
    """A path at which something is; CheckpointError if nothing is, or what is there must not be looked at."""
    try:
        os.stat(path)
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        old = LocalPath(staging_folder(Path(path)) / OLD)
        if not os.path.lexists(path) and os.path.isdir(old):  # unlike pathlib's, it takes any name
            return old
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointError(f"there is no checkpoint at {os.fspath(path)}: {reason}") from error
    return LocalPath(path)


class CachedCopy(NamedTuple):
    """A path in the local cache of the Hugging Face hub; `offline` is True if the hub cannot be reached."""

    path: LocalPath
    offline: bool


def cached_copy(where: RemotePath) -> CachedCopy | None:
    """Finds a place of the Hugging Face hub in the local cache: a file, or all weights of a folder.

    A revision is resolved to a commit by the hub; if that cannot be reached, or must not be (`HF_HUB_OFFLINE`), by the
    cache. Several processes, whose caches may differ, all ask the hub: they divide the downloads between them, and must
    agree on the division.

    Raises:
        CheckpointError: The hub cannot be reached, and the cache is incomplete.
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
            if path is None or (path.is_dir() and not all((path / file.name).is_file() for file in _named(where))):
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


def _named(folder: Location) -> Sequence[Location]:
    """The files of a folder that are known for weights by their names, PyTorch's among them."""
    return weight_files(folder) or model_weights(folder)


def _in_snapshot(snapshot: Path | None, key: str) -> LocalPath | None:
    """A place in a snapshot of a repository, if all weights that belong to it are there."""
    if snapshot is None or not (where := LocalPath(snapshot / key)).exists():
        return None
    try:
        there = _named(where) if where.is_dir() else [where]
        files = [file.parent / name for file in there for name in split_names(file.name)]
        for file in files:
            kind = format_of(file)
            shards = indexed_shards(file) if kind is not None and kind.shards else []
            if not all(each.is_file() for each in (file, *shards)):
                return None
    except CheckpointError:
        return None
    return where if files else None


def weight_files(folder: Location) -> Sequence[Location]:
    """The files of a folder that are its checkpoint: an index, the only weight file, or all safetensors files."""
    indexes = matching(folder, "*.safetensors.index.json")
    preferred = folder / "model.safetensors.index.json"
    if len(indexes) > 1 and preferred not in indexes:
        raise CheckpointError(f"{folder} has {len(indexes)} index files; open one of {[str(i) for i in indexes]}")
    if indexes:
        return [preferred if preferred in indexes else indexes[0]]
    for name in ("model.safetensors", "model.weights.json", "model.weights.h5"):
        if (folder / name).exists():
            return [folder / name]
    return loose_files(folder) or model_files(folder)


def split_names(name: str) -> list[str]:
    """The names of all files of the model of which a file of this name is one, by its name."""
    if (match := _SPLIT.fullmatch(name)) is None:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def model_files(folder: Location) -> Sequence[Location]:
    """The GGUF files of a folder, which must be of one model."""
    files = matching(folder, "*.gguf")
    models = {split_names(file.name)[0]: None for file in files}
    if len(models) > 1:
        raise CheckpointError(f"{folder} has {len(models)} GGUF models; open one of {list(models)}")
    return files


def model_weights(folder: Location) -> Sequence[Location]:
    """The files of a Hugging Face folder whose weights are PyTorch's: an index, the only file, or numbered ones."""
    for name in ("pytorch_model.bin.index.json", "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
    return matching(folder, "pytorch_model-*-of-*.bin")


def pytorch_files(folder: Location) -> Sequence[Location]:
    """The files of a folder that are PyTorch's by their names: those of a model, or the only one."""
    if files := model_weights(folder):
        return files
    indexes = matching(folder, "*.bin.index.json")
    found = (matching(folder, f"*.{suffix}") for suffix in ("bin", "pt", "pth", "ckpt"))
    files = indexes or sorted(itertools.chain(*found))
    if len(files) > 1:
        names = listed([file.name for file in files])
        raise CheckpointError(f"{folder} has {len(files)} files of PyTorch's; open one of {names}")
    return files


def msgpack_file(folder: Location) -> Location | None:
    """The file of Flax' in a folder: an index, `flax_model.msgpack`, the only one, or the newest `checkpoint_N`."""
    for name in ("flax_model.msgpack.index.json", "flax_model.msgpack"):
        if (folder / name).exists():
            return folder / name
    steps = [file for file in matching(folder, "checkpoint_*") if file.name[11:].isdecimal() and file.is_file()]
    files = matching(folder, "*.msgpack") or sorted(steps, key=lambda file: int(file.name[11:]))[-1:]
    return files[0] if len(files) == 1 else None


def npy_names(folder: Location) -> list[str]:
    """Paths of the `.npy` files in a folder and its folders, without the suffix; none that begins with a dot."""
    return sorted(name[:-4] for name in folder.files_below() if name.endswith(".npy") and "/." not in f"/{name}")


def find_contents(where: Location) -> Contents:
    """Opens what is at a place as it is stored, and notes what is wrong with it.

    Raises:
        CheckpointError: Nothing in a folder is a checkpoint.
    """
    return _settled(where.state, lambda _: _find_contents(where))


def _settled(state: Callable[[], T], look: Callable[[T], Contents]) -> Contents:
    """What a look finds; if it finds problems and a saver changed the state meanwhile, what another look finds."""
    for _ in range(_LOOKS):
        before = state()
        try:
            found = look(before)
        except CheckpointError:
            if state() == before:
                raise
            continue
        if not found.problems or state() == before:
            return found
        for part, _ in found.parts:
            part.close()
    return look(state())


def _find_contents(where: Location) -> Contents:
    found = Contents(where, "safetensors")
    files: Sequence[Location] = [where]
    if where.is_dir():
        with found.noting():
            files = weight_files(where)
        if found.problems:
            return found
        if files and files[0].suffix == ".safetensors":
            found.add_loose(files, SafetensorsFile)
            return found
    if not files:
        return _without_weight_files(where)
    file, there = files[0], files[0].is_file()
    if there:
        found.files.append(file)
    if (kind := format_of(file)) is not None and kind.shards:
        found.index, found.format = file, kind.name
        try:
            content = read_json_file(file)
            index = Index(file, file.name, weight_map(content, file), kind.grouped)
        except CheckpointError as error:
            found.problem(str(error), file)
            # What is stored alongside is shown all the same.
            found.add_loose(matching(file.parent, f"*{kind.shards}"), kind.open)
            return found
        found.metadata = content.get("metadata")
        found.add_indexed(index, kind.open)
        found.check_parts(file.parent)
        return found
    found.format = "unknown" if kind is None else kind.name
    with found.noting(file if there else None):
        head = check_pointer(file)
        # Others' files are called `.bin`, too; a pickle can be in an archive, and Equinox' are NumPy's in a row.
        if kind is None or kind.name == "pytorch":
            kind = format_of(file, head)
            if kind and kind.magic in (_ZIP, _NUMPY) and foreign([file.name]):
                kind = None
        if kind is None:
            with file.open("rb") as stream:
                head = stream.read(_HEAD) or head
            raise CheckpointError(
                f"{where} is in no known format; {foreign([where.name], head)}supported: {_SUPPORTED}"
            )
        found.add(kind.open(file))
        found.format = kind.name
        found.check_parts(file.parent)
    return found


def _without_weight_files(where: Location) -> Contents:
    """Opens a folder without files that are known by their name: of Orbax, of steps, of `.npy` files, or PyTorch's."""
    found = Contents(where, "orbax")
    with found.noting():
        if (checkpoint := extra("open_orbax")(where)) is not None:
            found.add(checkpoint)
    if found.whole is not None or found.problems:
        return found
    if newest_step(where) is not None:
        return _settled(lambda: newest_step(where), lambda step: find_contents(step or where))
    if not (names := npy_names(where)):
        if files := pytorch_files(where):
            if len(files) == 1 and not is_numbered(files[0].name):
                return find_contents(files[0])
            found.format = "pytorch"
            found.add_loose(files, _by("PyTorchFile"))
            return found
        if file := msgpack_file(where):
            return find_contents(file)
        if not where.lists:
            raise CheckpointError(
                f"cannot read {where}: the server answers 404 (not found), or with a page, for it and for the files of "
                "a checkpoint's folder below it. Check the address; web servers list no folders: give that of a file"
            )
        others = foreign(file.name for file in matching(where, "*"))
        raise CheckpointError(f"found no checkpoint in folder {where}; {others}supported: {_SUPPORTED}")
    found.format = "numpy"
    with found.noting():
        found.add(extra("open_npy_folder")(where, names))
    return found


def orbax_in(folder: Location) -> str:
    """The Orbax checkpoint that a folder is or has, in words; empty if there is none."""
    try:
        items = extra("find_items")(folder)
    except CheckpointError:  # there is one, though it cannot be opened
        return "of Orbax"
    return " and ".join(map(str, items))


def open_located(where: Location, *, as_stored: bool = False) -> Checkpoint:
    """Opens what is at a place, decoded where the configuration alongside it says that it is quantized."""
    found = find_contents(where)
    checkpoint = found.checkpoint()
    if as_stored or checkpoint.format not in ("safetensors", "pytorch"):
        return checkpoint
    return decoded(checkpoint, found.where if found.where.is_dir() else found.where.parent)

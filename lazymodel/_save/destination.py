"""Where files go, safetensors above all: what is there already, and the steps after which the new files count instead.

Responsible for names, for which files are the old checkpoint, and for the order in which files come and go. Not
responsible for what is in them, nor for how one step is made to happen completely or not at all (`_save/atomic`).

The files that count in a folder are those that `open_checkpoint` opens: an index before `model.safetensors`, and that
before numbered shards without an index. Other programs open `model.safetensors` first, so it comes and goes while there
is a complete index, and both see the old checkpoint or the new one at every instant. Shards come under unused names,
then the index is replaced, then the old shards go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lazymodel._errors import LazyModelError
from lazymodel._remote.path import LocalPath, Location, matching
from lazymodel._save.atomic import Staging, staging, writing
from lazymodel._show.progress import Progress
from lazymodel._show.text import format_bytes, listed
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import newest_step
from lazymodel.checkpoints._open import staging_folder, weight_files
from lazymodel.checkpoints._orbax import find_item
from lazymodel.checkpoints._safetensors import (
    DTYPES,
    DTYPES_KEY,
    FLOAT4,
    MAX_HEADER,
    OWN_DTYPES,
    SAVE_KEY,
    is_numbered,
    open_loose,
)
from lazymodel.checkpoints._untrusted import indexed_shards

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """How safetensors files are saved, wherever they go."""

    shard_size: int | None  # bytes of tensors in a file, at most; None for one file
    budget: int  # bytes of the host's memory
    metadata: Mapping[str, str]  # for the header of every file
    bar: Progress


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """One file to write."""

    name: str
    header: bytes  # everything before the tensors
    tensors: tuple[tuple[str, LazyTensor, int], ...]  # name, tensor, and byte in the file
    nbytes: int  # of all of it
    rest: tuple[tuple[int, bytes], ...] = ()  # other bytes, and where in the file they are


def grouped(
    tensors: Mapping[str, LazyTensor], shard_size: int | None, nbytes_of: Callable[[str, LazyTensor], int]
) -> list[dict[str, LazyTensor]]:
    """Divides tensors among files, in their order; one file where there is no limit."""
    groups: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = nbytes_of(name, tensor)
        if shard_size is not None and groups[-1] and size + nbytes > shard_size:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += nbytes
    return groups


class Destination:
    """Where files go, into a file or a folder, and the steps there."""

    _inside: bool  # whether the path is a folder that files are put into

    def __init__(self, path: LocalPath, files: list[SavedFile]) -> None:
        self.path, self.files = path, files
        self._stage = Staging(path, inside=self._inside)

    def place(self, file: SavedFile) -> Path:
        """A file's temporary place, the same in every process."""
        return self._stage.new / file.name

    @contextlib.contextmanager
    def staged(self, *, leads: bool, overwrite: bool) -> Generator[None]:
        """Locks the destination and makes every file with its header and its full length, until the block ends.

        Only the leading process does: the others write into its files.
        """
        if not leads:
            yield
            return
        with staging(self.path, inside=self._inside, rivals=self._rivals()) as self._stage:
            check_overwrite(self._there(), overwrite)
            with writing(self.path):
                check_room(self.path, sum(file.nbytes for file in self.files), self._stage.new)
                for file in self.files:
                    self.place(file).parent.mkdir(parents=True, exist_ok=True)
                    with open(self.place(file), "xb") as stream:
                        for start, text in ((0, file.header), *file.rest):
                            stream.seek(start)
                            stream.write(text)
                        stream.truncate(file.nbytes)
            yield

    def withdraw(self) -> None:
        """Does nothing: staged files are removed with their folder."""

    def commit(self) -> None:
        """Puts the complete files in place; where that cannot be done, what was there is as it was."""
        raise NotImplementedError

    def _rivals(self) -> list[Path]:
        """The staging folders of destinations that have files in common with this one."""
        raise NotImplementedError

    def _there(self) -> LocalPath | None:
        """Returns the path to be replaced, if any; raises LazyModelError if it must not be."""
        raise NotImplementedError


class FileDestination(Destination):
    """A single file, such as `x.safetensors`."""

    _inside = False

    def __init__(self, path: LocalPath, files: list[SavedFile]) -> None:
        super().__init__(path, [dataclasses.replace(file, name=path.name) for file in files])

    def _rivals(self) -> list[Path]:
        return [staging_folder(self.path.parent, inside=True)] if self.path.name == SINGLE else []

    def _there(self) -> LocalPath | None:
        check_file(self.path)
        return self.path if os.path.lexists(self.path) else None

    def commit(self) -> None:
        self._stage.replace_file(self.path.name)


class FolderDestination(Destination):
    """A folder: `model.safetensors`, or shards with their index. Other files in it stay."""

    _inside = True  # it may be a link to another file system, where files cannot be moved to

    def _rivals(self) -> list[Path]:
        if self.path.exists() and not self.path.is_dir():
            raise LazyModelError(f"{self.path} is a file; give a folder, or a name that ends with .safetensors")
        replaced = self.path.parent / self.path.resolve().name if self.path.is_symlink() else self.path
        return [staging_folder(replaced), staging_folder(self.path.resolve()), staging_folder(self.path / SINGLE)]

    def _there(self) -> LocalPath | None:
        self._old = old_files(self.path)
        return self.path / self._old[0] if self._old else None

    def commit(self) -> None:
        with writing(self.path):
            others = [name for name in self._old if name not in (INDEX, SINGLE)]
            if len(self.files) > 1:
                self._commit_shards()
            elif INDEX in self._old:
                self._stage.replace_files([SINGLE], INDEX, others)
            else:
                self._stage.replace_files([], SINGLE, others)

    def _commit_shards(self) -> None:
        if index := index_of_loose(self.path, self._old):
            (self._stage.new / INDEX).write_text(index, encoding="utf-8")
            self._stage.replace_files([], INDEX, [])
        (self._stage.new / INDEX).write_text(index_of(self.files), encoding="utf-8")
        replace_shards(
            self._stage, INDEX, self._old, lambda name, number: name.replace("model-", f"model-v{number}-"), os.link
        )


def replace_shards(
    stage: Staging,
    index: str,
    old: Sequence[str],
    other: Callable[[str, int], str],
    link: Callable[[Path, Path], object],
    *,
    needs_names: bool = False,
) -> str:
    """Puts an index and its shards, all that there is in `stage.new`, in the place of old files.

    Where a name is in use, the shards come under other names first, so that the index that is there refers to what it
    did, and get their own once that is replaced.

    Args:
        stage: Of the folder.
        index: Name of the index.
        old: Names of the files to remove, the index among them.
        other: Returns another name for a shard; the number differs from attempt to attempt.
        link: Gives a file another name.
        needs_names: True if readers open files of the usual names even if the index has others: old files that have
            them then stay until they are replaced.

    Returns:
        Why the shards that count have other names than in `stage.new`; empty if they do not.
    """

    def in_use(names: Sequence[str]) -> bool:
        return any(os.path.lexists(stage.destination / name) for name in names)

    with writing(stage.destination):
        text = (stage.new / index).read_text(encoding="utf-8")
        names = free = sorted(set(os.listdir(stage.new)) - {index})
        attempt = 1
        while in_use(free):
            attempt += 1
            free = [other(name, attempt) for name in names]
        if free == names and not old:
            # The shards without an index would look complete before it comes; the index without its shards does not.
            stage.replace_files([index, *names[:-1]], names[-1], [])
            return ""
        if free != names:
            for name, another in zip(names, free, strict=True):
                os.rename(stage.new / name, stage.new / another)
            (stage.new / index).write_text(_renamed(text, dict(zip(names, free, strict=True))), encoding="utf-8")
        kept = {*names} & {*old} if needs_names and free != names else set[str]()
        stage.replace_files(free, index, [name for name in old if name != index and name not in kept])
    if free == names:
        return ""
    if stage.unfinished or in_use([name for name in names if name not in kept]):
        return "files of these names are there still"
    try:
        with writing(stage.destination):
            for name, another in zip(names, free, strict=True):
                link(stage.destination / another, stage.new / name)
            (stage.new / index).write_text(text, encoding="utf-8")
        stage.replace_files(names, index, free)
    except LazyModelError as error:
        return str(error)
    return ""


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """An index with other names of shards."""
    config = json.loads(text)
    config["weight_map"] = {
        key: [names[name] for name in value] if isinstance(value, list) else names[value]
        for key, value in config["weight_map"].items()
    }
    return json.dumps(config, indent=4)


class WholeFolder(Destination):
    """A folder that is replaced as a whole."""

    _inside = False

    def _rivals(self) -> list[Path]:
        if self.path.exists() and not self.path.is_dir():
            raise LazyModelError(f"{self.path} is a file; give a folder")
        return [staging_folder(self.path, inside=True)]

    def commit(self) -> None:
        self._stage.replace_folder()


def check_room(path: Path, nbytes: int, folder: Path) -> None:
    """Raises LazyModelError where a folder's disk has not so many bytes free for what is to be saved at a path."""
    if (free := shutil.disk_usage(folder).free) < nbytes:
        raise LazyModelError(
            f"{path} needs {format_bytes(nbytes)}, and there are {format_bytes(free)} free; "
            "free some, or save elsewhere"
        )


def check_overwrite(there: Location | None, overwrite: bool) -> None:
    """Raises LazyModelError where there is something that may not be replaced."""
    if there is not None and not overwrite:
        raise LazyModelError(f"there is a checkpoint already: {there}. Pass overwrite=True (--overwrite) to replace it")


def check_file(path: Location) -> None:
    """Raises LazyModelError where a file of this name cannot be saved by itself."""
    folder = path.parent
    if path.is_dir():
        raise LazyModelError(f"{path} is a folder; give the name of a file, or of a folder without a suffix of files")
    for index in matching(folder, "*.safetensors.index.json"):
        if path.name in listed_shards(index) or (path.name, index.name) == (SINGLE, INDEX):
            raise LazyModelError(
                f"{path} would change the sharded checkpoint of {index}, or be hidden by it; save to the "
                f"folder, {folder}, or to another name"
            )


def index_text(total: int, weights: dict[str, str]) -> str:
    """An index: bytes of tensors in all, and the name of each tensor's shard."""
    content: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weights}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def index_of(files: Sequence[SavedFile]) -> str:
    """The index of files to write."""
    weights = {tensor: file.name for file in files for tensor, _, _ in file.tensors}
    return index_text(sum(file.nbytes - len(file.header) for file in files), weights)


def index_of_loose(folder: Location, old: Sequence[str]) -> str:
    """An index for old shards that have none, so that new ones can come alongside; empty if it needs none, or if they
    are not a complete checkpoint.
    """
    if not old or {INDEX, SINGLE} & set(old):
        return ""
    try:
        with open_loose(folder, [folder / name for name in old]) as shards:
            weights = {name: os.path.basename(tensor.source.file) for name, tensor in shards.items()}
            return index_text(sum(tensor.nbytes for tensor in shards.values()), weights)
    except LazyModelError:
        return ""


def old_files(folder: Location, ignored: re.Pattern[str] | None = None) -> list[str]:
    """Names of the files in a folder that are a checkpoint of ours to replace, the one that decides first.

    Files without an index whose names fit `ignored` are none.
    """
    names = [path.name for path in weight_files(folder)]
    if ignored is not None and INDEX not in names:
        names = [name for name in names if not ignored.fullmatch(name)]
    if not names:
        try:
            found = find_item(folder)
        except LazyModelError:  # of Orbax, too, though it cannot be opened
            found = folder
        if found is not None:
            raise _other(folder, "Orbax")
        if (step := newest_step(folder)) is not None:
            raise _other(folder, f"steps, of which {step.name} is the newest")
        return []
    if names == [INDEX]:
        shards = [name for name in listed_shards(folder / INDEX) if is_there(folder / name)]
        return [INDEX, *shards, *([SINGLE] if (folder / SINGLE).exists() and SINGLE not in shards else [])]
    if names == [SINGLE] or all(is_numbered(name) and name.startswith("model-") for name in names):
        return names
    raise _other(folder, listed(names))


def is_there(path: Location) -> bool:
    """Returns True if the name exists, even as a broken link."""
    return os.path.lexists(path) if isinstance(path, Path) else path.exists()


def listed_shards(index: Location) -> list[str]:
    """Names of the shards that an index lists in its own folder; none where it cannot be read."""
    try:
        return [shard.name for shard in indexed_shards(index) if shard.parent == index.parent]
    except LazyModelError:  # whose checkpoint cannot be opened
        return []


def _other(folder: Location, what: str) -> LazyModelError:
    return LazyModelError(
        f"there is a checkpoint already in {folder}, of another format or other names: {what}. Files of this one would "
        "hide it, or be hidden by it: save to another folder, or remove it first"
    )


_ALIGNMENT = 8  # bytes that the header is padded to, as the reference implementation pads it
_STORED = {dtype: (tag, ()) for tag, dtype in DTYPES.items()} | OWN_DTYPES


def layout(
    tensors: Mapping[str, LazyTensor], shard_size: int | None, metadata: Mapping[str, str], save_id: str
) -> list[SavedFile]:
    """Divides tensors among files, in their order; a single file where `shard_size` is None.

    `save_id` distinguishes this save's shards from others': 16 hexadecimal digits.
    """
    if bad := [key for key, value in metadata.items() if not isinstance(cast(Any, value), str)]:
        raise LazyModelError(f"metadata maps strings to strings; found {bad[0]!r}: {metadata[bad[0]]!r}")
    groups = grouped(tensors, shard_size, _stored_nbytes)
    copied = (SAVE_KEY, DTYPES_KEY)  # from another checkpoint
    metadata = {key: value for key, value in metadata.items() if key not in copied}
    names = [SINGLE]
    if len(groups) > 1:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        metadata[SAVE_KEY] = save_id
    return [_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _stored_nbytes(name: str, tensor: LazyTensor) -> int:
    if tensor.dtype not in _STORED:
        raise LazyModelError(
            f"{name!r}: safetensors has no dtype {tensor.dtype.name}, only those of JAX; cast it with a mapping"
        )
    if name == "__metadata__":
        raise LazyModelError("a tensor cannot be called '__metadata__' in safetensors; rename it with a mapping")
    if tensor.dtype != FLOAT4:
        return tensor.nbytes
    if tensor.size % 2:
        raise LazyModelError(f"{name!r}: safetensors packs 4-bit floats in pairs, and {list(tensor.shape)} is odd")
    return tensor.size // 2


def _file(name: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> SavedFile:
    # Larger dtypes first, as the reference implementation has it: then every tensor is aligned to its own.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    own = {name: tensor.dtype.name for name, tensor in tensors.items() if tensor.dtype in OWN_DTYPES}
    header: dict[str, Any] = {"__metadata__": {**metadata, **({DTYPES_KEY: json.dumps(own)} if own else {})}}
    begins: list[int] = []
    end = 0
    for tensor_name, tensor in ordered:
        begins.append(end)
        end += _stored_nbytes(tensor_name, tensor)
        offsets = [begins[-1], end]
        tag, inner = _STORED[tensor.dtype]
        header[tensor_name] = {"dtype": tag, "shape": [*tensor.shape, *inner], "data_offsets": offsets}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise LazyModelError(f"the name of a tensor has {bad!r} in it, which cannot be written as UTF-8") from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise LazyModelError(f"names and shapes take {format_bytes(len(text))}; safetensors allows {MAX_HEADER} bytes")
    data = len(text) + 8
    placed = [(n, tensor, data + begin) for (n, tensor), begin in zip(ordered, begins, strict=True)]
    return SavedFile(name, len(text).to_bytes(8, "little") + text, tuple(placed), data + end)

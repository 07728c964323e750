"""`Checkpoint`, what every format looks like from outside, and `open_checkpoint`, which finds the format of a path.

Formats live in their own modules and are imported only when a path turns out to be theirs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
import stat
from collections.abc import Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from lazymodel._agreement import opening
from lazymodel._atomic import settled
from lazymodel._errors import CheckpointError
from lazymodel._file_source import FileSource
from lazymodel._lazy_tensor import LazyTensor
from lazymodel._text import format_bytes, listed
from lazymodel.checkpoints._verify import Verify, verify_files

SUPPORTED = (
    "a .safetensors file, a folder of them (with or without *.safetensors.index.json), Keras weights (.weights.h5, "
    ".weights.json, .h5), a .keras archive, a Keras Hub preset folder, an Orbax checkpoint (an item, a step, or a "
    "folder of steps), or NumPy's .npz and .npy"
)
_LFS = b"version https://git-lfs.github.com/spec/v1"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"
_NPY = b"\x93NUMPY"
MAX_JSON = 100 << 20  # bytes; an index of a million tensors is below this


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """What a checkpoint's headers say of one tensor: its dtype in memory, shape, bytes in memory, and its file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    file: str


class Checkpoint(Mapping[str, LazyTensor]):
    """An open checkpoint: tensor name → `LazyTensor`. Opening and looking up read headers only.

    Subclasses provide `_tensor` and pass the names they have, as a list or as the keys of a dict of theirs. Usable in
    a `with` statement; closing releases file descriptors, and tensors that are still around open them again when read.

    Attributes:
        path: The path that was opened.
        format: What its files are, for reports.
    """

    format: ClassVar[str] = "unknown"

    def __init__(
        self, path: str | os.PathLike[str], names: list[str] | dict[str, Any], sources: list[FileSource]
    ) -> None:
        self.path = os.fspath(path)
        self._names: dict[str, Any] = names if isinstance(names, dict) else dict.fromkeys(names)
        self._sources = sources
        self._tensors: dict[str, LazyTensor] = {}

    def _tensor(self, name: str) -> LazyTensor:
        raise NotImplementedError

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._names:
            raise KeyError(f"{name!r} is not a tensor of {self.path}")
        if name not in self._tensors:
            self._tensors[name] = self._tensor(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would make the tensor

    def describe(self, name: str) -> TensorHeader:
        """What the headers say of a tensor that is there; formats that can tell make no tensor for it."""
        tensor = self[name]
        return TensorHeader(tensor.dtype, tensor.shape, tensor.nbytes, tensor.file)

    def keys(self) -> KeysView[str]:
        """The names; not the general view, which would ask for each name in Python."""
        return self._names.keys()

    @property
    def files(self) -> list[str]:
        """Paths of the files that hold its tensors."""
        return sorted({source.path for source in self._sources})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read from its files so far."""
        return sum(source.bytes_read for source in self._sources)

    def close(self) -> None:
        """Releases file descriptors."""
        for source in self._sources:
            source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        files = f"{len(self.files)} file" + ("" if len(self.files) == 1 else "s")
        return f"{type(self).__name__}({self.path!r}: {len(self)} tensors, {format_bytes(self.nbytes)} in {files})"


def open_checkpoint(path: str | os.PathLike[str], *, verify: Verify = False) -> Checkpoint:
    """Opens a checkpoint without reading its tensors; the format is found from the path and its first bytes.

    Args:
        path: A safetensors file or a folder with `*.safetensors.index.json`, `model.safetensors` or other
            safetensors files; a Keras `.weights.h5`, `.weights.json` (sharded) or `.keras` file; a Keras Hub preset
            folder (`model.weights.h5` or `model.weights.json`); an Orbax checkpoint: the folder of its arrays, of a
            step, or of steps, of which the newest committed one is opened; or a `.npz` or `.npy` file. Archives are
            read in place.
        verify: Whether to hash the files first, index and all, and refuse content that is not what is stated: True for
            the hashes that a Hugging Face cache or download, or a manifest such as `SHA256SUMS` in the folder, states;
            the path of a manifest; or a mapping of file name, relative to the checkpoint's folder, to
            `"sha256:<hex>"`. This reads every file once.

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
    """
    with opening():
        return _open_verified(existing(path), verify)


def _open_verified(where: Path, verify: Verify) -> Checkpoint:
    if verify is False:
        return _open(where)
    with _open(where) as unverified:
        files = content_files(unverified)
    hashed = verify_files(files, verify, where if where.is_dir() else where.parent)
    checkpoint = _open(where)  # once more, so that headers and index, too, are those that were hashed
    try:
        for source in hashed:
            source.check_unchanged()
    except CheckpointError:
        checkpoint.close()
        raise
    return checkpoint


def content_files(checkpoint: Checkpoint) -> list[str]:
    """Paths of the files that decide what a checkpoint holds: those of its tensors, and its index if it has one."""
    index = [checkpoint.path] if os.path.isfile(checkpoint.path) else []
    return list(dict.fromkeys([*index, *checkpoint.files]))


def existing(path: str | os.PathLike[str]) -> Path:
    """A path at which something is.

    Raises:
        CheckpointError: Nothing is there, or what is there must not be looked at.
    """
    try:
        os.stat(path)
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        if (old := settled(Path(path))) != Path(path):
            return old
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointError(f"there is no checkpoint at {os.fspath(path)}: {reason}") from error
    return Path(path)


def _open(where: Path) -> Checkpoint:
    return _open_folder(where) if where.is_dir() else _open_file(where)


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that are its checkpoint: its index or its only weight file, or all its safetensors files.

    Raises:
        CheckpointError: It has several index files, none of them with the usual name.
    """
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / "model.safetensors.index.json"
    if len(indexes) > 1 and preferred not in indexes:
        raise CheckpointError(f"{folder} has {len(indexes)} index files; open one of {[str(i) for i in indexes]}")
    if indexes:
        return [preferred if preferred in indexes else indexes[0]]
    for name in ("model.safetensors", "model.weights.json", "model.weights.h5"):
        if (folder / name).exists():
            return [folder / name]
    return sorted(folder.glob("*.safetensors"))


def _open_folder(folder: Path) -> Checkpoint:
    from lazymodel.checkpoints._orbax import find_item, open_orbax
    from lazymodel.checkpoints._safetensors import open_safetensors

    files = weight_files(folder)
    if files and files[0].suffix == ".safetensors":
        return open_safetensors(folder, files)
    if files:
        return _open_file(files[0])
    if (item := find_item(folder)) is not None:
        return open_orbax(folder, item)
    raise CheckpointError(f"found no checkpoint in folder {folder}; supported: {SUPPORTED}")


def _open_file(file: Path) -> Checkpoint:
    from lazymodel.checkpoints._hdf5 import open_archive, open_hdf5, open_sharded_hdf5
    from lazymodel.checkpoints._numpy import open_npy, open_npz
    from lazymodel.checkpoints._safetensors import open_index, open_safetensors

    head = check_pointer(file)
    if file.name.endswith(".safetensors.index.json"):
        return open_index(file)
    if file.name.endswith(".weights.json"):
        return open_sharded_hdf5(file)
    if file.suffix == ".safetensors":
        return open_safetensors(file, [file])
    if head.startswith(_HDF5) or file.suffix in (".h5", ".hdf5"):
        return open_hdf5(file)
    if file.suffix == ".npz":
        return open_npz(file)
    if file.suffix == ".npy" or head.startswith(_NPY):
        return open_npy(file)
    if head.startswith(_ZIP):
        return open_archive(file)
    raise CheckpointError(f"{file} is in no known format; supported: {SUPPORTED}")


def check_pointer(file: Path) -> bytes:
    """The first bytes of a file.

    Raises:
        CheckpointError: It is a Git LFS pointer (https://git-lfs.github.com/spec/v1), a small text file in the place
            of the real one; or it cannot be read; or it is no regular file. Such are not opened: a pipe would block
            whoever does, and opening a device can do anything.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise CheckpointError(
                f"{file}: expected a file, found a folder, a pipe or a device; do not trust this checkpoint"
            )
        with open(file, "rb") as stream:
            head = stream.read(512)
    except OSError as error:
        raise CheckpointError(f"cannot open {file}: {error.strerror}") from error
    if head.startswith(_LFS):
        size = next((line[5:].decode() for line in head.splitlines() if line.startswith(b"size ")), "unknown")
        raise CheckpointError(
            f"{file} is a Git LFS pointer: expected {size} bytes of weights, found {file.stat().st_size} of text. "
            "Run `git lfs pull` in its repository."
        )
    return head


def read_json_object(data: bytes, file: str) -> dict[str, Any]:
    """Parses a JSON object, in which no key may occur twice.

    Raises:
        CheckpointError: It is not JSON in UTF-8, not an object, too deeply nested, or repeats a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{file}: expected each key once in its JSON, found {twice!r} twice; it is corrupt")
        return result

    try:
        text = data.decode()  # json by itself would take UTF-16 as well
        parsed = json.loads(text)
        # Each pair of key and value takes a colon. Where there are no more colons than keys that came out, no key was
        # repeated; where there are, in strings or deeper in, a slower parser looks at each pair.
        if text.count(":") > _count_keys(parsed):
            parsed = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:  # half of a surrogate pair is no character, and fails to be written anywhere
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected a JSON object, found something else ({error}); it is corrupt"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found a {type(parsed).__name__}; it is corrupt")
    return cast("dict[str, Any]", parsed)


def _count_keys(parsed: Any) -> int:
    """The keys of an object and of the objects in it, without those further down."""
    if not isinstance(parsed, dict):
        return 0
    values = cast("dict[str, Any]", parsed).values()
    return len(values) + sum(len(cast("dict[str, Any]", value)) for value in values if isinstance(value, dict))


def read_json_file(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: It is no regular file, too large, cannot be read, or holds something else (`read_json_object`).
    """
    check_pointer(file)
    try:
        size = file.stat().st_size
        if size > MAX_JSON:
            raise CheckpointError(
                f"{file}: expected JSON of at most {format_bytes(MAX_JSON)}, found {format_bytes(size)}"
            )
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    return read_json_object(data, str(file))


def weight_map(content: dict[str, Any], index: str | os.PathLike[str]) -> dict[str, Any]:
    """The `weight_map` of what an index file says (Hugging Face's and Keras' have the same layout).

    Raises:
        CheckpointError: There is no such mapping.
    """
    weights = content.get("weight_map")
    if not isinstance(weights, dict):
        keys = reprlib.repr(sorted(content))
        raise CheckpointError(f"{os.fspath(index)}: expected a 'weight_map' object, found keys {keys}")
    return cast("dict[str, Any]", weights)


def shard_path(index: Path, shard: Any) -> Path:
    """Where a shard that an index names lies: in the index's own folder, and nowhere else.

    Raises:
        CheckpointError: The name is no relative path, climbs out with `..`, or leads out through a symbolic link.
            Links of a Hugging Face cache, `snapshots/<revision>/x -> ../../blobs/<hash>`, are followed.
    """
    if not isinstance(shard, str) or not shard or "\0" in shard:
        raise CheckpointError(f"{index}: expected a shard's file name, found {reprlib.repr(shard)}")
    if shard.startswith(("/", "\\")) or ".." in Path(shard).parts or ".." in shard.split("\\"):
        raise CheckpointError(
            f"{index}: expected shards inside its folder, found {shard!r}; do not trust this checkpoint"
        )
    path = index.parent / shard
    try:
        root = index.parent.resolve()
        target = path.resolve()
        path.is_file()  # fails for a name that is too long; `resolve` did for links that form a circle
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{index}: expected a shard's file name, found {reprlib.repr(shard)}, which cannot be one ({error})"
        ) from error
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise CheckpointError(
            f"{index}: expected shards inside its folder, but {shard!r} is a symbolic link to {target}; "
            "copy the file into the folder if that is meant"
        )
    return path


def require_shards(index: Path, paths: list[Path]) -> None:
    """Raises CheckpointError listing the shards that are not there."""
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: expected {len(paths)} shard files beside it, found {len(paths) - len(missing)}; missing "
            f"{listed(missing)}. Download them too."
        )

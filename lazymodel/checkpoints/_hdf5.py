"""HDF5 files as Keras writes them: `.weights.h5`, sharded `.weights.json`, and `.keras` archives read in place.

Contiguous, unfiltered datasets, which is what Keras writes, are read straight from the file at the offset that the
HDF5 library reports; others (chunked, compressed, converted) are read through h5py, box by box. What could lead out
of the file (external links and storage, virtual datasets) is refused, and a declared size is checked against the
bytes that are there. h5py is imported on first use.
"""

from __future__ import annotations

import io
import math
import threading
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._file_source import Convert, FileSource, assign
from lazymodel._lazy_tensor import ArrayLeaf, Box, FileLeaf, LazyTensor, Leaf, box_shape
from lazymodel.checkpoints._checkpoint import (
    Checkpoint,
    check_pointer,
    read_index,
    read_json_object,
    require_shards,
    shard_path,
)

_MAX_RATIO = 1100  # deflate cannot compress further than 1032 : 1 (https://zlib.net/zlib_tech.html)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _h5py() -> Any:
    try:
        import h5py  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise CheckpointError("reading HDF5 weights needs h5py, which is not installed: pip install h5py") from error
    return h5py


class _Window(io.RawIOBase):
    """A range of a file as a file of its own: a member of an uncompressed archive."""

    def __init__(self, path: str, base: int, size: int) -> None:
        super().__init__()
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 (closed in close)
        self._base, self._size, self._position = base, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._size - self._position), 0)
        self._file.seek(self._base + self._position)
        count = cast(Any, self._file).readinto(view[:count])
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _H5File:
    """An HDF5 file, or a member of an archive, that is opened when needed.

    Attributes:
        source: Its bytes, for direct reads.
        size: Its size in bytes; of the member, in an archive.
    """

    def __init__(self, path: str, base: int = 0, size: int | None = None) -> None:
        self.source = FileSource(path, base=base)
        self.size = self.source.size - base if size is None else size
        self._handle: Any = None
        self._lock = threading.Lock()

    def open(self) -> Any:
        """An `h5py.File`, kept open until `close`."""
        h5py = _h5py()
        with self._lock:
            if not self._handle:
                path, base = self.source.path, self.source.base
                whole = base == 0 and self.size == self.source.size
                try:
                    self._handle = h5py.File(path if whole else _Window(path, base, self.size), "r")
                except (OSError, RuntimeError) as error:
                    raise CheckpointError(
                        f"{path}: expected an HDF5 file of {self.size} bytes, found one that is truncated or corrupt "
                        f"({error}). Download or copy it again."
                    ) from error
            return self._handle

    def close(self) -> None:
        """Closes the handle; `open` opens it again."""
        with self._lock:
            if self._handle:
                self._handle.close()
            self._handle = None
        self.source.close()


class DatasetLeaf(Leaf):
    """A dataset that only the HDF5 library can read: chunked, compressed, or of a type that needs conversion."""

    def __init__(self, file: _H5File, name: str, dataset: Any, dtype: np.dtype[Any]) -> None:
        self._h5, self.name, self.file, self.shape, self.dtype = file, name, file.source.path, dataset.shape, dtype
        self.offset = 0
        self._bits = dataset.dtype
        self.row_step = dataset.chunks[0] if dataset.chunks else 1

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...]) -> None:
        try:
            values = np.asarray(self._h5.open()[self.name][box])
        except (OSError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"cannot read dataset {self.name!r} of {self.file}: {error}") from error
        if values.dtype != self._bits or values.shape != box_shape(box):
            raise CheckpointError(f"dataset {self.name!r} of {self.file} changed since it was opened; open it again")
        self._h5.source.check_unchanged()
        self._h5.source.count(values.nbytes)
        assign(out, values if self._bits == self.dtype else values.view(self.dtype), steps)


def _tensor(dataset: Any, file: _H5File) -> LazyTensor:
    """A dataset as a tensor. Keras stores bfloat16 as 2-byte values marked `dtype="bfloat16"`."""
    h5py = _h5py()
    name = dataset.name.lstrip("/")
    path = file.source.path
    what = f"{path}: dataset {name!r}"
    if dataset.is_virtual:
        raise CheckpointError(f"{what} is virtual: expected the values in this file, found references to other files")
    if dataset.external:
        raise CheckpointError(f"{what}: expected the values in this file, found them in {dataset.external[0][0]!r}")
    stored: np.dtype[Any] = dataset.dtype
    dtype = stored
    if _attribute(dataset, "dtype") == "bfloat16" and stored.itemsize == 2 and stored.kind in "uV" and not stored.names:
        dtype = _BFLOAT16
    elif stored.kind not in "biufc" or dataset.shape is None:
        raise CheckpointError(
            f"{what}: expected numbers, found {stored}; strings, records and opaque data cannot be weights"
        )
    shape = tuple(int(extent) for extent in dataset.shape)
    nbytes = math.prod(shape) * stored.itemsize
    if not nbytes:
        return LazyTensor(ArrayLeaf(np.empty(shape, dtype), name))
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    held = int(dataset.id.get_storage_size())
    ratio = _MAX_RATIO ** plist.get_nfilters()
    if held * ratio < nbytes or held > file.size:
        raise CheckpointError(
            f"{what}: expected {nbytes} bytes for {stored}{list(shape)}, found {held} stored in a file of {file.size}; "
            "it is truncated or corrupt"
        )
    offset = dataset.id.get_offset()
    exact = h5py.h5t.py_create(stored, logical=True).equal(dataset.id.get_type())
    if layout == h5py.h5d.CONTIGUOUS and offset is not None and (exact or dtype is _BFLOAT16):
        if offset + nbytes > file.size:
            raise CheckpointError(
                f"{path} is truncated: expected dataset {name!r} up to byte {offset + nbytes}, found a file of "
                f"{file.size} bytes. Download or copy it again."
            )
        return LazyTensor(FileLeaf(name, file.source, int(offset), shape, dtype))
    return LazyTensor(DatasetLeaf(file, name, dataset, dtype))


def _attribute(dataset: Any, key: str) -> Any:
    value = dataset.attrs.get(key) if key in dataset.attrs else None
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class Hdf5Checkpoint(Checkpoint):
    """One or more HDF5 files as one mapping from a dataset's path, such as `layers/dense/vars/0`, to its tensor."""

    def __init__(self, path: Path, names: dict[str, _H5File], files: list[_H5File]) -> None:
        super().__init__(path, list(names), [file.source for file in files])
        self._files = names
        self._open_files = files

    def _tensor(self, name: str) -> LazyTensor:
        file = self._files[name]
        return _tensor(file.open()[name], file)

    def close(self) -> None:
        for file in self._open_files:
            file.close()


def open_hdf5(path: Path) -> Hdf5Checkpoint:
    """Opens a single HDF5 file.

    Raises:
        CheckpointError: It is not HDF5, is truncated, or links to other files.
    """
    file = _H5File(str(path))
    return Hdf5Checkpoint(path, dict.fromkeys(_dataset_names(file), file), [file])


def open_sharded_hdf5(index: Path) -> Hdf5Checkpoint:
    """Opens the shards of a Keras `.weights.json`: a `weight_map` of group path to file name, or to several of them.

    Format: `keras.src.saving.saving_lib.ShardedH5IOStore`.

    Raises:
        CheckpointError: A shard is missing, outside the folder, or lacks a group that the index says it has.
    """
    groups = {str(group): _shard_names(index, shards) for group, shards in read_index(index).items()}
    paths = {
        shard: shard_path(index, shard) for shard in dict.fromkeys(s for shards in groups.values() for s in shards)
    }
    require_shards(index, list(paths.values()))
    for path in paths.values():
        check_pointer(path)
    files = {shard: _H5File(str(path)) for shard, path in paths.items()}
    return _join_shards(index, groups, files)


def open_archive(path: Path) -> Hdf5Checkpoint:
    """Opens the weights in a `.keras` archive, in place.

    Raises:
        CheckpointError: It is no archive, has no weights, or stores them compressed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if "model.weights.h5" in members:
                file = _member(path, members["model.weights.h5"])
                return Hdf5Checkpoint(path, dict.fromkeys(_dataset_names(file), file), [file])
            if "model.weights.json" not in members:
                raise CheckpointError(f"{path}: expected model.weights.h5 in the archive, found {sorted(members)[:8]}")
            index = read_json_object(archive.read("model.weights.json"), f"{path}:model.weights.json").get("weight_map")
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path}: expected a .keras archive, found a corrupt one ({error})") from error
    if not isinstance(index, dict):
        raise CheckpointError(f"{path}: expected a 'weight_map' object in model.weights.json")
    groups = {str(g): _shard_names(path, shards) for g, shards in cast("dict[str, Any]", index).items()}
    shards = dict.fromkeys(shard for names in groups.values() for shard in names)
    if missing := [shard for shard in shards if shard not in members]:
        raise CheckpointError(f"{path}: expected shards {missing[:8]} in the archive, found {sorted(members)[:8]}")
    return _join_shards(path, groups, {shard: _member(path, members[shard]) for shard in shards})


def _member(path: Path, info: zipfile.ZipInfo) -> _H5File:
    """A member of an archive as an HDF5 file (local file header: APPNOTE.TXT 6.3.10, section 4.3.7)."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise CheckpointError(
            f"{path}: expected {info.filename} to be stored without compression, as Keras does, found it compressed or "
            "encrypted; unpack the archive and open the file inside"
        )
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    base = info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    size = path.stat().st_size
    if len(header) < 30 or not header.startswith(b"PK\x03\x04") or base + info.file_size > size:
        raise CheckpointError(
            f"{path} is truncated: expected {info.filename} up to byte {base + info.file_size}, found {size} bytes"
        )
    return _H5File(str(path), base, info.file_size)


def _shard_names(index: Path, shards: Any) -> list[str]:
    names = cast("list[Any]", shards) if isinstance(shards, list) else [shards]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{index}: expected file names in 'weight_map', found {shards!r}")
    return [str(name) for name in names]


def _join_shards(path: Path, groups: dict[str, list[str]], files: dict[str, _H5File]) -> Hdf5Checkpoint:
    """Keeps, of every shard, the datasets of the groups that the index gives it."""
    names = {shard: _dataset_names(file) for shard, file in files.items()}
    joined: dict[str, _H5File] = {}
    for group, shards in groups.items():
        prefix = group.strip("/") + "/"
        for shard in shards:
            found = [name for name in names[shard] if name.startswith(prefix) and "/" not in name[len(prefix) :]]
            if not found:
                raise CheckpointError(f"{path}: expected datasets of {group!r} in shard {shard}, found none there")
            for name in found:
                if name in joined:
                    raise CheckpointError(f"{path}: dataset {name!r} is in more than one shard, {shard} among them")
                joined[name] = files[shard]
    return Hdf5Checkpoint(path, joined, list(files.values()))


def _dataset_names(file: _H5File) -> list[str]:
    """Paths of all datasets, following links inside the file only. A file that is refused is closed again."""
    try:
        return _walk(file)
    except CheckpointError:
        file.close()
        raise


def _walk(file: _H5File) -> list[str]:
    h5py = _h5py()
    root = file.open()
    path = file.source.path
    names: list[str] = []
    soft: list[tuple[str, str]] = []
    visited: set[Any] = set()
    groups: list[tuple[str, Any]] = [("", root)]
    try:
        while groups:
            prefix, group = groups.pop()
            address = h5py.h5o.get_info(group.id).addr
            if address in visited:
                continue  # hard links can form a circle
            visited.add(address)
            inner: list[tuple[str, Any]] = []
            for key in group:
                link = group.get(key, getlink=True)
                name = prefix + key
                if isinstance(link, h5py.ExternalLink):
                    raise CheckpointError(
                        f"{path}: {name!r} links to {link.filename!r}: expected values in this file; do not trust it"
                    )
                if isinstance(link, h5py.SoftLink):
                    soft.append((name, link.path if link.path.startswith("/") else f"{prefix}{link.path}"))
                    continue
                item = group[key]
                if isinstance(item, h5py.Dataset):
                    names.append(name)
                elif isinstance(item, h5py.Group):
                    inner.append((f"{name}/", item))
            groups += reversed(inner)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: expected {file.size} bytes of HDF5, found a corrupt file ({error})") from error
    known = set(names)
    for name, target in soft:
        if target.strip("/") not in known:
            raise CheckpointError(f"{path}: {name!r} is a link to {target!r}, where this file has no dataset")
        names.append(name)
    return names


__all__ = ("DatasetLeaf", "Hdf5Checkpoint", "open_archive", "open_hdf5", "open_sharded_hdf5")

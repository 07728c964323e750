"""Checks of untrusted content: pointers, JSON, indexes, shards, links, members of archives.

Formats: https://git-lfs.github.com/spec/v1; https://huggingface.co/docs/hub/local-cache; APPNOTE.TXT 6.3.10 (zip),
sections 4.3.7 and 4.4. Everything raises `CheckpointError` for what is corrupt, hostile or cannot be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import reprlib
import stat
import zipfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location, RemotePath
from lazymodel._remote.url import is_url
from lazymodel._show.text import format_bytes, listed
from lazymodel._tensors.byte_reader import ByteReader

MAX_JSON = 100 << 20  # bytes; an index of a million tensors is below this
MAX_DIMENSIONS = 32  # NumPy 1's; no model comes near
MAX_RATIO = 1100  # deflate cannot compress further than 1032 : 1 (https://zlib.net/zlib_tech.html)
_MAX_PATH = 4096  # characters; what Linux takes
_LFS = b"version https://git-lfs.github.com/spec/v1"
_LOCAL_HEADER = 30  # bytes of a member's local file header, before its name


def is_number(dtype: np.dtype[Any]) -> bool:
    """Returns True if arrays of a dtype can be weights: NumPy's numbers, and those of ml_dtypes."""
    return is_numpys(dtype) or dtype.type.__module__ == ml_dtypes.bfloat16.__module__


def is_numpys(dtype: np.dtype[Any]) -> bool:
    """Returns True for NumPy's own numbers. By its kind and text ml_dtypes' float8_e5m2 is one, too."""
    return dtype.kind in "biufc" and dtype.isbuiltin != 2


def counts(value: Any) -> tuple[int, ...] | None:
    """A list or tuple of non-negative ints below 2**63 (and no bools) as a tuple, else None."""
    if not isinstance(value, list | tuple):
        return None
    items = cast("list[Any]", value)
    return tuple(items) if all(type(item) is int and 0 <= item < 2**63 for item in items) else None


@contextlib.contextmanager
def reading(path: str | Location, verb: str = "read") -> Generator[None]:
    """Within the block, what the operating system refuses is a CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {verb} {path}: {error.strerror}") from error


@contextlib.contextmanager
def corrupt(message: str) -> Generator[None]:
    """Raises CheckpointError for whatever goes wrong inside: of a corrupt file, libraries raise nearly anything."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{message} ({error or type(error).__name__})") from error


def check_pointer(file: Location) -> bytes:
    """The first bytes of a file that is not a Git LFS pointer, a small text file in the place of the real one."""
    # Only regular files are opened: a pipe would block whoever opens it, and opening a device can do anything.
    with reading(file, "open"):
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(
                f"{file}: expected a file, found a folder, a pipe or a device; do not trust this checkpoint"
            )
        with file.open("rb") as stream:
            head = stream.read(512) or b""
    if head.startswith(_LFS):
        size = next((line[5:].decode() for line in head.splitlines() if line.startswith(b"size ")), "unknown")
        raise CheckpointError(
            f"{file} is a Git LFS pointer: expected {size} bytes of weights, found {file.stat().st_size} of text. "
            "Run `git lfs pull` in its repository."
        )
    return head


def read_at_most(file: Location, limit: int, what: str) -> bytes:
    """All bytes of a file, unless they are more than a limit."""
    with reading(file):
        if (size := file.stat().st_size) > limit:
            raise CheckpointError(
                f"{file}: expected {what} of at most {format_bytes(limit)}, found {format_bytes(size)}"
            )
        return file.read_bytes()


# JSON -----------------------------------------------------------------------------------------------------------------


def read_json_object(data: bytes, file: str) -> dict[str, Any]:
    """A JSON object in UTF-8, in which no key occurs twice and no string has half a character."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{file}: expected each key once in its JSON, found {twice!r} twice; it is corrupt")
        return result

    try:
        text = data.decode()  # json by itself would take UTF-16 as well
        parsed = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:  # half of a surrogate pair is not a character, and fails to be written anywhere
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected a JSON object, found something else ({error}); it is corrupt"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found a {type(parsed).__name__}; it is corrupt")
    return cast("dict[str, Any]", parsed)


def read_json_file(file: Location) -> dict[str, Any]:
    """The JSON object in a regular file of a sensible size."""
    check_pointer(file)
    return read_json_object(read_at_most(file, MAX_JSON, "JSON"), str(file))


# Indexes, shards, links -----------------------------------------------------------------------------------------------


def weight_map(content: dict[str, Any], index: str | Location) -> dict[str, Any]:
    """The `weight_map` of what an index file says (Hugging Face's and Keras' have the same layout)."""
    weights = content.get("weight_map")
    if not isinstance(weights, dict):
        keys = reprlib.repr(sorted(content))
        raise CheckpointError(f"{index}: expected a 'weight_map' object, found keys {keys}")
    return cast("dict[str, Any]", weights)


def leads_out(path: Path, root: Path) -> Path | None:
    """Where a path leads through links, if neither into a resolved folder nor to the blobs of its Hugging Face cache.

    Fails with OSError or RuntimeError where the links form a circle, or it cannot be a path.
    """
    # The cache's links are `snapshots/<revision>/x -> ../../blobs/<hash>`.
    target = path.resolve()
    blobs = (parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")
    return None if any(target.is_relative_to(folder) for folder in (root, *blobs)) else target


def shard_path(index: Location, shard: Any) -> Location:
    """The path of a shard that an index names: in the index's own folder, and nowhere else (see `leads_out`)."""
    if not isinstance(shard, str) or not shard or "\0" in shard:
        raise CheckpointError(f"{index}: expected a shard's file name, found {reprlib.repr(shard)}")
    parts = shard.replace("\\", "/").split("/")
    if is_url(shard) or not parts[0] or ".." in parts:
        raise CheckpointError(
            f"{index}: expected shards inside its folder, found {shard!r}; do not trust this checkpoint"
        )
    folder = index.parent
    if isinstance(folder, RemotePath):
        return folder / shard  # stores have no links
    path = folder / shard
    try:
        if len(shard) > _MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        is_link = stat.S_ISLNK(path.lstat().st_mode)
        target = leads_out(path, folder.resolve()) if is_link or path.parent != folder else None
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{index}: expected a shard's file name, found {reprlib.repr(shard)}, which cannot be one ({error})"
        ) from error
    if target is not None:
        raise CheckpointError(
            f"{index}: expected shards inside its folder, but {shard!r} is a symbolic link to {target}; "
            "copy the file into the folder if that is meant"
        )
    return path


def require_shards(index: Location, paths: Sequence[Location]) -> None:
    """Raises CheckpointError listing the shards that are not there."""
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(
            f"{index}: expected {len(paths)} shard files alongside it, found {len(paths) - len(missing)}; missing "
            f"{listed(missing)}. Download them too."
        )


def files_inside(folder: Location) -> list[str]:
    """Paths in a folder of all its files, with slashes; raises for anything but files, and for links that lead out."""
    if isinstance(folder, RemotePath):
        return folder.files_below()
    root = folder.resolve()
    files: list[str] = []
    for inner, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(inner, name)
            try:
                if path.is_symlink() and ((target := leads_out(path, root)) or path.is_dir()):
                    raise CheckpointError(
                        f"{path}: expected a file in the checkpoint's folder, found a symbolic link to "
                        f"{target or path.resolve()}; copy what it links to into the folder if that is meant"
                    )
                if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
                    raise CheckpointError(
                        f"{path}: expected a file, found a pipe or a device; do not trust this checkpoint"
                    )
            except (OSError, RuntimeError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CheckpointError(f"cannot read {path}: {reason}") from error
        files += [os.path.relpath(os.path.join(inner, name), folder).replace(os.sep, "/") for name in names]
    return files


# Zip archives ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of an archive: `stored` bytes from byte `start` of the file, `size` when decompressed."""

    path: Location
    name: str
    header: int
    start: int
    stored: int
    size: int
    crc: int
    deflated: bool


class Window(io.RawIOBase):
    """A range of a file as a file of its own, such as a member of an uncompressed archive. It opens nothing itself."""

    def __init__(self, source: ByteReader, base: int, size: int) -> None:
        super().__init__()
        self._source, self._base, self._size, self._position = source, base, size, 0
        self._file = source.open_file() if source.remote else None  # which keeps what was fetched

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count, position = max(min(len(view), self._size - self._position), 0), self._base + self._position
        if self._file is None:
            data = self._source.peek(position, count)
            count = len(data)
            view[:count] = data
        else:
            self._file.seek(position)
            count = cast(Any, self._file).readinto(view[:count])
        self._position += count
        return count


def zip_directory(source: ByteReader, path: Location, kind: str) -> zipfile.ZipFile:
    """The archive that a file is; nothing of what it lists is checked yet."""
    check_pointer(path)
    with corrupt(f"{path}: expected a {kind} archive, found a truncated or corrupt one. Download or copy it again"):
        return zipfile.ZipFile(cast(Any, Window(source, 0, source.size)))


def zip_member(path: Location, info: zipfile.ZipInfo) -> Member:
    """A member, after every check that needs none of its bytes."""
    what = f"{path}: member {info.filename!r}"
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if info.flag_bits & 1:
        raise CheckpointError(f"{what} is encrypted: expected it as Keras and NumPy write it")
    if info.compress_type != zipfile.ZIP_STORED and not deflated:
        raise CheckpointError(
            f"{what}: expected no compression, or deflate, found method {info.compress_type}; unpack the archive, or "
            "load and save it again with what wrote it"
        )
    size, header = path.stat().st_size, b""
    if 0 <= info.header_offset < size:
        with path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER) or b""
    if len(header) < _LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{what}: expected it at byte {info.header_offset}, found something else; it is corrupt")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + _LOCAL_HEADER + names
    if start + info.compress_size > size:
        raise CheckpointError(
            f"{path} is truncated: expected {info.filename} up to byte {start + info.compress_size}, found {size} "
            "bytes. Download or copy it again."
        )
    if info.file_size > info.compress_size * MAX_RATIO if deflated else info.file_size != info.compress_size:
        raise CheckpointError(
            f"{what}: expected {info.file_size} bytes, found {info.compress_size} stored, which cannot be as many; "
            "it is corrupt"
        )
    return Member(
        *(path, info.filename, info.header_offset, start),
        *(info.compress_size, info.file_size, info.CRC, deflated),
    )

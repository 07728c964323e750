"""Checks of untrusted content: pointers, JSON, indexes, shards, links, members of archives.

Formats: https://git-lfs.github.com/spec/v1; https://huggingface.co/docs/hub/local-cache; APPNOTE.TXT 6.3.10 (zip),
sections 4.3.7 and 4.4. Everything raises `CheckpointError` for what is corrupt, hostile or cannot be read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import reprlib
import stat
import zipfile
from collections.abc import Generator, Sequence
from typing import Any, TypeGuard, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._remote.url import is_url
from lazymodel._show.text import format_bytes, listed
from lazymodel._tensors.byte_reader import ByteReader, Seekable, reading

MAX_JSON = 100 << 20  # bytes; an index of a million tensors is below this
MAX_DIMENSIONS = 32  # NumPy 1's; no model comes near
MAX_NBYTES = 2**63  # what NumPy can address, even where an extent of 0 leaves nothing to hold
MAX_RATIO = 1100  # deflate cannot compress further than 1032 : 1 (https://zlib.net/zlib_tech.html)
CORRUPT = "it is corrupt"
TRUNCATED = "it is truncated or corrupt. Download or copy it again."
HOSTILE = "do not trust this checkpoint"
_MAX_PATH = 4096  # characters; what Linux takes
_LFS = b"version https://git-lfs.github.com/spec/v1"
_MOST = float(np.finfo(np.float32).max)
LOCAL_HEADER = 30  # bytes of a member's local file header, before its name


def mismatch(where: object, expected: str, found: object, fix: str = CORRUPT) -> CheckpointError:
    """The error for content that is not what it has to be."""
    return CheckpointError(f"{where}: expected {expected}, found {found}; {fix}")


def truncated(path: object, expected: str, found: object) -> CheckpointError:
    """The error for a file that ends too early."""
    return CheckpointError(f"{path} is truncated: expected {expected}, found {found}. Download or copy it again.")


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


def is_finite(value: Any) -> TypeGuard[float]:
    """Returns True for a number (and no bool) that float32 holds. JSON of Python has NaN, infinities and 1e400, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


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
            raise mismatch(file, "a file", "a folder, a pipe or a device", HOSTILE)
        with file.open("rb") as stream:
            head = stream.read(512) or b""
    if head.startswith(_LFS):
        size = next((line[5:].decode() for line in head.splitlines() if line.startswith(b"size ")), "unknown")
        raise CheckpointError(
            f"{file} is a Git LFS pointer: expected {size} bytes of weights, found text. Run `git lfs pull`."
        )
    return head


def read_at_most(file: Location, limit: int, what: str) -> bytes:
    """All bytes of a file, unless they are more than a limit."""
    with reading(file):
        if (size := file.stat().st_size) > limit:
            raise mismatch(file, f"{what} of at most {format_bytes(limit)}", format_bytes(size))
        return file.read_bytes()


# JSON -----------------------------------------------------------------------------------------------------------------


def read_json_object(data: bytes, file: str) -> dict[str, Any]:
    """A JSON object in UTF-8, in which no key occurs twice and no string has half a character."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise mismatch(file, "each key once in its JSON", f"{twice!r} twice")
        return result

    try:
        text = data.decode()  # json by itself would take UTF-16 as well
        parsed = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:  # half of a surrogate pair is not a character, and fails to be written anywhere
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise mismatch(file, "a JSON object", f"something else ({error})") from error
    if not isinstance(parsed, dict):
        raise mismatch(file, "a JSON object", f"a {type(parsed).__name__}")
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
        raise mismatch(index, "a 'weight_map' object", f"keys {reprlib.repr(sorted(content))}")
    return cast("dict[str, Any]", weights)


def indexed_shards(index: Location) -> list[Location]:
    """The paths of all shards that an index file lists."""
    shards: dict[Location, None] = {}
    for value in weight_map(read_json_file(index), index).values():
        names = cast("list[Any]", value) if isinstance(value, list) else [value]
        shards |= dict.fromkeys(shard_path(index, name) for name in names)
    return list(shards)


def shard_path(index: Location, shard: Any) -> Location:
    """The path of a shard that an index names: in the index's own folder, and nowhere else."""
    if not isinstance(shard, str) or not shard or "\0" in shard:
        raise mismatch(index, "a shard's file name", reprlib.repr(shard))
    parts = shard.replace("\\", "/").split("/")
    if is_url(shard) or not parts[0] or ".." in parts:
        raise mismatch(index, "shards inside its folder", repr(shard), HOSTILE)
    path = index.parent / shard
    try:
        if len(shard) > _MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        target = path.leads_out(index.parent)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError) as error:
        raise mismatch(index, "a shard's file name", f"{reprlib.repr(shard)} ({error})") from error
    if target:
        found = f"{shard!r}, which is a symbolic link to {target}"
        raise mismatch(index, "shards inside its folder", found, "copy the file into the folder if that is meant")
    return path


def require_shards(index: Location, paths: Sequence[Location]) -> None:
    """Raises CheckpointError listing the shards that are not there."""
    if missing := [path.name for path in paths if not path.is_file()]:
        found = f"{len(paths) - len(missing)} without {listed(missing)}"
        raise mismatch(index, f"{len(paths)} shard files alongside it", found, "download the others too")


def files_inside(folder: Location) -> list[str]:
    """Paths in a folder of all its files, with slashes; raises for anything but files, and for links that lead out."""
    files = folder.files_below()
    for path in (folder / name for name in files):
        try:
            is_link = path.is_symlink()
            target = is_link and path.leads_out(folder)
            found = f"a symbolic link to {target}" if target else path.irregular()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
        if found and is_link:
            raise mismatch(path, "a file in the checkpoint's folder", found, "copy what it links to if meant")
        if found:
            raise mismatch(path, "a file", found, HOSTILE)
    return files


# Zip archives ---------------------------------------------------------------------------------------------------------


class Window(Seekable):
    """A range of a file as a file of its own, such as a member of an uncompressed archive. It opens nothing itself."""

    def __init__(self, source: ByteReader, base: int, size: int) -> None:
        super().__init__()
        self._source, self._base, self.size = source, base, size
        self._file = source.open_file() if source.remote else None  # which keeps what was fetched

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count, position = max(min(len(view), self.size - self.position), 0), self._base + self.position
        if self._file is None:
            data = self._source.peek(position, count)
            count = len(data)
            view[:count] = data
        else:
            self._file.seek(position)
            count = cast(Any, self._file).readinto(view[:count])
        self.position += count
        return count


def zip_directory(source: ByteReader, path: Location, kind: str) -> list[zipfile.ZipInfo]:
    """The members of the archive that a file is; nothing of what it lists is checked yet."""
    check_pointer(path)
    with corrupt(f"{path}: expected a {kind} archive, found a truncated or corrupt one. Download or copy it again"):
        return zipfile.ZipFile(cast(Any, Window(source, 0, source.size))).infolist()


def member_start(path: Location, info: zipfile.ZipInfo) -> int:
    """The byte at which a member of an archive starts, after every check that needs none of its bytes."""
    what = f"{path}: member {info.filename!r}"
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if info.flag_bits & 1:
        raise mismatch(what, "it as Keras, NumPy and PyTorch write it", "it encrypted", "save it without a password")
    if info.compress_type != zipfile.ZIP_STORED and not deflated:
        fix = "unpack the archive, or load and save it again with what wrote it"
        raise mismatch(what, "no compression, or deflate", f"method {info.compress_type}", fix)
    size, header = path.stat().st_size, b""
    if 0 <= info.header_offset < size:
        with path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(LOCAL_HEADER) or b""
    if len(header) < LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise mismatch(what, f"it at byte {info.header_offset}", "something else")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + LOCAL_HEADER + names
    if start + info.compress_size > size:
        raise truncated(path, f"{info.filename} up to byte {start + info.compress_size}", f"{size} bytes")
    if info.file_size > info.compress_size * MAX_RATIO if deflated else info.file_size != info.compress_size:
        found = f"{info.compress_size} stored, which cannot be as many"
        raise mismatch(what, f"{info.file_size} bytes", found)
    return start


def stored_start(path: Location, info: zipfile.ZipInfo, by: str, fix: str) -> int:
    """As `member_start`, of a member that must not be compressed, so that it is read in place."""
    start = member_start(path, info)
    if info.compress_type != zipfile.ZIP_STORED:
        expected = f"{info.filename} to be stored without compression, as {by} does"
        raise mismatch(path, expected, "it compressed", fix)
    return start

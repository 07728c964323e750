"""Checks of untrusted content: pointers, JSON, indexes, shards, links.

Formats: https://git-lfs.github.com/spec/v1; https://huggingface.co/docs/hub/local-cache. Everything raises
`CheckpointError` for what is corrupt, hostile or cannot be read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import reprlib
import stat
from collections.abc import Generator, Sequence
from typing import Any, TypeGuard, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._remote.url import is_url
from lazymodel._show.text import format_bytes, listed
from lazymodel._tensors.byte_reader import reading

MAX_JSON = 100 << 20  # bytes; an index of a million tensors is below this
MAX_DIMENSIONS = 32  # NumPy 1's; no model comes near
MAX_NBYTES = 2**63  # what NumPy can address, even where an extent of 0 leaves nothing to hold
CORRUPT = "it is corrupt"
TRUNCATED = "it is truncated or corrupt. Download or copy it again."
HOSTILE = "do not trust this checkpoint"
_MAX_PATH = 4096  # characters; what Linux takes
_LFS = b"version https://git-lfs.github.com/spec/v1"
_MOST = float(np.finfo(np.float32).max)


def mismatch(where: object, expected: str, found: object, fix: str = CORRUPT) -> CheckpointError:
    """The error for content that is not what it has to be."""
    return CheckpointError(f"{where}: expected {expected}, found {found}; {fix}")


def truncated(path: object, expected: str, found: object) -> CheckpointError:
    """The error for a file that ends too early."""
    return CheckpointError(f"{path} is truncated: expected {expected}, found {found}. Download or copy it again.")


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

"""The Hugging Face hub: repositories, read at one commit, its local cache, and the hashes that both state.

Sources: https://huggingface.co/docs/hub/api for the addresses (`/api/models/{repo}/revision/{revision}`, with
`?blobs=true` for hashes, and `/{repo}/resolve/{revision}/{path}`); https://huggingface.co/docs/hub/local-cache;
`huggingface_hub/_local_folder.py` for the metadata of `hf download --local-dir`. Endpoint and token are those that
`huggingface_hub` would use.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lazymodel._errors import CheckpointError
from lazymodel._remote.requests import Missing
from lazymodel._remote.url import parse_url, quoted
from lazymodel._tensors.byte_reader import reading

MOST_JSON = 16 << 20  # bytes of an answer, 20 times as many when parsed; a list of a hundred thousand files is smaller
_COMMIT = re.compile("[0-9A-Za-z]+")
_DEFAULT = "https://huggingface.co"
_WHOLE_COMMIT = re.compile("[0-9a-f]{40}")


class Repository:
    """One repository at one revision. The first request fixes the commit, and all files are read from that commit."""

    def __init__(self, name: str, revision: str) -> None:
        self.name, self.revision = name, revision or "main"
        self.endpoint = os.environ.get("HF_ENDPOINT", _DEFAULT).rstrip("/")
        parse_url(self.endpoint)  # rejects plain http to other hosts
        token = _token()
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._settled: tuple[str, list[str]] | None = None
        self._hashes: dict[str, tuple[str, str]] | None = None

    def settled(self, read: Callable[[str], bytes]) -> tuple[str, list[str]]:
        """The hash of the commit, and the paths of all its files; `read` returns the body of an address."""
        self._settled = self._settled or self._found(read)
        return self._settled

    def hashes(self, read: Callable[[str], bytes]) -> dict[str, tuple[str, str]]:
        """The algorithm and digits that the hub publishes for each file, by path: the hash of its content if it is
        stored as a large file, else that of its git object.
        """
        if self._hashes is not None:
            return self._hashes
        self._hashes = stated = dict[str, tuple[str, str]]()
        body = read(f"{self.endpoint}/api/models/{self.name}/revision/{self.settled(read)[0]}?blobs=true")
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # then files have no hash
            for entry in cast("dict[str, Any]", json.loads(body))["siblings"]:
                large = entry.get("lfs")
                found = ("sha256", large["sha256"]) if large else ("git-sha1", entry["blobId"])
                stated[str(entry["rfilename"])] = (found[0], str(found[1]).lower())
        return stated

    def _found(self, read: Callable[[str], bytes]) -> tuple[str, list[str]]:
        where = f"{self.endpoint}/api/models/{self.name}/revision/{quoted(self.revision).replace('/', '%2F')}"
        failed, kind = f"cannot read hf://{self.name}@{self.revision}: ", CheckpointError
        try:
            answer = cast("dict[str, Any]", json.loads(read(where)))
            commit, files = answer["sha"], [entry["rfilename"] for entry in answer["siblings"]]
            if _COMMIT.fullmatch(commit) and all(isinstance(file, str) for file in files):
                return commit, files
            failed += "the hub's answer is not in its documented form"
        except CheckpointError as error:
            failed, kind = str(error), type(error)
        except Missing:
            failed += "the hub has no such repository or revision"
        except (ValueError, KeyError, TypeError, RecursionError):
            failed += "the hub's answer is not in its documented form"
        hint = "" if self.headers else ". If it is private or gated, log in with `hf auth login` or set HF_TOKEN"
        raise kind(f"{failed}{hint}")


def _token() -> str | None:
    try:
        from huggingface_hub import get_token
    except ImportError:
        if token := os.environ.get("HF_TOKEN"):
            return token
        home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        file = Path(os.environ.get("HF_TOKEN_PATH", home / "token"))
        return (file.read_text(encoding="utf-8").strip() or None) if file.is_file() else None
    return get_token()


def is_offline() -> bool:
    """Returns True if the user allows no request to the hub."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return constants.HF_HUB_OFFLINE


def cached_snapshot(name: str, commit: str) -> Path | None:
    """The folder of a commit in the local cache of the hub. Files may be missing there."""
    folder = _cache(name)
    snapshot = None if folder is None else folder / "snapshots" / commit
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def cached_commit(name: str, revision: str) -> str | None:
    """The commit of a revision at the time when the local cache of the hub was last updated from it."""
    if (folder := _cache(name)) is None:
        return None
    try:
        return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return revision if _WHOLE_COMMIT.fullmatch(revision) else None


def _cache(name: str) -> Path | None:
    """The folder of a repository in the local cache of the hub; None without `huggingface_hub`."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


_ALGORITHMS = {40: "git-sha1", 64: "sha256"}  # by length of an ETag: git's id of a blob, or the hash of an LFS object
_MAX_METADATA = 4 << 10  # bytes; three short lines


def stated_alongside(path: str) -> list[tuple[str, str, str]]:
    """The hashes that a cache or a download states for a file of its own: algorithm, digits, and who says so.

    In a cache, `snapshots/<revision>/<name>` is a link to a blob that has its ETag for a name; a download has
    `<folder>/.cache/huggingface/download/<name>.metadata`: lines of commit, ETag and time.
    """
    found: list[tuple[str, str]] = []
    folder, name = os.path.split(os.path.realpath(path))
    if os.path.basename(folder) == "blobs" and os.path.isdir(os.path.join(os.path.dirname(folder), "snapshots")):
        found.append((name, f"the name of its Hugging Face blob, {folder}/{name},"))
    for parent in Path(path).parents:
        metadata = parent / ".cache" / "huggingface" / "download" / f"{os.path.relpath(path, parent)}.metadata"
        if os.path.isfile(metadata):  # which, unlike pathlib's, does not raise where the name gets too long
            with reading(metadata), open(metadata, "rb") as stream:
                lines = stream.read(_MAX_METADATA).decode(errors="replace").split("\n")
            found.append((lines[1].strip() if len(lines) > 1 else "", str(metadata)))
            break
    return [(_ALGORITHMS[len(etag)], etag, source) for etag, source in found if len(etag) in _ALGORITHMS]

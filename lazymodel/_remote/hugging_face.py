"""Repositories of the Hugging Face hub: one commit of one of them, its files and where each is served.

Source of the addresses: https://huggingface.co/docs/hub/api (`/api/models/{repo}/revision/{revision}` and
`/{repo}/resolve/{revision}/{path}`). Endpoint and token are those that `huggingface_hub` would use.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lazymodel._errors import CheckpointError
from lazymodel._remote.requests import Missing
from lazymodel._remote.url import parse_url, quoted

MOST_JSON = 16 << 20  # bytes of an answer; the list of a hundred thousand files is smaller, parsed 20 times as large
_COMMIT = re.compile("[0-9A-Za-z]+")
_DEFAULT = "https://huggingface.co"
_WHOLE_COMMIT = re.compile("[0-9a-f]{40}")


class Repository:
    """One repository at one revision, which is settled with the first question: all files are those of one commit."""

    def __init__(self, name: str, revision: str) -> None:
        self.name, self.revision = name, revision or "main"
        self.endpoint = os.environ.get("HF_ENDPOINT", _DEFAULT).rstrip("/")
        parse_url(self.endpoint)  # refuses plain http to other hosts
        token = _token()
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._commit = ""
        self._files: list[str] = []

    def files(self, read: Callable[[str], bytes]) -> list[str]:
        """Paths of all files; `read` gets the body of an address."""
        self._ask(read)
        return self._files

    def files_url(self, read: Callable[[str], bytes]) -> str:
        """The address of its folder."""
        self._ask(read)
        return f"{self.endpoint}/{self.name}/resolve/{self._commit}"

    def commit(self, read: Callable[[str], bytes]) -> str:
        """The hash of the commit that the revision is."""
        self._ask(read)
        return self._commit

    def _ask(self, read: Callable[[str], bytes]) -> None:
        if self._commit:
            return
        shown = f"hf://{self.name}@{self.revision}"
        where = f"{self.endpoint}/api/models/{self.name}/revision/{quoted(self.revision).replace('/', '%2F')}"
        failed, kind = f"cannot read {shown}: ", CheckpointError
        try:
            body = read(where)
        except CheckpointError as error:
            failed, kind = str(error), type(error)
        except Missing:
            failed += "the hub knows no such repository or revision"
        else:
            try:
                answer = cast("dict[str, Any]", json.loads(body))
                files = [entry["rfilename"] for entry in answer["siblings"]]
                commit = answer["sha"]
            except (ValueError, KeyError, TypeError, RecursionError):
                files, commit = [None], ""
            if isinstance(commit, str) and _COMMIT.fullmatch(commit) and all(isinstance(file, str) for file in files):
                self._files, self._commit = cast("list[str]", files), commit
                return
            failed += "the hub's answer is not what it documents"
        mend = "" if self.headers else ". If it is private or gated, log in with `hf auth login` or set HF_TOKEN"
        raise kind(f"{failed}{mend}")


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
    """Whether the user wants the hub not to be asked."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return constants.HF_HUB_OFFLINE


def cached_snapshot(name: str, commit: str) -> Path | None:
    """The folder of a commit in the local cache of the hub, which may lack files."""
    folder = _cache(name)
    snapshot = None if folder is None else folder / "snapshots" / commit
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def cached_commit(name: str, revision: str) -> str | None:
    """The commit that a revision was when something of it was last put into the local cache of the hub."""
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

"""Objects as files below a folder: what they are called, their ETags, lists of them, uploads in parts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable
from email.utils import formatdate
from pathlib import Path
from typing import BinaryIO, Protocol

from tests.servers._controls import Controls

_STAGING = ".uploads"  # below the root, so that a finished upload is renamed into place
_BLOCK = 1 << 20


class Readable(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


@dataclasses.dataclass(frozen=True)
class Meta:
    """An object as it was when it was looked at."""

    path: str  # below the root
    size: int
    etag: str  # quoted
    generation: int
    modified: float  # seconds since 1970

    @property
    def last_modified(self) -> str:
        return formatdate(self.modified, usegmt=True)


@dataclasses.dataclass(frozen=True)
class Page:
    """A part of a list: whole paths and common prefixes in one order, and where the next page begins."""

    objects: list[Meta]
    prefixes: list[str]
    next: str | None


class Objects:
    """The files below `root`. Every answer looks at the file again: tests may write there directly."""

    def __init__(self, root: Path, controls: Controls) -> None:
        self.root = root
        self.controls = controls
        self._versions: dict[str, int] = {}
        self._uploads: dict[str, str] = {}  # id → path
        self._lock = threading.Lock()

    def file(self, path: str) -> Path:
        parts = path.split("/")
        if ".." in parts or parts[0] == _STAGING or path.startswith("/"):
            raise FileNotFoundError(path)
        return self.root / path

    def open(self, path: str) -> tuple[Meta, BinaryIO]:
        file = self.file(path).open("rb")
        return self._meta(path, os.fstat(file.fileno())), file

    def meta(self, path: str) -> Meta:
        if not (file := self.file(path)).is_file():
            raise FileNotFoundError(path)
        return self._meta(path, file.stat())

    def _meta(self, path: str, stat: os.stat_result) -> Meta:
        version = self._versions.get(path, 0)
        text = f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino} {version}"
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        return Meta(path, stat.st_size, f'"{digest[:24]}"', int(digest[:13], 16), stat.st_mtime)

    def replace_when_due(self, path: str) -> None:
        if (replacement := self.controls.next_replacement(path)) is None:
            return
        with self._lock:
            self._versions[path] = self._versions.get(path, 0) + 1
        if (source := replacement["source"]) is not None:
            self._write(path, lambda file: shutil.copyfile(self.root / source, file))

    def list(self, prefix: str, delimiter: str, after: str, most: int) -> Page:
        """Paths that begin with `prefix`, in order, behind `after`; those with `delimiter` behind it as prefixes."""
        names: set[str] = set()
        top = self.root / prefix.rpartition("/")[0]
        for folder, folders, files in os.walk(top):
            folders[:] = [name for name in folders if name != _STAGING]
            for name in files:
                path = (Path(folder) / name).relative_to(self.root).as_posix()
                if path.startswith(prefix):
                    head, found, _ = path[len(prefix) :].partition(delimiter) if delimiter else (path, "", "")
                    names.add(prefix + head + delimiter if found else path)
        ordered = sorted(names)
        ordered = ordered[bisect_right(ordered, after) :]
        page, more = ordered[:most], len(ordered) > most
        prefixes = [name for name in page if delimiter and name.endswith(delimiter)]
        return Page(
            [self.meta(name) for name in page if name not in set(prefixes)], prefixes, page[-1] if more else None
        )

    def put(self, path: str, body: Readable) -> Meta:
        def fill(file: Path) -> None:
            with file.open("wb") as out:
                while piece := body.read(_BLOCK):
                    out.write(piece)

        return self._write(path, fill)

    def delete(self, path: str) -> None:
        self.file(path).unlink()

    def _write(self, path: str, fill: Callable[[Path], object]) -> Meta:
        target = self.file(path)
        staging = self.root / _STAGING
        staging.mkdir(exist_ok=True)
        made = staging / uuid.uuid4().hex
        try:
            fill(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            made.replace(target)
        finally:
            made.unlink(missing_ok=True)
        return self.meta(path)

    # Uploads in parts. A part's name is the dialect's: a number or a block's id.

    def begin(self, path: str, upload: str) -> None:
        with self._lock:
            if upload in self._uploads:
                return
            self._uploads[upload] = path
            (self.root / _STAGING / upload).mkdir(parents=True)
        self.controls.count("uploads", "begun")

    def part(self, upload: str, name: str, body: Readable) -> str:
        """Writes a part and returns its ETag."""
        with self._lock:
            known = upload in self._uploads
        if not known:
            raise FileNotFoundError(upload)
        digest = hashlib.sha1(usedforsecurity=False)
        file = self.root / _STAGING / upload / name
        unfinished = file.with_suffix(f".{uuid.uuid4().hex}")
        with unfinished.open("wb") as out:
            while piece := body.read(_BLOCK):
                digest.update(piece)
                out.write(piece)
        unfinished.replace(file)
        return f'"{digest.hexdigest()}"'

    def complete(self, upload: str, names: Iterable[str]) -> Meta:
        with self._lock:
            path = self._uploads.pop(upload)
        folder = self.root / _STAGING / upload

        def fill(file: Path) -> None:
            with file.open("wb") as out:
                for name in names:
                    with (folder / name).open("rb") as part:
                        shutil.copyfileobj(part, out, _BLOCK)

        meta = self._write(path, fill)
        shutil.rmtree(folder)
        self.controls.count("uploads", "completed")
        return meta

    def abort(self, upload: str) -> None:
        with self._lock:
            del self._uploads[upload]
        shutil.rmtree(self.root / _STAGING / upload, ignore_errors=True)  # parts may still be coming
        self.controls.count("uploads", "aborted")

    def open_uploads(self) -> list[str]:
        """The paths of uploads that were begun and neither completed nor aborted."""
        with self._lock:
            return sorted(self._uploads.values())

    def forget_uploads(self) -> None:
        with self._lock:
            uploads = list(self._uploads)
            self._uploads.clear()
        for upload in uploads:
            shutil.rmtree(self.root / _STAGING / upload, ignore_errors=True)

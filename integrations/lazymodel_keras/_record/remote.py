"""Files at URLs for code that only takes paths: KerasHub's loaders, and Keras' own.

Small files (configurations, vocabularies, indexes of shards) are fetched into a temporary folder on request. Weight
files are never fetched: each has a placeholder path in that folder, without a file, and code that opens files while a
recording runs looks up the object for that path here. If all weights of a folder are in the local cache of the Hugging
Face hub, they are used from there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazymodel import CheckpointError
from lazymodel._remote.path import Location, RemoteFile, RemotePath, remote_path
from lazymodel._remote.url import is_supported, is_url, shown
from lazymodel._show.text import format_bytes
from lazymodel.checkpoints._open import CachedCopy, cached_copy, located
from lazymodel_keras._gguf import GgufFolder, is_gguf

_MOST = 256 << 20  # bytes of all small files of a preset; the largest vocabularies have a tenth of it
_WEIGHTS = (".h5", ".hdf5", ".safetensors", ".keras", ".npz", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack")
_CONFIG = "config.json"
_STOCK = ("hf", "gs")  # schemes that KerasHub reads by itself, with a download


class StandIn(RemoteFile):
    """An object as an open file; its name is its placeholder path, since wrappers identify it by name."""

    def __init__(self, where: RemotePath, path: str) -> None:
        super().__init__(where.store, where.key)
        self.name = path

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__  # HDF5 uses this as the name of a file object


class _Folder:
    """A folder at a URL, and the local folder of its small files."""

    def __init__(self, where: RemotePath, own: Path, cached: CachedCopy | None) -> None:
        self.where, self.own, self.cached = where, own, cached
        self.nbytes = 0  # fetched so far

    def file(self, name: str) -> str:
        """The path of a file in it; raises FileNotFoundError if there is none."""
        if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            raise CheckpointError(
                f"{self.where}: expected files inside it, found {name!r}; do not trust this checkpoint"
            )
        if self.cached is not None and (path := self.cached.path / name).is_file():
            return str(path)
        path, where = self.own / name, self.where / name
        offline = self.cached is not None and self.cached.offline
        if not path.exists():
            if offline or not where.is_file():
                raise FileNotFoundError(f"there is no {name} at {self.where}")
            if not name.endswith(_WEIGHTS):
                self._fetch(where, path)
        return str(path)

    def location(self, path: str) -> RemotePath:
        """Returns the object for a path in it."""
        return self.where / Path(path).relative_to(self.own).as_posix()

    def saved_model(self) -> str:
        """A folder as `model.save(path, zipped=False)` writes it; the weights are only an empty file."""
        names = [_CONFIG, *(name for name in self.where.files_below() if name.startswith("assets/"))]
        for name in names:
            self.file(name)
        Path(self.file("model.weights.h5")).touch()
        return str(self.own)

    def _fetch(self, where: RemotePath, path: Path) -> None:
        with where.open() as file:
            self.nbytes += (size := where.stat().st_size)
            if self.nbytes > _MOST:
                raise CheckpointError(
                    f"{where}: expected at most {format_bytes(_MOST)} of configurations and vocabularies besides the "
                    f"weights, found {format_bytes(self.nbytes)} with this file of {format_bytes(size)}. Copy the "
                    "folder without its weights to a disk to look at it."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read() or b"")


class RemoteFiles:
    """The files at URLs that one recording, and those that repeat it, have requested.

    Attributes:
        options: As `storage_options` in `lazymodel.open_checkpoint`, for all URLs.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self._folders: dict[str, _Folder | GgufFolder] = {}  # by URL or path, as given and as displayed
        self._located: dict[str, Location] = {}
        self._own: str | None = None

    def serves(self, path: Any) -> bool:
        """Returns True for a URL that is read here.

        Without obstore, KerasHub reads what it can by itself, and always repositories of the hub without an owner.
        """
        if not is_supported(path):
            return False
        scheme, _, rest = path.partition("://")
        stock = scheme.lower() in _STOCK and not has_obstore()
        return not stock and (scheme.lower() != "hf" or "/" in rest.strip("/"))

    def holds(self, preset: Any) -> bool:
        """Returns True for a preset that is read here, at a URL or in a GGUF file."""
        return self.serves(preset) or (is_gguf(preset) and not is_url(preset))

    def folder(self, url: str, cls: Any = None) -> str:
        """Registers a folder at a URL; returns the URL as displayed in messages, which `file` also takes.

        Does the same for the URL or path of a GGUF file, from which `cls` is to be built.
        """
        name = shown(url)
        if is_gguf(url):
            if not isinstance(folder := self._folders.get(url), GgufFolder):
                folder = GgufFolder(located(url, self.options if is_url(url) else None), self._own_folder())
                self._folders[url] = self._folders[name] = folder
            if cls is not None:
                folder.choose(cls)
        elif url not in self._folders:
            where = remote_path(url, self.options)
            self._folders[url] = self._folders[name] = _Folder(where, self._own_folder(), cached_copy(where))
        return name

    def file(self, folder: str, name: str) -> str:
        """The path of a file in the folder at a URL: a copy of a small file, or the placeholder of a weight file.

        Raises:
            FileNotFoundError: There is no such file.
            CheckpointError: It cannot be read, or is too large for a small file.
        """
        return self._folders[self.folder(folder)].file(name)

    def location(self, path: str) -> str | RemotePath:
        """The object for a placeholder path; other paths unchanged."""
        folder = self._holding(path)
        return path if folder is None else folder.location(path)

    def gguf(self, path: str) -> GgufFolder | None:
        """The GGUF file for a placeholder path or a registered preset; None for others."""
        folder = self._folders.get(path) or self._holding(path)
        return folder if isinstance(folder, GgufFolder) else None

    def located(self, path: Any) -> Any:
        """The location of a URL (raises CheckpointError if nothing is there); paths are returned unchanged."""
        if not self.serves(path):
            return path
        if path not in self._located:
            self._located[path] = located(path, self.options)
        return self._located[path]

    def for_keras(self, where: Any) -> Any:
        """Returns what Keras can open for a result of `located`, which may be a saved model in a folder.

        A path, or a file object for a file that Keras would open by itself.
        """
        if not isinstance(where, RemotePath):
            return where
        is_folder = (where / _CONFIG).is_file()
        folder = where if is_folder else where.parent
        known = next((f for f in self._folders.values() if isinstance(f, _Folder) and f.where == folder), None)
        if known is None:
            known = self._folders[f"{folder}#{id(where.store)}"] = _Folder(folder, self._own_folder(), None)
        try:
            if is_folder:
                return known.saved_model()
            path = known.file(where.name)
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint at {where}: the store has nothing there") from None
        return path if path.endswith((".weights.h5", ".weights.json")) else StandIn(where, path)

    def _holding(self, path: str) -> _Folder | GgufFolder | None:
        """The folder that contains a path."""
        folders = self._folders.values() if os.path.isabs(path) else ()
        return next((folder for folder in folders if Path(path).is_relative_to(folder.own)), None)

    def _own_folder(self) -> Path:
        if self._own is None:
            self._own = tempfile.mkdtemp(prefix="lazymodel-")
            weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
        return Path(tempfile.mkdtemp(dir=self._own))


def check_storage_options(path: Any, options: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError if options of a store were given for a path that is not a URL."""
    if options and not is_url(path):
        raise CheckpointError(f"{os.fspath(path)}: storage_options are for URLs, found a path or a preset's name")


def has_obstore() -> bool:
    """Returns True if URLs can be reached."""
    return importlib.util.find_spec("obstore") is not None

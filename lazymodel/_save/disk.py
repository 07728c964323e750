"""Where files go on disks: a file, a folder that may hold others, or a folder that is replaced as a whole.

Responsible for what is there already, and for the order in which files come and go. Not responsible for what is in
them, nor for how one step is made to happen completely or not at all (`_save/atomic`).

Programs other than ours open `model.safetensors` before an index, so it comes and goes while there is a complete index,
and both see the old checkpoint or the new one at every instant. Shards come under unused names, then the index is
replaced, then the old shards go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

from lazymodel._devices.collective import CollectiveScope
from lazymodel._errors import LazyModelError
from lazymodel._remote.path import LocalPath
from lazymodel._save.atomic import Staging, staging, writing
from lazymodel._save.files import Destination, SavedFile, SaveOptions, check_overwrite, divided
from lazymodel._save.safetensors import INDEX, SINGLE, check_file, check_folder, index_of, index_of_loose, old_files
from lazymodel._save.write import write_files
from lazymodel._show.text import format_bytes
from lazymodel.checkpoints._open import staging_folder


class DiskDestination(Destination):
    """A file or folder; how the new files are put in place is that of subclasses.

    Args:
        inside: Whether the path is a folder that files are put into, rather than replaced itself.
        rivals: The staging folders of other destinations that have files in common with this one.
    """

    def __init__(
        self,
        path: LocalPath,
        files: Sequence[SavedFile],
        options: SaveOptions,
        *,
        inside: bool = False,
        rivals: Iterable[Path] = (),
    ) -> None:
        divided(files, options.budget)  # which raises where it is too small, before anything is written
        self.path, self.files, self._options = path, files, options
        self._inside, self._rivals, self._leads = inside, rivals, False
        self._stage = Staging(path, inside=inside)

    @contextlib.contextmanager
    def stage(self, *, leads: bool, overwrite: bool) -> Generator[None]:
        """Locks the destination and makes every file with its header and its full length, until the block ends.

        Only the leading process does: the others write into its files.
        """
        self._leads = leads
        if not leads:
            yield
            return
        with staging(self.path, inside=self._inside, rivals=self._rivals) as self._stage:
            check_overwrite(self._there(), overwrite)
            with writing(self.path):
                check_room(self.path, sum(file.nbytes for file in self.files), self._stage.new)
                for place, file in self._places().items():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with open(place, "xb") as stream:
                        for start, text in ((0, file.header), *file.rest):
                            stream.seek(start)
                            stream.write(text)
                        stream.truncate(file.nbytes)
            yield

    def write(self, scope: CollectiveScope) -> None:
        write_files(self.path, self._places(), self._options, scope, leads=self._leads)

    def _places(self) -> dict[Path, SavedFile]:
        """Temporary places of the files, the same in every process."""
        return {self._stage.new / file.name: file for file in self.files}

    def _there(self) -> LocalPath | None:
        """Returns the path to be replaced, if any; raises LazyModelError if it must not be."""
        raise NotImplementedError


class FileDestination(DiskDestination):
    """A single file, such as `x.safetensors`."""

    def __init__(self, path: LocalPath, files: Sequence[SavedFile], options: SaveOptions) -> None:
        rivals = [staging_folder(path.parent, inside=True)] if path.name == SINGLE else []
        super().__init__(path, [dataclasses.replace(file, name=path.name) for file in files], options, rivals=rivals)

    def _there(self) -> LocalPath | None:
        check_file(self.path)
        return self.path if os.path.lexists(self.path) else None

    def commit(self) -> None:
        self._stage.replace_file(self.path.name)


class FolderDestination(DiskDestination):
    """A folder: `model.safetensors`, or shards with their index. Other files in it stay."""

    def __init__(self, path: LocalPath, files: Sequence[SavedFile], options: SaveOptions) -> None:
        check_folder(path)
        replaced = path.parent / path.resolve().name if path.is_symlink() else path
        rivals = [staging_folder(replaced), staging_folder(path.resolve()), staging_folder(path / SINGLE)]
        # It may be a link to another file system, where files cannot be moved to.
        super().__init__(path, files, options, inside=True, rivals=rivals)

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


class WholeFolder(DiskDestination):
    """A folder that is replaced as a whole."""

    def __init__(self, path: LocalPath, files: Sequence[SavedFile], options: SaveOptions) -> None:
        path = LocalPath(os.path.realpath(path))
        check_folder(path)
        super().__init__(path, files, options, rivals=[staging_folder(path, inside=True)])

    def commit(self) -> None:
        self._stage.replace_folder()


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


def check_room(path: Path, nbytes: int, folder: Path) -> None:
    """Raises LazyModelError where a folder's disk has not so many bytes free for what is to be saved at a path."""
    if (free := shutil.disk_usage(folder).free) < nbytes:
        raise LazyModelError(
            f"{path} needs {format_bytes(nbytes)}, and there are {format_bytes(free)} free; "
            "free some, or save elsewhere"
        )

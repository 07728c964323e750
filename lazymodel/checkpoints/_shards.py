"""Shards: the files of one checkpoint, which an index lists, or which are numbered and of one save.

A `Contents` collects them and everything that is wrong: opening raises it, inspecting shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import reprlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import Location, fetch_heads
from lazymodel._show.text import LISTED, first_lines, listed, plural
from lazymodel.checkpoints._checkpoint import Checkpoint, JoinedCheckpoint
from lazymodel.checkpoints._safetensors import SafetensorsFile
from lazymodel.checkpoints._untrusted import shard_path

SAVE_KEY = "lazymodel_save"  # in a shard's metadata: what the shards of one save have in common, and no others
_PART = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")  # as Hugging Face numbers the shards of a model
_NOUNS = ("tensor", "group")  # what an index lists, by whether it groups them
_MAX_NAME = 240  # characters of a name that a message shows; a file may give a tensor a name of megabytes


def is_numbered(name: str) -> bool:
    """Returns True if a file is called as shards of a safetensors checkpoint are."""
    return _PART.fullmatch(name) is not None


@dataclasses.dataclass
class Contents:
    """The contents of a place: its files, the tensors of each that count, and all problems."""

    where: Location
    format: str = "unknown"
    index: Location | None = None
    metadata: Any = None  # of the index
    whole: Checkpoint | None = None  # what is opened as one thing
    files: list[Location] = dataclasses.field(default_factory=list)  # that are there, index first
    parts: list[tuple[Checkpoint, Collection[str]]] = dataclasses.field(default_factory=list)
    problems: list[tuple[str, Location | None]] = dataclasses.field(default_factory=list)  # with the file, if it is one
    harmless: set[str] = dataclasses.field(default_factory=set)  # problems in spite of which all that is listed loads

    def problem(self, message: str, file: Location | None = None) -> None:
        self.problems.append((message, file))

    @contextlib.contextmanager
    def noting(self, file: Location | None = None) -> Generator[None]:
        """Notes what the block raises."""
        try:
            yield
        except LazyModelError as error:
            self.problem(str(error), file)

    def checkpoint(self) -> Checkpoint:
        """All of it as one; raises CheckpointError if anything is wrong that keeps it from being loaded."""
        if wrong := [message for message, _ in self.problems if message not in self.harmless]:
            for part, _ in self.parts:
                part.close()
            raise CheckpointError("\n".join(first_lines(wrong)))
        return JoinedCheckpoint(self.index or self.where, self.parts) if self.whole is None else self.whole

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds what is opened as one thing."""
        self.whole = checkpoint
        self.parts.append((checkpoint, checkpoint.keys()))

    def open(self, path: Location, expected: str, open: Callable[[Any], Checkpoint]) -> Checkpoint | None:
        """Opens a file that should be there; None where that fails."""
        with self.noting(path):
            if not path.is_file():
                found = "no such file. Download it too."
                if path.exists():
                    found = "a folder, a pipe or a device; do not trust this checkpoint"
                elif isinstance(path, Path) and path.is_symlink():
                    found = f"a link to {path.readlink()}, which is not there. Download it too."
                raise CheckpointError(f"{path}: expected {expected}, found {found}")
            self.files.append(path)
            return open(path)

    def add_loose(self, folder: Location, paths: Sequence[Location], open: Callable[[Any], Checkpoint]) -> None:
        """Adds files that no index describes; those numbered `k-of-n` must be n, and of one save."""
        fetch_heads(paths)
        opened = {path: self.open(path, "tensors", open) for path in paths}
        self.parts += [(shard, shard.keys()) for shard in opened.values() if shard is not None]
        for message in _save_problems(folder, opened, indexed=False):
            self.problem(message)

    def add_indexed(
        self, index: Location, weights: Mapping[str, Any], open: Callable[[Any], Checkpoint], *, grouped: bool
    ) -> None:
        """Adds the shards that an index names, each with the tensors that the index says it has.

        `weights` maps a tensor to its file or, where `grouped`, as Keras' indexes, a group of tensors to one file or
        more.
        """
        expected: dict[Location, list[str]] = {}
        for shard, keys in self.by_shard(index, weights, grouped=grouped).items():
            with self.noting(index):
                expected.setdefault(shard_path(index, shard), []).extend(keys)
        fetch_heads(expected)
        nouns = {path: f"{some(keys, _NOUNS[grouped])} as {index.name} says" for path, keys in expected.items()}
        opened = {path: shard for path in expected if (shard := self.open(path, nouns[path], open)) is not None}
        for message in _save_problems(index, opened, indexed=True):
            self.problem(message)
        for path, shard in opened.items():
            self.add_shard(path, shard, index.name, expected[path], weights, grouped=grouped)

    def by_shard(self, index: Any, weights: Mapping[str, Any], *, grouped: bool) -> dict[str, list[str]]:
        """Shard → what an index says that it has."""
        result: dict[str, list[str]] = {}
        wrong: dict[str, None] = {}
        for key, value in weights.items():
            for shard in cast("list[Any]", value) if grouped and isinstance(value, list) else [value]:
                if isinstance(shard, str):
                    result.setdefault(shard, []).append(key.strip("/") if grouped else key)
                else:
                    wrong[reprlib.repr(shard)] = None
        for shard in wrong:
            self.problem(f"{index}: expected a shard's file name, found {shard}", index)
        return result

    def add_shard(
        self,
        path: Location,
        shard: Checkpoint,
        index: str,
        expected: Sequence[str],
        weights: Mapping[str, Any],
        *,
        grouped: bool,
    ) -> None:
        """Adds the tensors of a shard that an index, which lists `weights` in all, says it has."""
        held: Any = shard.keys()
        if grouped:
            held = {}
            for name in shard:
                held.setdefault(name.rpartition("/")[0], []).append(name)
        found = [key for key in expected if key in held]
        wrong = [([key for key in expected if key not in held], "is missing", "says it has")]
        if len(found) < len(held):
            known = {key.strip("/") for key in weights} if grouped else weights.keys()
            others = held.keys() - set(expected) if grouped else held - set(expected)
            others = [key for key in held if key in others]
            wrong.append(([key for key in others if key in known], "has", "puts in other shards"))
            wrong.append(([key for key in others if key not in known], "has", "does not mention and nothing will load"))
        for keys, verb, what in wrong:
            if keys:
                message = (
                    f"{shard.path}: {verb} {some(keys, _NOUNS[grouped])}, which {index} {what}; download both again"
                )
                self.problem(message, path)
                if verb == "has":
                    self.harmless.add(message)
        self.parts.append((shard, [name for key in found for name in held[key]] if grouped else found))


def open_loose(folder: Location, paths: Iterable[Location]) -> Checkpoint:
    """Opens safetensors files of a folder that no index describes."""
    found = Contents(folder)
    found.add_loose(folder, list(paths), SafetensorsFile)
    return found.checkpoint()


def _save_problems(folder: Location, shards: Mapping[Location, Checkpoint | None], *, indexed: bool) -> Iterator[str]:
    """Why safetensors files, None those that cannot be opened, are not all of one save's shards.

    Where an index names them their number and their names are right as they are.
    """
    parts: dict[tuple[str, str], dict[Location, int]] = {}
    for path in shards:
        if match := _PART.fullmatch(path.name):
            parts.setdefault((match[1], match[3]), {})[path] = int(match[2])
    if not indexed:
        complete = True
        for (stem, total), paths in parts.items():
            numbers, most = set(paths.values()), int(total)
            if count := most - sum(1 <= number <= most for number in numbers):
                complete = False
                missing = islice((number for number in range(1, most + 1) if number not in numbers), LISTED)
                names = listed(
                    [f"{stem}-{number:0{len(total)}}-of-{total}.safetensors" for number in missing], count=count
                )
                yield (
                    f"{folder}: expected {most} shards as their names say, found {most - count}; missing {names}. "
                    "Download them too."
                )
        if len(parts) > 1 and complete:
            names = ", ".join(f"{stem}-*-of-{total}.safetensors" for stem, total in parts)
            yield (
                f"{folder}: expected the shards of one save, found those of {len(parts)}, {names}, and no index that "
                "says which count. Remove the others, or add the index file"
            )
    for paths in parts.values():
        saves: dict[str | None, list[str]] = {}
        for path in paths:
            if (shard := shards[path]) is not None and shard.metadata is not None:
                saves.setdefault(shard.metadata.get(SAVE_KEY), []).append(path.name)
        if len(saves) > 1:
            yield (
                f"{folder}: expected shards of one save, found a mixture of {len(saves)}: "
                f"{'; '.join(map(listed, saves.values()))}. Copy all shards of one of them again"
            )


def some(names: Sequence[str], noun: str = "tensor") -> str:
    """The first few of some names, and how many they are."""
    first = [repr(short(name)) for name in names[:LISTED]]
    return f"{plural(len(names), noun)} ({listed(first, count=len(names))})"


def short(text: str) -> str:
    """The text, without the middle of one that is too long to show."""
    half = _MAX_NAME // 2
    return text if len(text) <= _MAX_NAME else f"{text[:half]}…{text[-half:]}"

"""Shards: the files of one checkpoint, which an index lists, or which are numbered and of one save.

One loop serves opening, which stops at the first thing that is wrong, and inspecting, which is told all of them.
"""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import Location, fetch_heads
from lazymodel._show.text import LISTED, listed, plural
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._untrusted import require_shards, shard_path

SAVE_KEY = "lazymodel_save"  # in a shard's metadata: what the shards of one save have in common, and no others
_PART = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")  # as Hugging Face numbers the shards of a model
_NOUNS = ("tensor", "group")  # what an index lists, by whether it groups them
_MAX_NAME = 240  # characters of a name that a message shows; a file may give a tensor a name of megabytes

Report = Callable[[str, "str | Location | None"], None]  # is told what is wrong, and in which file
Part = tuple[Checkpoint, Collection[str]]  # a shard, and which of its tensors count


def is_numbered(name: str) -> bool:
    """Whether a file is called as shards of a safetensors checkpoint are."""
    return _PART.fullmatch(name) is not None


def open_loose(
    folder: Location, paths: Sequence[Location], open: Callable[[Any], Checkpoint], problem: Report | None = None
) -> list[Part]:
    """Opens files that no index describes; those numbered `k-of-n` must be n, and of one save."""
    headers: dict[Location, Mapping[str, str] | None] = dict.fromkeys(paths)
    parts: list[Part] = []
    fetch_heads(paths)
    for path in paths:
        with _noted(problem, path):
            _require(path, "tensors")
            parts.append(((shard := open(path)), shard.keys()))
            headers[path] = shard.metadata
    for message in _save_problems(folder, headers, indexed=False):
        _tell(problem, message)
    return parts


def open_indexed(
    index: Location,
    weights: Mapping[str, Any],
    open: Callable[[Any], Checkpoint],
    problem: Report | None = None,
    *,
    grouped: bool,
) -> list[Part]:
    """Opens the shards that an index names, each with the tensors that the index says it has.

    `weights` maps a tensor to its file or, where `grouped`, as Keras' indexes, a group of tensors to one file or more.
    `problem` is told everything that is wrong; None raises it, but for tensors that the index does not list.
    """
    expected: dict[Location, list[str]] = {}
    for shard, keys in by_shard(weights, index, problem, grouped=grouped).items():
        with _noted(problem, index):
            expected.setdefault(shard_path(index, shard), []).extend(keys)
    fetch_heads(expected)
    if problem is None:
        require_shards(index, list(expected))
    opened: dict[Location, Checkpoint] = {}
    for path, keys in expected.items():
        with _noted(problem, path):
            _require(path, f"{some(keys, _NOUNS[grouped])} as {index.name} says")
            opened[path] = open(path)
    for message in _save_problems(index, {path: shard.metadata for path, shard in opened.items()}, indexed=True):
        _tell(problem, message)
    known = weights.keys() if not grouped else {key.strip("/") for key in weights}
    names = [
        indexed_names(shard, index.name, expected[path], known, problem, grouped=grouped)
        for path, shard in opened.items()
    ]
    return list(zip(opened.values(), names, strict=True))


def by_shard(
    weights: Mapping[str, Any], index: str | Location, problem: Report | None = None, *, grouped: bool
) -> dict[str, list[str]]:
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
        _tell(problem, f"{index}: expected a shard's file name, found {shard}", index)
    return result


def indexed_names(
    shard: Checkpoint,
    index: str,
    expected: Sequence[str],
    known: Collection[str] = (),
    problem: Report | None = None,
    *,
    grouped: bool,
) -> Sequence[str]:
    """The tensors of a shard that an index, which lists `known` in all, says it has."""
    path = shard.path
    held: Any = shard.keys()
    if grouped:
        held = {}
        for name in shard:
            held.setdefault(name.rpartition("/")[0], []).append(name)

    def tell(keys: Sequence[str], verb: str, what: str) -> None:
        if keys:
            message = f"{path}: {verb} {some(keys, _NOUNS[grouped])}, which {index} {what}; download both again"
            _tell(problem, message, path)

    tell([key for key in expected if key not in held], "lacks", "says it has")
    if problem is not None:
        others = held.keys() - set(expected) if grouped else held - set(expected)
        others = [key for key in held if key in others]
        tell([key for key in others if key in known], "has", "puts in other shards")
        tell([key for key in others if key not in known], "has", "does not mention and nothing will load")
    there = [key for key in expected if key in held]
    return [name for key in there for name in held[key]] if grouped else there


def _save_problems(
    folder: Location, metadata: Mapping[Location, Mapping[str, str] | None], *, indexed: bool
) -> Iterator[str]:
    """What tells that safetensors files, given with their headers' metadata, are not all of one save's shards.

    Where an index names them their number and their names are right as they are.
    """
    parts: dict[tuple[str, str], dict[Location, int]] = {}
    for path in metadata:
        if match := _PART.fullmatch(path.name):
            parts.setdefault((match[1], match[3]), {})[path] = int(match[2])
    if not indexed:
        missing = [text for key, paths in parts.items() for text in _incomplete(folder, *key, set(paths.values()))]
        yield from missing
        if len(parts) > 1 and not missing:
            names = ", ".join(f"{stem}-*-of-{total}.safetensors" for stem, total in parts)
            yield (
                f"{folder}: expected the shards of one save, found those of {len(parts)}, {names}, and no index that "
                "says which count. Remove the others, or add the index file"
            )
    for paths in parts.values():
        saves: dict[str | None, list[str]] = {}
        for path in paths:
            if (found := metadata[path]) is not None:
                saves.setdefault(found.get(SAVE_KEY), []).append(path.name)
        if len(saves) > 1:
            yield (
                f"{folder}: expected shards of one save, found a mixture of {len(saves)}: "
                f"{'; '.join(map(listed, saves.values()))}. Copy all shards of one of them again"
            )


def _incomplete(folder: Location, stem: str, total: str, numbers: set[int]) -> Iterator[str]:
    count = int(total) - sum(1 <= number <= int(total) for number in numbers)
    if count:
        lacking = (number for number in range(1, int(total) + 1) if number not in numbers)
        names = [f"{stem}-{number:0{len(total)}}-of-{total}.safetensors" for number in islice(lacking, LISTED)]
        yield (
            f"{folder}: expected {int(total)} shards as their names say, found {int(total) - count}; "
            f"missing {listed(names, count=count)}. Download them too."
        )


def _require(path: Location, expected: str) -> None:
    if not path.exists():
        found = "no such file"
        if isinstance(path, Path) and path.is_symlink():
            found = f"a link to {path.readlink()}, which is not there"
        raise CheckpointError(f"{path}: expected {expected}, found {found}. Download it too.")


def some(names: Sequence[str], noun: str = "tensor") -> str:
    """The first few of some names, and how many they are."""
    first = [repr(short(name)) for name in names[:LISTED]]
    return f"{plural(len(names), noun)} ({listed(first, count=len(names))})"


def short(text: str) -> str:
    """The text, without the middle of one that is too long to show."""
    half = _MAX_NAME // 2
    return text if len(text) <= _MAX_NAME else f"{text[:half]}…{text[-half:]}"


@contextlib.contextmanager
def _noted(problem: Report | None, file: str | Location | None) -> Generator[None]:
    """Tells what the block raises, if there is somebody to tell."""
    try:
        yield
    except LazyModelError as error:
        if problem is None:
            raise
        problem(str(error), file)


def _tell(problem: Report | None, message: str, file: str | Location | None = None) -> None:
    with _noted(problem, file):
        raise CheckpointError(message)

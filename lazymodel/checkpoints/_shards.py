"""Numbered shards: whether files that no index describes are all of one checkpoint, and of one save.

Responsible for what names, `model-00002-of-00003.safetensors`, and headers tell. Where an index says which file has
which tensor, only the headers are asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from lazymodel._show.text import LISTED, listed

SAVE_KEY = "lazymodel_save"  # in a shard's metadata: what the shards of one save have in common, and no others
_PART = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")  # as Hugging Face numbers the shards of a model


def is_numbered(name: str) -> bool:
    """Whether a file is called as shards of a safetensors checkpoint are."""
    return _PART.fullmatch(name) is not None


def shard_problems(
    folder: str | os.PathLike[str], metadata: Mapping[Path, Mapping[str, str] | None], *, indexed: bool = False
) -> Iterator[str]:
    """What tells that safetensors files are not all of one save's shards.

    Args:
        folder: Where they lie, for messages.
        metadata: File → its header's metadata; None where that cannot be read.
        indexed: Whether an index names them, so that their number and their names are right as they are.
    """
    parts: dict[tuple[str, str], dict[Path, int]] = {}
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


def _incomplete(folder: str | os.PathLike[str], stem: str, total: str, numbers: set[int]) -> Iterator[str]:
    count = int(total) - sum(1 <= number <= int(total) for number in numbers)
    if count:
        lacking = (number for number in range(1, int(total) + 1) if number not in numbers)
        names = [f"{stem}-{number:0{len(total)}}-of-{total}.safetensors" for number in islice(lacking, LISTED)]
        yield (
            f"{folder}: expected {int(total)} shards as their names say, found {int(total) - count}; "
            f"missing {listed(names, count=count)}. Download them too."
        )

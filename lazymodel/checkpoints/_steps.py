"""Folders of steps in safetensors: `9/`, `10/`, …, each a folder as `lazymodel.save` writes it, and what it says of
where training was.

A step counts once it has its one file, or its index and all shards; before that there are some of them at most.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import Location, RemotePath, remote_path
from lazymodel._remote.url import is_url
from lazymodel._show.text import listed
from lazymodel.checkpoints._untrusted import read_json_file, reading, weight_map

DECIDING = ("model.safetensors.index.json", "model.safetensors")  # files of which one makes a step count
KEY = "lazymodel"  # in a checkpoint's metadata: the description of the step, as JSON
_BYTES = "base64"


def is_nothing(place: Location) -> bool:
    """Returns True if nothing was saved yet: there is nothing, or an empty folder. Web servers cannot say."""
    if isinstance(place, RemotePath):
        return place.store.lists and not place.exists()
    return not place.exists() or (place.is_dir() and not any(place.iterdir()))


def step_folders(folder: Location) -> list[tuple[int, Location]]:
    """(number, folder) of every folder in a folder that has a number for a name, the newest first."""
    with reading(folder, "list"):
        numbered = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    return sorted(((int(child.name), child) for child in numbered), reverse=True)


def is_complete(step: Location) -> bool:
    """Returns True if all of a step is there."""
    index, single = (step / name for name in DECIDING)
    if not index.exists():
        return single.exists()
    if isinstance(step, RemotePath):
        return True  # it comes last
    try:
        shards = set(weight_map(read_json_file(index), index).values())
    except CheckpointError:
        return True  # opening it says what is wrong
    return all((step / str(shard)).exists() for shard in shards)


def newest_step(folder: Location) -> Location | None:
    """The newest complete step in a folder; None where there is none."""
    return next((step for _, step in step_folders(folder) if is_complete(step)), None)


def place_of(path: Any, options: Mapping[str, Any] | None) -> Location:
    """The place that a path or URL names; nothing need be there."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"expected a path or URL, text or a pathlib.Path; got {reprlib.repr(path)}")
    if is_url(path):
        return remote_path(cast(str, path), options)
    if options:
        raise CheckpointError(f"{os.fspath(path)}: storage_options are for URLs, found a path")
    return Path(cast("str | os.PathLike[str]", path))


def find_step(where: Location, step: int | None) -> Location | None:
    """The folder of a step: of that number, or what `where` is itself, or the newest; None where there is none yet.

    Raises:
        CheckpointError: There is no complete step of the given number.
    """
    if step is None:
        return where if is_complete(where) else newest_step(where) if where.is_dir() else None
    if is_complete(found := where / str(step)):
        return found
    complete = [str(number) for number, folder in step_folders(where) if is_complete(folder)] if where.is_dir() else []
    raise CheckpointError(f"{where} has no complete step {step}; found {listed(complete) if complete else 'none'}")


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """Where training was when a step was saved.

    Attributes:
        path: The folder of the step.
        step: The step's number.
        metadata: What `save_step` was given.
        data: The state of a data iterator that `save_step` was given, for its `set_state`; None if there was none.

    Example:
        >>> lm.save_step(model, "run", 100, metadata={"loss": 0.25})
        >>> lm.training_state("run")
        TrainingState(path='run/100', step=100, metadata={'loss': 0.25}, data=None)
    """

    path: str
    step: int
    metadata: dict[str, Any]
    data: Any


def described(metadata: Mapping[str, Any] | None, data: Any) -> dict[str, Any]:
    """The description of a step, of types that JSON has.

    Raises:
        LazyModelError: Something in it is of another type; `data` may be bytes as well.
    """
    found: dict[str, Any] = {"metadata": dict(metadata or {})}
    if data is not None:
        is_bytes = isinstance(data, bytes | bytearray)
        found["data"] = {_BYTES: base64.b64encode(data).decode()} if is_bytes else data
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise LazyModelError(f"metadata and data states are of types that JSON has, or bytes: {error}") from None
    return found


def read_described(found: Any, folder: Location) -> tuple[dict[str, Any], Any]:
    """Metadata and data state from what `described` returned."""
    try:
        state = found.get("data")
        if isinstance(state, dict) and list(cast("dict[str, Any]", state)) == [_BYTES]:
            state = base64.b64decode(cast("dict[str, str]", state)[_BYTES], validate=True)
        return dict(found["metadata"]), state
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}: expected metadata of a step under {KEY!r}, found {error!r}") from error

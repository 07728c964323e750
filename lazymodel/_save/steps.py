"""Steps of training: numbered folders in one folder, each written as `save` writes any, of which the newest stay."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._remote.path import Location, RemotePath
from lazymodel._remote.upload import delete
from lazymodel._save.atomic import staging, writing
from lazymodel.checkpoints._open import weight_files
from lazymodel.checkpoints._orbax_folder import find_item
from lazymodel.checkpoints._steps import DECIDING, is_complete, step_folders


def step_place(folder: Location, step: Any, format: str) -> Location:
    """The folder that a step is saved to.

    Raises:
        LazyModelError: It is no number, or what is there already would hide the step.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise LazyModelError(f"step is a number from 0; got {step!r}")
    if format != "safetensors" or folder.suffix == ".safetensors":
        raise LazyModelError(f"{folder}: steps are folders of safetensors; give a folder, and no other format")
    if folder.is_dir() and (files := [file.name for file in weight_files(folder)] or _item(folder)):
        raise LazyModelError(f"{folder} has a checkpoint, {files[0]}, which would hide the step; use another folder")
    return folder / str(number)


def _item(folder: Location) -> list[str]:
    try:
        return [] if (item := find_item(folder)) is None else [str(item)]
    except CheckpointError:  # of Orbax, too, though it cannot be opened
        return ["of Orbax"]


def remove_old_steps(folder: Location, saved: int, most: int) -> list[str]:
    """Removes complete steps beyond the newest, and what killed savers left in older ones.

    Returns what could not be removed, in words.
    """
    failures: list[str] = []
    kept = 0
    for number, step in step_folders(folder):
        complete = is_complete(step)
        kept += complete
        if number != saved and (kept > most if complete else number < saved):
            # What makes it count goes first, so that a step is never there without its shards.
            names = *DECIDING, *(path.name for path in step.glob("model-*.safetensors"))
            failures += _removed_remote(step, names) if isinstance(step, RemotePath) else _removed(step, names)
    return failures


def _removed_remote(step: RemotePath, names: tuple[str, ...]) -> list[str]:
    deciding = len(DECIDING)
    return delete([step / name for name in names[:deciding]]) or delete([step / name for name in names[deciding:]])


def _removed(step: Path, names: tuple[str, ...]) -> list[str]:
    try:
        with writing(step):
            with staging(step, inside=True):  # so that nobody saves there meanwhile
                for name in names:
                    (step / name).unlink(missing_ok=True)
            if not os.listdir(step):  # no files of others
                step.rmdir()
    except LazyModelError as error:
        return [str(error)]
    return []

"""Folders of steps in safetensors: `9/`, `10/`, …, each a folder as `lazymodel.save` writes it.

A step counts once it has its index, or the one file that is all of it; before that there are shards at most.
"""

from __future__ import annotations

from lazymodel._remote.path import Location
from lazymodel.checkpoints._untrusted import reading

DECIDING = ("model.safetensors.index.json", "model.safetensors")  # files of which one makes a step count


def step_folders(folder: Location) -> list[tuple[int, Location]]:
    """(number, folder) of every folder in a folder that has a number for a name, the newest first."""
    with reading(folder, "list"):
        numbered = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    return sorted(((int(child.name), child) for child in numbered), reverse=True)


def is_complete(step: Location) -> bool:
    """Whether all of a step is there."""
    return any((step / name).exists() for name in DECIDING)


def newest_step(folder: Location) -> Location | None:
    """The newest complete step in a folder; None where there is none."""
    return next((step for _, step in step_folders(folder) if is_complete(step)), None)

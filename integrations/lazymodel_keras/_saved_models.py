"""Whether a path is a whole saved model, and what is there instead, said before Keras is asked to load it.

Keras takes what it does not find for one of its other formats, and complains of that.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, cast

import h5py

from lazymodel import CheckpointError, open_checkpoint
from lazymodel._show.text import closest, listed
from lazymodel.checkpoints._untrusted import read_json_file

_EXPECTED = (
    "expected a .keras file, a legacy .h5 file or a folder that model.save wrote, or an Orbax checkpoint that "
    "keras.callbacks.OrbaxCheckpoint wrote"
)


def check_saved_model(path: str) -> None:
    """Raises CheckpointError where a path is no saved model; names it, what was expected and what was found."""
    if "://" in path:
        return
    where = Path(path)
    found = _other_than_a_file(where) if where.is_file() else _other_than_a_folder(where)
    if found is not None:
        raise CheckpointError(f"cannot load a model from {path}: {_EXPECTED}; found {found}")


def _other_than_a_file(where: Path) -> str | None:
    """What a file is that is no saved model; None if it is one."""
    if where.stat().st_size == 0:
        return "an empty file"
    if where.name.endswith(".weights.h5"):
        return "weights without a model's configuration; build the model, then load them with lazymodel_keras.restore"
    if where.suffix == ".keras":
        return None if zipfile.is_zipfile(where) else "a file that is no zip archive, or a truncated one"
    if where.suffix in (".h5", ".hdf5"):
        return None if h5py.is_hdf5(where) else "a file that is no HDF5, or a truncated one"
    return f"a file of another kind ({where.suffix or 'without a suffix'})"


def _other_than_a_folder(where: Path) -> str | None:
    """Likewise of a folder, or of nothing."""
    if not where.is_dir():
        above = where.parent
        return f"nothing{closest(where.name, os.listdir(above)) if above.is_dir() else f'; there is no folder {above}'}"
    if (where / "config.json").exists():
        config: Any = read_json_file(where / "config.json")
        if isinstance(config, dict) and "class_name" in cast("dict[str, Any]", config):
            return None
        return (
            "the config.json of another library; load a preset or Hugging Face folder with lazymodel_keras.from_preset"
        )
    names = sorted(os.listdir(where))
    if not names:
        return "an empty folder"
    folder = f"a folder with {listed(names, most=4)}"
    try:
        with open_checkpoint(where) as checkpoint:
            if hasattr(checkpoint, "item"):
                return None
            return f"{folder}, which is a checkpoint without a model's configuration ({checkpoint.format})"
    except CheckpointError:
        if any(name.isdecimal() or "orbax" in name or name.startswith("_") for name in names):
            raise  # it says what is wrong with the step
        return folder

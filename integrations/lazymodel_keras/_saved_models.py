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
from lazymodel._remote.path import Location, RemotePath
from lazymodel._show.text import closest, listed
from lazymodel.checkpoints._untrusted import check_pointer, read_json_file

_HDF5 = b"\x89HDF\r\n\x1a\n"
_EXPECTED = (
    "expected a .keras file, a legacy .h5 file or a folder that model.save wrote, or an Orbax checkpoint that "
    "keras.callbacks.OrbaxCheckpoint wrote"
)


def check_saved_model(path: str | Location) -> None:
    """Raises CheckpointError where a path is no saved model; names it, what was expected and what was found."""
    if isinstance(path, str) and "://" in path:
        return
    where = Path(path) if isinstance(path, str) else path
    found = _other_than_a_file(where) if where.is_file() else _other_than_a_folder(where)
    if found is not None:
        raise CheckpointError(f"cannot load a model from {path}: {_EXPECTED}; found {found}")


def _other_than_a_file(where: Location) -> str | None:
    """What a file is that is no saved model; None if it is one."""
    if where.stat().st_size == 0:
        return "an empty file"
    if where.name.endswith(".weights.h5"):
        return "weights without a model's configuration; build the model, then load them with lazymodel_keras.restore"
    if where.suffix == ".keras":
        with where.open("rb") as file:
            is_zip = zipfile.is_zipfile(cast(Any, file))
        return None if is_zip else "a file that is no zip archive, or a truncated one"
    if where.suffix in (".h5", ".hdf5"):
        # What is at a URL is opened only where it has HDF5's signature at its beginning, as Keras writes it.
        is_hdf5 = check_pointer(where).startswith(_HDF5) if isinstance(where, RemotePath) else h5py.is_hdf5(where)
        return None if is_hdf5 else "a file that is no HDF5, or a truncated one"
    return f"a file of another kind ({where.suffix or 'without a suffix'})"


def _other_than_a_folder(where: Location) -> str | None:
    """Likewise of a folder, or of nothing."""
    if not where.is_dir():
        above = where.parent
        if isinstance(above, RemotePath):
            return "nothing there"
        return f"nothing{closest(where.name, os.listdir(above)) if above.is_dir() else f'; there is no folder {above}'}"
    if (where / "config.json").exists():
        config: Any = read_json_file(where / "config.json")
        if isinstance(config, dict) and "class_name" in cast("dict[str, Any]", config):
            return None
        return (
            "the config.json of another library; load a preset or Hugging Face folder with lazymodel_keras.from_preset"
        )
    names = sorted(each.name for each in where.iterdir())
    if not names:
        return "nothing there" if isinstance(where, RemotePath) else "an empty folder"
    folder = f"a folder with {listed(names, most=4)}"
    try:
        with open_checkpoint(cast(Any, where)) as checkpoint:
            if hasattr(checkpoint, "item"):
                return None
            return f"{folder}, which is a checkpoint without a model's configuration ({checkpoint.format})"
    except CheckpointError:
        if any(name.isdecimal() or "orbax" in name or name.startswith("_") for name in names):
            raise  # it says what is wrong with the step
        return folder

"""Keras' own ways of saving, each of which puts a complete file, set of files or folder in place, or changes nothing.

Keras opens what it saves to and writes on: whoever kills it then has neither the old weights nor the new. Within
`streamed_saving` it is given a path in a saver's own folder (`lazymodel._save.atomic`) instead, and what it wrote there
is put in place in one step. Responsible for which files belong together; not for what is in them.

    a file          `.weights.h5`, `.keras`, `.lora.h5`, legacy `.h5`: one rename
    sharded weights the index decides: shards under names that the old index does not have, then the index; then, since
                    Keras asks for the first shard by name, the same shards under Keras' own names, and the index again
    a folder        a preset, an unzipped model: all is written into a new folder, which also gets links to what else
                    is in the old one, and the two are exchanged
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from lazymodel import LazyModelError
from lazymodel._save.atomic import carry_over, staging, writing
from lazymodel._save.hdf5 import replace_shards
from lazymodel._show.text import format_bytes
from lazymodel.checkpoints._open import staging_folder
from lazymodel_keras import _upstream
from lazymodel_keras._model.skeleton import model_variables
from lazymodel_keras._record.patches import SharedPatches

_WEIGHTS, _SHARDS = "model.weights.h5", "model.weights.json"  # a preset's own, whole or sharded
_TASK, _TASK_WEIGHTS = "task.json", "task.weights.h5"

_thread = threading.local()


def install(undo: contextlib.ExitStack, patches: SharedPatches) -> None:
    """Makes Keras and KerasHub save this way until `undo` closes, where these patches are."""
    ways: list[tuple[Any, str, Any]] = [
        (_upstream.SAVING_LIB, "save_weights_only", _save_weights),
        (_upstream.SAVING_LIB, "save_model", _save_model),
        (_upstream.LEGACY_H5, "save_model_to_hdf5", _save_file),
    ]
    if (models := _upstream.hub_models()) is not None:
        ways.append((models.Backbone, "save_lora_weights", _save_file))
        ways += [(cls, "save_to_preset", _save_preset) for cls in _upstream.classes_defining("save_to_preset")]
    for owner, name, save in ways:
        patches.replace(undo, owner, name, functools.partial(_saved_whole, save))


def _saved_whole(save: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """What Keras' or KerasHub's `original` does, done by one of the functions below."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    where = list(bound.arguments)[1]  # after the model
    target = bound.arguments[where]
    if getattr(_thread, "saving", False) or not _is_local(target):
        return original(*args, **kwargs)

    def write(path: Path) -> Any:
        bound.arguments[where] = type(target)(path) if isinstance(target, Path) else str(path)
        return original(*bound.args, **bound.kwargs)

    path = Path(os.path.realpath(os.fspath(target)))  # a link stays one, and what it leads to is replaced
    _require_room(path, next(iter(bound.arguments.values())), original.__name__)
    with as_it_is():
        return save(write, path, bound.arguments)


@contextlib.contextmanager
def as_it_is() -> Generator[None]:
    """Within the block, what Keras saves goes to the path that it is given."""
    _thread.saving = True
    try:
        yield
    finally:
        _thread.saving = False


def _is_local(target: Any) -> bool:
    """Whether something is the path of a file or folder here, and no device or pipe."""
    if not isinstance(target, str | os.PathLike) or "://" in str(target):
        return False
    return not os.path.exists(target) or os.path.isfile(target) or os.path.isdir(target)


def _require_room(path: Path, saved: Any, how: str) -> None:
    """Raises LazyModelError where a disk has not the room for an object's values, before anything is written.

    HDF5 may end the process where it cannot write what is left while it closes a file; what was there stays then.
    """
    if how == "save_lora_weights":
        return
    variables = {id(variable): variable for variable in model_variables(saved)}.values()
    needed = sum(getattr(variable.value, "nbytes", 0) for variable in variables)
    above = next(folder for folder in path.parents if folder.is_dir())
    free = shutil.disk_usage(above)[2]
    if needed > free:
        raise LazyModelError(
            f"cannot save to {path}: it needs {format_bytes(needed)}, besides what is there now, and "
            f"{format_bytes(free)} are free; make room, or save elsewhere"
        )


def _save_file(write: Callable[[Path], Any], path: Path, arguments: dict[str, Any]) -> Any:
    with staging(path, rivals=[staging_folder(path.parent)]) as stage:
        result = write(stage.new / path.name)
        if path.exists():
            with writing(path):
                shutil.copymode(path, stage.new / path.name)
        stage.replace_file(path.name)
    return result


def _save_model(write: Callable[[Path], Any], path: Path, arguments: dict[str, Any]) -> Any:
    if arguments.get("zipped", True):
        return _save_file(write, path, arguments)
    return save_folder(write, path, lambda new: [])


# Sharded weights ------------------------------------------------------------------------------------------------------


def _save_weights(write: Callable[[Path], Any], path: Path, arguments: dict[str, Any]) -> Any:
    if arguments.get("max_shard_size") is None:
        return _save_file(write, path, arguments)
    index = path.name if path.suffix == ".json" else path.with_suffix(".json").name  # as Keras names it
    folder = path.parent
    with staging(folder, inside=True, rivals=[staging_folder(folder)]) as stage:
        result = write(stage.new / path.name)
        replace_shards(stage, index)
    return result


# Folders --------------------------------------------------------------------------------------------------------------


def _save_preset(write: Callable[[Path], Any], path: Path, arguments: dict[str, Any]) -> Any:
    return save_folder(write, path, functools.partial(outdated_of_preset, path))


def outdated_of_preset(path: Path, new: Path) -> list[str]:
    """What of an old preset does not count any more once there is a new one, and would be found."""
    written = set(os.listdir(new))
    names: list[str] = []
    if written & {_WEIGHTS, _SHARDS}:
        names += [_WEIGHTS, _SHARDS, *(shard.name for shard in path.glob("model_*.weights.h5"))]
    if _TASK in written:
        names += [_TASK_WEIGHTS]
    return names


def save_folder(write: Callable[[Path], Any], path: Path, outdated: Callable[[Path], list[str]]) -> Any:
    """Replaces a folder by what `write` writes into a new one and all of the old one but what is outdated."""
    rivals = [staging_folder(path, inside=True), *path.glob(".*.lazymodel-saving")]
    with _same_current_folder(), staging(path, rivals=rivals) as stage:
        result = write(stage.new)
        if path.is_dir():
            with writing(path):
                carry_over(path, stage.new, leave=outdated(stage.new))
        stage.replace_folder()
    return result


@contextlib.contextmanager
def _same_current_folder() -> Generator[None]:
    """Enters the current folder again afterwards, which may be in one that was exchanged for another."""
    current = os.getcwd()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it is gone, and was before
            os.chdir(current)

"""Keras' and KerasHub's own ways of saving: streamed through the host, and atomic.

Keras converts every variable to a NumPy array. JAX makes one of the whole sharded array and keeps it as long as that
exists: after `save_weights` the host holds the model once more. Here Keras gets stand-ins with a variable's shape and
dtype, and where HDF5 would copy the values, these are written from the shards, a chunk at a time.

Keras also overwrites the file that it replaces, so killing it loses both the old and the new weights. Here it gets a
path in a saver's own folder (`lazymodel._save.atomic`), and the files written there are put in place in one step:

    a file          `.weights.h5`, `.keras`, `.lora.h5`, legacy `.h5`: one rename
    sharded weights the index decides: shards under names that the old index does not have, then the index; then, since
                    Keras opens the first shard by name, the same shards under Keras' own names, and the index again
    a folder        a preset, an unzipped model: everything is written into a new folder, which also gets links to the
                    other files of the old one, and the two are exchanged

Presets and Hugging Face folders of abstract models: saved by KerasHub, and then filled with streamed values.

KerasHub saves an abstract model like any other, and so decides the content of each file. Meanwhile its variables hold
lazy tensors. A preset's HDF5 files reserve bytes for them, and the exporter to Hugging Face's names gets views of them;
then the core writes the values, in chunks, within the memory budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import h5py
import jax
import keras
import numpy as np

from lazymodel import AbstractModel, LazyModelError, Progress, save
from lazymodel._errors import warn
from lazymodel._mapping.resolve import lazy_values
from lazymodel._remote.path import LocalPath, matching
from lazymodel._save.atomic import carry_over, staging, writing
from lazymodel._save.disk import check_room
from lazymodel._save.files import SavedFile, SaveOptions
from lazymodel._save.safetensors import old_files
from lazymodel._save.write import write_files
from lazymodel._show.text import parse_bytes
from lazymodel._tensors.boxes import slabs
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.shards import DeviceTensor
from lazymodel.checkpoints._open import staging_folder
from lazymodel.checkpoints._untrusted import read_json_file
from lazymodel.extras.formats.save_hdf5 import replace_keras_shards, reserving_properties
from lazymodel_keras import _upstream
from lazymodel_keras._model.keras_object import KerasModel, model_variables
from lazymodel_keras._model.layers import held_lazily, lazy_operations

_CHUNK = 16 << 20  # bytes written at a time
_WEIGHTS, _SHARDS = "model.weights.h5", "model.weights.json"  # weights of a preset, in one file or sharded

# Path of a file → (name, tensor, offset in the file) of each tensor whose bytes are reserved there.
Reserved = dict[Path, list[tuple[str, LazyTensor, int]]]


@contextlib.contextmanager
def streamed_saving() -> Generator[None]:
    """Within the block, Keras and KerasHub save through the host's memory, a few MiB at a time.

    For `model.save_to_preset`, `save_weights` (sharded too), `model.save` and callbacks that call them, such as
    `keras.callbacks.ModelCheckpoint` in a `fit` inside the block. The content of the files does not change.
    `model.save` to a `.keras` file needs the weights' size once more on disk, in a temporary file next to it.

    Each call replaces the files completely or not at all: at every moment the path opens as the last saved state or as
    the new one, after any error or kill, and other files in the folder stay. If two savers run at the same path, the
    second raises. The next saver removes the files of a killed one (`.NAME.lazymodel-saving` next to a path,
    `.lazymodel-saving` next to sharded weights). A preset, and a model saved with `zipped=False`, is a new folder that
    replaces the old one, with links to the files that it keeps, so it cannot be a mount point. The disk needs space for
    old and new.

    The whole model has to be on this process's devices; with several processes, save with `lazymodel.save` or
    `keras.callbacks.OrbaxCheckpoint`.

    Raises:
        LazyModelError: From the call that saves: a part of a variable is on another process's devices, another saver
            is at the same path, or the system does not allow writing there.

    Example:
        >>> with lk.streamed_saving():
        ...     model.save_to_preset("saved")
        >>> lm.open_checkpoint("saved").nbytes == lm.open_checkpoint("preset").nbytes
        True
    """
    with _patches.needed(_Saving()):
        yield


@dataclasses.dataclass(frozen=True)
class _Saving:
    """The way in which Keras saves.

    Attributes:
        at_once: True if it saves to the path that it is given.
        reserved: Gets the places of values that would be streamed, whose bytes are only reserved; None streams them.
    """

    at_once: bool = False
    reserved: Reserved | None = None


_patches = _upstream.SharedPatches()


class _StandIn(np.ndarray):
    """An array without its own values, for a variable whose values are written from its shards."""

    tensor: LazyTensor


@_patches.replacing(_upstream.SAVING_LIB, "is_memory_sufficient")
def _is_memory_sufficient(_: _Saving, original: Any, model: Any) -> bool:
    return False  # Keras then writes a .keras file's weights to disk first


@_patches.replacing(_upstream.SAVING_LIB.H5IOStore, "__setitem__")
@_patches.replacing(_upstream.SAVING_LIB.ShardedH5IOStore, "__setitem__")
def _set(_: _Saving, original: Any, self: Any, key: str, value: Any) -> None:
    array = value.value if isinstance(value, keras.Variable) else value
    if isinstance(array, jax.Array | LazyTensor):
        path = getattr(value, "path", "a value")
        tensor = array if isinstance(array, LazyTensor) else LazyTensor(DeviceTensor(path, array))
        value = np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape).view(_StandIn)
        value.tensor = tensor
    original(self, key, value)


@_patches.replacing(_upstream.BACKEND_OPS, "convert_to_numpy")
def _convert(_: _Saving, original: Any, x: Any) -> Any:
    return x if isinstance(x, _StandIn) else original(x)


@_patches.replacing(h5py.Group, "create_dataset")
def _create(
    how: _Saving,
    original: Any,
    self: Any,
    name: Any,
    shape: Any = None,
    dtype: Any = None,
    data: Any = None,
    **options: Any,
) -> Any:
    if not isinstance(data, _StandIn):
        return original(self, name, shape, dtype, data, **options)
    if how.reserved is None:
        dataset = original(self, name, data.shape, data.dtype, **options)
        for chunk in slabs(data.shape, max(_CHUNK // data.dtype.itemsize, 1)):
            dataset[chunk] = np.asarray(data.tensor[chunk])
        return dataset
    dataset = original(self, name, data.shape, data.dtype, dcpl=reserving_properties(), **options)
    if data.size:
        place = (data.tensor.name, data.tensor, dataset.id.get_offset())
        how.reserved.setdefault(Path(self.file.filename), []).append(place)
    return dataset


# Atomic saving --------------------------------------------------------------------------------------------------------


@_patches.replacing(_upstream.SAVING_LIB, "save_weights_only")
@_patches.replacing(_upstream.SAVING_LIB, "save_model")
@_patches.replacing(_upstream.LEGACY_H5, "save_model_to_hdf5")
@_patches.replacing(lambda: _upstream.classes_defining("save_lora_weights"), "save_lora_weights")
@_patches.replacing(lambda: _upstream.classes_defining("save_to_preset"), "save_to_preset")
def _saved_whole(how: _Saving, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Does what Keras' or KerasHub's `original` does, completely or not at all."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    (_, model), (where, target), *_ = bound.arguments.items()
    if how.at_once or not _is_local(target):
        return original(*args, **kwargs)

    def write(path: Path) -> Any:
        bound.arguments[where] = path if isinstance(target, Path) else str(path)
        with _patches.needed(dataclasses.replace(how, at_once=True)):
            return original(*bound.args, **bound.kwargs)

    path = Path(os.path.realpath(os.fspath(target)))  # a link stays, and its target is replaced
    if original.__name__ != "save_lora_weights":
        # HDF5 may end the process if the disk is full when it closes a file.
        variables = {id(variable): variable for variable in model_variables(model)}.values()
        needed = sum(getattr(variable.value, "nbytes", 0) for variable in variables)
        check_room(path, needed, next(folder for folder in path.parents if folder.is_dir()))
    if original.__name__ == "save_to_preset":
        return save_folder(write, path, outdated_of_preset)
    if not bound.arguments.get("zipped", True):
        return save_folder(write, path, lambda path, new: [])
    sharded = bound.arguments.get("max_shard_size") is not None
    destination, rivals = path.parent if sharded else path, [staging_folder(path.parent)]
    with staging(destination, inside=sharded, rivals=rivals) as stage:
        result = write(stage.new / path.name)
        if sharded:
            replace_keras_shards(stage, path.name if path.suffix == ".json" else path.with_suffix(".json").name)
            return result
        if path.exists():
            with writing(path):
                shutil.copymode(path, stage.new / path.name)
        stage.replace_file(path.name)
    return result


def _is_local(target: Any) -> bool:
    """Returns True for the path of a local file or folder that is not a device or pipe."""
    if not isinstance(target, str | os.PathLike) or "://" in str(target):
        return False
    return not os.path.exists(target) or os.path.isfile(target) or os.path.isdir(target)


def outdated_of_preset(path: Path, new: Path) -> list[str]:
    """Names in an old preset that are obsolete once there is a new one, and would be found."""
    written = set(os.listdir(new))
    names: list[str] = []
    if written & {_WEIGHTS, _SHARDS}:
        names += [_WEIGHTS, _SHARDS, *(shard.name for shard in matching(LocalPath(path), "model_*.weights.h5"))]
    return [*names, "task.weights.h5"] if "task.json" in written else names


def save_folder(write: Callable[[Path], Any], path: Path, outdated: Callable[[Path, Path], list[str]]) -> Any:
    """Replaces a folder by the files that `write` writes into a new one and the old files that are not outdated."""
    rivals = [staging_folder(path, inside=True), *path.glob(".*.lazymodel-saving")]
    current = os.getcwd()
    try:
        with staging(path, rivals=rivals) as stage:
            result = write(stage.new)
            if path.is_dir():
                with writing(path):
                    carry_over(path, stage.new, leave=outdated(path, stage.new))
            stage.replace_folder()
    finally:
        with contextlib.suppress(OSError):  # the current folder was deleted before
            os.chdir(current)  # it may be in the folder that was exchanged
    return result


def save_preset(
    abstract: AbstractModel[Any],
    path: str | os.PathLike[str],
    *,
    to: str = "preset",
    max_shard_size: int | str = "10GiB",
    max_host_memory: int | str | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    overwrite: bool = False,
) -> None:
    """Saves an abstract model with its checkpoint's values, without building it: a preset, or a Hugging Face folder.

    The folder equals the result of `save_to_preset` or `export_to_transformers` for the loaded model: configuration,
    tokenizer, weights. It is complete or unchanged after any error or kill; other files in it stay.

    Args:
        abstract: As `abstract_from_preset` returns it, or quantized. Values that no checkpoint has are initialized on
            the host.
        path: A folder on a disk.
        to: `"preset"`, of KerasHub, or `"huggingface"`, for the classes that KerasHub exports.
        max_shard_size: Bytes of weights in one file; larger models are divided.
        max_host_memory: Limit of staged values in bytes, or `"1GiB"`; None is 256 MiB, and more if
            a value has to be initialized whole.
        progress: As for `materialize`, in written bytes.
        overwrite: True replaces an existing folder.

    Raises:
        LazyModelError: The path exists already, or the disk is too full; the model has an optimizer or other
            initializers than it was built with, or KerasHub does not export its class.
        CheckpointError: A tensor cannot be read.

    Example:
        >>> abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset", dtype="bfloat16")
        >>> lk.save_preset(abstract, "smaller")
        >>> lm.open_checkpoint("smaller").nbytes == lm.open_checkpoint("preset").nbytes // 2
        True
    """
    if to not in ("preset", "huggingface"):
        raise LazyModelError(f"to is 'preset' or 'huggingface'; got {to!r}")
    size = parse_bytes(max_shard_size, name="max_shard_size", at_least=1)
    result, values = _unfilled(abstract)
    options = SaveOptions.given({tensor.name: tensor for _, tensor in values}, max_host_memory, progress)
    how = {"preset": "save_to_preset", "huggingface": "export_to_transformers"}[to]
    if not hasattr(result, how):
        raise LazyModelError(f"{type(result).__name__} has no {how}: expected a backbone or a task of KerasHub")
    folder = Path(os.path.realpath(path))
    if os.path.lexists(folder) and not overwrite:
        raise LazyModelError(f"there is something already: {folder}. Pass overwrite=True (--overwrite) to replace it")
    above = next(above for above in folder.parents if above.is_dir())
    check_room(folder, sum(tensor.nbytes for _, tensor in values), above)

    def preset(new: Path) -> None:
        reserved = Reserved()
        with _upstream.holding_lazily(values), _patches.needed(_Saving(at_once=True, reserved=reserved)):
            result.save_to_preset(str(new), max_shard_size=size / 2**30)
        files = {
            path: SavedFile(path.name, b"", tuple(sorted(places, key=lambda each: each[2])), 0)
            for path, places in reserved.items()
        }
        write_files(folder, files, options, leads=True)

    def export(new: Path) -> None:
        tensors = _exported(result, values, new)
        if (
            read_json_file(LocalPath(new) / "config.json").get("tie_word_embeddings") is False
            and "lm_head.weight" not in tensors
        ):
            warn(
                f"{path}: {type(result).__name__} is saved without its output projection 'lm_head.weight', and "
                "transformers gives a language model of this folder random numbers for it. Save the task instead"
            )
        save(tensors, new, max_shard_size=size, max_host_memory=options.budget, progress=progress)

    if to == "preset":
        save_folder(preset, folder, outdated_of_preset)
    else:
        save_folder(export, folder, lambda path, new: old_files(LocalPath(path)))


def _unfilled(abstract: Any) -> tuple[Any, list[tuple[Any, LazyTensor]]]:
    """The Keras object of an abstract model, and the value that each of its variables will hold."""
    framework = getattr(abstract, "framework", None)
    if not isinstance(framework, KerasModel):
        raise LazyModelError(f"expected an abstract model of Keras, found {type(abstract).__name__}")
    skeleton = framework.unfilled()
    if abstract.recipes is not framework.spec.recipes or abstract.sources != framework.spec.sources:
        raise LazyModelError(
            f"{abstract.name} has an optimizer, other initializers or other names: materialize it, and save it within "
            "lazymodel_keras.streamed_saving"
        )
    values = lazy_values(abstract)
    return skeleton.result, [(variable, values[path]) for path, (variable, _) in skeleton.variables.items()]


# Exporting ------------------------------------------------------------------------------------------------------------

_preset_patches = _upstream.SharedPatches()


@_preset_patches.replacing(_upstream.exporter, _upstream.EXPORTED)
def _take(taken: dict[str, Any], original: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    # Each is a separate tensor: for a tie, one tensor under two names, only the first would be saved.
    taken |= {name: value if (held := held_lazily(value)) is None else held[...] for name, value in weights.items()}
    return {}


def _exported(result: Any, values: list[tuple[Any, LazyTensor]], new: Path) -> dict[str, Any]:
    """Makes KerasHub write everything of a Hugging Face folder except the weights; returns these by their names."""
    if _upstream.exporter() is None:
        raise LazyModelError("this version of KerasHub does not export to Hugging Face's names in a way that is known")
    taken: dict[str, Any] = {}
    try:
        with _preset_patches.needed(taken), lazy_operations.needed(), _upstream.holding_lazily(values):
            result.export_to_transformers(str(new))
    except ValueError as error:
        raise LazyModelError(f"KerasHub cannot export {type(result).__name__}: {error}") from error
    (new / "model.safetensors").unlink()
    return taken

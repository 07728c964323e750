"""Presets and Hugging Face folders of abstract models: saved by KerasHub, and then filled with streamed values.

KerasHub saves an abstract model like any other, and so decides the content of each file. Meanwhile its variables hold
lazy tensors. A preset's HDF5 files reserve bytes for them, and the exporter to Hugging Face's names gets views of them;
then the core writes the values, in chunks, within the memory budget.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lazymodel import AbstractModel, LazyModelError, LazyTensor, Progress, save
from lazymodel._mapping.given import lazy_values
from lazymodel._save.destination import Destination, SavedFile, check_room, old_files
from lazymodel._save.save import default_budget
from lazymodel._save.write import check_budget, write_files
from lazymodel._show.progress import progress_for
from lazymodel._show.text import parse_budget, parse_bytes
from lazymodel_keras import _upstream
from lazymodel_keras._build import KerasModel
from lazymodel_keras._model.lazy_values import held_lazily, lazy_operations
from lazymodel_keras._record.patches import SharedPatches
from lazymodel_keras._train.saving import Reserved, outdated_of_preset, reserving, save_folder


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
    tensors = {tensor.name: tensor for _, tensor in values}
    budget = parse_budget(max_host_memory, default_budget(tensors))
    how = {"preset": "save_to_preset", "huggingface": "export_to_transformers"}[to]
    if not hasattr(result, how):
        raise LazyModelError(f"{type(result).__name__} has no {how}: expected a backbone or a task of KerasHub")
    folder = Path(os.path.realpath(path))
    if os.path.lexists(folder) and not overwrite:
        raise LazyModelError(f"there is something already: {folder}. Pass overwrite=True (--overwrite) to replace it")
    above = next(above for above in folder.parents if above.is_dir())
    check_room(folder, sum(tensor.nbytes for _, tensor in values), above)

    def preset(new: Path) -> None:
        with _upstream.holding_lazily(values), reserving() as reserved:
            result.save_to_preset(str(new), max_shard_size=size / 2**30)
        target = _Reserved(folder, new, reserved)
        check_budget(target.files, budget)
        write_files(target, budget, progress_for(progress), leads=True)

    def export(new: Path) -> None:
        tensors = _exported(result, values, new)
        save(tensors, new, max_shard_size=size, max_host_memory=budget, progress=progress)

    if to == "preset":
        save_folder(preset, folder, outdated_of_preset)
    else:
        save_folder(export, folder, lambda path, new: old_files(path))


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


class _Reserved(Destination):
    """Existing files with bytes reserved for values."""

    _inside = False

    def __init__(self, folder: Path, new: Path, reserved: Reserved) -> None:
        files = {
            str(file.relative_to(new)): sorted(places, key=lambda each: each[2]) for file, places in reserved.items()
        }
        super().__init__(folder, [SavedFile(name, b"", tuple(places), 0) for name, places in files.items()])
        self._new = new

    def place(self, file: SavedFile) -> Path:
        return self._new / file.name


# Exporting ------------------------------------------------------------------------------------------------------------

_patches = SharedPatches()
_thread = threading.local()


@_patches.replacing(_upstream.exporter, _upstream.EXPORTED)
def _take(original: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    # Each is a separate tensor: for a tie, one tensor under two names, only the first would be saved.
    _thread.taken = {
        name: value if (held := held_lazily(value)) is None else held[...] for name, value in weights.items()
    }
    return {}


def _exported(result: Any, values: list[tuple[Any, LazyTensor]], new: Path) -> dict[str, Any]:
    """Makes KerasHub write everything of a Hugging Face folder except the weights; returns these by their names."""
    if _upstream.exporter() is None:
        raise LazyModelError("this version of KerasHub does not export to Hugging Face's names in a way that is known")
    try:
        with _patches.needed(), lazy_operations.needed(), _upstream.holding_lazily(values):
            result.export_to_transformers(str(new))
    except ValueError as error:
        raise LazyModelError(f"KerasHub cannot export {type(result).__name__}: {error}") from error
    (new / "model.safetensors").unlink()
    return _thread.taken

"""Presets and Hugging Face folders of abstract models: KerasHub's own saving, and the values streamed in afterwards.

KerasHub saves an abstract model as any other, and so decides what is in which file. Its variables hold lazy tensors
meanwhile. A preset's HDF5 files get room for them, and its exporter to Hugging Face's names gets views of them; then
the values are written by the core, in bands, under the budget.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lazymodel import AbstractModel, LazyModelError, LazyTensor, Progress, save
from lazymodel._save.destination import Destination, SavedFile, check_room, old_files
from lazymodel._save.save import default_budget
from lazymodel._save.write import check_budget, write_files
from lazymodel._show.text import parse_budget, parse_bytes
from lazymodel_keras import _upstream
from lazymodel_keras._build import KerasModel
from lazymodel_keras._model.lazy_values import lazy_value
from lazymodel_keras._record.patches import SharedPatches
from lazymodel_keras._train.saving import Reserved, reserving
from lazymodel_keras._train.whole_saving import as_it_is, outdated_of_preset, save_folder


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
    """Saves an abstract model with its checkpoint's values, without ever making it: a preset, or a Hugging Face folder.

    The folder is what `save_to_preset` or `export_to_transformers` of the loaded model would write: configuration,
    tokenizer, weights. It is complete or what it was before, whatever fails or is killed; other files in it stay.

    Args:
        abstract: As `abstract_from_preset` returns it, or quantized. What no checkpoint has is initialized, whole, on
            the host.
        path: A folder on a disk.
        to: `"preset"`, of KerasHub, or `"huggingface"`, for the classes that KerasHub exports.
        max_shard_size: Bytes of weights in one file; a model of more is divided.
        max_host_memory: Ceiling for staged values in bytes, or `"1GiB"`; None is 256 MiB, and more where
            something has to be initialized whole.
        progress: As for `materialize`, in bytes that are written.
        overwrite: Whether a folder that is there already is replaced.

    Raises:
        LazyModelError: There is something already, or no room; the model has an optimizer or other initializers than
            it was built with, or KerasHub does not export its class.
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
    budget = default_budget(tensors) if max_host_memory is None else parse_budget(max_host_memory)
    how = {"preset": "save_to_preset", "huggingface": "export_to_transformers"}[to]
    if not hasattr(result, how):
        raise LazyModelError(f"{type(result).__name__} has no {how}: expected a backbone or a task of KerasHub")
    folder = Path(os.path.realpath(path))
    if os.path.lexists(folder) and not overwrite:
        raise LazyModelError(f"there is something already: {folder}. Pass overwrite=True (--overwrite) to replace it")
    above = next(above for above in folder.parents if above.is_dir())
    check_room(folder, sum(tensor.nbytes for _, tensor in values), above)

    def preset(new: Path) -> None:
        with as_it_is(), _upstream.holding_lazily(values), reserving() as reserved:
            result.save_to_preset(str(new), max_shard_size=size / 2**30)
        target = _Reserved(folder, new, reserved)
        check_budget(target.files, budget)
        write_files(target, budget, progress, lambda: None, leads=True)

    def export(new: Path) -> None:
        tensors = _exported(result, values, new)
        save(tensors, new, max_shard_size=size, max_host_memory=budget, progress=progress)

    if to == "preset":
        save_folder(preset, folder, functools.partial(outdated_of_preset, folder))
    else:
        save_folder(export, folder, lambda new: old_files(folder))


def lazy_values(abstract: AbstractModel[Any]) -> dict[str, LazyTensor]:
    """What each variable of an abstract model of Keras will hold, by path; as long as no step changed that."""
    return dict(zip(abstract, (tensor for _, tensor in _unfilled(abstract)[1]), strict=True))


def _unfilled(abstract: Any) -> tuple[Any, list[tuple[Any, LazyTensor]]]:
    """The Keras object of an abstract model, and what each of its variables will hold."""
    framework = getattr(abstract, "framework", None)
    if not isinstance(framework, KerasModel):
        raise LazyModelError(f"expected an abstract model of Keras, found {type(abstract).__name__}")
    skeleton = framework.unfilled()
    if abstract.recipes is not framework.spec.recipes or abstract.sources != framework.spec.sources:
        raise LazyModelError(
            f"{abstract.name} has an optimizer, other initializers or other names: materialize it, and save it within "
            "lazymodel_keras.streamed_saving"
        )
    values = [
        (variable, lazy_value(skeleton.recording, variable, noted)) for variable, noted in skeleton.variables.values()
    ]
    return skeleton.result, values


class _Reserved(Destination):
    """Files that are there, with room in them for values."""

    _inside = False

    def __init__(self, folder: Path, new: Path, reserved: list[Reserved]) -> None:
        files: dict[Path, list[tuple[str, LazyTensor, int]]] = {}
        for file, tensor, offset in reserved:
            files.setdefault(file, []).append((tensor.name, tensor, offset))
        super().__init__(
            folder,
            [
                SavedFile(str(file.relative_to(new)), b"", tuple(sorted(tensors, key=lambda each: each[2])), 0)
                for file, tensors in files.items()
            ],
        )
        self._new = new

    def place(self, file: SavedFile) -> Path:
        return self._new / file.name


# Exporting ------------------------------------------------------------------------------------------------------------

_patches = SharedPatches()
_thread = threading.local()
_VIEWS: Mapping[str, Callable[..., Any]] = {
    "transpose": lambda x, axes=None: np.transpose(x, axes),
    "reshape": lambda x, newshape: np.reshape(x, tuple(newshape)),
    "expand_dims": lambda x, axis: np.expand_dims(x, axis),
    "concatenate": lambda xs, axis=0: np.concatenate(xs, axis),
}


def _lazy(value: Any) -> Any:
    held = _upstream.value(value) if isinstance(value, keras.Variable) else value
    return held if isinstance(held, LazyTensor) else None


def _viewing(view: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `keras.ops` that makes views of lazy tensors, and of the variables that hold one."""

    def call(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(x, list | tuple)
        found = [_lazy(each) for each in x] if several else [_lazy(x)]
        if any(each is None for each in found):
            return original(x, *args, **kwargs)
        return view(found if several else found[0], *args, **kwargs)

    return call


@_patches.register
def _install(undo: contextlib.ExitStack) -> None:
    for name, view in _VIEWS.items():
        _patches.replace(undo, keras.ops, name, _viewing(view))


@_patches.replacing(_upstream.exporter, _upstream.EXPORTED)
def _take(original: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    # Each a tensor of its own: of one under two names, a tie, only the first would be saved.
    _thread.taken = {name: value if (held := _lazy(value)) is None else held[...] for name, value in weights.items()}
    return {}


def _exported(result: Any, values: list[tuple[Any, LazyTensor]], new: Path) -> dict[str, Any]:
    """Has KerasHub write all of a Hugging Face folder but the weights, which are returned by their names there."""
    if _upstream.exporter() is None:
        raise LazyModelError("this version of KerasHub does not export to Hugging Face's names in a way that is known")
    try:
        with _patches.needed(), _upstream.holding_lazily(values):
            result.export_to_transformers(str(new))
    except ValueError as error:
        raise LazyModelError(f"KerasHub cannot export {type(result).__name__}: {error}") from error
    (new / "model.safetensors").unlink()
    return _thread.taken

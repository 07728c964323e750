"""Models from a bare configuration, for `lazymodel plan`: what a preset, a folder or a `config.json` describes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from lazymodel import AbstractModel, CheckpointError, LazyModelError
from lazymodel._remote.path import Location
from lazymodel._remote.url import shown
from lazymodel._show.quiet import quiet_tensorflow
from lazymodel._show.text import closest
from lazymodel.checkpoints._open import located, weight_files
from lazymodel.checkpoints._untrusted import MAX_JSON, read_at_most
from lazymodel_keras._gguf.folder import is_gguf
from lazymodel_keras._record.remote import RemoteFiles, check_storage_options
from lazymodel_keras.hub import abstract_from_preset

_WEIGHTS = ("*.weights.h5", "*.weights.json", "*.safetensors", "*.safetensors.index.json")


def plan_model(
    source: str,
    *,
    cls: str | None = None,
    dtype: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> AbstractModel[Any]:
    """The abstract model that a preset or a configuration describes.

    Args:
        source: A preset's name or URI, the folder of a KerasHub preset or of a Hugging Face model, a GGUF file, a JSON
            file like their `config.json`, or the URL of such a folder or file. Weights that are in the folder are what
            would be loaded; none are needed. Of a preset that is not on this machine the configuration is fetched
            only, and, at a URL, headers of its weights.
        cls: The name of a KerasHub class, such as `Gemma3CausalLM`; None is the backbone that the configuration names.
        dtype: The dtype policy, such as `bfloat16`; None is what a Hugging Face configuration says (`dtype` or
            `torch_dtype`), or else what `from_preset` would take.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.

    Raises:
        CheckpointError: There is no such preset, file or folder, or KerasHub cannot read it.
        LazyModelError: KerasHub has no such class.
    """
    try:
        with quiet_tensorflow():
            import keras_hub
    except ModuleNotFoundError as error:
        raise LazyModelError(
            f"presets and configurations are read by KerasHub, and {error.name} is not installed: "
            "pip install 'lazymodel[keras]'"
        ) from error
    models: Any = keras_hub.models
    target = models.Backbone
    options: dict[str, Any] = {}
    if cls is not None:
        target = getattr(models, cls, None)
        if target is None:
            raise LazyModelError(f"keras_hub.models has no class {cls!r}{closest(cls, vars(models))}")
        if not issubclass(target, models.Backbone):
            options["preprocessor"] = None  # it needs vocabularies, and a plan no texts
    if dtype is not None:
        options["dtype"] = dtype
        try:
            keras.dtype_policies.get(dtype)
        except (TypeError, ValueError) as error:
            raise LazyModelError(f"{dtype!r} is not a dtype policy of Keras: {error}") from error
    check_storage_options(source, storage_options)
    if is_gguf(source):
        return _planned(target, source, shown(source), True, {**options, "storage_options": storage_options})
    if RemoteFiles().serves(source):
        return _from_url(target, source, storage_options, options)
    if os.path.isfile(source):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copyfile(source, os.path.join(folder, "config.json"))
            return _from_folder(target, folder, source, False, options)
    if os.path.isdir(source):
        has_weights = any(next(Path(source).glob(pattern), None) for pattern in _WEIGHTS)
        return _from_folder(target, source, source, has_weights, options)
    try:
        return abstract_from_preset(target, source, load_weights=False, **options)
    except (CheckpointError, LazyModelError):
        raise
    except Exception as error:  # each of the hubs that KerasHub asks has errors of its own
        raise CheckpointError(
            f"cannot get the configuration of preset {source!r} ({type(error).__name__}: {error}). It is fetched from "
            "the network unless it was before; give a folder or a config.json instead"
        ) from error


def _from_url(
    target: Any, url: str, storage_options: Mapping[str, Any] | None, options: dict[str, Any]
) -> AbstractModel[Any]:
    where = located(url, storage_options)
    if where.is_file():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_bytes(read_at_most(where, MAX_JSON, "JSON"))
            return _from_folder(target, folder, shown(url), False, options)
    _read_config(where / "config.json", shown(url), options)
    loads = bool(weight_files(where))
    return _planned(target, url, shown(url), loads, {**options, "storage_options": storage_options})


def _from_folder(target: Any, folder: str, source: str, load: bool, options: dict[str, Any]) -> AbstractModel[Any]:
    _read_config(Path(folder, "config.json"), source, options)
    try:
        return _planned(target, folder, source, load, options)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(folder, source)) from error


def _read_config(path: Location, source: str, options: dict[str, Any]) -> None:
    """Adds the dtype that a Hugging Face configuration states to options without one.

    Raises CheckpointError for a file that is there and describes no model.
    """
    if not path.exists():
        return
    try:
        config = json.loads(read_at_most(path, MAX_JSON, "JSON").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON: {error}") from error
    if not isinstance(config, dict) or not {"registered_name", "model_type", "architecture"} & set(config):
        raise CheckpointError(
            f"{source} is not a model's configuration: it has none of the keys registered_name (KerasHub), "
            "model_type (Hugging Face) and architecture (timm)"
        )
    stated = config.get("dtype") or config.get("torch_dtype")
    if "dtype" in options or "model_type" not in config or stated not in ("bfloat16", "float16", "float32"):
        return
    options["dtype"] = stated
    if stated != keras.config.floatx():
        said = (
            f"planned in {stated}, as the configuration of {source} states; from_preset takes {keras.config.floatx()}"
        )
        print(f"lazymodel: {said} unless dtype={stated!r} is given", file=sys.stderr)


def _planned(target: Any, preset: str, source: str, load: bool, options: Mapping[str, Any]) -> AbstractModel[Any]:
    try:
        return abstract_from_preset(target, preset, load_weights=load, **options)
    except (TypeError, AttributeError, IndexError) as error:  # a configuration with values of other types
        raise CheckpointError(f"KerasHub cannot build a model from {source}: {error}") from error

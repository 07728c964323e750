"""From a folder of a model to another one, for `lazymodel convert --cls`: KerasHub's presets and Hugging Face's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from lazymodel import CheckpointError, LazyModelError
from lazymodel._save.convert import differences, forget
from lazymodel._show.text import closest
from lazymodel_keras._train.presets import lazy_values, save_preset
from lazymodel_keras.hub import abstract_from_preset


def convert_model(
    cls: str,
    source: str,
    destination: str,
    *,
    to: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    verify: bool = False,
    source_options: Mapping[str, Any] | None = None,
    max_host_memory: int | str | None = None,
    **options: Any,
) -> list[str]:
    """Saves a model's folder as another one; returns what `verify` found different.

    Args:
        cls: The name of a class of KerasHub, such as `Gemma3CausalLM`.
        source: What the class's `from_preset` takes, with `source_options` for a URL.
        destination: A folder on a disk.
        to: As of `save_preset`, as are `max_host_memory` and further options; None is a preset.
        dtype: The dtype policy of the new model; None keeps the source's.
        quantize: `"int8"` or `"int4"`, as Keras quantizes.
        verify: Whether to read everything back and compare it with the source. A Hugging Face folder always is: some
            of KerasHub's exporters lay out some shapes so that its own importer, and transformers, read other values.

    Raises:
        LazyModelError: As `abstract_from_preset` and `save_preset`; KerasHub has no such class.
    """
    import keras_hub

    models: Any = keras_hub.models
    if (target := getattr(models, cls, None)) is None:
        raise LazyModelError(f"keras_hub.models has no class {cls!r}{closest(cls, vars(models))}")
    if "://" in destination:
        raise LazyModelError(f"{destination}: expected the path of a folder, found a URL")
    if os.path.realpath(source) == os.path.realpath(destination):
        raise LazyModelError(f"{destination} is what is converted; convert to another path")
    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    abstract = abstract_from_preset(target, source, storage_options=source_options, **given)
    if quantize is not None:
        # Of a task's layers, tokenizers are never built, and Keras raises where it should quantize them.
        abstract = abstract.quantize(quantize, filters=lambda layer: layer.built)
    save_preset(abstract, destination, to=to or "preset", max_host_memory=max_host_memory, **options)
    if not verify and to != "huggingface":
        return []
    forget([entry.path for entry in os.scandir(destination)])
    expected = lazy_values(abstract)
    if to == "huggingface":  # whose configurations, as exported, name no task, and which has weights alone
        backbone = getattr(target, "backbone_cls", target)
        try:
            found = lazy_values(abstract_from_preset(backbone, destination, **given))
        except CheckpointError as error:
            return [f"KerasHub, which wrote it, cannot read it: {error}"]
        found = {path: tensor for path, tensor in found.items() if jnp.issubdtype(tensor.dtype, jnp.floating)}
    else:  # in the same order, since Keras numbers some names anew; states of random numbers are in no preset
        found = lazy_values(abstract_from_preset(target, destination, **given))
        found = {path: one for path, one in zip(expected, found.values(), strict=True) if one.file}
    expected = {path: tensor for path, tensor in expected.items() if path in found}
    return list(differences(expected, found, max_host_memory, options.get("progress")))

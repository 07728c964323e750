"""LoRA pairs that are created on their devices, split like the kernels that they belong to.

Responsible for choosing the layers and for enabling LoRA on them as KerasHub does, on models whose variables are
abstract and on finished ones. The pairs are ordinary variables, created by Keras; `_record/initializers` initializes
them, and the core splits them.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import keras

from lazymodel import AbstractVariable, LazyModelError
from lazymodel._sharding.follow import follow_weights
from lazymodel._show.text import closest
from lazymodel_keras import _upstream
from lazymodel_keras._model.abstract import from_skeleton, has_layout
from lazymodel_keras._model.keras_object import AbstractKerasObject, model_variables
from lazymodel_keras._record.recording import Recording, session

# Keras' layers in these modes have no LoRA, or not before calibration.
_WITHOUT_LORA = ("float8", "gptq", "awq")


def enable_lora(model: Any, rank: int, targets: str | None = None) -> None:
    """Does what `model.backbone.enable_lora(rank)` does, and creates every pair directly where its kernel is.

    On a finished model, KerasHub's own method leaves the pairs on one device, or whole on every device of the
    active `keras.distribution`; these are split like their kernels. Everything else in the backbone is frozen. A model
    that was compiled before has to be compiled again, as after KerasHub's own method.

    Args:
        model: A KerasHub task or backbone that has its weights, or with `targets` any built Keras model.
        rank: As in `AbstractModel.lora`.
        targets: Likewise.

    Raises:
        LazyModelError: The rank is not a positive integer, no layer is a target, or a target cannot have a pair.

    Example:
        >>> lk.enable_lora(model, 4)
        >>> [variable.shape for variable in model.trainable_variables[:2]]
        [(2, 16, 4), (4, 8)]
    """
    check_lora(rank, targets)
    with session(Recording()) as recording:
        add_lora(model, rank, targets)
    pairs = from_skeleton(AbstractKerasObject(None, recording, model, only_own=True))
    known = {variable.path: _described(variable) for variable in model_variables(model) if variable.path not in pairs}
    distribution = keras.distribution.distribution()
    without_rule = [path for path in pairs if not has_layout(path, distribution)]
    followed = follow_weights({**known, **pairs}, without_rule)
    pairs.with_variables({**pairs, **followed}).materialize(progress=False)


def check_lora(rank: Any, targets: str | None) -> None:
    """Raises LazyModelError for arguments that are invalid for any model."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise LazyModelError(f"the rank of a LoRA is a positive integer; got {rank!r}")
    if targets is not None:
        try:
            re.compile(targets)
        except (re.error, TypeError) as error:
            raise LazyModelError(f"LoRA targets {targets!r} are not a regular expression: {error}") from error


def add_lora(model: Any, rank: int, targets: str | None) -> None:
    """Enables LoRA on the target layers, like `Backbone.enable_lora`; raises as `enable_lora` above."""
    backbone = getattr(model, "backbone", None) or model
    layers = [layer for layer in _upstream.flat_layers(backbone, include_self=False) if layer.weights]
    able = [index for index, layer in enumerate(layers) if hasattr(layer, "enable_lora")]
    if targets is None:
        if not hasattr(backbone, "default_lora_layer_names"):
            raise LazyModelError(f"{model.name} is no KerasHub model and has no usual LoRA targets; say which")
        names = backbone.default_lora_layer_names()
        selected = [index for index in able if layers[index].name in names]
        expected = f"layers named {', '.join(map(repr, names))}"
    else:
        selected = [index for index in able if any(re.fullmatch(targets, v.path) for v in layers[index].weights)]
        paths = [variable.path for index in able for variable in layers[index].weights]
        expected = f"variables that match {targets!r}{closest(targets, paths)}"
    if not selected:
        raise LazyModelError(f"{model.name} has no LoRA targets: expected {expected}. Set the targets to a path regex")
    for layer in (layers[index] for index in selected):
        if (mode := layer.quantization_mode) in _WITHOUT_LORA:
            raise LazyModelError(f"{layer.path}: Keras has no LoRA for layers quantized with {mode!r}")
    try:
        if targets is None:
            backbone.enable_lora(rank)
            return
        # The same, with layers by position instead of by name.
        backbone.trainable = True
        for layer in _upstream.flat_layers(backbone, include_self=False):
            layer.trainable = False
        for index in selected:
            layers[index].trainable = True
            layers[index].enable_lora(rank)
        _upstream.set_lora_layers(backbone, selected, rank)
    except (ValueError, NotImplementedError) as error:  # a constraint on the kernel, or LoRA already
        raise LazyModelError(f"LoRA cannot be enabled on {model.name}: {error}") from error


def _described(variable: Any) -> AbstractVariable:
    sharding = getattr(variable.value, "sharding", None)
    return AbstractVariable(variable.path, tuple(variable.shape), jax.numpy.dtype(variable.dtype), sharding)

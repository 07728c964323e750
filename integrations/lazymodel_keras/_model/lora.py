"""LoRA pairs of finished Keras models: merged into the weights to which they belong.

Not responsible for enabling LoRA (`layers.py`), nor for the files of adapters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lazymodel import LazyModelError
from lazymodel._sharding.follow import lora_shardings
from lazymodel_keras import _upstream
from lazymodel_keras._model.keras_object import replace

_FUNCTIONS = ("train_function", "test_function", "predict_function", "generate_function")


def merge_lora(model: Any) -> None:
    """Adds the LoRA pairs of a model to the weights to which they belong, on their devices, and removes the pairs.

    Keras has no method for this; it merges pairs only while it saves. A merged weight is `kernel + lora_alpha /
    lora_rank * a @ b`, calculated in float32 and rounded once to the kernel's dtype, in the kernel's sharding and, on
    accelerators, in its memory. Weights of the same shape and sharding share one program. Quantized kernels (int8,
    int4) get the values that Keras saves: decoded, added and quantized again on the host.

    The variables are then those of a model that never had LoRA, and its compiled functions are made again when they
    are next called. A merged kernel is trainable if its layer is; what KerasHub's `enable_lora` froze stays frozen
    until `model.trainable = True`. An optimizer that was built is replaced by a new one of the same configuration.

    Args:
        model: A Keras model, or a part of one such as `model.backbone`. A compiled model around a part has to be
            compiled again.

    Raises:
        LazyModelError: The model has no pairs, or one of a layer whose weight it cannot be added to; the model is then
            unchanged.

    Example:
        >>> tuned = make_model()
        >>> lk.enable_lora(tuned, 4, ".*/kernel")  # then train it
        >>> lk.merge_lora(tuned)
        >>> [variable.name for variable in tuned.weights]
        ['kernel', 'bias']
    """
    if not isinstance(model, keras.layers.Layer):
        raise LazyModelError(
            f"expected a Keras model with LoRA pairs, got {type(model).__name__}; materialize it first"
        )
    layers = _upstream.flat_layers(model)
    adapted = [layer for layer in layers if getattr(layer, "lora_enabled", False)]
    if not adapted:
        raise LazyModelError(f"{model.name} has no LoRA pairs to merge; lazymodel_keras.enable_lora adds them")
    for layer in adapted:
        _checked(layer)
    for layer in adapted:
        _merge(layer)
    for inner in (layer for layer in layers if isinstance(layer, keras.Model)):
        _upstream.drop_lora_layers(inner)
        for name in _FUNCTIONS:
            if getattr(inner, name, None) is not None:
                setattr(inner, name, None)
        optimizer = getattr(inner, "optimizer", None)
        if optimizer is not None and optimizer.built:  # for the pairs
            inner.optimizer = type(optimizer).from_config(optimizer.get_config())


def _checked(layer: Any) -> tuple[Any, Any, Any]:
    """The weight and the pair of a layer. Raises LazyModelError if they cannot be merged."""
    variables, mode = _upstream.lora_variables(layer), layer.quantization_mode
    if variables is None or mode not in (None, "int8", "int4"):
        what = (
            f"quantized with {mode!r}" if mode else f"of class {type(layer).__name__}, which has its own kind of LoRA"
        )
        raise LazyModelError(f"{layer.path}: expected a pair of Keras' own layers, found one {what}; it is not merged")
    for variable in variables:
        if (array := _upstream.value(variable)) is None or array.is_deleted():
            raise LazyModelError(f"{variable.path} has no value: it is abstract, or was deleted or donated")
        if mode and not array.is_fully_addressable:
            raise LazyModelError(
                f"{variable.path}: Keras merges LoRA pairs into {mode!r} weights on the host, and this one is split "
                "over several processes; merge it in one process"
            )
    return variables


def _merge(layer: Any) -> None:
    weight, a, b = _checked(layer)
    if layer.quantization_mode is None:
        kernel = weight.value
        # Without a distribution KerasHub's own `enable_lora` leaves pairs on the first device.
        shardings = lora_shardings(kernel.sharding, kernel.shape, a.shape[-1])
        there = kernel.sharding.device_set
        pairs = zip((a.value, b.value), shardings, strict=True)
        pair = (each if each.sharding.device_set == there else jax.device_put(each, place) for each, place in pairs)
        add = jax.jit(_added, donate_argnums=0, out_shardings=kernel.sharding)
        replace(weight, add(kernel, *pair, np.float32(layer.lora_alpha / layer.lora_rank)))
    else:
        for variable, value in _upstream.requantized(layer):
            array = np.asarray(value).astype(variable.value.dtype)
            replace(variable, jax.device_put(array, variable.value.sharding))
    _upstream.drop_lora(layer)


def _added(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    # By default accelerators round the factors of a product to fewer bits.
    update = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1, precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + scale * update).astype(kernel.dtype)

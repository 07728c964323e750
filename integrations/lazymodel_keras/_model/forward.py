"""A Keras model's own forward pass and loss, as functions of its variables that a compiler takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lazymodel._abstract.framework import PlannedFunction
from lazymodel_keras._model.examples import inputs_of


def plan_function(
    model: Any, variables: Mapping[str, Any], what: str, *, batch: int, sequence: int | None
) -> PlannedFunction:
    """A Keras model's own forward pass or loss (`what="train"`), of its variables by path, which may be abstract.

    The loss of a language model is the cross-entropy of its logits, in float32, with tokens of the same shape; that of
    any other model is the mean of its outputs' squares, which has the same shapes to differentiate. `sequence` counts
    where the model takes any number of tokens; None is 1024 or the most that it takes.

    Raises:
        LazyModelError: The model does not say what it takes.
    """
    described: dict[str, None] = {}
    inputs = inputs_of(model, batch, sequence, described)
    training = what == "train"

    def function(values: Mapping[str, Any], inputs: Any) -> Any:
        mapping = [(variable, values[path]) for path, variable in variables.items()]
        with keras.StatelessScope(state_mapping=mapping):
            outputs = model(inputs, training=training)
        return loss(outputs, inputs) if training else outputs

    # A backbone's outputs have the shape of logits, too; only a task knows that they are.
    is_task = getattr(model, "backbone", None) is not None
    loss = _cross_entropy if is_task and isinstance(inputs, Mapping) and "token_ids" in inputs else _mean_square
    return PlannedFunction(function, (inputs,), f"{model.name} of {', '.join(described)}")


def _cross_entropy(outputs: Any, inputs: Any) -> Any:
    tokens = inputs["token_ids"]
    if getattr(outputs, "ndim", 0) != 3 or outputs.shape[:2] != tokens.shape:
        return _mean_square(outputs, inputs)
    logits = jax.nn.log_softmax(outputs.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None].astype(jnp.int32), axis=-1))


def _mean_square(outputs: Any, inputs: Any) -> Any:
    arrays = [array for array in jax.tree.leaves(outputs) if jnp.issubdtype(array.dtype, jnp.floating)]
    return sum(jnp.mean(jnp.square(array.astype(jnp.float32))) for array in arrays)

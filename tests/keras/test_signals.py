"""Signals of KerasHub's models have the names of their layers, and are what the built model computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

import lazymodel as lm

CONFIG: dict[str, Any] = {
    "vocabulary_size": 64, "num_layers": 2, "num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 16,
    "intermediate_dim": 32, "head_dim": 8, "use_post_ffw_norm": True, "use_post_attention_norm": True,
}  # fmt: skip
INPUTS = {"token_ids": np.arange(12).reshape(2, 6), "padding_mask": np.ones((2, 6), "int32")}


def rms(array: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(array, np.float64)))))


def test_blocks_of_a_decoder() -> None:
    abstract = lm.build_abstract(keras_hub.models.GemmaBackbone, **CONFIG)

    def loss(model: Any, inputs: Any) -> Any:
        return jnp.mean(model.token_embedding(model(inputs), reverse=True) ** 2)

    found, model = lm.signals(abstract, loss, INPUTS, gradients=True), abstract.materialize()
    blocks = [f"decoder_block_{number}" for number in range(2)]
    inner = keras.Model(model.inputs, [model.get_layer(name).output for name in blocks])
    outputs = jax.jit(inner.__call__)(INPUTS)  # operations one by one would be compiled one by one
    for name, output in zip(blocks, outputs, strict=True):
        np.testing.assert_allclose(found.activations[name].rms, rms(output), rtol=1e-5)
    assert {f"{name}/attention" for name in blocks} <= {*found.activations}
    assert "decoder_block_{layer}/ffw_linear/kernel" in found.over_depth(kind="variables")

    def stateless(values: list[jax.Array]) -> jax.Array:
        with keras.StatelessScope(list(zip(model.trainable_variables, values, strict=True))):
            return loss(model, INPUTS)

    gradients = jax.jit(jax.grad(stateless))([variable.value for variable in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(found.variables[variable.path].rms, rms(gradient), rtol=1e-4, err_msg=variable.path)

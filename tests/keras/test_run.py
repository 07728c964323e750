"""`run` with Keras models and tasks of KerasHub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.extras.run.models import assert_equal
from tests.extras.run.test_run import ran
from tests.large import mostly_large

LAYERS = 4
TOKENS = {"token_ids": np.arange(16)[None] % 50, "padding_mask": np.ones((1, 16), bool)}
CONFIG = {
    "vocabulary_size": 50, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 64
}  # fmt: skip


def backbone(layers: int = LAYERS) -> Any:
    keras.utils.set_random_seed(0)
    return keras_hub.models.Llama3Backbone(num_layers=layers, **CONFIG)


def forward(model: Any, inputs: Any) -> Any:
    return model(inputs)


def norms(model: Any, inputs: Any) -> list[jax.Array]:
    def loss(trainable: list[jax.Array]) -> jax.Array:
        others = [variable.value for variable in model.non_trainable_variables]
        return (model.stateless_call(trainable, others, inputs)[0] ** 2).mean()

    values = [variable.value for variable in model.trainable_variables]
    return [jnp.linalg.norm(gradient) for gradient in jax.grad(loss)(values)]


def whole(function: Any, model: Any) -> Any:
    """What the function gives of the whole model; its operations one by one would be compiled one by one."""
    return jax.jit(lambda inputs: function(model, inputs))(TOKENS)


@pytest.mark.parametrize("function", mostly_large([forward, norms], [norms]))
def test_backbone(function: Any) -> None:
    abstract = lm.build_abstract(backbone)
    found, report = ran(abstract, function, TOKENS)
    assert_equal(found, whole(function, abstract.materialize()))
    assert report.calls >= LAYERS
    assert_equal(ran(abstract, function, TOKENS)[0], found)  # the object is not used up


def test_programs_do_not_grow_with_depth() -> None:
    reports = [ran(lm.build_abstract(backbone, layers), forward, TOKENS)[1] for layers in (4, 8)]
    assert len(reports[0].rows) == len(reports[1].rows) <= 4
    assert reports[1].rows[1].calls == 7


def test_a_task_from_a_preset(tmp_path: Path) -> None:
    model: Any = keras_hub.models.Llama3CausalLM(backbone=backbone(), preprocessor=None)
    model.save_to_preset(tmp_path / "preset")
    abstract = lk.abstract_from_preset(keras_hub.models.Llama3CausalLM, str(tmp_path / "preset"), preprocessor=None)
    found, report = ran(abstract, forward, TOKENS)
    assert_equal(found, whole(forward, model))
    embedding = next(variable for path, variable in abstract.items() if "token_embedding/embeddings" in path)
    used = report.model_nbytes - embedding.nbytes + 16 * embedding.nbytes // 50  # of 50 rows, those of 16 tokens
    assert 0.99 * used < report.loaded_nbytes <= used and report.again_nbytes == 0


@pytest.mark.large  # functions of sharded models are also in extras/run
def test_sharded(mesh8: Any) -> None:
    rules = {".*feedforward_(gate|intermediate)_dense/kernel": P(None, "model"), ".*": P()}
    abstract = lm.build_abstract(backbone).shard(mesh8, rules)
    found, _ = ran(abstract, forward, TOKENS)
    assert_equal(jax.device_get(found), jax.device_get(whole(forward, abstract.materialize())))


def test_state_that_the_call_changes() -> None:
    """Batch statistics are updated, and dropout draws its keys, as in the whole model; both end with the call."""

    def make() -> Any:
        keras.utils.set_random_seed(0)
        inputs = x = keras.Input((8,))
        for _ in range(2):
            x = keras.layers.Dense(8, "relu")(x)
            x = keras.layers.Dropout(0.5, seed=3)(keras.layers.BatchNormalization()(x))
        return keras.Model(inputs, x)

    def function(model: Any, x: Any) -> Any:
        outputs = model(x, training=True)
        return outputs, [variable.value + 0 for variable in model.non_trainable_variables]

    abstract, x = lm.build_abstract(make), np.random.default_rng(0).random((4, 8), "float32")
    found, _ = ran(abstract, function, x)
    assert_equal(found, function(abstract.materialize(), x))
    assert_equal(ran(abstract, function, x)[0], found)


def test_functions_of_its_own_are_refused() -> None:
    inputs = keras.Input((8,))
    abstract = lm.build_abstract(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]))
    assert inputs is not None
    with pytest.raises(lm.TraceError, match="needs the value of an array"):
        abstract.run(lambda model, x: model.predict(x, verbose=0), np.ones((2, 8), "float32"))

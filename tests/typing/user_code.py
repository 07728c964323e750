"""What type checkers know of user code: pyright and mypy check it, nothing runs it."""

# pyright: reportMissingTypeStubs=false, reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import keras
import keras_hub
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import lazymodel as lm
import lazymodel_keras as lk


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"kernel": jax.random.normal(key, (8, 8))}


mesh = Mesh(np.array(jax.devices()), ("model",))
rules = {"kernel": PartitionSpec("model")}

# A function's result, and a class's instance, through every step.
params = lm.build_abstract(init, jax.random.key(0))
assert_type(params, lm.AbstractModel[dict[str, jax.Array]])
assert_type(params.shard(mesh, rules), lm.AbstractModel[dict[str, jax.Array]])
assert_type(params.shard(mesh, rules).materialize(), dict[str, jax.Array])
assert_type(params.materialize(lm.open_checkpoint("model.safetensors"), max_host_memory="4GiB"), dict[str, jax.Array])
assert_type(lm.build_abstract(Block, 64, rngs=nnx.Rngs(0)).shard(mesh, lm.auto()).materialize(), Block)
assert_type(params.with_optimizer(optax.adamw(1e-3)).materialize(), tuple[dict[str, jax.Array], Any])
assert_type(params["kernel"], lm.AbstractVariable)
assert_type(params.plan().device_nbytes, int)
assert_type(params.plan(what_if=lm.WhatIf(optimizer="adamw"), device_memory="16GiB").check(), lm.MemoryPlan)
assert_type(lm.open_checkpoint("model.safetensors")["kernel"], lm.LazyTensor)

# Keras says little of its own types; the class is known.
preset = lk.from_preset(keras_hub.models.GemmaCausalLM, "gemma2_9b_en", mesh=mesh, rules=lm.auto())
assert_type(preset, keras_hub.models.GemmaCausalLM)
abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "gemma2_9b_en", dtype="bfloat16")
assert_type(abstract.quantize("int8").lora(8).shard(mesh, rules).materialize(), keras_hub.models.GemmaBackbone)
assert_type(lk.restore(abstract, "checkpoints"), keras_hub.models.GemmaBackbone)


def make_model() -> keras.Model:
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])


assert_type(lm.build_abstract(make_model).materialize(), keras.Model)

# What is wrong is found: each comment is needed, or the checker says so.
params.materialize(max_host_memry="4GiB")  # type: ignore[call-arg]
params.shard(mesh, rules, on_unmatched=1)  # type: ignore[arg-type]

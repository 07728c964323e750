"""LoRA pairs: made on their devices, split like their kernels, and all that training changes."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import assert_same, bits, device_mesh, distribution, preset_of, seeded
from tests.keras.versions import KERAS, parts
from tests.small import shard_small

pytestmark = [
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Invalid quantization mode. Expected one of:UserWarning"),
]

Backbone = keras_hub.models.Backbone
GemmaCausalLM = keras_hub.models.GemmaCausalLM
RULES = {r".*attention/(query|key|value)/kernel": P("model"), "token_embedding/embeddings": P("model")}
QUERY = "decoder_block_0/attention/query"
# Older versions make pairs in the dtype of the model, and in bfloat16 stock Adam then changes nothing.
FLOAT32_PAIRS = parts(KERAS) >= (3, 15)


@pytest.fixture(scope="module")
def preset() -> str:
    return preset_of("gemma")


def batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 64, (8, 7)).astype("int32")
    return {"token_ids": tokens[:, :-1], "padding_mask": np.ones((8, 6), "bool")}, tokens[:, 1:]


def trained(model: Any) -> set[str]:
    """Fits two steps; the paths of what changed."""
    before = {variable.path: bits(variable) for variable in model.variables}
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    losses = model.fit(*batch(), batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    return {v.path for v in model.variables if not np.array_equal(before[v.path], bits(v))}


def loaded(preset: str, rank: int, targets: str | None = None, mesh: Mesh | None = None) -> Any:
    """With pairs that it had before it was loaded."""
    abstract = lk.abstract_from_preset(Backbone, preset).lora(rank, targets)
    return (abstract if mesh is None else abstract.shard(mesh, RULES)).materialize()


def pairs_of(model: Any) -> dict[str, Any]:
    return {variable.path: variable for variable in model.variables if "lora" in variable.path}


@pytest.mark.parametrize(
    ("cls", "quantize"),
    [
        (GemmaCausalLM, None),
        (Backbone, "int4"),
        pytest.param(Backbone, None, marks=pytest.mark.large),
        pytest.param(Backbone, "int8", marks=pytest.mark.large),
    ],
)
def test_equals_enabling_it_on_the_loaded_model(preset: str, mesh8: Mesh, cls: Any, quantize: str | None) -> None:
    options: dict[str, Any] = {} if quantize else {"dtype": "bfloat16"}
    options |= {} if cls is Backbone else {"preprocessor": None}

    def stock() -> Any:
        model = cls.from_preset(preset, **options)
        if quantize is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.freeze()
                model.quantize(quantize)
        getattr(model, "backbone", model).enable_lora(4)
        return model

    def ours() -> Any:
        abstract = lk.abstract_from_preset(cls, preset, **options)
        abstract = abstract if quantize is None else abstract.quantize(quantize)
        return abstract.lora(4).shard(mesh8, lm.auto()).materialize()

    expected, found = seeded(stock), seeded(ours)
    assert_same(expected, found, outputs=False)
    assert [v.path for v in expected.trainable_variables] == [v.path for v in found.trainable_variables]
    pairs = pairs_of(found)
    assert quantize or {v.dtype for v in pairs.values()} == {"float32" if FLOAT32_PAIRS else "bfloat16"}
    assert np.asarray(pairs[f"{QUERY}/lora_kernel_a"]).any()
    assert pairs[f"{QUERY}/lora_kernel_a"].shape == (8, 32, 4)


def test_pairs_are_split_like_their_kernels(preset: str, mesh8: Mesh) -> None:
    abstract = lk.abstract_from_preset(Backbone, preset).lora(2).shard(mesh8, RULES)
    a, b = abstract[f"{QUERY}/lora_kernel_a"], abstract[f"{QUERY}/lora_kernel_b"]
    assert (a.shape, a.spec, a.trainable, a.origin) == ((8, 32, 2), P("model"), True, "HeUniform")
    assert (b.shape, b.spec) == ((2, 4), P())
    assert not abstract[f"{QUERY}/kernel"].trainable
    assert "which it belongs to" in str(abstract.explain(f"{QUERY}/lora_kernel_a"))
    plan = abstract.plan(what_if=lm.WhatIf(optimizer="adam"))
    sizes = [v.shard_nbytes for v in abstract.values() if "lora" in v.path]
    assert plan.parts["optimizer state"] == 2 * sum(sizes)
    model = abstract.materialize()
    assert pairs_of(model)[f"{QUERY}/lora_kernel_a"].value.sharding.spec == P("model")

    rules = {**RULES, ".*/lora_kernel_a": P(None, "model")}
    abstract = lk.abstract_from_preset(Backbone, preset).lora(2).shard(mesh8, rules)
    assert abstract[f"{QUERY}/lora_kernel_a"].spec == P(None, "model"), "a rule goes before"


def test_layout_maps_of_keras(preset: str, mesh8: Mesh) -> None:
    with distribution(keras_hub.models.GemmaBackbone.get_layout_map(device_mesh(1, 8))):
        kernel = lk.abstract_from_preset(Backbone, preset).lora(2)[f"{QUERY}/kernel"].spec
        model = loaded(preset, 2)
        later = lk.from_preset(Backbone, preset)
        lk.enable_lora(later, 2)
    assert kernel == P("model", "batch", None)
    for pairs in map(pairs_of, (model, later)):
        variable = pairs[f"{QUERY}/lora_kernel_a"]
        assert variable.value.sharding.spec == P("model", "batch")
        variable.assign(np.ones(variable.shape))
        assert variable.value.sharding.spec == P("model", "batch")


@pytest.mark.parametrize("targets", [None, r".*/(query|ffw_linear)/kernel"])
def test_enabled_afterwards(preset: str, mesh8: Mesh, targets: str | None) -> None:
    def enabled(cls: Any, **options: Any) -> Any:
        model = lk.from_preset(cls, preset, mesh=mesh8, rules=RULES, **options)
        lk.enable_lora(model, 2, targets)
        return model

    model = enabled(GemmaCausalLM, preprocessor=None)
    pairs = pairs_of(model)
    assert len(pairs) == 8 and model.trainable_variables == list(pairs.values())
    assert pairs[f"{QUERY}/lora_kernel_a"].value.sharding.spec == P("model")
    assert all(len(variable.value.sharding.device_set) == 8 for variable in pairs.values())
    same = (seeded(lambda: enabled(Backbone)), seeded(lambda: loaded(preset, 2, targets, mesh=mesh8)))
    assert_same(*same, outputs=False)


@pytest.mark.parametrize("quantize", [None, pytest.param("int8", marks=pytest.mark.large)])
def test_training_changes_only_the_pairs(preset: str, mesh8: Mesh, quantize: str | None) -> None:
    dtype = "bfloat16" if FLOAT32_PAIRS else "float32"
    abstract = lk.abstract_from_preset(GemmaCausalLM, preset, preprocessor=None, dtype=dtype)
    abstract = abstract if quantize is None else abstract.quantize(quantize)
    model = abstract.lora(2).shard(mesh8, lm.auto()).materialize()
    kernels = {v.path: v.value.sharding for v in model.variables if v.path.endswith("/kernel")}
    assert {v.dtype for v in model.non_trainable_variables} <= {dtype, "int8", "uint32"}
    assert trained(model) == set(pairs_of(model))
    assert {path: sharding for path, sharding in kernels.items() if not sharding.is_fully_replicated}
    assert kernels == {v.path: v.value.sharding for v in model.variables if v.path in kernels}


def test_pairs_are_saved_and_loaded_alone(tmp_path: Path, preset: str, mesh8: Mesh) -> None:
    targets = r".*_1/attention/(key|query)/kernel"
    model = loaded(preset, 2, targets, mesh=mesh8)
    rng = np.random.default_rng(0)
    for variable in pairs_of(model).values():
        variable.assign(rng.standard_normal(variable.shape))
    assert len(pairs_of(model)) == 4
    model.save_lora_weights(str(tmp_path / "pairs.lora.h5"))
    assert (tmp_path / "pairs.lora.h5").stat().st_size < 20_000
    other = loaded(preset, 2, targets)
    other.load_lora_weights(str(tmp_path / "pairs.lora.h5"))
    assert_same(model, other, outputs=False)

    usual = loaded(preset, 2, mesh=mesh8)
    usual.save_lora_weights(str(tmp_path / "usual.lora.h5"))
    stock = Backbone.from_preset(preset)
    stock.load_lora_weights(str(tmp_path / "usual.lora.h5"))  # which enables them
    assert_same(stock, usual, outputs=False)


def test_a_plain_model(mesh8: Mesh) -> None:
    def build() -> Any:
        return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(8)])

    abstract = shard_small(lm.build_abstract(build), mesh8, {".*/kernel": P(None, "model")}, on_unmatched="ignore")
    model = abstract.materialize()
    with pytest.raises(lm.LazyModelError, match="no KerasHub model and has no usual LoRA targets; say which"):
        lk.enable_lora(model, 2)
    lk.enable_lora(model, 2, ".*/kernel")
    assert [v.value.sharding.spec for v in model.layers[0].trainable_variables][1:] == [P(), P(None, "model")]


def test_errors(preset: str) -> None:
    abstract = lk.abstract_from_preset(Backbone, preset)
    float8 = abstract.quantize(keras.quantizers.Float8QuantizationConfig())
    for lora, message in (
        (lambda: abstract.lora(0), "got 0"),
        (lambda: abstract.lora(2, "("), r"'\('"),
        (lambda: abstract.lora(2, "query"), "has no LoRA targets"),
        (lambda: lk.enable_lora(loaded(preset, 2), 2), r"gemma_backbone\S*: lora is already enabled"),
        (lambda: float8.lora(2), "'float8'"),
    ):
        with pytest.raises(lm.LazyModelError, match=message):
            lora()

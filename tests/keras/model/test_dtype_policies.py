"""Weights of one dtype loaded into models of another, and of several: always what stock makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import assert_same, save_hugging_face, save_preset

Backbone = keras_hub.models.Backbone
DTypePolicyMap = keras.dtype_policies.DTypePolicyMap


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_preset(tmp_path_factory.mktemp("dtype") / "gemma", "gemma")


def mixed_map() -> Any:
    policies = DTypePolicyMap(default_policy="float32")
    policies["token_embedding"] = "bfloat16"
    policies["decoder_block_0/attention/.*"] = "mixed_bfloat16"
    policies["decoder_block_1/ffw_.*"] = "float16"
    return policies


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "mixed_bfloat16", pytest.param("float16", marks=pytest.mark.large), mixed_map]
)
def test_equals_stock(preset: Path, mesh8: Mesh, dtype: Any) -> None:
    def policy() -> Any:
        return dtype() if callable(dtype) else dtype

    stock = Backbone.from_preset(str(preset), dtype=policy())
    ours = lk.from_preset(Backbone, str(preset), dtype=policy(), mesh=mesh8, rules=lm.auto())
    assert_same(stock, ours, outputs=False)
    for one, other in zip(stock._flatten_layers(), ours._flatten_layers(), strict=True):
        assert (one.variable_dtype, one.compute_dtype) == (other.variable_dtype, other.compute_dtype), one.path


def test_some_layers_differ(preset: Path) -> None:
    abstract = lk.abstract_from_preset(Backbone, str(preset), dtype=mixed_map())
    assert abstract["token_embedding/embeddings"].dtype == "bfloat16"
    assert abstract["decoder_block_0/attention/query/kernel"].dtype == np.float32
    assert abstract["decoder_block_1/ffw_linear/kernel"].dtype == np.float16
    assert abstract["decoder_block_0/ffw_linear/kernel"].dtype == np.float32


def test_a_task(preset: Path) -> None:
    cls = keras_hub.models.GemmaCausalLM
    for dtype in ("bfloat16", mixed_map()):
        stock = cls.from_preset(str(preset), dtype=dtype, preprocessor=None)
        assert_same(stock, lk.from_preset(cls, str(preset), dtype=dtype, preprocessor=None), outputs=False)


def test_the_global_policy(preset: Path) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        stock = Backbone.from_preset(str(preset))
        ours = lk.from_preset(Backbone, str(preset))
    finally:
        keras.config.set_dtype_policy(before)
    assert_same(stock, ours, outputs=False)
    assert ours.compute_dtype == "bfloat16"


@pytest.mark.large
def test_narrow_files_into_wide_models(tmp_path: Path, preset: Path) -> None:
    """A preset in bfloat16 and a Hugging Face folder in float16, each read as what the model is in."""
    Backbone.from_preset(str(preset), dtype="bfloat16").save_to_preset(str(tmp_path / "narrow"))
    hugging_face = save_hugging_face(tmp_path / "llama3", "llama3", dtype=np.float16)
    for folder, dtypes in ((tmp_path / "narrow", [None]), (hugging_face, [None, "bfloat16"])):
        for dtype in dtypes:
            stock = Backbone.from_preset(str(folder), dtype=dtype)
            assert_same(stock, lk.from_preset(Backbone, str(folder), dtype=dtype), outputs=False)

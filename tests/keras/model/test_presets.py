"""Presets in another dtype, by Keras' own layouts or on fewer devices: always what stock makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import BACKBONES, assert_same, save_hugging_face, save_preset

Backbone = keras_hub.models.Backbone
GemmaCausalLM = keras_hub.models.GemmaCausalLM
GEMMA, CONFIG = BACKBONES["gemma"]


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_preset(tmp_path_factory.mktemp("preset") / "gemma", "gemma"))


# Dtypes ---------------------------------------------------------------------------------------------------------------


def mixed_map() -> Any:
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["token_embedding"] = "bfloat16"
    policies["decoder_block_0/attention/.*"] = "mixed_bfloat16"
    policies["decoder_block_1/ffw_.*"] = "float16"
    return policies


@pytest.mark.parametrize(
    ("cls", "dtype", "everywhere"),
    [
        (Backbone, "mixed_bfloat16", None),
        (Backbone, mixed_map, None),
        (Backbone, None, "mixed_bfloat16"),
        (GemmaCausalLM, "bfloat16", None),
        (GemmaCausalLM, mixed_map, None),
        pytest.param(Backbone, "float16", None, marks=pytest.mark.large),
    ],
)
def test_equals_stock_in_another_dtype(preset: str, mesh8: Mesh, cls: Any, dtype: Any, everywhere: str | None) -> None:
    def options() -> dict[str, Any]:
        task = {} if cls is Backbone else {"preprocessor": None}
        return task | ({} if dtype is None else {"dtype": dtype() if callable(dtype) else dtype})

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(everywhere or before)
    try:
        stock = cls.from_preset(preset, **options())
        ours = lk.from_preset(cls, preset, mesh=mesh8, rules=lm.auto(), **options())
    finally:
        keras.config.set_dtype_policy(before)
    assert_same(stock, ours, outputs=False)
    for one, other in zip(stock._flatten_layers(), ours._flatten_layers(), strict=True):
        assert (one.variable_dtype, one.compute_dtype) == (other.variable_dtype, other.compute_dtype), one.path
    assert everywhere is None or ours.compute_dtype == "bfloat16"


@pytest.mark.large
def test_narrow_files_into_wide_models(tmp_path: Path, preset: str) -> None:
    """A preset in bfloat16 and a Hugging Face folder in float16, each read as what the model is in."""
    Backbone.from_preset(preset, dtype="bfloat16").save_to_preset(str(tmp_path / "narrow"))
    hugging_face = save_hugging_face(tmp_path / "llama3", "llama3", dtype=np.float16)
    for folder, dtypes in ((tmp_path / "narrow", [None]), (hugging_face, [None, "bfloat16"])):
        for dtype in dtypes:
            stock = Backbone.from_preset(str(folder), dtype=dtype)
            assert_same(stock, lk.from_preset(Backbone, str(folder), dtype=dtype), outputs=False)


# Layouts --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def device_mesh() -> keras.distribution.DeviceMesh:
    return keras.distribution.DeviceMesh((1, 8), ["batch", "model"], keras.distribution.list_devices())


def test_published_layout_map_as_rules(device_mesh: keras.distribution.DeviceMesh, preset: str) -> None:
    layout_map = GEMMA.get_layout_map(device_mesh)
    abstract = lm.build_abstract(GEMMA, **CONFIG).shard(device_mesh, layout_map)
    for path, variable in abstract.items():
        layout = layout_map[path]
        spec = P(*layout.axes) if layout is not None else P()
        assert tuple(variable.spec) == tuple(spec), path
    model = lk.from_preset(GEMMA, preset, mesh=device_mesh, rules=layout_map)
    assert model.token_embedding.embeddings.value.sharding == abstract["token_embedding/embeddings"].sharding


def test_keys_that_match_nothing_or_too_much(device_mesh: keras.distribution.DeviceMesh) -> None:
    abstract = lm.build_abstract(GEMMA, **CONFIG)
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map[".*/no_such_kernel"] = ("model", None)
    with pytest.warns(lm.LazyModelWarning, match="rule '.*/no_such_kernel' matches no variable"):
        abstract.shard(device_mesh, layout_map)
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map[".*embeddings"] = ("model", None)
    layout_map["token_embedding/.*"] = (None, "model")
    with pytest.raises(lm.ShardingError, match=r"'token_embedding/embeddings' is matched by more than one key"):
        abstract.shard(device_mesh, layout_map)


def test_indivisible_under_an_active_distribution(device_mesh: keras.distribution.DeviceMesh) -> None:
    """Gemma with one key-value head: the published layout asks for a split that does not exist."""
    layout_map = GEMMA.get_layout_map(device_mesh)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with distribution.scope(), pytest.raises(lm.ShardingError, match=r"key/kernel.*of size 1 does not divide into 8"):
        lm.build_abstract(GEMMA, **{**CONFIG, "num_key_value_heads": 1})


def test_what_an_active_distribution_replicates_is_named(device_mesh: keras.distribution.DeviceMesh) -> None:
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map[".*dense/kernel"] = (None, "model")

    def build() -> keras.Model:
        return keras.Sequential(
            [keras.layers.Input((512,)), keras.layers.Dense(1024, name="dense"), keras.layers.Dense(512, name="head")]
        )

    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with (
        distribution.scope(),
        pytest.warns(lm.LazyModelWarning, match=r"replicates 1 variables.*head/kernel \(1024, 512\)"),
    ):
        model = lm.build_abstract(build).materialize()
    assert model.weights[0].value.sharding.spec == P(None, "model")
    assert model.weights[2].value.is_fully_replicated


def test_a_mesh_of_fewer_devices(preset: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    model = lk.from_preset(GEMMA, preset, mesh=mesh, rules={".*embeddings": P("model"), ".*": P()})
    assert all(len(v.value.sharding.device_set) == 2 for v in model.weights)
    assert model.token_embedding.embeddings.value.sharding.spec == P("model")

"""Keras' own sharding objects as rules: `LayoutMap`, `DeviceMesh`, and an active distribution."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import BACKBONES, save_preset


@pytest.fixture
def device_mesh() -> keras.distribution.DeviceMesh:
    return keras.distribution.DeviceMesh((1, 8), ["batch", "model"], keras.distribution.list_devices())


def test_published_layout_map_as_rules(device_mesh: keras.distribution.DeviceMesh, tmp_path: Path) -> None:
    cls, config = BACKBONES["gemma"]
    layout_map = cls.get_layout_map(device_mesh)
    abstract = lm.build_abstract(cls, **config).shard(device_mesh, layout_map)
    for path, variable in abstract.items():
        layout = layout_map[path]
        spec = P(*layout.axes) if layout is not None else P()
        assert tuple(variable.spec) == tuple(spec), path
    model = lk.from_preset(cls, str(save_preset(tmp_path / "g", "gemma")), mesh=device_mesh, rules=layout_map)
    assert model.token_embedding.embeddings.value.sharding == abstract["token_embedding/embeddings"].sharding


def test_a_dead_key_is_warned_about(device_mesh: keras.distribution.DeviceMesh) -> None:
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map[".*/no_such_kernel"] = ("model", None)
    with pytest.warns(lm.LazyModelWarning, match="rule '.*/no_such_kernel' matches no variable"):
        lm.build_abstract(BACKBONES["gemma"][0], **BACKBONES["gemma"][1]).shard(device_mesh, layout_map)


def test_an_ambiguous_path_is_an_error(device_mesh: keras.distribution.DeviceMesh) -> None:
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map[".*embeddings"] = ("model", None)
    layout_map["token_embedding/.*"] = (None, "model")
    with pytest.raises(lm.ShardingError, match=r"'token_embedding/embeddings' is matched by more than one key"):
        lm.build_abstract(BACKBONES["gemma"][0], **BACKBONES["gemma"][1]).shard(device_mesh, layout_map)


def test_indivisible_under_an_active_distribution(device_mesh: keras.distribution.DeviceMesh) -> None:
    """Gemma with one key-value head: the published layout asks for a split that does not exist."""
    cls, config = BACKBONES["gemma"]
    layout_map = cls.get_layout_map(device_mesh)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with distribution.scope(), pytest.raises(lm.ShardingError, match=r"key/kernel.*of size 1 does not divide into 8"):
        lm.build_abstract(cls, **{**config, "num_key_value_heads": 1})


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


def test_a_mesh_of_fewer_devices(tmp_path: Path) -> None:
    import jax

    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    folder = str(save_preset(tmp_path / "bert", "bert"))
    model = lk.from_preset(BACKBONES["bert"][0], folder, mesh=mesh, rules={".*kernel": P("model"), ".*": P()})
    assert all(len(v.value.sharding.device_set) == 2 for v in model.weights)

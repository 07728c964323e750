"""Keyword arguments that neither KerasHub nor lazymodel takes are errors; all others arrive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import keras_hub
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.small import buffer_sizes, shard_small

from .models import BACKBONES, GEMMA, assert_same, in_block, preset_of, seeded

GEMMA_BACKBONE = BACKBONES["gemma"][0]
TYPOS = {"mseh": "mesh", "maxhostmemory": "max_host_memory", "Rules": "rules", "quantise": "quantize"}


@pytest.fixture(scope="module")
def preset() -> str:
    return preset_of("gemma")


STEPS = {"quantize": ".quantize('int8')", "quantize_filters": ".quantize('int8')"}
STEPS |= dict.fromkeys(("lora", "lora_rank", "lora_targets"), ".lora(8)")
LOADS: list[Any] = [lk.from_preset, lk.abstract_from_preset]


@pytest.mark.parametrize("load", LOADS)
def test_a_typo_is_an_error_with_the_nearest_name_and_what_changes_the_model_is_a_step(load: Any, preset: str) -> None:
    for typo, meant in TYPOS.items():
        with pytest.raises(lm.LazyModelError, match=f"GemmaBackbone.from_preset takes no argument '{typo}'.*{meant}"):
            load(GEMMA_BACKBONE, preset, **{typo: 3})
    for name, step in STEPS.items():
        text = re.escape(f"no argument '{name}'; it is a step: lazymodel_keras.abstract_from_preset(cls, preset){step}")
        with pytest.raises(lm.LazyModelError, match=text):
            load(GEMMA_BACKBONE, preset, **{name: 8})
        with pytest.raises(lm.LazyModelError, match=text):
            lm.build_abstract(GEMMA_BACKBONE.from_preset, preset, **{name: 8})


def first() -> keras.Model:
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, name="first")])


def test_options_of_materialize(tmp_path: Path) -> None:
    wrong: Any = {"max_host_memry": "1GiB"}
    ways = {"restore": lambda: lk.restore(first(), tmp_path, **wrong), "deferred": lambda: in_block(first, **wrong)}
    for name, way in (ways | {"load_model": lambda: lk.load_model(tmp_path, **wrong)}).items():
        with pytest.raises(lm.LazyModelError, match=f"{name} .*'max_host_memry'.*closest: 'max_host_memory'"):
            way()


def test_base_classes_are_judged_by_what_the_preset_makes(preset: str) -> None:
    with pytest.raises(lm.LazyModelError, match="GemmaBackbone.from_preset takes no argument 'num_classes'"):
        lk.from_preset(keras_hub.models.Backbone, preset, num_classes=3)
    with pytest.raises(lm.LazyModelError, match=r"GemmaCausalLM.*'num_layers'.*GemmaBackbone takes it.*backbone="):
        lk.from_preset(keras_hub.models.CausalLM, preset, preprocessor=None, num_layers=1)
    model = lk.abstract_from_preset(keras_hub.models.Backbone, preset, num_layers=1, load_weights=False)
    assert not any("decoder_block_1" in path for path in model)


def test_what_kerashub_takes_arrives(preset: str) -> None:
    backbone = lk.from_preset(
        GEMMA_BACKBONE, Path(preset), dtype="bfloat16", name="mine", trainable=False, dropout=0.25
    )
    assert (backbone.name, backbone.trainable, backbone.dropout) == ("mine", False, 0.25)
    assert backbone.weights[0].dtype == "bfloat16"
    task = lk.from_preset(keras_hub.models.GemmaCausalLM, preset, backbone=backbone, preprocessor=None, name="lm")
    assert task.backbone is backbone
    assert task.name == "lm"


def test_an_orbax_checkpoint_is_loaded_whole(tmp_path: Path) -> None:
    (tmp_path / "0" / "pytree").mkdir(parents=True)
    with pytest.raises(lm.LazyModelError, match="'objects_to_skip' for an Orbax"):
        in_block(lambda: first().load_weights(tmp_path, objects_to_skip=[]))


def test_a_task_with_a_head_of_its_own() -> None:
    folder, cls = preset_of("vit"), keras_hub.models.ImageClassifier
    given: dict[str, Any] = {"num_classes": 3, "preprocessor": None}
    assert lk.from_preset(cls, folder, **given, pooling="gap", head_dtype="float32").num_classes == 3
    resized = lk.abstract_from_preset(cls, folder, load_weights=False, image_shape=(32, 32, 3), **given)
    positions = next(variable for path, variable in resized.items() if "position" in path)
    assert positions.shape[0] == 65  # 8 × 8 patches and the class token


@pytest.mark.parametrize("name", BACKBONES)
def test_every_key_of_a_configuration_is_taken_and_nothing_else(name: str) -> None:
    cls, config = BACKBONES[name]
    abstract = lm.build_abstract(cls, **config)
    given = {**config, **abstract.framework.result.get_config()}
    assert len(lm.build_abstract(cls, **given)) >= len(abstract)
    with pytest.raises(lm.LazyModelError, match=f"{cls.__name__} takes no argument 'mseh'"):
        lm.build_abstract(cls, **config, mseh=3)


def test_names_that_are_looked_for_in_kwargs() -> None:
    """EfficientNet takes two of its former names out of its `**kwargs`."""
    config = {
        "stackwise_kernel_sizes": [3], "stackwise_num_repeats": [1], "input_shape": (16, 16, 3),
        "stackwise_input_filters": [8], "stackwise_output_filters": [8], "stackwise_expansion_ratios": [1],
        "stackwise_strides": [1], "stackwise_squeeze_and_excite_ratios": [0.25], "stackwise_block_types": ["v1"],
    }  # fmt: skip
    cls = keras_hub.models.EfficientNetBackbone
    lm.build_abstract(cls, **config, depth_coefficient=1.0, width_coefficient=1.0)


def test_constructors_and_methods_that_are_built_abstractly(preset: str) -> None:
    with pytest.raises(lm.LazyModelError, match=r"GemmaBackbone takes no argument 'num_layer'.*closest: 'num_layers'"):
        lm.build_abstract(GEMMA_BACKBONE, **GEMMA, num_layer=3)
    with pytest.raises(lm.LazyModelError, match=r"takes no argument 'mesh'.*argument of lazymodel_keras.from_preset"):
        lm.build_abstract(GEMMA_BACKBONE.from_preset, preset, mesh=3)
    for name, found in (("mesh", ".*lazymodel_keras.deferred"), ("num_layer", "")):
        with pytest.raises(lm.LazyModelError, match=f"no argument '{name}'{found}"):
            in_block(lambda name=name: GEMMA_BACKBONE.from_preset(preset, **{name: 3}))


def test_what_a_class_of_a_users_does_with_its_arguments() -> None:
    """Nobody can know."""

    class Mine(GEMMA_BACKBONE):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.found = kwargs.pop(f"rules_{'file'}", None)
            super().__init__(*args, **kwargs)

    assert lm.build_abstract(Mine, **GEMMA, rules_file="x").framework.result.found == "x"
    lm.build_abstract(Mine, **GEMMA, anything=3)


def test_what_is_no_class(preset: str) -> None:
    for given, expected in (
        *((name, "GemmaBackbone") for name in ("GemmaBackbone", "keras_hub.models.GemmaBackbone", "GemaBackbone")),
        (3, "has from_preset"),
        (int, "has from_preset"),
        (keras.Sequential(), "its class, Sequential|has from_preset"),
        (lm.build_abstract(GEMMA_BACKBONE, **GEMMA).framework.result, "its class, GemmaBackbone"),
    ):
        for load in LOADS:
            with pytest.raises(lm.LazyModelError, match=f"expected a KerasHub class.*got .*: pass .*({expected})"):
                load(given, preset)
    with pytest.raises(lm.LazyModelError, match="got the string 'GemmaBackbone'.*class or function itself"):
        lm.build_abstract("GemmaBackbone", **GEMMA)  # pyright: ignore[reportArgumentType]


def test_rules_are_completed(preset: str, mesh8: Mesh) -> None:
    """The errors of rules that do not fit advise it."""
    rules = {".*token_embedding/embeddings": P("model"), ".*query/kernel": P(None, None, "model")}  # 4 by 8
    with pytest.raises(lm.ShardingError, match="pass on_unmatched='auto'"):
        lk.from_preset(GEMMA_BACKBONE, preset, mesh=mesh8, rules=rules)
    stock = seeded(lambda: GEMMA_BACKBONE.from_preset(preset))
    for large in (1 << 10, 1 << 20):
        options: dict[str, Any] = {"mesh": mesh8, "rules": rules, "on_unmatched": "auto"}
        abstract = seeded(lambda: lk.abstract_from_preset(GEMMA_BACKBONE, preset))
        abstract = shard_small(abstract, mesh8, rules, on_unmatched="auto", large=large)
        ours = abstract.materialize()
        assert_same(stock, ours, outputs=False)
        with buffer_sizes(large=large):
            deferred = in_block(lambda: GEMMA_BACKBONE.from_preset(preset), **options)
            loaded = lk.from_preset(GEMMA_BACKBONE, preset, **options)
        assert_same(stock, loaded, outputs=False)
        for path, variable in zip(abstract, ours.weights, strict=True):
            assert variable.value.sharding == abstract[path].sharding
        for one, other in zip(ours.weights, deferred.weights, strict=True):
            assert one.value.sharding == other.value.sharding
        mended = [v for v in abstract.values() if v.reason is not None and v.reason.kind == "repaired"]
        assert len(mended) > (4 if large == 1 << 10 else 1)
        assert all("query/kernel" in v.path for v in mended) == (large == 1 << 20)


def test_load_model_takes_rules_as_from_preset_does(tmp_path: Path, mesh8: Mesh) -> None:
    model = first()
    model.save(path := tmp_path / "model.keras")
    for rules, found in (
        ({".*first/kernel": None, ".*/second/kernel": None}, r"'\.\*/second/kernel'"),
        ({".*first/kernel": P(("model",), "model")}, "on_unmatched='auto'"),
    ):
        with pytest.raises(lm.ShardingError, match=found):
            lk.load_model(path, mesh=mesh8, rules=rules)
    assert_same(model, lk.load_model(path, mesh=mesh8, rules={".*first/kernel": P("nothing")}, on_unmatched="auto"))
    with pytest.raises(lm.ShardingError, match="on_unmatched was given without mesh"):
        in_block(first, on_unmatched="auto")

"""Keyword arguments that neither KerasHub nor lazymodel takes are errors; all others arrive."""

from __future__ import annotations

import inspect
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
from lazymodel_keras import _keywords, _upstream

from .models import BACKBONES, GEMMA, assert_same, save_preset, seeded

GEMMA_BACKBONE = BACKBONES["gemma"][0]
CLASSES = [cls for cls in vars(keras_hub.models).values() if inspect.isclass(cls) and issubclass(cls, keras.Model)]
TYPOS = {"mseh": "mesh", "maxhostmemory": "max_host_memory", "Rules": "rules", "quantise": "quantize"}


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_preset(tmp_path_factory.mktemp("preset") / "gemma", "gemma"))


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
@pytest.mark.parametrize("load", [lk.from_preset, lk.abstract_from_preset])
def test_a_typo_is_an_error_with_the_nearest_name(load: Any, typo: str, meant: str, preset: str) -> None:
    with pytest.raises(lm.LazyModelError, match=f"GemmaBackbone.from_preset takes no argument '{typo}'.*{meant}"):
        load(GEMMA_BACKBONE, preset, **{typo: 3})


STEPS = {"quantize": ".quantize('int8')", "quantize_filters": ".quantize('int8')"}
STEPS |= dict.fromkeys(("lora", "lora_rank", "lora_targets"), ".lora(8)")


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_what_changes_the_model_is_a_step(name: str, step: str, preset: str) -> None:
    text = f"no argument '{name}'; it is a step: lazymodel_keras.abstract_from_preset(cls, preset){step}.shard"
    for load in (lk.from_preset, lk.abstract_from_preset):
        with pytest.raises(lm.LazyModelError, match=re.escape(text)):
            load(GEMMA_BACKBONE, preset, **{name: 8})
    with pytest.raises(lm.LazyModelError, match=re.escape(text)):
        lm.build_abstract(GEMMA_BACKBONE.from_preset, preset, **{name: 8})


def test_options_of_materialize(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, name="first")])
    text = "takes no argument 'max_host_memry'.*closest: 'max_host_memory'"
    wrong: Any = {"max_host_memry": "1GiB"}
    with pytest.raises(lm.LazyModelError, match=f"restore {text}"):
        lk.restore(model, tmp_path, **wrong)
    with pytest.raises(lm.LazyModelError, match=f"load_model {text}"):
        lk.load_model(tmp_path, **wrong)
    with pytest.raises(lm.LazyModelError, match=f"deferred {text}"), lk.deferred(**wrong):
        pass


def test_base_classes_are_judged_by_what_the_preset_makes(preset: str) -> None:
    with pytest.raises(lm.LazyModelError, match="GemmaBackbone.from_preset takes no argument 'num_classes'"):
        lk.from_preset(keras_hub.models.Backbone, preset, num_classes=3)
    with pytest.raises(lm.LazyModelError, match=r"GemmaCausalLM.*'num_layers'.*GemmaBackbone takes it.*backbone="):
        lk.from_preset(keras_hub.models.CausalLM, preset, preprocessor=None, num_layers=1)
    model = lk.abstract_from_preset(keras_hub.models.Backbone, preset, num_layers=1, load_weights=False)
    assert not any("decoder_block_1" in path for path in model)


def test_what_kerashub_takes_arrives(preset: str) -> None:
    backbone = lk.from_preset(GEMMA_BACKBONE, preset, dtype="bfloat16", name="mine", trainable=False, dropout=0.25)
    assert (backbone.name, backbone.trainable, backbone.dropout) == ("mine", False, 0.25)
    assert backbone.weights[0].dtype == "bfloat16"
    task = lk.from_preset(keras_hub.models.GemmaCausalLM, preset, backbone=backbone, preprocessor=None, name="lm")
    assert task.backbone is backbone
    assert task.name == "lm"


def test_a_folder_may_be_a_path(preset: str) -> None:
    assert_same(GEMMA_BACKBONE.from_preset(preset), lk.from_preset(GEMMA_BACKBONE, Path(preset)))


def test_an_orbax_checkpoint_is_loaded_whole(tmp_path: Path) -> None:
    (tmp_path / "0" / "pytree").mkdir(parents=True)
    with lk.deferred(), pytest.raises(lm.LazyModelError, match="no argument 'objects_to_skip' for an Orbax"):
        keras.Sequential([keras.layers.Input((8,))]).load_weights(tmp_path, objects_to_skip=[])


def test_a_task_with_a_head_of_its_own(tmp_path: Path) -> None:
    folder = str(save_preset(tmp_path / "vit", "vit"))
    task = lk.from_preset(
        keras_hub.models.ImageClassifier, folder, num_classes=3, preprocessor=None, pooling="gap", head_dtype="float32"
    )
    assert task.num_classes == 3
    resized = lk.abstract_from_preset(
        keras_hub.models.ImageClassifier,
        folder,
        load_weights=False,
        num_classes=3,
        preprocessor=None,
        image_shape=(32, 32, 3),
    )
    positions = next(variable for path, variable in resized.items() if "position" in path)
    assert positions.shape[0] == 65  # 8 × 8 patches and the class token


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_takes_what_its_signature_says(cls: Any) -> None:
    names, all_known = _keywords.taken_names(_keywords.constructors(cls))
    assert all_known
    named = {
        name
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name != "self" and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    assert named <= names
    assert not {"mseh", "maxhostmemory", "lora", "repair", "mesh", "quantise"} & names


@pytest.mark.parametrize("name", BACKBONES)
def test_every_key_of_a_configuration_is_taken(name: str) -> None:
    cls, config = BACKBONES[name]
    given = {**config, **cls(**config).get_config()}
    _keywords.check_constructor(cls, given)
    assert set(lm.build_abstract(cls, **config))


def test_names_that_are_looked_for_in_kwargs() -> None:
    """EfficientNet takes two of its former names out of its `**kwargs`."""
    names, _ = _keywords.taken_names(_keywords.constructors(keras_hub.models.EfficientNetBackbone))
    assert {"depth_coefficient", "width_coefficient"} <= names
    assert _upstream.backbone_keywords() == {"dtype", "image_shape"}


def test_constructors_and_methods_that_are_built_abstractly(preset: str) -> None:
    with pytest.raises(lm.LazyModelError, match=r"GemmaBackbone takes no argument 'num_layer'.*closest: 'num_layers'"):
        lm.build_abstract(GEMMA_BACKBONE, **GEMMA, num_layer=3)
    with pytest.raises(lm.LazyModelError, match=r"takes no argument 'mesh'.*argument of lazymodel_keras.from_preset"):
        lm.build_abstract(GEMMA_BACKBONE.from_preset, preset, mesh=3)
    with lk.deferred(), pytest.raises(lm.LazyModelError, match=r"no argument 'mesh'.*lazymodel_keras.deferred"):
        GEMMA_BACKBONE.from_preset(preset, mesh=3)
    with lk.deferred(), pytest.raises(lm.LazyModelError, match="no argument 'num_layer'"):
        GEMMA_BACKBONE.from_preset(preset, num_layer=3)


class Mine(GEMMA_BACKBONE):
    """A class of a user's, which does with its keyword arguments what nobody can know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.found = kwargs.pop(f"rules_{'file'}", None)
        super().__init__(*args, **kwargs)


def test_of_other_classes_only_typos_of_ours_are_errors(preset: str) -> None:
    assert lm.build_abstract(Mine, **GEMMA, rules_file="x").framework.result.found == "x"
    ours = {"rules": "", "mesh": ""}
    _keywords.check_from_preset(Mine, preset, ["rules_file"], ours)
    with pytest.raises(lm.LazyModelError, match=r"no argument 'mseh'.*closest: 'mesh'"):
        _keywords.check_from_preset(Mine, "nowhere", ["mseh"], ours)


@pytest.mark.parametrize("given", ["GemmaBackbone", "keras_hub.models.GemmaBackbone", "GemaBackbone", 3, int])
def test_no_class(given: Any, preset: str) -> None:
    expected = "GemmaBackbone" if isinstance(given, str) else "has from_preset"
    for load in (lk.from_preset, lk.abstract_from_preset):
        with pytest.raises(lm.LazyModelError, match=f"expected a KerasHub class.*got .*: pass .*{expected}"):
            load(given, preset)


def test_an_instance_is_no_class(preset: str) -> None:
    with pytest.raises(lm.LazyModelError, match="pass its class, Sequential|has from_preset"):
        lk.from_preset(keras.Sequential(), preset)
    with pytest.raises(lm.LazyModelError, match="pass its class, GemmaBackbone"):
        lk.from_preset(GEMMA_BACKBONE(**GEMMA), preset)


def test_build_abstract_of_a_name() -> None:
    with pytest.raises(lm.LazyModelError, match="got the string 'GemmaBackbone'.*class or function itself"):
        lm.build_abstract("GemmaBackbone", **GEMMA)  # pyright: ignore[reportArgumentType]


def test_repair_and_large(preset: str, mesh8: Mesh) -> None:
    """The errors of rules that do not fit advise them."""
    rules = {".*token_embedding/embeddings": P("model"), ".*query/kernel": P(None, None, "model")}  # 4 by 8
    with pytest.raises(lm.ShardingError, match="repair=True"):
        lk.from_preset(GEMMA_BACKBONE, preset, mesh=mesh8, rules=rules)
    with pytest.raises(lm.LazyModelError, match="no argument 'repair'; it is an argument of AbstractModel.shard"):
        lk.from_preset(GEMMA_BACKBONE, preset, mesh=mesh8, rules=rules, repair=True)
    stock = seeded(lambda: GEMMA_BACKBONE.from_preset(preset))
    for large in ("1KiB", "1MiB"):
        options: dict[str, Any] = {"repair": True, "large": large}
        abstract = seeded(lambda: lk.abstract_from_preset(GEMMA_BACKBONE, preset)).shard(mesh8, rules, **options)
        ours = abstract.materialize()
        assert_same(stock, ours)
        with lk.deferred(mesh=mesh8, rules=rules, **options):
            deferred = GEMMA_BACKBONE.from_preset(preset)
        for path, variable in zip(abstract, ours.weights, strict=True):
            assert variable.value.sharding == abstract[path].sharding
        for one, other in zip(ours.weights, deferred.weights, strict=True):
            assert one.value.sharding == other.value.sharding
        mended = [v for v in abstract.values() if v.reason is not None and v.reason.kind == "repaired"]
        assert len(mended) > (4 if large == "1KiB" else 1)
        assert all("query/kernel" in v.path for v in mended) == (large == "1MiB")


def test_repair_without_a_mesh() -> None:
    with pytest.raises(lm.ShardingError, match="repair was given without mesh"), lk.deferred(repair=True):
        pass


def test_load_model_takes_rules_as_from_preset_does(tmp_path: Path, mesh8: Mesh) -> None:
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, name="first")])
    model.save(tmp_path / "model.keras")
    with pytest.raises(lm.ShardingError, match=r"'\.\*/second/kernel'"):
        lk.load_model(tmp_path / "model.keras", mesh=mesh8, rules={".*first/kernel": None, ".*/second/kernel": None})
    with pytest.raises(lm.ShardingError, match="repair=True"):
        lk.load_model(tmp_path / "model.keras", mesh=mesh8, rules={".*first/kernel": P(("model",), "model")})
    loaded = lk.load_model(
        *(tmp_path / "model.keras",), mesh=mesh8, rules={".*first/kernel": P("nothing")}, repair=True, large=1
    )
    assert_same(model, loaded)

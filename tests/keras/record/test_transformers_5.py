"""Folders of transformers 5, which names keys and tensors otherwise than KerasHub's converters expect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import jax
import keras_hub
import numpy as np
import pytest
from keras_hub.src.utils.transformers import convert_roberta  # what a newer KerasHub changes; not exported
from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader  # likewise
from safetensors.numpy import load_file, save_file

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel_keras._record.transformers_5 import other_names, with_expected_keys
from tests.keras import transformers_folders
from tests.keras.models import EXPERTS, assert_same, decoder, save_hugging_face, seeded
from tests.keras.transformers_folders import FOLDERS
from tests.keras.versions import needs_keras_hub
from tests.large import mostly_large

M: Any = keras_hub.models
Config = dict[str, Any]

pytestmark = [
    needs_keras_hub("0.32", "the converters whose names are in the tables"),
    pytest.mark.filterwarnings("ignore:(?s).*:UserWarning:keras"),
]

_BART = {
    "model_type": "bart", "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 16, "architectures": ["BartModel"],
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"]
_GEMMA4 = {"model_type": "gemma4_text", "layer_types": _KINDS, "head_dim": 8, "num_key_value_heads": 4}
_PHI3 = {"model_type": "phi3", "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}
# A configuration of transformers 5, and the keys that it gets.
KEYS: list[tuple[Config, Config]] = [
    ({"model_type": "qwen3_moe", "num_local_experts": 4}, {"num_experts": 4}),
    (_BART, {"num_hidden_layers": 2}),
    ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, {"id2label": _LABELS}),
    ({"model_type": "vit", "architectures": ["ViTModel"]}, {}),
    ({**_GEMMA4, "per_layer_config": {"1": {"head_dim": 16}}}, {"global_head_dim": 16}),
    (
        {**_GEMMA4, "attention_k_eq_v": True, "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 2}}},
        {"global_head_dim": 16, "num_global_key_value_heads": 2},
    ),
    ({**_GEMMA4, "attention_k_eq_v": True}, {"num_global_key_value_heads": 4}),
    (_PHI3, {"rope_theta": 5.0}),
    ({"model_type": "llama", "num_local_experts": 4}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "more"), KEYS, ids=[f"{c['model_type']}-{'-'.join(m)}" for c, m in KEYS])
def test_keys_are_added(config: Config, more: Config) -> None:
    """Also in a nested configuration; a key that is there stays as it is."""
    assert with_expected_keys(config, "config.json") == {**config, **more}
    nested = {"model_type": "other", "text_config": config}
    assert with_expected_keys(nested, "config.json") == {**nested, "text_config": {**config, **more}}
    for key in more:
        if key not in ("global_head_dim", "num_global_key_value_heads"):
            assert with_expected_keys({**config, key: "own"}, "config.json")[key] == "own"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama", "per_layer_config": {"1": {"head_dim": 16}}}, "layer 1 a head_dim of 16"),
        ({**_GEMMA4, "per_layer_config": {"0": {"head_dim": 16}}}, "layer 0 a head_dim of 16"),
        ({**_GEMMA4, "per_layer_config": {"1": {"head_dim": 16, "hidden_size": 3}}}, "layer 1 a hidden_size of 3"),
        (
            {**_GEMMA4, "layer_types": _KINDS * 2, "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 4}}},
            "layer 1 a head_dim of 16",
        ),
    ],
)
def test_layers_that_differ(config: Config, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(lm.CheckpointError, match=rf"config\.json of .*per_layer_config gives {said}"):
        lk.abstract_from_preset(M.Backbone, str(tmp_path), load_weights=False)


def test_a_plan_takes_the_configuration(tmp_path: Path, command: Any) -> None:
    config = decoder("qwen3_moe", head_dim=8, sliding_window=None, **EXPERTS)
    config["num_local_experts"] = config.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, err = command("plan", str(tmp_path / "config.json"), "--json")
    assert (status, err) == (0, "") and json.loads(out)["variables"]


def _renamed(folder: Path, pattern: str, new: str) -> dict[str, np.ndarray]:
    """Renames tensors of a folder; returns them by their new names."""

    def renamed(found: Any) -> dict[str, Any]:
        return {re.sub(pattern, new, name): value for name, value in found.items()}

    tensors = dict[str, np.ndarray]()
    for file in folder.glob("*.safetensors"):
        save_file(found := renamed(load_file(file)), file)
        tensors |= found
    for file in folder.glob("*.index.json"):
        file.write_text(json.dumps({"weight_map": renamed(json.loads(file.read_text())["weight_map"])}))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_without_a_head(shards: int, tmp_path: Path) -> None:
    cls, folder = M.ViTBackbone, save_hugging_face(tmp_path / "vit", "vit", shards=shards)
    expected = seeded(lambda: lk.from_preset(cls, str(folder)))
    bare = _renamed(folder, r"^vit\.", "")
    assert not any(name.startswith("vit.") for name in bare)
    assert_same(expected, seeded(lambda: lk.from_preset(cls, str(folder))), outputs=False)
    _renamed(folder, r"^layernorm\.weight$", "elsewhere")
    with pytest.raises(lm.CheckpointError, match=r"(?:has no tensor|there is no) 'vit\.layernorm\.weight'"):
        lk.from_preset(cls, str(folder))


def test_the_expected_name_comes_first(tmp_path: Path) -> None:
    cls, folder = M.ViTBackbone, save_hugging_face(tmp_path / "vit", "vit")
    expected = seeded(lambda: lk.from_preset(cls, str(folder)))
    tensors = load_file(folder / "model.safetensors")
    others = {name.removeprefix("vit."): value + 1 for name, value in tensors.items()}
    save_file({**others, **tensors}, folder / "model.safetensors")
    with pytest.warns(lm.LazyModelWarning, match="did not request"):
        model = seeded(lambda: lk.from_preset(cls, str(folder), strict=False))
    assert_same(expected, model, outputs=False)


_LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
_ESM = {
    "vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32,
    "hidden_dropout_prob": 0.0, "position_embedding_type": "rotary", "pad_token_id": 1, "max_position_embeddings": 16,
    "token_dropout": False, "model_type": "esm", "architectures": ["EsmModel"],
}  # fmt: skip
_PHI = decoder("phi3", hidden_act="silu", max_position_embeddings=64, original_max_position_embeddings=16)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (_PHI, ""),
        ({**_PHI, "rope_scaling": {"type": "su", **_LONG}}, ""),
        ({**_PHI, "rope_parameters": {"rope_type": "longrope", "rope_theta": 5.0, **_LONG}, "rope_theta": None}, ""),
        (
            {**_PHI, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type is 'linear', the model has 'default'",
        ),
        ({**_PHI, "sliding_window": 8}, "sliding_window is '8, 8', the model has 'full, full'"),
        ({**_PHI, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, the model has 1.0"),
        ({**_PHI, "hidden_act": "relu"}, "hidden_act is 'relu', the model has 'silu'"),
        (_ESM, ""),
        ({**_ESM, "token_dropout": True}, "token_dropout is True, the model has False"),
        ({**_ESM, "position_embedding_type": "absolute"}, "is 'absolute', the model has 'absolute, begun a row early'"),
    ],
)
def test_what_the_class_does_not_compute(config: Config, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if said:
        with pytest.raises(lm.CheckpointError, match=re.escape(said)):
            lk.abstract_from_preset(M.Backbone, str(tmp_path), load_weights=False)
    else:
        assert lk.abstract_from_preset(M.Backbone, str(tmp_path), load_weights=False)


def test_a_converter_of_a_newer_kerashub_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = TransformersPresetLoader.__init__

    def newer(self: Any, preset: str, config: Config) -> None:
        own(self, preset, {**config, "model_type": "llama"} if config["model_type"] == "phi3" else config)

    (tmp_path / "config.json").write_text(json.dumps(_PHI))

    def built() -> type:
        framework: Any = lk.abstract_from_preset(M.Backbone, str(tmp_path), load_weights=False).framework
        return type(framework.result)

    assert built() is M.Phi3Backbone
    monkeypatch.setattr(TransformersPresetLoader, "__init__", newer)
    assert built() is M.Llama3Backbone


@pytest.mark.large
@pytest.mark.parametrize("name", ["RoBERTa"])
def test_a_newer_kerashub_adds_the_token_type(name: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[lm.LoadReport] = []

    def positions() -> np.ndarray:
        model = lk.from_preset(M.RobertaBackbone, str(made / name), report=reports.append)
        return np.asarray(model.embeddings.position_embedding.position_embeddings)

    tensors = load_file(made / name / "model.safetensors")
    table, rows = (tensors[f"roberta.embeddings.{of}_embeddings.weight"] for of in ("position", "token_type"))
    np.testing.assert_array_equal(positions(), table[2:] + rows[0])
    (note,) = reports[-1].notes
    assert note.startswith("embeddings.token_type_embeddings.weight was added")
    own = convert_roberta.convert_weights

    def newer(backbone: Any, loader: Any, config: Config) -> None:
        own(backbone, loader, config)
        variable = backbone.embeddings.position_embedding.position_embeddings
        variable.assign(variable + loader.get_tensor("roberta.embeddings.token_type_embeddings.weight")[0])

    monkeypatch.setattr(convert_roberta, "convert_weights", newer)
    np.testing.assert_array_equal(positions(), table[2:] + rows[0])
    assert reports[-1].notes == ()


def test_other_names() -> None:
    assert [*other_names("vision_tower.vision_model.head.x")] == ["vision_tower.head.x"]
    assert [*other_names("encoder.layer.0.LayerNorm.weight")] == ["encoder.layer.0.LayerNorm.gamma"]
    assert [*other_names("model.language_model.norm.weight")] == ["model.norm.weight", "language_model.norm.weight"]
    assert [*other_names("pooler.dense.weight")] == []


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After loading, KerasHub itself is as before."""
    folder = save_hugging_face(tmp_path / "vit", "vit")
    _renamed(folder, r"^vit\.", "")
    lk.from_preset(M.ViTBackbone, str(folder))
    with pytest.raises(Exception, match=r"vit\.embeddings"):
        M.ViTBackbone.from_preset(str(folder))


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of the tests that run."""
    pytest.importorskip("transformers", reason="needs transformers and torch, which make the original models")
    out = tmp_path_factory.mktemp("transformers_5")
    own: list[Any] = [item for item in request.session.items if cast(Any, item).module is request.module]
    items = [item for item in own if "made" in item.fixturenames]
    transformers_folders.write_all(out, list(dict.fromkeys(item.callspec.params["name"] for item in items)))
    return out


@pytest.mark.parametrize("name", mostly_large(FOLDERS, ["Qwen3-MoE", "PaliGemma"]))
def test_outputs_of_transformers(name: str, made: Path, command: Any) -> None:
    """The model computes what transformers computes, or there is an error; and it can be planned."""
    folder, path = FOLDERS[name], made / name
    assert command("plan", str(path / "config.json"), "--json").status == 0
    cls = getattr(M, folder.cls)
    if folder.said:
        with pytest.raises(lm.CheckpointError, match=re.escape(folder.said)):
            lk.from_preset(cls, str(path), **folder.load)
        return
    with jax.default_matmul_precision("highest"):
        model = lk.from_preset(cls, str(path), **folder.load)
        assert transformers_folders.apart(model, path) < folder.near


@pytest.mark.large
@pytest.mark.parametrize("name", FOLDERS)
def test_the_table(name: str, made: Path) -> None:
    """The page has the same errors; what it says of our model is within its bound."""
    lines = [line for line in transformers_folders.PAGE.read_text().splitlines() if line.startswith(f"| {name} | ")]
    with jax.default_matmul_precision("highest"):
        rows = transformers_folders.row(name, made), *lines
    ours, stock = zip(*map(transformers_folders.cells, rows), strict=True)
    for found, stated in (ours, stock):
        if ":" in found + stated:
            assert found == stated
        else:
            assert (float(found) < FOLDERS[name].near) == (float(stated) < FOLDERS[name].near)
    assert FOLDERS[name].said or float(ours[1]) < FOLDERS[name].near

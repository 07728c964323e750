"""Quantized Hugging Face folders as KerasHub models: what loading the plain folder gives, and nothing guessed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel.checkpoints import SafetensorsFile
from lazymodel_keras._record.files import open_decoded
from tests.large import mostly_large
from tests.quantized import FORMS, Form, quantized, settings, write_folder
from tests.servers.object_server import ObjectServer

from .models import EXPERTS, assert_same_values, decoder, decoder_shapes, random_tensors
from .models import refused as refused_load

LAYERS, HIDDEN, INNER = 3, 64, 128
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (keras_hub.models.Llama3Backbone, {}),
    "qwen3": (keras_hub.models.Qwen3Backbone, {"use_sliding_window": False, "sliding_window": None}),
    "qwen3_moe": (
        keras_hub.models.Qwen3MoeBackbone,
        {"use_sliding_window": False, "sliding_window": None, **EXPERTS, "moe_intermediate_size": INNER},
    ),
}
RULES = {
    ".*(query|key|value|feedforward_gate_dense|feedforward_intermediate_dense)/kernel": P(None, "model"),
    ".*(attention_output|feedforward_output_dense)/kernel": P("model"),
    ".*expert_feedforward_gate_dense": P(None, None, "model"),
    ".*expert_feedforward_output_dense": P(None, "model"),
    ".*embeddings": P("model"),
}


def folders(folder: Path, kind: str, form: Form, *, shards: int = 1) -> tuple[str, str]:
    """A quantized folder, and one with what its weights stand for."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 8}
    config = settings(form, **decoder(kind, **sizes, num_key_value_heads=8, **MODELS[kind][1]))
    tensors = random_tensors(decoder_shapes(config))
    stored, plain = quantized(form, tensors, lambda module: module.endswith("_proj"))
    made = write_folder(folder / "quantized", config, stored, shards=shards)
    del config["quantization_config"]
    return str(made), str(write_folder(folder / "plain", config, plain))


def values(folder: str, kind: str, mesh: Mesh) -> tuple[list[Any], lm.LoadReport]:
    reports: list[lm.LoadReport] = []
    abstract = lk.abstract_from_preset(MODELS[kind][0], folder).shard(mesh, RULES, on_unmatched="auto")
    model = abstract.materialize(initialize="nothing", report=reports.append)
    return model.variables, reports[0]


CASES = [("llama", form) for form in FORMS if not form.endswith(("fbgemm", "-bf16", "tensor", "-fp8", "pack-8", "fp4"))]
OF_SOME_MODULES = (
    "gptq-dynamic",
    "gptq-dynamic-order",
    "auto-round",
    "auto-round-v2",
)  # says `up_proj` is as packed here
CASES = [case for case in CASES if case[1] not in OF_SOME_MODULES]
CASES += [("llama", "mxfp4"), ("qwen3", "fp8-block"), ("qwen3_moe", "fp8-block"), ("qwen3_moe", "awq")]
# A form each of floats, integers, packed rows and packed columns; `tests/extras/quantized` has all of them.
SOME = [("llama", form) for form in ("int-quantized", "pack-4-zero", "nf4-nested")] + [
    ("qwen3_moe", form) for form in ("fp8-block", "awq")
]


@pytest.mark.parametrize(("kind", "form"), mostly_large(CASES, SOME))
def test_is_what_the_plain_folder_gives(kind: str, form: str, mesh8: Mesh, tmp_path: Path) -> None:
    made, plain = folders(tmp_path, kind, FORMS[form], shards=2)
    found, report = values(made, kind, mesh8)
    expected, _ = values(plain, kind, mesh8)
    assert_same_values(expected, found)
    # A word of HQQ's has numbers of distant rows: each device that has some of them reads it.
    most = mesh8.size if form.startswith("hqq") else 1.02
    assert report.read_nbytes <= most * sum(file.stat().st_size for file in Path(made).glob("*.safetensors"))


@pytest.mark.parametrize("form", [None, "mlx-4"])
def test_experts_that_mlx_joined(form: str | None, mesh8: Mesh, tmp_path: Path) -> None:
    """As mlx-lm's `convert` writes them: `switch_mlp`, quantized or not, and an index."""
    made, plain = folders(tmp_path, "qwen3_moe", FORMS[form or "mlx-4"])
    with SafetensorsFile(f"{made if form else plain}/model.safetensors") as file:
        stored = {name: file[name].read() for name in file}
    joined: dict[str, list[np.ndarray]] = {}
    for name in [name for name in stored if ".experts." in name]:
        joined.setdefault(re.sub(r"experts\.\d+", "switch_mlp", name), []).append(stored.pop(name))
    stored |= {name: np.stack(arrays) for name, arrays in joined.items()}
    config = json.loads(Path(made if form else plain, "config.json").read_text())
    folder = write_folder(tmp_path / "mlx", config, stored, shards=2)
    found, report = values(str(folder), "qwen3_moe", mesh8)
    assert_same_values(values(plain, "qwen3_moe", mesh8)[0], found)
    assert report.read_nbytes <= 1.02 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama", [], {}, None])
def test_a_plain_folder_is_not_decoded(kind: Any, tmp_path: Path) -> None:
    """Whatever a configuration has as the kind of model; and no file of it stays open."""
    folder = write_folder(tmp_path / "plain", {"model_type": kind}, {"w": np.ones((2, 2), np.float32)})
    assert open_decoded(str(folder / "model.safetensors")) is None
    assert not [file for file in Path("/proc/self/fd").iterdir() if str(folder) in os.path.realpath(file)]


Q = "model.layers.1.self_attn.q_proj"


def refused(folder: str) -> str:
    return refused_load(lk.abstract_from_preset, MODELS["llama"][0], folder, strict=False, cast="unsafe")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stored, _: stored.pop(f"{Q}.weight_scale_inv"), f"'{Q}.weight' (float8_e4m3fn)"),
        (lambda stored, _: stored.update({f"{Q}.g_idx": np.zeros(64, np.int32)}), f"'{Q}.g_idx' (int32)"),
        (lambda stored, _: stored.update({f"{Q}.weight_scale_inv": np.ones((4, 4), np.float32)}), "block of [24, 16]"),
        (lambda _, config: config.update(modules_to_not_convert=["self_attn.q_proj"]), "as not converted"),
        (lambda _, config: config.update(quant_method="sparse"), "quantized with 'sparse'"),
    ],
)
def test_what_is_not_understood_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    made, _ = folders(tmp_path, "llama", FORMS["fp8-block"])
    with SafetensorsFile(f"{made}/model.safetensors") as file:
        stored = {name: file[name].read() for name in file}
    config = json.loads(Path(made, "config.json").read_text())
    change(stored, config["quantization_config"])
    save_file(stored, f"{made}/model.safetensors")
    Path(made, "config.json").write_text(json.dumps(config))
    assert words in refused(made)
    assert words in refused_load(lm.open_checkpoint, made)


def test_at_a_url(object_server: ObjectServer) -> None:
    made, plain = folders(object_server.root / "quantized", "llama", FORMS["pack-4-zero"], shards=2)
    url = object_server.url("quantized/quantized")
    with lm.open_checkpoint(url) as ours, lm.open_checkpoint(plain) as expected:
        assert sorted(ours) == sorted(expected)
        np.testing.assert_array_equal(ours[f"{Q}.weight"].read(), expected[f"{Q}.weight"].read())
    abstract = lk.abstract_from_preset(MODELS["llama"][0], url)
    stock = lk.from_preset(MODELS["llama"][0], plain)
    assert_same_values(stock.variables, abstract.materialize().variables)
    config = Path(made, "config.json")
    config.write_text(config.read_text().replace("pack-quantized", "marlin-24"))
    assert "found 'marlin-24'" in refused(object_server.url("quantized/quantized"))


def test_what_is_left_of_a_quantized_folder(tmp_path: Path) -> None:
    """Of layers that the configuration lacks, in shards that nobody opened: under their plain names."""
    made, _ = folders(tmp_path, "llama", FORMS["awq"], shards=40)
    config = Path(made, "config.json")
    config.write_text(config.read_text().replace(f'"num_hidden_layers": {LAYERS}', '"num_hidden_layers": 1'))
    with pytest.warns(lm.LazyModelWarning, match=r"holds 18 tensors .* model\.layers\.1\."):
        abstract = lk.abstract_from_preset(MODELS["llama"][0], made, strict=False)
    assert len(abstract.unused) == 18
    assert f"{Q}.weight" in [tensor.name for tensor in abstract.unused]


@pytest.mark.parametrize("form", ["fp8-block", "pack-4-zero", "awq"])
def test_its_recorded_table_is_that_of_the_plain_folder(form: str, tmp_path: Path) -> None:
    made, plain = folders(tmp_path, "llama", FORMS[form])
    tables = [lm.WeightMap.recorded(lk.abstract_from_preset(MODELS["llama"][0], folder)) for folder in (made, plain)]
    assert str(tables[0]) == str(tables[1])
    assert "self_attn.q_proj.weight" in str(tables[0])

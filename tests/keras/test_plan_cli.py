"""`lazymodel plan` of KerasHub presets, Hugging Face folders and bare configurations; forward passes and training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras_hub
import pytest

import lazymodel as lm
from lazymodel_keras import adapter

from .models import preset_of

# Gemma2 in small, with the keys of a Hugging Face configuration.
GEMMA2 = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    "sliding_window": 4096,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "gemma2.json"
    path.write_text(json.dumps(GEMMA2))
    return str(path)


@pytest.fixture
def plan(command: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """What `lazymodel plan --json` prints, with no word besides."""

    def run(*arguments: str, status: int = 0) -> dict[str, Any]:
        ended = command("plan", *arguments, "--json")
        assert (ended.status, ended.err) == (status, "")
        return json.loads(ended.out)

    return run


def test_a_bare_configuration(config: str, plan: Callable[..., Any]) -> None:
    found = plan(config, "--mesh", "model=8", "--dtype", "bfloat16")
    paths = {row["path"]: row for row in found["variables"]}
    assert paths["token_embedding/embeddings"]["shape"] == [512, 64]
    assert {row["action"] for row in found["variables"]} == {"initialize"}
    assert {row["dtype"] for row in found["variables"]} == {"bfloat16"}
    assert found["device_nbytes"] < sum(row["nbytes"] for row in found["variables"]) / 4
    whole = plan(config, "--class", "GemmaCausalLM", "--mesh", "model=8")
    assert whole["device_nbytes"] >= 2 * found["device_nbytes"]  # float32, unless something else is said


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_that_a_configuration_states(key: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GEMMA2, key: "bfloat16"}))
    for source in (path, tmp_path):
        status, out, err = command("plan", source, "--json")
        assert status == 0
        assert {row["dtype"] for row in json.loads(out)["variables"]} == {"bfloat16"}
        assert err.count("\n") == 1 and "bfloat16" in err and "float32" in err
    floats = json.loads(command("plan", path, "--dtype", "f32", "--json").out)
    assert floats["counted"] == {"parameters": "float32"}


# Llama 3 70B, as its config.json has it, but for 10 layers in place of 80.
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 10, "num_attention_heads": 64, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip


def test_training_a_large_model_on_eight_cards(tmp_path: Path, plan: Callable[..., Any]) -> None:
    """What seems to fit in bfloat16 does not with moments, master weights and activations as people train."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    options = (str(path), "--topology", "H100:8", "--device-memory", "11GiB", "--dtype", "bf16", "--optimizer", "adamw")
    (row,) = plan(*options)["rows"]  # without a mesh, the command looks for the best
    assert (row["verdict"], row["changes"]) == ("fits", {})
    options += ("--mesh", "model=8")
    found = plan(*options)
    parameters = 10_657_898_496 * 2 / 8
    assert found["fits"] and found["not_counted"] == ["activations"]
    assert found["counted"] == dict.fromkeys(("parameters", "optimizer state", "gradients"), "bfloat16")
    assert found["parts"]["parameters"] == pytest.approx(parameters, rel=1e-3)
    mixed = (*options, "--moments", "float32", "--master-weights", "fp32")
    found = plan(*mixed, status=1)
    assert found["parts"]["optimizer state"] == pytest.approx(6 * parameters, rel=1e-3)
    found = plan(*mixed, "--batch", "8", "--sequence", "4096", "--remat", "full", status=1)
    tokens, layer = 8 * 4096, 2 * (2 * 8192 + (8192 + 2 * 1024 + 8192 + 2 * 28672) / 8) + 4 * 4096 * 64 / 8
    expected = tokens * (10 * 8192 * 2 + layer + 128256 / 8 * 8)
    assert found["parts"]["activations"] == pytest.approx(expected, rel=1e-6)
    assert found["used_nbytes"] == pytest.approx(parameters * 8 + expected, rel=1e-3)
    assert found["counted"]["activations"] == "estimated" and found["not_counted"] == []


def test_a_preset_says_what_would_be_loaded(plan: Callable[..., Any]) -> None:
    folder = preset_of("gemma")
    found = plan(folder, "--mesh", "model=2")
    assert {row["action"] for row in found["variables"]} == {"load"}
    assert found["read_nbytes"] == sum(row["nbytes"] for row in found["variables"])
    assert plan(f"{folder}/config.json", "--mesh", "model=2")["read_nbytes"] == 0


def test_training_with_lora(config: str, plan: Callable[..., Any]) -> None:
    found = plan(config, "--mesh", "model=8", "--lora-rank", "4", "--optimizer", "adam")
    backbone = adapter.from_config(config).materialize()
    backbone.enable_lora(4)
    trainable = sum(v.value.nbytes for v in backbone.trainable_variables)
    assert 0 < found["parts"]["LoRA"] <= trainable
    one = plan(config, "--lora-rank", "4", "--optimizer", "adam")
    assert one["parts"]["LoRA"] == trainable == one["parts"]["gradients"]
    assert one["parts"]["optimizer state"] == 2 * trainable


def test_a_quantized_model(config: str, plan: Callable[..., Any]) -> None:
    """What is planned is the quantized model itself, whether there are weights or not."""
    options = ("--mesh", "model=8", "--quantize", "int8")
    found = plan(config, *options)
    paths = {row["path"]: row for row in found["variables"]}
    assert paths["token_embedding/embeddings"]["dtype"] == "int8"
    assert paths["token_embedding/embeddings_scale"]["shape"] == [512]
    assert found["read_nbytes"] == 0
    assert {row["action"] for row in found["variables"]} == {"initialize"}
    floats = plan(config, "--mesh", "model=8")
    assert found["device_nbytes"] < 0.3 * floats["device_nbytes"]
    train = plan(config, *options, "--lora-rank", "4", "--optimizer", "adam")
    assert "decoder_block_0/attention/query/lora_kernel_a" in {row["path"] for row in train["variables"]}

    folder = preset_of("gemma")
    found = plan(folder, *options)
    assert found["read_nbytes"] == plan(folder, "--mesh", "model=8")["read_nbytes"], "the float weights"
    assert {row["action"] for row in found["variables"]} == {"load"}


def test_forward_and_training_are_compiled(config: str, plan: Callable[..., Any]) -> None:
    options = ("--mesh", "data=2,model=4", "--class", "GemmaCausalLM", "--batch", "4", "--sequence", "32")
    forward = plan(config, *options, "--compile", "forward")
    logits = 4 * 32 * 512 * 4 // 2  # over two parts of the batch, at least those of one part of the vocabulary
    assert forward["compiled"]["output_nbytes"] >= logits // 4
    assert forward["notes"][-1].startswith("compiled forward pass: ")
    assert "4 × 32" in forward["notes"][-1]
    train = plan(config, *options, "--compile", "train", "--optimizer", "adam")
    assert train["compiled"]["argument_nbytes"] > 2.5 * forward["compiled"]["argument_nbytes"]
    assert train["compiled"]["alias_nbytes"] > 2.5 * forward["device_nbytes"]  # updated in place
    assert train["used_nbytes"] == sum(train["parts"].values()) == _peak(train["compiled"])


def _peak(compiled: dict[str, int]) -> int:
    held = compiled["argument_nbytes"] + compiled["output_nbytes"] - compiled["alias_nbytes"]
    return held + compiled["temporary_nbytes"] + compiled["code_nbytes"]


def test_images_have_a_size() -> None:
    abstract = lm.build_abstract(
        keras_hub.models.ResNetBackbone,
        input_conv_filters=[64], input_conv_kernel_sizes=[7], stackwise_num_filters=[64], stackwise_num_blocks=[1],
        stackwise_num_strides=[1], block_type="basic_block",
    )  # fmt: skip
    found = abstract.plan(compile=lm.Compile("forward", batch=2))
    assert "2 × 224 × 224 × 3" in found.notes[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a model's configuration"),
        ("{}", "is not a model's configuration"),
        ('{"model_type": "no_such_model"}', "no converter"),
        ('{"model_type": "gemma2"}', "vocab_size"),
        (json.dumps(GEMMA2 | {"vocab_size": "many"}), "gemma2.json"),
    ],
)
def test_configurations_that_are_none(config: str, command: Callable[..., Any], content: str, message: str) -> None:
    Path(config).write_text(content)
    status, out, err = command("plan", config)
    assert (status, out) == (2, "") and message in err
    assert "/tmp/tmp" not in err  # where the configuration was copied to


def test_wrong_names(config: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    for arguments, message in (
        ([config, "--class", "GemmaCausalLN"], "closest: 'GemmaCausalLM'"),
        ([config, "--cls", "GemmaCausalLN"], "'GemmaCausalLN'"),
        ([config, "--dtype", "bfloat17"], "'bfloat17'"),
        (["gemma2_9b_em"], "closest: 'gemma2_9b_en'"),
        ([tmp_path / "absent"], "does not exist"),
        ([tmp_path / "empty"], "has no config.json"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        ended = command("plan", *arguments)
        assert ended.status == 2 and message in ended.err

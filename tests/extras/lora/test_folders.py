"""Adapters that PEFT saves, merged into folders that transformers saves: names and ties as in files, not in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazymodel as lm
from tests.large import mostly_large

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = SIZES | {"num_key_value_heads": 2, "vocab_size": 64}
VISION = SIZES | {"image_size": 28, "patch_size": 14}
EXPERTS = {"num_experts_per_tok": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
LLAVA = {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"}}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
QWEN_VISION = {"hidden_size": 32, "depth": 2, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
GEMMA_TOKENS = {"boi_token_index": 60, "eoi_token_index": 61, "image_token_index": 62, "mm_tokens_per_image": 4}


def model(name: str, config: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return build


llama = model("LlamaForCausalLM", "LlamaConfig", **TEXT)
tied = model("LlamaForCausalLM", "LlamaConfig", **TEXT, tie_word_embeddings=True)
mixtral = model("MixtralForCausalLM", "MixtralConfig", **TEXT, **EXPERTS, num_local_experts=4)
qwen_moe = model(
    "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **TEXT, **EXPERTS, num_experts=4, moe_intermediate_size=24, head_dim=8
)
gpt_oss = model("GptOssForCausalLM", "GptOssConfig", **TEXT, **EXPERTS, num_local_experts=4, head_dim=8)
t5 = model("T5ForConditionalGeneration", "T5Config", **T5)
gemma = model(
    "Gemma3ForConditionalGeneration",
    "Gemma3Config",
    text_config=TEXT | {"head_dim": 8},
    vision_config=VISION,
    **GEMMA_TOKENS,
)
llava = model("LlavaForConditionalGeneration", "LlavaConfig", **LLAVA, image_token_index=62)
qwen_vl = model(
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLConfig",
    text_config=TEXT | ROPE,
    vision_config=QWEN_VISION | {"patch_size": 14, "fullatt_block_indexes": [1]},
)
vit = model("ViTForImageClassification", "ViTConfig", **VISION, num_labels=3)

QV = ["q_proj", "v_proj"]
BOTH = ["embed_tokens", "lm_head"]
LANGUAGE: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {  # and the warning of `merge`
    "head saved": (tied, {"target_modules": QV, "modules_to_save": ["lm_head"]}, "changes them apart"),
    "embedding saved": (tied, {"target_modules": QV, "modules_to_save": ["embed_tokens"]}, "changes them apart"),
    "embedding saved and tied": (
        tied, {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, ""
    ),
    "both saved": (tied, {"target_modules": QV, "modules_to_save": BOTH}, "changes them apart"),
    "both saved, untied": (llama, {"target_modules": QV, "modules_to_save": BOTH}, ""),
    "head": (tied, {"target_modules": [*QV, "lm_head"]}, "changes them apart"),
    "embedding": (tied, {"target_modules": [*QV, "embed_tokens"]}, "changes them apart"),
    "embedding, tied": (tied, {"target_modules": [*QV, "embed_tokens"], "ensure_weight_tying": True}, ""),
    "tokens": (tied, {"target_modules": QV, "trainable_token_indices": [7, 1, 8]}, ""),
    "tokens of both": (
        llama, {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [2]}}, ""
    ),
    "shared": (t5, {"target_modules": ["q"], "modules_to_save": ["shared"]}, "leaves 'shared.weight' as it is"),
    "shared adapted": (t5, {"target_modules": ["q", "shared"]}, "leaves 'shared.weight' as it is"),
    "t5's head": (t5, {"target_modules": ["q"], "modules_to_save": ["lm_head"]}, "changes them apart"),
    "mixtral": (
        mixtral, {"target_modules": QV, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}, ""
    ),
    "mixtral's gate": (mixtral, {"target_modules": QV, "target_parameters": ["gate.weight", "down_proj"]}, ""),
    "qwen3-moe": (qwen_moe, {"target_modules": "all-linear"}, ""),  # ranks of experts differ
    "gpt-oss": (gpt_oss, {"target_modules": QV, "target_parameters": ["gate_up_proj"]}, ""),
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gemma3": (gemma, {"target_modules": "all-linear"}),
    "gemma3 projector": (gemma, {"target_modules": QV, "modules_to_save": ["multi_modal_projector"]}),
    "llava": (llava, {"target_modules": QV, "modules_to_save": ["multi_modal_projector"]}),
    "qwen2.5-vl": (qwen_vl, {"target_modules": "all-linear"}),
    "vit": (vit, {"target_modules": "all-linear", "modules_to_save": ["classifier"]}),
    "resized": (llama, {"target_modules": QV}),
    "resized and saved": (llama, {"target_modules": QV, "modules_to_save": BOTH}),
    "resized and tied": (tied, {"target_modules": QV}),
    "resized with tokens": (llama, {"target_modules": QV, "trainable_token_indices": [1, 66]}),
}


def tuned(build: Callable[[], Any], options: dict[str, Any], folder: Path, size: int | None = None) -> Any:
    """A model of PEFT with random numbers; its base and its adapter are in `folder`."""
    peft, torch, _ = (pytest.importorskip(package) for package in ("peft", "torch", "transformers"))
    torch.manual_seed(0)
    base = build()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    base.save_pretrained(folder / "base")
    base = type(base).from_pretrained(folder / "base")
    if size:
        base.resize_token_embeddings(size)
    found = peft.get_peft_model(base, peft.LoraConfig(r=4, **options))
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + 0.1)
    found.save_pretrained(folder / "adapter")
    base = type(base).from_pretrained(folder / "base")
    if size:
        base.resize_token_embeddings(size)
    return peft.PeftModel.from_pretrained(base, folder / "adapter").eval()


SOME = ("qwen3-moe", "gpt-oss", "shared adapted", "head saved", "t5's head", "embedding, tied", "tokens of both")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mostly_large(LANGUAGE, SOME))
def test_logits_are_those_of_the_model_that_was_trained(name: str, tmp_path: Path) -> None:
    build, options, warning = LANGUAGE[name]
    trained = tuned(build, options, tmp_path)
    with pytest.warns(lm.LazyModelWarning, match=warning) if warning else contextlib.nullcontext():
        merged = lm.merge(lm.open_checkpoint(tmp_path / "base"), lm.open_adapter(tmp_path / "adapter"))
    (tmp_path / "merged").mkdir()
    lm.save(merged, tmp_path / "merged" / "model.safetensors")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    if untied := "lm_head.weight" in merged:
        config["tie_word_embeddings"] = False  # as the warning says
    assert untied == ("lm_head.weight" in lm.open_checkpoint(tmp_path / "base") or "apart" in warning)
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config))
    import torch

    tokens = {"input_ids": torch.arange(1, 13)[None]}
    if build is t5:
        tokens["decoder_input_ids"] = tokens["input_ids"]
    with torch.no_grad():
        expected = trained(**tokens).logits.numpy()
        found = type(build()).from_pretrained(tmp_path / "merged").eval()(**tokens).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * expected.std())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mostly_large(OTHERS, ["llava", "resized with tokens", "vit", "resized and tied"]))
def test_files_are_those_that_peft_merges(name: str, tmp_path: Path) -> None:
    trained = tuned(*OTHERS[name], tmp_path, 70 if "resized" in name else None)
    merged = lm.merge(lm.open_checkpoint(tmp_path / "base"), lm.open_adapter(tmp_path / "adapter"))
    trained.merge_and_unload().save_pretrained(tmp_path / "theirs")
    expected = lm.open_checkpoint(tmp_path / "theirs")
    assert sorted(merged) == sorted(expected)
    for tensor, values in expected.items():
        np.testing.assert_allclose(merged[tensor].read(), values.read(), rtol=1e-5, atol=1e-5, err_msg=tensor)

"""Tiny models of every Hugging Face model type that KerasHub converts, as the `transformers` library makes them.

Names and shapes are those of the original project; the few names that newer versions of `transformers` write
differently from the checkpoints that people have are changed back. Run as a script it writes them all: PyTorch and
TensorFlow, which KerasHub imports, do not live in one process, so tests do that in a child process.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Original:
    """A tiny model of `transformers`.

    Attributes:
        architecture: Its class.
        config: What its configuration is made with.
        names: Pairs of a regex and its replacement, for tensors that checkpoints name differently.
        entries: What `config.json` has besides, as it is on the Hub.
        prepare: Run first.
        finish: Changes the tensors in place, where checkpoints store other ones.
        task: The name of the KerasHub task to load besides the backbone, where the converter has a head for it.
        files: Other weight files of the folder: path to tensors.
        since: The first version of KerasHub that converts it, if that is newer than the tested one.
    """

    architecture: str
    config: Config
    names: tuple[tuple[str, str], ...] = ()
    entries: Config = dataclasses.field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    finish: Callable[[Tensors], None] | None = None
    task: str = ""
    files: dict[str, Callable[[], Tensors]] = dataclasses.field(default_factory=dict)
    since: str = "0"


_WIDTH = 32
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": _WIDTH, "intermediate_size": 64}
_ENCODER = {**_SIZES, "vocab_size": 64, "max_position_embeddings": 16}
_DECODER = {
    **_SIZES, "vocab_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WIDE_HEADS = {**_DECODER, "head_dim": 8}
_WINDOW = {**_WIDE_HEADS, "sliding_window": 8}
_GEMMA3 = {**_WINDOW, "query_pre_attn_scalar": 8}  # the width of a head, as KerasHub computes
_IMAGE = {**_SIZES, "image_size": 16, "patch_size": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]
    },
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "in_channels": 3, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": _WIDTH, "num_position_embeddings": 16,
}  # fmt: skip
_OPT = {
    "model_type": "opt", "vocab_size": 64, "hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "ffn_dim": 64, "max_position_embeddings": 16, "word_embed_proj_dim": _WIDTH,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "vocab_size": 64, "d_model": _WIDTH, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64,
    "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_GEMMA4 = {
    **_WINDOW, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_GEMMA4_ENTRIES = {"global_head_dim": 16}
_GEMMA4_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 16, "position_embedding_size": 64,
}  # fmt: skip
_GEMMA4_AUDIO = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [128, 4],
    "output_proj_dims": 16,
}  # fmt: skip
_SIGLIP = (r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.")  # nested once more in checkpoints


def _normal(shape: tuple[int, ...], seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def _pack_experts(tensors: Tensors) -> None:
    """GPT-OSS stores its experts as MXFP4: blocks of 32 four-bit numbers in 16 bytes, and an exponent for each."""
    rng = np.random.default_rng(3)
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        experts, rows, columns = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, columns, rows // 32, 16)).astype("uint8")
        tensors[f"{name}_scales"] = rng.integers(120, 130, (experts, columns, rows // 32)).astype("uint8")


def _untie(tensors: Tensors) -> None:
    """Flan-T5 has an output projection of its own, which `transformers` 5 leaves out."""
    tensors["language_model.lm_head.weight"] = _normal(tensors["language_model.shared.weight"].shape, seed=4)


def _share_all_keys() -> None:
    """Lets every layer use the keys and values of another model, which `transformers` 5.23 refuses for an assistant."""
    from transformers import Gemma4TextConfig

    own: Any = Gemma4TextConfig.kv_sharing_modes

    def modes(config: Any) -> list[str | None]:
        layers = config.num_hidden_layers
        return ["reuse"] * layers if config.num_kv_shared_layers == layers else own.fget(config)

    Gemma4TextConfig.kv_sharing_modes = property(modes)


def _sam3() -> Config:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    layers = {**size, "num_layers": 1}
    return {
        "detector_config": {
            "model_type": "sam3",
            "vision_config": {
                "backbone_config": {
                    **size, "num_hidden_layers": 2, "image_size": 56, "patch_size": 14, "window_size": 2,
                    "global_attn_indexes": [1], "pretrain_image_size": 28, "model_type": "sam3_vit_model",
                },
                "fpn_hidden_size": 16, "scale_factors": [4.0, 2.0, 1.0, 0.5], "model_type": "sam3_vision_model",
            },
            "text_config": {
                **size, "model_type": "clip_text_model", "vocab_size": 64, "num_hidden_layers": 1, "projection_dim": 16,
                "max_position_embeddings": 32, "hidden_act": "gelu",
            },
            "geometry_encoder_config": {**layers, "roi_size": 3},
            "detr_encoder_config": layers,
            "detr_decoder_config": {**layers, "num_queries": 4},
            "mask_decoder_config": {"hidden_size": 16, "num_attention_heads": 2},
        }
    }  # fmt: skip


HUGGING_FACE: dict[str, Original] = {
    "albert": Original("AlbertForPreTraining", {**_ENCODER, "embedding_size": 16}),
    "bart": Original(
        "BartForConditionalGeneration",
        {
            "vocab_size": 64, "d_model": _WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 16,
        },
        entries={"num_hidden_layers": 2},
    ),
    "bert": Original("BertForPreTraining", _ENCODER),
    "blip-2": Original(
        "Blip2ForConditionalGeneration",
        {
            "vision_config": _IMAGE, "qformer_config": {**_ENCODER, "encoder_hidden_size": _WIDTH},
            "text_config": _OPT, "num_query_tokens": 4,
        },
    ),
    "blip-2 (T5)": Original(
        "Blip2ForConditionalGeneration",
        {
            "vision_config": _IMAGE, "qformer_config": {**_ENCODER, "encoder_hidden_size": _WIDTH}, "text_config": _T5,
            "num_query_tokens": 4,
        },
        finish=_untie,
    ),
    "deit": Original("DeiTForImageClassificationWithTeacher", {**_IMAGE, "num_labels": 5}, task="DeiTImageClassifier"),
    # Two layers of full attention: the converter takes their distance for the pattern.
    "diffusion_gemma": Original(
        "DiffusionGemmaForBlockDiffusion",
        {
            "text_config": {
                **_WINDOW, "global_head_dim": 16, "layer_types": ["full_attention"] * 2, "num_experts": 4,
                "top_k_experts": 2, "moe_intermediate_size": 16,
            },
            "vision_config": _GEMMA4_VISION,
        },
        entries={"text_config": {"final_logit_softcapping": 30.0}},
        task="DiffusionGemmaBlockDiffusionLM",
        since="0.33",
    ),
    "dinov2": Original("Dinov2Model", {**_IMAGE, "mlp_ratio": 2}),
    "dinov2_with_registers": Original("Dinov2WithRegistersModel", {**_IMAGE, "mlp_ratio": 2}),
    "dinov3_vit": Original("DINOv3ViTModel", _IMAGE),
    "distilbert": Original(
        "DistilBertForMaskedLM",
        {"vocab_size": 64, "n_layers": 2, "n_heads": 4, "dim": _WIDTH, "hidden_dim": 64, "max_position_embeddings": 16},
    ),
    "embedding_gemma2": Original(
        "EmbeddingGemma2Model",
        {
            "text_config": {
                **_WINDOW, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 8, "embedding_dim": 16,
            },
            "vision_config": _GEMMA4_VISION, "audio_config": _GEMMA4_AUDIO,
        },
        since="0.33",
    ),
    "esm": Original(
        "EsmForMaskedLM",
        {**_ENCODER, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 5},
        names=((r"LayerNorm\.gamma", "LayerNorm.weight"), (r"LayerNorm\.beta", "LayerNorm.bias")),
    ),
    "gemma": Original("GemmaForCausalLM", _WIDE_HEADS),
    "gemma2": Original("Gemma2ForCausalLM", {**_WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": Original(
        "Gemma3ForConditionalGeneration",
        {"text_config": _GEMMA3, "vision_config": _IMAGE, "mm_tokens_per_image": 1},
        names=(_SIGLIP,),
    ),
    "gemma3_text": Original("Gemma3ForCausalLM", _GEMMA3),
    # Its two last projections are in files of their own, which the converter opens itself.
    "gemma3_text (embedding)": Original(
        "Gemma3TextModel",
        {**_GEMMA3, "use_bidirectional_attention": True},
        files={
            "2_Dense": lambda: {"linear.weight": _normal((3072, _WIDTH))},
            "3_Dense": lambda: {"linear.weight": _normal((_WIDTH, 3072))},
        },
    ),
    "gemma4": Original(
        "Gemma4ForConditionalGeneration",
        {"text_config": _GEMMA4, "vision_config": _GEMMA4_VISION, "audio_config": _GEMMA4_AUDIO},
        entries={"text_config": _GEMMA4_ENTRIES},
    ),
    "gemma4_text": Original("Gemma4ForCausalLM", _GEMMA4, entries=_GEMMA4_ENTRIES),
    "gemma4_text (experts)": Original(
        "Gemma4ForCausalLM",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        entries=_GEMMA4_ENTRIES,
    ),
    "gemma4_assistant": Original(
        "Gemma4AssistantForCausalLM",
        {
            "text_config": {
                **_GEMMA4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2,
                "model_type": "gemma4_text",
            },
            "backbone_hidden_size": 16, "use_ordered_embeddings": True, "num_centroids": 8,
            "centroid_intermediate_top_k": 2,
        },
        prepare=_share_all_keys,
        entries={"text_config": _GEMMA4_ENTRIES},
        task="Gemma4AssistantCausalLM",
    ),
    "gpt2": Original("GPT2LMHeadModel", {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_oss": Original(
        "GptOssForCausalLM",
        {
            **_WINDOW, "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
            "layer_types": ["full_attention", "sliding_attention"],  # published ones begin with a window
        },
        finish=_pack_experts,
    ),
    "llama": Original("LlamaForCausalLM", _DECODER),
    "metaclip_2": Original(
        "MetaClip2Model",
        {
            "text_config": {**_ENCODER, "projection_dim": 16}, "vision_config": {**_IMAGE, "projection_dim": 16},
            "projection_dim": 16,
        },
    ),
    "mistral": Original("MistralForCausalLM", _DECODER),
    "mixtral": Original("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4, "sliding_window": 16}),
    "modernbert": Original(
        "ModernBertForMaskedLM",
        {**_ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        entries={"global_attn_every_n_layers": 3},
        task="ModernBertMaskedLM",
        since="0.33",
    ),
    "paligemma": Original(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**_WIDE_HEADS, "model_type": "gemma", "head_dim": 16},  # as many as image tokens
            "vision_config": {**_IMAGE, "model_type": "siglip_vision_model", "projection_dim": _WIDTH},
            "projection_dim": _WIDTH, "image_token_index": 64,
        },
        names=(_SIGLIP,),
    ),
    "qwen2": Original("Qwen2ForCausalLM", _DECODER),
    "qwen2_moe": Original("Qwen2MoeForCausalLM", {**_DECODER, **_SHARED_EXPERT}),
    "qwen3": Original("Qwen3ForCausalLM", _WIDE_HEADS),
    "qwen3_5": Original(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": {**_WIDE_HEADS, **_LINEAR}, "vision_config": _QWEN_VISION},
    ),
    "qwen3_5_moe": Original(
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": {**_WIDE_HEADS, **_LINEAR, **_SHARED_EXPERT}, "vision_config": _QWEN_VISION},
    ),
    "qwen3_moe": Original("Qwen3MoeForCausalLM", {**_WIDE_HEADS, **_EXPERTS}, entries={"num_experts": 4}),
    "roberta": Original("RobertaForMaskedLM", {**_ENCODER, "max_position_embeddings": 18}),
    "sam3_video": Original("Sam3VideoModel", _sam3()),
    "smollm3": Original("SmolLM3ForCausalLM", _DECODER),
    "swin": Original(
        "SwinForImageClassification",
        {
            "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
            "window_size": 4, "num_labels": 5,
        },
        task="SwinTransformerImageClassifier",
    ),
    "t5gemma": Original(
        "T5GemmaForConditionalGeneration",
        {
            "encoder": {**_WIDE_HEADS, "model_type": "t5_gemma_module"},
            "decoder": {**_WIDE_HEADS, "model_type": "t5_gemma_module"}, "vocab_size": 64,
        },
    ),
    "t5gemma2": Original(
        "T5Gemma2ForConditionalGeneration",
        {
            "encoder": {"text_config": _WIDE_HEADS, "vision_config": _IMAGE, "mm_tokens_per_image": 1},
            "decoder": _WIDE_HEADS,
        },
        names=(_SIGLIP,),
    ),
    "vit": Original("ViTForImageClassification", {**_IMAGE, "num_labels": 5}, task="ViTImageClassifier"),
    "xlm-roberta": Original("XLMRobertaForMaskedLM", {**_ENCODER, "max_position_embeddings": 18}),
}  # fmt: skip


def make(name: str) -> tuple[Config, Tensors]:
    """The `config.json` and the tensors of one of `HUGGING_FACE`, with random values in float32."""
    import torch
    import transformers

    original = HUGGING_FACE[name]
    if original.prepare is not None:
        original.prepare()
    # A configuration changes what it is given.
    config = transformers.AutoConfig.for_model(name.partition(" ")[0], **copy.deepcopy(original.config))
    model = getattr(transformers, original.architecture)(config)
    rng = np.random.default_rng(1)
    with torch.no_grad(), tempfile.TemporaryDirectory() as saved:
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.from_numpy(rng.standard_normal(tuple(tensor.shape)).astype("float32")))
        model.save_pretrained(saved)
        tensors = load_file(Path(saved) / "model.safetensors")
        entries = json.loads((Path(saved) / "config.json").read_text())
    for pattern, replacement in original.names:
        tensors = {re.sub(pattern, replacement, key): value for key, value in tensors.items()}
    if original.finish is not None:
        original.finish(tensors)
    return _merged(entries, original.entries), tensors


def _merged(entries: Config, more: Config) -> Config:
    return entries | {key: _merged(entries[key], new) if isinstance(new, dict) else new for key, new in more.items()}


def main(out: Path) -> None:
    """Writes every model into a folder of its own, and its other weight files with it."""
    for name, original in HUGGING_FACE.items():
        config, tensors = make(name)
        for path, more in {"": lambda tensors=tensors: tensors, **original.files}.items():
            folder = out / name / path
            folder.mkdir(parents=True)
            save_file(more(), folder / "model.safetensors")
        (out / name / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

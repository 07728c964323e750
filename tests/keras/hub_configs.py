"""A tiny model of every backbone and task class that the installed KerasHub exports, and the table of what works.

The errors in it are those of the newest KerasHub; classes that an older one does not have are left out of it.

`BACKBONES` and `TASKS` map a name to a `HubModel`. Towers (image encoders, text encoders, autoencoders) are built
inside `build`, so that building abstractly reaches them too. Classes that KerasHub exports under a second name stand
here once, under their own name. `exported` lists what has to be here; a test compares.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
from keras_hub.src.models.stable_diffusion_3.t5_encoder import T5Encoder  # a tower; not exported
from keras_hub.src.models.vae.vae_backbone import VAEBackbone  # a tower; not exported


class _Models:
    """`keras_hub.models`, with None for what an older version does not have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(keras_hub.models, name, None)


M: Any = _Models()
L: Any = keras_hub.layers

_LENGTH = 8  # of token sequences
_IMAGE = 32  # height and width where a model leaves them open
_VOCABULARY = 64


@dataclasses.dataclass(frozen=True)
class HubModel:
    """One tiny model.

    Attributes:
        name: Unique in its table: the class's name, with a remark in parentheses for a second configuration.
        cls: The KerasHub class.
        build: Returns an instance with freshly initialized weights.
        load: What `from_preset` needs besides the preset.
        build_error: A regex of the error with which stock KerasHub fails to build the model. Empty where it does not.
        load_error: The same for saving it as a preset and loading that again.
        reason: In words, why there is one of these errors.
    """

    name: str
    cls: Any
    build: Callable[[], Any]
    load: dict[str, Any] = dataclasses.field(default_factory=dict)
    build_error: str = ""
    load_error: str = ""
    reason: str = ""


BACKBONES: dict[str, HubModel] = {}
TASKS: dict[str, HubModel] = {}

# What a constructor's argument of this name is, in every class; what is left open by default stays open.
SIZES: dict[str, Any] = {
    "vocabulary_size": _VOCABULARY, "vocab_size": _VOCABULARY, "num_layers": 2, "encoder_num_layers": 2,
    "decoder_num_layers": 2, "num_heads": 2, "num_attention_heads": 4, "num_query_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "hidden_dim": 16, "hidden_size": 16, "intermediate_dim": 32, "embedding_dim": 8,
    "max_sequence_length": 16, "num_experts": 4, "top_k": 2, "moe_intermediate_dim": 8, "patch_size": 4,
    "image_size": 16, "image_shape": (16, 16, 3),
}  # fmt: skip
_OPEN = (None, 0, (None, None, 3))


def tiny(cls: Any, **own: Any) -> Any:
    """An instance of the sizes above, but for its own arguments."""
    defaults = {name: argument.default for name, argument in inspect.signature(cls.__init__).parameters.items()}
    return cls(**{name: size for name, size in SIZES.items() if defaults.get(name) not in _OPEN} | own)


def _backbone(
    cls: Any,
    towers: Callable[[], dict[str, Any]] = dict,
    /,
    *,
    remark: str = "",
    fields: dict[str, str] | None = None,
    **own: Any,
) -> None:
    """Adds a tiny backbone, if there is such a class; `towers` makes those of its own arguments that are models."""
    if cls is not None:
        name = f"{cls.__name__} ({remark})" if remark else cls.__name__
        BACKBONES[name] = HubModel(name, cls, lambda: tiny(cls, **own, **towers()), **fields or {})


# Encoders and decoders for text.

for _cls in (
    M.BartBackbone, M.BertBackbone, M.DistilBertBackbone, M.ESMBackbone, M.GPT2Backbone, M.GPTNeoXBackbone,
    M.OPTBackbone, M.RobertaBackbone, M.XLMRobertaBackbone, M.AlbertBackbone, M.BloomBackbone,
):  # fmt: skip
    _backbone(_cls)
_backbone(M.DebertaV3Backbone, bucket_size=4)
_backbone(M.EdRecBackbone, num_layers_enc=2, num_layers_dec=2)
_backbone(M.ElectraBackbone)
# XLA:CPU ends the process over a sharded FFT of which a device's part does not divide by the devices again.
_backbone(M.FNetBackbone, hidden_dim=64, intermediate_dim=128, max_sequence_length=_LENGTH)
_backbone(M.FalconBackbone, num_attention_heads=2)
_backbone(M.GemmaBackbone, use_post_ffw_norm=True, use_post_attention_norm=True)
_backbone(M.GptOssBackbone, sliding_window=4, head_dim=4)
_backbone(M.LlamaBackbone)
_backbone(M.Llama3Backbone)
_backbone(
    M.Llama3Backbone, tie_word_embeddings=True, remark="tied",
    fields={
        "load_error": "'token_embedding' expected 2 variables, but received 0",
        "reason": "`get_config` leaves out `tie_word_embeddings`",
    },
)  # fmt: skip
_backbone(M.MistralBackbone)
_backbone(M.MixtralBackbone)
_backbone(M.Phi3Backbone, pretraining_sequence_length=16)
_backbone(M.QwenBackbone)
_backbone(M.Qwen3Backbone)
_backbone(M.QwenMoeBackbone, shared_expert_intermediate_dim=16)
_backbone(M.Qwen3MoeBackbone, head_dim=4)
_QWEN3_5 = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
}  # fmt: skip
_backbone(M.Qwen3_5Backbone, **_QWEN3_5, remark="text")
_backbone(M.Qwen3_5MoeBackbone, **_QWEN3_5, shared_expert_intermediate_size=16)
_backbone(M.RoformerV2Backbone, head_size=8)
_backbone(M.RWKV7Backbone, head_size=8, gate_lora=8, mv_lora=4, aaa_lora=4, decay_lora=4)
_backbone(
    M.SmolLM3Backbone, attention_bias=False, attention_dropout=0.0, rope_layer_enabled_list=[True, False],
    layer_types=["attention"] * 2, mlp_bias=False, layer_norm_epsilon=1e-5, max_position_embeddings=16,
    rope_theta=10000.0, partial_rotary_factor=1.0,
)  # fmt: skip
_T5GEMMA = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 16, "intermediate_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    }.items()
} | {"sliding_window": 4}  # fmt: skip
_backbone(M.T5Backbone)
_backbone(M.T5GemmaBackbone, **_T5GEMMA)
_backbone(M.T5Gemma2Backbone, **_T5GEMMA, remark="text")
_backbone(M.XLNetBackbone)

# Images.

_RESNET = {
    "input_conv_filters": [64], "input_conv_kernel_sizes": [3], "stackwise_num_filters": [64, 8, 8, 8],
    "stackwise_num_blocks": [1, 1, 1, 1], "stackwise_num_strides": [1, 2, 2, 2], "block_type": "basic_block",
}  # fmt: skip
_SQUARE = (_IMAGE, _IMAGE, 3)
_MIT = {
    "num_layers": 4, "hidden_dims": [8, 16, 24, 32], "layerwise_depths": [1, 1, 1, 1],
    "layerwise_num_heads": [1, 1, 2, 2], "layerwise_sr_ratios": [8, 4, 2, 1], "layerwise_patch_sizes": [7, 3, 3, 3],
    "layerwise_strides": [4, 2, 2, 2], "max_drop_path_rate": 0.1, "image_shape": _SQUARE,
}  # fmt: skip
_HGNET = {
    "depths": [1, 1, 1, 1], "embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "stem_channels": [3, 8, 8],
    "hidden_act": "relu", "use_learnable_affine_block": True,
    # (channels in, between, out, blocks, layers, kernel) of each stage
    "stackwise_stage_filters": [(8, 8, 8, 1, 2, 3), (8, 8, 16, 1, 2, 3), (16, 8, 16, 1, 2, 3), (16, 8, 16, 1, 2, 3)],
    "apply_downsample": [False, True, True, True], "use_lightweight_conv_block": [False, False, True, True],
}  # fmt: skip


def _resnet(**changes: Any) -> Any:
    return M.ResNetBackbone(**{**_RESNET, **changes})


_backbone(
    M.BASNetBackbone, lambda: {"image_encoder": _resnet()}, num_classes=1, image_shape=(64, 64, 3),
    projection_filters=64,
)  # fmt: skip
_backbone(
    M.CSPNetBackbone, stem_filters=8, stem_kernel_size=3, stem_strides=1, stackwise_depth=[1, 1],
    stackwise_strides=[1, 2], stackwise_num_filters=[8, 16], block_type="dark_block", stage_type="csp",
    block_ratio=[0.5],
)  # fmt: skip
_STAGES = ["stage3", "stage4"]
_backbone(
    M.DFineBackbone,
    lambda: {"backbone": M.HGNetV2Backbone(**_HGNET, image_shape=(None, None, 3), out_features=_STAGES)},
    decoder_in_channels=[16, 16], encoder_hidden_dim=16, num_labels=4, num_denoising=0, learn_initial_query=False,
    num_queries=10, anchor_image_size=(64, 64), feat_strides=[16, 32], num_feature_levels=2,
    encoder_in_channels=[16, 16], encode_proj_layers=[1], num_attention_heads=2, encoder_ffn_dim=32,
    num_encoder_layers=1, hidden_expansion=0.5, depth_multiplier=0.5, eval_idx=-1, num_decoder_layers=2,
    decoder_attention_heads=2, decoder_ffn_dim=32, decoder_n_points=[3, 3], lqe_hidden_dim=8, num_lqe_layers=2,
    out_features=_STAGES, image_shape=(64, 64, 3), seed=0,
)  # fmt: skip
_backbone(M.DINOV2Backbone, position_embedding_shape=(24, 24, 3), num_register_tokens=2)
_backbone(M.DINOV3Backbone)
_backbone(
    M.DeepLabV3Backbone, lambda: {"image_encoder": _resnet()}, low_level_feature_key="P2",
    spatial_pyramid_pooling_key="P4", upsampling_size=4, dilation_rates=[2], projection_filters=8, image_shape=_SQUARE,
)  # fmt: skip
_backbone(M.DeiTBackbone)
_backbone(M.DenseNetBackbone, stackwise_num_repeats=[1, 1], growth_rate=4)
_backbone(
    M.DepthAnythingBackbone,
    lambda: {
        "image_encoder": tiny(
            M.DINOV2Backbone, num_layers=4, image_shape=_SQUARE, position_embedding_shape=(24, 24, 3)
        )
    },
    reassemble_factors=[4, 2, 1, 0.5], neck_hidden_dims=[8, 8, 16, 16], fusion_hidden_dim=8, head_hidden_dim=8,
    head_in_index=-1, feature_keys=["stage1", "stage2", "stage3", "stage4"],
)  # fmt: skip
_EFFICIENT_NET = {
    "stackwise_kernel_sizes": [3, 3], "stackwise_num_repeats": [1, 1], "stackwise_input_filters": [8, 8],
    "stackwise_output_filters": [8, 16], "stackwise_expansion_ratios": [1, 4],
    "stackwise_squeeze_and_excite_ratios": [0.0, 0.25], "stackwise_strides": [1, 2],
    "stackwise_block_types": ["fused", "unfused"], "stackwise_width_coefficients": [1.0, 1.0],
    "stackwise_depth_coefficients": [1.0, 1.0], "stackwise_force_input_filters": [0, 0],
    "stackwise_nores_option": [False, False], "input_shape": (None, None, 3),
}  # fmt: skip
_backbone(M.EfficientNetBackbone, **_EFFICIENT_NET)
_backbone(
    M.EfficientNetBackbone, **_EFFICIENT_NET, num_features=16, remark="narrow",
    fields={"load_error": "objects could not be loaded", "reason": "`get_config` leaves out `num_features`"},
)  # fmt: skip
# Of smaller images one point is left at the end, and XLA dies of a sharded depthwise convolution over all there is.
_backbone(M.HGNetV2Backbone, **_HGNET, image_shape=(2 * _IMAGE, 2 * _IMAGE, 3))
_backbone(M.MiTBackbone, **_MIT)
_backbone(
    M.MobileNetBackbone, stackwise_expansion=[[8], [16, 16]], stackwise_num_blocks=[1, 2],
    stackwise_num_filters=[[8], [8, 8]], stackwise_kernel_size=[[3], [5, 5]], stackwise_num_strides=[[2], [2, 1]],
    stackwise_se_ratio=[[None], [0.25, 0.25]], stackwise_activation=[["relu"], ["hard_swish"] * 2],
    stackwise_padding=[[1], [2, 2]], output_num_filters=16, depthwise_filters=8, depthwise_stride=2,
    depthwise_residual=False, last_layer_filter=16, squeeze_and_excite=0.5, image_shape=_SQUARE,
)  # fmt: skip
MOBILENET_V5 = {
    # Three stages: an edge residual, two inverted bottlenecks, and an inverted bottleneck with attention.
    "stackwise_block_types": [["er"], ["uir", "uir"], ["uir", "mqa"]], "stackwise_num_blocks": [1, 2, 2],
    "stackwise_num_filters": [[8], [16, 16], [16, 16]], "stackwise_strides": [[2], [2, 1], [2, 1]],
    "stackwise_act_layers": [["relu"], ["relu"] * 2, ["relu"] * 2],
    "stackwise_exp_ratios": [[4.0], [2.0, 2.0], [2.0, 1.0]], "stackwise_se_ratios": [[0.0], [0.0] * 2, [0.0] * 2],
    "stackwise_dw_kernel_sizes": [[0], [3, 3], [3, 3]], "stackwise_dw_start_kernel_sizes": [[0], [0, 0], [3, 0]],
    "stackwise_dw_end_kernel_sizes": [[0], [0, 0], [0, 0]], "stackwise_exp_kernel_sizes": [[3], [0, 0], [0, 0]],
    "stackwise_pw_kernel_sizes": [[1], [0, 0], [0, 0]], "stackwise_num_heads": [[0], [0, 0], [0, 2]],
    "stackwise_key_dims": [[0], [0, 0], [0, 8]], "stackwise_value_dims": [[0], [0, 0], [0, 8]],
    "stackwise_kv_strides": [[0], [0, 0], [0, 1]], "stackwise_use_cpe": [[False], [False] * 2, [False] * 2],
    "num_features": 16, "stem_size": 8, "image_shape": _SQUARE,
}  # fmt: skip
_backbone(M.MobileNetV5Backbone, **MOBILENET_V5, msfa_output_resolution=4)
_backbone(M.ResNetBackbone, **_RESNET | {"block_type": "bottleneck_block", "use_pre_activation": True})
_backbone(
    M.RetinaNetBackbone, lambda: {"image_encoder": _resnet(image_shape=(128, 128, 3))}, min_level=3, max_level=6,
    use_p5=False, image_shape=(128, 128, 3),
)  # fmt: skip
_backbone(M.SegFormerBackbone, lambda: {"image_encoder": M.MiTBackbone(**_MIT)}, projection_filters=8)
_backbone(M.SwinTransformerBackbone, image_shape=_SQUARE, embed_dim=8, depths=(1, 2), num_heads=(2, 2), window_size=4)
_backbone(M.VGGBackbone, stackwise_num_repeats=[1, 1], stackwise_num_filters=[8, 16])
_backbone(M.ViTBackbone, patch_size=(4, 4), mlp_dim=32)
_VIT_DET = {
    "global_attention_layer_indices": [1], "image_shape": (64, 64, 3), "patch_size": 8, "num_output_channels": 8,
    "window_size": 2,
}  # fmt: skip
_backbone(M.ViTDetBackbone, **_VIT_DET)
_backbone(M.XceptionBackbone, stackwise_conv_filters=[[8, 8], [16, 16]], stackwise_pooling=[True, False])

# Audio.

_backbone(
    M.MoonshineBackbone, filter_dim=16, encoder_num_heads=2, decoder_num_heads=2, max_position_embeddings=32,
)  # fmt: skip
_backbone(
    M.WhisperBackbone, num_mels=8, max_encoder_sequence_length=16, max_decoder_sequence_length=_LENGTH,
)  # fmt: skip

# Several modalities.


def _blip2() -> dict[str, Any]:
    vision = tiny(
        M.BLIP2VisionEncoder, use_patch_bias=True, use_class_token=True, use_mha_bias=True, use_mlp_bias=True,
        dropout_rate=0.0, layer_norm_epsilon=1e-6, initializer_range=0.02,
    )  # fmt: skip
    qformer = tiny(
        M.BLIP2QFormer, num_query_tokens=4, vision_dim=16, cross_attention_frequency=2, dropout=0.0,
        layer_norm_epsilon=1e-6,
    )  # fmt: skip
    return {"vision_encoder": vision, "qformer": qformer}


def _blip2_language(cls: Any, **own: Any) -> Any:
    return tiny(cls, num_query_tokens=4, qformer_hidden_dim=16, **own)


_backbone(M.BLIP2Backbone, lambda: {**_blip2(), "language_model": _blip2_language(M.BLIP2CustomOPT, dropout=0.0)})
_backbone(M.BLIP2Backbone, lambda: {**_blip2(), "language_model": _blip2_language(M.BLIP2FlanT5)}, remark="Flan-T5")
_TEXT = {"embedding_dim": 16, "max_sequence_length": _LENGTH}
for _both, _vision, _text, _own in (
    (M.CLIPBackbone, M.CLIPVisionEncoder, M.CLIPTextEncoder, {"projection_dim": 16}),
    (M.MetaCLIP2Backbone, M.MetaCLIP2VisionEncoder, M.MetaCLIP2TextEncoder, {"projection_dim": 16}),
    (M.SigLIPBackbone, M.SigLIPVisionEncoder, M.SigLIPTextEncoder, {}),
):
    _backbone(_text, **_TEXT)
    _backbone(_vision)

    def _towers(vision: Any = _vision, text: Any = _text) -> dict[str, Any]:
        text_encoder = tiny(text, **_TEXT, name="text_encoder")
        return {"vision_encoder": tiny(vision, name="vision_encoder"), "text_encoder": text_encoder}

    _backbone(_both, _towers, **_own)
_backbone(
    M.FluxBackbone, input_channels=8, mlp_ratio=2.0, depth=2, depth_single_blocks=2, axes_dim=[2, 2, 4], theta=10_000,
    use_bias=True, guidance_embed=True, image_shape=(_LENGTH, 8), text_shape=(_LENGTH, 16),
    image_ids_shape=(_LENGTH, 3), text_ids_shape=(_LENGTH, 3), y_shape=(16,),
)  # fmt: skip
_GEMMA3 = {"use_sliding_window_attention": True, "sliding_window_size": 4}
_backbone(M.Gemma3Backbone, **_GEMMA3, vision_encoder=None, remark="text")


def _gemma3_vision() -> dict[str, Any]:
    encoder = tiny(M.Gemma3VisionEncoder, hidden_dim=8, intermediate_dim=16, output_dim=16, pool_size=2)
    return {"vision_encoder": encoder}


_backbone(M.Gemma3Backbone, _gemma3_vision, **_GEMMA3)
_GEMMA3N = {
    "text_vocab_size": _VOCABULARY, "text_hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0,
    "intermediate_size": [32, 32], "hidden_activation": "gelu_approximate",
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "rope_theta": 10_000.0,
    "max_position_embeddings": 32, "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "laurel_rank": 4,
}  # fmt: skip
_backbone(M.Gemma3nBackbone, **_GEMMA3N, remark="text")
_backbone(
    M.Gemma3nBackbone, **_GEMMA3N, vision_encoder_config={**MOBILENET_V5, "msfa_output_resolution": 4},
    vision_hidden_size=16, vision_vocab_size=8, vision_vocab_offset=64, vision_soft_tokens_per_image=16,
    image_token_id=60, audio_hidden_size=8, audio_vocab_size=8, audio_vocab_offset=72, audio_soft_tokens_per_image=4,
    audio_token_id=61,
    audio_encoder_config={
        "hidden_size": 8, "input_feat_size": 16, "sscp_conv_channel_size": [8, 4],
        "sscp_conv_kernel_size": [(3, 3), (3, 3)], "sscp_conv_stride_size": [(2, 2), (2, 2)],
        "sscp_conv_group_norm_eps": 1e-3, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "gradient_clipping": 1.0,
        "residual_weight": 0.5, "num_attention_heads": 2, "attention_chunk_size": 4, "num_attention_context_right": 0,
        "num_attention_context_left": 5, "attention_logit_cap": 50.0, "conv_kernel_size": 5, "reduction_factor": 2,
    },
)  # fmt: skip
_GEMMA4 = {
    "sliding_window_size": 4, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8,
    "num_global_key_value_heads": 2,
}  # fmt: skip
_backbone(M.Gemma4Backbone, **_GEMMA4, remark="text")
_backbone(
    M.Gemma4Backbone, **_GEMMA4, enable_moe_block=True, num_experts=4, expert_intermediate_dim=8,
    num_experts_per_token=2, remark="experts",
)  # fmt: skip


def _gemma4_towers() -> dict[str, Any]:
    vision = tiny(
        M.Gemma4VisionEncoder, intermediate_dim=16, head_dim=8, output_dim=16, pool_size=2, position_embedding_size=16
    )
    audio = tiny(
        M.Gemma4AudioEncoder, input_feat_size=16, num_layers=1, chunk_size=4, context_left=5, context_right=0,
        sscp_conv_channels=(8, 4), output_proj_dims=16, output_dim=16,
    )  # fmt: skip
    return {"vision_encoder": vision, "audio_encoder": audio, "num_audio_tokens_per_clip": 4}


_backbone(
    M.Gemma4Backbone, _gemma4_towers, **_GEMMA4,
)  # fmt: skip
_backbone(
    M.PARSeqBackbone,
    lambda: {"image_encoder": tiny(M.ViTBackbone, patch_size=(4, 4), mlp_dim=32, use_class_token=False)},
    max_label_length=_LENGTH, decoder_hidden_dim=16, num_decoder_layers=1, num_decoder_heads=2, decoder_mlp_dim=32,
)  # fmt: skip
_backbone(
    M.PaliGemmaBackbone, vit_patch_size=4, vit_num_heads=2, vit_hidden_dim=8, vit_num_layers=2,
    vit_intermediate_dim=16,
)  # fmt: skip


def _qwen3_5_vision() -> dict[str, Any]:
    from keras_hub.src.models.qwen3_5.qwen3_5_vision_encoder import Qwen3_5VisionEncoder  # a tower; not exported

    encoder = tiny(
        Qwen3_5VisionEncoder, depth=2, intermediate_size=32, temporal_patch_size=2, in_channels=3,
        spatial_merge_size=2, out_hidden_size=16, num_position_embeddings=16,
    )  # fmt: skip
    return {"vision_encoder": encoder, "mrope_section": [1, 0, 0]}


_backbone(M.Qwen3_5Backbone, _qwen3_5_vision, **_QWEN3_5)


def _sam() -> dict[str, Any]:
    return {
        "image_encoder": tiny(M.ViTDetBackbone, **_VIT_DET),
        "prompt_encoder": L.SAMPromptEncoder(
            hidden_size=8, image_embedding_size=(8, 8), input_image_size=(64, 64), mask_in_channels=8
        ),
        "mask_decoder": L.SAMMaskDecoder(
            num_layers=2, hidden_size=8, intermediate_dim=16, num_heads=2, embedding_dim=8, num_multimask_outputs=3,
            iou_head_depth=2, iou_head_hidden_dim=8,
        ),
    }  # fmt: skip


_backbone(
    M.SAMBackbone,
    _sam,
)


def _sam3() -> dict[str, Any]:
    size = {"hidden_dim": 16, "intermediate_dim": 32, "num_heads": 2}
    image = {"image_shape": (56, 56, 3), "patch_size": 14}
    return {
        "vision_encoder": L.SAM3VisionEncoder(
            **image, **size, num_layers=2, fpn_hidden_dim=16, fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(28, 28, 3), window_size=2, global_attn_indexes=[1],
        ),
        "text_encoder": L.SAM3TextEncoder(vocabulary_size=_VOCABULARY, embedding_dim=16, num_layers=1, **size),
        "geometry_encoder": L.SAM3GeometryEncoder(num_layers=1, roi_size=3, **size),
        "detr_encoder": L.SAM3DetrEncoder(num_layers=1, **size),
        "detr_decoder": L.SAM3DetrDecoder(**image, **size, num_layers=1, num_queries=4),
        "mask_decoder": L.SAM3MaskDecoder(num_upsampling_stages=3, hidden_dim=16, num_heads=2),
    }  # fmt: skip


_backbone(
    M.SAM3PromptableConceptBackbone,
    _sam3,
)


def _stable_diffusion_3(*, t5: bool) -> dict[str, Any]:
    clip = {"max_sequence_length": _LENGTH, "intermediate_output_index": 0}
    return {
        "vae": VAEBackbone(
            encoder_num_filters=[32] * 4, encoder_num_blocks=[1] * 4, decoder_num_filters=[32] * 4,
            decoder_num_blocks=[1] * 4, name="vae",
        ),
        "clip_l": tiny(M.CLIPTextEncoder, hidden_dim=8, **clip, name="clip_l"),
        "clip_g": tiny(M.CLIPTextEncoder, embedding_dim=16, **clip, name="clip_g"),
        "t5": tiny(T5Encoder, hidden_dim=32, name="t5") if t5 else None,
    }  # fmt: skip


_MMDIT = {
    "mmdit_patch_size": 2, "mmdit_hidden_dim": 16, "mmdit_num_layers": 2, "mmdit_num_heads": 2,
    "mmdit_position_size": 24, "mmdit_qk_norm": "rms_norm", "mmdit_dual_attention_indices": (0,),
    "image_shape": (64, 64, 3),
}  # fmt: skip
_backbone(M.StableDiffusion3Backbone, lambda: _stable_diffusion_3(t5=False), **_MMDIT)
_backbone(M.StableDiffusion3Backbone, lambda: _stable_diffusion_3(t5=True), **_MMDIT, remark="T5")
_backbone(
    M.T5Gemma2Backbone, _gemma3_vision, **_T5GEMMA, eoi_token_index=62,
)  # fmt: skip
_VIDEO = {"num_frames": 2, "num_spatial_layers": 1, "num_temporal_layers": 1}
_backbone(M.VideoPrismBackbone, **_VIDEO, num_auxiliary_layers=1, vocabulary_size=_VOCABULARY, num_text_layers=1)
_backbone(M.VideoPrismBackbone, **_VIDEO, num_auxiliary_layers=0, remark="video")


def exported(base: Any) -> dict[str, list[str]]:
    """Every class of `keras_hub.models` that can be built on its own: its name to all names it is exported under.

    Leaves out the classes that others derive from: those have no weights of their own.
    """
    abstract = {M.Backbone, M.FeaturePyramidBackbone}
    found: dict[str, list[str]] = {}
    for name, cls in inspect.getmembers(keras_hub.models, inspect.isclass):
        if not issubclass(cls, base) or cls in abstract:
            continue
        if issubclass(cls, M.Task) and cls.backbone_cls is None:
            continue
        found.setdefault(cls.__name__, []).append(name)
    return found


# Tasks: one for every class, on the tiny backbone of its family.

_TASK_ARGUMENTS: dict[str, Any] = {
    "num_classes": 4,
    "preprocessor": None,
    "pooling_hidden_dim": 16,
    "head_hidden_size": 16,
    "head_filters": 16,
    "num_features": 16,
    "depth_estimation_type": "relative",
    "backbone_hidden_size": 16,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 2,
    "use_ordered_embeddings": True,
}

# Where a task's backbone is not the entry that has the class's plain name.
_TASK_BACKBONES = {
    "BLIP2Seq2SeqLM": "BLIP2Backbone (Flan-T5)",
    "Gemma3TextEmbedder": "Gemma3Backbone (text)",
    "Gemma4AssistantCausalLM": "Gemma4Backbone (text)",
}


# What a class's constructor and `from_preset` need besides.
_TASK_EXTRAS: dict[str, dict[str, Any]] = {
    "PARSeqCausalLM": {"compile": False},  # its loss is told the padding token by the preprocessor
}


def _task(cls: Any, **fields: Any) -> None:
    extras = _TASK_EXTRAS.get(cls.__name__, {})
    backbone = BACKBONES.get(_TASK_BACKBONES.get(cls.__name__, cls.backbone_cls.__name__))
    if backbone is None:
        return  # of a newer KerasHub; `test_every_model` names it
    accepted = inspect.signature(cls.__init__).parameters
    arguments = {name: value for name, value in _TASK_ARGUMENTS.items() if name in accepted} | extras

    def build() -> keras.Model:
        return cls(backbone=backbone.build(), **arguments)

    TASKS[cls.__name__] = HubModel(cls.__name__, cls, build, load={"preprocessor": None, **extras}, **fields)


# Errors of KerasHub's own.
_TASK_ERRORS: dict[str, dict[str, str]] = {
    "MoonshineAudioToText": {
        "load_error": "'str' object has no attribute 'get'",
        "reason": "the preset loader takes a saved dtype for a serialized policy, and this backbone's is a name",
    },
}

for _names in exported(M.Task).values():
    _task(getattr(M, _names[0]), **_TASK_ERRORS.get(_names[0], {}))

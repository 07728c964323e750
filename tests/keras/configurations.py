"""Tiny models of `transformers` whose configurations have a usual or an unusual value, and what they compute.

Run as a module it writes a folder for each case, with inputs and outputs: PyTorch and TensorFlow, which KerasHub
imports, do not live in one process, so tests do that in a child process.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .hugging_face_models import HUGGING_FACE, Config


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        of: The name of the model in `HUGGING_FACE`.
        cls: The class of KerasHub that loads it.
        changes: What its configuration has besides.
        said: What the error says; empty if the model is loaded.
        apart: How far outputs may be apart, in standard deviations.
    """

    of: str
    cls: str
    changes: Config
    said: str = ""
    apart: float = 1e-4

    @property
    def load(self) -> dict[str, Any]:
        """What `from_preset` needs besides the folder."""
        return {"preprocessor": None} if self.cls.endswith("CausalLM") else {}


_CLASSES = {
    "llama": "Llama3CausalLM", "mistral": "MistralCausalLM", "mixtral": "MixtralCausalLM", "qwen2": "QwenCausalLM",
    "qwen3": "Qwen3CausalLM", "qwen2_moe": "QwenMoeCausalLM", "qwen3_moe": "Qwen3MoeCausalLM",
    "smollm3": "SmolLM3CausalLM", "gemma": "GemmaCausalLM", "gemma2": "GemmaCausalLM",
    "gemma3_text": "Gemma3CausalLM", "gpt2": "GPT2CausalLM", "bert": "BertBackbone", "albert": "AlbertBackbone",
    "xlm-roberta": "XLMRobertaBackbone", "distilbert": "DistilBertBackbone", "vit": "ViTBackbone",
    "deit": "DeiTBackbone", "dinov2": "DINOV2Backbone", "dinov3_vit": "DINOV3Backbone",
    "swin": "SwinTransformerBackbone",
}  # fmt: skip
# KerasHub goes through float16 for Mistral, and takes the tanh for BERT's activation.
_APART = {"mistral": 2e-2, "bert": 2e-3}
_ENTRIES: dict[str, Config] = {"gemma3_text": {"num_hidden_layers": 6}}


def _rope(rope_type: str, theta: float = 10000.0, **more: Any) -> Config:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


_LLAMA3 = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)  # fmt: skip
_LINEAR, _YARN = _rope("linear", factor=4.0), _rope("yarn", factor=4.0, original_max_position_embeddings=16)
_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
_RELU = {"hidden_act": "relu"}

# Of each model: changes by a name for them, with what the error says; by default none is.
_ODD: dict[str, dict[str, tuple[Config, str]]] = {
    "llama": {
        "llama3": (_LLAMA3, ""), "theta": (_rope("default", 100.0), ""), "eps": ({"rms_norm_eps": 0.1}, ""),
        "linear": (_LINEAR, "rope_type is 'linear'"), "yarn": (_YARN, "rope_type is 'yarn'"),
        "relu": (_RELU, "hidden_act is 'relu'"), "tied": ({"tie_word_embeddings": True}, ""),
        "biases": ({"attention_bias": True, "mlp_bias": True}, "mlp_bias is True"),
        "wide": ({"head_dim": 8}, "head_dim is 8"),
    },
    "mistral": {"linear": (_LINEAR, ""), "yarn": (_YARN, "'yarn'"), "window": ({"sliding_window": 4}, "")},
    "mixtral": {
        "linear": (_LINEAR, ""), "window": ({"sliding_window": 4}, ""), "eps": ({"rms_norm_eps": 0.1}, ""),
        "llama3": (_LLAMA3, "'llama3'"), "one": ({"num_experts_per_tok": 1}, ""),
    },
    "qwen2": {"linear": (_LINEAR, ""), "window": (_WINDOW, "layer_types is '4, 4'"), "yarn": (_YARN, "'yarn'")},
    "qwen3": {
        "linear": (_LINEAR, ""), "window": (_WINDOW, "layer_types is '4, 4'"), "eps": ({"rms_norm_eps": 0.1}, "0.1"),
        "theta": (_rope("default", 100.0), ""), "biases": ({"attention_bias": True}, "attention_bias is True"),
    },
    "qwen2_moe": {"linear": (_LINEAR, ""), "normed": ({"norm_topk_prob": True}, ""), "relu": (_RELU, "'relu'")},
    "qwen3_moe": {"linear": (_LINEAR, ""), "normed": ({"norm_topk_prob": True}, ""), "window": (_WINDOW, "'4, 4'")},
    "smollm3": {"theta": (_rope("default", 100.0), ""), "linear": (_LINEAR, "'linear'"), "relu": (_RELU, "'relu'")},
    "gemma": {
        "gelu": ({"hidden_act": "gelu"}, ""), "theta": (_rope("default", 100.0), "rope_theta is 100.0"),
        "eps": ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1"), "relu": (_RELU, "hidden_act is 'relu'"),
    },
    "gemma2": {
        "caps": ({"final_logit_softcapping": 1.0, "attn_logit_softcapping": 1.0}, ""),
        "window": ({"sliding_window": 4}, ""), "scale": ({"query_pre_attn_scalar": 4}, "query_pre_attn_scalar is 4"),
        "types": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is 'full, 8'"),
    },
    "gemma3_text": {
        "cap": ({"final_logit_softcapping": 1.0}, ""), "window": ({"sliding_window": 4}, ""),
        "scale": ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256"),
        "types": ({"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types is 'full, 8, full, 8"),
        "linear": (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                }
            },
            "",
        ),
    },
    "gpt2": {
        "eps": ({"layer_norm_epsilon": 0.1}, "layer_norm_epsilon is 0.1"),
        "scale": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    },
    "albert": {"gelu": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'")},
    "xlm-roberta": {"eps": ({"layer_norm_eps": 0.1}, "layer_norm_eps is 0.1")},
    "vit": {"eps": ({"layer_norm_eps": 0.1}, "")},
    "deit": {"eps": ({"layer_norm_eps": 0.1}, ""), "relu": (_RELU, "hidden_act is 'relu'")},
    "dinov2": {"eps": ({"layer_norm_eps": 0.1}, "layer_norm_eps is 0.1")},
    "dinov3_vit": {"eps": ({"layer_norm_eps": 0.1}, ""), "relu": (_RELU, "")},
    "swin": {"eps": ({"layer_norm_eps": 0.1}, "layer_norm_eps is 0.1")},
}  # fmt: skip

CASES = {
    f"{of}-{name}" if name else of: Case(of, cls, {**_ENTRIES.get(of, {}), **changes}, said, _APART.get(of, 1e-4))
    for of, cls in _CLASSES.items()
    for name, (changes, said) in {"": ({}, ""), **_ODD.get(of, {})}.items()
}


def _write(case: Case, folder: Path) -> None:
    import torch
    import transformers

    original = HUGGING_FACE[case.of]
    config = transformers.AutoConfig.for_model(case.of, **copy.deepcopy({**original.config, **case.changes}))
    model: Any = getattr(transformers, original.architecture)(config).eval()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            value = rng.standard_normal(tuple(tensor.shape)) * (0.1 if tensor.ndim == 1 else 0.3)
            value += bool(re.search(r"norm\w*\.weight$|ln_\w+\.weight$|LayerNorm\.weight$", name))
            tensor.copy_(torch.from_numpy(value.astype("float32")))
        model.save_pretrained(folder)
        base = model if case.cls.endswith("CausalLM") or "DINO" in case.cls else getattr(model, model.base_model_prefix)
        if (size := original.config.get("image_size")) is not None:
            given = rng.standard_normal((2, size, size, 3)).astype("float32")
            output = base(pixel_values=torch.from_numpy(given.transpose(0, 3, 1, 2).copy()))
        else:
            given = rng.integers(5, 60, (2, 14)).astype("int32")
            output = base(input_ids=torch.from_numpy(given.astype("int64")))
    np.save(folder / "inputs.npy", given)
    np.save(folder / "outputs.npy", (output.logits if "logits" in output else output.last_hidden_state).numpy())
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **original.entries}))


def main(out: Path) -> None:
    """Writes every case into a folder of its own."""
    for name, case in CASES.items():
        _write(case, out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

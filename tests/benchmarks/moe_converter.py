"""A Hugging Face mixture of experts onto 8 devices: stock `from_preset` against `lazymodel_keras.from_preset`.

    python tests/benchmarks/moe_converter.py [--model qwen3_moe|gpt_oss] [--runs 3] [--json]

The folder has the names and shapes of a published model in 3 shards and an index; KerasHub's converter makes the
layers' experts of it, which is what is measured:

* Qwen3-MoE has one tensor for every projection of every expert, in bfloat16, 1.1 GiB. The converter transposes each,
  joins two of them and stacks those of a layer.
* GPT-OSS has its experts in MXFP4, of four bits a number. The converter decodes them to float32 and transposes them.

The model is bfloat16, with experts split over the devices. Stock and ours take turns, each in its own process, with the
page cache warm. Seconds are from the call until every array is ready; memory is the peak of private memory over what
the process held before the call, as a multiple of the model's bytes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import _measure

BACKED = 5 << 29  # bytes that each process touches before it is measured, so that both find memory equally ready
SHARDS = 3

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERTS, LAYERS, VOCABULARY = 1024, 16, 8, 64, 512, 32, 10, 32000
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "head_dim": HEAD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **CONFIG,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **CONFIG,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
}
CLASSES = {"qwen3_moe": "Qwen3MoeBackbone", "gpt_oss": "GptOssBackbone"}
# The published layout of Qwen3-MoE replicates experts: its rules match none of them. GPT-OSS has none.
LAYOUT = {
    ".*embeddings": ("model", None),
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*/experts/(expert_feedforward_.*_dense|gate_up_proj|down_proj)": ("model", None, None),
}


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the folder's tensors; those of integers end in `_blocks` or `_scales`."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        found |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        }
        if model == "gpt_oss":
            experts = f"{layer}.mlp.experts"
            found |= {
                f"{layer}.self_attn.q_proj.bias": (HEADS * HEAD,),
                f"{layer}.self_attn.k_proj.bias": (KV_HEADS * HEAD,),
                f"{layer}.self_attn.v_proj.bias": (KV_HEADS * HEAD,),
                f"{layer}.self_attn.o_proj.bias": (HIDDEN,),
                f"{layer}.self_attn.sinks": (HEADS,),
                f"{layer}.mlp.router.weight": (EXPERTS, HIDDEN),
                f"{layer}.mlp.router.bias": (EXPERTS,),
                f"{experts}.gate_up_proj_blocks": (EXPERTS, 2 * INNER, HIDDEN // 32, 16),
                f"{experts}.gate_up_proj_scales": (EXPERTS, 2 * INNER, HIDDEN // 32),
                f"{experts}.gate_up_proj_bias": (EXPERTS, 2 * INNER),
                f"{experts}.down_proj_blocks": (EXPERTS, HIDDEN, INNER // 32, 16),
                f"{experts}.down_proj_scales": (EXPERTS, HIDDEN, INNER // 32),
                f"{experts}.down_proj_bias": (EXPERTS, HIDDEN),
            }
            continue
        found |= {
            f"{layer}.self_attn.q_norm.weight": (HEAD,),
            f"{layer}.self_attn.k_norm.weight": (HEAD,),
            f"{layer}.mlp.gate.weight": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            prefix = f"{layer}.mlp.experts.{expert}"
            found |= {
                f"{prefix}.gate_proj.weight": (INNER, HIDDEN),
                f"{prefix}.up_proj.weight": (INNER, HIDDEN),
                f"{prefix}.down_proj.weight": (HIDDEN, INNER),
            }
    return found


def save(folder: Path) -> None:
    """Writes the folder of the model that it is named after."""
    import ml_dtypes
    import numpy as np

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[folder.name]))
    rng = np.random.default_rng(0)

    def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (110, 130)
            return rng.integers(low, high, shape, np.uint8)
        return rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)

    tensors = list(shapes(folder.name).items())
    parts = [tensors[len(tensors) * n // SHARDS : len(tensors) * (n + 1) // SHARDS] for n in range(SHARDS)]
    _measure.write_shards(folder, [{name: values_of(name, shape) for name, shape in part} for part in parts])


def load(how: str, folder: Path) -> dict[str, Any]:
    """In the child: one load onto 8 devices."""
    import jax
    import keras
    import keras_hub

    import lazymodel_keras as lk

    mesh = _measure.keras_mesh(model=8)
    layout = keras.distribution.LayoutMap(mesh)
    for path, axes in LAYOUT.items():
        layout[path] = axes
    cls: Any = getattr(keras_hub.models, CLASSES[folder.name])
    _measure.distribute(mesh, layout)
    _measure.back_memory(BACKED)
    with _measure.measured() as report:
        if how == "stock":
            model = cls.from_preset(str(folder), dtype="bfloat16")
        else:
            model = lk.from_preset(cls, str(folder), dtype="bfloat16", progress=False)
        jax.block_until_ready([variable.value for variable in model.weights])
        report["nbytes"] = sum(variable.value.nbytes for variable in model.weights)
    experts = [v.value for v in model.weights if "/experts/" in v.path and not v.path.endswith("_bias")]
    assert len(experts) == 2 * LAYERS and all(not value.sharding.is_fully_replicated for value in experts)
    return report | {"digest": _measure.digest(variable.value for variable in model.weights)}


def main() -> None:
    parser = _measure.arguments(__doc__, runs=3, child=("HOW", "FOLDER"))
    parser.add_argument("--model", choices=CONFIGS, default="qwen3_moe")
    options = parser.parse_args()
    if options.child:
        how, folder = options.child
        if how == "save":
            _measure.emit_measured(save, Path(folder))
        else:
            _measure.emit(load(how, Path(folder)))
        return

    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / options.model)
        _measure.run([__file__, "--child", "save", folder])
        results = _measure.stock_and_ours(__file__, folder, options.runs)
    _measure.show_loads(results, "bfloat16", as_json=options.json)


if __name__ == "__main__":
    main()

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
SHARDS, LAYERS, INNER = 3, 10, 512
CONFIG = {
    "vocab_size": 32000, "hidden_size": 1024, "head_dim": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_experts_per_tok": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 4096, "moe_intermediate_size": INNER, "num_experts": 32, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "router_aux_loss_coef": 0.001, "rope_theta": 1000000.0, "sliding_window": None,
    },
    "gpt_oss": {
        "intermediate_size": INNER, "num_local_experts": 32, "rope_theta": 150000.0, "sliding_window": 128,
    },
}  # fmt: skip
CLASSES = {"qwen3_moe": "Qwen3MoeBackbone", "gpt_oss": "GptOssBackbone"}
# The published layout of Qwen3-MoE replicates experts: its rules match none of them. GPT-OSS has none.
LAYOUT = {
    ".*embeddings": ("model", None),
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*/experts/(expert_feedforward_.*_dense|gate_up_proj|down_proj)": ("model", None, None),
}


def save(folder: Path) -> None:
    """Writes the folder of the model that it is named after."""
    import ml_dtypes
    import numpy as np

    from tests.keras.models import decoder, decoder_shapes

    config = decoder(folder.name, **CONFIG | CONFIGS[folder.name])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (110, 130)
            return rng.integers(low, high, shape, np.uint8)
        return rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)

    tensors = list(decoder_shapes(config).items())
    parts = [tensors[len(tensors) * n // SHARDS : len(tensors) * (n + 1) // SHARDS] for n in range(SHARDS)]
    _measure.write_shards(folder, [{name: values_of(name, shape) for name, shape in part} for part in parts])


def child(how: str, where: str) -> dict[str, Any] | None:
    """Saves, or loads once onto 8 devices."""
    folder = Path(where)
    if how == "save":
        return save(folder)
    import keras
    import keras_hub

    import lazymodel_keras as lk

    def layout(mesh: Any) -> Any:
        found = keras.distribution.LayoutMap(mesh)
        for path, axes in LAYOUT.items():
            found[path] = axes
        return found

    def once() -> Any:
        if how == "stock":
            model = cls.from_preset(where, dtype="bfloat16")
        else:
            model = lk.from_preset(cls, where, dtype="bfloat16", progress=False)
        experts = [v.value for v in model.weights if "/experts/" in v.path and not v.path.endswith("_bias")]
        assert len(experts) == 2 * LAYERS and all(not value.sharding.is_fully_replicated for value in experts)
        return model

    cls: Any = getattr(keras_hub.models, CLASSES[folder.name])
    _measure.distribute(layout, model=8)
    return _measure.load_keras(once, BACKED)


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3_moe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / options.model)
        _measure.child("save", folder, devices=1)
        results = _measure.stock_and_ours(folder, options.runs)
    _measure.show_loads(results, "bfloat16", as_json=options.json)


if __name__ == "__main__":
    main()

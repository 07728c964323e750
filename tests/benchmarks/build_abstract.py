"""Building very large KerasHub models abstractly: seconds and private memory.

    python tests/benchmarks/build_abstract.py [--json]

Each in a process of its own; memory is the peak over what the process held before the call.
"""

from __future__ import annotations

import json
from typing import Any

import _measure

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma2-9B": (
        "GemmaBackbone",
        _measure.decoder(
            256000, 42, 16, 8, 3584, 28672, head_dim=256, use_post_ffw_norm=True, use_post_attention_norm=True,
            final_logit_soft_cap=30, attention_logit_soft_cap=50,
        ),
    ),
    "Llama3-70B": ("Llama3Backbone", _measure.decoder(128256, 80, 64, 8, 8192, 28672)),
    "Mixtral, 1 trillion": (
        "MixtralBackbone", _measure.decoder(128000, 96, 96, 8, 12288, 8704, num_experts=32, top_k=2),
    ),
}  # fmt: skip


def child(name: str) -> dict[str, Any]:
    import keras_hub

    import lazymodel as lm

    cls, config = MODELS[name]
    with _measure.measured() as report:
        abstract = lm.build_abstract(getattr(keras_hub.models, cls), **config, dtype="bfloat16")
    return report | {"parameters": abstract.num_parameters, "variables": len(abstract)}


def main() -> None:
    _measure.in_child(child)
    options = _measure.arguments(__doc__).parse_args()
    for name in MODELS:
        m = _measure.child(name)
        row = {"model": name, "seconds": m.seconds, "peak_nbytes": m.peak_nbytes, **m.result}
        if options.json:
            print(json.dumps(row))
        else:
            print(
                f"{name:20} {m.result['parameters'] / 1e9:8.1f} billion parameters in {m.result['variables']:5} "
                f"variables: {m.seconds:5.2f} s, +{m.peak_nbytes / 2**20:.0f} MiB"
            )


if __name__ == "__main__":
    main()

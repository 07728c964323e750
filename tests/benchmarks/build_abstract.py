"""Building very large KerasHub models abstractly: seconds and private memory.

    python tests/benchmarks/build_abstract.py [--json]

Each in a process of its own; memory is the peak over what the process held before the call.
"""

from __future__ import annotations

import json

from _measure import arguments, emit, measured, run, virtual_devices

MODELS = {
    "Gemma2-9B": (
        "GemmaBackbone",
        {
            "vocabulary_size": 256000,
            "num_layers": 42,
            "num_query_heads": 16,
            "num_key_value_heads": 8,
            "hidden_dim": 3584,
            "intermediate_dim": 28672,
            "head_dim": 256,
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "final_logit_soft_cap": 30,
            "attention_logit_soft_cap": 50,
        },
    ),
    "Llama3-70B": (
        "Llama3Backbone",
        {
            "vocabulary_size": 128256,
            "num_layers": 80,
            "num_query_heads": 64,
            "num_key_value_heads": 8,
            "hidden_dim": 8192,
            "intermediate_dim": 28672,
        },
    ),
    "Mixtral, 1 trillion": (
        "MixtralBackbone",
        {
            "vocabulary_size": 128000,
            "num_layers": 96,
            "num_query_heads": 96,
            "num_key_value_heads": 8,
            "hidden_dim": 12288,
            "intermediate_dim": 8704,
            "num_experts": 32,
            "top_k": 2,
        },
    ),
}


def build(name: str) -> None:
    """In the child."""
    import keras_hub

    import lazymodel as lm

    cls, config = MODELS[name]
    with measured() as report:
        abstract = lm.build_abstract(getattr(keras_hub.models, cls), **config, dtype="bfloat16")
    emit(report | {"parameters": abstract.num_parameters, "variables": len(abstract)})


def main() -> None:
    parser = arguments(__doc__, child=("MODEL",))
    options = parser.parse_args()
    if options.child:
        build(*options.child)
        return
    for name in MODELS:
        m = run([__file__, "--child", name], env=virtual_devices())
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

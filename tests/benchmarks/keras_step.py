"""A training step of a KerasHub model on a mesh of 8 data devices: `lk.distribution` against stock Keras.

    python tests/benchmarks/keras_step.py [--runs 3] [--json]

The model is a Gemma of 12 million parameters in float32, a batch 32 rows of 128 tokens, the mesh 8 × 1 CPU devices.
Stock is placed by KerasHub's own layout map, ours by `lm.auto()`. They take turns, each in its own process. Seconds are
those of a step after the first, peaks those of private memory over what the process held before. Losses are compared.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import _measure

BATCH, LENGTH, STEPS = 32, 128, 3
CONFIG: dict[str, Any] = {
    "vocabulary_size": 8192, "num_layers": 3, "num_query_heads": 8, "num_key_value_heads": 8, "hidden_dim": 512,
    "intermediate_dim": 1024, "head_dim": 64,
}  # fmt: skip


def child(how: str) -> dict[str, Any]:
    _measure.backend()
    import jax
    import keras
    import keras_hub
    import numpy as np

    import lazymodel as lm
    import lazymodel_keras as lk

    def make() -> Any:
        keras.utils.set_random_seed(0)
        model: Any = keras_hub.models.GemmaCausalLM(keras_hub.models.GemmaBackbone(**CONFIG), preprocessor=None)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    if how == "ours":
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8, 1), ("batch", "model"))
        distribution = lk.distribution(mesh)
        model = lm.build_abstract(make).shard(mesh, lm.auto()).materialize()
    else:
        devices = keras.distribution.DeviceMesh((8, 1), ["batch", "model"], keras.distribution.list_devices())
        layouts = keras_hub.models.GemmaBackbone.get_layout_map(devices)
        distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        with distribution.scope():
            model = make()
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocabulary_size"], (STEPS * BATCH, LENGTH), "int32")
    given = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, tokens
    with distribution.scope():
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        losses = model.fit(*given, **options).history["loss"]  # compiles
        start = time.perf_counter()
        losses += model.fit(*given, **options).history["loss"]
        return {"step": (time.perf_counter() - start) / STEPS, "losses": losses}


def main() -> None:
    _measure.in_child(child)
    options = _measure.arguments(__doc__, runs=3).parse_args()
    results = _measure.in_turns(("stock", "ours"), options.runs, _measure.child)
    found: dict[str, Any] = {
        how: {
            "seconds_per_step": statistics.median(run.result["step"] for run in runs),
            "peak_nbytes": statistics.median(run.peak_nbytes for run in runs),
            "losses": runs[0].result["losses"],
        }
        for how, runs in results.items()
    }
    stock, ours = found["stock"], found["ours"]
    if any(abs(a - b) > 1e-4 * abs(a) for a, b in zip(stock["losses"], ours["losses"], strict=True)):
        raise SystemExit(f"the losses differ: {stock['losses']} and {ours['losses']}")
    if options.json:
        print(json.dumps(found))
        return
    for how, each in found.items():
        print(f"{how:6} {each['seconds_per_step']:6.2f} s a step, peak {each['peak_nbytes'] / 1e9:.1f} GB")
    print(f"ours takes {ours['seconds_per_step'] / stock['seconds_per_step']:.2f} of the time; losses are equal")


if __name__ == "__main__":
    main()

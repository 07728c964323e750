"""Loading a KerasHub preset onto 8 devices: stock `from_preset` against `lazymodel_keras.from_preset`.

    python tests/benchmarks/load_preset.py [--runs 5] [--json] [--plot FILE]

The model is a Gemma2 of 267 million parameters in float32, saved once with `save_to_preset`. Stock and ours take
turns, each in its own process, with the page cache warm. Seconds are from the call until every array is ready; memory
is the peak of private memory over what the process held before the call, as a multiple of the model's bytes.
`--plot` draws the private memory of the median runs over time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
from _drawing import COLOURS, pyplot, save_svg

BACKED = 4 << 30  # bytes that each process touches before it is measured, so that both find memory equally ready

CONFIG = {
    "vocabulary_size": 64000,
    "num_layers": 12,
    "num_query_heads": 8,
    "num_key_value_heads": 8,
    "hidden_dim": 1024,
    "intermediate_dim": 8192,  # for the gate and its partner together, as KerasHub counts
    "head_dim": 128,
    "query_head_dim_normalize": False,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "final_logit_soft_cap": 30.0,
    "attention_logit_soft_cap": 50.0,
    "sliding_window_size": 4096,
    "use_sliding_window_attention": True,
}


def save(folder: Path) -> None:
    """Writes the preset, with values that no initializer gives."""
    import keras
    import keras_hub
    import numpy as np

    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GemmaBackbone(**CONFIG)
    rng = np.random.default_rng(0)
    for variable in backbone.weights:
        variable.assign(rng.standard_normal(variable.shape, dtype=np.float32))
    backbone.save_to_preset(str(folder))


def load(how: str, folder: Path | str, fetch: Callable[[], Path] | None = None) -> dict[str, Any]:
    """In the child: one load onto 8 devices, of a folder or URL, or of the folder that is fetched first."""
    import jax
    import keras_hub
    import numpy as np

    import lazymodel_keras as lk

    mesh = _measure.keras_mesh(batch=1, model=8)
    _measure.distribute(mesh, keras_hub.models.GemmaBackbone.get_layout_map(mesh))
    _measure.back_memory(BACKED)
    with _measure.measured() as report:
        if fetch is not None:
            folder = fetch()
        if how == "stock":
            model = keras_hub.models.GemmaBackbone.from_preset(str(folder))
        else:
            model = lk.from_preset(keras_hub.models.GemmaBackbone, str(folder), progress=False)
        jax.block_until_ready([variable.value for variable in model.weights])
        report["nbytes"] = sum(int(np.prod(v.shape)) * 4 for v in model.weights)
    return report | {"digest": _measure.digest(variable.value for variable in model.weights)}


def main() -> None:
    parser = _measure.arguments(__doc__, runs=5, child=("HOW", "FOLDER"))
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    if options.child:
        how, folder = options.child
        if how == "save":
            _measure.emit_measured(save, Path(folder))
        else:
            _measure.emit(load(how, Path(folder)))
        return

    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "gemma")
        _measure.run([__file__, "--child", "save", folder], env=_measure.virtual_devices(1))
        results = _measure.stock_and_ours(__file__, folder, options.runs)
    _measure.show_loads(results, "float32", as_json=options.json)
    if options.plot:
        plot(results, results["ours"][0].result["nbytes"], options.plot)


def plot(results: dict[str, list[_measure.Measurement]], nbytes: int, file: str) -> None:
    """Draws private memory over time for each way's median run."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for how in ("stock", "ours"):
        colour = COLOURS[how]
        median = sorted(results[how], key=lambda m: m.seconds)[len(results[how]) // 2]
        label = {"stock": "keras_hub from_preset", "ours": "lazymodel_keras.from_preset"}[how]
        seconds = [moment for moment, _ in median.samples]
        axes.plot(seconds, [used / nbytes for _, used in median.samples], color=colour, label=label)
        axes.plot(median.seconds, median.samples[-1][1] / nbytes, "o", color=colour)
        axes.annotate(
            f"{median.seconds:.1f} s, peak {median.peak_nbytes / nbytes:.2f} ×",
            (median.seconds, median.samples[-1][1] / nbytes),
            textcoords="offset points",
            xytext=(6, 6),
            color=colour,
        )
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds", ylabel="private memory / model", ylim=(0, 2.2))
    axes.set_xlim(0, max(m.seconds for m in results["stock"]) * 1.25)
    axes.set_title(f"Loading a {nbytes / 2**30:.2f} GiB Gemma preset onto 8 devices", fontsize=10)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_svg(figure, Path(file))


if __name__ == "__main__":
    main()

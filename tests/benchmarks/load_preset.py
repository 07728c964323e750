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
CONFIG = _measure.decoder(
    64000, 12, 8, 8, 1024, 8192, head_dim=128,  # KerasHub counts the gate and its partner together
    query_head_dim_normalize=False, use_post_ffw_norm=True, use_post_attention_norm=True, final_logit_soft_cap=30.0,
    attention_logit_soft_cap=50.0, sliding_window_size=4096, use_sliding_window_attention=True,
)  # fmt: skip


def load(how: str, folder: Path | str, fetch: Callable[[], Path] | None = None) -> dict[str, Any]:
    """In the child: one load onto 8 devices, of a folder or URL, or of the folder that is fetched first."""
    import keras_hub

    import lazymodel_keras as lk

    cls = keras_hub.models.GemmaBackbone
    _measure.distribute(cls.get_layout_map, batch=1, model=8)

    def once() -> Any:
        found = str(folder if fetch is None else fetch())
        return cls.from_preset(found) if how == "stock" else lk.from_preset(cls, found, progress=False)

    return _measure.load_keras(once, BACKED)


def child(how: str, folder: str) -> dict[str, Any] | None:
    return _measure.save_gemma(Path(folder), CONFIG) if how == "save" else load(how, folder)


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=5)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "gemma")
        _measure.child("save", folder, devices=1)
        results = _measure.stock_and_ours(folder, options.runs)
    _measure.show_loads(results, "float32", as_json=options.json)
    if options.plot:
        plot(results, results["ours"][0].result["nbytes"], options.plot)


def plot(results: dict[str, list[_measure.Measurement]], nbytes: int, file: str) -> None:
    """Draws private memory over time for each way's median run."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for how, label in (("stock", "keras_hub from_preset"), ("ours", "lazymodel_keras.from_preset")):
        colour = COLOURS[how]
        median = sorted(results[how], key=lambda m: m.seconds)[len(results[how]) // 2]
        end = median.seconds, median.samples[-1][1] / nbytes
        seconds = [moment for moment, _ in median.samples]
        axes.plot(seconds, [used / nbytes for _, used in median.samples], color=colour, label=label)
        axes.plot(*end, "o", color=colour)
        text = f"{median.seconds:.1f} s, peak {median.peak_nbytes / nbytes:.2f} ×"
        axes.annotate(text, end, textcoords="offset points", xytext=(6, 6), color=colour)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds", ylabel="private memory / model", ylim=(0, 2.2))
    axes.set_xlim(0, max(m.seconds for m in results["stock"]) * 1.25)
    axes.set_title(f"Loading a {nbytes / 2**30:.2f} GiB Gemma preset onto 8 devices", fontsize=10)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_svg(figure, Path(file))


if __name__ == "__main__":
    main()

"""A float preset quantized while it is loaded, against stock load-then-quantize.

    python tests/benchmarks/quantize_preset.py [--preset FOLDER] [--runs 3] [--json]

The model is a Gemma2 of 601 million parameters in float32 (2.2 GiB), saved once with `save_to_preset` unless a folder
is given, and loaded onto 8 CPU devices. Stock and ours take turns, each in its own process, with the page cache warm.
Seconds are from the call until every array is ready; memory is the peak of private memory over what the process held
before the call. Values are compared bit for bit.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import _measure
from load_preset import CONFIG
from stream import PRESET

BACKED = 6 << 30  # bytes that each process touches before it is measured, so that both find memory equally ready
MIB = 1 << 20
MODE = "int8"  # KerasHub's layout maps do not fit the flattened kernels of int4
ALLOWANCE = 0.15  # of the quantized size, which a peak may exceed together with the largest layer in float


def split() -> None:
    """In the child: 8 devices and KerasHub's own layout map."""
    import keras_hub

    warnings.simplefilter("ignore")  # of layers that have nothing to quantize
    _measure.distribute(keras_hub.models.GemmaBackbone.get_layout_map, batch=1, model=8)


def quantize(how: str, folder: str) -> dict[str, Any]:
    """In the child: one load that ends in a quantized model."""
    import keras_hub

    import lazymodel_keras as lk

    cls = keras_hub.models.GemmaBackbone

    def load() -> Any:
        if how == "ours":
            return lk.abstract_from_preset(cls, folder).quantize(MODE).materialize(progress=False)
        model = cls.from_preset(folder)
        model.quantize(MODE)
        return model

    split()
    report, floats = _measure.load_keras(load, BACKED), lk.abstract_from_preset(cls, folder)
    largest = max(variable.nbytes for variable in floats.values())
    return report | {"float_nbytes": floats.nbytes, "largest_nbytes": largest}


def report_quantize(folder: str, runs: int) -> tuple[dict[str, Any], str]:
    """Measures both ways; what they took, as numbers and as text."""
    results = _measure.stock_and_ours(folder, runs)
    summary = {name: results["ours"][0].result[name] for name in ("nbytes", "float_nbytes", "largest_nbytes")}
    nbytes, largest = summary["nbytes"], summary["largest_nbytes"]
    allowed = (1 + ALLOWANCE) * nbytes + largest
    summary["allowed_nbytes"] = int(allowed)
    lines = [
        f"{summary['float_nbytes'] / MIB:,.0f} MiB in float32 to {nbytes / MIB:,.0f} MiB in {MODE} on 8 devices, "
        f"{runs} runs each; the largest layer has {largest / MIB:,.0f} MiB in float32"
    ]
    for how, found in results.items():
        seconds, peak = statistics.median(m.seconds for m in found), max(m.peak_nbytes for m in found)
        summary[how] = {"seconds": seconds, "peak_nbytes": peak}
        lines.append(
            f"  {how:6} {seconds:6.2f} s (median)   peak private memory {peak / MIB:,.0f} MiB, "
            f"{peak / nbytes:.2f} × the quantized model"
        )
    within = "within" if summary["ours"]["peak_nbytes"] <= allowed else "ABOVE"
    lines.append(
        f"  every value equal bit for bit; ours is {within} {allowed / MIB:,.0f} MiB, the quantized model and "
        f"{ALLOWANCE:.0%} of it and the largest layer in float32"
    )
    return summary, "\n".join(lines)


def child(how: str, folder: str) -> dict[str, Any] | None:
    if how == "save":
        return _measure.save_gemma(Path(folder), CONFIG | PRESET)
    return quantize(how, folder)


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--preset", metavar="FOLDER", help="a Gemma2 preset in float32; default: one is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.preset
        if folder is None:
            folder = str(Path(temporary) / "gemma")
            _measure.child("save", folder, devices=1)
        summary, text = report_quantize(folder, options.runs)
    print(json.dumps(summary) if options.json else text)


if __name__ == "__main__":
    main()

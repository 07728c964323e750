"""A float preset quantized while it is loaded, against stock load-then-quantize.

    python tests/benchmarks/quantize_preset.py [--preset FOLDER] [--runs 3] [--json]

The model is a Gemma2 of 601 million parameters in float32 (2.2 GiB), saved once with `save_to_preset` unless a folder
is given, and loaded onto 8 CPU devices. Stock and ours take turns, each in its own process, with the page cache warm.
Seconds are from the call until every array is ready; memory is the peak of private memory over what the process held
before the call, as a multiple of the quantized model's bytes. Values are compared bit for bit.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import _measure
from load_preset import CONFIG
from stream import PRESET

BACKED = 6 << 30  # bytes that each process touches before it is measured, so that both find memory equally ready
MODE = "int8"  # KerasHub's layout maps do not fit the flattened kernels of int4


def child(how: str, folder: str) -> dict[str, Any] | None:
    """Saves the preset, or makes a quantized model of it on 8 devices, by KerasHub's own layout map."""
    if how == "save":
        return _measure.save_gemma(Path(folder), CONFIG | PRESET)
    import keras_hub

    import lazymodel_keras as lk

    cls = keras_hub.models.GemmaBackbone

    def load() -> Any:
        if how == "ours":
            return lk.abstract_from_preset(cls, folder).quantize(MODE).materialize(progress=False)
        model = cls.from_preset(folder)
        model.quantize(MODE)
        return model

    warnings.simplefilter("ignore")  # of layers that have nothing to quantize
    _measure.distribute(cls.get_layout_map, batch=1, model=8)
    return _measure.load_keras(load, BACKED)


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
        results = _measure.stock_and_ours(folder, options.runs)
    _measure.show_loads(results, MODE, as_json=options.json)


if __name__ == "__main__":
    main()

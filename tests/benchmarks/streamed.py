"""What statistics of a model larger than the machine take, one variable at a time.

    python tests/benchmarks/streamed.py [--layers 42]

Gemma2-9B in float32, 34 GiB of initial values that are never there at once. The peak is of private memory over what the
process held before, beside the bytes of the largest variable.
"""

from __future__ import annotations

import os
from typing import Any

import _measure
from build_abstract import MODELS

GIB = 1 << 30


def child(layers: str) -> dict[str, Any]:
    import keras_hub

    import lazymodel as lm

    config = MODELS["Gemma2-9B"][1] | {"num_layers": int(layers)}
    model: Any = lm.build_abstract(keras_hub.models.GemmaBackbone, **config, dtype="float32")
    _measure.backend()
    with _measure.measured() as report:
        lm.statistics(model, progress=False)
    return report | {"nbytes": model.nbytes, "largest": max(variable.nbytes for variable in model.values())}


def main() -> None:
    os.environ.update({"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"})
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, json=False)
    parser.add_argument("--layers", type=int, default=MODELS["Gemma2-9B"][1]["num_layers"], help="fewer, for a trial")
    found = _measure.child(parser.parse_args().layers, devices=None)
    nbytes, largest = found.result["nbytes"], found.result["largest"]
    print(
        f"{nbytes / GIB:.2f} GiB in {found.seconds:.1f} s ({found.result['cpu']:.1f} s of CPU), largest "
        f"{largest / GIB:.2f} GiB, peak {found.peak_nbytes / GIB:.2f} GiB"
    )


if __name__ == "__main__":
    main()

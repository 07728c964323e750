"""All of Gemma2-9B, 9.24 billion parameters in bfloat16, on one host: initialized, saved sharded, and loaded again.

    python tests/benchmarks/gemma_9b.py [--folder FOLDER] [--layers 42] [--json]

The model is built abstractly, initialized onto 8 devices and saved as a KerasHub preset from its shards; a second
process loads the preset onto 8 devices and compares every variable's digest. Memory is the peak of private memory over
what the process held before, as a multiple of the model's 17.2 GiB. It needs 20 GiB of memory and as much disk, which
is given back unless `--folder` says where to keep the preset; then a preset that is there is only loaded.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure
from build_abstract import MODELS

CONFIG = MODELS["Gemma2-9B"][1]
DIGESTS = "digests.json"


def digests(model: Any) -> dict[str, str]:
    """A digest of every variable, from its shards as they lie."""
    return {
        variable.path: _measure.digest(
            shard.data for shard in sorted(variable.value.addressable_shards, key=lambda shard: str(shard.index))
        )
        for variable in model.weights
    }


def child(way: str, where: str, layers: str) -> dict[str, Any]:
    """Saves or loads, in a process of its own."""
    import jax
    import keras_hub
    import numpy as np
    from jax.sharding import Mesh

    import lazymodel as lm
    import lazymodel_keras as lk

    cls = keras_hub.models.GemmaBackbone
    folder, mesh = Path(where), Mesh(np.array(jax.devices()), ("model",))
    _measure.backend()
    begin = time.monotonic()
    with _measure.measured() as report:
        if way == "load":
            model = lk.from_preset(cls, str(folder), mesh=mesh, rules=lm.auto(), progress=False, dtype="bfloat16")
        else:
            abstract = lm.build_abstract(cls, **CONFIG | {"num_layers": int(layers)}, dtype="bfloat16")
            model = abstract.shard(mesh, lm.auto()).materialize(progress=False)
        jax.block_until_ready([variable.value for variable in model.weights])
        ready = time.monotonic()
        if way == "save":
            with lk.streamed_saving():
                model.save_to_preset(str(folder))
    report["steps"] = {"ready": ready - begin, "saved": time.monotonic() - ready}
    report["parameters"] = model.count_params()
    report["nbytes"] = sum(variable.value.nbytes for variable in model.weights)
    found, file = digests(model), folder / DIGESTS
    if way == "save":
        file.write_text(json.dumps(found))
    elif (expected := json.loads(file.read_text())) != found:
        wrong = [path for path in expected if found.get(path) != expected[path]]
        raise SystemExit(f"loaded with other values: {wrong or sorted(found.keys() - expected)}")
    return report


def show(way: str, m: _measure.Measurement, *, as_json: bool) -> None:
    """Prints one process's figures."""
    result, nbytes = m.result, m.result["nbytes"]
    seconds = {"initialize": result["steps"]["ready"], "save": result["steps"]["saved"]}
    if way == "load":
        seconds = {"load": result["steps"]["ready"]}
    rates = {step: nbytes / 1e9 / value for step, value in seconds.items()}
    if as_json:
        found = {"seconds": seconds, "gigabytes_per_second": rates, "peak": m.peak_nbytes / nbytes}
        print(json.dumps({"way": way, "parameters": result["parameters"], "nbytes": nbytes, **found}), flush=True)
        return
    steps = ", ".join(f"{step} {value:.1f} s ({rates[step]:.2f} GB/s)" for step, value in seconds.items())
    print(
        f"{way}: {result['parameters'] / 1e9:.2f} billion parameters, {nbytes / 2**30:.2f} GiB: {steps}; "
        f"peak {m.peak_nbytes / nbytes:.3f} × the model",
        flush=True,
    )


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="keep the preset here, and use the one that is there")
    parser.add_argument("--layers", type=int, default=CONFIG["num_layers"], help="fewer, for a trial")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "preset"
        for way in ("load",) if (folder / DIGESTS).exists() else ("save", "load"):
            show(way, _measure.child(way, folder, options.layers), as_json=options.json)


if __name__ == "__main__":
    main()

"""Peak private memory while parameters and both moments of Adam are materialized over eight virtual CPU devices.

    python tests/benchmarks/adam_memory.py --mib 1024

The model is a stack of equal matrices. Building, compiling and materializing are all inside the measured stretch. The
sizes of the shards on their devices show that nothing was gathered.
"""

from __future__ import annotations

import json
from typing import Any

import _measure

LAYERS = 16


def main() -> None:
    _measure.in_child(materialize)
    parser = _measure.arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of the parameters")
    options = parser.parse_args()
    measured = _measure.child(options.mib * 2**20)
    report = {**measured.result, "peak_nbytes": measured.peak_nbytes, "seconds": measured.seconds}
    report["ratio"] = report["peak_nbytes"] / report["parameter_nbytes"]
    if options.json:
        print(json.dumps(report))
        return
    mib = {name: nbytes / 2**20 for name, nbytes in report.items() if name.endswith("_nbytes")}
    print(f"parameters {mib['parameter_nbytes']:.0f} MiB, with both moments {mib['total_nbytes']:.0f} MiB")
    print(f"peak of private memory {mib['peak_nbytes']:.0f} MiB, {report['ratio']:.2f} × the parameters")
    print(f"largest temporaries {mib['temporary_nbytes']:.0f} MiB over all devices")
    print(f"largest variable {mib['largest_variable_nbytes']:.1f} MiB, shard {mib['largest_shard_nbytes']:.2f} MiB")


def materialize(nbytes: str) -> dict[str, Any]:
    """In the child: builds, shards and materializes a model of this many bytes, and its optimizer's state."""
    import jax
    import numpy as np
    import optax

    import lazymodel as lm

    rows = int(nbytes) // 4 // LAYERS // 1024

    def init(key: Any) -> Any:
        return [jax.random.normal(layer, (rows, 1024)) / 32 for layer in jax.random.split(key, LAYERS)]

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
    jax.block_until_ready(jax.random.normal(jax.random.key(0), (8,)))  # the backend and its threads
    with _measure.measured() as report:
        abstract = lm.build_abstract(init, jax.random.key(0)).with_optimizer(optax.adamw(1e-3))
        abstract = abstract.shard(mesh, {r"\d+": jax.P("model")})
        weights, state = abstract.materialize(progress=False)
    programs = abstract.programs.get_all([(r, [abstract[path].sharding for path in r.paths]) for r in abstract.recipes])
    leaves = jax.tree.leaves((weights, state))
    report["parameter_nbytes"] = sum(array.nbytes for array in weights)
    report["total_nbytes"] = sum(array.nbytes for array in leaves)
    report["temporary_nbytes"] = max(program.temp_nbytes for program in programs) * len(jax.devices())
    report["largest_variable_nbytes"] = max(array.nbytes for array in leaves)
    report["largest_shard_nbytes"] = max(shard.data.nbytes for array in leaves for shard in array.addressable_shards)
    return report


if __name__ == "__main__":
    main()

"""What it takes to initialize a deep, sharded model: one `jax.jit` over the whole tree against lazymodel's programs.

    python tests/benchmarks/init_compile.py [--layers 64] [--runs 3] [--json]

Builds a Flax NNX decoder for eight virtual CPU devices. Each measurement is a process of its own, the two ways in turn,
so that neither finds a warm cache. `whole` is tracing, lowering and compiling `jax.jit(init, out_shardings=…)`;
`lazymodel` is `build_abstract`, `shard` and compiling every program.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import _measure

HIDDEN, HEADS, VOCABULARY = 256, 8, 4096


def decoder(layers: int) -> Any:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.attention_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
            self.mlp_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
            self.query = nnx.LinearGeneral(HIDDEN, (HEADS, HIDDEN // HEADS), use_bias=False, rngs=rngs)
            self.key = nnx.Linear(HIDDEN, HIDDEN // 4, use_bias=False, rngs=rngs)
            self.value = nnx.Linear(HIDDEN, HIDDEN // 4, use_bias=False, rngs=rngs)
            self.output = nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)
            self.gate = nnx.Linear(HIDDEN, 4 * HIDDEN, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(4 * HIDDEN, HIDDEN, use_bias=False, rngs=rngs)

    class Decoder(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.embedding = nnx.Embed(VOCABULARY, HIDDEN, rngs=rngs)
            self.layers = nnx.List([Block(rngs=rngs) for _ in range(layers)])
            self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)

    return Decoder


def child(way: str, layers: str) -> dict[str, Any]:
    import jax
    import numpy as np
    from flax import nnx

    import lazymodel as lm

    cls, mesh = decoder(int(layers)), jax.sharding.Mesh(np.array(jax.devices()), ("model",))

    def spec(shape: tuple[int, ...]) -> jax.P:
        """Matrices are split along their last axis, as column-parallel layers are; vectors are replicated."""
        return jax.P(*[None] * (len(shape) - 1), "model") if len(shape) > 1 else jax.P()

    if way == "whole":
        init, key = (lambda key: nnx.state(cls(rngs=nnx.Rngs(key)))), jax.random.key(0)
        shapes = jax.eval_shape(init, key)  # not counted, though users need the shardings too
        shardings = jax.tree.map(lambda leaf: jax.NamedSharding(mesh, spec(leaf.shape)), shapes)
        jax.clear_caches()
        start = time.perf_counter()
        jax.jit(init, out_shardings=shardings).lower(key).compile()
        return {"seconds": time.perf_counter() - start}
    start = time.perf_counter()
    abstract = lm.build_abstract(cls, rngs=nnx.Rngs(0))
    traced = time.perf_counter() - start
    abstract = abstract.shard(mesh, lambda variable: spec(variable.shape))
    programs = abstract.programs
    programs.get_all([(recipe, [abstract[path].sharding for path in recipe.paths]) for recipe in abstract.recipes])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "trace": traced, "programs": len(programs), "variables": len(abstract)}


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--layers", type=int, default=64)
    options = parser.parse_args()
    measured = _measure.in_turns(
        ("whole", "lazymodel"), options.runs, lambda way: _measure.child(way, options.layers, env=_measure.repository())
    )
    whole, ours = ([run.result["seconds"] for run in runs] for runs in measured.values())
    of = measured["lazymodel"][0].result
    trace = statistics.median(run.result["trace"] for run in measured["lazymodel"])
    ratio = statistics.median(whole) / statistics.median(ours)
    if options.json:
        found = {"layers": options.layers, "variables": of["variables"], "programs": of["programs"]}
        found |= {"whole_seconds": whole, "lazymodel_seconds": ours, "trace_seconds": trace, "ratio": ratio}
        print(json.dumps(found, indent=2))
        return
    print(
        f"{options.layers} layers, {of['variables']} variables, 8 virtual CPU devices, median of {options.runs} runs: "
        f"whole-tree jit {statistics.median(whole):.2f} s, lazymodel {statistics.median(ours):.2f} s "
        f"({trace:.2f} s of it trace) with {of['programs']} programs, {ratio:.1f} × as fast"
    )


if __name__ == "__main__":
    main()

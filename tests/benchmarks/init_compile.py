"""What it takes to initialize a deep, sharded model: one `jax.jit` over the whole tree against lazymodel's programs.

    python tests/benchmarks/init_compile.py --layers 64 --runs 3

Builds a decoder (Flax NNX, and the same in plain JAX) for eight virtual CPU devices. Each measurement is a
process of its own, the two ways alternating, so that neither finds a warm cache. `whole` is tracing, lowering and
compiling `jax.jit(init, out_shardings=…)`; `lazymodel` is `build_abstract`, `shard` and compiling every program. Then
the model, wider (`--memory-hidden`), is built and materialized, compiling included, and its peak of private memory is
set against 1.1 × its parameters and the temporaries of the largest program on all devices. The last step initializes
every layer (`--check-layers` of them) with lazymodel and with the framework's own initialization, run eagerly, and
compares every bit; up to `--check-whole-layers` the whole-tree jit is compared too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import _measure

HIDDEN, HEADS, VOCABULARY = 256, 8, 4096
MODELS = ["nnx", "plain"]


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--check-layers", type=int, help="layers whose values are compared; as --layers by default")
    parser.add_argument("--check-whole-layers", type=int, default=4, help="the most for which whole-tree jit is too")
    parser.add_argument("--memory-hidden", type=int, default=512, help="width for the measurement of memory; 0: none")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    options = parser.parse_args()
    options.check_layers = options.check_layers or options.layers
    report: dict[str, Any] = {"layers": options.layers, "runs": options.runs}
    for model in options.models:
        results: dict[str, list[dict[str, Any]]] = {"whole": [], "lazymodel": []}
        for _ in range(options.runs):
            for way, runs in results.items():
                runs.append(_subprocess(way, model, options))
        whole, ours = ([run["seconds"] for run in results[way]] for way in ("whole", "lazymodel"))
        report[model] = {
            "variables": results["lazymodel"][0]["variables"],
            "programs": results["lazymodel"][0]["programs"],
            "whole_seconds": whole,
            "lazymodel_seconds": ours,
            "trace_seconds": statistics.median(run["trace"] for run in results["lazymodel"]),
            "ratio": statistics.median(whole) / statistics.median(ours),
            **_subprocess("check", model, options),
        }
        if options.memory_hidden:
            measured = [_subprocess("memory", model, options) for _ in range(options.runs)]
            peak = statistics.median(run["peak_nbytes"] for run in measured)
            bound = 1.1 * measured[0]["parameter_nbytes"] + measured[0]["temporary_nbytes"]
            report[model] |= measured[0] | {"peak_nbytes": peak, "bound_nbytes": bound}
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{options.layers} layers, 8 virtual CPU devices, median of {options.runs} runs")
    print("model  variables  whole-tree jit   lazymodel (of which trace)   ratio  programs  variables that differ")
    for model in options.models:
        row = report[model]
        print(
            f"{model:5}  {row['variables']:9}  {statistics.median(row['whole_seconds']):12.2f} s  "
            f"{statistics.median(row['lazymodel_seconds']):8.2f} s ({row['trace_seconds']:.2f} s)           "
            f"{row['ratio']:5.1f}× {row['programs']:9}  {row['different_from_eager']} from the framework's own init, "
            f"of {row['compared_variables']}; {row['different_from_whole']} from whole-tree jit, "
            f"of {row['compared_with_whole']}"
        )
    if not options.memory_hidden:
        return
    print(f"\nmaterializing, hidden size {options.memory_hidden}, private memory")
    print("model  parameters  largest temporaries        peak  × parameters  1.1 × parameters + temporaries")
    for model in options.models:
        row = report[model]
        mib = {name: row[f"{name}_nbytes"] / 2**20 for name in ("parameter", "temporary", "peak", "bound")}
        print(
            f"{model:5}  {mib['parameter']:6.0f} MiB  {mib['temporary']:15.0f} MiB  {mib['peak']:6.0f} MiB  "
            f"{mib['peak'] / mib['parameter']:11.2f}×  {mib['bound']:26.0f} MiB"
        )


def child(way: str, model: str, options: str) -> dict[str, Any]:
    return WAYS[way](model, argparse.Namespace(**json.loads(options)))


def _subprocess(way: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    measurement = _measure.child(way, model, json.dumps(vars(options)), env=_measure.repository())
    return measurement.result | ({"peak_nbytes": measurement.peak_nbytes} if way == "memory" else {})


def _spec(path: str, shape: tuple[int, ...]) -> Any:
    """Matrices are split along their last axis, as column-parallel layers are; vectors are replicated."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*[None] * (len(shape) - 1), "model") if len(shape) > 1 else PartitionSpec()


def _mesh() -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()), ("model",))


def _plain(layers: int, hidden: int) -> Any:
    import jax
    import jax.numpy as jnp

    def matrix(key: Any, rows: int, columns: int, scale: float = 1.0) -> Any:
        return jax.nn.initializers.lecun_normal()(key, (rows, columns), jnp.float32) * scale

    def init(key: Any) -> Any:
        keys = jax.random.split(key, layers + 1)
        tree: dict[str, Any] = {"embedding": jax.random.normal(keys[layers], (VOCABULARY, hidden)) * 0.02}
        for layer in range(layers):
            q, k, v, o, gate, up, down = jax.random.split(keys[layer], 7)
            depth = (2 * (layer + 1)) ** -0.5  # residual projections shrink with depth
            tree[f"layer_{layer}"] = {
                "attention_norm": jnp.ones((hidden,)),
                "mlp_norm": jnp.ones((hidden,)),
                "query": matrix(q, hidden, hidden),
                "key": matrix(k, hidden, hidden // 4),
                "value": matrix(v, hidden, hidden // 4),
                "output": matrix(o, hidden, hidden, depth),
                "gate": matrix(gate, hidden, 4 * hidden),
                "up": matrix(up, hidden, 4 * hidden),
                "down": matrix(down, 4 * hidden, hidden, depth),
            }
        return tree

    return init


def _nnx(layers: int, hidden: int) -> Any:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.attention_norm = nnx.RMSNorm(hidden, rngs=rngs)
            self.mlp_norm = nnx.RMSNorm(hidden, rngs=rngs)
            self.query = nnx.LinearGeneral(hidden, (HEADS, hidden // HEADS), use_bias=False, rngs=rngs)
            self.key = nnx.Linear(hidden, hidden // 4, use_bias=False, rngs=rngs)
            self.value = nnx.Linear(hidden, hidden // 4, use_bias=False, rngs=rngs)
            self.output = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
            self.gate = nnx.Linear(hidden, 4 * hidden, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(hidden, 4 * hidden, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(4 * hidden, hidden, use_bias=False, rngs=rngs)

    class Decoder(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.embedding = nnx.Embed(VOCABULARY, hidden, rngs=rngs)
            self.layers = nnx.List([Block(rngs=rngs) for _ in range(layers)])
            self.norm = nnx.RMSNorm(hidden, rngs=rngs)

    return Decoder


def _init_and_build(model: str, layers: int, hidden: int = HIDDEN) -> tuple[Any, Any]:
    """The framework's own initialization, as a function of a key, and a function that builds abstractly."""
    import jax

    import lazymodel as lm

    if model == "plain":
        init = _plain(layers, hidden)
        return init, lambda: lm.build_abstract(init, jax.random.key(0))
    from flax import nnx

    decoder = _nnx(layers, hidden)
    return (lambda key: nnx.state(decoder(rngs=nnx.Rngs(key)))), lambda: lm.build_abstract(decoder, rngs=nnx.Rngs(0))


def _out_shardings(init: Any) -> Any:
    import jax

    mesh = _mesh()
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jax.NamedSharding(mesh, _spec("", leaf.shape)), shapes)


def _sharded(abstract: Any) -> Any:
    return abstract.shard(_mesh(), lambda variable: _spec(variable.path, variable.shape))


def _measure_whole(model: str, options: argparse.Namespace) -> dict[str, Any]:
    import jax

    init, _ = _init_and_build(model, options.layers)
    shardings = _out_shardings(init)  # not counted, though users need it too
    jax.clear_caches()
    key = jax.random.key(0)
    start = time.perf_counter()
    jax.jit(init, out_shardings=shardings).lower(key).compile()
    return {"seconds": time.perf_counter() - start}


def _measure_lazymodel(model: str, options: argparse.Namespace) -> dict[str, Any]:
    _, build = _init_and_build(model, options.layers)
    start = time.perf_counter()
    abstract = build()
    traced = time.perf_counter() - start
    abstract = _sharded(abstract)
    cache = abstract.programs
    cache.get_all([(recipe, [abstract[path].sharding for path in recipe.paths]) for recipe in abstract.recipes])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "trace": traced, "programs": len(cache), "variables": len(abstract)}


def _measure_memory(model: str, options: argparse.Namespace) -> dict[str, Any]:
    import jax

    _, build = _init_and_build(model, options.layers, options.memory_hidden)
    jax.block_until_ready(jax.random.normal(jax.random.key(0), (8,)))  # the backend and its threads
    with _measure.measured() as report:
        abstract = _sharded(build())
        result = abstract.materialize(progress=False)
        report["parameter_nbytes"] = abstract.nbytes
        programs = {id(program): program for program in abstract.programs.get_all(
            [(recipe, [abstract[path].sharding for path in recipe.paths]) for recipe in abstract.recipes]
        )}  # fmt: skip
        report["temporary_nbytes"] = max(program.temp_nbytes for program in programs.values()) * jax.device_count()
    del result
    return report


def _measure_check(model: str, options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import numpy as np

    def differ(layers: int, run: Any) -> tuple[int, int]:
        init, build = _init_and_build(model, layers)
        ours = _sharded(build()).materialize(progress=False)
        if model == "nnx":
            from flax import nnx

            ours = nnx.state(ours)
        pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(run(init)(jax.random.key(0))), strict=True))
        return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs), len(pairs)

    eager = differ(options.check_layers, lambda init: init)
    shallow = min(options.check_layers, options.check_whole_layers)
    whole = differ(shallow, lambda init: jax.jit(init, out_shardings=_out_shardings(init)))
    return {
        "different_from_eager": eager[0],
        "compared_variables": eager[1],
        "different_from_whole": whole[0],
        "compared_with_whole": whole[1],
    }


WAYS = {
    "whole": _measure_whole,
    "lazymodel": _measure_lazymodel,
    "memory": _measure_memory,
    "check": _measure_check,
}

if __name__ == "__main__":
    main()

"""Seconds until a deep, sharded init can run: one `jax.jit` over the whole tree against lazymodel's init programs.

    python tests/benchmarks/init_compile.py --layers 64 --runs 3

Builds a decoder (Flax NNX, and the same in plain JAX) for eight virtual CPU devices. Each measurement is a process of
its own, the two ways alternating, so that neither finds a warm cache. `whole` is tracing, lowering and compiling
`jax.jit(init, out_shardings=…)`; `lazymodel` is `build_abstract`, `shard` and compiling every program. The last step
initializes a shallower model (`--check-layers`) both ways and eagerly, and compares every bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HIDDEN, HEADS, VOCABULARY = 256, 8, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--check-layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["nnx", "plain"], choices=["nnx", "plain"])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, model = options.one
        print(json.dumps(WAYS[way](model, options.check_layers if way == "check" else options.layers)))
        return
    report: dict[str, Any] = {"layers": options.layers, "runs": options.runs}
    for model in options.models:
        results: dict[str, list[dict[str, Any]]] = {"whole": [], "lazymodel": []}
        for _ in range(options.runs):
            for way, runs in results.items():
                runs.append(_subprocess(way, model, options))
        checked = _subprocess("check", model, options)
        whole, ours = ([run["seconds"] for run in results[way]] for way in ("whole", "lazymodel"))
        report[model] = {
            "variables": results["lazymodel"][0]["variables"],
            "programs": results["lazymodel"][0]["programs"],
            "whole_seconds": whole,
            "lazymodel_seconds": ours,
            "trace_seconds": statistics.median(run["trace"] for run in results["lazymodel"]),
            "ratio": statistics.median(whole) / statistics.median(ours),
            "compared_variables": checked["variables"],
            "different_from_eager": checked["different_from_eager"],
            "different_from_whole": checked["different_from_whole"],
        }
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
            f"{row['ratio']:5.1f}× {row['programs']:9}  {row['different_from_eager']} from eager, "
            f"{row['different_from_whole']} from whole-tree jit, of {row['compared_variables']}"
        )


def _subprocess(way: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", way, model]
    command += ["--layers", str(options.layers), "--check-layers", str(options.check_layers)]
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "integrations"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _spec(path: str, shape: tuple[int, ...]) -> Any:
    """Matrices are split along their last axis, as column-parallel layers are; vectors are replicated."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*[None] * (len(shape) - 1), "model") if len(shape) > 1 else PartitionSpec()


def _mesh() -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()), ("model",))


def _plain(layers: int) -> Any:
    import jax
    import jax.numpy as jnp

    def matrix(key: Any, rows: int, columns: int, scale: float = 1.0) -> Any:
        return jax.nn.initializers.lecun_normal()(key, (rows, columns), jnp.float32) * scale

    def init(key: Any) -> Any:
        keys = jax.random.split(key, layers + 1)
        tree: dict[str, Any] = {"embedding": jax.random.normal(keys[layers], (VOCABULARY, HIDDEN)) * 0.02}
        for layer in range(layers):
            q, k, v, o, gate, up, down = jax.random.split(keys[layer], 7)
            depth = (2 * (layer + 1)) ** -0.5  # residual projections shrink with depth
            tree[f"layer_{layer}"] = {
                "attention_norm": jnp.ones((HIDDEN,)),
                "mlp_norm": jnp.ones((HIDDEN,)),
                "query": matrix(q, HIDDEN, HIDDEN),
                "key": matrix(k, HIDDEN, HIDDEN // 4),
                "value": matrix(v, HIDDEN, HIDDEN // 4),
                "output": matrix(o, HIDDEN, HIDDEN, depth),
                "gate": matrix(gate, HIDDEN, 4 * HIDDEN),
                "up": matrix(up, HIDDEN, 4 * HIDDEN),
                "down": matrix(down, 4 * HIDDEN, HIDDEN, depth),
            }
        return tree

    return init


def _nnx(layers: int) -> Any:
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


def _init_and_args(model: str, layers: int) -> tuple[Any, Any]:
    """A function of a key that returns the tree of arrays, and a function that builds abstractly."""
    import jax

    import lazymodel as lm

    if model == "plain":
        init = _plain(layers)
        return init, lambda: lm.build_abstract(init, jax.random.key(0))
    from flax import nnx

    decoder = _nnx(layers)
    return (lambda key: nnx.state(decoder(rngs=nnx.Rngs(key)))), lambda: lm.build_abstract(decoder, rngs=nnx.Rngs(0))


def _out_shardings(init: Any) -> Any:
    import jax

    mesh = _mesh()
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jax.NamedSharding(mesh, _spec("", leaf.shape)), shapes)


def _measure_whole(model: str, layers: int) -> dict[str, Any]:
    import jax

    init, _ = _init_and_args(model, layers)
    shardings = _out_shardings(init)  # not counted, though users need it too
    jax.clear_caches()
    key = jax.random.key(0)
    start = time.perf_counter()
    jax.jit(init, out_shardings=shardings).lower(key).compile()
    return {"seconds": time.perf_counter() - start}


def _measure_lazymodel(model: str, layers: int) -> dict[str, Any]:
    from lazymodel._init_programs import ProgramCache

    _, build = _init_and_args(model, layers)
    start = time.perf_counter()
    abstract = build()
    traced = time.perf_counter() - start
    mesh = _mesh()
    shardings = {path: _sharding(mesh, path, variable.shape) for path, variable in abstract.items()}
    cache: ProgramCache = abstract.programs
    cache.get_all([(recipe, [shardings[path] for path in recipe.paths]) for recipe in abstract.recipes])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "trace": traced, "programs": len(cache), "variables": len(abstract)}


def _sharding(mesh: Any, path: str, shape: tuple[int, ...]) -> Any:
    import jax

    return jax.NamedSharding(mesh, _spec(path, shape))


def _measure_check(model: str, layers: int) -> dict[str, Any]:
    import jax
    import numpy as np

    init, build = _init_and_args(model, layers)
    key = jax.random.key(0)
    abstract = build().shard(_mesh(), lambda variable: _spec(variable.path, variable.shape))
    ours = abstract.materialize()
    if model == "nnx":
        from flax import nnx

        ours = nnx.state(ours)
    eager, whole = init(key), jax.jit(init, out_shardings=_out_shardings(init))(key)

    def differ(other: Any) -> int:
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True)
        return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)

    return {
        "variables": len(abstract),
        "different_from_eager": differ(eager),
        "different_from_whole": differ(whole),
    }


WAYS = {"whole": _measure_whole, "lazymodel": _measure_lazymodel, "check": _measure_check}

if __name__ == "__main__":
    main()

"""A sampler follows its trainer: `lm.Sync` beside Tunix' `transfer_state_with_mappings` and `reshard_pytree`.

    python tests/benchmarks/sync.py [--runs 5] [--json]        # needs google-tunix 0.1.7

Tunix' own Qwen3 and Llama3, float32 on one mesh, and the state of vLLM's JAX models, bfloat16 under other names and
layouts on another mesh, by Tunix' own table for them; eight virtual devices. The devices are halves of the eight, or
the same eight. Both ways run in turns in one process for times, and each in a process of its own for memory, which is
private memory: both models, and what was needed meanwhile.
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
import time
from typing import Any

import _measure

_SIZES: dict[str, Any] = {"num_layers": 16, "vocab_size": 16384, "embed_dim": 512, "hidden_dim": 1536}
_SIZES |= {"num_heads": 8, "head_dim": 64, "num_kv_heads": 4, "norm_eps": 1e-6}
MODELS = {
    "qwen3": _SIZES | {"rope_theta": 1_000_000, "use_tied_embedding": True},
    "llama3": _SIZES | {"rope_theta": 500_000, "weight_tying": False},
}
CLASSES = {"qwen3": "Qwen3", "llama3": "Llama3"}


def models(name: str, devices: str) -> tuple[Any, Any, Any, Any]:
    """The live trainer and the sampler's state, Tunix' mapping, and the same as a `WeightMap`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import lazymodel as lm

    module = importlib.import_module(f"tunix.models.{name}.model")
    known = {key: value for key, value in MODELS[name].items() if key in module.ModelConfig.__dataclass_fields__}
    config = module.ModelConfig(**known)
    here, there = (slice(0, 4), slice(4, 8)) if devices == "halves" else (slice(0, 8), slice(0, 8))
    every = np.array(jax.devices())
    training, sampling = Mesh(every[here].reshape(-1, 2), ("fsdp", "tp")), Mesh(every[there], ("model",))
    abstract = lm.build_abstract(getattr(module, CLASSES[name]), config, rngs=nnx.Rngs(params=0))
    trainer = abstract.shard(training).materialize()
    table = importlib.import_module(f"tunix.models.{name}.mapping_vllm_jax").VLLM_JAX_MAPPING["to_hf_mappings"]
    state = {".".join(map(str, keys)): leaf for keys, leaf in nnx.state(trainer, nnx.Param).flat_state()}
    target: dict[tuple[Any, ...], Any] = {}
    entries: dict[str, Any] = {}
    for source, (path, axes) in table.items():
        pattern = re.escape(source).replace(r"\*", r"(\d+)")
        found = [(match, value) for key, value in state.items() if (match := re.fullmatch(pattern, key))]
        if found:
            entries[path.replace(".", "/").replace("*", "{layer}")] = source.replace(".", "/").replace("*", "{layer}")
        for match, value in found:
            numbers = iter(match.groups())
            keys = tuple(int(next(numbers)) if key == "*" else key for key in path.split("."))
            fits = [
                axis if axis and extent % sampling.size == 0 else None
                for axis, extent in zip(axes, value.shape, strict=False)
            ]
            place = NamedSharding(sampling, P(*fits))
            target[keys] = nnx.Param(jax.device_put(jnp.zeros(value.shape, jnp.bfloat16), place))
    return trainer, nnx.State.from_flat_path(target), table, lm.WeightMap(entries)


def by_tunix(trainer: Any, sampler: Any, table: Any) -> Any:
    from flax import nnx
    from tunix.generate.utils import transfer_state_with_mappings
    from tunix.rl.reshard import reshard_pytree

    return transfer_state_with_mappings(nnx.state(trainer, nnx.Param), sampler, table, reshard_fn=reshard_pytree)


def measure_times(name: str, devices: str, runs: str) -> dict[str, Any]:
    import jax
    import numpy as np
    from flax import nnx

    import lazymodel as lm

    trainer, sampler, table, mapping = models(name, devices)
    own = jax.tree.map(jax.numpy.copy, sampler)
    start = time.perf_counter()
    sync = lm.Sync(trainer, own, mapping)
    planned = time.perf_counter() - start
    seconds: dict[str, list[float]] = {"tunix": [], "sync": []}
    for run in range(int(runs) + 1):
        # As after a step: new arrays, of which no host copy is cached.
        stepped = jax.block_until_ready(
            jax.tree.map(lambda leaf: leaf * np.float32(1.5), nnx.state(trainer, nnx.Param))
        )
        nnx.update(trainer, stepped)
        start = time.perf_counter()
        sampler = jax.block_until_ready(by_tunix(trainer, sampler, table))
        middle = time.perf_counter()
        own = jax.block_until_ready(sync(trainer, into=own))
        end = time.perf_counter()
        if run:
            seconds["tunix"].append(middle - start)
            seconds["sync"].append(end - middle)
        for one, other in zip(jax.tree.leaves(sampler), jax.tree.leaves(own), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    found = {key: statistics.median(values) for key, values in seconds.items()}
    leaves = jax.tree.leaves(own)
    found |= {"planned": planned, "variables": len(leaves), "nbytes": sum(leaf.nbytes for leaf in leaves)}
    return found | {"moved": sync.moved_nbytes, "groups": sync.num_groups, "programs": len(sync.compiled)}


def measure_peak(name: str, devices: str, way: str) -> dict[str, Any]:
    import jax

    import lazymodel as lm

    trainer, sampler, table, mapping = models(name, devices)
    sync = lm.Sync(trainer, sampler, mapping)
    jax.block_until_ready((trainer, sampler))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((trainer, sampler)))
    with _measure.measured() as report:
        jax.block_until_ready(by_tunix(trainer, sampler, table) if way == "tunix" else sync(trainer, into=sampler))
    return report | {"held": held}


def main() -> None:
    given = _measure.arguments(__doc__, runs=5).parse_args()
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        for devices in ("halves", "same"):
            row = {"model": name, "devices": devices}
            row |= _measure.child("times", name, devices, given.runs).result
            for way in ("tunix", "sync"):
                measured = _measure.child("peaks", name, devices, way)
                row[f"extra_{way}"] = measured.peak_nbytes
            rows.append(row)
            if not given.json:
                mib = {key: row[key] / 2**20 for key in ("nbytes", "moved", "extra_tunix", "extra_sync")}
                times = f"Tunix {row['tunix']:.3f} s, Sync {row['sync']:.3f} s ({row['tunix'] / row['sync']:.1f} x)"
                memory = f"Tunix {mib['extra_tunix']:.0f} MiB, Sync {mib['extra_sync']:.0f} MiB"
                plan = f"{row['planned']:.1f} s, {row['groups']} groups, {row['programs']} programs"
                print(f"{name} {devices}: {row['variables']} variables, {mib['nbytes']:.0f} MiB: {times}")
                print(f"  over both models: {memory}; planned in {plan}", flush=True)
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    _measure.in_child(lambda how, *words: {"times": measure_times, "peaks": measure_peak}[how](*words))
    sys.exit(main())

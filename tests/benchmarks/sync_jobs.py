"""A trainer and a sampler that are two programs: `lm.SyncClient` beside a plain pull, and beside files.

    python tests/benchmarks/sync_jobs.py [--runs 5] [--mib 512] [--json]

The trainer has float32 on 4 virtual devices, the sampler bfloat16 under other names and split otherwise on 8: the
layers stacked on one axis, attention in parts. In turns, in the same two processes: `sync.pull`, in place; a plain pull
by `jax.experimental.transfer` of as many bytes, in arrays of 16 MiB that are each on one device; and what people do,
the trainer writes safetensors with the package of that name, in bfloat16, and the sampler loads the file and puts
each tensor onto its devices. Seconds are the sampler's; for files, they include the trainer's. `pause` is how long the
sampler's old values are not there: all of a pull in place, nothing with `donate=False`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import _measure

assert _measure.ROOT
_PIECE = 16 << 20


def models(layers: int, width: int) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import lazymodel as lm

    devices = np.array(jax.devices())
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}

    def train() -> Any:
        return {f"layers_{n}": {name: jnp.ones(shape) for name, shape in shapes.items()} for n in range(layers)}

    def sample() -> Any:
        half = ml_dtypes.bfloat16
        stacked = {name: jnp.zeros((layers, *shapes[name]), half) for name in ("out", "up", "down")}
        return stacked | {name: jnp.zeros((layers, width, width), half) for name in "qkv"}

    trainer = lm.build_abstract(train).shard(Mesh(devices, ("data",)), {".*": P("data")})
    rules = {"(q|k|v|up)": P(None, None, "model"), "out|down": P(None, "model")}
    sampler = lm.build_abstract(sample).shard(Mesh(devices, ("model",)), rules)
    table = {name: lm.From(f"layers_{{layer}}/{name}").stack("layer") for name in ("out", "up", "down")}
    parts = {name: lm.From("layers_{layer}/qkv").part(n, of=3, axis=1).stack("layer") for n, name in enumerate("qkv")}
    return trainer, sampler, lm.WeightMap(table | parts)


def train(folder: str, layers: str, width: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import transfer
    from safetensors.numpy import save_file

    import lazymodel as lm

    trainer, _, _ = models(int(layers), int(width))
    training = trainer.materialize()
    halves = jax.tree.map(lambda array: array.astype(jnp.bfloat16), training)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(halves))
    devices = jax.devices()
    pieces = [jax.device_put(np.full(_PIECE, n, np.uint8), devices[n % len(devices)]) for n in range(nbytes // _PIECE)]
    plain = transfer.start_transfer_server(devices[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
    with lm.SyncServer(trainer) as server, Listener() as listener:
        server.publish(training)
        ready = {"address": server.address, "plain": plain.address(), "listener": listener.address}
        Path(folder, "ready.tmp").write_text(json.dumps(ready))
        Path(folder, "ready.tmp").rename(Path(folder, "ready"))
        with listener.accept() as asked:
            while (what := asked.recv()) != "end":
                number = secrets.randbits(60)
                if what == "plain":
                    plain.await_pull(number, pieces)
                else:
                    flat = {
                        f"{layer}.{name}": np.asarray(a) for layer, own in halves.items() for name, a in own.items()
                    }
                    save_file(flat, Path(folder, "weights.safetensors"))
                asked.send((number, len(pieces)))


def sample(folder: str, layers: str, width: str, runs: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import transfer
    from jax.sharding import SingleDeviceSharding
    from safetensors import safe_open

    import lazymodel as lm

    _, sampler, table = models(int(layers), int(width))
    while not Path(folder, "ready").exists():
        time.sleep(0.05)
    ready = json.loads(Path(folder, "ready").read_text())
    began = time.perf_counter()
    sync = lm.SyncClient(ready["address"], sampler, table)
    planned = time.perf_counter() - began
    sampling = sampler.materialize()
    found: dict[str, list[float]] = {"sync": [], "beside": [], "plain": [], "files": []}
    devices = jax.devices()
    link = transfer.start_transfer_server(devices[0].client, "127.0.0.1:0", ["127.0.0.1:0"]).connect(ready["plain"])
    shardings = {path: variable.sharding for path, variable in sampler.items()}

    def load() -> Any:
        with safe_open(Path(folder, "weights.safetensors"), "np") as file:
            each = [
                {name: file.get_tensor(f"layers_{n}.{name}") for name in ("qkv", "out", "up", "down")}
                for n in range(int(layers))
            ]
        whole = {name: np.stack([one[name] for one in each]) for name in ("out", "up", "down")}
        for n, name in enumerate("qkv"):
            whole[name] = np.stack([np.split(one["qkv"], 3, axis=1)[n] for one in each])
        return {name: jax.device_put(value, shardings[name]) for name, value in whole.items()}

    with Client(ready["listener"]) as trainer:
        for run in range(int(runs) + 1):
            for what in found:
                began = time.perf_counter()
                if what == "sync":
                    sampling = jax.block_until_ready(sync.pull(into=sampling))
                elif what == "beside":
                    sampling = jax.block_until_ready(sync.pull(into=sampling, donate=False))
                else:
                    trainer.send(what)
                    number, count = trainer.recv()
                    if what == "plain":
                        structs = [
                            jax.ShapeDtypeStruct(
                                (_PIECE,), jnp.uint8, sharding=SingleDeviceSharding(devices[n % len(devices)])
                            )
                            for n in range(count)
                        ]
                        jax.block_until_ready(link.pull(number, structs))
                    else:
                        loaded = jax.block_until_ready(load())
                        assert all(bool((loaded[name] == sampling[name]).all()) for name in loaded) or run
                if run:
                    found[what].append(time.perf_counter() - began)
        trainer.send("end")
    seconds = {what: statistics.median(times) for what, times in found.items()}
    print(json.dumps({"nbytes": sync.moved_nbytes, "planned": planned, "groups": sync.num_groups, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="of the sampler")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    width = 1024
    layers = max(given.mib // (12 * width * width * 2 >> 20), 1)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}

        def start(role: str, devices: int, *more: object) -> subprocess.Popen[str]:
            flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
            command = [sys.executable, __file__, role, folder, str(layers), str(width), *map(str, more)]
            return subprocess.Popen(command, env=environment | flags, stdout=subprocess.PIPE, text=True)

        trainer, sampler = start("train", 4), start("sample", 8, given.runs)
        try:
            result = json.loads(sampler.communicate()[0])
        finally:
            sampler.kill()
            trainer.terminate()
    if given.json:
        print(json.dumps(result))
        return
    seconds, nbytes = result["seconds"], result["nbytes"]
    print(f"{nbytes / 2**20:.0f} MiB, {layers} layers, {result['groups']} groups, planned in {result['planned']:.1f} s")
    for what, each in seconds.items():
        print(f"{what:>7}: {each:6.3f} s, {nbytes / each / 1e9:5.2f} GB/s")
    rate, files = (seconds[what] / seconds["sync"] for what in ("plain", "files"))
    print(f"of the plain pull's rate: {rate:.2f}; beside files: {files:.1f} ×")


if __name__ == "__main__":
    roles = {"train": train, "sample": sample}
    roles[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in roles else main()

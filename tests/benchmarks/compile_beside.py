"""Loading and compiling, one after the other and at the same time: a JAX decoder's training step.

Run as `python tests/benchmarks/compile_beside.py [RUNS]`; needs 1 GiB of memory and disk. Every figure is the median of
as many processes, the ways taking turns, in seconds after imports: from the start of `build_abstract` to the end of the
first step. Files are local, or behind a link that is capped so that loading takes as long as compiling.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from _measure import script

from tests.servers.object_server import ObjectServer

LAYERS, WIDTH, VOCABULARY = 16, 512, 8192
SHAPES = {"query": (1, 1), "key": (1, 1), "value": (1, 1), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
WAYS = ("load", "compile", "serial", "beside")


def init(key: Any) -> dict[str, Any]:
    import jax

    def kernel(path: int, rows: int, columns: int) -> Any:
        return jax.random.normal(jax.random.fold_in(key, path), (rows * WIDTH, columns * WIDTH)) * WIDTH**-0.5

    layers = [{name: kernel(10 * n + i, *SHAPES[name]) for i, name in enumerate(SHAPES)} for n in range(LAYERS)]
    return {"embedding": jax.random.normal(key, (VOCABULARY, WIDTH)) * 0.02, "layers": layers}


def train(params: Any, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def block(layer: Any, x: Any) -> Any:
        query, key, value = (x @ layer[name] for name in ("query", "key", "value"))
        scores = jnp.where(jnp.tri(x.shape[1]) > 0, query @ key.swapaxes(1, 2) * WIDTH**-0.5, -1e9)
        x = x + jax.nn.softmax(scores) @ value @ layer["out"]
        return x + jax.nn.gelu(x / jnp.std(x, axis=-1, keepdims=True) @ layer["up"]) @ layer["down"]

    def loss(params: Any) -> Any:
        x = params["embedding"][tokens]
        for layer in params["layers"]:
            x = block(layer, x)
        logits = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], axis=-1))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value


def child(way: str, url: str) -> None:
    import jax
    import numpy as np

    import lazymodel as lm

    options = {"client_options": {"allow_http": True}} if "://" in url else None
    tokens = np.zeros((1, 16), "int32")
    step = jax.jit(train, donate_argnums=0)
    jax.block_until_ready(jax.device_put(tokens))  # the backend is there
    start, cpu = time.perf_counter(), time.process_time()
    abstract = lm.build_abstract(init, jax.random.key(0))
    if way == "compile":
        step.lower(abstract.tree, tokens).compile()
    else:
        checkpoint = lm.open_checkpoint(url, storage_options=options) if options else lm.open_checkpoint(url)
        compile = lm.Compile(step, tokens) if way == "beside" else None
        params = abstract.materialize(checkpoint, initialize="nothing", compile=compile, progress=False)
        if way != "load":
            jax.block_until_ready(step(params, tokens))
    print(json.dumps([time.perf_counter() - start, time.process_time() - cpu]))


def measured(runs: int, url: str) -> dict[str, tuple[float, float]]:
    """Each way's medians of seconds, and of seconds of processor time."""
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    environment = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for _ in range(runs):
        for way, times in found.items():
            times.append(script([__file__, "--child", way, url], env=environment))
    return {way: (statistics.median(wall), statistics.median(cpu)) for way, (wall, cpu) in _columns(found).items()}


def _columns(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    return {way: list(zip(*times, strict=True)) for way, times in found.items()}


def show(title: str, seconds: dict[str, tuple[float, float]]) -> None:
    longer = max(seconds["load"][0], seconds["compile"][0])
    print(title)
    for way, (wall, cpu) in seconds.items():
        times = f"{wall / longer:4.2f} × the longer of loading and compiling"
        print(f"  {way:8} {wall:6.2f} s   {times}   ({cpu:.2f} s of processors)", flush=True)


def main(runs: int) -> None:
    import jax

    import lazymodel as lm

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bucket" / "model.safetensors"
        path.parent.mkdir()
        lm.save(lm.build_abstract(init, jax.random.key(0)).materialize(progress=False), path, progress=False)
        size = path.stat().st_size
        local = measured(runs, str(path))
        show(f"local file of {size / 1e6:.0f} MB", local)
        with ObjectServer(Path(folder)) as server:
            bandwidth = size / local["compile"][0]
            server.configure(bandwidth=bandwidth)
            show(f"behind a link of {bandwidth / 1e6:.0f} MB/s", measured(runs, server.url("bucket/model.safetensors")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

"""Running a model that is never whole, against the whole model: memory, time, programs, and equal results.

    python tests/benchmarks/run.py [--runs 2] [--layers 30] [--depths 8 32 64] [--folder FOLDER] [--json]

A decoder of the shape of SmolLM2 (135 million parameters in float32, 513 MiB, with the embedding as its head) reads 48
tokens of a safetensors file: `forward` returns the logits, `norms` the norm of the gradient of every variable. `whole`
materializes the model and calls a jitted function, `run` is `abstract.run`; both by turns, each in a process of its
own, on one CPU device. Peaks are of private memory over what the process held before, beside the bytes of the model,
and contain what compiling takes. Differences are shares of the largest value. Then it counts the programs at several
depths. Time is from opening the checkpoint to the result, with compiling; the machine should be idle.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _measure

WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, WORDS, TOKENS = 576, 9, 3, 64, 1536, 49152, 48


def decoder(layers: int) -> Any:
    """The init function."""
    import jax
    import jax.numpy as jnp

    shapes = {
        "query": (WIDTH, HEADS * HEAD), "key": (WIDTH, KV_HEADS * HEAD), "value": (WIDTH, KV_HEADS * HEAD),
        "out": (HEADS * HEAD, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    }  # fmt: skip

    def init(key: jax.Array) -> Any:
        def layer(key: jax.Array) -> dict[str, jax.Array]:
            keys = jax.random.split(key, len(shapes))
            pairs = zip(keys, shapes.items(), strict=True)
            found = {name: jax.random.normal(k, shape) * 0.02 for k, (name, shape) in pairs}
            return found | {"before": jnp.ones(WIDTH), "between": jnp.ones(WIDTH)}

        first, *keys = jax.random.split(key, layers + 1)
        embedding = jax.random.normal(first, (WORDS, WIDTH)) * 0.02
        return {"embedding": embedding, "layers": [layer(each) for each in keys], "norm": jnp.ones(WIDTH)}

    return init


def forward(model: Any, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def normed(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    def rotated(x: Any) -> Any:
        angles = jnp.arange(TOKENS)[:, None] * 1e4 ** (-jnp.arange(0, HEAD, 2) / HEAD)
        cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).reshape(x.shape)

    x, mask = model["embedding"][tokens], jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    for layer in model["layers"]:
        h = normed(x, layer["before"])
        query, key, value = ((h @ layer[name]).reshape(TOKENS, -1, HEAD) for name in ("query", "key", "value"))
        key, value = (jnp.repeat(each, HEADS // KV_HEADS, 1) for each in (rotated(key), value))
        scores = jnp.einsum("shd,thd->hst", rotated(query), key) / HEAD**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        x = x + jnp.einsum("hst,thd->shd", weights, value).reshape(TOKENS, -1) @ layer["out"]
        h = normed(x, layer["between"])
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return normed(x, model["norm"]) @ model["embedding"].T


def norms(model: Any, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def loss(model: Any) -> Any:
        words = jax.nn.log_softmax(forward(model, tokens))
        return -jnp.take_along_axis(words[:-1], tokens[1:, None], 1).mean()

    return jax.tree.map(lambda gradient: jnp.sqrt(jnp.sum(gradient * gradient)), jax.grad(loss)(model))


FUNCTIONS = {"forward": forward, "norms": norms}


def work(how: str, name: str, layers: str, path: str) -> dict[str, Any]:
    """What a process does: `save` writes the model; others return what they found."""
    import jax
    import numpy as np

    import lazymodel as lm

    abstract = lm.build_abstract(decoder(int(layers)), jax.random.key(0))
    if how == "save":
        lm.save(abstract, path, overwrite=True)
        return {"nbytes": abstract.nbytes}
    tokens = jax.block_until_ready(jax.random.randint(jax.random.key(1), (TOKENS,), 0, WORDS))
    reports: list[lm.RunReport] = []
    with _measure.measured() as found:
        checkpoint = lm.open_checkpoint(path) if Path(path).exists() else None
        if how == "run":
            result = abstract.run(FUNCTIONS[name], tokens, checkpoint=checkpoint, report=reports.append)
        else:
            result = jax.jit(FUNCTIONS[name])(abstract.materialize(checkpoint), tokens)
        result = jax.block_until_ready(result)
    np.save(f"{path}-{how}-{name}.npy", np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result)]))
    if reports:
        report = reports[0]
        found |= {"programs": len(report.rows), "calls": report.calls, "predicted": report.peak_nbytes}
        found |= {"loaded": report.loaded_nbytes, "again": report.again_nbytes}
    return found


def main() -> None:
    parser = _measure.arguments(__doc__, runs=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--depths", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = os.path.join(folder, "model.safetensors")
        nbytes = _measure.child("save", "-", options.layers, path, devices=None).result["nbytes"]
        for name in FUNCTIONS:
            runs: dict[str, list[_measure.Measurement]] = {"whole": [], "run": []}
            for _ in range(options.runs):
                for how, measured in runs.items():
                    measured.append(_measure.child(how, name, options.layers, path, devices=None))
            one, other = (_values(f"{path}-{how}-{name}.npy") for how in runs)
            found[name] = {
                how: {
                    "seconds": statistics.median(each.seconds for each in measured),
                    "peak": max(each.peak_nbytes for each in measured) / nbytes,
                    **measured[-1].result,
                }
                for how, measured in runs.items()
            }
            found[name]["difference"] = float(abs(one - other).max() / abs(one).max())
        found["nbytes"], missing = nbytes, os.path.join(folder, "missing")
        found["programs"] = {
            layers: {
                name: _measure.child("run", name, layers, missing, devices=None).result["programs"]
                for name in FUNCTIONS
            }
            for layers in options.depths
        }
    print(json.dumps(found, indent=2) if options.json else _text(found))


def _values(path: str) -> Any:
    import numpy as np

    return np.load(path)


def _text(found: dict[str, Any]) -> str:
    lines = [f"a model of {found['nbytes'] / 2**20:.0f} MiB"]
    for name in FUNCTIONS:
        for how in ("whole", "run"):
            one = found[name][how]
            line = f"{name:8} {how:6} {one['seconds']:6.2f} s, peak {one['peak']:.2f} × the model"
            if how == "run":
                line += (
                    f" ({one['predicted'] / found['nbytes']:.2f} predicted for the device), {one['calls']} calls of "
                    f"{one['programs']} programs, {one['loaded'] / 2**20:.0f} MiB read, "
                    f"{one['again'] / 2**20:.0f} of them again; {found[name]['difference']:.0e} off"
                )
            lines.append(line)
    for layers, programs in found["programs"].items():
        lines.append(f"{layers:3} layers: {', '.join(f'{count} programs {name}' for name, count in programs.items())}")
    return "\n".join(lines)


if __name__ == "__main__":
    _measure.in_child(work)
    main()

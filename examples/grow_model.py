"""Grow a small decoder into a deeper, a wider and an expert-split one that compute the same function.

    python examples/grow_model.py

The larger models are materialized from the small one's checkpoint through `lazymodel.grow`: no larger checkpoint is
written, and every device reads only what its shard needs.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not any(Path("/dev").glob("accel*")) and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm

VOCABULARY, SIZE, HEADS = 256, 64, 4


def init(key: jax.Array, layers: int = 2, hidden: int = 128, experts: int = 0) -> dict:
    """A decoder with pre-norm residual layers; with experts, each layer has as many feed-forward networks."""
    normal = jax.nn.initializers.normal(0.1)
    keys = iter(jax.random.split(key, 8 * layers + 2))

    def network() -> dict:
        stack = (experts,) if experts else ()
        up, down = normal(next(keys), (*stack, SIZE, hidden)), normal(next(keys), (*stack, hidden, SIZE))
        return {"up": up, "up_bias": jnp.zeros((*stack, hidden)), "down": down, "down_bias": jnp.zeros((*stack, SIZE))}

    def layer() -> dict:
        attention = {name: normal(next(keys), (SIZE, SIZE)) for name in ("query", "key", "value", "out")}
        made = {"attention": attention, "norm": jnp.ones(SIZE), "mlp_norm": jnp.ones(SIZE)}
        if experts:
            return {**made, "experts": network(), "router": normal(next(keys), (SIZE, experts))}
        return {**made, "mlp": network()}

    embed, readout = normal(next(keys), (VOCABULARY, SIZE)), normal(next(keys), (SIZE, VOCABULARY))
    return {"embed": embed, "readout": readout, "layers": [layer() for _ in range(layers)]}


def apply(model: dict, tokens: jax.Array) -> jax.Array:
    x = model["embed"][tokens]
    for layer in model["layers"]:
        y, weights = norm(x, layer["norm"]), layer["attention"]
        q, k, v = ((y @ weights[name]).reshape(*y.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(y.shape) @ weights["out"]
        y = norm(x, layer["mlp_norm"])
        x = x + (mixture(layer, y) if "experts" in layer else network(layer["mlp"], y))
    return x @ model["readout"]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def network(weights: dict, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ weights["up"] + weights["up_bias"]) @ weights["down"] + weights["down_bias"]


def mixture(layer: dict, x: jax.Array) -> jax.Array:
    """The two best experts of each token, with gates that sum to one."""
    scores, chosen = jax.lax.top_k(x @ layer["router"], 2)
    outputs = jax.vmap(network, (0, None), -2)(layer["experts"], x)
    picked = jnp.take_along_axis(outputs, chosen[..., None], axis=-2)
    return (picked * jax.nn.softmax(scores)[..., None]).sum(-2)


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("model",))
    tokens = jax.random.randint(jax.random.key(1), (4, 32), 0, VOCABULARY)

    def build(checkpoint: Mapping[str, Any] | None = None, **config: int) -> dict:
        abstract = lm.build_abstract(init, jax.random.key(0), **config)
        last = abstract.shard(mesh, lambda variable: P(*[None] * (len(variable.shape) - 1), "model"))
        return last.materialize(checkpoint, initialize="missing")

    def logits(model: dict) -> np.ndarray:
        return np.asarray(jax.jit(apply)(model, tokens))

    small = build()
    with tempfile.TemporaryDirectory() as folder:
        lm.save(small, Path(folder) / "small.safetensors")
        weights = lm.open_checkpoint(Path(folder) / "small.safetensors")

        additions = ["layers/{layer}/attention/out", "layers/{layer}/mlp/down", "layers/{layer}/mlp/down_bias"]
        deeper = lm.grow.depth(weights, "layers/{layer}/{rest...}", 6, zero=additions)
        copied = lm.grow.depth(weights, "layers/{layer}/{rest...}", 6)
        wider = lm.grow.width(
            weights,
            320,
            incoming={"layers/{layer}/mlp/up": 1, "layers/{layer}/mlp/up_bias": 0},
            outgoing={"layers/{layer}/mlp/down": 0},
            uneven=0.5,
        )
        split = lm.grow.experts(weights, {"layers/{layer}/mlp/{rest}": "layers/{layer}/experts/{rest}"}, 8)
        grown = {
            "6 layers, new ones zero": build(deeper, layers=6),
            "6 layers, copies": build(copied, layers=6),
            "320 hidden units": build(wider, hidden=320),
            "8 experts": build(split, experts=8),
        }

    expected = logits(small)
    print(f"{'grown from 2 layers, 128 hidden units':40} {'parameters':>10}   largest change of a logit")
    for name, model in grown.items():
        count = sum(leaf.size for leaf in jax.tree.leaves(model))
        print(f"{name:40} {count:10,}   {np.abs(logits(model) - expected).max():.1e}")


if __name__ == "__main__":
    main()

"""Layers as functions of a dict of arrays, with the names and shapes of published models, and models of such layers.

Each comes with the rules that its authors, or Megatron's scheme, would give, over the axes `data` and `model`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import lazymodel as lm

Shapes = dict[str, tuple[int, ...]]
COLUMNS, ROWS = P("data", "model"), P("model", "data")


class Layer(NamedTuple):
    shapes: Shapes
    apply: Callable[[Any, Any], Any]  # of a dict like `shapes`, and (rows, length, width)
    rules: dict[str, P]


def normed(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attended(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(*q.shape[:2], -1)


def _scanned(decay: Any, added: Any) -> Any:
    """x[t] = decay[t] · x[t - 1] + added[t] along dimension 1, without a loop."""

    def then(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(then, (decay, added), axis=1)[1]


def decoder(width: int, heads: int = 8) -> Layer:
    """Llama's, by KerasHub's names."""
    each = width // heads
    shapes = {
        "self_attention_layernorm/scale": (width,),
        **{f"self_attention/{name}/kernel": (width, heads, each) for name in ("query", "key", "value")},
        "self_attention/attention_output/kernel": (heads, each, width),
        "feedforward_layernorm/scale": (width,),
        "feedforward_intermediate_dense/kernel": (width, 3 * width),
        "feedforward_gate_dense/kernel": (width, 3 * width),
        "feedforward_output_dense/kernel": (3 * width, width),
    }

    def layer(p: Any, x: Any) -> Any:
        y = normed(x, p["self_attention_layernorm/scale"])
        q, k, v = (
            jnp.einsum("btm,mhd->bthd", y, p[f"self_attention/{name}/kernel"]) for name in ("query", "key", "value")
        )
        x += attended(q, k, v) @ p["self_attention/attention_output/kernel"].reshape(-1, x.shape[-1])
        y = normed(x, p["feedforward_layernorm/scale"])
        gate, up = y @ p["feedforward_gate_dense/kernel"], y @ p["feedforward_intermediate_dense/kernel"]
        return x + (jax.nn.silu(gate) * up) @ p["feedforward_output_dense/kernel"]

    rules = {
        ".*(query|key|value)/kernel": P("data", "model"),
        ".*attention_output/kernel": P("model", None, "data"),
        ".*(intermediate|gate)_dense/kernel": COLUMNS,
        ".*output_dense/kernel": ROWS,
    }
    return Layer(shapes, layer, rules)


def peer(width: int, down: str = "down_embed/embedding", up: str = "up_embed/embedding") -> Layer:
    """One of a thousand experts for each of four heads' four best products of keys: two tables that are looked up."""
    keys, best, heads = 32, 4, 4
    shapes = {
        "norm/scale": (width,),
        "peer/to_queries/kernel": (width, 2 * heads * 16),
        "peer/keys": (heads, keys, 2, 16),
        f"peer/{down}": (keys**2, width),
        f"peer/{up}": (keys**2, width),
    }

    def layer(p: Any, x: Any) -> Any:
        y = normed(x, p["norm/scale"])
        queries = (y @ p["peer/to_queries/kernel"]).reshape(*x.shape[:2], 2, heads, 16)
        scores, found = jax.lax.top_k(jnp.einsum("btphd,hkpd->pbthk", queries, p["peer/keys"]), best)
        index = found[0] * keys + found[1]
        hidden = jax.nn.gelu(jnp.einsum("btd,bthkd->bthk", y, p[f"peer/{down}"][index])) * jax.nn.softmax(scores[0])
        return x + jnp.einsum("bthk,bthkd->btd", hidden, p[f"peer/{up}"][index])

    by_features = {
        ".*_embed/.*": P(None, ("data", "model")),
        ".*queries.*": COLUMNS,
        ".*keys": P(None, None, None, "model"),
    }
    return Layer(shapes, layer, by_features)


def latent_attention(width: int, heads: int = 8) -> Layer:
    """DeepSeek's, by its names."""
    nope = value = width // heads
    rope, q_rank, rank = nope // 2, width // 2, width // 4
    shapes = {
        "input_layernorm/scale": (width,),
        "self_attn/q_a_proj/kernel": (width, q_rank),
        "self_attn/q_a_layernorm/scale": (q_rank,),
        "self_attn/q_b_proj/kernel": (q_rank, heads * (nope + rope)),
        "self_attn/kv_a_proj_with_mqa/kernel": (width, rank + rope),
        "self_attn/kv_a_layernorm/scale": (rank,),
        "self_attn/kv_b_proj/kernel": (rank, heads * (nope + value)),
        "self_attn/o_proj/kernel": (heads * value, width),
    }

    def layer(p: Any, x: Any) -> Any:
        p = {path.removeprefix("self_attn/"): value for path, value in p.items()}
        y, split = normed(x, p["input_layernorm/scale"]), (*x.shape[:2], heads, -1)
        queries = normed(y @ p["q_a_proj/kernel"], p["q_a_layernorm/scale"]) @ p["q_b_proj/kernel"]
        latent = y @ p["kv_a_proj_with_mqa/kernel"]
        both = (normed(latent[..., :rank], p["kv_a_layernorm/scale"]) @ p["kv_b_proj/kernel"]).reshape(split)
        turned = jnp.broadcast_to(latent[:, :, None, rank:], (*x.shape[:2], heads, rope))
        keys = jnp.concatenate([both[..., :nope], turned], -1)
        return x + attended(queries.reshape(split), keys, both[..., nope:]) @ p["o_proj/kernel"]

    return Layer(shapes, layer, {".*_b_proj/.*": COLUMNS, ".*(_a_|o_)proj.*kernel": ROWS})


def mamba(width: int) -> Layer:
    """Its arrays are in one layer, where `dt_bias` is as long as `x_proj` and `out_proj` have rows."""
    inner, state, rank = 2 * width, 4, 8
    shapes = {
        "norm/scale": (width,),
        "mixer/in_proj": (width, 2 * inner),
        "mixer/x_proj": (inner, rank + 2 * state),
        "mixer/dt_proj": (rank, inner),
        "mixer/dt_bias": (inner,),
        "mixer/A_log": (inner, state),
        "mixer/out_proj": (inner, width),
    }

    def layer(p: Any, x: Any) -> Any:
        p = {path.removeprefix("mixer/"): value for path, value in p.items()}
        u, gate = jnp.split(normed(x, p["norm/scale"]) @ p["in_proj"], 2, -1)
        dt, b, c = jnp.split(u @ p["x_proj"], [rank, rank + state], -1)
        dt = jax.nn.softplus(dt @ p["dt_proj"] + p["dt_bias"])
        states = _scanned(jnp.exp(-dt[..., None] * jnp.exp(p["A_log"])), (dt * u)[..., None] * b[:, :, None, :])
        return x + ((states * c[:, :, None, :]).sum(-1) * jax.nn.silu(gate)) @ p["out_proj"]

    return Layer(shapes, layer, {".*/(in|dt)_proj": COLUMNS, ".*/(x|out)_proj": ROWS, ".*(bias|A_log)": P("model")})


def rwkv(width: int) -> Layer:
    """A time mix and a channel mix, by RWKV's names."""
    shapes = {
        "ln1/scale": (width,),
        "att/time_decay": (width,),
        "att/time_mix": (1, 1, width),
        **{f"att/{name}/kernel": (width, width) for name in ("receptance", "key", "value", "output")},
        "ln2/scale": (width,),
        "ffn/key/kernel": (width, 4 * width),
        "ffn/receptance/kernel": (width, width),
        "ffn/value/kernel": (4 * width, width),
    }

    def layer(p: Any, x: Any) -> Any:
        y = normed(x, p["ln1/scale"])
        y = y * p["att/time_mix"] + jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1] * (1 - p["att/time_mix"])
        gate, key, value = (y @ p[f"att/{name}/kernel"] for name in ("receptance", "key", "value"))
        key, decay = jnp.exp(key), jnp.broadcast_to(jnp.exp(-jnp.exp(p["att/time_decay"])), key.shape)
        mixed = _scanned(decay, key * value) / (_scanned(decay, key) + 1)
        x += (jax.nn.sigmoid(gate) * mixed) @ p["att/output/kernel"]
        y = normed(x, p["ln2/scale"])
        hidden = jnp.square(jax.nn.relu(y @ p["ffn/key/kernel"])) @ p["ffn/value/kernel"]
        return x + jax.nn.sigmoid(y @ p["ffn/receptance/kernel"]) * hidden

    rules = {
        ".*(receptance|att/key|att/value|ffn/key)/kernel": COLUMNS,
        ".*(att/output|ffn/value)/kernel": ROWS,
        ".*time_decay": P("model"),
    }
    return Layer(shapes, layer, rules)


def vision(width: int, output: str = "prj", heads: int = 8) -> Layer:
    shapes = {"norm/scale": (width,), **{f"attn/{name}/kernel": (width, width) for name in ("q", "k", "v", output)}}
    shapes["attn/q_norm/scale"] = (width // heads,)

    def layer(p: Any, x: Any) -> Any:
        y, split = normed(x, p["norm/scale"]), (*x.shape[:2], heads, -1)
        q, k, v = ((y @ p[f"attn/{name}/kernel"]).reshape(split) for name in ("q", "k", "v"))
        return x + attended(normed(q, p["attn/q_norm/scale"]), k, v) @ p[f"attn/{output}/kernel"]

    return Layer(shapes, layer, {".*/(q|k|v)/.*": COLUMNS, f".*/{output}/.*": ROWS})


def built(shapes: Shapes, dtype: str = "float32") -> lm.AbstractModel[Any]:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {path: jax.random.normal(key, shape, dtype) for path, shape in shapes.items()}

    return lm.build_abstract(init, jax.random.key(0))


def whole(layer: Layer, vocabulary: int, layers: int) -> Layer:
    """A model: a table of tokens, the layers, each computed again in the backward pass, and a head."""
    width = next(shape for path, shape in layer.shapes.items() if path.endswith("scale"))[0]
    shapes: Shapes = {"token_embedding/embeddings": (vocabulary, width)}
    for index in range(layers):
        shapes |= {f"layers/{index}/{path}": shape for path, shape in layer.shapes.items()}
    shapes |= {"final_norm/scale": (width,), "lm_head/kernel": (width, vocabulary)}

    def apply(p: Any, tokens: Any) -> Any:
        x = p["token_embedding/embeddings"][tokens]
        for index in range(layers):
            own = {path: p[f"layers/{index}/{path}"] for path in layer.shapes}
            x = jax.checkpoint(layer.apply)(own, x)
        return normed(x, p["final_norm/scale"]) @ p["lm_head/kernel"]

    return Layer(shapes, apply, {".*token_embedding.*": ROWS, ".*lm_head.*": COLUMNS, **layer.rules})

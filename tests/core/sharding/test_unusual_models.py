"""`auto` on layers that are no plain transformer's: as little is sent as with the better split, or it says it guessed.

Bytes are counted in the compiled gradient of one layer, on eight devices along one axis and along two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.collectives import sent_nbytes
from tests.small import shard_small

BATCH, LENGTH, WIDTH, HEADS = 4, 16, 64, 8
LARGE = 1 << 12  # bytes from which on a variable of such small models is large
Shapes = dict[str, tuple[int, ...]]


def normed(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attended(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(BATCH, LENGTH, -1)


def peer(down: str, up: str) -> tuple[Shapes, Callable[[Any, Any], Any]]:
    """One of a thousand experts for each of four heads' four best products of keys: two tables that are looked up."""
    keys, best, heads = 32, 4, 4
    shapes = {
        "norm/scale": (WIDTH,),
        "peer/to_queries/kernel": (WIDTH, 2 * heads * 16),
        "peer/keys": (heads, keys, 2, 16),
        f"peer/{down}": (keys**2, WIDTH),
        f"peer/{up}": (keys**2, WIDTH),
    }

    def layer(p: Any, x: Any) -> Any:
        y = normed(x, p["norm/scale"])
        queries = (y @ p["peer/to_queries/kernel"]).reshape(BATCH, LENGTH, 2, heads, 16)
        scores, found = jax.lax.top_k(jnp.einsum("btphd,hkpd->pbthk", queries, p["peer/keys"]), best)
        index = found[0] * keys + found[1]
        hidden = jax.nn.gelu(jnp.einsum("btd,bthkd->bthk", y, p[f"peer/{down}"][index])) * jax.nn.softmax(scores[0])
        return x + jnp.einsum("bthk,bthkd->btd", hidden, p[f"peer/{up}"][index])

    return shapes, layer


def latent_attention() -> tuple[Shapes, Callable[[Any, Any], Any]]:
    """DeepSeek's, by its names."""
    nope, rope, value, q_rank, rank = 8, 4, 8, 32, 16
    shapes = {
        "input_layernorm/scale": (WIDTH,),
        "self_attn/q_a_proj/kernel": (WIDTH, q_rank),
        "self_attn/q_a_layernorm/scale": (q_rank,),
        "self_attn/q_b_proj/kernel": (q_rank, HEADS * (nope + rope)),
        "self_attn/kv_a_proj_with_mqa/kernel": (WIDTH, rank + rope),
        "self_attn/kv_a_layernorm/scale": (rank,),
        "self_attn/kv_b_proj/kernel": (rank, HEADS * (nope + value)),
        "self_attn/o_proj/kernel": (HEADS * value, WIDTH),
    }

    def layer(p: Any, x: Any) -> Any:
        p = {path.removeprefix("self_attn/"): value for path, value in p.items()}
        y, heads = normed(x, p["input_layernorm/scale"]), (BATCH, LENGTH, HEADS, -1)
        queries = normed(y @ p["q_a_proj/kernel"], p["q_a_layernorm/scale"]) @ p["q_b_proj/kernel"]
        latent = y @ p["kv_a_proj_with_mqa/kernel"]
        both = (normed(latent[..., :rank], p["kv_a_layernorm/scale"]) @ p["kv_b_proj/kernel"]).reshape(heads)
        turned = jnp.broadcast_to(latent[:, :, None, rank:], (BATCH, LENGTH, HEADS, rope))
        keys = jnp.concatenate([both[..., :nope], turned], -1)
        return x + attended(queries.reshape(heads), keys, both[..., nope:]) @ p["o_proj/kernel"]

    return shapes, layer


def mamba() -> tuple[Shapes, Callable[[Any, Any], Any]]:
    """Its arrays lie in one layer, where `dt_bias` is as long as `x_proj` and `out_proj` have rows."""
    inner, state, rank = 2 * WIDTH, 4, 8
    shapes = {
        "norm/scale": (WIDTH,),
        "mixer/in_proj": (WIDTH, 2 * inner),
        "mixer/x_proj": (inner, rank + 2 * state),
        "mixer/dt_proj": (rank, inner),
        "mixer/dt_bias": (inner,),
        "mixer/A_log": (inner, state),
        "mixer/out_proj": (inner, WIDTH),
    }

    def layer(p: Any, x: Any) -> Any:
        p = {path.removeprefix("mixer/"): value for path, value in p.items()}
        u, gate = jnp.split(normed(x, p["norm/scale"]) @ p["in_proj"], 2, -1)
        dt, b, c = jnp.split(u @ p["x_proj"], [rank, rank + state], -1)
        dt = jax.nn.softplus(dt @ p["dt_proj"] + p["dt_bias"])
        decay, added = jnp.exp(-dt[..., None] * jnp.exp(p["A_log"])), (dt * u)[..., None] * b[:, :, None, :]

        def then(first: Any, second: Any) -> Any:
            return first[0] * second[0], second[0] * first[1] + second[1]

        _, states = jax.lax.associative_scan(then, (decay, added), axis=1)
        return x + ((states * c[:, :, None, :]).sum(-1) * jax.nn.silu(gate)) @ p["out_proj"]

    return shapes, layer


def vision(output: str) -> tuple[Shapes, Callable[[Any, Any], Any]]:
    shapes = {"norm/scale": (WIDTH,), **{f"attn/{name}/kernel": (WIDTH, WIDTH) for name in ("q", "k", "v", output)}}
    shapes["attn/q_norm/scale"] = (WIDTH // HEADS,)

    def layer(p: Any, x: Any) -> Any:
        y, heads = normed(x, p["norm/scale"]), (BATCH, LENGTH, HEADS, -1)
        q, k, v = ((y @ p[f"attn/{name}/kernel"]).reshape(heads) for name in ("q", "k", "v"))
        return x + attended(normed(q, p["attn/q_norm/scale"]), k, v) @ p[f"attn/{output}/kernel"]

    return shapes, layer


COLUMNS, ROWS = P("data", "model"), P("model", "data")
BY_FEATURES = {
    ".*_embed/.*": P(None, ("data", "model")),
    ".*queries.*": COLUMNS,
    ".*keys": P(None, None, None, "model"),
}
MODELS = {
    "peer": (peer("down_embed/embedding", "up_embed/embedding"), BY_FEATURES),
    "peer with weights": (peer("down_embed/weight", "up_embed/weight"), BY_FEATURES),
    "latent attention": (latent_attention(), {".*_b_proj/.*": COLUMNS, ".*(_a_|o_)proj.*kernel": ROWS}),
    "mamba": (mamba(), {".*/(in|dt)_proj": COLUMNS, ".*/(x|out)_proj": ROWS, ".*(bias|A_log)": P("model")}),
    "vision": (vision("prj"), {".*/(q|k|v)/.*": COLUMNS, ".*/prj/.*": ROWS}),
}


def built(shapes: Shapes) -> lm.AbstractModel:
    return lm.build_abstract(lambda key: {path: jax.random.normal(key, shape) for path, shape in shapes.items()}, KEY)


def sent(shapes: Shapes, layer: Callable[[Any, Any], Any], mesh: Mesh, rules: Any) -> int:
    placed = shard_small(built(shapes), mesh, rules, large=LARGE, on_unmatched="ignore")
    arrays = {path: variable.struct for path, variable in placed.items()}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32", sharding=NamedSharding(mesh, P("data")))
    if "peer/keys" in shapes:  # whose gradient is a loop on CPUs, whose turns are not counted
        return sent_nbytes(jax.jit(layer, out_shardings=x.sharding).lower(arrays, x).compile())
    gradient = jax.grad(lambda p, x: jnp.square(layer(p, x)).mean())
    shardings = {path: struct.sharding for path, struct in arrays.items()}
    return sent_nbytes(jax.jit(gradient, out_shardings=shardings).lower(arrays, x).compile())


KEY = jax.random.key(0)


@pytest.mark.parametrize("sizes", [(1, 8), (2, 4)], ids=["1x8", "2x4"])
@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_sent_than_with_the_better_split(name: str, sizes: tuple[int, int]) -> None:
    (shapes, layer), rules = MODELS[name]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), ("data", "model"))
    assert 0 < sent(shapes, layer, mesh, lm.auto()) <= 1.1 * sent(shapes, layer, mesh, rules)


def test_a_guess_is_reported(mesh8: Mesh) -> None:
    shapes = {
        "layers/0/mlp/up/kernel": (64, 256),
        "layers/0/mix/receptance": (64, 64),  # nothing known
        "layers/0/mlp/Dense_0/kernel": (64, 256),  # up or down, by its shape
        "layers/0/attn/mystery/kernel": (64, 64),
        "layers/0/ffn/up/weight": (64, 64),  # as PyTorch stores it, or not
        "layers/0/conv/kernel": (3, 3, 128, 64),  # which gathers more than it gives
        "layers/0/small/what": (2, 3),
        "layers/0/conv_out/kernel": (3, 3, 64, 3),
    }
    placed = shard_small(built(shapes), mesh8, lm.auto(), large=LARGE)
    report = placed.explain()
    assert set(report.guessed) == set(list(shapes)[1:6])
    text = str(report)
    assert "split by a guess: 5 variables" in text
    for path in list(shapes)[1:6]:
        assert re.search(rf"{path} .*\({', '.join(map(str, shapes[path]))}\), P\(.*", text), path
        assert "inferred from: " in str(placed.explain(path))
    sure = built({"layers/0/mlp/up/kernel": (64, 256)}).shard(mesh8, lm.auto()).explain()
    assert sure.guessed == {} and "guess" not in str(sure)


def test_an_mlp_beside_queries_and_keys_is_one(mesh8: Mesh) -> None:
    shapes = {f"block/{name}/kernel": (64, 64) for name in ("query", "key", "value", "out")}
    shapes |= {"block/up/kernel": (64, 256), "block/down/kernel": (256, 64)}
    placed = built(shapes).shard(mesh8, lm.auto())
    assert (placed["block/up/kernel"].spec, placed["block/down/kernel"].spec) == (P(None, "model"), P("model"))
    assert placed.explain().guessed == {}


def test_a_bias_that_is_another_weights_turns_none(mesh8: Mesh) -> None:
    shapes, _ = mamba()
    with_bias, without = (
        shard_small(
            built({path: shape for path, shape in shapes.items() if path != left}), mesh8, lm.auto(), large=LARGE
        )
        for left in ("", "mixer/dt_bias")
    )
    assert {path: with_bias[path].spec for path in without} == {path: without[path].spec for path in without}

"""`auto` on layers that are no plain transformer's: as little is sent as with the better split, or it says it guessed.

Bytes are counted in the compiled gradient of one layer, on eight devices along one axis and along two.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.collectives import sent_nbytes
from tests.large import mostly_large
from tests.layers import Layer, built, latent_attention, mamba, peer, rwkv, vision
from tests.small import shard_small

BATCH, LENGTH, WIDTH = 4, 16, 64
LARGE = 1 << 12  # bytes from which on a variable of such small models is large


MODELS = {
    "peer": peer(WIDTH),
    "peer with weights": peer(WIDTH, "down_embed/weight", "up_embed/weight"),
    "latent attention": latent_attention(WIDTH),
    "mamba": mamba(WIDTH),
    "rwkv": rwkv(WIDTH),
    "vision": vision(WIDTH),
}


def sent(layer: Layer, mesh: Mesh, rules: Any) -> int:
    placed = shard_small(built(layer.shapes), mesh, rules, large=LARGE, on_unmatched="ignore")
    arrays = {path: variable.struct for path, variable in placed.items()}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32", sharding=NamedSharding(mesh, P("data")))
    gradient = jax.grad(lambda p, x: jnp.square(layer.apply(p, x)).mean())
    shardings = {path: struct.sharding for path, struct in arrays.items()}
    return sent_nbytes(jax.jit(gradient, out_shardings=shardings).lower(arrays, x).compile())


@pytest.mark.parametrize(
    ("name", "sizes"),
    mostly_large(
        [*itertools.product(MODELS, [(1, 8), (2, 4)])],
        [("rwkv", (2, 4)), ("latent attention", (2, 4)), ("peer", (1, 8)), ("vision", (1, 8))],
    ),
)
def test_no_more_is_sent_than_with_the_better_split(name: str, sizes: tuple[int, int]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), ("data", "model"))
    assert 0 < sent(MODELS[name], mesh, lm.auto()) <= 1.1 * sent(MODELS[name], mesh, MODELS[name].rules)


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
    shapes = mamba(WIDTH).shapes
    with_bias, without = (
        shard_small(
            built({path: shape for path, shape in shapes.items() if path != left}), mesh8, lm.auto(), large=LARGE
        )
        for left in ("", "mixer/dt_bias")
    )
    assert {path: with_bias[path].spec for path in without} == {path: without[path].spec for path in without}

"""Activations by arithmetic: the numbers of a small decoder by hand, how they are split, and what the compiler says."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import lazymodel as lm
from tests.conftest import needs_libtpu

# Layers, width, heads, heads of keys, their width, MLP, words: nothing that a TPU has to pad.
L, H, A, KV, D, F, V = 3, 512, 8, 4, 128, 1536, 1024
B, S = 32, 512
TOKENS = B * S

# Elements of a token and layer that a training step keeps, and bytes of the scores and of all logits with gradients.
ATTENTION, MLP = H + (A + 2 * KV) * D + A * D, H + 2 * F
SCORES, LOGITS = A * S * 4, 2 * V * 4


def init(key: Any, *, scanned: bool = False, dtype: Any = jnp.float32) -> dict[str, Any]:
    def layer(*lead: int) -> dict[str, Any]:
        def normal(*shape: int) -> Any:
            return 0.02 * jax.random.normal(key, (*lead, *shape), dtype)

        return {
            "attention": {
                "query": normal(H, A, D), "key": normal(H, KV, D), "value": normal(H, KV, D), "out": normal(A, D, H)
            },
            "mlp": {"gate": normal(H, F), "up": normal(H, F), "down": normal(F, H)},
            "attention_norm": {"scale": jnp.ones((*lead, H), dtype)},
            "mlp_norm": {"scale": jnp.ones((*lead, H), dtype)},
        }  # fmt: skip

    words = {"embedding": 0.02 * jax.random.normal(key, (V, H), dtype)}
    return words | ({"layers": layer(L)} if scanned else {f"layers_{i}": layer() for i in range(L)})


def loss(tree: Any, tokens: Any) -> Any:
    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale

    x = tree["embedding"][tokens]
    for layer in (tree[name] for name in tree if name.startswith("layers_")):
        attention, mlp = layer["attention"], layer["mlp"]
        y = norm(x, layer["attention_norm"]["scale"])
        q, k, v = (jnp.einsum("bsh,had->bsad", y, attention[name]) for name in ("query", "key", "value"))
        k, v = (jnp.repeat(each, A // KV, 2) for each in (k, v))
        scores = jax.nn.softmax(jnp.einsum("bsad,btad->bast", q, k).astype("float32")).astype(x.dtype)
        x = x + jnp.einsum("bast,btad,adh->bsh", scores, v, attention["out"])
        y = norm(x, layer["mlp_norm"]["scale"])
        x = x + (jax.nn.silu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"]
    logits = jax.nn.log_softmax((x @ tree["embedding"].T).astype("float32"))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))


def model(**options: Any) -> lm.AbstractModel:
    return lm.build_abstract(lambda key: init(key, **options), jax.random.key(0))


def estimated(abstract: lm.AbstractModel, **options: Any) -> int:
    plan = abstract.plan(what_if=lm.WhatIf(batch=B, sequence=S, **options), device_memory="64GiB")
    assert plan.counted["activations"] == "estimated" and plan.fits
    assert "; fits, " in str(plan) and "not counted" not in str(plan)
    return plan.parts["activations"]


@pytest.mark.parametrize(("scanned", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_by_hand(scanned: bool, dtype: str) -> None:
    abstract, n = model(scanned=scanned, dtype=dtype), jnp.dtype(dtype).itemsize
    layer = n * (ATTENTION + MLP)
    assert estimated(abstract, optimizer="adam") == TOKENS * (L * (layer + SCORES) + LOGITS)
    assert estimated(abstract, optimizer="adam", remat="attention") == TOKENS * (L * layer + LOGITS)
    full = TOKENS * (L * n * H + layer + SCORES + LOGITS)
    assert estimated(abstract, optimizer="adam", remat="full") == full
    assert estimated(abstract) == TOKENS * (max(n * ATTENTION + 2 * SCORES, n * MLP) + n * V)


def test_split_over_devices() -> None:
    """Heads, the MLP's inside and the words are split as their weights are, batches over axes of data."""
    mesh = AbstractMesh((2, 4), ("data", "model"))
    found = estimated(model().shard(mesh, lm.auto()), optimizer="adam")
    attention, mlp = H + ((A + 2 * KV) * D + A * D) // 4, H + 2 * F // 4
    assert found == TOKENS // 2 * (L * (4 * (attention + mlp) + SCORES // 4) + LOGITS // 4)
    alone = estimated(model().shard(AbstractMesh((8,), ("fsdp",)), {".*": PartitionSpec()}), optimizer="adam")
    assert alone == -(-B // 8) * S * (L * (4 * (ATTENTION + MLP) + SCORES) + LOGITS)


def test_with_an_optimizer_of_its_own() -> None:
    optax = pytest.importorskip("optax")
    assert estimated(model().with_optimizer(optax.adam(1e-3))) == estimated(model(), optimizer="adam")


@pytest.mark.parametrize(
    ("devices", "least", "most"),
    [
        ("cpu", 0.25, 1),  # which fuses less, so that it keeps more at a time
        pytest.param("v5e-1", 0.7, 1.4, marks=[needs_libtpu, pytest.mark.large]),
    ],
)
def test_near_what_the_compiler_says(devices: str, least: float, most: float) -> None:
    """XLA for TPUs, which are not here; of the softmax it keeps less than it does for models with masks."""
    mesh = lm.topology(devices) if devices != "cpu" else Mesh(np.array(jax.devices()[:1]), ("model",))
    abstract = model(dtype="bfloat16").shard(mesh, lm.auto())
    step = lm.Compile("train", loss, jax.ShapeDtypeStruct((B, S), jnp.int32))
    compiled = abstract.plan(compile=step)
    assert compiled.counted["activations"] == "compiled"
    assert least < estimated(abstract, optimizer="sgd") / compiled.parts["activations"] < most
    with pytest.raises(lm.LazyModelError, match="counts activations, and batch=4 estimates them"):
        abstract.plan(what_if=lm.WhatIf(batch=4, sequence=4), compile=step)


@needs_libtpu
@pytest.mark.large
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "dtype", "axes"),
    [(128_000, "bfloat16", {"data": 2, "model": 4}), (40_000, "float32", {"data": 4, "model": 2})],
)
def test_near_what_the_compiler_says_of_a_split_step(
    words: int, dtype: str, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meshes of data and model, where a plan keeps the batch split."""
    monkeypatch.setattr(sys.modules[__name__], "V", words)
    mesh = lm.topology("v5e:2x4", axes)
    abstract = model(dtype=dtype).shard(mesh, lm.auto())
    tokens = jax.ShapeDtypeStruct((B, S), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    compiled = abstract.plan(compile=lm.Compile("train", loss, tokens), device_memory="64GiB").parts["activations"]
    expected = estimated(abstract, optimizer="sgd")
    assert abs(expected - compiled) <= expected / 4


def test_what_is_no_dense_transformer_is_refused() -> None:
    def experts(key: Any) -> Any:
        return {**init(key), "moe": {"experts": {"up": jnp.ones((4, H, F)), "down": jnp.ones((4, F, H))}}}

    expert = "'moe/experts/up' has the role 'expert_up'"
    for build, why in ((experts, expert), (lambda key: {"w": jnp.ones((4, 4))}, "one of these is missing")):
        with pytest.raises(lm.LazyModelError, match=f"{why}.*compile=Compile"):
            lm.build_abstract(build, jax.random.key(0)).plan(what_if=lm.WhatIf(batch=1, sequence=1))

"""A small decoder and functions of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, HIDDEN, WORDS, HEADS = 32, 64, 96, 4


def decoder(layers: int, *, stacked: bool = False) -> Callable[[jax.Array], dict[str, Any]]:
    """An init function: an embedding, which is the head as well, and layers, in a list or stacked."""

    def init(key: jax.Array) -> dict[str, Any]:
        def layer(key: jax.Array) -> dict[str, Any]:
            keys = jax.random.split(key, 4)
            return {
                "qkv": jax.random.normal(keys[0], (WIDTH, 3 * WIDTH)) * 0.1,
                "out": jax.random.normal(keys[1], (WIDTH, WIDTH)) * 0.1,
                "up": jax.random.normal(keys[2], (WIDTH, HIDDEN)) * 0.1,
                "down": jax.random.normal(keys[3], (HIDDEN, WIDTH)) * 0.1,
                "scale": jnp.ones(WIDTH),
            }

        first, *keys = jax.random.split(key, layers + 1)
        blocks: Any = [layer(each) for each in keys]
        if stacked:
            blocks = jax.tree.map(lambda *rows: jnp.stack(rows), *blocks)
        return {"embedding": jax.random.normal(first, (WORDS, WIDTH)), "layers": blocks, "norm": jnp.ones(WIDTH)}

    return init


def block(layer: dict[str, Any], x: jax.Array, mask: jax.Array) -> jax.Array:
    """One layer; `mask` is shared by all."""
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * layer["scale"]
    q, k, v = jnp.split((h @ layer["qkv"]).reshape(len(x), 3 * HEADS, -1), 3, 1)
    scores = jax.nn.softmax(jnp.where(mask, jnp.einsum("shd,thd->hst", q, k), -1e9), -1)
    x = x + jnp.einsum("hst,thd->shd", scores, v).reshape(x.shape) @ layer["out"]
    return x + jax.nn.silu(x @ layer["up"]) @ layer["down"]


def ends(body: Callable[[Any, jax.Array, jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The function of the model and tokens whose layers are run by `body`."""

    def forward(model: Any, tokens: Any) -> jax.Array:
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        x = body(model["layers"], model["embedding"][tokens], mask)
        return (x * model["norm"]) @ model["embedding"].T

    return forward


def _one_by_one(layers: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    for layer in layers:
        x = block(layer, x, mask)
    return x


def _scanned(layers: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, layer: (block(layer, x, mask), None), x, layers)[0]


forward = ends(_one_by_one)
scanned = ends(_scanned)


def loss_of(forward: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    def loss(model: Any, tokens: Any) -> jax.Array:
        words = jax.nn.log_softmax(forward(model, tokens))
        return -jnp.take_along_axis(words[:-1], tokens[1:, None], 1).mean()

    return loss


def norms_of(forward: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
    """The norm of every variable's gradient."""

    def norms(model: Any, tokens: Any) -> Any:
        gradients = jax.grad(loss_of(forward))(model, tokens)
        return jax.tree.map(lambda gradient: jnp.sqrt(jnp.sum(jnp.square(gradient))), gradients)

    return norms


def tokens(count: int = 12) -> jax.Array:
    return jax.random.randint(jax.random.key(9), (count,), 0, WORDS)


def rows(abstract: Any) -> int:
    """Bytes of the embeddings of `tokens()`."""
    return len(tokens()) * WIDTH * abstract["embedding"].dtype.itemsize


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Same structure, and values that differ by no more than a share of the largest one."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other) or isinstance(one, jax.Array)
        if not hasattr(other, "dtype"):
            assert one == other
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        one, other = np.asarray(one), np.asarray(other)
        if other.dtype.kind not in "fcV":
            np.testing.assert_array_equal(one, other)
            continue
        one, other = (each if each.dtype.kind == "c" else each.astype(np.float64) for each in (one, other))
        finite = np.abs(other[np.isfinite(other)])
        np.testing.assert_allclose(one, other, 0, tolerance * max(finite.max(initial=0), 1e-30))

"""Converters written with JAX: under `jax.jit` they are traced, and move lazy tensors as they would move arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from tests.large import mostly_large
from tests.trees import named

Tensors = dict[str, Any]
ROWS, COLUMNS = 16, 24


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {f"h.{layer}.up": rng.standard_normal((ROWS, COLUMNS)).astype("float32") for layer in range(3)}
    return made | {"h.0.norm": rng.standard_normal(ROWS).astype(ml_dtypes.bfloat16), "mask": np.ones((8, 8))}


CONVERTERS: dict[str, Callable[[Tensors], Any]] = {
    "stacked": lambda w: {"up": jnp.stack([w[f"h.{layer}.up"].T for layer in range(3)])},
    "joined": lambda w: [jnp.concatenate([w["h.0.up"][..., None, :], w["h.1.up"][:, None]], axis=1)],
    "heads": lambda w: {"q": w["h.0.up"].reshape(4, 4, COLUMNS).transpose(2, 0, 1), "norm": w["h.0.norm"]},
    "parts": lambda w: tuple(jnp.split(w["h.0.up"], [8, 20], axis=1)),
    "cuts": lambda w: {"row": w["h.1.up"][3], "last": w["h.1.up"][:, -1], "some": w["h.2.up"][2:14:3, ::-1]},
    "repeated": lambda w: {"kv": jnp.repeat(w["h.0.up"], 2, axis=0), "bias": jnp.zeros((4, 2))},
    "cast": lambda w: {"up": (w["h.0.up"] / 1.0).astype("bfloat16"), "norm": w["h.0.norm"].astype("float32") * 1},
    "inner": lambda w: jax.jit(lambda up, _: {"up": jnp.squeeze(jnp.copy(up)[None])})(w["h.0.up"], w["mask"] + 1),
    "wide": lambda w: {"mask": w["mask"]},
}


@pytest.mark.parametrize(
    "name", mostly_large(CONVERTERS, ["parts", "heads", "inner", "cast", "repeated", "joined", "cuts"])
)
def test_equals_the_function_of_arrays(name: str, tmp_path: Path, mesh8: Mesh) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    convert = jax.jit(CONVERTERS[name])
    expected = convert({name: jnp.asarray(tensor) for name, tensor in tensors().items()})
    abstract = lm.build_abstract(lambda: jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), expected))
    rules = {path: P(*["model" if size % 8 == 0 else None for size in v.shape][:1]) for path, v in abstract.items()}
    with lm.open_checkpoint(tmp_path) as checkpoint:
        mapped = lm.map_checkpoint(checkpoint, convert)
        assert checkpoint.bytes_read == 0
        model = abstract.shard(mesh8, rules).materialize(mapped, initialize="nothing")
        stored = {tensor for tensor in tensors() if tensor not in mapped.unused}
        assert checkpoint.bytes_read <= sum(checkpoint[tensor].nbytes for tensor in stored)
    for path, value in named(expected).items():
        assert np.asarray(named(model)[path]).tobytes() == np.asarray(value).tobytes(), path
    assert set(mapped.unused) >= {"mask"} - stored


def test_only_what_a_device_needs_is_read(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with lm.open_checkpoint(tmp_path) as checkpoint:
        mapped = lm.map_checkpoint(checkpoint, jax.jit(CONVERTERS["stacked"]))
        assert sorted(mapped.unused) == ["h.0.norm", "mask"]
        np.testing.assert_array_equal(mapped["up"][1, :4].read(), tensors()["h.1.up"].T[:4])
        assert checkpoint.bytes_read <= ROWS * COLUMNS * 4


def test_a_trainer_moves_to_its_sampler_by_one(mesh8: Mesh) -> None:
    trainer = {name: jax.device_put(tensor) for name, tensor in tensors().items() if "up" in name}
    sampler = lm.build_abstract(lambda: {"up": jnp.zeros((3, COLUMNS, ROWS))}).materialize()
    convert = jax.jit(CONVERTERS["stacked"])
    np.testing.assert_array_equal(
        lm.Sync(trainer, sampler, convert)(trainer, into=sampler)["up"], convert(trainer)["up"]
    )


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda w: {"up": w["h.0.up"] * 2}, "function <lambda> computes 'mul'; it must only move elements"),
        (lambda w: {"up": w["h.0.up"] @ w["h.1.up"].T}, "computes 'dot_general'"),
        (lambda w: {"up": w["h.9.up"]}, "cannot be traced: 'h.9.up'.*of another configuration"),
        (lambda w: {"up": w["h.0.up"].reshape(7, -1)}, "cannot be traced"),
    ],
)
def test_errors(convert: Callable[[Tensors], Any], message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        lm.map_checkpoint(tensors(), jax.jit(convert))

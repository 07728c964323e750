"""Signals are what the materialized model shows: activations, their gradients, and those of variables."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import lazymodel as lm
from lazymodel._abstract.framework import ModelSpec
from lazymodel.extras.run.signals import Signal, Signals
from tests.large import mostly_large

WIDTH = 16
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")


def rms(array: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(array, np.float64)))))


def stacked(depth: int) -> ModelSpec:
    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, depth)
        kernels = jax.vmap(lambda key: jax.random.normal(key, (WIDTH, WIDTH)) / 4)(keys)
        return {"layers": {"kernel": kernels}, "head": jax.random.normal(key, (WIDTH, 1))}

    return lm.build_abstract(init, jax.random.key(0))


def stacked_loss(model: Any, x: Any) -> jax.Array:
    def body(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("block"):
            return jax.checkpoint(lambda x, kernel: jnp.tanh(x @ kernel))(x, kernel), None

    with jax.named_scope("stack"):
        x, _ = jax.lax.scan(body, x, model["layers"]["kernel"])
    with jax.named_scope("head"):
        x = x @ model["head"]
    return jnp.mean(jnp.square(x))


def layers(depth: int) -> ModelSpec:
    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, depth)
        made = [{"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / 4, "bias": jnp.zeros(WIDTH)} for key in keys]
        return {"layers": made, "head": {"kernel": jax.random.normal(key, (WIDTH, 1))}}

    return lm.build_abstract(init, jax.random.key(0))


def loss(model: Any, x: Any, shifts: Any = None) -> jax.Array:
    for number, layer in enumerate(model["layers"]):
        x = x @ layer["kernel"] + layer["bias"]
        x = jax.nn.relu(x if shifts is None else x + shifts[number])
    return jnp.mean(jnp.square(x @ model["head"]["kernel"]))


def test_layers_are_named_by_their_variables(mesh8: Mesh) -> None:
    abstract = layers(3).shard(mesh8, {".*kernel": PartitionSpec("model")})
    found = lm.signals(abstract, loss, X, gradients=True)
    model = jax.device_get(abstract.materialize())
    assert list(found.activations) == [*(f"layers/{n}" for n in range(3)), "head"] == list(found.gradients)
    x = X
    for number, layer in enumerate(model["layers"]):
        x = np.asarray(x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]))
        signal = found.activations[f"layers/{number}"]
        assert signal.shape == (8, WIDTH)
        assert signal.dtype == "float32"
        np.testing.assert_allclose(
            [signal.rms, signal.mean, signal.min, signal.max],
            [rms(x), x.mean(), x.min(), x.max()],
            rtol=1e-5,
            atol=1e-7,
        )
        assert signal.zeros == 0
        x = np.maximum(x, 0)
    shifts = [np.zeros((8, WIDTH), np.float32) for _ in range(3)]
    value, (by_model, by_shift) = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))(model, X, shifts)
    for number in range(3):
        np.testing.assert_allclose(found.gradients[f"layers/{number}"].rms, rms(by_shift[number]), rtol=1e-5)
        assert found.gradients[f"layers/{number}"].zeros == np.mean(np.asarray(by_shift[number]) == 0) > 0
        for name in ("kernel", "bias"):
            expected = rms(by_model["layers"][number][name])
            np.testing.assert_allclose(found.variables[f"layers/{number}/{name}"].rms, expected, rtol=1e-5)
    np.testing.assert_allclose(found.value, value, rtol=1e-6)


def test_layers_of_a_scan_are_measured_one_by_one() -> None:
    abstract = stacked(3)
    found, model = lm.signals(abstract, stacked_loss, X, gradients=True), abstract.materialize()
    x, outputs = jnp.asarray(X), list[float]()
    for kernel in model["layers"]["kernel"]:
        x = jnp.tanh(x @ kernel)
        outputs.append(rms(x))
    assert list(found.over_depth()) == ["stack/block[{layer}]"]
    np.testing.assert_allclose(list(found.over_depth()["stack/block[{layer}]"].values()), outputs, rtol=1e-5)
    assert found.activations["stack"].rms == pytest.approx(outputs[-1])
    gradient = jax.jit(jax.grad(stacked_loss))(model, X)
    measured = found.over_depth(kind="variables")["layers/kernel[{layer}]"]
    np.testing.assert_allclose(list(measured.values()), [rms(each) for each in gradient["layers"]["kernel"]], rtol=1e-5)
    np.testing.assert_allclose(found.variables["head"].rms, rms(gradient["head"]), rtol=1e-5)


def test_derivatives_that_a_function_defines_are_kept() -> None:
    @jax.custom_vjp
    def rounded(x: jax.Array) -> jax.Array:
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, gradient: (gradient,))
    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (WIDTH, WIDTH))}, jax.random.key(0))

    def quantized(model: Any, x: Any) -> jax.Array:
        return jnp.mean(rounded(x @ model["w"]))

    found = lm.signals(abstract, quantized, X, gradients=True)
    expected = rms(jax.grad(quantized)(abstract.materialize(), X)["w"])
    assert expected > 0
    np.testing.assert_allclose(found.variables["w"].rms, expected, rtol=1e-5)


def test_each_seed_draws_the_initial_values_again() -> None:
    abstract = layers(2)
    found = lm.signals(abstract, loss, X, seeds=3)
    alone = [lm.signals(abstract.rekey(seed), loss, X) for seed in range(3)]
    for name, signal in found.activations.items():
        np.testing.assert_array_equal(signal.rms, [each.activations[name].rms for each in alone])
    assert len(set(found.activations["head"].rms)) == 3
    assert found.to_dict()["activations"]["head"]["rms"] == found.activations["head"].rms.tolist()


def test_a_checkpoint_is_measured_and_compared() -> None:
    abstract = layers(2)
    doubled = jax.tree.map(lambda array: 2 * array, abstract.materialize())
    found = lm.signals(abstract, loss, X, checkpoint=doubled).compare(lm.signals(abstract, loss, X))
    for (_, name), (mine, theirs) in found.rows.items():
        assert mine == pytest.approx(theirs * 2 ** {"layers/0": 1, "layers/1": 2, "head": 3}[name])
    assert "layers/{0..1}" in repr(found)


def test_programs_and_memory_do_not_grow_with_depth() -> None:
    reports: list[Any] = []
    for depth in (6, 10):
        lm.signals(layers(depth), loss, X, gradients=True, report=reports.append)
        lm.signals(stacked(depth), stacked_loss, X, gradients=True, report=reports.append)
    few, few_stacked, many, many_stacked = reports
    assert len(few.rows) == len(many.rows)
    assert len(few_stacked.rows) == len(many_stacked.rows)


@pytest.mark.parametrize("dtype", mostly_large(["float32", "bfloat16"], ["bfloat16"]))
def test_gradients_do_not_accumulate(dtype: str) -> None:
    def init(key: jax.Array) -> Any:
        return [jax.random.normal(key, (128, 128), dtype) / 8 for key in jax.random.split(key, 24)]

    def forward(model: Any, x: Any) -> jax.Array:
        for kernel in model:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(jnp.square(x.astype("float32")))

    reports: list[lm.RunReport] = []
    lm.signals(
        lm.build_abstract(init, jax.random.key(0)), forward, jnp.ones((4, 128), dtype), gradients=True,
        report=reports.append,
    )  # fmt: skip
    assert reports[0].peak_nbytes < 0.5 * reports[0].model_nbytes


def test_what_cannot_be_measured_is_rejected() -> None:
    abstract = layers(2)
    with pytest.raises(lm.LazyModelError, match=r"scalar loss, found float32\[8,16\]"):
        lm.signals(abstract, lambda model, x: x @ model["layers"][0]["kernel"], X, gradients=True)
    with pytest.raises(lm.LazyModelError, match="no layer was found"):
        lm.signals(abstract, lambda model, x: x.sum(), X)
    with pytest.raises(lm.LazyModelError, match="abstract model.*dict"):
        lm.signals(abstract.materialize(), loss, X)
    found = lm.signals(abstract, loss, X)
    with pytest.raises(lm.LazyModelError, match="'median'"):
        found.over_depth("median")
    with pytest.raises(lm.LazyModelError, match="no name in common"):
        found.compare(lm.signals(lm.build_abstract(lambda: {"w": jnp.ones(WIDTH)}), lambda model, x: x * model["w"], X))


def test_each_line_of_a_figure_is_in_the_legend() -> None:
    pytest.importorskip("matplotlib")
    abstract = layers(3)
    found = lm.signals(abstract, loss, X, gradients=True)
    panels = found.plot().axes
    kinds = ("activations", "gradients", "variables")
    for kind, axes in zip(kinds, panels, strict=True):
        named = [text.get_text().strip() for text in axes.get_legend().get_texts()]
        assert named and named == list(found.over_depth("rms", kind))


def test_layers_that_explode_or_vanish_are_marked(tmp_path: Path) -> None:
    def signals(*sizes: float) -> Signals:
        own = {f"layers/{i}": Signal((4,), "float32", size, size / 3, -size, size, 0) for i, size in enumerate(sizes)}
        return Signals("model", own, own, {})

    grows = signals(1, 50, 150, math.inf)
    assert grows.table().lines == [
        "activations of layers/{layer} explode: 1 in layer 0, 1.5e+02 in layer 2",
        "gradients of layers/{layer} explode: inf in layer 3",
    ]
    assert signals(1, 0.5, 0.001).table().lines == [
        "activations of layers/{layer} vanish: 1 in layer 0, 0.001 in layer 2",
        "gradients of layers/{layer} explode: 0.001 in layer 2, 0.5 in layer 1",
    ]
    assert signals(1, 20, 0.05).table().lines == ["gradients of layers/{layer} explode: 0.05 in layer 2, 20 in layer 1"]
    # Nothing is far from the activations of zero.
    assert signals(0, 1).table().lines == ["gradients of layers/{layer} vanish: 1 in layer 1, 0 in layer 0"]
    signals(1, 2).save(tmp_path / "signals.html")
    page = (tmp_path / "signals.html").read_text()
    assert "0.333" in page and "0.3333" not in page
    if importlib.util.find_spec("matplotlib"):
        assert 0 < page.index("<svg") < page.index("<pre>")

"""The initializers that research compares: their moments, their spectra, and the numbers of their papers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm

KEY = jax.random.key(0)
i = lm.initializers


def drawn(initializer: Any, *shape: int) -> Any:
    return np.asarray(initializer(KEY, shape, jnp.float32))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("make", "variance"), [(i.glorot, 2 / 800), (i.he, 2 / 200), (i.lecun, 1 / 200)])
def test_moments_of_variance_scaling(make: Any, variance: float, uniform: bool) -> None:
    values = drawn(make(uniform=uniform), 200, 600)
    assert values.std() == pytest.approx(variance**0.5, rel=0.01)
    assert values.mean() == pytest.approx(0, abs=float(values.std()) / 50)
    edge = 3**0.5 if uniform else 2 / 0.87962566  # of uniform numbers, of normal ones cut at two deviations
    assert np.abs(values).max() == pytest.approx(edge * variance**0.5, rel=0.01)


@pytest.mark.large
def test_spectra() -> None:
    for shape in ((32, 32), (16, 48), (4, 8, 16)):
        values = drawn(i.orthogonal(2.0), *shape).reshape(-1, shape[-1])
        np.testing.assert_allclose(np.linalg.svd(values, compute_uv=False), 2, rtol=1e-4)
    np.testing.assert_array_equal(drawn(i.identity(0.5), 2, 3, 5)[1], 0.5 * np.eye(3, 5))
    # Marchenko and Pastur's edges, of a matrix of independent entries of variance 1 / fan-in
    found = np.linalg.svd(drawn(i.lecun(), 256, 64), compute_uv=False)
    assert found.max() == pytest.approx(1 + 0.5, rel=0.05) and found.min() == pytest.approx(1 - 0.5, rel=0.1)
    with pytest.raises(lm.LazyModelError, match=r"identity needs a matrix; got shape \(3,\)"):
        drawn(i.identity(), 3)


def test_several_axes_of_fan_in() -> None:
    assert drawn(i.he(in_axis=(0, 1), out_axis=2), 8, 16, 256).std() == pytest.approx(1 / 8, rel=0.02)


def test_schemes_have_their_papers_numbers() -> None:
    glorot = (2 / 400) ** 0.5
    rules, alpha = i.deepnet(32, weights="w", residual="r")
    stds = {name: drawn(each, 200, 200).std() / glorot for name, each in rules.items()}
    assert alpha == pytest.approx(64**0.25) and list(rules) == ["r", "w"]
    assert stds == pytest.approx({"r": 256**-0.25, "w": 1}, rel=0.01)
    for decoder, factor in ((True, 144**-0.25), (False, 0.67 / 2)):
        fixed = i.t_fixup(16, weights="w", residual="r", embeddings="e", width=100, decoder=decoder)
        stds = {name: drawn(each, 200, 200).std() for name, each in fixed.items()}
        assert stds == pytest.approx({"r": factor * glorot, "w": glorot, "e": factor / 10}, rel=0.02)
    small = i.small_init(1000, weights="w", residual="r", layers=10)
    stds = {name: drawn(each, 200, 200).std() for name, each in small.items()}
    assert stds == pytest.approx({"r": 0.2 / 1000**0.5, "w": 0.02}, rel=0.02)
    assert list(i.small_init(1000, weights="w")) == ["w"]
    assert not drawn(i.zero_residual("r")["r"], 4, 4).any()
    with pytest.raises(lm.LazyModelError, match="needs the number of layers; got None"):
        i.small_init(8, weights="w", residual="r")
    for make in (i.deepnet, functools.partial(i.t_fixup, embeddings="e", width=8)):
        with pytest.raises(lm.LazyModelError, match="needs at least one layer; got 0"):
            make(0, weights="w", residual="r")

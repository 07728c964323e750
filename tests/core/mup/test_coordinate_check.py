"""The coordinate check: what it measures, and that muP passes it where standard parametrization does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lazymodel as lm

WIDTHS = (64, 1024)


def shapes(width: int) -> dict[str, tuple[int, int]]:
    return {"first": (8, width), "middle": (width, width), "last": (width, 4)}


def init(key: jax.Array, width: int) -> Any:
    return {name: {"kernel": jax.nn.initializers.lecun_normal()(key, shape)} for name, shape in shapes(width).items()}


def check(use_mup: bool, tx: Any) -> lm.CoordinateCheck:
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8)).astype("float32")

    def make(width: int) -> Any:
        base, model = (lm.build_abstract(init, jax.random.key(0), each) for each in (WIDTHS[0], width))
        scheme, random = lm.mup(base, model), np.random.default_rng(0)
        own = scheme.optimizer(tx) if use_mup else tx
        params: dict[str, dict[str, Any]] = {}
        for name, shape in shapes(width).items():  # in NumPy, since nothing is compiled for that
            row = scheme[f"{name}/kernel"]
            std = row.std if use_mup else row.own_std
            params[name] = {"kernel": random.normal(0, std or 0, shape).astype("float32")}

        def step(params: Any, state: Any) -> Any:
            def loss(params: Any) -> Any:
                hidden = jax.nn.relu(x @ params["first"]["kernel"])
                deeper = jax.nn.relu(hidden @ params["middle"]["kernel"])
                logits = deeper @ params["last"]["kernel"]
                return jnp.mean((logits - y[:, :4]) ** 2), {"hidden": hidden, "deeper": deeper, "logits": logits}

            (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = own.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), found

        return (params, own.init(params)), jax.jit(step)

    def step(model: Any) -> Any:
        (params, state), once = model
        trained, found = once(params, state)
        return (trained, once), found

    return lm.coordinate_check(make, WIDTHS, step)


@pytest.mark.parametrize("tx", [optax.adam(0.01), optax.sgd(0.1)], ids=["adam", "sgd"])
def test_mup_passes_where_standard_parametrization_does_not(tx: Any) -> None:
    flat, standard = check(True, tx), check(False, tx)
    assert flat.growing() == {}, flat
    assert standard.growing(), standard
    assert "with the width grow or vanish" in repr(standard) and "all keep their size" in repr(flat)


def test_sizes_and_changes_are_root_mean_squares() -> None:
    def step(x: Any) -> Any:
        return x + np.float32(1), {"a": {"b": x}}

    found = lm.coordinate_check(lambda width: np.array([3.0, -4.0] * width, np.float32), [2, 4], step, steps=2)
    assert found.sizes["a/b"][4] == pytest.approx([12.5**0.5, 12.5**0.5, 14.5**0.5])
    assert found.changes["a/b"][2] == (0, 1, 2)
    assert found.widths == [2, 4] and found.steps == 2
    assert found.slopes("sizes") == {"a/b": 0} and found.growing() == {}
    assert np.isnan(found.slopes("changes", 0)["a/b"])
    with pytest.raises(lm.LazyModelError, match='what is "sizes" or "changes"'):
        found.slopes("size")


def test_wrong_arguments() -> None:
    for widths, steps in (([8], 3), ([8, 8], 3), ([8, 16], 0)):
        with pytest.raises(lm.LazyModelError, match="two widths and a step at least"):
            lm.coordinate_check(lambda width: width, widths, lambda width: (width, {}), steps=steps)
    with pytest.raises(lm.LazyModelError, match="a pytree of arrays; there are none"):
        lm.coordinate_check(lambda width: width, [8, 16], lambda width: (width, {}))


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = lm.coordinate_check(lambda width: jnp.ones(width), [8, 16], lambda x: (2 * x, {"x": x}), steps=2)
    figure = found.plot(tmp_path / "check.svg", "doubling")
    assert [axes.get_title() for axes in figure.axes] == ["size at first", "change, step 1", "change, step 2"]
    assert list(figure.axes[2].lines[0].get_ydata()) == [3, 3]
    assert (tmp_path / "check.svg").stat().st_size > 1000

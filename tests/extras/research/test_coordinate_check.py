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


# Every kind of variable: readouts of one number and of an ensemble, a table and a vector beside them.
def shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "embed/weight": (16, width),
        "first/kernel": (8, width),
        "first/bias": (width,),
        "middle/kernel": (width, width),
        "last/kernel": (width, 4),
        "value/kernel": (width, 1),
        "critics/kernel": (5, width, 1),
        "critics/bias": (5, 1),
    }


def init(key: jax.Array, width: int) -> Any:
    lecun = jax.nn.initializers.lecun_normal()
    tree: dict[str, dict[str, Any]] = {}
    for path, shape in shapes(width).items():
        layer, name = path.split("/")
        value = jnp.zeros(shape) if name == "bias" else lecun(key, shape[-2:])
        tree.setdefault(layer, {})[name] = jnp.broadcast_to(value, shape)
    return tree


def check(use_mup: bool, tx: Any) -> lm.CoordinateCheck:
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8)).astype("float32")

    def make(width: int) -> Any:
        base, model = (lm.build_abstract(init, jax.random.key(0), each) for each in (WIDTHS[0], width))
        scheme, random = lm.mup(base, model, tied=False), np.random.default_rng(0)
        own = scheme.optimizer(tx) if use_mup else tx
        params: dict[str, dict[str, Any]] = {}
        for path, shape in shapes(width).items():  # in NumPy, since nothing is compiled for that
            (layer, name), row = path.split("/"), scheme[path]
            std = row.std if use_mup else row.own_std
            params.setdefault(layer, {})[name] = random.normal(0, std or 0, shape).astype("float32")

        def step(params: Any, state: Any) -> Any:
            def loss(params: Any) -> Any:
                kernel = {layer: arrays.get("kernel") for layer, arrays in params.items()}
                hidden = jax.nn.relu(x @ kernel["first"] + params["first"]["bias"] + params["embed"]["weight"])
                deeper = jax.nn.relu(hidden @ kernel["middle"])
                logits, value = deeper @ kernel["last"], deeper @ kernel["value"]
                critics = jnp.einsum("bw,ewo->ebo", deeper, kernel["critics"]) + params["critics"]["bias"][:, None]
                found = {"hidden": hidden, "deeper": deeper, "logits": logits, "value": value, "critics": critics}
                outputs = jnp.concatenate([logits, value, *critics], -1)
                return jnp.mean((outputs - np.tile(y, 2)[:, :10]) ** 2), found

            (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = own.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), found

        return (params, own.init(params)), jax.jit(step)

    def step(model: Any) -> Any:
        (params, state), once = model
        trained, found = once(params, state)
        return (trained, once), found

    return lm.coordinate_check(make, WIDTHS, step)


@pytest.mark.parametrize(
    "tx", [optax.adam(0.01), pytest.param(optax.sgd(0.1), marks=pytest.mark.large)], ids=["adam", "sgd"]
)
def test_mup_passes_where_standard_parametrization_does_not(tx: Any) -> None:
    flat, standard = check(True, tx), check(False, tx)
    assert flat.growing() == {}, flat
    assert set(standard.growing()) >= {"logits", "critics"}, standard
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
    with pytest.raises(lm.LazyModelError, match="a pytree of arrays; it has none"):
        lm.coordinate_check(lambda width: width, [8, 16], lambda width: (width, {}))


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = lm.coordinate_check(lambda width: jnp.ones(width), [8, 16], lambda x: (2 * x, {"x": x}), steps=2)
    figure = found.plot(tmp_path / "check.svg", "doubling")
    assert [axes.get_title() for axes in figure.axes] == ["size at first", "change, step 1", "change, step 2"]
    assert list(figure.axes[2].lines[0].get_ydata()) == [3, 3]
    assert (tmp_path / "check.svg").stat().st_size > 1000

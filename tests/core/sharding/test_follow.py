"""What belongs to another variable is split along the dimensions that both have."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._sharding.follow import along, follow, follow_weights, lora_shardings


def variable(
    path: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None = None, follows: str | None = None
) -> lm.AbstractVariable:
    return lm.AbstractVariable(path, shape, np.dtype("float32"), sharding, follows=follows)


def test_each_dimension_is_split_as_the_one_that_it_runs_along(mesh42: Mesh) -> None:
    sharding = NamedSharding(mesh42, P("batch", None, "model"))
    assert along(sharding, (0, 1, 2), (8, 3, 4)).spec == P("batch", None, "model")
    assert along(sharding, (2, None, 0), (4, 8, 8)).spec == P("model", None, "batch")
    assert along(sharding, (0, None), (8, 8)).spec == P("batch")
    assert along(sharding, (0, 2), (2, 4)).spec == P(None, "model")  # 2 does not divide into 4 parts
    assert along(NamedSharding(mesh42, P(("batch", "model"))), (0,), (4,)).spec == P()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert along(one, (0,), (4,)) is one


@pytest.mark.parametrize("spec", [P(), P("batch"), P(None, "model"), P("batch", None, "model")])
def test_planned_pairs_are_split_like_those_of_a_model(mesh42: Mesh, spec: P) -> None:
    sharding = NamedSharding(mesh42, spec)
    shapes = {"a/kernel": (8, 4, 16), "a/lora_kernel_a": (8, 4, 2), "a/lora_kernel_b": (2, 16)}
    model = {path: variable(path, shape) for path, shape in shapes.items()}
    model["a/kernel"] = variable("a/kernel", (8, 4, 16), sharding)
    followed = follow_weights(model, ["a/lora_kernel_a", "a/lora_kernel_b"])
    pair = lora_shardings(sharding, (8, 4, 16), 2)
    assert [v.sharding for v in followed.values()] == list(pair)
    assert all(v.reason is not None and v.reason.kind == "follows" for v in followed.values())


def test_state_of_another_shape_takes_what_is_left_of_the_spec(mesh42: Mesh) -> None:
    parameters = {
        "w": variable("w", (8, 16), NamedSharding(mesh42, P("batch", "model"))),
        "square": variable("square", (8, 8), NamedSharding(mesh42, P("batch", "model"))),
        "same": variable("same", (8, 8), NamedSharding(mesh42, P())),
    }
    state = {
        "row": variable("row", (8,), follows="w"),
        "column": variable("column", (16,), follows="w"),
        "history": variable("history", (3, 8, 16), follows="w"),
        "ambiguous": variable("ambiguous", (8,), follows="square"),
        "alike": variable("alike", (8,), follows="same"),
        "other": variable("other", (5,), follows="w"),
        "moment": variable("moment", (8, 16), follows="w"),
        "count": variable("count", (), follows=""),
    }
    placed = follow(state, parameters)
    assert {path: v.spec for path, v in placed.items()} == {
        "row": P("batch"),
        "column": P("model"),
        "history": P(None, "batch", "model"),
        "ambiguous": P(),
        "alike": P(),
        "other": P(),
        "moment": P("batch", "model"),
        "count": P(),
    }
    assert follow({"count": state["count"]}, {})["count"].sharding is None  # there is no mesh to be replicated on

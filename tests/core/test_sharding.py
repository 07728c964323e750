"""The sharding pass: every form of rule, and one clear error for each that does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._sharding import assign


def variables(**shapes: tuple[int, ...]) -> dict[str, lm.AbstractVariable]:
    return {
        path.replace("__", "/"): lm.AbstractVariable(path.replace("__", "/"), shape, np.dtype("float32"))
        for path, shape in shapes.items()
    }


MODEL = variables(layers_0__kernel=(16, 24), layers_0__bias=(24,), layers_1__kernel=(16, 24), head__kernel=(16, 10))


def specs(assigned: dict[str, lm.AbstractVariable]) -> dict[str, P]:
    return {path: variable.spec for path, variable in assigned.items()}


def test_first_matching_pattern_wins_and_the_rest_is_replicated(mesh8: Mesh) -> None:
    rules = {r"layers_0/kernel": P("model"), r"layers_\d+/kernel": P(None, "model")}
    assert specs(assign(MODEL, mesh8, rules)) == {
        "layers_0/kernel": P("model"),
        "layers_0/bias": P(),
        "layers_1/kernel": P(None, "model"),
        "head/kernel": P(),
    }


def test_specs_are_partition_specs_tuples_or_none(mesh42: Mesh) -> None:
    rules = {"layers_0/kernel": (None, ("batch", "model")), "layers_1/kernel": ["batch", "model"], "head/.*": None}
    assigned = assign(MODEL, mesh42, rules)
    assert assigned["layers_0/kernel"].spec == P(None, ("batch", "model"))
    assert assigned["layers_1/kernel"].spec == P("batch", "model")
    assert assigned["head/kernel"].spec == P()
    assert assigned["layers_0/kernel"].shard_nbytes == 16 * 3 * 4


def test_callable_rules_may_return_specs_or_shardings(mesh8: Mesh) -> None:
    own = NamedSharding(mesh8, P("model"))
    assigned = assign(MODEL, mesh8, lambda v: own if v.path == "layers_0/bias" else P(None) if v.shape else None)
    assert assigned["layers_0/bias"].sharding == own
    assert assigned["head/kernel"].spec == P(None)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layers_0/kernel": P("data")}, r"'layers_0/kernel'.*no axis 'data'; its axes are 'model' \(8\)"),
        ({"layers_0/kernel": P("model", "model")}, "axis 'model' is used twice"),
        ({"layers_0/bias": P(None, "model")}, "2 entries for 1 dimensions"),
        (
            {"head/kernel": P(None, "model")},
            "dimension 1 of size 10 does not divide into 8 parts.*dimension 0 would divide",
        ),
        ({"layer_0/kernel": P("model")}, "rule 'layer_0/kernel' matches no variable; closest: 'layers_0/kernel'"),
        ({"layers_(/kernel": P("model")}, "not a regular expression"),
        ({"layers_0/kernel": "model"}, "a tuple of axis names; got 'model'"),
        (42, "rules are a mapping .* got int"),
    ],
)
def test_misfits_name_the_path_and_the_mend(mesh8: Mesh, rules: object, message: str) -> None:
    with pytest.raises(lm.ShardingError, match=message):
        assign(MODEL, mesh8, rules)  # pyright: ignore[reportArgumentType]


def test_all_misfits_are_reported_together(mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError) as caught:
        assign(MODEL, mesh8, {r".*kernel": P("data"), ".*bias": P("other")})
    assert len(str(caught.value).splitlines()) == 4


def test_large_unmatched_variables_are_never_replicated_in_silence(mesh8: Mesh) -> None:
    model = variables(small=(8,), table=(1024, 1024))
    with pytest.warns(lm.LazyModelWarning, match=r"1 variables.*table \(1024, 1024\) 4.00 MiB"):
        assign(model, mesh8, {"small": P("model")})
    with pytest.raises(lm.ShardingError, match="match no sharding rule"):
        assign(model, mesh8, {"small": P("model")}, on_unmatched="error")
    assign(model, mesh8, {"small": P("model")}, on_unmatched="ignore")
    assign(model, mesh8, {"small": P("model")}, large="8MiB")
    assign(model, mesh8, {"small": P("model"), "table": P()})  # replication that is meant
    with pytest.raises(lm.ShardingError, match="on_unmatched is"):
        assign(model, mesh8, {"small": P("model")}, on_unmatched="loud")


def test_a_mesh_is_required() -> None:
    with pytest.raises(lm.ShardingError, match="mesh is a jax.sharding.Mesh; got list"):
        assign(MODEL, [1, 2], {})  # pyright: ignore[reportArgumentType]


def test_paths_made_unique_match_as_the_names_they_had(mesh8: Mesh) -> None:
    model = {path: lm.AbstractVariable(path, (8,), np.dtype("float32")) for path in ("dense/kernel", "dense/kernel#2")}
    assert set(specs(assign(model, mesh8, {"dense/kernel": P("model")})).values()) == {P("model")}

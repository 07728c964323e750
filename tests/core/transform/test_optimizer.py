"""Optimizer state: equal to the optimizer's own start, sharded like its parameters, never whole on one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.conftest import ROOT
from tests.core.trace._eager import assert_same
from tests.large import mostly_large
from tests.small import shard_small

optax = pytest.importorskip("optax")
P = jax.P
ones = jax.nn.initializers.ones

RULES = {r"layers/\d+/w": P(None, "model"), r"layers/\d+/b": P("model"), ".*": P()}


def init(key: Any) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    layers = [{"w": jax.random.normal(keys[i], (64, 128)), "b": jnp.zeros(128)} for i in range(2)]
    return {"layers": layers, "embedding": jax.random.normal(keys[2], (32, 64)), "steps": jnp.arange(3), "act": "gelu"}


def params() -> dict[str, Any]:
    """What is trained of the model, built eagerly: None in place of the rest."""
    return {**init(jax.random.key(0)), "steps": None, "act": None}


def abstract_model() -> lm.AbstractModel:
    return lm.build_abstract(init, jax.random.key(0))


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


SCHEDULE = optax.linear_schedule(0.1, 0.01, 10)
OPTIMIZERS = {
    "adamw": optax.adamw(SCHEDULE),
    "adamw in bfloat16": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16, momentum=0.9),
    "lion": optax.lion(1e-3),
    "sgd without state": optax.sgd(0.1),
    "injected hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "masked": optax.masked(optax.adam(1e-3), matrices),
    "multi_transform": optax.multi_transform({True: optax.adam(1e-3), False: optax.sgd(1e-2, momentum=0.9)}, matrices),
    "accumulated gradients": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), every_k_schedule=4
    ),
    "noise with a key": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    "history": optax.lbfgs(memory_size=3),
    "copies of parameters": optax.contrib.schedule_free_adamw(),
}


@pytest.mark.parametrize(
    "name",
    mostly_large(
        OPTIMIZERS,
        [name for name in OPTIMIZERS if name not in ("history", "adamw in bfloat16", "injected hyperparameters")],
    ),
)
def test_state_equals_the_optimizers_own_wherever_shard_is_called(name: str, mesh8: Any) -> None:
    optimizer = OPTIMIZERS[name]
    before = abstract_model().shard(mesh8, RULES).with_optimizer(optimizer)
    after = abstract_model().with_optimizer(optimizer).shard(mesh8, RULES)
    assert {path: v.sharding for path, v in before.items()} == {path: v.sharding for path, v in after.items()}
    model, state = after.materialize()
    assert_same(state, optimizer.init(params()))
    assert model["act"] == "gelu"
    assert_same({**model, "steps": None, "act": None}, params())
    for path, variable in after.items():
        assert variable.sharding is not None, path
        parameter = after[variable.follows] if variable.follows else None
        if parameter is not None and parameter.shape == variable.shape:
            assert variable.sharding == parameter.sharding, path
        if not variable.shape:
            assert variable.spec == P(), path
    placed = jax.tree.map(lambda array: array.sharding.spec, state)
    _, tree = after.tree
    assert jax.tree.leaves(placed) == [struct.sharding.spec for struct in jax.tree.leaves(tree)]


def test_paths_are_the_places_in_the_state() -> None:
    abstract = abstract_model().with_optimizer(optax.adamw(1e-3))
    assert [path for path in abstract if path.startswith("optimizer/")] == [
        "optimizer/0/count",
        *(f"optimizer/0/{moment}/{path}" for moment in ("mu", "nu")
          for path in ("embedding", "layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w")),
    ]  # fmt: skip
    assert abstract["optimizer/0/mu/layers/1/w"].follows == "layers/1/w"
    assert abstract["optimizer/0/count"].follows == ""
    assert abstract["layers/1/w"].follows is None
    assert abstract.num_parameters == abstract_model().num_parameters
    bare = abstract_model().with_optimizer(optax.scale_by_adam())
    assert "optimizer/mu/layers/0/w" in bare


def test_state_of_another_shape_takes_what_is_left_of_the_spec(mesh42: Any) -> None:
    def start(params: Any) -> Any:
        w, square, same, high = (params[name] for name in ("w", "square", "same", "high"))
        return {
            "row": {"w": w[:, 0], "square": square[0], "same": same[0], "high": high[0]},
            "column": {"w": w[0]},
            "history": {"w": jnp.stack([w] * 3)},
            "other": {"w": jnp.zeros(5)},
            "turned": {"high": high.T},
        }

    def build() -> Any:
        return {"w": jnp.zeros((8, 16)), "square": jnp.zeros((8, 8)), "same": jnp.zeros((8, 8)),
                "high": jnp.zeros((8, 3, 4))}  # fmt: skip

    optimizer = optax.GradientTransformation(start, optax.identity().update)
    rules = {"w|square": P("batch", "model"), "same": P(), "high": P("batch", None, "model")}
    sharded = lm.build_abstract(build).with_optimizer(optimizer).shard(mesh42, rules)
    assert {path.removeprefix("optimizer/"): v.spec for path, v in sharded.items() if v.follows is not None} == {
        "row/w": P("batch"),
        "row/square": P(),  # either dimension
        "row/same": P(),
        "row/high": P(None, "model"),
        "column/w": P("model"),
        "history/w": P(None, "batch", "model"),
        "other/w": P(),
        "turned/high": P(),
    }
    unsharded = lm.build_abstract(build).with_optimizer(optimizer)
    assert {variable.sharding for variable in unsharded.values()} == {None}


def test_patterns_that_match_state_only_are_rules_for_it(mesh42: Any) -> None:
    rules = {r"layers/\d+/w": P(None, "model"), r"optimizer/.*/layers/\d+/w": P("batch", "model")}
    abstract = abstract_model().with_optimizer(optax.adam(1e-3)).shard(mesh42, rules)
    assert abstract["layers/0/w"].spec == P(None, "model")
    assert abstract["optimizer/0/nu/layers/0/w"].spec == P("batch", "model")
    assert abstract["optimizer/0/nu/layers/0/b"].spec == P()
    with pytest.raises(lm.ShardingError, match="optimiser"):
        abstract_model().with_optimizer(optax.adam(1e-3)).shard(mesh42, {"optimiser/.*": P("batch")})


def test_other_rules_are_for_parameters_and_state_follows(mesh8: Any) -> None:
    def by_path(variable: lm.AbstractVariable) -> Any:
        assert not variable.path.startswith("optimizer/")
        return P("model") if variable.path == "embedding" else P()

    abstract = abstract_model().with_optimizer(optax.adam(1e-3))
    assert abstract.shard(mesh8, by_path)["optimizer/0/mu/embedding"].spec == P("model")
    auto = shard_small(abstract, mesh8, lm.auto(), large=1)
    for path, variable in auto.items():
        if variable.follows:
            assert variable.spec == auto[variable.follows].spec, path
    assert "'embedding', whose optimizer state it is" in str(auto.explain("optimizer/0/mu/embedding"))


def test_only_some_are_trained() -> None:
    abstract = abstract_model()
    by_pattern = abstract.with_optimizer(optax.adam(1e-3), trained=r".*/w")
    by_function = abstract.with_optimizer(optax.adam(1e-3), trained=lambda variable: variable.path.endswith("/w"))
    assert list(by_pattern) == list(by_function)
    trained = {path for path in by_pattern if "/mu/" in path}
    assert trained == {"optimizer/0/mu/layers/0/w", "optimizer/0/mu/layers/1/w"}
    only = {"layers": [{"w": layer["w"], "b": None} for layer in params()["layers"]]}
    assert_same(
        by_pattern.materialize()[1], optax.adam(1e-3).init({"act": None, "embedding": None, "steps": None, **only})
    )


def test_moments_and_counts_come_from_a_checkpoint_by_path(tmp_path: Path, mesh8: Any) -> None:
    optimizer = optax.adamw(1e-2)
    abstract = abstract_model().with_optimizer(optimizer).shard(mesh8, RULES)
    model, state = abstract.materialize()
    trained = {**model, "steps": None, "act": None}
    _, state = jax.jit(optimizer.update)(jax.tree.map(jnp.ones_like, trained), state, trained)
    lm.save({**model, "act": None, "optimizer": state}, tmp_path / "run.safetensors")
    with lm.open_checkpoint(tmp_path / "run.safetensors") as checkpoint:
        assert set(checkpoint) == set(abstract)
        _, again = abstract.materialize(checkpoint, initialize="nothing")
        assert_same(again, state)
        lacking = {name: checkpoint[name] for name in checkpoint if name != "optimizer/0/count"}
        with pytest.raises(lm.CheckpointError, match="optimizer/0/count"):
            abstract.materialize(lacking, initialize="nothing")


def test_copies_are_of_the_parameters_that_were_loaded() -> None:
    optimizer = OPTIMIZERS["copies of parameters"]
    abstract = abstract_model().with_optimizer(optimizer)
    loaded = {"embedding": np.full((32, 64), 7, np.float32)}
    reports: list[lm.LoadReport] = []
    model, state = abstract.materialize(loaded, initialize="missing", report=reports.append)
    expected = {**params(), "embedding": jnp.full((32, 64), 7, jnp.float32)}
    assert_same(state, optimizer.init(expected))
    assert state.z["embedding"].unsafe_buffer_pointer() != model["embedding"].unsafe_buffer_pointer()
    assert {row.action for row in reports[0].rows if row.path.startswith("optimizer/z/")} == {"initialize"}
    plan = abstract.plan()
    assert {row.source for row in plan.rows if row.path == "optimizer/z/embedding"} == {"of parameters"}
    given = abstract.materialize({"optimizer/z/embedding": np.ones((32, 64), np.float32)}, initialize="missing")[1]
    assert float(given.z["embedding"].sum()) == 32 * 64


def test_a_single_array_is_a_model_too(mesh8: Any) -> None:
    abstract = lm.build_abstract(lambda key: jax.random.normal(key, (8, 4)), jax.random.key(0))
    sharded = abstract.with_optimizer(optax.adam(1e-3)).shard(mesh8, {".*": P("model")})
    weights, state = sharded.materialize()
    assert_same(state, optax.adam(1e-3).init(weights))
    assert state[0].mu.sharding.spec == P("model")


def test_nothing_is_allocated_and_depth_adds_no_programs() -> None:
    def deep(key: Any, layers: int) -> Any:
        return [jax.random.normal(k, (1 << 20, 1 << 14)) for k in jax.random.split(key, layers)]  # 64 GiB each

    abstract = lm.build_abstract(lambda key: deep(key, 12), jax.random.key(0)).with_optimizer(optax.adamw(1e-3))
    assert abstract.nbytes == 3 * 12 * 2**36 + 4
    assert len({recipe.signature for recipe in abstract.recipes}) == 3  # normal, zeros, the count


def test_what_cannot_be_is_said() -> None:
    abstract = abstract_model()
    with pytest.raises(lm.LazyModelError, match="an optimizer already"):
        abstract.with_optimizer(optax.adam(1e-3)).with_optimizer(optax.adam(1e-3))
    with pytest.raises(lm.LazyModelError, match=r"no variable of init matches 'layer/.*'"):
        abstract.with_optimizer(optax.adam(1e-3), trained="layer/.*")
    with pytest.raises(lm.LazyModelError, match="nothing to optimize"):
        lm.build_abstract(lambda: jnp.arange(3)).with_optimizer(optax.adam(1e-3))
    with pytest.raises(lm.LazyModelError, match="takes an Optax gradient transformation"):
        abstract.with_optimizer(optax.adam)  # type: ignore[arg-type]
    taken = lm.build_abstract(lambda: {"w": jnp.ones(3), "optimizer": {"mu": {"w": jnp.ones(3)}}})
    with pytest.raises(lm.LazyModelError, match="'optimizer/mu/w', where optimizer state would go"):
        taken.with_optimizer(optax.scale_by_adam(), trained="w")

    with pytest.raises(lm.LazyModelError, match="matches only optimizer state, such as 'optimizer/0/mu"):
        abstract.with_optimizer(optax.adam(1e-3)).reinitialize("optimizer/.*w", ones)

    def needs_values(tree: Any) -> Any:
        return {"on": bool(jax.tree.leaves(tree)[0].sum() > 0)}  # the branch

    with pytest.raises(lm.TraceError, match="the branch"):
        abstract.with_optimizer(optax.GradientTransformation(needs_values, optax.identity().update))


@pytest.mark.large
def test_parameters_and_both_moments_take_three_times_the_parameters() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "benchmarks" / "adam_memory.py", "--mib", "96", "--json"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])},
    )
    report = json.loads(done.stdout)
    assert report["largest_shard_nbytes"] * 8 == report["largest_variable_nbytes"]
    assert report["peak_nbytes"] <= 3 * report["parameter_nbytes"] + report["temporary_nbytes"] + 64 * 2**20


@pytest.mark.parametrize(
    "rules",
    [
        {"layers/.*w": ones},
        pytest.param(lambda variable: ones if variable.path.endswith("/w") else None, marks=pytest.mark.large),
    ],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_another_initializer_is_for_parameters_and_the_state_starts_from_them(rules: Any, order: str) -> None:
    """Schedule-free Adam begins with zero moments and a copy of the parameters."""
    optimizer = optax.contrib.schedule_free_adamw(1e-3)
    if order == "before":
        abstract = abstract_model().reinitialize(rules).with_optimizer(optimizer)
    else:
        abstract = abstract_model().with_optimizer(optimizer).reinitialize(rules)
    model, state = abstract.materialize(progress=False)
    expected = params()
    for layer in expected["layers"]:
        layer["w"] = jnp.ones((64, 128))
    start = optimizer.init(expected)
    assert jax.tree.structure(state) == jax.tree.structure(start)
    jax.tree.map(np.testing.assert_array_equal, state, start)
    jax.tree.map(np.testing.assert_array_equal, model["layers"], expected["layers"])


def test_factored_and_stacked_state_is_split_by_what_it_has_of_its_parameter(mesh8: Any) -> None:
    factored = abstract_model().with_optimizer(OPTIMIZERS["adafactor"]).shard(mesh8, RULES)
    assert factored["optimizer/0/v_row/layers/0/w"].spec == P()
    assert factored["optimizer/0/v_col/layers/0/w"].shape == (128,)
    assert factored["optimizer/0/v_col/layers/0/w"].spec == P("model")
    history = abstract_model().with_optimizer(OPTIMIZERS["history"]).shard(mesh8, RULES)
    found = history["optimizer/0/diff_params_memory/layers/0/w"]
    assert found.shape == (3, 64, 128) and found.spec == P(None, None, "model")

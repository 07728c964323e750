"""The sharding pass: every form of rule, and one clear error for each that does not fit."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.small import shard_small


def build(**shapes: tuple[int, ...]) -> lm.AbstractModel:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {path.replace("__", "/"): jax.random.normal(key, shape) for path, shape in shapes.items()}

    return lm.build_abstract(init, jax.random.key(0))


MESH = Mesh(np.array(jax.devices()[:3]), ("model",))
MODEL = build(layers_0__kernel=(16, 24), layers_0__bias=(24,), layers_1__kernel=(16, 24), head__kernel=(16, 10))


def specs(sharded: lm.AbstractModel) -> dict[str, P | None]:
    return {path: variable.spec for path, variable in sharded.items()}


def test_first_matching_pattern_wins_and_the_rest_is_replicated(mesh8: Mesh) -> None:
    rules = {r"layers_0/kernel": P("model"), r"layers_\d+/kernel": P(None, "model")}
    assert specs(MODEL.shard(mesh8, rules)) == {
        "layers_0/kernel": P("model"),
        "layers_0/bias": P(),
        "layers_1/kernel": P(None, "model"),
        "head/kernel": P(),
    }


def test_specs_are_partition_specs_tuples_or_none(mesh42: Mesh) -> None:
    rules = {"layers_0/kernel": (None, ("batch", "model")), "layers_1/kernel": ["batch", "model"], "head/.*": None}
    assigned = MODEL.shard(mesh42, rules)
    assert assigned["layers_0/kernel"].spec == P(None, ("batch", "model"))
    assert assigned["layers_1/kernel"].spec == P("batch", "model")
    assert assigned["head/kernel"].spec == P()
    assert assigned["layers_0/kernel"].shard_nbytes == 16 * 3 * 4


def test_callable_rules_may_return_specs_or_shardings(mesh8: Mesh) -> None:
    own = NamedSharding(mesh8, P("model"))
    assigned = MODEL.shard(mesh8, lambda v: own if v.path == "layers_0/bias" else P(None) if v.shape else None)
    assert assigned["layers_0/bias"].sharding == own
    assert assigned["head/kernel"].spec == P(None)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layers_0/kernel": P("data")}, r"'layers_0/kernel'.*no axis 'data'; its axes are 'model' \(8\)"),
        ({"layers_0/kernel": P("model", "model")}, "axis 'model' is used twice"),
        ({"layers_0/bias": P(None, "model")}, "2 entries for 1 dimensions"),
        ({"head/kernel": P(None, "model")}, "1 of size 10 does not divide into 8 parts.*dimension 0 would divide"),
        ({"layer_0/kernel": P("model")}, "rule 'layer_0/kernel' matches no variable; closest: 'layers_0/kernel'"),
        (42, "rules are a mapping .* got int"),
        ({lm.role("router"): P()}, "no variable has the role 'router'"),
        ({3: P()}, "rule=3 is not a regular expression"),
        ([("embed", "model")], "pairs of logical and mesh axes, and no variable"),
        ([("embed",)], r"pairs of a logical axis and a mesh axis.*got \('embed',\)"),
        (None, "uses the axis names that variables carry, and no variable"),
        (lambda _: Format(Layout.AUTO, jax.NamedSharding(MESH, P())), "'head/kernel': a Format needs a sharding and"),
        (lambda _: Format(Layout((0, 1, 2)), jax.NamedSharding(MESH, P())), r"the layout's major_to_minor \(0, 1, 2\)"),
        (lambda _: jax.NamedSharding(MESH, P(None, "model")), "dimension 1 of size 10 does not divide into 3 parts"),
    ],
)
def test_misfits_name_the_path_and_the_fix(mesh8: Mesh, rules: Any, message: str) -> None:
    with pytest.raises(lm.ShardingError, match=message):
        MODEL.shard(mesh8, rules)
    with pytest.raises(lm.ShardingError, match="mesh is a jax.sharding.Mesh; got list"):
        MODEL.shard([1, 2], rules)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("on_unmatched", ["error", "auto"])
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("atuo", r"rules='atuo' is not known; closest: 'auto'; the only name is 'auto', short for lm.auto\(\)"),
        (".*kernel", r"A rule for paths is written \{'.*kernel': PartitionSpec\(…\)\}"),
        ({".*": "model"}, r"^rule '.\*': a spec is .* got 'model'. Write PartitionSpec\('model'\) to split the first"),
        ({".*": 3}, r"^rule '.\*': a spec is a PartitionSpec or a tuple of axis names; got 3"),
        ({".*": P}, r"^rule '.\*': a spec is .* got <class .*PartitionSpec() replicates".replace("()", r"\(\)")),
        ({".*": ({"model"}, None)}, r"^rule '.\*': an entry of a spec is an axis name, a tuple of them, or None"),
        ({".*": (["model", ["x"]],)}, "an entry of a spec is an axis name"),
        ({".*": {"model": 0}}, "a spec is a PartitionSpec or a tuple of axis names"),
        (
            lambda variable: "model",
            r"result of the callable .* for 'head/kernel': a spec is .* got 'model'. Write PartitionSpec\('model'\)",
        ),
        ({lm.role("mlp_up"): "model"}, "^rule mlp_up: a spec is"),
        ({"**/kernel": P()}, r"'\*\*/kernel' is not a regular expression"),
    ],
)
def test_what_is_no_spec_is_said_once(mesh8: Mesh, rules: Any, message: str, on_unmatched: str) -> None:
    with pytest.raises(lm.ShardingError, match=message) as raised:
        MODEL.shard(mesh8, rules, on_unmatched=on_unmatched)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("rules", ["auto", lm.auto])
def test_auto_by_name_or_uncalled_is_auto(mesh8: Mesh, rules: Any) -> None:
    expected = shard_small(MODEL, mesh8, lm.auto(), large=1)
    assert expected["layers_0/kernel"].spec != P()
    assert dict(shard_small(MODEL, mesh8, rules, large=1)) == dict(expected)
    repaired = shard_small(MODEL, mesh8, {"layers_0/kernel": P("nowhere")}, on_unmatched="auto", large=1)
    assert repaired["layers_0/kernel"].spec == expected["layers_0/kernel"].spec
    assert lm.plans(MODEL, "v5e-1", rules=rules).rows[0].verdict == "fits"


@pytest.mark.parametrize(
    ("spec", "first", "second", "scale"),
    [
        (P(), P(), P(), P()),
        (P("batch"), P("batch"), P(), P()),
        (P(None, "model"), P(None, "model"), P(), P(None, "model")),
        (P("batch", None, "model"), P("batch"), P(None, "model"), P(None, None, "model")),
    ],
)
def test_what_belongs_to_a_weight_and_has_no_rule_follows_it(
    mesh42: Mesh, spec: P, first: P, second: P, scale: P
) -> None:
    """Along the dimensions that both have; the scale has two groups of four rows."""
    shapes = {"kernel": (8, 4, 16), "lora_kernel_a": (8, 4, 2), "lora_kernel_b": (2, 16), "kernel_scale": (2, 4, 16)}
    sharded = build(**{f"a/{name}": shape for name, shape in shapes.items()}).shard(mesh42, {"a/kernel": spec})
    found = {path: variable.spec for path, variable in sharded.items() if path != "a/kernel"}
    assert found == {"a/lora_kernel_a": first, "a/lora_kernel_b": second, "a/kernel_scale": scale}
    assert {sharded[path].reason.kind for path in found} == {"follows"}


def test_groups_with_a_scale_are_not_split_into_more_parts_than_there_are(mesh42: Mesh) -> None:
    """Two 4-bit numbers share a byte, and four rows a scale."""
    tensors = {"up/kernel": jnp.zeros((8, 16), "int8"), "up/kernel_scale": jnp.zeros((2, 32))}
    sharded = lm.build_abstract(lambda: tensors).shard(mesh42, {"up/kernel": P("batch", "model")})
    assert sharded["up/kernel_scale"].spec == P(None, "model")


def test_all_misfits_are_reported_together(mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError) as caught:
        MODEL.shard(mesh8, {r".*kernel": P("data"), ".*bias": P("other")})
    *misfits, hint = str(caught.value).splitlines()
    assert len(misfits) == 3  # those that differ in numbers only are one
    assert misfits[-1].startswith("'layers_{0..1}/kernel' of shape")
    assert hint == "Fix the rules, or pass on_unmatched='auto', which uses the shardings of lm.auto() for these."


def test_large_unmatched_variables_are_never_replicated_in_silence(mesh8: Mesh) -> None:
    model = build(small=(8,), table=(1024, 1024))
    with pytest.warns(lm.LazyModelWarning, match=r"1 variables.*table \(1024, 1024\) 4.00 MiB"):
        model.shard(mesh8, {"small": P("model")})
    with pytest.raises(lm.ShardingError, match="match no sharding rule"):
        model.shard(mesh8, {"small": P("model")}, on_unmatched="error")
    small = build(small=(8,), table=(512, 511))
    small.shard(mesh8, {"small": P("model")}, on_unmatched="error")
    model.shard(mesh8, {"small": P("model"), "table": P()})  # replication that is meant
    with pytest.raises(lm.ShardingError, match="on_unmatched is 'error', 'warn' or 'auto'; got 'ignore'"):
        model.shard(mesh8, {"small": P("model")}, on_unmatched="ignore")


def test_paths_made_unique_match_as_the_names_they_had(mesh8: Mesh) -> None:
    model = build(**{"dense/kernel": (8,), "dense/kernel#2": (8,)})
    assert set(specs(model.shard(mesh8, {"dense/kernel": P("model")})).values()) == {P("model")}


def test_rules_by_role_mix_with_paths(mesh8: Mesh) -> None:
    model = build(token_embedding__embeddings=(64, 16), head__kernel=(16, 24), up__kernel=(16, 24))
    rules = {"head/kernel": P(None, "model"), lm.role("embedding"): P("model"), lm.role("mlp_up"): P("model")}
    assigned = model.shard(mesh8, rules)
    assert specs(assigned) == {
        "token_embedding/embeddings": P("model"),
        "head/kernel": P(None, "model"),
        "up/kernel": P("model"),
    }
    reason = assigned["up/kernel"].reason
    assert reason is not None and (reason.kind, reason.role) == ("rule", "mlp_up")


def test_auto_completes_rules_and_says_so(mesh8: Mesh) -> None:
    model = build(up=(8, 8), table=(64, 9), head=(3, 64), fine=(8, 8))
    rules = {"table": P(None, "model"), "head": P("nowhere"), "fine": P("model"), "gone": P("model")}
    sharded = shard_small(model, mesh8, rules, on_unmatched="auto", large=0)  # warnings are errors here: it is silent
    assert specs(sharded) == {
        "fine": P("model"),
        "head": P(None, "model"),
        "table": P("model"),
        "up": P(None, "model"),
    }
    report = sharded.explain()
    assert set(report.repaired) == {"up", "table", "head"}
    assert report.notes == ("rule 'gone' matches no variable",)
    assert "dimension 1 of size 9 does not divide into 8 parts" in report.repaired["table"]
    assert "no axis 'nowhere'" in report.repaired["head"]
    assert "no rule matches it" in report.repaired["up"]
    assert "rule 'gone' matches no variable" in str(report)
    assert list(sharded) == list(model)  # the order that the rebuilt model relies on
    with pytest.raises(lm.ShardingError, match="pass on_unmatched='auto'"):
        shard_small(model, mesh8, {"table": P(None, "model")}, on_unmatched="ignore")


def test_explain_a_rule_and_what_is_replicated(mesh42: Mesh) -> None:
    sharded = shard_small(build(a=(8, 6), b=(7, 3)), mesh42, {"a": P("batch")}, on_unmatched="ignore")
    text = str(sharded.explain("a"))
    assert "spec: P('batch'" in text or "spec: PartitionSpec('batch'" in text
    assert "each of 8 devices holds (2, 6), 48 B" in text
    assert "why (rule): rule 'a' matches" in text
    assert "axis 'batch' (4) divides dimension 0" in text
    assert "axis 'model' (2) divides dimensions 0, 1" in text
    assert "axis 'model' (2) divides no dimension" in str(sharded.explain("b"))
    report = sharded.explain()
    assert (report.fullest_nbytes, report.emptiest_nbytes) == (48 + 84, 48 + 84)
    assert (list(report.replicated), report.replicated_nbytes, report.unmatched) == (["b"], 84, ("b",))
    assert report.imbalance == pytest.approx(132 * 8 / (192 + 84))
    with pytest.raises(KeyError, match="'c' is not a variable"):
        sharded.explain("c")
    assert "no sharding was assigned" in str(build(a=(2,)).explain("a"))


def test_a_proposer_of_ones_own(mesh8: Mesh) -> None:
    class Last:
        def propose(self, variables: Any, mesh: Mesh, *, large: int) -> dict[str, tuple[P, str]]:
            return {path: (P(None, "model"), f"last, {large}") for path in variables if path != "b"}

    sharded = shard_small(build(a=(3, 8), b=(4, 4)), mesh8, Last(), large=17, on_unmatched="ignore")
    assert sharded["a"].spec == P(None, "model")
    assert "why (proposed): last, 17" in str(sharded.explain("a"))
    assert sharded.explain().unmatched == ("b",)


def test_formats_reach_the_arrays(mesh8: Mesh) -> None:
    model = build(a=(16, 8), b=(16, 8))
    plain = model.shard(mesh8, {".*": P("model")}).materialize()
    swapped = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh8, P("model")))
    sharded = model.shard(mesh8, lambda v: swapped if v.path == "a" else P("model"))
    assert sharded["a"].spec == P("model")
    assert "layout: dimensions from major to minor (1, 0)" in str(sharded.explain("a"))
    arrays = sharded.materialize()
    assert arrays["a"].format.layout.major_to_minor == (1, 0)
    assert arrays["b"].format.layout.major_to_minor == (0, 1)
    assert arrays["a"].sharding == plain["a"].sharding
    np.testing.assert_array_equal(arrays["a"], plain["a"])
    loaded = sharded.materialize({"a": np.arange(128.0, dtype="float32").reshape(16, 8), "b": np.zeros((16, 8), "f4")})
    assert loaded["a"].format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(loaded["a"], np.arange(128.0).reshape(16, 8))
    compiled = jax.jit(lambda tree: tree["a"] @ tree["b"].T).lower(sharded.tree).compile()
    assert compiled(arrays).shape == (16, 16)


def test_explain_has_a_row_for_layers_that_are_alike(mesh8: Mesh) -> None:
    shapes = {f"layers_{index}/{name}": (16, 10) for index in range(20) for name in ("down", "up")}
    report = shard_small(
        build(table=(8, 4), **shapes), mesh8, {"table": P("model")}, on_unmatched="ignore", large=1
    ).explain()
    text = str(report)
    lines = ("in all rows: count: 20", "replicated: 40 variables, 25.00 KiB in all on each device")
    assert {*lines, "matched by no rule: 40 variables"} <= set(text.splitlines())
    for name in ("down", "up"):
        row = rf"layers_{{0..19}}/{name} +replicated +\(16, 10\), 640 B +replicated, since no rule matches it"
        assert len(re.findall(row, text)) == 1
    assert len(report.replicated) == 40  # each by itself for programs
    hostile = build(**{"bad\x1b[2Jname": (8, 10)}).shard(mesh8, {".*": P()}).explain()
    assert "\x1b" not in str(hostile)


def test_a_numpy_array_that_stays_on_the_host_is_not_said_to_be_replicated(mesh8: Mesh) -> None:
    table = np.zeros((1 << 10, 1 << 9), "float32")  # 2 MiB
    model = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (8, 8)), "table": table}, jax.random.key(0))
    sharded = model.shard(mesh8, {"w": P("model")}, on_unmatched="error")
    assert sharded["table"].on_host and sharded["table"].sharding.is_fully_replicated
    with pytest.raises(lm.ShardingError, match="1 variables of at least 1 B match no sharding rule.*: w "):
        shard_small(model, mesh8, {}, on_unmatched="error", large=1)


def test_what_belongs_to_a_weight_on_one_device_is_there_too(mesh8: Mesh) -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    model = build(**{"a/kernel": (8, 16), "a/lora_kernel_a": (8, 2)})
    sharded = model.shard(mesh8, lambda variable: one if variable.path == "a/kernel" else None)
    assert {variable.sharding for variable in sharded.values()} == {one}

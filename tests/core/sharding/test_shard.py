"""The sharding pass: every form of rule, and one clear error for each that does not fit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._sharding import shard


def variables(**shapes: tuple[int, ...]) -> dict[str, lm.AbstractVariable]:
    return {
        path.replace("__", "/"): lm.AbstractVariable(path.replace("__", "/"), shape, np.dtype("float32"))
        for path, shape in shapes.items()
    }


MODEL = variables(layers_0__kernel=(16, 24), layers_0__bias=(24,), layers_1__kernel=(16, 24), head__kernel=(16, 10))


def assign(
    model: dict[str, lm.AbstractVariable], mesh: Mesh, rules: Any, **options: Any
) -> dict[str, lm.AbstractVariable]:
    return shard.assign(model, mesh, rules, **options)[0]


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
        assign(MODEL, mesh8, rules)


def test_all_misfits_are_reported_together(mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError) as caught:
        assign(MODEL, mesh8, {r".*kernel": P("data"), ".*bias": P("other")})
    *misfits, mend = str(caught.value).splitlines()
    assert len(misfits) == 3  # those that differ in numbers only are one
    assert misfits[0].startswith("'layers_{0..1}/kernel' of shape")
    assert mend == "Mend the rules, or repair=True of shard() chooses for these as lm.auto() would."


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
        assign(MODEL, [1, 2], {})


def test_paths_made_unique_match_as_the_names_they_had(mesh8: Mesh) -> None:
    model = {path: lm.AbstractVariable(path, (8,), np.dtype("float32")) for path in ("dense/kernel", "dense/kernel#2")}
    assert set(specs(assign(model, mesh8, {"dense/kernel": P("model")})).values()) == {P("model")}


def build(**shapes: tuple[int, ...]) -> lm.AbstractModel:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {path: jax.random.normal(key, shape) for path, shape in shapes.items()}

    return lm.build_abstract(init, jax.random.key(0))


def test_rules_by_role_mix_with_paths(mesh8: Mesh) -> None:
    model = variables(token_embedding__embeddings=(64, 16), head__kernel=(16, 24), up__kernel=(16, 24))
    rules = {"head/kernel": P(None, "model"), lm.role("embedding"): P("model"), lm.role("mlp_up"): P("model")}
    assigned = assign(model, mesh8, rules)
    assert specs(assigned) == {
        "token_embedding/embeddings": P("model"),
        "head/kernel": P(None, "model"),
        "up/kernel": P("model"),
    }
    reason = assigned["up/kernel"].reason
    assert reason is not None and (reason.kind, reason.role) == ("rule", "mlp_up")
    with pytest.raises(lm.ShardingError, match="no variable has the role 'router'"):
        assign(model, mesh8, {lm.role("router"): P()})
    with pytest.raises(lm.ShardingError, match="there is no role 'embeding'; closest: 'embedding'"):
        lm.role("embeding")
    with pytest.raises(lm.ShardingError, match="a rule's key is a path regex or a role; got 3"):
        assign(model, mesh8, {3: P()})


def test_repair_mends_what_does_not_fit_and_says_so(mesh8: Mesh) -> None:
    model = build(up=(8, 8), table=(64, 9), head=(3, 64), fine=(8, 8))
    rules = {"table": P(None, "model"), "head": P("nowhere"), "fine": P("model"), "gone": P("model")}
    sharded = model.shard(mesh8, rules, repair=True, large=0)  # warnings are errors here: it is silent
    assert {path: variable.spec for path, variable in sharded.items()} == {
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
    with pytest.raises(lm.ShardingError, match="repair=True of shard"):
        model.shard(mesh8, {"table": P(None, "model")}, on_unmatched="ignore")


def test_repair_on_axes_of_other_names_takes_an_auto(mesh42: Mesh) -> None:
    mesh = Mesh(mesh42.devices, ("x", "y"))
    model = build(table=(64, 9))
    with pytest.raises(
        lm.ShardingError, match=r"nothing is known of mesh axes 'x', 'y'; .*lm.auto\(tensor='y', fsdp='x'\)"
    ):
        model.shard(mesh, {"table": P("x", "y")}, repair=True)
    sharded = model.shard(mesh, {"table": P("x", "y")}, repair=lm.auto(fsdp=("x", "y")), large=0)
    assert sharded["table"].spec == P(("x", "y"))


def test_explain_a_rule_and_what_is_replicated(mesh42: Mesh) -> None:
    sharded = build(a=(8, 6), b=(7, 3)).shard(mesh42, {"a": P("batch")}, on_unmatched="ignore")
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


def test_imbalance_between_devices(mesh8: Mesh) -> None:
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    report = build(a=(8, 4), b=(4,)).shard(mesh8, lambda v: P("model") if v.path == "a" else alone).explain()
    assert (report.num_devices, report.fullest_nbytes, report.emptiest_nbytes) == (8, 16 + 16, 16)


def test_a_proposer_of_ones_own(mesh8: Mesh) -> None:
    class Last:
        def propose(self, variables: Any, mesh: Mesh, *, large: int) -> dict[str, tuple[P, str]]:
            return {path: (P(None, "model"), f"last, {large}") for path in variables if path != "b"}

    sharded = build(a=(3, 8), b=(4, 4)).shard(mesh8, Last(), large=17, on_unmatched="ignore")
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


def test_formats_that_cannot_be(mesh8: Mesh) -> None:
    sharding = NamedSharding(mesh8, P("model"))
    model = variables(a=(16, 8))
    three = Mesh(np.array(jax.devices()[:3]), ("model",))
    with pytest.raises(lm.ShardingError, match="'a': a Format needs a sharding and a layout that is written out"):
        assign(model, mesh8, lambda _: Format(Layout.AUTO, sharding))
    with pytest.raises(lm.ShardingError, match=r"'a' of shape \(16, 8\): the layout's major_to_minor \(0, 1, 2\)"):
        assign(model, mesh8, lambda _: Format(Layout((0, 1, 2)), sharding))
    with pytest.raises(lm.ShardingError, match="dimension 1 of size 8 does not divide into 3 parts"):
        assign(model, mesh8, lambda _: NamedSharding(three, P(None, "model")))


def test_axis_names_without_rules_or_with_the_wrong_ones(mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError, match="uses the axis names that variables carry, and no variable"):
        build(a=(8,)).shard(mesh8)
    with pytest.raises(lm.ShardingError, match="pairs of logical and mesh axes, and no variable"):
        build(a=(8,)).shard(mesh8, [("embed", "model")])
    with pytest.raises(lm.ShardingError, match=r"pairs of a logical axis and a mesh axis.*got \('embed',\)"):
        build(a=(8,)).shard(mesh8, [("embed",)])


def test_explain_says_a_sentence_once(mesh8: Mesh) -> None:
    shapes = {f"layers_{index}/{name}": (16, 10) for index in range(20) for name in ("down", "up")}
    report = build(table=(8, 4), **shapes).shard(mesh8, {"table": P("model")}, on_unmatched="ignore", large=1).explain()
    lines = str(report).splitlines()
    assert lines[1:] == [
        "replicated: 40 variables, 25.00 KiB each",
        "  replicated, since no rule matches it:",
        "    layers_{0..19}/down × 20 (16, 10), 640 B",
        "    layers_{0..19}/up × 20 (16, 10), 640 B",
        "matched by no rule: 40 variables",
        "  layers_{0..19}/down × 20",
        "  layers_{0..19}/up × 20",
    ]
    assert len(report.replicated) == 40  # each by itself for programs
    # What differs in more than numbers, or in its sentence, has a line of its own, up to a dozen.
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
    ]
    many = build(**dict.fromkeys(words, (8, 10))).shard(mesh8, {".*": P()}).explain()
    lines = str(many).splitlines()
    assert lines[2] == "  rule '.*' matches:"
    assert len(lines) == 3 + 12 + 1 and lines[-1] == "  … and 1 more"
    hostile = build(**{"bad\x1b[2Jname": (8, 10)}).shard(mesh8, {".*": P()}).explain()
    assert "\x1b" not in str(hostile)


def test_a_numpy_array_that_stays_on_the_host_is_not_said_to_be_replicated(mesh8: Mesh) -> None:
    table = np.zeros((1 << 10, 1 << 9), "float32")  # 2 MiB
    model = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (8, 8)), "table": table}, jax.random.key(0))
    sharded = model.shard(mesh8, {"w": P("model")}, on_unmatched="error")
    assert sharded["table"].on_host and sharded["table"].sharding.is_fully_replicated
    with pytest.raises(lm.ShardingError, match="1 variables of at least 1 B match no sharding rule.*: w "):
        model.shard(mesh8, {}, on_unmatched="error", large=1)

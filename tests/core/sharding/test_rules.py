"""Rules by name, and specs in the forms in which people write them first."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm


def model() -> lm.AbstractModel:
    return lm.build_abstract(lambda key: {"a/kernel": jax.random.normal(key, (64, 512))}, jax.random.key(0))


@pytest.mark.parametrize("rules", ["auto", lm.auto])
def test_auto_by_name_or_uncalled_is_auto(mesh8: Mesh, rules: Any) -> None:
    expected = model().shard(mesh8, lm.auto(), large=1)
    assert expected["a/kernel"].spec != P()
    assert dict(model().shard(mesh8, rules, large=1)) == dict(expected)
    mended = model().shard(mesh8, {"a/kernel": P("nowhere")}, repair=rules, large=1)
    assert mended["a/kernel"].spec == expected["a/kernel"].spec
    assert lm.smallest_topology(model(), "v5e", rules, compile=None).smallest.num_devices == 1


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("atuo", "rules='atuo' is not known; closest: 'auto'; rules by name are 'auto', which is lm.auto()"),
        (".*kernel", r"A rule for paths is written \{'.*kernel': PartitionSpec\(…\)\}"),
        ({".*": "model"}, r"^rule '.\*': a spec is .* got 'model'. Write PartitionSpec\('model'\) to split the first"),
        ({".*": 3}, r"^rule '.\*': a spec is a PartitionSpec or a tuple of axis names; got 3"),
        ({".*": P}, r"^rule '.\*': a spec is .* got <class .*PartitionSpec() replicates".replace("()", r"\(\)")),
        ({".*": ({"model"}, None)}, r"^rule '.\*': an entry of a spec is an axis name, a tuple of them, or None"),
        ({".*": (["model", ["x"]],)}, "an entry of a spec is an axis name"),
        ({".*": {"model": 0}}, "a spec is a PartitionSpec or a tuple of axis names"),
        (lambda variable: "model", r"of 'a/kernel': a spec is .* got 'model'. Write PartitionSpec\('model'\)"),
        ({lm.role("mlp_up"): "model"}, "^rule 'mlp_up': a spec is"),
        ({"**/kernel": P()}, "'\\*\\*/kernel' is not a regular expression: .* `.\\*` stands for any text"),
    ],
)
@pytest.mark.parametrize("repair", [False, True])
def test_what_is_no_spec_is_said_once_with_the_mend(mesh8: Mesh, rules: Any, message: str, repair: bool) -> None:
    with pytest.raises(lm.ShardingError, match=message) as raised:
        model().shard(mesh8, rules, repair=repair)
    assert len(str(raised.value).splitlines()) == 1


def test_repair_by_another_name(mesh8: Mesh) -> None:
    with pytest.raises(lm.ShardingError, match="repair='yes' is not known"):
        model().shard(mesh8, "auto", repair="yes")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("spec", [P(None, "model"), (None, "model"), [None, "model"], [None, ["model"]]])
def test_forms_of_a_spec(mesh8: Mesh, spec: Any) -> None:
    placed = model().shard(mesh8, {".*": spec})["a/kernel"]
    assert placed.sharding is not None and placed.sharding.shard_shape((64, 512)) == (64, 64)
    assert model().shard(mesh8, {".*": None})["a/kernel"].spec == P()

"""The table of roles: every order is over labels that the role has."""

from __future__ import annotations

import pytest

import lazymodel as lm
from lazymodel._sharding.roles import ROLES, Role


@pytest.mark.parametrize("row", ROLES.values(), ids=list(ROLES))
def test_orders_are_of_the_labels(row: Role) -> None:
    assert lm.role(row.name) is row
    assert set(row.fsdp) - {"parts"} <= set(row.tensor)
    assert bool(row.tensor) == bool(row.why)
    if row.within != "attention":  # whose labels depend on the neighbours
        for ndim in row.ndims if row.tensor else ():
            assert set(row.tensor) <= set(row.label(ndim)), ndim
    for ndim in row.ndims:
        assert len(row.label(ndim)) == ndim


def test_labels_turn_where_a_weight_is_stored_the_other_way_round() -> None:
    assert ROLES["convolution"].label(4) == ("space", "space", "in", "out")
    assert ROLES["convolution"].label(4, out_first=True) == ("out", "in", "space", "space")
    assert ROLES["expert_up"].label(3, out_first=True) == ("experts", "in", "out")
    assert ROLES["expert_up"].label(4) == ("experts", "in", "parts", "out")
    assert repr(lm.role("mlp_up")) == "Role(name='mlp_up')"

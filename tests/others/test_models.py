"""Models of other packages: each row of `integrations/JAX_MODELS.md` is what happens."""

from __future__ import annotations

import pytest

from .support_table import MODELS, PAGE, row

pytestmark = [pytest.mark.large, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", MODELS)
def test_the_page_says_what_happens(name: str) -> None:
    found = row(MODELS[name])
    assert "✗" not in found
    assert found in PAGE.read_text().splitlines()

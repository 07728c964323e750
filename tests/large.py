"""Which cases of a test run by default, and which with the large tests alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest


def mostly_large(cases: Collection[Any], few: Collection[Any], marks: Callable[[Any], list[Any]] = lambda _: []) -> Any:
    """Cases for a test that runs for a few of them by default, and for the others with the large tests.

    A tuple has the values of several arguments.
    """
    assert all(case in cases for case in few)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]),
            marks=[*marks(case), *([] if case in few else [pytest.mark.large])],
        )
        for case in cases
    ]

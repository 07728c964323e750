"""Which cases of a test run by default, and which with the large tests alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # of a loaded machine; examples share fixtures


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


def examples(few: int, many: int, **strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Of a test of a property: `few` examples by default, `many` with the large tests."""

    def decorate(test: Callable[..., None]) -> Any:
        def run(examples: int, **fixtures: Any) -> None:
            drawing = settings(max_examples=examples, deadline=None, suppress_health_check=_CHECKS)
            drawing(given(**strategies)(test))(**fixtures)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in strategies]
        count = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = signature.replace(parameters=[count, *fixtures])
        run.__dict__.update(getattr(test, "__dict__", {}))  # its marks
        return pytest.mark.parametrize("examples", mostly_large([few, many], [few]))(run)

    return decorate

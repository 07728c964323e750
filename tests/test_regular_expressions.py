"""Every regular expression of the library takes time in proportion to its text, whatever that is.

Found are the literal ones: constants of modules, and those that are written where they are used.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")

ROOT = Path(__file__).parents[1]
_SEARCHING = ("search", "sub", "split", "findall", "finditer")  # the others, `match` and `fullmatch`, begin once
# Where expressions see the paths of the user's own variables alone, or no text beyond a length that is checked before.
_OWN = ("lazymodel/_sharding/", "lazymodel/extras/quantized/config.py")


class Used(NamedTuple):
    """A regular expression and how it is used."""

    where: str
    method: str
    pattern: re.Pattern[Any]


def flattened(values: Any) -> Iterator[re.Pattern[Any]]:
    for value in values:
        if isinstance(value, re.Pattern):
            yield value
        elif isinstance(value, list | tuple):
            yield from flattened(value)


def used() -> Iterator[Used]:
    for file in sorted([*ROOT.glob("lazymodel/**/*.py"), *ROOT.glob("integrations/*/**/*.py")]):
        name = str(file.relative_to(ROOT))
        text = file.read_text()
        if not re.search(r"\bre\b", text) or name.startswith(_OWN):
            continue
        try:
            module = importlib.import_module(
                name.removeprefix("integrations/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
        except ImportError:  # the core's tests run without frameworks
            continue
        patterns = {key: value for key, value in vars(module).items() if isinstance(value, re.Pattern)}
        called: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if (pattern := patterns.get(node.value.id)) is not None:
                called.add(node.value.id)
                yield Used(f"{name}:{node.lineno}", node.attr, pattern)
        tables = [value for value in vars(module).values() if isinstance(value, list | tuple)]
        unseen = [pattern for key, pattern in patterns.items() if key not in called]
        yield from (Used(name, "search", pattern) for pattern in [*unseen, *flattened(tables)])
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(ast.Attribute(ast.Name("re"), method), [ast.Constant(str() as literal), _, *_]):
                    yield Used(f"{name}:{node.lineno}", method, re.compile(literal))
                case _:
                    pass


def texts(pattern: re.Pattern[Any], length: int) -> Iterator[Any]:
    """A letter, again and again, and an end that fits nothing; all letters that the expression can be about."""
    is_text = isinstance(pattern.pattern, str)
    letters = {*(pattern.pattern if is_text else pattern.pattern.decode("latin-1")), *"aZ_09 \n./-:[({\"\\'é"}
    for letter in sorted(letters):
        text = f"{letter * length}\0"
        yield text if is_text else text.encode("latin-1")


@pytest.mark.parametrize(
    ("length", "most"),
    [  # timeouts end those that would take for ever
        pytest.param(20_000, 1.0, marks=pytest.mark.timeout(100)),
        pytest.param(1_000_000, 10.0, marks=[pytest.mark.large, pytest.mark.timeout(1800)]),
    ],
)
def test_time_is_linear(length: int, most: float) -> None:
    """A quadratic one takes seconds for the short texts, and hours for the long ones; a linear one milliseconds."""
    found = list({(each.pattern, each.method in _SEARCHING): each for each in used()}.values())
    assert len(found) > 60
    for where, method, pattern in found:
        for text in texts(pattern, length):
            start = time.perf_counter()
            if method in _SEARCHING:
                for _ in pattern.finditer(text):
                    pass
            else:
                pattern.fullmatch(text)
                pattern.match(text)
            seconds = time.perf_counter() - start
            assert seconds < most, (where, method, pattern.pattern, text[:1], seconds)

"""Values that share steps, level over level: whatever is done with such a graph takes as long as it has steps."""

from __future__ import annotations

import ast
import collections
import gc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lazymodel as lm
from tests.core.trace._eager import assert_eager

ROOT = Path(__file__).parents[3]
LEVELS = 60
KEY = jax.random.key(0)


def shared(key: Any) -> Any:
    """Each level uses the one before twice, and adds up floats, so that it runs kernel by kernel."""
    x = jax.random.normal(key, (4, 4))
    kept = []
    for _ in range(LEVELS):
        x = x @ x / jnp.abs(x).max()
        kept.append(x.sum())
    return {"x": x, "kept": kept}


class NoEnd(Exception):
    pass


def limited(run: Callable[[], Any], most: int = 300_000) -> Any:
    """What this returns; fails if it calls `repr`, `eq` or `hash` of one of our classes more often than this."""
    calls = collections.Counter[str]()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name in ("__repr__", "__eq__", "__hash__"):
            name = frame.f_code.co_qualname
            calls[name] += 1
            if calls[name] > most:
                raise NoEnd(name)

    sys.setprofile(count)
    try:
        return run()
    except NoEnd as error:
        name = str(error)
    finally:
        sys.setprofile(None)
    pytest.fail(f"{name} has no end", pytrace=False)  # a traceback would have the `repr` of its values


def reachable(*roots: Any) -> Iterator[Any]:
    """Objects of ours that others lead to."""
    seen, waiting = set[int](), list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type) or len(seen) > 200_000:
            continue
        seen.add(id(value))
        if type(value).__module__.startswith("lazymodel"):
            yield value
        if type(value).__module__.startswith(("lazymodel", "builtins", "types", "functools")):
            waiting += [each for each in gc.get_referents(value) if not hasattr(each, "__path__")]


@pytest.mark.large
def test_a_graph_with_shared_levels() -> None:
    abstract = limited(lambda: lm.build_abstract(shared, KEY))
    recipes = abstract.recipes
    found = {type(value).__qualname__: value for value in reachable(*recipes)}
    assert {"Program", "Kernel", "Kernels", "InitRecipe", "Value", "_Step"} <= found.keys()
    for name, value in found.items():
        text = limited(lambda value=value: repr(value), 2_000)
        assert len(text) < 200_000, f"repr of {name}"  # a recipe lists its kernels
        limited(lambda value=value: (hash(value), value == found["Program"]))
    assert max(len(repr(each.function)) for each in recipes) < 200  # which JAX takes of what it compiles
    assert_eager(shared)  # not before: compiling would not end, if a `repr` had none

    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (4, 4))}, KEY)

    def forward(model: Any, x: Any) -> Any:
        for _ in range(LEVELS):
            x = jnp.tanh(x @ model["w"] + x)
        return x

    abstract.run(forward, jnp.ones((2, 4)), progress=False)


@pytest.mark.parametrize("package", ["lazymodel", "integrations"])
def test_no_generated_repr_or_comparison_in_a_graph(package: str) -> None:
    """A dataclass whose fields lead back to its own class has none of these, or they expand what is shared."""
    fields: dict[str, dict[str, str]] = collections.defaultdict(dict)  # what is generated → class → its fields' types
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            options = [ast.unparse(each) for each in node.decorator_list if "dataclass" in ast.unparse(each)]
            types = " ".join(ast.unparse(each.annotation) for each in node.body if isinstance(each, ast.AnnAssign))
            for what in ("repr", "eq") if options else ():
                if f"{what}=False" not in options[0]:
                    fields[what][f"{file.stem}.{node.name}"] = types
    assert fields
    for what, classes in fields.items():
        leads = {
            name: [other for other in classes if re.search(rf"\b{other.partition('.')[2]}\b", types)]
            for name, types in classes.items()
        }
        for name in classes:
            seen, waiting = (
                set[str](),
                [other for other in leads[name] if other.partition(".")[0] == name.partition(".")[0]],
            )
            while waiting:
                other = waiting.pop()
                assert other != name, f"{name}: {what}=False, since it holds others of its own class"
                if other not in seen:
                    seen.add(other)
                    waiting += leads[other]

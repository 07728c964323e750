"""Warnings point to the user's own line, whichever function gives them and however deep inside."""

from __future__ import annotations

import contextlib
import inspect
import re
import types
import warnings
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._errors import warn

KEPT = types.SimpleNamespace()
MODEL = lm.build_abstract(lambda: {"w": jnp.ones((1024, 512)), "v": jnp.ones((1024, 256))})


def leaky(key: jax.Array) -> dict[str, jax.Array]:
    KEPT.last = jax.random.normal(key, (2,))
    return {"w": KEPT.last}


def of_the_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if it were in one of this library's modules."""
    return types.FunctionType(function.__code__, {"__name__": "lazymodel._module", "warn": warn})


@of_the_library
def warning(*given: Any) -> Any:
    warn("of something")
    return given[0]


@contextlib.contextmanager
@of_the_library
def block() -> Generator[None, None, None]:
    yield
    warn("of something")


# The line that a warning is to point to ends with `# here`.


def shard_without_a_rule_for_all(mesh: Mesh) -> None:
    MODEL.shard(mesh, {"w": P("model")})  # here


def build_abstract_of_what_keeps_a_tracer(mesh: Mesh) -> None:
    lm.build_abstract(leaky, jax.random.key(0))  # here


def materialize_without_any_tensor(mesh: Mesh) -> None:
    MODEL.materialize({})  # here


def materialize_less_than_the_checkpoint_has(mesh: Mesh) -> None:
    MODEL.materialize(  # here
        {"w": np.ones((1024, 512), "float32"), "extra": np.ones(3, "float32")}, initialize="missing", strict=False
    )


def leave_a_block(mesh: Mesh) -> None:
    with block():  # here
        pass


def have_a_framework_call_back(mesh: Mesh) -> None:
    jax.jit(warning)(jnp.ones(2))  # here


CALLS = (
    shard_without_a_rule_for_all, build_abstract_of_what_keeps_a_tracer, materialize_without_any_tensor,
    materialize_less_than_the_checkpoint_has, leave_a_block, have_a_framework_call_back,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_warning_points_to_the_user_s_line(call: Callable[[Mesh], None], mesh8: Mesh) -> None:
    lines, first = inspect.getsourcelines(call)
    with pytest.warns(lm.LazyModelWarning) as caught:
        call(mesh8)
    (here,) = (first + index for index, line in enumerate(lines) if line.endswith("# here\n"))
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, here)]


def test_a_warning_is_given_once_a_line_and_can_be_filtered_by_module() -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setitem(globals(), "__warningregistry__", {})
        warnings.simplefilter("default")
        for _ in range(2):
            warning(None)
        assert len(caught) == 1
        warnings.filterwarnings("ignore", module=re.escape(__name__))
        warning(None)
        assert len(caught) == 1

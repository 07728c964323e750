"""What tests of going on with training share: batches with a position, and states that are the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tests.core.trace._eager import same_bytes

BATCHES = np.random.default_rng(0).normal(size=(10, 8, 8)).astype("float32")


class Batches:
    """An iterator with a state, as Grain's have it."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def __next__(self) -> np.ndarray:
        self.position += 1
        return BATCHES[self.position - 1]

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def assert_same(one: Any, other: Any) -> None:
    """Trees of the same structure and shardings, whose arrays are the same bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
    assert_same_values(one, other)


def assert_same_values(one: Any, other: Any) -> None:
    """Trees whose leaves are the same bit for bit."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert same_bytes(a, b) if hasattr(a, "dtype") else (type(a), a) == (type(b), b)

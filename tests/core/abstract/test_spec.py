"""An abstract model as a value."""

from __future__ import annotations

import copy
import pickle

import jax
import pytest

import lazymodel as lm


def test_copies_and_pickles() -> None:
    """It never changes, so a copy is the model itself; its programs cannot go to another process."""
    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (4,))}, jax.random.key(0))
    assert copy.copy(abstract) is abstract
    assert copy.deepcopy({"model": abstract})["model"] is abstract
    with pytest.raises(lm.LazyModelError, match="cannot be pickled.*build_abstract"):
        pickle.dumps(abstract)

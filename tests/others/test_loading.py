"""Hugging Face folders in models of Levanter and EasyDeL: values, dtypes and shardings as by their own loaders."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from . import folders

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]
os.environ.setdefault("EASYDEL_AUTO", "0")  # else it sets flags that XLA ends the process at


@pytest.mark.parametrize(
    ("package", "kind"),
    [("levanter", "llama"), ("levanter", "mixtral"), ("easydel", "llama"), ("easydel", "qwen3_moe")],
)
def test_equals_their_own_loader(package: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    load = importlib.import_module(f".{package}_loading", __package__).load
    folder = folders.write(tmp_path, kind)
    expected, found = load(folder, kind, lazily=False), load(folder, kind, lazily=True)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path].dtype == value.dtype and found[path].sharding.is_equivalent_to(value.sharding, value.ndim)
        assert np.asarray(found[path]).tobytes() == np.asarray(value).tobytes(), path

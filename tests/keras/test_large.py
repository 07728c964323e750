"""A preset of real size, 267 million parameters: values from one file and from shards, and peak memory. Minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras_hub
import pytest

from tests.conftest import ROOT, child_environment

from .models import assert_same_in_distribution, randomize

pytestmark = pytest.mark.large

BENCHMARK = ROOT / "tests" / "benchmarks" / "load_preset.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_shard_size", [None, 0.3], ids=["one_file", "shards"])  # GB
def test_gemma_of_267_million_parameters(max_shard_size: float | None, tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCHMARK.parent))
    try:
        from load_preset import CONFIG
    finally:
        sys.path.remove(str(BENCHMARK.parent))
    cls = keras_hub.models.GemmaBackbone
    folder = str(tmp_path / "gemma")
    randomize(cls(**CONFIG)).save_to_preset(folder, max_shard_size=max_shard_size)
    assert len(list(Path(folder).glob("*.weights.h5"))) == (1 if max_shard_size is None else 4)
    assert_same_in_distribution(cls, folder)


@pytest.mark.timeout(900)
def test_peak_private_memory() -> None:
    """Each way in a process of its own, watched from outside; the benchmark also compares every value."""
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--runs", "1", "--json"],
        check=True,
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert json.loads(done.stdout)["ours"]["peak"] <= 1.10

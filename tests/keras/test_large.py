"""A preset of real size, 267 million parameters: values from one file and from shards, and peak memory. Minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras
import keras_hub
import pytest

import lazymodel_keras as lk
from tests.conftest import ROOT, child_environment

from .models import assert_same, randomize, seeded

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
    mesh = keras.distribution.DeviceMesh((1, 8), ["batch", "model"], keras.distribution.list_devices())
    layout_map = cls.get_layout_map(mesh)
    with keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope():
        stock = seeded(lambda: cls.from_preset(folder))
        ours = seeded(lambda: lk.from_preset(cls, folder))
        assert_same(stock, ours, outputs=False)
        for expected, found in zip(stock.weights, ours.weights, strict=True):
            assert expected.value.sharding == found.value.sharding


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

"""Loading from servers that lie at random ends in the right values or in one error, in bounded memory, and in time."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save

from tests.conftest import ROOT, child_environment
from tests.servers.lying import lying
from tests.servers.scripted import scripted

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

TIMES = 6  # loads from each
MOST = 48 << 20  # bytes of private memory: what is loaded at a time, and what fetches it
SEEDS = range(20)


def files() -> dict[str, bytes]:
    """Two shards, of 3 MiB each, and their index."""
    tensors = {f"w{n}": (np.arange(1 << 18) + n).astype(np.float32).reshape(512, 512) for n in range(6)}
    shards = {f"/m/{n}.safetensors": save({name: tensors[name] for name in [*tensors][n::2]}) for n in range(2)}
    weights = {name: f"{n % 2}.safetensors" for n, name in enumerate(tensors)}
    return shards | {"/m/model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weights}).encode()}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.large) for seed in SEEDS])
def test_right_or_one_error(seed: int) -> None:
    with scripted(lying(seed, files())) as origin:
        child = subprocess.run(
            [
                *(sys.executable, "-m", "tests.core.remote._lying_worker"),
                *(f"{origin}/m/model.safetensors.index.json", str(TIMES)),
            ],
            cwd=ROOT,
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=150,
        )
    assert child.returncode == 0, child.stderr
    nbytes, outcomes, threads = json.loads(child.stdout)
    print(seed, nbytes >> 20, threads, outcomes)
    assert len(outcomes) == TIMES
    assert all(outcome.isprintable() and len(outcome) < 1000 for outcome in outcomes), outcomes
    assert nbytes < MOST, (nbytes, outcomes)

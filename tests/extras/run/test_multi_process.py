"""Several processes run one function: each reads its own shards, and what fails in one fails in all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import lazymodel as lm
from tests.extras.run._multi_process_worker import LAYERS, PROCESSES
from tests.extras.run.models import decoder, forward, norms_of, tokens
from tests.processes import free_address, printed, run_workers

WORKER = Path(__file__).with_name("_multi_process_worker.py")


@pytest.mark.large
@pytest.mark.timeout(90)
def test_processes(tmp_path: Path) -> None:
    abstract = lm.build_abstract(decoder(LAYERS), jax.random.key(0))
    lm.save(abstract, tmp_path / "model.safetensors")
    for process in range(PROCESSES):
        shutil.copy(tmp_path / "model.safetensors", tmp_path / f"model-{process}.safetensors")
    address = free_address()
    codes = run_workers(WORKER, [(process, address, tmp_path) for process in range(PROCESSES)], tmp_path, patience=80)
    assert codes == [0] * PROCESSES, printed(tmp_path, PROCESSES)
    outcomes: list[dict[str, Any]] = [
        json.loads((tmp_path / f"outcome-{process}.json").read_text()) for process in range(PROCESSES)
    ]
    model, tied = abstract.materialize(), abstract["embedding"].nbytes
    for outcome in outcomes:
        assert "wrong" not in outcome, outcome["wrong"]
        for name, function in (("forward", forward), ("norms", norms_of(forward))):
            expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(model, tokens()))]
            for one, other in zip(outcome[name], expected, strict=True):
                np.testing.assert_allclose(one, other, 1e-4, 1e-5 * np.abs(other).max())
        np.testing.assert_allclose(outcome["scan"], outcomes[0]["scan"], 0, 0)
        assert outcome["read"] < 0.6 * (abstract.nbytes + tied)
    assert "model-1.safetensors" in outcomes[1]["error"]
    assert "process 1 failed" in outcomes[0]["error"] and "model-1.safetensors" in outcomes[0]["error"]

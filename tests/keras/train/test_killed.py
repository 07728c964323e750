"""A training run that is killed in the middle goes on from its checkpoint, on another mesh, as if it had not been."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import lazymodel_keras as lk
from tests.keras.train import _killed_worker as worker
from tests.keras.versions import needs_orbax_callback

pytest.importorskip("orbax.checkpoint")
pytestmark = needs_orbax_callback


@pytest.mark.parametrize(
    ("name", "steps", "epochs", "killed_after"),
    [("small", 4, 8, 22), pytest.param("gemma", 10, 30, 163, marks=pytest.mark.large)],
)
def test_losses_continue(name: str, steps: int, epochs: int, killed_after: int, tmp_path: Path) -> None:
    if name == "gemma":
        worker.save_preset(tmp_path)
    command = [sys.executable, worker.__file__, str(tmp_path), name, str(steps), str(killed_after)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert process.returncode == -signal.SIGKILL, process.stderr

    keras.utils.clear_session()
    uninterrupted = worker.abstract(name, (1, 8), tmp_path).materialize()
    expected = worker.train(uninterrupted, tmp_path / "whole", steps, epochs, worker.Losses())

    state = lk.training_state(tmp_path / "killed")
    assert state.epoch is not None and 0 < state.epoch <= killed_after // steps
    assert state.data == {"position": state.epoch * steps}
    model = lk.restore(worker.abstract(name, (2, 4), tmp_path), tmp_path / "killed")
    assert int(model.optimizer.iterations.value) == state.epoch * steps
    assert {len(v.value.sharding.device_set) for v in [*model.variables, *model.optimizer.variables]} == {8}
    found = worker.train(
        model, tmp_path / "killed", steps, epochs, worker.Losses(), data=state.data, initial_epoch=state.epoch
    )
    assert list(found) == list(range(state.epoch, epochs))
    np.testing.assert_allclose(list(found.values()), [expected[epoch] for epoch in found], rtol=1e-4)
    assert expected[epochs - 1] < expected[0], "it learns something"

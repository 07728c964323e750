"""Keras models over the devices of two processes: drawn alike, loaded, trained and saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.processes import free_address, printed, run_workers

from ._processes_worker import PROCESSES, WIDTH, make


@pytest.mark.timeout(90)
def test_two_processes_load_train_and_save_one_model(tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    stock = make()
    stock.save_weights(tmp_path / "model.weights.h5")
    for index, kernel in enumerate(layer.kernel for layer in stock.layers if hasattr(layer, "kernel")):
        np.save(tmp_path / f"kernel-{index}.npy", np.asarray(kernel.value))
    address, worker = free_address(), Path(__file__).with_name("_processes_worker.py")
    arguments = [(process, address, tmp_path) for process in range(PROCESSES)]
    assert run_workers(worker, arguments, tmp_path, patience=80) == [0] * PROCESSES, printed(tmp_path, PROCESSES)

    outcomes = [json.loads((tmp_path / f"outcome-{process}.json").read_text()) for process in range(PROCESSES)]
    for outcome in outcomes:
        assert re.search(
            r"keys or seeds differ: process 0 .* process 1 .*keras\.utils\.set_random_seed", outcome["unseeded"]
        )
        assert outcome["losses"] == outcomes[0]["losses"] and outcome["losses"][1] < outcome["losses"][0]
    saved = load_file(tmp_path / "trained.safetensors")
    kernel = next(value for name, value in saved.items() if value.shape == (WIDTH, WIDTH))
    assert not np.array_equal(kernel, np.load(tmp_path / "kernel-0.npy"))

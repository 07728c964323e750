"""Several processes, one model: each reads its own shards, and what fails in one fails in all.

One pair of processes (Gloo on CPU) goes through all scenarios of `_multi_process_worker`, one after the other, because
starting them is what takes the time, and because a scenario that left them out of step would break the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.core.materialize._multi_process_worker import PROCESSES, SCENARIOS, matrices, tensors, write_copies
from tests.processes import free_address, printed, run_workers

pytestmark = pytest.mark.timeout(60)

WORKER = Path(__file__).with_name("_multi_process_worker.py")
PATIENCE = 50  # seconds, all processes together


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    """What came of each scenario, by process."""
    folder = tmp_path_factory.mktemp("processes")
    write_copies(folder)
    address = free_address()
    codes = run_workers(WORKER, [(process, address, folder) for process in range(PROCESSES)], folder, patience=PATIENCE)
    assert codes == [0] * PROCESSES, f"exit codes {codes}\n{printed(folder, PROCESSES)}"
    return [json.loads((folder / f"outcomes-{process}.json").read_text()) for process in range(PROCESSES)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_each_process(outcomes: list[Mapping[str, Any]], scenario: str) -> None:
    for process, outcome in enumerate(outcomes):
        assert not outcome[scenario]["wrong"], f"process {process}:\n{outcome[scenario]['wrong']}"


def test_only_what_is_replicated_is_read_twice(outcomes: list[Mapping[str, Any]]) -> None:
    first, second = (outcome["load"]["found"] for outcome in outcomes)
    nbytes = {name: tensor.nbytes for name, tensor in tensors().items()}
    assert first["read"] + second["read"] == sum(nbytes.values()) + nbytes["up/bias"]
    assert first["order"] == second["order"]


def test_columns_cost_each_process_its_half_of_the_file(outcomes: list[Mapping[str, Any]]) -> None:
    found = [outcome["columns"]["found"] for outcome in outcomes]
    assert found[0]["report"] == found[1]["report"]
    if not all(each["mapped"] for each in found):
        pytest.skip("this file system gives no leases, so short rows are read with what lies between them")
    nbytes = sum(matrix.nbytes for matrix in matrices().values())
    assert max(each["read"] for each in found) <= 0.55 * nbytes
    assert sum(each["read"] for each in found) == nbytes

"""A fleet that reads once: what several processes hold is read by one of them, and exchanged.

Two processes of four devices and four of two go through the scenarios of `_exchange_worker`, one after the other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.core.materialize._exchange_worker import tensors
from tests.processes import free_address, printed, run_workers
from tests.servers.object_server import ObjectServer

pytestmark = pytest.mark.timeout(120)

WORKER = Path(__file__).with_name("_exchange_worker.py")
PATIENCE = 100  # seconds, all processes together
GOOD = "exchanged,in_groups,across,explicit,read"


def outcomes_of(folder: Path, processes: int, scenarios: str, expected: list[int], **more: str) -> list[Any]:
    """Runs all processes to their end, with these exit codes; what came of each scenario, by process."""
    address = free_address()
    arguments = [(process, processes, address, folder, scenarios) for process in range(processes)]
    codes = run_workers(WORKER, arguments, folder, patience=PATIENCE, LAZYMODEL_WAIT_SECONDS="20", **more)
    assert codes == expected, f"exit codes {codes}\n{printed(folder, processes)}"
    return [json.loads((folder / f"outcomes-{process}.json").read_text()) for process in range(processes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    save_file(tensors(), folder / "model.safetensors")
    for name in ("right", *(f"truncated-{process}" for process in range(4))):
        save_file({"w": np.ones((2048, 256), "float32")}, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def two(folder: Path, served: tuple[ObjectServer, str]) -> list[Mapping[str, Any]]:
    """What came of each scenario, by process, of two processes."""
    server, name = served
    return outcomes_of(folder, 2, f"{GOOD},remote,truncated,choices", [0, 0], MODEL_URL=server.url(name))


@pytest.fixture(scope="module")
def served(_object_server: ObjectServer, folder: Path) -> tuple[ObjectServer, str]:
    """A server that has the file, and the file's name there."""
    _object_server.reset()
    shutil.copy(folder / "model.safetensors", _object_server.root / "exchanged.safetensors")
    return _object_server, "exchanged.safetensors"


@pytest.fixture(scope="module")
def four(folder: Path, two: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """And of four, of which the last is killed in the end."""
    return outcomes_of(folder, 4, f"{GOOD},killed", [0, 0, 0, -9])


@pytest.fixture(scope="module", params=["two", "four"])
def outcomes(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    return request.getfixturevalue(request.param)


FILE_NBYTES = sum(tensor.nbytes for tensor in tensors().values())


@pytest.mark.parametrize("scenario", ["exchanged", "in_groups", "across", "explicit"])
def test_each_byte_is_read_once(outcomes: list[Mapping[str, Any]], scenario: str) -> None:
    """The worker has compared all bits."""
    read = [outcome[scenario]["read"] for outcome in outcomes if outcome]
    everyone = sum(read) if len(read) == len(outcomes) else None  # the one that is killed says nothing
    assert everyone is None or FILE_NBYTES <= everyone <= 1.02 * FILE_NBYTES
    assert max(read) <= 1.1 * FILE_NBYTES / len(outcomes), "they share the work evenly"


def test_processes_fetch_each_byte_once_together(
    two: list[Mapping[str, Any]], served: tuple[ObjectServer, str]
) -> None:
    server, name = served
    sent = server.counters()["path_bytes"][name]
    # Twice would be once in each process; gaps between the halves of tensors as small as these are fetched along.
    assert FILE_NBYTES <= sent <= 1.5 * FILE_NBYTES
    assert sum(outcome["remote"]["read"] for outcome in two) <= 1.02 * FILE_NBYTES


def test_without_every_replica_reads(four: list[Mapping[str, Any]]) -> None:
    for outcome in four[:-1]:
        assert outcome["read"]["read"] > 2 * outcome["exchanged"]["read"]
        assert outcome["read"]["exchanged"] == outcome["read"]["programs"] == 0


def test_variables_that_are_alike_share_a_program(outcomes: list[Mapping[str, Any]]) -> None:
    """Nine that are alike have two, one for eight of them; two that hold nothing twice have none."""
    for outcome in outcomes:
        if outcome:
            assert outcome["exchanged"]["programs"] <= 13
            assert outcome["in_groups"]["programs"] == 0


def test_the_report_counts_what_came_over_the_interconnect(two: list[Mapping[str, Any]]) -> None:
    for outcome in two:
        assert outcome["exchanged"]["exchanged"] > FILE_NBYTES
        assert "from other devices" in outcome["exchanged"]["text"]
        assert outcome["exchanged"]["rounds"] > outcome["read"]["rounds"] == 0


def test_what_fails_in_one_process_fails_in_all(two: list[Mapping[str, Any]]) -> None:
    assert "truncated-1.safetensors changed while it was being read" in two[1]["truncated"]
    assert two[0]["truncated"].startswith("process 1 failed, so nothing was materialized here either: ")


def test_processes_that_would_not_run_the_same_programs_are_refused(two: list[Mapping[str, Any]]) -> None:
    for outcome in two:
        assert outcome["choices"].startswith("the processes' checkpoints, keys or seeds differ: ")


def test_a_process_that_is_killed_at_an_exchange_hangs_nobody(four: list[Mapping[str, Any]]) -> None:
    for outcome in four[:-1]:
        assert "could not be exchanged" in outcome["killed"] or "so nothing was materialized" in outcome["killed"]

"""A fleet that reads once: what several processes hold is read by one of them, and exchanged.

Two processes of four devices and four of two go through the scenarios of `_exchange_worker`, one after the other.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.conftest import child_environment
from tests.core.materialize._exchange_worker import tensors
from tests.servers.object_server import ObjectServer

pytestmark = pytest.mark.timeout(120)

WORKER = Path(__file__).with_name("_exchange_worker.py")
PATIENCE = 100  # seconds, all processes together
GOOD = "exchanged,in_groups,across,explicit,read"


def run_workers(folder: Path, processes: int, scenarios: str, **more: str) -> list[int | None]:
    """Runs all processes to their end, and returns their exit codes; none outlives this call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = child_environment() | {"JAX_PLATFORMS": "cpu", "LAZYMODEL_WAIT_SECONDS": "20"} | more
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for process in range(processes):
            with (folder / f"log-{process}.txt").open("wb") as file:
                command = [sys.executable, str(WORKER), str(process), str(processes), address, str(folder), scenarios]
                workers.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        deadline = time.monotonic() + PATIENCE
        for worker in workers:
            try:
                worker.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                break
    finally:
        codes = [worker.poll() for worker in workers]  # None is one that hangs
        for worker in workers:
            worker.kill()
            worker.wait()
    return codes


def outcomes_of(folder: Path, processes: int, codes: list[int | None], expected: list[int]) -> list[Mapping[str, Any]]:
    printed = "\n".join(f"--- process {n}\n{(folder / f'log-{n}.txt').read_text()}" for n in range(processes))
    assert codes == expected, f"exit codes {codes}\n{printed}"
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
    codes = run_workers(folder, 2, f"{GOOD},remote,truncated,choices", MODEL_URL=server.url(name))
    return outcomes_of(folder, 2, codes, [0, 0])


@pytest.fixture(scope="module")
def served(_object_server: ObjectServer, folder: Path) -> tuple[ObjectServer, str]:
    """A server that has the file, and the file's name there."""
    _object_server.reset()
    shutil.copy(folder / "model.safetensors", _object_server.root / "exchanged.safetensors")
    return _object_server, "exchanged.safetensors"


@pytest.fixture(scope="module")
def four(folder: Path, two: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """And of four, of which the last is killed in the end."""
    return outcomes_of(folder, 4, run_workers(folder, 4, f"{GOOD},killed"), [0, 0, 0, -9])


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
        assert outcome["choices"].startswith("the processes' checkpoints differ: ")


def test_a_process_that_is_killed_at_an_exchange_hangs_nobody(four: list[Mapping[str, Any]]) -> None:
    for outcome in four[:-1]:
        assert "could not be exchanged" in outcome["killed"] or "so nothing was materialized" in outcome["killed"]

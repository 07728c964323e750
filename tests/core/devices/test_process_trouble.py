"""Processes that share a model and one of which fails, ends, is killed or is late: how the others end, and when.

Every test starts its own processes (Gloo on CPU), because what goes wrong is how one of them ends. JAX's own times are
left as they are: it aborts whoever is left 100 seconds after a process was killed, and waits 300 seconds at exit.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.processes import free_address, run_workers

WORKER = Path(__file__).with_name("_process_trouble_worker.py")
WAIT = 10  # seconds that a process waits for another
PATIENCE = 80  # seconds, all processes together: less than JAX takes to abort them

pytestmark = pytest.mark.timeout(PATIENCE + 20)


class Ended:
    """How processes ended."""

    def __init__(self, codes: list[int | None], printed: list[str]) -> None:
        self.codes, self.printed = codes, printed

    def __str__(self) -> str:
        ends = enumerate(zip(self.codes, self.printed, strict=True))
        return "\n".join(f"--- process {n}: {code}\n{text}" for n, (code, text) in ends)

    def check(self, process: int, code: int, *messages: str) -> None:
        """Asserts how one of them ended, and that nothing aborted it."""
        assert self.codes[process] == code, str(self)
        for message in messages:
            assert message in self.printed[process], str(self)
        assert "Check failure stack trace" not in self.printed[process], str(self)


def run(
    folder: Path, processes: int, troubles: Mapping[int, str], *, corrupt: int | None = None, wait: float = WAIT
) -> Ended:
    """Runs that many processes to their end; None is the code of one that had to be killed."""
    for process in range(processes):
        save_file({"w": np.ones((96, 256), "float32")}, folder / f"model-{process}.safetensors")
    if corrupt is not None:
        (folder / f"model-{corrupt}.safetensors").write_bytes(b"\xff" * 1000)
    address = free_address()
    arguments = [(process, processes, address, folder, troubles.get(process, "none")) for process in range(processes)]
    codes = run_workers(WORKER, arguments, folder, patience=PATIENCE, LAZYMODEL_WAIT_SECONDS=str(wait))
    return Ended(codes, [(folder / f"log-{process}.txt").read_text(errors="replace") for process in range(processes)])


def test_a_file_that_one_of_three_cannot_open(tmp_path: Path) -> None:
    ended = run(tmp_path, 3, {}, corrupt=1, wait=1000)
    ended.check(1, 1, "CheckpointError: ", "model-1.safetensors")
    for process in (0, 2):
        ended.check(process, 1, "CheckpointError: process 1 failed, so nothing was materialized here either: ")
        assert "model-1.safetensors" in ended.printed[process]


def test_one_killed_while_it_streams_is_named_to_the_rest(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {1: "killed while streaming"}, wait=1000)
    assert ended.codes[1] == -signal.SIGKILL
    ended.check(0, 1, "CheckpointError: process 1 gave no sign of life for 3 seconds, so nothing was materialized here")


def test_one_interrupted_is_named_to_the_other(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {0: "interrupted"}, wait=1000)
    ended.check(0, -signal.SIGINT, "KeyboardInterrupt")
    ended.check(1, 1, "CheckpointError: process 0 failed, so nothing was materialized here either: KeyboardInterrupt")


def test_one_killed_before_it_came_is_named_in_time(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {1: "killed before"}, wait=6)
    assert ended.codes[1] == -signal.SIGKILL
    ended.check(0, 1, "CheckpointError: process 1 did not come within 6 seconds", "LAZYMODEL_WAIT_SECONDS")


@pytest.mark.large
def test_one_killed_after_opening_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {1: "killed after opening"}, wait=1000)
    assert ended.codes[1] == -signal.SIGKILL
    ended.check(0, 1, "CheckpointError: process 1 gave no sign of life for 3 seconds")


@pytest.mark.large
def test_one_killed_after_materializing_is_named_at_the_next_stage(tmp_path: Path) -> None:
    ended = run(tmp_path, 4, {3: "killed after materializing"})
    assert ended.codes[3] == -signal.SIGKILL
    for process in (0, 1, 2):
        ended.check(process, 1, "process 3")


@pytest.mark.large
def test_one_that_ends_before_it_came_is_named_at_once(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {0: "ends before"}, wait=1000)
    ended.check(0, 1, "enough seen")
    ended.check(1, 1, "CheckpointError: process 0 has ended, so nothing was materialized here either")


@pytest.mark.large
def test_one_that_is_later_than_gloo_waits_is_waited_for(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {1: "late"}, wait=60)
    for process in (0, 1):
        ended.check(process, 0, "all is well")


@pytest.mark.large
def test_one_that_is_later_than_the_time_set(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {0: "far too late"})
    ended.check(1, 1, "CheckpointError: process 0 did not come within 10 seconds")
    ended.check(0, 1, "CheckpointError: process 0 did not come within 10 seconds")


@pytest.mark.large
def test_process_0_does_not_stay_for_one_that_is_later(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, {1: "far too late"})
    ended.check(0, 1, "CheckpointError: process 1 did not come within 10 seconds")
    # It is told the same if it comes while process 0 is about to end; later, JAX aborts it with its coordinator.
    assert ended.codes[1] in (1, -signal.SIGABRT), str(ended)


@pytest.mark.large
def test_without_process_0_jax_aborts_the_rest_at_once(tmp_path: Path) -> None:
    """What no library can change, short of its own connection: the coordination service is gone with the process."""
    ended = run(tmp_path, 3, {0: "killed while streaming"}, wait=1000)
    assert ended.codes == [-signal.SIGKILL, -signal.SIGABRT, -signal.SIGABRT], str(ended)

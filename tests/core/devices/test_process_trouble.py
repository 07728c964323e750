"""Processes that share a model and one of which fails, ends, is killed or is late: how the others end, and when.

What goes wrong is how a process ends, so every case starts its own (Gloo on CPU). Where one was killed, the others
raise, and JAX aborts them at their end, once its heartbeats are missed; by default they do not wait for that.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.processes import free_address, run_workers

WORKER = Path(__file__).with_name("_process_trouble_worker.py")
PATIENCE = 80  # seconds, all processes together
KILLED, RAISED, ABORTED = -signal.SIGKILL, 1, (1, -signal.SIGABRT)
NOTHING = "so nothing was materialized here either"
SILENT = "process 1 sent no heartbeat for 3 sec"

pytestmark = pytest.mark.timeout(PATIENCE + 20)


class Case(NamedTuple):
    """What happens in one process, with how long the others wait; how each process ends, and what the others say."""

    trouble: str
    process: int
    codes: list[int | tuple[int, ...]]
    message: str
    wait: float = 1000


# Cases of a row run at the same time: they wait for nothing but heartbeats.
CASES: list[Any] = [
    [Case("corrupt", 1, [RAISED, RAISED, RAISED], f"process 1 failed, {NOTHING}: ")],
    [Case("interrupted", 0, [-signal.SIGINT, RAISED], f"process 0 failed, {NOTHING}: KeyboardInterrupt")],
    [
        Case("killed while streaming", 1, [RAISED, KILLED], SILENT),
        Case("killed before", 1, [RAISED, KILLED], "process 1 did not come within 2 seconds", 2),
    ],
    *(
        pytest.param([case], marks=pytest.mark.large)
        for case in (
            Case("killed while streaming", 1, [ABORTED, KILLED], SILENT),
            Case("killed before", 1, [ABORTED, KILLED], "process 1 did not come within 5 seconds", 5),
            Case("killed after opening", 1, [ABORTED, KILLED], SILENT),
            Case("killed after materializing", 3, [ABORTED, ABORTED, ABORTED, KILLED], "process 3", 5),
            Case("ends before", 0, [RAISED, RAISED], f"process 0 has ended, {NOTHING}"),
            Case("far too late", 0, [RAISED, RAISED], "process 0 did not come within 10 seconds", 10),
        )
    ),
]


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: " and ".join(case.trouble for case in cases))
def test_the_others_name_it(tmp_path: Path, cases: list[Case]) -> None:
    for case, (codes, logs) in zip(cases, run(tmp_path, cases), strict=True):
        for process, (code, expected, log) in enumerate(zip(codes, case.codes, logs, strict=True)):
            assert code in (expected if isinstance(expected, tuple) else (expected,)), logs
            if process != case.process:
                assert f"CheckpointError: {case.message}" in log, logs
                assert (case.trouble == "corrupt") == ("model-1.safetensors" in log), logs
            elif case.trouble == "corrupt":
                assert "all of it is refused" in log, logs
            assert isinstance(expected, tuple) or "Check failure stack trace" not in log, logs


@pytest.mark.large
def test_one_that_is_later_than_gloo_waits_is_waited_for(tmp_path: Path) -> None:
    ((codes, logs),) = run(tmp_path, [Case("late", 1, [0, 0], "", 60)])
    assert codes == [0, 0] and all("all is well" in log for log in logs), logs


@pytest.mark.large
def test_without_process_0_jax_aborts_the_rest_at_once(tmp_path: Path) -> None:
    """What no library can change, short of its own connection: the coordination service is gone with the process."""
    ((codes, logs),) = run(tmp_path, [Case("killed while streaming", 0, [KILLED, 0, 0], "")])
    assert codes == [KILLED, -signal.SIGABRT, -signal.SIGABRT], logs


def run(folder: Path, cases: list[Case]) -> list[tuple[list[int | None], list[str]]]:
    """Runs the processes of all cases; of each the exit codes, None for one that had to be killed, and the logs."""
    arguments: list[tuple[object, ...]] = []
    for case in cases:
        (own := folder / case.trouble).mkdir()
        address = free_address()
        for process in range(len(case.codes)):
            file, bad = own / f"model-{process}.safetensors", case.trouble == "corrupt" and process == case.process
            save_file({"w": np.ones((96, 256), "float32")}, file)
            if bad:
                file.write_bytes(b"\xff" * 1000)
            other = "leaves at once" if case.codes == [RAISED, KILLED] else "none"
            trouble = case.trouble if process == case.process else other
            arguments.append((process, len(case.codes), address, own, trouble, case.wait))
    codes = iter(run_workers(WORKER, arguments, folder, patience=PATIENCE))
    logs = iter((folder / f"log-{n}.txt").read_text(errors="replace") for n in range(len(arguments)))
    return [([next(codes) for _ in case.codes], [next(logs) for _ in case.codes]) for case in cases]

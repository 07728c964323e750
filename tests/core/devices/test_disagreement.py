"""Processes that give the same call different models, or of which one fails early: all fail, soon, with one reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lazymodel as lm
from tests.core.devices._disagreement_worker import CASES, VALUES
from tests.processes import free_address, printed, run_workers

pytestmark = pytest.mark.timeout(60)

WORKER = Path(__file__).with_name("_disagreement_worker.py")
GIVE = r"the processes' variables differ in name, dtype, shape or sharding: {}\. Give all processes the same "
HAS = GIVE.format("process 0 has '{}' as {}, process 1 has not")
BY_ROWS = r"float32\[8, 8\] P\('model',?\) of {'model': 4} in memory '\w+' on devices [\d, ]+"
DIFFERENT = {
    "materialize_rules": HAS.format("w", BY_ROWS),
    "materialize_devices": HAS.format("[bw]", ".* and 1 more"),
    "stream_rules": HAS.format("w", BY_ROWS),
    "run_devices": HAS.format("[bw]", ".* and 1 more"),
    "restore_rules": HAS.format("w", BY_ROWS),
    "save_rules": HAS.format("w", BY_ROWS),
    "save_shapes": HAS.format("own", r"float32\[8, 8\]"),
    "save_names": GIVE.format("process 1 has some that process 0 has not"),
    "save_devices": HAS.format("w", BY_ROWS),
    "sync_rules": HAS.format("sampler: w", BY_ROWS),
    "save_unwritten": "not every element of 'there' has exactly one process that would write it",
    "save_mapping_differs": "not every element of 'w' has exactly one process that would write it",
}
EARLY = {  # what one process fails with, and the others quote
    "reshard_devices": "can only move between processes if",
    "sync_plan": "JAX moves arrays between processes only if",
    "save_mapping_raises": "the model has no variable 'v'",
    "save_step_data_raises": "of types that JSON has",
    "restore_step_raises": "has no complete step 4",
    "save_adapter_raises": "expected the weight of a module",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disagreement")
    save_file(VALUES, folder / "model.safetensors")
    lm.save_step(VALUES, folder / "steps", 3)
    address = free_address()
    arguments = [(process, address, folder) for process in range(2)]
    codes = run_workers(WORKER, arguments, folder, patience=50, LAZYMODEL_WAIT_SECONDS="10")
    assert codes == [0, 0], f"exit codes {codes}\n{printed(folder, 2)}"
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"outcomes-{process}.json").read_text()) for process in range(2)]


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_is_named_by_all(outcomes: list[dict[str, Any]], case: str) -> None:
    for outcome in outcomes:
        assert re.match(f"CheckpointError: {DIFFERENT[case]}", outcome[case]["error"]), outcome[case]


@pytest.mark.parametrize("case", EARLY)
def test_an_early_error_of_one_is_quoted_by_all(outcomes: list[dict[str, Any]], case: str) -> None:
    errors = [outcome[case]["error"] for outcome in outcomes]
    assert all(re.search(EARLY[case], error) for error in errors), errors
    assert sum(bool(re.search(r"process [01] failed, so nothing was \w+ here either", error)) for error in errors) == 1
    assert max(outcome[case]["seconds"] for outcome in outcomes) < 5


def test_an_error_after_the_commit_does_not_say_that_nothing_was_saved(
    outcomes: list[dict[str, Any]], folder: Path
) -> None:
    first, second = (outcome["save_interrupted"]["error"] for outcome in outcomes)
    assert first == "KeyboardInterrupt: enough"
    assert re.search("process 0 failed, while the new .* the old one is there, or the new one: enough", second)
    np.testing.assert_array_equal(load_file(folder / "interrupted.safetensors")["w"], VALUES["w"])


def test_arrays_of_single_processes_may_differ_in_their_devices(outcomes: list[dict[str, Any]], folder: Path) -> None:
    values = VALUES["w"].tolist()
    for outcome in outcomes:
        assert outcome["agree_on_all"]["error"] == ""
        assert outcome["agree_on_all"]["found"] == [values, values[:2] if outcome is outcomes[0] else values[4:6]]
    saved = load_file(folder / "agree.safetensors")
    np.testing.assert_array_equal(saved["w"], VALUES["w"])
    assert (saved["here"].tolist(), saved["count"].tolist()) == ([1, 1], 3)


def test_nothing_is_left_where_saving_failed(folder: Path, outcomes: list[dict[str, Any]]) -> None:
    assert {*DIFFERENT, *EARLY, "save_interrupted", "agree_on_all"} == {*CASES}
    there = {"model", "agree", "interrupted", "there"}
    assert {path.stem for path in folder.iterdir() if path.suffix not in (".txt", ".json")} == there | {"steps"}
    assert load_file(folder / "there.safetensors")["there"].tolist() == [1] * 8

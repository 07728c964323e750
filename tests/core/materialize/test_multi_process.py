"""Several processes, one model: each reads its own shards, and what fails in one fails in all.

One pair of processes (Gloo on CPU) goes through all scenarios of `_multi_process_worker`, one after the other, because
starting them is what takes the time, and because a scenario that left them out of step would break the next one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.processes import free_address, printed, run_workers

pytestmark = pytest.mark.timeout(60)

WORKER = Path(__file__).with_name("_multi_process_worker.py")
PROCESSES = 2
PATIENCE = 50  # seconds, all processes together


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "embedding": rng.standard_normal((1024, 256)).astype("float32"),
        "up/kernel": rng.standard_normal((32, 16384)).astype("float32"),
        "up/bias": rng.standard_normal(24).astype("float32"),
        "head/kernel": rng.standard_normal((256, 1024)).astype(ml_dtypes.bfloat16),
    }


def columns() -> dict[str, np.ndarray]:
    """Matrices for column slices: of 16 bytes and 1 KiB a row and device, and of rows shorter than a call is worth."""
    rng = np.random.default_rng(1)
    return {
        "narrow": rng.standard_normal((8192, 64)).astype(ml_dtypes.bfloat16),
        "wide": rng.standard_normal((512, 2048)).astype("float32"),
        "rows": rng.standard_normal((8, 256)).astype("float32"),
    }


def write_copies(folder: Path) -> None:
    """A copy of the checkpoint for each scenario and process, some with something wrong."""
    right = tensors()
    save_file(right, folder / "right.safetensors")
    for scenario in (
        "load",
        "truncated",
        "missing",
        "both_missing",
        "misshapen",
        "lacking",
        "corrupt",
        "all_corrupt",
        "other_dtype",
        "stops",
        "alone",
    ):
        for process in range(PROCESSES):
            shutil.copy(folder / "right.safetensors", folder / f"{scenario}-{process}.safetensors")
    save_file(columns(), folder / "columns.safetensors")
    save_file(right | {"up/bias": np.zeros(23, "float32")}, folder / "misshapen-1.safetensors")
    lacking = {name: value for name, value in right.items() if name != "head/kernel"}
    save_file(lacking, folder / "lacking-1.safetensors")
    save_file(right | {"up/bias": right["up/bias"].astype("float16")}, folder / "other_dtype-1.safetensors")
    for name in ("corrupt-1", "all_corrupt-0", "all_corrupt-1"):
        (folder / f"{name}.safetensors").write_bytes(b"\xff" * 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    write_copies(folder)
    address = free_address()
    codes = run_workers(WORKER, [(process, address, folder) for process in range(PROCESSES)], folder, patience=PATIENCE)
    assert codes == [0] * PROCESSES, f"exit codes {codes}\n{printed(folder, PROCESSES)}"
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[Mapping[str, Any]]:
    """What came of each scenario, by process."""
    return [json.loads((folder / f"outcomes-{process}.json").read_text()) for process in range(PROCESSES)]


def test_each_process_reads_its_own_shards(outcomes: list[Mapping[str, Any]]) -> None:
    file_nbytes = sum(tensor.nbytes for tensor in tensors().values())
    for outcome in outcomes:
        assert outcome["load"]["read"] == outcome["load"]["planned"] <= 0.55 * file_nbytes
    # Nothing but what is replicated is read twice.
    assert sum(outcome["load"]["read"] for outcome in outcomes) == file_nbytes + tensors()["up/bias"].nbytes


def test_every_shard_has_its_values_and_the_model_computes(outcomes: list[Mapping[str, Any]]) -> None:
    expected = tensors()["up/kernel"].sum(dtype="float64")
    for outcome in outcomes:
        assert outcome["load"]["shards"] == 6 * 4, "of six variables, on four devices; the worker compared them"
        assert outcome["load"]["streamed"] == outcomes[0]["load"]["streamed"]
        assert len(outcome["load"]["streamed"]) == 6
        assert outcome["load"]["sum"] == pytest.approx(expected, abs=0.1)
        assert outcome["under_a_mesh"] == 6 * 4


@pytest.mark.parametrize(
    ("scenario", "failing", "message"),
    [
        ("truncated", 1, "truncated-1.safetensors changed while it was being read"),
        ("missing", 0, "cannot open {folder}/missing-0.safetensors: No such file or directory"),
        ("misshapen", 1, "'up/bias': expected shape (24,), found (23,) in tensor 'up/bias' of"),
        ("progress", 0, "no room on the screen"),
        ("corrupt", 1, "corrupt-1.safetensors"),
    ],
)
def test_what_fails_in_one_process_fails_in_all(
    outcomes: list[Mapping[str, Any]], folder: Path, scenario: str, failing: int, message: str
) -> None:
    own, others = outcomes[failing][scenario], outcomes[1 - failing][scenario]
    assert message.format(folder=folder) in own
    assert not own.startswith("process"), "its own error, not a report of it"
    assert others.startswith(f"process {failing} failed, so nothing was materialized here either: ")
    assert message.format(folder=folder) in others


def test_all_failing_raise_their_own(outcomes: list[Mapping[str, Any]]) -> None:
    for process, outcome in enumerate(outcomes):
        assert f"both_missing-{process}.safetensors: No such file" in outcome["both_missing"]
        assert not outcome["both_missing"].startswith("process")


def test_openings_that_fail_in_all_concern_nobody_else(outcomes: list[Mapping[str, Any]]) -> None:
    for process, outcome in enumerate(outcomes):
        error, fallback = outcome["all_corrupt"]
        assert f"all_corrupt-{process}.safetensors" in error and not error.startswith("process")
        assert fallback == "materialized"


def test_a_process_that_falls_back_alone_is_refused_and_all_go_on_in_step(outcomes: list[Mapping[str, Any]]) -> None:
    first, then = outcomes[0]["fallback"]
    assert first.startswith("process 1 failed, so nothing was materialized here either: ")
    assert "corrupt-1.safetensors" in first
    assert [then, outcomes[1]["fallback"][1]] == ["materialized", "materialized"]


def test_tensors_of_another_dtype_are_another_checkpoint(outcomes: list[Mapping[str, Any]]) -> None:
    for outcome in outcomes:
        assert re.search(
            r"process 0 would read \S*/other_dtype-0\.safetensors \([\d,]+ bytes, .*"
            r"process 1 would read \S*/other_dtype-1\.safetensors \([\d,]+ bytes, ",
            outcome["other_dtype"],
        )


def test_keys_and_arrays_that_differ_are_refused(outcomes: list[Mapping[str, Any]]) -> None:
    for outcome in outcomes:
        keyed, constant = outcome["other_key"]
        drawn = re.findall(r"initialize 6 \(of keys and seeds ([0-9a-f]{8})\): embedding", keyed)
        assert len(set(drawn)) == 2, keyed
        assert constant.startswith("the processes' checkpoints, keys or seeds differ: process 0 would load 1 variables")


def test_a_process_stops_when_another_has_failed(outcomes: list[Mapping[str, Any]]) -> None:
    error, read = outcomes[0]["stops"]
    assert error.startswith("process 1 failed, so nothing was materialized here either: ")
    assert "stops-1.safetensors" in error
    assert read == 0, "it was told after the first of what is initialized, which comes before what is read"


def test_what_is_called_later_is_compiled_in_all(outcomes: list[Mapping[str, Any]]) -> None:
    expected = 4 * tensors()["up/kernel"].sum(dtype="float64")
    for outcome in outcomes:
        result, events = outcome["compiled"]
        assert result == pytest.approx(expected, abs=0.5) and events == []


def test_what_one_process_cannot_compile_fails_in_all(outcomes: list[Mapping[str, Any]]) -> None:
    message = "needs 20.00 GiB on a device, says the compiler"
    assert outcomes[1]["refused"].startswith("DoesNotFitError: ") and message in outcomes[1]["refused"]
    assert outcomes[0]["refused"].startswith("process 1 failed, so nothing was materialized here either: ")
    assert message in outcomes[0]["refused"]


def test_a_late_process_is_waited_for(outcomes: list[Mapping[str, Any]]) -> None:
    assert [outcome["late"] for outcome in outcomes] == [6 * 4, 6 * 4]


def test_checkpoints_that_differ_are_refused(outcomes: list[Mapping[str, Any]]) -> None:
    for outcome in outcomes:
        assert re.sub(r" \(of keys and seeds [0-9a-f]{8}\)", "", outcome["lacking"]) == (
            "the processes' checkpoints, keys or seeds differ: "
            "process 0 would load 4 variables and initialize 2: new/bias, new/kernel, "
            "process 1 would load 3 variables and initialize 3: head/kernel, new/bias, new/kernel. "
            "Give all processes the same files and the same key or seed (of Keras: keras.utils.set_random_seed)."
        )


def test_a_process_may_load_a_model_of_its_own(outcomes: list[Mapping[str, Any]]) -> None:
    assert [outcome["unsharded"] for outcome in outcomes] == [6, 6]
    assert "No such file or directory" in outcomes[0]["alone"]
    assert outcomes[1]["alone"] == "did something else"


def test_columns_cost_each_process_its_half_of_the_file(outcomes: list[Mapping[str, Any]]) -> None:
    file_nbytes = sum(tensor.nbytes for tensor in columns().values())
    if not all(outcome["columns"]["mapped"] for outcome in outcomes):
        pytest.skip("this file system gives no leases, so short rows are read with what lies between them")
    for outcome in outcomes:
        assert outcome["columns"]["read"] <= 0.55 * file_nbytes
    assert sum(outcome["columns"]["read"] for outcome in outcomes) == file_nbytes


def test_each_process_reports_what_it_did_itself(outcomes: list[Mapping[str, Any]], folder: Path) -> None:
    tensors = columns()
    reports = [outcome["columns"]["report"] for outcome in outcomes]
    for process, (report, outcome) in enumerate(zip(reports, outcomes, strict=True)):
        assert (report["process_index"], report["process_count"]) == (process, PROCESSES)
        assert report["read_nbytes"] == outcome["columns"]["read"]
        assert {row["path"]: row["needed_nbytes"] for row in report["rows"]} == {
            name: tensor.nbytes // PROCESSES for name, tensor in tensors.items()
        }
        assert report["needed_nbytes"] == sum(tensor.nbytes for tensor in tensors.values()) // PROCESSES
    # Of everything but the process itself they say the same.
    own = {
        "process_index",
        "read_nbytes",
        "gb_per_second",
        "seconds",
        "initialize_seconds",
        "stream_seconds",
        "timeline",
    }
    first, second = ({key: value for key, value in report.items() if key not in own} for report in reports)
    assert first == second
    file = str(folder / "columns.safetensors")
    assert first["files"] == {file: Path(file).stat().st_size}

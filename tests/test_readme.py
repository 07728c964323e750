"""The README's code runs, and its commands are where `.ci/run` looks for them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, child_environment

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- runs -->\n```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_code_block_runs(block: str, tmp_path: Path) -> None:
    if "keras" in block:
        pytest.importorskip("keras_hub")
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path, env=child_environment(), timeout=280)


@pytest.mark.parametrize("name", ["run", "test"])
def test_commands_are_single_lines(name: str) -> None:
    (block,) = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert len(block.strip().splitlines()) == 1


def test_figures_it_shows_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^":]+)"', README):
        assert (ROOT / target).exists(), target

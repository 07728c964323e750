"""The README's code runs, and its commands are where `.ci/run` looks for them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, child_environment

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- runs -->\n```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 2


# What all blocks import is imported once; each then runs in a process of its own, forked before JAX has any device.
RUN_BLOCKS = """
import json, os, sys, traceback, warnings
import jax, numpy, lazymodel
warnings.filterwarnings("ignore", message=".*fork")
results = []
for block in json.load(sys.stdin):
    sys.stdout.flush()
    if not (child := os.fork()):
        status = 1
        try:
            exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def blocks_ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], str]:
    """The status with which each block ended, and what they said."""
    has_keras = importlib.util.find_spec("keras_hub") is not None
    blocks = [block for block in BLOCKS if has_keras or "keras" not in block]
    done = subprocess.run(
        [sys.executable, "-c", RUN_BLOCKS],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("readme"),
        env=child_environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(blocks, json.loads(done.stdout.splitlines()[-1]), strict=True)), done.stderr


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_code_block_runs(block: str, blocks_ran: tuple[dict[str, int], str]) -> None:
    if "keras" in block:
        pytest.importorskip("keras_hub")
    statuses, said = blocks_ran
    assert statuses[block] == 0, said


@pytest.mark.parametrize("name", ["run", "test"])
def test_commands_are_single_lines(name: str) -> None:
    (block,) = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert len(block.strip().splitlines()) == 1


def test_figures_it_shows_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^":]+)"', README):
        assert (ROOT / target).exists(), target

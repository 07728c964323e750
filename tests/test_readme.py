"""The README's code runs, and its commands are where `.ci/run` looks for them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, child_environment
from tests.test_package import NAMES

README = (ROOT / "README.md").read_text()
# What a block goes on from stands in the comment before it.
MARKED = re.findall(r"<!-- runs(.*?)-->\n```python\n(.*?)```", README, flags=re.DOTALL)
BLOCKS = [setup.strip("\n ") + "\n" * bool(setup.strip()) + shown for setup, shown in MARKED]


def test_every_block_runs_that_needs_no_network() -> None:
    assert len(BLOCKS) + README.count("<!-- needs the network -->\n```python") == README.count("```python") > 7
    assert README.count("<!-- needs the network -->") == 1


# What all blocks import is imported once; each then runs in a process of its own, forked before JAX has any device.
RUN_BLOCKS = """
import json, os, sys, traceback, warnings
import jax, numpy, lazymodel
blocks = json.load(sys.stdin)
if any("keras_hub" in block for block in blocks):
    import keras_hub, lazymodel_keras
warnings.filterwarnings("ignore", message=".*fork")
sys.path.append(sys.argv[1])  # for servers of tests; at the end, so that packages are those that are installed
results = []
for block in blocks:
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
        [sys.executable, "-c", RUN_BLOCKS, str(ROOT)],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("readme"),
        env=child_environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(blocks, json.loads(done.stdout.splitlines()[-1]), strict=True)), done.stderr


@pytest.mark.parametrize("block", BLOCKS, ids=[shown.splitlines()[0] for _, shown in MARKED])
def test_code_block_runs(block: str, blocks_ran: tuple[dict[str, int], str]) -> None:
    if "keras" in block:
        pytest.importorskip("keras_hub")
    if "TrainingCheckpoint" in block and not hasattr(pytest.importorskip("keras").callbacks, "OrbaxCheckpoint"):
        pytest.skip("this Keras has no OrbaxCheckpoint")
    statuses, said = blocks_ran
    assert statuses[block] == 0, said


def test_every_exported_name_is_in_its_list() -> None:
    (names,) = re.findall(r"\n## Names\n(.*?)\n## ", README, flags=re.DOTALL)
    exported = {*NAMES["lazymodel"].split(), *NAMES["lazymodel_keras"].split()} - {"adapter"}
    assert exported - set(re.findall(r"`(\w+)`", names)) == set()


@pytest.mark.parametrize("name", ["run", "test"])
def test_commands_are_single_lines(name: str) -> None:
    (block,) = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert len(block.strip().splitlines()) == 1


def test_figures_it_shows_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^":]+)"', README):
        assert (ROOT / target).exists(), target

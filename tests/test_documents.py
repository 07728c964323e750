"""The code of README and docs runs, its commands are where `.ci/run` looks for them, and the README is short."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import json
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lazymodel
from tests.conftest import ROOT
from tests.large import mostly_large
from tests.test_package import NAMES

README = (ROOT / "README.md").read_text()
DOCUMENTS = {"README.md": README} | {f"docs/{path.name}": path.read_text() for path in (ROOT / "docs").glob("*.md")}
NOTEBOOKS = {f"examples/{path.name}": json.loads(path.read_text()) for path in (ROOT / "examples").glob("*.ipynb")}
# A block of Python, below a comment `not run: why` if it needs what is not here.
BLOCK = re.compile(r"(?:^<!-- not run: ([^>]+?) -->\n)?^```python\n(.*?)^```", re.M | re.S)

ERRORS = ("LazyModelError", "TraceError", "ShardingError", "CheckpointError", "DoesNotFitError")


def program(text: str) -> str:
    """The blocks of a page that run, in their order, each line where the page has it."""
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if not block[1] and (HAS_KERAS or not re.search(r"keras|\blk\.", block[2])):
            first, code = text.count("\n", 0, block.start(2)), block[2].splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


HAS_KERAS = importlib.util.find_spec("keras_hub") is not None
LONG = [f"docs/{name}.md" for name in ("adapters", "flax", "keras", "resume", "signals", "sync")]  # seconds each
PROGRAMS = {name: code for name, text in sorted(DOCUMENTS.items()) if (code := program(text)).strip()}


def test_every_block_runs_or_says_why_not() -> None:
    blocks = [block for text in DOCUMENTS.values() for block in BLOCK.finditer(text)]
    assert sum(text.count("```python") for text in DOCUMENTS.values()) == len(blocks)
    assert sum(block[1] is None for block in blocks) > 2 * len(blocks) / 3
    assert not [name for name, text in DOCUMENTS.items() if "<!-- runs\n" in text]  # code that no reader sees


def run(name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, as a reader pastes it, in a folder of its own; a warning of ours is an error."""
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.simplefilter("error", lazymodel.LazyModelWarning)  # who copies an example is not told that it is wrong
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
        gc.collect()  # what ends with the page


@pytest.mark.usefixtures("settings_come_back")
@pytest.mark.parametrize("name", mostly_large(PROGRAMS, [name for name in PROGRAMS if name not in LONG]))
def test_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = PROGRAMS[name]
    if ".quantize(" in code and "nnx" in code:
        pytest.importorskip("qwix")
    if "TrainingCheckpoint" in code and not hasattr(pytest.importorskip("keras").callbacks, "OrbaxCheckpoint"):
        pytest.skip("this Keras has no OrbaxCheckpoint")
    run(name, code, tmp_path, monkeypatch)


def test_notebooks_are_as_their_readers_see_them() -> None:
    """With what they show, which is tables and no trouble, small, and nothing of the machine that ran them."""
    assert len(NOTEBOOKS) == 5
    for name, notebook in NOTEBOOKS.items():
        outputs = [output for cell in cells(notebook) for output in cell["outputs"]]
        assert any("text/html" in output.get("data", {}) for output in outputs)
        assert not [output for output in outputs if output.get("name") == "stderr" or output["output_type"] == "error"]
        text = json.dumps(notebook)
        assert len(text) < 100_000
        assert not re.search(r"/(root|home|tmp|usr)/", text)
        assert max(len(line) for cell in cells(notebook) for line in cell["source"]) <= 90
        assert any(f"(../{name})" in page for page in DOCUMENTS.values())


@pytest.mark.large
@pytest.mark.usefixtures("settings_come_back")
@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_code_of_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Jupyter."""
    run(name, "\n".join("".join(cell["source"]) for cell in cells(NOTEBOOKS[name])), tmp_path, monkeypatch)


@pytest.mark.large
@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
def test_notebooks_show_the_same_when_they_run_again(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    ran = client(nbformat.read(ROOT / name, as_version=4), kernel_name="python3").execute()
    kinds = [[sorted(output.get("data", [output["output_type"]])) for output in cell["outputs"]] for cell in cells(ran)]
    kept = [[sorted(o.get("data", [o["output_type"]])) for o in cell["outputs"]] for cell in cells(NOTEBOOKS[name])]
    assert kinds == kept


def test_extras_are_as_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `lazymodel\[(\w+)\]` \| (.*?) \|", DOCUMENTS["docs/start.md"], flags=re.M)
    listed = {extra: set(re.findall(r"`([\w-]+)", packages)) for extra, packages in rows}
    for_users = set(declared) - {"all", "demo", "test", "docs", "dev", "peft"}
    packages = {extra: {re.split(r"[^\w-]", each)[0] for each in declared[extra]} for extra in for_users}
    assert {extra: listed.get(extra) for extra in packages} == packages
    assert set(listed) == for_users | {"all", "demo", "dev"}


def test_every_exported_name_is_in_their_list() -> None:
    exported = {*NAMES["lazymodel"].split(), *NAMES["lazymodel_keras"].split()} - {"adapter"}
    assert exported - set(re.findall(r"`(\w+)`", DOCUMENTS["docs/names.md"])) == set()


@pytest.mark.parametrize("name", ["run", "test"])
def test_commands_are_single_lines(name: str) -> None:
    (block,) = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert len(block.strip().splitlines()) == 1


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100


def anchors(text: str) -> set[str]:
    """The names that links give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_what_is_linked_exists(name: str) -> None:
    text, folder = DOCUMENTS[name], (ROOT / name).parent
    links = re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text)
    for target, anchor in links + [(picture, "") for picture in re.findall(r'src="([^":]+)"', text)]:
        if not target.startswith("reference/"):  # made when the site is built
            page = folder / target if target else ROOT / name
            assert page.exists(), target
            assert not anchor or anchor in anchors(page.read_text()), f"{target}#{anchor}"


def test_the_page_of_measurements_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    report = importlib.import_module("report")
    text = DOCUMENTS["docs/benchmarks.md"]
    assert report.written(text, json.loads(report.RESULTS.read_text())) == text  # python tests/benchmarks/report.py
    for picture in re.findall(r"\(drawings/(measured_\w+\.svg)\)", text):
        assert (report.PICTURES / picture).is_file()


def literal(message: ast.expr) -> str:
    """The words of a message as the sources have them, with `…` for whatever is put in."""
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(literal, values))
        case ast.BinOp(left=left, right=right):
            return literal(left) + literal(right)
    return "…"


def messages() -> Iterator[tuple[str, str]]:
    """Where an error of ours is made with a message that has words of its own, and the message."""
    for path in [path for folder in ("lazymodel", "integrations") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ERRORS:
                text = literal(node.args[0])
                if len(re.findall(r"[a-z]{2,}", text)) > 2:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_troubleshooting_has_every_error() -> None:
    """Words of each message are a heading, or filed under one, and all of these are words of the sources."""
    filed = tomllib.loads((ROOT / "tests" / "error_messages.toml").read_text())
    headings = re.findall(r"^### (.*)$", DOCUMENTS["docs/troubleshooting.md"], flags=re.M)
    assert [heading for heading in headings if heading in filed] == list(filed)
    words = [each for heading in headings for each in filed.get(heading, [heading])]
    sources = [path.read_text() for folder in ("lazymodel", "integrations") for path in (ROOT / folder).rglob("*.py")]
    said = re.sub(r'"\s+f?"', "", "\n".join(sources))
    found = list(messages())
    assert len(found) > 450
    assert not [each for each in words if each not in said and not any(each in text for _, text in found)]
    assert not [(place, text) for place, text in found if not any(each in text for each in words)]

